"""`import ckfs`: tensors as arrays in the process, without a mount. Every byte against the mount's files and the reference."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import ml_dtypes
import numpy as np
import pytest

import mounting
import notebook
import package
import reference
import repos
from mounting import ROOT
from reference import Mesh
from repos import PACKED_BITS

package.import_ckfs()

import ckfs
from ckfs import _ckfs, _settings


def test_the_package_has_the_version_of_the_program():
    assert mounting.run("--version").out.split()[1] == ckfs.__version__


def same(found: np.ndarray, expected: np.ndarray, what: object) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, (what, found.dtype, found.shape)
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), what


def named(shown: dict[str, reference.Shown]) -> dict[str, reference.Shown]:
    return {path.replace("/", "."): one for path, one in shown.items()}


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["", "fsdp=3", "fsdp=2,tensor=2", "tensor=2,fsdp=2", "dp_replicate=2,dp_shard=2"])
@pytest.mark.parametrize("name", ["llama", "uneven", "qwen3_moe"])
def test_every_tensor_whole_and_in_shards(repo, name, mesh):
    tensors, grid = named(reference.canonical(repo(name))), Mesh.parse(mesh)
    ck = ckfs.open(repo(name).path, mesh=mesh or None)
    assert list(ck) == sorted(tensors) and len(ck) == len(tensors)
    assert list(grid.devices) == ck.devices
    for path, shown in tensors.items():
        tensor = ck[path]
        assert path in ck and tensor.shape == tuple(shown.shape) and tensor.nbytes == shown.array.nbytes
        assert [list(axis) if isinstance(axis, tuple) else axis for axis in tensor.spec] == reference.spec(shown, grid)
        same(np.asarray(tensor), shown.array, path)
        for device in grid.devices:
            same(tensor.shard(device), reference.shard(shown, grid, device), (path, device))


@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tensor=2"])
def test_load_holds_each_weight_once(repo, mesh):
    shown, grid = named(reference.canonical(repo("llama"))), Mesh.parse(mesh)
    ck = ckfs.open(repo("llama").path, mesh=mesh)
    bundle = {name for name, one in shown.items() if one.bundled and (one.scanned or not one.layers)}
    for device in grid.devices:
        seen: list[tuple[int, int]] = []
        found = ck.load(device, progress=lambda done, total: seen.append((done, total)), threads=3)
        assert set(found) == set(ck.bundle()) and set(found) <= set(shown) and "layers.0.wq" not in found
        for name, array in found.items():
            same(array, reference.shard(shown[name], grid, device), (name, device))
        assert seen[-1] == (sum(array.nbytes for array in found.values()),) * 2
    assert {"embed", "layers.scanned.wq"} <= set(ck.bundle()) and bundle
    whole = ck.load()
    assert all(np.array_equal(whole[name], shown[name].array) for name in whole)


def test_load_takes_what_only_names(repo):
    ck = ckfs.open(repo("llama").path)
    assert list(ck.load(only="layers.0.wq")) == ["layers.0.wq"]
    assert set(ck.load(only=["*.wq", "embed"])) == {"layers.scanned.wq", "embed"}
    assert "layers.1.wk" in ck.load(only="layers.1.*")
    with pytest.raises(KeyError, match="layers.scanned.wq"):
        ck.load(only="layers.scannd.wq")


def test_every_dtype(repo):
    tensors = named(reference.canonical(repo("every_dtype")))
    ck = ckfs.open(repo("every_dtype").path, mesh={"fsdp": 2})
    for name, shown in tensors.items():
        if shown.code not in PACKED_BITS:
            same(np.asarray(ck[name]), shown.array, name)
            same(ck.load(1, only=name)[name], reference.shard(shown, Mesh.parse("fsdp=2"), 1), name)
            continue
        # Packed in files; a byte for each element in arrays.
        tensor, bits = ck[name], PACKED_BITS[shown.code]
        packed = bytearray(tensor.nbytes)
        tensor.read_into(packed)
        assert bytes(packed) == shown.array.tobytes(), name
        whole = np.asarray(tensor)
        number = int.from_bytes(packed, "little")
        codes = [number >> (bits * n) & ((1 << bits) - 1) for n in range(tensor.size)]
        assert whole.dtype.name == tensor.dtype.name and whole.shape == tensor.shape
        assert whole.view(np.uint8).reshape(-1).tolist() == codes, name
        same(tensor[..., 1:4], whole[..., 1:4], name)
        same(ck.load(only=name)[name], whole, name)
    assert np.asarray(ck["scalar"]).shape == () and ck["scalar"][()] == tensors["scalar"].array
    assert np.asarray(ck["empty"]).shape == (0, 3)


CASES = [
    ("llama_f32", {"dtype": "bf16", "mesh": "fsdp=2,tensor=2"}),
    ("edge_values", {"dtype": "f16"}),
    ("llama", {"layout": "maxtext", "mesh": "fsdp=2", "even": True}),
    ("qwen3_moe", {"layout": "maxtext"}),
    ("llama", {"layout": "hf", "dtype": "f32", "mesh": "fsdp=3"}),
    ("gpt_oss", {"dequantize": "bf16"}),
    ("deepseek_v3", {"dequantize": "bf16", "mesh": "fsdp=2"}),
    ("block_fp8_bf16", {"dtype": "f32"}),
    ("mixtral", {"unscanned": True, "mesh": "expert=2"}),
    ("mixtral", {"layout": "transformers", "mesh": "fsdp=2"}),
    ("gemma3", {"exclude": ["*norm*"], "layers": "1.."}),
    ("llama", {"layout": "hf", "quantize": "fp8-channel", "quantize_ignore": "*lm_head*"}),
    ("llama", {"layout": "hf", "quantize": "int8-channel", "mesh": "fsdp=2"}),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[f"{name}-{'-'.join(map(str, s.values()))}" for name, s in CASES])
@pytest.mark.parametrize("source_io", ["mmap", "pread"])
def test_arrays_have_the_bytes_of_the_mounts_files(own, repo, name, settings, source_io):
    flags = ckfs._settings.flags(settings)
    mounted = own(repo(name).path, *flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckfs.PlanWarning)
        ck = ckfs.open(repo(name).path, source_io=source_io, **settings)
    rows = ck.plan()["views"][0]["tensors"]
    assert [row["name"] for row in rows] == list(ck)
    for row in rows:
        tensor = ck[row["name"]]
        assert np.asarray(tensor).tobytes() == (mounted / f"full/{row['path']}").read_bytes(), row
    for device in ck.devices:
        loaded = ck.load(device)
        for row in rows:
            expected = (mounted / f"dev{device}/{row['path']}").read_bytes()
            if row["name"] in loaded:
                assert loaded[row["name"]].tobytes() == expected, (row, device)
            assert ck[row["name"]].shard(device).tobytes() == expected, (row, device)


def _random_index(draw: random.Random, shape: tuple[int, ...]) -> tuple:
    words: list[object] = []
    for extent in shape:
        if draw.random() < 0.2 and extent:
            words.append(draw.randrange(-extent, extent))
        else:
            ends = [draw.choice([None, draw.randint(-extent - 2, extent + 2)]) for _ in range(2)]
            words.append(slice(*ends, draw.choice([None, 1, 1, 2, 3, 7, -1, -2, -5])))
    if draw.random() < 0.4:
        low = draw.randint(0, len(words))
        words[low : draw.randint(low, len(words))] = [Ellipsis]
    for _ in range(draw.choice([0, 0, 1, 2])):
        words.insert(draw.randint(0, len(words)), None)
    return tuple(words)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama_f32", {"dtype": "bf16"}),
        ("llama", {"layout": "maxtext"}),
        ("qwen3_moe", {"layout": "maxtext"}),
        ("gpt_oss", {"dequantize": "bf16"}),
        ("deepseek_v3", {"dequantize": "bf16"}),
    ],
)
def test_regions_are_numpys(repo, name, settings):
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckfs.PlanWarning)
        ck = ckfs.open(repo(name).path, **settings)
    wholes = {name: np.asarray(ck[name]) for name in ck}
    names = list(ck)
    for _ in range(400):
        name = draw.choice(names)
        index, whole = _random_index(draw, wholes[name].shape), wholes[name]
        what = f"seed {seed}: {name}{whole.shape}[{index}]"
        found, expected = ck[name][index], whole[index]
        assert type(found) is type(expected), what
        same(np.asarray(found), np.asarray(expected), what)
        if isinstance(expected, np.ndarray):
            target = np.empty(expected.shape, expected.dtype)
            ck[name].read_into(target, index)
            same(target, expected, what)


def test_a_region_reads_its_own_bytes_only(wide):
    ck = ckfs.open(wide.path, source_io="pread", layout="hf")
    name = "model.embed_tokens.weight"
    before = read_bytes()
    ck[name][:1]
    row = read_bytes() - before
    before = read_bytes()
    np.asarray(ck[name])
    whole = read_bytes() - before
    assert 0 < row < 200_000 < ck[name].nbytes <= whole


def read_bytes() -> int:
    """Bytes that this process has read by system calls."""
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["rchar"])


def test_indexes_that_are_not_basic_are_refused(repo):
    tensor = ckfs.open(repo("llama").path)["embed"]
    for index in ([0, 1], np.array([0]), True, 1.5, "a", np.array(True), (0, 0, 0), (..., 0, ...), 10**6, -(10**6)):
        with pytest.raises(IndexError):
            tensor[index]
    with pytest.raises(IndexError, match="read a region"):
        tensor[[0, 1]]


def test_memory_of_the_caller(repo):
    tensor = ckfs.open(repo("llama").path, dtype="f32")["embed"]
    whole = np.asarray(tensor)
    plain = bytearray(whole[3:5].nbytes)
    tensor.read_into(plain, np.s_[3:5])
    assert bytes(plain) == whole[3:5].tobytes()
    part = np.zeros((4, *whole.shape), np.float32)
    tensor.read_into(part[2])
    assert np.array_equal(part[2], whole) and not part[[0, 1, 3]].any()
    frozen = np.zeros_like(whole)
    frozen.flags.writeable = False
    for target, text in (
        (np.zeros(3, np.float32), "expected an array float32"),
        (whole.astype(np.float64), "found float64"),
        (np.zeros(whole.shape[::-1], np.float32).T, "rows follow each other"),
        (frozen, "writable"),
        (bytearray(3), f"expected a buffer of {whole.nbytes} bytes, found 3"),
    ):
        with pytest.raises(ValueError, match=text):
            tensor.read_into(target)
    with pytest.raises((ValueError, BufferError), match="writable"):
        tensor.read_into(bytes(whole.nbytes))
    assert np.asarray(tensor, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.asarray(tensor, copy=False)


# --- settings, errors, warnings --------------------------------------------------------------------------------------


def test_keywords_are_those_of_the_table():
    assert set(_settings.OpenSettings.__annotations__) == set(_ckfs.settings())
    for command, known in (("mount", _settings.MountSettings), ("serve", _settings.ServeSettings)):
        flags = mounting.run(command, "--help").out + mounting.run("help", "options").out
        for name in set(known.__annotations__) - set(_settings.WITHOUT_FLAG):
            assert f"--{name.replace('_', '-')}" in flags, name


def test_settings_have_types_of_their_own(repo):
    path = repo("llama").path
    ck = ckfs.open(path, mesh={"fsdp": 4, "tensor": 2}, devices=[1, 3], dtype=np.float32, include=["*wq*"], cache_bytes=1 << 26)
    assert ck.mesh == {"fsdp": 4, "tensor": 2} and ck.devices == [1, 3]
    assert all(tensor.dtype == np.float32 for tensor in ck.values()) and all("wq" in name for name in ck)
    for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), pytest.importorskip("torch").bfloat16):
        assert ckfs.open(path, dtype=dtype)["embed"].dtype == ml_dtypes.bfloat16
    rules = [{"match": "*wq", "dtype": "f32"}]
    casts = ckfs.open(path, cast=rules, shard_rules=[{"match": "*", "spec": ["-"]}], mesh="fsdp=2", shard="none", replicate="fsdp")
    assert casts["layers.scanned.wq"].dtype == np.float32 and casts["layers.scanned.wk"].dtype != np.float32


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"mehs": "fsdp=2"}, TypeError, "did you mean `mesh`"),
        ({"mkdir": True}, TypeError, "of mounts only"),
        ({"mesh": {"fsdp": 0}}, ckfs.UsageError, 'mesh axis "fsdp"'),
        ({"dtype": "b16", "layout": "maxtxt"}, ckfs.UsageError, "maxtext"),
        ({"unscanned": 3}, ckfs.UsageError, "unscanned"),
        ({"include": {"a", "b"}}, TypeError, "include"),
        ({"mesh": "fsdp=2,wheel=2"}, ckfs.PlanError, "wheel"),
        ({"layout": "/nothing.toml"}, ckfs.UsageError, "/nothing.toml"),
    ],
)
def test_refused_settings(repo, settings, error, text):
    with pytest.raises(error, match=text):
        ckfs.open(repo("llama").path, **settings)


def test_all_problems_are_in_one_error(repo, fresh, tmp_path):
    with pytest.raises(ckfs.PlanError) as failed:
        ckfs.open(tmp_path / "missing")
    assert len(failed.value.problems) == 1 and "missing" in str(failed.value)
    with pytest.raises(ckfs.PlanError) as failed:
        ckfs.open(repo("uneven").path, mesh={"fsdp": 4}, even=True)
    assert len(failed.value.problems) > 3 and all("evenly" in problem for problem in failed.value.problems)
    with pytest.raises(ckfs.UsageError) as refused:
        ckfs.open(repo("llama").path, dtype="b16", mesh="fsdp=0")
    assert len(refused.value.problems) == 2
    damaged = fresh("two_files_without_index")
    for file in damaged.path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ckfs.PlanError) as failed:
        ckfs.open(damaged.path)
    assert len(failed.value.problems) == 2, failed.value.problems


def test_warnings_of_a_plan_are_warnings(fresh):
    repo = fresh("llama")
    shutil.copy(next(iter(repo.path.glob("*.safetensors"))), repo.path / "left.safetensors")
    with pytest.warns(ckfs.PlanWarning, match="left.safetensors") as found:
        ckfs.open(repo.path)
    assert found[0].filename == __file__, "the warning names the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error", ckfs.PlanWarning)
        with pytest.raises(ckfs.PlanWarning):
            ckfs.open(repo.path)


def test_names_that_do_not_exist(repo):
    ck = ckfs.open(repo("llama").path, mesh="fsdp=2")
    with pytest.raises(KeyError, match="layers.scanned.wq"):
        ck["layers.scannd.wq"]
    assert "nothing" not in ck and ck.get("nothing") is None and 3 not in ck
    for call in (lambda: ck.load(2), lambda: ck["embed"].shard(2), lambda: ck["embed"].region(7)):
        with pytest.raises(ValueError, match="0 to 1"):
            call()


def test_views_of_a_configuration(repo, tmp_path):
    config = tmp_path / "ckfs.toml"
    config.write_text(f'source = "{repo("llama").path}"\n[view.train]\ndtype = "f32"\n[view.rollout]\nlayout = "hf"\n')
    assert "model.norm.weight" in ckfs.open(config=config, view="rollout")
    assert ckfs.open(config=config, view="train")["embed"].dtype == np.float32
    with pytest.raises(ckfs.UsageError, match="rollout"):
        ckfs.open(config=config)
    with pytest.raises(ckfs.UsageError, match="rollout"):
        ckfs.open(config=config, view="eval")


def test_plan_and_tensor_show_themselves(repo):
    ck = ckfs.open(repo("llama").path, mesh={"fsdp": 2})
    plan = ck.plan()
    assert plan["views"][0]["layout"] == "canonical" and "fsdp=2" in plan._repr_html_()
    page = ck["layers.scanned.wq"]._repr_html_()
    assert "<table>" in page and "bfloat16" in page and "q_proj" in page
    assert "embed" in repr(ck["embed"]) and "llama" in repr(ck)


def test_the_notebook_shows_what_its_cells_give(tmp_path, monkeypatch):
    cells = json.loads((ROOT / "examples/tensors.ipynb").read_text())["cells"]
    monkeypatch.chdir(tmp_path)
    mounting.run("demo", "--keep", "--dir", "demo")
    mounting.run("umount", "demo/mnt")
    assert notebook.run(cells) == [cell.get("outputs", []) for cell in cells]


def test_a_closed_checkpoint_says_so(repo):
    with ckfs.open(repo("llama").path) as ck:
        tensor = ck["embed"]
    with pytest.raises(ckfs.Error, match="closed"):
        tensor[:1]


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["replaced", "edited", "truncated"])
def test_a_source_that_changes_raises(tmp_path, change):
    repo = repos.wide(tmp_path / "source")
    ck = ckfs.open(repo.path)
    before = np.asarray(ck["embed"])
    assert before.any()
    for file in repo.path.glob("*.safetensors"):
        data = file.read_bytes()
        if change == "replaced":
            other = file.with_suffix(".new")
            other.write_bytes(data[::-1])
            other.rename(file)
        elif change == "edited":
            with file.open("r+b") as opened:
                opened.seek(len(data) // 2)
                opened.write(b"other")
        else:
            os.truncate(file, len(data) // 3)
    with pytest.raises(ckfs.ReadError, match="safetensors"):
        ck.load()
    with pytest.raises(ckfs.ReadError, match="safetensors"):
        np.asarray(ck["layers.scanned.w_up"])
    # As of a file that cannot be read.
    with pytest.raises(OSError, match="safetensors") as failed:
        ck["layers.scanned.w_up"].read_into(np.empty(ck["layers.scanned.w_up"].shape, before.dtype))
    assert failed.value.errno == errno.EIO and failed.value.code == 1
    again = pickle.loads(pickle.dumps(failed.value))
    assert type(again) is ckfs.ReadError and str(again) == str(failed.value)


@pytest.mark.parametrize("number", [0, -1, 513, 2**16, 2**62, 2**64, 2**200, -(2**200), 1.5, True, "many"])
def test_numbers_of_any_size_are_refused_and_nothing_panics(wide, number):
    ck = ckfs.open(wide.path, mesh="fsdp=2")
    tensor = ck["embed"]
    for call in (
        lambda: ck.load(threads=number),
        lambda: tensor.read_into(np.empty(tensor.shape, tensor.dtype), threads=number),
    ):
        with pytest.raises(ValueError, match="threads: expected 1 to 512, found "):
            call()
    if number != 0:
        for call in (ck.load, tensor.region, tensor.shard):
            with pytest.raises(ValueError, match="expected one of the mesh's 2, 0 to 1"):
                call(number)
    if isinstance(number, int) and not isinstance(number, bool) and number:
        for key in (slice(None, None, number), slice(number, None, abs(number)), slice(None, number, -abs(number))):
            assert tensor[key].tobytes() == np.asarray(tensor)[key].tobytes(), key


def test_settings_that_hold_themselves_are_refused(repo):
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        ckfs.open(repo("llama").path, include=endless)
    # The extension has no such limit of Python's own.
    with pytest.raises(TypeError, match="include: expected at most 16 lists or dicts inside each other"):
        _ckfs.open(str(repo("llama").path), {"include": endless})


def test_buffers_that_share_bytes_are_refused(wide):
    ck = ckfs.open(wide.path)
    tensor = ck["embed"]
    memory = np.zeros(tensor.nbytes + 2, np.uint8)
    rows = [(tensor._index, None, None, memory[start : start + tensor.nbytes]) for start in (2, 0)]
    with pytest.raises(ValueError, match=f"embed and embed: {tensor.nbytes - 2} bytes of memory are given for both"):
        ck._load(rows)
    assert not memory.any(), "nothing was written"
    # Side by side they share nothing.
    memory = np.zeros(2 * tensor.nbytes, np.uint8)
    ck._load([(tensor._index, None, None, part) for part in np.split(memory, 2)])
    assert memory.tobytes() == np.asarray(tensor).tobytes() * 2
    folded = np.lib.stride_tricks.as_strided(np.zeros(tensor.size, tensor.dtype), tensor.shape, [tensor.dtype.itemsize] * 2)
    with pytest.raises(ValueError, match="rows follow each other"):
        tensor.read_into(folded)


def script(text: str, *args: object, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(text), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)  # type: ignore[call-overload]


def test_a_child_of_fork_is_refused_with_words(repo):
    done = script(
        """
        import os, sys, ckfs, numpy
        ck = ckfs.open(sys.argv[1])
        array = ck["embed"][...]
        child = os.fork()
        if child == 0:
            # Arrays are plain memory; everything else is refused, and nothing hangs.
            print("sum", int(array.view("uint8").sum(dtype="int64")), flush=True)
            for call in (lambda: ck["embed"], lambda: ck.load(), lambda: ckfs.open(sys.argv[1]), ck.plan):
                try:
                    call()
                except ckfs.ForkError as error:
                    print("refused:", error, flush=True)
            del ck
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        print("child", status, "sum", int(ck["embed"][...].view("uint8").sum(dtype="int64")))
        """,
        repo("llama").path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused:") == 4 and "spawn" in done.stdout and "child 0" in done.stdout
    sums = [line.split()[-1] for line in done.stdout.splitlines() if "sum" in line]
    assert len(set(sums)) == 1 and len(sums) == 2


CHILDREN = """
    import multiprocessing, sys
    import ckfs

    def bytes_of(source):
        return ckfs.open(source)["embed"][...].tobytes()

    def main(source, method, opens_first):
        mine = bytes_of(source) if opens_first else None
        with multiprocessing.get_context(method).Pool(2) as pool:
            first, second = pool.map(bytes_of, [source, source])
        assert first == second == (mine or bytes_of(source))
        print("ok")

    if __name__ == "__main__":
        main(sys.argv[1], sys.argv[2], sys.argv[3] == "True")
