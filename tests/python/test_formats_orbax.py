"""The unmodified Orbax on `orbax/`: every way to restore, on 8 CPU devices, in one process and in two."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

# Before jax creates its devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import pytest

import mounting
import reference
import repos
from reference import Mesh
from servers import free_port

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

jax.config.update("jax_enable_x64", True)  # 64-bit types would be narrowed otherwise
HERE = Path(__file__).parent
MESH = "fsdp=4,tensor=2"


def nested(flat: dict[str, object]) -> dict:
    """`a.b.c` as keys of dictionaries."""
    tree: dict = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return tree


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    out = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def bundle(repo: repos.Repo) -> dict[str, reference.Shown]:
    return {shown.name: shown for shown in reference.canonical(repo).values() if shown.bundled}


def same_tree(found: dict, tensors: dict[str, reference.Shown]) -> None:
    found = flat(found)
    assert set(found) == set(tensors)
    for name, shown in tensors.items():
        array = np.asarray(found[name])
        assert (array.dtype, array.shape) == (repos.NUMPY[shown.code], shown.array.shape), name
        mounting.same_bytes(array.tobytes(), shown.array, name)


def jax_mesh(text: str) -> jax.sharding.Mesh:
    axes = Mesh.parse(text).axes
    return jax.make_mesh([size for _, size in axes], [name for name, _ in axes])


def targets(mounted: mounting.Mount, mesh: str, spec_of=None) -> dict:
    """The target of a restore: shapes, types and shardings, from the manifest."""
    devices = jax_mesh(mesh)
    out = {}
    for row in mounted.manifest()["tensors"]:
        if row["bundled"]:
            axes = spec_of(row) if spec_of else [tuple(axis) if isinstance(axis, list) else axis for axis in row["spec"]]
            sharding = NamedSharding(devices, PartitionSpec(*axes))
            out[row["name"]] = jax.ShapeDtypeStruct(row["shape"], repos.NUMPY[row["dtype"]], sharding=sharding)
    return nested(out)


@pytest.fixture
def mounted(shared):
    return shared("llama", "--mesh", MESH)


@pytest.fixture
def tensors(repo):
    return bundle(repo("llama"))


def test_pytree_checkpointer_without_a_target(mounted, tensors):
    same_tree(ocp.PyTreeCheckpointer().restore(mounted / "orbax/0/items"), tensors)


def test_standard_checkpointer_without_a_target(mounted, tensors):
    same_tree(ocp.StandardCheckpointer().restore(mounted / "orbax/0/items"), tensors)


def test_each_device_gets_its_own_shard(mounted, tensors):
    """Device d of jax's mesh holds, byte for byte, the contents of `dev{d}`."""
    found = ocp.StandardCheckpointer().restore(mounted / "orbax/0/items", targets(mounted, MESH))
    same_tree(found, tensors)
    for name, array in flat(found).items():
        for shard in array.addressable_shards:
            raw = (mounted / f"dev{shard.device.id}/{name.replace('.', '/')}").read_bytes()
            mounting.same_bytes(raw, np.asarray(shard.data), (name, shard.device))


@pytest.mark.parametrize("spec_of", [
    lambda row: [None] * len(row["shape"]),
    lambda row: ["all" if extent % 8 == 0 else None for extent in row["shape"]][:1],
    lambda row: [*[None] * (len(row["shape"]) - 1), "all" if row["shape"][-1] % 8 == 0 else None],
], ids=["replicated", "first_axis", "last_axis"])  # fmt: skip
def test_shardings_other_than_the_chunks(mounted, tensors, spec_of):
    target = targets(mounted, "all=8", spec_of)
    same_tree(ocp.StandardCheckpointer().restore(mounted / "orbax/0/items", target), tensors)


def test_chunks_smaller_than_shards(shared, tensors):
    """A limit that cuts every shard of a matrix in several chunks."""
    mounted = shared("llama", "--mesh", MESH, "--chunk-bytes", "100")
    sizes = [entry.stat().st_size for entry in (mounted / "orbax/0/items/layers.scanned.wq").glob("[0-9]*")]
    assert len(sizes) > 8 and max(sizes) <= 100
    same_tree(ocp.StandardCheckpointer().restore(mounted / "orbax/0/items", targets(mounted, MESH)), tensors)


