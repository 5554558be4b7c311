"""Checkpoints of DeepSpeed as sources: written by its own engine on the CPU, compared with its own `zero_to_fp32`."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

import forked
import mounting

torch = pytest.importorskip("torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

HERE = Path(__file__).parent
# Ranks, stage of ZeRO, type of the weights.
CASES = [(1, 2, "bf16"), (2, 1, "fp32"), (2, 2, "bf16"), (2, 3, "bf16"), (3, 2, "bf16"), (3, 3, "fp32")]
PROGRAMS = ("deepspeed.utils.zero_to_fp32", "deepspeed.checkpoint.ds_to_universal")
MODULES = ("deepspeed.comm.torch", "deepspeed.runtime.zero.muon.muon_optimizer", *PROGRAMS, *forked.COMPILER)


@pytest.fixture(scope="session")
def saved(base: Path):
    """The checkpoint of a case, saved once."""
    done = {}

    def of(case: tuple[int, int, str]) -> Path:
        if case not in done:
            done[case] = base / "deepspeed" / "-".join(map(str, case))
            ranks, *how = case
            forked.run_ranks(ranks, MODULES, HERE / "deepspeed_process.py", done[case], *how, DS_ACCELERATOR="cpu")
        return done[case]

    return of


def script(program: str, *arguments: object) -> None:
    """Runs one of DeepSpeed's own programs."""
    forked.run(MODULES, "-m", program, *arguments, DS_ACCELERATOR="cpu")


def fp32(checkpoint: Path, to: Path) -> dict[str, torch.Tensor]:
    """What `zero_to_fp32` makes."""
    script("deepspeed.utils.zero_to_fp32", checkpoint, to)
    return torch.load(to / "pytorch_model.bin", weights_only=True)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def shown(point: Path) -> dict[str, bytes]:
    paths = [path for path in (point / "full").rglob("*") if path.is_file()]
    return {str(path.relative_to(point / "full")).replace("/", "."): path.read_bytes() for path in paths}


@pytest.mark.parametrize("case", CASES)
def test_master_weights_are_those_of_zero_to_fp32(saved, own, tmp_path, case):
    checkpoint = saved(case)
    expected = fp32(checkpoint, tmp_path)
    found = shown(own(checkpoint, "--mesh", "fsdp=2", "--layout", "stored", "--dtype", "f32").point)
    assert {name: found[name] for name in expected} == {name: raw(tensor) for name, tensor in expected.items()}
    # With ZeRO 1 it drops parameters that are not trained.
    surplus = {"frozen.weight", "frozen.bias"} if case[1] == 1 else set()
    assert set(found) - set(expected) == surplus
    # As they are stored: master weights in f32, what is not trained in the model's type.
    tag = checkpoint / (checkpoint / "latest").read_text()
    mounted = own(tag, "--layout", "stored")
    dtypes = {name: os.getxattr(mounted / "full" / name.replace(".", "/"), "user.ckfs.dtype").decode() for name in found}
    assert dtypes["up.weight"] == "F32" and dtypes["places"] == "I64"
    assert dtypes["frozen.weight"] == ("BF16" if case[2] == "bf16" else "F32")
    assert "no difference" in mounting.run("verify", mounted.point).out


@pytest.fixture(scope="session")
def converted(base: Path, saved):
    """What `ds_to_universal` makes of a case, converted once: the directory with `universal/` and `latest_universal`."""

    def of(case: tuple[int, int, str]) -> Path:
        to = base / "universal" / "-".join(map(str, case))
        if not to.exists():
            convert(saved(case), to / "universal", case[1])
        return to

    return of


def convert(checkpoint: Path, to: Path, stage: int) -> None:
    more = ["--inject_missing_state"] if stage < 3 else []
    workers = ["--num_extract_workers", 1, "--num_merge_workers", 1]
    tag = checkpoint / (checkpoint / "latest").read_text()
    script("deepspeed.checkpoint.ds_to_universal", "--input_folder", tag, "--output_folder", to, *workers, *more)


