"""One of two processes of Megatron-Core: `megatron_process.py DIRECTORY MOUNT…`, rank and address from the environment.

Loads each mount's `dcp/` by `dist_checkpointing.load`: once as a whole, and once as a tensor-parallel rank, whose layers are slices of
the stacked tensors. Writes, as JSON, the other contents of the checkpoint and a digest of each tensor of both loads, into the file of
its rank in DIRECTORY.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Transformer Engine and Apex")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
RANKS = 2


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def wrong(shape: list[int], code: str) -> torch.Tensor:
    return torch.full(shape, 7, dtype=DTYPES[code])


def whole(rows: list[dict], rank: int) -> dict[str, ShardedTensor]:
    state = {}
    for row in rows:
        state[row["name"]] = ShardedTensor.from_rank_offsets(row["name"], wrong(row["shape"], row["dtype"]), replica_id=rank)
    return state


def of_rank(rows: list[dict], rank: int) -> dict[str, ShardedTensor]:
    """Layers one by one, their matrices split by rows, or by the first axis of even extent."""
    state = {}
    for row in rows:
        layers = len(row.get("layers") or [])
        shape, split = list(row["shape"][bool(layers) :]), []
        if len(shape) > 1:
            axis = next(axis for axis, extent in enumerate(shape) if extent % RANKS == 0)
            shape[axis] //= RANKS
            split = [(axis + bool(layers), rank, RANKS)]
        for layer in range(layers or 1):
            offsets = [(0, layer, layers), *split] if layers else split
            state[f"{row['name']}/{layer}"] = ShardedTensor.from_rank_offsets(
                row["name"], wrong(shape, row["dtype"]), *offsets,
                prepend_axis_num=int(bool(layers)), replica_id=0 if split else rank,
            )  # fmt: skip
    return state


def main(directory: str, *points: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    out = []
    for point in points:
        dcp = f"{point}/dcp"
        assert dist_checkpointing.check_is_distributed_checkpoint(dcp)
        rows = [row for row in json.loads(Path(point, ".ckfs/manifest.json").read_text())["tensors"] if row["bundled"]]
        rest = dist_checkpointing.load(whole(rows, rank), dcp)
        tensors = {row["name"]: digest(rest.pop(row["name"])) for row in rows}
        wanted = of_rank(rows, rank)
        found = dist_checkpointing.load(wanted, dcp)
        out.append({"rest": rest, "whole": tensors, "rank": {name: digest(found[name]) for name in wanted}})
    Path(directory, f"{rank}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
