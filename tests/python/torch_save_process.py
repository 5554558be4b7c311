"""One of four processes that save a state as training programs do: `torch_save_process.py DIRECTORY`, rank and address from the
environment.

Each case is a directory of `torch.distributed.checkpoint` and, beside it, the whole tensors as `torch.save` writes them.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    """Extents that four ranks do not divide, and some that are smaller than four."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.small = nn.Parameter(torch.randn(3))
        self.tiny = nn.Parameter(torch.randn(1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x)))) + self.small.sum() + self.tiny.sum()


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(directory: Path, name: str, state: dict, writer: object | None = None) -> None:
    tensors = {}

    def walk(path: tuple, value: object) -> None:
        if isinstance(value, torch.Tensor):
            tensors[".".join(map(str, path))] = whole(value).detach().contiguous()
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk((*path, key), inner)

    walk((), state)
    if writer is None:
        dcp.save(state, checkpoint_id=str(directory / name))
    else:
        dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        torch.save(tensors, directory / f"{name}.whole.pt")
    dist.barrier()


def main(where: str) -> None:
    dist.init_process_group("gloo")
    directory = Path(where)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))

    fsdp = model()
    fully_shard(fsdp, mesh=mesh)
    optimizer = torch.optim.AdamW(fsdp.parameters())
    fsdp(torch.randn(2, 10)).sum().backward()
    optimizer.step()
    state = {"model": get_model_state_dict(fsdp), "optimizer": get_optimizer_state_dict(fsdp, optimizer), "step": 7}
    save(directory, "fsdp", state)

    hsdp = model(1)
    fully_shard(hsdp, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp")))
    save(directory, "hsdp", get_model_state_dict(hsdp))

    both = model(2)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    plan = {f"{n}.{word}": way() for n in (0, 1) for word, way in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    parallelize_module(both, grid["tensor"], plan)
    fully_shard(both, mesh=grid["fsdp"])
    save(directory, "both", get_model_state_dict(both))

    torch.manual_seed(3)
    matrix = torch.randn(7, 9).to(torch.bfloat16)
    placed = {
        "rows": distribute_tensor(matrix, mesh, [Shard(0)]),
        "columns": distribute_tensor(matrix, mesh, [Shard(1)]),
        "copies": distribute_tensor(matrix, mesh, [Replicate()]),
        "plain": torch.arange(6, dtype=torch.int64),
        # Rank 0 saves what is equal everywhere: a view that is not in row-major order.
        "turned": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 5),
        "flags": torch.tensor([True, False, True]),
        "text": "no tensor",
    }
    save(directory, "placed", placed)

    # Files of safetensors that say where their tensors are in the whole.
    safetensors = directory / "safetensors"
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    if "save_distributed" in inspect.signature(HuggingFaceStorageWriter).parameters:
        writer = HuggingFaceStorageWriter(path=str(safetensors), save_distributed=True)
        flat = {key: value for key, value in placed.items() if key not in ("text", "empty", "turned")}
        save(directory, "safetensors", flat, writer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
