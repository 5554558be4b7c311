"""Layout torchtitan against the states of torchtitan's own models: digests that `torchtitan_process.py` has written.

FSDP2 cuts each tensor of a state on axis 0 as `torch.chunk` does. The way back starts from such states, as torchtitan's checkpointer
saves them.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import mounting
import repos
import torchtitan_repos
from vllm_process import digest

STATES = json.loads((Path(__file__).parent / "torchtitan_states.json").read_text())
RANKS = 3


def state_of(source: Path, out: Path, *mesh: str) -> list[dict[str, repos.Tensor]]:
    mounting.run("export", source, out, "--layout", "torchtitan", "--only", "safetensors", *mesh)
    files = sorted((out / "safetensors").glob("dev*.safetensors"))
    return [repos.parse_safetensors(file)[0] for file in files]


@pytest.mark.parametrize("name", torchtitan_repos.BUILDERS)
def test_the_state_is_that_of_torchtitans_own_model(name, tmp_path):
    made = torchtitan_repos.BUILDERS[name](tmp_path / name)
    [whole] = state_of(made.path, tmp_path / "whole")
    assert digest({key: (tensor.code, tensor.shape, tensor.data) for key, tensor in whole.items()}) == STATES[name], sorted(whole)

    ranks = state_of(made.path, tmp_path / "ranks", "--mesh", f"fsdp={RANKS}")
    assert len(ranks) == RANKS
    for key, tensor in whole.items():
        rows = -(-tensor.shape[0] // RANKS)
        for rank, found in enumerate(ranks):
            # The bias of the router is a buffer, which FSDP2 does not split.
            is_buffer = key.endswith("expert_bias_E")
            expected = tensor.array() if is_buffer else tensor.array()[rank * rows : (rank + 1) * rows]
            assert (found[key].shape, found[key].data) == (expected.shape, expected.tobytes()), (key, rank)


@pytest.fixture(autouse=True)
def quiet():
    """torch logs each call of its checkpointer."""
    logger = logging.getLogger("c10d-NullHandler-dcp_logger")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def saved(source: Path, run: Path, step: int, change=None) -> Path:
    """A step as torchtitan's checkpointer saves it: the state of the model without a prefix, and that of the training beside it."""
    out = run.parent / f"state-{step}"
    state_of(source, out)
    weights = load_file(out / "safetensors/dev0.safetensors")
    if change:
        change(weights)
    states = {"train_state": {"step": step, "ntokens_seen": 64 * step}, "dataloader": {"dp_world_size": 1, "dp_rank_0": b"state"}}
    states["lr_scheduler"] = {"last_epoch": step, "_last_lr": [0.1]}
    states["optimizer"] = {f"param_groups.{name}.lr": torch.tensor(0.1) for name in weights}
    for name, tensor in weights.items():
        moments = {"step": torch.tensor(float(step)), "exp_avg": torch.ones_like(tensor), "exp_avg_sq": torch.ones_like(tensor)}
        states["optimizer"] |= {f"state.{name}.{key}": value for key, value in moments.items()}
    dcp.save(weights | states, checkpoint_id=run / f"step-{step}", no_dist=True)
    return run / f"step-{step}"


def back(made: repos.Repo, tmp_path: Path) -> list[object]:
    """The flags of the way back. The configuration lies alone, so that nothing else of the repository is read."""
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(made.path / "config.json", config)
    return ["--layout", "hf", "--config-from", config]


def tensors_of(repository: Path) -> dict[str, repos.Tensor]:
    found = {}
    for file in sorted(repository.glob("*.safetensors")):
        found |= repos.parse_safetensors(file)[0]
    return found


def same_repository(found: Path, expected: Path) -> None:
    found, expected = tensors_of(found), tensors_of(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].code, found[name].shape, found[name].data) == (tensor.code, tensor.shape, tensor.data), name


