"""`sharded_state/` of layout `sglang`: digests of what SGLang's own classes and `load_weights` make of the same repositories, for each
rank (`sglang_process.py` wrote them to `sglang_states.json`).

With `CKFS_SGLANG=PYTHON:WHEEL`, an interpreter and an unpacked wheel as in `sglang_process.py`, SGLang's own `ShardedStateLoader` loads
the states too.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import mounting
import repos
import sglang_repos
import vllm_process
import vllm_repos

HERE = Path(__file__).parent
STATES = json.loads((HERE / "sglang_states.json").read_text())


def options_of(key: str) -> tuple[list[str], tuple[int, bool, str]]:
    """Of ckfs for a recorded state, and what SGLang is run with."""
    ranks, experts, option = re.match(r"tp=(\d+) ep=(\d+) (\S+)", key).groups()
    options = ["--layout", "sglang", "--mesh", f"tensor={ranks}"]
    options += ["--set", "expert_parallel=true"] if experts != "1" else []
    options += ["--set", option] if option != "default" else []
    return options, (int(ranks), experts != "1", "" if option == "default" else option)


@pytest.mark.parametrize("name", STATES)
def test_states_are_those_of_sglangs_own_classes(name, own, tmp_path):
    made = sglang_repos.BUILDERS[name](tmp_path / name)
    compared, runs = 0, []
    for setting, keys in itertools.groupby(STATES[name], lambda key: key.rpartition(" ")[0]):
        options, run = options_of(setting)
        if STATES[name][f"{setting} rank=0"] is None:
            refused = mounting.run("plan", made.path, *options, expect=1)
            assert "SGLang loads no gpt-oss with experts that are spread" in refused.err
            continue
        state = own(made.path, *options) / "sharded_state"
        for rank, key in enumerate(keys):
            found, metadata, _ = repos.parse_safetensors(state / f"model-rank-{rank}-part-0.safetensors")
            found = {tensor: (held.code, held.shape, held.data) for tensor, held in found.items()}
            assert metadata == {"format": "pt"}
            assert vllm_process.digest(found) == STATES[name][key], (key, sorted(found))
            compared += 1
        assert {file.name for file in state.glob("*.safetensors")} == {f"model-rank-{n}-part-0.safetensors" for n in range(rank + 1)}
        runs.append([str(state), *run])
    assert compared == sum(digest is not None for digest in STATES[name].values())
    if engine := os.environ.get("CKFS_SGLANG"):
        python, wheel = engine.split(":")
        command = [python, HERE / "sglang_process.py", "load", made.path, json.dumps(runs)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": wheel})


def test_what_sglang_cannot_load_is_refused(own, tmp_path):
    """With the engine's name; the same table serves vLLM, which can."""

    def refused(name: str, said: str, *options: str) -> None:
        if not (tmp_path / name).exists():
            (vllm_repos.BUILDERS.get(name) or getattr(sglang_repos, name))(tmp_path / name)
        answer = mounting.run("plan", tmp_path / name, "--layout", "sglang", *options, expect=1)
        assert said in answer.err, answer.err

    refused("llama", "mesh axis tensor=3 does not divide the model's 4 attention heads: SGLang refuses such ranks", "--mesh", "tensor=3")
    refused("llama", "expected a mesh without axis pp", "--mesh", "pp=3")
    refused("mixtral", "expected a mesh without axis pp, expert or ep", "--mesh", "ep=2")
    refused("olmoe", "SGLang takes as many key-value heads as heads, which are 4; the model has 2")
    refused("qwen3_moe", "SGLang's class has experts in all layers")
    refused("gemma3_untied", "SGLang's class loads no output head")
    refused("deepseek_v3", "fuse_shared: expected layout sglang, one shared expert", "--set", "fuse_shared=true")
    mounting.run("plan", tmp_path / "olmoe", "--layout", "vllm")


def test_a_tied_head_that_sglangs_class_does_not_know_is_missing(tmp_path):
    """SGLang's Mixtral would serve a head of random numbers."""
    made = vllm_repos.mixtral(tmp_path / "mixtral")
    config = json.loads((made.path / "config.json").read_text()) | {"tie_word_embeddings": True}
    tensors = {name: tensor for name, tensor in made.tensors.items() if name != "lm_head.weight"}
    tied = repos.write(tmp_path / "tied", {"model.safetensors": tensors}, config)
    refused = mounting.run("plan", tied.path, "--layout", "sglang", expect=1)
    assert "missing tensor lm_head.weight" in refused.err
    mounting.run("plan", tied.path, "--layout", "vllm")
