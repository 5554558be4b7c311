"""Small quantized repositories of every scheme, with the configuration that its library writes, and their decoded values.

Each is a whole model: layers in which one matrix is unquantized and named in the scheme's list of exceptions;
unquantized embedding and head (MLX quantizes them too); norms. Codes and companions of one matrix are in two files.
`BUILDERS` builds one by its name, with wild scales, or with calm ones, for which all logits are numbers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

import quantized_formats as formats
import repos
from quantized_formats import SCHEMES, Noise, Parts, Scheme
from reference import FLOATS, cast_array
from repos import Draw, Repo, Tensor

# Ends of the names of tensors that stay as stored for any 16-bit dtype, because the model's own code keeps them in float32.
KEPT = ("e_score_correction_bias", "mlp.gate.weight")
# These for float16 only, where bfloat16's range is too wide.
KEPT_GPT_OSS = ("layernorm.weight", "model.norm.weight")
KEPT_V4 = (
    ".attn_sink", ".gate.bias", ".gate.bias_vl", ".ape", ".hc_attn_fn", "norm.weight", ".attn_norm.weight", ".ffn_norm.weight",
    ".q_norm.weight", ".kv_norm.weight",
)  # fmt: skip


@dataclasses.dataclass
class Quantized:
    """A quantized repository. `values` are float32, by decoded name; `replaced` maps the stored codes to that name; `gone` are
    all stored tensors that decoding replaces or drops; `companions` are, by decoded name, the stored names that it is decoded from."""

    repo: Repo
    code: str
    values: dict[str, np.ndarray]
    replaced: dict[str, str]
    gone: set[str]
    companions: dict[str, list[str]]
    kept: tuple[str, ...] = KEPT

    def decoded(self, weights: str | None = None, rest: str | None = None) -> Repo:
        """The repository with decoded matrices stored as `weights`, and its other floats cast to `rest`."""
        config = {
            word: value for word, value in self.repo.config.items() if word not in ("quantization_config", "quantization")
        }
        files: dict[str, dict[str, Tensor]] = {}
        for file, tensors in self.repo.files.items():
            files[file] = {}
            for name, tensor in tensors.items():
                if name in self.replaced:
                    to = self.replaced[name]
                    files[file][to] = Tensor.of(weights or self.code, formats.rounded(self.values[to], weights or self.code))
                elif name not in self.gone:
                    is_kept = rest in ("BF16", "F16") and name.endswith(self.kept)
                    cast = rest and tensor.code in FLOATS and not is_kept
                    files[file][name] = Tensor.of(rest, cast_array(tensor.array(), rest)) if cast else tensor
        return Repo(self.repo.path, files, config)


@dataclasses.dataclass
class Sizes:
    """Sizes of a llama. `hidden` may differ from the sum over the heads."""

    hidden: int = 96
    inter: int = 160
    heads: int = 4
    narrow: int = 2
    head: int = 24
    vocab: int = 64


# Numbers of rows that are no multiples of 32, of 8, or of 2.
ODD = Sizes(93, 151, 3, 1, 30)
BLOCKS = Sizes(200, 300, 5, 1, 40)
UNQUANTIZED = "model.layers.1.self_attn.o_proj"
WORDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
MODULES = [f"model.layers.{n}.{word}" for n in range(2) for word in WORDS]


class Maker:
    """Collects the tensors of a repository, spread over two files."""

    def __init__(self, path: Path, kind: str, code: str) -> None:
        self.path, self.kind, self.code, self.draw = path, kind, code, Draw(path.name)
        self.files: dict[str, dict[str, Tensor]] = {f"model-0000{n}-of-00002.safetensors": {} for n in (1, 2)}
        self.made = Quantized(Repo(path, {}, {}), code, {}, {}, set(), {})
        self.turn = 0
        self.metadata: dict[str, object] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        [*self.files.values()][self.turn % 2][name] = tensor
        self.turn += 1

    def plain(self, name: str, *shape: int, code: str | None = None) -> None:
        tensor = self.draw(name, code or self.code, *shape)
        if name.endswith("norm.weight"):
            tensor = Tensor.of(tensor.code, 1 + tensor.array().astype(np.float32) / 4)
        self.add(name, tensor)
        self.metadata[name] = {"_type": "Tensor"}

    def quantized(self, module: str, scheme: Scheme, out: int, inner: int, more: Parts | None = None) -> None:
        """One matrix; `more` are further companions, which no decoder needs."""
        parts = scheme.draw(Noise(f"{self.path.name}/{module}", self.kind), out, inner)
        decoded = f"{module}.weight"
        # The next matrix starts in the other file.
        self.turn += (self.turn + len(self.made.values)) % 2
        for word, tensor in {**parts, **(more or {})}.items():
            self.add(f"{module}.{word}", tensor)
            self.made.gone.add(f"{module}.{word}")
        self.made.replaced[f"{module}.{scheme.codes}"] = decoded
        self.made.values[decoded] = scheme.decode(parts, out, inner)
        needed = [word for word in parts if word not in (scheme.codes, *scheme.dropped)]
        self.made.companions[decoded] = [f"{module}.{word}" for word in needed if word != "g_idx"]
        if scheme.name.startswith("torchao"):
            self.metadata[decoded] = torchao_metadata(scheme.name, out, inner)

    def write(self, config: dict, metadata: bool = False) -> Quantized:
        repo = repos.write(self.path, self.files, config)
        if metadata:
            text = {name: json.dumps(row) for name, row in self.metadata.items()} | {
                "tensor_names": json.dumps([*self.metadata]),
                "format": "pt",
            }
            for file, tensors in self.files.items():
                (self.path / file).write_bytes(repos.safetensors_bytes(tensors, text))
        self.made.repo = repo
        return self.made


def torchao_metadata(name: str, out: int, inner: int) -> dict:
    """The header entry that torchao 0.18 writes for one tensor."""
    dtype = {"_type": "torch.dtype", "_data": "bfloat16"}
    data = {
        "torchao-float8": {
            "block_size": [1, inner], "mm_config": None, "act_quant_kwargs": None,
            "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"}, "dtype": dtype,
        },
        "torchao-int8": {"act_quant_kwargs": None, "reduce_range": False, "block_size": [1, inner], "dtype": dtype},
        "torchao-int4": {"activation_dtype": dtype, "block_size": [1, 32], "shape": [out, inner]},
    }[name]  # fmt: skip
    kind = {"torchao-float8": "Float8Tensor", "torchao-int8": "Int8Tensor", "torchao-int4": "Int4Tensor"}[name]
    words = {"Float8Tensor": ["qdata", "scale"], "Int8Tensor": ["zero_point", "qdata", "scale"]}.get(
        kind, ["qdata", "scale", "zero_point"]
    )
    return {"_type": kind, "_data": data, "_tensor_data_names": words}


def llama_config(sizes: Sizes, code: str, **more: object) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": sizes.hidden, "intermediate_size": sizes.inter,
        "num_hidden_layers": 2, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.narrow, "head_dim": sizes.head,
        "vocab_size": sizes.vocab, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "torch_dtype": formats.DTYPE_WORDS[code], "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


def llama(
    path: Path,
    kind: str,
    scheme: str | dict[str, str],
    config: dict,
    *,
    sizes: Sizes | None = None,
    code: str = "BF16",
    more: Callable[[str], Parts] = lambda module: {},
    metadata: bool = False,
) -> Quantized:
    """`scheme`: the scheme of all matrices except one, or by module ("" for the others); `config`: members for config.json."""
    sizes, maker = sizes or Sizes(), Maker(path, kind, code)
    width, narrow = sizes.heads * sizes.head, sizes.narrow * sizes.head
    shapes = dict(zip(WORDS, [(width, sizes.hidden), (narrow, sizes.hidden), (narrow, sizes.hidden), (sizes.hidden, width)]))
    shapes |= {
        "mlp.gate_proj": (sizes.inter, sizes.hidden),
        "mlp.up_proj": (sizes.inter, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.inter),
    }
    by_module = {"": scheme} if isinstance(scheme, str) else scheme
    for name in ("model.embed_tokens", "lm_head"):
        if name in by_module:
            maker.quantized(name, SCHEMES[by_module[name]], sizes.vocab, sizes.hidden)
        else:
            maker.plain(f"{name}.weight", sizes.vocab, sizes.hidden)
    maker.plain("model.norm.weight", sizes.hidden)
    for module in MODULES:
        shape = shapes[module.split(".", 3)[3]]
        if module == UNQUANTIZED:
            maker.plain(f"{module}.weight", *shape)
        else:
            maker.quantized(module, SCHEMES[by_module.get(module) or by_module[""]], *shape, more(module))
    for n in range(2):
        for word in repos.LLAMA_NORMS:
            maker.plain(f"model.layers.{n}.{word}.weight", sizes.hidden)
    return maker.write(llama_config(sizes, code, **config), metadata)


# --- configurations ------------------------------------------------------------------------------------------------------


def group(
    targets: list[str], format: str, kind: str, bits: int, strategy: str, inputs: dict | None = None, **more: object
) -> dict:
    """One of compressed-tensors' `config_groups`."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "group_size": None, "strategy": strategy, "dynamic": False}
    return {
        "targets": targets,
        "weights": weights | more,
        "input_activations": inputs,
        "output_activations": None,
        "format": format,
    }


