"""Checkpoints that Orbax wrote, in all its ways, as sources: their bytes, and the same checkpoint for another mesh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Before jax creates its devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import pytest

import mounting
from servers import free_port, stub_bucket

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
import ml_dtypes  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

jax.config.update("jax_enable_x64", True)  # 64-bit types would be narrowed otherwise
HERE = Path(__file__).parent

# The options of the writer, by the name of the kind.
WRITERS = {
    "ocdbt-zarr3": {"use_ocdbt": True, "use_zarr3": True},
    "ocdbt-zarr2": {"use_ocdbt": True, "use_zarr3": False},
    "ocdbt-plain": {"use_ocdbt": True, "use_zarr3": True, "use_compression": False},
    "files-zarr3": {"use_ocdbt": False, "use_zarr3": True},
    "files-zarr2": {"use_ocdbt": False, "use_zarr3": False},
    "files-plain-zarr3": {"use_ocdbt": False, "use_zarr3": True, "use_compression": False},
    "files-plain-zarr2": {"use_ocdbt": False, "use_zarr3": False, "use_compression": False},
}


def grid(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(list(axes.values()), list(axes))


def state() -> dict:
    """A training state of 8 devices: split along each axis, replicated, scalars, lists, names with dots, types."""
    rng = np.random.default_rng(0)
    fsdp, both = grid(fsdp=8), grid(fsdp=4, tensor=2)

    def draw(dtype: object, *shape: int) -> np.ndarray:
        dtype = np.dtype(dtype)
        bits = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        return np.frombuffer((bits & 1 if dtype == bool else bits).tobytes(), dtype).reshape(shape)

    def put(array: np.ndarray, mesh: jax.sharding.Mesh, *spec: object) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    layer = lambda: {"mlp": {"wi_0": {"kernel": put(draw(ml_dtypes.bfloat16, 16, 24), both, "fsdp", "tensor")}}}  # noqa: E731
    params = {
        "decoder": {
            "layers_0": layer(),
            "layers_1": layer(),
            "layers": {"mlp": {"wo": {"kernel": put(draw(np.float32, 8, 3, 32), fsdp, "fsdp")}}},
            "decoder_norm": {"scale": put(draw(np.float32, 33), both)},
        },
        "columns": put(draw(np.float16, 3, 16), both, None, ("fsdp", "tensor")),
        "large": put(draw(np.float32, 64, 1024), fsdp, "fsdp"),
        "zeros": put(np.zeros((64, 64), np.float32), fsdp, "fsdp"),
        "scalar": np.float32(3.5),
        "wide": draw(np.int64, 5, 7),
        "f8": put(draw(ml_dtypes.float8_e4m3fn, 8, 8), fsdp, "fsdp"),
        "f8_scales": draw(ml_dtypes.float8_e8m0fnu, 8),
        "bool": draw(np.bool_, 6, 2),
    }
    mu = {"decoder": {"w": put(draw(np.float32, 16, 24), both, "fsdp", "tensor")}}
    return {"params": {"params": params}, "opt_state": {"mu": mu, "count": np.int32(3)}, "step": np.int32(7)}


def flat(tree: object, prefix: str = "") -> dict[str, np.ndarray]:
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree)}
    out: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}.{key}" if prefix else key)
    return out


def model(tree: dict) -> dict[str, np.ndarray]:
    return {name: array for name, array in flat(tree).items() if name.startswith("params.")}


@pytest.fixture(scope="module")
def saved() -> dict:
    return state()


@pytest.fixture(scope="module")
def written(base, saved):
    """A directory of `CheckpointManager` with two steps, by the kind of writer; the newer one has the state."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            root = base / "orbax" / kind
            handler = ocp.PyTreeCheckpointHandler(**WRITERS[kind])
            with ocp.CheckpointManager(root, item_handlers=handler) as manager:
                older = {"params": {"params": {"w": np.zeros(2, np.float32)}}}
                manager.save(2, args=ocp.args.PyTreeSave(older))
                manager.save(10, args=ocp.args.PyTreeSave(saved), custom_metadata={"scan_layers": False})
                manager.wait_until_finished()
            made[kind] = root
        return made[kind]

    return get


