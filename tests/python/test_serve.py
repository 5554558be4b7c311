"""`ckfs serve`: unmodified clients read the files of a mount over HTTP and as a repository of the Hub. Every byte is compared with
what `ckfs export` writes or a mount shows."""

from __future__ import annotations

import concurrent.futures
import email.utils
import hashlib
import http.client
import json
import os
import re
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import urllib.request
from pathlib import Path

import pytest

import mounting
import repos
from serving import Server, run_client


def files_below(directory: Path) -> dict[str, bytes]:
    """The content of all files, links included, by path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve-home")


FLAGS = ("--mesh", "fsdp=4,tensor=2", "--dtype", "bf16")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, repo) -> Path:
    """All files of a view, written by another command."""
    path = tmp_path_factory.mktemp("serve") / "exported"
    mounting.run("export", repo("llama_f32").path, path, *FLAGS)
    return path


@pytest.fixture(scope="module")
def server(repo, home: Path):
    with Server(repo("llama_f32").path, *FLAGS, home=home) as server:
        yield server


def test_every_file_is_that_of_an_export(server: Server, exported: Path) -> None:
    """All paths of the listings, each file compared; nothing is left out and nothing is there beside."""
    found: dict[str, bytes] = {}
    pending = [""]
    while pending:
        above = pending.pop()
        for row in server.json(f"/files/{above}"):
            path = above + row["name"]
            if row["type"] == "directory":
                pending.append(f"{path}/")
            elif row["type"] == "file":
                body = server.get(f"/files/{path}")
                assert len(body) == row["size"], path
                found[path] = body
    expected = files_below(exported)
    live = {name for name in found if name.startswith(".ckfs/")}
    assert {".ckfs/stats.json", ".ckfs/metrics", ".ckfs/manifest.json", ".ckfs/plan.txt"} <= live
    regular = {path for path in expected if not (exported / path).is_symlink() and not path.startswith((".ckfs/", "mesh/"))}
    assert set(found) - live == regular
    for path in regular:
        assert found[path] == expected[path], path
    # A link leads to what it names.
    assert server.get("/files/mesh/fsdp=1,tensor=0/embed") == found["dev2/embed"]


def test_a_mount_of_the_same_view_has_the_same_bytes(server: Server, shared) -> None:
    mounted = shared("llama_f32", *FLAGS)
    for under in ("dev3", "safetensors", "hf", "dcp"):
        for path in sorted(mounted.files(under)):
            assert server.get(f"/files/{under}/{path}") == (mounted / under / path).read_bytes(), path


def test_curl_reads_ranges_heads_and_conditions(server: Server, exported: Path, tmp_path: Path) -> None:
    path = "safetensors/dev0.safetensors"
    url, whole = f"{server.url}/files/{path}", (exported / path).read_bytes()

    def curl(*args: str) -> bytes:
        return subprocess.run(["curl", "-sS", "--fail", *args], capture_output=True, check=True, timeout=60).stdout

    size = len(whole)
    assert size > 1000
    for text, expected in [
        ("0-0", whole[:1]), ("0-99", whole[:100]), ("17-1016", whole[17:1017]), (f"{size - 1}-", whole[-1:]),
        ("-7", whole[-7:]), (f"5-{size + 99}", whole[5:]), ("-99999999999999999999", whole),
    ]:  # fmt: skip
        assert curl("-r", text, url) == expected, text
    heads = curl("-I", url).decode().lower()
    assert f"content-length: {size}\r\n" in heads and "accept-ranges: bytes\r\n" in heads
    etag = re.search(r'etag: ("[^"]+")', heads)[1]
    # A partial file is continued.
    part = tmp_path / "part"
    part.write_bytes(whole[:100])
    curl("-C", "-", "-o", str(part), url)
    assert part.read_bytes() == whole

    def status(method: str = "GET", **headers: str) -> tuple[int, bytes, str | None]:
        reply, body = server.request(f"/files/{path}", method, **headers)
        return reply.status, body, reply.headers["Content-Range"]

    assert status(Range="bytes=2-3") == (206, whole[2:4], f"bytes 2-3/{size}")
    assert status(Range=f"bytes={size}-")[::2] == (416, f"bytes */{size}")
    assert status(Range="bytes=0-1,4-5")[:2] == (200, whole)
    assert status(If_Match=etag)[:2] == (200, whole)
    assert status(If_Match='"other"')[0] == 412
    assert status(If_None_Match=etag)[:2] == (304, b"")
    assert status(If_None_Match='"other"')[:2] == (200, whole)
    assert status(Range="bytes=1-4", If_Range=etag)[:2] == (206, whole[1:5])
    assert status(Range="bytes=1-4", If_Range='"other"')[:2] == (200, whole)
    assert status("HEAD", Range="bytes=1-4")[:2] == (200, b"")
    for method in ("PUT", "POST", "DELETE", "PATCH"):
        reply, _ = server.request(f"/files/{path}", method, b"x")
        assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


def test_a_time_is_that_of_this_start_and_a_condition(server: Server, repo) -> None:
    """Sources that are served with other settings are other files, which are not older than the server."""
    path = "/files/dev0/embed"
    whole = server.get(path)
    for method in ("GET", "HEAD"):
        reply, _ = server.request(path, method)
        modified = reply.headers["Last-Modified"]
        started, seconds = email.utils.parsedate_to_datetime(modified).timestamp(), 365 * 24 * 3600
        newest = max(file.stat().st_mtime for file in repo("llama_f32").path.iterdir())
        assert int(newest) <= started <= email.utils.parsedate_to_datetime(reply.headers["Date"]).timestamp()
    before, after = (email.utils.formatdate(started + by, usegmt=True) for by in (-seconds, seconds))
    for headers, status in [
        ({"If_Modified_Since": modified}, 304), ({"If_Modified_Since": after}, 304), ({"If_Modified_Since": before}, 200),
        ({"If_Modified_Since": "yesterday"}, 200), ({"If_Modified_Since": modified, "If_None_Match": '"other"'}, 200),
        ({"If_Unmodified_Since": modified}, 200), ({"If_Unmodified_Since": before}, 412),
        ({"If_Unmodified_Since": before, "If_Match": reply.headers["ETag"]}, 200),
    ]:  # fmt: skip
        reply, body = server.request(path, **headers)
        assert (reply.status, body == whole) == (status, status == 200), headers
    # A date is no proof for a part: two files may be of one second.
    assert server.request(path, Range="bytes=0-9", If_Range=modified)[0].status == 200


def test_a_directory_is_at_the_address_with_a_slash(server: Server) -> None:
    for path in ("", "/hf", "/dev0/layers", "//dev0", "/mesh/fsdp%3D0,tensor%3D0"):
        for method in ("GET", "HEAD"):
            reply, _ = server.request(f"/files{path}", method)
            assert reply.status == 307, path
        target = reply.headers["Location"]
        assert target.startswith("/files/") and not target.startswith("/files//") and target.endswith("/"), target
        assert server.request(target)[0].status == 200
    assert server.request("/files/hf/config.json")[0].status == 200
    assert server.request("/files/hf/config.json/")[0].status == 200


def test_generated_files_have_the_tag_of_their_bytes(server: Server) -> None:
    """No condition and no range joins two contents of a file that changes."""
    for path in ("/files/.ckfs/stats.json", "/files/.ckfs/metrics"):
        tags = {}
        for _ in range(3):
            reply, body = server.request(path)
            assert tags.setdefault(reply.headers["ETag"], body) == body
        assert len(tags) > 1, "requests are counted"
        old, kept = next(iter(tags.items()))
        assert server.request(path, If_Match=old)[0].status == 412
        assert server.request(path, If_None_Match=old)[0].status == 200
        for headers in ({"If_Range": old}, {}):
            reply, body = server.request(path, Range="bytes=5-", **headers)
            assert (reply.status, len(body)) == (200, len(kept))


def named(server: Server, path: str, *hosts: str, port: int | None = None, version: str = "1.1") -> tuple[int, str]:
    """Status and body of a request with these `Host` headers."""
    with socket.create_connection((server.host, port or server.port), timeout=60) as client:
        headers = "".join(f"Host: {host}\r\n" for host in hosts)
        client.sendall(f"GET {path} HTTP/{version}\r\n{headers}Connection: close\r\n\r\n".encode("latin-1"))
        received = b""
        while part := client.recv(1 << 16):
            received += part
    head, _, body = received.decode("latin-1").partition("\r\n\r\n")
    return int(head.split()[1]), body


def test_a_request_has_one_host(repo, home: Path) -> None:
    with Server(repo("llama_f32").path, "--s3", "0", home=home) as server:
        s3 = int(re.search(r"S3 at http://[^:]+:(\d+)", server.told)[1])
        for port, path in ((server.port, "/files/full/embed"), (s3, "/ckfs/full/embed")):
            for hosts in ((), ("localhost", "localhost"), ("a", "b"), ("",), ("a b",), ("a/b",), ("user@localhost",), ("a:b",)):
                assert named(server, path, *hosts, port=port)[0] == 400, hosts
            assert named(server, path, port=port, version="1.0")[0] == 200
            for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80", "ckfs.localhost", "desk", "10.0.0.1"):
                assert named(server, path, host, port=port)[0] == 200, host


def test_pages_of_the_web_read_nothing(repo, home: Path, tmp_path: Path) -> None:
    """A page whose name leads to this machine (DNS rebinding) is no program of this machine."""
    path, name = repo("llama_f32").path, "rebind.example"
    (tmp_path / "token").write_text("s3cret")
    addresses = ("/", "/files/", "/files/full/embed", "/metrics", "/api/models", "/ckfs/llama_f32/resolve/main/config.json")
    with Server(path, "--s3", "0", "--allow-host", "*.example.com", home=home) as server:
        s3 = int(re.search(r"S3 at http://[^:]+:(\d+)", server.told)[1])
        for address in addresses:
            status, body = named(server, address, f"{name}:{server.port}")
            assert (status, "--allow-host rebind.example" in body) == (421, True), address
            assert named(server, address, "models.example.com")[0] == 200
            assert named(server, f"http://{name}{address}", "localhost")[0] == 421, "the name of the target counts"
        status, body = named(server, "/ckfs/full/embed", name, port=s3)
        assert (status, "<Code>AccessDenied</Code>" in body, "--allow-host rebind.example" in body) == (421, True, True)
        assert named(server, "/ckfs/full/embed", "models.example.com", port=s3)[0] == 200
        assert named(server, "/healthz", name)[0] == 200
    with Server(path, "--token-file", tmp_path / "token", home=home) as server:
        assert named(server, "/files/full/embed", name)[0] == 401
        assert server.request("/files/full/embed", Host=name, Authorization="Bearer s3cret")[0].status == 200
    with Server(path, "--allow-anyone", home=home) as server:
        # Directories of tests are closed to other users.
        assert named(server, "/files/full/embed", name)[0] == 403
        assert named(server, "/files/full/embed", "localhost")[0] == 200


def test_a_browser_gets_a_page_of_links(server: Server) -> None:
    reply, page = server.request("/files/", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    links = re.findall(r'<a href="([^"]+)">([^<]+)</a>', page.decode())
    assert ("/files/dev0/", "dev0/") in links and ("/files/mesh/", "mesh/") in links
    seen: set[str] = set()
    pending = [link for link, _ in links]
    while pending:
        link = pending.pop()
        if link in seen or not link.endswith("/") or link.count("/") > 5:
            continue
        seen.add(link)
        reply, page = server.request(link, Accept="text/html")
        assert reply.status == 200, link
        pending += [link for link, _ in re.findall(r'<a href="([^"]+)">([^<]+)</a>', page.decode())]
    assert "/files/dev7/layers/scanned/" in seen
    assert b"/files/" in server.get("/") and b"ckfs/llama_f32" in server.get("/")


def test_paths_lead_nowhere_else(server: Server, exported: Path) -> None:
    expected = (exported / "dev0/embed").read_bytes()
    assert server.get("/files/dev0//embed") == expected
    assert server.get("/files/%64ev0/embed") == expected
    assert server.get("/files/mesh/fsdp%3D0,tensor%3D0/embed") == expected
    for path, status in [
        ("/files/../etc/passwd", 400), ("/files/dev0/../dev1/embed", 400), ("/files/%2e%2e/x", 400), ("/files/dev0/%2E/embed", 400),
        ("/files/dev0%2Fembed", 400), ("/files/dev0/embed%00", 400), ("/files/%ff", 400), ("/files/absent", 404),
        ("/files/dev0/embed/x", 404), ("/files/dev0/%2565mbed", 404), ("/ckfs/llama_f32/resolve/main/%2e%2e/dev0/embed", 404),
        ("/filesx", 404), ("/absent", 404), ("/api/models/ckfs/llama_f32/tree/main/..%2f..", 404),
    ]:  # fmt: skip
        assert server.request(path)[0].status == status, path


def test_health_and_metrics(server: Server) -> None:
    assert server.get("/healthz") == b"alive\n"
    assert server.get("/readyz") == b"ready\n"
    text = server.get("/metrics").decode()
    assert text.endswith("# EOF\n") and "ckfs_degraded 0\n" in text
    assert int(re.search(r'ckfs_ops_total{op="read"} (\d+)', text)[1]) > 0
    assert json.loads(server.get("/files/.ckfs/stats.json"))["health"] == "healthy"


def test_many_readers_at_a_time(server: Server, exported: Path) -> None:
    paths = [path for path in files_below(exported) if path.startswith(("dev", "full/", "npy/"))]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for path, body in zip(paths, pool.map(lambda path: server.get(f"/files/{path}"), paths), strict=True):
            assert body == (exported / path).read_bytes(), path


def test_the_commit_is_that_of_plan_and_sources(repo, fresh, home: Path, server: Server) -> None:
    def commit(source: object, *flags: str) -> str:
        with Server(source, *flags, home=home) as other:
            model = other.json("/api/models")[0]
            assert re.fullmatch("[0-9a-f]{40}", model["sha"])
            return model["sha"]

    path = repo("llama_f32").path
    own = server.json("/api/models/ckfs/llama_f32")["sha"]
    assert commit(path, *FLAGS) == own
    assert commit(path, "--mesh", "fsdp=4,tensor=2") != own
    other = fresh("llama_f32")
    first = commit(other.path)
    file = next(other.path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    second, times = commit(other.path), file.stat()
    assert second != first
    # A program may give a file its old time again: rsync, touch, tar.
    file.write_bytes(file.read_bytes()[:-1] + b"\2")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert commit(other.path) != second
    # Clients of the Hub take the address of the commit from here, so that it is theirs until they have the file.
    reply, _ = server.request("/ckfs/llama_f32/resolve/main/config.json", "HEAD")
    assert (reply.status, reply.headers["Location"]) == (200, f"{server.url}/ckfs/llama_f32/resolve/{own}/config.json")


# Clients of the Hub.


@pytest.fixture(scope="module")
def models(base: Path) -> dict[str, Path]:
    """A model of transformers in float32, in several files."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    path = base / "serve-models/plain"
    save_llama(path)
    return {"plain": path}