def compressed(format: str, groups: list[dict], ignore: list[str] | None = None) -> dict:
    return {"quantization_config": {
        "config_groups": {f"group_{n}": row for n, row in enumerate(groups)}, "quant_method": "compressed-tensors",
        "kv_cache_scheme": None, "format": format, "quantization_status": "compressed", "global_compression_ratio": None,
        "ignore": ignore or ["lm_head", UNQUANTIZED],
    }}  # fmt: skip


def one_group(format: str, *args: object, **more: object) -> dict:
    return compressed(format, [group(["Linear"], format, *args, **more)])  # type: ignore[arg-type]


STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "strategy": "tensor", "dynamic": False}
TOKENS = STATIC | {"strategy": "token", "dynamic": True}


def modelopt_algorithm(word: str) -> dict:
    size = {"NVFP4": 16, "MXFP8": 32}.get(word)
    return {"quant_algo": word} | ({"group_size": size} if size else {})


def modelopt_group(word: str, targets: list[str]) -> dict:
    row = {"dynamic": False, "num_bits": 4 if word == "NVFP4" else 8, "type": "float"}
    size = modelopt_algorithm(word).get("group_size")
    row |= {"group_size": size} if size else {}
    return {"input_activations": row, "weights": row, "targets": targets}


def modelopt(path: Path, kind: str, words: dict[str, str], **more: object) -> Quantized:
    """config.json as modelopt's converter writes it, and hf_quant_config.json beside it; `words`: algorithm by module."""
    schemes = {"FP8": "modelopt-fp8", "MXFP8": "modelopt-mxfp8", "NVFP4": "modelopt-nvfp4"}
    producer = {"name": "modelopt", "version": "0.47.0"}
    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    if words.keys() == {""}:
        algorithm, exclude = words[""], {"exclude_modules": ["lm_head", UNQUANTIZED]}
        said = modelopt_algorithm(algorithm) | {"kv_cache_quant_algo": "FP8"} | exclude
        config: dict[str, object] = {"ignore": exclude["exclude_modules"]}
        if algorithm != "MXFP8":  # its converter knows no group for this one
            config["config_groups"] = {"group_0": modelopt_group(algorithm, ["Linear"])}
    else:
        layers = {module: modelopt_algorithm(words.get(module, words[""])) for module in MODULES if module != UNQUANTIZED}
        said = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
        kinds = dict.fromkeys(row["quant_algo"] for row in layers.values())
        groups = {word: sorted(module for module, row in layers.items() if row["quant_algo"] == word) for word in kinds}
        config = {
            "config_groups": {f"group_{n}": modelopt_group(word, names) for n, (word, names) in enumerate(groups.items())}
        }
        config |= {"quantized_layers": layers, "ignore": []}
    config |= {"quant_algo": said["quant_algo"], "kv_cache_scheme": cache, "producer": producer, "quant_method": "modelopt"}

    def cache_scales(module: str) -> Parts:
        word = {"k_proj": "k_scale", "v_proj": "v_scale"}.get(module.rsplit(".", 1)[1])
        return {word: Tensor.of("F32", np.array(1.5))} if word else {}

    scheme = {module: schemes[word] for module, word in words.items()}
    made = llama(path, kind, scheme, {"quantization_config": config}, more=cache_scales, **more)  # type: ignore[arg-type]
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": said}, indent=4))
    return made


