"""In a guest of `boot.sh` that systemd has booted: a mount is handed over, and killed, under readers that compare every byte.

Linux sends unanswered requests again since 6.9. Before, a killed daemon's readers may end with an error that the guide names, and what is
opened later is read as ever; a daemon that is replaced in order is noticed by no reader on any kernel.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

TIMES = int(os.environ.get("TIMES", "20"))
SECONDS = 300
SOURCE, POINT, EXPECTED = Path("/var/model"), Path("/mnt/small"), Path("/var/expected")
FLAGS = ("--mesh", "fsdp=2", "--dtype", "bf16")
RESENDS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 9)
# Of a read, an open, and a mapped page.
STATED = ("ConnectionAbortedError", "Transport endpoint is not connected", "FileNotFoundError", f"ended by {-signal.SIGBUS}")


def say(text: str) -> None:
    print(f"boot: {time.monotonic():.0f} s: {text}", flush=True)


def run(*words: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words}: {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return done.stdout + done.stderr


def of(name: str) -> str:
    return run("systemctl", "show", "--value", "-p", name, "ckfs@small").strip()


def pid() -> int:
    return json.loads((POINT / ".ckfs/stats.json").read_text())["pid"]


def wait(true, what: str) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            if true():
                return
        except OSError:
            # Between two daemons.
            pass
        if time.monotonic() > end:
            raise SystemExit(f"not in time: {what}")
        time.sleep(0.05)


class Readers:
    """Of several directories, all the time."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("restart_process.py")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
        self.all = [subprocess.Popen([sys.executable, script, POINT / name, EXPECTED / name], **pipes) for name in ("dev0", "dev1", "hf")]
        self.go_on()

    def go_on(self) -> None:
        """Waits until each has read for some rounds from now on."""
        for reader in self.all:
            while select.select([reader.stdout], [], [], 0)[0] and os.read(reader.stdout.fileno(), 1 << 16):
                pass
            rounds = 0
            while rounds <= 2:
                if not select.select([reader.stdout], [], [], SECONDS)[0]:
                    raise SystemExit("a reader hangs")
                lines = os.read(reader.stdout.fileno(), 1 << 16)
                if not lines:
                    raise ReaderEnded(f"{reader.stderr.read().decode()[-400:]} ended by {reader.wait()}")
                rounds += lines.count(b"\n")

    def end(self) -> int:
        checks = 0
        for reader in self.all:
            reader.stdin.close()
            checks += sum(json.loads(reader.stdout.read().splitlines()[-1]).values())
            reader.wait()
        return checks

    def kill(self) -> None:
        for reader in self.all:
            reader.kill()
            reader.wait()


class ReaderEnded(Exception):
    """A reader has ended: by an error, or as it found something wrong."""


def again(what: str, act, may_fail: bool = False) -> None:
    readers, errors = Readers(), Counter()
    for _ in range(TIMES):
        act()
        try:
            readers.go_on()
        except ReaderEnded as error:
            found = [stated for stated in STATED if stated in str(error)]
            if not may_fail or not found:
                raise SystemExit(f"{what}: {error}") from None
            errors[found[0]] += 1
            readers.kill()
            readers = Readers()
    say(f"{what}, {TIMES} times: {readers.end()} checks; readers with errors: {dict(errors) or 'none'}")


def service_restarted() -> None:
    before = of("MainPID")
    run("systemctl", "restart", "ckfs@small")
    assert of("MainPID") != before and of("ActiveState") == "active"


def service_killed() -> None:
    before = of("MainPID")
    os.kill(int(before), signal.SIGKILL)
    wait(lambda: of("MainPID") not in {before, "0"} and of("ActiveState") == "active", "the next daemon")


def replaced() -> None:
    before = pid()
    assert "replaced under its readers" in run("ckfs", "restart", POINT)
    assert pid() != before


def main() -> None:
    say(f"Linux {platform.release()}, {run('systemctl', '--version').splitlines()[0]}, {run('ckfs', '--version').splitlines()[0]}")
    # Files that an image of a disk brings have times of whole seconds, which tell no change.
    run("cp", "-r", "/opt/model", SOURCE)
    run("ckfs", "export", SOURCE, EXPECTED, *FLAGS)
    POINT.mkdir(parents=True, exist_ok=True)
    Path("/etc/ckfs/small.toml").write_text(f'source = "{SOURCE}"\nmountpoint = "{POINT}"\nmesh = "fsdp=2"\ndtype = "bf16"\n')
    run("systemctl", "start", "ckfs@small")
    wait(lambda: of("NFileDescriptorStore") == "2", "what systemd keeps")
    again("systemctl restart", service_restarted)
    again("kill -9 of a service", service_killed, may_fail=not RESENDS)
    run("systemctl", "stop", "ckfs@small")
    assert of("NFileDescriptorStore") == "0" and f" {POINT} " not in Path("/proc/mounts").read_text()
    run("ckfs", "mount", SOURCE, POINT, *FLAGS)
    again("ckfs restart", replaced)
    run("ckfs", "umount", POINT)
    wait(lambda: subprocess.run(["pgrep", "-x", "ckfs"], capture_output=True).returncode, "the end of all daemons")
    say("PASSED")


try:
    main()
except BaseException as error:  # noqa: BLE001
    say(f"FAILED: {error!r}")
    print(subprocess.run(["journalctl", "--no-pager", "-n", "40", "-u", "ckfs@small"], capture_output=True, text=True).stdout, flush=True)
finally:
    subprocess.run(["systemctl", "--no-block", "poweroff"])
