"""One of several processes that train with FSDP2, one for each MOUNT: `torch_process.py MESH WAYS MOUNT…`, rank and address from the
environment.

The model is built from the tensors of the manifest, under the repository's own names. Torch shards its parameters and
loads them in three ways, or in the named ones. After each, every local shard is compared with the raw file of the same device. Prints, for
each way, the bytes of the rank's own shards and the bytes that the mount fetched during the load.
"""

from __future__ import annotations

import json
import sys
import time
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

import forked

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


def fetched(mount: Path) -> int:
    """Bytes fetched from the sources so far, once fetching has stopped."""
    last = -1
    while True:
        found = sum(json.loads((mount / ".ckfs/stats.json").read_text())["bytes_fetched"].values())
        if found == last:
            return found
        last = found
        time.sleep(0.1)


def load_all(rank: int, mesh_text: str, ways: list[str], mount: Path) -> None:
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
        # The mount splits vocabularies too; torch splits them with another placement, so they are left out.
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

    def load_by(reader: dcp.StorageReader) -> None:
        state = model.state_dict()
        dcp.load(state, storage_reader=reader)
        model.load_state_dict(state)

    def load_own_file() -> None:
        own, wanted = load_file(mount / f"safetensors/dev{rank}.safetensors"), {row["name"] for row in rows}
        state = {}
        for name, value in model.state_dict().items():
            if name in wanted:
                mine = (value.device_mesh, value.placements)
                state[name] = DTensor.from_local(own[name], *mine, run_check=False, shape=value.shape, stride=value.stride())
        model.load_state_dict(state, strict=False)

    for how, load in (
        ("dcp", lambda: load_by(dcp.FileSystemReader(mount / "dcp"))),
        ("safetensors", lambda: load_by(dcp.HuggingFaceStorageReader(str(mount / "safetensors")))),
        ("hf", lambda: load_by(dcp.HuggingFaceStorageReader(str(mount / "hf")))),
        ("own", load_own_file),
    ):
        if ways and how not in ways:
            continue
        wipe()
        before = fetched(mount)
        dist.barrier()
        load()
        dist.barrier()
        wanted = sum(value.to_local().nbytes for value in model.state_dict().values())
        print(json.dumps({"way": how, "wanted": wanted, "fetched": fetched(mount) - before}))
        dist.barrier()  # later reads of other ranks do not belong to the load
        check(how)
        dist.barrier()

    print("checked", len(rows))
    dist.destroy_process_group()


def main(mesh: str, ways: str, *points: str) -> None:
    dist.init_process_group("gloo")
    load_all(dist.get_rank(), mesh, ways.split(), Path(points[dist.get_rank()]))


def run(points: list[Path], mesh: str, *ways: str) -> list[list[dict]]:
    """Starts one process per mount point, one mount per rank or one for all, and returns their output."""
    out = forked.run_ranks(len(points), forked.TORCH, __file__, mesh, " ".join(ways), *points)
    assert all("checked" in text for text in out), out
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in out]


if __name__ == "__main__":
    main(*sys.argv[1:])
