"""One of four processes that train with FSDP2: `torch_process.py MOUNT MESH`, rank and address from the environment.

The model is made of the tensors of the manifest, under the repository's own names. Its parameters are sharded by torch, and
loaded in three ways; after each, every local shard is compared with the raw file of the same device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def build(rows: list[dict]) -> nn.Module:
    """Modules by the names of their parameters; matrices whose roles are known become linear layers."""
    root = nn.Module()
    for row in rows:
        *parents, last = row["name"].split(".")
        at = root
        for word in parents:
            if not hasattr(at, word):
                linear = word in COLUMN + ROW
                at.add_module(word, nn.Linear(1, 1, bias=False, device="meta") if linear else nn.Module())
            at = getattr(at, word)
        values = torch.zeros(row["shape"], dtype=DTYPES[row["dtype"]])
        setattr(at, last, nn.Parameter(values, requires_grad=False))
    return root


def main(point: str, mesh_text: str) -> None:
    dist.init_process_group("gloo")
    rank, mount = dist.get_rank(), Path(point)
    names, sizes = zip(*((name, int(size)) for name, size in (axis.split("=") for axis in mesh_text.split(","))))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    rows = [row for row in json.loads((mount / ".ckfs/manifest.json").read_text())["tensors"] if row["bundled"]]
    model = build(rows)
    if "tp" in names:
        plan = {}
        for name, module in model.named_modules():
            word = name.rsplit(".", 1)[-1]
            if word in COLUMN + ROW:
                plan[name] = ColwiseParallel() if word in COLUMN else RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
        # The mount splits vocabularies too; torch's own way of that has another placement, so they are left out.
        rows = [row for row in rows if "embed" not in row["name"] and "lm_head" not in row["name"]]
        fully_shard(model, mesh=mesh["fsdp"])
    else:
        fully_shard(model, mesh=mesh)

    def check(how: str) -> None:
        for row in rows:
            local = model.state_dict()[row["name"]].to_local()
            expected = row["regions"][rank]["shape"]
            assert list(local.shape) == expected, (how, row["name"], list(local.shape), expected)
            found = local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert found == (mount / f"dev{rank}" / row["path"]).read_bytes(), (how, row["name"])

    def wipe() -> None:
        for value in model.state_dict().values():
            value.to_local().fill_(7)

    for how, reader in (
        ("dcp", dcp.FileSystemReader(mount / "dcp")),
        ("safetensors", dcp.HuggingFaceStorageReader(str(mount / "safetensors"))),
    ):
        wipe()
        state = model.state_dict()
        dcp.load(state, storage_reader=reader)
        model.load_state_dict(state)
        check(how)
        dist.barrier()

    wipe()
    own, wanted = load_file(mount / f"safetensors/dev{rank}.safetensors"), {row["name"] for row in rows}
    state = {}
    for name, value in model.state_dict().items():
        if name in wanted:
            state[name] = DTensor.from_local(
                own[name], value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
    model.load_state_dict(state, strict=False)
    check("own file")
    dist.barrier()
    print("checked", len(rows))
    dist.destroy_process_group()


main(*sys.argv[1:])
