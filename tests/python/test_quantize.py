"""Quantized on read: codes and scales are bit for bit those of the libraries, and `hf/` is what they load."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file

import engine_parameters as engines
import mlx_oracles
import quantize_oracles as oracles
import quantized_repos
from mounting import error_of, find_ckfs, mount, read, run

SCHEMES = [
    "fp8-block",
    "fp8-block:ue8m0",
    "fp8-channel",
    "fp8-tensor",
    "mxfp8",
    "mxfp8:sglang",
    "mxfp4",
    "nvfp4",
    "nvfp4:modelopt",
    "int8-channel",
    "int4",
    "int4-g32",
]

SHAPES = {
    "self_attn.q_proj": (1031, 1152),
    "self_attn.k_proj": (257, 1152),
    "self_attn.v_proj": (129, 1152),
    "self_attn.o_proj": (1024, 896),
    "mlp.gate_proj": (643, 1152),
    "mlp.up_proj": (643, 1152),
    "mlp.down_proj": (300, 128),
    "mlp.odd_proj": (515, 1027),
    "mlp.narrow_proj": (70, 96),
}
"""Rows that fill no block of 128, columns that fill a last one in part, and one matrix that groups do not divide."""

GROUPS = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["w1", "w3"]]
"""Matrices that engines fuse."""


def matrix(shape: tuple[int, int], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights of every size: usual ones, blocks of zeros, subnormals and large numbers, ties of codes, both zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    weight = torch.randn(shape, generator=generator) * 0.02
    # Each quarter of the rows has another size.
    sizes = torch.tensor([1.0, 1e-3, 64.0, 0.25])
    weight *= sizes[torch.arange(rows) * 4 // rows][:, None]
    weight[: min(rows, 128), 1 : min(columns, 128)] = 0.0
    if rows > 128:
        weight[:128, : min(columns, 128)] = 0.0
    weight[0, : columns // 2] = -0.0
    weight[min(rows, 140) - 1, :] = 0.0
    if rows > 200:
        tiny, huge = (1e-40, 1e30) if dtype != torch.float16 else (1e-7, 1e3)
        weight[150, :] *= tiny
        weight[151, :] = tiny * torch.arange(columns)
        weight[200, :] *= huge
        # Numbers of few bits: quotients by a scale that is a power of two are ties.
        few = torch.randint(-56, 57, (20, columns), generator=generator) / 16.0
        few[:, ::16] = 7.0
        weight[160:180, :] = few
        weight[180:200, :] = few * 2.0**-9
    return weight.to(dtype)


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two layers of matrices, and what is never quantized."""
    made = {}
    for layer in range(2):
        for number, (name, shape) in enumerate(SHAPES.items()):
            made[f"model.layers.{layer}.{name}.weight"] = matrix(shape, 100 * layer + number, dtype)
        made[f"model.layers.{layer}.mlp.gate.weight"] = matrix((32, 128), layer, dtype)
        made[f"model.layers.{layer}.self_attn.q_proj.bias"] = matrix((1, 1031), layer, dtype)[0]
        made[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(1152, dtype=dtype)
    made["model.embed_tokens.weight"] = matrix((512, 1152), 7, dtype)
    made["lm_head.weight"] = matrix((512, 1152), 8, dtype)
    return made


@pytest.fixture(scope="module")
def repo(base: Path):
    """A repository of these weights in a dtype, written once."""
    made: dict[torch.dtype, Path] = {}

    def get(dtype: torch.dtype) -> Path:
        if dtype not in made:
            made[dtype] = base / "quantize" / str(dtype)
            made[dtype].mkdir(parents=True)
            save_file(weights(dtype), made[dtype] / "model.safetensors", metadata={"format": "pt"})
            config = {"model_type": "made-up", "num_hidden_layers": 2, "torch_dtype": str(dtype).removeprefix("torch.")}
            (made[dtype] / "config.json").write_text(json.dumps(config))
        return made[dtype]

    return get


def cat(source: Path, path: str, *args: object) -> bytes:
    """A file of the mount."""
    command = [str(find_ckfs()), "cat", str(source), path, *map(str, args)]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit for bit."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, f"{what}: {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
    if found.dim() == 0:
        found, expected = found.reshape(1), expected.reshape(1)
    found, expected = found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    differ = (found != expected).nonzero()
    if len(differ):
        at = tuple(differ[0].tolist())
        raise AssertionError(f"{what}: {len(differ)} bytes differ, first at {at}: {found[at]}, expected {expected[at]}")


def expected(scheme: str, plain: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The tensors that a library makes of a repository, and the modules that it quantizes."""
    made, quantized = {}, set()
    group = {"mxfp8": 32, "mxfp8:sglang": 32, "mxfp4": 32, "nvfp4": 16, "nvfp4:modelopt": 16, "int4": 128, "int4-g32": 32}
    for name, weight in plain.items():
        module, last = name.rsplit(".", 2)[0], name.rsplit(".", 2)[-2]
        is_linear = (last.endswith("_proj") or last in ("w1", "w2", "w3")) and name.endswith(".weight")
        if not is_linear or weight.shape[1] % group.get(scheme, 1):
            made[name] = weight
            continue
        quantized.add(name.removesuffix(".weight"))
        fused = next((words for words in GROUPS if last in words), [last])
        together = [plain[f"{module}.{word}.weight"].float() for word in fused]
        parts = oracles.stored(scheme, weight.float(), together)
        made |= {f"{name}{suffix}": tensor for suffix, tensor in parts.items()}
    return made, quantized


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_scales_are_those_of_the_library(repo, scheme, dtype):
    source = repo(dtype)
    plain = load_file(source / "model.safetensors")
    wanted, quantized = expected(scheme, plain)
    assert sum(plain[f"{module}.weight"].numel() for module in quantized) > 4_000_000
    found = load(cat(source, "hf/model.safetensors", "--quantize", scheme))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        same(found[name], tensor, f"{scheme} {name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_exponents_rounded_up_are_those_of_torchao(dtype):
    """A second opinion on `mxfp8:sglang`, of which the table above has the formula alone. torchao rounds scales of subnormal numbers otherwise."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    compared = 0
    for name, weight in weights(dtype).items():
        if not name.endswith("_proj.weight") or weight.shape[1] % 32:
            continue
        weight = weight.float()
        made = oracles.stored("mxfp8:sglang", weight, [])
        scale, codes = to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        normal = weight.view(weight.shape[0], -1, 32).abs().amax(dim=2) / 448 >= 2.0**-126
        same(scale.view(torch.uint8)[normal], made["_scale_inv"][normal], name)
        by_groups = (found.view(torch.uint8).view(*normal.shape, 32)[normal] for found in (codes, made[""]))
        same(*by_groups, name)
        compared += 32 * int(normal.sum())
    assert compared > 4_000_000


def test_a_matrix_of_zeros_has_codes_of_zeros_and_scales_that_are_numbers(tmp_path):
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(130, 256)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "made-up"}')
    name = "model.layers.0.self_attn.q_proj.weight"
    for scheme in SCHEMES:
        found = load(cat(tmp_path, "hf/model.safetensors", "--quantize", scheme))
        codes = found.get(name, found.get(f"{name}_packed"))
        zero = {"int8-channel": 0x80, "int4": 0x88, "int4-g32": 0x88}.get(scheme, 0)
        assert (codes.contiguous().view(torch.uint8) == zero).all(), scheme
        for suffix in ("_scale", "_scale_inv", "_global_scale", "_scale_2"):
            if (scale := found.get(f"{name}{suffix}")) is not None:
                # The byte 0 of an exponent is 2^-127.
                wide = scale.float() if scale.dtype != torch.uint8 else 2.0 ** (scale.float() - 127)
                assert wide.isfinite().all() and (wide > 0).all(), f"{scheme} {suffix}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-tensor", "nvfp4", "int4-g32"])
