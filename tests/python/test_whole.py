"""Files made whole in memory when they are opened, by `--whole`."""

import errno
import mmap
import os
import threading
import time

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import repos
from mounting import daemon_pid, error_of, read, run, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the kernel takes files to read by itself from root only")

MIB = 1 << 20
KERNELS = "params/decoder/layers"


def held(mounted) -> int:
    return mounted.stats()["whole_bytes_held"]


@pytest.mark.parametrize("options", [(), ("--dtype", "f32"), ("--layout", "maxtext"), ("--layout", "maxtext-unscanned")])
def test_bytes_are_the_same_as_those_made_while_they_are_read(own, wide, options):
    options = ("--mesh", "fsdp=2,tensor=2", *options)
    plain, whole = own(wide.path, *options, "--whole", "none"), own(wide.path, *options, "--whole", "all")
    under = ["full", "dev1", "npy/dev2", "orbax", "safetensors", "dcp"]
    names = [f"{top}/{name}" for top in under for name in plain.files(top)]
    large = [name for name in names if (plain / name).stat().st_size >= MIB]
    assert len(large) > 20
    for count, name in enumerate(large, 1):
        assert read(whole / name) == read(plain / name), name
        assert whole.stats()["whole_files"] == count
    before = whole.stats()
    for name in large[:5]:
        assert read(whole / name) == read(plain / name), name
        mapped = np.memmap(whole / name, "u1", mode="r")
        assert np.array_equal(mapped, np.frombuffer(read(plain / name), "u1")), name
    after = whole.stats()
    assert after["whole_files"] <= before["whole_files"] + 5 and after["passthrough_opens"] >= before["passthrough_opens"] + 10
    assert plain.stats()["whole_files"] == 0


def blank(mounted) -> int:
    return mounted.stats()["blank_bytes_held"]


def wait_for_blanks(mounted):
    """Waits until there are some and no more come: they are begun one after another."""
    last, since = 0, time.monotonic()

    def settled():
        nonlocal last, since
        if blank(mounted) != last:
            last, since = blank(mounted), time.monotonic()
        return last > 0 and time.monotonic() - since > 3

    wait_until(settled, seconds=30, what="blanks")


def test_memory_made_ready_beforehand_holds_the_same_bytes(own, wide):
    options = ("--mesh", "fsdp=2,tensor=2", "--layout", "maxtext")
    plain = own(wide.path, *options, "--whole", "none")
    mounted = own(wide.path, *options, "--whole", "all", "--cache-bytes", "1G")
    # Sizes told beforehand, some of them read twice, longer ones by a header, and others.
    under = ["dev1", "dev2", "npy/dev1", "full", "orbax", "safetensors"]
    names = [f"{top}/{name}" for top in under for name in plain.files(top)]
    lengths = {name: (plain / name).stat().st_size for name in names if (plain / name).stat().st_size >= MIB}
    assert len(lengths) > 20 and any(length % (2 * MIB) for length in lengths.values())
    assert sum(lengths.values()) < 512 * MIB, "so that what is closed leaves room"
    # Nothing is made ready beside readers, so that how many find something depends on the time, but not for the first of each size.
    wait_for_blanks(mounted)
    firsts = {length: name for name, length in reversed(lengths.items())}
    for name in dict.fromkeys([*firsts.values(), *lengths]):
        assert read(mounted / name) == read(plain / name), name
        stats = mounted.stats()
        assert stats["blank_bytes_held"] <= 256 * MIB and stats["blank_bytes_held"] + stats["whole_bytes_held"] <= 768 * MIB
        if stats["whole_files"] <= len(firsts):
            assert stats["blank_files"] == stats["whole_files"], name
    assert stats["whole_files"] == len(lengths)
    # More are made once it is quiet.
    wait_for_blanks(mounted)
    name = "dev3/params/decoder/layers/mlp/wo/kernel"
    assert read(mounted / name) == read(plain / name)
    assert mounted.stats()["blank_files"] == stats["blank_files"] + 1
    assert blank(plain) == 0


