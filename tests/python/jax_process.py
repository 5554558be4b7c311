"""Loads arrays by `ckfs.jax.load` in one of several processes, each with four devices, and compares what the process holds.

    python jax_process.py PROCESS PROCESSES PORT SOURCE
"""

from __future__ import annotations

import os
import sys

PROCESS, PROCESSES, PORT, SOURCE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}

import dataclasses
import json

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

if PROCESSES > 1:
    jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)

import ckfs


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """As flax's: the weights are under `params`."""

    step: object
    params: object


def nested(names: dict[str, object]) -> dict:
    tree: dict = {}
    for name, value in names.items():
        *parents, last = name.split(".")
        at = tree
        for word in parents:
            at = at.setdefault(word, {})
        at[last] = value
    return tree


def abstract(ck: ckfs.Checkpoint, name: str, mesh: jax.sharding.Mesh, spec: PartitionSpec, dtype: object = None) -> jax.ShapeDtypeStruct:
    tensor = ck[name]
    return jax.ShapeDtypeStruct(tensor.shape, dtype or tensor.dtype, sharding=NamedSharding(mesh, spec))


def check(array: jax.Array, whole: np.ndarray, sharding: object) -> int:
    assert array.shape == whole.shape and array.dtype == whole.dtype and array.sharding == sharding
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes(), (whole.shape, shard.index)
    return len(array.addressable_shards)


def main() -> None:
    devices = np.array(jax.devices())
    assert len(devices) == 4 * PROCESSES and len(jax.local_devices()) == 4
    mesh = jax.sharding.Mesh(devices.reshape(-1, 2), ("fsdp", "tensor"))
    ck = ckfs.open(SOURCE, mesh={"fsdp": len(devices) // 2, "tensor": 2})
    checked = 0
    # By the checkpoint's own specs, whole, and the other way round.
    for choose in (lambda t: t.spec, lambda t: (), lambda t: tuple(reversed(t.spec))):
        names = {}
        for name in ck.bundle():
            spec = PartitionSpec(*choose(ck[name]))
            axes = [ck.mesh[axis] if isinstance(axis, str) else 1 for axis in spec]
            if all(extent % axis == 0 for extent, axis in zip(ck[name].shape, axes)):
                names[name] = abstract(ck, name, mesh, spec)
        tree = nested(names)
        made = ckfs.jax.load(ck, tree)
        assert jax.tree_util.tree_structure(made) == jax.tree_util.tree_structure(tree)
        for name, leaf in names.items():
            at = made
            for word in name.split("."):
                at = at[word]
            checked += check(at, np.asarray(ck[name]), leaf.sharding)
    # MaxText's names, in a train state and as variables of nnx; another dtype.
    maxtext = ckfs.open(SOURCE, layout="maxtext", dtype="f32")
    names = {name: abstract(maxtext, name, mesh, PartitionSpec(), np.float32) for name in maxtext.bundle()}
    state = TrainState(None, {"params": nested(names)["params"]} if all(n.startswith("params.") for n in names) else {"params": nested(names)})
    made = ckfs.jax.load(maxtext, state)
    leaves = {name: leaf for name, leaf in zip(sorted(names), jax.tree_util.tree_leaves(made.params), strict=True)}
    for name, leaf in leaves.items():
        checked += check(leaf, np.asarray(maxtext[name]), names[name].sharding)
    bf16 = abstract(maxtext, sorted(names)[0], mesh, PartitionSpec(), jax.numpy.bfloat16)
    half = ckfs.jax.load(maxtext, nested({sorted(names)[0]: bf16}))
    assert jax.tree_util.tree_leaves(half)[0].dtype == jax.numpy.bfloat16
    if PROCESSES == 1:
        local = ckfs.jax.load(ck, {"embed": jax.ShapeDtypeStruct(ck["embed"].shape, ck["embed"].dtype)})["embed"]
        assert np.array_equal(local, np.asarray(ck["embed"]))
        try:
            ckfs.jax.load(ck, {"embd": local, "final_norm": jax.ShapeDtypeStruct((3,), local.dtype)})
        except ckfs.LoadError as error:
            assert error.missing == ["embd"] and len(error.mismatched) == 1 and "found" in str(error), error
            assert "did you mean 'embed' by 'embd'?" in str(error), error
        else:
            raise AssertionError("a tree that does not fit is loaded")
        # An optimizer's moments have the names of the weights, and must not get their values.
        moments = {"0": {"mu": state.params, "nu": state.params}}
        for tree in ({"params": state.params, "opt_state": moments}, {"opt_state": moments}, {"a": state.params, "b": state.params}):
            try:
                ckfs.jax.load(maxtext, tree)
            except ckfs.LoadError as error:
                assert "give the tree of the weights alone" in str(error), error
            else:
                raise AssertionError(f"{list(tree)} is loaded")
    print(json.dumps({"checked": checked}), flush=True)


if __name__ == "__main__":
    main()