def test_what_is_no_number_is_an_error_that_names_its_place(tmp_path, scheme, value):
    weight = torch.ones(130, 256, dtype=torch.bfloat16)
    weight[129, 7] = value
    save_file({"model.layers.0.self_attn.q_proj.weight": weight}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "made-up"}')
    command = [str(find_ckfs()), "cat", str(tmp_path), "hf/model.safetensors", "--quantize", scheme]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 1
    message = done.stderr.decode()
    assert "model.layers.0.self_attn.q_proj.weight" in message and "[129, 7]" in message, message
    assert run("verify", tmp_path, "--quantize", scheme, expect=None).code == 1
    planned = run("plan", tmp_path, "--quantize", scheme, "--check-values", expect=1).err
    assert "1 of 1 weights cannot be quantized" in planned, planned
    assert "model.layers.0.self_attn.q_proj.weight" in planned and "[129, 7]" in planned, planned


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-tensor", "mxfp8", "nvfp4", "int8-channel"])
def test_what_is_no_number_is_eio_through_a_mount_and_the_rest_is_served(tmp_path, scheme):
    bad, good = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"
    weight = torch.ones(130, 256, dtype=torch.bfloat16)
    save = {good: weight.clone(), bad: weight}
    weight[129, 7] = float("nan")
    source = tmp_path / "source"
    source.mkdir()
    save_file(save, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "made-up"}')
    mounted = mount(source, tmp_path / "mnt", "--layout", "hf", "--quantize", scheme)
    try:
        codes = "_packed" if scheme in ("nvfp4", "int8-channel") else ""
        scales = {"fp8-block": "_scale_inv", "nvfp4": "_global_scale"}.get(scheme, "_scale")
        for path in (f"full/{bad}{codes}", f"dev0/{bad}{scales}", "hf/model.safetensors", "safetensors/dev0.safetensors"):
            assert error_of(read, mounted / path) == errno.EIO, path
        assert read(mounted / f"full/{good}{codes}") == cat(source, f"full/{good}{codes}", "--layout", "hf", "--quantize", scheme)
        # Of spans that are no part of its block, a mount knows only that they are not there: the kernel reads ahead.
        for target, args in ((mounted.point, ()), (source, ("--layout", "hf", "--quantize", scheme))):
            found = run("verify", target, "--only", f"full/{bad}*", *args, expect=1).err
            assert bad in found and "[129, 7]" in found, found
    finally:
        run("umount", mounted.point)


# --- MLX ------------------------------------------------------------------------------------------------------------------

MLX = json.loads(mlx_oracles.RECORD.read_text())["models"]
"""What `mlx_lm.convert` wrote of small models."""


