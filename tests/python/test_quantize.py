"""Quantized on read: codes and scales are bit for bit those of the libraries, and `hf/` is what they load."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

import quantize_oracles as oracles
from mounting import find_ckfs, run

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

GROUPS = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
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
        is_linear = last.endswith("_proj") and name.endswith(".weight")
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
