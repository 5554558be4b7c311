"""Raw files: every shard of every device equals what numpy cuts from the whole tensor."""

import dataclasses
import json
import os

import pytest

import mounting
import reference
from mounting import check_device, check_full, check_xattrs
from reference import Mesh

MESHES = [
    "fsdp=4",
    "fsdp=3",
    "fsdp=2,tensor=2",
    "tensor=2,fsdp=2",
    "tp=2",
    "dp_replicate=2,dp_shard=2",
    "data=2,fsdp=2,tensor=2",
    "replica=3",
]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["llama", "uneven"])
def test_every_shard_of_every_device(shared, repo, name, mesh):
    mounted, tensors, grid = shared(name, "--mesh", mesh), reference.canonical(repo(name)), Mesh.parse(mesh)
    assert {entry.name for entry in mounted.point.glob("dev*")} == {f"dev{d}" for d in grid.devices}
    for device in grid.devices:
        check_device(mounted, tensors, grid, device)
    check_full(mounted, tensors)


@pytest.mark.parametrize("mesh", ["expert=2", "ep=2,fsdp=2", "fsdp=2,expert=2,tensor=2"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_expert_meshes(shared, repo, name, mesh):
    mounted, tensors, grid = shared(name, "--mesh", mesh), reference.canonical(repo(name)), Mesh.parse(mesh)
    for device in grid.devices:
        check_device(mounted, tensors, grid, device)


def test_experts_of_other_devices_are_empty(shared):
    """Unscanned names under an expert axis: experts 0 and 1 on the first device, 2 and 3 on the second."""
    mounted = shared("qwen3_moe", "--mesh", "expert=2")
    for device, held in enumerate(({0, 1}, {2, 3})):
        for expert in range(4):
            file = mounted / f"dev{device}/layers/1/experts/{expert}/w_gate"
            assert file.stat().st_size == (6 * 16 * 2 if expert in held else 0)
            assert json.loads(mounting.xattr(file, "shape")) == ([6, 16] if expert in held else [0, 16])


def test_uneven_sizes_by_hand(shared):
    """Literal numbers, so that a mistake in the reference's chunk is detected."""
    mounted = shared("uneven", "--mesh", "fsdp=4")
    rows = {size: [] for size in (13, 10, 6, 2)}
    for size, found in rows.items():
        for device in range(4):
            found.append((mounted / f"dev{device}/block{size}/weight").stat().st_size // 12)
    assert rows == {13: [4, 4, 4, 1], 10: [3, 3, 3, 1], 6: [2, 2, 2, 0], 2: [1, 1, 0, 0]}


def test_chunks_are_torchs():
    """The reference's own arithmetic against torch."""
    torch = pytest.importorskip("torch")
    for extent in range(1, 40):
        for parts in range(1, 10):
            theirs = [len(piece) for piece in torch.arange(extent).chunk(parts)]
            ours = [stop - start for start, stop in (reference.chunk(0, extent, parts, i) for i in range(parts))]
            assert ours == theirs + [0] * (parts - len(theirs))


def test_without_a_mesh_there_is_one_device(shared, repo):
    mounted = shared("llama")
    assert {entry.name for entry in mounted.point.glob("dev*")} == {"dev0"}
    check_device(mounted, reference.canonical(repo("llama")), Mesh(()), 0)


@pytest.mark.parametrize("mesh", ["fsdp=4", "tensor=2,fsdp=2"])
def test_layout_hf(shared, repo, mesh):
    mounted, tensors, grid = shared("llama", "--layout", "hf", "--mesh", mesh), reference.hf(repo("llama")), Mesh.parse(mesh)
    names = reference.canonical_names(repo("llama"))
    for path, shown in tensors.items():
        role = dataclasses.replace(shown, tensor_axis=reference.tensor_axis(names[path].rest))
        for device in grid.devices:
            file = mounted / f"dev{device}/{path}"
            mounting.same_bytes(file.read_bytes(), reference.shard(role, grid, device), file)
    assert mounted.files("full") == set(tensors)


@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tensor=2"])
@pytest.mark.parametrize("name", ["llama", "uneven"])
def test_xattrs(shared, repo, name, mesh):
    mounted, grid = shared(name, "--mesh", mesh), Mesh.parse(mesh)
    for path, shown in reference.canonical(repo(name)).items():
        for device in grid.devices:
            file = mounted / f"dev{device}/{path}"
            check_xattrs(file, shown, grid, device)
            assert json.loads(mounting.xattr(file, "spec")) == reference.spec(shown, grid)
            assert json.loads(mounting.xattr(file, "sources")) == shown.sources
        check_xattrs(mounted / f"full/{path}", shown, Mesh(()), 0)


def test_xattrs_are_listed_and_others_absent(shared):
    file = shared("llama", "--mesh", "fsdp=4") / "dev1/layers/scanned/wq"
    names = {f"user.ckfs.{name}" for name in ("dtype", "shape", "global_shape", "offset", "spec", "sources")}
    assert names <= set(os.listxattr(file))
    with pytest.raises(OSError):
        os.getxattr(file, "user.ckfs.nothing")


@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tensor=2", "data=2,fsdp=2,tensor=2"])
def test_mesh_links(shared, mesh):
    mounted, grid = shared("llama", "--mesh", mesh), Mesh.parse(mesh)
    assert set(os.listdir(mounted / "mesh")) == {grid.link(d) for d in grid.devices}
    for device in grid.devices:
        link = mounted / "mesh" / grid.link(device)
        assert os.readlink(link) == f"../dev{device}"
        assert link.resolve() == mounted / f"dev{device}"


def test_only_the_hosts_own_devices(shared, repo):
    mounted = shared("llama", "--mesh", "fsdp=4", "--devices", "2-3")
    assert {entry.name for entry in mounted.point.glob("dev*")} == {"dev2", "dev3"}
    for device in (2, 3):
        check_device(mounted, reference.canonical(repo("llama")), Mesh.parse("fsdp=4"), device)
    assert set(os.listdir(mounted / "safetensors")) == {"dev2.safetensors", "dev3.safetensors"}


@pytest.mark.parametrize("mesh", ["fsdp=3", "fsdp=2,tensor=2"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "uneven"])
def test_manifest(shared, repo, name, mesh):
    mounted, grid, tensors = shared(name, "--mesh", mesh), Mesh.parse(mesh), reference.canonical(repo(name))
    manifest = mounted.manifest()
    assert list(manifest["mesh"].items()) == list(grid.axes)
    assert (manifest["layout"], manifest["family"]) == ("canonical", None if name == "uneven" else "llama")
    assert manifest["devices"] == [{"device": d, "coordinates": grid.coordinates(d)} for d in grid.devices]
    rows = {row["path"]: row for row in manifest["tensors"]}
    assert set(rows) == set(tensors)
    for path, shown in tensors.items():
        row = rows[path]
        assert (row["name"], row["dtype"], row["shape"]) == (shown.name, shown.code, list(shown.shape)), path
        assert row["spec"] == reference.spec(shown, grid), path
        assert row["sources"] == shown.sources, path
        assert row.get("layers", []) == list(shown.layers), path
        assert row["bundled"] == shown.bundled, path
        expected = [
            {"device": d, "offset": reference.shard_offset(shown, grid, d), "shape": reference.shard_shape(shown, grid, d)}
            for d in grid.devices
        ]
        assert row["regions"] == expected, path


def test_other_files_about_the_mount(shared):
    mounted = shared("llama", "--mesh", "fsdp=4")
    assert {"manifest.json", "plan.txt", "config.toml", "stats.json", "metrics"} <= set(os.listdir(mounted / ".ckfs"))
    assert "llama" in (mounted / ".ckfs/plan.txt").read_text()
    assert 'mesh = "fsdp=4"' in (mounted / ".ckfs/config.toml").read_text()


def test_every_dtype_passes_through(shared, repo):
    mounted, tensors = shared("every_dtype", "--mesh", "fsdp=3"), reference.canonical(repo("every_dtype"))
    check_full(mounted, tensors)
    for device in range(3):
        check_device(mounted, tensors, Mesh.parse("fsdp=3"), device)
    for path, shown in tensors.items():
        assert mounting.xattr(mounted / f"full/{path}", "dtype") == shown.code
