"""Layout transformers against the state of the model that transformers loads from the same repository."""

import re
import shutil
import subprocess

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from guide_blocks import ROOT
from mounting import find_ckfs
from tiny_models import class_of, model_of

FIXTURES = ROOT / "tests/fixtures/maxtext"
MODELS = ROOT / "src/plan/experts/models.toml"

# Types of which a small model is made here. Mixtral and DeepSeek V3 have fixtures. Of the other types of the table no small model
# can be made from the default configuration, or ckfs refuses them by name, as it does not know a conversion of theirs.
COVERED = [
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v32", "deepseek_v4", "dory",
    "dots1", "dots3_note", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa", "hunyuan_v1_moe",
    "hy_v3", "inkling2", "kimi_linear", "lara_mini", "minimax_m3_vl", "mistral_large4", "molmo2", "nemotron_h_omni", "olmoe",
    "qwen2_moe", "qwen3_moe", "qwen3_omni_moe_thinker", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "solar_open", "unlimited_ocr",
]  # fmt: skip
# The same, without a repository of the modules' names: Step's then has the names of the layout hf, and Kimi's are refused.
RELEASES = ["kimi_k25", "step3p7"]
# Types whose experts, if they have any, are no single ones in a release: from the names of the modules nothing changes.
SAME = ["dory", "ernie4_5_vl_moe", "lara_mini", "molmo2"]


def dory_release(name):
    """A tensor's name in a release of Dory, which transformers reads and does not write: two blocks for each layer."""
    words = {"self_attn": (0, "mixer"), "lambda_1": (0, "attn_alpha"), "mlp": (1, "mixer"), "lambda_2": (1, "mlp_alpha")}

    def block(found):
        half, word = words[found[2]]
        return f"layers.{2 * int(found[1]) + half}.{word}"

    name = name.replace("self_attn.gate_proj.", "self_attn.g_proj.")
    name = re.sub(r"layers\.(\d+)\.(self_attn|lambda_1|mlp|lambda_2)(?=\.|$)", block, name)
    return re.sub("^model\\.", "backbone.", name).replace("embed_tokens", "embeddings")


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def shown(source, out, *flags):
    """Everything under full/, by path."""
    command = [find_ckfs(), "export", source, out, *flags, "--only", "full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    root = out / "full"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek3"])
def test_every_tensor_of_the_state_is_shown(family, tmp_path):
    source = FIXTURES / family / "hf"
    state = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    files = shown(source, tmp_path / "out", "--layout", "transformers")
    assert set(files) == set(state)
    for name, tensor in state.items():
        assert files[name] == bytes_of(tensor), name


def test_the_table_is_of_the_pinned_version():
    assert f"# from transformers {transformers.__version__}." in MODELS.read_text(), "run tests/python/experts_table.py"


@pytest.mark.parametrize("model_type", COVERED + RELEASES)
def test_models_with_experts(model_type, tmp_path):
    """The state is shown from the release's names, which transformers saves, and from the names of its modules."""
    release, modules = tmp_path / "release", tmp_path / "modules"
    model = model_of(model_type)
    model.save_pretrained(release)
    if model_type == "dory":
        with safe_open(release / "model.safetensors", "pt") as file:
            tensors = {dory_release(name): file.get_tensor(name) for name in file.keys()}
        save_file(tensors, release / "model.safetensors", {"format": "pt"})
    state = class_of(model_type).from_pretrained(release, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    files = shown(release, tmp_path / "a", "--layout", "transformers")
    assert sorted(files) == sorted(state)
    assert [name for name, tensor in state.items() if files[name] != bytes_of(tensor)] == []
    if model_type in RELEASES:
        return
    shutil.copytree(release, modules, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: tensor.clone() for name, tensor in state.items()}, modules / "model.safetensors")
    if model_type in SAME:
        command = [find_ckfs(), "plan", modules, "--layout", "transformers"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "has the same names in transformers 5 as in the repository: use --layout hf" in done.stderr
        return
    assert shown(modules, tmp_path / "b", "--layout", "transformers") == files


def test_layers_of_kimi_as_transformers_saves_them(tmp_path):
    """transformers 5.24 saves the text layers as `blocks`; they are shown as the releases name them, the tower's as they are."""
    source = tmp_path / "source"
    model = model_of("kimi_k25")
    model.save_pretrained(source)
    with safe_open(source / "model.safetensors", "pt") as file:
        assert "language_model.model.blocks.0.self_attn.o_proj.weight" in file.keys()
    state = model.state_dict()
    files = shown(source, tmp_path / "hf", "--layout", "hf")
    own = "language_model.model.layers.1.self_attn.o_proj.weight"
    assert files[own] == bytes_of(state["model.language_model.layers.1.self_attn.o_proj.weight"])
    assert "vision_tower.encoder.blocks.1.wo.weight" in files
    files = shown(source, tmp_path / "canonical", "--layout", "canonical", "--unscanned")
    names = {name.replace("/", ".") for name in files}
    assert {"language_model.model.layers.1.wo", "vision_tower.encoder.layers.1.wo.weight"} <= names


def test_dense_models_are_sent_to_the_layout_hf():
    command = [find_ckfs(), "plan", FIXTURES / "llama3.1" / "hf", "--layout", "transformers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "llama has the same names in transformers 5 as in the repository: use --layout hf" in done.stderr
