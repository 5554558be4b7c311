"""Sources on the network: unmodified clients read a mount of the Hub, or of an object store, each a stub on loopback."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

import mounting
import reference
import repos
from mounting import check_device, check_full
from reference import Mesh
from servers import STUB_SETTINGS, Stub

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/maxtext"


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


@pytest.mark.parametrize("way", ["fetch", "mount"])
def test_complete_files_are_placed_for_programs_of_the_hub(own, repo, hub, clean, tmp_path, way):
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    local, cache = repo("llama").path, tmp_path / "hf/hub"
    weights = sorted(path.name for path in local.glob("*.safetensors"))
    mounting.run("fetch", "org/llama")
    assert not cache.exists(), "only where it is asked for"
    if way == "fetch":
        told = mounting.run("fetch", "org/llama", "--hf-cache", "share").out
        assert "complete for other programs" in told
    else:
        mounted = own("org/llama", "--hf-cache", "share")
        for path in local.iterdir():
            (mounted / "hf" / path.name).read_bytes()
        mounting.wait_until((cache / "models--org--llama/refs/main").exists, what="the snapshot")
    found = Path(snapshot_download("org/llama", cache_dir=cache, local_files_only=True))
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in local.iterdir())
    for path in local.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path
        assert (found / path.name).resolve().parent.name == "blobs"
    assert try_to_load_from_cache("org/llama", weights[0], cache_dir=cache) == str(found / weights[0])
    assert {path.name for path in (cache / "models--org--llama").rglob(".*")} == set(), "nothing unfinished"
    # ckfs itself reads it there, without the Hub and without its own cache.
    hub.close()
    clean.setenv("CKFS_CACHE_DIR", str(tmp_path / "another"))
    check_full(own("org/llama", "--offline"), reference.canonical(repo("llama")))


def test_a_part_of_a_repository_is_not_placed_for_programs_of_the_hub(wide, clean, tmp_path):
    stub = Stub("hub", f"org/wide={wide.path}")
    try:
        clean.setenv("HF_ENDPOINT", stub.url)
        told = mounting.run("fetch", "org/wide", "--mesh", "fsdp=4", "--devices", "1", "--hf-cache", "share").out
        assert "not all files are complete" in told
        placed = tmp_path / "hf/hub/models--org--wide"
        assert not (placed / "snapshots").exists() and not (placed / "refs").exists()
        assert all(path.stat().st_size < 1 << 20 for path in (placed / "blobs").iterdir()), "only small files are complete"
    finally:
        stub.close()


def test_what_is_not_here_says_how_to_get_it(hub, clean):
    error = mounting.run("plan", "org/llama", "--offline", expect=1).err
    assert "not found" in error and "cache " in error and "ckfs fetch org/llama" in error
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


def damage(file: Path) -> None:
    """Changes one bit of the last byte."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_wrong_bytes_of_the_hub_are_fetched_once_more_and_then_refused(own, repo, clean, tmp_path):
    """The Hub names the digest of what it was given; its content network has a byte that was damaged later."""
    local = tmp_path / "local"
    shutil.copytree(repo("llama").path, local)
    weights = sorted(local.glob("*.safetensors"))[0]
    stub = Stub("hub", f"org/llama={local}")
    try:
        clean.setenv("HF_ENDPOINT", stub.url)
        damage(weights)
        error = mounting.run("fetch", "org/llama", expect=1).err
        assert weights.name in error and "fetched once more" in error and "expected SHA-256" in error
        told = mounting.run("cache", "verify")
        assert f"{weights.name}: not verifiable: part of a file" in told.out, "wrong bytes do not stay"
        for words in (["cat", "org/llama", "hf/" + weights.name], ["export", "org/llama", tmp_path / "to"], ["sums", "org/llama"]):
            assert "expected SHA-256" in mounting.run(*words, expect=1).err
        assert "expected SHA-256" in mounting.run("mount", "org/llama", tmp_path, expect=1).err, "a small file is compared first"
    finally:
        stub.close()


