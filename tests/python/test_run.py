"""`ckfs run`: a mount for one command, as a user without root and as root.

A user without root needs `/dev/fuse` with mode 0666. Where the host has another mode, the tests bind a device with this mode over it, in a
mount namespace of their own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

import mounting
from mounting import wait_until

NOBODY = 65534
SIZE = 1 << 16
DATA = bytes(range(256)) * (SIZE // 256)

# A device that all users may open, as on most hosts, visible to these processes only.
OPEN_DEVICE = """
mount -t tmpfs none "$1/dev"; mknod "$1/dev/fuse" c 10 229; chmod 666 "$1/dev/fuse"; mount --bind "$1/dev/fuse" /dev/fuse
shift; exec "$@"
"""


class Bench:
    """A checkpoint that all users read, a copy of the program, and the words that start it as a user."""

    def __init__(self, directory: Path, uid: int) -> None:
        self.directory, self.uid = directory, uid
        self.tmp = directory / "tmp"
        self.model = directory / "model"
        for new in (self.tmp, self.model, directory / "dev"):
            new.mkdir()
        self.tmp.chmod(0o777)
        header = f'{{"w":{{"dtype":"U8","shape":[{SIZE}],"data_offsets":[0,{SIZE}]}}}}'.encode()
        (self.model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + DATA)
        self.program = directory / "ckfs"
        shutil.copy(mounting.find_ckfs(), self.program)
        self.env = {**os.environ, "TMPDIR": str(self.tmp), "HOME": str(self.tmp), "CKFS_LOG": ""}
        # A directory that a user cannot search would make a missing command a closed one.
        self.env["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"

    def words(self, *command: object, flags: tuple[object, ...] = (), source: object = None) -> list[str]:
        words = [str(self.program), "run", *map(str, flags), str(source or self.model), "--", *map(str, command)]
        if self.uid != os.getuid():
            user = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", *words]
            words = ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", OPEN_DEVICE, "sh",
                     str(self.directory), *user]  # fmt: skip
        return words

    def run(self, *command: object, **more: object) -> subprocess.CompletedProcess:
        keep = {key: more.pop(key) for key in ("flags", "source") if key in more}
        return subprocess.run(
            self.words(*command, **keep), capture_output=True, text=True, timeout=60, env=self.env, **more
        )

    def start(self, *command: object, **more: object) -> subprocess.Popen:
        return subprocess.Popen(self.words(*command, **more), stdout=subprocess.PIPE, text=True, env=self.env)

    def processes(self) -> list[int]:
        """Processes of the program's copy: starters and daemons."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "exe") == str(self.program):
                    found.append(int(entry.name))
            except OSError:
                pass
        return found

    def nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), what="no process is left")
        assert not list(self.tmp.glob("ckfs-run-*")), "no mount point is left"
        assert not mounting.mount_points(self.tmp)


@pytest.fixture(params=["root", "user"])
def bench(request, tmp_path, fuse):
    if os.getuid() != 0:
        if request.param == "root" or os.environ.get("CI") == "true":
            pytest.skip("needs root")
        return Bench(tmp_path, os.getuid())
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o5 != 0o5 and directory.is_relative_to(tempfile.gettempdir()):
            directory.chmod(directory.stat().st_mode | 0o55)
    return Bench(tmp_path, 0 if request.param == "root" else NOBODY)


def test_the_command_has_the_mount_its_streams_and_its_code(bench):
    script = 'cat; cat "$CKFS_MOUNT/full/w" | sha256sum; id -u; test -r "$CKFS_MOUNT/.ckfs/plan.txt"; pwd; exit 7'
    done = bench.run("sh", "-c", script, input="from stdin\n", cwd=bench.tmp)


    assert done.returncode == 7, done.stderr
    assert done.stderr == ""
    expected = f"from stdin\n{hashlib.sha256(DATA).hexdigest()}  -\n{bench.uid}\n{bench.tmp}\n"
    assert done.stdout == expected
    bench.nothing_left()


def test_the_command_has_no_rights_and_others_see_no_mount(bench):
    script = "read -r word; ls $CKFS_MOUNT; grep CapEff /proc/self/status; stat -c %u $CKFS_MOUNT/full/w"
    with subprocess.Popen(
        bench.words("sh", "-c", "echo $CKFS_MOUNT; " + script),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=bench.env,
    ) as child:  # fmt: skip
        point = Path(child.stdout.readline().strip())
        assert point.is_dir() and not list(point.iterdir()), "outside it is an empty directory"
        assert mounting.mount_type(point) is None
        told, _ = child.communicate("go\n", timeout=mounting.TIMEOUT_SECONDS)
    *names, rights, owner = told.split("\n")[:-1]
    assert child.returncode == 0 and "full" in names and int(owner) == bench.uid
    if bench.uid:
        assert int(rights.split()[1], 16) == 0
    bench.nothing_left()


