"""A tiny GPTModel of Megatron-Core, saved by its own `dist_checkpointing`: `megatron_model.py CONFIG.json DIRECTORY`.

Beside the directory it writes `.npz`, the tensors that the model has in Hugging Face's form by a conversion of its own, and
`.json`, the names and global shapes of the saved tensors.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def build(config: dict) -> GPTModel:
    kind = config["model_type"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    normed = kind in ("qwen3", "qwen3_moe")
    mixture = {"num_moe_experts": experts, "moe_router_topk": 2, "add_bias_linear": False} if experts else {}
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    settings = TransformerConfig(
        num_layers=config["num_hidden_layers"], hidden_size=hidden, num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"], kv_channels=config.get("head_dim") or hidden // heads,
        ffn_hidden_size=width if experts else config["intermediate_size"], gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", add_qkv_bias=kind == "qwen2", qk_layernorm=normed,
        use_cpu_initialization=True, perform_initialization=True, params_dtype=torch.float32,
        **{"add_bias_linear": False, **mixture},
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=normed, normalization="RMSNorm")
    return GPTModel(
        config=settings, transformer_layer_spec=spec, vocab_size=256, max_sequence_length=64, position_embedding_type="rope",
        share_embeddings_and_output_weights=bool(config.get("tie_word_embeddings")),
    )  # fmt: skip


def heads_first(config: dict, fused: np.ndarray) -> dict[str, np.ndarray]:
    """Query, key and value of a fused matrix or bias, group by group."""
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rows = fused.reshape(groups, heads // groups + 2, size, *fused.shape[1:])
    parts = {"q": rows[:, :-2], "k": rows[:, -2:-1], "v": rows[:, -1:]}
    return {name: part.reshape(-1, *fused.shape[1:]) for name, part in parts.items()}


def converted(config: dict, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face repository."""
    vocabulary = config["vocab_size"]
    out = {"model.embed_tokens.weight": state["embedding.word_embeddings.weight"][:vocabulary], "model.norm.weight": state["decoder.final_layernorm.weight"]}
    if "output_layer.weight" in state:
        out["lm_head.weight"] = state["output_layer.weight"][:vocabulary]
    block, words = ("block_sparse_moe", ("w1", "w3", "w2")) if config["model_type"] == "mixtral" else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        one = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm", "self_attention.linear_proj": "self_attn.o_proj",
               "self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm", "mlp.router": f"{block}.gate",
               "mlp.linear_fc2": "mlp.down_proj"}  # fmt: skip
        for source, target in one.items():
            if f"{theirs}{source}.weight" in state:
                out[f"{ours}{target}.weight"] = state[f"{theirs}{source}.weight"]
        for kind in ("weight", "bias"):
            fused = state.get(f"{theirs}self_attention.linear_qkv.{kind}")
            if fused is not None:
                out |= {f"{ours}self_attn.{name}_proj.{kind}": part for name, part in heads_first(config, fused).items()}
        if (fused := state.get(f"{theirs}mlp.linear_fc1.weight")) is not None:
            out[f"{ours}mlp.gate_proj.weight"], out[f"{ours}mlp.up_proj.weight"] = np.split(fused, 2)
        expert = 0
        while (fused := state.get(f"{theirs}mlp.experts.local_experts.{expert}.linear_fc1.weight")) is not None:
            at = f"{ours}{block}.experts.{expert}."
            out[f"{at}{words[0]}.weight"], out[f"{at}{words[1]}.weight"] = np.split(fused, 2)
            out[f"{at}{words[2]}.weight"] = state[f"{theirs}mlp.experts.local_experts.{expert}.linear_fc2.weight"]
            expert += 1
    return out


def main(config_file: str, directory: str) -> None:
    config = json.loads(Path(config_file).read_text())
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(7)
    model = build(config)
    state = model.state_dict_for_save_checkpoint() if hasattr(model, "state_dict_for_save_checkpoint") else model.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    # The strategy waits for the GPU, which this machine may lack.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    sharded = model.sharded_state_dict()
    Path(directory).mkdir(parents=True)
    dist_checkpointing.save(sharded, directory)
    arrays = {name: value.numpy() for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    np.savez(f"{directory}.npz", **converted(config, arrays))
    shapes = {}
    for name, tensor in FileSystemReader(directory).read_metadata().state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        shape = list(tensor.size)
        # The vocabulary is padded here, and whole in the repository.
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            shape[0] = config["vocab_size"]
        shapes[name] = shape
    Path(f"{directory}.json").write_text(json.dumps(shapes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
