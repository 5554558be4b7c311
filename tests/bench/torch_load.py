#!/usr/bin/env python3
"""Speed of PyTorch's loaders on a mount, as ratios to the same loads from plain files in the same run. Run by hand:

    "$(tests/python/setup.sh)/bin/python" tests/bench/torch_load.py [--size 2] [--runs 5] [--pause 0] [--only WORD] [--materialize memory]

A generated bf16 Llama repository of SIZE gigabytes is mounted with `--layout hf --mesh fsdp=4`, for every repetition anew.

* `load_file`: `safetensors.torch.load_file` of a device's file against a copy of that file on disk. It only maps the file, so
  the same load is also timed with its usual next step: every page touched, or all copied into parameters as in `load_state_dict`.
* `dcp`: `dcp.load` in one process from `safetensors/` and from `dcp/` against the repository itself: of the whole model, and of
  one rank's shards as FSDP2 has them (the other ranks are torch's fake ones; nothing is communicated). Torch takes some tenths of a
  millisecond for each chunk, of which `safetensors/` and `dcp/` have four for each of the repository's.
* `hf`: `safe_open` and every tensor copied, from the files of `hf/` against those of the repository.

Plain and mounted loads alternate; a row gives medians of RUNS. "First" loads follow a mount after PAUSE seconds and a plain load,
during which ckfs warms up: the page cache has none of the mount, but has the sources and the plain files. "Second" loads
follow them. The first repetition's values are compared. Below the table each row is a JSON line, with the bytes that the mount
served and fetched from the sources in the last repetition. Needs three times SIZE of disk and four times of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "tests/maxtext")]

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import llama
import mounting

RANKS = 4
DEVICE = 1
MESH = f"fsdp={RANKS}"
PAGE_BYTES = 4096

State = dict[str, torch.Tensor]
Load = Callable[[Path, State], None]


def size_of(gigabytes: float) -> llama.Size:
    """The largest model within this many bytes, in the proportions of Llama 3.1 8B except for a smaller vocabulary."""

    def size(heads: int) -> llama.Size:
        hidden = heads * llama.HEAD
        return llama.Size(hidden, heads, max(heads // 4, 1), hidden * 7 // 2, 32000)

    def total_bytes(of: llama.Size) -> int:
        layer = sum(rows * columns for rows, columns in of.layer().values())
        return 2 * (llama.LAYERS * layer + 2 * of.vocab * of.hidden)

    heads = 1
    while total_bytes(size(heads + 1)) <= gigabytes * 1e9:
        heads += 1
    return size(heads)


def read_through(directory: Path) -> None:
    """Brings files into the page cache as a read from disk brings them: in larger pages than those of writes, where the kernel has them."""
    drop_pages(directory)
    for file in sorted(directory.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as held:
            while held.read(1 << 24):
                pass


def drop_pages(directory: Path) -> None:
    """Drops the pages of files that nothing maps."""
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def empty_state(files: list[Path]) -> State:
    """Tensors of the shapes that these files name, in allocated memory."""
    state = {}
    for file in files:
        with safe_open(file, framework="pt") as held:
            for name in held.keys():
                part = held.get_slice(name)
                state[name] = torch.zeros(part.get_shape(), dtype=torch.bfloat16)
    return state


def shards_of(state: State) -> State:
    """The part of each tensor that one rank has under FSDP2."""
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = {}
    for name, tensor in state.items():
        local = tensor.chunk(RANKS)[DEVICE].clone()
        sharded[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
    return sharded


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def only_load(file: Path, _: State) -> None:
    load_file(file)


def load_and_touch(file: Path, _: State) -> None:
    for tensor in load_file(file).values():
        tensor.reshape(-1).view(torch.uint8)[::PAGE_BYTES].sum()


def load_and_copy(file: Path, state: State) -> None:
    for name, tensor in load_file(file).items():
        state[name].copy_(tensor)


def load_dcp(directory: Path, state: State) -> None:
    classic = (directory / ".metadata").exists()
    reader = dcp.FileSystemReader if classic else dcp.HuggingFaceStorageReader
    dcp.load(state, storage_reader=reader(str(directory)), no_dist=True)


def load_slices(directory: Path, state: State) -> None:
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():
                state[name].copy_(held.get_tensor(name))


def seconds_of(load: Load, path: Path, state: State) -> float:
    start = time.perf_counter()
    load(path, state)
    elapsed = time.perf_counter() - start
    gc.collect()  # maps that still exist would keep the mount busy
    return elapsed


def counted(mounted: mounting.Mount) -> dict[str, int]:
    time.sleep(0.05)  # reads are counted after their reply
    stats = mounted.stats()
    return {"served": sum(stats["bytes_served"].values()), "fetched": sum(stats["bytes_fetched"].values())}


def values_of(state: State) -> list[int]:
    """A sum over each tensor's bits, which changes if values are wrong or missing."""
    return [int(local_tensor(state[name]).view(torch.int16).sum(dtype=torch.int64)) for name in sorted(state)]


