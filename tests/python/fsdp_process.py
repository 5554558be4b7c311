"""The local states of the ranks under FSDP2, as JSON: for each directory, for each rank, name -> shape. No other rank runs: the
process group only pretends.

    python fsdp_process.py WORLD DIRECTORY:CLASS...
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def local_shapes(directory: str, name: str, rank: int, world: int) -> dict[str, list[int]]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__.endswith("Layer"):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    local = {key: value.to_local() if hasattr(value, "to_local") else value for key, value in model.state_dict().items()}
    dist.destroy_process_group()
    return {key: list(value.shape) for key, value in local.items()}


def main() -> None:
    world = int(sys.argv[1])
    models = [argument.rsplit(":", 1) for argument in sys.argv[2:]]
    print(json.dumps({name: [local_shapes(path, name, rank, world) for rank in range(world)] for path, name in models}))


if __name__ == "__main__":
    main()
