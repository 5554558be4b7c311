"""Materialized files on a disk, by `--materialize DIR`."""

import errno
import os
import subprocess

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
        wait_until(lambda count=count: mounted.stats()["materialized_files"] == count, what=f"{name} on disk")
        before = mounted.stats()
        assert read(mounted / name) == expected
        assert np.array_equal(np.memmap(mounted / name, "u1", mode="r"), np.frombuffer(expected, "u1"))
        after = mounted.stats()
        assert after["bytes_served"]["tiles"] == before["bytes_served"]["tiles"], "the kernel asked nobody"
        assert after["passthrough_opens"] >= before["passthrough_opens"] + 2
    assert os.listdir(copies) == []


def test_a_file_of_a_changed_source_is_not_opened(own, fresh, tmp_path):
    source = fresh("llama").path
    mounted = own(source, "--materialize", tmp_path)
    read(mounted / "full/embed")
    wait_until(lambda: mounted.stats()["materialized_files"] == 1, what="a file on disk")
    for file in source.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 1)
    assert error_of(open, mounted / "full/embed") == errno.EIO


def test_a_directory_without_unnamed_files_is_refused(repo, tmp_path):
    done = run("mount", repo("llama").path, tmp_path, "--materialize", "/proc", expect=1)
    assert "/proc: no place for materialized files" in done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_directory_leaves_all_bytes_readable(own, wide, tmp_path):
    """A file system of 4 MiB for files that are mostly larger, and together far larger."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "ckfs-test", small], check=True)
    try:
        plain = own(wide.path, "--dtype", "f32", "--materialize", "none")
        mounted = own(wide.path, "--dtype", "f32", "--materialize", small)
        names = sorted(f"full/{name}" for name in plain.files("full"))
        for _ in range(2):
            for name in names:
                assert read(mounted / name) == read(plain / name), name
        stats = mounted.stats()
        assert 0 < stats["materialized_bytes"] <= 4 << 20
        assert stats["failed_reads"] == 0 and stats["panics"] == 0 and stats["health"] == "healthy"
        run("umount", mounted.point)
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@pytest.mark.parametrize("how", [("--whole", "all"), ("-o", "whole=tensors")])
def test_the_former_flag_names_the_new_one(repo, tmp_path, how):
    done = run("mount", repo("llama").path, tmp_path, *how, expect=2)
    assert "is now `materialize`" in done.err and "`memory`" in done.err, done.err
