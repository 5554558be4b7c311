"""`ckfs.torch`: new tensors, and modules that are filled in place, against torch's own loaders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import forked
import package
import repos
from guide_blocks import ROOT
from repos import NUMPY

package.import_ckfs()

import ckfs


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().contiguous()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def original(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_tensors_are_those_of_safetensors(repo):
    path = repo("every_dtype").path
    ck = ckfs.open(path, layout="hf")
    found = ckfs.torch.load(ck)
    for name, tensor in repo("every_dtype").tensors.items():
        assert bits(found[name]) == tensor.data, name
        if tensor.code in NUMPY:
            assert found[name].shape == torch.Size(tensor.shape), name
        if tensor.code in ("BF16", "F8_E4M3", "BOOL", "C64", "U16"):
            kinds = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "BOOL": torch.bool, "C64": torch.complex64, "U16": torch.uint16}
            assert found[name].dtype == kinds[tensor.code]


def test_shards_of_a_device(repo):
    ck = ckfs.open(repo("llama").path, mesh={"fsdp": 3}, dtype=torch.float32)
    for device in range(3):
        found, arrays = ckfs.torch.load(ck, device), ck.load(device)
        assert {name: bits(tensor) for name, tensor in found.items()} == {name: array.tobytes() for name, array in arrays.items()}
        assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert ckfs.torch.load(ck, 0, only="embed", to="cpu").keys() == {"embed"}
    with pytest.raises(RuntimeError):
        ckfs.torch.load(ck, 0, only="embed", to="nowhere")


@pytest.mark.parametrize("most", [1, 100, 5000, 1 << 20])
@pytest.mark.parametrize("kind", ["every_dtype", "llama"])
def test_values_that_pass_by_stages_are_those_that_are_read_directly(repo, monkeypatch, kind, most):
    """As to a GPU, by stages of any size, but to memory of the host."""
    monkeypatch.setattr(ckfs.torch, "STAGE_BYTES", (most, most))
    sizes, stage = [], ckfs.torch._Stage
    monkeypatch.setattr(ckfs.torch, "_Stage", lambda size, pinned: sizes.append(size) or stage(size, pinned))
    ck = ckfs.open(repo(kind).path, **({"mesh": {"fsdp": 3}} if kind == "llama" else {"layout": "hf"}))
    for device in (0, 2) if kind == "llama" else (None,):
        expected, parts, seen = ckfs.torch.load(ck, device), [], []
        for at, (name, tensor) in enumerate(expected.items()):
            # Elements that follow each other, and such that do not.
            target = torch.empty_like(tensor) if at % 2 or tensor.ndim < 2 else torch.empty_like(tensor.mT).mT
            selection, _ = ckfs._checkpoint.selected(ck[name].shape, () if device is None else ck[name].region(device))
            parts.append(ckfs.torch._Part(ck[name]._index, selection, None, target))
        total = sum(part.target.nbytes for part in parts)
        reported = ckfs._checkpoint.Reported(lambda done, total: seen.append((done, total)), total)
        ckfs.torch._load_by_stages(ck, parts, 2, reported)
        for (name, tensor), part in zip(expected.items(), parts):
            assert bits(part.target) == bits(tensor), name
        assert seen == sorted(seen) and seen.count((total, total)) == 1 and {other for _, other in seen} == {total}
        # A packed last axis, or one element, is the least that is read at a time.
        least = 1000 if kind == "every_dtype" else 0
        assert all(size <= max(-(-most // 64) * 64, least) for size in sizes) and len(sizes) <= 4


@pytest.mark.parametrize(
    ("extents", "target", "most", "expected"),
    [
        ((0, 5), torch.empty(0, 5), 1, 1), ((), torch.empty(()), 1, 1), ((1, 7), torch.empty(1, 7), 4, 7), ((5, 4), torch.empty(5, 4), 32, 3),
        # Packed: two elements a byte; and rows of five elements of six bits, which share a byte.
        ((4, 4), torch.empty(4, 2, dtype=torch.uint8), 2, 4), ((2, 5), torch.empty(2, 4, dtype=torch.uint8), 1, 1),
    ],
)  # fmt: skip
def test_a_tensor_is_cut_between_whole_bytes(extents, target, most, expected):
    parts = list(ckfs.torch._Part(0, [(0, extent, 1) for extent in extents], None, target).cut(most))
    assert len(parts) == expected and sum(part.target.nbytes for part in parts) == target.nbytes


def run_ranks(world: int, source: Path, cases: list[str]) -> list[list[dict]]:
    said = forked.run_ranks(world, forked.TORCH, ROOT / "tests/python/load_into_process.py", source, *cases)
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out in said]


def test_modules_of_four_ranks_are_as_torch_loads_them(repo):
    cases = ["fsdp:4", "hsdp:2:2", "tp_fsdp:2:2", "tp:4"]
    found = run_ranks(4, repo("llama").path, cases)
    for row in [row for rows in found for row in rows]:
        assert row["differ"] == [] and row["tensors"] > 10 and row["bytes"] > 0, row
    assert [row["case"] for row in found[0]] == cases
    assert [row["strided"] for row in found[0]] == [False, False, True, False], "FSDP2 over tensor parallelism is strided"


def test_modules_of_three_ranks_are_split_unevenly(repo):
    for row in [row for rows in run_ranks(3, repo("llama").path, ["fsdp:3"]) for row in rows]:
        assert row["differ"] == [], row


def fake_world(rank: int, world: int):
    """A process group that only pretends: whatever communicates gets nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def test_strided_shards_of_any_size():
    """Parameters split by tensor parallelism first and then by FSDP2, evenly or not: each rank's part is of its own number."""
    said = forked.run(forked.TORCH, ROOT / "tests/python/strided_process.py")
    assert said.split()[-2:] == ["96", "ranks"], said


