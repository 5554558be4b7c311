"""The mount point `/dev/fd/N`: a parent with privileges mounts, a daemon without any serves the descriptor."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

import mounting
from mounting import error_of, read, run

NOBODY = 65534
DATA = bytes(range(256)) * 256
READ_ONLY_NOSUID_NODEV = 7


class Parent:
    """A process that may mount: this one. It opens /dev/fuse and mounts, and a daemon of another user serves."""

    def __init__(self, directory: Path) -> None:
        self.point, self.model = directory / "mnt", directory / "model"
        self.point.mkdir()
        self.model.mkdir()
        header = f'{{"w":{{"dtype":"U8","shape":[{len(DATA)}],"data_offsets":[0,{len(DATA)}]}}}}'.encode()
        (self.model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + DATA)
        self.program = directory / "ckfs"
        shutil.copy(mounting.find_ckfs(), self.program)
        self.env = {**os.environ, "HOME": str(directory), "CKFS_LOG": ""}

    def mount(self) -> int:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
        data = f"fd={descriptor},rootmode=40000,user_id={NOBODY},group_id={NOBODY},allow_other,default_permissions"
        libc = ctypes.CDLL(None, use_errno=True)
        names = [name.encode() for name in ("ckfs:model", str(self.point), "fuse.ckfs")]
        assert libc.mount(*names, READ_ONLY_NOSUID_NODEV, data.encode()) == 0, os.strerror(ctypes.get_errno())
        return descriptor

    def words(self, descriptor: int, *flags: object) -> list[str]:
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        return [*user, str(self.program), "mount", str(self.model), f"/dev/fd/{descriptor}", *map(str, flags)]

    def serve(self, *flags: object) -> subprocess.Popen:
        """A daemon in the foreground; this process keeps no copy of the descriptor."""
        descriptor = self.mount()
        words = self.words(descriptor, "--foreground", "-v", *flags)
        daemon = subprocess.Popen(words, pass_fds=[descriptor], stderr=subprocess.PIPE, text=True, env=self.env)
        os.close(descriptor)
        return daemon


@pytest.fixture
def parent(tmp_path, fuse):
    if os.getuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("not root, and CI=true")
        pytest.skip("not root")
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o5 != 0o5 and directory.is_relative_to(tempfile.gettempdir()):
            directory.chmod(directory.stat().st_mode | 0o55)
    parent = Parent(tmp_path)
    yield parent
    mounting.detach(parent.point)


def test_a_daemon_without_privileges_serves_until_the_parent_unmounts(parent):
    daemon = parent.serve()
    assert read(parent.point / "full/w") == DATA
    assert Path(f"/proc/{daemon.pid}/status").read_text().split("Uid:")[1].split()[0] == str(NOBODY)
    row = run("status", parent.point, "--json").json()["mounts"][0]
    assert (row["health"], row["pid"], row["source"]) == ("healthy", daemon.pid, str(parent.model))
    assert "mountpoint" not in read(parent.point / ".ckfs/config.toml").decode()
    run("umount", parent.point)
    _, log = daemon.communicate(timeout=mounting.TIMEOUT_SECONDS)
    assert daemon.returncode == 0 and "UnmountedOutside" in log, log
    assert mounting.mount_type(parent.point) is None


def test_the_starter_returns_when_the_mount_answers(parent):
    descriptor = parent.mount()
    words = parent.words(descriptor)
    done = subprocess.run(words, pass_fds=[descriptor], capture_output=True, text=True, env=parent.env, timeout=60)
    os.close(descriptor)
    assert done.returncode == 0 and f"mounted on /dev/fd/{descriptor}" in done.stderr, done.stderr
    assert read(parent.point / "full/w") == DATA
    pid = run("status", parent.point, "--json").json()["mounts"][0]["pid"]
    run("umount", parent.point)
    mounting.wait_until(lambda: not Path(f"/proc/{pid}/exe").exists(), what="the daemon ends")


def test_a_signal_ends_the_daemon_and_leaves_the_mount_to_the_parent(parent):
    daemon = parent.serve("--grace", "0", "--drain", "30")
    assert read(parent.point / "full/w") == DATA
    with (parent.point / "full/w").open("rb", buffering=0) as kept:
        daemon.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(timeout=0.5)
        assert kept.read(len(DATA)) == DATA, "open files are served on"
    _, log = daemon.communicate(timeout=mounting.TIMEOUT_SECONDS)
    assert daemon.returncode == 0 and "the process that made the mount has to unmount it" in log, log
    assert error_of(read, parent.point / "full/w") == errno.ENOTCONN
    assert run("status", parent.point, "--json", expect=1).json()["mounts"][0]["health"] == "stale"
    run("umount", parent.point)


def test_open_files_are_cut_off_when_the_time_is_over(parent):
    daemon = parent.serve("--grace", "0", "--drain", "0")
    with (parent.point / "full/w").open("rb", buffering=0):
        daemon.send_signal(signal.SIGTERM)
        _, log = daemon.communicate(timeout=mounting.TIMEOUT_SECONDS)
    assert daemon.returncode == 1 and "1 open files are cut off" in log, log


def test_a_killed_daemon_leaves_a_stale_mount(parent):
    daemon = parent.serve()
    assert read(parent.point / "full/w") == DATA
    daemon.kill()
    daemon.communicate(timeout=mounting.TIMEOUT_SECONDS)
    assert error_of(read, parent.point / "full/w") == errno.ENOTCONN
    run("umount", "--stale", parent.point)
    assert mounting.mount_type(parent.point) is None


def refused(parent: Parent, descriptor: int, *flags: str) -> str:
    words = [str(parent.program), "mount", str(parent.model), f"/dev/fd/{descriptor}", *flags]
    passed = [descriptor] if 2 < descriptor < 1000 else []
    done = subprocess.run(words, pass_fds=passed, capture_output=True, text=True, env=parent.env, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "expected a descriptor of /dev/fuse, open for reading and writing and mounted" in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize("flags", [(), ("--foreground",)])
def test_other_descriptors_are_refused(parent, flags):
    assert "no open descriptor of this number" in refused(parent, 4000, *flags)
    assert "a standard stream" in refused(parent, 1, *flags)
    for path, mode, found in [
        ("/dev/null", os.O_RDWR, "the device 1:3"),
        (parent.model / "model.safetensors", os.O_RDONLY, "no character device but "),
        ("/dev/fuse", os.O_RDONLY, "one open for reading only"),
        ("/dev/fuse", os.O_RDWR, "one without a mount"),
    ]:
        descriptor = os.open(path, mode)
        try:
            assert found in refused(parent, descriptor, *flags)
        finally:
            os.close(descriptor)


def test_a_mount_that_is_served_already_is_refused(parent):
    descriptor = parent.mount()
    words = parent.words(descriptor, "--foreground", "-v")
    daemon = subprocess.Popen(words, pass_fds=[descriptor], stderr=subprocess.PIPE, text=True, env=parent.env)
    assert read(parent.point / "full/w") == DATA
    assert "another process serves already" in refused(parent, descriptor, "--foreground")
    assert read(parent.point / "full/w") == DATA, "the first daemon goes on"
    os.close(descriptor)
    run("umount", parent.point)
    daemon.communicate(timeout=mounting.TIMEOUT_SECONDS)
    assert daemon.returncode == 0