def fine_fp8(block: list[int] | None, **more: object) -> dict:
    return {"quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block, "modules_to_not_convert": ["lm_head", UNQUANTIZED],
        "activation_scheme": "dynamic" if block else "static", **more,
    }}  # fmt: skip


AWQ = {"quantization_config": {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ["lm_head", UNQUANTIZED],
}}  # fmt: skip


def gptq(bits: int, size: int, version: str | None, act: bool = False) -> dict:
    """AutoGPTQ wrote no `checkpoint_format` at first: that is version 1."""
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act, "sym": False, "damp_percent": 0.01,
        "static_groups": False, "true_sequential": True, "lm_head": False, "dynamic": {f"-:{UNQUANTIZED}": {}},
    }  # fmt: skip
    return {"quantization_config": config | ({"checkpoint_format": version} if version else {})}


def bnb(bits: int, kind: str = "nf4", nested: bool = False) -> dict:
    return {"quantization_config": {
        "quant_method": "bitsandbytes", "_load_in_8bit": bits == 8, "_load_in_4bit": bits == 4, "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head", UNQUANTIZED], "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8,
    }}  # fmt: skip


def mlx(bits: int, size: int, mode: str = "affine", **more: object) -> dict:
    config = {"group_size": size, "bits": bits, "mode": mode, UNQUANTIZED: False, **more}
    return {"quantization": config, "quantization_config": config}


