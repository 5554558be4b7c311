"""What the program has of the gguf package: the lattices of its IQ types, and digests of what it decodes.

    python tests/python/gguf_tables.py      writes src/format/gguf/grids.txt and src/format/gguf/blocks/digests.txt

test_gguf.py compares both with the installed package.
"""

import zlib
from pathlib import Path

import gguf
import numpy as np
from gguf import quants

ROOT = Path(__file__).resolve().parents[2] / "src/format/gguf"
BLOCKS = 64


def grids():
    """Name, values of codes, and codes in hexadecimal digits."""
    types = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]
    of = [getattr(quants, name) for name in types]
    rows = [f"{name} {','.join(map(str, of.grid_map))} {of.grid_hex.decode()}" for name, of in zip(types, of, strict=True)]
    return "\n".join(rows) + "\n"


def decoded_types():
    return [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, *quants._type_traits]


def random_blocks(kind):
    """Bytes of some blocks, by a generator that the test in Rust has, too: scales among them are infinite, NaN and subnormal."""
    state, count = int(kind), BLOCKS * gguf.GGML_QUANT_SIZES[kind][1]
    found = bytearray()
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append(state >> 56)
    return np.frombuffer(bytes(found), np.uint8)


def digests():
    """Name, number, elements and bytes of a block, and CRC-32 of the elements with every NaN alike."""
    rows = []
    for kind in decoded_types():
        with np.errstate(all="ignore"):
            values = gguf.dequantize(random_blocks(kind), kind).astype(np.float32)
        values[np.isnan(values)] = np.float32("nan")
        rows.append(f"{kind.name} {int(kind)} {' '.join(map(str, gguf.GGML_QUANT_SIZES[kind]))} {zlib.crc32(values.tobytes())}")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    (ROOT / "grids.txt").write_text(grids())
    (ROOT / "blocks/digests.txt").write_text(digests())
