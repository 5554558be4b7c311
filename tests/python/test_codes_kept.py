"""Codes in another library's form: what compressed-tensors makes of them, bit for bit, and the same numbers when decoded."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert import convert_checkpoint
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from safetensors.torch import load_file, save_file

import quantized_formats as formats
import quantized_repos
from mounting import find_ckfs, run
from quantized_repos import UNQUANTIZED, Quantized

CT = "keep:compressed-tensors"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit for bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), f"{what}: {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
    bytes_of = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    assert torch.equal(*bytes_of), what


@pytest.fixture(scope="module")
def made(base: Path):
    """A quantized repository, written once."""
    known: dict[str, Quantized] = {}

    def get(name: str, kind: str = "wild") -> Quantized:
        key = f"{kind}-{name}"
        if key not in known:
            known[key] = quantized_repos.BUILDERS[name](base / "kept" / key, kind)
        return known[key]

    return get


@pytest.fixture(scope="module")
def kept(base: Path):
    """`hf/` of a repository with its codes in another form, as it is exported."""

    def get(source: Path, form: str = CT) -> Path:
        name = source.parent.name if source.name == "hf" else source.name
        target = base / "kept-made" / f"{name}-{form.removeprefix('keep:')}"
        if not target.exists():
            run("export", source, target, "--layout", "hf", "--requantize", form)
        return target / "hf"

    return get


def converted(source: Path, target: Path, converter: object) -> tuple[dict[str, torch.Tensor], dict]:
    """What the library's converter writes."""
    convert_checkpoint(str(source), str(target), converter=converter, max_workers=1, device="cpu")
    return tensors_of(target), json.loads((target / "config.json").read_text())["quantization_config"]


def scheme_of(config: dict, module: str):
    """The settings of a module in a configuration, as the library reads them, and its format."""
    parsed = QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "version"})
    groups = list(parsed.config_groups.values())
    scheme = next((group for group in groups if module in group.targets), None)
    scheme = scheme or next(group for group in groups if "Linear" in group.targets)
    return scheme, scheme.format or parsed.format


def decompressed(path: Path, module: str) -> torch.Tensor:
    """A weight, decoded by the library in float32."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme, format = scheme_of(config, module)
    state = {n.removeprefix(f"{module}."): t for n, t in tensors_of(path).items() if n.startswith(f"{module}.")}
    state.pop("bias", None)
    # In a float narrower than that the library rounds products.
    if state["weight_scale"].dtype in (torch.float16, torch.bfloat16):
        state["weight_scale"] = state["weight_scale"].float()
    return BaseCompressor.get_value_from_registry(format).decompress(state, scheme)["weight"].float()


def awq(source: Path) -> AutoAWQConverter:
    config = json.loads((source / "config.json").read_text())["quantization_config"]
    return AutoAWQConverter.from_autoawq_config(config)


def modelopt(source: Path) -> ModelOptNvfp4Converter:
    cache = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
    return ModelOptNvfp4Converter(ignore=["lm_head", UNQUANTIZED], targets=["re:.*_proj$"], kv_cache_scheme=cache)


@pytest.mark.parametrize(("name", "converter"), [("awq-gemm", awq), ("modelopt-nvfp4", modelopt)])
def test_bytes_and_configuration_are_those_of_the_librarys_converter(made, kept, tmp_path, name, converter):
    repo = made(name)
    source = repo.repo.path
    wanted, config = converted(source, tmp_path / "converted", converter(source))
    found = tensors_of(kept(source))
    assert found.keys() == wanted.keys()
    for tensor, expected in wanted.items():
        # The library reads factors with one axis, and its converter writes them without.
        if expected.dim() == 0 and "global_scale" in tensor:
            expected = expected.reshape(1)
        same(found[tensor], expected, tensor)
    own = json.loads((kept(source) / "config.json").read_text())["quantization_config"]
    module = repo.replaced[next(iter(repo.replaced))].removesuffix(".weight")
    (ours, format), (theirs, expected_format) = scheme_of(own, module), scheme_of({**config, "config_groups": {
        "group": {**next(iter(config["config_groups"].values())), "targets": ["Linear"]}}}, module)  # fmt: skip
    assert format == expected_format
    # The observer is of no use once codes are there.
    assert ours.weights == theirs.weights.model_copy(update={"observer": ours.weights.observer})
    assert ours.input_activations == theirs.input_activations
    assert {"lm_head", UNQUANTIZED} <= set(own["ignore"])
    assert not {module} & set(own["ignore"])


def signed(repo: Quantized, module: str, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[out, in]` and zero points `[out, groups]` of a GPTQ module, as the library has them before it packs them."""
    tensors = repo.repo.tensors
    words = tensors[f"{module}.qweight"].array()
    codes = formats.fields(np.ascontiguousarray(words.T).view(np.uint8), bits)
    zeros = formats.fields(formats.raw(tensors[f"{module}.qzeros"]), bits).astype(np.int64).T
    if repo.repo.config["quantization_config"].get("checkpoint_format", "gptq") == "gptq":
        zeros = (zeros + 1) % 2**bits
    half = 2 ** (bits - 1)
    return tuple(torch.from_numpy(part.astype(np.int64) - half).to(torch.int8).contiguous() for part in (codes, zeros))


