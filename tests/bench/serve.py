#!/usr/bin/env python3
"""Speed of `ckfs serve` over loopback, as ratios in the same run. Run by hand:

    cargo build --release --locked -p ckfs -p ckfs-python
    "$(tests/python/setup.sh)/bin/python" tests/bench/serve.py [--size 2] [--runs 5] [--only WORD]

A generated bf16 Llama repository of SIZE gigabytes, in the page cache. Ways of one case alternate, RUNS times; a row is
the medians.

* `nginx`: files of weights that the view leaves untouched, one after the other, by one client and by eight at a time, against nginx
  with `sendfile` (Debian's nginx-light; the case is left out where there is none).
* `mount`: a file that is cast, by one client, against the first read of the same file from a new mount.

The client reads into one buffer of 1 MiB. Values are compared in the first repetition.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "tests/maxtext"), str(ROOT / "tests/bench")]

import http_get
import in_process
import llama
import mounting
import torch_load
from http_get import BUFFER_BYTES, get
from in_process import DEVICE, RANKS, Table, Way
from serving import Server

CLIENTS = 8


def processor_of(process: int) -> float:
    """Seconds of a process and of those that it has started."""
    text = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, text[11:15])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return own + sum(processor_of(int(child)) for child in children)


class Nginx:
    def __init__(self, work: Path, root: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        config = work / "nginx.conf"
        config.write_text(
            f"daemon off; worker_processes auto; pid {work}/nginx.pid; error_log {work}/nginx.log;\n"
            + ("user root;\n" if os.geteuid() == 0 else "")
            + "events { worker_connections 256; }\n"
            + f"http {{ access_log off; sendfile on; tcp_nopush on; sendfile_max_chunk 2m; client_body_temp_path {work}/body;\n"
            + f"server {{ listen 127.0.0.1:{self.port}; root {root}; }} }}\n"
        )
        self.process = subprocess.Popen(["nginx", "-p", str(work), "-c", str(config)], stderr=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit((work / "nginx.log").read_text())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Fetch(Way):
    """All paths from one server, by some clients in processes of their own. Its processor time is the server's."""

    def __init__(self, port: int, paths: list[str], clients: int, process: int) -> None:
        super().__init__(self.fetch)
        self.port, self.paths, self.clients, self.server = port, paths, clients, process

    def fetch(self) -> None:
        command = [sys.executable, http_get.__file__, f"127.0.0.1:{self.port}", *self.paths]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = [subprocess.Popen(command, **pipes) for _ in range(self.clients)]
        for process in started:
            assert process.stdout.readline() == "ready\n"
        before = processor_of(self.server)
        for process in started:
            process.stdin.write("go\n")
            process.stdin.flush()
        spans = [tuple(map(float, process.communicate()[0].split())) for process in started]
        self.took = max(end for _, end in spans) - min(begin for begin, _ in spans)
        self.spent = processor_of(self.server) - before

    def run(self) -> None:
        super().run()
        # Without the start of the clients.
        self.wall[-1], self.processor[-1] = self.took, self.spent


def untouched(table: Table, run: argparse.Namespace) -> None:
    names = sorted(path.name for path in run.repo.glob("*.safetensors"))
    total = sum((run.repo / name).stat().st_size for name in names)
    nginx = Nginx(run.work, run.repo)
    try:
        with Server(run.repo, home=run.work) as server:
            for name in names:
                theirs = get("127.0.0.1", nginx.port, f"/{name}", True)
                assert theirs == get(server.host, server.port, f"/files/hf/{name}", True), name
            rates = {}
            for clients in (1, CLIENTS):
                own = Fetch(server.port, [f"/files/hf/{name}" for name in names], clients, server.process.pid)
                other = Fetch(nginx.port, [f"/{name}" for name in names], clients, nginx.process.pid)
                what = "one client" if clients == 1 else f"{clients} clients together"
                table.compare(f"untouched, {what}", own, {"nginx": other}, 0.6 if clients == 1 else None, total * clients)
                rates[clients] = total * clients / statistics.median(own.wall) / 1e9
            table.row(f"{CLIENTS} clients together against one", rates[1], rates[CLIENTS], rates[CLIENTS] / rates[1], 1.0, 0)
    finally:
        nginx.stop()


def cast(table: Table, run: argparse.Namespace) -> None:
    flags = ("--mesh", f"fsdp={RANKS}", "--dtype", "f32")
    path, point = f"safetensors/dev{DEVICE}.safetensors", run.work / "mnt"

    def again() -> None:
        if mounting.mount_points(run.work):
            mounting.run("umount", point)
        mounting.mount(run.repo, point, *flags)
        time.sleep(0.5)  # what it does at its start is not of the read

    def read() -> None:
        buffer = bytearray(BUFFER_BYTES)
        with open(point / path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    try:
        again()
        expected = hashlib.sha256((point / path).read_bytes()).hexdigest()
        total = (point / path).stat().st_size
        with Server(run.repo, *flags, home=run.work) as server:
            assert get(server.host, server.port, f"/files/{path}", True) == (total, expected)
            own = Fetch(server.port, [f"/files/{path}"], 1, server.process.pid)
            table.compare("cast to f32", own, {"the mount's first read": Way(read, again)}, 1.0, total)
    finally:
        mounting.detach(point)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=2.0, help="gigabytes of the generated repository")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of each case")
    parser.add_argument("--only", default="", help="only cases whose name contains this word")
    parser.add_argument("--dir", default="/var/tmp", help="where the repository and the mount point are made, and deleted again")
    run = parser.parse_args()
    run.work = Path(tempfile.mkdtemp(prefix="ckfs-serve-", dir=run.dir))
    try:
        run.repo = run.work / "repo"
        total = llama.write(run.repo, torch_load.size_of(run.size))
        torch_load.read_through(run.repo)
        print(f"{total / 1e9:.2f} GB of bf16, {in_process.THREADS} processors, {run.runs} repetitions, {mounting.find_ckfs()}")
        table = Table(run.only, run.runs)
        if table.wants("nginx"):
            if shutil.which("nginx"):
                untouched(table, run)
            else:
                print("nginx: not installed")
        if table.wants("mount"):
            cast(table, run)
        print()
        for row in table.rows:
            print(json.dumps(row))
    finally:
        mounting.detach(run.work / "mnt")
        shutil.rmtree(run.work)


if __name__ == "__main__":
    main()
