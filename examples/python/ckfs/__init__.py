"""Mounts checkpoints from Python: calls the program `ckfs`, and turns its errors into exceptions.

    import ckfs

    with ckfs.mount("/data/llama", mesh={"fsdp": 4, "tensor": 2}, dtype="bf16") as path:
        weights = numpy.load(path / "npy/dev3/layers/scanned/wq.npy")

Keyword arguments are the program's flags with underscores for dashes: `no_mtp=True` is `--no-mtp`, a list repeats the flag, and
a mapping is written `name=value,...`. `ckfs mount --help` explains them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Error", "UsageError", "mount", "plan", "program"]


class Error(Exception):
    """The program failed. The text is its message; `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class UsageError(Error):
    """The program does not know a flag, or refuses its value."""


def program() -> str:
    """The program: `CKFS_BIN` if it is set, else that of this Python environment, else the one in `PATH`."""
    if chosen := os.environ.get("CKFS_BIN"):
        return chosen
    beside = Path(sysconfig.get_path("scripts")) / "ckfs"
    if beside.exists():
        return str(beside)
    if found := shutil.which("ckfs"):
        return found
    raise FileNotFoundError("no program ckfs in this Python environment or in PATH; set CKFS_BIN")


def _flags(flags: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, Mapping):
            value = ",".join(f"{key}={item}" for key, item in value.items())
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is True:
                words.append(flag)
            elif item is not None and item is not False:
                words.append(f"{flag}={os.fspath(item) if isinstance(item, os.PathLike) else item}")
    return words


def _run(*words: str) -> str:
    # The daemon of a mount closes these pipes, so that this returns when the mount answers.
    done = subprocess.run([program(), *words], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip().removeprefix("ckfs: ").removeprefix("error: ")
        raise (UsageError if done.returncode == 2 else Error)(message, done.returncode)
    return done.stdout.decode()


def _words(command: str, flags: Mapping[str, Any], *names: str | os.PathLike[str] | None) -> list[str]:
    return [command, *_flags(flags), "--", *(os.fspath(name) for name in names if name is not None)]


def plan(source: str | os.PathLike[str] | None = None, /, **flags: Any) -> dict[str, Any]:
    """What would be mounted: the document that `ckfs plan --json` prints. Without a source, `config` names it.

    Raises `Error` with all problems of the source and of the flags.
    """
    return json.loads(_run(*_words("plan", {**flags, "json": True}, source)))


@contextlib.contextmanager
def mount(
    source: str | os.PathLike[str], /, mountpoint: str | os.PathLike[str] | None = None, **flags: Any
) -> Iterator[Path]:
    """Mounts a source while the `with` block runs, and yields the mount point.

    Without `mountpoint`, the mount point is a new temporary directory, which is removed at the end. At the end the mount is
    detached: files that are still open or mapped stay readable until they are closed.

    Raises `Error` with all problems of the source and of the flags.
    """
    point = Path(os.path.abspath(mountpoint)) if mountpoint is not None else Path(tempfile.mkdtemp(prefix="ckfs-"))
    try:
        _run(*_words("mount", flags, source, point))
        try:
            yield point
        finally:
            _run("umount", "--lazy", "--", str(point))
    finally:
        if mountpoint is None:
            point.rmdir()
