"""The Python module of the wheel, with the program under test."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import mounting

sys.path.insert(0, str(mounting.ROOT / "examples/python"))

import ckfs


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setenv("CKFS_BIN", str(mounting.find_ckfs()))


def test_a_mount_lives_as_long_as_its_block(repo, fuse):
    with ckfs.mount(repo("llama").path, mesh={"fsdp": 2}, layout="canonical") as path:
        assert mounting.mount_type(path) == "fuse.ckfs"
        assert sorted(name.name for name in path.glob("dev*")) == ["dev0", "dev1"]
        kept = np.memmap(path / "full/embed", dtype=np.uint8, mode="r")
        whole = bytes(kept)
    assert not path.exists()
    assert bytes(kept) == whole, "what is mapped stays readable"


def test_a_mount_ends_with_an_exception(repo, fuse, tmp_path):
    point = tmp_path / "mnt"
    point.mkdir()
    with pytest.raises(KeyError), ckfs.mount(repo("llama").path, point):
        assert mounting.mount_type(point) == "fuse.ckfs"
        raise KeyError
    assert mounting.mount_type(point) is None and point.exists()


def test_a_plan_is_that_of_the_program(repo):
    source = repo("llama").path
    found = ckfs.plan(source, mesh="fsdp=2", exclude=["*embed*", "*norm*"], unscanned=True, dtype=None, even=False)
    same = ["--mesh=fsdp=2", "--exclude=*embed*", "--exclude=*norm*", "--unscanned"]
    assert found == mounting.run("plan", source, "--json", *same).json()


def test_errors_are_exceptions(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ckfs.Error, match=str(missing)) as failed:
        ckfs.plan(missing)
    assert failed.value.code == 1 and not isinstance(failed.value, ckfs.UsageError)
    with pytest.raises(ckfs.UsageError, match="fsdp=0") as refused:
        ckfs.plan(missing, mesh="fsdp=0")
    assert refused.value.code == 2
    with pytest.raises(ckfs.Error, match=str(missing)), ckfs.mount(missing):
        pytest.fail("nothing is mounted")
