"""A training with optax, where it is installed, on eight devices, saved by Orbax in the middle, and resumed on another mesh.

    python optax_state_process.py DIRECTORY           trains, saves to DIRECTORY/state, trains on, and keeps the end
    python optax_state_process.py DIRECTORY ITEM      restores an item, trains on, and compares the end with that one
"""

from __future__ import annotations

import os
import sys

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}

from pathlib import Path

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEPS = 3


class Moments(NamedTuple):
    """As optax's `ScaleByAdamState`."""

    count: jax.Array
    mu: dict
    nu: dict


class Adam:
    """Where optax is not installed: an optimizer with the like state."""

    def init(self, params: dict) -> tuple:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(jnp.int32(0), zeros, zeros), Empty()

    def update(self, gradients: dict, state: tuple, params: dict) -> tuple[dict, tuple]:
        count = state[0].count + 1
        mu = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state[0].mu, gradients)
        nu = jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new * new, state[0].nu, gradients)
        rate = 3e-3 * 0.7 ** (count / 2)
        step = lambda mu, nu, old: -rate * (mu / (jnp.sqrt(nu) + 1e-8) + 0.1 * old)  # noqa: E731
        return jax.tree.map(step, mu, nu, params), (Moments(count, mu, nu), Empty())


class Empty(NamedTuple):
    """As optax's `EmptyState`."""


try:
    import optax

    OPTIMIZER = optax.adamw(optax.exponential_decay(3e-3, 2, 0.7), weight_decay=0.1)
except ImportError:
    OPTIMIZER = Adam()


def mesh_of(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def sharding(mesh: Mesh, value: jax.Array) -> NamedSharding:
    """Arrays of numbers are cut along the axes of the mesh, keys and counters are on all devices."""
    is_cut = value.ndim == 2 and jnp.issubdtype(value.dtype, jnp.floating)
    return NamedSharding(mesh, PartitionSpec(*mesh.axis_names) if is_cut else PartitionSpec())


def begun(mesh: Mesh) -> dict:
    one, two = jax.random.split(jax.random.key(3))
    params = {"one": jax.random.normal(one, (16, 32)), "two": jax.random.normal(two, (32, 8))}
    state = {"params": params, "opt_state": OPTIMIZER.init(params), "rng": jax.random.key(9), "step": jnp.int32(0)}
    return jax.tree.map(lambda value: jax.device_put(value, sharding(mesh, value)), state)


def trained(state: dict, mesh: Mesh) -> dict:
    whole = NamedSharding(mesh, PartitionSpec())

    @jax.jit
    def step(state: dict) -> dict:
        rng, drawn = jax.random.split(state["rng"])
        batch = jax.random.normal(drawn, (4, 16))
        # Each device computes with the whole weights, as FSDP gathers them: the bits do not depend on the mesh.
        params = jax.lax.with_sharding_constraint(state["params"], whole)
        loss = lambda params: jnp.sum(jnp.tanh(batch @ params["one"]) @ params["two"]) ** 2  # noqa: E731
        gradients = jax.lax.with_sharding_constraint(jax.grad(loss)(params), whole)
        updates, kept = OPTIMIZER.update(gradients, jax.lax.with_sharding_constraint(state["opt_state"], whole), params)
        return {"params": jax.tree.map(jnp.add, params, updates), "opt_state": kept, "rng": rng, "step": state["step"] + 1}

    for _ in range(STEPS):
        state = step(state)
    return state


def plain(state: dict) -> list[np.ndarray]:
    is_key = lambda value: jnp.issubdtype(value.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(value) if is_key(value) else value) for value in jax.tree.leaves(state)]


def main() -> None:
    directory = Path(sys.argv[1])
    saver = ocp.PyTreeCheckpointer()
    if len(sys.argv) == 2:
        mesh = mesh_of(fsdp=8)
        state = trained(begun(mesh), mesh)
        saver.save(directory / "state", state | {"name": "run"})
        np.savez(directory / "end.npz", *plain(trained(state, mesh)))
        return
    item, mesh = Path(sys.argv[2]), mesh_of(fsdp=4, tensor=2)
    # As from the source, without a target: the same tree, types, shardings and bits.
    source, view = saver.restore(directory / "state"), saver.restore(item)
    assert jax.tree.structure(source) == jax.tree.structure(view)
    assert source.pop("name") == view.pop("name") == "run"
    for one, other in zip(jax.tree.leaves(source), jax.tree.leaves(view)):
        assert type(one) is type(other) and one.dtype == other.dtype and getattr(one, "sharding", 0) == getattr(other, "sharding", 0)
    assert all(np.array_equal(one, other) for one, other in zip(plain(source), plain(view)))
    # On another mesh, into the trainer's own tree.
    target = begun(mesh)
    asked = jax.tree.map(lambda value: ocp.ArrayRestoreArgs(sharding=sharding(mesh, value)), target)
    restored = saver.restore(item, item=target | {"name": ""}, restore_args=asked | {"name": ocp.RestoreArgs(restore_type=str)})
    assert restored.pop("name") == "run"
    assert jax.tree.leaves(restored["params"])[0].sharding == sharding(mesh, restored["params"]["one"])
    end, kept = plain(trained(restored, mesh)), np.load(directory / "end.npz")
    expected = [kept[name] for name in kept.files]
    assert len(end) == len(expected) > 7
    for one, other in zip(end, expected):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


if __name__ == "__main__":
    main()
