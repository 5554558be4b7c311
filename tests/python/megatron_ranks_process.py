"""One of several processes of Megatron-Core: `megatron_ranks_process.py DIRECTORY CONFIG.json STATE.pt TENSOR PIPELINE CHUNKS EXPERT [tied]`.

Builds the rank's part of a GPT model, fills it with its part of the whole model's tensors, and saves it as Megatron's own training does:
`iter_0000007/mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt`. How a tensor is cut is taken from the parameter itself (`partition_dim`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ranks
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.cuda = lambda tensor, *_, **__: tensor


def name_of_rank(tensor: int, pipeline: int, expert: int, sizes: tuple[int, int, int]) -> str:
    """As `get_checkpoint_name` of Megatron-LM."""
    name = f"mp_rank_{tensor:02d}"
    if sizes[1] > 1:
        name += f"_{pipeline:03d}"
    if sizes[2] > 1:
        name += f"_{expert:03d}"
    return name


def main(directory: str, config_file: str, state_file: str, *numbers: str) -> None:
    tensor, pipeline, chunks, expert = map(int, numbers[:4])
    tied = "tied" in numbers
    config = json.loads(Path(config_file).read_text())
    whole = torch.load(state_file)
    dist.init_process_group("gloo")
    ranks.initialize_model_parallel(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )  # fmt: skip
    experts = config.get("num_experts")
    settings = TransformerConfig(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"], kv_channels=config["head_dim"],
        ffn_hidden_size=config.get("moe_intermediate_size") or config["intermediate_size"], gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", add_bias_linear=False, qk_layernorm=bool(experts),
        use_cpu_initialization=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bf16=True,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_moe_experts=experts, moe_router_topk=2,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=bool(experts), normalization="RMSNorm")
    stage, mine = ranks.get_pipeline_model_parallel_rank(), ranks.get_tensor_model_parallel_rank()
    own_expert = ranks.get_expert_model_parallel_rank()
    layers = config["num_hidden_layers"] // (pipeline * chunks)
    states = []
    for chunk in range(chunks):
        first, last = stage == 0 and chunk == 0, stage == pipeline - 1 and chunk == chunks - 1
        more = {"vp_stage": chunk} if chunks > 1 else {}
        model = GPTModel(
            config=settings, transformer_layer_spec=spec, vocab_size=config["vocab_size"], max_sequence_length=64, position_embedding_type="rope",
            share_embeddings_and_output_weights=tied, pre_process=first, post_process=last, **more,
        )  # fmt: skip
        begin = chunk * pipeline * layers + stage * layers
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(part(whole, name, parameter, begin, (mine, tensor), own_expert * ((experts or 0) // expert)))
        states.append(model.state_dict_for_save_checkpoint())
    arguments = argparse.Namespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert, num_layers=config["num_hidden_layers"],
        expert_tensor_parallel_size=tensor, num_experts=experts, swiglu=True, group_query_attention=True, num_query_groups=config["num_key_value_heads"],
        untie_embeddings_and_output_weights=not tied, params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto, rank=dist.get_rank(),
    )  # fmt: skip
    models = {"model": states[0]} if chunks == 1 else {f"model{number}": state for number, state in enumerate(states)}
    saved = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7, **models}
    saved |= {"optimizer": {"exp_avg": torch.zeros(3)}, "rng_state": [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()}]}
    # Copies of data parallelism are saved once.
    if ranks.get_expert_data_parallel_rank() == 0 and (expert > 1 or ranks.get_data_parallel_rank() == 0):
        path = Path(directory, "iter_0000007", name_of_rank(mine, stage, own_expert, (tensor, pipeline, expert)))
        path.mkdir(parents=True, exist_ok=True)
        torch.save(saved, path / "model_optim_rng.pt")
    if dist.get_rank() == 0:
        Path(directory, "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    os._exit(0)


def part(whole: dict, name: str, parameter: torch.nn.Parameter, begin: int, place: tuple[int, int], first_expert: int) -> torch.Tensor:
    """The rank's part of a tensor of the whole model."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(int(words[2]) + begin)
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        words[at] = str(int(words[at]) + first_expert)
    tensor = whole.get(".".join(words))
    if tensor is None and words[0] == "output_layer":
        tensor = whole["embedding.word_embeddings.weight"]
    rank, count = place
    axis = getattr(parameter, "partition_dim", -1)
    if not getattr(parameter, "tensor_model_parallel", False) or axis < 0 or count == 1:
        return tensor
    if "linear_fc1" in words:
        return torch.cat([half.chunk(count, axis)[rank] for half in tensor.chunk(2, axis)], axis)
    return tensor.chunk(count, axis)[rank]


if __name__ == "__main__":
    main(*sys.argv[1:])