def mlx_parts(scheme: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What MLX makes of a matrix, in its own dtype."""
    import mlx.core as mx

    mode, bits, group = mlx_oracles.SCHEMES[scheme]
    integers = weight.contiguous().view(torch.int32 if weight.dtype == torch.float32 else torch.int16).numpy()
    own = {torch.bfloat16: mx.bfloat16, torch.float16: mx.float16, torch.float32: mx.float32}[weight.dtype]
    made = mx.quantize(mx.array(integers).view(own), group, bits, mode=mode)
    found = {}
    for word, part in zip(("weight", "scales", "biases"), made, strict=False):
        kind = {mx.uint32: torch.uint32, mx.uint8: torch.uint8}.get(part.dtype, weight.dtype)
        plain = np.array(part.view({4: mx.uint32, 2: mx.uint16, 1: mx.uint8}[part.dtype.size]))
        found[word] = torch.from_numpy(plain).view(kind)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_scales_and_biases_are_those_of_mlx(tmp_path, dtype):
    plain = {name: weight for name, weight in weights(dtype).items() if ".layers.1." not in name}
    for weight in plain.values():
        # Groups of larger numbers have scales of zero or infinity there, and those of smaller ones exponents that wrap.
        weight[weight.abs() > 1e20] = 3.0
        if dtype != torch.float16:
            weight[weight.abs() < 1e-36] = 0.0
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "made-up"}')
    compared = 0
    for scheme, (mode, bits, group) in mlx_oracles.SCHEMES.items():
        wanted = {}
        for name, weight in plain.items():
            module = name.removesuffix(".weight")
            is_quantized = name != module and weight.dim() == 2 and weight.shape[1] % group == 0 and not module.endswith("mlp.gate")
            parts = mlx_parts(scheme, weight) if is_quantized else {}
            wanted |= {f"{module}.{word}": part for word, part in parts.items()} or {name: weight}
            compared += weight.numel() if is_quantized else 0
        found = load(cat(tmp_path, "hf/model.safetensors", "--layout", "hf", "--quantize", scheme))
        assert found.keys() == wanted.keys(), scheme
        for name, tensor in wanted.items():
            same(found[name], tensor, f"{scheme} {name}")
        config = json.loads(cat(tmp_path, "hf/config.json", "--layout", "hf", "--quantize", scheme))
        assert config["quantization"] == config["quantization_config"] == {"group_size": group, "bits": bits, "mode": mode}
    assert compared > 4_000_000 * len(mlx_oracles.SCHEMES)


@pytest.mark.parametrize("model_type", MLX)
def test_a_mount_is_what_mlx_lm_converts_to_and_decodes_again(tmp_path, model_type):
    source, row = tmp_path / "source", MLX[model_type]
    mlx_oracles.write_model(model_type, source)
    before = json.dumps(mlx_oracles.digests((source / "model.safetensors").read_bytes()), sort_keys=True)
    assert hashlib.sha256(before.encode()).hexdigest() == row["source"], "other weights than mlx_lm had"
    mounted = mount(source, tmp_path / "mnt", "--layout", "hf", "--quantize", row["scheme"])
    try:
        stored = (mounted / "hf/model.safetensors").read_bytes()
        found = mlx_oracles.digests(stored)
        assert {name for name in found.keys() | row["tensors"].keys() if found.get(name) != row["tensors"].get(name)} == set()
        assert json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])["__metadata__"] == {"format": "mlx"}
        config = json.loads((mounted / "hf/config.json").read_text())
        assert {key: config[key] for key in row["quantization"]} == row["quantization"]
        assert "no difference" in run("verify", mounted.point).out
        decoded = load(cat(mounted / "hf", "hf/model.safetensors", "--layout", "hf", "--dequantize=f32"))
    finally:
        run("umount", mounted.point)
    plain, coded = load_file(source / "model.safetensors"), load(stored)
    assert decoded.keys() == plain.keys()
    mode, bits, group = mlx_oracles.SCHEMES[row["scheme"]]
    for name in [name for name in plain if f"{name.removesuffix('weight')}scales" in coded]:
        parts = {word: coded[f"{name.removesuffix('weight')}{word}"] for word in ("weight", "scales", "biases")[: 2 + (mode == "affine")]}
        same(decoded[name], mlx_value(parts, group, bits, mode), name)


def mlx_value(parts: dict[str, torch.Tensor], group: int, bits: int, mode: str) -> torch.Tensor:
    """The float32 that MLX decodes to."""
    import mlx.core as mx

    words = mx.array(parts["weight"].view(torch.int32).numpy()).view(mx.uint32)
    if mode == "mxfp4":
        return torch.from_numpy(np.array(mx.dequantize(words, mx.array(parts["scales"].numpy()), None, group, bits, mode, dtype=mx.float32)))
    more = [mx.array(parts[word].float().numpy()) for word in ("scales", "biases")]
    return torch.from_numpy(np.array(mx.dequantize(words, *more, group, bits)))


def test_experts_and_other_words_of_mlx_are_refused(tmp_path):
    expert_repo(tmp_path / "source", stacked=False)
    refused = run("plan", tmp_path / "source", "--layout", "hf", "--quantize", "mlx:4bit-g32", expect=1).err
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in refused or "experts.{0-3}" in refused, refused
    assert "switch_mlp" in refused and "--quantize-ignore" in refused, refused
    for word in ("mlx:7bit-g64", "mlx:4bit-g16", "mlx:4bit"):
        assert "as in mlx:4bit-g64, or mlx:mxfp4" in run("plan", tmp_path / "source", "--quantize", word, expect=2).err
    mlx_oracles.write_model("granite", tmp_path / "granite")
    assert "gives some modules of granite 8 bits" in run("plan", tmp_path / "granite", "--quantize", "mlx:4bit-g32", expect=1).err


def test_stacks_and_shards_of_mlx_are_those_of_single_tensors(models):
    """Columns are cut at groups: words of 6 bits of a group fill whole ones."""
    args, single = ("--quantize", "mlx:6bit-g32"), "model.layers.{}.self_attn.o_proj"
    for word, file in (("weight", "wo"), ("scales", "wo_scales"), ("biases", "wo_biases")):
        parts = [cat(models["llama"], f"full/{single.format(n)}.{word}", "--layout", "hf", *args) for n in range(2)]
        assert cat(models["llama"], f"full/layers/scanned/{file}", *args) == b"".join(parts)
        rows = np.frombuffer(parts[1], np.uint8).reshape(128, 2, -1)
        # 416 columns in two parts are cut inside a group.
        mesh = ("--layout", "hf", "--mesh", "tensor=2", "--quantize-ignore", "*.down_proj")
        for device in range(2):
            shard = cat(models["llama"], f"dev{device}/{single.format(1)}.{word}", *mesh, *args)
            assert shard == rows[:, device].tobytes(), (word, device)
    refused = run("plan", models["llama"], "--layout", "hf", "--mesh", "tensor=2", *args, expect=1).err
    assert "down_proj.weight (2 tensors): axis 1" in refused and "inside a block of 32" in refused, refused


# --- a factor that several matrices share, by numpy ------------------------------------------------------------------------


def e2m1(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest E2M1, two in a byte. A zero has no sign."""
    codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    codes = np.where(values == 0, 0, codes)
    return codes[..., 0::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor"])
def test_what_engines_fuse_shares_one_factor(repo, scheme):
    source = repo(torch.bfloat16)
    plain = load_file(source / "model.safetensors")
    found = load(cat(source, "hf/model.safetensors", "--quantize", scheme))
    f32 = np.float32
    for group in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["o_proj"]):
        where = "mlp" if "up_proj" in group else "self_attn"
        names = [f"model.layers.1.{where}.{word}.weight" for word in group]
        arrays = [plain[name].float().numpy() for name in names]
        greatest = f32(max(np.abs(array).max() for array in arrays))
        # Otherwise a factor of each would pass, too.
        assert len(group) == 1 or len({np.abs(array).max() for array in arrays}) > 1
        for name, array in zip(names, arrays, strict=True):
            if scheme == "fp8-tensor":
                scale = greatest / f32(448)
                assert found[f"{name}_scale"].numpy().tolist() == [scale]
                codes = np.clip(array / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
                assert np.array_equal(found[name].view(torch.uint8).numpy(), codes), name
                continue
            # torch divides a number by a tensor so.
            factor = (f32(1) / greatest) * f32(448 * 6)
            assert found[f"{name}_global_scale"].numpy().tolist() == [factor]
            blocks = array.reshape(array.shape[0], -1, 16)
            scale = np.clip(factor * (np.abs(blocks).max(axis=2) / f32(6)), 0, 448).astype(ml_dtypes.float8_e4m3fn)
            scale = np.where(scale.astype(f32) == 0, f32(0.125), scale.astype(f32))
            assert np.array_equal(found[f"{name}_scale"].float().numpy(), scale), name
            with np.errstate(over="ignore"):
                codes = e2m1((blocks / (scale / factor)[..., None]).reshape(array.shape))
            assert np.array_equal(found[f"{name}_packed"].numpy(), codes), name


# --- experts --------------------------------------------------------------------------------------------------------------

EXPERTS = 4


def expert_weights(stacked: bool) -> dict[str, torch.Tensor]:
    """A layer of a mixture of experts and one of a dense MLP."""
    made = {
        "model.embed_tokens.weight": matrix((64, 256), 1, torch.bfloat16),
        "model.layers.0.mlp.gate.weight": matrix((EXPERTS, 256), 2, torch.bfloat16),
        "model.layers.0.mlp.shared_expert_gate.weight": matrix((1, 256), 3, torch.bfloat16),
        "model.layers.0.mlp.shared_expert.down_proj.weight": matrix((256, 384), 4, torch.bfloat16),
        "model.layers.1.mlp.down_proj.weight": matrix((256, 384), 5, torch.bfloat16),
    }
    base = "model.layers.0.mlp.experts"
    if stacked:
        for name, shape in (("gate_up_proj", (2 * 160, 256)), ("down_proj", (256, 160))):
            made[f"{base}.{name}"] = torch.stack([matrix(shape, 10 + n, torch.bfloat16) for n in range(EXPERTS)])
        return made
    for n in range(EXPERTS):
        for number, (name, shape) in enumerate((("gate_proj", (160, 256)), ("up_proj", (160, 256)), ("down_proj", (256, 160)))):
            # Each expert has a size of its own, so that a factor of all of them is another than that of one.
            weight = matrix(shape, 100 * n + number, torch.bfloat16) * 2.0**n
            made[f"{base}.{n}.{name}.weight"] = weight if name != "up_proj" else weight * 0.5
    return made


def expert_repo(path: Path, stacked: bool) -> dict[str, torch.Tensor]:
    path.mkdir()
    made = expert_weights(stacked)
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text('{"model_type": "made-up", "num_hidden_layers": 2}')
    return made


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "int4"])
def test_single_experts_are_those_of_the_library(tmp_path, scheme):
    source = tmp_path / "source"
    plain = expert_repo(source, stacked=False)
    wanted, quantized = expected(scheme, plain)
    assert len([module for module in quantized if ".experts." in module]) == 3 * EXPERTS
    found = load(cat(source, "hf/model.safetensors", "--quantize", scheme))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        same(found[name], tensor, f"{scheme} {name}")
    config = json.loads(cat(source, "hf/config.json", "--quantize", scheme))["quantization_config"]
    left = config.get("modules_to_not_convert", config.get("ignore"))
    assert {"model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"} <= set(left)
    assert not quantized & set(left)
    plan = run("plan", "-v", source, "--layout", "hf", "--quantize", scheme).out
    assert f"{3 * EXPERTS} tensors of experts" in plan, plan


