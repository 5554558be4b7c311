"""One of several processes of Megatron-Core: `megatron_state_process.py KIND TENSOR PIPELINE save DIRECTORY`, or `… load OUT CHECKPOINT…`.

Saves a GPT model and the state of its optimizer after a step by Megatron's own `dist_checkpointing`, or loads such checkpoints into a model
of other values and writes a digest of each thing that the rank has then, as JSON. KIND is `whole`, for an optimizer of which each rank has
all, or the form in which Megatron's `DistributedOptimizer` is saved, as `distrib_optim_sharding_type` names it. That one is made for GPUs:
here it finds tensors of the CPU wherever it asks for CUDA, and an Adam that keeps what Apex' keeps, and is otherwise unchanged.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import multiprocessing
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state as ranks
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.cuda = lambda tensor, *_, **__: tensor


class OnTheCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


def build(tensor: int, pipeline: int, dtype: torch.dtype) -> GPTModel:
    settings = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=48, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", add_bias_linear=False, use_cpu_initialization=True,
        params_dtype=dtype, pipeline_dtype=dtype, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
    )  # fmt: skip
    return GPTModel(
        config=settings, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=64, max_sequence_length=16,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
    )  # fmt: skip


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Of its own on each rank, but for the weights of norms, which are the same on all."""
    return torch.randn(parameter.shape) if parameter.ndim > 1 else torch.linspace(-1, 1, len(parameter))


class Whole:
    """An optimizer of which each rank has all, in the space of the model's tensors."""

    def __init__(self, _kind: str, model: GPTModel, lr: float) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=lr)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = gradient(parameter)
        self.optimizer.step()

    def state(self, weights: dict, _loads: bool) -> dict:
        """As Megatron's optimizers describe their state, with one number of steps for all."""
        kept = self.optimizer.state_dict()
        places = get_param_id_to_sharded_param_map(weights, self.model.parameters())
        step = [of["step"] for of in kept["state"].values()][0]
        optim_state_to_sharding_state(kept, places, exclude_keys=("step",))
        kept["state"]["common_step"] = step
        return kept

    def taken(self, loaded: dict) -> dict:
        return loaded


class Adam(torch.optim.Optimizer):
    """Keeps its state as Apex' `FusedAdam` does, with the number of steps in the groups: torch's Megatron saves and cannot load."""

    def __init__(self, params: list, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for at in group["params"]:
                first, second = (self.state[at].setdefault(name, torch.zeros_like(at)) for name in ("exp_avg", "exp_avg_sq"))
                first.lerp_(at.grad, 1 - group["betas"][0])
                second.mul_(group["betas"][1]).addcmul_(at.grad, at.grad, value=1 - group["betas"][1])
                one, two = (1 - beta ** group["step"] for beta in group["betas"])
                at.mul_(1 - group["lr"] * group["weight_decay"])
                at.addcdiv_(first, second.div(two).sqrt_().add_(group["eps"]), value=-group["lr"] / one)


class Distributed:
    """Megatron's optimizer of which each rank has a part of the model's flat buffers."""

    def __init__(self, kind: str, model: GPTModel, lr: float) -> None:
        optimizers.Adam = distrib_optimizer.Adam = Adam
        optimizers.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
        self.metadata = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
        self.model = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
        config = OptimizerConfig(optimizer="adam", lr=lr, use_distributed_optimizer=True, bf16=True)
        self.optimizer = get_megatron_optimizer(config, [self.model])

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.main_grad.copy_(gradient(parameter))
        done, *_ = self.optimizer.step()
        assert done

    def state(self, weights: dict, loads: bool) -> dict:
        return self.optimizer.sharded_state_dict(weights, is_loading=loads, metadata=self.metadata)

    def taken(self, loaded: dict) -> dict:
        """What the optimizer has of each parameter once it has taken the loaded state, and after one more step."""
        with torch.no_grad():
            self.optimizer.load_state_dict(loaded)
        [inner], found = self.optimizer.chained_optimizers, {}
        for when in ("loaded", "one step on"):
            for name, parameter in self.model.module.named_parameters():
                if parameter in inner.model_param_group_index_map:
                    states = inner._get_main_param_and_optimizer_states(parameter)
                    found[f"{when}/{name}"] = {key: value.detach() for key, value in states.items()}
            found[f"{when}/groups"] = {str(n): group | {"params": None} for n, group in enumerate(inner.optimizer.param_groups)}
            # The step changes tensors in place.
            found = copy.deepcopy(found)
            torch.manual_seed(9)
            self.step()
        return found


def state_of(model: GPTModel, optimizer: Whole | Distributed, iteration: int, loads: bool) -> dict:
    weights = model.sharded_state_dict()
    replica = (0, ranks.get_tensor_model_parallel_rank(), ranks.get_data_parallel_rank())
    place = (ranks.get_pipeline_model_parallel_rank(),)
    rng = ShardedObject("rng_state", {"torch": f"state {iteration}"}, (1,), (0,), replica_id=(*place, *replica[1:]))
    arguments = argparse.Namespace(num_layers=2, swiglu=True, iteration=iteration)
    return {"model": weights, "optimizer": optimizer.state(weights, loads), "rng": rng, "args": arguments, "iteration": iteration}


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


def main(kind: str, tensor: str, pipeline: str, action: str, place: str, *checkpoints: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks.initialize_model_parallel(tensor_model_parallel_size=int(tensor), pipeline_model_parallel_size=int(pipeline))
    torch.manual_seed(rank if action == "save" else 100 + rank)
    model = build(int(tensor), int(pipeline), torch.float32 if kind == "whole" else torch.bfloat16)
    with OnTheCpu():
        optimizer = (Whole if kind == "whole" else Distributed)(kind, model, 1e-2 if action == "save" else 1.0)
        optimizer.step()
        if action == "save":
            if rank == 0:
                Path(place).mkdir(parents=True)
            dist.barrier()
            dist_checkpointing.save(state_of(model, optimizer, 7, False), place, content_metadata={"kind": kind})
        for number, checkpoint in enumerate(checkpoints):
            assert dist_checkpointing.load_content_metadata(checkpoint) == {"kind": kind}
            found = dist_checkpointing.load(state_of(model, optimizer, 0, True), checkpoint)
            model.load_state_dict(found["model"])
            found["optimizer"] = optimizer.taken(found["optimizer"])
            Path(place, f"{number}-{rank}.json").write_text(json.dumps(digests(found, "", {})))
    dist.barrier()
    # What Megatron has started for writing would outlive this process.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
