"""The tests' own tools: all other tests here depend on them."""

import numpy as np
import pytest

import reference
import repos
from reference import Mesh

MESHES = ["fsdp=4", "fsdp=3", "tensor=2,fsdp=2", "fsdp=2,expert=2,tensor=2", "replica=2,fsdp=5"]


@pytest.mark.parametrize("name", repos.BUILDERS)
def test_official_parser_reads_our_repos(repo, name):
    from safetensors import safe_open

    for file, members in repo(name).files.items():
        with safe_open(repo(name).path / file, framework="numpy") as handle:
            assert set(handle.keys()) == set(members)
            for key, tensor in members.items():
                part = handle.get_slice(key)
                assert (part.get_dtype(), tuple(part.get_shape())) == (tensor.code, tensor.shape)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", repos.BUILDERS)
def test_shards_tile_the_whole(repo, name, mesh):
    """The number of devices that hold an element is the product of the axes that do not split its tensor."""
    grid = Mesh.parse(mesh)
    for path, shown in reference.canonical(repo(name)).items():
        held = np.zeros(shown.shape, np.int32)
        splitting = {axis for axes in reference.split_by(shown, grid) for axis in axes}
        if shown.expert is not None:
            splitting |= {axis for axis, _ in grid.axes if reference.KIND[axis] == "expert"}
        copies = int(np.prod([size for axis, size in grid.axes if axis not in splitting], dtype=np.int64))
        for device in grid.devices:
            held[tuple(slice(a, b) for a, b in reference.region(shown, grid, device))] += 1
        assert (held == copies).all(), path


@pytest.mark.parametrize("name", repos.BUILDERS)
def test_scanned_and_unscanned_agree(repo, name):
    """One unscanned name per source tensor, and every stack consists of them."""
    tensors = reference.canonical(repo(name))
    single = {shown.sources[0]: shown for shown in tensors.values() if not shown.scanned and not shown.alias}
    assert set(single) == set(repo(name).tensors)
    for shown in tensors.values():
        if shown.scanned:
            parts = b"".join(single[source].array.tobytes() for source in shown.sources)
            assert parts == shown.array.tobytes()
            assert len(shown.layers) == shown.shape[0]


def test_paths_are_files_or_directories_but_not_both(repo):
    for name in repos.BUILDERS:
        paths = set(reference.canonical(repo(name)))
        folders = {path.rsplit("/", n)[0] for path in paths for n in range(1, path.count("/") + 1)}
        assert not paths & folders, name


def test_transformers_accepts_our_repos(repo):
    """For families whose models are small enough to build: no weight is missing or unexpected."""
    pytest.importorskip("torch")
    from transformers import AutoModel, AutoModelForCausalLM

    kinds = {"bert": AutoModel}
    for name in ("llama", "llama_tied", "llama_f32", "qwen2", "qwen3_moe", "mixtral", "phi3", "gpt_oss", "bert"):
        kind = kinds.get(name, AutoModelForCausalLM)
        _, report = kind.from_pretrained(repo(name).path, output_loading_info=True)
        wrong = {key: report[key] for key in ("missing_keys", "mismatched_keys") if report[key]}
        assert not wrong, (name, wrong)
