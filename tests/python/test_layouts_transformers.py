"""Layout transformers against the state of the model that transformers loads from the same repository."""

import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM

from guide_blocks import ROOT
from mounting import find_ckfs

FIXTURES = ROOT / "tests/fixtures/maxtext"


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek3"])
def test_every_tensor_of_the_state_is_shown(family, tmp_path):
    source = FIXTURES / family / "hf"
    state = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    command = [find_ckfs(), "export", source, tmp_path / "out", "--layout", "transformers", "--only", "full"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    files = {path.name: path for path in (tmp_path / "out/full").iterdir()}
    assert set(files) == set(state)
    for name, tensor in state.items():
        assert files[name].read_bytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