def save_llama(path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path, max_shard_size="100KB")


def test_snapshot_download_and_single_files(server: Server, exported: Path, tmp_path: Path) -> None:
    out = run_client(
        """
        import json, os
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
        api = HfApi()
        info = api.model_info("ckfs/llama_f32", files_metadata=True)
        assert [s.size for s in info.siblings] == [s.size for s in api.list_repo_tree("ckfs/llama_f32", recursive=True)]
        assert api.list_repo_refs("ckfs/llama_f32").branches[0].target_commit == info.sha
        assert api.repo_exists("ckfs/llama_f32") and not api.repo_exists("ckfs/other")
        assert api.file_exists("ckfs/llama_f32", "config.json") and not api.file_exists("ckfs/llama_f32", "absent")
        assert {i.path for i in api.get_paths_info("ckfs/llama_f32", ["config.json", "absent"])} == {"config.json"}
        path = snapshot_download("ckfs/llama_f32")
        assert path == snapshot_download("ckfs/llama_f32", revision=info.sha), "the commit is a revision"
        assert path.endswith(info.sha)
        for call, error in [
            (lambda: hf_hub_download("ckfs/llama_f32", "absent"), EntryNotFoundError),
            (lambda: hf_hub_download("ckfs/other", "config.json"), RepositoryNotFoundError),
            (lambda: hf_hub_download("ckfs/llama_f32", "config.json", revision="v9"), RevisionNotFoundError),
            (lambda: api.model_info("ckfs/other"), RepositoryNotFoundError),
            (lambda: api.model_info("ckfs/llama_f32", revision="v9"), RevisionNotFoundError),
        ]:
            try:
                call()
            except error:
                continue
            raise AssertionError(error)
        # Bytes of a download that broke off are not asked for again.
        name = sorted(s.rfilename for s in info.siblings if s.rfilename.endswith(".safetensors"))[0]
        whole = open(os.path.join(path, name), "rb").read()
        local = os.environ["HOME"] + "/local"
        hf_hub_download("ckfs/llama_f32", name, local_dir=local)
        assert open(f"{local}/{name}", "rb").read() == whole
        print(json.dumps(path))
        """,
        tmp_path,
        HF_ENDPOINT=server.url,
    )
    assert files_below(Path(json.loads(out))) == files_below(exported / "hf")