def mlx_llama(
    path: Path, kind: str, scheme: str, config: dict, by_module: dict[str, str] | None = None, **more: object
) -> Quantized:
    words = {"": scheme, "model.embed_tokens": scheme, "lm_head": scheme} | (by_module or {})
    return llama(path, kind, words, config, **more)  # type: ignore[arg-type]


def torchao(word: str) -> dict:
    row = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
    kinds = {
        "Float8WeightOnlyConfig": {"granularity": row, "weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}},
        "Int8WeightOnlyConfig": {"granularity": row, "group_size": None},
        "Int4WeightOnlyConfig": {
            "group_size": 32, "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"}, "int4_tile_packed_ntile": 8,
            "int4_choose_qparams_algorithm": {"_type": "Int4ChooseQParamsAlgorithm", "_data": "TINYGEMM"},
        },
    }  # fmt: skip
    return {"quantization_config": {
        "quant_method": "torchao", "include_input_output_embeddings": False, "untie_embedding_weights": False,
        "modules_to_not_convert": ["lm_head", UNQUANTIZED],
        "quant_type": {"default": {"_type": word, "_version": 2, "_data": kinds[word] | {"set_inductor_config": True}}},
    }}  # fmt: skip


# --- repositories --------------------------------------------------------------------------------------------------------


def gpt_oss(path: Path, kind: str) -> Quantized:
    """Experts in one tensor a layer, `[experts, out, in/32, 16]` stored and `[experts, in, out]` decoded; sinks and biases."""
    maker, hidden, inter, experts, heads, narrow, head, vocab = Maker(path, kind, "BF16"), 64, 96, 3, 4, 2, 16, 64
    maker.made.kept = KEPT_GPT_OSS
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        maker.plain(name, vocab, hidden)
    maker.plain("model.norm.weight", hidden)
    for n in range(2):
        at = f"model.layers.{n}"
        for word, out, in_ in (
            ("q", heads * head, hidden),
            ("k", narrow * head, hidden),
            ("v", narrow * head, hidden),
            ("o", hidden, heads * head),
        ):
            maker.plain(f"{at}.self_attn.{word}_proj.weight", out, in_)
            maker.plain(f"{at}.self_attn.{word}_proj.bias", out)
        maker.plain(f"{at}.self_attn.sinks", heads)
        for word in repos.LLAMA_NORMS:
            maker.plain(f"{at}.{word}.weight", hidden)
        maker.plain(f"{at}.mlp.router.weight", experts, hidden)
        maker.plain(f"{at}.mlp.router.bias", experts)
        for word, out, in_ in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
            name = f"{at}.mlp.experts.{word}"
            blocks, scales = formats.draw_blocks(Noise(f"{path.name}/{name}", kind), experts, out, in_)
            maker.add(f"{name}_blocks", blocks)
            maker.add(f"{name}_scales", scales)
            maker.plain(f"{name}_bias", experts, out)
            maker.made.replaced[f"{name}_blocks"] = name
            maker.made.gone |= {f"{name}_blocks", f"{name}_scales"}
            maker.made.values[name] = formats.decode_blocks(blocks, scales)
            maker.made.companions[name] = [f"{name}_scales"]
    return maker.write({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": hidden, "intermediate_size": inter,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": narrow, "head_dim": head, "vocab_size": vocab,
        "num_local_experts": experts, "num_experts_per_tok": 2, "experts_per_token": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0,
        "attention_bias": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 150000, "eos_token_id": 2,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ]},
    })  # fmt: skip


