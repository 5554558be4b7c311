"""Four processes that map one file at once, on a daemon of two threads: none may stall, for any type of file.

Page faults block a process in the kernel until the daemon answers, so a daemon whose threads wait for each other hangs its
clients beyond the reach of signals. The watchdog ends the daemon first: that frees them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import mounting
import repos

pytest.importorskip("safetensors")
from safetensors import safe_open  # noqa: E402

PROCESSES = 4
TURNS = 6
# A turn takes a second or two; a stall would last forever.
STALL_SECONDS = 600

VIEWS = {
    "contiguous": ("--mesh", "fsdp=4"),
    "columns": ("--mesh", "tensor=4"),
    "cast": ("--mesh", "fsdp=4", "--dtype", "f32"),
    # With room for a few tiles only, tiles are computed again and again.
    "transposed": ("--mesh", "fsdp=2,tensor=2", "--layout", "maxtext", "--cache-bytes", "16M"),
}


def digest(data: object) -> str:
    return hashlib.sha256(data).hexdigest()  # type: ignore[arg-type]


def by_safe_open(file: Path, order: random.Random) -> dict[str, str]:
    with safe_open(file, framework="np") as held:
        names = sorted(held.keys())
        order.shuffle(names)
        return {name: digest(held.get_tensor(name).tobytes()) for name in names}


def by_memmap(file: Path, order: random.Random) -> dict[str, str]:
    """Every page once in the process's own order, then tensor by tensor."""
    data = np.memmap(file, np.uint8, mode="r")
    pages = list(range(0, len(data), mmap.PAGESIZE))
    order.shuffle(pages)
    touched = sum(int(data[page]) for page in pages)
    assert touched >= 0
    base = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:base].tobytes())
    header.pop("__metadata__")
    spans = {name: (base + row["data_offsets"][0], base + row["data_offsets"][1]) for name, row in header.items()}
    return {name: digest(data[begin:end]) for name, (begin, end) in spans.items()}


def read(file: Path, way: int, seed: int, barrier, expected: dict[str, str]) -> None:
    barrier.wait(STALL_SECONDS)
    found = (by_safe_open, by_memmap)[way](file, random.Random(seed))
    assert found == expected


@pytest.mark.parametrize("view", VIEWS)
def test_one_file_mapped_by_four(own, wide, view):
    options, name = VIEWS[view], "safetensors/dev1.safetensors"
    sequential = own(wide.path, *options)
    expected = {key: digest(tensor.data) for key, tensor in repos.parse_safetensors(sequential / name)[0].items()}
    context = multiprocessing.get_context("fork")
    for turn in range(TURNS):
        mounted, barrier = own(wide.path, "--threads", "2", *options), context.Barrier(PROCESSES)
        daemon, deadline = mounting.daemon_pid(mounted.point), time.monotonic() + STALL_SECONDS
        jobs = [(mounted / name, n % 2, PROCESSES * turn + n, barrier, expected) for n in range(PROCESSES)]
        running = [context.Process(target=read, args=job, daemon=True) for job in jobs]
        for process in running:
            process.start()
        for process in running:
            process.join(max(0.1, deadline - time.monotonic()))
        stuck = [n for n, process in enumerate(running) if process.is_alive()]
        if stuck:
            os.kill(daemon, signal.SIGKILL)
            for process in running:
                process.kill()
            pytest.fail(f"turn {turn}: processes {stuck} not done within {STALL_SECONDS} s")
        assert [process.exitcode for process in running] == [0] * PROCESSES, f"turn {turn}"
        assert mounted.stats()["failed_reads"] == 0
        mounting.run("umount", mounted.point)