def test_what_is_not_here_is_said_as_the_hub_says_it(server: Server, exported: Path, tmp_path: Path) -> None:
    config = (exported / "hf/config.json").read_bytes()
    out = run_client(
        """
        import json
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
        api, name = HfApi(), "ckfs/llama_f32"
        def refused(error, call):
            try:
                call()
            except error as found:
                return type(found) is error
            raise AssertionError("not refused")
        for kind in (None, "dataset", "space"):
            for other in ("gpt2", "org/other"):
                assert not api.repo_exists(other, repo_type=kind), (other, kind)
                assert not api.file_exists(other, "x", repo_type=kind)
                assert not api.revision_exists(other, "main", repo_type=kind)
                assert refused(RepositoryNotFoundError, lambda: hf_hub_download(other, "x", repo_type=kind))
                assert refused(RepositoryNotFoundError, lambda: api.list_repo_refs(other, repo_type=kind))
                assert refused(RepositoryNotFoundError, lambda: list(api.list_repo_tree(other, repo_type=kind)))
                assert refused(RepositoryNotFoundError, lambda: api.get_paths_info(other, ["x"], repo_type=kind))
                assert refused(RepositoryNotFoundError, lambda: api.auth_check(other, repo_type=kind))
        assert not api.repo_exists(name, repo_type="dataset") and list(api.list_datasets()) == list(api.list_spaces()) == []
        api.auth_check(name)
        for revision, there in (("main", True), ("HEAD", True), ("refs/heads/main", True), ("v9", False)):
            assert api.revision_exists(name, revision) == there, revision
        assert not api.file_exists(name, "absent") and api.file_exists(name, "config.json")
        commit = api.model_info(name).sha
        assert api.model_info(name, revision="HEAD").sha == commit
        commits = api.list_repo_commits(name)
        assert [found.commit_id for found in commits] == [commit] and commits[0].authors == ["ckfs"]
        assert refused(RevisionNotFoundError, lambda: api.list_repo_commits(name, revision="v9"))
        assert refused(RepositoryNotFoundError, lambda: api.list_repo_commits("gpt2"))
        for query, count in (({"search": "LLAMA"}, 1), ({"search": "mistral"}, 0), ({"author": "ckfs"}, 1), ({"author": "meta"}, 0)):
            assert len(list(api.list_models(**query))) == count, query
        print(hf_hub_download(name, "config.json", revision="HEAD"))
        """,
        tmp_path,
        HF_ENDPOINT=server.url,
    )
    assert Path(out.strip()).read_bytes() == config
    assert server.get("/ckfs/llama_f32/raw/main/config.json") == config
    reply, _ = server.request("/api/models/ckfs/llama_f32/discussions")
    assert (reply.status, reply.headers["X-Error-Code"]) == (404, None)


