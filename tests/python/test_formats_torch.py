"""The unmodified torch on `pt/`, `dcp/` and `safetensors/`: in one process, and in four with FSDP2."""

from __future__ import annotations

import numpy as np
import pytest

import mounting
import reference
import repos
from reference import Mesh

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

import torch_process  # noqa: E402

TORCH = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
TORCH |= {"F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}


def torch_dtype(code: str) -> torch.dtype:
    return TORCH.get(code) or getattr(torch, np.dtype(repos.NUMPY[code]).name)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_tensor(found: torch.Tensor, code: str, expected: np.ndarray, what: object) -> None:
    assert (found.dtype, tuple(found.shape)) == (torch_dtype(code), expected.shape), what
    mounting.same_bytes(raw_bytes(found), expected, what)


def bundle(repo: repos.Repo) -> dict[str, reference.Shown]:
    return {shown.name: shown for shown in reference.canonical(repo).values() if shown.bundled}


# Types that torch has and the safetensors package's table for torch lacks.
UNREAD = ("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


@pytest.fixture(params=["llama", "uneven", "all_types"])
def case(request, shared, own, repo, tmp_path):
    """A mount for four devices and the contents of its bundles; for `types`, also a scalar and an empty tensor."""
    if not request.param.endswith("types"):
        return shared(request.param, "--mesh", "fsdp=4"), bundle(repo(request.param)), Mesh.parse("fsdp=4")
    draw, codes = repos.Draw(request.param), repos.NUMPY.keys()
    out = {code.lower(): draw(code, code, 6, 8) for code in codes if request.param == "all_types" or code not in UNREAD}
    out |= {"scalar": draw("scalar", "BF16"), "empty": repos.Tensor("F32", (0, 3), b""), "odd": draw("odd", "F32", 7, 5)}
    source = repos.write(tmp_path / "types", {"model.safetensors": out}, {"model_type": "unheard_of"})
    return own(source.path, "--mesh", "fsdp=4"), bundle(source), Mesh.parse("fsdp=4")


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load(case, mmap, weights_only):
    mounted, tensors, mesh = case
    for device in mesh.devices:
        found = torch.load(mounted / f"pt/dev{device}.pt", mmap=mmap, weights_only=weights_only)
        assert list(found) and set(found) == set(tensors)
        for name, shown in tensors.items():
            same_tensor(found[name], shown.code, reference.shard(shown, mesh, device), (device, name))


def empty_state(tensors: dict[str, reference.Shown]) -> dict[str, torch.Tensor]:
    """Tensors of the right shapes with wrong values."""
    state = {}
    for name, shown in tensors.items():
        state[name] = torch.empty(shown.array.shape, dtype=torch_dtype(shown.code))
        if state[name].numel():
            state[name].reshape(-1).view(torch.uint8).fill_(0x5A)
    return state


def check_state(state: dict[str, torch.Tensor], tensors: dict[str, reference.Shown]) -> None:
    for name, shown in tensors.items():
        same_tensor(state[name], shown.code, shown.array, name)


def test_dcp_load(case):
    mounted, tensors, _ = case
    state = empty_state(tensors)
    dcp.load(state, checkpoint_id=str(mounted / "dcp"), no_dist=True)
    check_state(state, tensors)


@pytest.mark.parametrize("case", ["llama", "uneven", "most_types"], indirect=True)
def test_device_files_reassemble(case):
    """`HuggingFaceStorageReader` assembles the whole tensors from the four files."""
    mounted, tensors, _ = case
    state = empty_state(tensors)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(mounted / "safetensors")), no_dist=True)
    check_state(state, tensors)


