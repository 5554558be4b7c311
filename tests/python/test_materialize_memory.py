"""Files materialized in memory: those of one tensor at their open, bundles while their tensors are read."""

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
    return mounted.stats()["materialized_bytes_held"]


@pytest.mark.parametrize("options", [(), ("--dtype", "f32"), ("--layout", "maxtext"), ("--layout", "maxtext-unscanned")])
def test_bytes_are_the_same_as_without_materialization(own, wide, options):
    options = ("--mesh", "fsdp=2,tensor=2", *options)
    plain, mounted = own(wide.path, *options, "--materialize", "none"), own(wide.path, *options, "--materialize", "memory")
    under = ["full", "dev1", "npy/dev2", "orbax", "safetensors", "pt", "dcp"]
    names = [f"{top}/{name}" for top in under for name in plain.files(top)]
    large = [name for name in names if (plain / name).stat().st_size >= MIB]
    assert len(large) > 20
    for count, name in enumerate(large, 1):
        assert read(mounted / name) == read(plain / name), name
        # A file of many tensors is materialized while its reader reads, and counted a moment later.
        wait_until(lambda count=count: mounted.stats()["materialized_files"] == count, what=name)
    before = mounted.stats()
    for name in large[:5] + [name for name in large if name.startswith(("safetensors/", "pt/"))]:
        assert read(mounted / name) == read(plain / name), name
        mapped = np.memmap(mounted / name, "u1", mode="r")
        assert np.array_equal(mapped, np.frombuffer(read(plain / name), "u1")), name
    after = mounted.stats()
    assert after["materialized_files"] <= before["materialized_files"] + 20
    assert after["passthrough_opens"] >= before["passthrough_opens"] + 10
    assert plain.stats()["materialized_files"] == 0


ONE_TENSOR = {
    "full/layers/scanned/wq": 1,
    "npy/dev0/layers/scanned/wq.npy": 1,
    "full/final_norm": 0,
    "full/layers/0/wq": 1,
    "full/layers/0/wk": 1,
}
MANY_TENSORS = {
    "safetensors/dev0.safetensors": ("auto", "memory"),
    "pt/dev0.pt": ("auto", "memory"),
    "dcp/__0_0.distcp": ("memory",),
}


def opened(mounted, name) -> dict:
    """The changes of some counters by an open and a read of one byte."""
    before = mounted.stats()
    with open(mounted / name, "rb") as file:
        file.read(1)
    after = mounted.stats()
    return {key: after[key] - before[key] for key in ("materialized_files", "passthrough_opens")}


@pytest.mark.parametrize("which,again", [(None, 1), ("memory", 1), ("none", 0)])
def test_a_cast_chunk_of_orbax_is_materialized_when_it_is_opened_again(own, wide, which, again):
    cast = ("--dtype", "f32")
    mounted = own(wide.path, *cast, *(("--materialize", which) if which else ()))
    plain, name = own(wide.path, *cast, "--materialize", "none", "--direct-io"), "orbax/0/items/layers.scanned.wq/0.0.0"
    first = 1 if which == "memory" else 0
    assert opened(mounted, name)["materialized_files"] == first
    assert opened(mounted, name) == {"materialized_files": again - first, "passthrough_opens": again}
    other = "orbax/0/items/layers.scanned.wk/0.0.0"
    for _ in range(3):
        assert read(mounted / other) == read(plain / other)
        assert np.array_equal(np.memmap(mounted / other, "u1", mode="r"), np.memmap(plain / other, "u1", mode="r"))


@pytest.mark.parametrize("dtype", ["keep", "f32"])
@pytest.mark.parametrize("which", [None, "memory", "none"])
def test_which_files_are_materialized(own, wide, which, dtype):
    """Bytes that need no work are made in memory only where that was asked for, or together with all others of a bundle."""
    mounted = own(wide.path, "--dtype", dtype, *(("--materialize", which) if which else ()))
    for name, made in ONE_TENSOR.items():
        before = mounted.stats()["materialized_files"]
        for _ in range(2):
            with open(mounted / name, "rb") as file:
                file.read(1)
        expected = made if which == "memory" or (which is None and dtype == "f32") else 0
        assert mounted.stats()["materialized_files"] - before == expected, name
    for name, by in MANY_TENSORS.items():
        before = mounted.stats()["materialized_files"]
        with open(mounted / name, "rb") as file:
            file.read(1)
        assert mounted.stats()["materialized_files"] - before == ((which or "auto") in by), name


