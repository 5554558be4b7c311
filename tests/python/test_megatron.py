"""Megatron-Core, unmodified, loads `dcp/`: beyond torch's files it needs `metadata.json` and `common.pt`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import forked
import reference

HERE = Path(__file__).parent
RANKS = 2


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def expected_of_rank(shown: reference.Shown, rank: int) -> list[np.ndarray]:
    parts = shown.array if shown.scanned else [shown.array]
    if parts[0].ndim < 2:
        return list(parts)
    axis = next(axis for axis, extent in enumerate(parts[0].shape) if extent % RANKS == 0)
    return [np.split(part, RANKS, axis)[rank] for part in parts]


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core has no package for this Python")
def test_dist_checkpointing_load(shared, repo, tmp_path):
    cases = [("llama", "fsdp=4"), ("qwen3_moe", "fsdp=2,tensor=2")]
    mounts = [shared(name, "--mesh", mesh) for name, mesh in cases]
    points = [mounted.point for mounted in mounts]
    forked.run_ranks(RANKS, forked.MEGATRON, HERE / "megatron_process.py", tmp_path, *points)
    for rank in range(RANKS):
        for (name, _), found in zip(cases, json.loads((tmp_path / f"{rank}.json").read_text()), strict=True):
            tensors = {shown.name: shown for shown in reference.canonical(repo(name)).values() if shown.bundled}
            assert found["rest"] == {"iteration": 0}
            assert found["whole"] == {key: digest(shown.array) for key, shown in tensors.items()}
            parts = {key: expected_of_rank(shown, rank) for key, shown in tensors.items()}
            assert found["rank"] == {f"{key}/{n}": digest(part) for key, split in parts.items() for n, part in enumerate(split)}


# The form of the optimizer's state, the ranks that save it, two of them by tensor, and tensor, pipeline and all ranks that load it.
STATES = [
    ("whole", 2, [(1, 2, 2), (1, 1, 1)]),
    ("fully_reshardable", 4, [(1, 2, 2), (1, 1, 2)]),
    # This is of the optimizer's buffers: Megatron loads it on other ranks of data only.
    ("dp_reshardable", 4, [(2, 1, 2)]),
]


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core has no package for this Python")
@pytest.mark.parametrize("kind,ranks,loads", STATES)
def test_a_training_state_is_loaded_with_other_tensor_and_pipeline_parallelism(own, tmp_path, kind, ranks, loads):
    saved, script = tmp_path / "iter_0000007", HERE / "megatron_state_process.py"
    forked.run_ranks(ranks, forked.MEGATRON, script, kind, 2, 1, "save", saved)
    mounted = own(saved, "--training-state", "--mesh", "fsdp=2")
    for name in ("common.pt", "metadata.json"):
        assert (mounted / "dcp" / name).read_bytes() == (saved / name).read_bytes()
    for tensor, pipeline, world in loads:
        out = tmp_path / f"{tensor}-{pipeline}"
        out.mkdir()
        forked.run_ranks(world, forked.MEGATRON, script, kind, tensor, pipeline, "load", out, saved, mounted / "dcp")
        for rank in range(world):
            expected, found = (json.loads((out / f"{number}-{rank}.json").read_text()) for number in (0, 1))
            assert found == expected and found["/iteration"] == "7" and "state 7" in found["/rng/torch"]
            assert sum("exp_avg_sq" in name for name in found) > 5
    # Of the model alone it is a checkpoint without a training.
    assert (own(saved) / "dcp/common.pt").read_bytes() != (saved / "common.pt").read_bytes()
