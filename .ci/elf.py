#!/usr/bin/env python3
"""Which processor a program is for, from its own header: packages are named by it, whatever machine makes them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "target/dist/ckfs"
# `e_machine` of ELF, as `uname -m` names it.
MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}


def machine(program: Path = PROGRAM) -> str:
    """The architecture of a 64-bit little-endian ELF file."""
    if not program.is_file():
        sys.exit(f"{program}: no such file; run .ci/dist first")
    with program.open("rb") as file:
        head = file.read(20)
    if head[:6] != b"\x7fELF\x02\x01" or (found := MACHINES.get(int.from_bytes(head[18:20], "little"))) is None:
        sys.exit(f"{program}: no 64-bit ELF file for one of {', '.join(MACHINES.values())}")
    return found


if __name__ == "__main__":
    print(machine(Path(sys.argv[1])))
