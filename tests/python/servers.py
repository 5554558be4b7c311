"""Servers on loopback that stand for services on the network, and repositories put on them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import datetime
import email.utils
import hashlib
import hmac
import itertools
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mounting

# Variables that say where services are, and with which rights they are read.
NAMES = ["HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CKFS_CACHE_DIR", "SERVICE_ACCOUNT"]
PREFIXES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "STORAGE_EMULATOR_")


def stub_program() -> Path:
    """The newest build, in the directory of the program's build, which may be one for its target below that of this machine."""
    above = mounting.find_ckfs().parents
    built = [path for at in above for kind in ("debug", "release") if (path := at / kind / "examples/stub").exists()]
    assert built, f"no server below {above[1]}: run `cargo build --example stub`"
    return max(built, key=lambda path: path.stat().st_mtime)


class Stub:
    """A server of `tests/stub`, running until it is closed."""

    def __init__(self, *args: object) -> None:
        self.process = subprocess.Popen(
            [stub_program(), *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:"), self.url

    def set(self, **switches: object) -> None:
        query = "&".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in switches.items())
        urllib.request.urlopen(f"{self.url}/_stub/set?{query}").read()

    def stats(self) -> dict:
        return json.load(urllib.request.urlopen(f"{self.url}/_stub/stats"))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(mounting.TIMEOUT_SECONDS)


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """An environment without services, with a cache of this test's own."""
    for name in [*NAMES, *(name for name in os.environ if name.startswith(PREFIXES))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CKFS_CACHE_DIR", str(tmp_path / "cache"))
    return monkeypatch


def free_port() -> int:
    """A port that a server may take later. The kernel gives those from 32768 on to whoever connects meanwhile, so it is below; and
    each process of the tests has its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for port in _ports:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port + 1000 * (worker % 20)))
            return free.getsockname()[1]


_ports = itertools.cycle(random.sample(range(12000, 13000), 1000))


@contextmanager
def running(command: list[object], log: Path, answers: Callable[[], bool], what: str) -> Iterator[None]:
    """A server while the block runs, from when it answers."""
    with open(log, "wb") as output:
        process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return answers()
        except OSError:
            return False

    try:
        mounting.wait_until(ready, what=what)
        yield
    finally:
        process.terminate()
        process.wait(mounting.TIMEOUT_SECONDS)


@dataclasses.dataclass
class Bucket:
    """A place for objects, `address` with the environment's settings, that this test may change."""

    address: str
    put: Callable[[str, bytes], None]
    environment: dict[str, str]
    stub: Stub | None = None

    def upload(self, directory: Path) -> None:
        for path in sorted(directory.iterdir()):
            self.put(path.name, path.read_bytes())


def request(method: str, url: str, headers: dict[str, str], body: bytes = b"") -> None:
    # Without a type of its own, urllib says that it is a form.
    headers = {"Content-Type": "application/octet-stream", **headers}
    made = urllib.request.Request(url, data=body, method=method, headers=headers)
    urllib.request.urlopen(made, timeout=30).read()


# Settings of the environment for a stub, by the scheme of its addresses.
STUB_SETTINGS = {
    "s3": lambda url: {
        "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"
    },
    "gs": lambda url: {"GOOGLE_BASE_URL": url, "GOOGLE_SKIP_SIGNATURE": "true"},
    "https": lambda url: {},
}  # fmt: skip


@contextmanager
def stub_bucket(scheme: str, root: Path) -> Iterator[Bucket]:
    place = root / "weights/some/model"
    place.mkdir(parents=True)

    def put(name: str, body: bytes) -> None:
        # Replaced as a whole, as objects are.
        (place / f".{name}").write_bytes(body)
        (place / f".{name}").rename(place / name)

    stub = Stub("store", root)
    try:
        address = f"{stub.url}/weights/some/model/" if scheme == "https" else f"{scheme}://weights/some/model"
        yield Bucket(address, put, STUB_SETTINGS[scheme](stub.url), stub)
    finally:
        stub.close()


@contextmanager
def moto_bucket(log: Path) -> Iterator[Bucket]:
    """Another implementation of S3, whose clients sign their requests."""
    pytest.importorskip("moto.server")
    url = f"http://127.0.0.1:{(port := free_port())}"
    # The signature is not checked, but who signs owns the object, and others may not replace it.
    scope = "Credential=key/20261101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    signed = {"Authorization": f"AWS4-HMAC-SHA256 {scope}"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    with running(command, log, lambda: urllib.request.urlopen(f"{url}/moto-api/", timeout=5).status == 200, "moto"):
        request("PUT", f"{url}/weights", signed)
        put = lambda name, body: request("PUT", f"{url}/weights/some/model/{name}", signed, body)  # noqa: E731
        settings = {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        yield Bucket("s3://weights/some/model", put, settings | keys)


# The account of every Azurite, as its documentation has it.
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite_program() -> Path:
    """Azurite. Where it cannot be installed, the test is skipped; in CI it fails."""
    done = subprocess.run([Path(__file__).parent / "azurite.sh"], capture_output=True, text=True, timeout=300)
    if done.returncode == 3 and os.environ.get("CI") != "true":
        pytest.skip(f"AZURE IS NOT TESTED: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def azure_put(url: str, path: str, body: bytes, query: str = "", **more: str) -> None:
    """A signed request to Azurite, as the service's "Authorize with Shared Key" has it."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2023-11-03", **more}
    kind = "application/octet-stream"
    length = str(len(body)) if body else ""
    ours = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{path}"
    resource += "".join(f"\n{name}:{value}" for name, value in sorted(urllib.parse.parse_qsl(query)))
    text = "\n".join(["PUT", "", "", length, "", kind, "", "", "", "", "", "", ours + resource])
    digest = hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    query = f"?{query}" if query else ""
    request("PUT", f"{url}/{AZURITE_ACCOUNT}/{path}{query}", headers, body)


@contextmanager
def azurite_bucket(directory: Path) -> Iterator[Bucket]:
    program = azurite_program()
    url = f"http://127.0.0.1:{(port := free_port())}"

    def answers() -> bool:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True

    directory.mkdir()
    command = [program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", directory]
    with running([*command, "--blobPort", port], directory.with_suffix(".log"), answers, "azurite"):
        azure_put(url, "weights", b"", "restype=container")
        kind = {"x-ms-blob-type": "BlockBlob"}
        put = lambda name, body: azure_put(url, f"weights/some/model/{name}", body, **kind)  # noqa: E731
        settings = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url}
        yield Bucket("az://weights/some/model", put, settings)


@contextmanager
def bucket_of(kind: str, directory: Path) -> Iterator[Bucket]:
    """A bucket of its own on a server of this kind."""
    directory.mkdir(parents=True, exist_ok=True)
    made = {
        "moto": lambda: moto_bucket(directory / "moto.log"),
        "azurite": lambda: azurite_bucket(directory / "azurite"),
    }.get(kind, lambda: stub_bucket(kind, directory / "root"))
    with made() as bucket:
        yield bucket


@contextmanager
def encrypted(url: str, certificate: Path) -> Iterator[str]:
    """The server at `url`, encrypted: its address. Nobody has signed its certificate but itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server")])
    now = datetime.datetime.now(datetime.UTC)
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
    pem = serialization.Encoding.PEM
    certificate.write_bytes(built.sign(key, hashes.SHA256()).public_bytes(pem))
    keyfile = certificate.with_suffix(".key")
    keyfile.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, keyfile)
    port = urllib.parse.urlsplit(url).port

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, to_writer), copy(to_reader, writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