def test_a_wider_type_is_cast_by_orbax(mounted, tensors):
    as_f32 = lambda target: jax.ShapeDtypeStruct(target.shape, np.float32, sharding=target.sharding)  # noqa: E731
    target = jax.tree.map(as_f32, targets(mounted, MESH))
    found = flat(ocp.StandardCheckpointer().restore(mounted / "orbax/0/items", target))
    for name, shown in tensors.items():
        assert np.array_equal(np.asarray(found[name]), shown.array.astype(np.float32)), name


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("kind", ["standard", "pytree"])
def test_checkpoint_manager(mounted, tensors, kind, read_only):
    options = ocp.CheckpointManagerOptions(read_only=True) if read_only else None
    args = ocp.args.StandardRestore(targets(mounted, MESH)) if kind == "standard" else ocp.args.PyTreeRestore()
    with ocp.CheckpointManager(mounted / "orbax", item_names=("items",), options=options) as manager:
        assert manager.latest_step() == 0
        assert manager.metadata(0).custom_metadata == {"scan_layers": True}
        same_tree(manager.restore(0, args=ocp.args.Composite(items=args))["items"], tensors)


def test_version_1(mounted, tensors):
    import orbax.checkpoint.experimental.v1 as v1

    same_tree(v1.load(mounted / "orbax/0"), tensors)
    same_tree(v1.load(mounted / "orbax/0", targets(mounted, MESH), checkpointable_name="items"), tensors)


def test_metadata(mounted, tensors):
    metadata = ocp.StandardCheckpointer().metadata(mounted / "orbax/0/items")
    leaves = flat(metadata.item_metadata.tree)
    assert set(leaves) == set(tensors)
    for name, shown in tensors.items():
        assert (leaves[name].shape, leaves[name].dtype) == (shown.array.shape, repos.NUMPY[shown.code])
    assert metadata.custom_metadata == {"scan_layers": True}


@pytest.mark.parametrize("args, scanned", [((), True), (("--unscanned",), False), (("--layout", "hf"), False)])
def test_scan_layers(shared, args, scanned):
    mounted = shared("llama", "--mesh", MESH, *args)
    metadata = ocp.StandardCheckpointer().metadata(mounted / "orbax/0/items")
    assert metadata.custom_metadata["scan_layers"] is scanned


def test_names_of_the_repository(shared, repo):
    """Layout hf: `model.layers.0...` becomes dictionaries, with the numbers of layers as strings."""
    mounted = shared("llama", "--mesh", MESH, "--layout", "hf")
    tensors = {name: shown for name, shown in reference.hf(repo("llama")).items()}
    same_tree(ocp.PyTreeCheckpointer().restore(mounted / "orbax/0/items"), tensors)


@pytest.fixture(scope="session")
def types_repo(base):
    """Every type that an array can have, with a scalar, an empty tensor and a shape that no mesh axis divides."""
    draw = repos.Draw("types")
    out = {code.lower(): draw(code, code, 6, 8) for code in repos.NUMPY}
    out |= {"scalar": draw("scalar", "BF16"), "empty": repos.Tensor("F32", (0, 3), b""), "odd": draw("odd", "F32", 7, 5)}
    return repos.write(base / "repos/types", {"model.safetensors": out}, {"model_type": "unheard_of"})


@pytest.mark.parametrize("mesh", ["", "fsdp=2", "fsdp=4"])
def test_every_type(own, types_repo, mesh):
    tensors = bundle(types_repo)
    mounted = own(types_repo.path, *(["--mesh", mesh] if mesh else []))
    same_tree(ocp.PyTreeCheckpointer().restore(mounted / "orbax/0/items"), tensors)
    # jax lacks arrays of some types; the others are restored with shardings. It would not accept an uneven split.
    named = {name: shown for name, shown in tensors.items() if name not in ("f8_e8m0",)}
    even = lambda row: [None if i or not n or n % 2 else "x" for i, n in enumerate(row["shape"])]  # noqa: E731
    target = targets(mounted, "x=2,y=4", even)
    target = {name: leaf for name, leaf in target.items() if name in named}
    found = ocp.PyTreeCheckpointer().restore(
        mounted / "orbax/0/items", item=target, transforms={},
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
    )  # fmt: skip
    same_tree(found, named)


def params_repo(path: Path) -> repos.Repo:
    """A repository with the names that MaxText writes: with layout hf they become its tree."""
    draw, at = repos.Draw("params"), "params.params.decoder"
    tensors = {
        "params.params.token_embedder.embedding": draw("embedding", "BF16", 64, 16),
        f"{at}.decoder_norm.scale": draw("norm", "F32", 16),
        f"{at}.layers.mlp.wi_0.kernel": draw("wi_0", "BF16", 16, 2, 32),
        f"{at}.layers.self_attention.query.kernel": draw("query", "BF16", 16, 2, 4, 8),
    }
    return repos.write(path, {"model.safetensors": tensors}, {"model_type": "unheard_of"})


