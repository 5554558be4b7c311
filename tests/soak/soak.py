#!/usr/bin/env python3
"""A soak test: random clients, faults and remounts for a given time, every byte compared.

    soak.py [--seconds 600] [--seed N] [--clients 4]

Two mounts exist at once. The *steady* one is mounted once and only read; its memory, descriptors and threads are reported
after a warm-up and at the end, and must not have grown. The *faulty* one is mounted anew each round, with random
options, and has one fault while its clients read: a source that is touched, truncated or replaced, a signal, a killed
daemon, an unmount under load. After a fault a client may get one of the listed errors, but all bytes that it gets must be
right; a mount without a fault must never return an error.

The expected bytes come from the reference of the client tests, which shares no code with ckfs. The seed and each round are
printed, so that a failure can be run again. Exit status 0 means that there was no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import numpy as np  # noqa: E402

import mounting  # noqa: E402
import reference  # noqa: E402
import repos  # noqa: E402

MIB = 1 << 20
# Errors on which clients leave a mount once a fault was injected.
AFTER_A_FAULT = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT, errno.ENODEV, errno.EBADF}
# The steady mount may grow by this much between the warm-up and the end.
GROWTH_MIB_MAX = 64
# It is warm after this many calls of its clients, and a fault comes after so many of each client.
WARM_UP_CALLS, CALLS_BEFORE_FAULT = 500, 5
# A machine that does other things too gives a client no time for so long at most.
PATIENCE_SECONDS = 600
ROUND_SECONDS = 8

VIEWS: list[tuple[str, str, str | None]] = [
    # mesh, layout, dtype
    ("fsdp=4", "canonical", None),
    ("fsdp=2,tensor=2", "canonical", "bf16"),
    ("tensor=4", "canonical", "f32"),
    ("fsdp=3", "hf", None),
    ("fsdp=2", "hf", "f32"),
]
OPTIONS: list[tuple[str, ...]] = [
    (),
    ("--threads", "1"),
    ("--direct-io",),
    ("--no-passthrough",),
    ("--source-io", "pread"),
    ("--cache-bytes", "16M"),
]


class Expected:
    """The files of a view by the reference, in a directory of plain files."""

    def __init__(self, directory: Path, repo: repos.Repo, mesh: str, layout: str, dtype: str | None) -> None:
        self.directory, self.sizes = directory, {}
        shown = reference.hf(repo) if layout == "hf" else reference.canonical(repo)
        self.names = {tensor.name: path for path, tensor in shown.items() if tensor.bundled}
        code = reference.USER_DTYPES[dtype] if dtype else None
        axes = reference.Mesh.parse(mesh)
        self.devices = list(axes.devices)
        for path, tensor in shown.items():
            tensor = reference.cast(tensor, code)
            self._write(f"full/{path}", tensor.array)
            for device in self.devices:
                self._write(f"dev{device}/{path}", reference.shard(tensor, axes, device))

    def _write(self, path: str, array: np.ndarray) -> None:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        np.ascontiguousarray(array).tofile(file)
        self.sizes[path] = array.nbytes

    def bytes_of(self, path: str, start: int, stop: int) -> bytes:
        with open(self.directory / path, "rb") as file:
            return os.pread(file.fileno(), stop - start, start)


def end_with_the_parent() -> None:
    """One that outlives its parent would keep a mount busy."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class WrongError(Exception):
    """A client found wrong bytes or an unexpected error."""


def compare(found: bytes, expected: Expected, path: str, start: int) -> int:
    stop = min(start + len(found), expected.sizes[path])
    wanted = expected.bytes_of(path, start, stop)
    if found != wanted:
        raise WrongError(f"{path}: bytes {start}..{start + len(found)} are not as expected")
    return len(found)


def read_whole(point: Path, expected: Expected, path: str, rng: random.Random) -> int:
    found = (point / path).read_bytes()
    if len(found) != expected.sizes[path]:
        raise WrongError(f"{path}: {len(found)} bytes, expected {expected.sizes[path]}")
    return compare(found, expected, path, 0)


