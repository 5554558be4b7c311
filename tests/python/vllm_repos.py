"""Tiny repositories of the families of layout `vllm`, in sizes that four ranks divide and that vLLM's own classes accept."""

from __future__ import annotations

from pathlib import Path

from repos import (
    HEAD_DIM, HEADS, HIDDEN, INTER, KV_HEADS, LLAMA_NORMS, VOCAB,
    Draw, Repo, Tensor, attention, base_config, ends, gated_mlp, norms, split, write,
)  # fmt: skip

# Odd, so that two pipeline stages differ.
LAYERS, EXPERTS, MOE_INTER = 3, 4, 8
GEMMA_NORMS = (*LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def experts_of(draw: Draw, at: str, count: int = EXPERTS, inter: int = MOE_INTER) -> dict[str, Tensor]:
    out = {}
    for e in range(count):
        out |= gated_mlp(draw, f"{at}.experts.{e}", "BF16", inter)
    return out


def llama(path: Path, *, tied: bool = False, layers: int = LAYERS) -> Repo:
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=tied)
    for n in range(layers):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16") | gated_mlp(draw, f"{at}.mlp", "BF16") | norms(draw, at, "BF16", *LLAMA_NORMS)
    config = base_config("llama", "LlamaForCausalLM", layers, tie_word_embeddings=tied)
    return write(path, {"model.safetensors": out}, config)


def llama_tied(path: Path) -> Repo:
    return llama(path, tied=True)


def llama_deep(path: Path) -> Repo:
    """Seven layers on four stages: 2, 2, 2 and 1."""
    return llama(path, layers=7)


def qwen3_moe(path: Path) -> Repo:
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", qk_norm=True) | norms(draw, at, "BF16", *LLAMA_NORMS)
        if n == 0:
            out |= gated_mlp(draw, f"{at}.mlp", "BF16")
            continue
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", "BF16", EXPERTS, HIDDEN)
        out |= experts_of(draw, f"{at}.mlp")
    config = base_config(
        "qwen3_moe", "Qwen3MoeForCausalLM", LAYERS, num_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=MOE_INTER, mlp_only_layers=[0], decoder_sparse_step=1,
    )  # fmt: skip
    return write(path, {"model.safetensors": out}, config)


def mixtral(path: Path) -> Repo:
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16") | norms(draw, at, "BF16", *LLAMA_NORMS)
        moe = f"{at}.block_sparse_moe"
        out[f"{moe}.gate.weight"] = draw(f"{moe}.gate", "BF16", EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            for word, rows, columns in (("w1", INTER, HIDDEN), ("w2", HIDDEN, INTER), ("w3", INTER, HIDDEN)):
                out[f"{moe}.experts.{e}.{word}.weight"] = draw(f"{moe}.{e}.{word}", "BF16", rows, columns)
    config = base_config("mixtral", "MixtralForCausalLM", LAYERS, num_local_experts=EXPERTS, num_experts_per_tok=2)
    return write(path, {"model.safetensors": out}, config)


def phi3(path: Path) -> Repo:
    """Fused in the repository too: all of q, all of k, all of v, which a rank's part is not."""
    draw, width, narrow = Draw(path.name), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out[f"{at}.self_attn.qkv_proj.weight"] = draw(f"{at}.qkv", "BF16", width + 2 * narrow, HIDDEN)
        out[f"{at}.self_attn.o_proj.weight"] = draw(f"{at}.o", "BF16", HIDDEN, width)
        out[f"{at}.mlp.gate_up_proj.weight"] = draw(f"{at}.gate_up", "BF16", 2 * INTER, HIDDEN)
        out[f"{at}.mlp.down_proj.weight"] = draw(f"{at}.down", "BF16", HIDDEN, INTER)
        out |= norms(draw, at, "BF16", *LLAMA_NORMS)
    config = base_config("phi3", "Phi3ForCausalLM", LAYERS, pad_token_id=0)
    del config["head_dim"]
    return write(path, {"model.safetensors": out}, config)


def gemma_layers(draw: Draw, prefix: str) -> dict[str, Tensor]:
    out = ends(draw, "BF16", tied=True, prefix=prefix)
    for n in range(LAYERS):
        at = f"{prefix}layers.{n}"
        out |= attention(draw, at, "BF16", qk_norm=True) | gated_mlp(draw, f"{at}.mlp", "BF16")
        out |= norms(draw, at, "BF16", *GEMMA_NORMS)
    return out


def gemma_config(**more: object) -> dict:
    return base_config(
        "gemma3_text", "Gemma3ForCausalLM", LAYERS, tie_word_embeddings=True, sliding_window=16,
        layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"], query_pre_attn_scalar=HEAD_DIM,
        rope_theta=1e6, rope_local_base_freq=1e4, hidden_activation="gelu_pytorch_tanh", **more,
    )  # fmt: skip


def gemma3_text(path: Path) -> Repo:
    return write(path, {"model.safetensors": gemma_layers(Draw(path.name), "model.")}, gemma_config())


VISION, VISION_INTER, PATCHES = 8, 12, 4


def gemma3(path: Path) -> Repo:
    """With a vision tower, whose attention vLLM fuses too, and a projector."""
    draw = Draw(path.name)
    out = gemma_layers(draw, "language_model.model.")
    tower = "vision_tower.vision_model"

    def affine(name: str, rows: int, columns: int) -> None:
        out[f"{name}.weight"] = draw(name, "BF16", rows, columns)
        out[f"{name}.bias"] = draw(f"{name} bias", "BF16", rows)

    def norm(name: str) -> None:
        out[f"{name}.weight"] = draw(name, "BF16", VISION)
        out[f"{name}.bias"] = draw(f"{name} bias", "BF16", VISION)

    out[f"{tower}.embeddings.patch_embedding.weight"] = draw("patch", "BF16", VISION, 3, 2, 2)
    out[f"{tower}.embeddings.patch_embedding.bias"] = draw("patch bias", "BF16", VISION)
    out[f"{tower}.embeddings.position_embedding.weight"] = draw("position", "BF16", PATCHES, VISION)
    for n in range(2):
        at = f"{tower}.encoder.layers.{n}"
        for word in ("q_proj", "k_proj", "v_proj", "out_proj"):
            affine(f"{at}.self_attn.{word}", VISION, VISION)
        affine(f"{at}.mlp.fc1", VISION_INTER, VISION)
        affine(f"{at}.mlp.fc2", VISION, VISION_INTER)
        norm(f"{at}.layer_norm1")
        norm(f"{at}.layer_norm2")
    norm(f"{tower}.post_layernorm")
    out["multi_modal_projector.mm_input_projection_weight"] = draw("projection", "BF16", VISION, HIDDEN)
    out["multi_modal_projector.mm_soft_emb_norm.weight"] = draw("soft norm", "BF16", VISION)
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": VISION, "intermediate_size": VISION_INTER,
        "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 4, "patch_size": 2, "num_channels": 3,
        "vision_use_head": False,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": gemma_config(),
        "vision_config": vision, "torch_dtype": "bfloat16", "mm_tokens_per_image": 1, "image_token_index": 31,
        "boi_token_index": 29, "eoi_token_index": 30,
    }  # fmt: skip
    return write(path, split(out, 2), config)


