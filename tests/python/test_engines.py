"""The download step of vLLM and of SGLang under `HF_ENDPOINT`: their own module files, unmodified, ask `ckfs serve` for a
repository, download it and read it. Every tensor is compared with what `ckfs export` writes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import mounting
from engine_process import ENGINES, digests
from mounting import wait_until
from serving import Server, run_script
from test_serve import home, save_llama  # noqa: F401  a fixture

PROCESS = Path(__file__).with_name("engine_process.py")
VIEWS = {"bf16": ("--dtype", "bf16"), "fp8": ("--quantize", "fp8-block")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32, in several files."""
    import torch

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("engines") / "llama"
    save_llama(path)
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def exported(source: Path, out: Path, *flags: str) -> Path:
    mounting.run("export", source, out, "--only", "hf/*", *flags)
    return out / "hf"


def tensors_of(directory: Path) -> dict[str, str]:
    from safetensors import safe_open

    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= digests((name, file.get_tensor(name)) for name in file.keys())
    return found


def headers_of(directory: Path) -> dict[str, dict[str, object]]:
    """Dtype and shape of each tensor, as the headers say."""
    found = {}
    for path in directory.glob("*.safetensors"):
        body = path.read_bytes()
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        found |= {name: row for name, row in header.items() if name != "__metadata__"}
    return found


def engine(name: str, server: Server, home: Path, model: str, *revisions: str) -> list[dict]:  # noqa: F811
    """What the engine finds of each revision, one after the other in one process; without any of the default one."""
    out = run_script(PROCESS, name, model, *revisions, home=home, HF_ENDPOINT=server.url, HF_XET_HIGH_PERFORMANCE="1")
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def same_files(found: dict, expected: Path) -> None:
    """The engine's directory has the files of weights and their index as they are, and its iterator gives every tensor."""
    assert found["tensors"] == tensors_of(expected)
    for path in [*expected.glob("*.safetensors"), expected / "model.safetensors.index.json"]:
        assert (Path(found["folder"]) / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("view", VIEWS)
def test_vllm_downloads_and_reads(view: str, model: Path, home: Path, tmp_path: Path) -> None:  # noqa: F811
    expected = exported(model, tmp_path / "exported", *VIEWS[view])
    with Server(model, "--name", "some/llama", *VIEWS[view], home=home) as server:
        (found,) = engine("vllm", server, tmp_path, "some/llama")
        assert found["commit"] == server.json("/api/models/some/llama")["sha"]
    same_files(found, expected)
    assert found["files"] == sorted(path.name for path in expected.iterdir())
    assert (found["config"], found["absent"], found["mistral"]) == (True, False, False)
    assert found["config.json"] == json.loads((expected / "config.json").read_text()) and found["absent.json"] is None
    headers = headers_of(expected)
    assert found["headers"].keys() == headers.keys()
    for name, row in found["headers"].items():
        assert row["dtype"] == headers[name]["dtype"], name
        assert [list(row[key]) for key in ("shape", "data_offsets")] == [headers[name][key] for key in ("shape", "data_offsets")]
    assert found["lm_head"] == any("lm_head" in name for name in headers)
    assert found["small"] == sorted(path.name for path in expected.iterdir() if path.suffix != ".safetensors")


@pytest.mark.parametrize("view", VIEWS)
def test_sglang_downloads_and_reads(view: str, model: Path, home: Path, tmp_path: Path) -> None:  # noqa: F811
    expected = exported(model, tmp_path / "exported", *VIEWS[view])
    with Server(model, "--name", "some/llama", *VIEWS[view], home=home) as server:
        (found,) = engine("sglang", server, tmp_path, "some/llama")
    same_files(found, expected)
    assert (found["config"], found["absent"], found["gguf"], found["fp8_experts"]) == (True, False, None, False)
    assert found["small"] == sorted(path.name for path in expected.glob("*.json"))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_step_of_a_run_is_a_revision(name: str, model: Path, home: Path, tmp_path: Path) -> None:  # noqa: F811
    run = tmp_path / "run"
    for step in (100, 200):
        shutil.copytree(model, run / f"checkpoint-{step}")
        config = run / f"checkpoint-{step}/config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"step": step}))
        (run / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps({"global_step": step}))
    with Server(run, "--steps", "all", "--dtype", "bf16", "--name", "some/run", home=home) as server:
        wait_until(lambda: server.request("/api/models/some/run/revision/200")[0].status == 200, what="the steps are there")
        commits = [server.json(f"/api/models/some/run/revision/{step}")["sha"] for step in (100, 200)]
        expected = {step: exported(run / f"checkpoint-{step}", tmp_path / f"exported-{step}", "--dtype", "bf16") for step in (100, 200)}
        steps = {commits[0]: 100, "main": 200, "100": 100}
        found = engine(name, server, tmp_path, "some/run", *steps)
    for step, row in zip(steps.values(), found, strict=True):
        assert Path(row["folder"]).name == commits[step // 100 - 1]
        same_files(row, expected[step])


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_streamer_reads_the_bucket(name: str, model: Path, home: Path, tmp_path: Path) -> None:  # noqa: F811
    """`--load-format runai_streamer`: no download, the tensors come from the objects."""
    expected = exported(model, tmp_path / "exported", "--dtype", "bf16")
    with Server(model, "--dtype", "bf16", "--s3", "0", home=home) as server:
        url = re.search(r"S3 at (http://[^,]+), bucket ckfs", server.told)[1]
        addresses = [f"s3://ckfs/hf/{path.name}" for path in sorted(expected.glob("*.safetensors"))]
        out = run_script(
            PROCESS, name, "--stream", *addresses, home=tmp_path,
            AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any", AWS_REGION="us-east-1",
            AWS_EC2_METADATA_DISABLED="true", RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0",
        )  # fmt: skip
    assert json.loads(out.splitlines()[-1])["tensors"] == tensors_of(expected)


def test_the_modules_are_the_engines_own() -> None:
    for module in ("vllm/model_executor/model_loader/weight_utils.py", "sglang/srt/model_loader/weight_utils.py"):
        assert "def download_weights_from_hf(" in (ENGINES / module).read_text()
