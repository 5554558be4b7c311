"""GGUF files as sources: written by the gguf package, decoded as it decodes them, and loaded as transformers loads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import mounting

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
import gguf_tables  # noqa: E402
import transformers  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

TINY = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
MOE = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=32, n_routed_experts=4,
    num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32, first_k_dense_replace=1,
)
# By architecture of GGUF: the configuration's class, and what it has besides.
MODELS = {
    "llama": ("LlamaConfig", dict(head_dim=16)),
    "mistral": ("MistralConfig", dict(head_dim=16)),
    "qwen2": ("Qwen2Config", {}),
    "qwen2moe": ("Qwen2MoeConfig", MOE | dict(shared_expert_intermediate_size=64)),
    "qwen3": ("Qwen3Config", dict(head_dim=32)),
    "qwen3moe": ("Qwen3MoeConfig", MOE | dict(head_dim=32, norm_topk_prob=True)),
    "gemma2": ("Gemma2Config", dict(head_dim=32, sliding_window=64)),
    "gemma3": ("Gemma3TextConfig", dict(head_dim=32, sliding_window=64)),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", dict(head_dim=16)),
    "gpt-oss": ("GptOssConfig", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=64)),
    "deepseek2": ("DeepseekV2Config", LATENT | dict(q_lora_rank=None)),
    "deepseek3": ("DeepseekV3Config", LATENT | dict(q_lora_rank=32, n_group=2, topk_group=1)),
}
# Those that transformers does not read, or of which it leaves out experts. Mistral it finds by a name that gguf has not.
NOT_READ = ["mistral", "glm4", "gpt-oss", "deepseek2", "deepseek3"]
# Names of llama.cpp that are of several models.
SHARED = {"mistral": "llama", "deepseek3": "deepseek2"}
KEYS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "attention.key_length": "head_dim",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "attention.sliding_window": "sliding_window",
}
KEYS_OF = {
    "gpt-oss": {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
    "deepseek2": {
        "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank", "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace",
        "attention.value_length_mla": "v_head_dim", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    },
}


def model_of(architecture: str):
    name, more = MODELS[architecture]
    config = getattr(transformers, name)(**TINY | more)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.state_dict().values():
        # Norms with 1 added and taken away again are what they were.
        tensor.copy_((256 * torch.randn(tensor.shape)).round() / 256)
    return model


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it."""
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def converted(model, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a model by the names and in the layouts of llama.cpp."""
    config, found = model.config, {}
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == SHARED.get(architecture, architecture))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("self_attn.sinks"):
            found[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = value
            continue
        if name.endswith("e_score_correction_bias"):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = value
            continue
        if name.endswith("kv_b_proj.weight"):
            layer = name.split(".")[2]
            of_heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            found[f"blk.{layer}.attn_k_b.weight"] = of_heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
            found[f"blk.{layer}.attn_v_b.weight"] = of_heads[:, config.qk_nope_head_dim :]
            continue
        if alternating := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name):
            if architecture == "gpt-oss":
                layer, which, bias = alternating.groups()
                value, ending = (value, "bias") if bias else (value.swapaxes(1, 2), "weight")
                if which == "down":
                    found[f"blk.{layer}.ffn_down_exps.{ending}"] = value
                else:
                    found[f"blk.{layer}.ffn_gate_exps.{ending}"] = value[:, ::2]
                    found[f"blk.{layer}.ffn_up_exps.{ending}"] = value[:, 1::2]
                continue
        if experts := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name):
            layer, which = experts.groups()
            if which == "down":
                found[f"blk.{layer}.ffn_down_exps.weight"] = value
            else:
                half = value.shape[1] // 2
                found[f"blk.{layer}.ffn_gate_exps.weight"] = value[:, :half]
                found[f"blk.{layer}.ffn_up_exps.weight"] = value[:, half:]
            continue
        stem, ending = name.rsplit(".", 1)
        name = f"{names.get_name(stem)}.{ending}"
        if architecture in ("llama", "mistral") and "attn_q." in name:
            value = permuted(value, config.num_attention_heads)
        if architecture in ("llama", "mistral") and "attn_k." in name:
            value = permuted(value, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        found[name] = value[0] if "ffn_gate_inp_shexp" in name else value
    return found


def write(path: Path, architecture: str, tensors: dict, kinds: list, config=None, split: dict | None = None) -> None:
    """Writes a file whose matrices have these types, one after the other."""
    stored = SHARED.get(architecture, architecture)
    writer = gguf.GGUFWriter(path, stored)
    if architecture == "mistral":
        writer.add_name("mistral")
    if config is not None:
        for key, name in (KEYS | KEYS_OF.get(stored, {})).items():
            if isinstance(value := getattr(config, name, None), int):
                writer.add_uint32(f"{stored}.{key}", value)
        writer.add_float32(f"{stored}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
        writer.add_float32(f"{stored}.rope.freq_base", 10000.0)
        rotary = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotary = getattr(config, "qk_rope_head_dim", rotary // 2 if architecture == "glm4" else rotary)
        writer.add_uint32(f"{stored}.rope.dimension_count", rotary)
        if stored == "deepseek2":
            writer.add_uint32(f"{stored}.attention.key_length_mla", config.qk_nope_head_dim + config.qk_rope_head_dim)
        if architecture == "deepseek3":
            writer.add_uint32(f"{stored}.expert_gating_func", 2)
        writer.add_token_list([f"<{token}>" for token in range(config.vocab_size)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
    for key, value in (split or {}).items():
        writer.add_uint16(key, value)
    for at, (name, value) in enumerate(tensors.items()):
        kind = kinds[at % len(kinds)] if value.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def states_equal(found, expected) -> None:
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory without mount points."""
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def load(directory: Path, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **more)


def test_tables_are_those_of_the_package():
    assert (gguf_tables.ROOT / "grids.txt").read_text() == gguf_tables.grids()
    assert (gguf_tables.ROOT / "blocks/digests.txt").read_text() == gguf_tables.digests()
    assert gguf_tables.FILES.read_text() == gguf_tables.small_files()


@pytest.mark.parametrize("architecture", MODELS)
def test_hf_is_the_model_that_was_converted(architecture, own, files):
    model = model_of(architecture)
    write(files / "model.gguf", architecture, converted(model, architecture), [Kind.F32], model.config)
    mounted = own(files / "model.gguf")
    assert sorted(path.name for path in (mounted / "hf").iterdir()) == ["config.json", "model.safetensors"]
    states_equal(load(mounted / "hf"), model)


@pytest.mark.parametrize("architecture", [name for name in MODELS if name not in NOT_READ])
def test_states_are_those_of_gguf_file(architecture, own, files):
    model = model_of(architecture)
    kinds = [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.F16, Kind.BF16, Kind.Q5_0, Kind.Q4_1]
    write(files / "model.gguf", architecture, converted(model, architecture), kinds, model.config)
    mounted = own(files)
    config = transformers.AutoConfig.from_pretrained(mounted / "hf")
    theirs = transformers.AutoConfig.from_pretrained(files, gguf_file="model.gguf")
    told = json.loads((mounted / "hf/config.json").read_text())
    for name, value in theirs.to_dict().items():
        # What transformers does not take from the file is its default there.
        if name in told and name not in ("architectures", "dtype", "head_dim", *MOE, "shared_expert_intermediate_size"):
            assert getattr(config, name) == value, name
    states_equal(load(mounted / "hf"), load(files, gguf_file="model.gguf", config=config))


def test_architectures_of_the_library_are_compared_or_refused_by_name(files):
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES as loaded

    stored = {arch.replace("-", ""): arch for arch in gguf.MODEL_ARCH_NAMES.values()}
    names = {stored.get(name.replace("_", ""), name) for name in loaded} - {"general", "tokenizer"}
    assert {"llama", "qwen2moe", "falcon"} < names
    compared = {SHARED.get(name, name) for name in MODELS}
    assert compared & names > {"llama", "gpt-oss"}
    for name in names - compared - set(SHARED):
        random_file(files / "model.gguf", name)
        refused = mounting.run("plan", files / "model.gguf", "--layout", "hf", expect=1)
        assert f'"{name}"' in refused.err, name


def random_file(path: Path, architecture: str) -> dict[str, np.ndarray]:
    """A file with a tensor of every type that is decoded, of random bytes. Returns the values."""
    writer, values = gguf.GGUFWriter(path, architecture), {}
    for kind in gguf_tables.decoded_types():
        stored = gguf_tables.random_blocks(kind).reshape(8, -1)
        with np.errstate(all="ignore"):
            values[f"of.{kind.name}"] = gguf.dequantize(stored, kind)
        plain = {Kind.F32: np.float32, Kind.F16: np.float16}.get(kind)
        writer.add_tensor(f"of.{kind.name}", stored.view(plain) if plain else stored, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_every_type_under_stored_names(own, files):
    values = random_file(files / "model.gguf", "unheard-of")
    mounted = own(files / "model.gguf")
    found = load_file(mounted / "safetensors/dev0.safetensors")
    assert found.keys() == values.keys()
    for name, value in values.items():
        whole = found[name].float().numpy()
        assert whole.shape == value.shape and np.array_equal(whole, value, equal_nan=True), name
    assert not (mounted / "hf").exists()
    refused = mounting.run("plan", files / "model.gguf", "--layout", "hf", expect=1)
    assert "unheard-of" in refused.err
    mounting.run("verify", mounted.point)


def test_split_files_and_variants(own, files):
    model = model_of("llama")
    tensors = converted(model, "llama")
    names = list(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        split = {"split.no": number, "split.count": 2} | {"split.tensors.count": len(names)}
        path = files / f"tiny-F32-0000{number + 1}-of-00002.gguf"
        write(path, "llama", {name: tensors[name] for name in part}, [Kind.F32], model.config if number == 0 else None, split)
    write(files / "tiny-Q8_0.gguf", "llama", tensors, [Kind.Q8_0], model.config)
    for source, more in ((files, ["--variant", "F32"]), (files / "tiny-F32-00001-of-00002.gguf", [])):
        states_equal(load(own(source, *more) / "hf"), model)
    several = mounting.run("plan", files, expect=1)
    assert "tiny-F32.gguf, tiny-Q8_0.gguf" in several.err
    (files / "tiny-F32-00002-of-00002.gguf").unlink()
    lacks = mounting.run("plan", files / "tiny-F32-00001-of-00002.gguf", expect=1)
    assert "missing: number 2" in lacks.err


def test_shards_casts_and_codes_of_it(own, files):
    """What holds for any repository holds for this one: other types, meshes, MaxText's layout, quantized weights."""
    model = model_of("llama")
    write(files / "model.gguf", "llama", converted(model, "llama"), [Kind.Q8_0], model.config)
    theirs = load(files, gguf_file="model.gguf").state_dict()
    mounted = own(files / "model.gguf", "--layout", "hf", "--dtype", "bf16", "--mesh", "fsdp=2,tensor=2")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(load_file(mounted / "hf/model.safetensors")[name], theirs[name].bfloat16())
    whole = np.frombuffer((mounted / "full" / name).read_bytes(), np.uint16)
    assert np.array_equal(whole, theirs[name].bfloat16().view(torch.uint16).numpy().ravel())
    mounting.run("verify", mounted.point)
    maxtext = own(files / "model.gguf", "--layout", "maxtext", "--dtype", "f32")
    [kernel] = (maxtext / "full").rglob("mlp/wo/kernel")
    stacked = np.frombuffer(kernel.read_bytes(), np.float32).reshape(96, 2, 64)
    assert np.array_equal(stacked[:, 1], theirs["model.layers.1.mlp.down_proj.weight"].T.numpy())
    quantized = own(files / "model.gguf", "--quantize", "fp8-block")
    assert "quantization_config" in json.loads((quantized / "hf/config.json").read_text())


def test_a_tokenizer_comes_from_another_repository(own, files):
    model = model_of("qwen2")
    write(files / "model.gguf", "qwen2", converted(model, "qwen2"), [Kind.F16], model.config)
    assert "hf/ has no tokenizer" in mounting.run("plan", files / "model.gguf").err
    model.config.save_pretrained(files / "whole")
    (files / "whole/tokenizer.json").write_text("{}")
    mounted = own(files / "model.gguf", "--config-from", files / "whole")
    assert (mounted / "hf/tokenizer.json").read_text() == "{}"
    states_equal(load(mounted / "hf"), load(files, gguf_file="model.gguf"))
