"""One process of a distributed restore: `orbax_process.py MOUNT MESH COORDINATOR RANK RESULT [ROOT]`.

With ROOT, all names are below it. Writes, as JSON, the seconds that the restore took, and a digest of each local shard, by the path
of the raw file with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import repos
from reference import Mesh


def main(point: str, mesh: str, coordinator: str, rank: str, result: str, *root: str) -> None:
    jax.distributed.initialize(coordinator, 2, int(rank))
    mount, axes = Path(point), Mesh.parse(mesh).axes
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    grid = jax.sharding.Mesh(np.array(devices).reshape([size for _, size in axes]), [name for name, _ in axes])
    number = {device: d for d, device in enumerate(grid.devices.flat)}
    target: dict = {}
    paths = {}
    for row in json.loads((mount / ".ckfs/manifest.json").read_text())["tensors"]:
        if not row["bundled"]:
            continue
        spec = PartitionSpec(*[tuple(axis) if isinstance(axis, list) else axis for axis in row["spec"]])
        leaf = jax.ShapeDtypeStruct(row["shape"], repos.NUMPY[row["dtype"]], sharding=NamedSharding(grid, spec))
        *parents, last = *root, *row["name"].split(".")
        at = target
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = leaf
        paths[row["name"]] = row["path"]
    started = time.monotonic()
    restored = ocp.StandardCheckpointer().restore(mount / "orbax/0/items", target)
    jax.block_until_ready(restored)
    seconds = time.monotonic() - started
    digests = {}
    for name, path in paths.items():
        array = restored
        for key in (*root, *name.split(".")):
            array = array[key]
        for shard in array.addressable_shards:
            digest = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
            digests[f"dev{number[shard.device]}/{path}"] = digest
    # To a file: the collectives' library writes to standard output.
    Path(result).write_text(json.dumps({"seconds": seconds, "shards": digests}))
    jax.distributed.shutdown()


main(*sys.argv[1:])