def test_codes_and_failures(bench):
    assert bench.run("true").returncode == 0
    assert bench.run("sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM
    assert bench.run("sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL
    missing = bench.run("no-such-command")
    assert missing.returncode == 127 and "no program no-such-command in PATH" in missing.stderr
    closed = bench.run(bench.model / "model.safetensors")
    assert closed.returncode == 126 and "Permission denied" in closed.stderr
    bad = bench.run("true", source=bench.directory / "nothing")
    assert bad.returncode == 1 and str(bad.stderr).count("error:") == 1 and "nothing" in bad.stderr, bad.stderr
    used = bench.run("true", flags=("--mesh", "fsdp=0"))
    assert used.returncode == 2, used.stderr
    bench.nothing_left()


def test_signals_reach_the_command(bench):
    script = "trap 'echo caught; exit 9' TERM; trap 'echo usr' USR1; echo ready; while :; do sleep 0.05; done"
    child = bench.start("sh", "-c", script)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGUSR1)
    assert child.stdout.readline() == "usr\n"
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=mounting.TIMEOUT_SECONDS)[0] == "caught\n" and child.returncode == 9
    bench.nothing_left()


def test_killing_the_program_ends_all(bench):
    child = bench.start("sh", "-c", "echo $$; exec sleep 600")
    command = int(child.stdout.readline())
    child.kill()
    child.wait(timeout=mounting.TIMEOUT_SECONDS)
    wait_until(lambda: not bench.processes(), what="the daemon ends")
    wait_until(lambda: not Path(f"/proc/{command}/exe").exists(), what="the command ends")
    assert not mounting.mount_points(bench.tmp)


def test_children_that_are_left_behind_lose_the_mount(bench):
    # The first child only stands there. The second has a file open, for which the program waits a second at most.
    script = """
        (exec <"$CKFS_MOUNT/full/w" >/dev/null 2>&1; exec sleep 600) & echo $!
        (cd "$CKFS_MOUNT"; exec sleep 600) >/dev/null 2>&1 & echo $!
        sleep 0.2; exit 3"""
    done = bench.run("sh", "-c", script)
    children = [int(word) for word in done.stdout.split()]
    try:
        assert done.returncode == 3
        assert all(Path(f"/proc/{child}").exists() for child in children), "they live on"
        bench.nothing_left()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_later_run_removes_the_directory_that_a_killed_one_leaves(bench):
    with bench.start("sh", "-c", "echo ready; exec sleep 600") as child:
        assert child.stdout.readline() == "ready\n"
        child.kill()
    wait_until(lambda: not bench.processes(), what="no process is left")
    assert len(list(bench.tmp.glob("ckfs-run-*"))) == 1
    assert bench.run("true").returncode == 0
    bench.nothing_left()


def test_several_at_once(bench):
    running = [bench.start("sh", "-c", 'echo $CKFS_MOUNT; sha256sum <"$CKFS_MOUNT/full/w"; sleep 0.3') for _ in range(4)]
    told = [child.communicate(timeout=60)[0].split("\n") for child in running]
    assert [child.returncode for child in running] == [0] * 4
    assert len({lines[0] for lines in told}) == 4 and len({lines[1] for lines in told}) == 1
    bench.nothing_left()


def test_a_daemon_that_dies_is_reported_and_the_command_goes_on(bench):
    script = "echo ready; read -r word; cat $CKFS_MOUNT/full/w >/dev/null || echo failed"
    with subprocess.Popen(
        bench.words("sh", "-c", script),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=bench.env,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == "ready\n"
        daemon = max(bench.processes(), key=lambda pid: pid != child.pid)
        os.kill(daemon, signal.SIGKILL)
        assert child.stderr.readline().startswith("ckfs: error: the daemon has ended")
        told, _ = child.communicate("go\n", timeout=mounting.TIMEOUT_SECONDS)
    assert told == "failed\n" and child.returncode == 0
    bench.nothing_left()


def test_sources_that_the_user_cannot_read_stay_closed(bench):
    if bench.uid == 0:
        pytest.skip("root reads everything")
    secret = bench.model / "model.safetensors"
    secret.chmod(0o600)
    done = bench.run("true")
    assert done.returncode == 1 and str(secret) in done.stderr and "ermission denied" in done.stderr, done.stderr
    # Files of another user that this one may read show as the user's own.
    secret.chmod(0o644)
    assert bench.run("sh", "-c", 'stat -c %u:%a "$CKFS_MOUNT/full/w"').stdout == f"{bench.uid}:444\n"
    bench.nothing_left()


def test_refusals_name_the_remedy(bench):
    if os.getuid() != 0:
        pytest.skip("needs root")
    if bench.uid == 0:
        # Without the device.
        words = ["unshare", "--mount", "--propagation", "slave", "sh", "-ec",
                 'mount -t tmpfs none "$0/dev"; mount --bind "$0/dev" /dev; exec "$@"', str(bench.directory)]  # fmt: skip
        expected = "/dev/fuse: not found; load the module"
    else:
        # Without user namespaces: their number is a setting of the user namespace, here of a new one.
        words = ["unshare", "--user", "--map-root-user", "sh", "-ec",
                 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"', "sh",
                 "setpriv", "--bounding-set=-all", "--inh-caps=-all"]  # fmt: skip
        expected = "max_user_namespaces"
    words += [str(bench.program), "run", str(bench.model), "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=bench.env, check=False)
    assert done.returncode == 1 and expected in done.stderr, done.stderr
    assert "`ckfs doctor`" in done.stderr and "`ckfs export`" in done.stderr
    bench.nothing_left()


