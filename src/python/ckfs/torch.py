"""A checkpoint as tensors of torch: new ones, or those of a module or state dict, filled in place.

No call here communicates: each process reads what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from ._checkpoint import Checkpoint, Progress, Reported, Selection, selected
from ._dtypes import PACKED_BITS, packed_bytes
from ._errors import LoadError

if TYPE_CHECKING:
    from . import _ckfs as extension

# Least and most bytes of each of the two stages in memory of the host, through which values go to a device. To pin memory takes
# longer than to fill it, so a small load has small ones.
STAGE_BYTES = (32 << 20, 256 << 20)
# A load is cut into this many parts, as far as the bounds allow it.
STAGED_PARTS = 128
# Each tensor of a stage begins at a multiple of this.
STAGE_ALIGNMENT = 64
# Words that wrappers of modules put into names.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

State: TypeAlias = torch.nn.Module | MutableMapping[str, Any] | Mapping[str, Any]


class IncompatibleKeys(NamedTuple):
    """What `Module.load_state_dict` returns: names that one side lacks."""

    missing_keys: list[str]
    """Names of the state that the checkpoint lacks; these tensors are unchanged."""
    unexpected_keys: list[str]
    """Names of the checkpoint that the state lacks."""


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in its own memory."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


def _memory(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a contiguous tensor in memory of the host."""
    flat: np.ndarray[Any, np.dtype[np.uint8]] = _bytes(tensor).numpy()
    return flat