def same(directory: Path, arrays: dict[str, np.ndarray]) -> None:
    """The raw files of a directory, against arrays."""
    found = {str(path.relative_to(directory)).replace("/", ".") for path in directory.rglob("*") if path.is_file()}
    assert found == set(arrays)
    for name, array in arrays.items():
        mounting.same_bytes((directory / name.replace(".", "/")).read_bytes(), array, name)


@pytest.mark.parametrize("kind", WRITERS)
def test_bytes_of_every_writer(own, written, saved, kind):
    """Through the mount, the whole model; the optimizer's state is left out, and costs no file."""
    mounted = own(written(kind), "--mesh", "fsdp=4,tensor=2")
    same(mounted / "full", model(saved))
    plan = mounting.run("plan", written(kind), "--json").json()
    assert "opt_state" in json.dumps(plan)
    done = mounting.run("verify", written(kind), "--mesh", "fsdp=4,tensor=2")
    assert "no difference" in done.out + done.err


@pytest.mark.parametrize("kind", ["ocdbt-zarr3", "files-plain-zarr2"])
def test_the_training_state_is_shown_on_request(own, written, saved, kind):
    same(own(written(kind), "--training-state") / "full", flat(saved))


@pytest.mark.parametrize("below", ["10", "10/default"])
def test_a_step_and_an_item_are_sources_too(own, written, saved, below):
    same(own(written("ocdbt-zarr3") / below) / "full", model(saved))


def restored(items: Path, tree: dict, mesh: jax.sharding.Mesh, spec_of) -> dict:
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec_of(leaf.shape))), tree
    )
    return ocp.StandardCheckpointer().restore(items, target)


@pytest.mark.parametrize("kind", ["ocdbt-zarr3", "files-zarr2", "files-plain-zarr3"])
def test_the_same_checkpoint_for_another_mesh(own, written, saved, kind):
    """fsdp=8 as Orbax wrote it, mounted for fsdp=2,tensor=4, restored by Orbax on such a mesh: equal arrays."""
    mounted = own(written(kind), "--mesh", "fsdp=2,tensor=4")
    even = lambda shape: PartitionSpec(*["fsdp" if shape and shape[0] % 2 == 0 else None][: len(shape)])  # noqa: E731
    tree = {"params": saved["params"]}
    found = restored(mounted / "orbax/0/items", tree, grid(fsdp=2, tensor=4), even)
    found, expected = flat(found), flat(tree)
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        mounting.same_bytes(np.ascontiguousarray(found[name]).tobytes(), array, name)
    # What Orbax reads there is a source again.
    again = own(mounted / "orbax")
    same(again / "full", model(saved))


def test_orbax_in_and_dcp_out(own, written, saved):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    mounted = own(written("ocdbt-zarr3"), "--mesh", "fsdp=4,tensor=2")
    arrays = {name: array for name, array in model(saved).items() if array.dtype in (np.float32, np.int64, np.float16)}
    state = {name: torch.empty(array.shape, dtype=getattr(torch, array.dtype.name)) for name, array in arrays.items()}
    dcp.load(state, checkpoint_id=str(mounted / "dcp"))
    for name, array in arrays.items():
        mounting.same_bytes(state[name].numpy().tobytes(), array, name)


def test_the_checkpointer_of_standard_trees(own, base, saved):
    path = base / "orbax/standard"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, saved)
    same(own(path) / "full", model(saved))


def test_chunks_smaller_than_shards(own, base, saved):
    path = base / "orbax/chunked"
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=256), saved)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(saved, save_args=arguments))
    same(own(path, "--mesh", "fsdp=8") / "full", model(saved))
    same(own(path, "--mesh", "fsdp=3") / "full", model(saved))


