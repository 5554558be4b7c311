#!/usr/bin/env python3
"""Speed of `import ckfs` in process, as ratios to native loads of the same bytes in the same run. Run by hand:

    cargo build --release --locked -p ckfs -p ckfs-python && cargo bench --locked --bench kernels --no-run
    "$(tests/python/setup.sh)/bin/python" tests/bench/in_process.py [--size 2] [--runs 5] [--only WORD]

A generated bf16 Llama repository of SIZE gigabytes, in the page cache as a read from disk leaves it there; the arrays are those of device 1 of `fsdp=4`. Ways of one
case alternate, RUNS times; a row is the medians of two ways: wall time and processor time of both, and the ratio of wall times.

* `contiguous`: `ck.load` against `preadv` of the same spans into new arrays by the same number of threads. For both also
  memory that exists and was touched, which no page fault slows down.
* `cast`, `transposed`: against the kernels' own speed from memory to memory (`cargo bench --bench kernels`, a process for each
  thread, at once). The cast is also compared with torch's `copy_` by as many
  threads.
* `mount`: the same load by as many threads that read the raw files of a new mount with the same flags.
* `numpy`: a script that maps the files, stacks the layers, casts, and cuts the shard.
* `ranks`: four gloo processes at a time, from `ckfs.open` on, against each reading all and slicing, and rank 0 reading and
  broadcasting.
* `load_into`: four FSDP2 ranks against `dcp.load` with `HuggingFaceStorageReader`.
* `memory`: the most anonymous memory during a load beyond its arrays, a thread.

Values are compared in the first repetition. Below the table each row is a JSON line.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "tests/maxtext"), str(ROOT / "tests/bench")]

import ml_dtypes
import numpy as np

import llama
import mounting
import package

package.import_ckfs()
import ckfs  # noqa: E402

DEVICE, RANKS = 1, 4
THREADS = os.cpu_count() or 1
BF16 = np.dtype(ml_dtypes.bfloat16)
CHUNK_BYTES = 8 << 20

Arrays = dict[str, np.ndarray]


def seconds_of_processor() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in (own, children))


class Way:
    """A way to do a load, and what it took."""

    def __init__(self, call: Callable[[], object], before: Callable[[], object] | None = None) -> None:
        self.call, self.before = call, before
        self.wall: list[float] = []
        self.processor: list[float] = []

    def run(self) -> object:
        if self.before is not None:
            self.before()
        gc.collect()
        processor, begun = seconds_of_processor(), time.perf_counter()
        result = self.call()
        self.wall.append(time.perf_counter() - begun)
        self.processor.append(seconds_of_processor() - processor)
        return result


class Table:
    def __init__(self, only: str, runs: int) -> None:
        self.only, self.runs, self.rows = only, runs, []
        print(f"{'case':<56} {'other s':>8} {'ckfs s':>8} {'GB/s':>6} {'cpu s':>12} {'ratio':>6} {'goal':>5}")

    def wants(self, case: str) -> bool:
        return self.only in case

    def row(self, case: str, other: float, own: float, ratio: float, goal: float | None, total: int, **more: object) -> None:
        row = {"bench": "in_process", "case": case, "other_s": round(other, 4), "ckfs_s": round(own, 4), "ratio": round(ratio, 3)}
        self.rows.append(row | {"goal": goal, "bytes": total, **more})
        processor = f"{more.get('other_cpu_s', 0):.2f} {more.get('ckfs_cpu_s', 0):.2f}"
        rate = total / own / 1e9 if own else 0
        print(f"{case:<56} {other:>8.3f} {own:>8.3f} {rate:>6.2f} {processor:>12} {ratio:>6.2f} {goal or '':>5}", flush=True)

    def compare(self, case: str, own: Way, others: dict[str, Way], goal: float | None, total: int) -> None:
        """Runs all alternately; a row for each of the others."""
        for _ in range(self.runs):
            for way in (*others.values(), own):
                way.run()
        for name, other in others.items():
            self.pair(f"{case} against {name}", other, own, goal, total)

    def pair(self, case: str, other: Way, own: Way, goal: float | None, total: int) -> None:
        walls = [statistics.median(way.wall) for way in (other, own)]
        spent = [statistics.median(way.processor) for way in (other, own)]
        more = {"other_cpu_s": round(spent[0], 3), "ckfs_cpu_s": round(spent[1], 3)}
        more["ckfs_runs_s"] = [round(wall, 4) for wall in own.wall]
        self.row(case, *walls, walls[0] / walls[1], goal, total, **more)


def headers(repo: Path) -> dict[str, tuple[Path, int, list[int]]]:
    """Where each tensor is: file, first byte, shape."""
    found = {}
    for path in sorted(repo.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            for name, row in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    found[name] = (path, 8 + length + row["data_offsets"][0], row["shape"])
    return found


def shard_spans(repo: Path) -> dict[str, tuple[Path, int, list[int]]]:
    """The same of the device's shards on axis 0, as `torch.chunk` cuts them."""
    found = {}
    for name, (path, start, shape) in headers(repo).items():
        rows = -(-shape[0] // RANKS)
        low, high = min(DEVICE * rows, shape[0]), min((DEVICE + 1) * rows, shape[0])
        row = 2 * int(np.prod(shape[1:]))
        found[name] = (path, start + low * row, [high - low, *shape[1:]])
    return found


def read_spans(spans: dict[str, tuple[Path, int, list[int]]], arrays: Arrays) -> None:
    """`preadv` into the arrays by all threads, in parts."""
    files = {path: os.open(path, os.O_RDONLY) for path, *_ in spans.values()}
    parts = []
    for name, (path, start, _) in spans.items():
        memory = arrays[name].reshape(-1).view(np.uint8)
        parts += [(files[path], memory[at : at + CHUNK_BYTES], start + at) for at in range(0, len(memory), CHUNK_BYTES)]

    def read(part: tuple[int, np.ndarray, int]) -> None:
        fd, memory, at = part
        while len(memory):
            count = os.preadv(fd, [memory], at)
            memory, at = memory[count:], at + count

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, parts))
    for fd in files.values():
        os.close(fd)