def _new(shape: Iterable[int], name: str, device: torch.device | None) -> torch.Tensor:
    """New memory: of the host's it is numpy's, which asks for huge pages. Types that torch lacks are packed bytes."""
    shape = tuple(shape)

    def memory(size: int) -> torch.Tensor:
        if device is not None:
            return torch.empty(size, dtype=torch.uint8, device=device)
        return torch.from_numpy(np.empty(size, np.uint8))

    if name in PACKED_BITS:
        size = packed_bytes(name, math.prod(shape))
        rows = (*shape[:-1], -1) if shape and size else (size,)
        packed = memory(size).reshape(rows)
        dtype = getattr(torch, f"{name}_x2", None)
        return packed if dtype is None else packed.view(dtype)
    dtype = getattr(torch, name)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    return memory(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def load(
    ck: Checkpoint,
    device: int | None = None,
    *,
    to: torch.device | str | None = None,
    only: str | Iterable[str] | None = None,
    threads: int | None = None,
    progress: Progress = False,
) -> dict[str, torch.Tensor]:
    """Loads the shards of a device of the mesh, or whole tensors without one, as new tensors by name.

    `to` is the torch device that they are moved to, a part at a time. The other arguments are those of `Checkpoint.load`.
    Elements narrower than a byte stay packed: `float4_e2m1fn_x2` where torch has it, else `uint8`, the last axis in bytes.
    """
    names = ck._chosen(only, device)
    other = None if to is None else torch.device(to)
    if other is not None and other.type == "cpu":
        other = None
    tensors: dict[str, torch.Tensor] = {}
    parts: list[_Part] = []
    for name in names:
        source = ck[name]
        region = () if device is None else source.region(device)
        selection, shape = selected(source.shape, region)
        tensors[name] = _new(shape, source._dtype_name, other)
        parts.append(_Part(source._index, selection, None, tensors[name]))
    if other is None:
        ck._load([part.row(part.target) for part in parts], threads, progress)
    else:
        _load_by_stages(ck, parts, threads, Reported(progress, sum(part.target.nbytes for part in parts)))
    return tensors


class _Part(NamedTuple):
    """A part of a tensor, and the memory that it is for, which has its shape."""

    # Its number in the view.
    tensor: int
    selection: list[Selection]
    # What to cast to: the name of a dtype.
    dtype: str | None
    target: torch.Tensor

    def row(self, memory: torch.Tensor) -> extension.Row:
        return (self.tensor, self.selection, self.dtype, _memory(memory))

    def cut(self, most: int) -> Iterator[_Part]:
        """Parts of at most so many bytes, as far as whole elements of the axes allow."""
        shape = [stop - start for start, stop, _ in self.selection]
        # The last axis of packed elements has other extents, and is not cut.
        axes = range(len(shape) if list(self.target.shape) == shape else len(shape) - 1)
        axis = next((axis for axis in axes if shape[axis] > 1), None)
        # Packed rows that share a byte are read together. An empty tensor is at most anything.
        if self.target.nbytes <= most or axis is None or self.target.nbytes * 8 % math.prod(shape) != 0:
            yield self
            return
        count = max(1, most // (self.target.nbytes // shape[axis]))
        for at in range(0, shape[axis], count):
            start, size = self.selection[axis][0] + at, min(count, shape[axis] - at)
            selection = [*self.selection[:axis], (start, start + size, 1), *self.selection[axis + 1 :]]
            yield from self._replace(selection=selection, target=self.target.narrow(axis, at, size)).cut(most)


class _Stage:
    """Memory of the host that is filled, and then copied to devices while another stage is filled."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.memory, self.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=pinned), pinned
        self.copied: list[Any] = []

    def wait(self) -> None:
        """Until its memory is copied."""
        for event in self.copied:
            event.synchronize()
        self.copied = []

    def send(self, ck: Checkpoint, parts: list[_Part], threads: int | None, progress: Progress) -> None:
        """Reads the parts, and begins to copy them to where they belong."""
        self.wait()
        places, end = [], 0
        for part in parts:
            raw = self.memory[end : end + part.target.nbytes]
            places.append(raw.view(part.target.dtype).reshape(part.target.shape))
            end += _staged_bytes(part)
        ck._load([part.row(place) for part, place in zip(parts, places)], threads, progress)
        for part, place in zip(parts, places):
            if part.target.is_contiguous():
                _bytes(part.target).copy_(_bytes(place), non_blocking=self.pinned)
            else:
                part.target.copy_(place, non_blocking=self.pinned)
        if self.pinned:
            for device in {part.target.device for part in parts if part.target.is_cuda}:
                event = cast("Any", torch.cuda).Event()  # which torch has no types for
                event.record(torch.cuda.current_stream(device))
                self.copied.append(event)


def _staged_bytes(part: _Part) -> int:
    return -(-part.target.nbytes // STAGE_ALIGNMENT) * STAGE_ALIGNMENT


def _load_by_stages(ck: Checkpoint, parts: list[_Part], threads: int | None, reported: Reported) -> None:
    """Loads parts whose memory cannot be read into: of other devices, or elements that do not follow each other.

    Copies to a GPU begin from pinned memory, so that they need no processor and run while the next parts are read.
    """
    least, most = STAGE_BYTES
    limit = min(max(sum(map(_staged_bytes, parts)) // STAGED_PARTS, least), most)
    groups: list[list[_Part]] = [[]]
    filled = largest = 0
    for part in (piece for part in parts for piece in part.cut(limit)):
        size = _staged_bytes(part)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += size
        largest = max(largest, filled)
    pinned = any(part.target.is_cuda for part in parts)
    stages = [_Stage(largest, pinned) for _ in groups[:2]]
    with torch.no_grad():
        for turn, group in enumerate(groups):
            size = sum(part.target.nbytes for part in group)
            stages[turn % 2].send(ck, group, threads, reported.of(size))
    for stage in stages:
        stage.wait()


def _chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """The part of a range, as `torch.chunk` cuts it."""
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def _region(name: str, tensor: Any) -> tuple[slice, ...] | None:
    """The part of a DTensor that this process holds; `None` if it holds nothing.

    A placement splits what those before it on the same axis leave. A strided one, as FSDP2 makes over tensor parallelism,
    splits what those behind it leave: its `split_factor` says how many parts these make.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    order: dict[int, list[int]] = {}
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_partial():
            raise LoadError(f"{name}: placement {placement}: a partial sum cannot be loaded")
        if placement.is_replicate():
            continue
        outer = order.setdefault(placement.dim % tensor.ndim, [])
        parts, at = getattr(placement, "split_factor", 1), 0
        while parts > 1 and at < len(outer) and parts % tensor.device_mesh.size(outer[at]) == 0:
            parts //= tensor.device_mesh.size(outer[at])
            at += 1
        if parts != 1:
            raise LoadError(f"{name}: placements {tensor.placements}: no nesting of the mesh axes has this split factor")
        outer.insert(at, axis)
    ranges = [(0, extent) for extent in tensor.shape]
    for dim, axes in order.items():
        for axis in axes:
            ranges[dim] = _chunk(*ranges[dim], tensor.device_mesh.size(axis), coordinate[axis])
    local = [stop - start for start, stop in ranges]
    if math.prod(local) == tensor._local_tensor.numel() == 0:
        return None
    if list(tensor._local_tensor.shape) != local:
        found = list(tensor._local_tensor.shape)
        raise LoadError(f"{name}: placements {tensor.placements} on {list(tensor.shape)}: expected a shard {local}, found {found}")
    return tuple(slice(*bounds) for bounds in ranges)


class _Target(NamedTuple):
    """A tensor of the state: the name in it, the memory of this process, and its part of the whole."""

    key: str
    local: torch.Tensor
    shape: tuple[int, ...]
    region: tuple[slice, ...] | None


def _plain_name(key: str) -> str:
    for word in WRAPPERS:
        key = key.replace(word, "")
    return key


def _targets(state: Mapping[str, Any]) -> Iterator[_Target]:
    for key, value in state.items():
        # What a module keeps besides tensors is not in a checkpoint of weights.
        if not isinstance(value, torch.Tensor):
            continue
        shape = tuple(value.shape)
        local, region = getattr(value, "_local_tensor", None), tuple(slice(None) for _ in shape)
        if local is None:
            yield _Target(key, value, shape, region)
        else:
            yield _Target(key, local, shape, _region(key, value))


def _place(local: torch.Tensor) -> tuple[Any, ...]:
    """What tells whether two tensors are one."""
    return (local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last address of the elements."""
    start, size = tensor.data_ptr(), tensor.element_size()
    return start, start + size * (1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride())))


def _addresses(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array with its elements where those of the tensor are: to be compared, not to be read."""
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    interface = {"version": 3, "typestr": f"|V{size}", "data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _is_folded(tensor: torch.Tensor) -> bool:
    """Whether elements of one tensor may share memory: along some axis it goes less far than the axes inside are long."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape)):
        if extent > 1 and stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def _check_memory(targets: list[_Target]) -> None:
    """Refuses tensors of the state that share memory and are not one: which of two values it then has would be chance."""
    filled = [target for target in targets if target.region is not None and target.local.numel()]
    shared = [f"{target.key}: elements of it share memory" for target in filled if _is_folded(target.local)]
    filled.sort(key=lambda target: (str(target.local.device), target.local.data_ptr()))
    for at, target in enumerate(filled):
        end = _bounds(target.local)[1]
        for other in filled[at + 1 :]:
            if other.local.device != target.local.device or other.local.data_ptr() >= end:
                break
            if np.shares_memory(_addresses(target.local), _addresses(other.local)):
                shared.append(f"{target.key} and {other.key} share memory")
    if shared:
        text = "the state has memory for several values:\n  " + "\n  ".join(shared[:8])
        more = f"\n  and {len(shared) - 8} more" if len(shared) > 8 else ""
        raise LoadError(f"{text}{more}\n  give each tensor memory of its own, as by .contiguous() or .clone()", mismatched=shared)


def load_into(
    ck: Checkpoint,
    state: State,
    strict: bool = True,
    *,
    threads: int | None = None,
    progress: Progress = False,
) -> IncompatibleKeys:
    """Fills a module or a state dict in place. A DTensor gets the part that its own mesh and placements give this process.

    Names are those of the checkpoint's layout: open it with `layout="hf"`, `"transformers"` or `"torchtitan"`, as the module
    is. FSDP2, HSDP, tensor parallelism and their combinations, plain tensors, buffers of the state dict and tied parameters
    are filled, with no communication. A floating dtype other than the checkpoint's is cast to, as `copy_` does. Buffers that
    are not persistent are not in a state dict: after `to_empty` they are the caller's to set.

    As `Module.load_state_dict`: with `strict`, missing and unexpected names are an error, raised before anything is changed;
    without, they are returned. Other shapes, tensors on the meta device and tensors that share a part of their memory are
    always an error.

    Raises `LoadError`; `ReadError`, after which the state holds anything.
    """
    tensors = state.state_dict(keep_vars=True) if isinstance(state, torch.nn.Module) else state
    targets = list(_targets(tensors))
    if isinstance(state, torch.nn.parallel.DistributedDataParallel):
        names = {target.key: _plain_name(target.key.removeprefix("module.")) for target in targets}
    else:
        names = {target.key: _plain_name(target.key) for target in targets}
    _check(ck, targets, names)
    # Of names that are one tensor the last that the checkpoint has is loaded, as one after the other would leave it.
    chosen: dict[tuple[Any, ...], _Target] = {}
    for target in targets:
        if names[target.key] in ck:
            chosen[_place(target.local) if target.local.numel() else (target.key,)] = target
    missing = [t.key for t in targets if names[t.key] not in ck and _place(t.local) not in chosen]
    known = set(names.values())
    unexpected = [name for name in ck.bundle() if name not in known]
    if strict and (missing or unexpected):
        raise LoadError(_difference(missing, unexpected), missing, unexpected)
    _check_memory(list(chosen.values()))
    _fill(ck, [(target, names[target.key]) for target in chosen.values() if target.region is not None], threads, progress)
    return IncompatibleKeys(missing, unexpected)


def _check(ck: Checkpoint, targets: list[_Target], names: dict[str, str]) -> None:
    """Refuses shapes that differ, and memory that does not exist."""
    found = [target for target in targets if names[target.key] in ck]
    other = [
        f"{target.key}: expected shape {list(target.shape)}, found {list(ck[names[target.key]].shape)} in the checkpoint"
        for target in found
        if target.shape != ck[names[target.key]].shape
    ]
    if other:
        raise LoadError("the checkpoint has tensors of other shapes:\n  " + "\n  ".join(other), mismatched=other)
    meta = [target.key for target in found if target.local.is_meta]
    if meta:
        text = f"{meta[0]} and {len(meta) - 1} more tensors are on the meta device" if len(meta) > 1 else f"{meta[0]} is on the meta device"
        raise LoadError(f"{text}: give them memory first, as by module.to_empty(device=...)", meta)


def _difference(missing: list[str], unexpected: list[str]) -> str:
    lines = [
        f"{len(names)} {what}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        for what, names in (("missing in the checkpoint", missing), ("unexpected, not in the state", unexpected))
        if names
    ]
    advice = "names are those of the layout: open with layout=\"hf\", \"transformers\" or \"torchtitan\", or give strict=False"
    return "the checkpoint does not fit the state:\n  " + "\n  ".join(lines) + f"\n  {advice}"


def _fill(ck: Checkpoint, chosen: list[tuple[_Target, str]], threads: int | None, progress: Progress) -> None:
    direct: list[_Part] = []
    staged: list[_Part] = []
    for target, name in chosen:
        source = ck[name]
        selection, _ = selected(source.shape, target.region)
        local = target.local.detach()
        # Memory of the host whose elements follow each other is filled directly.
        parts = direct if local.device.type == "cpu" and local.is_contiguous() else staged
        parts.append(_Part(source._index, selection, _name_of(local.dtype), local))
    sizes = [sum(part.target.nbytes for part in parts) for parts in (direct, staged)]
    reported = Reported(progress, sum(sizes))
    if direct or not staged:
        ck._load([part.row(part.target) for part in direct], threads, reported.of(sizes[0]))
    if staged:
        _load_by_stages(ck, staged, threads, reported)


__all__ = ["IncompatibleKeys", "load", "load_into"]