def test_from_pretrained_names_the_repository_that_is_not_here(server: Server, tmp_path: Path) -> None:
    out = run_client(
        """
        from transformers import AutoConfig
        try:
            AutoConfig.from_pretrained("gpt2")
        except OSError as error:
            print(error)
        """,
        tmp_path,
        HF_ENDPOINT=server.url,
    )
    assert "gpt2 is not a local folder and is not a valid model identifier" in out and "connection" not in out


def test_object_names_of_small_files_are_those_of_git(server: Server, exported: Path, tmp_path: Path) -> None:
    """`hf cache verify` compares them, and so does ckfs. All files of this repository are small."""
    rows = server.json("/api/models/ckfs/llama_f32/tree/main?recursive=true")
    for row in (row for row in rows if row["type"] == "file"):
        body = (exported / "hf" / row["path"]).read_bytes()
        assert row["oid"] == hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest(), row["path"]
        reply, _ = server.request(f"/ckfs/llama_f32/resolve/main/{row['path']}", "HEAD")
        assert reply.headers["ETag"] == reply.headers["X-Linked-Etag"] == f'"{row["oid"]}"'
    siblings = server.json("/api/models/ckfs/llama_f32?blobs=true")["siblings"]
    assert {row["rfilename"]: row["blobId"] for row in siblings} == {row["path"]: row["oid"] for row in rows if row["type"] == "file"}
    out = run_client(
        """
        from huggingface_hub import HfApi, snapshot_download
        snapshot_download("ckfs/llama_f32")
        found = HfApi().verify_repo_checksums("ckfs/llama_f32")
        print(found.checked_count, found.mismatches, found.missing_paths, found.extra_paths)
        """,
        tmp_path,
        HF_ENDPOINT=server.url,
    )
    assert out == f"{len(siblings)} [] [] []\n"


