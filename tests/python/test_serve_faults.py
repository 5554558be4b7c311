"""`ckfs serve` when something is wrong: sources that change in mid-answer, clients that do not read, floods. What it holds is bounded,
and a client never takes a part for the whole."""

from __future__ import annotations

import http.client
import re
import resource
import socket
import time
from pathlib import Path

import pytest

import repos
from serving import Server
from test_serve import home  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def own_wide(base: Path) -> repos.Repo:
    return repos.wide(base / "repos/wide-serve")


def resident_bytes(server: Server) -> int:
    """Memory of the process that is no file's."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) << 10


def begun(server: Server, path: str, window: int = 64 << 10) -> socket.socket:
    """A client that has asked for a file and takes nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    client.settimeout(60)
    client.connect((server.host, server.port))
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return client


def largest(source: Path) -> Path:
    return max(source.glob("*.safetensors"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("flags", [(), ("--dtype", "f32")], ids=["untouched", "cast"])
def test_a_source_that_changes_in_mid_answer_ends_the_connection(own_wide: repos.Repo, tmp_path: Path, home: Path, flags) -> None:  # noqa: F811
    source = tmp_path / "source"
    source.mkdir()
    for file in own_wide.path.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    with Server(source, *flags, home=home) as server:
        file = largest(source)
        path = f"/files/hf/{file.name}"
        whole = server.get(path)
        assert len(whole) > 4 << 20
        with begun(server, path) as client:
            received = client.recv(1000)
            file.write_bytes(b"\0" * file.stat().st_size)
            try:
                while part := client.recv(1 << 20):
                    received += part
            except ConnectionResetError:
                pass
        head, _, body = received.partition(b"\r\n\r\n")
        promised = int(re.search(rb"content-length: (\d+)", head)[1])
        assert promised == len(whole)
        # Fewer bytes than promised, and none of the changed file.
        assert len(body) < promised
        assert whole.startswith(body)
        # A client that counts sees it.
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        connection.request("GET", path)
        assert connection.getresponse().status == 500
        connection.close()
        assert server.request("/readyz")[0].status == 503


def test_clients_that_do_not_read_hold_little_memory(own_wide: repos.Repo, home: Path) -> None:  # noqa: F811
    with Server(own_wide.path, "--cache-bytes", "64M", home=home) as server:
        path = f"/files/hf/{largest(own_wide.path).name}"
        server.get(path)
        before = resident_bytes(server)
        clients = [begun(server, path, 4096) for _ in range(200)]
        for client in clients:
            client.recv(100)
        time.sleep(2)
        held = resident_bytes(server) - before
        # A chunk or two each, not a file: those of 200 files would be gigabytes.
        assert held < 350 << 20, f"{held >> 20} MiB"
        # Others are served meanwhile.
        assert server.get("/files/hf/config.json")
        for client in clients:
            client.close()


def test_ten_thousand_idle_connections(own_wide: repos.Repo, home: Path) -> None:  # noqa: F811
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 11_000:
        pytest.skip(f"a process may have {hard} open files")
    with Server(own_wide.path, home=home) as server:
        server.get("/healthz")
        before = resident_bytes(server)
        resource.setrlimit(resource.RLIMIT_NOFILE, (11_000, hard))
        clients = []
        try:
            for _ in range(10_000):
                clients.append(socket.create_connection((server.host, server.port), timeout=60))
            assert server.get("/healthz") == b"alive\n"
            files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
            assert files < 6000, files
            assert resident_bytes(server) - before < 200 << 20
            # The oldest made room.
            clients[0].settimeout(30)
            assert clients[0].recv(1) == b""
        finally:
            for client in clients:
                client.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def answer_to(server: Server, sent: bytes) -> bytes:
    with socket.create_connection((server.host, server.port), timeout=90) as client:
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        received = b""
        try:
            while part := client.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
        return received


def test_floods_of_headers_and_nonsense_are_refused(own_wide: repos.Repo, home: Path) -> None:  # noqa: F811
    with Server(own_wide.path, home=home) as server:
        before = resident_bytes(server)
        get = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
        for sent, status in [
            (get + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n", b"431"),
            (get + b"".join(b"X-%d: a\r\n" % n for n in range(200)) + b"\r\n", b"431"),
            (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n", b"4"),
            (b"\x16\x03\x01\x02\x00" * 100 + b"\r\n\r\n", b"400"),
            (b"GET /healthz HTTP/9.9\r\n\r\n", b"400"),
            (b"nonsense\r\n\r\n", b"400"),
        ]:
            received = answer_to(server, sent)
            # A client that goes on sending may lose the answer.
            assert received == b"" or received.startswith(b"HTTP/1.1 " + status), (sent[:40], received[:100])
        # Endless headers: the connection ends.
        with socket.create_connection((server.host, server.port), timeout=60) as client, pytest.raises(OSError):
            for _ in range(100_000):
                client.sendall(b"X: " + b"a" * 1000 + b"\r\n")
        assert resident_bytes(server) - before < 64 << 20
        assert server.get("/healthz") == b"alive\n"


def test_a_body_that_names_paths_is_bounded(own_wide: repos.Repo, home: Path) -> None:  # noqa: F811
    with Server(own_wide.path, home=home) as server:
        path = server.json("/api/models")[0]["id"]
        address = f"/api/models/{path}/paths-info/main"
        assert server.request(address, "POST", b"paths=config.json")[0].status == 200
        for body in (b"paths=" + b"a" * (2 << 20), b"x", b"paths=a&" * 1001, b"{", b'{"paths": [1]}'):
            assert server.request(address, "POST", body)[0].status == 400
        assert server.request(address)[0].status == 405
