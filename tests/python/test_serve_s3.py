"""`ckfs serve --s3`: unmodified clients of S3 and of HTTP list and read the files of a mount. Every byte is compared with what
`ckfs export` writes."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

import mounting
from serving import Server, run_client
from test_serve import FLAGS, exported, files_below, home  # noqa: F401  fixtures


TOKEN = "s3cret-token"


@pytest.fixture(scope="module")
def server(repo, home: Path):  # noqa: F811
    with Server(repo("llama_f32").path, *FLAGS, "--s3", "0", home=home) as server:
        yield server


def s3_url(server: Server) -> str:
    return re.search(r"S3 at (http://[^,]+), bucket ckfs", server.told)[1]


def client(url: str, key: str = "any", secret: str = "any"):
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1",
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(exported: Path) -> dict[str, bytes]:  # noqa: F811
    """All objects by key. Links have no keys; files that change are not compared."""
    found = files_below(exported)
    return {path: body for path, body in found.items() if not path.startswith(("mesh/", ".ckfs/"))}


def keys(s3, **more: object) -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="ckfs", **more)
    return [row["Key"] for page in pages for row in page.get("Contents", [])]


def test_boto3_lists_and_reads_every_object(server: Server, expected: dict[str, bytes]) -> None:
    s3 = client(s3_url(server))
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["ckfs"]
    s3.head_bucket(Bucket="ckfs")
    assert s3.get_bucket_location(Bucket="ckfs")["LocationConstraint"] is None
    found = keys(s3)
    assert found == sorted(found, key=str.encode)
    assert {key for key in found if not key.startswith(".ckfs/")} == set(expected)
    for key, body in expected.items():
        got = s3.get_object(Bucket="ckfs", Key=key)
        assert got["Body"].read() == body, key
        head = s3.head_object(Bucket="ckfs", Key=key)
        assert (head["ContentLength"], head["ETag"]) == (len(body), got["ETag"])


@pytest.mark.parametrize("page", [1, 3, 1000])
def test_pages_prefixes_and_delimiters_agree_with_the_keys(server: Server, page: int) -> None:
    s3 = client(s3_url(server))
    every = keys(s3)
    prefixes = ["", "dev0/", "dev", "dev0/layers/scanned/w", "npy/dev1/layers/", "absent", "hf/config.json", "hf/config.jsonx", "d"]
    for prefix in prefixes if page > 1 else ["dev0/layers/", "safetensors"]:
        wanted = [key for key in every if key.startswith(prefix)]
        assert keys(s3, Prefix=prefix, PaginationConfig={"PageSize": page}) == wanted
        pages = s3.get_paginator("list_objects_v2").paginate(
            Bucket="ckfs", Prefix=prefix, Delimiter="/", PaginationConfig={"PageSize": page}
        )
        objects, common = [], []
        for result in pages:
            assert result["KeyCount"] == len(result.get("Contents", [])) + len(result.get("CommonPrefixes", [])) <= page
            objects += [row["Key"] for row in result.get("Contents", [])]
            common += [row["Prefix"] for row in result.get("CommonPrefixes", [])]
        rest = [key[len(prefix) :] for key in wanted]
        assert objects == [prefix + part for part in rest if "/" not in part]
        assert common == sorted({prefix + part[: part.index("/") + 1] for part in rest if "/" in part})
    if page == 1000:
        for start in (every[0], every[7], "dev3/", "dev3", "dev3/zzz", "zzz"):
            assert keys(s3, StartAfter=start) == [key for key in every if key > start], start


@pytest.mark.parametrize("operation", ["list_objects", "list_object_versions"])
def test_the_other_lists_have_the_same_rows(server: Server, operation: str) -> None:
    s3 = client(s3_url(server))
    every = {row["Key"]: row for page in s3.get_paginator("list_objects_v2").paginate(Bucket="ckfs") for row in page["Contents"]}
    assert all(row["ETag"] for row in every.values()) and ".ckfs/stats.json" in every
    rows_of = "Versions" if operation == "list_object_versions" else "Contents"
    for prefix, delimiter, size in [("", "", 1000), ("", "", 40), ("", "/", 2), ("dev0/", "/", 1), ("dev0/layers/", "/", 1), ("absent", "/", 5)]:
        pages = s3.get_paginator(operation).paginate(
            Bucket="ckfs", Prefix=prefix, Delimiter=delimiter, PaginationConfig={"PageSize": size}
        )
        rows, common = [], []
        for page in pages:
            assert len(page.get(rows_of, [])) + len(page.get("CommonPrefixes", [])) <= size
            rows += page.get(rows_of, [])
            common += [row["Prefix"] for row in page.get("CommonPrefixes", [])]
        rest = [key[len(prefix) :] for key in every if key.startswith(prefix)]
        is_row = (lambda part: "/" not in part) if delimiter else (lambda part: True)
        assert [row["Key"] for row in rows] == [prefix + part for part in rest if is_row(part)]
        assert common == sorted({prefix + part[: part.index("/") + 1] for part in rest if not is_row(part)})
        for row in rows:
            known = every[row["Key"]]
            assert (row["Size"], row["LastModified"]) == (known["Size"], known["LastModified"]) or row["Key"].startswith(".ckfs/")
            assert row["ETag"] == known["ETag"] or row["Key"].startswith(".ckfs/")
            assert rows_of == "Contents" or (row["VersionId"], row["IsLatest"]) == ("null", True)
    started = s3.list_objects(Bucket="ckfs", Marker="dev3/", MaxKeys=2)
    assert [row["Key"] for row in started["Contents"]] == [key for key in every if key > "dev3/"][:2]
    whole = boto3.resource(
        "s3", endpoint_url=s3_url(server), aws_access_key_id="any", aws_secret_access_key="any", region_name="us-east-1"
    ).Bucket("ckfs")  # fmt: skip
    assert [row.key for row in whole.objects.filter(Prefix="hf/")] == [key for key in every if key.startswith("hf/")]


def test_the_bytes_are_answered_to_those_who_ask_for_them(server: Server, expected: dict[str, bytes]) -> None:
    s3, key = client(s3_url(server)), "safetensors/dev0.safetensors"
    whole, head = expected[key], s3.head_object(Bucket="ckfs", Key=key)
    at = {"Bucket": "ckfs", "Key": key}
    assert s3.get_object(**at, VersionId="null")["Body"].read() == whole
    first = s3.get_object(**at, PartNumber=1)
    assert (first["Body"].read(), first["ContentRange"]) == (whole, f"bytes 0-{len(whole) - 1}/{len(whole)}")
    assert s3.head_object(**at, PartNumber=1)["ContentLength"] == len(whole)
    found = s3.get_object_attributes(**at, ObjectAttributes=["ETag", "ObjectSize", "StorageClass", "ObjectParts", "Checksum"])
    assert (found["ETag"], found["ObjectSize"], found["StorageClass"]) == (head["ETag"].strip('"'), len(whole), "STANDARD")
    assert found["LastModified"] == head["LastModified"] and "ObjectParts" not in found

    def code(call, **args: object) -> str:
        with pytest.raises(ClientError) as caught:
            call(**at | args)
        return caught.value.response["Error"]["Code"]

    assert code(s3.get_object, VersionId="abc") == "NoSuchVersion"
    assert code(s3.get_object, PartNumber=2) == "InvalidPartNumber"
    assert code(s3.get_object, PartNumber=1, Range="bytes=0-1") == "InvalidRequest"
    assert code(s3.get_object_acl) == "NotImplemented"
    assert code(s3.get_object_tagging) == "NoSuchTagSet"
    assert code(s3.get_object_tagging, Key="absent") == "NoSuchKey"
    assert code(s3.get_object_torrent) == "MethodNotAllowed"
    assert code(s3.get_object_retention) == "NoSuchObjectLockConfiguration"
    assert code(s3.list_parts, UploadId="x") == "NoSuchUpload"
    bucket = {"Bucket": "ckfs"}
    assert "Status" not in s3.get_bucket_versioning(**bucket) and "Uploads" not in s3.list_multipart_uploads(**bucket)
    assert s3.get_bucket_request_payment(**bucket)["Payer"] == "BucketOwner"
    for ask, expected_code in [
        (s3.get_bucket_policy, "NoSuchBucketPolicy"), (s3.get_bucket_cors, "NoSuchCORSConfiguration"),
        (s3.get_bucket_lifecycle_configuration, "NoSuchLifecycleConfiguration"), (s3.get_bucket_tagging, "NoSuchTagSet"),
        (s3.get_bucket_encryption, "ServerSideEncryptionConfigurationNotFoundError"),
        (s3.get_public_access_block, "NoSuchPublicAccessBlockConfiguration"), (s3.get_bucket_acl, "NotImplemented"),
    ]:  # fmt: skip
        with pytest.raises(ClientError) as caught:
            ask(**bucket)
        assert caught.value.response["Error"]["Code"] == expected_code
    modified = head["LastModified"]
    assert code(s3.get_object, IfModifiedSince=modified) == "304"
    assert code(s3.get_object, IfUnmodifiedSince=modified - datetime.timedelta(days=1)) == "PreconditionFailed"
    assert s3.get_object(**at, IfUnmodifiedSince=modified)["Body"].read() == whole


def test_the_bucket_is_found_in_the_name_too(server: Server, expected: dict[str, bytes]) -> None:
    """Clients without a setting for path style put the bucket before `localhost`."""
    port = int(s3_url(server).rsplit(":", 1)[1])

    def get(path: str) -> bytes:
        return urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": f"ckfs.localhost:{port}"})).read()

    for path in ("/hf/config.json", "/ckfs/hf/config.json"):
        assert get(path) == expected["hf/config.json"]
    assert b"<Key>hf/config.json</Key>" in get("/?list-type=2&prefix=hf/")


def test_ranges_conditions_and_errors(server: Server, expected: dict[str, bytes]) -> None:
    s3 = client(s3_url(server))
    key = "safetensors/dev0.safetensors"
    whole = expected[key]
    got = s3.get_object(Bucket="ckfs", Key=key, Range="bytes=5-104")
    assert (got["Body"].read(), got["ContentRange"]) == (whole[5:105], f"bytes 5-104/{len(whole)}")
    assert s3.get_object(Bucket="ckfs", Key=key, Range="bytes=-9")["Body"].read() == whole[-9:]
    etag = got["ETag"]
    assert s3.get_object(Bucket="ckfs", Key=key, IfMatch=etag)["Body"].read() == whole

    def code(call, **args: object) -> str:
        with pytest.raises(ClientError) as caught:
            call(**{"Bucket": "ckfs"} | args)
        return caught.value.response["Error"]["Code"]

    assert code(s3.get_object, Key="absent") == "NoSuchKey"
    assert code(s3.get_object, Key="dev0") == "NoSuchKey"
    assert code(s3.head_object, Key="absent") == "404"
    assert code(s3.get_object, Key=key, Range=f"bytes={len(whole)}-") == "InvalidRange"
    assert code(s3.get_object, Key=key, IfMatch='"other"') == "PreconditionFailed"
    assert code(s3.get_object, Key=key, IfNoneMatch=etag) == "304"
    assert code(s3.list_objects_v2, Bucket="other") == "NoSuchBucket"
    assert code(s3.head_bucket, Bucket="other") == "404"
    assert code(s3.put_object, Key="x", Body=b"x") == "MethodNotAllowed"
    assert code(s3.delete_object, Key=key) == "MethodNotAllowed"
    assert code(s3.list_objects_v2, ContinuationToken="nonsense") == "InvalidArgument"
    assert code(s3.list_objects_v2, Delimiter="x") == "NotImplemented"
    # An object is found through a link as well.
    assert s3.get_object(Bucket="ckfs", Key="mesh/fsdp=0,tensor=1/embed")["Body"].read() == expected["dev1/embed"]


def test_signatures_are_checked_where_there_is_a_token(repo, home: Path, tmp_path: Path) -> None:  # noqa: F811
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with Server(repo("llama_f32").path, "--s3", "0", "--token-file", token, home=home) as server:
        url = s3_url(server)
        good = client(url, "ckfs", TOKEN)
        body = good.get_object(Bucket="ckfs", Key="full/embed", Range="bytes=0-9")["Body"].read()
        assert len(body) == 10
        assert len(good.list_objects_v2(Bucket="ckfs", Prefix="dev0/layers/0/", Delimiter="/")["Contents"]) > 3
        signed = good.generate_presigned_url("get_object", Params={"Bucket": "ckfs", "Key": "full/embed"}, ExpiresIn=60)
        assert urllib.request.urlopen(signed).read()[:10] == body
        former = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="ckfs", aws_secret_access_key=TOKEN, region_name="us-east-1",
            config=Config(signature_version="s3", s3={"addressing_style": "path"}),
        )  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(former.generate_presigned_url("get_object", Params={"Bucket": "ckfs", "Key": "full/embed"}))
        assert refused.value.code == 400 and b"signature_version=&#39;s3v4&#39;" in refused.value.read()
        with pytest.raises(ClientError, match="s3v4"):
            former.get_object(Bucket="ckfs", Key="full/embed")
        for key, secret, expected in [("ckfs", "wrong", "SignatureDoesNotMatch"), ("other", TOKEN, "InvalidAccessKeyId")]:
            with pytest.raises(ClientError) as caught:
                client(url, key, secret).get_object(Bucket="ckfs", Key="full/embed")
            assert caught.value.response["Error"]["Code"] == expected
        for address in (f"{url}/ckfs/full/embed", f"{url}/ckfs?list-type=2", f"{url}/", signed.replace("full", "dev0")):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(address)
            assert refused.value.code == 403


def test_tensorstore_reads_by_http_and_by_s3(server: Server, expected: dict[str, bytes], tmp_path: Path) -> None:
    """The Orbax checkpoint of the view, through each of its key-value stores."""
    keys = [key for key in expected if key.startswith(("orbax/", "dev0/"))][:40]
    out = run_client(
        f"""
        import json, sys
        import tensorstore as ts
        keys = {keys!r}
        http = ts.KvStore.open({{"driver": "http", "base_url": "{server.url}/files/"}}).result()
        s3 = ts.KvStore.open({{"driver": "s3", "bucket": "ckfs", "endpoint": "{s3_url(server)}", "aws_region": "us-east-1",
                              "aws_credentials": {{"type": "anonymous"}}}}).result()
        for key in keys:
            one, other = http.read(key).result(), s3.read(key).result()
            assert one.state == other.state == "value", key
            assert one.value == other.value, key
            print(json.dumps([key, other.value.hex()]))
        assert http.read("absent").result().state == s3.read("absent").result().state == "missing"
        listed = sorted(key.decode() for key in s3.list(ts.KvStore.KeyRange("dev0/", "dev00")).result())
        print(json.dumps(listed))
        """,
        tmp_path,
    )
    *rows, listed = [json.loads(line) for line in out.splitlines()]
    assert rows == [[key, expected[key].hex()] for key in keys]
    assert listed == sorted(key for key in expected if key.startswith("dev0/"))


def test_ckfs_reads_the_bucket_of_another_ckfs(server: Server, expected: dict[str, bytes], tmp_path: Path) -> None:
    env = os.environ | {
        "AWS_ENDPOINT_URL": s3_url(server), "AWS_ALLOW_HTTP": "true", "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1",
        "HOME": str(tmp_path),
    }  # fmt: skip
    mounting.run("export", "s3://ckfs/hf", tmp_path / "out", "--only", "hf/*", env=env)
    assert files_below(tmp_path / "out/hf") == {key[3:]: body for key, body in expected.items() if key.startswith("hf/")}


def test_s3fs_and_fsspec(server: Server, expected: dict[str, bytes], tmp_path: Path) -> None:
    out = run_client(
        f"""
        import hashlib, json, fsspec
        s3 = fsspec.filesystem("s3", anon=True, endpoint_url={s3_url(server)!r})
        found = {{path[5:]: hashlib.sha256(s3.cat(path)).hexdigest() for path in s3.find("ckfs/safetensors") + s3.find("ckfs/hf")}}
        web = fsspec.filesystem("http")
        for key, digest in found.items():
            with web.open("{server.url}/files/" + key, "rb", block_size=1000) as file:
                assert hashlib.sha256(file.read()).hexdigest() == digest, key
        assert any(row.rstrip("/").endswith("/files/dev0") for row in web.ls("{server.url}/files/", detail=False))
        print(json.dumps(found))
        """,
        tmp_path,
    )
    wanted = {key: body for key, body in expected.items() if key.startswith(("safetensors/", "hf/"))}
    assert json.loads(out) == {key: hashlib.sha256(body).hexdigest() for key, body in wanted.items()}


def test_the_streamer_of_runai(server: Server, expected: dict[str, bytes], tmp_path: Path) -> None:
    names = sorted(key for key in expected if key.startswith("safetensors/"))
    out = run_client(
        f"""
        import hashlib, json
        from runai_model_streamer import SafetensorsStreamer
        found = {{}}
        with SafetensorsStreamer() as streamer:
            for name in {names!r}:
                streamer.stream_file("s3://ckfs/" + name)
                for tensor, value in streamer.get_tensors():
                    found[name + " " + tensor] = hashlib.sha256(value.contiguous().view(-1).view(__import__("torch").uint8).numpy().tobytes()).hexdigest()
        print(json.dumps(found))
        """,
        tmp_path,
        AWS_ENDPOINT_URL=s3_url(server), AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any", AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true", RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0",
    )  # fmt: skip
    import torch
    from safetensors import safe_open

    wanted = {}
    for name in names:
        path = tmp_path / "one.safetensors"
        path.write_bytes(expected[name])
        with safe_open(path, "pt") as file:
            for tensor in file.keys():
                value = file.get_tensor(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                wanted[f"{name} {tensor}"] = hashlib.sha256(value).hexdigest()
    assert json.loads(out.splitlines()[-1]) == wanted
