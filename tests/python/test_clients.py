"""Every way to read a file, and every refused way to write one."""

import errno
import hashlib
import mmap
import multiprocessing
import os
import random

import numpy as np
import pytest

import mounting
import reference
import repos
from reference import Mesh

MIB = 1 << 20


@pytest.fixture(scope="module")
def large(base):
    """24 MiB of float32 in one matrix and 12 MiB in three layers: enough for several tiles and read-ahead windows."""
    draw = repos.Draw("large")
    tensors = {"wide": draw("wide", "F32", 3072, 2048)}
    tensors |= {f"model.layers.{n}.proj.weight": draw(f"{n}", "F32", 1024, 1024) for n in range(3)}
    return repos.write(base / "repos/large", {"model.safetensors": tensors}, {"model_type": "unheard_of"})


@pytest.fixture(scope="module", params=[(), ("--dtype", "bf16")], ids=["copied", "cast"])
def view(request, base, large, fuse):
    """The large repo mounted plain and cast, and the expected contents of its files."""
    point = base / f"large-{request.param_index}"
    mounted = mounting.mount(large.path, point, "--mesh", "fsdp=4", *request.param)
    code = "BF16" if request.param else None
    tensors = {path: reference.cast(shown, code) for path, shown in reference.canonical(large).items()}
    yield mounted, tensors
    mounting.run("umount", point)


def _expected(tensors, path, device):
    return np.ascontiguousarray(reference.shard(tensors[path], Mesh.parse("fsdp=4"), device))


PATHS = ["wide", "layers/scanned/proj"]


@pytest.mark.parametrize("path", PATHS)
def test_numpy_fromfile_and_memmap(view, path):
    mounted, tensors = view
    for device in range(4):
        expected = _expected(tensors, path, device)
        file = mounted / f"dev{device}/{path}"
        for read in (np.fromfile, lambda file, dtype: np.memmap(file, dtype, mode="r")):
            found = read(file, np.uint8).reshape(-1)
            assert np.array_equal(found, expected.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
@pytest.mark.parametrize("path", PATHS)
def test_mmap(view, path, flags):
    mounted, tensors = view
    with open(mounted / f"dev1/{path}", "rb") as file, mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ) as held:
        mounting.same_bytes(held[:], _expected(tensors, path, 1), path)


@pytest.mark.parametrize("path", PATHS)
def test_o_direct(view, path):
    """16 MiB at a time, into page-aligned memory, past the end too."""
    mounted, tensors = view
    buffer = mmap.mmap(-1, 16 * MIB)
    fd = os.open(mounted / f"dev2/{path}", os.O_RDONLY | os.O_DIRECT)
    try:
        found = bytearray()
        while count := os.preadv(fd, [buffer], len(found)):
            found += buffer[:count]
        mounting.same_bytes(bytes(found), _expected(tensors, path, 2), path)
        assert os.preadv(fd, [buffer], 1 << 40) == 0
    finally:
        os.close(fd)


@pytest.mark.parametrize("path", PATHS)
def test_random_reads(view, path):
    mounted, tensors = view
    expected = _expected(tensors, path, 3).tobytes()
    rng, fd = random.Random(11), os.open(mounted / f"dev3/{path}", os.O_RDONLY)
    try:
        for _ in range(500):
            at, count = rng.randrange(len(expected) + 1), rng.choice([1, 3, 4096, 5000, 131072, 300001])
            assert os.pread(fd, count, at) == expected[at : at + count], (at, count)
    finally:
        os.close(fd)


def _read_all(job):
    root, names, seed = job
    random.Random(seed).shuffle(names)
    sums = {}
    for name in names:
        with open(os.path.join(root, name), "rb") as file:
            data = file.read() if seed % 2 else mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)[:]
        sums[name] = hash(bytes(data))
    return sums


def test_parallel_readers(view):
    """Eight processes, half of them by mmap, all files at once, each in its own order."""
    mounted, tensors = view
    names = [f"dev{device}/{path}" for device in range(4) for path in PATHS]
    expected = {name: _expected(tensors, name.split("/", 1)[1], int(name[3])) for name in names}
    with multiprocessing.get_context("fork").Pool(8) as pool:
        results = pool.map_async(_read_all, [(str(mounted.point), list(names), seed) for seed in range(8)]).get(120)
    wanted = {name: hash(array.tobytes()) for name, array in expected.items()}
    assert all(sums == wanted for sums in results)