@pytest.mark.parametrize("cache,fits", [("330M", True), ("100M", False)])
def test_the_plan_states_the_materialized_files_and_the_mount_agrees(own, wide, cache, fits):
    """Two bundles of 79 MB fit three quarters of 330 MiB and not those of 100 MiB."""
    options = ("--cache-bytes", cache, "--dtype", "keep")
    found = run("plan", wide.path, *options, "--json").json()["materialized"]
    assert found["place"] == "memory" and found["choice"] == "auto"
    assert found["bundles"]["files"] == 2 and found["bundles"]["fit"] == found["bundles"]["materialized"] == fits
    assert found["files_of_one_tensor"]["min_bytes"] == MIB and not found["mixed"]
    text = run("plan", "-v", wide.path, *options).out
    assert ("2 bundles of" in text) == fits and ("no bundle, as 2 of" in text) == (not fits)
    mounted = own(wide.path, *options)
    assert read(mounted / ".ckfs/plan.txt").decode() == text
    read(mounted / "safetensors/dev0.safetensors")
    if fits:
        wait_until(lambda: mounted.stats()["materialized_files"] == 1, what="the bundle")
    else:
        time.sleep(0.3)
        assert mounted.stats()["materialized_files"] == 0
    assert run("plan", wide.path, "--materialize", "none", "--json").json()["materialized"]["place"] == "nowhere"


def fetched(mounted) -> int:
    return sum(mounted.stats()["bytes_fetched"].values())


def test_header_probes_of_a_bundle_materialize_it_once(own, wide):
    """As in `HuggingFaceStorageReader`: list the directory, open every file for its header, then read the needed tensors."""
    mounted = own(wide.path, "--mesh", "fsdp=4")
    plain = own(wide.path, "--mesh", "fsdp=4", "--materialize", "none")
    files = sorted((mounted / "safetensors").glob("*.safetensors"))
    assert len(files) == 4 and mounted.stats()["materialized_files"] == 0, "a listing materializes nothing"
    total = sum(file.stat().st_size for file in files)
    for mount, most in ((mounted, total), (plain, len(files) * 4 * MIB)):
        for _ in range(3):
            for file in files:
                with safe_open(mount / "safetensors" / file.name, framework="np") as held:
                    assert len(held.keys()) > 10
        assert fetched(mount) <= most
    assert mounted.stats()["materialized_files"] == 4 and plain.stats()["materialized_files"] == 0
    expected = {name: tensor.tobytes() for name, tensor in load_file(plain / "safetensors" / files[2].name).items()}
    before = mounted.stats()
    assert {name: tensor.tobytes() for name, tensor in load_file(files[2]).items()} == expected
    assert mounted.stats()["passthrough_opens"] > before["passthrough_opens"], "the kernel reads it by itself"
    assert fetched(mounted) <= total


def test_an_open_with_o_direct_materializes_nothing(own, wide):
    mounted = own(wide.path, "--mesh", "fsdp=2", "--dtype", "f32")
    for name in ("full/layers/scanned/wq", "npy/dev0/layers/scanned/wq.npy", "safetensors/dev0.safetensors"):
        expected = read(own(wide.path, "--mesh", "fsdp=2", "--dtype", "f32", "--materialize", "none") / name)
        descriptor = os.open(mounted / name, os.O_RDONLY | os.O_DIRECT)
        try:
            found = mmap.mmap(-1, len(expected))
            assert os.preadv(descriptor, [found], 0) == len(expected) and found[:] == expected
        finally:
            os.close(descriptor)
        time.sleep(0.2)
        stats = mounted.stats()
        assert stats["materialized_files"] == 0 and stats["materialized_bytes_held"] == 0, name
    # A file that is complete already is used.
    assert read(mounted / "full/layers/scanned/wq") is not None
    before = mounted.stats()["passthrough_opens"]
    os.close(os.open(mounted / "full/layers/scanned/wq", os.O_RDONLY | os.O_DIRECT))
    assert mounted.stats()["passthrough_opens"] == before + 1


def test_many_readers_of_a_bundle_fetch_each_byte_once(own, wide):
    options = ("--mesh", "fsdp=2", "--dtype", "f32")
    plain, mounted = own(wide.path, *options, "--materialize", "none"), own(wide.path, *options)
    name, wrong = "safetensors/dev1.safetensors", []
    expected = read(plain / name)

    def reader(number: int) -> None:
        with open(mounted / name, "rb", buffering=0) as file:
            starts = range(0, len(expected), 700_001)
            for start in list(starts)[number::4] + list(starts)[::-4]:
                file.seek(start)
                if file.read(300_000) != expected[start : start + 300_000]:
                    wrong.append(start)

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a reader waits forever"
    assert wrong == []
    assert read(mounted / name) == expected
    # Where memory is short the kernel reads a page of the plain one twice.
    assert fetched(mounted) <= fetched(plain)


