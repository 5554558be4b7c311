"""Life and death of a mount: start, signals, kill -9, busy unmount, other users, mount(8), counters."""

import errno
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

import mounting
from mounting import error_of, read, run, wait_until


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
    wait_until(lambda: error_of(os.listdir, mounted.point) == errno.ENOTCONN, what="a stale mount")
    again = mounting.mount(repo("llama").path, mounted.point)
    assert read(again / "full/embed") == repo("llama").tensors["model.embed_tokens.weight"].data
    assert len(mounting.mount_points(mounted.point)) == 1


def test_umount_clears_a_stale_mount(own, repo):
    mounted = own(repo("llama").path)
    os.kill(mounting.daemon_pid(mounted.point), signal.SIGKILL)
    wait_until(lambda: error_of(os.listdir, mounted.point) == errno.ENOTCONN, what="a stale mount")
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
    os.truncate(two_files.path / "model-00001-of-00002.safetensors", 1000)
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
        assert read(point / "full/embed")
        assert daemon.poll() is None
        daemon.terminate()
        assert daemon.wait(15) == 0
        assert mounting.mount_type(point) is None
    finally:
        daemon.kill()
        mounting.detach(point)


@pytest.fixture
def nobody():
    """A directory and the program, both within reach of an unprivileged user, and a way to run as that user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else; as another user all tests run unprivileged anyway")
    directory = Path(tempfile.mkdtemp(prefix="ckfs-nobody-"))
    directory.chmod(0o777)
    shutil.copy(mounting.find_ckfs(), directory / "ckfs")
    who = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": directory, "env": os.environ | {"HOME": str(directory)}}
    yield directory, who
    for point in mounting.mount_points(directory):
        mounting.detach(point)
    shutil.rmtree(directory)


def test_an_unprivileged_user_mounts(nobody, repo, fuse):
    """By way of fusermount3; other users, root too, are kept out, as the kernel has it."""
    directory, who = nobody
    shutil.copytree(repo("llama").path, directory / "repo")
    point, binary = directory / "mnt", directory / "ckfs"
    point.mkdir()
    os.chown(point, 65534, 65534)
    run("mount", directory / "repo", point, "--mesh", "fsdp=2", binary=binary, **who)
    assert mounting.mount_type(point) == "fuse.ckfs"
    got = subprocess.run(["cat", point / "full/embed"], capture_output=True, timeout=30, check=True, **who).stdout
    assert got == repo("llama").tensors["model.embed_tokens.weight"].data
    run("umount", point, binary=binary, **who)
    assert mounting.mount_type(point) is None


def test_many_mounts_at_once(own, repo):
    """Daemons do not share state."""
    mounts = [own(repo(name).path, "--mesh", "fsdp=2") for name in ("llama", "uneven", "bert", "llama")]
    assert len({mounting.daemon_pid(mounted.point) for mounted in mounts}) == 4
    for mounted in mounts[1:]:
        run("umount", mounted.point)
    assert read(mounts[0] / "full/embed")


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
    size = len(read(mounted / "full/layers/scanned/wq"))
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