@pytest.mark.parametrize("scheme", ["fp8-block", "nvfp4", "int4-g32"])
def test_stacks_of_experts_are_those_of_single_ones(tmp_path, scheme):
    """The layout `canonical` stacks codes and scales of all experts, and decoding gives the weights within a step."""
    source = tmp_path / "source"
    plain = expert_repo(source, stacked=False)
    wanted, _ = expected(scheme, plain)
    suffixes = {"fp8-block": ["", "_scale_inv"], "nvfp4": ["_packed", "_scale", "_global_scale"], "int4-g32": ["_packed", "_scale"]}
    shown = json.loads(cat(source, ".ckfs/manifest.json", "--quantize", scheme))["tensors"]
    for suffix in suffixes[scheme]:
        name = f"model.layers.0.mlp.experts.{{}}.up_proj.weight{suffix}"
        whole = torch.stack([wanted[name.format(n)] for n in range(EXPERTS)])
        rows = [row for row in shown if "scanned" in row["name"] and row["shape"] == [1, *whole.shape]]
        rows = [row for row in rows if "experts" in row["name"] and "up" in row["name"] and row["name"].endswith(suffix)]
        assert len(rows) == 1, (suffix, [row["name"] for row in shown])
        found = cat(source, "full/" + rows[0]["name"].replace(".", "/"), "--quantize", scheme)
        assert found == whole.contiguous().view(torch.uint8).numpy().tobytes(), suffix
    export = export_hf(source, tmp_path / "export", "--layout", "hf", "--quantize", scheme)
    decoded = load(cat(export, "hf/model.safetensors", "--layout", "hf", "--dequantize=f32"))
    step = {"fp8-block": 1 / 16, "nvfp4": 1 / 5, "int4-g32": 1 / 14}[scheme]
    for name, weight in plain.items():
        error, greatest = (decoded[name].float() - weight.float()).abs().max(), weight.float().abs().max()
        assert error <= step * greatest, f"{name}: {error}, greatest {greatest}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_in_one_tensor_are_quantized_by_blocks_or_refused_by_name(tmp_path, scheme):
    source = tmp_path / "source"
    plain = expert_repo(source, stacked=True)
    names = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    args = ("--layout", "hf", "--quantize", scheme)
    if not scheme.startswith("fp8-block"):
        refused = run("plan", source, *args, expect=1).err
        assert all(name in refused for name in names) and "expected fp8-block" in refused, refused
        # Left as they are by the user's word.
        args += ("--quantize-ignore", "*.experts.*")
        found = load(cat(source, "hf/model.safetensors", *args))
        assert all(torch.equal(found[name], plain[name]) for name in names)
        config = json.loads(cat(source, "hf/config.json", *args))["quantization_config"]
        assert set(names) <= set(config.get("modules_to_not_convert", config.get("ignore")))
        return
    found = load(cat(source, "hf/model.safetensors", *args))
    for name in names:
        single = [oracles.stored(scheme, weight.float(), []) for weight in plain[name]]
        for suffix in ("", "_scale_inv"):
            same(found[f"{name}{suffix}"], torch.stack([parts[suffix] for parts in single]), f"{name}{suffix}")
    assert "no difference" in run("verify", source, *args).out
    warned = run("plan", source, *args).err
    assert "model.layers.0.mlp.experts." in warned and "transformers 5.24 reports the scales as unexpected" in warned, warned


