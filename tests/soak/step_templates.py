"""Steps of every kind as their frameworks write them: `step_templates.py DIRECTORY VARIANTS`, rank and address from the environment.

Two processes save each kind several times, with other values each time: `DIRECTORY/<kind>/<variant>/` is a finished step, and
`DIRECTORY/expected/<kind>/<variant>/` has the bytes of each tensor in a file of its name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
warnings.filterwarnings("ignore")

import deepspeed_process  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

RANKS = 2
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def expect(directory: Path, kind: str, variant: int, tensors: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() != 0:
        return
    where = directory / "expected" / kind / str(variant)
    where.mkdir(parents=True)
    for name, tensor in tensors.items():
        (where / name).write_bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def model(variant: int) -> LlamaForCausalLM:
    torch.manual_seed(variant)
    return LlamaForCausalLM(CONFIG)


def transformers(directory: Path, variant: int) -> None:
    step = directory / "transformers" / str(variant)
    if dist.get_rank() == 0:
        saved = model(variant)
        saved.save_pretrained(step, max_shard_size="150KB")
        torch.save({"state": {}}, step / "optimizer.pt")
        (step / "trainer_state.json").write_text(json.dumps({"global_step": variant}))
        expect(directory, "transformers", variant, saved.state_dict())


def sharded(variant: int) -> dict:
    module = model(variant)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module.state_dict()


def torch_dcp(directory: Path, variant: int) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": sharded(variant), "step": variant}, checkpoint_id=directory / "torch_dcp" / str(variant))
    expect(directory, "torch_dcp", variant, {f"model.{name}": tensor for name, tensor in model(variant).state_dict().items()})


def ranks(directory: Path, variant: int) -> None:
    actor = directory / "ranks" / str(variant) / "actor"
    actor.mkdir(parents=True, exist_ok=True)
    torch.save(sharded(variant), actor / f"model_world_size_{RANKS}_rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        CONFIG.save_pretrained(actor / "huggingface")
    expect(directory, "ranks", variant, model(variant).state_dict())


def megatron(directory: Path, variant: int) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    # It waits for an accelerator that is not there.
    torch.cuda.synchronize = torch.cuda.current_device = lambda *_: "cpu"
    step = directory / "megatron" / str(variant)
    step.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    tensors = model(variant).state_dict()
    rank = dist.get_rank()
    state = {}
    for name, tensor in tensors.items():
        part = tensor.chunk(RANKS)[rank].clone()
        state[name] = ShardedTensor.from_rank_offsets(name, part, (0, rank, RANKS), replica_id=0)
    dist_checkpointing.save(state, str(step))
    expect(directory, "megatron", variant, tensors)


def deepspeed(directory: Path, variants: int) -> None:
    """One engine, saved after each of its steps."""
    import deepspeed as library
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    library.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }
    module = deepspeed_process.Model()
    trained = [value for value in module.parameters() if value.requires_grad]
    engine, *_ = library.initialize(model=module, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=config)
    for variant in range(variants):
        engine.backward(engine(torch.tensor([[1, 2, 3]]) + dist.get_rank()))
        engine.step()
        engine.save_checkpoint(str(directory / "deepspeed"), tag=str(variant))
        dist.barrier()
        if dist.get_rank() == 0:
            tensors = get_fp32_state_dict_from_zero_checkpoint(str(directory / "deepspeed"), tag=str(variant))
            expect(directory, "deepspeed", variant, tensors)


def orbax(directory: Path, variants: int) -> None:
    if dist.get_rank() != 0:
        return
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(directory / "orbax", options=ocp.CheckpointManagerOptions(create=True)) as manager:
        for variant in range(variants):
            tensors = {name.replace(".", "_"): tensor for name, tensor in model(variant).state_dict().items()}
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            manager.save(variant, args=ocp.args.StandardSave({"params": arrays, "step": np.int32(variant)}))
            expect(directory, "orbax", variant, {f"params.{name}": tensor for name, tensor in tensors.items()})


def main(where: str, variants: str) -> None:
    directory, count = Path(where), int(variants)
    dist.init_process_group("gloo")
    for variant in range(count):
        for save in (transformers, torch_dcp, ranks, megatron):
            save(directory, variant)
            dist.barrier()
    deepspeed(directory, count)
    orbax(directory, count)
    dist.barrier()
    if dist.get_rank() == 0:
        for extra in [directory / "deepspeed/latest", *directory.glob("deepspeed/*.py")]:
            extra.unlink(missing_ok=True)
        shutil.rmtree(directory / "orbax/descriptor", ignore_errors=True)
    # Threads of gloo may end the process with an error when it takes its modules apart.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
