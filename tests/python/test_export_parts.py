"""An export by several tasks, as processes at the same time: what they write together is what one export writes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

import mlx_oracles
import mounting
from mounting import ROOT, run
from servers import Stub, bucket_of

FLAGS = ["--mesh", "fsdp=2", "--max-shard-bytes", "100K"]
INDEXES = ["hf/model.safetensors.index.json", "dcp/.metadata", "orbax/0/items/manifest.ocdbt"]


def contents(directory: Path) -> dict[str, bytes | str]:
    """All files and links below a directory."""
    found = [path for path in directory.rglob("*") if path.is_symlink() or path.is_file()]
    return {str(p.relative_to(directory)): os.readlink(p) if p.is_symlink() else p.read_bytes() for p in found}


def at_once(commands: list[list], **more: object) -> list[mounting.Done]:
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda words: run(*words, **more), commands))


def parts(numbers: range, of: int, source: object, target: object, *flags: object) -> list[list]:
    return [["export", source, target, *flags, "--part", f"{number}/{of}"] for number in numbers]


@pytest.fixture(scope="module")
def whole(repo, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("whole") / "out"
    run("export", repo("llama").path, target, *FLAGS)
    return target


@pytest.mark.parametrize("numbers", [range(1, 4), range(3)], ids=["from one", "from zero"])
def test_tasks_write_together_what_one_export_writes(repo, whole, tmp_path, numbers):
    commands = parts(numbers, 3, repo("llama").path, tmp_path / "out", *FLAGS)
    told = [done.json() for done in at_once([[*words, "--json"] for words in commands])]
    assert contents(tmp_path / "out") == contents(whole)
    assert any(one["complete"] for one in told) and len({one["part"] for one in told}) == 3
    sizes = [one["bytes"] for one in told]
    assert max(sizes) < 1.2 * min(sizes), sizes
    before = {path: path.lstat() for path in (tmp_path / "out").rglob("*")}
    assert all("complete already" in done.err for done in at_once(commands))
    assert {path: path.lstat() for path in (tmp_path / "out").rglob("*")} == before
    # The one export of the same finds it complete too.
    assert "complete already" in run("export", repo("llama").path, tmp_path / "out", *FLAGS).err


def test_indexes_come_last_and_all_tasks_have_one_source_and_one_set_of_flags(repo, whole, tmp_path):
    source, out = repo("llama").path, tmp_path / "out"
    (first,), (second,) = (parts(range(number, number + 1), 2, source, out, *FLAGS) for number in (1, 2))
    assert "other parts are not complete yet" in run(*first).err
    written = contents(out)
    assert not written.keys() & set(INDEXES) and "config.json" not in {Path(name).name for name in written}
    others = [
        [*second, "--dtype", "f32"], [*second, "--only", "hf"], ["export", repo("qwen3_moe").path, *second[2:]],
        *parts(range(2, 3), 4, source, out, *FLAGS), ["export", source, out, *FLAGS],
    ]  # fmt: skip
    for words in others:
        assert "an interrupted export of another view" in run(*words, expect=1).err, words
        assert contents(out) == written, "a refused task leaves nothing"
    # A file that is lost is written again, and nothing else.
    lost = next(path for path in sorted(out.rglob("*.safetensors")))
    lost.unlink()
    again = run(*first, "--json").json()
    assert (again["files"] - again["kept_files"], again["complete"]) == (1, False) and lost.exists()
    lost.unlink()
    assert "other parts are not complete yet" in run(*second).err, "what another task has written is gone"
    assert "all parts are complete" in run(*first).err
    assert contents(out) == contents(whole)


def test_a_part_is_of_one_checkpoint_and_one_of_n(repo, tmp_path):
    for text in ("3/2", "1", "0/0", "x/2"):
        assert "expected K/N" in run("export", repo("llama").path, tmp_path / "out", "--part", text, expect=2).err
    error = run("export", repo("llama").path, tmp_path / "out", "--part", "1/2", "--steps", "all", expect=2).err
    assert "give the directory of a step" in error


@pytest.mark.parametrize("mesh", ["fsdp=2", "data=2,fsdp=2"])
def test_tasks_fetch_together_what_one_export_fetches(repo, clean, tmp_path, mesh):
    """Each has a cache of its own, as on hosts of their own. Copies on devices are fetched by one of them."""
    with bucket_of("s3", tmp_path / "server") as bucket:
        for name, value in bucket.environment.items():
            clean.setenv(name, value)
        bucket.upload(repo("llama").path)
        stub: Stub = bucket.stub
        fetched = []
        for numbers, of in ((range(1, 2), 1), (range(1, 5), 4)):
            before = stub.stats()["object_bytes"]
            words = parts(numbers, of, bucket.address, tmp_path / f"of{of}", "--mesh", mesh, "--only", "safetensors", "--only", "pt")
            at_once([[*one, "--cache-dir", tmp_path / f"cache{of}-{number}"] for number, one in enumerate(words)])
            fetched.append(stub.stats()["object_bytes"] - before)
        assert contents(tmp_path / "of1") == contents(tmp_path / "of4")
        # Each reads the headers and small files for itself.
        small = sum(path.stat().st_size for path in repo("llama").path.iterdir() if path.suffix != ".safetensors")
        assert fetched[1] <= 1.05 * fetched[0] + 3 * (small + 20_000), fetched


def test_tasks_quantize_a_remote_model_for_mlx_none_of_which_fetches_it_all(clean, tmp_path):
    """Models larger than a disk: each task, with a cache of its own, fetches what its files are made of."""
    mlx_oracles.write_model("llama", tmp_path / "model")
    stored = load_file(tmp_path / "model/model.safetensors")
    (tmp_path / "model/model.safetensors").unlink()
    where = {name: f"model-{number % 6 + 1:05}-of-00006.safetensors" for number, name in enumerate(sorted(stored))}
    for file in set(where.values()):
        save_file({name: stored[name] for name in stored if where[name] == file}, tmp_path / "model" / file, metadata={"format": "pt"})
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    flags = ["--layout", "hf", "--quantize", "mlx:4bit-g32", "--only", "hf"]
    run("export", tmp_path / "model", tmp_path / "one", *flags)
    with bucket_of("s3", tmp_path / "server") as bucket:
        for name, value in bucket.environment.items():
            clean.setenv(name, value)
        bucket.upload(tmp_path / "model")
        fetched = []
        for number, words in enumerate(parts(range(1, 4), 3, bucket.address, tmp_path / "out", *flags)):
            before = bucket.stub.stats()["object_bytes"]
            run(*words, "--cache-dir", tmp_path / f"cache{number}")
            fetched.append(bucket.stub.stats()["object_bytes"] - before)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert len([*(tmp_path / "one/hf").glob("*.safetensors")]) >= 3
    weights = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    small = sum(path.stat().st_size for path in (tmp_path / "model").iterdir() if path.suffix != ".safetensors")
    # Of the four files that are another's, a header is read with 128 KiB.
    assert max(fetched) < 0.4 * weights + small + 4 * 131_072, (fetched, weights)


@pytest.fixture
def objects(clean, tmp_path):
    """A bucket of moto, and a function for what it holds."""
    boto3 = pytest.importorskip("boto3")
    with bucket_of("moto", tmp_path / "server") as bucket:
        for name, value in bucket.environment.items():
            clean.setenv(name, value)
        s3 = boto3.client("s3")

        def found() -> dict[str, bytes]:
            listed = s3.list_objects_v2(Bucket="weights", Prefix="some/model/").get("Contents", [])
            get = lambda key: s3.get_object(Bucket="weights", Key=key)["Body"].read()  # noqa: E731
            return {one["Key"].removeprefix("some/model/"): get(one["Key"]) for one in listed}

        yield bucket, s3, found


def test_an_export_into_a_bucket_is_resumed_and_completed(repo, whole, objects):
    bucket, s3, found = objects
    flags = [*FLAGS, "--only", "hf", "--only", "dcp", "--only", "safetensors"]
    expected = {name: data for name, data in contents(whole).items() if name.split("/")[0] in flags}
    first, second = parts(range(1, 3), 2, repo("llama").path, bucket.address, *flags)
    assert "other parts are not complete yet" in run(*first).err
    written = found()
    assert not written.keys() & set(INDEXES) and all(written[name] == expected[name] for name in written.keys() & expected.keys())
    for words in ([*second, "--dtype", "f32"], *parts(range(2, 3), 4, *first[1:-2])):
        assert ".ckfs-export" in run(*words, expect=1).err
    lost = max(written.keys() & expected.keys())
    s3.delete_object(Bucket="weights", Key=f"some/model/{lost}")
    assert "other parts are not complete yet" in run(*second).err
    again = run(*first, "--json").json()
    assert (again["files"] - again["kept_files"], again["complete"]) == (1, True)
    assert found() == expected
    stamps = {one["Key"]: one["LastModified"] for one in s3.list_objects_v2(Bucket="weights")["Contents"]}
    assert all(done.json()["complete"] for done in at_once([[*words, "--json"] for words in (first, second)]))
    assert {one["Key"]: one["LastModified"] for one in s3.list_objects_v2(Bucket="weights")["Contents"]} == stamps
    error = run("export", f"{bucket.address}/hf", f"{bucket.address}/hf/out", "--force", expect=1).err
    assert "lies inside the source" in error
    # Another checkpoint is not written over it unasked.
    assert "--force" in run("export", repo("qwen3_moe").path, bucket.address, "--only", "hf", expect=1).err
    assert found() == expected


def test_tasks_at_once_fill_a_bucket_with_files_of_several_parts(wide, objects, tmp_path):
    bucket, _, found = objects
    flags = ["--mesh", "fsdp=2", "--only", "safetensors", "--only", "hf"]
    run("export", wide.path, tmp_path / "out", *flags)
    at_once(parts(range(4), 4, wide.path, bucket.address, *flags))
    assert found() == contents(tmp_path / "out")


STAND_IN = '''"""What ray_export.py uses of Ray, in processes of this machine."""
from concurrent.futures import ProcessPoolExecutor
pool = None
class Remote:
    def __init__(self, call): self.call = call
    def remote(self, *words): return pool.submit(_call, self.call.__module__, self.call.__name__, words)
def _call(module, name, words):
    import runpy, sys
    return runpy.run_path(sys.argv[0])[name].call(*words)
def remote(**options): return Remote
def init():
    global pool
    pool = ProcessPoolExecutor(4)
def get(tasks): return [task.result() for task in tasks]
'''


def ray_path(tmp_path: Path) -> str:
    """Where the module is: the real one, or else one with processes of its own."""
    if importlib.util.find_spec("ray") is None:
        (tmp_path / "ray.py").write_text(STAND_IN)
    return os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])


JOB = yaml.safe_load((ROOT / "examples/kubernetes/export-job.yaml").read_text())["spec"]
ARGS = JOB["template"]["spec"]["containers"][0]["args"]


def recipe(name: str, tmp_path: Path, source: Path, target: Path) -> list[tuple[list, dict]]:
    """The commands that a scheduler starts at once, with their environments."""
    if name == "ray":
        words = [sys.executable, ROOT / "examples/ray_export.py", "3", source, target, *FLAGS]
        return [(words, {"PYTHONPATH": ray_path(tmp_path)})]
    if name == "slurm":
        words = [ROOT / "examples/slurm/export.sh", source, target, *FLAGS]
        return [(words, {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": "3"}) for number in range(1, 4)]
    assert JOB["completionMode"] == "Indexed" and ARGS[:3] == ["export", "/models/llama", "/models/llama-maxtext"]
    words = [mounting.find_ckfs(), "export", source, target, *ARGS[3:]]
    return [([*words[:-1], words[-1].replace("$(JOB_COMPLETION_INDEX)", str(pod))], {}) for pod in range(JOB["completions"])]


@pytest.mark.parametrize("name,flags", [("slurm", FLAGS), ("kubernetes", ARGS[3:-2]), ("ray", FLAGS)])
def test_recipes_export_with_what_schedulers_give(repo, tmp_path, name, flags):
    source = repo("llama").path
    run("export", source, tmp_path / "whole", *flags)
    environment = os.environ | {"CKFS": str(mounting.find_ckfs())}
    begun = [
        subprocess.Popen(words, env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for words, more in recipe(name, tmp_path, source, tmp_path / "out")
    ]
    for process in begun:
        out, err = process.communicate(timeout=mounting.TIMEOUT_SECONDS)
        assert process.returncode == 0, (out, err)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
