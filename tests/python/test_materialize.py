"""Copies of tensor files that the kernel reads by itself, by `--materialize`."""

import errno
import os

import numpy as np
import pytest

from mounting import error_of, read, run, wait_until


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel takes files to read by itself from root only")
def test_a_file_opened_again_is_read_by_the_kernel(own, repo, tmp_path):
    source, copies = repo("llama").path, tmp_path / "copies"
    copies.mkdir()
    plain, mounted = own(source, "--dtype", "bf16"), own(source, "--dtype", "bf16", "--materialize", copies)
    names = ["full/layers/scanned/wq", "safetensors/dev0.safetensors", "orbax/0/items/embed/0.0"]
    for count, name in enumerate(names, 1):
        expected = read(plain / name)
        assert read(mounted / name) == expected
        wait_until(lambda count=count: mounted.stats()["copied_files"] == count, what=f"the copy of {name}")
        before = mounted.stats()
        assert read(mounted / name) == expected
        assert np.array_equal(np.memmap(mounted / name, "u1", mode="r"), np.frombuffer(expected, "u1"))
        after = mounted.stats()
        assert after["bytes_served"]["tiles"] == before["bytes_served"]["tiles"], "the kernel asked nobody"
        assert after["passthrough_opens"] >= before["passthrough_opens"] + 2
    assert os.listdir(copies) == []


def test_a_copy_of_a_changed_source_is_not_opened(own, fresh, tmp_path):
    source = fresh("llama").path
    mounted = own(source, "--materialize", tmp_path)
    read(mounted / "full/embed")
    wait_until(lambda: mounted.stats()["copied_files"] == 1, what="the copy")
    for file in source.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 1)
    assert error_of(open, mounted / "full/embed") == errno.EIO


def test_a_directory_that_holds_no_unnamed_files_is_refused(repo, tmp_path):
    done = run("mount", repo("llama").path, tmp_path, "--materialize", "/proc", expect=1)
    assert "/proc: no place for copies" in done.err
