"""Reads past the kernel's page cache, by `--direct-io`."""

import errno
import mmap
import os
import shutil
import subprocess

import numpy as np
import pytest

from mounting import error_of, read, run


def served(mounted) -> int:
    return sum(mounted.stats()["bytes_served"].values())


def test_each_read_comes_to_the_daemon_and_maps_are_right(own, repo):
    source = repo("llama")
    cached = own(source.path, "--dtype", "bf16")
    direct = own(source.path, "--dtype", "bf16", "--direct-io=full/*")
    for mounted, path, times in [(cached, "full/embed", 1), (direct, "full/embed", 2), (direct, "npy/dev0/embed.npy", 1)]:
        before = served(mounted)
        contents = [read(mounted / path) for _ in range(2)]
        assert contents[0] == contents[1] == read(cached / path)
        assert times * len(contents[0]) <= served(mounted) - before < times * len(contents[0]) + 4096
    expected = np.frombuffer(read(cached / "full/embed"), "u2")
    for _ in range(2):
        assert np.array_equal(np.memmap(direct / "full/embed", "u2", mode="r"), expected)
        with open(direct / "full/embed", "rb") as file:
            assert mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:] == expected.tobytes()


def test_it_is_an_option_of_mount_too(own, repo):
    mounted = own(repo("llama").path, "-o", "direct_io")
    assert "direct_io = true" in read(mounted / ".ckfs/config.toml").decode()
    before = served(mounted)
    assert 2 * len(read(mounted / "full/embed")) == 2 * len(read(mounted / "full/embed")) <= served(mounted) - before
    run("mount", repo("llama").path, mounted.point, "--direct-io=/(/", expect=2)


@pytest.fixture
def without_direct(tmp_path, two_files):
    """A source on ramfs, which refuses O_DIRECT, as squashfs does."""
    source = tmp_path / "ramfs"
    source.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ckfs-test", source], check=True)
    shutil.copytree(two_files.path, source, dirs_exist_ok=True)
    assert error_of(os.open, source / "config.json", os.O_RDONLY | os.O_DIRECT) == errno.EINVAL
    yield source
    subprocess.run(["umount", "-l", source], check=True)


def _direct_bytes(file) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 1 << 20)
    found = bytearray()
    while count := os.preadv(descriptor, [buffer], len(found)):
        found += buffer[:count]
    os.close(descriptor)
    return bytes(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_an_identical_file_of_a_source_without_o_direct(own, without_direct):
    """The kernel would open the source's file with O_DIRECT too: the daemon answers instead."""
    mounted = own(without_direct)
    names = [f"hf/{path.name}" for path in without_direct.iterdir() if path.name.endswith(("json", "safetensors"))]
    assert len(names) >= 3
    for name in names:
        expected = (without_direct / name.removeprefix("hf/")).read_bytes()
        before = mounted.stats()["passthrough_opens"]
        assert _direct_bytes(mounted / name) == expected, name
        assert mounted.stats()["passthrough_opens"] == before
        with open(mounted / name, "rb") as held:
            assert held.read() == expected
            assert mounted.stats()["passthrough_opens"] == before + 1
            # The kernel reads the source's file for this reader, and cannot for the other: the errno of that file system.
            assert error_of(_direct_bytes, mounted / name) == errno.EINVAL
        assert _direct_bytes(mounted / name) == expected, name
