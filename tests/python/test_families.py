"""What ckfs knows of model families against the classes of the pinned transformers: buffers, what stays in float32, tied
heads, and lists of layers in configurations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

import forked
from guide_blocks import ROOT
from mounting import find_ckfs

SMALL = {"vocab_size": 64, "num_attention_heads": 4}
DECODER = SMALL | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 4}
CONFIGS = {
    "DeepseekV3ForCausalLM": lambda: transformers.DeepseekV3Config(
        **DECODER, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        head_dim=4,
    ),
    "GptOssForCausalLM": lambda: transformers.GptOssConfig(**DECODER, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "Ernie4_5_MoeForCausalLM": lambda: transformers.Ernie4_5_MoeConfig(
        **DECODER, moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1,
    ),
    "Gemma4ForCausalLM": lambda: transformers.Gemma4TextConfig(
        **DECODER, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"],
    ),
    "BartForConditionalGeneration": lambda: transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
    ),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4,
    ),
}  # fmt: skip


# Classes with buffers in their state. Ernie's bias of the same name is a parameter, which FSDP2 splits.
WITH_BUFFERS = ["DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM", "Gemma4ForCausalLM", "BartForConditionalGeneration"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """A repository in float32 for each class."""
    at = tmp_path_factory.mktemp("families")
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        getattr(transformers, name)(config()).float().save_pretrained(at / name)
    return {name: at / name for name in CONFIGS}


def plan(source: Path, *flags: str) -> list[dict]:
    command = [find_ckfs(), "plan", source, "--json", "--layout", "hf", *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)["views"][0]["tensors"]


@pytest.mark.weekly
@pytest.mark.parametrize("table", ["buffers_and_float32", "names", "parts", "ties"])
def test_the_tables_of_families_are_what_the_classes_say(table):
    script = ROOT / f"tests/families/{table}.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=600, env=os.environ | {"CKFS_BIN": str(find_ckfs())})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.weekly
def test_lists_of_layers_in_configurations_are_cut_or_named():
    script = ROOT / "tests/families/layer_lists.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout


def test_the_shapes_of_a_device_are_those_of_its_rank_under_fsdp2(sources, tmp_path):
    models = [f"{sources[name]}:{name}" for name in WITH_BUFFERS]
    ranks = json.loads(forked.run(forked.TORCH, ROOT / "tests/python/fsdp_process.py", "2", *models).splitlines()[-1])
    for name in WITH_BUFFERS:
        command = [find_ckfs(), "export", sources[name], tmp_path / name, "--layout", "hf", "--mesh", "fsdp=2", "--only", "safetensors"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        for rank, expected in enumerate(ranks[name]):
            with safe_open(tmp_path / f"{name}/safetensors/dev{rank}.safetensors", "pt") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
            both = shapes.keys() & expected.keys()
            assert len(both) > 10
            assert {key: shapes[key] for key in both} == {key: expected[key] for key in both}, name


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_what_transformers_keeps_in_float32_stays_under_a_dtype(name, dtype, sources):
    wanted = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    state = getattr(transformers, name).from_pretrained(sources[name], dtype=wanted).state_dict()
    found = {tensor["name"]: tensor["dtype"] for tensor in plan(sources[name], "--dtype", dtype)}
    both = found.keys() & state.keys()
    assert len(both) > 10
    expected = {key: "F32" if state[key].dtype == torch.float32 else dtype.upper() for key in both}
    assert {key: found[key] for key in both} == expected
