"""Sources that change under a live mount, and daemons that die: an error or the right bytes, never anything else."""

import errno
import mmap
import os
import signal
import subprocess
import threading
import time

import mounting
import numpy as np
import pytest
import reference
import repos
from mounting import run, wait_until

LAYERS = 4
SIZE = 768  # 768 x 768 float32 in 4 layers: 9 MiB per file


@pytest.fixture
def two_files(tmp_path):
    """`a` and `b` in files of their own, so that one can be damaged and the other must go on."""
    draw = repos.Draw("damage")
    files = {}
    for number, word in enumerate("ab"):
        files[f"model-0000{number + 1}-of-00002.safetensors"] = {
            f"model.layers.{n}.{word}.weight": draw(f"{word}{n}", "F32", SIZE, SIZE) for n in range(LAYERS)
        }
    return repos.write(tmp_path / "source", files, {"model_type": "unheard_of"})


def _truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def _truncate_to_nothing(file):
    os.truncate(file, 0)


def _rewrite_in_place(file):
    with open(file, "rb+") as handle:
        handle.seek(-4096, os.SEEK_END)
        handle.write(b"\xa5" * 4096)
    later = time.time() + 5
    os.utime(file, (later, later))


def _replace(file):
    data = bytearray(file.read_bytes())
    data[-4096:] = b"\xa5" * 4096
    new = file.with_suffix(".new")
    new.write_bytes(data)
    new.rename(file)


def _delete(file):
    file.unlink()


DAMAGES = [_truncate, _truncate_to_nothing, _rewrite_in_place]


def _read(path):
    with open(path, "rb") as file:
        return file.read()


def _error_of(call, *args):
    try:
        call(*args)
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16")], ids=["copied", "cast"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__[1:])
def test_a_damaged_source_is_eio(own, two_files, damage, options):
    mounted = own(two_files.path, "--mesh", "fsdp=2", *options)
    code = "BF16" if options else None
    tensors = {path: reference.cast(shown, code) for path, shown in reference.canonical(two_files).items()}
    damage(two_files.path / "model-00001-of-00002.safetensors")
    last = LAYERS - 1
    for path in (f"full/layers/{last}/a", "full/layers/scanned/a", f"dev1/layers/{last}/a"):
        assert _error_of(_read, mounted / path) == errno.EIO, path
    for path in ("full/layers/scanned/b", f"full/layers/{last}/b"):
        mounting.same_bytes(_read(mounted / path), tensors[path.removeprefix("full/")].array, path)
    assert mounted.stats()["poisoned_sources"] == 1
    assert mounted.stats()["panics"] == 0
    assert mounting.mount_type(mounted.point) == "fuse.ckfs"


@pytest.mark.parametrize("damage", [_replace, _delete], ids=lambda damage: damage.__name__[1:])
def test_a_replaced_source_never_shows_other_bytes(own, two_files, damage):
    """The old file may live on behind an open descriptor: its bytes are right, EIO is right too, the new ones are not."""
    mounted = own(two_files.path, "--mesh", "fsdp=2")
    tensors = reference.canonical(two_files)
    damage(two_files.path / "model-00001-of-00002.safetensors")
    for path in ("layers/scanned/a", "layers/3/a", "layers/scanned/b"):
        try:
            found = _read(mounted / f"full/{path}")
        except OSError as error:
            assert error.errno == errno.EIO and not path.endswith("b")
        else:
            mounting.same_bytes(found, tensors[path].array, path)


def test_a_replaced_source_is_eio_once_seen(own, two_files):
    """New opens notice that the name now belongs to another file."""
    mounted = own(two_files.path)
    _replace(two_files.path / "model-00001-of-00002.safetensors")
    assert _error_of(_read, mounted / "full/layers/3/a") == errno.EIO
    assert mounted.stats()["poisoned_sources"] == 1


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16")], ids=["copied", "cast"])
def test_truncation_while_being_read(own, two_files, options):
    """Readers in full flight when the bytes go: each sees EIO or right bytes, and the daemon lives."""
    mounted = own(two_files.path, "--mesh", "fsdp=2", *options)
    code = "BF16" if options else None
    expected = reference.cast(reference.canonical(two_files)["layers/scanned/a"], code).array.tobytes()
    wrong, stop = [], threading.Event()

    def reader():
        while not stop.is_set():
            fd = os.open(mounted / "full/layers/scanned/a", os.O_RDONLY | os.O_DIRECT)
            try:
                with mmap.mmap(-1, 1 << 20) as buffer:
                    at = 0
                    while count := os.preadv(fd, [buffer], at):
                        if buffer[:count] != expected[at : at + count]:
                            wrong.append(at)
                        at += count
                    if at != len(expected):
                        wrong.append(("short", at))
            except OSError as error:
                if error.errno != errno.EIO:
                    wrong.append(error)
            finally:
                os.close(fd)

    def guarded():
        try:
            reader()
        except OSError as error:  # open itself may say EIO
            if error.errno != errno.EIO:
                wrong.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    _truncate(two_files.path / "model-00001-of-00002.safetensors")
    time.sleep(0.7)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert _error_of(_read, mounted / "full/layers/3/a") == errno.EIO
    assert _read(mounted / "full/layers/3/b")


