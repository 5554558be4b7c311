"""Reads the files of a mount in every way, over and over, and compares each byte with what it read first by `expected`.

Arguments: mount point, directory with the same files as they must be. A line is written after each round; the end of standard input ends
it, with the checks of each kind as JSON.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import select
import sys
from pathlib import Path

PAGE = mmap.PAGESIZE


class Reader:
    def __init__(self, point: Path, expected: Path) -> None:
        self.random = random.Random(os.getpid())
        self.point = point
        self.bytes = {str(file.relative_to(expected)): file.read_bytes() for file in expected.rglob("*") if file.is_file()}
        self.names = {str(at.relative_to(expected)): sorted(os.listdir(at)) for at in [expected, *expected.rglob("*")] if at.is_dir()}
        # Opened and mapped before any daemon is replaced, and never closed.
        self.open = {name: os.open(point / name, os.O_RDONLY) for name in self.bytes}
        self.maps = {name: mmap.mmap(file, 0, prot=mmap.PROT_READ) for name, file in self.open.items()}
        self.counts: dict[str, int] = {}

    def span(self, data: bytes) -> tuple[int, int]:
        start = self.random.randrange(len(data))
        return start, min(self.random.choice([1, 4096, 100_000, 1 << 20]), len(data) - start)

    def check(self, kind: str, name: str, found: object, expected: object) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if found != expected:
            raise SystemExit(f"wrong: {kind} of {name}")

    def round(self) -> None:
        name = self.random.choice(list(self.bytes))
        data, file = self.bytes[name], self.open[name]
        # Otherwise the kernel answers from its cache.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        start, length = self.span(data)
        self.check("open before", name, os.pread(file, length, start), data[start : start + length])
        start, length = self.span(data)
        self.check("mapped before", name, self.maps[name][start : start + length], data[start : start + length])
        with open(self.point / name, "rb", buffering=0) as anew:
            self.check("opened anew", name, anew.read(), data)
        with open(self.point / name, "rb") as anew, mmap.mmap(anew.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            self.check("mapped anew", name, mapped[:], data)
        self.direct(name, data)
        self.check("size", name, os.stat(self.point / name).st_size, len(data))
        at = self.random.choice(list(self.names))
        self.check("listing", at, sorted(os.listdir(self.point / at)), self.names[at])

    def direct(self, name: str, data: bytes) -> None:
        try:
            direct = os.open(self.point / name, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The kernel reads it from a file in memory already, of a file system without O_DIRECT.
            self.check("O_DIRECT", name, True, True)
            return
        try:
            with mmap.mmap(-1, -(-len(data) // PAGE) * PAGE) as room:
                length = os.preadv(direct, [room], 0)
                self.check("O_DIRECT", name, room[:length], data[:length])
                self.check("O_DIRECT", name, length > 0, True)
        finally:
            os.close(direct)


def main() -> None:
    reader = Reader(Path(sys.argv[1]), Path(sys.argv[2]))
    while not select.select([sys.stdin], [], [], 0)[0]:
        reader.round()
        print("round", flush=True)
    print(json.dumps(reader.counts), flush=True)


main()
