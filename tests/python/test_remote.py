"""Sources on the network: unmodified clients read a mount of the Hub, or of an object store, each a stub on loopback."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

import mounting
import reference
from mounting import check_device, check_full
from reference import Mesh

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/maxtext"
NAMES = ["HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CKFS_CACHE_DIR", "AWS_ENDPOINT_URL"]


class Stub:
    """A server of `tests/stub`, running until it is closed."""

    def __init__(self, *args: object) -> None:
        target = mounting.find_ckfs().parents[1]
        built = [path for kind in ("debug", "release") if (path := target / kind / "examples/stub").exists()]
        assert built, f"no server below {target}: run `cargo build --example stub`"
        program = max(built, key=lambda path: path.stat().st_mtime)
        self.process = subprocess.Popen(
            [program, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
        self.process.wait(10)


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """An environment without a Hub, with a cache of this test's own."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CKFS_CACHE_DIR", str(tmp_path / "cache"))
    return monkeypatch


@pytest.fixture
def hub(clean, repo):
    """The Hub with `org/llama`, behind a token."""
    stub = Stub("hub", f"org/llama={repo('llama').path}")
    stub.set(token="hf_secret")
    clean.setenv("HF_ENDPOINT", stub.url)
    clean.setenv("HF_TOKEN", "hf_secret")
    yield stub
    stub.close()


@pytest.mark.parametrize("name", ["org/llama", "org/llama@main", "hf://org/llama"])
def test_a_mount_of_the_hub_shows_what_a_local_one_does(own, repo, hub, name):
    mesh = Mesh.parse("fsdp=2")
    mounted = own(name, "--mesh", "fsdp=2")
    for device in range(2):
        check_device(mounted, reference.canonical(repo("llama")), mesh, device)
    check_full(mounted, reference.canonical(repo("llama")))
    assert not hub.stats()["token_leaked"]


def test_torch_and_transformers_load_from_the_hub(own, repo, hub):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    mounted = own("org/llama", "--mesh", "fsdp=2")
    local = own(repo("llama").path, "--mesh", "fsdp=2")
    for device in range(2):
        path = f"safetensors/dev{device}.safetensors"
        found, expected = load_file(mounted / path), load_file(local / path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in found)
    for file in (local / "hf").iterdir():
        assert (mounted / "hf" / file.name).read_bytes() == file.read_bytes(), file


@pytest.mark.parametrize("amount", [[], ["--full"]])
def test_verify_compares_a_source_of_the_hub_and_its_mount(own, repo, hub, amount):
    flags = ["--mesh", "fsdp=2", "--dtype", "f32"]
    assert "no difference" in mounting.run("verify", "org/llama", *flags, *amount).out
    mounted = own("org/llama", *flags)
    assert "no difference" in mounting.run("verify", mounted.point, *amount).out


def test_a_fetched_model_needs_no_network(own, repo, hub, clean):
    told = mounting.run("fetch", "org/llama", "--mesh", "fsdp=2")
    assert "needed" in told.out
    planned = mounting.run("plan", "org/llama", "--mesh", "fsdp=2", "--json").json()
    assert planned["remote"]["absent_bytes"] == 0
    hub.close()
    clean.setenv("HF_HUB_OFFLINE", "1")
    check_full(own("org/llama", "--mesh", "fsdp=2"), reference.canonical(repo("llama")))


def test_what_is_not_here_says_how_to_get_it(hub, clean):
    error = mounting.run("plan", "org/llama", "--offline", expect=1).err
    assert "not in the hub cache" in error and "ckfs fetch org/llama" in error
    error = mounting.run("plan", "org/lama", expect=1).err
    assert "no such repository" in error and "hf_secret" not in error
    clean.delenv("HF_TOKEN")
    error = mounting.run("plan", "org/llama", expect=1).err
    assert "set HF_TOKEN" in error
    hub.set(gated=True)
    error = mounting.run("plan", "org/llama", expect=1).err
    assert "accept the licence at" in error and "set HF_TOKEN" in error


def test_faults_of_the_network_do_not_reach_the_reader(own, repo, hub):
    hub.set(busy=2, busy_seconds=1, broken=3, short=4, short_after=1000)
    check_full(own("org/llama"), reference.canonical(repo("llama")))


@pytest.mark.parametrize("scheme", ["s3", "https"])
def test_a_mount_of_a_bucket(own, repo, clean, tmp_path, scheme):
    root = tmp_path / "root"
    (root / "models").mkdir(parents=True)
    (root / "models/llama").symlink_to(repo("llama").path)
    stub = Stub("store", root)
    try:
        settings = {"AWS_ENDPOINT_URL": stub.url, "AWS_ALLOW_HTTP": "true", "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "x"}
        for name, value in settings.items():
            clean.setenv(name, value)
        source = "s3://models/llama" if scheme == "s3" else f"{stub.url}/models/llama/"
        mounted = own(source)
        check_full(mounted, reference.canonical(repo("llama")))
        text = (mounted / ".ckfs/metrics").read_text()
        values = {sample.name: sample.value for family in parse_openmetrics(text) for sample in family.samples}
        assert 0 < values["ckfs_remote_latency_seconds_count"] <= values["ckfs_remote_requests_total"]
        assert values["ckfs_remote_latency_seconds_bucket"] == values["ckfs_remote_latency_seconds_count"], "the last is all"
    finally:
        stub.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_configuration_and_missing_tensors_come_from_the_hub(clean, tmp_path, family):
    local = FIXTURES / family / "hf"
    mounting.run("export", local, tmp_path / "leaves", "--layout", "maxtext-unscanned", "--only", "safetensors")
    (leaves,) = (tmp_path / "leaves/safetensors").glob("*.safetensors")
    stub = Stub("hub", f"org/model={local}")
    try:
        clean.setenv("HF_ENDPOINT", stub.url)
        for name, more in [("text", []), ("whole", ["--fill-from"])]:
            found, expected = tmp_path / f"{name}-hub", tmp_path / f"{name}-local"
            for place, to in [("org/model", found), (local, expected)]:
                filled = [word for option in more for word in (option, place)]
                mounting.run("export", leaves, to, "--layout", "hf", "--only", "hf", "--config-from", place, *filled)
            assert contents(found) == contents(expected)
        error = mounting.run("plan", leaves, "--layout", "hf", "--config-from", local, "--fill-from", "org/none", expect=1).err
        assert "org/none" in error
    finally:
        stub.close()


def contents(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    assert files
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
