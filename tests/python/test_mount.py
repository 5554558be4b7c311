"""The life of a mount: start, signals, kill -9, busy unmount, other users, mount(8), counters."""

import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import tempfile
import threading
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
    """kill -9 leaves a mount that answers ENOTCONN; the next mount removes it."""
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
    """Refused with the name of the process using the mount; `--lazy` detaches it, and that process can still read."""
    mounted = own(two_files.path, "--dtype", "bf16")
    pid, expected = mounting.daemon_pid(mounted.point), read(mounted / "full/layers/scanned/a")
    with open(mounted / "full/layers/scanned/a", "rb") as file:
        assert file.read(4096) == expected[:4096]
        done = run("umount", mounted.point, expect=1)
        assert "busy" in done.err and str(os.getpid()) in done.err
        assert mounting.mount_type(mounted.point) == "fuse.ckfs"
        run("umount", "--lazy", mounted.point)
        assert mounting.mount_type(mounted.point) is None and os.listdir(mounted.point) == []
        assert file.read() == expected[4096:]
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="end of the daemon")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("options", [(), ("--foreground",)], ids=["background", "foreground"])
def test_signals_end_a_start_that_is_not_ready(fresh, tmp_path, fuse, options, number):
    """A lease makes opening a source file wait, as a slow file system would, for 45 s."""
    repo, point = fresh("llama_tied"), tmp_path / "mnt"
    point.mkdir()
    opening = threading.Event()
    # Signals handled here have their default action in a child; ignored ones, as in background test runs, would stay ignored.
    before = {signal.SIGIO: signal.signal(signal.SIGIO, lambda *_: opening.set())}
    before[number] = signal.signal(number, signal.default_int_handler)
    file = os.open(repo.path / "model.safetensors", os.O_RDWR)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        started = subprocess.Popen(
            [mounting.find_ckfs(), "mount", repo.path, point, *options], start_new_session=True, stderr=subprocess.PIPE
        )
        assert opening.wait(mounting.TIMEOUT_SECONDS), "nobody opened the source"
        # As by Ctrl-C for SIGINT: to the starter and the daemon.
        (os.killpg if number == signal.SIGINT else os.kill)(started.pid, number)
        assert started.wait(mounting.TIMEOUT_SECONDS) == -number
        wait_until(lambda: not _alive(started.pid), what="end of the daemon")
        assert mounting.mount_type(point) is None
    finally:
        os.close(file)
        for handled, handler in before.items():
            signal.signal(handled, handler)
        mounting.detach(point)


def _alive(session: int) -> bool:
    """Whether a process of that session is left."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    return True
        except OSError:
            pass
    return False


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
        assert daemon.wait(mounting.TIMEOUT_SECONDS) == 0
        assert mounting.mount_type(point) is None
    finally:
        daemon.kill()
        mounting.detach(point)


AS_NOBODY = r"""
set -e
mount -t tmpfs -o mode=1777 ckfs-test "$1" && cd "$1"
mknod -m 666 fuse c 10 229 && mount --bind fuse /dev/fuse
cp "$2" ckfs && cp -r "$3" repo && chmod -R a+rX ckfs repo
mkdir mnt && chown 65534:65534 mnt
exec setpriv --reuid=65534 --regid=65534 --clear-groups env HOME="$1" sh -ec '
    ./ckfs mount repo mnt --mesh fsdp=2
    trap "fusermount3 -uz mnt 2>/dev/null || true" EXIT
    findmnt -n -o FSTYPE mnt; sha256sum <mnt/full/embed; ./ckfs verify mnt
    ./ckfs umount mnt; findmnt -n mnt || echo gone'
