"""The libraries that define the quantization schemes, applied to the same matrices as `quantized_formats`.

    python quantized_oracles.py [scheme ...]      compares, prints, and writes its findings to quantized_oracles.json

needs, beside requirements.txt, without their dependencies: nvidia-modelopt 0.47.0 (with requests, omegaconf,
antlr4-python3-runtime 4.9.3, nvidia-ml-py, pulp), autoawq 0.2.9 and gptqmodel 7.7.0, installed without build isolation and with
BUILD_CUDA_EXT=0 (with a new setuptools, logbar, device-smi, tokenicer, dill, datasets, pyarrow, pandas, xxhash, multiprocess,
random_word, maturin, defuser, PyPcre, pillow), all on the CPU. They have no wheel, or too many dependencies, for every run: the
test compares its digests of inputs and results with those that this program wrote.

Each comparison has at least four million elements, all codes, and scales of 0, -0, subnormal, negative and up to 2^±127;
scales of NaN and infinity are left out, since the libraries disagree on them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

import quantized_formats as formats
from quantized_formats import Noise, Parts, canonical_bits, rounded
from repos import Tensor, safetensors_bytes

RECORD = Path(__file__).with_name("quantized_oracles.json")
# Rows and columns; odd where the scheme permits it, with partial words, blocks and groups.
SIZE = (2048, 2080)
ODD = (2051, 2049)


def torch_of(tensor: Tensor):
    import torch

    kinds = {
        "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "U32": torch.int32, "F16": torch.float16,
        "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    }  # fmt: skip
    return torch.frombuffer(bytearray(tensor.data), dtype=kinds[tensor.code]).reshape(tensor.shape)


def torch_kind(code: str):
    import torch

    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[code]


def numpy_of(tensor) -> np.ndarray:
    import ml_dtypes
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


# --- one function per library: (parts, out, in, code) -> values of that type -------------------------------------------


def compressed_tensors(format: str, strategy: str, bits: int, kind: str, group: int | None = None, **more: object) -> Callable:
    """`decompress` returns the type of the scale; for another type it receives the scale in that type, which must be exact."""

    def run(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        zeros = "weight_zero_point" in parts
        weights = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, group_size=group, symmetric=not zeros, **more)
        state = {name: torch_of(tensor) for name, tensor in parts.items() if name not in ("input_scale", "input_global_scale")}
        if state["weight_scale"].dtype.is_floating_point and state["weight_scale"].element_size() > 1:
            state["weight_scale"] = state["weight_scale"].to(torch_kind(code))
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)
        return numpy_of(BaseCompressor.get_value_from_registry(format).decompress(state, scheme)["weight"])

    return run


def transformers_fp8(companion: str) -> Callable:
    """The library divides shapes to find the block, so the sizes must be multiples of it."""

    def run(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        quantized, scales = torch_of(parts["weight"]), torch_of(parts[companion])
        return numpy_of(Fp8Dequantize(None)._dequantize_one(quantized, scales, torch_kind(code)))

    return run


def transformers_mlx(bits: int, group: int) -> Callable:
    """Returns the type of the scales; for another type it receives them in that type."""

    def run(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
        import torch
        from transformers.integrations.metal_quantization import (
            _affine_dequantize_tensor,
        )

        words, (scales, biases) = torch_of(parts["weight"]), (torch_of(parts[word]) for word in ("scales", "biases"))
        return numpy_of(_affine_dequantize_tensor(words.view(torch.uint32), scales, biases, group, bits).to(torch_kind(code)))

    return run


def mlx(bits: int, group: int, mode: str) -> Callable:
    """On the CPU; affine only with float32 scales, since with others it rounds the product to their type first."""

    def run(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        arrays = {
            word: mx.array(tensor.array() if tensor.code != "BF16" else formats.float32(tensor))
            for word, tensor in parts.items()
        }
        if mode == "affine":
            arrays |= {word: arrays[word].astype(mx.float32) for word in ("scales", "biases")}
        kind = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}[code]
        more = {} if mode == "affine" else {"dtype": kind}
        found = mx.dequantize(arrays["weight"], arrays["scales"], arrays.get("biases"), group, bits, mode, **more)
        assert found.dtype == kind
        if code == "BF16":
            import ml_dtypes

            return np.array(found.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(found)

    return run


def modelopt_fp8(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
    import torch
    from modelopt.torch.quantization.qtensor import FP8QTensor

    tensor = FP8QTensor(torch.Size((out, inner)), torch_kind(code), torch_of(parts["weight"]))
    return numpy_of(tensor.dequantize(torch_kind(code), scale=torch_of(parts["weight_scale"])))


def modelopt_mxfp8(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
    import torch
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    tensor = MXFP8QTensor(torch.Size((out, inner)), torch_kind(code), torch_of(parts["weight"]))
    return numpy_of(tensor.dequantize(torch_kind(code), scale=torch_of(parts["weight_scale"])))


def modelopt_nvfp4(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensor = NVFP4QTensor(torch.Size((out, inner)), torch_kind(code), torch_of(parts["weight"]))
    scales = {"scale": torch_of(parts["weight_scale"]), "double_scale": torch_of(parts["weight_scale_2"])}
    return numpy_of(tensor.dequantize(torch_kind(code), block_sizes={-1: 16}, **scales))


def transformers_gpt_oss(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    found = _convert_moe_packed_tensors(torch_of(parts["blocks"]), torch_of(parts["scales"]), dtype=torch_kind(code))
    return numpy_of(found).reshape(-1, out).T


def autoawq(group: int) -> Callable:
    """Returns the type of the scales. The package cannot be imported without its dependencies; this file of it can."""

    @cache
    def module() -> types.ModuleType:
        (home,) = importlib.util.find_spec("awq").submodule_search_locations or []
        spec = importlib.util.spec_from_file_location("awq_packing", Path(home) / "utils/packing_utils.py")
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    def run(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
        scales = torch_of(parts["scales"]).to(torch_kind(code))
        found = module().dequantize_gemm(torch_of(parts["qweight"]), torch_of(parts["qzeros"]), scales, 4, group)
        return numpy_of(found.T)

    return run


def gptqmodel(bits: int, version: int) -> Callable:
    """Through a file, in the way of a whole repository's conversion."""

    def run(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
        from gptqmodel.utils.model_dequant import convert_gptq_file

        config = {"bits": bits, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "model.safetensors"
            file.write_bytes(safetensors_bytes({f"x.{name}": tensor for name, tensor in parts.items()}))
            return numpy_of(convert_gptq_file(file, torch_kind(code), config, "cpu")["x.weight"])

    return run


def bitsandbytes_4bit(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
    """The generic kernel, and no other: see the note on the AVX-512 one in quantized_oracles.json."""
    from bitsandbytes.backends.default import ops

    (state,) = (json.loads(tensor.data) for name, tensor in parts.items() if ".quant_state." in name)
    absmax = torch_of(parts["weight.absmax"])
    if "nested_offset" in state:
        import torch

        outer, table = torch_of(parts["weight.nested_absmax"]), torch_of(parts["weight.nested_quant_map"])
        absmax = ops._dequantize_blockwise_compute(absmax, outer, table, state["nested_blocksize"], torch.float32)
        absmax = absmax + torch.tensor(state["nested_offset"])
    codes, table = torch_of(parts["weight"]).reshape(-1), torch_of(parts["weight.quant_map"])
    found = ops._dequantize_4bit_compute(codes, absmax, table, state["blocksize"], (out, inner), torch_kind(code))
    return numpy_of(found)


def bitsandbytes_int8(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
    from bitsandbytes import functional

    found = functional.int8_vectorwise_dequant(torch_of(parts["weight"]), torch_of(parts["SCB"]))
    return numpy_of(found.to(torch_kind(code)))


def torchao(kind: str) -> Callable:
    def run(parts: Parts, out: int, inner: int, code: str) -> np.ndarray:
        from torchao.quantization import Float8Tensor, Int8Tensor

        tensors = {name.removeprefix("_weight_"): torch_of(tensor) for name, tensor in parts.items()}
        made = (Float8Tensor if kind == "float8" else Int8Tensor)(**tensors, block_size=[1, inner], dtype=torch_kind(code))
        return numpy_of(made.dequantize(torch_kind(code)))

    return run


# --- the libraries for each scheme ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Oracle:
    """`codes`: the types that it was run with. `zeros`: whether it loses the sign of zero."""

    package: str
    run: Callable[[Parts, int, int, str], np.ndarray]
    codes: tuple[str, ...] = ("F32", "BF16")
    size: tuple[int, int] = SIZE
    zeros: bool = False
    note: str = ""


CT, HF = "compressed-tensors", "transformers"
BNB_NOTE = "the generic kernel; the AVX-512 one reads the wrong absmax where columns are no multiple of the blocksize"
ORACLES: dict[str, tuple[Oracle, ...]] = {
    # Here the experts are rows of one matrix, one below the other, and `in` counts the columns of all.
    "gpt-oss-mxfp4": (Oracle(HF, transformers_gpt_oss, ("F32", "BF16", "F16"), (1024, 4 * 1056)),),
    "pack-int4-group": (Oracle(CT, compressed_tensors("pack-quantized", "group", 4, "int", 32)),),
    "pack-int4-group-f16": (Oracle(CT, compressed_tensors("pack-quantized", "group", 4, "int", 32), ("F32", "F16")),),
    "pack-int4-group-zeros": (Oracle(CT, compressed_tensors("pack-quantized", "group", 4, "int", 32)),),
    "pack-int4-channel": (Oracle(CT, compressed_tensors("pack-quantized", "channel", 4, "int"), size=ODD),),
    "pack-int4-channel-zeros": (Oracle(CT, compressed_tensors("pack-quantized", "channel", 4, "int"), size=ODD),),
    "pack-int8-group": (Oracle(CT, compressed_tensors("pack-quantized", "group", 8, "int", 32)),),
    "pack-int8-channel": (Oracle(CT, compressed_tensors("pack-quantized", "channel", 8, "int"), size=ODD),),
    "pack-int8-channel-zeros": (Oracle(CT, compressed_tensors("pack-quantized", "channel", 8, "int"), ("F32", "F16"), ODD),),
    "ct-fp8-tensor": (Oracle(CT, compressed_tensors("float-quantized", "tensor", 8, "float"), ("F32",), ODD),),
    "ct-fp8-channel": (Oracle(CT, compressed_tensors("float-quantized", "channel", 8, "float"), size=ODD),),
    "ct-fp8-channel-f32": (Oracle(CT, compressed_tensors("float-quantized", "channel", 8, "float"), ("F32",), ODD),),
    "ct-fp8-block": (Oracle(CT, compressed_tensors("float-quantized", "block", 8, "float", block_structure=[128, 128]), size=ODD),),
    "ct-nvfp4": (Oracle(CT, compressed_tensors("nvfp4-pack-quantized", "tensor_group", 4, "float", 16), ("BF16",)),),
    "ct-mxfp4": (Oracle(CT, compressed_tensors("mxfp4-pack-quantized", "group", 4, "float", 32), ("BF16",)),),
    "ct-mxfp8": (Oracle(CT, compressed_tensors("mxfp8-quantized", "group", 8, "float", 32), ("BF16",)),),
    "fbgemm-fp8": (
        Oracle(CT, compressed_tensors("float-quantized", "channel", 8, "float"), ("F32",), ODD, note="FBGEMM's own needs a GPU"),
    ),
    "modelopt-fp8": (Oracle("nvidia-modelopt", modelopt_fp8, ("F32",), note="in BF16 it rounds both factors first"),),
    "modelopt-mxfp8": (Oracle("nvidia-modelopt", modelopt_mxfp8),),
    "modelopt-nvfp4": (Oracle("nvidia-modelopt", modelopt_nvfp4, zeros=True, note="code 8 is +0.0 there"),),
    "fp8-tensor": (Oracle(HF, transformers_fp8("weight_scale_inv"), size=ODD),),
    "fp8-block": (Oracle(HF, transformers_fp8("weight_scale_inv"), size=(2048, 2176), note="wrong for partial blocks"),),
    "fp8-block-bf16": (Oracle(HF, transformers_fp8("weight_scale_inv"), size=(2048, 2176), note="wrong for partial blocks"),),
    "fp8-block-ue8m0": (Oracle(HF, transformers_fp8("weight_scale_inv"), size=(2048, 2176), note="wrong for partial blocks"),),
    "deepseek-v4-fp8": (Oracle(HF, transformers_fp8("scale"), size=(2048, 2176), note="wrong for partial blocks"),),
    "deepseek-v4.1-fp8": (Oracle(HF, transformers_fp8("scale"), size=(2048, 2176), note="wrong for partial blocks"),),
    "deepseek-v4.1-engram": (Oracle(HF, transformers_fp8("scale"), size=(2048, 2176)),),
    "deepseek-v4-fp4": (Oracle(HF, transformers_fp8("scale")),),
    "awq-gemm": (Oracle("autoawq", autoawq(32), ("F32", "F16")),),
    "gptq-4-v1": (Oracle("gptqmodel", gptqmodel(4, 1)),),
    "gptq-4-v1-partial": (Oracle("gptqmodel", gptqmodel(4, 1), size=(2048, 2088)),),
    "gptq-4-v2-act": (Oracle("gptqmodel", gptqmodel(4, 2)),),
    "gptq-8-v1-act": (Oracle("gptqmodel", gptqmodel(8, 1)),),
    "gptq-8-v2": (Oracle("gptqmodel", gptqmodel(8, 2)),),
    "bnb-nf4": (Oracle("bitsandbytes", bitsandbytes_4bit, size=ODD, note=BNB_NOTE),),
    "bnb-nf4-nested": (Oracle("bitsandbytes", bitsandbytes_4bit, size=ODD, note=BNB_NOTE),),
    "bnb-fp4": (Oracle("bitsandbytes", bitsandbytes_4bit, ("F32", "F16"), ODD, note=BNB_NOTE),),
    "bnb-fp4-nested": (Oracle("bitsandbytes", bitsandbytes_4bit, size=ODD, note=BNB_NOTE),),
    "bnb-int8": (Oracle("bitsandbytes", bitsandbytes_int8, size=ODD),),
    "mlx-affine-2": (Oracle(HF, transformers_mlx(2, 32), ("BF16",)), Oracle("mlx", mlx(2, 32, "affine"), ("F32",))),
    "mlx-affine-4": (Oracle(HF, transformers_mlx(4, 32), ("BF16",)), Oracle("mlx", mlx(4, 32, "affine"), ("F32",))),
    "mlx-affine-4-f16": (
        Oracle(HF, transformers_mlx(4, 64), ("F16",), (2048, 2112)), Oracle("mlx", mlx(4, 64, "affine"), ("F32",), (2048, 2112)),
    ),
    "mlx-affine-4-f32": (Oracle(HF, transformers_mlx(4, 32), ("F32",)), Oracle("mlx", mlx(4, 32, "affine"), ("F32",))),
    "mlx-affine-8": (Oracle(HF, transformers_mlx(8, 32), ("BF16",)), Oracle("mlx", mlx(8, 32, "affine"), ("F32",))),
    "mlx-affine-3": (Oracle("mlx", mlx(3, 32, "affine"), ("F32",)),),
    "mlx-affine-5": (Oracle("mlx", mlx(5, 64, "affine"), ("F32",), (2048, 2112)),),
    "mlx-affine-6": (Oracle("mlx", mlx(6, 32, "affine"), ("F32",)),),
    "mlx-mxfp4": (Oracle("mlx", mlx(4, 32, "mxfp4"), ("BF16",)),),
    "mlx-mxfp8": (Oracle("mlx", mlx(8, 32, "mxfp8"), ("BF16",)),),
    "mlx-nvfp4": (Oracle("mlx", mlx(4, 16, "nvfp4"), ("BF16",)),),
    "torchao-float8": (Oracle("torchao", torchao("float8"), size=ODD),),
    "torchao-int8": (Oracle("torchao", torchao("int8"), size=ODD),),
}  # fmt: skip


def digest(*arrays: bytes | np.ndarray) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(array if isinstance(array, bytes) else np.ascontiguousarray(array))
    return found.hexdigest()


def inputs_digest(parts: Parts) -> str:
    return digest(*(f"{name} {tensor.code} {tensor.shape}".encode() + tensor.data for name, tensor in sorted(parts.items())))


def drawn(scheme: str, oracle: Oracle) -> Parts:
    noise, (out, inner) = Noise(f"oracle/{scheme}", "sound"), oracle.size
    if scheme == "gpt-oss-mxfp4":
        return dict(zip(("blocks", "scales"), formats.draw_blocks(noise, 4, out, inner // 4)))
    return formats.SCHEMES[scheme].draw(noise, out, inner)


def decoded(scheme: str, oracle: Oracle, parts: Parts) -> np.ndarray:
    """The value by the numpy reference, as float32."""
    if scheme == "gpt-oss-mxfp4":
        return formats.decode_blocks(parts["blocks"], parts["scales"]).reshape(-1, oracle.size[0]).T
    return formats.SCHEMES[scheme].decode(parts, *oracle.size)


def bits_of(values: np.ndarray, oracle: Oracle) -> np.ndarray:
    """Bits to compare: all NaN equal, and without the sign of zeros where the oracle loses it."""
    return canonical_bits(np.where(values == 0, values.dtype.type(0), values) if oracle.zeros else values)


def compare(scheme: str) -> list[dict]:
    """Results of this machine's libraries, one row for each library and type."""
    rows = []
    for oracle in ORACLES[scheme]:
        parts = drawn(scheme, oracle)
        ours = decoded(scheme, oracle, parts)
        for code in oracle.codes:
            mine = bits_of(rounded(ours, code), oracle)
            theirs = bits_of(oracle.run(parts, *oracle.size, code), oracle)
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, (
                scheme,
                mine.shape,
                theirs.shape,
                mine.dtype,
                theirs.dtype,
            )
            row = {
                "oracle": f"{oracle.package} {importlib.metadata.version(oracle.package)}",
                "type": code,
                "shape": list(oracle.size),
            }
            row |= {
                "differing": int(np.count_nonzero(mine != theirs)),
                "inputs": inputs_digest(parts),
                "result": digest(theirs),
            }
            rows.append(row | ({"note": oracle.note} if oracle.note else {}))
    return rows


def main() -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() and sys.argv[1:] else {}
    for scheme in sys.argv[1:] or [*ORACLES]:
        record[scheme] = compare(scheme)
        for row in record[scheme]:
            print(f"{scheme}: {row['oracle']}, {row['type']}: {row['differing']} of {np.prod(row['shape'])} differ", flush=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
