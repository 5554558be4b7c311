"""Calls of the program `ckfs`: mounts, plans, servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from . import _settings
from ._errors import Error, PlanError, PlanWarning, UsageError
from ._plan import Plan
from ._settings import MountSettings, ServeSettings


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


# What the program tells its user on standard error.
_WARNING = re.compile(r"ckfs: warning: (.*)")


def _failed(stderr: bytes, code: int) -> Error:
    message = stderr.decode(errors="replace").strip().removeprefix("ckfs: ").removeprefix("error: ")
    if code == 2:
        return UsageError(message, code)
    # A list of problems has a line for each below the first.
    first, *rest = message.split("\n")
    problems = [line.strip() for line in rest if line.startswith("  ")] if " problems" in first else [message]
    return PlanError(message, code, problems)


def _run(*words: str) -> str:
    # The daemon of a mount closes these pipes, so that this returns when the mount answers.
    done = subprocess.run([program(), *words], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        raise _failed(done.stderr, done.returncode)
    for line in done.stderr.decode(errors="replace").splitlines():
        _warn(line)
    return done.stdout.decode()


def _warn(line: str) -> bool:
    """Whether a line is a warning. It is then one of the caller of this package."""
    found = _WARNING.match(line)
    if found:
        warnings.warn(found[1], PlanWarning, stacklevel=4)
    return found is not None


def _words(command: str, settings: Mapping[str, Any], *names: str | os.PathLike[str] | None) -> list[str]:
    return [command, *_settings.flags(settings), "--", *(os.fspath(name) for name in names if name is not None)]


def plan(source: str | os.PathLike[str] | None = None, /, **settings: Unpack[MountSettings]) -> Plan:
    """What would be mounted: the document that `ckfs plan --json` prints. Without a source, `config` names it.

    Raises `PlanError` with all problems of the source and of the view, `UsageError` for a refused setting.
    """
    words = _words("plan", settings, source)
    # The program says the warnings of the document on standard error, too.
    return Plan(json.loads(_run(words[0], "--json", *words[1:])))


class Mount(os.PathLike[str]):
    """A mount. It ends with its `with` block, by `unmount`, when the program ends, and when the program is killed.

    It is a path: `mount / "dev0"`. Files that are still open or mapped at the end stay readable until they are closed.
    """

    def __init__(self, path: Path, keeper: subprocess.Popen[bytes]) -> None:
        self.path = path
        """The mount point."""
        self._end = weakref.finalize(self, _end_mount, keeper, os.getpid())

    def unmount(self) -> None:
        """Ends the mount. Does nothing if it has ended."""
        self._end()

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.path / name

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.unmount()

    def __repr__(self) -> str:
        return f"<ckfs.Mount {self.path}{'' if self._end.alive else ', ended'}>"


class Server:
    """A running `ckfs serve`. It ends with its `with` block, by `stop`, when the program ends, and when the program is killed."""

    def __init__(self, address: str, process: subprocess.Popen[str], keeper: subprocess.Popen[bytes]) -> None:
        self.address = address
        """Where it answers, such as `http://127.0.0.1:8421`: what `HF_ENDPOINT` takes."""
        self._end = weakref.finalize(self, _end_server, process, keeper, os.getpid())

    @property
    def files(self) -> str:
        """Where the files are; paths follow."""
        return f"{self.address}/files/"

    def stop(self) -> None:
        """Ends the server. Does nothing if it has ended."""
        self._end()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<ckfs.Server {self.address}{'' if self._end.alive else ', ended'}>"


def _end_server(process: subprocess.Popen[str], keeper: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.terminate()
        process.wait()
        _let_go(keeper)


# The keeper waits for its input to end, which the kernel sees to however this process ends. It then detaches the mount, and
# removes the directory if that was made for it. Ctrl-C in a terminal is not for it.
_KEEPER = """trap '' INT QUIT HUP TERM
read -r _
"$0" umount --lazy -- "$1" >/dev/null 2>&1
[ -z "$2" ] || rmdir -- "$2"
"""


# Likewise for a server, unless it has ended before.
_SERVER_KEEPER = """trap '' INT QUIT HUP TERM
read -r _
kill "$0" 2>/dev/null
"""


def _keep(script: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", script, *words],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _let_go(keeper: subprocess.Popen[bytes]) -> None:
    if keeper.stdin is not None:
        keeper.stdin.close()
        keeper.wait()


def _end_mount(keeper: subprocess.Popen[bytes], owner: int) -> None:
    # A child of `fork` has the keeper's input too, but the mount is not its own.
    if os.getpid() == owner:
        _let_go(keeper)


def mount(
    source: str | os.PathLike[str] | None = None,
    /,
    mountpoint: str | os.PathLike[str] | None = None,
    **settings: Unpack[MountSettings],
) -> Mount:
    """Mounts a source. As a context manager the mount gives its path, and ends with the block.

    Without `mountpoint`, the mount point is a new temporary directory, which is removed at the end. Keywords are flags of
    `ckfs mount` with underscores for dashes. Warnings of the plan arrive as `ckfs.PlanWarning`.

    Raises `PlanError` with all problems of the source and of the view, `UsageError` for a refused setting.
    """
    made = tempfile.mkdtemp(prefix="ckfs-") if mountpoint is None else ""
    point = Path(made or os.path.abspath(os.fspath(mountpoint or "")))
    try:
        _run(*_words("mount", settings, source, point))
    except BaseException:
        if made:
            os.rmdir(made)
        raise
    return Mount(point, _keep(_KEEPER, program(), str(point), made))


def run(
    source: str | os.PathLike[str] | None,
    command: Sequence[str | os.PathLike[str]],
    /,
    *,
    check: bool = False,
    **settings: Unpack[MountSettings],
) -> subprocess.CompletedProcess[bytes]:
    """Runs a command with a mount of its own, which needs no root: `ckfs run`. The command finds it in `CKFS_MOUNT`.

    Its standard streams are those of this program. Returns when the command has ended; with `check`, an exit code other than
    0 raises `subprocess.CalledProcessError`.
    """
    words = ["run", *_settings.flags(settings)]
    names = [] if source is None else [os.fspath(source)]
    return subprocess.run([program(), *words, *names, "--", *(os.fspath(word) for word in command)], check=check)


# What `ckfs serve` says once it answers.
_SERVING = re.compile(r"ckfs: serving .* at (http://[^/ ]+)")


def serve(source: str | os.PathLike[str] | None = None, /, **settings: Unpack[ServeSettings]) -> Server:
    """Serves the files of a view over HTTP by `ckfs serve`, and `hf/` as a repository of the Hub. Returns when it answers.

    Keywords are flags of `ckfs serve`; by default it listens on a free port of this machine. Its log goes to standard error.

    Raises `PlanError` with all problems of the source and of the view, `UsageError` for a refused setting.
    """
    given: dict[str, Any] = {"listen": "127.0.0.1:0", **settings}
    names = [] if source is None else [os.fspath(source)]
    words = [program(), "serve", *_settings.flags(given, ServeSettings), "--", *names]
    # Ctrl-C in a terminal is for the program, which ends the server.
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    log = process.stderr
    assert log is not None, "a pipe was asked for"
    said: list[str] = []
    try:
        for line in log:
            if found := _SERVING.match(line):
                threading.Thread(target=shutil.copyfileobj, args=(log, sys.stderr), daemon=True).start()
                return Server(found[1], process, _keep(_SERVER_KEEPER, str(process.pid)))
            if not _warn(line):
                said.append(line)
    except BaseException:
        process.terminate()
        raise
    raise _failed("".join(said).encode(), process.wait())


__all__ = ["Mount", "Server", "mount", "plan", "program", "run", "serve"]