def test_direct_reads_find_the_bytes(own, wide):
    name = f"dev1/{KERNELS}/mlp/wi_0/kernel"
    options = ("--mesh", "fsdp=2", "--layout", "maxtext")
    expected = read(own(wide.path, *options, "--materialize", "none") / name)
    mounted = own(wide.path, *options)
    descriptor = os.open(mounted / name, os.O_RDONLY | os.O_DIRECT)
    try:
        found = mmap.mmap(-1, len(expected))
        assert os.preadv(descriptor, [found], 0) == len(expected) and found[:] == expected
        assert os.preadv(descriptor, [memoryview(found)[:4096]], len(expected) & -4096) == len(expected) % 4096
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("cache", ["0", "1M", "8M", "24M"])
def test_without_room_files_are_computed_as_they_are_read(own, wide, cache):
    options = ("--layout", "maxtext", "--mesh", "fsdp=2")
    plain, mounted = own(wide.path, *options, "--materialize", "none"), own(wide.path, *options, "--cache-bytes", cache)
    names = [f"dev{device}/{KERNELS}/{leaf}/kernel" for device in range(2) for leaf in ("mlp/wi_0", "mlp/wo", "self_attention/out")]
    opened = [open(mounted / name, "rb") for name in names]
    try:
        for file, name in zip(opened, names, strict=True):
            assert file.read() == read(plain / name), name
        stats = mounted.stats()
        assert stats["materialized_bytes_held"] <= int(cache.rstrip("M")) * MIB * 3 // 4
        assert (stats["materialized_files"] > 0) == (cache in ("8M", "24M"))
    finally:
        for file in opened:
            file.close()
    for name in names:
        assert read(mounted / name) == read(plain / name), "opened again, with or without room"


def test_many_opens_at_once_wait_for_one(own, wide):
    options = ("--layout", "maxtext", "--mesh", "fsdp=4,tensor=2")
    plain, mounted = own(wide.path, *options, "--materialize", "none"), own(wide.path, *options, "--threads", "2")
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
    assert stats["materialized_files"] == len(names)
    assert sum(stats["bytes_fetched"].values()) == sum(map(len, expected.values())), "each byte once"
    assert stats["in_flight"] <= 1 and stats["panics"] == 0


def test_a_mapped_file_outlives_its_room(own, wide):
    """A closed file is dropped to make room for others; a process that has mapped it keeps its pages."""
    options = ("--layout", "maxtext", "--cache-bytes", "48M")
    plain, mounted = own(wide.path, *options, "--materialize", "none"), own(wide.path, *options)
    names = [f"full/{KERNELS}/mlp/{leaf}/kernel" for leaf in ("wi_0", "wi_1", "wo")]
    maps = [np.memmap(mounted / name, "u1", mode="r") for name in names]
    maps += [np.memmap(mounted / name, "u1", mode="r") for name in names]
    for mapped, name in zip(maps, names * 2, strict=True):
        assert np.array_equal(mapped, np.frombuffer(read(plain / name), "u1")), name
    assert held(mounted) <= 36 * MIB


def test_new_bytes_of_a_changed_source_are_never_shown(own, fresh, tmp_path):
    source = repos.wide(tmp_path / "source").path
    mounted, plain = own(source, "--layout", "maxtext"), own(source, "--layout", "maxtext", "--materialize", "none")
    name, other = f"full/{KERNELS}/mlp/wi_0/kernel", f"full/{KERNELS}/mlp/wo/kernel"
    expected = read(plain / name)
    with open(mounted / name, "rb") as file:
        for shard in source.glob("*.safetensors"):
            os.truncate(shard, 100_000)
        assert file.read() == expected, "made before the change"
    assert error_of(open, mounted / name) == errno.EIO
    assert error_of(read, mounted / other) == errno.EIO
    wait_until(lambda: mounted.stats()["poisoned_sources"] > 0, what="the change is noticed")


def test_without_passthrough_nothing_is_materialized(own, wide):
    mounted = own(wide.path, "--no-passthrough")
    assert len(read(mounted / "full/embed")) == (mounted / "full/embed").stat().st_size
    assert mounted.stats()["materialized_files"] == 0 and mounted.stats()["passthrough_opens"] == 0