@pytest.mark.parametrize("flags", [[], ["--layout", "maxtext", "--dtype", "f32"], ["--materialize", "memory"]])
def test_wrong_bytes_that_a_mount_has_served_are_dropped_everywhere(own, wide, clean, tmp_path, flags):
    """Kernel pages, tiles and materialized files of a source whose digest is wrong are not served once it was compared."""
    local = tmp_path / "local"
    shutil.copytree(wide.path, local)
    weights = sorted(local.glob("*.safetensors"))[-1]
    stub = Stub("hub", f"org/wide={local}")
    try:
        clean.setenv("HF_ENDPOINT", stub.url)
        damage(weights)
        mounted = own("org/wide", *flags)
        files = [path for path in (mounted / "dev0").rglob("*") if path.is_file()]
        for path in files:
            try:
                path.read_bytes()
            except OSError:
                pass
        mounting.wait_until(lambda: mounted.stats()["poisoned_sources"] == 1, what="the comparison")
        told = mounting.run("status", mounted.point, expect=1).out
        assert weights.name in told and "expected SHA-256" in told

        def is_lost(path):
            try:
                path.read_bytes()
            except OSError as error:
                return error.errno == errno.EIO
            return False

        lost = [path for path in files if is_lost(path)]
        assert lost, "files of these weights"
        if not flags:
            again = mounting.run("sums", "org/wide", "--only", "hf/" + weights.name, expect=1)
            assert "expected SHA-256" in again.err
    finally:
        stub.close()


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_a_blob_of_the_cache_without_the_digest_of_its_name_is_refused(clean, tmp_path, name):
    repo = repos.hub_cache(tmp_path / "hf/hub")
    clean.setenv("HF_HUB_OFFLINE", "1")
    mounting.run("cat", "org/tiny", "hf/config.json")
    blob = (repo.path / name).resolve()
    content = blob.read_bytes()
    edited = content[:-4] + bytes(4) if name.endswith(".safetensors") else content.replace(b"{", b"{ ", 1)[: len(content) + 1]
    blob.write_bytes(edited)
    kind = "SHA-256" if name.endswith(".safetensors") else "git blob id"
    for words in (["cat", "org/tiny", "hf/config.json"], ["export", "org/tiny", tmp_path / "to"], ["verify", "org/tiny"], ["sums", "org/tiny"]):
        error = mounting.run(*words, expect=1).err
        assert f"{name}: expected {kind} {blob.name}" in error and "hf download" in error


def test_no_log_has_a_token_or_a_signed_address(repo, hub, clean):
    clean.setenv("CKFS_LOG", "trace")
    hub.set(busy=1, busy_seconds=1, broken=2, short=2, short_after=1000, expired=1)
    told = mounting.run("fetch", "org/llama", "--mesh", "fsdp=2")
    hub.set(token="hf_other")
    refused = mounting.run("fetch", "org/llama", "--mesh", "fsdp=4", "--cache-dir", repo("llama").path.parent / "none", expect=1)
    text = "".join((told.out, told.err, refused.out, refused.err))
    assert "again in" in text, "faults are logged"
    for secret in ("hf_secret", "hf_other", "Bearer", "Signature", "X-Amz"):
        assert secret not in text, [line for line in text.splitlines() if secret in line][:3]


def test_requests_to_a_bucket_are_counted(own, bucket):
    mounted = own("s3://models/llama")
    text = (mounted / ".ckfs/metrics").read_text()
    values = {sample.name: sample.value for family in parse_openmetrics(text) for sample in family.samples}
    assert 0 < values["ckfs_remote_latency_seconds_count"] <= values["ckfs_remote_requests_total"]
    assert values["ckfs_remote_latency_seconds_bucket"] == values["ckfs_remote_latency_seconds_count"], "the last is all"
    told = mounting.run("status", mounted.point).out
    assert re.search(r"remote  \d+ requests, half of them within \d+ ms, 99 % within \d+ ms; .+ fetched; 0 retries", told), told


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


