#!/usr/bin/env python3
"""Measures what a new version of weights costs an engine: `CKFS_BIN=… versions.py [--layers 8] [--versions 5] [--changed 0.03]`.

A trainer publishes differences (`xor`, not compressed, an Adler-32 for each tensor) to a base. An engine loads each version in one of two ways:
it reads all of `MNT/<version>/hf`; or, as engines do themselves, it keeps a copy of the repository, applies each difference to the copy in
place, compares the digests, and reads the copy. Prints for each version the bytes that are read and written below, and the seconds of a
processor and of the clock, without the digests that compare the two. What ckfs reads is what the kernel counts (`rchar`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from repos import Tensor, safetensors_bytes  # noqa: E402
from steps import BIN, cpu, wait  # noqa: E402

WIDE, BLOCK_BYTES = 1024, 1 << 20


def model(layers: int) -> dict[str, np.ndarray]:
    """Bytes of a Llama in bf16."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (8 * WIDE, WIDE), "lm_head.weight": (8 * WIDE, WIDE), "model.norm.weight": (WIDE,)}
    for at in (f"model.layers.{n}." for n in range(layers)):
        shapes |= {f"{at}self_attn.{word}_proj.weight": (WIDE, WIDE) for word in "qkvo"}
        shapes |= {f"{at}mlp.{word}_proj.weight": (4 * WIDE, WIDE) for word in ("gate", "up")} | {f"{at}mlp.down_proj.weight": (WIDE, 4 * WIDE)}
        shapes |= {f"{at}{word}_layernorm.weight": (WIDE,) for word in ("input", "post_attention")}
    return {name: rng.integers(0, 256, (*shape, 2), np.uint8) for name, shape in shapes.items()}


def save(path: Path, tensors: dict[str, np.ndarray], code: str, **metadata: str) -> None:
    rows = {name: Tensor(code, array.shape[:-1] if code == "BF16" else (array.size,), array.tobytes()) for name, array in tensors.items()}
    path.write_bytes(safetensors_bytes(rows, metadata))


def publish(place: Path, version: int, tensors: dict[str, np.ndarray], changed: float) -> int:
    """Changes a part of each tensor's elements; the bytes of the difference."""
    rng, made, deltas, digests = np.random.default_rng(version), place.with_name(f"tmp_{version}"), {}, {}
    made.mkdir()
    for name, array in tensors.items():
        deltas[name] = (rng.random((*array.shape[:-1], 1), np.float32) < changed).astype(np.uint8) * np.array([1, 0], np.uint8)
        tensors[name] = array ^ deltas[name]
        digests[name] = f"{zlib.adler32(tensors[name]):08x}"
    save(made / "model-00001-of-00001.safetensors", deltas, "U8", **digests)
    metadata = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": "xor", "compression_format": "none",
        "checksum_format": "adler32",
    }  # fmt: skip
    weight_map = dict.fromkeys(deltas, "model-00001-of-00001.safetensors")
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    made.rename(place)
    return sum(array.size for array in deltas.values())


def header_of(path: Path) -> tuple[int, dict]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return 8 + size, json.loads(file.read(size))


def patch(copy: Path, version: Path) -> None:
    """Applies a difference to the copy in place."""
    (own, rows), difference = header_of(copy), next(version.glob("*.safetensors"))
    start, deltas = header_of(difference)
    digests = deltas.pop("__metadata__")
    to, by = np.memmap(copy, np.uint8, "r+"), np.memmap(difference, np.uint8, "r")
    for name, row in deltas.items():
        (low, high), (first, last) = rows[name]["data_offsets"], row["data_offsets"]
        to[own + low : own + high] ^= by[start + first : start + last]
        assert f"{zlib.adler32(to[own + low : own + high]):08x}" == digests[name], name
    to.flush()


def loaded(path: Path) -> bytearray:
    """Reads a whole file, as an engine does."""
    body = bytearray(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        at = 0
        while got := file.readinto(memoryview(body)[at : at + BLOCK_BYTES]):
            at += got
    return body


def digests_of(path: Path, body: bytearray) -> dict[str, str]:
    """Of the tensors of a file that was read."""
    start, rows = header_of(path)
    tensors = {name: row["data_offsets"] for name, row in rows.items() if name != "__metadata__"}
    return {name: hashlib.sha256(memoryview(body)[start + low : start + high]).hexdigest() for name, (low, high) in tensors.items()}


def bytes_read(pid: int) -> int:
    """What a process has read by calls."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


def measured(label: str, bytes_told: str, own: float, begun: float, more: float = 0.0) -> None:
    spent = time.process_time() - own + more
    print(f"{label}: {bytes_told}, {spent:.2f} s of a processor, {time.monotonic() - begun:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--changed", type=float, default=0.03)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        base, run, mnt, copy = (Path(root, word) for word in ("base", "run", "mnt", "copy.safetensors"))
        for place in (base, run, mnt):
            place.mkdir()
        tensors = model(options.layers)
        save(base / "model.safetensors", tensors, "BF16", format="pt")
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": options.layers, "hidden_size": WIDE,
            "intermediate_size": 4 * WIDE, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8 * WIDE,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (base / "config.json").write_text(json.dumps(config))
        shutil.copyfile(base / "model.safetensors", copy)
        size = copy.stat().st_size
        command = [BIN, "mount", run, mnt, "--base", base, "--steps", "all", "--foreground"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            for version in range(1, options.versions + 1):
                place = run / f"weight_v{version:06d}"
                difference = publish(place, version, tensors, options.changed)
                begun, own = time.monotonic(), time.process_time()
                patch(copy, place)
                body = loaded(copy)
                told = f"{(difference + 2 * size) / 1e6:.0f} MB read, {size / 1e6:.0f} MB written"
                measured(f"version {version}, patched in place", told, own, begun)
                expected = digests_of(copy, body)
                wait(lambda: os.path.lexists(mnt / f"{version}/hf/model.safetensors"), 0.02)
                before, already = cpu(process.pid), bytes_read(process.pid)
                begun, own = time.monotonic(), time.process_time()
                body = loaded(shown := mnt / f"{version}/hf/model.safetensors")
                spent = cpu(process.pid) - before
                told = f"{(bytes_read(process.pid) - already) / 1e6:.0f} MB read"
                measured(f"version {version}, through the mount", told, own, begun, spent)
                assert digests_of(shown, body) == expected, version
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


if __name__ == "__main__":
    main()
