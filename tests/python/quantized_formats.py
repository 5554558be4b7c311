"""The stored form of a matrix in each quantization scheme, and its decoded values: numpy only, written from the formats' definitions.

A scheme draws the stored tensors ("parts", by the end of their names) of one matrix `[out, in]`, and decodes parts to
float32. Every product, quotient, sum and difference is one float32 operation, rounded once, in the order written here;
the caller rounds the result once more to the type that it needs. This file never divides a shape to find a block.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from repos import NUMPY, Tensor

Parts = dict[str, Tensor]


def decoding(function: Callable) -> Callable:
    """Overflow to infinity and NaN are valid values here."""

    def silent(*args: object) -> np.ndarray:
        with np.errstate(all="ignore"):
            found = function(*args)
        assert found.dtype == np.float32
        return found

    return silent


def over(count: int, size: int) -> int:
    """Groups of `size` that cover `count`."""
    return -(-count // size)


# --- random bytes and scales -------------------------------------------------------------------------------------------

# Zeros, subnormals, the powers of two at the edges of the range, and ordinary ones.
SOUND_SCALES = [0.0, -0.0, 1e-45, -1e-40, 2.0**127, -(2.0**127), 2.0**-126, 2.0**-127, 1.0, -3.5]


class Noise:
    """Deterministic bytes: only PCG64's raw stream is used, which numpy promises not to change.

    `kind` says which scales are drawn: with "calm" ones a model's logits are numbers; "sound" ones have all the
    extremes except NaN and infinity; "wild" ones have those too.
    """

    def __init__(self, seed: str, kind: str = "wild") -> None:
        assert kind in ("calm", "sound", "wild")
        self.stream = np.random.PCG64(zlib.crc32(seed.encode()))
        self.kind = kind

    def bytes(self, *shape: int) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        raw = np.asarray(self.stream.random_raw(over(count, 8)), "<u8").reshape(-1).view(np.uint8)
        return raw[:count].reshape(shape).copy()

    def words(self, *shape: int) -> np.ndarray:
        return self.bytes(int(np.prod(shape, dtype=np.int64)) * 4).view("<u4").reshape(shape)

    def below(self, limit: int, *shape: int) -> np.ndarray:
        return (self.words(*shape) % np.uint32(limit)).astype(np.int64)

    def codes(self, code: str, *shape: int) -> Tensor:
        """Codes of one byte or one word each, all bit patterns; calm floats have no NaN."""
        if code in ("I32", "U32"):
            return Tensor(code, shape, self.words(*shape).tobytes())
        raw = self.bytes(*shape)
        if code == "F8_E4M3" and self.kind == "calm":
            raw[raw & 0x7F == 0x7F] = 0x38
        return Tensor(code, shape, raw.tobytes())

    def floats(self, code: str, *shape: int, calm: float = 1.0, positive: bool = False) -> Tensor:
        """Scales: of random mantissa and a few powers of two; `calm` is their magnitude if `kind` is "calm"."""
        random, choice = self.words(*shape), self.bytes(*shape)
        mantissa = (random & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)
        values = mantissa.view(np.float32) * np.float32(calm)
        if self.kind == "calm":
            return Tensor.of(code, values)
        power = (random >> np.uint32(23) & np.uint32(15)).astype(np.int32) - 8
        values = np.ldexp(values, power).astype(np.float32)
        if not positive:
            values = np.where(random >> np.uint32(31), -values, values)
        special = np.array(SOUND_SCALES + ([np.inf, -np.inf, np.nan] if self.kind == "wild" else []), np.float32)
        if code == "F16":
            special = np.concatenate([special, np.array([6e-8, -1e-5, 65504.0, 2.0**-14], np.float32)])
            special = special[(np.abs(special) <= 65504) | ~np.isfinite(special)]
        if self.kind == "sound" and positive:
            special = special[special > 0]
        chosen = special[self.bytes(*shape) % len(special)]
        return Tensor.of(code, np.where(choice % 16 == 0, chosen, values).astype(np.float32))

    def exponents(self, code: str, *shape: int) -> Tensor:
        """Powers of two as bytes, E8M0: 0 is 2^-127, 254 is 2^127, 255 is NaN."""
        raw = self.bytes(*shape)
        if self.kind == "calm":
            raw = 119 + raw % 4
        elif self.kind == "sound":
            raw[raw == 255] = 254
        return Tensor(code, shape, raw.astype(np.uint8).tobytes())

    def small_floats(self, *shape: int) -> Tensor:
        """Scales as F8_E4M3; wild ones have both signs and NaN."""
        raw = self.bytes(*shape)
        if self.kind == "calm":
            raw = 0x28 + raw % 16
        elif self.kind == "sound":
            raw[raw & 0x7F == 0x7F] ^= 1
        return Tensor("F8_E4M3", shape, raw.astype(np.uint8).tobytes())


# --- numbers of few bits -------------------------------------------------------------------------------------------------


def _e2m1(code: int) -> float:
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 128 else magnitude


# Code 8 of E2M1 is -0.0.
E2M1 = np.array([_e2m1(code) for code in range(16)], np.float32)
E4M3 = np.array([_e4m3(code) for code in range(256)], np.float32)
E8M0 = np.array([*(2.0 ** (code - 127) for code in range(255)), float("nan")], np.float32)


def raw(tensor: Tensor) -> np.ndarray:
    """The bytes, the last axis in bytes."""
    width = np.dtype(NUMPY[tensor.code]).itemsize
    shape = (*tensor.shape[:-1], tensor.shape[-1] * width) if tensor.shape else (width,)
    return np.frombuffer(tensor.data, np.uint8).reshape(shape)


def fields(data: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned fields of some bits along the last axis of bytes, low bits first, and across bytes where they do not divide 8."""
    assert data.dtype == np.uint8
    if 8 % bits:
        each = np.unpackbits(data, axis=-1, bitorder="little").reshape(*data.shape[:-1], -1, bits)
        return (each << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (data[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(*data.shape[:-1], -1)


def high_first(data: np.ndarray) -> np.ndarray:
    return np.stack([data >> 4, data & 15], -1).reshape(*data.shape[:-1], -1)


def float32(tensor: Tensor) -> np.ndarray:
    """Scales as float32, exactly; bytes without a float type are exponents."""
    if tensor.code in ("F8_E8M0", "U8"):
        return E8M0[raw(tensor).reshape(tensor.shape)]
    if tensor.code == "F8_E4M3":
        return E4M3[raw(tensor).reshape(tensor.shape)]
    with np.errstate(all="ignore"):
        return tensor.array().astype(np.float32)


def spread(grid: np.ndarray, block: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Each value of the grid over its block, the last blocks cut off."""
    assert grid.shape == tuple(over(extent, size) for extent, size in zip(shape, block)), (grid.shape, block, shape)
    for axis, size in enumerate(block):
        grid = np.repeat(grid, size, axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    return grid


# --- schemes -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scheme:
    """`draw(noise, out, in)` makes the parts; `decode(parts, out, in)` gives float32 `[out, in]`.

    `codes` is the part in whose file the decoded matrix is expected; `dropped` are parts that decoding does not need.
    """

    name: str
    draw: Callable[[Noise, int, int], Parts]
    decode: Callable[[Parts, int, int], np.ndarray]
    codes: str = "weight"
    dropped: tuple[str, ...] = ()


# compressed-tensors, integers


def draw_packed(
    noise: Noise, out: int, inner: int, *, bits: int, group: int | None, zeros: bool, scale: str, shape: str
) -> Parts:
    groups = 1 if group is None else inner // group
    parts = {
        "weight_packed": noise.codes("I32", out, over(inner * bits, 32)),
        "weight_scale": noise.floats(scale, out, groups, calm=2.0**-6),
        "weight_shape": Tensor.of(shape, np.array([out, inner])),
    }
    if zeros:
        parts["weight_zero_point"] = noise.codes("I32", over(out * bits, 32), groups)
    return parts


@decoding
def decode_packed(bits: int, group: int | None, parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = (q - z) * s`; both are stored plus 2^(bits-1). Zero points are packed along the rows."""
    assert parts["weight_shape"].array().tolist() == [out, inner]
    bias = 1 << bits - 1
    q = fields(raw(parts["weight_packed"]), bits)[:, :inner].astype(np.int32) - bias
    if "weight_zero_point" in parts:
        words = parts["weight_zero_point"].array()
        columns = np.ascontiguousarray(words.T).view(np.uint8)
        z = fields(columns, bits)[:, :out].T.astype(np.int32) - bias
        q = q - spread(z, (1, group or inner), (out, inner))
    return q.astype(np.float32) * spread(float32(parts["weight_scale"]), (1, group or inner), (out, inner))


def packed(name: str, bits: int, group: int | None, *, zeros: bool = False, scale: str = "BF16", shape: str = "I64") -> Scheme:
    draw = partial(draw_packed, bits=bits, group=group, zeros=zeros, scale=scale, shape=shape)
    return Scheme(name, draw, partial(decode_packed, bits, group), "weight_packed")


# 8-bit floats


def draw_fp8(
    noise: Noise, out: int, inner: int, *, grid: Callable[[int, int], tuple[int, ...]], name: str, scale: str, more: tuple = ()
) -> Parts:
    shape = grid(out, inner)
    exponents = scale in ("U8", "F8_E8M0")
    parts = {"weight": noise.codes("F8_E4M3", out, inner)}
    parts[name] = noise.exponents(scale, *shape) if exponents else noise.floats(scale, *shape, calm=2.0**-10)
    return parts | {word: Tensor.of("F32", np.full(size, 0.5)) for word, size in more}


@decoding
def decode_fp8(name: str, block: tuple[int, int] | None, parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = q * s`; without a block there is one scale for a row, or for all rows."""
    q, s = E4M3[raw(parts["weight"])], float32(parts[name])
    if block is not None:
        return q * spread(s, block, (out, inner))
    return q * (s.reshape(-1, 1) if s.size == out else s.reshape(1, 1))


def fp8(name: str, kind: str | tuple[int, int], companion: str, scale: str, more: tuple = ()) -> Scheme:
    """`kind`: "scalar" (shape []), "tensor" ([1]), "channel" ([out, 1]) or a block; `more`: scalars that are dropped."""
    block = kind if isinstance(kind, tuple) else None
    grids: dict[object, Callable[[int, int], tuple[int, ...]]] = {
        "scalar": lambda out, inner: (), "tensor": lambda out, inner: (1,), "channel": lambda out, inner: (out, 1),
    }  # fmt: skip
    grid = grids[kind] if block is None else lambda out, inner: (over(out, block[0]), over(inner, block[1]))
    draw = partial(draw_fp8, grid=grid, name=companion, scale=scale, more=more)
    return Scheme(name, draw, partial(decode_fp8, companion, block), dropped=tuple(word for word, _ in more))


# 4-bit floats


def draw_fp4(noise: Noise, out: int, inner: int, *, codes: tuple[str, str], name: str, group: int, scale: str) -> Parts:
    parts = {codes[0]: noise.codes(codes[1], out, inner // 2)}
    shape = (out, over(inner, group))
    return parts | {name: noise.small_floats(*shape) if scale == "F8_E4M3" else noise.exponents(scale, *shape)}


@decoding
def decode_mx(codes: str, name: str, parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = e2m1 * 2^(e - 127)`, 32 elements an exponent."""
    q = E2M1[fields(raw(parts[codes]), 4)]
    return q * spread(float32(parts[name]), (1, 32), (out, inner))


# One scale of a tensor in some ten thousand makes the order of operations visible in bf16: for some pair of a code and a group's
# scale, another order then returns another value. These were searched for: q * (s / g) against q * (s * (1 / g)) and
# (q * s) / g, and q * (s * t) against (q * s) * t and q * (s / (1 / t)).
TELLING_DIVISORS = [5847.07763671875, 28024.30078125, 21900.638671875, 23055.01171875]
TELLING_FACTORS = [2.752031468844507e-05, 4.5091681386111304e-05, 2.9775834264000878e-05]


def draw_nvfp4(noise: Noise, out: int, inner: int) -> Parts:
    parts = draw_fp4(noise, out, inner, codes=("weight_packed", "U8"), name="weight_scale", group=16, scale="F8_E4M3")
    # Large, as written by the library: 2688 / the largest absolute weight.
    divisor = np.float32(173.7 if noise.kind == "calm" else TELLING_DIVISORS[noise.below(len(TELLING_DIVISORS), 1)[0]])
    parts["weight_global_scale"] = Tensor.of("F32", np.array([divisor]))
    return parts | {"input_global_scale": Tensor.of("F32", np.array([448.0]))}


@decoding
def decode_nvfp4(parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = e2m1 * (s / g)`: the quotient first."""
    scale = float32(parts["weight_scale"]) / float32(parts["weight_global_scale"]).reshape(())
    return E2M1[fields(raw(parts["weight_packed"]), 4)] * spread(scale, (1, 16), (out, inner))


def draw_modelopt_nvfp4(noise: Noise, out: int, inner: int) -> Parts:
    parts = draw_fp4(noise, out, inner, codes=("weight", "U8"), name="weight_scale", group=16, scale="F8_E4M3")
    factor = np.float32(0.0057 if noise.kind == "calm" else TELLING_FACTORS[noise.below(len(TELLING_FACTORS), 1)[0]])
    scalars = {"weight_scale_2": factor, "input_scale": np.float32(0.25)}
    return parts | {word: Tensor.of("F32", np.array(value)) for word, value in scalars.items()}


@decoding
def decode_modelopt_nvfp4(parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = e2m1 * (s * s2)`: the scales first."""
    scale = float32(parts["weight_scale"]) * float32(parts["weight_scale_2"])
    return E2M1[fields(raw(parts["weight"]), 4)] * spread(scale, (1, 16), (out, inner))


# gpt-oss: all experts in one tensor


def draw_blocks(noise: Noise, experts: int, out: int, inner: int) -> tuple[Tensor, Tensor]:
    return noise.codes("U8", experts, out, inner // 32, 16), noise.exponents("U8", experts, out, inner // 32)


@decoding
def decode_blocks(blocks: Tensor, scales: Tensor) -> np.ndarray:
    """`[experts, out, in/32, 16]` and `[experts, out, in/32]` give `[experts, in, out]`."""
    values = E2M1[fields(raw(blocks), 4)] * float32(scales)[..., None]
    experts, out, groups, _ = blocks.shape
    return np.ascontiguousarray(values.reshape(experts, out, groups * 32).transpose(0, 2, 1))


# AWQ and GPTQ: stored [in, out]

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def draw_awq(noise: Noise, out: int, inner: int, *, group: int) -> Parts:
    return {
        "qweight": noise.codes("I32", inner, out // 8),
        "qzeros": noise.codes("I32", inner // group, out // 8),
        "scales": noise.floats("F16", inner // group, out, calm=2.0**-6),
    }


def awq_columns(words: Tensor) -> np.ndarray:
    """Nibble k of word c is column 8c + AWQ_ORDER[k]."""
    nibbles = fields(raw(words), 4).reshape(words.shape[0], -1, 8)
    columns = np.empty_like(nibbles)
    columns[:, :, AWQ_ORDER] = nibbles
    return columns.reshape(words.shape[0], -1)


@decoding
def decode_awq(group: int, parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W^T[i, o] = (q - z) * s`."""
    q, z = awq_columns(parts["qweight"]).astype(np.int32), awq_columns(parts["qzeros"]).astype(np.int32)
    block, shape = (group, 1), (inner, out)
    scale = spread(float32(parts["scales"]), block, shape)
    return np.ascontiguousarray(((q - spread(z, block, shape)).astype(np.float32) * scale).T)


def draw_gptq(noise: Noise, out: int, inner: int, *, bits: int, group: int, order: str) -> Parts:
    groups = over(inner, group)
    index = np.arange(inner) // group
    if order == "act":
        index = index[np.argsort(noise.words(inner), kind="stable")]
    parts = {
        "qweight": noise.codes("I32", inner * bits // 32, out),
        "qzeros": noise.codes("I32", groups, out * bits // 32),
        "scales": noise.floats("F16", groups, out, calm=2.0 ** (-2 - bits)),
    }
    return parts | ({} if order == "absent" else {"g_idx": Tensor.of("I32", index)})


@decoding
def decode_gptq(bits: int, group: int, plus: int, parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W^T[i, o] = (q - z) * s[g_idx[i], o]`; version 1 stores z - 1, which wraps within its field."""
    words = np.ascontiguousarray(parts["qweight"].array().T)
    q = fields(words.view(np.uint8), bits)[:, :inner].T.astype(np.int32)
    z = fields(raw(parts["qzeros"]), bits).astype(np.int32) + plus & (1 << bits) - 1
    index = parts["g_idx"].array() if "g_idx" in parts else np.arange(inner) // group
    return np.ascontiguousarray(((q - z[index]).astype(np.float32) * float32(parts["scales"])[index]).T)


def gptq(name: str, bits: int, group: int, version: int = 1, order: str = "plain") -> Scheme:
    """`order`: "plain", "act" (desc_act), or "absent" (no g_idx)."""
    plus = 1 if version == 1 else 0
    return Scheme(
        name, partial(draw_gptq, bits=bits, group=group, order=order), partial(decode_gptq, bits, group, plus), "qweight"
    )


# bitsandbytes

# The values of bitsandbytes' own `get_4bit_type`, as the shortest decimals with the same float32.
NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.0052083335, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25]
FP4 = FP4 + [-value if value else 0.0 for value in FP4]
QUANT_MAPS = {"nf4": np.array(NF4, np.float32), "fp4": np.array(FP4, np.float32)}
NESTED_BLOCK = 256
DTYPE_WORDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def draw_bnb4(noise: Noise, out: int, inner: int, *, kind: str, block: int, nested: bool, dtype: str) -> Parts:
    blocks = over(out * inner, block)
    state: dict[str, object] = {"quant_type": kind, "blocksize": block, "dtype": DTYPE_WORDS[dtype], "shape": [out, inner]}
    parts = {"weight": noise.codes("U8", over(out * inner, 2), 1)}
    if nested:
        parts["weight.absmax"] = noise.codes("U8", blocks)
        parts["weight.nested_absmax"] = noise.floats("F32", over(blocks, NESTED_BLOCK), calm=0.125)
        parts["weight.nested_quant_map"] = noise.floats("F32", 256, calm=0.25)
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.06230171397328377}
    else:
        parts["weight.absmax"] = noise.floats("F32", blocks, calm=0.125)
    parts["weight.quant_map"] = Tensor.of("F32", QUANT_MAPS[kind])
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts | {f"weight.quant_state.bitsandbytes__{kind}": Tensor.of("U8", text)}


@decoding
def decode_bnb4(parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = map[q] * a[i / block]` over the flat tensor, the high nibble first; nested: `a = map2[q2] * a2[k / 256] + offset`."""
    (state,) = (json.loads(tensor.data) for name, tensor in parts.items() if ".quant_state." in name)
    assert state["shape"] == [out, inner]
    count, block = out * inner, state["blocksize"]
    absmax = parts["weight.absmax"]
    if "nested_offset" in state:
        table, outer = float32(parts["weight.nested_quant_map"]), float32(parts["weight.nested_absmax"])
        scaled = table[absmax.array()] * spread(outer, (state["nested_blocksize"],), absmax.shape)
        scale = scaled + np.float32(state["nested_offset"])
    else:
        scale = float32(absmax)
    values = float32(parts["weight.quant_map"])[high_first(raw(parts["weight"]).reshape(-1))][:count]
    return (values * spread(scale, (block,), (count,))).reshape(out, inner)


def bnb4(name: str, kind: str, block: int, nested: bool, dtype: str = "BF16") -> Scheme:
    return Scheme(name, partial(draw_bnb4, kind=kind, block=block, nested=nested, dtype=dtype), decode_bnb4)


def draw_bnb8(noise: Noise, out: int, inner: int) -> Parts:
    parts = {"weight": noise.codes("I8", out, inner), "SCB": noise.floats("F32", out, calm=1.0)}
    return parts | {"weight_format": Tensor.of("U8", np.array(0))}


@decoding
def decode_bnb8(parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = (q * SCB) * (1 / 127)`, two roundings; the factor is the library's decimal."""
    product = parts["weight"].array().astype(np.float32) * float32(parts["SCB"])[:, None]
    return product * np.float32(7.874015718698502e-3)


# MLX


def draw_mlx(noise: Noise, out: int, inner: int, *, bits: int, group: int, mode: str, scale: str) -> Parts:
    parts = {"weight": noise.codes("U32", out, inner * bits // 32)}
    if noise.kind == "calm" and mode == "mxfp8":
        parts["weight"] = Tensor("U32", (out, inner // 4), noise.codes("F8_E4M3", out, inner).data)
    shape = (out, inner // group)
    if mode == "affine":
        parts["scales"] = noise.floats(scale, *shape, calm=2.0 ** (-2 - bits))
        return parts | {"biases": noise.floats(scale, *shape, calm=-(2.0**-4))}
    if mode == "nvfp4":
        return parts | {"scales": Tensor("U8", shape, noise.small_floats(*shape).data)}
    return parts | {"scales": noise.exponents("U8", *shape)}


@decoding
def decode_mlx(bits: int, group: int, mode: str, parts: Parts, out: int, inner: int) -> np.ndarray:
    """Affine: `W = q * s + b`, two roundings. The modes of small floats have no bias; nvfp4's scales are E4M3."""
    q = fields(raw(parts["weight"]), bits)
    block, shape = (1, group), (out, inner)
    if mode == "affine":
        scale, bias = (spread(float32(parts[word]), block, shape) for word in ("scales", "biases"))
        return q.astype(np.float32) * scale + bias
    table = E4M3 if mode == "nvfp4" else E8M0
    scale = spread(table[raw(parts["scales"])], block, shape)
    return (E4M3 if mode == "mxfp8" else E2M1)[q] * scale


def mlx(name: str, bits: int, group: int, mode: str = "affine", scale: str = "BF16") -> Scheme:
    draw = partial(draw_mlx, bits=bits, group=group, mode=mode, scale=scale)
    return Scheme(name, draw, partial(decode_mlx, bits, group, mode))


# torchao


def draw_torchao_float8(noise: Noise, out: int, inner: int) -> Parts:
    return {"_weight_qdata": noise.codes("F8_E4M3", out, inner), "_weight_scale": noise.floats("F32", out, 1, calm=2.0**-10)}


@decoding
def decode_torchao_float8(parts: Parts, out: int, inner: int) -> np.ndarray:
    return E4M3[raw(parts["_weight_qdata"])] * float32(parts["_weight_scale"])


def draw_torchao_int8(noise: Noise, out: int, inner: int) -> Parts:
    return {
        "_weight_qdata": noise.codes("I8", out, inner), "_weight_scale": noise.floats("F32", out, 1, calm=2.0**-10),
        "_weight_zero_point": Tensor.of("I8", np.zeros((out, 1)) if noise.kind == "calm" else noise.codes("I8", out, 1).array()),
    }  # fmt: skip


@decoding
def decode_torchao_int8(parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = (q - z) * s`, one of each per row."""
    q, z = (parts[word].array().astype(np.int32) for word in ("_weight_qdata", "_weight_zero_point"))
    return (q - z).astype(np.float32) * float32(parts["_weight_scale"])


def draw_torchao_int4(noise: Noise, out: int, inner: int, *, group: int) -> Parts:
    shape = (inner // group, out)
    return {
        "_weight_qdata": noise.codes("I8", out, inner // 2), "_weight_scale": noise.floats("BF16", *shape, calm=2.0**-6),
        "_weight_zero_point": noise.floats("BF16", *shape, calm=2.0**-6),
    }  # fmt: skip


@decoding
def decode_torchao_int4(group: int, parts: Parts, out: int, inner: int) -> np.ndarray:
    """`W = q * s + z` of signed nibbles, low first; the zero point is a float; both are stored `[in/group, out]`."""
    q = fields(raw(parts["_weight_qdata"]), 4).astype(np.int32)
    q = np.where(q > 7, q - 16, q).astype(np.float32)
    scale, zero = (spread(float32(parts[word]).T, (1, group), (out, inner)) for word in ("_weight_scale", "_weight_zero_point"))
    return q * scale + zero


_MODELOPT_FP8 = fp8("modelopt-fp8", "scalar", "weight_scale", "F32", (("input_scale", ()),))

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        # compressed-tensors
        packed("pack-int4-group", 4, 32, shape="I32"),
        packed("pack-int4-group-f16", 4, 32, scale="F16"),
        packed("pack-int4-group-zeros", 4, 32, zeros=True),
        packed("pack-int4-channel", 4, None),
        packed("pack-int4-channel-zeros", 4, None, zeros=True),
        packed("pack-int8-group", 8, 32),
        packed("pack-int8-channel", 8, None),
        packed("pack-int8-channel-zeros", 8, None, zeros=True, scale="F16"),
        fp8("ct-fp8-tensor", "tensor", "weight_scale", "F32", (("input_scale", (1,)),)),
        fp8("ct-fp8-channel", "channel", "weight_scale", "BF16"),
        fp8("ct-fp8-channel-f32", "channel", "weight_scale", "F32"),
        fp8("ct-fp8-block", (128, 128), "weight_scale", "BF16"),
        Scheme("ct-nvfp4", draw_nvfp4, decode_nvfp4, "weight_packed", ("input_global_scale",)),
        Scheme("ct-mxfp4", partial(draw_fp4, codes=("weight_packed", "U8"), name="weight_scale", group=32, scale="U8"),
               partial(decode_mx, "weight_packed", "weight_scale"), "weight_packed"),
        fp8("ct-mxfp8", (1, 32), "weight_scale", "U8"),
        # fbgemm and modelopt
        fp8("fbgemm-fp8", "channel", "weight_scale", "F32"),
        _MODELOPT_FP8,
        fp8("modelopt-mxfp8", (1, 32), "weight_scale", "U8"),
        Scheme("modelopt-nvfp4", draw_modelopt_nvfp4, decode_modelopt_nvfp4, dropped=("input_scale",)),
        # fp8 of transformers and DeepSeek
        fp8("fp8-tensor", "scalar", "weight_scale_inv", "F32", (("activation_scale", ()),)),
        fp8("fp8-block", (128, 128), "weight_scale_inv", "F32"),
        fp8("fp8-block-bf16", (128, 128), "weight_scale_inv", "BF16"),
        fp8("fp8-block-ue8m0", (128, 128), "weight_scale_inv", "F8_E8M0"),
        fp8("deepseek-v4-fp8", (128, 128), "scale", "F8_E8M0"),
        fp8("deepseek-v4.1-fp8", (32, 32), "scale", "F8_E8M0"),
        fp8("deepseek-v4.1-engram", (1, 32), "scale", "F8_E8M0"),
        Scheme("deepseek-v4-fp4", partial(draw_fp4, codes=("weight", "I8"), name="scale", group=32, scale="F8_E8M0"),
               partial(decode_mx, "weight", "scale")),
        # AWQ and GPTQ
        Scheme("awq-gemm", partial(draw_awq, group=32), partial(decode_awq, 32), "qweight"),
        gptq("gptq-4-v1", 4, 32),
        gptq("gptq-4-v1-partial", 4, 64),
        gptq("gptq-4-v1-no-index", 4, 32, order="absent"),
        gptq("gptq-4-v2-act", 4, 32, 2, "act"),
        gptq("gptq-8-v1-act", 8, 32, 1, "act"),
        gptq("gptq-8-v2", 8, 32, 2),
        # bitsandbytes
        bnb4("bnb-nf4", "nf4", 64, False),
        bnb4("bnb-nf4-nested", "nf4", 64, True),
        bnb4("bnb-fp4", "fp4", 128, False, "F16"),
        bnb4("bnb-fp4-nested", "fp4", 64, True, "F32"),
        Scheme("bnb-int8", draw_bnb8, decode_bnb8, dropped=("weight_format",)),
        # MLX
        mlx("mlx-affine-2", 2, 32), mlx("mlx-affine-4", 4, 32), mlx("mlx-affine-4-f16", 4, 64, scale="F16"),
        mlx("mlx-affine-4-f32", 4, 32, scale="F32"), mlx("mlx-affine-8", 8, 32),
        mlx("mlx-affine-3", 3, 32, scale="F32"), mlx("mlx-affine-5", 5, 64, scale="F32"), mlx("mlx-affine-6", 6, 32, scale="F32"),
        mlx("mlx-mxfp4", 4, 32, "mxfp4"), mlx("mlx-mxfp8", 8, 32, "mxfp8"), mlx("mlx-nvfp4", 4, 16, "nvfp4"),
        # torchao
        Scheme("torchao-float8", draw_torchao_float8, decode_torchao_float8, "_weight_qdata"),
        Scheme("torchao-int8", draw_torchao_int8, decode_torchao_int8, "_weight_qdata"),
        Scheme("torchao-int4", partial(draw_torchao_int4, group=32), partial(decode_torchao_int4, 32), "_weight_qdata"),
    )
}  # fmt: skip


def rounded(values: np.ndarray, code: str) -> np.ndarray:
    """float32 to the requested type, to nearest, ties to even."""
    with np.errstate(all="ignore"):
        return values if code == "F32" else values.astype(NUMPY[code])


def canonical_bits(values: np.ndarray) -> np.ndarray:
    """The bits as unsigned integers, with all NaNs equal: the processor determines which NaN an operation returns."""
    kinds = {np.dtype(np.float32): (np.uint32, 0x7FC00000), np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7FC0)}
    kinds[np.dtype(np.float16)] = (np.uint16, 0x7E00)
    unsigned, quiet = kinds[values.dtype]
    return np.where(np.isnan(values), unsigned(quiet), np.ascontiguousarray(values).view(unsigned))