@pytest.mark.parametrize("name", ["gptq-4-v1", "gptq-4-v1-no-index", "gptq-4-v2-act", "gptq-8-v1-act", "gptq-8-v2"])
def test_gptq_is_packed_as_the_library_packs_it(made, kept, name):
    repo = made(name)
    found = tensors_of(kept(repo.repo.path))
    bits = repo.repo.config["quantization_config"]["bits"]
    stored = {name: torch.from_numpy(tensor.array().copy()) for name, tensor in repo.repo.tensors.items() if tensor.code != "BF16"}
    config = json.loads((kept(repo.repo.path) / "config.json").read_text())["quantization_config"]
    gone = set()
    for codes, weight in repo.replaced.items():
        module = weight.removesuffix(".weight")
        unpacked, zeros = signed(repo, module, bits)
        expected = {
            "weight_packed": pack_to_int32(unpacked, bits),
            "weight_scale": stored[f"{module}.scales"].T,
            "weight_shape": torch.tensor(unpacked.shape),
            "weight_zero_point": pack_to_int32(zeros, bits, packed_dim=0),
        }
        if "act" in name:
            expected["weight_g_idx"] = stored[f"{module}.g_idx"]
        # The library reads groups by activations no more.
        assert [group["weights"].pop("actorder", "group") for group in config["config_groups"].values()] == ["group" if "act" in name else None]
        scheme, _ = scheme_of(config, module)
        for group in config["config_groups"].values():
            group["weights"]["actorder"] = "group" if "act" in name else None
        assert (scheme.weights.num_bits, scheme.weights.symmetric, scheme.weights.group_size) == (bits, False, 32)
        for word, tensor in expected.items():
            same(found.pop(f"{module}.{word}"), tensor, f"{module}.{word}")
        gone |= {tensor for tensor in repo.gone if tensor.startswith(f"{module}.")}
    assert found.keys() == repo.repo.tensors.keys() - gone


def test_gptq_without_zero_points_of_its_own_is_symmetric(made, kept, tmp_path):
    """In the middle everywhere, whatever the configuration says: kernels for symmetric codes are others."""
    repo = made("gptq-4-v1")
    files = {
        file: {
            name: formats.Tensor(tensor.code, tensor.shape, b"\x77" * len(tensor.data)) if name.endswith("qzeros") else tensor
            for name, tensor in tensors.items()
        }
        for file, tensors in repo.repo.files.items()
    }
    source = tmp_path / "symmetric"
    quantized_repos.repos.write(source, files, repo.repo.config)
    out = kept(source)
    assert not [name for name in tensors_of(out) if name.endswith("weight_zero_point")]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme, _ = scheme_of(config, "model.layers.0.self_attn.q_proj")
    assert scheme.weights.symmetric is True
    decodes_alike(source, out)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-block-bf16", "deepseek-v3-fp8"])
