"""Checkpoints of torch as sources, written by the unmodified torch: four processes with FSDP2, HSDP and TP×FSDP, and single files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

import forked
import mounting
import repos
from servers import stub_bucket

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

HERE = Path(__file__).parent
RANKS = 4
CASES = ["fsdp", "hsdp", "both", "placed", "safetensors"]


@pytest.fixture(scope="session")
def saved(base: Path) -> Path:
    """What four processes saved, each case with its whole tensors beside it."""
    directory = base / "torch_saved"
    directory.mkdir()
    forked.run_ranks(RANKS, forked.TORCH, HERE / "torch_save_process.py", directory)
    return directory


def whole(saved: Path, case: str) -> dict[str, torch.Tensor]:
    if not (saved / case).exists():
        pytest.skip(f"this torch cannot save the case {case}")
    return torch.load(saved / f"{case}.whole.pt", weights_only=True)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(point: Path, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        assert (point / "full" / name.replace(".", "/")).read_bytes() == raw(tensor), name


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_what_torch_saved(saved, own, case):
    tensors = whole(saved, case)
    mounted = own(saved / case, "--mesh", "fsdp=3", "--training-state")
    same(mounted.point, tensors)
    # Shards of another mesh, which divides nothing evenly.
    for device in range(3):
        found = load_file(mounted / f"safetensors/dev{device}.safetensors")
        assert set(found) == {name for name in tensors}
    mounting.run("verify", mounted.point)


def test_a_bucket_holds_the_same_checkpoint(saved, own, clean, tmp_path):
    tensors = whole(saved, "both")
    with stub_bucket("s3", tmp_path / "server") as bucket:
        for name, value in bucket.environment.items():
            clean.setenv(name, value)
        shutil.copytree(saved / "both", tmp_path / "server/weights/some/model", dirs_exist_ok=True)
        mounted = own(bucket.address, "--mesh", "fsdp=3")
        same(mounted.point, tensors)
        assert "no difference" in mounting.run("verify", mounted.point).out


def test_metadata_of_older_torch_is_read(saved, own, tmp_path):
    """Before 2.3 torch had the properties of tensors in another module."""
    older = pytest.importorskip("torch.distributed._shard.sharded_tensor.metadata")
    tensors = whole(saved, "placed")
    copy = tmp_path / "older"
    shutil.copytree(saved / "placed", copy)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    for tensor in metadata.state_dict_metadata.values():
        if properties := getattr(tensor, "properties", None):
            tensor.properties = older.TensorProperties(properties.dtype, properties.layout, properties.requires_grad)
    for info in metadata.storage_data.values():
        info.__dict__.pop("transform_descriptors", None)
    written = pickle.dumps(metadata)
    assert b"torch.distributed._shard.sharded_tensor.metadata" in written
    (copy / ".metadata").write_bytes(written)
    same(own(copy).point, tensors)


@pytest.mark.parametrize("case", ["fsdp", "placed"])
def test_single_files_hold_the_same(saved, own, case):
    tensors = whole(saved, case)
    mounted = own(saved / f"{case}.whole.pt", "--training-state")
    same(mounted.point, tensors)
    mounting.run("verify", mounted.point)


def test_optimizer_state_is_left_out_unless_asked_for(saved, own):
    tensors = whole(saved, "fsdp")
    plan = mounting.run("plan", saved / "fsdp", "--json").json()
    left_out = {row["name"] for row in plan["no_tensors"]}
    optimizer = {name for name in tensors if name.startswith("optimizer")}
    assert optimizer and optimizer <= left_out and "step" in left_out
    assert plan["container"] == "torch.distributed.checkpoint"
    mounted = own(saved / "fsdp")
    same(mounted.point, {name: tensor for name, tensor in tensors.items() if name not in optimizer})
    assert not (mounted / "full/optimizer").exists()


def test_a_checkpoint_is_cut_for_another_mesh(saved, own):
    """The mount's `dcp/` is the same checkpoint: torch loads it, and so does another mount."""
    tensors = whole(saved, "both")
    first = own(saved / "both", "--mesh", "fsdp=2,tensor=3")
    state = {name: torch.full_like(tensor, 9) for name, tensor in tensors.items()}
    dcp.load(state, checkpoint_id=str(first / "dcp"))
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name
    second = own(first / "dcp", "--mesh", "fsdp=5")
    same(second.point, tensors)