def new_arrays(spans: dict[str, tuple[Path, int, list[int]]], dtype: np.dtype = BF16) -> Arrays:
    return {name: np.empty(shape, dtype) for name, (_, _, shape) in spans.items()}


def touched(arrays: Arrays) -> Arrays:
    for array in arrays.values():
        array.view(np.uint8).fill(0)
    return arrays


def rows_into(ck: ckfs.Checkpoint, arrays: Arrays) -> list[tuple]:
    """What the extension takes: the device's shards into these arrays."""
    rows = []
    for name, array in arrays.items():
        selection = [(part.start, part.stop, 1) for part in ck[name].region(DEVICE)]
        rows.append((ck[name]._index, selection, None, array.reshape(-1).view(np.uint8)))
    return rows


def same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype and array.tobytes() == expected[name].tobytes(), name


def contiguous(table: Table, repo: Path) -> None:
    ck, spans = ckfs.open(repo, layout="hf", mesh={"fsdp": RANKS}), shard_spans(repo)

    def native() -> Arrays:
        arrays = new_arrays(spans)
        read_spans(spans, arrays)
        return arrays

    expected = native()
    same(ck.load(DEVICE), expected)
    total = sum(array.nbytes for array in expected.values())
    table.compare("contiguous, new arrays", Way(lambda: ck.load(DEVICE)), {"preadv into new arrays": Way(native)}, 0.9, total)
    memory = touched(new_arrays(spans))
    rows, touch = rows_into(ck, memory), lambda: touched(memory)  # noqa: E731
    other = Way(lambda: read_spans(spans, memory), touch)
    table.compare("contiguous", Way(lambda: ck._load(rows), touch), {"preadv, both into touched memory": other}, 0.9, total)
    same(memory, expected)


