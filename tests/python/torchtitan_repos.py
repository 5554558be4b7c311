"""Tiny repositories of the families of layout `torchtitan`, in sizes that torchtitan's own classes accept."""

from __future__ import annotations

from pathlib import Path

import vllm_repos
from repos import HIDDEN, LLAMA_NORMS, Draw, Repo, attention, base_config, ends, gated_mlp, norms, split, write
from vllm_repos import EXPERTS, LAYERS, MOE_INTER, experts_of


def llama3(path: Path) -> Repo:
    return vllm_repos.llama(path)


def llama3_tied(path: Path) -> Repo:
    return vllm_repos.llama(path, tied=True)


def qwen3(path: Path, *, tied: bool = False) -> Repo:
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=tied)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", qk_norm=True) | gated_mlp(draw, f"{at}.mlp", "BF16")
        out |= norms(draw, at, "BF16", *LLAMA_NORMS)
    config = base_config("qwen3", "Qwen3ForCausalLM", LAYERS, tie_word_embeddings=tied)
    return write(path, split(out, 2), config)


def qwen3_tied(path: Path) -> Repo:
    return qwen3(path, tied=True)


def qwen3_moe(path: Path) -> Repo:
    """With experts in every layer, as torchtitan builds it."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", qk_norm=True) | norms(draw, at, "BF16", *LLAMA_NORMS)
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", "BF16", EXPERTS, HIDDEN)
        out |= experts_of(draw, f"{at}.mlp")
    config = base_config(
        "qwen3_moe", "Qwen3MoeForCausalLM", LAYERS, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=MOE_INTER,
        mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip
    return write(path, {"model.safetensors": out}, config)


def deepseek_v3(path: Path) -> Repo:
    return vllm_repos.deepseek_v3(path)


def deepseek_v3_direct(path: Path) -> Repo:
    """The query has no low rank."""
    return vllm_repos.deepseek(path, "deepseek_v3", q_lora=None, topk_method="noaux_tc", scoring_func="sigmoid")


BUILDERS = {
    builder.__name__: builder
    for builder in (llama3, llama3_tied, qwen3, qwen3_tied, qwen3_moe, deepseek_v3, deepseek_v3_direct)
}  # fmt: skip
