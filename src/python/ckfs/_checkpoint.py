"""A checkpoint in process: tensors as arrays, without a mount."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast

from . import _settings
from ._dtypes import PACKED_BITS, numpy_dtype, packed_bytes, unpacked
from ._errors import Error, PlanWarning, UsageError
from ._plan import Plan, amount, table
from ._settings import OpenSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from . import _ckfs as extension

Index: TypeAlias = Any
"""An int, a slice, an ellipsis, None, or a tuple of these."""
Selection: TypeAlias = tuple[int, int, int]
Spec: TypeAlias = tuple[str | tuple[str, ...] | None, ...]
Progress: TypeAlias = Callable[[int, int], object] | bool


def open(source: str | os.PathLike[str] | None = None, /, *, view: str | None = None, **settings: Unpack[OpenSettings]) -> Checkpoint:  # noqa: A001, E501
    """Opens a checkpoint in this process: no mount, no daemon, and no root.

    `source` is what `ckfs mount` takes: a directory or file, `org/name[@revision]`, `hf://`, `s3://`, `gs://`, `az://` or
    `https://`. Without it, the file that `config` names says it. Keywords are the settings of a view and of reading:
    `mesh={"fsdp": 4}`, `layout="maxtext"`, `dtype="bf16"`, `devices=[0, 1]`, ...; `ckfs plan --help` explains them. Of a
    configuration with several views, `view` names one.

    Warnings of the plan arrive as `ckfs.PlanWarning`.

    Raises `TypeError` for an unknown keyword, `UsageError` for a refused value, `PlanError` with all problems of source and
    plan, and `ForkError` in a child of a process that has opened one.
    """
    try:
        from . import _ckfs
    except ImportError as error:
        raise Error(f"this installation of ckfs lacks its extension, which opens checkpoints in process: {error}") from error
    given = _settings.values(settings)
    opened, found = _ckfs.open(None if source is None else os.fspath(source), given)
    for text in found:
        warnings.warn(text, PlanWarning, stacklevel=2)
    views = opened.views()
    if view is None:
        if len(views) > 1:
            raise UsageError(f"the configuration has several views; give view=, one of: {', '.join(views)}")
        number = 0
    elif view in views:
        number = views.index(view)
    else:
        raise UsageError(f"no view {view!r}; there are: {', '.join(repr(name) for name in views)}")
    return Checkpoint(opened, number)


class Checkpoint(Mapping[str, "Tensor"]):
    """An opened checkpoint: a mapping from names, with dots, to tensors whose bytes are read when they are asked for.

    All names that the plan has are in it. With the layout `canonical` that is each layer by itself (`layers.0.wq`) and the
    stack of all (`layers.scanned.wq`). `load` takes each weight once.

    The files may not change while it is open: a read of bytes that have changed raises `ReadError`.
    """

    def __init__(self, opened: extension.OpenedCheckpoint, view: int) -> None:
        self._opened: extension.OpenedCheckpoint | None = opened
        self._view = view
        names = opened.names(view)
        self._index = {name: index for index, (name, _) in enumerate(names)}
        self._bundle = [name for name, bundled in names if bundled]
        self.source = opened.label()
        self.mesh = dict(opened.mesh(view))
        """Names and sizes of the mesh axes, the last one fastest."""
        self.devices = opened.devices(view)
        """The devices that the settings list."""

    @property
    def _open(self) -> extension.OpenedCheckpoint:
        if self._opened is None:
            raise Error("the checkpoint is closed")
        return self._opened

    def close(self) -> None:
        """Ends the use of the source. Arrays stay."""
        self._opened = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> Tensor:
        index = self._index.get(name)
        if index is None:
            near = self._open.nearest(self._view, str(name))
            raise KeyError(f"no tensor {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        return Tensor(self, index)

    # Two checkpoints are the same if they are one object: values are compared as arrays, not here.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"<ckfs.Checkpoint {self.source}: {len(self)} tensors{', mesh ' + mesh if mesh else ''}>"

    def plan(self) -> Plan:
        """The plan: the document of `ckfs plan --json`, a dict that a notebook shows as a table."""
        return Plan(json.loads(self._open.plan_json()))

    def bundle(self) -> list[str]:
        """The names that together hold each weight once: those that `load` takes."""
        return list(self._bundle)

    def _chosen(self, only: str | Iterable[str] | None, device: int | None) -> list[str]:
        """Names by patterns. A pattern that none of the bundle matches is looked for among all names."""
        bundle = self._bundle if device is None else self._open.stage_names(self._view, device)
        if only is None:
            return list(bundle)
        chosen: dict[str, None] = {}
        for pattern in [only] if isinstance(only, str) else only:
            if pattern in self._index:
                found = [pattern]
            else:
                found = fnmatch.filter(bundle, pattern) or fnmatch.filter(self._index, pattern)
            if not found:
                near = self._open.nearest(self._view, pattern)
                raise KeyError(f"only={pattern!r}: no such tensor" + (f"; did you mean {near!r}?" if near else ""))
            chosen.update(dict.fromkeys(found))
        return list(chosen)

    def load(
        self,
        device: int | None = None,
        *,
        only: str | Iterable[str] | None = None,
        threads: int | None = None,
        progress: Progress = False,
    ) -> dict[str, npt.NDArray[Any]]:
        """Loads the shards of a device, or whole tensors without one, by all processors.

        Each weight is loaded once: `layers.scanned.wq` and not `layers.0.wq`, unless `only` names it. `only` is a name or a
        pattern (`"*.wq"`), or several. `threads` is the most threads to use. `progress(done, total)` is called with bytes
        several times a second; `True` writes them to standard error.

        Returns new arrays by name, of `t.dtype`, shape that of the shard. Raises `ReadError`, and `KeyboardInterrupt` within
        a second of Ctrl-C.
        """
        names = self._chosen(only, device)
        parts = []
        for name in names:
            tensor = self[name]
            region = None if device is None else tensor.region(device)
            parts.append(_Part(tensor, region))
        arrays = [part.allocated() for part in parts]
        self._load([part.row(array) for part, array in zip(parts, arrays)], threads, progress)
        return {name: part.finished(array) for name, part, array in zip(names, parts, arrays)}

    def _load(self, rows: Sequence[extension.Row], threads: int | None = None, progress: Progress = False) -> None:
        report = _write_progress if progress is True else progress or None
        self._open.load(self._view, rows, threads, report)


def _write_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    sys.stderr.write(f"\rckfs: {amount(done)} of {amount(total)}{end}")
    sys.stderr.flush()


class Reported:
    """Progress of several loads as that of one, of `total` bytes."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.report = _write_progress if progress is True else progress or None
        self.total, self.begun = total, 0

    def of(self, size: int) -> Progress:
        """The progress of the next load, of `size` bytes."""
        report, begun = self.report, self.begun
        self.begun += size
        return False if report is None else lambda done, _: report(begun + done, self.total)


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous array, in its own memory."""
    import numpy as np

    return array.reshape(-1).view(np.uint8)


class _Part:
    """A part of a tensor: what is read along each axis, and the shape that the caller sees."""

    def __init__(self, tensor: Tensor, region: Index = None) -> None:
        self.tensor = tensor
        key = () if region is None else region
        self.selection, self.shape = selected(tensor.shape, key)
        self.packed = PACKED_BITS.get(tensor._dtype_name)
        if self.packed is not None and region is not None:
            # Elements that share a byte are read together, and the part is taken of them.
            self.key: Index = key
            self.selection, self.read_shape = [(0, extent, 1) for extent in tensor.shape], tensor.shape
        else:
            self.key, self.read_shape = None, self.shape

    def allocated(self) -> npt.NDArray[Any]:
        """New memory for what is read."""
        import numpy as np

        if self.packed is not None:
            return np.empty(packed_bytes(self.tensor._dtype_name, math.prod(self.read_shape)), np.uint8)
        return np.empty(self.shape, self.tensor.dtype)

    def row(self, array: npt.NDArray[Any]) -> extension.Row:
        return (self.tensor._index, self.selection, None, _bytes_of(array))

    def finished(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.packed is None:
            return array
        whole = unpacked(self.tensor._dtype_name, array, self.read_shape)
        return whole if self.key is None else whole[self.key]


def selected(shape: tuple[int, ...], key: Index) -> tuple[list[Selection], tuple[int, ...]]:
    """What an index takes along each axis, as start, stop and step, and the shape of the result: numpy's basic indexing."""
    import operator

    words = list(key) if isinstance(key, tuple) else [key]
    if sum(word is Ellipsis for word in words) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    axes = sum(word is not None and word is not Ellipsis for word in words)
    if axes > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} axes, but {axes} were indexed")
    at = next((n for n, word in enumerate(words) if word is Ellipsis), len(words))
    words[at : at + 1] = [slice(None)] * (len(shape) - axes)
    selection: list[Selection] = []
    result: list[int] = []
    for word in words:
        if word is None:
            result.append(1)
            continue
        extent = shape[len(selection)]
        if isinstance(word, slice):
            start, stop, step = word.indices(extent)
            count = len(range(start, stop, step))
            # A step that is never taken may have any size.
            selection.append((start, stop, step) if count > 1 else (start, start + count, 1) if count else (0, 0, 1))
            result.append(count)
            continue
        try:
            if isinstance(word, bool):
                raise TypeError("a bool is a mask")
            number = operator.index(word)
        except TypeError as error:
            text = f"a tensor is indexed by ints, slices, ... and None, found {word!r}: read a region, and index that array"
            raise IndexError(text) from error
        if not -extent <= number < extent:
            raise IndexError(f"index {number} is out of bounds for axis {len(selection)} with size {extent}")
        number %= extent
        selection.append((number, number + 1, 1))
    return selection, tuple(result)