def find_kernels() -> Path | None:
    """The newest build of the bench `kernels`."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/deps"
    built = [path for path in target.glob("kernels-*") if not path.suffix]
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def kernel_rate(program: Path, case: str) -> float:
    """GB/s of output of all threads at once."""
    started = [subprocess.Popen([program, case], stdout=subprocess.PIPE, text=True) for _ in range(THREADS)]
    rows = [[json.loads(line) for line in process.communicate()[0].splitlines() if line.startswith("{")] for process in started]
    return sum(row["output_gb_per_s"] for found in rows for row in found if row["case"] == case)


def kernels(table: Table, run: argparse.Namespace, case: str, kernel: str, **settings: object) -> None:
    if not run.kernels:
        print(f"{case}: the bench `kernels` is not built", flush=True)
        return
    ck = ckfs.open(run.repo, mesh={"fsdp": RANKS}, **settings)
    names = [name for name in ck.bundle() if len(ck[name].shape) > 1]
    rates = []
    arrays = {name: np.zeros([s.stop - s.start for s in ck[name].region(DEVICE)], ck[name].dtype) for name in names}
    total = sum(array.nbytes for array in arrays.values())
    rows = rows_into(ck, arrays)
    ways = {
        "new arrays": Way(lambda: ck.load(DEVICE, only=names)),
        "touched memory": Way(lambda: ck._load(rows), lambda: touched(arrays)),
    }
    for _ in range(table.runs):
        rates.append(kernel_rate(run.kernels, kernel))
        for way in ways.values():
            way.run()
    other = total / statistics.median(rates) / 1e9
    for name, way in ways.items():
        own = statistics.median(way.wall)
        cpu = round(statistics.median(way.processor), 3)
        more = {"ckfs_cpu_s": cpu, "other_cpu_s": round(other * THREADS, 3)}
        table.row(f"{case}, {name}, against the kernel", other, own, other / own, 0.8, total, **more)


def by_torch(table: Table, repo: Path) -> None:
    """The cast by torch's `copy_`, from memory."""
    import torch

    torch.set_num_threads(THREADS)
    ck, spans = ckfs.open(repo, layout="hf", mesh={"fsdp": RANKS}, dtype="f32"), shard_spans(repo)
    arrays = new_arrays(spans, np.dtype(np.float32))
    sources = new_arrays(spans, np.dtype(np.int16))
    read_spans(spans, sources)
    pairs = [(torch.from_numpy(arrays[name]), torch.from_numpy(sources[name]).view(torch.bfloat16)) for name in spans]

    def copy() -> None:
        for target, source in pairs:
            target.copy_(source)

    touch = lambda: touched(arrays)  # noqa: E731
    touch()
    copy()
    expected = {name: array.tobytes() for name, array in arrays.items()}
    rows = rows_into(ck, arrays)
    other, total = {"torch's copy_ of memory, both into touched memory": Way(copy, touch)}, sum(map(len, expected.values()))
    table.compare("cast to f32", Way(lambda: ck._load(rows), touch), other, 0.8, total)
    assert all(array.tobytes() == expected[name] for name, array in arrays.items())


def read_files(root: Path, paths: list[str]) -> dict[str, bytearray]:
    """Files into new memory by all threads."""

    def read(path: str) -> tuple[str, np.ndarray]:
        return path, np.fromfile(root / path, np.uint8)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return dict(pool.map(read, paths))


def through_a_mount(table: Table, run: argparse.Namespace, case: str, *flags: str, **settings: object) -> None:
    point = run.work / "mnt"
    ck = ckfs.open(run.repo, mesh={"fsdp": RANKS}, **settings)
    rows = {row["name"]: row["path"] for row in ck.plan()["views"][0]["tensors"]}
    paths = {name: f"dev{DEVICE}/{rows[name]}" for name in ck.bundle()}
    mounted = mounting.mount(run.repo, point, "--mesh", f"fsdp={RANKS}", *flags)
    found = read_files(mounted.point, list(paths.values()))
    for name, array in ck.load(DEVICE).items():
        assert array.tobytes() == found[paths[name]].tobytes(), name
    total = sum(len(body) for body in found.values())

    def again() -> None:
        mounting.run("umount", point)
        mounting.mount(run.repo, point, "--mesh", f"fsdp={RANKS}", *flags)
        time.sleep(0.5)  # what it does at its start is not of the read

    del found
    try:
        other = Way(lambda: read_files(point, list(paths.values())), again)
        table.compare(case, Way(lambda: ck.load(DEVICE)), {"the mount's first read": other}, 2.0, total)
    finally:
        mounting.detach(point)


