"""Files of ranks as sources, written by four processes of the unmodified torch as verl, SkyRL and lmms-engine save them."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

import forked
import mounting

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

HERE = Path(__file__).parent
RANKS = 4
WHOLE = ["fsdp2", "fsdp2_hsdp", "fsdp2_second_axis", "fsdp1", "fsdp1_hsdp", "fsdp1_sharded_tensor", "fsdp2_tensor", "stages"]
PLACEMENTS = ["line", "grid", "turned", "deep"]


@pytest.fixture(scope="session")
def saved(base: Path) -> Path:
    """What four processes saved, each case with its whole tensors beside it."""
    directory = base / "ranks_saved"
    directory.mkdir()
    forked.run_ranks(RANKS, forked.TORCH, HERE / "ranks_process.py", directory)
    return directory


def whole(saved: Path, case: str) -> dict[str, torch.Tensor]:
    return torch.load(saved / f"{case}.whole.pt", weights_only=True)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(point: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = {str(path.relative_to(point / "full")).replace("/", ".") for path in (point / "full").rglob("*") if path.is_file()}
    assert found == set(tensors)
    for name, tensor in tensors.items():
        path = point / "full" / name.replace(".", "/")
        assert path.read_bytes() == raw(tensor), name
        assert json.loads(os.getxattr(path, "user.ckfs.shape")) == list(tensor.shape), name


@pytest.mark.parametrize("case", [*WHOLE, *PLACEMENTS])
def test_every_tensor_is_what_torch_gathers(saved, own, case):
    tensors = whole(saved, case)
    mounted = own(saved / case, "--mesh", "fsdp=3", "--layout", "stored")
    same(mounted.point, tensors)
    assert "no difference" in mounting.run("verify", mounted.point).out


def test_a_step_of_verl_is_a_repository(saved, own, tmp_path):
    """`huggingface/` beside the files gives configuration and tokenizer: transformers loads `hf/`, and vLLM's names are there."""
    from transformers import AutoModelForCausalLM

    actor = saved / "verl/actor"
    plan = mounting.run("plan", actor, "--json").json()
    assert plan["container"] == "files of ranks"
    mounted = own(actor, "--mesh", "fsdp=2")
    hf = mounted / "hf"
    assert sorted(path.name for path in hf.iterdir()) == ["config.json", "model.safetensors", "tokenizer_config.json"]
    expected, found = whole(saved, "verl/actor"), load_file(hf / "model.safetensors")
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    model, info = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    original = AutoModelForCausalLM.from_pretrained(saved / "verl.saved", dtype=torch.bfloat16)
    tokens = torch.arange(3, 21).reshape(2, 9)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, original(tokens).logits)
    # The canonical names, stacked over layers.
    stacked = torch.stack([expected[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in range(3)])
    assert (mounted / "full/layers/scanned/wq").read_bytes() == raw(stacked)
    mounting.run("verify", mounted.point)
    mounting.run("export", actor, tmp_path / "several", "--max-shard-bytes", "20K", "--only", "hf", "--dtype", "f32")
    index = json.loads((tmp_path / "several/hf/model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / "several/hf" / file)[name] for name, file in index["weight_map"].items()}
    assert len(set(index["weight_map"].values())) > 1 and set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name].float()) for name in expected)
    assert json.loads((tmp_path / "several/hf/config.json").read_text())["dtype"] == "float32"


def test_the_files_of_an_optimizer_are_not_opened(saved, tmp_path):
    copy = tmp_path / "actor"
    shutil.copytree(saved / "verl/actor", copy)
    for path in [*copy.glob("optim_*"), *copy.glob("extra_*")]:
        path.write_bytes(b"damaged")
    assert "no difference" in mounting.run("verify", copy).out


def test_a_directory_of_lmms_engine_has_the_files_below(saved, own, tmp_path):
    step = tmp_path / "checkpoint-5"
    shutil.copytree(saved / "verl/actor", step / "pytorch_model_fsdp_0", ignore=shutil.ignore_patterns("huggingface", "fsdp_config.json", "*state*"))
    shutil.copytree(saved / "verl/actor/huggingface", step, dirs_exist_ok=True)
    mounted = own(step)
    expected, found = whole(saved, "verl/actor"), load_file(mounted / "hf/model.safetensors")
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def refused(source: Path, *arguments: str) -> str:
    return mounting.run("plan", source, *arguments, expect=1).err