"""


@pytest.mark.parametrize(("method", "opens_first"), [("fork", False), ("spawn", True), ("spawn", False), ("forkserver", True)])
def test_a_child_opens_where_it_has_threads_of_its_own(repo, tmp_path, method, opens_first):
    """By fork if the parent has opened nothing; by spawn and from a server of forks in any case."""
    program = tmp_path / "children.py"
    program.write_text(textwrap.dedent(CHILDREN))
    command = [sys.executable, program, repo("llama").path, method, str(opens_first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize("call", ["load", "read"])
def test_ctrl_c_ends_a_load(tmp_path, call):
    """A sparse checkpoint of many gigabytes, whose transposed cast takes far longer."""
    import json
    import struct

    header, at = {}, 0
    for layer in range(24):
        size = 16384 * 16384 * 4
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        header[name] = {"dtype": "F32", "shape": [16384, 16384], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path = tmp_path / "repo/model.safetensors"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    code = textwrap.dedent(
        """
        import sys, ckfs, numpy, time
        ck = ckfs.open(sys.argv[1], layout="hf", dtype="bf16")
        names = list(ck)
        try:
            print("ready", flush=True)
            if sys.argv[2] == "load":
                ck.load(only=names[:6])
            else:
                for name in names:
                    ck[name][::-1]
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            sys.exit(3)
        print("done", flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path.parent), call], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert process.wait(mounting.TIMEOUT_SECONDS) == 3