def stacking_script(repo: Path, wide: np.dtype) -> Callable[[], Arrays]:
    """What a user writes by hand: maps the files, stacks the layers, casts, and cuts the device's shard."""
    found = headers(repo)
    stacked = {
        "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
        "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    }  # fmt: skip
    single = {"embed": "model.embed_tokens", "lm_head": "lm_head", "final_norm": "model.norm"}

    def array(name: str) -> np.ndarray:
        path, start, shape = found[f"{name}.weight"]
        return np.memmap(path, BF16, "r", start, tuple(shape))

    def cut(whole: np.ndarray, axis: int) -> np.ndarray:
        rows = -(-whole.shape[axis] // RANKS)
        part = slice(DEVICE * rows, (DEVICE + 1) * rows)
        return np.ascontiguousarray(whole[:, part] if axis else whole[part])

    def script() -> Arrays:
        made = {}
        for own, name in stacked.items():
            whole = np.stack([array(f"model.layers.{layer}.{name}") for layer in range(llama.LAYERS)]).astype(wide, copy=False)
            made[f"layers.scanned.{own}"] = cut(whole, 1)
        return made | {own: cut(array(name).astype(wide, copy=False), 0) for own, name in single.items()}

    return script


def numpy_script(table: Table, repo: Path, case: str, dtype: str | None) -> None:
    ck = ckfs.open(repo, mesh={"fsdp": RANKS}, **({"dtype": dtype} if dtype else {}))
    script = stacking_script(repo, np.dtype(np.float32) if dtype else BF16)
    loaded = ck.load(DEVICE)
    same(loaded, script())
    total = sum(one.nbytes for one in loaded.values())
    del loaded
    table.compare(case, Way(lambda: ck.load(DEVICE)), {"numpy": Way(script)}, 3.0, total)


def memory(table: Table, repo: Path, case: str, **settings: object) -> None:
    """In a process of its own, which has loaded once before."""
    code = """
        import json, sys, threading
        import ckfs
        def anonymous():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
        ck = ckfs.open(sys.argv[1], mesh={"fsdp": 4}, **json.loads(sys.argv[2]))
        ck["final_norm" if "final_norm" in ck else list(ck)[0]][...]
        before, most, going = anonymous(), 0, True
        def watch():
            global most
            while going:
                most = max(most, anonymous())
        thread = threading.Thread(target=watch)
        thread.start()
        arrays = ck.load(1)
        going = False
        thread.join()
        print(max(most, anonymous()) - before - sum(array.nbytes for array in arrays.values()))
    """
    import textwrap

    command = [sys.executable, "-c", textwrap.dedent(code), repo, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    above = int(done.stdout) / THREADS / (1 << 20)
    table.rows.append({"bench": "in_process", "case": case, "mib_a_thread": round(above, 1), "goal": 64})
    print(f"{case:<56} {above:>8.1f} MiB a thread beyond the arrays, goal at most 64", flush=True)


# --- four processes --------------------------------------------------------------------------------------------------


def worker(rank: int, port: int, repo: str, kind: str, runs: int) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, THREADS // RANKS))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    ways = (rank_ways if kind == "ranks" else fsdp_ways)(rank, repo)
    sums: dict[str, int] = {}
    for turn in range(runs):
        for name, (call, prepare) in ways.items():
            prepare()
            gc.collect()
            dist.barrier()
            begun = (time.perf_counter(), time.process_time())
            made = call()
            spent = time.process_time() - begun[1]
            dist.barrier()
            wall = time.perf_counter() - begun[0]
            if turn == 0:
                sums[name] = sum(total_of(made[key]) * (7 * at + 1) for at, key in enumerate(sorted(made)))
            total = sum(one.nbytes for one in made.values())
            del made
            print(json.dumps({"way": name, "wall": wall, "cpu": spent, "bytes": total}), flush=True)
    assert len(set(sums.values())) == 1, sums
    dist.barrier()
    dist.destroy_process_group()


def total_of(tensor: object) -> int:
    """A sum of the bytes of a tensor of torch."""
    import torch

    return int(tensor.contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


def rank_ways(rank: int, repo: str) -> dict[str, tuple[Callable[[], dict], Callable[[], None]]]:
    import torch
    import torch.distributed as dist
    from safetensors import safe_open

    def shard(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(RANKS)[rank].clone()

    def reads_all() -> dict:
        made = {}
        for path in sorted(Path(repo).glob("*.safetensors")):
            body = np.fromfile(path, np.uint8)
            length = int(body[:8].view(np.uint64)[0])
            for name, row in json.loads(bytes(body[8 : 8 + length])).items():
                low, high = (8 + length + offset for offset in row["data_offsets"])
                made[name] = shard(torch.from_numpy(body[low:high]).view(torch.bfloat16).reshape(row["shape"]))
        return made

    def broadcasts() -> dict:
        made = {}
        for path in sorted(Path(repo).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    whole = torch.empty(file.get_slice(name).get_shape(), dtype=torch.bfloat16)
                    if rank == 0:
                        whole.copy_(file.get_tensor(name))
                    dist.broadcast(whole, 0)
                    made[name] = shard(whole)
        return made

    def own() -> dict:
        return ckfs.torch.load(ckfs.open(repo, layout="hf", mesh={"fsdp": RANKS}), rank)

    ways = {"each rank reads all and slices": reads_all, "rank 0 reads and broadcasts": broadcasts, "ckfs": own}
    return {name: (call, lambda: None) for name, call in ways.items()}


def fsdp_ways(rank: int, repo: str) -> dict[str, tuple[Callable[[], dict], Callable[[], None]]]:
    import load_into_process as model_of
    import torch.distributed.checkpoint as dcp

    model = model_of.sharded(repo, "fsdp", (RANKS,))
    locals_of = lambda: {key: model_of.local(value).detach() for key, value in model.state_dict().items()}  # noqa: E731

    def by_dcp() -> dict:
        state = model.state_dict()
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(repo))
        return locals_of()

    def own() -> dict:
        found = ckfs.torch.load_into(ckfs.open(repo, layout="hf"), model)
        assert found == ([], []), found
        return locals_of()

    poison = lambda: model_of.poison(model)  # noqa: E731
    return {"dcp.load": (by_dcp, poison), "ckfs": (own, poison)}


def processes(table: Table, repo: Path, kind: str, goal: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--worker", kind, "--runs", str(table.runs), "--repo", str(repo), "--port", str(port)]
    started = [subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
    said = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), said
    rows = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]
    ways: dict[str, Way] = {}
    for turn in zip(*rows, strict=True):
        way = ways.setdefault(turn[0]["way"], Way(lambda: None))
        way.wall.append(max(row["wall"] for row in turn))
        way.processor.append(sum(row["cpu"] for row in turn))
    total = sum(row["bytes"] for row in (found[-1] for found in rows))
    own = ways.pop("ckfs")
    for name, other in ways.items():
        table.pair(f"{kind}, four ranks, against {name}", other, own, goal, total)


# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=2.0, help="gigabytes of the generated repository")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of each case")
    parser.add_argument("--only", default="", help="only cases whose name contains this word")
    parser.add_argument("--dir", default="/var/tmp", help="where the repository and the mount point are made, and deleted again")
    parser.add_argument("--kernels", type=Path, default=find_kernels(), help="the program of the bench `kernels`")
    for name in ("--worker", "--repo", "--rank", "--port"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    run = parser.parse_args()
    if run.worker:
        worker(int(run.rank), int(run.port), run.repo, run.worker, run.runs)
        return
    import torch_load

    run.work = Path(tempfile.mkdtemp(prefix="ckfs-in-process-", dir=run.dir))
    try:
        run.repo = run.work / "repo"
        total = llama.write(run.repo, torch_load.size_of(run.size))
        torch_load.read_through(run.repo)
        what = f"{total / 1e9:.2f} GB of bf16, device {DEVICE} of fsdp={RANKS}, {THREADS} threads, {run.runs} repetitions"
        print(f"{what}, {package.find_extension()}")
        measure(Table(run.only, run.runs), run)
    finally:
        mounting.detach(run.work / "mnt")
        shutil.rmtree(run.work)


def measure(table: Table, run: argparse.Namespace) -> None:
    cases: dict[str, Callable[[], None]] = {
        "contiguous": lambda: contiguous(table, run.repo),
        "cast": lambda: kernels(table, run, "cast to f32", "cast BF16 to F32, into memory", dtype="f32"),
        "cast, torch": lambda: by_torch(table, run.repo),
        "transposed": lambda: kernels(table, run, "transposed", "transpose 2-byte 8192x8192, 4 MiB bands, into memory", layout="maxtext"),
        "mount": lambda: through_a_mount(table, run, "load"),
        "mount, cast": lambda: through_a_mount(table, run, "load, cast to f32", "--dtype", "f32", dtype="f32"),
        "mount, transposed": lambda: through_a_mount(table, run, "load, transposed", "--layout", "maxtext", layout="maxtext"),
        "numpy": lambda: numpy_script(table, run.repo, "stacked and cut", None),
        "numpy, cast": lambda: numpy_script(table, run.repo, "stacked, cast and cut", "f32"),
        "ranks": lambda: processes(table, run.repo, "ranks", 1.0),
        "load_into": lambda: processes(table, run.repo, "load_into", 2.0),
        "memory": lambda: memory(table, run.repo, "memory, contiguous"),
        "memory, cast": lambda: memory(table, run.repo, "memory, cast", dtype="f32"),
        "memory, transposed": lambda: memory(table, run.repo, "memory, transposed", layout="maxtext"),
    }
    for name, call in cases.items():
        if table.wants(name):
            call()
    print()
    for row in table.rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
