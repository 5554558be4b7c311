#!/usr/bin/env python3
"""Two processes of four devices each restore one mount: counts the fetched source bytes and checks the result. Run by hand:

    $(tests/python/setup.sh)/bin/python tests/maxtext/two_processes.py [--size 2] [--dir /var/tmp/ckfs-maxtext] [ckfs flags ...]

A generated Llama repository (`llama.py`) is mounted with the layout `maxtext` for fsdp=4,tensor=2, and two processes of
`tests/python/orbax_process.py` restore their halves at once. Prints the counters of `.ckfs/stats.json` up to then; the aim is that each
byte of split arrays is fetched once in total. Then every shard's hash is compared with that of the raw file of the same device. All
processes that it starts have a time limit and end with the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import llama

HERE = Path(__file__).resolve().parent
MESH = "fsdp=4,tensor=2"
CKFS = os.environ.get("CKFS_BIN", str(HERE.parents[1] / "target/release/ckfs"))
RESTORER = HERE.parent / "python/orbax_process.py"
FLAGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
# Time limits of a mount or its end, and of each half of the work with it.
SHORT_SECONDS, LONG_SECONDS = 60, 900
COUNTS = (
    "tile_hits", "tile_misses", "tile_waits", "tile_evictions", "tile_bytes", "prefetched_tiles", "prefetch_hits", "failed_reads",
)  # fmt: skip


@contextlib.contextmanager
def mounted(repo: Path, point: Path, flags: list[str]) -> Iterator[None]:
    point.mkdir(exist_ok=True)
    command = [CKFS, "mount", repo, point, "--layout", "maxtext", "--mesh", MESH, "-q", *flags]
    subprocess.run(command, check=True, timeout=SHORT_SECONDS)
    try:
        yield
    finally:
        subprocess.run([CKFS, "umount", point], check=True, timeout=SHORT_SECONDS)


def restore(point: Path, work: Path) -> list[dict]:
    """Both halves at once. If one process fails the other is ended: it would wait for its partner."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
    results = [work / f"rank{rank}.json" for rank in range(2)]
    logs = [work / f"rank{rank}.log" for rank in range(2)]
    running: list[subprocess.Popen] = []
    deadline = time.monotonic() + LONG_SECONDS
    try:
        for rank, (result, log) in enumerate(zip(results, logs, strict=True)):
            result.unlink(missing_ok=True)
            command = [sys.executable, RESTORER, point, MESH, address, str(rank), result, "params"]
            with open(log, "w") as out:
                running.append(
                    subprocess.Popen(command, env=os.environ | FLAGS, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
                )
        while any(process.poll() is None for process in running):
            failed = [rank for rank, process in enumerate(running) if process.poll()]
            if failed:
                raise SystemExit(f"process {failed[0]} failed:\n{logs[failed[0]].read_text()[-4000:]}")
            if time.monotonic() > deadline:
                raise SystemExit(f"not restored within {LONG_SECONDS} s; see {logs[0]} and {logs[1]}")
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(running) if process.returncode]
        if failed:
            raise SystemExit(f"process {failed[0]} failed:\n{logs[failed[0]].read_text()[-4000:]}")
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [json.loads(result.read_text()) for result in results]


def hashes(point: Path, paths: list[str]) -> dict[str, str]:
    """SHA-256 of files of the mount, by a process that can be ended while it reads."""
    done = subprocess.run(
        ["sha256sum", "--", *paths], cwd=point, capture_output=True, check=True, text=True, timeout=LONG_SECONDS
    )
    return {path: digest for digest, path in (line.split(maxsplit=1) for line in done.stdout.splitlines())}


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=llama.SIZES, default="2", help="about how many GB of weights")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp/ckfs-maxtext"))
    parser.add_argument("--keep", action="store_true", help="keeps the repository")
    args, flags = parser.parse_known_args()
    work = args.dir
    work.mkdir(parents=True, exist_ok=True)
    repo, point = work / f"hf-{args.size}", work / "mnt-two"
    if not repo.exists():
        llama.write(repo, llama.SIZES[args.size])
    for file in repo.iterdir():
        file.read_bytes()  # into the page cache
    total = sum(file.stat().st_size for file in repo.glob("*.safetensors"))
    try:
        with mounted(repo, point, flags):
            before, started = os.getloadavg()[0], time.monotonic()
            ranks = restore(point, work)
            seconds = time.monotonic() - started
            stats = json.loads((point / ".ckfs/stats.json").read_text())
            print(f"processes: {seconds:.1f} s from start to end, load {before:.1f} to {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
            for rank, found in enumerate(ranks):
                print(f"process {rank}: restored {len(found['shards'])} shards in {found['seconds']:.1f} s")
            served, fetched = sum(stats["bytes_served"].values()), sum(stats["bytes_fetched"].values())
            print(f"source files {gigabytes(total)}, served {gigabytes(served)}, fetched {gigabytes(fetched)}: {fetched / total:.4f} times")
            print(", ".join(f"{name} {stats[name]}" for name in COUNTS))
            first, second = (found["shards"] for found in ranks)
            assert not first.keys() & second.keys(), "both processes hold a device"
            shards = first | second
            assert len(shards) == 8 * len(llama.SIZES[args.size].leaves())
            raw = hashes(point, list(shards))
            other = [path for path, digest in shards.items() if raw[path] != digest]
            print(f"{len(shards) - len(other)} of {len(shards)} shards equal the raw files bit for bit", *other[:8])
            if other:
                raise SystemExit(1)
    finally:
        if not args.keep:
            shutil.rmtree(repo)


if __name__ == "__main__":
    main()