"""


def test_an_unprivileged_user_mounts(repo, fuse):
    """Through fusermount3, in a mount namespace where `/dev/fuse` is open to all, as on most hosts."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else; as another user all tests run unprivileged anyway")
    inside = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", AS_NOBODY, "sh"]
    with tempfile.TemporaryDirectory(prefix="ckfs-nobody-") as directory:
        os.chmod(directory, 0o755)  # pytest's own directories are closed to others
        command = [*inside, directory, mounting.find_ckfs(), repo("llama").path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    digest = hashlib.sha256(repo("llama").tensors["model.embed_tokens.weight"].data).hexdigest()
    lines = done.stdout.splitlines()
    assert lines[0] == "fuse.ckfs" and lines[1].startswith(digest) and "no difference" in lines[2] and lines[-1] == "gone"


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


BY_MOUNT = r"""
set -e
mkdir sbin && ln -s "$1" sbin/mount.ckfs
mount -t overlay -o lowerdir="$PWD/sbin:$(readlink -f /sbin)" ckfs-test /sbin || exit 77
trap "umount -l mnt 2>/dev/null || true" EXIT
for options in mesh=fsdp=2:tensor=2 ro,nosuid,mesh=fsdp=4 rw,noatime; do
    mount -t ckfs "$2" mnt -o $options
    findmnt -n -o FSTYPE,SOURCE mnt; ls -d mnt/dev* | wc -l
    umount mnt
done
printf '%s %s/mnt ckfs noauto,nofail,devices=1,mesh=fsdp=2 0 0\n' "$2" "$PWD" >fstab
mount --fstab fstab mnt; ls -d mnt/dev*; umount mnt
mount -t ckfs "$2" mnt; ls -d mnt/dev*; umount mnt
"""


def test_mount_and_umount_programs(repo, tmp_path, fuse):
    """mount(8) itself, which adds `rw` by default, and umount(8); with `/sbin` as on a host with ckfs installed."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts by mount(8)")
    (tmp_path / "mnt").mkdir()
    inside = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", BY_MOUNT, "sh"]
    command, source = [*inside, mounting.find_ckfs(), repo("llama").path], repo("llama").path
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip(f"no overlay here: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    mounted = f"fuse.ckfs ckfs:{source}"
    assert done.stdout.splitlines() == [mounted, "4", mounted, "4", mounted, "1", "mnt/dev1", "mnt/dev0"]


def test_mount_helper_accepts_the_arguments_of_mount(helper, repo, tmp_path, fuse):
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
    stats = mounted.stats_of_reads()
    assert stats["ops"]["read"]["errors"] == 0
    assert len(stats["ops"]["read"]["latency"]) == len(stats["latency_bounds_us"]) + 1
    # Stacked, but not converted: runs of source bytes.
    for counter in ("bytes_served", "bytes_fetched"):
        assert set(stats[counter]) == {"identical", "runs", "tiles", "generated"}
        assert stats[counter]["runs"] >= size and stats[counter]["tiles"] == 0
    assert (stats["poisoned_sources"], stats["panics"], stats["failed_reads"]) == (0, 0, 0)
    assert (mounted / ".ckfs/stats.json").stat().st_size == len(read(mounted / ".ckfs/stats.json"))
    assert (stats["health"], stats["problems"], stats["last_error"]) == ("healthy", [], None)


def test_stats_move_on(own, repo):
    """The kernel does not cache them: a later read returns later counts."""
    mounted = own(repo("llama").path)
    before = mounted.stats()["ops"]["lookup"]["count"]
    for n in range(5):
        assert not (mounted / f"nothing{n}").exists()
    wait_until(lambda: mounted.stats()["ops"]["lookup"]["count"] >= before + 5, what="five lookups counted")


def test_each_byte_is_fetched_about_once(own, two_files):
    """Sequential reads of all shards fetch the source once."""
    mounted = own(two_files.path, "--mesh", "fsdp=4", "--dtype", "bf16")
    for device in range(4):
        for word in "ab":
            np.fromfile(mounted / f"dev{device}/layers/scanned/{word}", np.uint8)
    total = sum(len(tensor.data) for tensor in two_files.tensors.values())
    stats = mounted.stats_of_reads(8)
    assert 0.5 * total <= stats["bytes_served"]["tiles"] and sum(stats["bytes_fetched"].values()) <= 1.1 * total