def test_blocks_keep_their_bytes_under_the_other_names(made, kept, name):
    repo = made(name)
    stored = {name: tensor for name, tensor in repo.repo.tensors.items()}
    found = tensors_of(kept(repo.repo.path))
    expected = {name.replace(".weight_scale_inv", ".weight_scale"): tensor for name, tensor in stored.items()}
    assert found.keys() == expected.keys()
    for word, tensor in expected.items():
        assert found[word].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == tensor.data, word
    config = json.loads((kept(repo.repo.path) / "config.json").read_text())["quantization_config"]
    weight = repo.replaced[next(iter(repo.replaced))]
    scheme, format = scheme_of(config, weight.removesuffix(".weight"))
    from compressed_tensors.quantization.quant_scheme import FP8_BLOCK

    block = repo.repo.config["quantization_config"]["weight_block_size"]
    assert format == "float-quantized"
    assert scheme.weights == FP8_BLOCK["weights"].model_copy(update={"block_structure": block, "observer": scheme.weights.observer})
    assert scheme.input_activations == FP8_BLOCK["input_activations"]


def test_experts_of_gpt_oss_are_linear_layers_with_their_rows_apart(made, kept):
    repo = made("gpt-oss-mxfp4", "calm")
    stored, found = repo.repo.tensors, tensors_of(kept(repo.repo.path))
    compared = 0
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for word, (stack, first, step) in {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1)}.items():
            blocks, scales = (torch.from_numpy(stored[f"{at}.{stack}_{end}"].array().copy()) for end in ("blocks", "scales"))
            bias = stored[f"{at}.{stack}_bias"].array()
            for expert in range(blocks.shape[0]):
                module = f"{at}.{expert}.{word}"
                same(found[f"{module}.weight_packed"], blocks[expert, first::step].flatten(1), module)
                same(found[f"{module}.weight_scale"], scales[expert, first::step], module)
                assert np.array_equal(found[f"{module}.bias"].view(torch.int16).numpy(), bias[expert, first::step].view(np.int16))
                decoded = torch.from_numpy(repo.values[f"{at}.{stack}"][expert].T[first::step].copy())
                same(decompressed(kept(repo.repo.path), module), decoded.to(torch.bfloat16).float(), module)
                compared += 1
    assert compared == 2 * 3 * 3
    assert not [name for name in found if "gate_up_proj" in name]


def decodes_alike(source: Path, made: Path, **more: object) -> None:
    """The program decodes both to the same numbers."""
    plain = []
    for path in (source, made):
        out = path.parent / f"{path.name}-plain-{made.parent.name}"
        if not out.exists():
            run("export", path, out, "--layout", "hf", "--dequantize=f32")
        plain.append(tensors_of(out / "hf"))
    assert plain[0].keys() == plain[1].keys()
    for name, tensor in plain[0].items():
        same(plain[1][name], tensor, name)


# Those whose library decodes exactly what is stored; the factor of NVFP4 is rounded, see below.
ALIKE = ["awq-gemm", "gptq-4-v1", "gptq-8-v2", "fp8-block", "fp8-block-bf16", "deepseek-v3-fp8"]


@pytest.mark.parametrize("name", [*ALIKE, "gptq-4-v2-act", "gptq-8-v1-act"])
def test_decoded_values_are_the_same_before_and_after(made, kept, name):
    repo = made(name)
    decodes_alike(repo.repo.path, kept(repo.repo.path))


@pytest.mark.parametrize("name", ALIKE)
def test_the_library_decodes_the_same_values(made, kept, name):
    repo = made(name, "calm")
    out = kept(repo.repo.path)
    for weight, values in repo.values.items():
        found = decompressed(out, weight.removesuffix(".weight"))
        expected = torch.from_numpy(values.copy())
        assert torch.equal(found, expected), weight