def test_unfinished_steps_are_passed_over_and_alone_refused(own, written, saved, base):
    root = base / "orbax/unfinished"
    shutil.copytree(written("ocdbt-zarr3"), root)
    shutil.copytree(root / "10", root / "11.orbax-checkpoint-tmp")
    shutil.copytree(root / "10", root / "12")
    metadata = root / "12/_CHECKPOINT_METADATA"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"commit_timestamp_nsecs": None}))
    same(own(root) / "full", model(saved))
    # An item whose saver was stopped, on a store that cannot rename it.
    item = base / "orbax/unfinished-item"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(item, {"params": {"w": np.zeros(2, np.float32)}})
    own(item)
    metadata = item / "_CHECKPOINT_METADATA"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"commit_timestamp_nsecs": None}))
    for alone in ("11.orbax-checkpoint-tmp", "12", "../unfinished-item"):
        done = mounting.run("plan", root / alone, expect=1)
        assert "unfinished" in done.err, done.err


@pytest.mark.parametrize("kind", ["ocdbt-zarr3", "files-plain-zarr2"])
def test_a_bucket_holds_the_same_checkpoint(own, written, saved, clean, tmp_path, kind):
    """By ranged reads, and without the optimizer's. A step without its commit file is not finished on an object store."""
    with stub_bucket("s3", tmp_path / "server") as bucket:
        for name, value in bucket.environment.items():
            clean.setenv(name, value)
        place = tmp_path / "server/weights/some/model"
        shutil.copytree(written(kind), place, dirs_exist_ok=True)
        mounted = own(bucket.address, "--mesh", "fsdp=4,tensor=2")
        same(mounted / "full", model(saved))
        assert "no difference" in mounting.run("verify", mounted.point).out
        (place / "10/commit_success.txt").unlink()
        plan = mounting.run("plan", bucket.address, "--json")
        (view,) = plan.json().get("views", [plan.json()])
        assert {row["name"] for row in view["tensors"]} == {"params.params.w"}
        assert "commit_success.txt" in plan.out + plan.err
        assert "unfinished" in mounting.run("plan", f"{bucket.address}/10", expect=1).err


def test_int4_is_refused_with_the_reason(base):
    path = base / "orbax/int4"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": {"q": jax.numpy.arange(-8, 8).astype(jax.numpy.int4)}})
    done = mounting.run("plan", path, expect=1)
    assert "params.q" in done.err and "int4" in done.err


def test_a_lost_chunk_is_refused_and_a_damaged_one_is_an_error(own, written, base):
    """Orbax stores chunks of zeros too: a missing one is damage."""
    root = base / "orbax/lost"
    shutil.copytree(written("files-zarr2") / "10", root)
    chunk = root / "default/params.params.zeros/3.0"
    stored = chunk.read_bytes()
    chunk.unlink()
    done = mounting.run("plan", root, expect=1)
    assert "params.params.zeros" in done.err and "3.0" in done.err
    chunk.write_bytes(stored[:-3])
    mounted = own(root)
    assert mounting.error_of((mounted / "full/params/params/zeros").read_bytes) is not None
    assert mounting.error_of((mounted / "full/params/params/large").read_bytes) is None
    chunk.write_bytes(stored)


def test_a_chunk_beyond_all_memory_is_an_error(own, written, base):
    """A damaged description may give a chunk any shape: it is refused before the mount, and the other tensors are served."""
    root = base / "orbax/vast"
    shutil.copytree(written("files-zarr2") / "10", root)
    description = root / "default/params.params.wide/.zarray"
    changed = json.loads(description.read_text()) | {"chunks": [1 << 18, 1 << 18]}
    description.write_text(json.dumps(changed))
    refused = mounting.run("plan", root, expect=1).err
    assert "params.params.wide: a chunk" in refused and "512 GiB" in refused and "--exclude" in refused
    mounted = own(root, "--exclude", "params.params.wide")
    assert mounting.error_of((mounted / "full/params/params/large").read_bytes) is None


