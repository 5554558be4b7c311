"""Fills modules that are split by tensor parallelism first and then by FSDP2, with and without replicas, evenly or not. Each rank is a
process of its own, in a group that only pretends: whatever communicates gets nothing. Compares with the definition.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # which FSDP needs: each of the forked ranks would take two seconds to import it
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckfs
import ckfs.torch
import repos

SIZES = [(2, 2), (4, 2), (2, 3), (3, 2), (2, 2, 2)]
ROWS = [16, 13, 2]


def part(whole: torch.Tensor, *cuts: tuple[int, int, int]) -> torch.Tensor:
    """The parts of parts that torch.chunk makes: axis, number of parts, which of them."""
    for dim, parts, index in cuts:
        chunks = torch.chunk(whole, parts, dim)
        whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def check(source: Path, values: torch.Tensor, sizes: tuple[int, ...], rank: int) -> None:
    rows, names = len(values), ("replicate", "fsdp", "tp")[-len(sizes) :]
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with torch.device("meta"):
        model = nn.Module()
        model.a, model.b = nn.Linear(8, rows, bias=False), nn.Linear(rows, 8, bias=False)
    parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    fully_shard(model, mesh=mesh[names[:-1]] if len(sizes) > 2 else mesh[names[0]])
    model.to_empty(device="cpu")
    ckfs.torch.load_into(ckfs.open(source, layout="hf"), model)
    fsdp, tp = mesh.get_coordinate()[-2:]
    for key, dim, whole in (("a.weight", 0, values), ("b.weight", 1, values.T)):
        parameter = model.state_dict()[key]
        assert isinstance(parameter, DTensor)
        expected = part(whole, (dim, sizes[-1], tp), (0, sizes[-2], fsdp))
        local = parameter.to_local()
        # Of a part without elements torch keeps no more than that.
        assert torch.equal(local, expected) or local.numel() == expected.numel() == 0, (sizes, rows, rank, key, parameter.placements)


def main() -> None:
    ranks = 0
    with tempfile.TemporaryDirectory() as directory:
        for rows in ROWS:
            values = torch.arange(rows * 8, dtype=torch.float32).reshape(rows, 8)
            source = Path(directory) / str(rows)
            pair = (("a.weight", values), ("b.weight", values.T))
            tensors = {key: repos.Tensor.of("F32", value.numpy()) for key, value in pair}
            repos.write(source, {"model.safetensors": tensors}, {"model_type": "unheard_of"})
            for sizes in SIZES:
                for rank in range(math.prod(sizes)):
                    if (child := os.fork()) == 0:
                        try:
                            check(source, values, sizes, rank)
                        except BaseException:
                            sys.excepthook(*sys.exc_info())
                            os._exit(1)
                        os._exit(0)
                    if os.waitpid(child, 0)[1] != 0:
                        sys.exit(f"mesh {sizes}, {rows} rows, rank {rank}")
                    ranks += 1
    print(f"{ranks} ranks")


if __name__ == "__main__":
    main()