def test_an_empty_file_tells_its_size(fresh, home: Path) -> None:
    """Clients in Rust and JavaScript ask for the first byte of each file, and take its size from `Content-Range`."""
    source = fresh("llama_f32").path
    (source / "empty.txt").write_bytes(b"")
    with Server(source, "--name", "org/model", home=home) as server:
        for path in ("/org/model/resolve/main/empty.txt", "/org/model/raw/main/empty.txt"):
            reply, body = server.request(path, Range="bytes=0-0")
            assert (reply.status, body, reply.headers["Content-Range"].split("/")[1]) == (200, b"", "0")
            assert reply.headers["ETag"] and len(reply.headers["X-Repo-Commit"]) == 40
        reply, body = server.request("/org/model/resolve/main/config.json", Range="bytes=0-0")
        assert (reply.status, len(body), reply.headers["Content-Range"].split("/")[0]) == (206, 1, "bytes 0-0")


def test_a_download_that_broke_off_is_resumed(server: Server, exported: Path, tmp_path: Path) -> None:
    name = next(path.name for path in sorted((exported / "hf").iterdir()) if path.suffix == ".safetensors")
    whole = (exported / "hf" / name).read_bytes()
    out = run_client(
        f"""
        import glob, os
        from huggingface_hub import hf_hub_download, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.file_download import http_get
        url = hf_hub_url("ckfs/llama_f32", {name!r})
        found = get_hf_file_metadata(url)
        assert found.size == {len(whole)} and len(found.commit_hash) == 40 and found.etag and found.xet_file_data is None
        with open(os.environ["HOME"] + "/part", "w+b") as part:
            part.write(open({str(exported / "hf" / name)!r}, "rb").read()[:100])
            part.flush()
            http_get(url, part, resume_size=100, expected_size=found.size)
            part.seek(0)
            assert part.read() == open({str(exported / "hf" / name)!r}, "rb").read()
        path = hf_hub_download("ckfs/llama_f32", {name!r})
        print(os.path.basename(os.path.realpath(path)) == found.etag)
        """,
        tmp_path,
        HF_ENDPOINT=server.url,
    )
    assert out == "True\n"


def test_the_file_system_of_the_hub(server: Server, exported: Path, tmp_path: Path) -> None:
    out = run_client(
        """
        import hashlib, json
        from huggingface_hub import HfFileSystem
        fs = HfFileSystem()
        found = {}
        for path in fs.find("ckfs/llama_f32"):
            with fs.open(path, "rb", block_size=4096) as file:
                found[path.removeprefix("ckfs/llama_f32/")] = hashlib.sha256(file.read()).hexdigest()
        name = sorted(path for path in found if path.endswith(".safetensors"))[0]
        with fs.open(f"ckfs/llama_f32/{name}", "rb") as file:
            file.seek(100)
            part = file.read(50).hex()
        assert fs.info("ckfs/llama_f32/config.json")["size"] == fs.size("ckfs/llama_f32/config.json")
        print(json.dumps([found, name, part]))
        """,
        tmp_path,
        HF_ENDPOINT=server.url,
    )
    found, name, part = json.loads(out)
    expected = files_below(exported / "hf")
    assert found == {path: hashlib.sha256(body).hexdigest() for path, body in expected.items()}
    assert bytes.fromhex(part) == expected[name][100:150]