def test_explain_names_chunk_and_codec(written):
    done = mounting.run("explain", written("files-zarr2"), "full/params/params/large")
    assert "zstd" in done.out and "chunk" in done.out


WRITER = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = Mesh(np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id))).reshape(4, 2), ("fsdp", "tensor"))
def put(array, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
tree = {"params": {"split": put(np.arange(2048, dtype=np.float32).reshape(32, 64), "fsdp", "tensor"),
                   "rows": put(np.arange(64, dtype=np.int32), "fsdp"), "whole": put(np.arange(33, dtype=np.float32))}}
handler = ocp.PyTreeCheckpointHandler(use_ocdbt=sys.argv[4] == "ocdbt", use_zarr3=True)
with ocp.CheckpointManager(sys.argv[3], item_handlers=handler) as manager:
    manager.save(1, args=ocp.args.PyTreeSave(tree))
    manager.wait_until_finished()
jax.distributed.shutdown()
"""


@pytest.mark.parametrize("store", ["ocdbt", "files"])
def test_several_processes_write_one_checkpoint(own, base, store):
    """Two processes of four devices: an OCDBT database each, which one of them merges; a replicated array is there once."""
    root = base / "orbax/processes" / store
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WRITER, f"127.0.0.1:{free_port()}"]
    running = [subprocess.Popen([*command, str(rank), str(root), store], env=environment) for rank in range(2)]
    try:
        for process in running:
            process.wait(timeout=180)
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    expected = {
        "params.split": np.arange(2048, dtype=np.float32), "params.rows": np.arange(64, dtype=np.int32),
        "params.whole": np.arange(33, dtype=np.float32),
    }  # fmt: skip
    same(own(root, "--mesh", "fsdp=8") / "full", expected)


def test_keys_with_dots_and_places_in_lists_are_restored_into_the_same_tree(own, base):
    """Orbax stores such trees under joined keys; only `_METADATA` tells them apart."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.random(shape, np.float32)  # noqa: E731
    params = {
        "a.b": draw(2, 4), "a": {"c": draw(3)}, "0": draw(1), "plain": {"w": draw(2, 2)},
        "list": [draw(4), {"x.y": draw(2)}], "pair": (draw(2), draw(6)), "count": {"0": draw(4), "1": draw(2)},
    }  # fmt: skip
    tree = {"params": params}
    path = base / "orbax/keys"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    mounted = own(path)
    items = mounted / "orbax/0/items"
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    found = {
        "pytree": ocp.PyTreeCheckpointer().restore(items, item=target),
        "standard": ocp.StandardCheckpointer().restore(items, target),
    }
    for name, restored in found.items():
        assert jax.tree.structure(restored) == jax.tree.structure(tree), name
        for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
            mounting.same_bytes(np.ascontiguousarray(leaf).tobytes(), expected, name)
    # Without a target the tree is as Orbax gives it of its own checkpoint.
    without = [ocp.PyTreeCheckpointer().restore(directory) for directory in (path, items)]
    assert jax.tree.structure(without[0]) == jax.tree.structure(without[1])
    # The mount is a source with the same keys.
    again = own(mounted / "orbax") / "orbax/0/items"
    restored = ocp.StandardCheckpointer().restore(again, target)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)