def test_two_threads_serve_page_faults(own, large):
    """A daemon of two threads serves sixteen processes that fault in the same map."""
    mounted = own(large.path, "--mesh", "fsdp=4", "--dtype", "bf16", "-o", "threads=2")
    names = [f"dev{device}/wide" for device in range(4)]
    with multiprocessing.get_context("fork").Pool(16) as pool:
        jobs = [(str(mounted.point), list(names), 2 * seed) for seed in range(16)]
        results = pool.map_async(_read_all, jobs).get(120)
    assert all(sums == results[0] for sums in results)


def _map_and_compare(job):
    """Faults in every page of a map, in the process's own order, once all processes are ready."""
    path, digest, seed, barrier = job
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as held:
        starts = list(range(0, len(held), 4096))
        random.Random(seed).shuffle(starts) if seed % 2 else starts.reverse()
        barrier.wait(60)
        pages = {start: held[start : start + 4096] for start in starts}
    return hashlib.sha256(b"".join(pages[start] for start in sorted(pages))).hexdigest() == digest


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16")], ids=["copied", "cast"])
def test_one_file_mapped_by_many_on_two_threads(own, large, options):
    """Four processes fault in the same cold pages at once, on a daemon of two threads; six times, each on a new mount."""
    shown = reference.canonical(large)["wide"]
    expected = (reference.cast(shown, "BF16") if options else shown).array.tobytes()
    context, digest = multiprocessing.get_context("fork"), hashlib.sha256(expected).hexdigest()
    with context.Manager() as manager, context.Pool(4) as pool:
        for turn in range(6):
            mounted, barrier = own(large.path, "--threads", "2", *options), manager.Barrier(4)
            jobs = [(mounted / "full/wide", digest, 4 * turn + n, barrier) for n in range(4)]
            assert pool.map_async(_map_and_compare, jobs, chunksize=1).get(60) == [True] * 4
            mounting.run("umount", mounted.point)


def _fails_with(code, call, *args, **more):
    with pytest.raises(OSError) as caught:
        call(*args, **more)
    assert caught.value.errno == code, f"{errno.errorcode.get(caught.value.errno)}, expected {errno.errorcode[code]}"


def test_every_write_is_erofs(shared):
    mounted = shared("llama", "--mesh", "fsdp=4")
    file, folder = mounted / "dev0/embed", mounted / "dev0"
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
        _fails_with(errno.EROFS, os.open, file, flags)
    _fails_with(errno.EROFS, os.open, folder / "new", os.O_CREAT | os.O_WRONLY)
    _fails_with(errno.EROFS, os.unlink, file)
    _fails_with(errno.EROFS, os.rename, file, folder / "other")
    _fails_with(errno.EROFS, os.mkdir, folder / "new")
    _fails_with(errno.EROFS, os.rmdir, folder)
    _fails_with(errno.EROFS, os.symlink, "x", folder / "new")
    _fails_with(errno.EROFS, os.link, file, folder / "new")
    _fails_with(errno.EROFS, os.truncate, file, 0)
    _fails_with(errno.EROFS, os.chmod, file, 0o777)
    _fails_with(errno.EROFS, os.utime, file)
    _fails_with(errno.EROFS, os.setxattr, file, "user.x", b"1")


def test_stat(shared):
    mounted = shared("llama", "--mesh", "fsdp=4")
    file = os.stat(mounted / "dev0/embed")
    assert (file.st_size, file.st_mode & 0o222, file.st_nlink) == (8 * 16 * 2, 0, 1)
    folder = os.stat(mounted / "dev0/layers")
    assert folder.st_nlink == 2 + len(os.listdir(mounted / "dev0/layers"))
    assert os.stat(mounted / "dev0/embed").st_ino == file.st_ino
    assert not os.path.exists(mounted / "dev0/nothing")
    assert os.statvfs(mounted.point).f_flag & os.ST_RDONLY


def test_mount_type_and_source(shared):
    assert mounting.mount_type(shared("llama", "--mesh", "fsdp=4").point) == "fuse.ckfs"


def test_walks_agree(shared):
    """`os.walk` and `find` see the same tree twice."""
    mounted = shared("qwen3_moe", "--mesh", "fsdp=2")
    first = sorted(str(path) for path in mounted.point.rglob("*"))
    assert first == sorted(str(path) for path in mounted.point.rglob("*"))
    assert len(first) == len(set(first)) > 100


def test_sendfile(shared, tmp_path):
    """The system call that `cp` and web servers use."""
    source = shared("llama", "--mesh", "fsdp=4") / "dev2/layers/scanned/w_gate"
    expected = source.read_bytes()
    with open(source, "rb") as file, open(tmp_path / "copy", "wb+") as target:
        assert os.sendfile(target.fileno(), file.fileno(), 0, len(expected)) == len(expected)
    assert (tmp_path / "copy").read_bytes() == expected