def test_an_exception_of_progress_ends_the_load(repo):
    ck = ckfs.open(repo("llama").path)

    def stop(done: int, total: int) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        ck.load(progress=stop)
    assert ck.load()


def test_other_threads_run_meanwhile(wide):
    """The interpreter's lock is free while bytes are made."""
    done = script(
        """
        import sys, threading, ckfs
        ck = ckfs.open(sys.argv[1], dtype="f32", source_io="pread")
        turns, loading = 0, True
        def load():
            global loading
            for _ in range(3):
                ck.load(threads=2)
            loading = False
        thread = threading.Thread(target=load)
        thread.start()
        while loading:
            turns += 1
        thread.join()
        print(turns)
        """,
        wide.path,
    )
    assert int(done.stdout) > 10_000, done.stderr


# --- without the extension -------------------------------------------------------------------------------------------


def test_without_the_extension_the_program_is_called(repo, tmp_path, fuse):
    directory = package.place(tmp_path / "pure", extension=False)
    done = script(
        """
        import sys, ckfs
        print(list(ckfs.plan(sys.argv[1], mesh={"fsdp": 2})["views"][0]["mesh"]["axes"])[0]["name"])
        with ckfs.mount(sys.argv[1]) as path:
            print(sorted(found.name for found in path.glob("dev*")))
        try:
            ckfs.open(sys.argv[1])
        except ckfs.Error as error:
            print(error)
        """,
        repo("llama").path,
        env={**os.environ, "PYTHONPATH": str(directory), "CKFS_BIN": str(mounting.find_ckfs())},
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["fsdp", "['dev0']"] and "lacks its extension" in lines[2], done.stderr
