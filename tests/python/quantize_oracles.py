"""What libraries make of a matrix when they quantize it: the stored tensors by what follows the weight's name.

compressed-tensors computes in the dtype of the weight, so that it is given float32 here. torch stands for DeepSeek's formula and for
that of sglang's converter; torchao and ModelOpt's own functions are second opinions where they have the same format.
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

Stored = dict[str, torch.Tensor]

FP8_MAX = 448.0
"""Greatest number of E4M3."""

PRESETS = {
    "fp8-channel": ("FP8_DYNAMIC", "float-quantized"),
    "fp8-tensor": ("FP8", "float-quantized"),
    "mxfp8": ("MXFP8A16", "mxfp8-quantized"),
    "mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"),
    "nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
}
"""compressed-tensors' name of a scheme, and of its format."""


def deepseek(weight: torch.Tensor, power_of_two: bool) -> Stored:
    """Blocks of 128 x 128, as DeepSeek's and slime's converters make them; a block of zeros has the scale 1."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX
    if power_of_two:
        bits = scale.view(torch.int32)
        exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
        scale = torch.where(scale == 0, scale, (exponent.clamp(1, 254) << 23).view(torch.float32))
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"": codes.view(padded.shape)[:rows, :columns].contiguous(), "_scale_inv": scale[:, 0, :, 0].contiguous()}


def sglang(weight: torch.Tensor) -> Stored:
    """The exponent of a group of 32 is that of the greatest magnitude over 448, rounded up (`downcast_to_mxfp`)."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // 32, 32)
    bits = (groups.abs().amax(dim=2) / FP8_MAX).view(torch.int32)
    exponent = (bits + 0x7FFFFF) >> 23
    scale = (exponent << 23).view(torch.float32)
    factor = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    codes = (groups * factor[:, :, None]).to(torch.float8_e4m3fn).view(rows, columns)
    return {"": codes, "_scale_inv": exponent.to(torch.uint8)}


def factor(weights: list[torch.Tensor]) -> torch.Tensor:
    """The factor of matrices that engines fuse: the least of all."""
    return torch.stack([generate_gparam(weight.min(), weight.max()) for weight in weights]).amin(dim=0)


def preset(scheme: str) -> tuple[QuantizationScheme, str]:
    """compressed-tensors' own description of a scheme, and its format."""
    if not scheme.startswith("int"):
        name, form = PRESETS[scheme]
        return preset_name_to_scheme(name, ["Linear"]), form
    group = int(scheme.split("-g")[1]) if "-g" in scheme else 128
    bits, strategy = (8, "channel") if scheme == "int8-channel" else (4, "group")
    args = QuantizationArgs(
        num_bits=bits,
        type="int",
        strategy=strategy,
        group_size=group if bits == 4 else None,
        symmetric=True,
        scale_dtype=torch.bfloat16,
    )
    return QuantizationScheme(targets=["Linear"], weights=args), "pack-quantized"


def config(scheme: str, left: list[str]) -> dict | None:
    """The `quantization_config` that the library writes, if it writes one."""
    if scheme == "fp8-block":
        from transformers import FineGrainedFP8Config

        return FineGrainedFP8Config(weight_block_size=(128, 128), modules_to_not_convert=left).to_dict()
    if scheme not in PRESETS and not scheme.startswith("int"):
        return None
    how, form = preset(scheme)
    groups = {"config_groups": {"group_0": how}, "format": form, "quantization_status": "compressed", "ignore": left}
    return QuantizationConfig(**groups).model_dump(mode="json")


def compressed(scheme: str, weight: torch.Tensor, together: list[torch.Tensor]) -> Stored:
    """By compressed-tensors, on float32."""
    how, form = preset(scheme)
    args = how.weights
    if args.group_size:
        grouped = weight.unflatten(-1, (-1, args.group_size))
        low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    elif args.strategy == "channel":
        low, high = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
    else:
        low, high = (torch.stack([edge(one) for one in together]).flatten() for edge in (torch.min, torch.max))
        low, high = low.amin().reshape(1), high.amax().reshape(1)
    shared = factor(together) if scheme == "nvfp4" else None
    scale, _ = calculate_qparams(low, high, args, global_scale=shared)
    if scheme.startswith("int"):
        scale = scale.to(torch.bfloat16)
    state = {"weight": weight, "weight_scale": scale}
    if shared is not None:
        state["weight_global_scale"] = shared
    made = BaseCompressor.get_value_from_registry(form).compress(state, how)
    return {name.removeprefix("weight"): tensor for name, tensor in made.items()}


def modelopt(weight: torch.Tensor, together: list[torch.Tensor]) -> Stored:
    """By the formulas of ModelOpt 0.47 (`NVFP4QTensor`), whose package is no part of these tests: run once beside them, 16 million
    elements of `weights` in test_quantize.py, none differed."""
    second = torch.stack([one.abs().amax() for one in together]).amax() / (6.0 * FP8_MAX)
    groups = weight.view(weight.shape[0], -1, 16)
    scale = groups.abs().amax(dim=-1) / (6.0 * second)
    scale[scale == 0] = 1.0
    scale = scale.clamp(min=2**-9, max=FP8_MAX).to(torch.float8_e4m3fn)
    scaled = (groups / (scale.to(torch.float32) * second)[..., None]).view(weight.shape)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    sign, size = (scaled < 0).to(torch.uint8), scaled.abs()
    code = torch.searchsorted(bounds, size, out_int32=True).to(torch.uint8)
    code += (size[..., None] == bounds[[1, 3, 5]]).any(dim=-1).to(torch.uint8) + (sign << 3)
    return {"": (code[..., 1::2] << 4) | code[..., 0::2], "_scale": scale, "_scale_2": second}


def stored(scheme: str, weight: torch.Tensor, together: list[torch.Tensor]) -> Stored:
    """The stored tensors of a matrix, of float32. `together` are the matrices with which it shares a factor."""
    if scheme.startswith("fp8-block"):
        return deepseek(weight, scheme.endswith(":ue8m0"))
    if scheme == "mxfp8:sglang":
        return sglang(weight)
    if scheme == "nvfp4:modelopt":
        return modelopt(weight, together)
    return compressed(scheme, weight, together)