def deepseek_v3(path: Path, kind: str, attention: str, experts_scheme: str, config: dict) -> Quantized:
    """Latent attention, one dense layer and one of experts, in DeepSeek V3's names; "" leaves matrices unquantized."""
    maker, hidden, inter, experts, heads = Maker(path, kind, "BF16"), 160, 96, 3, 2

    def matrix(module: str, scheme: str, out: int, inner: int) -> None:
        if scheme:
            maker.quantized(module, SCHEMES[scheme], out, inner)
        else:
            maker.plain(f"{module}.weight", out, inner)

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        maker.plain(name, 64, hidden)
    maker.plain("model.norm.weight", hidden)
    for n in range(2):
        at = f"model.layers.{n}"
        for word, out, inner in (
            ("q_a_proj", 96, hidden), ("q_b_proj", heads * 48, 96), ("kv_a_proj_with_mqa", 144, hidden),
            ("kv_b_proj", heads * 64, 128), ("o_proj", hidden, heads * 32),
        ):  # fmt: skip
            matrix(f"{at}.self_attn.{word}", attention, out, inner)
        maker.plain(f"{at}.self_attn.q_a_layernorm.weight", 96)
        maker.plain(f"{at}.self_attn.kv_a_layernorm.weight", 128)
        for word in repos.LLAMA_NORMS:
            maker.plain(f"{at}.{word}.weight", hidden)
        mlps = [(f"{at}.mlp", attention, 320)] if n == 0 else [(f"{at}.mlp.shared_experts", attention, inter)]
        if n == 1:
            maker.plain(f"{at}.mlp.gate.weight", experts, hidden)
            maker.plain(f"{at}.mlp.gate.e_score_correction_bias", experts, code="F32")
            mlps += [(f"{at}.mlp.experts.{e}", experts_scheme, inter) for e in range(experts)]
        for module, scheme, width in mlps:
            matrix(f"{module}.gate_proj", scheme, width, hidden)
            matrix(f"{module}.up_proj", scheme, width, hidden)
            matrix(f"{module}.down_proj", scheme, hidden, width)
    return maker.write({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": hidden, "intermediate_size": 320,
        "moe_intermediate_size": inter, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads,
        "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 96, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **config,
    })  # fmt: skip


# As in the published Kimi repositories.
KIMI_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
DEEPSEEK_FP8 = {"quantization_config": {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
}}  # fmt: skip


def deepseek_v4(path: Path, kind: str) -> Quantized:
    """Names of DeepSeek's own: fp4 experts with an exponent per 32, fp8 in blocks of 128 elsewhere, scales `X.scale`."""
    maker, hidden, inter, experts = Maker(path, kind, "BF16"), 160, 96, 3
    maker.made.kept = KEPT_V4
    for name in ("embed.weight", "head.weight"):
        maker.plain(name, 64, hidden)
    maker.plain("norm.weight", hidden)
    for n in range(2):
        at = f"layers.{n}"
        for word, out, inner in (
            ("wq_a", 96, hidden),
            ("wq_b", 192, 96),
            ("wkv", 144, hidden),
            ("wo_a", 130, 192),
            ("wo_b", hidden, 130),
        ):
            maker.quantized(f"{at}.attn.{word}", SCHEMES["deepseek-v4-fp8"], out, inner)
        for word, size in (("attn.q_norm", 96), ("attn.kv_norm", 144), ("attn_norm", hidden), ("ffn_norm", hidden)):
            maker.plain(f"{at}.{word}.weight", size)
        maker.plain(f"{at}.attn.attn_sink", 4, code="F32")
        maker.plain(f"{at}.hc_attn_fn", 4, 2 * hidden, code="F32")
        maker.plain(f"{at}.ffn.gate.weight", experts, hidden)
        maker.plain(f"{at}.ffn.gate.bias", experts, code="F32")
        mlps = [("shared_experts", "deepseek-v4-fp8"), *((f"experts.{e}", "deepseek-v4-fp4") for e in range(experts))]
        for module, scheme in mlps:
            for word, out, inner in (("w1", inter, hidden), ("w2", hidden, inter), ("w3", inter, hidden)):
                maker.quantized(f"{at}.ffn.{module}.{word}", SCHEMES[scheme], out, inner)
    return maker.write({
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": hidden, "moe_intermediate_size": inter,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "q_lora_rank": 96, "vocab_size": 64, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        },
    })  # fmt: skip


