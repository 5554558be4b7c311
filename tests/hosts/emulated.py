#!/usr/bin/env python3
"""Runs a command as root where programs for aarch64 run too, by qemu-user, and nowhere else on the machine.

    emulated.py COMMAND [ARGUMENT…]

The command is in a user namespace with all ids, and has mounts and processes of its own. There the kernel knows qemu-aarch64-static as
the interpreter of these programs (`binfmt_misc`), as of Linux 6.7, where that is a matter of the namespace. In earlier kernels it is
one of the whole machine, which this program leaves alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

# sched.h and sys/mount.h.
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
QEMU = "/usr/bin/qemu-aarch64-static"
# The head of a 64-bit little-endian program or library for aarch64. Flags: the interpreter is opened now, so that roots need none.
HEAD = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
RULE = f":ckfs-aarch64:M::{HEAD}:{MASK}:{QEMU}:OCF"

libc = ctypes.CDLL(None, use_errno=True)


def mount(kind: str | None, target: str, flags: int = 0) -> None:
    name = kind.encode() if kind else None
    if libc.mount(name, target.encode(), name, flags, None) != 0:
        sys.exit(f"emulated.py: {target}: {os.strerror(ctypes.get_errno())}")


def inside() -> None:
    """In the namespaces: mounts what belongs to them, and becomes the command."""
    mount(None, "/", MS_REC | MS_PRIVATE)
    mount("proc", "/proc")
    mount("binfmt_misc", "/proc/sys/fs/binfmt_misc")
    try:
        Path("/proc/sys/fs/binfmt_misc/register").write_text(RULE)
    except OSError as error:
        sys.exit(f"emulated.py: {QEMU} is not accepted as interpreter ({error.strerror}): Linux 6.7 or later can")
    os.execvp(sys.argv[1], sys.argv[1:])


def status(pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def main() -> None:
    ready, is_ready = os.pipe()
    mapped, is_mapped = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(is_mapped)
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID) != 0:
            sys.exit(f"emulated.py: unshare: {os.strerror(ctypes.get_errno())}")
        os.write(is_ready, b".")
        if not os.read(mapped, 1):
            sys.exit("emulated.py: the ids could not be mapped; only root may map all")
        if (second := os.fork()) == 0:
            inside()
        sys.exit(status(second))
    os.close(is_ready)
    if os.read(ready, 1):
        try:
            for kind in ("uid", "gid"):
                Path(f"/proc/{first}/{kind}_map").write_text("0 0 4294967295\n")
            os.write(is_mapped, b".")
        except OSError:
            os.close(is_mapped)
    sys.exit(status(first))


if __name__ == "__main__":
    main()
