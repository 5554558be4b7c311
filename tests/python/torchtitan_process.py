"""Digests of the states of torchtitan's models, as its own adapters and classes make them of the repositories of `torchtitan_repos.py`.

    $(tests/python/setup.sh)/bin/python tests/python/torchtitan_process.py tests/python/torchtitan_states.json

The adapter's `from_hf`, the model's class and its `load_state_dict` are those of torchtitan 0.3.0, unchanged, on the CPU. Packages that
are not installed and have no part in names and values are replaced by empty ones.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import vllm_process

STUBS = {"torchdata", "datasets", "torch_checkpointing", "wandb", "tensorboard", "einops"}
# Kernels for a GPU, which need triton.
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


class Finder(vllm_process.Finder):
    def find_spec(self, name: str, _path: object = None, _target: object = None):
        known = name == KERNELS or name.partition(".")[0] in STUBS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None


def config_of(name: str, hf: dict):
    """torchtitan's configuration of a model of these sizes, with its own builders of layers."""
    from torchtitan.models import deepseek_v3, llama3, qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm

    dim, rows, heads = hf["hidden_size"], hf["vocab_size"], hf["num_attention_heads"]
    layers = {"n_layers": hf["num_hidden_layers"], "dim": dim, "n_heads": heads, "attn_backend": "flex"}
    ends = {
        "vocab_size": rows, "dim": dim, "norm": RMSNorm.Config(normalized_shape=dim),
        "tok_embeddings": Embedding.Config(num_embeddings=rows, embedding_dim=dim),
        "lm_head": Linear.Config(in_features=dim, out_features=rows),
    }  # fmt: skip
    if hf.get("tie_word_embeddings"):
        ends["enable_weight_tying"] = True
    if hf["model_type"] == "deepseek_v3":
        made = deepseek_v3._build_dsv3_layers(
            **layers, n_dense_layers=hf["first_k_dense_replace"], q_lora_rank=hf["q_lora_rank"] or 0,
            kv_lora_rank=hf["kv_lora_rank"], qk_nope_head_dim=hf["qk_nope_head_dim"], qk_rope_head_dim=hf["qk_rope_head_dim"],
            v_head_dim=hf["v_head_dim"], mscale=1.0, dense_hidden_dim=hf["intermediate_size"],
            moe_hidden_dim=hf["moe_intermediate_size"], num_experts=hf["n_routed_experts"],
            num_shared_experts=hf["n_shared_experts"], router_top_k=2, router_score_func="sigmoid", moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            rope=ComplexRoPE.Config(dim=hf["qk_rope_head_dim"], max_seq_len=64),
        )  # fmt: skip
        return deepseek_v3.DeepSeekV3Model.Config(layers=made, **ends), deepseek_v3.DeepSeekV3StateDictAdapter
    layers |= {"n_kv_heads": hf["num_key_value_heads"]}
    if hf["model_type"] == "llama":
        rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=64)
        made = llama3._build_llama3_layers(**layers, hidden_dim=hf["intermediate_size"], rope=rope)
        return llama3.Llama3Model.Config(layers=made, **ends), llama3.Llama3StateDictAdapter
    layers |= {"head_dim": hf["head_dim"], "rope": CosSinRoPE.Config(dim=hf["head_dim"], max_seq_len=64)}
    if hf["model_type"] == "qwen3":
        made = qwen3._build_qwen3_layers(**layers, hidden_dim=hf["intermediate_size"])
    else:
        made = qwen3._build_qwen3_moe_layers(
            **layers, moe_hidden_dim=hf["moe_intermediate_size"], num_experts=hf["num_experts"], top_k=2,
            moe_comm_backend="standard",
        )  # fmt: skip
    return qwen3.Qwen3Model.Config(layers=made, **ends), qwen3.Qwen3StateDictAdapter


def state_of(name: str, repo: Path, hf: dict) -> dict:
    """The state of the model after it has loaded what the adapter makes of the repository."""
    import torch
    from safetensors.torch import load_file

    config, adapter = config_of(name, hf)
    tensors = {}
    for file in sorted(repo.glob("model*.safetensors")):
        tensors |= load_file(file)
    made = adapter(config, None).from_hf(dict(tensors))
    torch.set_default_dtype(torch.bfloat16)
    model = config.build()
    torch.set_default_dtype(torch.float32)
    for value in model.state_dict().values():
        # What no weight is loaded into is then noticed.
        value.fill_(7)
    found = model.load_state_dict(made, strict=False)
    # A bias that balances experts in training begins with zeros: Qwen's repositories have none.
    assert not found.unexpected_keys and all(key.endswith("moe.expert_bias_E") for key in found.missing_keys), found
    state = {key: value for key, value in model.state_dict().items() if key not in found.missing_keys}
    # A weight that the model keeps in another type is a tensor of the adapter's all the same.
    for key, value in made.items():
        assert torch.equal(state[key].to(value.dtype), value), key
    raw = {key: made[key].detach().contiguous().reshape(-1).view(torch.uint8).numpy() for key in state}
    code = {torch.bfloat16: "BF16", torch.float32: "F32"}
    return {key: (code[made[key].dtype], tuple(made[key].shape), np.ascontiguousarray(raw[key]).tobytes()) for key in state}


def main(out: Path) -> None:
    import torchtitan_repos

    sys.meta_path.insert(0, Finder())
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, build in torchtitan_repos.BUILDERS.items():
            repo = build(Path(folder) / name)
            state = state_of(name, repo.path, repo.config)
            made[name] = vllm_process.digest(state)
            print(name, len(state), flush=True)
    out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
