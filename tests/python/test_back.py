"""The way back: checkpoints of MaxText and Megatron-Core as repositories that transformers loads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import forked
import mounting
import repos

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/maxtext"
HERE = Path(__file__).parent


def loaded(path: Path):
    """The model of a repository in f32, and what transformers has to say of its tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)


def logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.arange(3, 21).reshape(2, 9)).logits.numpy()


def back(checkpoint: Path, family: str, to: Path, *more: object) -> Path:
    """Exports `hf/` of a checkpoint with the configuration of a family's fixture."""
    arguments = ["--layout", "hf", "--config-from", FIXTURES / family / "hf", "--only", "hf", *more]
    mounting.run("export", checkpoint, to, *arguments)
    return to / "hf"


def saved(family: str, layout: str, to: Path, form: str) -> Path:
    """A checkpoint of another layout, made from a family's fixture."""
    mounting.run("export", FIXTURES / family / "hf", to, "--layout", layout, "--only", form)
    return to / form


# The arithmetic of the others rounds: their logits are near.
@pytest.mark.parametrize("family, near", [("llama3.1", 0.05), ("qwen3", 0), ("qwen3-moe", 0), ("gemma2", 0.05), ("olmo3", 0)])
def test_transformers_computes_the_same_from_maxtexts_checkpoint(tmp_path, family, near):
    checkpoint = saved(family, "maxtext", tmp_path / "maxtext", "orbax")
    exported = back(checkpoint, family, tmp_path / "back", "--max-shard-bytes", "100K")
    model, info = loaded(exported)
    assert not any(info.values()), info
    expected, found = logits(loaded(FIXTURES / family / "hf")[0]), logits(model)
    if near:
        np.testing.assert_allclose(found, expected, atol=near * np.abs(expected).max())
    else:
        np.testing.assert_array_equal(found, expected)


def test_a_text_model_without_its_tower_is_a_model_by_itself(tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText

    checkpoint = saved("gemma3", "maxtext-unscanned", tmp_path / "maxtext", "orbax")
    model, info = loaded(back(checkpoint, "gemma3", tmp_path / "text"))
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert not any(info.values()), info
    filled = back(checkpoint, "gemma3", tmp_path / "whole", "--fill-from", FIXTURES / "gemma3/hf")
    load = AutoModelForImageTextToText.from_pretrained
    whole, info = load(filled, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    np.testing.assert_array_equal(logits(whole), logits(model))
    original = load(FIXTURES / "gemma3/hf", dtype=torch.float32, attn_implementation="eager")
    tower = {name: value for name, value in original.state_dict().items() if "vision" in name or "projector" in name}
    assert tower
    for name, value in tower.items():
        assert torch.equal(whole.state_dict()[name], value), name


def test_the_companions_files_are_in_the_repository(tmp_path):
    companion = tmp_path / "companion"
    companion.mkdir()
    (companion / "config.json").write_bytes((FIXTURES / "qwen3/hf/config.json").read_bytes())
    files = {"generation_config.json": b"{}", "tokenizer.json": b'{"a": 1}', "merges.txt": b"a b\n"}
    for name, content in files.items():
        (companion / name).write_bytes(content)
    (companion / "model.safetensors.index.json").write_text("{}")
    (companion / "README.md").write_text("of another model")
    checkpoint = saved("qwen3", "maxtext", tmp_path / "maxtext", "orbax")
    arguments = ["--layout", "hf", "--config-from", companion, "--only", "hf", "--dtype", "f32"]
    mounting.run("export", checkpoint, tmp_path / "out", *arguments)
    out = tmp_path / "out/hf"
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", *files}
    assert {name: (out / name).read_bytes() for name in files} == files
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_a_mount_of_the_way_back_is_verified(own, tmp_path):
    checkpoint = saved("gemma2", "maxtext", tmp_path / "maxtext", "orbax")
    options = ["--layout", "hf", "--config-from", FIXTURES / "gemma2/hf", "--mesh", "fsdp=2"]
    mounted = own(checkpoint, *options)
    assert "no difference" in mounting.run("verify", checkpoint, *options).out
    tensors, _, _ = repos.parse_safetensors(mounted / "hf/model.safetensors")
    for name, tensor in tensors.items():
        shards = [(mounted / f"dev{device}/{name}").read_bytes() for device in range(2)]
        assert b"".join(shards) == tensor.data, name


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core has no package for this Python")
@pytest.mark.parametrize("family", ["llama3.1", "qwen2.5", "qwen3", "qwen3-moe", "mixtral"])
def test_megatron_cores_own_checkpoint_comes_back(tmp_path, family):
    directory = tmp_path / "megatron"
    forked.run(forked.MEGATRON, HERE / "megatron_model.py", FIXTURES / family / "hf/config.json", directory)
    exported = back(directory, family, tmp_path / "back")
    tensors = {}
    for file in exported.glob("*.safetensors"):
        tensors |= repos.parse_safetensors(file)[0]
    expected = np.load(tmp_path / "megatron.npz")
    assert set(tensors) == set(expected.files)
    for name in expected.files:
        mounting.same_bytes(tensors[name].data, expected[name], name)
    # The layout makes the same names and shapes from the repository: Megatron-Core can load them.
    more = ["--set", "experts_norm=false"] if family in ("qwen3-moe", "mixtral") else []
    found = mounting.run("plan", exported, "--layout", "megatron", *more, "--json").json()
    shapes = json.loads((tmp_path / "megatron.json").read_text())
    made = {row["name"]: row["shape"] for row in _tensors(found)}
    assert made == shapes


def _tensors(plan: dict) -> list[dict]:
    views = plan.get("views") or [plan]
    return views[0]["tensors"]
