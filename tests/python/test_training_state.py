"""Whole training states: trainers resume through a view on other ranks and meshes, and go on as if they had never stopped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mounting
from mounting import ROOT, run

pytest.importorskip("torch")


def train(script: str, *words: object) -> None:
    command = [sys.executable, ROOT / "tests/python" / script, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=mounting.TIMEOUT_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[int], Path]:
    """The directory of a training by so many ranks, which is done once."""
    made: dict[int, Path] = {}

    def of(ranks: int) -> Path:
        if ranks not in made:
            made[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
            train("fsdp_state_process.py", ranks, made[ranks])
        return made[ranks]

    return of


@pytest.mark.parametrize("before,after", [(2, 4), (4, 2)])
def test_fsdp2_resumes_on_other_ranks_bit_for_bit(own, trained, before, after):
    directory = trained(before)
    mounted = own(directory / "state", "--training-state", "--mesh", f"fsdp={after}")
    train("fsdp_state_process.py", after, directory, mounted / "dcp")
    # What is no tensor is there byte for byte, and said.
    objects = (mounted / "dcp/__0_1.distcp").read_bytes()
    assert len(objects) > 0 and all(
        any(part in path.read_bytes() for path in (directory / "state").glob("*.distcp")) for part in pickles(objects)
    )
    text = run("plan", "-v", directory / "state", "--training-state").out
    assert "members pass through dcp/" in text and "optim.param_groups" in text
    assert "are not shown" in run("plan", "-v", directory / "state").out


def pickles(data: bytes) -> list[bytes]:
    """The archives of `torch.save` in the bytes, one after the other."""
    starts = [at for at in range(len(data)) if data.startswith(b"PK\x03\x04", at) and data[at + 30 :].startswith(b"archive/data.pkl")]
    return [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)])]


def test_members_that_are_lost_are_named(trained, tmp_path):
    shutil.copytree(trained(2) / "state", tmp_path / "state")
    for path in (tmp_path / "state").glob("*.distcp"):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 3])
    error = run("plan", tmp_path / "state", "--training-state", expect=1).err
    assert 'member "extra.' in error or 'member "optim.' in error, error


def test_optax_resumes_on_another_mesh_bit_for_bit(own, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    train("optax_state_process.py", tmp_path)
    mounted = own(tmp_path / "state", "--training-state", "--mesh", "fsdp=4,tensor=2")
    item = mounted / "orbax/0/items"
    train("optax_state_process.py", tmp_path, item)
    for name in ("_sharding", "_strings.json"):
        assert (item / name).read_bytes() == (tmp_path / "state" / name).read_bytes()
    assert sorted(path.name for path in item.iterdir() if not path.is_dir()) == [
        "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "_strings.json"
    ]  # fmt: skip
    text = run("plan", "-v", tmp_path / "state", "--training-state").out
    assert "files pass through orbax/" in text and "array_metadatas/process_0" in text
    # Of the model alone none of it is shown.
    model = {path.name for path in Path(own(tmp_path / "state") / "orbax/0/items").iterdir()}
    assert not model & {"_sharding", "_strings.json", "array_metadatas"}
    (tmp_path / "state/_strings.json").write_text("{}")
    error = run("plan", tmp_path / "state", "--training-state", expect=1).err
    assert "_strings.json" in error and "expected the text of name" in error