def mapped(mounted, repo) -> int:
    """Bytes of weights that the daemon has mapped and resident."""
    of_weights, total = False, 0
    for line in open(f"/proc/{daemon_pid(mounted.point)}/smaps"):
        if line.startswith("Rss:"):
            total += of_weights * int(line.split()[1]) * 1024
        elif not line.split()[0].endswith(":"):
            of_weights = str(repo) in line and ".safetensors" in line
    return total


def test_sources_are_mapped_beforehand_where_bytes_are_made_of_them(own, wide):
    for file in wide.path.glob("*.safetensors"):
        file.read_bytes()
    options = ("--mesh", "fsdp=2,tensor=2")
    made = own(wide.path, *options, "--layout", "maxtext")
    others = [own(wide.path, *options), own(wide.path, *options, "--layout", "maxtext", "--whole", "none")]
    kernels = sum((made / "full" / name).stat().st_size for name in made.files("full") if name.endswith("kernel"))
    assert kernels > MIB
    wait_until(lambda: mapped(made, wide.path) >= kernels, what="mapped sources")
    for other in others:
        assert mapped(other, wide.path) < kernels // 2
    assert not any(made.stats()["bytes_fetched"].values()), "nothing is read yet"
    for name in made.files("dev1"):
        assert read(made / "dev1" / name) == read(others[1] / "dev1" / name), name


ONE_TENSOR = {
    "full/layers/scanned/wq": 1,
    "npy/dev0/layers/scanned/wq.npy": 1,
    "orbax/0/items/layers.scanned.wq/0.0.0": 1,
    "full/final_norm": 0,
    "full/layers/0/wq": 1,
    "full/layers/0/wk": 1,
}
MANY_TENSORS = {
    "safetensors/dev0.safetensors": (None, "all"),
    "pt/dev0.pt": (None, "all"),
    "dcp/__0_0.distcp": ("all",),
}


@pytest.mark.parametrize("which", [None, "tensors", "all", "none"])
def test_which_files_are(own, wide, which):
    mounted = own(wide.path, *(("--whole", which) if which else ()))
    expected = {name: made * (which != "none") for name, made in ONE_TENSOR.items()}
    expected |= {name: int(which in by) for name, by in MANY_TENSORS.items()}
    for name, made in expected.items():
        before = mounted.stats()["whole_files"]
        with open(mounted / name, "rb") as file:
            file.read(1)
        assert mounted.stats()["whole_files"] - before == made, name
    # All of it was made although one byte was asked for, once.
    assert mounted.stats()["whole_bytes"] == sum((mounted / name).stat().st_size for name, made in expected.items() if made)
    assert "whole" in run("mount", wide.path, mounted.point, "--whole", "some", expect=2).err


def test_who_looks_for_headers_causes_nothing_to_be_made(own, wide):
    """As `HuggingFaceStorageReader` does: list the directory, open every file for its header, then read what is wanted."""
    mounted = own(wide.path, "--mesh", "fsdp=4")
    directory = mounted / "safetensors"
    for round in range(2):
        files = sorted(file for file in directory.iterdir() if file.suffix == ".safetensors")
        assert len(files) == 4
        for file in files:
            with safe_open(file, framework="np") as held:
                assert len(held.keys()) > 10
        assert mounted.stats()["whole_files"] == round
        expected = {name: tensor.tobytes() for name, tensor in load_file(files[2]).items()}
        assert mounted.stats()["whole_files"] == 1, "opened again, and found when it is once more"
        fetched = sum(mounted.stats()["bytes_fetched"].values())
        assert fetched < files[2].stat().st_size + 4 * (4 << 20), "headers, and what the kernel reads ahead of them"
        assert {name: tensor.tobytes() for name, tensor in load_file(files[2]).items()} == expected
        # The kernel may list the directory from memory the second time; what was made then is found all the same.