def test_orbax_restores_a_checkpoint_of_torch(saved, own):
    ocp = pytest.importorskip("orbax.checkpoint")
    tensors = whole(saved, "hsdp")
    mounted = own(saved / "hsdp", "--mesh", "fsdp=2")
    found = ocp.PyTreeCheckpointer().restore(str(mounted / "orbax/0/items"))
    for name, tensor in tensors.items():
        node = found
        for key in name.split("."):
            node = node[key]
        assert np.asarray(node).tobytes() == raw(tensor), name


def test_views_of_storages_are_what_they_show(tmp_path, own):
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    state = {
        "tied.a": base,
        "tied.b": base,
        "turned": base.t(),
        "part": base[1:4, 2:9:3],
        "row": base[5],
        "column": base[:, 3],
        "repeated": torch.tensor([1.5, 2.5]).expand(3, 2),
        "scalar": torch.tensor(7, dtype=torch.int16),
        "bf16": base.to(torch.bfloat16)[::2],
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": {"list": [base[0], base[1]], "lr": 0.1},
        "flags": torch.tensor([True, False]),
    }
    path = tmp_path / "state.pt"
    torch.save(state, path)
    mounted = own(path)
    flat = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    flat |= {"nested.list.0": base[0], "nested.list.1": base[1]}
    same(mounted.point, flat)
    mounting.run("verify", mounted.point)
    plan = mounting.run("plan", path, "--json").json()
    assert plan["no_tensors"] == [{"name": "nested.lr", "kind": "a float"}]


def test_other_kinds_are_refused_by_name(tmp_path):
    class Own:
        pass

    path = tmp_path / "x.pt"
    torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    assert "save it with torch.save" in mounting.run("plan", path, expect=1).err
    torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=False, pickle_protocol=4)
    assert "save it with torch.save" in mounting.run("plan", path, expect=1).err
    path.write_bytes(pickle.dumps({"w": np.zeros(2)}))
    assert "as pickle.dump writes" in mounting.run("plan", path, expect=1).err
    path.write_bytes(b"")
    assert "an empty file" in mounting.run("plan", path, expect=1).err
    torch.save({"w": torch.zeros(2), "os": os.system}, path)
    assert "posix.system" in mounting.run("plan", path, expect=1).err
    torch.save({"z": torch.zeros(2, 2).to_sparse()}, path)
    assert "_rebuild_sparse_tensor" in mounting.run("plan", path, expect=1).err


@pytest.mark.parametrize("parts", [1, 2])
def test_a_repository_of_bin_files_is_a_repository(tmp_path, own, parts):
    """The same views as the repository of safetensors, and an `hf/` that transformers loads."""
    transformers = pytest.importorskip("transformers")
    plain = repos.llama(tmp_path / "plain", parts=parts)
    loaded = {}
    for file in sorted(plain.path.glob("*.safetensors")):
        loaded[file.name] = load_file(file)
    source = tmp_path / "bin"
    source.mkdir()
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, tensors in enumerate(loaded.values(), 1):
        name = "pytorch_model.bin" if parts == 1 else f"pytorch_model-{number:05}-of-{parts:05}.bin"
        torch.save(tensors, source / name)
        index["weight_map"] |= dict.fromkeys(tensors, name)
    if parts > 1:
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text((plain.path / "config.json").read_text())
    torch.save({"lr": 0.1}, source / "training_args.bin")
    expected, found = own(plain.path, "--mesh", "fsdp=2"), own(source, "--mesh", "fsdp=2")
    for device in range(2):
        assert found.files(f"dev{device}") == expected.files(f"dev{device}")
        for path in expected.files(f"dev{device}"):
            assert (found / f"dev{device}/{path}").read_bytes() == (expected / f"dev{device}/{path}").read_bytes(), path
    names = {path.name for path in (found / "hf").iterdir()}
    assert not any(name.startswith("pytorch_model") for name in names), names
    shown = {}
    for file in (found / "hf").glob("*.safetensors"):
        shown |= load_file(file)
    for tensors in loaded.values():
        for name, tensor in tensors.items():
            assert raw(shown[name]) == raw(tensor), name
    model = transformers.AutoModelForCausalLM.from_pretrained(found / "hf", dtype="auto")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for tensors in loaded.values() for name, tensor in tensors.items())