def test_a_tree_comes_in_pages(server: Server) -> None:
    whole = server.json("/api/models/ckfs/llama_f32/tree/main?recursive=true")
    found, path = [], "/api/models/ckfs/llama_f32/tree/main?recursive=true&limit=2"
    while path:
        reply, body = server.request(path)
        rows = json.loads(body)
        assert 1 <= len(rows) <= 2
        found += rows
        link = reply.headers["Link"]
        path = re.fullmatch(rf'<{re.escape(server.url)}(/[^>]+)>; rel="next"', link)[1] if link else None
    assert found == whole and len(whole) > 4


@pytest.mark.parametrize("flags", [(), ("--dtype", "bf16"), ("--dtype", "f16", "--layers", "0..2")], ids=["plain", "bf16", "cut"])
def test_transformers_loads_it_by_name(models: dict[str, Path], home: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The same model as from the files of an export."""
    exported = tmp_path / "exported"
    mounting.run("export", models["plain"], exported, "--only", "hf/*", *flags)
    with Server(models["plain"], "--name", "my/model", *flags, home=home) as server:
        out = run_client(
            f"""
            import torch, transformers
            found = transformers.AutoModelForCausalLM.from_pretrained("my/model", dtype="auto")
            expected = transformers.AutoModelForCausalLM.from_pretrained({str(exported / "hf")!r}, dtype="auto")
            ours, theirs = found.state_dict(), expected.state_dict()
            assert ours.keys() == theirs.keys()
            assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs)
            print(found.dtype, len(found.model.layers))
            """,
            tmp_path,
            HF_ENDPOINT=server.url,
        )
    dtype = {(): "float32", ("--dtype", "bf16"): "bfloat16"}.get(flags, "float16")
    assert out == f"torch.{dtype} {2 if '--layers' in flags else 3}\n"


def test_transformers_loads_what_is_dequantized(repo, home: Path, tmp_path: Path) -> None:
    source = repo("block_fp8_bf16").path
    exported = tmp_path / "exported"
    mounting.run("export", source, exported, "--only", "hf/*", "--dequantize")
    with Server(source, "--dequantize", "--name", "my/model", home=home) as server:
        out = run_client(
            """
            from huggingface_hub import snapshot_download
            print(snapshot_download("my/model"))
            """,
            tmp_path,
            HF_ENDPOINT=server.url,
        )
    assert files_below(Path(out.strip())) == files_below(exported / "hf")
    assert "quantization_config" not in json.loads((Path(out.strip()) / "config.json").read_text())


def test_ckfs_reads_from_another_ckfs(server: Server, exported: Path, tmp_path: Path) -> None:
    """By the name of a repository; the disk cache is used, and a second run finds the same bytes in it."""
    env = {"HF_ENDPOINT": server.url, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    for turn in range(2):
        target = tmp_path / f"out{turn}"
        mounting.run("export", "ckfs/llama_f32", target, "--only", "hf/*", env=os.environ | env)
        assert files_below(target / "hf") == files_below(exported / "hf")
    with Server("ckfs/llama_f32", "--mesh", "fsdp=2", home=tmp_path, **env) as second:
        assert second.json("/api/models")[0]["id"] == "ckfs/llama_f32", "the name goes on"
        for name, body in files_below(exported / "hf").items():
            assert second.get(f"/files/hf/{name}") == body, name


# Configuration, rights, the end.


def test_a_file_with_several_views(repo, home: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(f"""
source = "{repo('llama_f32').path}"
[view.train]
mesh = "fsdp=2"
[view.rollout]
layout = "hf"
dtype = "bf16"
[serve]
listen = "127.0.0.1:0"
""")
    exported = tmp_path / "exported"
    mounting.run("export", "--config", config, exported)
    with Server("--config", config, home=home) as server:
        assert {row["id"] for row in server.json("/api/models")} == {"ckfs/train", "ckfs/rollout"}
        commits = {row["sha"] for row in server.json("/api/models")}
        assert len(commits) == 2
        for view in ("train", "rollout"):
            for path, body in files_below(exported / view / "hf").items():
                assert server.get(f"/ckfs/{view}/resolve/main/{path}") == body
                assert server.get(f"/files/{view}/hf/{path}") == body
        assert server.get("/files/train/dev1/embed") == (exported / "train/dev1/embed").read_bytes()
    done = mounting.run("serve", "--config", config, "--name", "a/b", expect=2)
    assert "--name a/b: there are 2 views" in done.err


def test_a_token_is_asked_for(repo, home: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    path = repo("llama_f32").path
    with Server(path, "--token-file", token, home=home) as server:
        bearer = "Bearer s3cret"
        assert server.request("/files/dev0/embed", Authorization=bearer)[0].status == 200
        assert server.request("/files/.ckfs/plan.txt", Authorization=bearer)[0].status == 200
        for address in ("/", "/files/", "/files/dev0/embed", "/metrics", "/api/models", "/ckfs/llama_f32/resolve/main/config.json"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic czNjcmV0"}, {"Authorization": "s3cret"}):
                reply, body = server.request(address, **headers)
                assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, 'Bearer realm="ckfs"'), address
                assert b"llama" not in body
        assert server.get("/healthz") == b"alive\n" and server.get("/readyz") == b"ready\n"
        script = """
            from huggingface_hub import hf_hub_download, snapshot_download
            try:
                print(len(open(hf_hub_download("ckfs/llama_f32", "config.json")).read()) > 0)
            except Exception as error:
                print(type(error).__name__)
        """
        good = run_client(script, tmp_path / "a", HF_ENDPOINT=server.url, HF_TOKEN="s3cret")
        bad = run_client(script, tmp_path / "b", HF_ENDPOINT=server.url, HF_TOKEN="wrong")
    assert (good, bad != "True\n") == ("True\n", True)


def test_other_machines_are_let_in_on_purpose_only(repo, home: Path) -> None:
    done = mounting.run("serve", repo("llama_f32").path, "--listen", "0.0.0.0:0", expect=2)
    assert "--listen 0.0.0.0:0: other machines reach this address; --token-file FILE" in done.err
    done = mounting.run("serve", repo("llama_f32").path, "--listen", "example.org:80", expect=2)
    assert "expected PORT, or IP:PORT" in done.err


def own_address() -> str | None:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        except OSError:
            return None
    return None if address.startswith("127.") else address


def test_strangers_see_what_all_users_may_read(fresh, home: Path, tmp_path: Path) -> None:
    """A peer that is not loopback, without a token: the permissions of the sources hold, and .ckfs/ is not there."""
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    source = fresh("llama_f32").path
    with Server(source, "--listen", f"{address}:0", "--allow-anyone", home=home) as server:
        # Directories of tests are closed to other users.
        assert server.request("/files/dev0/embed")[0].status == 403
        assert server.request("/files/")[0].status == 403
        assert server.get("/readyz") == b"ready\n"
    with Server(source, "--listen", f"{address}:0", "--allow-anyone", "--file-mode", "0444", "--dir-mode", "0555", home=home) as server:
        assert len(server.get("/files/dev0/embed")) > 0
        names = {row["name"] for row in server.json("/files/")}
        assert "dev0" in names and ".ckfs" not in names
        for path in ("/files/.ckfs/", "/files/.ckfs/plan.txt", "/files/.ckfs/stats.json"):
            assert server.request(path)[0].status == 404, path
        assert server.json("/api/models/ckfs/llama_f32")["sha"]


def is_closed(server: Server) -> bool:
    with socket.socket() as client:
        return client.connect_ex((server.host, server.port)) != 0


def test_every_door_shows_strangers_the_same(fresh, home: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        source, token = root / "model", root / "token"
        shutil.copytree(fresh("llama_f32").path, source)
        for below in ("listed", "passed", "closed"):
            (source / below).mkdir()
            (source / below / "x.json").write_text("{}")
        for path in (root, source, *source.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (source / "listed/own.json").write_text("{}")
        (source / "listed/own.json").chmod(0o600)
        (source / "passed").chmod(0o711)
        (source / "closed").chmod(0o700)
        token.write_text("secret\n")
        token.chmod(0o600)
        flags = ("--layout", "hf", "--s3", "0", "--token-file", token, "--allow-anyone")
        with Server(source, *flags, home=home) as server:
            model, known = "/api/models/ckfs/model", {"Authorization": "Bearer secret"}
            s3 = re.search(r"S3 at (http://[^,]+)", server.told)[1]
            keys = urllib.request.urlopen(f"{s3}/ckfs?list-type=2&prefix=hf/", timeout=60).read().decode()
            of_keys = set(re.findall("<Key>hf/([^<]*)</Key>", keys))
            rows = server.json(f"{model}/tree/main?recursive=true")
            of_tree = {row["path"] for row in rows if row["type"] == "file"}
            siblings = {row["rfilename"] for row in server.json(model)["siblings"]}
            listed = {"listed/x.json", "listed/own.json"}
            assert of_keys == of_tree == siblings and {path for path in siblings if "/" in path} == listed
            # A digest would tell strangers what is in a file that they may not read.
            names = {row["path"]: row["oid"] for row in rows}
            assert names["listed/own.json"].startswith("ckfs-") and len(names["listed/x.json"]) == 40
            own = json.loads(server.get(f"{model}/tree/main/listed", **known))
            assert len({row["oid"] for row in own}) == 1, "both are {}"
            assert server.request("/files/hf/listed/own.json")[0].status == 403
            assert {"listed/x.json", "passed/x.json", "closed/x.json"} <= {
                row["rfilename"] for row in json.loads(server.get(model, **known))["siblings"]
            }
            for below, status in (("listed", 200), ("passed", 200), ("closed", 403)):
                for path in (f"/files/hf/{below}/x.json", f"/ckfs/model/resolve/main/{below}/x.json"):
                    assert server.request(path)[0].status == status, path
                listed = 200 if below == "listed" else 403
                for path in (f"/files/hf/{below}/", f"{model}/tree/main/{below}"):
                    assert server.request(path)[0].status == listed, path
                code = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", f"{s3}/ckfs?list-type=2&prefix=hf/{below}/"]
                assert subprocess.run(code, capture_output=True, text=True, check=True).stdout == str(listed), below
            assert place.encode() not in server.get("/") and place.encode() in server.get("/", **known)
        source.chmod(0o700)
        with Server(source, *flags, home=home) as server:
            assert server.json("/api/models") == []
            for path in (model, "/ckfs/model/resolve/main/config.json", "/files/hf/config.json"):
                assert server.request(path)[0].status == 403, path
                assert server.request(path, **known)[0].status == 200, path


def test_the_end_waits_for_answers_that_have_begun(wide: repos.Repo, home: Path) -> None:
    server = Server(wide.path, home=home)
    expected = next(iter(sorted(wide.path.glob("*.safetensors"))))
    size = expected.stat().st_size
    assert size > 4 << 20, "more than sockets hold"
    with socket.create_connection((server.host, server.port), timeout=60) as client, socket.create_connection((server.host, server.port)):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.sendall(f"GET /files/hf/{expected.name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        received = client.recv(1000)
        server.process.terminate()
        mounting.wait_until(lambda: is_closed(server), what="no more connections")
        assert server.process.poll() is None, "an answer has begun"
        while part := client.recv(1 << 20):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert body == expected.read_bytes()
    server.stop()


def test_a_second_signal_cuts_answers_off(wide: repos.Repo, home: Path) -> None:
    server = Server(wide.path, home=home)
    name = next(iter(sorted(wide.path.glob("*.safetensors")))).name
    with socket.create_connection((server.host, server.port), timeout=60) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.sendall(f"GET /files/hf/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        client.recv(1000)
        server.process.terminate()
        mounting.wait_until(lambda: is_closed(server), what="no more connections")
        server.process.terminate()
        log = server.stop(expect=1)
    assert "answers were cut off" in log


def test_what_is_wrong_is_said_at_the_start(repo, tmp_path: Path) -> None:
    path = repo("llama_f32").path
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = mounting.run("serve", path, "--listen", port, expect=1)
        # The texts of system errors are those of the C library: glibc's, or musl's in the released program.
        assert re.search(rf"listen on 127\.0\.0\.1:{port}: Address (already )?in use", done.err)
    for flags, text in [
        (("--token-file", tmp_path / "absent"), "--token-file"),
        (("--name", "no name"), "expected ORG/NAME"),
        (("--listen", "x"), "expected PORT"),
    ]:
        assert text in mounting.run("serve", path, *flags, expect=2).err
    assert "no such" in mounting.run("serve", tmp_path / "absent-source", expect=1).err.lower()
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert "expected a token" in mounting.run("serve", path, "--token-file", empty, expect=2).err


def test_a_source_that_changes_ends_the_answer_and_is_named(fresh, home: Path) -> None:
    source = fresh("llama_f32").path
    with Server(source, "--dtype", "bf16", home=home) as server:
        assert server.get("/readyz") == b"ready\n"
        for file in source.glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1] + b"\1")
        reply, body = server.request("/files/full/embed")
        assert reply.status == 500 and b"(os error 5)" in body
        reply, body = server.request("/readyz")
        assert reply.status == 503 and body.startswith(b"degraded\nsource changed: ") and str(source).encode() in body
        assert server.get("/healthz") == b"alive\n"
        assert "ckfs_degraded 1\n" in server.get("/metrics").decode()


def test_a_body_on_its_way_leaves_the_connection_open(server: Server) -> None:
    """A client sends head and body in two packets, and its next request after an answer that did not need the body."""

    def answer(client: socket.socket, method: str) -> tuple[int, bool]:
        reply = http.client.HTTPResponse(client, method=method)
        reply.begin()
        reply.read()
        return reply.status, reply.will_close

    body = b'{"paths": ["x"]}'

    def head(length: int, *more: str) -> bytes:
        lines = ["POST /api/models/gpt2/paths-info/main HTTP/1.1", "Host: x", f"Content-Length: {length}", *more, "", ""]
        return "\r\n".join(lines).encode()

    with socket.create_connection((server.host, server.port), timeout=60) as client:
        for _ in range(3):
            client.sendall(head(len(body)))
            select.select([client], [], [], 0.2)  # A server that does not wait for the body has answered.
            client.sendall(body)
            assert answer(client, "POST") == (404, False)
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer(client, "GET") == (200, False)
    for sent in (head(len(body), "Expect: 100-continue"), head(1 << 30)):
        with socket.create_connection((server.host, server.port), timeout=60) as client:
            client.sendall(sent)
            assert answer(client, "POST") == (404, True)


def test_pipelined_requests_are_answered_in_order(server: Server, exported: Path) -> None:
    paths = ["dev0/embed", "dev1/embed", "absent", "dev2/embed", "full/final_norm"] * 20
    sent = "".join(f"GET /files/{path} HTTP/1.1\r\nHost: x\r\n\r\n" for path in paths[:-1])
    sent += f"GET /files/{paths[-1]} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=60) as client:
        sender = threading.Thread(target=client.sendall, args=(sent.encode(),))
        sender.start()
        received = b""
        while part := client.recv(1 << 16):
            received += part
        sender.join()
    for path in paths:
        head, _, received = received.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        body, received = received[:length], received[length:]
        if path == "absent":
            assert head.startswith(b"HTTP/1.1 404")
        else:
            assert (head[:12], body) == (b"HTTP/1.1 200", (exported / path).read_bytes()), path
    assert received == b""