@pytest.mark.parametrize("mesh", ["replica=2,fsdp=2", "expert=2,fsdp=2", "fsdp=2,expert=3"])
@pytest.mark.parametrize("args", [(), ("--unscanned",)], ids=["scanned", "unscanned"])
def test_copies_and_experts_reassemble(shared, repo, mesh, args):
    """Copies on several devices, and single experts that only some devices hold."""
    mounted = shared("qwen3_moe", "--mesh", mesh, *args)
    tensors = {shown.name: shown for shown in reference.canonical(repo("qwen3_moe")).values() if not shown.alias}
    bundled = {row["name"] for row in mounted.manifest()["tensors"] if row["bundled"]}
    tensors = {name: shown for name, shown in tensors.items() if name in bundled}
    assert len(tensors) == len(bundled)
    for reader in (dcp.HuggingFaceStorageReader(str(mounted / "safetensors")), dcp.FileSystemReader(mounted / "dcp")):
        state = empty_state(tensors)
        dcp.load(state, storage_reader=reader, no_dist=True)
        check_state(state, tensors)


def test_pairs_of_4_bit_floats(own, tmp_path):
    """Two 4-bit floats of a row are one element of torch."""
    tensors = {"w": repos.Tensor("F4", (4, 8), bytes(range(16))), "v": repos.Draw("pairs")("v", "BF16", 4, 8)}
    source = repos.write(tmp_path / "pairs", {"model.safetensors": tensors}, {"model_type": "unheard_of"})
    mounted = own(source.path, "--mesh", "fsdp=2")
    for device in range(2):
        found = torch.load(mounted / f"pt/dev{device}.pt", weights_only=True)["w"]
        assert (found.dtype, tuple(found.shape)) == (torch.float4_e2m1fn_x2, (2, 4))
        assert raw_bytes(found) == bytes(range(8 * device, 8 * device + 8))
    dcp_to_torch_save(mounted / "dcp", tmp_path / "whole.pt")
    assert raw_bytes(torch.load(tmp_path / "whole.pt", weights_only=True)["w"]) == bytes(range(16))


def test_dcp_to_torch_save(case, tmp_path):
    """Torch's own converter to a file for `torch.load`."""
    mounted, tensors, _ = case
    dcp_to_torch_save(str(mounted / "dcp"), tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(found) == set(tensors)
    check_state(found, tensors)


def test_common_pt(shared):
    """The entries that Megatron-Core reads beside the tensors."""
    assert torch.load(shared("llama", "--mesh", "fsdp=4") / "dcp/common.pt", weights_only=True) == {"iteration": 0}


def test_metadata_lists_each_region_once(shared):
    mounted = shared("llama", "--mesh", "replica=2,fsdp=2")
    metadata = dcp.FileSystemReader(mounted / "dcp").read_metadata()
    for name, tensor in metadata.state_dict_metadata.items():
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
        assert len(chunks) == len(set(chunks)), name
        assert sum(int(np.prod(sizes)) for _, sizes in chunks) == int(np.prod(tensor.size)), name
    assert {info.relative_path for info in metadata.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}


def test_a_source_that_fails_is_an_error(own, fresh):
    source = fresh("llama_f32")
    mounted = own(source.path, "--mesh", "fsdp=4")
    tensors = bundle(source)
    for name in source.files:
        with open(source.path / name, "r+b") as held:
            held.truncate((source.path / name).stat().st_size // 2)
    with pytest.raises(dcp.api.CheckpointException, match="Input/output error"):
        dcp.load(empty_state(tensors), checkpoint_id=str(mounted / "dcp"), no_dist=True)
    with pytest.raises(OSError, match="Input/output error"):
        torch.load(mounted / "pt/dev0.pt")


MESHES = {"fsdp": "dp_shard=4", "hsdp": "dp_replicate=2,dp_shard=2", "fsdp_tp": "fsdp=2,tp=2"}


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("name", ["llama", "uneven"])
def test_four_processes(shared, name, kind):
    """FSDP2 over four gloo processes: loaded from `dcp/`, `safetensors/`, `hf/`, and each rank's own file."""
    mounted = shared(name, "--mesh", MESHES[kind], "--layout", "hf")
    found = torch_process.run([mounted.point] * 4, MESHES[kind])
    assert all([row["way"] for row in rows] == ["dcp", "safetensors", "hf", "own"] for rows in found), found