class Small(nn.Module):
    """Two names of one parameter, a buffer, one that is not persistent, and something that is no tensor."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.full((2,), 7.0), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: object) -> None:
        pass


@pytest.fixture
def small(tmp_path):
    def get(**tensors: torch.Tensor) -> ckfs.Checkpoint:
        codes = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16", torch.float64: "F64"}
        path = tmp_path / f"repo{len(list(tmp_path.iterdir()))}"
        made = {
            name.replace("__", "."): repos.Tensor(codes[tensor.dtype], tuple(tensor.shape), bits(tensor)) for name, tensor in tensors.items()
        }
        repos.write(path, {"model.safetensors": made}, {"model_type": "unheard_of"})
        return ckfs.open(path, layout="hf")

    return get


def test_tied_parameters_and_buffers(small):
    weight, other = torch.randn(5, 3), torch.randn(5, 3)
    module = Small()
    ckfs.torch.load_into(small(first__weight=weight, count=torch.tensor(9)), module)
    assert torch.equal(module.second.weight, weight) and module.count == 9 and torch.equal(module.table, torch.full((2,), 7.0))
    assert module.second.weight is module.first.weight
    # Both names: as load_state_dict leaves it, the last one counts.
    both = {"first.weight": weight, "second.weight": other, "count": torch.tensor(3), "_extra_state": None}
    theirs = Small()
    theirs.load_state_dict(both)
    ckfs.torch.load_into(small(first__weight=weight, second__weight=other, count=torch.tensor(3)), module)
    assert torch.equal(module.first.weight, theirs.first.weight)


def test_strictness_is_that_of_modules(small):
    weight = torch.randn(5, 3)
    ck = small(first__weight=weight, more=torch.zeros(1), count=torch.tensor(1))
    module = Small(tied=False)
    before = module.first.weight.detach().clone()
    with pytest.raises(ckfs.LoadError, match="layout") as failed:
        ckfs.torch.load_into(ck, module)
    assert failed.value.missing == ["second.weight"] and failed.value.unexpected == ["more"]
    assert torch.equal(module.first.weight, before), "nothing is changed"
    found = ckfs.torch.load_into(ck, module, strict=False)
    assert found.missing_keys == ["second.weight"] and found.unexpected_keys == ["more"]
    assert torch.equal(module.first.weight, weight)
    with pytest.raises(ckfs.LoadError, match=r"expected shape \[5, 3\], found \[3, 5\]") as failed:
        ckfs.torch.load_into(small(first__weight=weight.T), Small(), strict=False)
    assert len(failed.value.mismatched) == 1 or failed.value.mismatched


def test_memory_of_any_kind(small):
    weight = torch.randn(5, 3)
    ck = small(weight=weight)
    column = torch.zeros(3, 5).T
    part = torch.zeros(7, 5, 3)
    for target in (torch.zeros(5, 3), column, part[2]):
        ckfs.torch.load_into(ck, {"weight": target})
        assert torch.equal(target, weight)
    assert not part[[0, 1, 3, 4, 5, 6]].any()
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        target = torch.zeros(5, 3, dtype=dtype)
        ckfs.torch.load_into(ck, {"weight": target})
        assert bits(target) == bits(torch.zeros(5, 3, dtype=dtype).copy_(weight)), dtype
    with pytest.raises(ValueError, match="weight"):
        ckfs.torch.load_into(ck, {"weight": torch.zeros(5, 3, dtype=torch.int32)})
    with pytest.raises(ckfs.LoadError, match="to_empty"):
        ckfs.torch.load_into(ck, {"weight": torch.zeros(5, 3, device="meta")})
    with pytest.raises(ckfs.LoadError, match="meta"):
        ckfs.torch.load_into(ck, nn.ParameterDict({"weight": nn.Parameter(torch.zeros(5, 3, device="meta"))}))


def test_tensors_that_share_memory_are_refused(small):
    ck = small(a=torch.ones(4, 3), b=torch.full((4, 3), 2.0))

    def refused(state: dict[str, torch.Tensor], text: str) -> None:
        with pytest.raises(ckfs.LoadError, match=text):
            ckfs.torch.load_into(ck, state)
        assert not any(tensor.any() for tensor in state.values()), "nothing is changed"

    rows, columns, line = torch.zeros(7, 3), torch.zeros(4, 5), torch.zeros(100)
    refused({"a": rows[:4], "b": rows[3:]}, "a and b share memory")
    refused({"b": columns[:, 2:], "a": columns[:, :3]}, "share memory")
    refused({"a": rows[:4], "b": rows[:4].reshape(3, 4).T}, "share memory")
    refused({"a": line.as_strided((4, 3), (2, 1)), "b": torch.zeros(4, 3)}, "a: elements of it share memory")
    refused({"a": torch.zeros(1, 3).expand(4, 3), "b": torch.zeros(4, 3)}, "a: elements of it share memory")
    # Parts of one memory that share no element: rows, columns, every other element.
    for a, b in ((rows.new_zeros(8, 3)[:4], None), (torch.zeros(4, 6)[:, :3], None), (torch.zeros(4, 6)[:, ::2], None)):
        base = a._base
        b = base[4:] if base.shape == (8, 3) else base[:, 3:] if a.stride(1) == 1 else base[:, 1::2]
        ckfs.torch.load_into(ck, {"a": a, "b": b})
        assert bool((a == 1).all()) and bool((b == 2).all())


def test_names_of_wrapped_modules(small):
    weight = torch.randn(5, 3)
    ck = small(first__weight=weight, second__weight=weight, count=torch.tensor(1))
    module = Small(tied=False)
    ckfs.torch.load_into(ck, torch.compile(module))
    assert torch.equal(module.second.weight, weight)
    fake_world(0, 1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Small(tied=False))
        ckfs.torch.load_into(ck, wrapped)
        assert torch.equal(wrapped.module.first.weight, weight)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3_moe"])
def test_a_model_of_transformers(repo, name):
    path = repo(name).path
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(path)
        ours = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ours.to_empty(device="cpu")
    ours.tie_weights()
    layout = "transformers" if name == "qwen3_moe" else "hf"
    ckfs.torch.load_into(ckfs.open(path, layout=layout, dtype="bf16"), ours)
    left, right = ours.state_dict(), theirs.state_dict()
    assert left.keys() == right.keys() and all(bits(left[key]) == bits(right[key]) for key in left)


def test_a_state_dict_of_tensors_is_that_of_safetensors(repo):
    path = repo("llama").path
    state = {name: torch.empty_like(tensor) for name, tensor in original(path).items()}
    ckfs.torch.load_into(ckfs.open(path, layout="hf"), state)
    assert all(bits(state[name]) == bits(tensor) for name, tensor in original(path).items())