def deepseek_v41(path: Path, kind: str) -> Quantized:
    """As the published V4.1: fp8 in blocks of 32, tables of n-grams (Engram) with an exponent for 32 of each row, a tower for images, a
    draft of its own, and the text model's configuration inside."""
    maker, hidden, inter, experts, rows, wide = Maker(path, kind, "BF16"), 96, 64, 3, 75, 64
    maker.made.kept = KEPT_V4
    for name in ("embed.weight", "head.weight"):
        maker.plain(name, 64, hidden)
    maker.plain("norm.weight", hidden)

    def block(at: str) -> None:
        for word, out, inner in (("wq_a", 48, hidden), ("wq_b", 96, 48), ("wkv", 72, hidden), ("wo_a", 70, 96), ("wo_b", hidden, 70)):
            maker.quantized(f"{at}.attn.{word}", SCHEMES["deepseek-v4.1-fp8"], out, inner)
        for word, size in (("attn.q_norm", 48), ("attn.kv_norm", 72), ("attn_norm", hidden), ("ffn_norm", hidden)):
            maker.plain(f"{at}.{word}.weight", size)
        maker.plain(f"{at}.attn.attn_sink", 4, code="F32")
        maker.plain(f"{at}.hc_attn_fn", 4, 2 * hidden, code="F32")
        maker.plain(f"{at}.ffn.gate.weight", experts, hidden)
        for word in ("bias", "bias_vl"):
            maker.plain(f"{at}.ffn.gate.{word}", experts, code="F32")
        mlps = [("shared_experts", "deepseek-v4.1-fp8"), *((f"experts.{e}", "deepseek-v4-fp4") for e in range(experts))]
        for module, scheme in mlps:
            for word, out, inside in (("w1", inter, hidden), ("w2", hidden, inter), ("w3", inter, hidden)):
                maker.quantized(f"{at}.ffn.{module}.{word}", SCHEMES[scheme], out, inside)

    for n in range(2):
        block(f"layers.{n}")
    at = "layers.1.engram"
    maker.quantized(f"{at}.embed", SCHEMES["deepseek-v4.1-engram"], rows, wide)
    maker.quantized(f"{at}.wkv", SCHEMES["deepseek-v4.1-fp8"], 5 * hidden, 3 * wide)
    for word in ("q_weight", "k_weight"):
        maker.plain(f"{at}.{word}", 4, hidden)
    block("mtp.0")
    maker.plain("vision.blocks.0.attn.wqkv.weight", 96, 32)
    maker.plain("aligner.proj.weight", hidden, 32)
    maker.plain("image_start", hidden)
    text = {
        "model_type": "deepseek_v41_text", "hidden_size": hidden, "moe_intermediate_size": inter, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "q_lora_rank": 48, "vocab_size": 64, "num_nextn_predict_layers": 1, "engram_layer_ids": [1], "engram_num_embeddings": [rows],
        "engram_head_dim": wide,
    }  # fmt: skip
    return maker.write({
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": text, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "quantization_config": {
            "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32], "activation_scheme": "dynamic",
            "expert_dtype": "fp4",
        },
    })  # fmt: skip


def simple(scheme: str, config: dict, **more: object) -> Callable[[Path, str], Quantized]:
    return lambda path, kind: llama(path, kind, scheme, config, **more)  # type: ignore[arg-type]


