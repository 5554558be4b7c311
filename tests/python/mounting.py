"""Calls the `ckfs` program as a user would: plain subprocesses, exit codes, mount points.

A mount is identified by its mount point; mounts that a test leaves behind are found in the kernel's mount table under the
tests' own temporary directory and nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from reference import Mesh, Shown, shard, shard_offset, shard_shape

ROOT = Path(__file__).resolve().parents[2]
# Ends what hangs, and nothing else: tests wait for events, also on a machine that has other work.
TIMEOUT_SECONDS = 300


def find_ckfs() -> Path:
    """The program under test: `CKFS_BIN`, else the newest of the release and debug builds."""
    if chosen := os.environ.get("CKFS_BIN"):
        return Path(chosen).resolve()
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [path for path in (target / "release/ckfs", target / "debug/ckfs") if path.exists()]
    if not built:
        raise FileNotFoundError("no ckfs program: run `cargo build --release` or set CKFS_BIN")
    return max(built, key=lambda path: path.stat().st_mtime)


@dataclasses.dataclass
class Done:
    """A finished run of the program."""

    code: int
    out: str
    err: str

    def json(self) -> dict:
        return json.loads(self.out)


def run(*args: object, expect: int | None = 0, binary: Path | None = None, **more: object) -> Done:
    """Runs `ckfs ARGS` and checks the exit code, showing the output if it differs."""
    command = [str(binary or find_ckfs()), *map(str, args)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS, **more)  # type: ignore[call-overload]
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if expect is not None:
        assert done.returncode == expect, f"{' '.join(command)}\nexit {done.returncode}, expected {expect}\n{out}\n{err}"
    return Done(done.returncode, out, err)


def mount_points(below: Path) -> list[Path]:
    """Mount points at or under a directory, the innermost first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split(" ")[4]))
        if point.is_relative_to(below):
            found.append(point)
    return sorted(found, reverse=True)


def mount_type(point: Path) -> str | None:
    """File system type at a mount point, or None if nothing is mounted there."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        if fields.split(" ")[4] == str(point):
            return tail.split(" ")[0]
    return None


def detach(point: Path) -> None:
    """Unmounts in any state of the daemon."""
    fusermount = shutil.which("fusermount3") or "fusermount3"
    for command in (["umount", "-l", str(point)], [fusermount, "-uz", str(point)]):
        if mount_type(point) is not None:
            subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)


def wait_until(true: Callable[[], bool], seconds: float = TIMEOUT_SECONDS, what: str = "condition") -> None:
    """Polls; a daemon needs a moment for work after its reply."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def daemon_pid(point: Path) -> int:
    """The process that serves a mount point, found by its command line."""
    wanted = str(point).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if wanted in words and b"ckfs" in os.path.basename(words[0]) and state != "Z":
            return int(entry.name)
    raise AssertionError(f"no daemon serves {point}")


@dataclasses.dataclass
class Mount:
    """A live mount."""

    point: Path
    source: Path

    def __truediv__(self, name: str) -> Path:
        return self.point / name

    def manifest(self) -> dict:
        return json.loads((self / ".ckfs/manifest.json").read_text())

    def stats(self) -> dict:
        return json.loads((self / ".ckfs/stats.json").read_text())

    def stats_of_reads(self, reads: int = 1) -> dict:
        """The statistics once this many reads are counted. The daemon counts them, and the bytes with them, after the reply."""

        def counted() -> bool:
            row = self.stats()["ops"]["read"]
            return row["count"] >= reads and sum(row["latency"]) == row["count"]

        wait_until(counted, what=f"{reads} reads counted")
        return self.stats()

    def files(self, under: str) -> set[str]:
        """Paths of all regular files below a directory, relative to it."""
        base = self.point / under
        return {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file() and not path.is_symlink()}


def mount(source: Path | str, point: Path, *args: object, **more: object) -> Mount:
    point.mkdir(parents=True, exist_ok=True)
    run("mount", source, point, *args, **more)
    assert mount_type(point) is not None, "mount reported success but nothing is mounted"
    return Mount(point, Path(source))


def same_bytes(found: bytes, expected: np.ndarray, what: object) -> None:
    """Compares bytes, so that NaN equals NaN only with the same bits."""
    wanted = np.ascontiguousarray(expected).tobytes()
    assert len(found) == len(wanted), f"{what}: {len(found)} bytes, expected {len(wanted)}"
    if found != wanted:
        first = int(np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8))[0])
        raise AssertionError(f"{what}: differs first at byte {first} of {len(wanted)}")


def check_device(mounted: Mount, tensors: dict[str, Shown], mesh: Mesh, device: int) -> None:
    """All raw files of one device, against the reference: names, sizes and bytes."""
    assert mounted.files(f"dev{device}") == set(tensors)
    for path, shown in tensors.items():
        file = mounted / f"dev{device}/{path}"
        expected = shard(shown, mesh, device)
        assert file.stat().st_size == expected.nbytes, file
        same_bytes(file.read_bytes(), expected, file)


def check_full(mounted: Mount, tensors: dict[str, Shown]) -> None:
    """All unsharded raw files."""
    assert mounted.files("full") == set(tensors)
    for path, shown in tensors.items():
        same_bytes((mounted / f"full/{path}").read_bytes(), shown.array, path)


def read(path: Path) -> bytes:
    return path.read_bytes()


def error_of(call: Callable, *args: object) -> int | None:
    """The errno with which a call fails, or None."""
    try:
        call(*args)
    except OSError as error:
        return error.errno
    return None


def xattr(file: Path, name: str) -> str:
    return os.getxattr(file, f"user.ckfs.{name}").decode()


def check_xattrs(file: Path, shown: Shown, mesh: Mesh, device: int) -> None:
    """A raw file's extended attributes; shapes are JSON lists."""
    assert xattr(file, "dtype") == shown.code
    assert json.loads(xattr(file, "shape")) == shard_shape(shown, mesh, device)
    assert json.loads(xattr(file, "global_shape")) == list(shown.shape)
    assert json.loads(xattr(file, "offset")) == shard_offset(shown, mesh, device)
