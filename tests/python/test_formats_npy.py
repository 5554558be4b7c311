"""numpy on `npy/`: files loaded, mapped, and viewed as their real types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mounting
import reference
import repos
from reference import Mesh

OPAQUE = ("BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def files(mounted, repo, mesh):
    for device in Mesh.parse(mesh).devices:
        for path, shown in reference.canonical(repo).items():
            if shown.bundled:
                yield mounted / f"npy/dev{device}/{path}.npy", shown, reference.shard(shown, Mesh.parse(mesh), device)


@pytest.mark.parametrize("mmap_mode", [None, "r", "c"])
@pytest.mark.parametrize("name, mesh", [("llama", "fsdp=2,tensor=2"), ("uneven", "fsdp=4"), ("every_dtype", "fsdp=3")])
def test_np_load(shared, repo, name, mesh, mmap_mode):
    mounted, count = shared(name, "--mesh", mesh), 0
    for file, shown, expected in files(mounted, repo(name), mesh):
        if mmap_mode and expected.size == 0:
            continue  # numpy cannot map an empty array
        found = np.load(file, mmap_mode=mmap_mode)
        if shown.code in OPAQUE:
            assert found.dtype == np.dtype(f"V{expected.itemsize}"), file
            found = found.view(repos.NUMPY[shown.code])
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), file
        mounting.same_bytes(found.tobytes(), expected, file)
        count += 1
    assert count >= 5


def test_the_names_are_those_of_the_bundle(shared, repo):
    mounted = shared("llama", "--mesh", "fsdp=2,tensor=2")
    expected = {f"{path}.npy" for path, shown in reference.canonical(repo("llama")).items() if shown.bundled}
    assert mounted.files("npy/dev3") == expected


def test_bfloat16_files_equal_those_of_numpy(shared, repo, tmp_path):
    """The dictionary of `np.save`, whose padding differs: here the elements start on a page."""
    mounted = shared("llama", "--mesh", "fsdp=2,tensor=2")
    file, _, expected = next(files(mounted, repo("llama"), "fsdp=2,tensor=2"))
    assert expected.dtype == ml_dtypes.bfloat16
    np.save(tmp_path / "own.npy", expected)
    own, ours = (tmp_path / "own.npy").read_bytes(), file.read_bytes()
    assert ours[10:4096].split() == own[10:128].split()
    assert ours[4096:] == own[128:]


def test_a_forgotten_view_is_an_error(shared):
    """No operation treats the bytes of bfloat16 as numbers of another type without a view."""
    found = np.load(shared("llama", "--mesh", "fsdp=2,tensor=2") / "npy/dev0/embed.npy")
    with pytest.raises(TypeError):
        found + 1
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError):
        jnp.asarray(found)
    assert jnp.asarray(found.view(ml_dtypes.bfloat16)).dtype == jnp.bfloat16
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError):
        torch.from_numpy(found)
    tensor = torch.from_numpy(found.view(np.uint16)).view(torch.bfloat16)
    assert tensor.float().numpy().tobytes() == found.view(ml_dtypes.bfloat16).astype(np.float32).tobytes()


def test_xattrs_name_the_type(shared):
    file = shared("llama", "--mesh", "fsdp=2,tensor=2") / "npy/dev0/embed.npy"
    assert mounting.xattr(file, "dtype") == "BF16"