PACK, NVFP4 = "pack-quantized", "nvfp4-pack-quantized"
MIXED = compressed("mixed-precision", [
    group(["re:.*mlp\\..*"], NVFP4, "float", 4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
    group(["re:.*self_attn\\..*"], "float-quantized", "float", 8, "channel", TOKENS),
    group(["model.layers.0.mlp.down_proj"], PACK, "int", 4, "group", group_size=32),
])  # fmt: skip
MIXED_SCHEMES = {module: "ct-fp8-channel" if ".self_attn." in module else "ct-nvfp4" for module in MODULES}
MIXED_SCHEMES["model.layers.0.mlp.down_proj"] = "pack-int4-group"
MODELOPT_MIXED = {module: "FP8" if ".self_attn." in module else "NVFP4" for module in MODULES}
MODELOPT_MIXED |= {"": "NVFP4", "model.layers.1.mlp.down_proj": "MXFP8"}

# By the name of the repository: the scheme's name where one scheme is used throughout.
BUILDERS: dict[str, Callable[[Path, str], Quantized]] = {
    "gpt-oss-mxfp4": gpt_oss,
    "pack-int4-group": simple("pack-int4-group", one_group(PACK, "int", 4, "group", group_size=32)),
    "pack-int4-group-f16": simple("pack-int4-group-f16", one_group(PACK, "int", 4, "group", group_size=32), code="F16"),
    "pack-int4-group-zeros": simple("pack-int4-group-zeros", one_group(PACK, "int", 4, "group", group_size=32, symmetric=False)),
    "pack-int4-channel": simple("pack-int4-channel", one_group(PACK, "int", 4, "channel"), sizes=ODD),
    "pack-int4-channel-zeros": simple("pack-int4-channel-zeros", one_group(PACK, "int", 4, "channel", symmetric=False), sizes=ODD),
    "pack-int8-group": simple("pack-int8-group", one_group(PACK, "int", 8, "group", group_size=32)),
    "pack-int8-channel": simple("pack-int8-channel", one_group(PACK, "int", 8, "channel"), sizes=ODD),
    "pack-int8-channel-zeros": simple(
        "pack-int8-channel-zeros", one_group(PACK, "int", 8, "channel", symmetric=False), sizes=ODD, code="F16"
    ),
    "kimi-int4": lambda path, kind: deepseek_v3(
        path, kind, "", "pack-int4-group",
        compressed(PACK, [group(["Linear"], PACK, "int", 4, "group", group_size=32)], KIMI_IGNORE),
    ),
    "ct-fp8-tensor": simple("ct-fp8-tensor", one_group("float-quantized", "float", 8, "tensor", STATIC), sizes=ODD),
    "ct-fp8-channel": simple("ct-fp8-channel", one_group("float-quantized", "float", 8, "channel", TOKENS), sizes=ODD),
    "ct-fp8-channel-f32": simple("ct-fp8-channel-f32", one_group("float-quantized", "float", 8, "channel", TOKENS), sizes=ODD),
    "ct-fp8-block": simple(
        "ct-fp8-block", one_group("float-quantized", "float", 8, "block", TOKENS, block_structure=[128, 128]), sizes=BLOCKS
    ),
    "ct-nvfp4": simple(
        "ct-nvfp4", one_group(NVFP4, "float", 4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
    ),
    "ct-mxfp4": simple("ct-mxfp4", one_group("mxfp4-pack-quantized", "float", 4, "group", group_size=32, scale_dtype="torch.uint8")),
    "ct-mxfp8": simple("ct-mxfp8", one_group("mxfp8-quantized", "float", 8, "group", group_size=32, scale_dtype="torch.uint8")),
    "ct-mixed": lambda path, kind: llama(path, kind, MIXED_SCHEMES, MIXED),
    "fbgemm-fp8": simple("fbgemm-fp8", {"quantization_config": {
        "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head", UNQUANTIZED],
    }}, sizes=ODD),
    "modelopt-fp8": lambda path, kind: modelopt(path, kind, {"": "FP8"}, sizes=ODD),
    "modelopt-mxfp8": lambda path, kind: modelopt(path, kind, {"": "MXFP8"}),
    "modelopt-nvfp4": lambda path, kind: modelopt(path, kind, {"": "NVFP4"}),
    "modelopt-mixed": lambda path, kind: modelopt(path, kind, MODELOPT_MIXED),
    "fp8-tensor": simple("fp8-tensor", fine_fp8(None), sizes=ODD),
    "fp8-block": simple("fp8-block", fine_fp8([128, 128]), sizes=BLOCKS),
    "fp8-block-bf16": simple("fp8-block-bf16", fine_fp8([128, 128]), sizes=BLOCKS),
    "fp8-block-ue8m0": simple("fp8-block-ue8m0", fine_fp8([128, 128], scale_fmt="ue8m0"), sizes=BLOCKS),
    "deepseek-v3-fp8": lambda path, kind: deepseek_v3(path, kind, "fp8-block", "fp8-block", DEEPSEEK_FP8),
    "deepseek-v4": deepseek_v4,
    "deepseek-v4.1": deepseek_v41,
    "awq-gemm": simple("awq-gemm", AWQ, code="F16"),
    "gptq-4-v1": simple("gptq-4-v1", gptq(4, 32, None), code="F16"),
    "gptq-4-v1-partial": simple("gptq-4-v1-partial", gptq(4, 64, "gptq"), code="F16", sizes=Sizes(80, 136, 4, 2, 20)),
    "gptq-4-v1-no-index": simple("gptq-4-v1-no-index", gptq(4, 32, "gptq"), code="F16"),
    "gptq-4-v2-act": simple("gptq-4-v2-act", gptq(4, 32, "gptq_v2", True), code="F16"),
    "gptq-8-v1-act": simple("gptq-8-v1-act", gptq(8, 32, "gptq", True), code="F16"),
    "gptq-8-v2": simple("gptq-8-v2", gptq(8, 32, "gptq_v2"), code="F16"),
    "bnb-nf4": simple("bnb-nf4", bnb(4), sizes=ODD),
    "bnb-nf4-nested": simple("bnb-nf4-nested", bnb(4, nested=True), sizes=Sizes(162, 289, 6, 3, 32)),
    "bnb-fp4": simple("bnb-fp4", bnb(4, "fp4"), sizes=ODD, code="F16"),
    "bnb-fp4-nested": simple("bnb-fp4-nested", bnb(4, "fp4", True), sizes=ODD, code="F32"),
    "bnb-int8": simple("bnb-int8", bnb(8), sizes=ODD),
    "mlx-affine-2": lambda path, kind: mlx_llama(path, kind, "mlx-affine-2", mlx(2, 32)),
    "mlx-affine-4": lambda path, kind: mlx_llama(
        path, kind, "mlx-affine-4", mlx(4, 32, **{"model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8, "mode": "affine"}}),
        {"model.layers.0.mlp.down_proj": "mlx-affine-8"},
    ),
    "mlx-affine-4-f16": lambda path, kind: mlx_llama(
        path, kind, "mlx-affine-4-f16", mlx(4, 64), sizes=Sizes(128, 192, 4, 2, 32), code="F16"
    ),
    "mlx-affine-4-f32": lambda path, kind: mlx_llama(path, kind, "mlx-affine-4-f32", mlx(4, 32), code="F32"),
    "mlx-affine-8": lambda path, kind: mlx_llama(path, kind, "mlx-affine-8", mlx(8, 32)),
    "mlx-affine-3": lambda path, kind: mlx_llama(path, kind, "mlx-affine-3", mlx(3, 32), code="F32"),
    "mlx-affine-5": lambda path, kind: mlx_llama(path, kind, "mlx-affine-5", mlx(5, 64), sizes=Sizes(128, 192, 4, 2, 32), code="F32"),
    "mlx-affine-6": lambda path, kind: mlx_llama(path, kind, "mlx-affine-6", mlx(6, 32), code="F32"),
    "mlx-mxfp4": lambda path, kind: mlx_llama(path, kind, "mlx-mxfp4", mlx(4, 32, "mxfp4")),
    "mlx-mxfp8": lambda path, kind: mlx_llama(path, kind, "mlx-mxfp8", mlx(8, 32, "mxfp8")),
    "mlx-nvfp4": lambda path, kind: mlx_llama(path, kind, "mlx-nvfp4", mlx(4, 16, "nvfp4")),
    "torchao-float8": simple("torchao-float8", torchao("Float8WeightOnlyConfig"), sizes=ODD, metadata=True),
    "torchao-int8": simple("torchao-int8", torchao("Int8WeightOnlyConfig"), sizes=ODD, metadata=True),
    "torchao-int4": simple("torchao-int4", torchao("Int4WeightOnlyConfig"), metadata=True),
}  # fmt: skip