def olmoe(path: Path) -> Repo:
    """Norms over all heads of q and k together, on every rank."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16") | norms(draw, at, "BF16", *LLAMA_NORMS)
        for word, heads in (("q_norm", HEADS), ("k_norm", KV_HEADS)):
            out[f"{at}.self_attn.{word}.weight"] = draw(f"{at}.{word}", "BF16", heads * HEAD_DIM)
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", "BF16", EXPERTS, HIDDEN)
        out |= experts_of(draw, f"{at}.mlp", inter=MOE_INTER)
    config = base_config("olmoe", "OlmoeForCausalLM", LAYERS, num_experts=EXPERTS, num_experts_per_tok=2)
    config |= {"intermediate_size": MOE_INTER}
    del config["head_dim"]
    return write(path, {"model.safetensors": out}, config)


def glm4_moe(path: Path) -> Repo:
    """Biases on q, k and v, norms of q and k, a float32 correction, and an extra layer for speculation that vLLM skips."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS + 1):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", bias=True, qk_norm=True) | norms(draw, at, "BF16", *LLAMA_NORMS)
        if n == 0:
            out |= gated_mlp(draw, f"{at}.mlp", "BF16")
            continue
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", "BF16", EXPERTS, HIDDEN)
        out[f"{at}.mlp.gate.e_score_correction_bias"] = draw(f"{at}.correction", "F32", EXPERTS)
        out |= gated_mlp(draw, f"{at}.mlp.shared_experts", "BF16", MOE_INTER) | experts_of(draw, f"{at}.mlp")
    at = f"model.layers.{LAYERS}"
    out |= norms(draw, at, "BF16", "enorm", "hnorm", "shared_head.norm")
    out[f"{at}.eh_proj.weight"] = draw("eh_proj", "BF16", HIDDEN, 2 * HIDDEN)
    out[f"{at}.embed_tokens.weight"] = draw("own embed", "BF16", VOCAB, HIDDEN)
    out[f"{at}.shared_head.head.weight"] = draw("own head", "BF16", VOCAB, HIDDEN)
    config = base_config(
        "glm4_moe", "Glm4MoeForCausalLM", LAYERS, n_routed_experts=EXPERTS, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=MOE_INTER, attention_bias=True, use_qk_norm=True, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, num_nextn_predict_layers=1,
    )  # fmt: skip
    return write(path, split(out, 2), config)