def measure(case: str, load: Load, plain: Path, shown: str, state: State, goals: tuple, run: argparse.Namespace) -> list[dict]:
    """Rows for the first and the second load of one case."""
    seconds: dict[str, list[float]] = {"plain": [], "first": [], "second": []}
    counts: dict[str, dict[str, int]] = {}
    total = sum(local_tensor(tensor).nbytes for tensor in state.values())
    load(plain, state)
    expected, repeat = values_of(state), range(run.runs)
    for turn in repeat:
        mounted = mounting.mount(run.repo, run.work / "mnt", "--layout", "hf", "--mesh", MESH, "--materialize", run.materialize)
        try:
            time.sleep(run.pause)
            for which in ("first", "second"):
                seconds["plain"].append(seconds_of(load, plain, state))
                if turn == 0:
                    for tensor in state.values():
                        local_tensor(tensor).zero_()
                before = counted(mounted)
                seconds[which].append(seconds_of(load, mounted / shown, state))
                counts[which] = {key: value - before[key] for key, value in counted(mounted).items()}
                if turn == 0 and load not in (only_load, load_and_touch) and values_of(state) != expected:
                    sys.exit(f"{case}: the mount's values differ from the plain files'")
            mounting.run("umount", mounted.point)
        finally:
            mounting.detach(mounted.point)
    rows = []
    for which, goal in zip(("first", "second"), goals):
        native, found = statistics.median(seconds["plain"]), statistics.median(seconds[which])
        row = {"bench": "torch_load", "case": f"{case}, {which}", "native_s": round(native, 4), "mounted_s": round(found, 4)}
        row |= {"ratio": round(native / found, 3), "goal": goal, "bytes": total, **counts[which]}
        row |= {"mounted_runs_s": [round(second, 4) for second in seconds[which]]}
        rows.append(row)
        print(f"{row['case']:<48} {native:>9.3f} {found:>9.3f} {row['ratio']:>7.2f}  {goal or '':>5}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=2.0, help="gigabytes of the generated repository")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of each case")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds from each mount to its first load")
    parser.add_argument("--only", default="", help="only cases whose name contains this word")
    parser.add_argument("--materialize", default="auto", help="which files ckfs materializes")
    parser.add_argument("--dir", default="/var/tmp", help="where the repository and the mount point are made, and deleted again")
    run = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    dist.init_process_group("fake", store=FakeStore(), rank=DEVICE, world_size=RANKS)
    run.work = Path(tempfile.mkdtemp(prefix="ckfs-torch-load-", dir=run.dir))
    try:
        measure_all(run)
    finally:
        mounting.detach(run.work / "mnt")
        shutil.rmtree(run.work)


def measure_all(run: argparse.Namespace) -> None:
    run.repo, own = run.work / "repo", run.work / f"dev{DEVICE}.safetensors"
    total = llama.write(run.repo, size_of(run.size))
    mounted = mounting.mount(run.repo, run.work / "mnt", "--layout", "hf", "--mesh", MESH, "--materialize", run.materialize)
    shutil.copyfile(mounted / f"safetensors/{own.name}", own)
    mounting.run("umount", mounted.point)
    read_through(run.repo)
    read_through(run.work)
    print(f"{total / 1e9:.2f} GB of bf16, torch {torch.__version__}, {torch.get_num_threads()} threads, {run.runs} repetitions")
    print(f"{'case':<48} {'native s':>9} {'mounted s':>9} {'ratio':>7}  {'goal':>5}")

    def shard() -> State:
        return empty_state([own])

    def whole() -> State:
        return empty_state(sorted(run.repo.glob("*.safetensors")))

    def rank() -> State:
        return shards_of(whole())

    device_file, goals = f"safetensors/{own.name}", (0.35, 0.75)
    cases = [
        ("load_file", only_load, own, device_file, shard, (None, None)),
        ("load_file, every page touched", load_and_touch, own, device_file, shard, goals),
        ("load_file, copied into parameters", load_and_copy, own, device_file, shard, goals),
        ("dcp from safetensors/", load_dcp, run.repo, "safetensors", whole, (1.0, 1.0)),
        ("dcp from dcp/", load_dcp, run.repo, "dcp", whole, (None, None)),
        ("dcp of a rank's shards from safetensors/", load_dcp, run.repo, "safetensors", rank, (1.0, 1.0)),
        ("dcp of a rank's shards from dcp/", load_dcp, run.repo, "dcp", rank, (None, None)),
        ("hf/ by safe_open", load_slices, run.repo, "hf", whole, (0.95, 0.95)),
    ]
    rows = []
    for name, load, plain, shown, state, wanted in cases:
        if run.only in name:
            rows += measure(name, load, plain, shown, state(), wanted, run)
    print()
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
