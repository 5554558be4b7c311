#!/usr/bin/env python3
"""Two ways from a checkpoint that Orbax wrote for MaxText back to a Hugging Face repository. Run by hand:

    tests/maxtext/back.py [--size 2] [--dir /var/tmp/ckfs-back] [--keep]

(a) MaxText's converter `to_huggingface`, unmodified from PyPI, to bf16;
(b) `ckfs export --layout hf --only 'hf/**'`.

The checkpoint holds parameters only, with scanned layers, as OCDBT with zstd: what MaxText saves by default. Time is that of
whole processes, interpreter and imports included. Memory is the largest resident sum over all processes of a way at one moment,
and of that the anonymous part. The checkpoint is in the page cache at the start of each way. Afterwards all tensors are
compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import compare
import llama


def write_checkpoint(mount: str, out: str, size: llama.Size) -> None:
    """Restores MaxText's parameters from a mount, and has Orbax save them."""
    import jax
    import orbax.checkpoint as ocp

    leaves = {name: jax.ShapeDtypeStruct(shape, llama.BF16) for name, (shape, _) in size.leaves().items()}
    target = compare.nested({f"params.params.{name}": leaf for name, leaf in leaves.items()})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), target)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    args = ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    restored = checkpointer.restore(mount, args=args)
    checkpointer.save(out, args=ocp.args.PyTreeSave(restored))


def write_tokenizer(repo: Path, vocab: int) -> None:
    """A tokenizer, which `to_huggingface` copies."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{number}": number for number in range(vocab)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0").save_pretrained(repo)


def source(work: Path, repo: Path, size: str) -> Path:
    out = work / f"orbax-{size}"
    if out.exists():
        return out
    point = work / "mnt"
    point.mkdir(exist_ok=True)
    subprocess.run([compare.CKFS, "mount", str(repo), str(point), "--layout", "maxtext", "-q"], check=True)
    try:
        command = [sys.executable, __file__, "--write", str(point / "orbax/0/items"), str(out / "0/items"), size]
        subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
    finally:
        subprocess.run([compare.CKFS, "umount", str(point)], check=True)
    return out


def timed(command: list[str], log: Path, **more: object) -> dict[str, float]:
    watch = compare.Watch()
    with open(log, "w") as out:
        code = subprocess.run(command, stdout=out, stderr=out, **more).returncode
    watch.stop()
    if code:
        raise RuntimeError(f"{command[:4]} ended with {code}:\n{log.read_text()[-4000:]}")
    return watch.figures()


def converted(work: Path, repo: Path, checkpoint: Path, size: str) -> dict[str, float]:
    """(a)"""
    command = [
        sys.executable, "-m", "maxtext.checkpoint_conversion.to_huggingface", "model_name=llama3.1-8b",
        f"load_parameters_path={checkpoint / '0/items'}", f"base_output_directory={work / 'a'}", "scan_layers=true",
        "hardware=cpu", "skip_jax_distributed_system=true", "use_multimodal=false", "weight_dtype=bfloat16",
        f"--hf_model_path={repo}", "--override_model_architecture", *llama.SIZES[size].settings(),
    ]  # fmt: skip
    return timed(command, work / "to_huggingface.log", env=os.environ | {"HF_HUB_OFFLINE": "1"}, cwd=work)


def exported(work: Path, repo: Path, checkpoint: Path) -> dict[str, float]:
    """(b)"""
    command = [compare.CKFS, "export", str(checkpoint), str(work / "b"), "--layout", "hf", "--config-from", str(repo)]
    return timed([*command, "--only", "hf/**"], work / "export.log")


def tensors(directory: Path) -> dict[str, list]:
    """By name: dtype, shape, and the digest of the bytes."""
    import hashlib

    found = {}
    for path in directory.rglob("*.safetensors"):
        file = path.read_bytes()
        start = 8 + int.from_bytes(file[:8], "little")
        for name, of in json.loads(file[8:start]).items():
            if name != "__metadata__":
                begin, end = (start + offset for offset in of["data_offsets"])
                found[name] = [of["dtype"], of["shape"], hashlib.sha256(file[begin:end]).hexdigest()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=llama.SIZES, default="2", help="about how many GB of weights")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp/ckfs-back"))
    parser.add_argument("--ways", default="ab")
    parser.add_argument("--keep", action="store_true", help="keeps everything that was written")
    args = parser.parse_args()
    work = args.dir
    work.mkdir(parents=True, exist_ok=True)
    repo = work / f"hf-{args.size}"
    if not repo.exists():
        llama.write(repo, llama.SIZES[args.size])
        write_tokenizer(repo, llama.SIZES[args.size].vocab)
    checkpoint = source(work, repo, args.size)
    rows = {}
    for way in args.ways:
        shutil.rmtree(work / way, ignore_errors=True)
        for file in checkpoint.rglob("*"):
            if file.is_file():
                file.read_bytes()
        run = {"a": lambda: converted(work, repo, checkpoint, args.size), "b": lambda: exported(work, repo, checkpoint)}[way]
        rows[way] = run()
        print(way, json.dumps(rows[way]), flush=True)
    if {"a", "b"} <= rows.keys():
        a, b = rows["a"], rows["b"]
        print(f"time a/b {a['seconds'] / b['seconds']:.2f}, memory b/a {b['rss'] / a['rss']:.3f}")
        left, right = tensors(work / "a"), tensors(work / "b")
        other = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
        print(f"{len(right) - len(other)} of {len(left)} tensors are equal bit for bit", other[:8])
    if not args.keep:
        shutil.rmtree(work)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write_checkpoint(sys.argv[2], sys.argv[3], llama.SIZES[sys.argv[4]])
    else:
        main()