class Tensor:
    """A tensor of a checkpoint. It has no bytes: indexing it reads the region, and nothing else, into a new array.

    `t[2:4, ..., ::2]` is numpy's basic indexing: ints, slices with steps of either sign, `...` and `None`.
    `numpy.asarray(t)` reads all of it.
    """

    __slots__ = ("_checkpoint", "_dtype_name", "_index", "_spec", "layers", "logical", "name", "nbytes", "shape", "sources")

    def __init__(self, checkpoint: Checkpoint, index: int) -> None:
        self._checkpoint, self._index = checkpoint, index
        row = checkpoint._open.tensor_row(checkpoint._view, index)
        self.name: str = row[0]
        self.shape: tuple[int, ...] = tuple(row[1])
        self._dtype_name: str = row[2]
        self._spec: str = row[3]
        self.nbytes: int = row[4]
        """Bytes of the whole tensor, as files have them: packed, where elements are narrower than a byte."""
        self.layers: tuple[int, ...] | None = None if row[5] is None else tuple(row[5])
        """Numbers of the layers that are stacked on axis 0, for a stack."""
        self.logical: tuple[str, ...] = tuple(row[6])
        """Logical names of the axes, where the layout gives them."""
        self.sources: tuple[str, ...] = tuple(row[7])
        """The tensors of the repository that it is made from."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, numpy's or that of ml_dtypes."""
        return numpy_dtype(self._dtype_name)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def spec(self) -> Spec:
        """For each axis the mesh axis that splits it, several of them, or None: what `PartitionSpec(*t.spec)` takes."""
        words = json.loads(self._spec)
        return tuple(tuple(word) if isinstance(word, list) else word for word in words)

    def region(self, device: int) -> tuple[slice, ...]:
        """The part that a device holds: `t[t.region(d)]` is `t.shard(d)`."""
        found = self._checkpoint._open.region(self._checkpoint._view, self._index, device)
        return tuple(slice(start, stop) for start, stop in found)

    def shard(self, device: int) -> npt.NDArray[Any]:
        """The part that a device holds, as a new array."""
        return cast("npt.NDArray[Any]", self._read(self.region(device)))

    def _read(self, key: Index) -> Any:
        part = _Part(self, key)
        array = part.allocated()
        self._checkpoint._load([part.row(array)])
        return part.finished(array)

    def __getitem__(self, key: Index) -> Any:
        array = self._read(key)
        words = key if isinstance(key, tuple) else (key,)
        # As numpy: an element by its numbers is a scalar, with an ellipsis it is an array.
        return array[()] if array.shape == () and Ellipsis not in [w for w in words if w is not None] else array

    def read_into(self, buffer: Any, region: Index = (), *, threads: int | None = None) -> None:
        """Reads a region into memory of the caller: an array of the region's shape and of `t.dtype`, or a buffer of its bytes.

        The memory must be writable and contiguous, in the order of rows. Raises `ValueError` if it does not fit.
        """
        selection, shape = selected(self.shape, region)
        try:
            import numpy as np
        except ImportError:
            is_array = False
        else:
            is_array = isinstance(buffer, np.ndarray)
        if is_array and (buffer.dtype != "uint8" or self._dtype_name == "uint8"):
            if self._dtype_name in PACKED_BITS:
                raise ValueError(f"{self.name}: elements of {self._dtype_name} are packed: expected a buffer of bytes")
            if buffer.dtype != self.dtype or buffer.shape != shape:
                expected, found = f"{self.dtype} {list(shape)}", f"{buffer.dtype} {list(buffer.shape)}"
                raise ValueError(f"{self.name}: expected an array {expected}, found {found}")
            if not buffer.flags.c_contiguous or not buffer.flags.writeable:
                raise ValueError(f"{self.name}: expected a writable array whose rows follow each other")
            memory = _bytes_of(buffer)
        elif is_array:
            memory = buffer
        else:
            memory = cast("Any", memoryview(buffer).cast("B"))
        self._checkpoint._load([(self._index, selection, None, memory)], threads)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.name}: an array of it is always a copy")
        array = cast("npt.NDArray[Any]", self._read(()))
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<ckfs.Tensor {self.name} {self._dtype_name}{list(self.shape)} spec={self.spec}>"

    def _repr_html_(self) -> str:
        more = len(self.sources) - 3
        sources = ", ".join(self.sources[:3]) + (f" and {more} more" if more > 0 else "")
        rows = [
            ("shape", "×".join(map(str, self.shape)) or "one element"),
            ("dtype", self._dtype_name),
            ("bytes", amount(self.nbytes)),
            ("spec", ", ".join("-" if axis is None else str(axis) for axis in self.spec) or "-"),
            ("sources", sources),
        ]
        return table(rows, self.name)


__all__ = ["Checkpoint", "Tensor", "open"]
