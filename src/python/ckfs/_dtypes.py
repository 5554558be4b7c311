"""Element types by numpy's name, and arrays over their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import Error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Bits of types that are narrower than a byte. Checkpoints pack them, arrays of ml_dtypes have a byte for each element.
PACKED_BITS = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
NATIVE = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "complex64",
)  # fmt: skip


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of this name: numpy's own, or that of ml_dtypes."""
    import numpy as np

    if name in NATIVE:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise Error(f"numpy has no {name}: install ml_dtypes") from error
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def packed_bytes(name: str, elements: int) -> int:
    """Bytes of so many elements of a packed type."""
    return elements * PACKED_BITS[name] // 8


def unpacked(name: str, packed: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """An array of a packed type, of which the first element has the lowest bits of the first byte."""
    import numpy as np

    bits = PACKED_BITS[name]
    each = np.unpackbits(packed, bitorder="little").reshape(-1, bits)
    codes = np.packbits(np.pad(each, ((0, 0), (0, 8 - bits))), axis=1, bitorder="little")
    return codes.reshape(shape).view(numpy_dtype(name))