def test_direct_reads_find_the_bytes(own, wide):
    name = f"dev1/{KERNELS}/mlp/wi_0/kernel"
    options = ("--mesh", "fsdp=2", "--layout", "maxtext")
    expected = read(own(wide.path, *options, "--whole", "none") / name)
    mounted = own(wide.path, *options)
    descriptor = os.open(mounted / name, os.O_RDONLY | os.O_DIRECT)
    try:
        found = mmap.mmap(-1, len(expected))
        assert os.preadv(descriptor, [found], 0) == len(expected) and found[:] == expected
        assert os.preadv(descriptor, [memoryview(found)[:4096]], len(expected) & -4096) == len(expected) % 4096
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("cache", ["0", "1M", "8M", "24M"])
def test_without_room_files_are_made_as_they_are_read(own, wide, cache):
    options = ("--layout", "maxtext", "--mesh", "fsdp=2")
    plain, mounted = own(wide.path, *options, "--whole", "none"), own(wide.path, *options, "--cache-bytes", cache)
    names = [f"dev{device}/{KERNELS}/{leaf}/kernel" for device in range(2) for leaf in ("mlp/wi_0", "mlp/wo", "self_attention/out")]
    opened = [open(mounted / name, "rb") for name in names]
    try:
        for file, name in zip(opened, names, strict=True):
            assert file.read() == read(plain / name), name
        stats = mounted.stats()
        assert stats["whole_bytes_held"] + stats["blank_bytes_held"] <= int(cache.rstrip("M")) * MIB * 3 // 4
        assert (stats["whole_files"] > 0) == (cache in ("8M", "24M"))
    finally:
        for file in opened:
            file.close()
    for name in names:
        assert read(mounted / name) == read(plain / name), "opened again, in whatever way there is room for"


def test_many_who_open_at_once_wait_for_one(own, wide):
    options = ("--layout", "maxtext", "--mesh", "fsdp=4,tensor=2")
    plain, mounted = own(wide.path, *options, "--whole", "none"), own(wide.path, *options, "--threads", "2")
    names = [f"full/{KERNELS}/{leaf}/kernel" for leaf in ("mlp/wi_0", "mlp/wi_1", "mlp/wo", "self_attention/query")]
    expected, wrong = {name: read(plain / name) for name in names}, []

    def reader(name: str) -> None:
        for _ in range(3):
            if read(mounted / name) != expected[name]:
                wrong.append(name)

    threads = [threading.Thread(target=reader, args=(name,)) for name in names * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a reader waits forever"
    assert wrong == []
    stats = mounted.stats()
    assert stats["whole_files"] == len(names)
    assert sum(stats["bytes_fetched"].values()) == sum(map(len, expected.values())), "each byte once"
    assert stats["in_flight"] <= 1 and stats["panics"] == 0


def test_what_is_mapped_outlives_its_room(own, wide):
    """A file is given up for others once it is closed; who has mapped it keeps its pages."""
    options = ("--layout", "maxtext", "--cache-bytes", "48M")
    plain, mounted = own(wide.path, *options, "--whole", "none"), own(wide.path, *options)
    names = [f"full/{KERNELS}/mlp/{leaf}/kernel" for leaf in ("wi_0", "wi_1", "wo")]
    maps = [np.memmap(mounted / name, "u1", mode="r") for name in names]
    maps += [np.memmap(mounted / name, "u1", mode="r") for name in names]
    for mapped, name in zip(maps, names * 2, strict=True):
        assert np.array_equal(mapped, np.frombuffer(read(plain / name), "u1")), name
    assert held(mounted) <= 36 * MIB


def test_a_changed_source_is_never_shown_as_it_is_now(own, fresh, tmp_path):
    source = repos.wide(tmp_path / "source").path
    mounted, plain = own(source, "--layout", "maxtext"), own(source, "--layout", "maxtext", "--whole", "none")
    name, other = f"full/{KERNELS}/mlp/wi_0/kernel", f"full/{KERNELS}/mlp/wo/kernel"
    expected = read(plain / name)
    with open(mounted / name, "rb") as file:
        for shard in source.glob("*.safetensors"):
            os.truncate(shard, 100_000)
        assert file.read() == expected, "made before the change"
    assert error_of(open, mounted / name) == errno.EIO
    assert error_of(read, mounted / other) == errno.EIO
    wait_until(lambda: mounted.stats()["poisoned_sources"] > 0, what="the change is noticed")


def test_without_passthrough_nothing_is(own, wide):
    mounted = own(wide.path, "--no-passthrough")
    assert len(read(mounted / "full/embed")) == (mounted / "full/embed").stat().st_size
    assert mounted.stats()["whole_files"] == 0 and mounted.stats()["passthrough_opens"] == 0