def read_spans(point: Path, expected: Expected, path: str, rng: random.Random) -> int:
    size, total = expected.sizes[path], 0
    with open(point / path, "rb", buffering=0) as file:
        for _ in range(16):
            start = rng.randrange(size + 1)
            length = rng.choice([1, 17, 4096, 100_000, MIB])
            wanted = min(length, size - start)
            found = os.pread(file.fileno(), length, start)
            # What fails after some pages gives those, and tells the error to the next read.
            while 0 < len(found) < wanted and (rest := os.pread(file.fileno(), wanted - len(found), start + len(found))):
                found += rest
            if len(found) != wanted:
                raise WrongError(f"{path}: {len(found)} bytes at {start}, expected {wanted}")
            total += compare(found, expected, path, start)
    return total


def read_direct(point: Path, expected: Expected, path: str, rng: random.Random) -> int:
    total = 0
    fd = os.open(point / path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 4 * MIB) as buffer:
            while count := os.preadv(fd, [buffer], total):
                total += compare(buffer[:count], expected, path, total)
    finally:
        os.close(fd)
    if total != expected.sizes[path]:
        raise WrongError(f"{path}: {total} bytes, expected {expected.sizes[path]}")
    return total


def stat_all(point: Path, expected: Expected, path: str, rng: random.Random) -> int:
    parent = str(Path(path).parent)
    for name in os.listdir(point / parent):
        below = f"{parent}/{name}"
        status = os.stat(point / below)
        if below in expected.sizes and status.st_size != expected.sizes[below]:
            raise WrongError(f"{below}: {status.st_size} bytes, expected {expected.sizes[below]}")
    return 0


def read_bundle(point: Path, expected: Expected, path: str, rng: random.Random) -> int:
    device = rng.choice(expected.devices)
    tensors, _, _ = repos.parse_safetensors(point / f"safetensors/dev{device}.safetensors")
    if set(tensors) != set(expected.names):
        raise WrongError(f"safetensors/dev{device}: {sorted(set(tensors) ^ set(expected.names))}")
    return sum(compare(tensor.data, expected, f"dev{device}/{expected.names[name]}", 0) for name, tensor in tensors.items())


