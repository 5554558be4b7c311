"""`.ckfs/metrics` of a real mount, read by the parsers of Prometheus' own Python client."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import json
import re
import socket
import subprocess
from collections.abc import Iterator

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from mounting import ROOT, Mount, error_of, find_ckfs, read, run

GAUGES = {"ckfs_degraded", "ckfs_poisoned_sources", "ckfs_stalled_sources", "ckfs_in_flight_requests", "ckfs_threads"}
GAUGES |= {f"ckfs_memory_{what}_bytes" for what in ("held", "limit", "budget", "resident")}


def samples(mounted: Mount, parse=parse_openmetrics) -> dict[tuple, float]:
    """Values by name and labels."""
    text = (mounted / ".ckfs/metrics").read_text()
    found = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_openmetrics_accepts_all(own, repo):
    mounted = own(repo("llama").path, "--mesh", "fsdp=2")
    size = len(read(mounted / "full/layers/scanned/wq"))
    mounted.stats_of_reads()
    text = (mounted / ".ckfs/metrics").read_text()
    assert len(text) == (mounted / ".ckfs/metrics").stat().st_size and text.endswith("\n# EOF\n")
    families = {family.name: family for family in parse_openmetrics(text)}
    assert all(name.startswith("ckfs_") for name in families)
    assert all(family.documentation.strip() for family in families.values()), "each has its line of help"
    assert GAUGES <= {name for name, family in families.items() if family.type == "gauge"}
    kinds = {name: family.type for name, family in families.items() if name not in GAUGES}
    assert kinds.pop("ckfs_build") == "info" and kinds.pop("ckfs_latency_seconds") == "histogram"
    kinds.pop("ckfs_memory_shared_bytes", None)
    assert set(kinds.values()) == {"counter"}, kinds
    values = samples(mounted)
    version = run("--version").out.split()[1]
    assert values["ckfs_build_info", ("version", version)] == 1
    paths = {labels[0][1] for name, *labels in values if name == "ckfs_served_bytes_total"}
    assert paths == {"identical", "runs", "tiles", "generated"}
    assert values["ckfs_served_bytes_total", ("path", "runs")] >= size
    assert values["ckfs_ops_total", ("op", "read")] >= 1 and values["ckfs_errors_total", ("op", "read")] == 0
    assert values["ckfs_latency_seconds_bucket", ("le", "+Inf"), ("op", "read")] >= 1
    assert values["ckfs_memory_limit_bytes",] >= values["ckfs_memory_budget_bytes", ("part", "cache")] > 0
    assert values["ckfs_poisoned_sources",] == 0 and values["ckfs_degraded",] == 0


def test_the_classic_parser_finds_the_same_numbers(own, repo):
    mounted = own(repo("llama").path)
    read(mounted / "full/embed")
    mounted.stats_of_reads()
    names = {"ckfs_tile_hits_total", "ckfs_served_bytes_total", "ckfs_poisoned_sources", "ckfs_build_info"}
    modern, classic = samples(mounted), samples(mounted, parse_classic)
    assert {key: value for key, value in modern.items() if key[0] in names} == {
        key: value for key, value in classic.items() if key[0] in names
    }


def test_a_changed_source_is_degraded(own, two_files):
    mounted = own(two_files.path)
    weights = sorted(two_files.path.glob("*.safetensors"))
    os.utime(weights[0])
    codes = {error_of(read, path) for path in (mounted.point / "full").rglob("*") if path.is_file()}
    assert codes == {None, errno.EIO}
    values = samples(mounted)
    assert (values["ckfs_degraded",], values["ckfs_poisoned_sources",]) == (1, 1)
    assert values["ckfs_failed_opens_total",] >= 1
    stats = mounted.stats()
    assert stats["health"] == "degraded" and stats["poisoned_files"] == [str(weights[0])]
    (problem,) = stats["problems"]
    assert set(problem) == {"kind", "file", "cause", "remedy", "first", "last", "ended", "count"}
    assert problem["file"] == str(weights[0]) and str(mounted.point) in problem["remedy"]
    assert run("status", mounted.point, expect=1).out.count(str(weights[0])) >= 1


@contextlib.contextmanager
def server(*args: object) -> Iterator[int]:
    """`ckfs metrics --listen` on a free port of this host."""
    words = [str(find_ckfs()), "metrics", *map(str, args), "--listen", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            assert line.startswith("ckfs: metrics at http://127.0.0.1:") and line.endswith("/metrics\n"), line
            yield int(line.split(":")[3].split("/")[0])
        finally:
            process.terminate()


def get(port: int, method: str = "GET", path: str = "/metrics", **more: object) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, **more)
    reply = connection.getresponse()
    return reply, reply.read().decode()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stream:
        stream.sendall(request)
        return b"".join(iter(lambda: stream.recv(4096), b""))


def by_mount(text: str) -> dict[tuple, float]:
    """Values by name and mount; families are complete and stand together."""
    families = list(parse_classic(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.type != "unknown" for family in families), [family for family in families if family.type == "unknown"]
    return {
        (sample.name, sample.labels["mount"], sample.labels.get("op") or sample.labels.get("path")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_all_mounts_are_scraped(own, repo):
    first, second = own(repo("llama").path, "--mesh", "fsdp=2"), own(repo("llama").path)
    size = len(read(first / "full/layers/scanned/wq"))
    first.stats_of_reads()
    with server() as port:
        reply, text = get(port)
        assert reply.status == 200 and reply.version == 11
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert int(reply.headers["Content-Length"]) == len(text.encode())
        values = by_mount(text)
        one, two = str(first.point), str(second.point)
        assert values["ckfs_up", one, None] == values["ckfs_up", two, None] == 1
        assert values["ckfs_served_bytes_total", one, "runs"] >= size > values["ckfs_served_bytes_total", two, "runs"]
        assert {"ckfs_build_info", "ckfs_degraded", "ckfs_latency_seconds_count"} <= {name for name, *_ in values}
        run("umount", second.point)
        assert two not in {mount for _, mount, _ in by_mount(get(port)[1])}
    printed = by_mount(run("metrics", first.point).out)
    assert {mount for _, mount, _ in printed} == {one}


def test_a_mount_without_its_daemon_is_down(own, repo):
    mounted = own(repo("llama").path)
    os.kill(mounted.stats()["pid"], 9)
    assert by_mount(run("metrics", mounted.point).out) == {("ckfs_up", str(mounted.point), None): 0}
    with server(mounted.point) as port:
        assert by_mount(get(port)[1]) == {("ckfs_up", str(mounted.point), None): 0}


def test_a_server_waits_for_its_mount(tmp_path):
    with server(tmp_path) as port:
        assert by_mount(get(port)[1]) == {("ckfs_up", str(tmp_path), None): 0}
    assert "no ckfs mount" in run("metrics", tmp_path, expect=1).err


def test_bad_requests_are_answered():
    with server() as port:
        assert get(port, path="/")[0].status == 404
        assert get(port, path="/metrics?x=y")[0].status == 200
        reply, body = get(port, "HEAD")
        assert reply.status == 200 and int(reply.headers["Content-Length"]) > 0 and body == ""
        reply, _ = get(port, "POST", body=b"x" * 100_000)
        assert reply.status == 405 and reply.headers["Allow"] == "GET, HEAD"
        assert get(port, headers={"X-Long": "x" * 10_000})[0].status == 431
        for request in (b"nonsense\r\n\r\n", b"\xff\xfe \x00 x\r\n\r\n", b"GET /metrics HTTP/2\r\n\r\n"):
            assert raw(port, request).startswith(b"HTTP/1.1 400 "), request
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stream:
            stream.sendall(b"GET /metr")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stream:
            for byte in b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n":
                stream.sendall(bytes([byte]))
            assert stream.recv(12) == b"HTTP/1.1 200"


def test_idle_connections_keep_nobody_out():
    with server() as port, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(200)]
        assert get(port)[0].status == 200
        # The last has had its time, and is closed without an answer.
        assert idle[-1].recv(1) == b""


@pytest.mark.parametrize("address", ["", "x", "1.2.3.4", "70000", "127.0.0.1:99999"])
def test_addresses_are_checked(address):
    assert "expected PORT, or ADDRESS:PORT" in run("metrics", "--listen", address, expect=2).err


def test_a_file_is_replaced(own, repo, tmp_path):
    mounted = own(repo("llama").path)
    file = tmp_path / "ckfs.prom"
    file.write_text("old")
    run("metrics", mounted.point, "--textfile", file)
    assert by_mount(file.read_text())["ckfs_up", str(mounted.point), None] == 1
    assert [path.name for path in tmp_path.glob("*ckfs*")] == ["ckfs.prom"]
    assert "No such file" in run("metrics", "--textfile", tmp_path / "no/ckfs.prom", expect=1).err


def expressions() -> dict[str, str]:
    """The queries of the alert rules and of the dashboard, by what they are called."""
    rules = yaml.safe_load((ROOT / "examples/monitoring/alerts.yaml").read_text())
    found = {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    for panel in json.loads((ROOT / "examples/monitoring/dashboard.json").read_text())["panels"]:
        found |= {f"{panel['title']} {target['refId']}": target["expr"] for target in panel["targets"]}
    return found


def test_alerts_and_dashboard_ask_for_metrics_that_exist(own, repo, tmp_path):
    mounted = own(repo("llama").path, "--mesh", "fsdp=2")
    read(mounted / "full/embed")
    steps = tmp_path / "run"
    (steps / "checkpoint-5").mkdir(parents=True)
    for path in repo("llama").path.iterdir():
        (steps / "checkpoint-5" / path.name).symlink_to(path.resolve())
    (steps / "checkpoint-5/trainer_state.json").write_text("{}")
    grown = own(steps, "--steps", "all")
    text = run("metrics", mounted.point).out + run("metrics", grown.point).out
    known: dict[str, list[dict[str, str]]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels = re.match(r"(\w+)\{(.*)\} ", line).groups()
            known.setdefault(name, []).append(dict(re.findall(r'(\w+)="([^"]*)"', labels)))
    asked = expressions()
    assert len(asked) > 20
    for title, expression in asked.items():
        names = set(re.findall(r"\bckfs_\w+", expression))
        assert names and names <= set(known), (title, names - set(known))
        # Every label that is selected or grouped by, and every value that is asked for; Prometheus adds the instance.
        plain = re.sub(r'"[^"]*"', "", expression)
        groups = re.findall(r"by \(([^)]*)\)", plain)
        labels = {label.strip() for group in groups for label in group.split(",")} - {"instance"}
        labels |= set(re.findall(r"(\w+)=", plain)) - {"instance"}
        for name in names:
            have = {label for row in known[name] for label in row}
            if len(names) == 1:
                assert labels <= have, (title, name, labels - have)
        for label, value in re.findall(r'(\w+)="([^"$]+)"', expression):
            assert any(row.get(label) == value for name in names for row in known[name]), (title, label, value)


def test_alerts_say_what_to_do():
    rules = yaml.safe_load((ROOT / "examples/monitoring/alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        assert re.fullmatch(r"Ckfs[A-Z]\w+", rule["alert"]) and rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "action"}
