"""Services that misbehave: redirects to other hosts, limits, silence, listings without end, keys that name no file.

Each is a small server in this process, and the program is mostly `ckfs plan`: hardly anything is mounted.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mounting import TIMEOUT_SECONDS, find_ckfs

MODIFIED = "Wed, 01 Jan 2025 00:00:00 GMT"
Handler = Callable[["Call"], None]


class Call(http.server.BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    # A reply is one packet: the kernel would hold the second for 40 ms.
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.answer(self)  # type: ignore[attr-defined]

    do_HEAD = do_GET


class Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that gave up is no error."""


@contextmanager
def serving(answer: Handler) -> Iterator[str]:
    server = Quiet(("127.0.0.1", 0), Call)
    server.answer = answer  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def write_model(directory: Path, files: int = 1) -> None:
    directory.mkdir(parents=True)
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    for number, name in enumerate(names):
        save_file({f"model.layers.{number}.w.weight": np.ones((4, 4), np.float32)}, directory / name)
    weight_map = {f"model.layers.{number}.w.weight": name for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "x"}')


def row(key: str, size: int) -> str:
    return (
        f"<Contents><Key>{key}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"{size}"</ETag><Size>{size}</Size></Contents>'
    )


def blob(key: str, size: int) -> str:
    return (
        f"<Blob><Name>{key}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified><Etag>{size}</Etag>"
        f"<Content-Length>{size}</Content-Length><Content-Type>a/b</Content-Type></Properties></Blob>"
    )


def bucket(root: Path, more: list[tuple[str, int]] = []) -> Handler:  # noqa: B006  never changed
    """The bucket `b`, as S3, Google and Azure show it. `more` are keys with sizes that only the listing has."""

    def answer(call: Call) -> None:
        url = urllib.parse.urlsplit(call.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        key = re.sub("^/(account/)?b(/|$)", "", urllib.parse.unquote(url.path))
        if "list-type" in query or "comp" in query:
            files = [path for path in root.rglob("*") if path.is_file()]
            keys = sorted([(str(path.relative_to(root)), path.stat().st_size) for path in files] + more)
            keys = [row for row in keys if row[0].startswith(query.get("prefix", ""))]
            if "comp" in query:
                text = "".join(blob(*row) for row in keys)
                text = f"<EnumerationResults><Blobs>{text}</Blobs><NextMarker/></EnumerationResults>"
            else:
                text = "".join(row(*one) for one in keys)
                text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{text}</ListBucketResult>"
            return call.reply(200, text.encode(), Content_Type="application/xml")
        path = root / key
        if not path.is_file():
            return call.reply(404)
        body = path.read_bytes()
        about = {"ETag": f'"{len(body)}"', "Last_Modified": MODIFIED}
        asked = call.headers.get("Range") or call.headers.get("x-ms-range")
        if asked and call.command == "GET":
            low, high = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            part = body[low : high + 1]
            return call.reply(206, part, Content_Range=f"bytes {low}-{low + len(part) - 1}/{len(body)}", **about)
        return call.reply(200, body, Content_Length=str(len(body)), **about)

    return answer


def settings(kind: str, url: str, place: Path) -> tuple[str, dict[str, str]]:
    """The address of the model at a service of this kind, and the environment with its credentials."""
    if kind == "s3":
        keys = {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "sekrit", "AWS_SESSION_TOKEN": "sekrit-token"}
        return "s3://b/m", keys | {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}
    if kind == "gs":
        account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        (place / "account.json").write_text(json.dumps(account))
        return "gs://b/m", {"GOOGLE_SERVICE_ACCOUNT": str(place / "account.json")}
    if kind == "az":
        names = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "c2Vrcml0"}
        return "az://b/m", names | {"AZURE_STORAGE_ENDPOINT": url}
    if kind == "hub":
        return "b/m", {"HF_ENDPOINT": url, "HF_TOKEN": "hf_sekrit", "HF_HUB_OFFLINE": "0"}
    return f"{url}/b/m/", {}