def test_hf_files_of_a_damaged_source(own, two_files):
    """Byte-identical files, which the kernel may read past the daemon: an error or a refusal, never zeros."""
    mounted = own(two_files.path)
    file = two_files.path / "model-00001-of-00002.safetensors"
    before = file.read_bytes()
    _truncate(file)
    try:
        found = _read(mounted / "hf" / file.name)
    except OSError as error:
        assert error.errno == errno.EIO
    else:
        pytest.fail(f"read {len(found)} bytes of {len(before)} without an error")
    other = "model-00002-of-00002.safetensors"
    assert _read(mounted / "hf" / other) == (two_files.path / other).read_bytes()


def test_mapped_reader_gets_sigbus_not_zeros(own, two_files):
    """A client that maps a file whose source is gone dies by SIGBUS, as with any file system; the daemon does not."""
    mounted = own(two_files.path, "--dtype", "bf16")
    target = mounted / "full/layers/3/a"
    script = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)\n"
        "print('mapped', flush=True); sys.stdin.readline()\n"
        "print(sum(held[::4096]))\n"
    )
    client = subprocess.Popen(
        [mounting.shutil.which("python3"), "-c", script, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout.readline() == b"mapped\n"
    _truncate_to_nothing(two_files.path / "model-00001-of-00002.safetensors")
    client.communicate(b"\n", timeout=30)
    assert client.returncode == -signal.SIGBUS
    assert _read(mounted / "full/layers/3/b")


# --- daemons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_unmount(own, repo, number):
    mounted = own(repo("llama").path)
    pid = mounting.daemon_pid(mounted.point)
    os.kill(pid, number)
    wait_until(lambda: mounting.mount_type(mounted.point) is None, what="unmount after a signal")
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="end of the daemon")
    assert os.listdir(mounted.point) == []


def test_a_stale_mount_is_recovered(own, repo):
    """kill -9 leaves a mount that answers ENOTCONN; the next mount clears it away."""
    mounted = own(repo("llama").path)
    os.kill(mounting.daemon_pid(mounted.point), signal.SIGKILL)
    wait_until(lambda: _error_of(os.listdir, mounted.point) == errno.ENOTCONN, what="a stale mount")
    again = mounting.mount(repo("llama").path, mounted.point)
    assert _read(again / "full/embed") == repo("llama").tensors["model.embed_tokens.weight"].data
    assert len(mounting.mount_points(mounted.point)) == 1


def test_umount_clears_a_stale_mount(own, repo):
    mounted = own(repo("llama").path)
    os.kill(mounting.daemon_pid(mounted.point), signal.SIGKILL)
    wait_until(lambda: _error_of(os.listdir, mounted.point) == errno.ENOTCONN, what="a stale mount")
    run("umount", mounted.point)
    assert mounting.mount_type(mounted.point) is None


def test_a_live_mount_is_never_covered(own, repo):
    mounted = own(repo("llama").path)
    done = run("mount", repo("uneven").path, mounted.point, expect=1)
    assert str(mounted.point) in done.err and "mounted" in done.err
    assert len(mounting.mount_points(mounted.point)) == 1
    assert (mounted / "full/embed").exists()


def test_umount(own, repo, tmp_path):
    mounted = own(repo("llama").path)
    pid = mounting.daemon_pid(mounted.point)
    run("umount", mounted.point)
    assert mounting.mount_type(mounted.point) is None
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="end of the daemon")
    assert str(mounted.point) in run("umount", mounted.point, expect=1).err


def test_umount_while_busy(own, two_files):
    """An open file does not keep the mount in the tree; who holds it reads on or gets an error, then the daemon ends."""
    mounted = own(two_files.path, "--dtype", "bf16")
    with open(mounted / "full/layers/scanned/a", "rb") as file:
        assert len(file.read(4096)) == 4096
        run("umount", mounted.point)
        assert mounting.mount_type(mounted.point) is None
    assert os.listdir(mounted.point) == []


def test_mount_point_must_be_a_directory(repo, tmp_path, fuse):
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in run("mount", repo("llama").path, tmp_path / "file", expect=1).err
    assert str(tmp_path / "none") in run("mount", repo("llama").path, tmp_path / "none", expect=1).err


def test_a_failed_start_is_mounts_own_error(two_files, tmp_path, fuse):
    _truncate(two_files.path / "model-00001-of-00002.safetensors")
    (tmp_path / "mnt").mkdir()
    done = run("mount", two_files.path, tmp_path / "mnt", expect=1)
    assert "model-00001-of-00002.safetensors" in done.err
    assert mounting.mount_type(tmp_path / "mnt") is None