def test_what_is_missing_is_named(saved, tmp_path):
    actor = tmp_path / "actor"
    shutil.copytree(saved / "verl/actor", actor)
    (actor / "model_world_size_4_rank_2.pt").unlink()
    assert "expected the files of 4 ranks, found 3; missing: rank 2" in refused(actor)
    shutil.copy(saved / "verl/actor/model_world_size_4_rank_2.pt", actor / "model_world_size_5_rank_2.pt")
    assert "files of several jobs, of 4 and 5 ranks" in refused(actor)
    error = refused(saved / "verl/actor/model_world_size_4_rank_1.pt")
    assert "the parts of one of 4 ranks: give the directory" in error and str(saved / "verl/actor") in error
    assert "actor" in refused(saved / "verl")


def test_files_of_another_save_are_refused(saved, tmp_path):
    """Files of other ranks under these names, another model's, and a note of another world."""
    actor = tmp_path / "actor"
    shutil.copytree(saved / "verl/actor", actor)
    first, second = actor / "model_world_size_4_rank_0.pt", actor / "model_world_size_4_rank_1.pt"
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert "in which the rank that saved it is at" in refused(actor)
    first.write_bytes(kept)
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 8}')
    assert "fsdp_config.json beside them says 8" in refused(actor)
    (actor / "fsdp_config.json").unlink()
    shutil.copy(saved / "fsdp2/model_world_size_4_rank_3.pt", actor)
    assert "has no part in its file" in refused(actor)


@pytest.mark.parametrize(
    "case, message",
    [
        ("two_meshes", "nothing says whether these are copies or parts"),
        ("partial", "the placement Partial"),
        ("falling", "ranks do not ascend"),
        ("plain", "nothing in the files of 4 ranks says how tensors are cut"),
        ("uneven_plain", "nothing says how it is cut"),
        ("contradicting", "model_world_size_4_rank_0.pt says [4, 4]"),
    ],
)
def test_what_metadata_does_not_decide_is_refused(saved, case, message):
    assert message in refused(saved / case)


def test_other_classes_are_refused_by_name(saved, tmp_path):
    copy = tmp_path / "fsdp2"
    shutil.copytree(saved / "fsdp2", copy)
    state = {"w": torch.ones(2), "f": os.system}
    torch.save(state, copy / "model_world_size_4_rank_0.pt")
    assert "posix.system" in refused(copy)


def test_damage_is_noticed_before_the_mount(saved, tmp_path):
    """Cut off anywhere, or with another placement in the pickle, whose checksum is then right."""
    copy = tmp_path / "fsdp2"
    shutil.copytree(saved / "fsdp2", copy)
    path = copy / "model_world_size_4_rank_1.pt"
    whole_file = path.read_bytes()
    for kept in (0, 100, len(whole_file) // 2, len(whole_file) - 1):
        path.write_bytes(whole_file[:kept])
        assert "model_world_size_4_rank_1.pt" in refused(copy)
    with zipfile.ZipFile(saved / "fsdp2/model_world_size_4_rank_1.pt") as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert data.count(b"placement_types Shard") or data.count(b"placement_types\nShard")
                data = data.replace(b"placement_types\nShard\n", b"placement_types\nReplicate\n")
            new.writestr(entry.filename, data)
    assert "model_world_size_4_rank_1.pt says" in refused(copy)


def test_a_configuration_of_another_model_is_refused(saved, tmp_path):
    actor = tmp_path / "actor"
    shutil.copytree(saved / "verl/actor", actor)
    path = actor / "huggingface/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 122}))
    assert "embed" in refused(actor)


def test_a_bucket_holds_the_same(saved, own, clean, tmp_path):
    from servers import stub_bucket

    with stub_bucket("s3", tmp_path / "server") as bucket:
        for name, value in bucket.environment.items():
            clean.setenv(name, value)
        shutil.copytree(saved / "verl/actor", tmp_path / "server/weights/some/model", dirs_exist_ok=True)
        mounted = own(bucket.address, "--mesh", "fsdp=3")
        expected, found = whole(saved, "verl/actor"), load_file(mounted / "hf/model.safetensors")
        assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_values_decide_nothing(tmp_path, saved, own):
    """All shards have equal values: a reader that compares them would drop all but one."""
    copy = tmp_path / "fsdp2"
    shutil.copytree(saved / "fsdp2", copy)
    for path in copy.glob("*.pt"):
        with zipfile.ZipFile(path) as old:
            entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
        with zipfile.ZipFile(path, "w") as new:
            for name, data in entries:
                is_mesh = "/data/" in name and data == np.arange(4, dtype=np.int32).tobytes()
                new.writestr(name, bytes(len(data)) if "/data/" in name and not is_mesh else data)
    mounted = own(copy, "--layout", "stored")
    same(mounted.point, {name: torch.zeros_like(tensor) for name, tensor in whole(saved, "fsdp2").items()})
