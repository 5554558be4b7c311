"""One of several processes of Megatron-Core: `megatron_state_process.py TENSOR PIPELINE save DIRECTORY`, or `… load OUT CHECKPOINT…`.

Saves a GPT model and the state of its optimizer after a step by Megatron's own `dist_checkpointing`, in the space of the model's tensors,
or loads such checkpoints into a model of other values and writes a digest of each thing that the rank has then, as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ranks
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")


def build(tensor: int, pipeline: int) -> GPTModel:
    settings = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=48, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", add_bias_linear=False, use_cpu_initialization=True,
        params_dtype=torch.float32, pipeline_dtype=torch.float32, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
    )  # fmt: skip
    return GPTModel(
        config=settings, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=64, max_sequence_length=16,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
    )  # fmt: skip


def state_of(model: GPTModel, optimizer: torch.optim.Optimizer, iteration: int) -> dict:
    """As Megatron's optimizers describe their state, with one number of steps for all."""
    weights, kept = model.sharded_state_dict(), optimizer.state_dict()
    places = get_param_id_to_sharded_param_map(weights, model.parameters())
    step = [of["step"] for of in kept["state"].values()][0]
    optim_state_to_sharding_state(kept, places, exclude_keys=("step",))
    kept["state"]["common_step"] = step
    replica = (0, ranks.get_tensor_model_parallel_rank(), ranks.get_data_parallel_rank())
    place = (ranks.get_pipeline_model_parallel_rank(),)
    rng = ShardedObject("rng_state", {"torch": f"state {iteration}"}, (1,), (0,), replica_id=(*place, *replica[1:]))
    arguments = argparse.Namespace(num_layers=2, swiglu=True, iteration=iteration)
    return {"model": weights, "optimizer": kept, "rng": rng, "args": arguments, "iteration": iteration}


def digests(value: object, name: str, found: dict[str, str]) -> dict[str, str]:
    if isinstance(value, dict):
        for key, member in value.items():
            digests(member, f"{name}/{key}", found)
    elif isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()}"
    else:
        found[name] = repr(value)
    return found


def main(tensor: str, pipeline: str, action: str, place: str, *checkpoints: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks.initialize_model_parallel(tensor_model_parallel_size=int(tensor), pipeline_model_parallel_size=int(pipeline))
    torch.manual_seed(rank if action == "save" else 100 + rank)
    model = build(int(tensor), int(pipeline))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if action == "save" else 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    if action == "save":
        if rank == 0:
            Path(place).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state_of(model, optimizer, 7), place)
    for number, checkpoint in enumerate(checkpoints):
        found = dist_checkpointing.load(state_of(model, optimizer, 0), checkpoint)
        Path(place, f"{number}-{rank}.json").write_text(json.dumps(digests(found, "", {})))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
