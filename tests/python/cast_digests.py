"""Prints the table of cast digests in tests/tensor/kernels.rs, computed by numpy and ml_dtypes, and compares with torch.

Run: python3 -m venv v && v/bin/pip install numpy ml_dtypes torch && v/bin/python tests/python/cast_digests.py

Each row is the SHA-256 of the little-endian results of casting one list of inputs: every pattern of the 8- and 16-bit
types; 2**24 patterns of F32 and 2**20 of F64 chosen below. Every cast goes through float32, which matters for F64
sources (rounded twice, as torch does) and for the payloads of NaNs only. torch is optional; where it differs in
anything but the payload or sign of a NaN, the number of such elements and an example are printed as a comment.
"""

import hashlib
import sys
import warnings

import ml_dtypes
import numpy as np

TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F8E5M2": ml_dtypes.float8_e5m2,
    "F8E4M3": ml_dtypes.float8_e4m3fn,
    "F8E5M2Fnuz": ml_dtypes.float8_e5m2fnuz,
    "F8E4M3Fnuz": ml_dtypes.float8_e4m3fnuz,
}
TORCH = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8E5M2": "float8_e5m2",
    "F8E4M3": "float8_e4m3fn",
    "F8E5M2Fnuz": "float8_e5m2fnuz",
    "F8E4M3Fnuz": "float8_e4m3fnuz",
}


def mix(index):
    """The upper 32 bits of a multiplicative hash, as uint64."""
    return (index * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)


def f32_patterns():
    """All values of the upper 24 bits; the lowest byte from eight values on, beside and between rounding borders."""
    index = np.arange(1 << 24, dtype=np.uint64)
    low = np.array([0x00, 0x00, 0x00, 0x01, 0x7F, 0x80, 0x81, 0xFF], np.uint64)[mix(index) >> np.uint64(29)]
    return ((index << np.uint64(8)) | low).astype(np.uint32)


def f64_patterns():
    """One in eight has all upper 20 bits of an f64; the others are f32 patterns with a perturbation below an f32's
    last bit, ties among them."""
    index = np.arange(1 << 20, dtype=np.uint64)
    hashed = mix(index)
    wild = (index << np.uint64(44)) | (hashed << np.uint64(12))
    narrow = ((index << np.uint64(12)) | (hashed & np.uint64(0xFFF))).astype(np.uint32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = narrow.view(np.float32).astype(np.float64).view(np.uint64)
    nudges = np.array([0, 1, (1 << 28) - 1, 1 << 28, (1 << 28) + 1, (1 << 29) - 1, 1 << 27, 3 << 27], np.uint64)
    near = wide | nudges[(hashed >> np.uint64(12)) & np.uint64(7)]
    return np.where(hashed >> np.uint64(29) == 0, wild, near)


def patterns(name):
    if name == "F32":
        return f32_patterns()
    if name == "F64":
        return f64_patterns()
    width = np.dtype(TYPES[name]).itemsize
    return np.arange(1 << 8 * width, dtype={1: np.uint8, 2: np.uint16}[width])


def cast(bits, source, target):
    values = bits.view(TYPES[source])
    return values.astype(np.float32).astype(TYPES[target])


def compare_with_torch(torch, bits, source, target, ours):
    raw = torch.from_numpy(bits.view(np.uint8).copy()).view(getattr(torch, TORCH[source]))
    theirs = raw.to(getattr(torch, TORCH[target])).view(torch.uint8).numpy().view(ours.dtype)
    both_nan = np.isnan(theirs.astype(np.float64)) & np.isnan(ours.astype(np.float64))
    unsigned = f"u{ours.dtype.itemsize}"
    different = (theirs.view(unsigned) != ours.view(unsigned)) & ~both_nan
    if different.any():
        at = int(np.nonzero(different)[0][0])
        values = f"{bits[at]:#x} becomes {theirs.view(unsigned)[at]:#x}, here {ours.view(unsigned)[at]:#x}"
        print(f"    // torch {torch.__version__} differs in {different.sum()} elements: {values}")


def main():
    warnings.simplefilter("ignore")
    try:
        import torch
    except ImportError:
        torch = None
    print(f"// numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}, torch {torch and torch.__version__}", file=sys.stderr)
    for source in TYPES:
        bits = patterns(source)
        for target in TYPES:
            if source == target:
                continue
            ours = cast(bits, source, target)
            if torch is not None:
                compare_with_torch(torch, bits, source, target, ours)
            digest = hashlib.sha256(np.ascontiguousarray(ours).view(np.uint8)).hexdigest()
            print(f'    (DType::{source}, DType::{target}, "{digest}"),')


if __name__ == "__main__":
    main()
