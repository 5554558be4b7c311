"""The files that a mount would have, for programs that open files by fsspec: `ckfs://`, read-only, in this process.

    with fsspec.open("ckfs://npy/dev0/embed.npy", source="/data/llama", mesh="fsdp=4") as file:
        shard = numpy.load(file)

Paths are those of the mount. Options are `source` and the keywords of `ckfs.open`.
"""

from __future__ import annotations

import io
import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ._checkpoint import open as open_checkpoint
from ._settings import OpenSettings

if TYPE_CHECKING:
    from . import _ckfs as extension

    class AbstractFileSystem:
        """What is used here of a package without types."""

        def __init__(self, **options: Any) -> None: ...

        @classmethod
        def _strip_protocol(cls, path: str) -> str: ...
else:
    from fsspec import AbstractFileSystem

# Bytes that are read at once by programs that ask for few.
BUFFER_BYTES = 1 << 20


class CkfsFileSystem(AbstractFileSystem):
    """The files of one checkpoint. Two with the same options are one, which stays open."""

    protocol = "ckfs"
    root_marker = ""

    def __init__(self, source: str | os.PathLike[str] | None = None, **options: Any) -> None:
        settings = {name: options.pop(name) for name in list(options) if name in OpenSettings.__annotations__}
        super().__init__(source=source, **settings, **options)
        self._checkpoint = open_checkpoint(source, **settings)

    @property
    def _files(self) -> extension.OpenedCheckpoint:
        return self._checkpoint._open

    @property
    def fsid(self) -> str:
        return f"ckfs:{self._checkpoint.source}"

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        from . import _ckfs

        path = self._strip_protocol(path)
        return _entry(path, _ckfs.entry(self._files, path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        from . import _ckfs

        path = self._strip_protocol(path)
        found = self.info(path)
        if found["type"] == "directory":
            rows = _ckfs.entries(self._files, path)
            names = [f"{path}/{row[0]}" if path else row[0] for row in rows]
            listed = [_entry(name, row) for name, row in zip(names, rows)]
        else:
            listed = [found]
        return listed if detail else [entry["name"] for entry in listed]

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], timezone.utc)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        from . import _ckfs

        path = self._strip_protocol(path)
        first, last, _ = slice(start, end).indices(self.info(path)["size"])
        return _ckfs.read(self._files, path, first, max(last - first, 0))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> io.BufferedReader:
        if mode != "rb":
            raise OSError(30, "ckfs is read-only", path)
        info = self.info(path)
        if info["type"] == "directory":
            raise IsADirectoryError(21, "is a directory", path)
        return io.BufferedReader(_File(self, info), block_size or BUFFER_BYTES)


def _entry(name: str, row: tuple[str, bool, int, float]) -> dict[str, Any]:
    _, is_directory, size, modified = row
    return {"name": name, "size": size, "type": "directory" if is_directory else "file", "mtime": modified}


class _File(io.RawIOBase):
    """An open file."""

    def __init__(self, files: CkfsFileSystem, info: dict[str, Any]) -> None:
        self._fs = files
        self.name: str = info["name"]
        self.size: int = info["size"]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at: int = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence] + offset
        if at < 0:
            raise OSError(22, "negative position in a file", self.name)
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        found = self._fs.cat_file(self.name, self._at, self._at + len(target))
        target[: len(found)] = found
        self._at += len(found)
        return len(found)