def deepseek(path: Path, kind: str, *, q_lora: int | None, experts: int = EXPERTS, shared: int = 2, **more: object) -> Repo:
    """MLA, one dense layer, then layers with experts."""
    draw, code, rope, nope, latent, wide = Draw(path.name), "BF16", 2, 4, 8, 4
    out = ends(draw, code, tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        matrices = [
            ("kv_a_proj_with_mqa", latent + rope, HIDDEN), ("kv_b_proj", HEADS * (nope + wide), latent),
            ("o_proj", HIDDEN, HEADS * wide),
        ]  # fmt: skip
        if q_lora is None:
            matrices.append(("q_proj", HEADS * (nope + rope), HIDDEN))
        else:
            matrices += [("q_a_proj", q_lora, HIDDEN), ("q_b_proj", HEADS * (nope + rope), q_lora)]
            out[f"{at}.self_attn.q_a_layernorm.weight"] = draw(f"{at}.q_a_norm", code, q_lora)
        for word, rows, columns in matrices:
            out[f"{at}.self_attn.{word}.weight"] = draw(f"{at}.{word}", code, rows, columns)
        out[f"{at}.self_attn.kv_a_layernorm.weight"] = draw(f"{at}.kv_a_norm", code, latent)
        out |= norms(draw, at, code, *LLAMA_NORMS)
        if n == 0:
            out |= gated_mlp(draw, f"{at}.mlp", code)
            continue
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", code, experts, HIDDEN)
        if kind == "deepseek_v3":
            out[f"{at}.mlp.gate.e_score_correction_bias"] = draw(f"{at}.correction", "F32", experts)
        out |= gated_mlp(draw, f"{at}.mlp.shared_experts", code, shared * MOE_INTER) | experts_of(draw, f"{at}.mlp", experts)
    config = base_config(
        kind, {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[kind], LAYERS,
        n_routed_experts=experts, n_shared_experts=shared, first_k_dense_replace=1, moe_intermediate_size=MOE_INTER,
        q_lora_rank=q_lora, kv_lora_rank=latent, qk_rope_head_dim=rope, qk_nope_head_dim=nope, v_head_dim=wide,
        num_experts_per_tok=2, norm_topk_prob=True, n_group=1, topk_group=1, routed_scaling_factor=1.0,
        moe_layer_freq=1, **more,
    ) | {"num_key_value_heads": HEADS}  # fmt: skip
    del config["head_dim"]
    return write(path, split(out, 2), config)


def deepseek_v2_lite(path: Path) -> Repo:
    return deepseek(path, "deepseek_v2", q_lora=None, topk_method="greedy", scoring_func="softmax")


def deepseek_v2(path: Path) -> Repo:
    return deepseek(path, "deepseek_v2", q_lora=6, topk_method="group_limited_greedy", scoring_func="softmax")


def deepseek_v3(path: Path) -> Repo:
    return deepseek(path, "deepseek_v3", q_lora=6, topk_method="noaux_tc", scoring_func="sigmoid")


def gpt_oss(path: Path) -> Repo:
    """Sinks, biases everywhere, and stacked experts whose gate and up rows alternate."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", bias=True) | norms(draw, at, "BF16", *LLAMA_NORMS)
        out[f"{at}.self_attn.o_proj.bias"] = draw(f"{at}.o bias", "BF16", HIDDEN)
        out[f"{at}.self_attn.sinks"] = draw(f"{at}.sinks", "BF16", HEADS)
        out[f"{at}.mlp.router.weight"] = draw(f"{at}.router", "BF16", EXPERTS, HIDDEN)
        out[f"{at}.mlp.router.bias"] = draw(f"{at}.router bias", "BF16", EXPERTS)
        out[f"{at}.mlp.experts.gate_up_proj"] = draw(f"{at}.gate_up", "BF16", EXPERTS, HIDDEN, 2 * INTER)
        out[f"{at}.mlp.experts.gate_up_proj_bias"] = draw(f"{at}.gate_up bias", "BF16", EXPERTS, 2 * INTER)
        out[f"{at}.mlp.experts.down_proj"] = draw(f"{at}.down", "BF16", EXPERTS, INTER, HIDDEN)
        out[f"{at}.mlp.experts.down_proj_bias"] = draw(f"{at}.down bias", "BF16", EXPERTS, HIDDEN)
    more = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8, "attention_bias": True}
    return write(path, {"model.safetensors": out}, base_config("gpt_oss", "GptOssForCausalLM", LAYERS, **more))


BUILDERS = {
    builder.__name__: builder
    for builder in (
        llama, llama_tied, llama_deep, qwen3_moe, mixtral, phi3, gemma3_text, gemma3, olmoe, glm4_moe, deepseek_v2_lite, deepseek_v2,
        deepseek_v3, gpt_oss,
    )
}  # fmt: skip
