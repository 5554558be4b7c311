"""The number of source bytes that a rank causes to be read, by the mount's own counters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mounting
import reference
import repos
from reference import Mesh

torch = pytest.importorskip("torch")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import torch_process  # noqa: E402

# Bytes beyond each rank's shard: headers, and files that a format has beside the tensors.
MORE = 1.02


def fetched(mounted: mounting.Mount) -> int:
    return torch_process.fetched(mounted.point)


def read_ahead_bytes(mounted: mounting.Mount) -> int:
    """The kernel's read-ahead around a page fault: the value that the mount requested, or 128 KiB."""
    device = mounted.point.stat().st_dev
    return 1024 * int(Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text())


def source_bytes(repo: repos.Repo, mesh: Mesh, device: int) -> int:
    """Bytes of the repository's elements that a device holds."""
    shards = [reference.shard(shown, mesh, device) for shown in reference.canonical(repo).values() if shown.bundled]
    return sum(2 * shard.size for shard in shards)


@pytest.mark.parametrize("options", [(), ("--layout", "hf")], ids=["stacked", "hf"])
@pytest.mark.parametrize("mesh", ["fsdp=4", "tensor=4", "fsdp=2,tensor=2"])
@pytest.mark.parametrize("folder,load", [("safetensors", load_file), ("pt", lambda file: torch.load(file, mmap=True))])
def test_a_device_file(own, wide, folder, load, mesh, options):
    """Inner splits too: only the device's columns of each row are read."""
    mounted, grid = own(wide.path, "--mesh", mesh, *options), Mesh.parse(mesh)
    for device in grid.devices:
        before, (file,) = fetched(mounted), (mounted / folder).glob(f"dev{device}.*")
        total = sum(tensor.clone().nbytes for tensor in load(file).values())
        assert total == source_bytes(wide, grid, device)
        assert total <= fetched(mounted) - before <= MORE * total, device


@pytest.mark.parametrize("options", [(), ("--layout", "hf")], ids=["stacked", "hf"])
@pytest.mark.parametrize("mesh", ["fsdp=4", "tensor=4"])
def test_a_device_file_cast(own, wide, mesh, options):
    """Converted data is computed once if it is read from beginning to end."""
    mounted, grid = own(wide.path, "--mesh", mesh, "--dtype", "f32", *options), Mesh.parse(mesh)
    for device in grid.devices:
        before = fetched(mounted)
        assert len((mounted / f"safetensors/dev{device}.safetensors").read_bytes()) > 2 * source_bytes(wide, grid, device)
        assert fetched(mounted) - before <= MORE * source_bytes(wide, grid, device), device


@pytest.mark.parametrize("mesh", ["fsdp=4", "tensor=4"])
def test_a_mapped_device_file_cast(own, wide, mesh):
    """Page faults and the kernel's requests ahead of them come in several streams, and some tiles are computed twice."""
    mounted, grid = own(wide.path, "--mesh", mesh, "--dtype", "f32"), Mesh.parse(mesh)
    before, total = fetched(mounted), source_bytes(wide, grid, 1)
    assert sum(tensor.clone().nbytes for tensor in load_file(mounted / "safetensors/dev1.safetensors").values()) == 2 * total
    assert fetched(mounted) - before <= MORE * total


@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tensor=2"])
def test_untouched_files(own, wide, mesh):
    """The kernel reads `hf/` by itself where it may; else four ranks that read all of it together fetch it once."""
    for options in ((), ("-o", "no_passthrough")):
        mounted = own(wide.path, "--mesh", mesh, *options)
        before, total = fetched(mounted), 0
        for _ in range(4):
            for file in sorted((mounted / "hf").glob("*.safetensors")):
                with safe_open(file, framework="pt") as held:
                    total += sum(held.get_tensor(name).clone().nbytes for name in held.keys())
        assert total == 4 * source_bytes(wide, Mesh.parse("replica=1"), 0)
        assert fetched(mounted) - before <= MORE * total / 4
        if mounted.stats()["passthrough_opens"]:
            assert not options and fetched(mounted) == before


def everything(repo: repos.Repo) -> int:
    return sum(len(tensor.data) for tensor in repo.tensors.values())


@pytest.mark.parametrize("mesh", ["dp_shard=4", "dp_replicate=2,dp_shard=2", "fsdp=2,tp=2"])
def test_four_ranks(own, wide, mesh):
    """FSDP2 in four processes, each with a mount of its own, as on four hosts.

    From `safetensors/`, torch maps all files for a header probe, and the kernel reads 1 MiB of each. A mount that materializes
    bundles would make all four, so that a host that reads one of them says so. Under tensor parallelism a rank also reads
    small tensors of other ranks' files, with the kernel's read-ahead around them.
    """
    options = ("--mesh", mesh, "--layout", "hf", "--materialize", "none")
    mounts, ways = [own(wide.path, *options) for _ in range(4)], ("dcp", "safetensors")
    around = {"dcp": 0, "safetensors": 4 * read_ahead_bytes(mounts[0])}
    for rank, rows in enumerate(torch_process.run([mounted.point for mounted in mounts], mesh, *ways)):
        assert [row["way"] for row in rows] == list(ways)
        for row in rows:
            assert row["wanted"] <= row["fetched"], (rank, row)
            most = everything(wide) if "tp" in mesh else MORE * row["wanted"] + around[row["way"]]
            assert row["fetched"] <= most, (rank, row)


@pytest.mark.parametrize("mesh", ["dp_shard=4", "fsdp=2,tp=2"])
def test_four_ranks_of_a_host(own, wide, mesh):
    """On one mount together: each byte of the repository once. From `safetensors/`, files are materialized in pieces that all ranks share,
    so that what the kernel reads around a header or a small tensor is not fetched again. From `dcp/` each rank fetches what it holds:
    under tensor parallelism torch keeps tensors whole that the mesh of the mount splits, and a rank that opens another's file after it was
    closed reads it through the page cache, with the kernel's read-ahead."""
    mounted, ways = own(wide.path, "--mesh", mesh, "--layout", "hf"), ("dcp", "safetensors")
    ahead = read_ahead_bytes(mounted)
    around = {"dcp": 4 * ahead if "tp" in mesh else 0, "safetensors": 4 * ((2 << 20) + 2 * ahead)}
    for rows in torch_process.run([mounted.point] * 4, mesh, *ways):
        assert [row["way"] for row in rows] == list(ways)
        most = {"dcp": max(everything(wide), 4 * rows[0]["wanted"]), "safetensors": everything(wide)}
        assert all(row["fetched"] <= MORE * most[row["way"]] + around[row["way"]] for row in rows), rows