@pytest.mark.parametrize("name", torchtitan_repos.BUILDERS)
def test_torchtitans_checkpoint_comes_back(name, tmp_path):
    made = torchtitan_repos.BUILDERS[name](tmp_path / name)
    step = saved(made.path, tmp_path / "run", 3)
    flags = back(made, tmp_path)
    mounting.run("export", step, tmp_path / "back", *flags, "--only", "hf/*")
    same_repository(tmp_path / "back/hf", made.path)
    config = json.loads((tmp_path / "back/hf/config.json").read_text())
    assert {**config, "dtype": None} == {**made.config, "dtype": None}
    assert "no difference" in mounting.run("verify", step, *flags).out


def test_steps_of_torchtitan_are_repositories(own, tmp_path):
    made = torchtitan_repos.llama3(tmp_path / "llama3")
    run = tmp_path / "run"
    for step in (10, 20):
        saved(made.path, run, step)
    mounted = own(run, "--steps", "all", *back(made, tmp_path))
    for step in ("10", "20", "latest"):
        same_repository(mounted / f"{step}/hf", made.path)


def test_a_head_that_differs_from_the_embedding_stays_a_tensor(tmp_path):
    made = torchtitan_repos.llama3_tied(tmp_path / "llama3_tied")
    head = {}

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"].clone()
        weights["lm_head.weight"][-1, -1] += 1
        head["lm_head.weight"] = weights["lm_head.weight"]

    step = saved(made.path, tmp_path / "run", 1, change)
    done = mounting.run("export", step, tmp_path / "back", *back(made, tmp_path), "--only", "hf/*")
    assert "lm_head.weight is stored and differs from tok_embeddings.weight" in done.err
    found = load_file(tmp_path / "back/hf/model.safetensors")
    assert torch.equal(found["lm_head.weight"], head["lm_head.weight"])
    assert json.loads((tmp_path / "back/hf/config.json").read_text())["tie_word_embeddings"] is False


def test_what_the_repository_has_no_place_for_is_refused(tmp_path):
    made = torchtitan_repos.qwen3_moe(tmp_path / "qwen3_moe")
    bias = "layers.0.moe.expert_bias_E"
    flags = back(made, tmp_path)
    step = saved(made.path, tmp_path / "run", 1, lambda weights: weights.update({bias: torch.ones(4)}))
    done = mounting.run("plan", step, *flags, expect=1)
    assert f"unexpected tensor {bias}" in done.err and "--allow-unmapped" in done.err, done.err
    done = mounting.run("export", step, tmp_path / "back", *flags, "--allow-unmapped=*.expert_bias_E", "--only", "hf/*")
    assert f"unexpected tensor {bias}: left out" in done.err
    same_repository(tmp_path / "back/hf", made.path)

    step = saved(made.path, tmp_path / "run", 2, lambda weights: weights.pop("layers.1.moe.router.gate.weight"))
    done = mounting.run("plan", step, *flags, expect=1)
    assert "missing tensor layers.1.moe.router.gate.weight, needed for the layout torchtitan/qwen3" in done.err, done.err
    done = mounting.run("plan", step, "--layout", "hf", expect=1)
    assert "the names are those of the layout torchtitan" in done.err and "--config-from" in done.err, done.err
    done = mounting.run("plan", step, "--layout", "torchtitan", *flags[2:], expect=1)
    assert "--layout hf with --config-from makes a repository" in done.err, done.err


@pytest.mark.parametrize(
    "change, expected",
    [({"num_key_value_heads": 1}, "attention.qkv_linear.wk.weight"), ({"vocab_size": 8}, "tok_embeddings.weight")],
)
def test_the_configuration_of_another_size_is_refused(change, expected, tmp_path):
    made = torchtitan_repos.llama3(tmp_path / "llama3")
    flags = back(made, tmp_path)
    (tmp_path / "config/config.json").write_text(json.dumps(made.config | change))
    done = mounting.run("plan", saved(made.path, tmp_path / "run", 1), *flags, expect=1)
    assert expected in done.err and "by config.json and the layout torchtitan/llama3" in done.err, done.err
