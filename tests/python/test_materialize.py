"""Materialized files on a disk, by `--materialize DIR`."""

import errno
import json
import os
import subprocess
import time

import numpy as np
import pytest

from mounting import detach, error_of, find_ckfs, read, run, wait_until


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


def _refused(mounted_err: str, directory, reason: str) -> None:
    """The warning at the mount says where nothing is written, and why."""
    assert f"--materialize {directory}: nothing is written there: " in mounted_err and reason in mounted_err, mounted_err


def _written_bytes(directory) -> int:
    found = os.statvfs(directory)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")
def test_where_the_kernel_reads_no_files_nothing_is_written(own, wide, tmp_path):
    """A directory of overlayfs, of which the kernel takes no files to read by itself."""
    disk, stacked = tmp_path / "disk", tmp_path / "stacked"
    disk.mkdir(), stacked.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "ckfs-test", disk], check=True)
    for name in ("lower", "upper", "work"):
        (disk / name).mkdir()
    options = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "ckfs-test", stacked], check=True)
    try:
        point = tmp_path / "mnt"
        done = run("mount", "--mkdir", wide.path, point, "--materialize", stacked)
        try:
            _refused(done.err, stacked, "stacked on others (overlay, FUSE), of which the kernel reads no files by itself; give one of")
            before = _written_bytes(disk)
            for name in ("full/layers/scanned/wq", "safetensors/dev0.safetensors"):
                assert read(point / name)
            # Longer than the copy of these few MiB takes.
            time.sleep(1)
            assert _written_bytes(disk) == before
            assert json.loads((point / ".ckfs/stats.json").read_text())["materialized_files"] == 0
        finally:
            detach(point)
    finally:
        subprocess.run(["umount", stacked], check=True)
        subprocess.run(["umount", disk], check=True)


def test_a_directory_is_not_passed_over_in_silence(repo, fuse, tmp_path):
    """Without passthrough: switched off here, as older kernels have none."""
    point = tmp_path / "mnt"
    done = run("mount", "--mkdir", repo("llama").path, point, "--materialize", tmp_path, "--no-passthrough")
    detach(point)
    _refused(done.err, tmp_path, "passthrough is switched off; leave no_passthrough out")


@pytest.mark.skipif(os.geteuid() != 0, reason="enters a user namespace")
def test_in_a_user_namespace_nothing_is_written(repo, fuse, tmp_path):
    point = tmp_path / "mnt"
    point.mkdir()
    mount = [find_ckfs(), "mount", repo("llama").path, point, "--materialize", tmp_path]
    script = '"$@" && ls "$POINT/hf" && umount "$POINT"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "slave", "sh", "-c", script, "sh", *mount]
    done = subprocess.run(inside, capture_output=True, text=True, env=os.environ | {"POINT": str(point)}, timeout=60)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0 and "config.json" in done.stdout, done
    _refused(done.stderr, tmp_path, "for root with CAP_SYS_ADMIN only, and not in a user namespace; mount as root of the host")
