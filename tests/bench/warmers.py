#!/usr/bin/env python3
"""The effect of each warmer on the time of a load. Run by hand, on a machine that does nothing else, as root:

    "$(tests/python/setup.sh)/bin/python" tests/bench/warmers.py [--size 2] [--runs 5] [--only WORD] [--cache-bytes 12G]

A generated bf16 Llama repository of SIZE gigabytes is mounted anew for each load, on one device, so that the files are as large
as the repository. The environment variable `CKFS_WARM` of the daemon names the warmers that are on.

Rows are loads by settings: `load_file` of `safetensors/dev0.safetensors` and every page touched, `dcp.load` of the whole model
from `dcp/`, and an Orbax restore of `orbax/0/items` (layout maxtext, which transposes); right after the mount and 5 s later; with the
sources in the page cache (warm) and not (cold). Columns are sets of warmers: all, all without one of them, none. Sets take turns
within a row; a cell is the median of RUNS in seconds. The ratio to `all` follows in each cell except the first two: more than 1 is
the benefit of the warmer that is left out. Each row is printed as a JSON line too. Needs twice SIZE of disk, four times of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "tests/maxtext"), str(Path(__file__).parent)]

import llama
import mounting

WARMERS = ("zero", "prefault", "threads", "wake")
SETS = {"all": WARMERS, **{f"-{left}": tuple(w for w in WARMERS if w != left) for left in WARMERS}, "none": ("none",)}
PAGE_BYTES = 4096


def load_file_touched(point: Path) -> float:
    from safetensors.torch import load_file
    import torch

    start = time.perf_counter()
    for tensor in load_file(point / "safetensors/dev0.safetensors").values():
        tensor.reshape(-1).view(torch.uint8)[::PAGE_BYTES].sum()
    return time.perf_counter() - start


def load_dcp(point: Path) -> float:
    import torch
    import torch.distributed.checkpoint as dcp

    rows = [row for row in json.loads((point / ".ckfs/manifest.json").read_text())["tensors"] if row["bundled"]]
    state = {row["name"]: torch.zeros(row["shape"], dtype=torch.bfloat16) for row in rows}
    start = time.perf_counter()
    dcp.load(state, checkpoint_id=point / "dcp", no_dist=True)
    return time.perf_counter() - start


def restore_orbax(point: Path) -> float:
    import jax
    import orbax.checkpoint as ocp

    target: dict = {}
    for row in json.loads((point / ".ckfs/manifest.json").read_text())["tensors"]:
        if row["bundled"]:
            at, (*parents, last) = target, row["name"].split(".")
            for parent in parents:
                at = at.setdefault(parent, {})
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            at[last] = jax.ShapeDtypeStruct(row["shape"], jax.numpy.bfloat16, sharding=sharding)
    start = time.perf_counter()
    jax.block_until_ready(ocp.StandardCheckpointer().restore(point / "orbax/0/items", target))
    return time.perf_counter() - start


LOADS = {
    "load_file": (load_file_touched, ("--layout", "hf")),
    "dcp": (load_dcp, ("--layout", "hf")),
    "orbax": (restore_orbax, ("--layout", "maxtext")),
}


def one_load(name: str, point: str) -> None:
    """Runs in a process of its own, so that a loader's imports and caches do not affect the next one's time. Imports come first."""
    if name == "orbax":
        import jax  # noqa: F401
        import orbax.checkpoint  # noqa: F401
    else:
        import safetensors.torch  # noqa: F401
        import torch.distributed.checkpoint  # noqa: F401
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"seconds": LOADS[name][0](Path(point))}), flush=True)


def set_cache(repo: Path, is_warm: bool) -> None:
    if is_warm:
        for file in sorted(repo.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as held:
                while held.read(1 << 24):
                    pass
    else:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")


def measure(run: argparse.Namespace, name: str, warmers: tuple[str, ...], pause: float, is_warm: bool) -> float:
    point = str(run.work / "mnt")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--load", name, "--point", point]
    loader = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert loader.stdout.readline() == "ready\n", "the loader did not start"
        set_cache(run.repo, is_warm)
        mounted = mounting.mount(
            run.repo, run.work / "mnt", *LOADS[name][1], "--cache-bytes", run.cache_bytes,
            env=os.environ | {"CKFS_WARM": ",".join(warmers)},
        )  # fmt: skip
        time.sleep(pause)
        out, _ = loader.communicate("go\n")
        assert loader.returncode == 0, "the load failed"
        mounting.run("umount", mounted.point)
        return json.loads(out.splitlines()[-1])["seconds"]
    finally:
        loader.kill()
        mounting.detach(run.work / "mnt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=2.0, help="gigabytes of the generated repository")
    parser.add_argument("--runs", type=int, default=5, help="loads of each cell")
    parser.add_argument("--only", default="", help="only rows whose name contains this word")
    parser.add_argument("--sets", default=",".join(SETS), help="only these sets; the first one is what the others are compared with")
    parser.add_argument("--cache-bytes", default="12G", help="the mount's cache: the bundles must fit three quarters of it")
    parser.add_argument("--dir", default="/var/tmp", help="where the repository and the mount point are made, and deleted again")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    run = parser.parse_args()
    if run.load:
        return one_load(run.load, run.point)
    from torch_load import size_of

    run.sets = {name: SETS[name] for name in run.sets.split(",")}
    run.work = Path(tempfile.mkdtemp(prefix="ckfs-warmers-", dir=run.dir))
    rows = []
    try:
        run.repo = run.work / "repo"
        total = llama.write(run.repo, size_of(run.size))
        os.sync()
        print(f"{total / 1e9:.2f} GB of bf16, {run.runs} runs, seconds and ratio to all")
        print(f"{'load':<34}" + "".join(f"{name:>16}" for name in run.sets), flush=True)
        for name in LOADS:
            for is_warm in (True, False):
                for pause in (0.0, 5.0):
                    case = f"{name}, {'warm' if is_warm else 'cold'}, {pause:.0f} s after mount"
                    if run.only in case:
                        rows.append(row_of(run, case, name, pause, is_warm))
    finally:
        mounting.detach(run.work / "mnt")
        shutil.rmtree(run.work)
    print()
    for row in rows:
        print(json.dumps(row))


def row_of(run: argparse.Namespace, case: str, name: str, pause: float, is_warm: bool) -> dict:
    seconds: dict[str, list[float]] = {warmers: [] for warmers in run.sets}
    for _ in range(run.runs):
        for warmers, words in run.sets.items():
            seconds[warmers].append(measure(run, name, words, pause, is_warm))
    medians = {warmers: statistics.median(found) for warmers, found in seconds.items()}
    cell = lambda warmers: f"{medians[warmers]:.3f} ({medians[warmers] / medians[next(iter(run.sets))]:.2f})"  # noqa: E731
    print(f"{case:<34}" + "".join(f"{cell(warmers):>16}" for warmers in run.sets), flush=True)
    return {"bench": "warmers", "case": case, "median_s": medians, "runs_s": seconds}


if __name__ == "__main__":
    main()
