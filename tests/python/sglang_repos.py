"""Tiny repositories of the families of layout `sglang`: those of `vllm_repos.py`, and what only SGLang's classes tell apart."""

from __future__ import annotations

from pathlib import Path

import vllm_repos
from repos import (
    HEAD_DIM, HEADS, HIDDEN, LLAMA_NORMS, VOCAB, Draw, Repo, attention, base_config, ends, gated_mlp, norms, write,
)  # fmt: skip
from vllm_repos import EXPERTS, LAYERS, MOE_INTER, experts_of


def dense(path: Path, kind: str, architecture: str, *, bias: str = "", qk_norm: bool = False, **more: object) -> Repo:
    """Of Llama's names, with biases of the projections `bias`."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", bias="q" in bias, qk_norm=qk_norm) | gated_mlp(draw, f"{at}.mlp", "BF16")
        out |= norms(draw, at, "BF16", *LLAMA_NORMS)
        if "o" in bias:
            out[f"{at}.self_attn.o_proj.bias"] = draw(f"{at}.o bias", "BF16", HIDDEN)
    return write(path, {"model.safetensors": out}, base_config(kind, architecture, LAYERS, **more))


def llama_biased(path: Path) -> Repo:
    return dense(path, "llama", "LlamaForCausalLM", bias="qkvo", attention_bias=True)


def mistral(path: Path) -> Repo:
    return dense(path, "mistral", "MistralForCausalLM")


def qwen2(path: Path) -> Repo:
    return dense(path, "qwen2", "Qwen2ForCausalLM", bias="qkv")


def qwen3(path: Path) -> Repo:
    return dense(path, "qwen3", "Qwen3ForCausalLM", qk_norm=True)


def qwen3_biased(path: Path) -> Repo:
    """In SGLang, as in transformers, with a bias of the output projection."""
    return dense(path, "qwen3", "Qwen3ForCausalLM", bias="qkvo", qk_norm=True, attention_bias=True)


def qwen3_three(path: Path) -> Repo:
    """Heads for three ranks, which do not divide a vocabulary that is padded to 64."""
    draw, heads, kv = Draw(path.name), 6, 3
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        for word, rows, columns in (
            ("q", heads * HEAD_DIM, HIDDEN), ("k", kv * HEAD_DIM, HIDDEN), ("v", kv * HEAD_DIM, HIDDEN), ("o", HIDDEN, heads * HEAD_DIM),
        ):  # fmt: skip
            out[f"{at}.self_attn.{word}_proj.weight"] = draw(f"{at}.{word}", "BF16", rows, columns)
        for word in ("q_norm", "k_norm"):
            out[f"{at}.self_attn.{word}.weight"] = draw(f"{at}.{word}", "BF16", HEAD_DIM)
        out |= gated_mlp(draw, f"{at}.mlp", "BF16") | norms(draw, at, "BF16", *LLAMA_NORMS)
    config = base_config("qwen3", "Qwen3ForCausalLM", LAYERS) | {"num_attention_heads": heads, "num_key_value_heads": kv}
    return write(path, {"model.safetensors": out}, config)


def olmoe(path: Path) -> Repo:
    """As many key/value heads as heads, which SGLang's class takes for granted."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= norms(draw, at, "BF16", *LLAMA_NORMS)
        for word in "qkvo":
            out[f"{at}.self_attn.{word}_proj.weight"] = draw(f"{at}.{word}", "BF16", HIDDEN, HIDDEN)
        for word in "qk":
            out[f"{at}.self_attn.{word}_norm.weight"] = draw(f"{at}.{word}_norm", "BF16", HIDDEN)
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", "BF16", EXPERTS, HIDDEN)
        out |= experts_of(draw, f"{at}.mlp", inter=MOE_INTER)
    config = base_config("olmoe", "OlmoeForCausalLM", LAYERS, num_experts=EXPERTS, num_experts_per_tok=2)
    config |= {"intermediate_size": MOE_INTER, "num_key_value_heads": HEADS}
    del config["head_dim"]
    return write(path, {"model.safetensors": out}, config)


def qwen3_moe(path: Path) -> Repo:
    """Experts in all layers, as SGLang's class has them."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", bias=True, qk_norm=True) | norms(draw, at, "BF16", *LLAMA_NORMS)
        out[f"{at}.self_attn.o_proj.bias"] = draw(f"{at}.o bias", "BF16", HIDDEN)
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", "BF16", EXPERTS, HIDDEN)
        out |= experts_of(draw, f"{at}.mlp")
    config = base_config(
        "qwen3_moe", "Qwen3MoeForCausalLM", LAYERS, num_experts=EXPERTS, num_experts_per_tok=2, attention_bias=True,
        moe_intermediate_size=MOE_INTER, decoder_sparse_step=1,
    )  # fmt: skip
    return write(path, {"model.safetensors": out}, config)


def gemma3_untied(path: Path) -> Repo:
    """A head of its own, which SGLang's class does not load."""
    draw = Draw(path.name)
    out = vllm_repos.gemma_layers(draw, "model.")
    out["lm_head.weight"] = draw("lm_head", "BF16", VOCAB, HIDDEN)
    return write(path, {"model.safetensors": out}, vllm_repos.gemma_config() | {"tie_word_embeddings": False})


def deepseek_v3_full(path: Path) -> Repo:
    """As many experts as the released model, and one shared, which SGLang then stacks with them."""
    more = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return vllm_repos.deepseek(path, "deepseek_v3", q_lora=6, experts=256, shared=1, **more)


def kimi_k2(path: Path) -> Repo:
    """Of DeepSeek V3's names and class, with more experts, which SGLang does not stack with the shared one."""
    made = vllm_repos.deepseek(path, "deepseek_v3", q_lora=6, experts=384, shared=1, topk_method="noaux_tc", scoring_func="sigmoid")
    return write(path, made.files, made.config | {"model_type": "kimi_k2"})


SHARED = ("llama", "llama_tied", "mixtral", "phi3", "gemma3_text", "gemma3", "glm4_moe", "deepseek_v2_lite",
          "deepseek_v2", "deepseek_v3", "gpt_oss")  # fmt: skip
OWN = (llama_biased, mistral, qwen2, qwen3, qwen3_biased, qwen3_three, olmoe, qwen3_moe, deepseek_v3_full, kimi_k2)
BUILDERS = {name: vllm_repos.BUILDERS[name] for name in SHARED} | {builder.__name__: builder for builder in OWN}

# Parameters of the layout that say how SGLang runs, beside its defaults.
OPTIONS = {"glm4_moe": ["fuse_shared=false"], "deepseek_v3_full": ["fuse_shared=false"], "gpt_oss": ["moe_runner=triton"]}
# Tensor ranks, and whether each has experts of its own.
SETTINGS = [(1, False), (2, False), (3, False), (4, False), (2, True), (4, True)]


def settings(repo: Repo, name: str) -> list[tuple[int, bool, str]]:
    """Of a repository: tensor ranks, experts spread, a parameter."""
    sparse = any("experts" in tensor for tensor in repo.tensors)
    found = []
    for ranks, spread in SETTINGS:
        fits = (ranks == 3) == (name == "qwen3_three" and ranks > 1) and (sparse or not spread)
        found += [(ranks, spread, option) for option in ["", *OPTIONS.get(name, [])]] if fits else []
    return found