# --- sources that are quantized -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["fp8-block", "fp8-block:ue8m0", "mxfp4", "int4-g32"])
@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp8:sglang", "nvfp4", "fp8-channel"])
def test_a_quantized_source_is_decoded_to_f32_and_quantized(repo, tmp_path, first, scheme):
    once = export_hf(repo(torch.float32), tmp_path / "once", "--layout", "hf", "--quantize", first)
    plain = load(cat(once, "hf/model.safetensors", "--layout", "hf", "--dequantize=f32"))
    wanted, _ = expected(scheme, plain)
    if first == "fp8-block:ue8m0" and scheme.startswith("mxfp8"):
        # Codes stay, as a test of their own says.
        stored = load_file(once / "model.safetensors")
        for name in [name for name in wanted if f"{name}_scale_inv" in stored]:
            suffix = "_scale_inv" if scheme.endswith("sglang") else "_scale"
            exponents = repeated_exponents(stored[name], stored[f"{name}_scale_inv"])
            wanted |= {name: stored[name], f"{name}{suffix}": exponents} if f"{name}{suffix}" in wanted else {}
    found = load(cat(once, "hf/model.safetensors", "--layout", "hf", "--quantize", scheme))
    for name, tensor in wanted.items():
        if "_proj" in name and not name.endswith("bias"):
            same(found[name], tensor, f"{first} -> {scheme} {name}")