def maxtext_restore(items: Path, target: dict) -> dict:
    """The call of MaxText's `load_params_from_path`."""
    checkpointer = ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(restore_concurrent_gb=96, save_concurrent_gb=96, use_ocdbt=True, use_zarr3=True)
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    return checkpointer.restore(
        items, item={"params": target}, transforms={}, restore_args={"params": restore_args}
    )["params"]  # fmt: skip


@pytest.fixture
def params(own, tmp_path):
    source = params_repo(tmp_path / "params")
    return source, own(source.path, "--mesh", MESH, "--layout", "hf")


def test_the_call_that_maxtext_makes(params):
    source, mounted = params
    target = targets(mounted, MESH)["params"]
    # Its newer loader requests the tree of shapes first.
    tree = ocp.StandardCheckpointer().metadata(mounted / "orbax/0/items").item_metadata.tree["params"]["params"]
    assert tree["decoder"]["layers"]["mlp"]["wi_0"]["kernel"].shape == (16, 2, 32)
    found = maxtext_restore(mounted / "orbax/0/items", target)
    same_tree({"params": found}, reference.hf(source))


@pytest.mark.parametrize("layout, scanned", [("maxtext", True), ("maxtext-unscanned", False)])
def test_the_layout_of_maxtext(shared, layout, scanned):
    """Keys are `params` twice, and each device gets the contents of its raw files."""
    mounted = shared("llama", "--mesh", MESH, "--layout", layout)
    items = mounted / "orbax/0/items"
    assert ocp.StandardCheckpointer().metadata(items).custom_metadata["scan_layers"] is scanned
    target = targets(mounted, MESH)["params"]
    found = flat(maxtext_restore(items, {"params": target})["params"])
    assert len(found) == len(flat(target)) > 8
    for name, array in found.items():
        for shard in array.addressable_shards:
            raw = (mounted / f"dev{shard.device.id}/params/{name.replace('.', '/')}").read_bytes()
            mounting.same_bytes(raw, np.asarray(shard.data), (name, shard.device))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_source_that_fails_is_an_error_and_never_zeros(params):
    """That call reads a missing chunk as zeros, so the mount must fail in another way."""
    source, mounted = params
    target = targets(mounted, MESH)["params"]
    file = source.path / "model.safetensors"
    with open(file, "r+b") as held:
        held.truncate(file.stat().st_size // 2)
    with pytest.raises(Exception) as raised:
        maxtext_restore(mounted / "orbax/0/items", target)
    assert "Input/output error" in "".join(traceback.format_exception(raised.value))
    del raised
    gc.collect()  # Orbax leaves other reads of the same restore behind, which fail too


def test_each_byte_is_fetched_once(own, repo):
    """Restoring onto the mesh of the mount reads each byte of the bundle from the source once."""
    mounted, tensors = own(repo("llama").path, "--mesh", MESH), bundle(repo("llama"))
    target = targets(mounted, MESH)
    before = fetched(mounted)
    ocp.StandardCheckpointer().restore(mounted / "orbax/0/items", target)
    assert fetched(mounted) - before <= 1.02 * sum(shown.array.nbytes for shown in tensors.values())


def fetched(mounted: mounting.Mount) -> int:
    """Bytes of sources that were read, summed over all ways of reading."""
    return sum(mounted.stats()["bytes_fetched"].values())


@pytest.mark.parametrize("flags, root", [((), ()), (("--layout", "maxtext"), ("params",))], ids=["canonical", "maxtext"])
def test_two_processes_of_four_devices(own, repo, tmp_path, flags, root):
    """Each process opens its own chunks of split arrays, and together they fetch each byte once: what both need, such as norms, comes
    to the second one from the kernel's page cache."""
    mounted = own(repo("llama").path, "--mesh", MESH, *flags)
    rows = [row for row in mounted.manifest()["tensors"] if row["bundled"]]
    before = fetched(mounted)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE),
    }  # fmt: skip
    command = [sys.executable, str(HERE / "orbax_process.py"), str(mounted.point), MESH, f"127.0.0.1:{free_port()}"]
    results = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    running = [
        subprocess.Popen([*command, str(rank), str(result), *root], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank, result in enumerate(results)
    ]
    try:
        out = [process.communicate(timeout=mounting.TIMEOUT_SECONDS)[0].decode() for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(out)
    total = sum(int(np.prod(row["shape"])) * np.dtype(repos.NUMPY[row["dtype"]]).itemsize for row in rows)
    assert fetched(mounted) - before <= 1.02 * total
    first, second = (json.loads(result.read_text())["shards"] for result in results)
    assert len(first) == len(second) == 4 * len(rows) and not first.keys() & second.keys()
    for path, digest in (first | second).items():
        assert hashlib.sha256((mounted / path).read_bytes()).hexdigest() == digest, path