@pytest.fixture
def bucket(clean, repo, tmp_path):
    """An object store with `s3://models/llama`."""
    (tmp_path / "root/models").mkdir(parents=True)
    (tmp_path / "root/models/llama").symlink_to(repo("llama").path)
    stub = Stub("store", tmp_path / "root")
    for name, value in STUB_SETTINGS["s3"](stub.url).items():
        clean.setenv(name, value)
    yield stub
    stub.close()


SOURCES = [("hub", "hf://org/llama"), ("hub", "org/llama"), ("bucket", "s3://models/llama")]


@pytest.mark.parametrize("server,source", SOURCES)
def test_plan_and_explain_say_of_a_remote_source_what_they_say_of_a_local_one(request, repo, server, source):
    request.getfixturevalue(server)
    local = str(repo("llama").path)
    options = ["--mesh", "fsdp=2,tensor=2", "--dtype", "f32", "--devices", "1-2"]
    found, expected = (mounting.run("plan", place, "--json", *options).json() for place in (source, local))
    # Where it is, what this machine's memory holds, and who may read it.
    root = found["root"]
    for plan in (found, expected):
        for name in ("source", "root", "revision", "materialized", "readers"):
            del plan[name]
    needed = found.pop("remote")
    assert 0 < needed["needed_bytes"] <= sum(file["bytes"] for file in expected["files"])
    assert found == expected
    for path in ("dev1/layers/scanned/wq", "full/embed", "safetensors/dev2.safetensors", "hf/config.json"):
        words = [mounting.run("explain", place, path, *options).out for place in (source, local)]
        assert words[0].replace(root, local) == words[1], path


@pytest.mark.parametrize("server,source", SOURCES)
def test_cat_export_and_verify_read_a_remote_source(request, repo, tmp_path, server, source):
    request.getfixturevalue(server)
    local, options = repo("llama").path, ["--mesh", "fsdp=2", "--dtype", "f32"]
    for path in ("dev1/layers/scanned/w_down", "full/embed", "safetensors/dev0.safetensors", "hf/tokenizer_config.json"):
        command = [mounting.find_ckfs(), "cat", source, path, *options]
        found = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
        command[2] = local
        assert found == subprocess.run(command, capture_output=True, timeout=60, check=True).stdout, path
    for place, to in ((source, "found"), (local, "expected")):
        mounting.run("export", place, tmp_path / to, *options)
    found, expected = contents(tmp_path / "found"), contents(tmp_path / "expected")
    assert found.keys() == expected.keys()
    # These name the source, or the time of its last change.
    same = [name for name in expected if not name.startswith(".ckfs/") and not name.endswith("_CHECKPOINT_METADATA")]
    assert [name for name in same if found[name] != expected[name]] == []
    assert "no difference" in mounting.run("verify", source, *options).out


@pytest.mark.parametrize("server,source", SOURCES)
def test_transformers_loads_a_model_from_a_mount_of_a_remote_source(request, own, repo, server, source):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    request.getfixturevalue(server)
    found = AutoModelForCausalLM.from_pretrained(own(source) / "hf", dtype="auto")
    expected = AutoModelForCausalLM.from_pretrained(repo("llama").path, dtype="auto")
    ours, theirs = found.state_dict(), expected.state_dict()
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype and torch.equal(ours[key], value), key
    ids = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)


def test_a_bucket_is_read_offline_as_it_was_pinned_last(own, repo, bucket):
    error = mounting.run("plan", "s3://models/llama", "--offline", expect=1).err
    assert "s3://models/llama" in error and "--offline" in error and "ckfs fetch" in error
    mounting.run("fetch", "s3://models/llama")
    bucket.close()
    check_full(own("s3://models/llama", "--offline"), reference.canonical(repo("llama")))
    error = mounting.run("plan", "s3://models/other", "--offline", expect=1).err
    assert "s3://models/other" in error and "ckfs fetch" in error


def contents(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    assert files
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
