"""Starts `ckfs serve` as a user would, and says where it answers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import forked
import mounting

READY = re.compile(r"ckfs: serving (.*) at http://(\S+)/files/; (.*)")


class Server:
    """A server of this test's own, until it is stopped."""

    def __init__(self, *args: object, home: Path, **env: str) -> None:
        command = [str(mounting.find_ckfs()), "serve", *map(str, args)]
        if not any(str(arg).startswith("--listen") for arg in args) and "--config" not in args:
            command += ["--listen", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"HOME": str(home)} | env,
        )  # fmt: skip
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := READY.search(line):
                break
        else:
            raise AssertionError(f"{command}: exit {self.process.wait()}\n{''.join(self.log)}")
        self.label, self.address, self.told = found.groups()
        self.url = f"http://{self.address}"
        self.host, port = self.address.rsplit(":", 1)
        self.port = int(port)
        # The log must not fill the pipe.
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def request(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """One request; underscores in names of headers are dashes."""
        connection = http.client.HTTPConnection(self.host.strip("[]"), self.port, timeout=60)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            reply = connection.getresponse()
            return reply, reply.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> bytes:
        reply, body = self.request(path, **headers)
        if reply.status == 307:
            reply, body = self.request(reply.headers["Location"].removeprefix(self.url), **headers)
        assert reply.status in (200, 206), (path, reply.status, body)
        return body

    def json(self, path: str) -> object:
        return json.loads(self.get(path, Accept="application/json"))

    def stop(self, expect: int = 0) -> str:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(10)
        assert code == expect, f"exit {code}\n{''.join(self.log)}"
        return "".join(self.log)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.process.kill()
            self.process.wait()
            sys.stderr.write("".join(self.log))


def run_client(script: str, home: Path, **env: str) -> str:
    """Runs Python in a process of its own: clients of the Hub read their environment once. Returns what it prints."""
    clean, script = clean_environment(home, env), textwrap.dedent(script)
    if "transformers" not in script:
        return _run("-c", script, clean=clean)
    # Nothing that is imported before it knows of the Hub.
    gone = {name: None for name in os.environ if name not in clean}
    return forked.start(("torch", *forked.COMPILER, "scipy.optimize"), "-c", script, ranks=[gone | clean]).wait()[0]


def run_script(*args: object, home: Path, **env: str) -> str:
    """The same, with arguments of Python."""
    return _run(*args, clean=clean_environment(home, env))


def clean_environment(home: Path, env: dict[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "AWS_", "CKFS_CACHE"))}
    fixed = {"HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return clean | fixed | env


def _run(*args: object, clean: dict[str, str]) -> str:
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=mounting.TIMEOUT_SECONDS, env=clean)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
