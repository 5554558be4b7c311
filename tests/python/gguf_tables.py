"""What the program has of the gguf package: the lattices of its IQ types, and digests of what it decodes.

    python tests/python/gguf_tables.py      writes grids.txt and blocks/digests.txt below src/format/gguf, and files to mutate

test_gguf.py compares both with the installed package.
"""

import json
import tempfile
import zlib
from pathlib import Path

import gguf
import numpy as np
from gguf import quants

ROOT = Path(__file__).resolve().parents[2] / "src/format/gguf"
FILES = Path(__file__).resolve().parents[1] / "fixtures/formats/gguf.json"
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


def small_files():
    """Small files of several architectures, in hexadecimal digits: valid input of the fuzz target."""
    two = {"q": (64, 32), "k": (32, 32)}
    of = {
        "llama": ({"token_embd": (8, 32), "blk.0.attn_q": two["q"], "blk.0.attn_k": two["k"]}, {}),
        "gemma2": ({"output_norm": (32,), "blk.0.ffn_gate": (2, 32)}, {}),
        "gpt-oss": ({"blk.0.ffn_gate_exps": (2, 3, 32), "blk.0.ffn_up_exps": (2, 3, 32)}, {"expert_count": 2}),
        "deepseek2": ({"blk.0.attn_k_b": (2, 3, 32), "blk.0.attn_v_b": (2, 32, 3)}, {"expert_count": 2}),
        "other": ({"some.tensor": (2, 64)}, {}),
    }
    found = {}
    for architecture, (tensors, more) in of.items():
        with tempfile.TemporaryDirectory() as directory:
            writer = gguf.GGUFWriter(Path(directory) / "x", architecture)
            for key, value in ({"block_count": 1, "attention.head_count": 4, "attention.head_count_kv": 2} | more).items():
                writer.add_uint32(f"{architecture}.{key}", value)
            writer.add_token_list(["a", "b"])
            writer.add_array(f"{architecture}.rope.sections", [1, 2])
            for name, shape in tensors.items():
                kind = gguf.GGMLQuantizationType.Q4_0 if shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F16
                writer.add_tensor(f"{name}.weight", gguf.quantize(np.ones(shape, np.float32), kind), raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            found[architecture] = (Path(directory) / "x").read_bytes().hex()
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    (ROOT / "grids.txt").write_text(grids())
    (ROOT / "blocks/digests.txt").write_text(digests())
    FILES.write_text(small_files())
