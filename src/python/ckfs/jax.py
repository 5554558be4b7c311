"""A checkpoint as arrays of jax, with the shardings of a tree of abstract arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ._checkpoint import Checkpoint, Progress, Reported, _bytes_of, selected
from ._dtypes import PACKED_BITS
from ._errors import LoadError

if TYPE_CHECKING:
    from . import _ckfs as extension

# Bytes that are read to memory of the host at a time, before they are moved to devices.
STAGED_BYTES = 256 << 20
# Words of a training state beside the weights: below them are moments and averages that have the names of the weights.
STATE_WORDS = frozenset({"opt_state", "optimizer", "optim", "inner_state", "mu", "nu", "trace", "ema", "grads", "gradients"})


def _words(path: tuple[Any, ...]) -> list[str]:
    """The words of a leaf's place: keys, attributes and numbers."""
    return [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]


def _name(ck: Checkpoint, path: tuple[Any, ...]) -> str | None:
    """The checkpoint's name of a leaf. Variables of flax.nnx end in `value`; a train state has `params` around the weights."""
    words = _words(path)
    candidates = [words]
    if words and words[-1] in ("value", "raw_value"):
        candidates.append(words[:-1])
    for found in list(candidates):
        at = next((n for n, word in enumerate(found) if word == "params"), None)
        if at is None:
            candidates.append(["params", *found])
        elif not STATE_WORDS.intersection(found[:at]):
            candidates += [found[at:], found[at + 1 :]]
    return next((".".join(found) for found in candidates if ".".join(found) in ck), None)


def _pieces(leaf: Any) -> Iterator[tuple[tuple[slice, ...], list[Any]]]:
    """The distinct regions of an array that devices of this process hold, each with these devices."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    held: dict[tuple[tuple[int, int], ...], tuple[tuple[slice, ...], list[Any]]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None, "a device of this process has an index"
        words = tuple(slice(*word.indices(extent)[:2]) for word, extent in zip(index, leaf.shape, strict=True))
        key = tuple((word.start, word.stop) for word in words)
        held.setdefault(key, (words, []))[1].append(device)
    yield from held.values()


def load(ck: Checkpoint, abstract_tree: Any, *, threads: int | None = None, progress: Progress = False) -> Any:
    """Loads arrays for a tree of `jax.ShapeDtypeStruct`, or of arrays, each with the sharding that its leaf says.

    A leaf's name is its place in the tree, joined by dots: `{"layers": {"scanned": {"wq": ...}}}` for `layers.scanned.wq`.
    The weights of MaxText's abstract state (`state.params`) fit `layout="maxtext"`; an optimizer's state is in no checkpoint of
    weights, and a tree with one does not fit. A floating dtype other than the checkpoint's is cast to. Each process
    reads what its own devices hold, once; the sharding may be any, on any mesh. Leaves without one go to the default device.

    Returns the same tree with arrays. Raises `LoadError` with all names and shapes that do not fit, `ReadError`.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_tree)
    missing, mismatched, sources = [], [], []
    places: dict[str, str] = {}
    for path, leaf in leaves:
        name = _name(ck, path)
        place = ".".join(_words(path))
        if name is None:
            missing.append(place)
            continue
        source = ck[name]
        sources.append(source)
        if (other := places.setdefault(name, place)) != place:
            mismatched.append(f"{place}: is {name} of the checkpoint, and so is {other}; give the tree of the weights alone")
        if tuple(leaf.shape) != source.shape:
            mismatched.append(f"{place}: expected shape {list(leaf.shape)}, found {list(source.shape)} in the checkpoint")
        elif source._dtype_name in PACKED_BITS:
            mismatched.append(f"{place}: elements of {source._dtype_name} are packed, which jax does not read")
    if missing or mismatched:
        lines = [f"{len(missing)} missing in the checkpoint: {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}"]
        if any(STATE_WORDS.intersection(place.split(".")) for place in missing):
            lines.append("an optimizer's state is among them: give the tree of the weights alone, such as state.params")
        near = ck._open.nearest(ck._view, missing[0]) if missing else None
        if near:
            lines.append(f"did you mean {near!r} by {missing[0]!r}?")
        text = "\n  ".join((lines if missing else []) + mismatched)
        raise LoadError(f"the checkpoint does not fit the tree:\n  {text}", missing, mismatched=mismatched)
    found = list(zip(leaves, sources, strict=True))
    results: list[Any] = []
    waiting: list[tuple[Any, list[tuple[np.ndarray[Any, Any], list[Any]]]]] = []
    rows: list[extension.Row] = []
    staged = 0
    wanted = [(leaf, [(*selected(source.shape, region), devices) for region, devices in _pieces(leaf)]) for (_, leaf), source in found]
    reported = Reported(progress, sum(math.prod(shape) * np.dtype(leaf.dtype).itemsize for leaf, parts in wanted for _, shape, _ in parts))
    for (leaf, parts), (_, source) in zip(wanted, found, strict=True):
        dtype = np.dtype(leaf.dtype)
        pieces = []
        for selection, shape, devices in parts:
            array = np.empty(shape, dtype)
            rows.append((source._index, selection, dtype.name, _bytes_of(array)))
            pieces.append((array, devices))
            staged += array.nbytes
        waiting.append((leaf, pieces))
        if staged >= STAGED_BYTES:
            ck._load(rows, threads, reported.of(staged))
            results += [_made(*one) for one in waiting]
            rows, waiting, staged = [], [], 0
    ck._load(rows, threads, reported.of(staged))
    results += [_made(*one) for one in waiting]
    return jax.tree_util.tree_unflatten(tree, results)


def _made(leaf: Any, pieces: list[tuple[np.ndarray[Any, Any], list[Any]]]) -> Any:
    """The array of a leaf, from the regions that this process has read."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shards = [jax.device_put(array, device) for array, devices in pieces for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


__all__ = ["load"]