@pytest.mark.parametrize("name", quantized_repos.BUILDERS)
def test_every_scheme_is_decoded_to_f32_and_quantized(tmp_path, name):
    """Whether a decoder has its rows transposed, sorted or cut, no value is rounded to the model's own dtype on the way."""
    source = quantized_repos.BUILDERS[name](tmp_path / "source", "calm").repo.path
    out = {}
    for key, of, args in (
        ("decoded", source, ["--dequantize=f32"]),
        ("twice", tmp_path / "decoded" / "hf", ["--quantize", "fp8-block"]),
        ("once", source, ["--quantize", "fp8-block"]),
    ):
        run("export", of, tmp_path / key, "--layout", "hf", "--only", "hf", *args)
        files = sorted((tmp_path / key / "hf").glob("*.safetensors"))
        out[key] = {name: tensor for file in files for name, tensor in load_file(file).items()}
    codes = [name for name, tensor in out["twice"].items() if tensor.dtype == torch.float8_e4m3fn]
    assert codes and out["once"].keys() == out["twice"].keys()
    for name in codes:
        for found in (name, f"{name}_scale_inv"):
            same(out["once"][found], out["twice"][found], found)


def repeated_exponents(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The exponent of each group of 32: that of the block of 128 x 128 that it is in."""
    exponent = (scale.view(torch.int32) >> 23).to(torch.uint8)
    assert torch.equal(torch.exp2(exponent.float() - 127), scale)
    rows, columns = codes.shape
    return exponent.repeat_interleave(128, dim=0).repeat_interleave(4, dim=1)[:rows, : columns // 32]


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp8:sglang"])
def test_blocks_with_powers_of_two_keep_their_codes_as_mxfp8_and_repeat_exponents(models, tmp_path, scheme):
    once = export_hf(models["llama"], tmp_path / "once", "--layout", "hf", "--quantize", "fp8-block:ue8m0")
    twice = export_hf(once, tmp_path / "twice", "--layout", "hf", "--quantize", scheme)
    before, after = load_file(once / "model.safetensors"), load_file(twice / "model.safetensors")
    suffix = "_scale_inv" if scheme.endswith("sglang") else "_scale"
    coded = [name for name, tensor in before.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(coded) == 14
    for name in coded:
        same(after[name], before[name], name)
        same(after[f"{name}{suffix}"], repeated_exponents(before[name], before[f"{name}_scale_inv"]), name)
    assert "no difference" in run("verify", once, "--layout", "hf", "--quantize", scheme).out
    text = run("explain", once, f"full/{coded[0]}", "--layout", "hf", "--quantize", scheme).out
    assert "else stored codes and exponents" in text, text
    # Not so if the configuration does not say that scales are powers of two: then as every other source.
    config = json.loads((once / "config.json").read_text())
    del config["quantization_config"]["scale_fmt"]
    (once / "config.json").write_text(json.dumps(config))
    anew = load(cat(once, "hf/model.safetensors", "--layout", "hf", "--quantize", scheme))
    assert any(not torch.equal(anew[name].view(torch.uint8), before[name].view(torch.uint8)) for name in coded)
    assert "stored codes" not in run("explain", once, f"full/{coded[0]}", "--layout", "hf", "--quantize", scheme).out


# --- programs that load it ------------------------------------------------------------------------------------------------

LOADED = [scheme for scheme in SCHEMES if scheme not in ("nvfp4:modelopt", "int4")]
"""Schemes that transformers loads. Rows of the small models are no multiple of 128."""


@pytest.fixture(scope="module")
def models(base: Path):
    """Small models of several families, saved by transformers in bf16."""
    import transformers

    def save(name: str, config: object) -> Path:
        torch.manual_seed(0)
        path = base / "quantize-models" / name
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        return path

    small = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 416, "head_dim": 32, **small}
    experts = {"moe_intermediate_size": 96, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    return {
        "llama": save("llama", transformers.LlamaConfig(**more)),
        "qwen3": save("qwen3", transformers.Qwen3Config(**more)),
        "gemma2": save("gemma2", transformers.Gemma2Config(**more)),
        "olmo2": save("olmo2", transformers.Olmo2Config(**{k: v for k, v in more.items() if k != "head_dim"})),
        "mistral": save("mistral", transformers.MistralConfig(**more)),
        "qwen3_moe": save("qwen3_moe", transformers.Qwen3MoeConfig(**more, **experts, num_experts=4, mlp_only_layers=[0])),
        "mixtral": save("mixtral", transformers.MixtralConfig(**more, num_experts_per_tok=2, num_local_experts=4)),
    }


MIXTURES = ["qwen3_moe", "mixtral"]
"""Families of mixtures of experts. They store single experts, which transformers puts together when it loads."""


def export_hf(source: Path, target: Path, *args: object) -> Path:
    """`hf/` of a mount of one file of weights."""
    target.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes(cat(source, f"hf/{name}", *args))
    return target


def logits(path: Path, config: dict) -> torch.Tensor:
    import transformers

    more = {}
    if config.get("quantization_config", {}).get("quant_method") == "compressed-tensors":
        more["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more)
    with torch.no_grad():
        return model(torch.arange(1, 17)[None]).logits


def library_repo(source: Path, target: Path, scheme: str) -> Path:
    """The repository that the library of a scheme makes of one in bf16: its tensors, and its `quantization_config` where it has one."""
    plain = load_file(source / "model.safetensors")
    wanted, quantized = expected(scheme, plain)
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in wanted.items()}, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    modules = (name.removesuffix(".weight") for name, tensor in plain.items() if tensor.dim() == 2)
    left = sorted({module for module in modules if module not in quantized} | {"lm_head"})
    own = json.loads(cat(source, "hf/config.json", "--layout", "hf", "--quantize", scheme))["quantization_config"]
    config["quantization_config"] = oracles.config(scheme, left) or own
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2", "mistral", *MIXTURES])
@pytest.mark.parametrize("scheme", LOADED)
def test_transformers_loads_the_values_that_the_library_decodes(models, tmp_path, scheme, family):
    """The logits are those of the library's own repository, and near those of the weights that ckfs decodes from its own codes."""
    source = models[family]
    exported = export_hf(source, tmp_path / "quantized", "--layout", "hf", "--quantize", scheme)
    library = library_repo(source, tmp_path / "library", scheme)
    config, theirs = (json.loads((path / "config.json").read_text()) for path in (exported, library))
    assert config["quantization_config"]
    if scheme == "mxfp8" and family in MIXTURES:
        # transformers 5.24 does not decode single experts with exponents, from whatever program they are.
        for path, told in ((exported, config), (library, theirs)):
            with pytest.raises(RuntimeError, match="conversion"):
                logits(path, told)
        return
    found = logits(exported, config)
    assert torch.equal(found, logits(library, theirs)), f"{scheme} {family}"
    if scheme == "nvfp4" and family in MIXTURES:
        # transformers 5.24 leaves out `weight_global_scale` where it puts experts together: the logits of both mean nothing.
        return
    # transformers decodes fp8 to bf16, whatever dtype is asked for.
    decoded = export_hf(exported, tmp_path / "decoded", "--layout", "hf", "--dequantize=f32")
    expected_logits = logits(decoded, {})
    error = (found - expected_logits).abs().max() / expected_logits.abs().max()
    most = 0.2 if config["quantization_config"]["quant_method"] in ("fp8", "mxfp8") else 0.03
    assert error < most, f"{scheme} {family}: {error}"
    plain = logits(source, {})
    bound = {"mxfp4": 0.9, "nvfp4": 0.7, "int4-g32": 0.7}.get(scheme, 0.3)
    # Another expert for one token changes its logits altogether.
    assert family in MIXTURES or (found - plain).abs().max() / plain.abs().max() < bound


# --- what engines allocate -------------------------------------------------------------------------------------------------

ENGINES = json.loads((Path(__file__).parent / "engine_parameters.json").read_text())
"""By engine, kind of layer and scheme: the parameters that the engine registers, with dtypes and shapes (`engine_parameters.py`)."""

FUSED = {"self_attn.qkv_proj": ["q_proj", "k_proj", "v_proj"], "mlp.gate_up_proj": ["gate_proj", "up_proj"]}


def engine_weights() -> dict[str, torch.Tensor]:
    """A dense layer and one of experts, in the sizes of the table."""
    made = {"model.embed_tokens.weight": matrix((64, engines.HIDDEN), 1, torch.bfloat16)}
    for module, (inputs, outputs) in engines.LINEAR.items():
        parent, last = module.split(".")
        for number, (word, rows) in enumerate(zip(FUSED.get(module, [last]), outputs, strict=True)):
            made[f"model.layers.0.{parent}.{word}.weight"] = matrix((rows, inputs), 10 + number, torch.bfloat16)
    shapes = {"gate_proj": (engines.EXPERT_INTER, engines.HIDDEN), "down_proj": (engines.HIDDEN, engines.EXPERT_INTER)}
    for expert in range(engines.EXPERTS):
        for number, word in enumerate(("gate_proj", "up_proj", "down_proj")):
            weight = matrix(shapes.get(word, shapes["gate_proj"]), 100 * expert + number, torch.bfloat16)
            made[f"model.layers.1.mlp.experts.{expert}.{word}.weight"] = weight
    return made


def fits(parts: list[torch.Tensor], shape: list[int]) -> bool:
    """Whether a parameter of this shape has room for the tensors of matrices that are fused, and no more."""
    if all(part.numel() == 1 for part in parts):
        # Of one matrix an engine has one number.
        return math.prod(shape) == len(parts)
    return list(torch.cat(parts).shape) == shape


@pytest.mark.parametrize(("engine", "kind", "scheme"), [(e, k, s) for e, kinds in ENGINES.items() for k, all_of in kinds.items() for s in all_of])
def test_engines_register_what_hf_has(tmp_path, engine, kind, scheme):
    """Names, dtypes and shapes of `hf/` are those of the parameters into which the engine's loader copies tensors, none more or less."""
    save_file(engine_weights(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "made-up", "num_hidden_layers": 2}')
    found = load(cat(tmp_path, "hf/model.safetensors", "--quantize", scheme))
    table, taken = ENGINES[engine][kind][scheme], set()

    def check(names: list[str], parameter: str, dtype: str, shape: list[int]) -> None:
        assert found.keys() >= set(names), f"{engine} registers {parameter}, for which hf/ lacks {set(names) - found.keys()}"
        parts = [found[name] for name in names]
        taken.update(names)
        assert {str(part.dtype) for part in parts} == {f"torch.{dtype}"}, f"{names[0]}: {parts[0].dtype}, {engine} has {dtype}"
        if parameter != "weight_shape":
            assert fits(parts, shape), f"{names}: {[list(part.shape) for part in parts]}, {engine} has {shape}"

    def is_of_activations(parameter: str) -> bool:
        # Registered for repositories of other programs, and dropped: the configuration says that weights alone are quantized.
        return scheme.startswith("nvfp4") and "input_" in parameter

    if kind == "linear":
        for module, parameters in table.items():
            parent, last = module.split(".")
            for parameter, (dtype, shape) in parameters.items():
                if not is_of_activations(parameter):
                    names = [f"model.layers.0.{parent}.{word}.{parameter}" for word in FUSED.get(module, [last])]
                    check(names, parameter, dtype, shape)
    else:
        for parameter, (dtype, shape) in table.items():
            which, _, rest = parameter.partition("_")
            words = {"w13": ["gate_proj", "up_proj"], "w2": ["down_proj"]}[which]
            for expert in range(engines.EXPERTS):
                if not is_of_activations(parameter):
                    check([f"model.layers.1.mlp.experts.{expert}.{word}.{rest}" for word in words], rest, dtype, shape[1:] or [1])
    layer = "model.layers.0." if kind == "linear" else "model.layers.1."
    assert taken == {name for name in found if name.startswith(layer)}
    if scheme.startswith("nvfp4"):
        config = json.loads(cat(tmp_path, "hf/config.json", "--quantize", scheme))["quantization_config"]
        groups = config.get("config_groups", {"all": {}}).values()
        assert config.get("quant_algo", "W4A16_NVFP4") == "W4A16_NVFP4"
        assert not any(group.get("input_activations") for group in groups)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_quantized_is_decoded_again_within_half_a_step(models, tmp_path, scheme):
    source = models["llama"]
    exported = export_hf(source, tmp_path / "quantized", "--layout", "hf", "--quantize", scheme)
    if scheme == "nvfp4:modelopt":
        (exported / "hf_quant_config.json").write_bytes(
            cat(source, "hf/hf_quant_config.json", "--layout", "hf", "--quantize", scheme)
        )
    plain = load_file(source / "model.safetensors")
    found = load(cat(exported, "hf/model.safetensors", "--layout", "hf", "--dequantize=f32"))
    assert found.keys() == plain.keys()
    # Half a step of the greatest code: of E4M3 16 of 448, of E2M1 1 of 6, of integers half of 7.5 or 127.5.
    step = {"mxfp4": 1 / 3, "nvfp4": 1 / 5, "nvfp4:modelopt": 1 / 5, "int8-channel": 1 / 250, "int4": 1 / 14, "int4-g32": 1 / 14}
    for name, weight in plain.items():
        error = (found[name].float() - weight.float()).abs().max() / weight.float().abs().max()
        assert error <= step.get(scheme, 1 / 16), f"{scheme} {name}: {error}"


@pytest.mark.parametrize("scheme", ["fp8-block", "mxfp4", "nvfp4", "int4-g32", "fp8-tensor"])
def test_shards_are_slices_of_the_whole(models, scheme):
    source, name = models["llama"], "model.layers.1.mlp.down_proj.weight"
    args = ("--layout", "hf", "--quantize", scheme)
    suffixes = {"fp8-block": ["", "_scale_inv"], "fp8-tensor": ["", "_scale"], "nvfp4": ["_packed", "_scale", "_global_scale"]}
    parts = [f"{name}{suffix}" for suffix in suffixes.get(scheme, ["_packed", "_scale"])]
    for part in parts:
        whole = cat(source, f"full/{part}", *args)
        shards = [cat(source, f"dev{device}/{part}", *args, "--mesh", "fsdp=1,data=2", "--replicate", "data") for device in range(2)]
        assert shards == [whole, whole]
    gate = "model.layers.1.mlp.up_proj.weight"
    mesh = ("--mesh", "fsdp=2")
    if scheme == "fp8-block":
        # 416 rows in two parts are 208: inside a block.
        refused = run("plan", source, *args, *mesh, expect=1)
        assert f"{gate.replace('.1.', '.{0-1}.')} (2 tensors): axis 0" in refused.err and "inside a block of 128" in refused.err
        assert run("plan", source, *args, *mesh, "--even").code == 0
        return
    codes = gate if scheme == "fp8-tensor" else f"{gate}_packed"
    whole = cat(source, f"full/{codes}", *args)
    assert b"".join(cat(source, f"dev{device}/{codes}", *args, *mesh) for device in range(2)) == whole


@pytest.mark.parametrize("scheme", ["fp8-block", "mxfp8", "nvfp4", "int4-g32"])
def test_verify_and_explain(models, scheme):
    args = (models["mistral"], "--layout", "hf", "--quantize", scheme)
    assert "no difference" in run("verify", *args).out
    scale = "model.layers.0.mlp.up_proj.weight_scale" + ("_inv" if "block" in scheme or "sglang" in scheme else "")
    text = run("explain", models["mistral"], f"full/{scale}", *args[1:]).out
    assert "of weights are read" in text, text


def test_what_stays_is_said_and_chosen_by_patterns(models):
    source = models["llama"]
    args = ("--layout", "hf", "--quantize", "fp8-block", "--quantize-ignore", "model.layers.{0-0}.*", "--quantize-only", "*.mlp.*")
    config = json.loads(cat(source, "hf/config.json", *args))["quantization_config"]
    left = config["modules_to_not_convert"]
    assert "lm_head" in left and "model.layers.0.mlp.up_proj" in left and "model.layers.1.self_attn.q_proj" in left
    assert "model.layers.1.mlp.up_proj" not in left
    found = load(cat(source, "hf/model.safetensors", *args))
    coded = {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    assert coded == {f"model.layers.1.mlp.{word}_proj.weight" for word in ("gate", "up", "down")}
    assert "cannot" not in run("plan", "-v", source, "--quantize", "fp8-block", "--check-values").out
    refused = {"maxtext": "expected the layout canonical, hf or stored", "vllm": "expected the layout hf, from which vLLM and SGLang load any scheme"}
    for layout, reason in refused.items():
        assert reason in run("plan", source, "--layout", layout, "--quantize", "fp8-block", expect=1).err