class Run:
    """`ckfs plan` with what it said."""

    def __init__(self, place: Path, source: str, environment: dict[str, str], *flags: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "HF_", "GOOGLE_", "AZURE_"))}
        own = {"HOME": str(place), "XDG_CACHE_HOME": str(place / f"cache-{time.monotonic_ns()}")}
        command = [str(find_ckfs()), "plan", source, *flags]
        done = subprocess.run(command, env=kept | own | environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr.strip()


KINDS = ["s3", "gs", "az", "https", "hub"]


@pytest.mark.parametrize("kind", KINDS)
def test_credentials_stay_with_their_host(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "root/m")
    seen: list[str] = []
    serve = bucket(tmp_path / "root")

    def other(call: Call) -> None:
        seen.append(str(call.headers))
        serve(call)

    with serving(other) as target:
        elsewhere = target.replace("127.0.0.1", "localhost")
        with serving(lambda call: call.reply(307, Location=elsewhere + call.path)) as url:
            source, environment = settings(kind, url, tmp_path)
            run = Run(tmp_path, source, environment, "--source-timeout", "30s")
    if kind == "hub":
        # Its API answers at the Hub only.
        assert run.code == 1 and "not the Hub" in run.err and not seen, run.err
        return
    assert run.code == 0, run.err
    allowed = {"accept", "host", "if-match", "range", "user-agent", "x-ms-range"}
    names = {line.split(":")[0].lower() for headers in seen for line in headers.splitlines() if line}
    assert seen and names <= allowed - {"x-ms-range"}, names
    assert not any("sekrit" in headers or "KEY" in headers for headers in seen)


@pytest.mark.parametrize("target", ["http://192.0.2.1:9", "http://example.invalid"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_redirect_leads_to_the_clear(tmp_path: Path, kind: str, target: str) -> None:
    with serving(lambda call: call.reply(302, Location=target + call.path)) as url:
        source, environment = settings(kind, url, tmp_path)
        # Nothing is asked again, which would take longer than this test may.
        run = Run(tmp_path, source, environment, "--source-timeout", "1h", "--allow-http")
    assert run.code == 1 and "not encrypted" in run.err, run.err


@pytest.mark.parametrize("name", ["m", "sp ace", "a b~c*d+e"])
def test_queries_are_sent_as_they_are_signed(tmp_path: Path, name: str) -> None:
    """A server that compares the query as it was sent, which the canonical form of a signature is made of."""
    write_model(tmp_path / "root" / name)
    serve = bucket(tmp_path / "root")

    def strict(call: Call) -> None:
        query = urllib.parse.urlsplit(call.path).query
        words = [word for pair in query.split("&") for word in pair.split("=", 1)]
        exact = all(word == urllib.parse.quote(urllib.parse.unquote(word), safe="-._~") for word in words)
        serve(call) if exact else call.reply(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")

    with serving(strict) as url:
        _, environment = settings("s3", url, tmp_path)
        run = Run(tmp_path, f"s3://b/{name}", environment)
    assert run.code == 0, run.err


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_keys_that_name_no_file_are_passed_over(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "root/m")
    markers = [("m/", 0), ("m/original/", 0), ("m/tokenizer_$folder$", 0)]
    odd = [("m/x//y", 5), ("m/../z", 5), ("m/" + "d/" * 400 + "f", 3)]
    with serving(bucket(tmp_path / "root", markers)) as url:
        source, environment = settings(kind, url, tmp_path)
        run = Run(tmp_path, source, environment)
        assert run.code == 0 and run.err == "", run.err
    with serving(bucket(tmp_path / "root", markers + odd)) as url:
        source, environment = settings(kind, url, tmp_path)
        run = Run(tmp_path, source, environment)
    assert run.code == 0 and "passed over" in run.err and "m/x//y" in run.err and len(run.err.splitlines()) == 1, run.err


@pytest.mark.parametrize("status", [503, None])
@pytest.mark.parametrize("kind", ["s3", "https", "hub"])
def test_a_command_ends_in_time_and_says_what_it_waits_for(tmp_path: Path, kind: str, status: int | None) -> None:
    ended = threading.Event()
    answer = (lambda call: call.reply(status)) if status else (lambda _: ended.wait())
    with serving(answer) as url:
        source, environment = settings(kind, url, tmp_path)
        try:
            run = Run(tmp_path, source, environment, "--source-timeout", "3s")
        finally:
            ended.set()
    assert run.code == 1, run.err
    line, *more = run.err.splitlines()
    assert "waiting until" in line and "127.0.0.1" in line and "--source-timeout 3 s" in line, run.err
    assert "--source-timeout" in "\n".join(more)


@pytest.mark.parametrize("kind", ["s3", "https"])
def test_a_service_with_a_limit_is_asked_less_and_no_reply_is_asked_for_twice(tmp_path: Path, kind: str) -> None:
    """Twenty requests a second for forty files: a listing of many HEADs is not begun anew when one is refused."""
    write_model(tmp_path / "root/m", files=40)
    serve, lock = bucket(tmp_path / "root"), threading.Lock()
    good: list[tuple[float, str]] = []
    refused = [0]

    def limited(call: Call) -> None:
        with lock:
            now = time.monotonic()
            allowed = sum(now - at < 1 for at, _ in good) < 20
            if allowed:
                good.append((now, f"{call.command} {call.path}"))
            else:
                refused[0] += 1
        serve(call) if allowed else call.reply(429)

    with serving(limited) as url:
        source, environment = settings(kind, url, tmp_path)
        run = Run(tmp_path, source, environment, "--source-timeout", "5m")
    assert run.code == 0, run.err
    heads = [what for _, what in good if what.startswith("HEAD")]
    assert len(heads) == len(set(heads)), "a HEAD was repeated"
    assert refused[0] < 4 * len(good), (refused, len(good))


@pytest.mark.parametrize("mode", ["empty", "same objects", "same page", "new objects"])
def test_a_listing_without_end_is_refused(tmp_path: Path, mode: str) -> None:
    count = [0]

    def endless(call: Call) -> None:
        count[0] += 1
        rows = {"same objects": row("m/a", 1), "new objects": row(f"m/{count[0]}", 1)}.get(mode, "")
        token = "x" if mode == "same page" else f"t{count[0]}"
        text = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>{rows}"
        call.reply(200, f"<ListBucketResult>{text}</ListBucketResult>".encode(), Content_Type="application/xml")

    with serving(endless) as url:
        source, environment = settings("s3", url, tmp_path)
        run = Run(tmp_path, source, environment, "--source-timeout", "5m")
    assert run.code == 1 and count[0] < 300, (count, run.err)
    assert re.search("without end|twice|again and again", run.err), run.err


@pytest.mark.parametrize("scheme, variable", [("s3", "AWS_ACCESS_KEY_ID"), ("gs", "GOOGLE_APPLICATION_CREDENTIALS")])
def test_without_credentials_it_is_said_where_they_were_looked_for(tmp_path: Path, scheme: str, variable: str) -> None:
    with serving(lambda call: call.reply(404)) as url:
        host = url.removeprefix("http://")
        environment = {"AWS_METADATA_ENDPOINT": url, "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host}
        run = Run(tmp_path, f"{scheme}://b/m", environment, "--source-timeout", "5m")
    assert run.code == 1 and "no credentials: looked for" in run.err and variable in run.err, run.err


def test_systemd_is_told_what_a_start_waits_for(tmp_path: Path, fuse: None) -> None:
    """A service that is silent at first: the unit says so, and its time limit is extended for as long as the wait may take."""
    write_model(tmp_path / "root/m")
    serve, limit, awake = bucket(tmp_path / "root"), 600, threading.Event()

    def answer(call: Call) -> None:
        awake.wait()
        serve(call)

    point = tmp_path / "mnt"
    point.mkdir()
    # The path of a socket must be short.
    said = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with tempfile.TemporaryDirectory() as place, serving(answer) as url, said:
        said.bind(f"{place}/notify")
        said.settimeout(TIMEOUT_SECONDS)
        source, environment = settings("https", url, tmp_path)
        environment |= {"NOTIFY_SOCKET": f"{place}/notify", "HOME": place, "XDG_CACHE_HOME": f"{place}/cache"}
        command = [str(find_ckfs()), "mount", "--foreground", source, str(point), "--source-timeout", f"{limit}s"]
        begun = time.monotonic()
        run = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
        try:
            messages: list[dict[str, str]] = []
            # What is left of the limit when a message comes, or more: the wait begins later than this test.
            left = {}
            while not messages or "READY" not in messages[-1]:
                lines = said.recv(4096).decode().splitlines()
                left[len(messages)] = limit - (time.monotonic() - begun)
                messages.append(dict(line.split("=", 1) for line in lines))
                if len(messages) > 3:
                    awake.set()
        finally:
            awake.set()
            run.terminate()
            errors = run.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert run.returncode == 0 and "waiting until" in errors, errors
    assert messages[0] == {"STATUS": "reading headers"}
    assert messages[-1] == {"READY": "1", "STATUS": f"serving {source.rstrip('/')} on {point}"}
    waits = {number: message for number, message in enumerate(messages) if "EXTEND_TIMEOUT_USEC" in message}
    assert len(waits) > 2, messages
    for message in waits.values():
        assert "127.0.0.1" in message["STATUS"] and f"--source-timeout {limit} s" in message["STATUS"], message
    # What is left of the limit, and half a minute for what comes after.
    seconds = {number: int(message["EXTEND_TIMEOUT_USEC"]) / 1e6 - 30 for number, message in waits.items()}
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True), seconds
    assert all(left[number] - 1 < found < limit for number, found in seconds.items()), (seconds, left)


@contextmanager
def told(place: Path, command: list[str], environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen, Callable[[float], dict[str, str] | None]]]:
    """A command that tells systemd what it does, and a function that gives its next message, or None after some seconds."""
    # The path of a socket must be short.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as said, tempfile.TemporaryDirectory() as short:
        said.bind(f"{short}/notify")
        environment = os.environ | environment | {"NOTIFY_SOCKET": f"{short}/notify", "HOME": str(place), "XDG_CACHE_HOME": f"{place}/cache"}
        run = subprocess.Popen([str(find_ckfs()), *command], env=environment, stderr=subprocess.PIPE, text=True)

        def message(seconds: float) -> dict[str, str] | None:
            """The next one but that of descriptors, which a mount gives to systemd to keep."""
            said.settimeout(seconds)
            while True:
                try:
                    found = dict(line.split("=", 1) for line in said.recv(4096).decode().splitlines())
                except TimeoutError:
                    return None
                if "FDSTORE" not in found:
                    return found

        try:
            yield run, message
        finally:
            run.terminate()
            errors = run.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert run.returncode == 0, errors


@pytest.mark.parametrize("command", ["mount", "serve"])
def test_systemd_gets_signs_of_life_also_while_storage_hangs(tmp_path: Path, fuse: None, command: str) -> None:
    """Each within the time of the watchdog, and none where no watchdog waits, or another process is watched."""
    (tmp_path / "root/m").mkdir(parents=True)
    save_file({"model.layers.0.w.weight": np.ones((1024, 1024), np.float32)}, tmp_path / "root/m/model.safetensors")
    (tmp_path / "root/m/config.json").write_text('{"model_type": "x"}')
    point = tmp_path / "mnt"
    point.mkdir()
    serve, hangs, asked = bucket(tmp_path / "root"), threading.Event(), threading.Event()
    awake = threading.Event()

    def answer(call: Call) -> None:
        if hangs.is_set():
            asked.set()
            awake.wait(TIMEOUT_SECONDS)
        serve(call)

    limit = 2.0
    with serving(answer) as url:
        source, environment = settings("https", url, tmp_path)
        flags = {"mount": ["--foreground", source, str(point), "--prefetch", "off"], "serve": [source, "--listen", "0", "--prefetch", "off"]}
        for watched in ({}, {"WATCHDOG_USEC": f"{limit * 1e6:.0f}", "WATCHDOG_PID": "1"}):
            with told(tmp_path, [command, *flags[command]], environment | watched) as (_, message):
                while "READY" not in message(TIMEOUT_SECONDS):
                    pass
                assert message(1.5 * limit) is None, watched
        begun = time.monotonic()
        with told(tmp_path, [command, *flags[command]], environment | {"WATCHDOG_USEC": f"{limit * 1e6:.0f}"}) as (run, message):
            status = {}
            while "READY" not in status:
                status = message(TIMEOUT_SECONDS)
            times = []
            hangs.set()
            address = re.search(r"at (http://\S+)", status["STATUS"])
            name = "safetensors/dev0.safetensors"
            read = ["curl", "-sf", f"{address[1]}/files/{name}"] if address else ["cat", f"{point}/{name}"]
            with subprocess.Popen(read, stdout=subprocess.DEVNULL) as reader:
                assert asked.wait(TIMEOUT_SECONDS)
                for _ in range(4):
                    assert message(TIMEOUT_SECONDS) == {"WATCHDOG": "1"}
                    times.append(time.monotonic() - begun)
                assert reader.poll() is None, "the reader still waits"
                awake.set()
                hangs.clear()
                assert reader.wait(TIMEOUT_SECONDS) == 0
            # Not more often than every half of it.
            assert all(seconds > n * limit / 2 - 0.1 for n, seconds in enumerate(times)), times
            run.terminate()
            found = message(TIMEOUT_SECONDS)
            while found == {"WATCHDOG": "1"}:
                found = message(TIMEOUT_SECONDS)
            assert found == {"STOPPING": "1"}


@pytest.mark.parametrize("kind", ["foreign", "closed", "no directory"])
def test_a_plan_says_of_a_cache_directory_what_a_mount_says(tmp_path: Path, fuse: None, kind: str) -> None:
    write_model(tmp_path / "root/m")
    cache, point = tmp_path / "cache", tmp_path / "mnt"
    point.mkdir()
    if kind == "foreign":
        (cache / "objects/pack").mkdir(parents=True)
    elif kind == "closed":
        cache = Path("/proc/sys/cache")
    else:
        cache.write_text("")
    before = sorted(tmp_path.rglob("*"))
    with serving(bucket(tmp_path / "root")) as url:
        source, environment = settings("https", url, tmp_path)
        said = []
        for command in (["plan", source], ["mount", source, str(point)]):
            full = [str(find_ckfs()), *command, "--cache-dir", str(cache)]
            run = subprocess.run(full, env=os.environ | environment, capture_output=True, text=True, timeout=60)
            assert run.returncode == 0, run.stderr
            said.append([line for line in run.stderr.splitlines() if line.startswith("ckfs: warning: ")])
            assert command[0] == "mount" or sorted(tmp_path.rglob("*")) == before, "a plan made something"
        subprocess.run([str(find_ckfs()), "umount", "--lazy", str(point)], check=True)
    assert said[0] == said[1] and len(said[0]) == 1 and f"no disk cache in {cache}" in said[0][0], said