def test_keys_with_slashes_are_restored_into_the_same_tree(own, base):
    """Haiku's modules are called so. Orbax stores such an array in a directory of a directory."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.random(shape, np.float32)  # noqa: E731
    params = {"mlp/linear": {"w": draw(2, 4), "b/c": draw(3)}, "mlp": {"linear": draw(5)}, "per%cent": draw(2), "plain": {"w": draw(2)}}
    tree = {"params": params}
    path = base / "orbax/slashes"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    mounted = own(path, "--mesh", "fsdp=2")
    items = mounted / "orbax/0/items"
    directories = lambda below: {str(found.relative_to(below)) for found in below.rglob("*") if found.is_dir()}  # noqa: E731
    assert directories(items) == directories(path)
    for found in (ocp.PyTreeCheckpointer().restore(items), ocp.PyTreeCheckpointer().restore(own(mounted / "orbax") / "orbax/0/items")):
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
            mounting.same_bytes(np.ascontiguousarray(leaf).tobytes(), expected, "slashes")


def test_what_is_empty_and_single_numbers_are_restored_as_from_the_source(own, base):
    """An optimizer's state has places with nothing; without them its tree does not fit."""
    tree = {
        "params": {"w": np.ones((2, 4), np.float32), "nothing": None, "dict": {}, "list": [], "lr": 0.5, "flag": True},
        "opt_state": [{"count": 3, "mu": {"w": np.zeros((2, 4), np.float32)}}, None, {"x": {}}],
        "step": 7,
    }
    path = base / "orbax/empty"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    for more, expected in (["--training-state"], tree), ([], {"params": tree["params"]}):
        items = own(path, "--mesh", "fsdp=2", *more) / "orbax/0/items"
        without = ocp.PyTreeCheckpointer().restore(items)
        for restored in (without, ocp.PyTreeCheckpointer().restore(items, item=expected), ocp.StandardCheckpointer().restore(items, expected)):
            assert jax.tree.structure(restored) == jax.tree.structure(expected)
            jax.tree.map(lambda found, saved: mounting.same_bytes(np.asarray(found).tobytes(), np.asarray(saved), "leaf"), restored, expected)
        assert [type(without["params"][name]) for name in ("lr", "flag")] == [float, bool]


def in_order(file: Path, step: int = 1 << 16) -> bytes:
    """A whole file, by a sequential reader."""
    with file.open("rb", buffering=0) as opened:
        return b"".join(iter(lambda: opened.read(step), b""))


@pytest.fixture(scope="module")
def counted(base) -> tuple[Path, dict]:
    """Arrays of eight chunks, one for each device, and one of a single chunk, all zstd; the optimizer has twice as much."""
    rng = np.random.default_rng(2)
    mesh = grid(fsdp=8)

    def put(*shape: int, spec: PartitionSpec) -> jax.Array:
        # Few values, so that chunks do become smaller.
        return jax.device_put(rng.integers(0, 9, shape).astype(np.float32), NamedSharding(mesh, spec))

    split, whole = PartitionSpec("fsdp"), PartitionSpec()
    tensors = lambda: {  # noqa: E731
        "a": put(64, 8192, spec=split), "b": put(512, 700, spec=split), "c": put(300, 500, spec=whole)
    }  # fmt: skip
    tree = {"params": {"params": tensors()}, "opt_state": {"mu": tensors(), "nu": tensors()}}
    path = base / "orbax/counted"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path, tree


def decoded(mounted: mounting.Mount) -> int:
    return mounted.stats()["decoded_chunks"]


def test_a_device_decodes_its_own_chunks_and_each_once(own, counted):
    """By the count of decoded chunks: none of other devices, none of the optimizer's, none before a reader comes."""
    path, tree = counted
    mounted = own(path, "--mesh", "fsdp=8", "--materialize", "none")
    assert decoded(mounted) == 0
    files = sorted(mounted.point.glob("safetensors/dev*"))
    assert len(files) == 8
    in_order(files[3])
    # Its parts of a and b, and c.
    assert decoded(mounted) == 3
    for file in files:
        in_order(file)
    # All devices have parts of the one chunk of c.
    assert decoded(mounted) == 17
    # A chunk that was read to its end may give its buffer to the next one: another reader of it may decode it again. How often
    # depends on the order in which the kernel's parallel requests arrive.
    for name, array in tree["params"]["params"].items():
        mounting.same_bytes(in_order(mounted / f"full/params/params/{name}"), np.asarray(array), name)
    assert decoded(mounted) >= 17