def members(value: object) -> object:
    """A loaded value as values that compare: types, order and bytes included."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), raw(value)
    if isinstance(value, dict):
        return type(value), [(key, members(member)) for key, member in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [members(member) for member in value]
    if type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__") and not hasattr(value, "name"):
        return type(value), members(value.__dict__)
    return type(value), value


def unpadded(state: object, name: str) -> object:
    """Without what the last ranks of ZeRO 3 have after the end of parameters that are not trained: DeepSpeed leaves that memory as it is."""
    if isinstance(state, dict) and (fragments := state.get("frozen_param_fragments")) and name.startswith("zero_pp_rank_"):
        rank, shapes = int(name.split("_")[3]), state["frozen_param_shapes"]
        for parameter, fragment in fragments.items():
            fragments[parameter] = fragment[: max(0, shapes[parameter].numel() - rank * len(fragment))]
    return state


def compare(found: Path, expected: Path) -> int:
    """Compares the archives of two directories, member by member."""
    files = lambda at: sorted(str(path.relative_to(at)) for path in at.rglob("*") if path.is_file())  # noqa: E731
    assert files(found) == files(expected)
    for name in files(expected):
        values = [unpadded(torch.load(at / name, weights_only=False), name) for at in (found, expected)]
        assert members(values[0]) == members(values[1]), name
    return len(files(expected))


@pytest.mark.parametrize("case", CASES)
def test_a_training_state_is_the_universal_checkpoint_of_its_converter(saved, converted, own, case):
    mounted = own(saved(case), "--training-state")
    assert compare(mounted / "universal", converted(case) / "universal") > 20
    assert (mounted / "latest_universal").read_text() == (converted(case) / "latest_universal").read_text()
    # What the optimizer keeps is there as tensors too, and no part of a model.
    moments = mounted / "full/optimizer/state/up/weight/exp_avg_sq"
    param = torch.load(converted(case) / "universal/zero/up.weight/exp_avg_sq.pt", weights_only=False)
    assert moments.read_bytes() == raw(param["param"] if case[1] < 3 else param)
    assert "no difference" in mounting.run("verify", mounted.point).out
    assert not (own(saved(case)) / "universal").exists()
    # Weights of another type are another model's, to which the optimizer's state does not belong.
    assert not (own(saved(case), "--training-state", "--dtype", "bf16") / "universal").exists()


@pytest.mark.parametrize("case,ranks", [((2, 1, "fp32"), 1), ((2, 2, "bf16"), 3), ((3, 3, "fp32"), 2)])
def test_deepspeed_resumes_on_other_ranks_as_from_its_converter(saved, converted, own, tmp_path, case, ranks):
    mounted = own(saved(case), "--training-state")
    for source, to in ((mounted.point, "found"), (converted(case), "expected")):
        arguments = (tmp_path / to, *case[1:], source)
        forked.run_ranks(ranks, MODULES, HERE / "deepspeed_process.py", *arguments, DS_ACCELERATOR="cpu")
    assert (tmp_path / "found/latest").read_text() == "global_step4"
    assert compare(tmp_path / "found/global_step4", tmp_path / "expected/global_step4") >= 2


def test_what_the_converter_does_not_make_is_said(saved, tmp_path):
    said = lambda: "".join([(done := mounting.run("plan", copy, "--training-state")).out, done.err])  # noqa: E731
    for member, edit, message in [
        ("model", lambda state: state | {"universal_checkpoint_info": {"vocabulary_parameter_patterns": ["embed"]}}, "vocabulary"),
        ("optim", lambda state: state["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("exp_avg"), "exp_avg"),
    ]:
        copy = tmp_path / member
        shutil.copytree(saved((1, 2, "bf16")), copy)
        [path] = (copy / (copy / "latest").read_text()).glob(f"*{member}*_states.pt")
        state = torch.load(path, weights_only=False)
        changed = edit(state)
        torch.save(changed if isinstance(changed, dict) else state, path)
        assert "universal/ is not shown" in said() and message in said()


@pytest.mark.parametrize("case", [(2, 1, "fp32"), (3, 3, "fp32")])
def test_universal_checkpoints_hold_the_same(saved, own, tmp_path, case):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(saved(case), checkpoint)
    tag = (checkpoint / "latest").read_text()
    universal = checkpoint / f"{tag}_universal"
    convert(checkpoint, universal, case[1])
    expected = fp32(checkpoint, tmp_path / "fp32")
    for source in (universal, checkpoint):
        if source == checkpoint:
            shutil.rmtree(checkpoint / tag)
            (checkpoint / "latest").unlink()
        found = shown(own(source, "--layout", "stored", "--dtype", "f32").point)
        assert {name: found[name] for name in expected} == {name: raw(tensor) for name, tensor in expected.items()}


def refused(source: Path) -> str:
    return mounting.run("plan", source, expect=1).err


def test_what_is_missing_or_of_another_save_is_named(saved, tmp_path):
    case = (3, 3, "fp32")
    copy = tmp_path / "copy"
    shutil.copytree(saved(case), copy)
    tag = copy / (copy / "latest").read_text()
    partition = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    kept = partition.read_bytes()
    partition.unlink()
    assert "expected the partitions of 3 ranks, found 2; missing: rank 1" in refused(copy)
    for length in (0, 1000, len(kept) - 1):
        partition.write_bytes(kept[:length])
        assert partition.name in refused(copy)
    partition.write_bytes(kept)
    states = tag / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    model = torch.load(states, weights_only=False)
    torch.save(model | {"global_steps": 9}, states)
    assert "they are of different saves" in refused(copy)
    states.unlink()
    assert "expected the model states of 3 ranks" in refused(copy)
    (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert "expected the model states of rank 0" in refused(copy)
    shutil.rmtree(tag)
    assert "the file latest names" in refused(copy)


def test_parameters_that_the_partitions_do_not_hold_are_refused(saved, tmp_path):
    case = (2, 2, "bf16")
    for name, edit, message in [
        ("more", lambda shapes: shapes | {"other": torch.Size([500])}, "needs those from"),
        ("fewer", lambda shapes: {"embed.weight": shapes["embed.weight"]}, "they are not of the same parameters"),
    ]:
        copy = tmp_path / name
        shutil.copytree(saved(case), copy)
        states = copy / (copy / "latest").read_text() / "mp_rank_00_model_states.pt"
        model = torch.load(states, weights_only=False)
        model["param_shapes"][0] = edit(dict(model["param_shapes"][0]))
        model["param_alignment_paddings"] = None
        torch.save(model, states)
        for path in states.parent.glob("*_optim_states.pt"):
            optimizer = torch.load(path, weights_only=False)
            optimizer["optimizer_state_dict"].pop("param_alignment_paddings", None)
            torch.save(optimizer, path)
        assert message in refused(copy)


def test_models_that_are_split_otherwise_are_refused(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved((2, 2, "bf16")), copy)
    tag = copy / (copy / "latest").read_text()
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
    assert "split over ranks (mp_rank_01)" in refused(copy)
    (tag / "mp_rank_01_model_states.pt").rename(tag / "layer_01-model_00-model_states.pt")
    assert "stages of a pipeline or experts" in refused(copy)
    # The files of the other rank are not there at all: the model states count them.
    model = torch.load(tag / "layer_01-model_00-model_states.pt", weights_only=False)
    (tag / "layer_01-model_00-model_states.pt").unlink()
    torch.save(model | {"mp_world_size": 2}, tag / "mp_rank_00_model_states.pt")
    assert "split over ranks (mp_world_size)" in refused(copy)


def test_files_of_two_saves_in_one_directory_are_refused(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved((2, 2, "bf16")), copy)
    tag = copy / (copy / "latest").read_text()
    own, other = tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(own, other)
    said = refused(copy)
    assert f"{other.name}: of the same rank as" in said and own.name in said
    other.unlink()
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert "of the same rank as" in refused(copy)
    (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    # An end of parameters beyond all numbers.
    for path in tag.glob("*_optim_states.pt"):
        optimizer = torch.load(path, weights_only=False)
        state = optimizer["optimizer_state_dict"]
        state["param_alignment_paddings"] = [[2**64 - 1 for _ in group] for group in state["param_alignment_paddings"]]
        torch.save(optimizer, path)
    assert "elements on all ranks, and parameter" in refused(copy)


def test_classes_of_a_client_are_refused_by_name(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved((2, 2, "bf16")), copy)
    states = copy / (copy / "latest").read_text() / "mp_rank_00_model_states.pt"
    torch.save(torch.load(states, weights_only=False) | {"client": os.system}, states)
    assert "posix.system" in refused(copy)


def test_parameters_that_were_not_saved_are_said(saved, tmp_path):
    """As `save_checkpoint(exclude_frozen_parameters=True)` leaves a checkpoint."""
    copy = tmp_path / "copy"
    shutil.copytree(saved((1, 2, "bf16")), copy)
    said = lambda: "exclude_frozen_parameters" in "".join([(done := mounting.run("plan", copy)).out, done.err])  # noqa: E731
    assert not said()
    path = copy / (copy / "latest").read_text() / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    trained = {name: tensor for name, tensor in state["module"].items() if not name.startswith("frozen.")}
    torch.save(state | {"module": trained, "frozen_param_shapes": None, "frozen_param_fragments": None}, path)
    assert said()
