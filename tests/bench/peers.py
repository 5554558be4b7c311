#!/usr/bin/env python3
"""Whole loads by ckfs and by the loaders that users have: a table for each job, all rows of it measured in one run. By hand:

    cargo build --release --locked -p ckfs -p ckfs-python
    "$(tests/python/setup.sh)/bin/python" tests/bench/peers.py [--size 2] [--runs 5] [--only JOB] [--cold]

A generated bf16 Llama repository of SIZE gigabytes. The jobs:

* `whole`: every tensor as it is stored, into the parameters of a model, or as new tensors where a loader makes them.
* `shard`: what rank 1 of four has under FSDP2 (each tensor's rows, as `torch.chunk` cuts them).
* `decode`: the same model in fp8 with a scale for each block of 128 x 128, as bf16.
* `stack`: layers stacked and cast to f32, rank 1's part of four, as arrays of numpy.
* `maxtext`: MaxText's arrays on eight devices of jax's CPU backend (`fsdp=4,tensor=2`).

The ways of a job alternate, RUNS times. A row has the medians of wall and processor seconds (of this process, its children and the
daemon), and how many times as fast the fastest way of ckfs is. Each way begins where a user begins: plain files, a new mount that
nobody has read, or `ckfs.open`, whose time counts. Sources are in the page cache; with `--cold`, their pages are dropped before each
load. Values are compared bit for bit in the first repetition. Below the tables each row is a JSON line.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import gc
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

# Before jax is imported.
os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "tests/maxtext"), str(ROOT / "tests/bench")]

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

import compare
import in_process
import llama
import mounting
import package
import torch_load

package.import_ckfs()
import ckfs  # noqa: E402
import ckfs.jax  # noqa: E402
import ckfs.torch  # noqa: E402

RANKS, RANK = torch_load.RANKS, torch_load.DEVICE
THREADS = os.cpu_count() or 1
MESH = f"fsdp={RANKS}"
# Digests of the values of each tensor, by name.
Sums = dict[str, int]
Values = Mapping[str, object]


@dataclasses.dataclass
class Way:
    """A loader. `flags` are those of the mount that it loads from, if it does."""

    name: str
    load: Callable[[Path], Values]
    flags: tuple[str, ...] | None = None
    peer: bool = True
    wall: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)


def own(name: str, load: Callable[[Path], Values], *flags: str) -> Way:
    """A way through a mount with these flags, or, without any, in process."""
    return Way(name, load, flags or None, peer=False)


def processor_seconds(daemon: int | None) -> float:
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    if daemon is not None:
        ticks = sum(map(int, Path(f"/proc/{daemon}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    return sum(one.ru_utime + one.ru_stime for one in found) + ticks / os.sysconf("SC_CLK_TCK")


def bits(value: object) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = torch_load.local_tensor(value).detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(np.asarray(value)).reshape(-1).view(np.uint8)


def sums_of(values: Values) -> Sums:
    """Two sums over the bits of each tensor, one of them with places."""

    def digest(value: object) -> int:
        found = bits(value)
        found = found[: len(found) // 2 * 2].view(np.uint16).astype(np.uint64)
        return int(found.sum()) ^ int((found * (np.arange(len(found), dtype=np.uint64) % np.uint64(65_521))).sum()) << 64

    return {name: digest(value) for name, value in values.items()}


class Bench:
    def __init__(self, run: argparse.Namespace) -> None:
        self.run, self.rows = run, []

    def once(self, way: Way, source: Path, drop: list[Path]) -> Values:
        """Loads once and remembers what it took."""
        point, daemon = self.run.work / "mnt", None
        if way.flags is not None:
            mounting.mount(source, point, *way.flags)
            daemon = mounting.daemon_pid(point)
        try:
            gc.collect()
            for directory in drop:
                torch_load.drop_pages(directory)
            processor, begun = processor_seconds(daemon), time.perf_counter()
            values = way.load(source if way.flags is None else point)
            way.wall.append(time.perf_counter() - begun)
            way.processor.append(processor_seconds(daemon) - processor)
            if self.first:
                self.sums.append((way.name, sums_of(values)))
            del values
            gc.collect()  # maps that still exist would keep the mount busy
            if way.flags is not None:
                mounting.run("umount", point)
        finally:
            mounting.detach(point)

    def job(self, name: str, what: str, source: Path, ways: list[Way], files: list[Path]) -> None:
        """A table. `files` are the directories of plain files that any of the ways reads."""
        if self.run.only not in name:
            return
        for turn in range(self.run.runs):
            self.first, self.sums = turn == 0, []
            for way in ways:
                self.once(way, source, files if self.run.cold else [])
            for other, sums in self.sums[1:]:
                expected = self.sums[0][1]
                wrong = [key for key in expected.keys() | sums.keys() if expected.get(key) != sums.get(key)]
                if wrong:
                    sys.exit(f"{name}: {other} differs from {self.sums[0][0]}: {sorted(wrong)[:5]}")
        best = min(statistics.median(way.wall) for way in ways if not way.peer)
        print(f"\n{name}: {what}\n{'way':<64} {'s':>8} {'cpu s':>8} {'ckfs':>8}", flush=True)
        for way in sorted(ways, key=lambda way: (not way.peer, statistics.median(way.wall))):
            wall, processor = statistics.median(way.wall), statistics.median(way.processor)
            row = {"bench": "peers", "job": name, "way": way.name, "peer": way.peer, "cold": self.run.cold, "s": round(wall, 4)}
            row |= {"cpu_s": round(processor, 3), "ckfs_times_as_fast": round(wall / best, 3)}
            self.rows.append(row | {"runs_s": [round(one, 4) for one in way.wall]})
            print(f"{way.name:<64} {wall:>8.3f} {processor:>8.2f} {wall / best:>7.2f}x", flush=True)


# --- torch -----------------------------------------------------------------------------------------------------------


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def by_load_file(state: torch_load.State, **settings: str) -> Callable[[Path], Values]:
    """`load_file`, copied into tensors that exist, as `load_state_dict` does."""

    def load(directory: Path) -> Values:
        for file in files_of(directory):
            for name, tensor in load_file(file, **settings).items():
                state[name].copy_(tensor)
        return state

    return load


def by_dcp(state: torch_load.State) -> Callable[[Path], Values]:
    def load(directory: Path) -> Values:
        torch_load.load_dcp(directory, state)
        return state

    return load


def by_transformers(**settings: object) -> Callable[[Path], Values]:
    def load(directory: Path) -> Values:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **settings).state_dict()

    return load


def below(name: str, load: Callable[[Path], Values]) -> Callable[[Path], Values]:
    return lambda point: load(point / name)


def whole(bench: Bench, repo: Path) -> None:
    state = torch_load.empty_state(files_of(repo))
    layout = ("--layout", "hf")
    ways = [
        Way("safetensors' load_file, copied", by_load_file(state)),
        Way("safetensors' load_file by reads, copied", by_load_file(state, backend="pread")),
        Way("torch's dcp.load, HuggingFaceStorageReader", by_dcp(state)),
        Way("transformers' from_pretrained", by_transformers()),
        own("mount, hf/: load_file, copied", below("hf", by_load_file(state)), *layout),
        own("mount, hf/: dcp.load", below("hf", by_dcp(state)), *layout),
        own("mount, hf/: from_pretrained", below("hf", by_transformers()), *layout),
        own("ckfs.open, ckfs.torch.load", lambda source: ckfs.torch.load(ckfs.open(source, layout="hf"))),
    ]
    bench.job("whole", "every tensor as stored, torch", repo, ways, [repo])


def shard(bench: Bench, repo: Path) -> None:
    names = torch_load.empty_state(files_of(repo))
    sharded = torch_load.shards_of(names)
    local = {name: torch_load.local_tensor(tensor) for name, tensor in sharded.items()}
    rows = {name: [-(-tensor.shape[0] // RANKS) * at for at in (RANK, RANK + 1)] for name, tensor in names.items()}

    def all_then_cut(directory: Path) -> Values:
        for file in files_of(directory):
            for name, tensor in load_file(file, backend="pread").items():
                local[name].copy_(tensor.chunk(RANKS)[RANK])
        return local

    def slices(directory: Path) -> Values:
        for file in files_of(directory):
            with safe_open(file, "pt") as held:
                for name in held.keys():
                    low, high = rows[name]
                    local[name].copy_(held.get_slice(name)[low:high])
        return local

    def dcp_shards(directory: Path) -> Values:
        torch_load.load_dcp(directory, sharded)
        return local

    def device_file(point: Path) -> Values:
        for name, tensor in load_file(point / f"safetensors/dev{RANK}.safetensors").items():
            local[name].copy_(tensor)
        return local

    def by_preadv(directory: Path) -> Values:
        spans = in_process.shard_spans(directory)
        arrays = in_process.new_arrays(spans)
        in_process.read_spans(spans, arrays)
        return arrays

    def in_place(directory: Path) -> Values:
        ckfs.torch.load_into(ckfs.open(directory, layout="hf"), sharded)
        return local

    layout = ("--layout", "hf", "--mesh", MESH)
    in_own = lambda source: ckfs.torch.load(ckfs.open(source, layout="hf", mesh={"fsdp": RANKS}), RANK)  # noqa: E731
    # What torch would have saved: the rank's own part is read, and unpickled tensor by tensor.
    saved = bench.run.work / "saved"
    if bench.run.only in "shard":
        mounting.run("export", repo, saved, *layout, "--only", "dcp/**")
    ways = [
        Way("safetensors' load_file by reads, then cut", all_then_cut),
        Way("safetensors' get_slice, copied", slices),
        Way("torch's dcp.load, HuggingFaceStorageReader", dcp_shards),
        Way("by hand: headers, then preadv of the rank's rows by all threads", by_preadv),
        Way("torch's dcp.load of a saved checkpoint", lambda _: dcp_shards(saved / "dcp")),
        own("mount, hf/: dcp.load", below("hf", dcp_shards), *layout),
        own("mount, dcp/: dcp.load", below("dcp", dcp_shards), *layout),
        own("mount, safetensors/: load_file of the rank's file, copied", device_file, *layout),
        own("ckfs.open, ckfs.torch.load of the rank", in_own),
        own("ckfs.open, ckfs.torch.load_into", in_place),
    ]
    bench.job("shard", f"rank {RANK} of {RANKS}, torch", repo, ways, [repo, saved])
    shutil.rmtree(saved, ignore_errors=True)


def decode(bench: Bench, repo: Path) -> None:
    import transformers

    if bench.run.only not in "decode":
        return
    quantized = bench.run.work / "fp8"
    mounting.run("export", repo, bench.run.work / "out", "--layout", "hf", "--quantize", "fp8-block", "--only", "hf/**")
    (bench.run.work / "out/hf").rename(quantized)
    shutil.rmtree(bench.run.work / "out")
    torch_load.read_through(quantized)
    settings = transformers.FineGrainedFP8Config(dequantize=True)
    ways = [
        Way("transformers' from_pretrained, dequantize", by_transformers(quantization_config=settings)),
        own("mount, hf/: from_pretrained", below("hf", by_transformers()), "--layout", "hf", "--dequantize"),
        own("ckfs.open, ckfs.torch.load", lambda source: ckfs.torch.load(ckfs.open(source, layout="hf", dequantize=True))),
    ]
    bench.job("decode", "fp8 blocks to bf16, torch", quantized, ways, [quantized])
    shutil.rmtree(quantized)


# --- numpy and jax ---------------------------------------------------------------------------------------------------


def stack(bench: Bench, repo: Path) -> None:
    script = in_process.stacking_script(repo, np.dtype(np.float32))
    settings = {"mesh": {"fsdp": RANKS}, "dtype": "f32"}
    opened = ckfs.open(repo, **settings)
    rows = {row["name"]: row["path"] for row in opened.plan()["views"][0]["tensors"]}
    paths = {name: f"dev{RANK}/{rows[name]}" for name in opened.bundle()}

    def raw_files(point: Path) -> Values:
        read = lambda path: np.fromfile(point / path, np.float32)  # noqa: E731
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            return dict(zip(paths, pool.map(read, paths.values())))

    ways = [
        Way("numpy, by hand: map, stack, cast, cut", lambda _: script()),
        own("mount, raw files: np.fromfile by all threads", raw_files, "--mesh", MESH, "--dtype", "f32"),
        own("ckfs.open, load", lambda source: ckfs.open(source, **settings).load(RANK)),
    ]
    bench.job("stack", f"stacked, f32, rank {RANK} of {RANKS}, numpy", repo, ways, [repo])


def maxtext(bench: Bench, repo: Path, size: llama.Size) -> None:
    import jax
    import orbax.checkpoint as ocp

    if bench.run.only not in "maxtext":
        return
    target = {
        name: jax.ShapeDtypeStruct(shape, llama.BF16, sharding=jax.sharding.NamedSharding(compare.grid(), jax.P(*spec)))
        for name, (shape, spec) in size.leaves().items()
    }
    ready = lambda arrays: jax.block_until_ready(arrays)  # noqa: E731

    def in_own(source: Path) -> Values:
        ck = ckfs.open(source, layout="maxtext")
        loaded = ckfs.jax.load(ck, {f"params.{name}": leaf for name, leaf in target.items()})
        return ready({name.removeprefix("params."): array for name, array in loaded.items()})

    arrays = in_own(repo)
    saved = bench.run.work / "saved"
    with ocp.PyTreeCheckpointer() as saver:
        saver.save(saved, compare.nested({f"params.params.{name}": array for name, array in arrays.items()}))
    del arrays
    restore = lambda items: ready(compare.restore_orbax(str(items), size))  # noqa: E731
    by_reader = lambda path: ready(compare.restore_safetensors(str(path), size))  # noqa: E731
    ways = [
        Way("Orbax restore of a checkpoint converted before", lambda _: restore(saved)),
        Way("Orbax's reader of safetensors, the transforms in jax", by_reader),
        own("mount, orbax/: Orbax restore", below("orbax/0/items", restore), "--layout", "maxtext", "--mesh", compare.MESH),
        own("ckfs.open, ckfs.jax.load", in_own),
    ]
    bench.job("maxtext", "MaxText's arrays on 8 CPU devices, jax", repo, ways, [repo, saved])
    shutil.rmtree(saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=llama.SIZES, default="2", help="gigabytes of the generated repository, about")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of each job")
    parser.add_argument("--only", default="", help="only jobs whose name contains this word")
    parser.add_argument("--cold", action="store_true", help="drop the page cache's copy of the files before each load")
    parser.add_argument("--dir", default="/var/tmp", help="where the repository and the mount point are made, and deleted again")
    run = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("fake", store=torch_load.FakeStore(), rank=RANK, world_size=RANKS)
    run.work = Path(tempfile.mkdtemp(prefix="ckfs-peers-", dir=run.dir))
    bench = Bench(run)
    try:
        size, repo = llama.SIZES[run.size], run.work / "repo"
        total = llama.write(repo, size)
        torch_load.read_through(repo)
        versions = f"torch {torch.__version__}, {THREADS} processors, {run.runs} repetitions"
        print(f"{total / 1e9:.2f} GB of bf16, {'cold' if run.cold else 'in the page cache'}, {versions}")
        for job in (whole, shard, decode, stack):
            job(bench, repo)
        maxtext(bench, repo, size)
    finally:
        mounting.detach(run.work / "mnt")
        shutil.rmtree(run.work)
    print()
    for row in bench.rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
