"""Writes the repositories that `boot.sh` mounts: `tiny` is verified whole, `wide` is there to measure memory and cold reads.

    repository.py DIRECTORY
"""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path

HIDDEN, INTER, VOCAB, LAYERS, HEADS = 128, 320, 64, 2, 8
# More than a huge page of 32 MiB, so that one that is read for an eighth of this tensor shows.
WIDE_ROWS, WIDE_COLUMNS = 49152, 512
# Files from 1 MiB on are materialized. This is no multiple of a huge page.
SMALL_FILES, SMALL_ROWS = 6, 1280
BF16_BYTES = 2


def config(vocabulary: int, layers: int) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTER,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HIDDEN // HEADS,
        "vocab_size": vocabulary, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


def write(path: Path, shapes: dict[str, tuple[int, ...]], settings: dict) -> None:
    path.mkdir(parents=True)
    rows, end, draw = {}, 0, random.Random(7)
    parts = []
    for name, shape in shapes.items():
        size = BF16_BYTES
        for extent in shape:
            size *= extent
        rows[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
        # Bits that are no infinity and no NaN in any cast.
        block = bytes(byte & 0xBF if odd % 2 else byte for odd, byte in enumerate(draw.randbytes(min(size, 1 << 20))))
        parts.append((block * -(-size // len(block)))[:size])
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    (path / "config.json").write_text(json.dumps(settings))


def main() -> None:
    root = Path(sys.argv[1])
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}.self_attn.{side}_proj.weight": (HIDDEN, HIDDEN) for side in "qkvo"}
        shapes |= {f"{prefix}.mlp.{side}_proj.weight": (INTER, HIDDEN) for side in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INTER)
    write(root / "tiny", shapes, config(VOCAB, LAYERS))
    shapes = {f"small{number}": (SMALL_ROWS, WIDE_COLUMNS) for number in range(SMALL_FILES)}
    write(root / "wide", {"rows": (WIDE_ROWS, WIDE_COLUMNS), **shapes}, {"model_type": "none"})


if __name__ == "__main__":
    main()
