"""A daemon that is replaced under its readers: by `ckfs restart`, by its keeper, and by what systemd keeps."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import mounting
from mounting import error_of, run

# More by hand: CKFS_RESTARTS=200 CKFS_RESTART_ROUNDS=30, so that each daemon lives longer than a second.
RESTARTS = int(os.environ.get("CKFS_RESTARTS", "3"))
ROUNDS = int(os.environ.get("CKFS_RESTART_ROUNDS", "2"))
READERS = 2
RESENDS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 9)

pytestmark = pytest.mark.usefixtures("fuse")


class Place:
    """A model, a mount point, and a state directory of their own."""

    def __init__(self, directory: Path, fresh) -> None:
        self.source, self.point = fresh("llama").path, directory / "mnt"
        self.point.mkdir()
        self.env = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "CKFS_LOG": ""}
        self.expected = directory / "expected"

    def mount(self, *flags: object) -> None:
        run("mount", self.source, self.point, "--mesh", "fsdp=2", "--dtype", "bf16", *flags, env=self.env)

    def restart(self, expect: int = 0) -> str:
        return run("restart", self.point, expect=expect, env=self.env).err

    def pid(self) -> int:
        return json.loads((self.point / ".ckfs/stats.json").read_text())["pid"]

    def copy(self) -> None:
        """What readers must find: made without the mount."""
        if not self.expected.exists():
            run("export", self.source, self.expected, "--mesh", "fsdp=2", "--dtype", "bf16")
        for made in [*self.expected.iterdir()]:
            if made.name not in {"dev0", "dev1", "safetensors", "hf"}:
                subprocess.run(["rm", "-rf", made], check=True)

    @contextlib.contextmanager
    def readers(self):
        """Processes that read all the time. Yields what waits until each of them has gone on."""
        self.copy()
        # The copy holds parts of the mount only.
        script = Path(__file__).with_name("restart_process.py")
        names = [name for name in ("dev0", "dev1", "safetensors", "hf") if (self.expected / name).is_dir()]
        words = [[sys.executable, script, self.point / name, self.expected / name] for name in names for _ in range(READERS)]
        started = [subprocess.Popen(word, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) for word in words]

        def go_on() -> None:
            for reader in started:
                # Rounds of before this moment do not count, nor the one that it is in.
                while select.select([reader.stdout], [], [], 0)[0] and os.read(reader.stdout.fileno(), 1 << 16):
                    pass
                rounds = 0
                while rounds <= ROUNDS:
                    lines = os.read(reader.stdout.fileno(), 1 << 16)
                    assert lines, "a reader has found something wrong"
                    rounds += lines.count(b"\n")

        try:
            go_on()
            yield go_on
            for reader in started:
                reader.stdin.close()
                counts = json.loads(reader.stdout.read().splitlines()[-1])
                assert set(counts) == {"open before", "mapped before", "opened anew", "mapped anew", "O_DIRECT", "size", "listing"}
                print(counts)
                assert reader.wait(mounting.TIMEOUT_SECONDS) == 0
        finally:
            for reader in started:
                reader.kill()
                reader.wait()


@pytest.fixture
def place(tmp_path, fresh):
    place = Place(tmp_path, fresh)
    yield place
    mounting.detach(place.point)


def test_readers_notice_no_restart(place):
    place.mount()
    with place.readers() as go_on:
        for _ in range(RESTARTS):
            before = place.pid()
            assert "replaced under its readers" in place.restart()
            assert place.pid() != before
            mounting.wait_until(lambda: not Path(f"/proc/{before}/root").exists(), what="the end of the old daemon")
            go_on()
    run("umount", place.point)
    mounting.wait_until(lambda: not list((place.point.parent / "state/ckfs/daemon").iterdir()), what="the end of the last daemon")


@pytest.mark.skipif(not RESENDS, reason="the kernel sends no request again")
def test_readers_wait_for_the_daemon_after_one_that_was_killed(place):
    place.mount("--keeper")
    with place.readers() as go_on:
        for _ in range(RESTARTS):
            before = place.pid()
            os.kill(before, signal.SIGKILL)
            assert place.pid() != before
            go_on()
        # The next program, which a person starts, has a keeper too.
        assert "replaced under its readers" in place.restart()
        os.kill(place.pid(), signal.SIGKILL)
        go_on()
    mounting.wait_until(lambda: len(keepers_of(place)) == 1, what="one keeper")
    run("umount", place.point)
    mounting.wait_until(lambda: not keepers_of(place), what="the end of the keeper")


def keepers_of(place: Place) -> list[str]:
    found = subprocess.run(["pgrep", "-f", f"{place.point.parent}/state.* --keep$"], capture_output=True, text=True, check=False)
    return found.stdout.split()


def test_what_changed_is_refused_while_it_is_read_and_the_daemon_goes_on(place):
    place.mount()
    before = place.pid()
    config = place.source / "config.json"
    with open(place.point / "dev1/embed", "rb", buffering=0) as file:
        first = file.read(10)
        config.write_text(config.read_text() + "\n")
        said = place.restart(expect=1)
        assert "no longer what a mount would show now" in said and "it is left as it is" in said, said
        assert place.pid() == before
        assert first + file.read() == (place.point / "dev1/embed").read_bytes()
    assert "mounted anew" in place.restart()
    assert place.pid() != before


def test_a_run_is_refused_by_name(place, tmp_path):
    steps = tmp_path / "run"
    steps.mkdir()
    place.source.rename(steps / "checkpoint-100")
    (steps / "checkpoint-100/trainer_state.json").write_text("{}")
    run("mount", steps, place.point, "--steps", "all", env=place.env)
    with open(place.point / "100/full/embed", "rb"):
        assert "the steps of a run come and go" in place.restart(expect=1)
    assert "the steps of a run" not in place.restart()
    run("umount", place.point)
    refused = run("mount", steps, place.point, "--steps", "all", "--keeper", expect=1, env=place.env).err
    assert "--keeper: for a mount of one checkpoint" in refused


def test_a_generated_file_is_never_continued_by_another_content(place):
    place.mount()
    begun, unread = (os.open(place.point / ".ckfs/stats.json", os.O_RDONLY) for _ in range(2))
    before = os.pread(begun, 100, 0)
    assert place.pid() == json.loads(os.pread(unread, 1 << 20, 0))["pid"]
    place.restart()
    for file in (begun, unread):
        assert error_of(os.pread, file, 100, 100) == errno.EIO
        assert json.loads(os.pread(file, 1 << 20, 0))["pid"] == place.pid()
        assert os.pread(file, 1 << 20, 1 << 19) == b""
        os.close(file)
    assert before.startswith(b"{")


class Systemd:
    """What systemd does for a service with FileDescriptorStoreMax=: keeps descriptors, and passes them to the next process."""

    def __init__(self, place: Place, directory: Path) -> None:
        self.place, self.kept, self.said = place, [], b""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(directory / "notify"))
        self.env = {**place.env, "NOTIFY_SOCKET": str(directory / "notify")}

    def start(self, *flags: object) -> subprocess.Popen:
        words = [mounting.find_ckfs(), "mount", self.place.source, self.place.point, "--foreground", "--mesh", "fsdp=2", "--dtype", "bf16"]
        # The numbers after the standard streams, and the process's own number: by a shell, which then is the program.
        moves = " ".join(f"{3 + at}<&{file} {file}<&-" for at, file in enumerate(self.kept))
        names = ":".join(["ckfs"] * len(self.kept))
        count = f"LISTEN_PID=$$ LISTEN_FDS={len(self.kept)} LISTEN_FDNAMES={names} " if self.kept else ""
        script = f'exec {moves}; export {count or "CKFS_LOG="}; exec "$@"'
        self.said = b""
        daemon = subprocess.Popen(["bash", "-c", script, "bash", *map(str, [*words, *flags])], env=self.env, pass_fds=self.kept)
        self.wait_for(b"READY=1")
        return daemon

    def wait_for(self, word: bytes) -> None:
        """Until the daemon has said a word: two of its threads speak, in any order."""
        self.socket.settimeout(mounting.TIMEOUT_SECONDS)
        while word not in self.said:
            text, found, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(64))
            self.said += text
            for _, _, data in found:
                self.keep(array.array("i", data[: len(data) // 4 * 4]).tolist())
            if b"FDSTOREREMOVE=1" in text:
                self.drop()

    def keep(self, files: list[int]) -> None:
        """Numbers that the shell does not use, and no file twice."""
        for file in files:
            if os.fstat(file).st_ino not in {os.fstat(kept).st_ino for kept in self.kept}:
                self.kept.append(os.dup2(file, 200 + len(self.kept)))
            os.close(file)

    def drop(self) -> None:
        while self.kept:
            os.close(self.kept.pop())


@pytest.mark.skipif(not RESENDS, reason="the kernel sends no request again")
def test_a_service_goes_on_after_a_kill_and_after_a_restart(place, tmp_path):
    systemd = Systemd(place, tmp_path)
    daemon = systemd.start()
    systemd.wait_for(b"FDSTORE=1")
    assert len(systemd.kept) == 2
    try:
        with place.readers() as go_on:
            for end in [signal.SIGKILL, signal.SIGUSR2] * RESTARTS:
                before = place.pid()
                daemon.send_signal(end)
                daemon.wait(mounting.TIMEOUT_SECONDS)
                daemon = systemd.start()
                assert place.pid() not in {before, None}
                go_on()
        # What has changed since is mounted anew, and says so.
        with open(place.point / "dev0/embed", "rb", buffering=0) as file:
            daemon.kill()
            daemon.wait(mounting.TIMEOUT_SECONDS)
            config = place.source / "config.json"
            config.write_text(config.read_text() + "\n")
            daemon = systemd.start()
            systemd.wait_for(b"FDSTORE=1")
            assert error_of(os.fstatvfs, file.fileno()) in {errno.ENOTCONN, errno.ECONNABORTED}
        assert (place.point / "hf/config.json").read_text() == config.read_text()
        daemon.send_signal(signal.SIGTERM)
        systemd.wait_for(b"FDSTOREREMOVE=1")
        assert daemon.wait(mounting.TIMEOUT_SECONDS) == 0
        assert mounting.mount_type(place.point) is None
    finally:
        daemon.kill()
        daemon.wait()
        systemd.drop()
