"""The files of a mount by fsspec, in process, against those of an export."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.tests.abstract import AbstractFixtures
from fsspec.tests.abstract.get import AbstractGetTests
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import forked
import mounting
import package

package.import_ckfs()

from ckfs.filesystem import CkfsFileSystem

# It may have been imported before the package under test was there.
fsspec.register_implementation("ckfs", CkfsFileSystem, clobber=True)
SETTINGS = {"mesh": "fsdp=2,tensor=2", "dtype": "f32"}


@pytest.fixture
def exported(repo, tmp_path):
    source = repo("llama").path
    mounting.run("export", source, tmp_path / "out", "--mesh", SETTINGS["mesh"], "--dtype", SETTINGS["dtype"])
    return source, tmp_path / "out"


def test_every_file_is_that_of_the_export(exported):
    source, out = exported
    files = fsspec.filesystem("ckfs", source=str(source), **SETTINGS)
    found = {path for path in files.find("") if not path.startswith(".ckfs")}
    # Links are followed, as by programs that read a mount.
    walked = [(Path(at), names) for at, _, names in os.walk(out, followlinks=True)]
    expected = {str((at / name).relative_to(out)): at / name for at, names in walked for name in names}
    expected = {name: path for name, path in expected.items() if not name.startswith(".ckfs")}
    assert found == expected.keys() and len(found) > 100
    for name, path in expected.items():
        whole = path.read_bytes()
        assert files.size(name) == len(whole), name
        assert files.cat_file(name) == whole, name
        assert files.cat_file(name, 3, -1) == whole[3:-1] and files.cat_file(name, -5) == whole[-5:], name
    directories = {str(at.relative_to(out)) for at, _ in walked} - {".", ".ckfs"}
    assert {name for name in files.find("", withdirs=True) if files.isdir(name)} - {"", ".ckfs"} == directories


def test_files_are_opened_by_name_and_read_in_parts(exported):
    source, out = exported
    with fsspec.open("ckfs://npy/dev3/embed.npy", source=str(source), **SETTINGS) as file:
        shard = np.load(file)
    assert np.array_equal(shard, np.load(out / "npy/dev3/embed.npy"))
    whole = (out / "safetensors/dev1.safetensors").read_bytes()
    with fsspec.open("ckfs://safetensors/dev1.safetensors", source=str(source), block_size=1000, **SETTINGS) as file:
        random = np.random.default_rng(0)
        for at in random.integers(0, len(whole), 200):
            file.seek(at)
            assert file.read(1500) == whole[at : at + 1500]
        assert file.seek(0, os.SEEK_END) == len(whole) and file.read() == b""


def test_what_is_not_there_or_cannot_be_is_an_error_of_the_system(repo, fresh):
    files = CkfsFileSystem(str(repo("llama").path))
    for call in (files.info, files.ls, files.cat_file, files.open):
        with pytest.raises(FileNotFoundError):
            call("full/no")
    assert not files.exists("nothing")
    with pytest.raises(IsADirectoryError):
        files.open("full")
    for call in (lambda: files.open("full/embed", "wb"), lambda: files.open("full/new", "wb")):
        with pytest.raises(OSError) as refused:
            call()
        assert refused.value.errno == errno.EROFS
    changed = fresh("llama").path
    files = CkfsFileSystem(str(changed))
    with open(max(changed.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xa5")
    with pytest.raises(OSError) as failed:
        files.cat_file("full/embed")
        files.cat_file("safetensors/dev0.safetensors")
    assert failed.value.errno == errno.EIO


def test_another_process_opens_its_own(repo):
    files = CkfsFileSystem(str(repo("llama").path), mesh="fsdp=2")
    again = pickle.loads(pickle.dumps(files))
    assert again is files, "of the same options there is one"
    size = f"{files.size('dev1/embed')}\n"
    for code, given in (
        ("import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).size('dev1/embed'))", pickle.dumps(files).hex()),
        ("import fsspec, sys; print(fsspec.filesystem('ckfs', source=sys.argv[1]).size('full/embed') // 2)", repo("llama").path),
    ):
        command = [sys.executable, "-c", code, str(given)]
        assert subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout == size


def test_dcp_is_loaded_without_a_mount(exported):
    source, out = exported
    reader = FsspecReader("ckfs://dcp", source=str(source), **SETTINGS)
    metadata = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    expected = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(expected, checkpoint_id=out / "dcp", no_dist=True)
    assert state and all(torch.equal(state[name], tensor) for name, tensor in expected.items())


class Written(CkfsFileSystem):
    """What fsspec's tests write was there before."""

    protocol = "ckfs-written"

    def mkdir(self, path, create_parents=True, **more):
        assert self.isdir(path)

    def makedirs(self, path, exist_ok=False):
        assert self.isdir(path)

    def touch(self, path, truncate=True, **more):
        assert self.size(path) == 0

    def pipe_file(self, path, value, mode="overwrite", **more):
        assert self.cat_file(path) == value

    pipe = pipe_file

    def rm(self, path, recursive=False, maxdepth=None):
        pass


class Sources(AbstractFixtures):
    @pytest.fixture
    def fs(self, repo, tmp_path, request):
        source = tmp_path / "source"
        shutil.copytree(repo("llama").path, source)
        written = fsspec.filesystem("file", auto_mkdir=True)
        at = str(source / "files")
        for name in (name for name in request.fixturenames if name.startswith(("fs_bulk", "fs_glob", "fs_dir", "fs_10"))):
            getattr(self, name.removeprefix("fs"))(written, os.path.join, at)
        written.touch(f"{at}/src/file")
        return Written(str(source), layout="hf", skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self):
        return "hf/files"


class TestGet(Sources, AbstractGetTests):
    """fsspec's own tests of reading."""
