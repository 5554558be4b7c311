"""One of four processes that save their own parts as FSDP trainers do: `ranks_process.py DIRECTORY`, rank and address from the environment.

Each case is a directory of `model_world_size_4_rank_*.pt` and, beside it, the whole tensors that torch itself gathers.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardedStateDictConfig, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

warnings.filterwarnings("ignore")
SHAPES = [(7, 9), (8, 4), (3, 1), (1, 6), (5,), (2, 3, 5), (0, 4)]


def whole(value: object) -> object:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def save(directory: Path, case: str, state: dict, tensors: dict | None = None) -> None:
    """What verl's checkpoint manager writes for the model, and the whole tensors beside it."""
    where = directory / case
    where.mkdir(exist_ok=True, parents=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.save(state, where / f"model_world_size_{world}_rank_{rank}.pt")
    tensors = {name: whole(value) for name, value in state.items()} if tensors is None else tensors
    if rank == 0:
        torch.save(tensors, directory / f"{case}.whole.pt")
    dist.barrier()


class Small(nn.Module):
    """Extents that four ranks do not divide, a buffer, and a parameter that is smaller than four."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 10, bias=False)
        self.tiny = nn.Parameter(torch.randn(3))
        self.register_buffer("inverse", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + self.tiny.sum()


def fsdp1(directory: Path, case: str, seed: int, **how: object) -> None:
    """FSDP 1 with `SHARDED_STATE_DICT`, as verl and SkyRL save it."""
    module = Small(seed)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    wrapped = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"), mixed_precision=mixed, **how)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)):
        save(directory, case, wrapped.state_dict(), expected)


def fsdp2(directory: Path, case: str, seed: int, mesh: DeviceMesh, **how: object) -> None:
    module = Small(seed)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    fully_shard(module, mesh=mesh, **how)
    save(directory, case, module.state_dict(), expected)


def transformers_model(directory: Path, mesh: DeviceMesh) -> None:
    """A whole step of verl: FSDP 2 of a model of transformers, with configuration, tokenizer and other files beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=6
    )
    torch.manual_seed(11)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if dist.get_rank() == 0:
        model.save_pretrained(directory / "verl.saved")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    save(directory, "verl/actor", model.state_dict())
    if dist.get_rank() == 0:
        actor = directory / "verl/actor"
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(actor / "huggingface")
        (actor / "huggingface/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": dist.get_world_size()}))
        torch.save({"epoch": 1}, directory / "verl/data.pt")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.save({"state": {}}, directory / f"verl/actor/optim_world_size_{world}_rank_{rank}.pt")
    torch.save({"rng": {}}, directory / f"verl/actor/extra_state_world_size_{world}_rank_{rank}.pt")
    dist.barrier()


def placed(mesh: DeviceMesh, pairs: list[tuple], dtype: torch.dtype) -> dict:
    """A tensor of each shape under each placement. `from_local` of what the placements themselves cut."""
    state = {}
    for number, (placements, shape) in enumerate(itertools.product(pairs, SHAPES)):
        dims = [placement.dim for placement in placements if hasattr(placement, "dim")]
        if any(dim >= len(shape) for dim in dims):
            continue
        torch.manual_seed(number)
        tensor = torch.randn(shape).to(dtype)
        local = tensor
        for axis, placement in enumerate(placements):
            if isinstance(placement, (Shard, _StridedShard)):
                parts, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False)
                local = parts[mesh.get_coordinate()[axis]]
        spread = DTensor.from_local(
            local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        assert torch.equal(spread.full_tensor(), tensor), (placements, shape)
        words = "_".join(str(placement).replace("(", "").replace(")", "").replace(", ", "x").strip("_") for placement in placements)
        state[f"{words}.{'x'.join(map(str, shape))}.{number}"] = spread
    return state


def cases(directory: Path) -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))

    fsdp2(directory, "fsdp2", 0, line)
    fsdp2(directory, "fsdp2_hsdp", 1, grid)
    fsdp2(directory, "fsdp2_second_axis", 2, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")), shard_placement_fn=second_axis)
    fsdp1(directory, "fsdp1", 3, device_mesh=line)
    fsdp1(directory, "fsdp1_hsdp", 4, device_mesh=grid, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    fsdp1(directory, "fsdp1_sharded_tensor", 5)

    both = Small(6)
    expected = {name: value.clone() for name, value in both.state_dict().items()}
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    parallelize_module(both, two["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(both, mesh=two["fsdp"])
    # What tensor parallelism leaves alone is on the mesh of FSDP, of which there are two.
    save(directory, "fsdp2_tensor", {name: value for name, value in both.state_dict().items() if name != "tiny"},
         {name: value for name, value in expected.items() if name != "tiny"})  # fmt: skip
    save(directory, "two_meshes", both.state_dict(), {})

    transformers_model(directory, line)

    single = [(Replicate(),), (Shard(0),), (Shard(1),), (Shard(2),)]
    save(directory, "line", placed(line, single, torch.bfloat16))
    ways = [Replicate(), Shard(0), Shard(1)]
    pairs = list(itertools.product(ways, ways)) + [(_StridedShard(dim, split_factor=2), Shard(dim)) for dim in (0, 1)]
    pairs += [(_StridedShard(0, split_factor=2), Replicate()), (Replicate(), _StridedShard(1, split_factor=3))]
    save(directory, "grid", placed(grid, pairs, torch.float32))
    turned = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("ddp", "fsdp"))
    save(directory, "turned", placed(turned, pairs, torch.float16))
    falling = DeviceMesh("cpu", torch.tensor([3, 2, 1, 0]), mesh_dim_names=("fsdp",))
    save(directory, "falling", {"w": distribute_tensor(torch.ones(4, 4), falling, [Shard(0)])}, {})
    deep = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    save(directory, "deep", placed(deep, list(itertools.product(ways, repeat=3)), torch.float64))

    # Pipeline stages: other names on other meshes.
    stage = dist.get_rank() // 2
    own = grid["fsdp"]
    torch.manual_seed(7)
    tensors = {f"layers.{layer}.w": torch.randn(5, 3) for layer in range(2)}
    name = f"layers.{stage}.w"
    save(directory, "stages", {name: distribute_tensor(tensors[name], own, [Shard(0)])}, tensors)

    save(directory, "partial", {"w": DTensor.from_local(torch.ones(4, 4), line, [Partial()])}, {})
    save(directory, "plain", {"w": torch.ones(4, 4), "v": torch.zeros(dist.get_rank() + 1)}, {})
    uneven = {"w": distribute_tensor(torch.ones(4, 4), line, [Shard(0)]), "v": torch.zeros(dist.get_rank() + 1)}
    save(directory, "uneven_plain", uneven, {})
    other = [Shard(0)] if dist.get_rank() else [Replicate()]
    local = torch.ones(1, 4) if dist.get_rank() else torch.ones(4, 4)
    contradicting = DTensor.from_local(local, line, other, run_check=False, shape=torch.Size((4, 4)), stride=(4, 1))
    save(directory, "contradicting", {"w": contradicting}, {})


def second_axis(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 else None


def main(where: str) -> None:
    dist.init_process_group("gloo")
    cases(Path(where))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
