"""Tensor parallelism: the table of plans is transformers' own, and shards are what each rank of such a plan computes with."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import mounting

ROOT = Path(__file__).parents[2]
RANKS = 2
LLM = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64,
)  # fmt: skip
LATENT = LLM | dict(
    num_key_value_heads=4, q_lora_rank=6, kv_lora_rank=8, qk_rope_head_dim=2, qk_nope_head_dim=4, v_head_dim=4, moe_intermediate_size=8,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
SPEECH = dict(
    d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24,
    decoder_ffn_dim=24, vocab_size=32, num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, word_embed_proj_dim=16, ffn_dim=24,
)  # fmt: skip
EYE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14)
MODELS = {
    "llama": ("LlamaForCausalLM", LLM | dict(attention_bias=True, mlp_bias=True)),
    "glm4": ("Glm4ForCausalLM", LLM | dict(attention_bias=True)),
    "phi3": ("Phi3ForCausalLM", LLM),
    "phi": ("PhiForCausalLM", LLM | dict(num_key_value_heads=4)),
    "olmo2": ("Olmo2ForCausalLM", LLM),
    "starcoder2": ("Starcoder2ForCausalLM", LLM),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "mixtral": ("MixtralForCausalLM", LLM | dict(num_local_experts=4, num_experts_per_tok=2)),
    "opt": ("OPTForCausalLM", LLM | SPEECH | dict(ffn_dim=24, do_layer_norm_before=True)),
    "gpt2": ("GPT2LMHeadModel", dict(n_embd=16, n_layer=2, n_head=4, vocab_size=32, n_positions=64)),
    "whisper": ("WhisperForConditionalGeneration", SPEECH),
    "bert": ("BertModel", LLM),
    "clip_vision_model": ("CLIPVisionModel", EYE),
}


def script():
    spec = importlib.util.spec_from_file_location("tensor_parallel", ROOT / "tests/families/tensor_parallel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_pinned_transformers():
    made = script()
    assert made.text() == made.TABLE.read_text(), "tests/families/tensor_parallel.py makes the file anew"


@pytest.mark.parametrize("name", MODELS)
def test_shards_are_those_of_the_plan_and_each_block_is_cut_as_a_whole(name, tmp_path):
    cls, settings = MODELS[name]
    config = transformers.CONFIG_MAPPING[name](**settings)
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config)
    model.save_pretrained(tmp_path / "model")
    whole = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        whole |= load_file(file)
    mounting.run(
        "export", tmp_path / "model", tmp_path / "out", "--layout", "hf", "--mesh", f"tensor={RANKS}", "--only", "safetensors"
    )
    ranks = [load_file(tmp_path / f"out/safetensors/dev{rank}.safetensors") for rank in range(RANKS)]
    plan = getattr(config, "base_model_tp_plan", None) or {}
    sides: dict[str, set[str]] = {}
    for tensor, value in whole.items():
        shards = [rank[tensor] for rank in ranks]
        cut = next((axis for axis in range(value.dim()) if shards[0].shape[axis] != value.shape[axis]), None)
        if cut is None:
            assert all(torch.equal(shard, value) for shard in shards), tensor
        else:
            assert torch.equal(torch.cat(shards, dim=cut), value), tensor
        module, last = tensor.rsplit(".", 1)
        stars = re.sub(r"\.\d+", ".*", module)
        style = next((style for key, style in plan.items() if stars == key or stars.endswith("." + key)), "")
        # What the plan names is cut as it says, with its bias.
        if style.startswith("colwise"):
            assert cut == 0, (tensor, style)
        if style.startswith("rowwise"):
            assert cut == (1 if last == "weight" else None), (tensor, style)
        if "*" in stars and value.dim() == 2:
            # The attention or the MLP of a layer, or an expert.
            inner = module.split(re.search(r"\d+", module)[0] + ".", 1)[1].split(".")
            block = inner[: inner.index("experts") + 2] if "experts" in inner else inner[:1]
            block = ["mlp"] if block[0] in ("fc1", "fc2", "intermediate", "output") else block
            row, column = (0, 1) if name == "gpt2" else (1, 0)
            sides.setdefault(".".join(block), set()).add({row: "row", column: "column", None: "whole"}[cut])
    for block, found in sides.items():
        assert ("row" in found) == ("column" in found), (block, found)
    assert any("row" in found for found in sides.values())