def test_damage_of_a_directory_is_refused_before_the_mount(saved, tmp_path):
    whole(saved, "both")
    copy = tmp_path / "copy"
    shutil.copytree(saved / "both", copy)
    (copy / "__1_0.distcp").unlink()
    error = mounting.run("plan", copy, expect=1).err
    assert "__1_0.distcp" in error and "not there" in error
    shutil.copy(saved / "both/__1_0.distcp", copy / "__1_0.distcp")
    data = bytearray((copy / "__1_0.distcp").read_bytes())
    data[data.index(b"FloatStorage")] ^= 1
    (copy / "__1_0.distcp").write_bytes(data)
    assert "CRC-32" in mounting.run("plan", copy, expect=1).err
    (copy / ".metadata").unlink()
    assert "without .metadata" in mounting.run("plan", copy, expect=1).err


def test_what_is_no_checkpoint_is_named(saved, tmp_path):
    assert "the directory is empty" in mounting.run("plan", tmp_path, expect=1).err
    for step in ("first", "second"):
        shutil.copytree(saved / "both", tmp_path / "run" / step)
    assert "open one of them: second, first" in mounting.run("plan", tmp_path / "run", expect=1).err
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF" + bytes(60))
    assert "llama.cpp" in mounting.run("plan", tmp_path, expect=1).err
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in mounting.run("plan", tmp_path / "model.safetensors", expect=1).err
    # A clone without its files.
    for name in ("model.safetensors", "pytorch_model.bin"):
        clone = tmp_path / f"clone of {name}"
        clone.mkdir()
        shutil.copy(tmp_path / "model.safetensors", clone / name)
        assert "git lfs pull" in mounting.run("plan", clone, expect=1).err
    advices = {"model_world_size_2_rank_{}.pt": "nothing in the files of 2 ranks", "zero_pp_rank_{}_optim_states.pt": "ds_to_universal.py"}
    for name, advice in advices.items():
        ranks = tmp_path / f"ranks of {name}"
        ranks.mkdir()
        for rank in range(2):
            torch.save({"w": torch.zeros(2)}, ranks / name.format(rank))
        assert advice in mounting.run("plan", ranks, expect=1).err


def test_the_prefix_of_a_training_program_is_proposed(tmp_path):
    path = tmp_path / "x.pt"
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    torch.save({"model": {f"_orig_mod.{name}": torch.zeros(2, 2) for name in names}}, path)
    rule = mounting.run("plan", path, "--json").json()["proposed_rename"]
    plan = mounting.run("plan", path, "--source-rename", rule, "--layout", "hf", "--json").json()
    shown = {row["name"] for view in plan.get("views", [plan]) for row in view["tensors"]}
    assert shown == set(names)


def test_a_checkpoint_of_lightning_is_its_model(tmp_path, own):
    state = {"model.model.layers.0.w": torch.ones(3), "model.lm_head.weight": torch.zeros(2)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": state, "optimizer_states": [optimizer], "epoch": 1, "callbacks": {}}, path)
    plan = mounting.run("plan", path, "--layout", "hf", "--json").json()
    assert "optimizer_states.0.state.0.exp_avg" in {row["name"] for row in plan["no_tensors"]}
    (view,) = plan.get("views", [plan])
    assert {row["name"] for row in view["tensors"]} == {"model.layers.0.w", "lm_head.weight"}


@pytest.mark.parametrize("form", ["file", "directory"])
def test_what_wraps_the_model_is_taken_away_where_a_repository_is_asked_for(tmp_path, repo, form):
    original = repo("llama")
    stored = {}
    for file in sorted(original.path.glob("*.safetensors")):
        stored |= load_file(file)
    wrapped = {f"module._orig_mod.{name}": value for name, value in stored.items()}
    path = tmp_path / "state.pt" if form == "file" else tmp_path / "state"
    if form == "file":
        torch.save({"model": wrapped, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}, path)
    else:
        dcp.save({"app": wrapped}, checkpoint_id=path, no_dist=True)
    arguments = ["--layout", "hf", "--config-from", original.path]
    plan = mounting.run("plan", path, *arguments, "--json").json()
    (view,) = plan.get("views", [plan])
    assert {row["name"] for row in view["tensors"]} == set(stored)
    assert any("--source-rename replaces this" in warning for warning in view["warnings"]), view["warnings"]
    mounting.run("export", path, tmp_path / "out", *arguments, "--only", "hf")
    found = {}
    for file in (tmp_path / "out/hf").glob("*.safetensors"):
        found |= load_file(file)
    assert set(found) == set(stored)
    for name, value in stored.items():
        assert raw(found[name]) == raw(value), name
    # The user's own rename is the only one, and what it leaves is not the model's.
    done = mounting.run("plan", path, *arguments, "--source-rename", "_orig_mod\\.=>", expect=1)
    assert "0 of " in done.err and "module." in done.err, done.err
