#!/usr/bin/env python3
"""Whole models and a rank's shards to a GPU, by ckfs in process and by the loaders that users have. By hand, on a host with a GPU:

    cargo build --release --locked -p ckfs -p ckfs-python
    python tests/bench/gpu.py [--size 4] [--runs 3] [--cold]

A generated bf16 Llama repository of SIZE gigabytes, in the page cache, or, with `--cold`, dropped from it before each load. Each load is a
process of its own, which has set up the GPU before the clock starts and has pinned no memory. It ends when all tensors are on the
GPU. The ways alternate, RUNS times; a row has the median wall and processor seconds, and in the first repetition the
tensors are compared. Loaders that are not installed (fastsafetensors, runai_model_streamer) are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "tests/maxtext"), str(ROOT / "tests/bench")]

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import llama
import package
import torch_load

package.import_ckfs()
import ckfs  # noqa: E402
import ckfs.torch  # noqa: E402

RANKS, RANK = 4, 1
GPU = "cuda:0"
State = dict[str, torch.Tensor]


def files_of(repo: Path) -> list[str]:
    return [str(path) for path in sorted(repo.glob("*.safetensors"))]


def by_load_file(repo: Path) -> State:
    return {name: tensor for file in files_of(repo) for name, tensor in load_file(file, device=GPU).items()}


def by_slices(repo: Path) -> State:
    state = {}
    for file in files_of(repo):
        with safe_open(file, "pt", device=GPU) as held:
            for name in held.keys():
                part = held.get_slice(name)
                rows = -(-part.get_shape()[0] // RANKS)
                state[name] = part[RANK * rows : (RANK + 1) * rows]
    return state


def by_fastsafetensors(repo: Path) -> State:
    from fastsafetensors import SafeTensorsFileLoader

    # Without GPU-direct storage.
    loader = SafeTensorsFileLoader(None, GPU, nogds=True)
    loader.add_filenames({0: files_of(repo)})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name) for name in loader.get_keys()}


def by_streamer(repo: Path) -> State:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files_of(repo))
        return {name: tensor.to(GPU) for name, tensor in streamer.get_tensors()}


def by_ckfs(repo: Path) -> State:
    return ckfs.torch.load(ckfs.open(repo, layout="hf"), to=GPU)


def rank_by_ckfs(repo: Path) -> State:
    return ckfs.torch.load(ckfs.open(repo, layout="hf", mesh={"fsdp": RANKS}), RANK, to=GPU)


def into_module(repo: Path) -> State:
    ck = ckfs.open(repo, layout="hf")
    state = {name: torch.empty(ck[name].shape, dtype=torch.bfloat16, device=GPU) for name in ck.bundle()}
    ckfs.torch.load_into(ck, state)
    return state


WAYS: dict[str, dict[str, Callable[[Path], State]]] = {
    "whole": {
        "safetensors' load_file": by_load_file,
        "fastsafetensors": by_fastsafetensors,
        "runai_model_streamer": by_streamer,
        "ckfs.torch.load": by_ckfs,
        "ckfs.torch.load_into": into_module,
    },
    "rank 1 of 4": {"safetensors' get_slice": by_slices, "ckfs.torch.load": rank_by_ckfs},
}


def process(job: str, way: str, repo: Path) -> None:
    """One load: prints its wall and processor seconds, and sums over the bits of each tensor."""
    torch.ones(1, device=GPU).sum().item()
    torch.cuda.synchronize()
    processor, begun = time.process_time(), time.perf_counter()
    state = WAYS[job][way](repo)
    torch.cuda.synchronize()
    took = time.perf_counter() - begun, time.process_time() - processor
    sums = {}
    for name, tensor in state.items():
        assert tensor.device.type == "cuda", (name, tensor.device)
        numbers = tensor.contiguous().view(torch.int16).reshape(-1).long()
        places = torch.arange(len(numbers), device=GPU) % 65_521
        sums[name] = [int(numbers.sum()), int((numbers * places).sum())]
    print(json.dumps({"wall": took[0], "processor": took[1], "sums": sums}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=llama.SIZES, default="4", help="gigabytes of the generated repository, about")
    parser.add_argument("--runs", type=int, default=3, help="repetitions of each job")
    parser.add_argument("--cold", action="store_true", help="drop the page cache's copy of the files before each load")
    parser.add_argument("--dir", default="/var/tmp", help="where the repository is made, and deleted again")
    parser.add_argument("--process", nargs=3, metavar=("JOB", "WAY", "REPOSITORY"), help=argparse.SUPPRESS)
    run = parser.parse_args()
    if run.process:
        process(run.process[0], run.process[1], Path(run.process[2]))
        return
    work = Path(tempfile.mkdtemp(prefix="ckfs-gpu-", dir=run.dir))
    try:
        total = llama.write(work / "repo", llama.SIZES[run.size])
        torch_load.read_through(work / "repo")
        cache = "cold" if run.cold else "in the page cache"
        print(f"{total / 1e9:.2f} GB of bf16, {cache}, {torch.cuda.get_device_name()}, {os.cpu_count()} processors, torch {torch.__version__}")
        for job, ways in WAYS.items():
            names = [name for name in ways if not name.isidentifier() or importlib.util.find_spec(name)]
            took: dict[str, list[dict]] = {name: [] for name in names}
            for _ in range(run.runs):
                for name in names:
                    if run.cold:
                        torch_load.drop_pages(work / "repo")
                    words = [sys.executable, __file__, "--process", job, name, work / "repo"]
                    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                    took[name].append(json.loads(done.stdout.splitlines()[-1]))
                    if took[name][0]["sums"] != took[names[0]][0]["sums"]:
                        sys.exit(f"{job}: {name} differs from {names[0]}")
            best = min(statistics.median(row["wall"] for row in took[name]) for name in names if name.startswith("ckfs"))
            print(f"\n{job:<40} {'s':>8} {'cpu s':>8} {'ckfs':>8}", flush=True)
            for name in names:
                wall, processor = (statistics.median(row[key] for row in took[name]) for key in ("wall", "processor"))
                print(f"{name:<40} {wall:>8.3f} {processor:>8.2f} {wall / best:>7.2f}x", flush=True)
                row = {"bench": "gpu", "job": job, "way": name, "cold": run.cold, "s": round(wall, 4), "cpu_s": round(processor, 3)}
                print(json.dumps(row | {"runs_s": [round(one["wall"], 4) for one in took[name]]}), file=sys.stderr)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