def test_foreground(repo, tmp_path, fuse):
    point = tmp_path / "mnt"
    point.mkdir()
    daemon = subprocess.Popen([mounting.find_ckfs(), "mount", repo("llama").path, point, "--foreground"])
    try:
        wait_until(lambda: mounting.mount_type(point) is not None, what="mount in the foreground")
        assert _read(point / "full/embed")
        assert daemon.poll() is None
        daemon.terminate()
        assert daemon.wait(15) == 0
        assert mounting.mount_type(point) is None
    finally:
        daemon.kill()
        mounting.detach(point)


def test_many_mounts_at_once(own, repo):
    """Daemons do not share state."""
    mounts = [own(repo(name).path, "--mesh", "fsdp=2") for name in ("llama", "uneven", "bert", "llama")]
    assert len({mounting.daemon_pid(mounted.point) for mounted in mounts}) == 4
    for mounted in mounts[1:]:
        run("umount", mounted.point)
    assert _read(mounts[0] / "full/embed")


# --- mount(8) --------------------------------------------------------------------------------------------------------


@pytest.fixture
def helper(tmp_path):
    """The program under the name by which mount(8) calls it."""
    link = tmp_path / "mount.ckfs"
    link.symlink_to(mounting.find_ckfs())
    return link


def test_mount_helper(helper, repo, tmp_path, fuse):
    """As mount(8) calls it for an fstab line; commas inside an option are escaped."""
    point = tmp_path / "mnt"
    point.mkdir()
    try:
        run(repo("llama").path, point, "-o", r"rw,mesh=fsdp=4\,tensor=2,dtype=f32,ro,nosuid,_netdev", binary=helper)
        assert mounting.mount_type(point) == "fuse.ckfs"
        assert {entry for entry in os.listdir(point) if entry.startswith("dev")} == {f"dev{d}" for d in range(8)}
        assert mounting.xattr(point / "full/embed", "dtype") == "F32"
        mounting.run("umount", point)
    finally:
        mounting.detach(point)


def test_mount_helper_takes_what_mount_passes(helper, repo, tmp_path, fuse):
    """`-n`, `-s`, `-v`, `-f` and `-t` are mount(8)'s own; a fake mount mounts nothing."""
    point = tmp_path / "mnt"
    point.mkdir()
    try:
        run(repo("llama").path, point, "-n", "-s", "-v", "-t", "fuse.ckfs", "-o", "ro", binary=helper)
        assert mounting.mount_type(point) == "fuse.ckfs"
        mounting.run("umount", point)
        run(repo("llama").path, point, "-f", "-o", "ro", binary=helper)
        assert mounting.mount_type(point) is None
    finally:
        mounting.detach(point)


def test_mount_helper_failures(helper, repo, tmp_path):
    point = tmp_path / "mnt"
    point.mkdir()
    done = run(tmp_path / "missing", point, "-o", "ro", binary=helper, expect=None)
    assert done.code != 0 and str(tmp_path / "missing") in done.err
    done = run(repo("llama").path, point, "-o", "mesh=fsdp", binary=helper, expect=None)
    assert done.code != 0 and "fsdp" in done.err
    done = run(repo("llama").path, point, "-o", "no_such_option=1", binary=helper, expect=None)
    assert done.code != 0 and "no_such_option" in done.err
    assert mounting.mount_type(point) is None


# --- counting --------------------------------------------------------------------------------------------------------


def test_stats_and_metrics(own, repo):
    mounted = own(repo("llama").path, "--mesh", "fsdp=2")
    size = len(_read(mounted / "full/layers/scanned/wq"))
    stats = mounted.stats()
    assert stats["ops"]["read"]["count"] >= 1 and stats["ops"]["read"]["errors"] == 0
    assert stats["bytes_served"] >= size and stats["bytes_fetched"] >= size
    assert (stats["poisoned_sources"], stats["panics"]) == (0, 0)
    text = (mounted / ".ckfs/metrics").read_text()
    values = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert all(name.startswith("ckfs_") for name in values)
    assert any(name.startswith("ckfs_ops_total{") and 'op="read"' in name for name in values)
    assert values["ckfs_poisoned_sources"] == 0


def test_stats_move_on(own, repo):
    """Not cached by the kernel: a later read sees later counts."""
    mounted = own(repo("llama").path)
    before = mounted.stats()["ops"]["lookup"]["count"]
    for n in range(5):
        assert not (mounted / f"nothing{n}").exists()
    assert mounted.stats()["ops"]["lookup"]["count"] >= before + 5


def test_each_byte_is_fetched_about_once(own, two_files):
    """Sequential reads of all shards fetch the source once."""
    mounted = own(two_files.path, "--mesh", "fsdp=4", "--dtype", "bf16")
    for device in range(4):
        for word in "ab":
            np.fromfile(mounted / f"dev{device}/layers/scanned/{word}", np.uint8)
    total = sum(len(tensor.data) for tensor in two_files.tensors.values())
    assert mounted.stats()["bytes_fetched"] <= 1.1 * total
