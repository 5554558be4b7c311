#!/usr/bin/env python3
"""Measures a run of very many steps: `CKFS_BIN=… steps.py [--steps 10000] [--bucket] [--rounds 4] [--day-steps 240]`.

Makes a run of tiny steps, in a directory or in a bucket of the stub (`cargo build --example stub`), mounts all of them, and prints what the
mount takes of a processor in a quiet minute, what it takes to open a step beside `ckfs plan` of it, how soon thousands of steps appear and
disappear, and its memory while steps come, are read and go, as over a day.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import servers  # noqa: E402

BIN = os.environ["CKFS_BIN"]
CONFIG = json.dumps({"model_type": "llama", "architectures": ["LlamaModel"], "num_hidden_layers": 0, "hidden_size": 32, "vocab_size": 32,
                     "num_attention_heads": 1, "tie_word_embeddings": True}).encode()  # fmt: skip
TENSOR = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [32, 32], "data_offsets": [0, 4096]}}
HEADER = (header := json.dumps(TENSOR).encode()) + b" " * (-len(header) % 8)


def make(run: Path, number: int, age_seconds: int = 0) -> None:
    """A step as a trainer writes it, which renames it in the end."""
    at = run / f"tmp-{number}"
    at.mkdir()
    weights = struct.pack("<Q", len(HEADER)) + HEADER + bytes([number % 251]) * 4096
    for name, data in (("config.json", CONFIG), ("model.safetensors", weights), ("trainer_state.json", b"{}")):
        (at / name).write_bytes(data)
    for place in [*at.iterdir(), at]:
        os.utime(place, (time.time() - age_seconds,) * 2)
    at.rename(run / f"checkpoint-{number}")


def cpu(pid: int) -> float:
    """Seconds of a processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    [row] = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmRSS")]
    return int(row.split()[1]) / 1024


def taken(*command: object, environment: dict) -> float:
    """Seconds of a processor that a command takes."""
    before = os.times()
    subprocess.run([BIN, *map(str, command)], check=True, capture_output=True, env=environment)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def wait(until, every: float = 0.05) -> float:
    begun = time.monotonic()
    while not until():
        time.sleep(every)
    return time.monotonic() - begun


def measure(options: argparse.Namespace, run: Path, source: str, mnt: Path, environment: dict) -> None:
    begun = time.monotonic()
    command = [BIN, "mount", source, mnt, "--steps", "all", "--foreground", "--layout", "stored"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    say = lambda text: print(f"{text}; {cpu(process.pid):.2f} s, {resident(process.pid):.0f} MiB in all", flush=True)  # noqa: E731
    try:
        wait(lambda: os.path.lexists(mnt / "latest"))
        assert len(os.listdir(mnt)) == options.steps + 2 and process.poll() is None
        say(f"mounted {options.steps} steps in {time.monotonic() - begun:.1f} s")
        time.sleep(5)
        for _ in range(2):
            before = cpu(process.pid)
            time.sleep(60)
            say(f"a quiet minute: {(cpu(process.pid) - before) / 0.6:.3f} % of a processor")
        plan = sum(taken("plan", f"{source}/checkpoint-{number}", "--layout", "stored", environment=environment) for number in range(11, 61)) / 50
        before = cpu(process.pid)
        for number in range(11, 211):
            (mnt / str(number) / "full").stat()
        say(f"opening of a step {(cpu(process.pid) - before) * 5:.2f} ms, plan of it {plan * 1000:.2f} ms of a processor")
        first = options.steps + 1
        for number in range(options.rounds):
            before = cpu(process.pid)
            for step in range(first, first + 1000):
                make(run, step)
            last = first + 999
            newest = wait(lambda: os.readlink(mnt / "latest") == str(last))
            rest = wait(lambda: len(os.listdir(mnt)) == options.steps + 1002, 0.5)
            for step in range(first - options.steps, first - options.steps + 1000):
                shutil.rmtree(run / f"checkpoint-{step}")
            gone = wait(lambda: len(os.listdir(mnt)) == options.steps + 2, 0.5)
            say(f"1000 more: the newest after {newest:.1f} s, all after {newest + rest:.1f} s, 1000 gone after {gone:.1f} s, {cpu(process.pid) - before:.1f} s of a processor")
            first += 1000
        for number in range(options.day_steps):
            make(run, first + number)
            wait(lambda: os.readlink(mnt / "latest") == str(first + number), 0.02)
            assert len((mnt / str(first + number) / "full/model/embed_tokens/weight").read_bytes()) == 4096
            shutil.rmtree(run / f"checkpoint-{first + number - options.steps}")
            if number % 40 == 39:
                say(f"{number + 1} steps came, were read, and as many went")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--day-steps", type=int, default=240)
    parser.add_argument("--bucket", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        run, mnt = Path(root, "root/bucket/run"), Path(root, "mnt")
        run.mkdir(parents=True)
        mnt.mkdir()
        for number in range(1, options.steps + 1):
            make(run, number, 86_400)
        source, environment = str(run), dict(os.environ)
        if options.bucket:
            stub = servers.Stub("store", Path(root, "root"))
            stack.callback(stub.close)
            source, environment = "s3://bucket/run", environment | servers.STUB_SETTINGS["s3"](stub.url) | {"XDG_CACHE_HOME": f"{root}/cache"}
        measure(options, run, source, mnt, environment)


if __name__ == "__main__":
    main()
