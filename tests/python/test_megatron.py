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
