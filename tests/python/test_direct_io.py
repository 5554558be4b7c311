"""Reads past the kernel's page cache, by `--direct-io`."""

import mmap

import numpy as np

from mounting import read, run


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
