"""One of several processes that fill modules by `ckfs.torch.load_into`: each fills its own shards, and compares them with what
`torch.distributed.checkpoint` loads from the same repository into the same modules.

    python load_into_process.py REPOSITORY CASE...

Rank and address are in the environment.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckfs

MESHES = {
    "fsdp": ("fsdp",), "hsdp": ("replicate", "fsdp"), "tp": ("tp",), "tp_fsdp": ("fsdp", "tp"), "hsdp_tp": ("replicate", "fsdp", "tp"),
}  # fmt: skip


def sharded(source: str, case: str, sizes: tuple[int, ...]) -> torch.nn.Module:
    """A Llama on the meta device, split and then given memory, as trainers do."""
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = MESHES[case]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if "tp" in names:
        plan = {}
        for word in ("q", "k", "v"):
            plan[f"self_attn.{word}_proj"] = ColwiseParallel()
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], plan | {"mlp.down_proj": RowwiseParallel()})
        parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel()})
    split = tuple(name for name in names if name != "tp")
    if split:
        of = mesh[split] if len(split) > 1 else mesh[split[0]]
        for layer in model.model.layers:
            fully_shard(layer, mesh=of)
        fully_shard(model, mesh=of)
    return model.to_empty(device="cpu")


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def poison(model: torch.nn.Module) -> None:
    for value in model.state_dict().values():
        if local(value).numel():
            local(value).view(torch.uint8).fill_(0xA5)


def bytes_of(model: torch.nn.Module) -> dict[str, bytes]:
    values = {key: local(value).detach().contiguous() for key, value in model.state_dict().items()}
    return {key: value.reshape(-1).view(torch.uint8).numpy().tobytes() for key, value in values.items()}


def main() -> None:
    source, *cases = sys.argv[1:]
    dist.init_process_group("gloo")
    ck = ckfs.open(source, layout="hf")
    for word in cases:
        case, *numbers = word.split(":")
        model = sharded(source, case, tuple(map(int, numbers)))
        poison(model)
        found = ckfs.torch.load_into(ck, model)
        assert found == ([], []), found
        ours = bytes_of(model)
        poison(model)
        state = model.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(source))
        theirs = bytes_of(model)
        differ = [key for key in theirs if ours[key] != theirs[key]]
        strided = any("_S(" in str(value.placements) or "Strided" in str(value.placements) for value in state.values() if isinstance(value, DTensor))
        print(json.dumps({"case": word, "tensors": len(theirs), "bytes": sum(map(len, ours.values())), "differ": differ, "strided": strided}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