def test_the_factor_of_nvfp4_is_the_nearest_reciprocal_both_ways(made, kept):
    """The one thing that is computed: decoded values differ by its rounding at most."""
    repo = made("modelopt-nvfp4", "calm")
    out = kept(repo.repo.path)
    found, stored = tensors_of(out), repo.repo.tensors
    for weight, values in repo.values.items():
        module = weight.removesuffix(".weight")
        factor = stored[f"{module}.weight_scale_2"].array().astype(np.float32).reshape(1)
        same(found[f"{module}.weight_global_scale"], 1 / torch.from_numpy(factor), module)
        decoded = decompressed(out, module).numpy()
        np.testing.assert_allclose(decoded, values, rtol=2**-7)
    repo = made("ct-nvfp4", "calm")
    back = kept(repo.repo.path, "keep:modelopt")
    found = tensors_of(back)
    for weight in repo.values:
        module = weight.removesuffix(".weight")
        factor = torch.from_numpy(repo.repo.tensors[f"{module}.weight_global_scale"].array().astype(np.float32).reshape(()))
        same(found[f"{module}.weight_scale_2"], 1 / factor, module)
        codes = repo.repo.tensors[f"{module}.weight_packed"]
        assert found[f"{module}.weight"].numpy().tobytes() == codes.data
    config = json.loads((back / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "NVFP4")
    assert json.loads((back / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "NVFP4"


def test_there_and_back_is_the_repository_that_it_was(made, kept):
    repo = made("fp8-block")
    back = kept(kept(repo.repo.path), "keep:fp8")
    found = tensors_of(back)
    assert found.keys() == repo.repo.tensors.keys()
    for name, tensor in repo.repo.tensors.items():
        assert found[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == tensor.data, name
    config = json.loads((back / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])


@pytest.mark.parametrize("kind", ["wild", "calm"])
def test_experts_of_gpt_oss_there_and_back(made, kept, kind):
    repo = made("gpt-oss-mxfp4", kind)
    back = kept(kept(repo.repo.path), "keep:mxfp4")
    found = tensors_of(back)
    assert found.keys() == repo.repo.tensors.keys()
    for name, tensor in repo.repo.tensors.items():
        assert tuple(found[name].shape) == tuple(tensor.shape), name
        assert found[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == tensor.data, name
    config = json.loads((back / "config.json").read_text())["quantization_config"]
    stored = repo.repo.config["quantization_config"]["modules_to_not_convert"]
    plain = {name.removesuffix(".weight") for name, tensor in found.items() if tensor.dim() == 2 and tensor.is_floating_point() and name.endswith(".weight")}
    assert config == {"quant_method": "mxfp4", "modules_to_not_convert": config["modules_to_not_convert"]}
    assert set(config["modules_to_not_convert"]) == plain | {"lm_head"}
    assert all(any(re.match(rule.replace(".", r"\.").replace("*", ".*"), name) for rule in stored) for name in plain)


def test_experts_back_are_decoded_by_transformers_as_the_linear_layers_are(made, kept):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    layers = kept(made("gpt-oss-mxfp4", "calm").repo.path)
    found, stored = tensors_of(kept(layers, "keep:mxfp4")), tensors_of(layers)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for stack, words in (("gate_up_proj", ["gate_proj", "up_proj"]), ("down_proj", ["down_proj"])):
            decoded = convert_moe_packed_tensors(found[f"{at}.{stack}_blocks"], found[f"{at}.{stack}_scales"], dtype=torch.float32)
            for expert in range(decoded.shape[0]):
                for turn, word in enumerate(words):
                    expected = decompressed(layers, f"{at}.{expert}.{word}")
                    assert torch.equal(decoded[expert].T[turn :: len(words)], expected), (stack, expert, word)
                    bias = found[f"{at}.{stack}_bias"][expert, turn :: len(words)]
                    assert torch.equal(bias, stored[f"{at}.{expert}.{word}.bias"])


def test_experts_that_make_no_stack_are_refused_by_name(made, kept, tmp_path):
    layers = kept(made("gpt-oss-mxfp4", "calm").repo.path)
    stored, config = tensors_of(layers), json.loads((layers / "config.json").read_text())
    at = "model.layers.1.mlp.experts"

    def without(name: str, *ends: str, **members: object) -> str:
        out = tmp_path / name
        out.mkdir()
        save_file({key: tensor for key, tensor in stored.items() if not key.endswith(ends)} if ends else stored, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(config | members))
        return refused(out, "keep:mxfp4")

    gone = [f"{at}.2.up_proj.{end}" for end in ("weight_packed", "weight_scale", "bias")]
    assert f"{at}.gate_up_proj: expert 2 has no up_proj in MXFP4" in without("layer", *gone)
    assert f"{at}.0.down_proj.bias is not there" in without("bias", f"{at}.0.down_proj.bias")
    assert f"{at}.down_proj: expected the 2 experts of num_local_experts" in without("fewer", num_local_experts=2)
    assert "expert 3 has no" in without("more", num_local_experts=4)
    assert "only experts of gpt_oss in MXFP4 have that form" in without("other", model_type="mixtral")


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_bias_of_experts_without_rows_is_refused(made, tmp_path, shape):
    source = made("gpt-oss-mxfp4", "calm").repo.path
    name = "model.layers.1.mlp.experts.gate_up_proj_bias"
    save_file(tensors_of(source) | {name: torch.zeros(shape, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    text = refused(tmp_path, CT)
    assert "panicked" not in text and "axis 0" in text, text


@pytest.mark.parametrize(("name", "compressed"), [("awq-gemm", False), ("gptq-4-v1", False), ("modelopt-nvfp4", True), ("fp8-block", True)])
def test_transformers_loads_what_is_made(made, kept, name, compressed):
    """Packed zero points only when it decodes: 5.24 gives them another shape otherwise, also those of the library's own converter."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    repo = made(name, "calm")
    out = kept(repo.repo.path)
    more = {} if compressed else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32, **more)
    caches = {key for key in info["unexpected_keys"] if key.endswith(("k_scale", "v_scale"))}
    assert not info["missing_keys"] and not info["mismatched_keys"] and info["unexpected_keys"] == caches
    state, stored, compared = model.state_dict(), tensors_of(out), 0
    for key, tensor in stored.items():
        if compressed and key not in caches:
            same(state[key].to(tensor.dtype), tensor, key)
            compared += 1
    for weight, values in repo.values.items() if not compressed else ():
        # It rounds products to the scales' float16 first.
        np.testing.assert_allclose(state[weight].numpy(), values, rtol=2**-10)
        compared += 1
    assert compared >= 13


@pytest.mark.parametrize("name", ["awq-gemm", "gptq-8-v1-act", "fp8-block", "modelopt-nvfp4", "gpt-oss-mxfp4", "back-to-mxfp4"])
@pytest.mark.parametrize("layout", ["hf", "canonical"])
def test_shards_are_those_of_the_converted_repository(made, kept, own, name, layout):
    """Any mesh cuts the view as it cuts the repository that it shows."""
    source, form = (kept(made("gpt-oss-mxfp4").repo.path), "keep:mxfp4") if name.startswith("back") else (made(name).repo.path, CT)
    mesh = ("--layout", layout, "--mesh", "fsdp=2,tensor=2")
    roots = [own(source, *mesh, "--requantize", form).point, own(kept(source, form), *mesh).point]
    tops = ("dev0", "dev3", "full", "dcp", "safetensors")
    listed = [
        {path.relative_to(root): path for top in tops for path in (root / top).rglob("*") if path.is_file()} for root in roots
    ]
    assert listed[0].keys() == listed[1].keys() and len(listed[0]) > 100
    for name, path in listed[0].items():
        if name.name != ".metadata":
            assert path.read_bytes() == listed[1][name].read_bytes(), name
    run("verify", roots[0])


def refused(source: Path, form: str, *more: object) -> str:
    done = subprocess.run([find_ckfs(), "plan", source, "--requantize", form, *map(str, more)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_what_has_no_place_is_refused_by_name_with_the_way_out(made, tmp_path):
    for name, form, words in [
        ("bnb-nf4", CT, "bitsandbytes"),
        ("mlx-affine-4", CT, "mlx"),
        ("awq-gemm", "keep:modelopt", "awq"),
        ("ct-mxfp4", "keep:mxfp4", "only experts of gpt_oss"),
        ("ct-nvfp4", "keep:mxfp4", "only experts of gpt_oss"),
        ("ct-nvfp4", CT, "nvfp4"),
        ("ct-fp8-channel", "keep:fp8", "one block of rows and columns"),
        ("modelopt-mixed", CT, "scaled_fp8"),
        ("fp8-block-ue8m0", CT, "found F8_E8M0"),
        ("gptq-4-v1-partial", CT, "a multiple of 8 and of 64, found 80"),
    ]:
        text = refused(made(name).repo.path, form)
        assert words in text and form in text and "--dtype decodes" in text and "model." in text, text
    awq = made("awq-gemm").repo.path
    for more in (["--dtype", "bf16"], ["--dequantize"], ["--quantize", "fp8-block"], ["--layout", "maxtext"]):
        assert "codes stay codes" in refused(awq, CT, *more)
    plain = quantized_repos.repos.llama(tmp_path / "plain").path
    assert "no tensor of the source is quantized" in refused(plain, CT)