def read_mapped(point: Path, expected: Expected, path: str, rng: random.Random) -> int:
    """Reads pages in random order. On the steady mount only: a missing page is SIGBUS."""
    size = expected.sizes[path]
    if size == 0:
        return 0
    total = 0
    with open(point / path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        for start in rng.sample(range(0, size, 65_536), min(16, -(-size // 65_536))):
            total += compare(held[start : start + 65_536], expected, path, start)
    return total


WAYS = [read_whole, read_spans, read_direct, stat_all, read_bundle]


def client(point: Path, expected: Expected, seed: int, faulted, stop, report, calls) -> None:
    """Reads until stopped. Reports the failure, if there was one, and the bytes that were compared."""
    end_with_the_parent()
    rng, total, reads, errors, wrong = random.Random(seed), 0, 0, 0, None
    ways = WAYS if faulted is not None else [*WAYS, read_mapped]
    paths = sorted(expected.sizes)
    while not stop.is_set() and wrong is None:
        way, path = rng.choice(ways), rng.choice(paths)
        before = faulted is not None and faulted.is_set()
        try:
            total += way(point, expected, path, rng)
            reads += 1
            with calls:
                calls.value += 1
        except OSError as error:
            errors += 1
            now = faulted is not None and faulted.is_set()
            if not (before or now) or error.errno not in AFTER_A_FAULT:
                wrong = f"{way.__name__} {path}: {error}"
            time.sleep(0.01)
        except Exception:  # noqa: BLE001
            wrong = f"{way.__name__} {path}: {traceback.format_exc()}"
    report.put((total, reads, errors, wrong))


class Clients:
    """Client processes on one mount."""

    def __init__(self, context, count: int, point: Path, expected: Expected, seed: int, *, faulty: bool) -> None:
        self.stop, self.report, self.calls = context.Event(), context.Queue(), context.Value("Q")
        self.faulted = context.Event() if faulty else None
        args = (point, expected)
        self.processes = [
            context.Process(target=client, args=(*args, seed + n, self.faulted, self.stop, self.report, self.calls), daemon=True)
            for n in range(count)
        ]
        for process in self.processes:
            process.start()

    def have_read(self, calls: int) -> None:
        """Waits until the clients have done so many calls, or one has ended by a failure."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.calls.value < calls and self.report.empty() and time.monotonic() < deadline:
            time.sleep(0.1)

    def end(self) -> tuple[int, int, int, list[str]]:
        """Bytes compared, calls done, errors seen, and failures."""
        self.stop.set()
        wrong, totals = [], [0, 0, 0]
        for _ in self.processes:
            try:
                *counts, found = self.report.get(timeout=PATIENCE_SECONDS)
            except Exception:  # noqa: BLE001
                wrong.append(f"a client did not end within {PATIENCE_SECONDS} s")
                continue
            totals = [a + b for a, b in zip(totals, counts)]
            wrong += [found] if found else []
        for process in self.processes:
            process.join(60)
            if process.is_alive():
                process.kill()
        return (*totals, wrong)  # type: ignore[return-value]


def resources(pid: int) -> dict[str, int]:
    """Memory, descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    row = {key: int(value.split()[0]) for key, value in (line.split(":", 1) for line in status.splitlines()) if key in (
        "Threads", "RssAnon", "RssFile", "RssShmem")}  # fmt: skip
    return {
        "anonymous_mib": row["RssAnon"] >> 10, "file_mib": row["RssFile"] >> 10, "shared_mib": row["RssShmem"] >> 10,
        "threads": row["Threads"], "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }  # fmt: skip


# --- faults ----------------------------------------------------------------------------------------------------------


def source_file(source: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(source.glob("*.safetensors")))


def no_fault(mounted: mounting.Mount, rng: random.Random) -> None:
    """The control: a round in which no error is allowed."""


def touch(mounted: mounting.Mount, rng: random.Random) -> None:
    os.utime(source_file(mounted.source, rng))


def truncate(mounted: mounting.Mount, rng: random.Random) -> None:
    file = source_file(mounted.source, rng)
    # At the end of a page: if a page is cut inside, its other readers see zeros in it for a moment too.
    os.truncate(file, file.stat().st_size // 2 // mmap.PAGESIZE * mmap.PAGESIZE)


def replace(mounted: mounting.Mount, rng: random.Random) -> None:
    file = source_file(mounted.source, rng)
    new = file.with_suffix(".new")
    new.write_bytes(bytes(file.stat().st_size))
    new.rename(file)


def remove(mounted: mounting.Mount, rng: random.Random) -> None:
    source_file(mounted.source, rng).unlink()


def harmless_signals(mounted: mounting.Mount, rng: random.Random) -> None:
    pid = mounting.daemon_pid(mounted.point)
    for _ in range(20):
        os.kill(pid, rng.choice([signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ]))
        time.sleep(0.05)


def kill_daemon(mounted: mounting.Mount, rng: random.Random) -> None:
    os.kill(mounting.daemon_pid(mounted.point), signal.SIGKILL)


def end_daemon(mounted: mounting.Mount, rng: random.Random) -> None:
    os.kill(mounting.daemon_pid(mounted.point), signal.SIGTERM)


def unmount_lazily(mounted: mounting.Mount, rng: random.Random) -> None:
    mounting.run("umount", "--lazy", mounted.point)


# Each with whether clients may get errors, and whether `ckfs status` must report the mount as broken afterwards (None: it may).
FAULTS = {
    no_fault: (False, False),
    harmless_signals: (False, False),
    touch: (True, True),
    truncate: (True, True),
    replace: (True, None),
    remove: (True, None),
    kill_daemon: (True, True),
    end_daemon: (True, None),
    unmount_lazily: (True, None),
}


def health_is_told(mounted: mounting.Mount, broken: bool) -> list[str]:
    """Whether `ckfs status` agrees with the clients' errors."""
    if mounting.mount_type(mounted.point) is None:
        return []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        done = mounting.run("status", mounted.point, expect=None)
        if (done.code != 0) == broken:
            return []
        if time.monotonic() > deadline:
            return [f"status: exit {done.code}, although the mount is {'broken' if broken else 'whole'}: {done.out}"]
        time.sleep(0.5)


class Soak:
    def __init__(self, work: Path, seed: int, clients: int) -> None:
        self.work, self.rng, self.clients = work, random.Random(seed), clients
        self.context = multiprocessing.get_context("spawn")
        self.repo = repos.wide(work / "wide")
        self.views = [Expected(work / f"expected/{n}", self.repo, *view) for n, view in enumerate(VIEWS)]
        self.wrong: list[str] = []
        self.totals = {"rounds": 0, "bytes": 0, "calls": 0, "errors": 0}

    def add(self, ended: tuple[int, int, int, list[str]], what: str) -> None:
        compared, calls, errors, wrong = ended
        self.totals["bytes"] += compared
        self.totals["calls"] += calls
        self.totals["errors"] += errors
        self.wrong += [f"{what}: {text}" for text in wrong]

    def mount(self, source: Path, point: Path, view: int, *options: str) -> mounting.Mount:
        mesh, layout, dtype = VIEWS[view]
        more = ("--dtype", dtype) if dtype else ()
        return mounting.mount(source, point, "--mesh", mesh, "--layout", layout, *more, *options)

    def round(self, number: int) -> None:
        view = self.rng.randrange(len(VIEWS))
        options = self.rng.choice(OPTIONS)
        fault = self.rng.choice(list(FAULTS))
        may_fail, broken = FAULTS[fault]
        what = f"round {number}: {' '.join(filter(None, VIEWS[view]))} {' '.join(options)}: {fault.__name__}"
        source, point = self.work / f"source{number}", self.work / f"faulty{number % 2}"
        shutil.copytree(self.repo.path, source)
        # The mount point may hold the dead mount of two rounds before: mounting recovers it.
        with contextlib.suppress(FileExistsError):
            point.mkdir()
        mounted = self.mount(source, point, view, *options)
        clients = Clients(self.context, self.clients, point, self.views[view], self.rng.randrange(1 << 30), faulty=True)
        clients.have_read(CALLS_BEFORE_FAULT * self.clients)
        time.sleep(ROUND_SECONDS / 2)
        if may_fail:
            clients.faulted.set()
        fault(mounted, self.rng)
        time.sleep(ROUND_SECONDS / 2)
        if broken is not None:
            self.wrong += [f"{what}: {text}" for text in health_is_told(mounted, broken)]
        ended = clients.end()
        self.add(ended, what)
        print(f"{what}: {ended[0] / MIB:.0f} MiB in {ended[1]} calls, {ended[2]} errors", flush=True)
        if fault is not kill_daemon and mounting.mount_type(point) is not None:
            done = mounting.run("umount", "--wait", "20", point, expect=None)
            if done.code != 0:
                self.wrong.append(f"{what}: umount: {done.err}")
                mounting.detach(point)
        shutil.rmtree(source)

    def run(self, seconds: float) -> None:
        steady = self.mount(self.repo.path, self.work / "steady", 0)
        pid = mounting.daemon_pid(steady.point)
        clients = Clients(self.context, 2, steady.point, self.views[0], self.rng.randrange(1 << 30), faulty=False)
        clients.have_read(WARM_UP_CALLS)
        deadline = time.monotonic() + seconds
        start = resources(pid)
        while time.monotonic() < deadline and not self.wrong:
            self.round(self.totals["rounds"])
            self.totals["rounds"] += 1
        end = resources(pid)
        self.add(clients.end(), "steady mount")
        self.wrong += [f"steady mount: {text}" for text in health_is_told(steady, broken=False)]
        print(json.dumps({"start": start, "end": end, **self.totals}), flush=True)
        for key, most in (("anonymous_mib", GROWTH_MIB_MAX), ("threads", 8), ("descriptors", 64)):
            if end[key] > start[key] + most:
                self.wrong.append(f"steady mount: {key} grew from {start[key]} to {end[key]}")
        # Pages of its program, and of the sources, which it maps twice, are there when the system has memory for them.
        sources = sum(path.stat().st_size for path in self.repo.path.rglob("*.safetensors"))
        if end["file_mib"] > (most := (mounting.find_ckfs().stat().st_size + 2 * sources) // MIB + 1):
            self.wrong.append(f"steady mount: {end['file_mib']} MiB of files are in its memory, expected at most {most}")
        mounting.run("umount", "--wait", "20", steady.point)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--clients", type=int, default=3)
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.seconds:.0f} s, {mounting.find_ckfs()}", flush=True)
    end_with_the_parent()
    with tempfile.TemporaryDirectory(prefix="ckfs-soak.") as directory:
        work = Path(directory)
        try:
            soak = Soak(work, args.seed, args.clients)
            soak.run(args.seconds)
        finally:
            for point in mounting.mount_points(work):
                mounting.detach(point)
    for text in soak.wrong:
        print(f"WRONG: {text}", flush=True)
    print("soak: failed" if soak.wrong else "soak: nothing was wrong", flush=True)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
