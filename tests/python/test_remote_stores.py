"""Object stores and web servers: the same promises on every kind of server, real ones where there are any for a test.

S3 is a stub and moto, Azure is Azurite, Google's store and the web server are stubs.
"""

from __future__ import annotations

import base64
import errno
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import mounting
import reference
from mounting import check_device, check_full
from reference import Mesh
from servers import Stub, bucket_of, encrypted, stub_bucket, stub_program

KINDS = ["s3", "moto", "gs", "azurite", "https"]


@pytest.fixture
def bucket(request, clean, tmp_path):
    """An empty place for a repository, of the kind that the test names, set in the environment."""
    with bucket_of(request.param, tmp_path / "server") as made:
        for name, value in made.environment.items():
            clean.setenv(name, value)
        yield made


on_all = pytest.mark.parametrize("bucket", KINDS, indirect=True)
on_google = pytest.mark.parametrize("bucket", ["gs"], indirect=True)
on_azure = pytest.mark.parametrize("bucket", ["azurite"], indirect=True)


def contract_files(directory: Path) -> Path:
    """Files for the contract of sources: an empty one, small ones, and one of several requests and segments."""
    directory.mkdir()
    noise = np.random.default_rng(7)
    for name, size in {"a.bin": 300_000, "b.bin": 4097, "large.safetensors": (17 << 20) + 11, "none.bin": 0}.items():
        (directory / name).write_bytes(noise.bytes(size))
    # The web server's listing.
    index = {"weight_map": {f"tensor of {path.name}": path.name for path in directory.iterdir()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def conforms(address: str, files: Path) -> None:
    done = subprocess.run([stub_program(), "conform", address, files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@on_all
def test_every_store_keeps_the_contract_of_sources(bucket, tmp_path):
    files = contract_files(tmp_path / "files")
    bucket.upload(files)
    conforms(bucket.address, files)


def test_the_hub_keeps_the_contract_of_sources(clean, tmp_path):
    files = contract_files(tmp_path / "files")
    stub = Stub("hub", f"org/model={files}")
    try:
        clean.setenv("HF_ENDPOINT", stub.url)
        conforms("hf://org/model", files)
    finally:
        stub.close()


@on_all
def test_plan_fetch_mount_and_verify(own, wide, bucket):
    bucket.upload(wide.path)
    options, mesh = ["--mesh", "fsdp=4", "--devices", "1-2"], Mesh.parse("fsdp=4")
    planned = mounting.run("plan", bucket.address, *options, "--json").json()["remote"]
    assert 0 < planned["absent_bytes"] <= planned["spanned_bytes"]
    assert "needed" in mounting.run("fetch", bucket.address, *options).out
    assert mounting.run("plan", bucket.address, *options, "--json").json()["remote"]["absent_bytes"] == 0
    assert "no difference" in mounting.run("verify", bucket.address, *options).out
    mounted, tensors = own(bucket.address, *options), reference.canonical(wide)
    for device in (1, 2):
        check_device(mounted, tensors, mesh, device)
    for path in wide.path.iterdir():
        assert (mounted / "hf" / path.name).read_bytes() == path.read_bytes(), path
    mounting.same_bytes((mounted / "full/layers/scanned/wq").read_bytes(), tensors["layers/scanned/wq"].array, "wq")
    assert "no difference" in mounting.run("verify", mounted.point).out
    mounting.run("status", mounted.point)


@on_all
def test_a_replaced_object_is_an_error_and_never_other_bytes(own, wide, bucket):
    bucket.upload(wide.path)
    mounted = own(bucket.address)
    name = max(wide.path.glob("*.safetensors"), key=lambda path: path.stat().st_size).name
    data = bytearray((wide.path / name).read_bytes())
    data[-1] ^= 1
    bucket.put(name, bytes(data))
    copy = (mounted / "hf" / name).open("rb", buffering=0)
    with copy, pytest.raises(OSError) as raised:
        copy.seek(len(data) // 2)
        copy.read(1 << 20)
    assert raised.value.errno == errno.EIO
    told = mounting.run("status", mounted.point, expect=1)
    assert name in told.out + told.err and "changed" in told.out + told.err
    # A new mount shows the new object.
    assert (own(bucket.address) / "hf" / name).read_bytes() == bytes(data)


@on_all
def test_what_is_not_there_is_said(bucket, clean):
    wrong = bucket.address.rstrip("/") + "-other"
    error = mounting.run("plan", wrong, expect=1).err
    assert "no object has this prefix" in error or "no such" in error, error
    if not wrong.startswith("http"):
        error = mounting.run("plan", bucket.address.replace("//weights", "//nowhere"), expect=1).err
        assert "no such" in error or "no object has this prefix" in error, error


@on_azure
def test_a_wrong_key_of_azure_is_explained(own, repo, bucket, clean):
    bucket.upload(repo("llama").path)
    wrong = base64.b64encode(b"w" * 64).decode()
    clean.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    error = mounting.run("plan", bucket.address, expect=1).err
    assert "refuses" in error and "AZURE_STORAGE_ACCOUNT_KEY" in error and "SAS" in error, error
    assert wrong not in error and "Signature" not in error, error
    # Without it, the emulator's own key is right.
    clean.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    check_full(own(bucket.address), reference.canonical(repo("llama")))


@on_google
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_of_google_is_explained(repo, bucket, status):
    bucket.upload(repo("llama").path)
    bucket.stub.set(refuse=status)
    error = mounting.run("plan", bucket.address, expect=1).err
    for part in ("refuses", "GOOGLE_APPLICATION_CREDENTIALS", str(status), "stub-1"):
        assert part in error, error


@on_google
@pytest.mark.parametrize("status", [429, 503])
def test_pauses_that_google_asks_for_are_made(own, repo, bucket, status):
    bucket.upload(repo("llama").path)
    bucket.stub.set(busy=2, busy_status=status, busy_seconds=1)
    mounted = own(bucket.address)
    bucket.stub.set(busy=2)
    check_full(mounted, reference.canonical(repo("llama")))


@on_google
def test_slow_and_cut_replies_of_google_are_continued(own, repo, bucket):
    bucket.upload(repo("llama").path)
    bucket.stub.set(short=5, short_after=20_000)
    check_full(own(bucket.address), reference.canonical(repo("llama")))
    bucket.stub.set(short=0, drip=100_000, generation=1)
    check_full(own(bucket.address), reference.canonical(repo("llama")))


@on_google
def test_a_reply_of_google_that_stalls_is_an_error_in_time(own, wide, bucket):
    bucket.upload(wide.path)
    mounted = own(bucket.address, "--source-timeout", "5s")
    name = max(wide.path.glob("*.safetensors"), key=lambda path: path.stat().st_size).name
    size = (wide.path / name).stat().st_size
    bucket.stub.set(stall_after=0)
    with (mounted / "hf" / name).open("rb", buffering=0) as copy:
        copy.seek(size // 2)
        assert mounting.error_of(copy.read, 1 << 20) == errno.EIO
        bucket.stub.set(stall_after="")
        copy.seek(size // 2)
        assert copy.read(1 << 20) == (wide.path / name).read_bytes()[size // 2 : size // 2 + (1 << 20)]


@on_google
@pytest.mark.parametrize("way", ["emulator", "account"])
def test_other_places_of_googles_store(repo, bucket, clean, tmp_path, way):
    bucket.upload(repo("llama").path)
    for name in bucket.environment:
        clean.delenv(name)
    if way == "emulator":
        clean.setenv("STORAGE_EMULATOR_HOST", bucket.stub.url.removeprefix("http://"))
    else:
        account = {"gcs_base_url": bucket.stub.url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        (tmp_path / "account.json").write_text(json.dumps(account))
        clean.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    mounting.run("plan", bucket.address)


def long_rows(directory: Path) -> Path:
    """Matrices whose shards on the inner axis are parts of long rows: with gaps of 96 KiB, and of 1.5 MiB."""
    directory.mkdir()
    shapes = {"near": [64, 1 << 16], "far": [8, 1 << 20], "rows": [1 << 10, 1 << 10]}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = shape[0] * shape[1] * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    data = np.random.default_rng(3).bytes(end)
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_what_is_fetched_is_what_plan_says(bucket, tmp_path):
    bucket.upload(long_rows(tmp_path / "files"))
    (tmp_path / "rules.toml").write_text('[[shard_rules]]\nmatch = "*"\nspec = ["-", "tensor"]\n')
    # So long that gaps of up to 1 MiB are read over.
    bucket.stub.set(latency_ms=30)
    options = ["--mesh", "tensor=4", "--devices", "1", "--shard", tmp_path / "rules.toml"]
    planned = mounting.run("plan", bucket.address, *options, "--json").json()["remote"]
    # Each row of "near", a quarter of each of "far", and all of "rows", whose gaps are smaller than a block.
    near, far, rows = 64 * (1 << 17) - (96 << 10), 8 * (512 << 10), 1 << 21
    assert near + far + rows <= planned["spanned_bytes"] <= (near + far + rows) * 1.05, planned
    before = bucket.stub.stats()["object_bytes"]
    told = mounting.run("fetch", bucket.address, *options).out
    assert bucket.stub.stats()["object_bytes"] - before == planned["absent_bytes"], told
    after = mounting.run("plan", bucket.address, *options, "--json").json()["remote"]
    assert (after["spanned_bytes"], after["absent_bytes"]) == (planned["spanned_bytes"], 0)
    text = mounting.run("plan", "-v", bucket.address, *options).out
    assert f"{planned['spanned_bytes'] / planned['needed_bytes']:.2f} times of which is fetched" in text


def test_an_own_authority_signs_the_certificate_of_a_server(repo, clean, tmp_path):
    with stub_bucket("https", tmp_path / "store") as bucket:
        bucket.upload(repo("llama").path)
        with encrypted(bucket.stub.url, tmp_path / "server.pem") as url:
            address = bucket.address.replace(bucket.stub.url, url)
            # Repetitions would not help: they would go on until the run of this test is ended.
            error = mounting.run("plan", address, "--source-timeout", "1h", expect=1).err
            assert "invalid peer certificate" in error and "SSL_CERT_FILE" in error
            clean.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
            assert "no difference" in mounting.run("verify", address, "--mesh", "fsdp=2").out
