"""`ckfs serve --steps`: unmodified clients read the steps of a run, which come and go meanwhile. Every byte is compared with what
`ckfs export` writes of the step alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mounting
from mounting import wait_until
from servers import STUB_SETTINGS, Stub, clean, moto_bucket  # noqa: F401  fixture
from servers import request as http_request
from serving import Server, run_client
from test_serve import files_below, save_llama

FLAGS = ("--mesh", "fsdp=2")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve-runs-home")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, bytes]]:
    """The files of a step as transformers writes them, with the file that ends it last."""
    model = tmp_path_factory.mktemp("serve-runs") / "model"
    save_llama(model)

    def files(number: int) -> dict[str, bytes]:
        made = {}
        for path in sorted(model.iterdir()):
            made[path.name] = path.read_bytes()
            if path.suffix == ".safetensors":
                tensors = {name: array + np.float32(number) for name, array in load_file(path).items()}
                save_file(tensors, model.with_name("part"), metadata={"format": "pt"})
                made[path.name] = model.with_name("part").read_bytes()
        return made | {"trainer_state.json": json.dumps({"global_step": number}).encode()}

    return files


def save(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(parents=True)
    for name, body in files.items():
        (directory / name).write_bytes(body)


def steps(server: Server) -> list[str]:
    return sorted((row["name"] for row in server.json("/files/") if row["name"].isdigit()), key=int)


def exported(source: Path, target: Path, *flags: str) -> dict[str, bytes]:
    """The files of a step alone that are the same at each request."""
    mounting.run("export", source, target, *flags)
    return {path: body for path, body in files_below(target).items() if not path.startswith((".ckfs/", "mesh/"))}


@pytest.fixture
def run(tmp_path: Path, trained) -> Path:
    """A run of two steps."""
    for number in (100, 200):
        save(tmp_path / f"run/checkpoint-{number}", trained(number))
    return tmp_path / "run"


def test_every_file_of_every_step_is_that_of_an_export(run: Path, home: Path, tmp_path: Path, trained) -> None:
    with Server(run, "--steps", "all", *FLAGS, home=home) as server:
        assert "(2 steps, the newest 200)" in server.label and "has ckfs/run" in server.told
        assert steps(server) == ["100", "200"]
        for number in ("100", "200"):
            expected = exported(run / f"checkpoint-{number}", tmp_path / number, *FLAGS)
            found, pending = {}, [""]
            while pending:
                above = pending.pop()
                for row in server.json(f"/files/{number}/{above}"):
                    path = above + row["name"]
                    if row["type"] == "directory" and path != ".ckfs":
                        pending.append(f"{path}/")
                    elif row["type"] == "file":
                        found[path] = server.get(f"/files/{number}/{path}")
                        assert len(found[path]) == row["size"], path
            assert found.keys() == expected.keys()
            for path, body in expected.items():
                assert found[path] == body, path
            assert server.get(f"/files/{number}/mesh/fsdp=1/embed") == expected["dev1/embed"]
        tags = [server.request(f"/files/{name}/hf/config.json", "HEAD")[0].headers["ETag"] for name in ("200", "100")]
        assert tags[0] != tags[1] and tags[0].startswith('"ckfs-')
        url = f"{server.url}/files/latest/dev1/embed"
        curl = ["curl", "-sSL", "--fail", "-r", "10-99", url]
        assert subprocess.run(curl, capture_output=True, check=True).stdout == expected["dev1/embed"][10:100]
        # A file that is made at each request has the tag of its bytes: who waits for a step is told that there is none yet.
        path = "/files/.ckfs/steps.json"
        reply, body = server.request(path)
        tag = reply.headers["ETag"]
        assert (server.request(path)[0].headers["ETag"], server.request(path, If_None_Match=tag)[0].status) == (tag, 304)
        assert server.request(path, Range="bytes=5-9", If_Match=tag)[1] == body[5:10]
        assert server.request(path, Range="bytes=5-9")[1] == body
        # What there is, for programs and people.
        listed = server.json("/files/.ckfs/steps.json")
        assert (listed["latest"], [row["step"] for row in listed["steps"]]) == (200, [100, 200])
        assert b"ckfs/run" in server.get("/", Accept="text/html") and b'href="/files/200/"' in server.get("/files/")
        assert b"ckfs_latest_step 200" in server.get("/metrics")
        for absent in ("300/hf/config.json", "0100/hf/config.json", "100/absent", "x", ".ckfs/absent"):
            assert server.request(f"/files/{absent}")[0].status == 404, absent


def test_a_listing_plans_no_step(run: Path, home: Path) -> None:
    with Server(run, "--steps", "all", "--s3", "0", *FLAGS, home=home) as server:
        s3 = re.search(r"S3 at http://[^:]+:(\d+)", server.told)[1]
        server.get("/files/")
        server.get("/files/", Accept="text/html")
        subprocess.run(["curl", "-sS", "--fail", f"http://127.0.0.1:{s3}/ckfs?list-type=2&delimiter=/"], check=True)
        assert server.json("/files/.ckfs/stats.json")["steps"]["plans"] == 0


def test_a_step_is_a_revision(run: Path, home: Path, tmp_path: Path) -> None:
    with Server(run, "--steps", "all", "--name", "my/run", *FLAGS, home=home) as server:
        out = run_client(
            """
            import json
            from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download
            from huggingface_hub.errors import RevisionNotFoundError
            api = HfApi()
            shas = {name: api.model_info("my/run", revision=name).sha for name in ("100", "200", "main")}
            assert shas["200"] == shas["main"] == api.model_info("my/run").sha != shas["100"]
            branches = {row.name: row.target_commit for row in api.list_repo_refs("my/run").branches}
            assert branches == shas, branches
            commits = {name: [row.commit_id for row in api.list_repo_commits("my/run", revision=name)] for name in ("100", "200", "HEAD")}
            assert commits == {"100": [shas["100"]], "200": [shas["200"], shas["100"]], "HEAD": [shas["200"], shas["100"]]}, commits
            assert [row.title for row in api.list_repo_commits("my/run")] == ["step 200", "step 100"]
            paths = {name: snapshot_download("my/run", revision=name) for name in ("100", "200")}
            assert snapshot_download("my/run") == snapshot_download("my/run", revision=shas["200"]) == paths["200"]
            assert paths["100"].endswith(shas["100"])
            name = hf_hub_download("my/run", "config.json", revision="100")
            assert name == paths["100"] + "/config.json"
            fs = HfFileSystem()
            assert fs.read_text("my/run@100/trainer_state.json") != fs.read_text("my/run@200/trainer_state.json")
            for unknown in ("300", "v9", "0" * 40):
                try:
                    snapshot_download("my/run", revision=unknown)
                except RevisionNotFoundError as error:
                    assert "the steps from 100 to 200" in str(error), error
                else:
                    raise AssertionError(unknown)
            print(json.dumps([paths, shas]))
            """,
            tmp_path,
            HF_ENDPOINT=server.url,
        )
    paths, shas = json.loads(out)
    for number, path in paths.items():
        expected = exported(run / f"checkpoint-{number}", tmp_path / number, *FLAGS, "--only", "hf/*")
        assert {f"hf/{name}": body for name, body in files_below(Path(path)).items()} == expected
    # The commits are those of another server of the same steps, which knows none of them at first.
    with Server(run, "--steps", "all", "--name", "my/run", *FLAGS, home=home) as server:
        reply, body = server.request(f"/my/run/resolve/{shas['100']}/config.json")
        assert (reply.status, reply.headers["X-Repo-Commit"]) == (200, shas["100"])
        assert body == (Path(paths["100"]) / "config.json").read_bytes()
    # And those of a server of one step alone.
    with Server(run / "checkpoint-100", "--name", "my/run", *FLAGS, home=home) as server:
        assert server.json("/api/models/my/run")["sha"] == shas["100"]


def test_a_name_that_moves_is_answered_by_the_address_of_its_commit(run: Path, home: Path, tmp_path: Path, trained) -> None:
    save(tmp_path / "next", trained(300))
    with Server(run, "--steps", "all", "--s3", "0", *FLAGS, home=home) as server:
        shas = {number: server.json(f"/api/models/ckfs/run/revision/{number}")["sha"] for number in ("100", "200")}
        resolve = "/ckfs/run/resolve"
        for path, address in [
            ("/files/latest/hf/config.json", "/files/200/hf/config.json"), ("/files/latest", "/files/200/"),
            ("/files/latest/hf/", "/files/200/hf/"),
            (f"{resolve}/main/config.json?download=true", f"{server.url}{resolve}/{shas['200']}/config.json?download=true"),
        ]:  # fmt: skip
            for method in ("GET", "HEAD"):
                reply, _ = server.request(path, method)
                assert (reply.status, reply.headers["Location"]) == (307, address), (path, method)
        reply, _ = server.request(f"{resolve}/100/config.json", "HEAD")
        assert (reply.status, reply.headers["Location"]) == (200, f"{server.url}{resolve}/{shas['100']}/config.json")
        assert server.request("/files/latest/absent")[0].status == 404
        # Clients of S3 follow no address; parts of two steps are refused.
        s3 = re.search(r"S3 at http://[^:]+:(\d+)", server.told)[1]
        key = f"http://127.0.0.1:{s3}/ckfs/latest/dev0/embed"
        code = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code} %header{etag}", key]
        status, etag = subprocess.run(code, capture_output=True, text=True, check=True).stdout.split()
        assert status == "200"
        told = subprocess.run(["curl", "-sS", "-r", "0-9", key], capture_output=True, text=True, check=True).stdout
        assert "<Code>InvalidRequest</Code>" in told and "ask for 200/dev0/embed" in told
        part = ["curl", "-sS", "--fail", "-r", "0-9", "-H", f"If-Match: {etag}", key]
        assert subprocess.run(part, capture_output=True, check=True).stdout == server.get("/files/200/dev0/embed")[:10]
        # The branch moves between the two requests of a client.
        path = run_client(
            f"""
            import os, time
            import huggingface_hub.file_download as download
            from huggingface_hub import HfApi, hf_hub_download
            get = download.http_get
            def late(*args, **kwargs):
                os.rename({str(tmp_path / "next")!r}, {str(run / "checkpoint-300")!r})
                while HfApi().model_info("ckfs/run").sha == {shas["200"]!r}:
                    time.sleep(0.05)
                return get(*args, **kwargs)
            download.http_get = late
            print(hf_hub_download("ckfs/run", "trainer_state.json"))
            """,
            tmp_path,
            HF_ENDPOINT=server.url,
        )
        path = Path(path.strip())
        assert (path.parent.name, path.read_bytes()) == (shas["200"], b'{"global_step": 200}')


def test_a_commit_that_a_stranger_guesses_plans_no_step(run: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    modes = ("--file-mode", "0444", "--dir-mode", "0555")
    with Server(run, "--steps", "all", "--token-file", tmp_path / "token", "--allow-anyone", *modes, *FLAGS, home=home) as server:
        address = f"/ckfs/run/resolve/{'0' * 40}/config.json"
        plans = lambda: json.loads(server.get("/files/.ckfs/stats.json", Authorization="Bearer secret"))["steps"]["plans"]  # noqa: E731
        assert server.request(address)[0].status == 404 and plans() <= 1, "the newest"
        assert server.request(address, Authorization="Bearer secret")[0].status == 404 and plans() == 2


def test_transformers_loads_the_newest_step(run: Path, home: Path, tmp_path: Path) -> None:
    with Server(run, "--steps", "latest", "--dtype", "bf16", home=home) as server:
        assert steps(server) == ["200"]
        out = run_client(
            f"""
            import torch, transformers
            found = transformers.AutoModelForCausalLM.from_pretrained("ckfs/run", dtype="auto")
            expected = transformers.AutoModelForCausalLM.from_pretrained({str(run / "checkpoint-200")!r}, dtype=torch.bfloat16)
            theirs = expected.state_dict()
            assert found.dtype == torch.bfloat16 and all(torch.equal(theirs[n], t) for n, t in found.state_dict().items())
            print(len(theirs))
            """,
            tmp_path,
            HF_ENDPOINT=server.url,
        )
    assert int(out) > 20


def test_objects_of_every_step(run: Path, home: Path, tmp_path: Path) -> None:
    boto3 = pytest.importorskip("boto3")
    from botocore.config import Config

    with Server(run, "--steps", "all", "--s3", "0", *FLAGS, home=home) as server:
        s3 = boto3.client(
            "s3", endpoint_url=re.search(r"S3 at (http://[^,]+), bucket ckfs", server.told)[1], region_name="us-east-1",
            aws_access_key_id="any", aws_secret_access_key="any",
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )  # fmt: skip
        rows = s3.list_objects_v2(Bucket="ckfs", Delimiter="/")
        assert [row["Prefix"] for row in rows["CommonPrefixes"]] == [".ckfs/", "100/", "200/"]
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket="ckfs", PaginationConfig={"PageSize": 7})
        listed = {row["Key"]: row for page in pages for row in page["Contents"]}
        expected = {}
        for number in ("100", "200"):
            alone = exported(run / f"checkpoint-{number}", tmp_path / number, *FLAGS)
            expected |= {f"{number}/{path}": body for path, body in alone.items()}
        assert {key for key in listed if ".ckfs/" not in key} == expected.keys()
        for key, body in expected.items():
            got = s3.get_object(Bucket="ckfs", Key=key)
            assert got["Body"].read() == body and got["ETag"] == listed[key]["ETag"], key
        # By the link, the same object.
        assert s3.head_object(Bucket="ckfs", Key="latest/dev0/embed")["ETag"] == listed["200/dev0/embed"]["ETag"]
        steps_json = s3.get_object(Bucket="ckfs", Key=".ckfs/steps.json")["Body"].read()
        assert json.loads(steps_json)["latest"] == 200


def test_steps_come_and_go_and_the_server_is_healthy(run: Path, home: Path, tmp_path: Path, trained) -> None:
    ran = tmp_path / "ran"
    hook = f'curl -sS --fail "$CKFS_STEP_URL/hf/trainer_state.json" >> {ran}; echo " $CKFS_STEP" >> {ran}'
    with Server(run, "--steps", "all", "--on-step", hook, *FLAGS, home=home) as server:
        path = "/files/100/safetensors/dev0.safetensors"
        whole = server.get(path)
        assert server.json("/api/models/ckfs/run/revision/100")["sha"]
        save(run / "checkpoint-300", trained(300))
        wait_until(lambda: steps(server) == ["100", "200", "300"], what="the new step is there")
        expected = exported(run / "checkpoint-300", tmp_path / "300", *FLAGS)
        assert {path: server.get(f"/files/latest/{path}") for path in expected} == expected
        assert server.json("/api/models/ckfs/run")["sha"] == server.json("/api/models/ckfs/run/revision/300")["sha"]
        wait_until(lambda: ran.exists() and ran.read_text().endswith("300\n"), what="the command has run")
        assert ran.read_text() == (run / "checkpoint-300/trainer_state.json").read_text() + " 300\n"
        shutil.rmtree(run / "checkpoint-100")
        wait_until(lambda: steps(server) == ["200", "300"], what="the deleted step is gone")
        for address in (path, "/files/100/", "/ckfs/run/resolve/100/config.json", "/api/models/ckfs/run/revision/100"):
            assert server.request(address)[0].status == 404, address
        assert server.get("/readyz") == b"ready\n"
        wait_until(lambda: server.json("/files/.ckfs/stats.json")["steps"]["deleted"] == 1, what="the deleted step is counted")
        # Under its number, another one.
        save(run / "checkpoint-100", trained(7))
        wait_until(lambda: steps(server) == ["100", "200", "300"], what="it is back")
        assert server.get("/files/100/hf/trainer_state.json") == b'{"global_step": 7}'
        assert server.get(path) != whole


@pytest.mark.parametrize("path", ["hf/model.safetensors", "full/embed_tokens", "safetensors/dev1.safetensors"])
@pytest.mark.parametrize("flags", [(), ("--dtype", "bf16")], ids=["untouched", "cast"])
def test_an_answer_of_a_deleted_step_is_cut_off(run: Path, home: Path, path: str, flags: tuple[str, ...]) -> None:
    """A client that has taken a little of a file larger than all buffers on the way, when the trainer deletes the step."""
    weights = np.random.default_rng(7).standard_normal((8192, 2048), np.float32)
    (run / "checkpoint-300").mkdir()
    (run / "checkpoint-300/config.json").write_text('{"model_type": "unheard_of"}')
    save_file({"embed_tokens.weight": weights}, run / "checkpoint-300/model.safetensors")
    (run / "checkpoint-300/trainer_state.json").write_text('{"global_step": 300}')
    with Server(run, "--steps", "all", *FLAGS, *flags, home=home) as server:
        wait_until(lambda: steps(server) == ["100", "200", "300"], what="the step is there")
        whole = server.get(f"/files/300/{path}")
        assert len(whole) > 15 << 20
        with socket.socket() as slow:
            # Before it connects, so that the window is never larger.
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(60)
            slow.connect((server.host, server.port))
            slow.sendall(f"GET /files/300/{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            got = slow.recv(1000)
            shutil.rmtree(run / "checkpoint-300")
            wait_until(lambda: steps(server) == ["100", "200"], what="the deleted step is gone")
            with contextlib.suppress(ConnectionResetError):
                while part := slow.recv(1 << 16):
                    got += part
        head, _, body = got.partition(b"\r\n\r\n")
        assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(whole)
        # It ends before what was promised, and what came is right.
        assert len(body) < len(whole) and whole.startswith(body)
        assert server.get("/readyz") == b"ready\n"


def test_a_damaged_step_tells_why_and_the_others_live(run: Path, home: Path, tmp_path: Path, trained) -> None:
    files = trained(300)
    name = next(name for name in files if name.endswith(".safetensors"))
    files[name] = files[name][:-10]
    save(run / "checkpoint-300", files)
    with Server(run, "--steps", "all", "--s3", "0", *FLAGS, home=home) as server:
        wait_until(lambda: steps(server) == ["100", "200", "300"], what="the damaged step is there")
        for address in ("/files/300/hf/config.json", "/files/latest/dev0/embed", "/ckfs/run/resolve/main/config.json"):
            reply, body = server.request(address)
            assert reply.status == 500 and name in body.decode(), (address, reply.status, body)
        assert [row["name"] for row in server.json("/files/300/")] == [".ckfs"]
        assert name in server.get("/files/300/.ckfs/error").decode()
        s3 = re.search(r"S3 at http://[^:]+:(\d+)", server.told)[1]
        told = subprocess.run(["curl", "-sS", f"http://127.0.0.1:{s3}/ckfs/300/hf/config.json"], capture_output=True, text=True)
        assert "<Code>InternalError</Code>" in told.stdout and name in told.stdout
        reply, body = server.request("/readyz")
        assert reply.status == 503 and b"step not planned" in body and b"checkpoint-300" in body
        error = run_client(
            """
            from huggingface_hub import HfApi
            from huggingface_hub.errors import HfHubHTTPError
            api = HfApi()
            assert api.model_info("ckfs/run", revision="200").sha
            try:
                api.model_info("ckfs/run", revision="300")
            except HfHubHTTPError as error:
                print(error)
            """,
            tmp_path,
            HF_ENDPOINT=server.url,
        )
        assert name in error and "500" in error
        assert server.get("/files/200/hf/trainer_state.json") == b'{"global_step": 200}'
        # Its trainer writes it anew.
        shutil.rmtree(run / "checkpoint-300")
        save(run / "checkpoint-300", trained(300))
        wait_until(lambda: server.request("/files/300/hf/trainer_state.json")[0].status == 200, what="the step is whole")
        wait_until(lambda: server.request("/readyz")[0].status == 200, what="the server is healthy again")


def test_several_views_of_every_step(run: Path, home: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(f'source = "{run}"\n[view.train]\nmesh = "fsdp=2"\n[view.rollout]\nlayout = "hf"\ndtype = "bf16"\n')
    with Server("--config", config, "--steps", "all", "--listen", "0", home=home) as server:
        assert {row["id"] for row in server.json("/api/models")} == {"ckfs/train", "ckfs/rollout"}
        mounting.run("export", run / "checkpoint-100", tmp_path / "alone", "--layout", "hf", "--dtype", "bf16", "--only", "hf/*")
        for name, body in files_below(tmp_path / "alone/hf").items():
            assert server.get(f"/ckfs/rollout/resolve/100/{name}") == body
            assert server.get(f"/files/100/rollout/hf/{name}") == body
        assert server.get("/files/100/train/dev1/embed")


def test_what_is_of_runs_only_and_what_is_no_run(run: Path) -> None:
    done = mounting.run("serve", run / "checkpoint-100", "--on-step", "true", "--listen", "0", expect=2)
    assert "--on-step: only with --steps" in done.err
    done = mounting.run("serve", run / "checkpoint-100", "--steps", "all", "--listen", "0", expect=1)
    assert "leave --steps out" in done.err


# Runs in object stores.


class RemoteRun:
    """A run in a bucket of its own. Its trainer writes each object as a whole, and the file that ends a step last."""

    def __init__(self, address: str, put: Callable[[str, bytes], None], delete: Callable[[str], None], trained) -> None:
        self.address, self.put, self.delete, self.trained = address, put, delete, trained

    def save(self, number: int) -> None:
        for name, body in self.trained(number).items():
            self.put(f"checkpoint-{number}/{name}", body)

    def remove(self, number: int) -> None:
        for name in reversed(self.trained(number)):
            self.delete(f"checkpoint-{number}/{name}")


@pytest.fixture(params=["s3", "gs", "moto"])
def remote_run(request, clean, tmp_path: Path, trained):  # noqa: F811
    """A run of one step. Objects of the stubs are old, those of moto have the time of this machine."""
    with contextlib.ExitStack() as stack:
        if request.param == "moto":
            bucket = stack.enter_context(moto_bucket(tmp_path / "moto.log"))
            url = f"{bucket.environment['AWS_ENDPOINT_URL']}/weights/some/model"
            scope = "Credential=key/20261101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
            signed = {"Authorization": f"AWS4-HMAC-SHA256 {scope}"}
            delete = lambda name: http_request("DELETE", f"{url}/{name}", signed)  # noqa: E731
            made, settings = RemoteRun(bucket.address, bucket.put, delete, trained), bucket.environment
        else:
            place = tmp_path / "root/weights/runs/one"
            place.mkdir(parents=True)
            stub = stack.enter_context(contextlib.closing(Stub("store", tmp_path / "root")))

            def put(name: str, body: bytes) -> None:
                (place / name).parent.mkdir(exist_ok=True)
                (tmp_path / "object").write_bytes(body)
                (tmp_path / "object").rename(place / name)

            made = RemoteRun(f"{request.param}://weights/runs/one", put, lambda name: (place / name).unlink(), trained)
            settings = STUB_SETTINGS[request.param](stub.url)
        for name, value in settings.items():
            clean.setenv(name, value)
        made.save(100)
        yield made


def same_step(get: Callable[[str], bytes], number: int, trained) -> None:
    for name, body in trained(number).items():
        assert get(f"{number}/hf/{name}") == body, (number, name)


def test_a_new_step_in_a_bucket_is_noticed_by_polling(remote_run: RemoteRun, home: Path, trained) -> None:
    with Server(remote_run.address, "--steps", "all", "--steps-poll", "1s", "--name", "my/run", home=home) as server:
        wait_until(lambda: steps(server) == ["100"], what="the first step is there")
        get = lambda path: server.get(f"/files/{path}")  # noqa: E731
        same_step(get, 100, trained)
        # A step that is not finished is none, though it is looked at.
        for name, body in trained(200).items():
            if name == "trainer_state.json":
                looks = server.json("/files/.ckfs/stats.json")["steps"]["looks"]
                wait_until(lambda: server.json("/files/.ckfs/stats.json")["steps"]["looks"] > looks + 2, what="it looks")
                assert steps(server) == ["100"]
                listed = server.json("/files/.ckfs/steps.json")["steps"]
                assert (listed[1]["complete"], listed[1]["unfinished"].split()[0]) == (False, name)
            remote_run.put(f"checkpoint-200/{name}", body)
        wait_until(lambda: steps(server) == ["100", "200"], what="the new step is there")
        same_step(get, 200, trained)
        assert server.get("/my/run/resolve/main/trainer_state.json") == b'{"global_step": 200}'
        assert server.request("/readyz")[0].status == 200
        remote_run.remove(100)
        wait_until(lambda: steps(server) == ["200"], what="the deleted step is gone")
        assert server.request("/files/100/hf/config.json")[0].status == 404
        same_step(get, 200, trained)
        wait_until(lambda: server.request("/readyz")[0].status == 200, what="the server is healthy")


def test_a_mount_notices_a_new_step_in_a_bucket(remote_run: RemoteRun, own, trained) -> None:
    mount = own(remote_run.address, "--steps", "latest=2", "--steps-poll", "1s")
    names = lambda: {path.name for path in mount.point.iterdir() if path.name.isdigit()}  # noqa: E731
    wait_until(lambda: names() == {"100"}, what="the first step is there")
    get = lambda path: (mount / path).read_bytes()  # noqa: E731
    same_step(get, 100, trained)
    for number in (200, 300):
        remote_run.save(number)
        wait_until(lambda: str(number) in names(), what="the new step is there")
        same_step(get, number, trained)
    assert names() == {"200", "300"} and (mount / "latest").readlink() == Path("300")
    remote_run.remove(300)
    wait_until(lambda: names() == {"100", "200"}, what="the deleted step is gone")
    mounting.run("status", mount.point)


def test_a_step_in_a_bucket_that_is_written_anew(remote_run: RemoteRun, home: Path, trained) -> None:
    with Server(remote_run.address, "--steps", "all", "--steps-poll", "1s", home=home) as server:
        wait_until(lambda: steps(server) == ["100"], what="the first step is there")
        same_step(lambda path: server.get(f"/files/{path}"), 100, trained)
        commit = server.json("/api/models")[0]["sha"]
        for name, body in trained(7).items():
            remote_run.put(f"checkpoint-100/{name}", body)

        def is_new() -> bool:
            # What has begun with the old object ends before its promised length.
            try:
                reply, body = server.request("/files/100/hf/trainer_state.json")
            except http.client.IncompleteRead:
                return False
            return reply.status == 200 and body == b'{"global_step": 7}'

        wait_until(is_new, what="the new files are there")
        for name, body in trained(7).items():
            assert server.get(f"/files/100/hf/{name}") == body, name
        assert server.json("/api/models")[0]["sha"] != commit


def test_a_bucket_that_does_not_answer_for_a_while(clean, home: Path, tmp_path: Path, trained) -> None:  # noqa: F811
    """Steps that are there go on, the cause is told, and new steps are seen once the service answers again."""
    place = tmp_path / "root/weights/runs/one"
    save(place / "checkpoint-100", trained(100))
    with contextlib.closing(Stub("store", tmp_path / "root")) as stub:
        for name, value in STUB_SETTINGS["s3"](stub.url).items():
            clean.setenv(name, value)
        with Server("s3://weights/runs/one", "--steps", "all", "--steps-poll", "1s", home=home) as server:
            get = lambda path: server.get(f"/files/{path}")  # noqa: E731
            wait_until(lambda: steps(server) == ["100"], what="the first step is there")
            same_step(get, 100, trained)
            stub.set(refuse=403)
            wait_until(lambda: server.request("/readyz")[0].status == 503, what="the server tells")
            assert b"steps not found: s3://weights/runs/one" in server.request("/readyz")[1]
            save(place / "checkpoint-200", trained(200))
            assert steps(server) == ["100"], "a step is not deleted because its service does not answer"
            same_step(get, 100, trained)
            stub.set(refuse="")
            wait_until(lambda: steps(server) == ["100", "200"], what="the new step is there")
            wait_until(lambda: server.request("/readyz")[0].status == 200, what="the server is healthy again")
            same_step(get, 200, trained)


def test_plan_and_export_of_a_run_in_a_bucket(remote_run: RemoteRun, tmp_path: Path, trained) -> None:
    remote_run.put("checkpoint-200/config.json", b"{}")
    rows = json.loads(mounting.run("plan", remote_run.address, "--steps", "all", "--json").out)["steps"]
    assert [row["step"] for row in rows] == [100]
    # Without the flag the steps are listed.
    listed = mounting.run("plan", remote_run.address, "--json").json()["steps"]
    assert [(row["step"], row["complete"]) for row in listed] == [(100, True), (200, False)]
    text = mounting.run("plan", remote_run.address).out
    assert "a run of 2 steps, 1 complete" in text and f"ckfs mount {remote_run.address} MNT --steps all" in text, text
    done = mounting.run("export", remote_run.address, tmp_path / "out", "--steps", "all", "--only", "hf/*")
    assert "step 200 is passed over" in done.err
    for name, body in trained(100).items():
        assert (tmp_path / "out/100/hf" / name).read_bytes() == body, name
