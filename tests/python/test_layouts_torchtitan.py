"""Layout torchtitan against the states of torchtitan's own models: digests that `torchtitan_process.py` has written.

FSDP2 cuts each tensor of a state on axis 0 as `torch.chunk` does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
