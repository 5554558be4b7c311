"""Steps of real trainers, read through a mount while the training goes on: each is what its trainer had at that step."""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import forked
import mounting
import run_process
import servers
import torchtitan_trainer
from repos import NUMPY
from serving import Server

HERE = Path(__file__).parent
STEPS = 5


def compare(mount: mounting.Mount, step: int, truth: Path) -> None:
    """All tensors of a step, by the names of its trainer."""
    expected = load_file(truth / f"{step}.safetensors")
    rows = json.loads((mount / f"{step}/.ckfs/manifest.json").read_text())["tensors"]
    found = {}
    for row in rows:
        array = np.fromfile(mount / f"{step}/full/{row['path']}", dtype=np.float32).reshape(row["shape"])
        found[row["name"]] = array
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=f"step {step}, {name}")


def compare_models(mount: mounting.Mount, step: int, truth: Path) -> None:
    """A model of transformers: its tensors, and what it says."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(mount / f"{step}/hf")
    expected = load_file(truth / f"{step}.safetensors")
    if model.config.tie_word_embeddings:
        expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name], err_msg=f"step {step}, {name}")
    own = AutoModelForCausalLM.from_config(model.config)
    own.load_state_dict({name: torch.from_numpy(array) for name, array in expected.items()})
    tokens = torch.arange(8)[None]
    assert torch.equal(model.eval()(tokens).logits, own.eval()(tokens).logits)


def is_shown(mount: mounting.Mount, step: int) -> bool:
    return str(step) in {path.name for path in mount.point.iterdir()}


def model_without_weights(path: Path, kind: str) -> None:
    """The configuration of the model that a trainer has, whose steps have none, and a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

    torchtitan = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": torchtitan_trainer.LAYERS, "num_attention_heads": 16}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    made = {
        "transformers_fsdp": lambda: LlamaConfig(**run_process.CONFIG, architectures=["LlamaForCausalLM"]),
        "torchtitan_fsdp": lambda: LlamaConfig(
            **torchtitan, intermediate_size=768, num_key_value_heads=16, rms_norm_eps=1e-5, max_position_embeddings=131072,
            rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling}, architectures=["LlamaForCausalLM"],
        ),
        "torchtitan_tensor": lambda: Qwen3Config(
            **torchtitan, intermediate_size=3072, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, architectures=["Qwen3ForCausalLM"],
        ),
    }[kind]()  # fmt: skip
    made.save_pretrained(path)
    words = models.WordLevel({f"w{number}": number for number in range(32)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0").save_pretrained(path)


KINDS = ["orbax", "torch_dcp", "megatron", "transformers", "transformers_fsdp", "torchtitan_fsdp", "torchtitan_tensor"]
# Of models that transformers has.
MODELS = ("transformers", "torchtitan")
IN_TWO_PROCESSES = ("transformers_fsdp", "torchtitan_fsdp", "torchtitan_tensor")


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_what_its_trainer_had(kind, own, tmp_path):
    if kind == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core has no package for this Python")
    run, truth = tmp_path / "run", tmp_path / "truth"
    run.mkdir()
    truth.mkdir()
    flags = []
    if kind.startswith(MODELS) and kind != "transformers":
        model_without_weights(tmp_path / "model", kind)
        flags = ["--config-from", tmp_path / "model", "--layout", "hf"]
    mount = own(run, "--steps", "all", *flags)
    imports = {"orbax": (), "megatron": forked.MEGATRON}.get(kind, forked.TORCH)
    ranks = forked.ranks_of(2, ACCELERATE_USE_FSDP="true") if kind in IN_TWO_PROCESSES else None
    trainer = forked.start(imports, HERE / "run_process.py", kind, run, truth, STEPS, ranks=ranks)
    check = compare_models if kind.startswith(MODELS) else compare
    seen, compared = set(), set()
    try:
        deadline = time.monotonic() + forked.HANG_SECONDS
        while STEPS not in compared:
            assert time.monotonic() < deadline, f"{kind}: seen {seen}, compared {compared}\n{trainer.said()}"
            for path in sorted(mount.point.iterdir(), key=lambda path: path.name):
                if not path.name.isdigit() or int(path.name) in compared:
                    continue
                step = int(path.name)
                seen.add(step)
                try:
                    check(mount, step, truth)
                    compared.add(step)
                    (truth / f"{step}.read").touch()
                except OSError:
                    # Its trainer has deleted it meanwhile.
                    mounting.wait_until(lambda: not is_shown(mount, step), what=f"step {step} is gone")
            time.sleep(0.05)
        trainer.wait()
    except BaseException:
        trainer.kill()
        raise
    # Old ones may be deleted before they were read.
    assert len(compared) >= 3, compared
    assert (mount / "latest").readlink() == Path(str(STEPS))
    left = lambda: {int(path.name) for path in mount.point.iterdir() if path.name.isdigit()}  # noqa: E731
    # The mount learns a moment later of what the trainer deleted last.
    listed = mounting.run("plan", run, "--json").json()["steps"]
    complete = {row["step"] for row in listed if row["complete"]}
    mounting.wait_until(lambda: left() == complete, what="the steps of the run")
    if kind == "orbax" or kind.startswith(MODELS):
        kept = set(range(STEPS - run_process.KEPT + 1, STEPS + 1))
        # torchtitan deletes none after its last step.
        assert complete >= kept if kind.startswith("torchtitan") else complete == kept
        mounting.wait_until(lambda: mount.stats()["steps"]["deleted"] > 0, what="a deleted step is counted")
    stats = mount.stats()
    assert stats["health"] == "healthy", stats["problems"]
    assert stats["steps"]["failed_plans"] == 0
    # Each step alone gives the same files.
    row = listed[-1]
    mounting.run("export", row["source"], tmp_path / "alone", "--only", "full", *flags)
    for path in (tmp_path / "alone/full").rglob("*"):
        if path.is_file():
            below = path.relative_to(tmp_path / "alone")
            assert path.read_bytes() == (mount / f"{STEPS}/{below}").read_bytes(), below


def test_a_step_that_loses_its_files_one_by_one_was_deleted(own, repo, tmp_path):
    run, made = tmp_path / "run", repo("llama_f32").path
    for step in (1, 2, 3):
        shutil.copytree(made, run / f"checkpoint-{step}")
        (run / f"checkpoint-{step}/trainer_state.json").write_text("{}")
    mount = own(run, "--steps", "all")
    shown = lambda: {path.name for path in mount.point.iterdir()} - {"latest", ".ckfs"}  # noqa: E731
    counts = lambda: json.loads((mount / ".ckfs/stats.json").read_text())["steps"]  # noqa: E731
    mounting.wait_until(lambda: shown() == {"1", "2", "3"}, what="the steps")
    for step in (1, 2):
        (run / f"checkpoint-{step}/trainer_state.json").unlink()
    mounting.wait_until(lambda: shown() == {"3"}, what="the steps are gone")
    # Nobody knows yet what becomes of them.
    assert (counts()["deleted"], counts()["rewritten"]) == (0, 0)
    shutil.rmtree(run / "checkpoint-1")
    mounting.wait_until(lambda: counts()["deleted"] == 1, what="the deleted step is counted")
    (run / "checkpoint-2/trainer_state.json").write_text("{}")
    mounting.wait_until(lambda: shown() == {"2", "3"}, what="the other one is back")
    assert (counts()["deleted"], counts()["rewritten"], counts()["appeared"]) == (1, 1, 4)


def overwrite_encode(new: np.ndarray, changed_mask: np.ndarray) -> np.ndarray:
    """As slime has it."""
    pos = np.flatnonzero(changed_mask).astype("<u4")
    return np.concatenate([np.array([pos.size], "<u4").view(np.uint8), pos.view(np.uint8), new[changed_mask]])


def publish(place: Path, version: int, encoding: str, tensors: dict[str, np.ndarray], names: list[str]) -> None:
    """Changes tensors, and publishes what has changed as slime does: all files, then one rename."""
    rng, made = np.random.default_rng(version), place.with_name(f"tmp_{version}")
    made.mkdir()
    deltas, digests = {}, {}
    for name in names:
        old, new = tensors[name], tensors[name].copy()
        new[rng.choice(new.size, 1 + new.size // 30, replace=False)] ^= 0x21
        deltas[name] = new ^ old if encoding == "xor" else overwrite_encode(new, new != old)
        tensors[name], digests[name] = new, f"{zlib.adler32(new):08x}"
    save_file(deltas, made / "model-00001-of-00001.safetensors", metadata=digests)
    metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding}
    metadata |= {"compression_format": "none", "checksum_format": "adler32"}
    index = {"metadata": metadata, "weight_map": {name: "model-00001-of-00001.safetensors" for name in deltas}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    made.rename(place)


def test_published_versions_are_the_base_with_their_differences(own, repo, tmp_path):
    base, run = repo("llama"), tmp_path / "run"
    run.mkdir()
    tensors = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in base.tensors.items()}
    names = sorted(tensors)
    mount = own(run, "--base", base.path, "--steps", "all")
    expected = {}
    for version, (encoding, changed) in enumerate([("xor", names), ("overwrite", names[::2]), ("xor", names[1::3])], 1):
        publish(run / f"weight_v{version:06d}", version, encoding, tensors, changed)
        mounting.wait_until(lambda v=version: is_shown(mount, v), what=f"version {version}")
        expected[version] = dict(tensors)
    assert (mount / "latest").readlink() == Path("3")
    for version, wanted in expected.items():
        found = {}
        for path in sorted((mount / f"{version}/hf").glob("*.safetensors")):
            with safe_open(path, "np") as file:
                found |= {name: file.get_tensor(name).reshape(-1).view(np.uint8) for name in file.keys()}
        assert found.keys() == wanted.keys()
        for name in names:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=f"version {version}, {name}")
    # With an interpreter and an engine's wheel as in `test_sglang.py`: a running engine takes one version after the other.
    for name in ("sglang", "vllm"):
        if engine := os.environ.get(f"CKFS_{name.upper()}"):
            python, _, wheel = engine.partition(":")
            command = [python, Path(__file__).with_name(f"{name}_process.py"), "update", base.path]
            command += [mount / f"{version}/hf" for version in (1, 2, 3, 2)]
            subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": wheel})
    # Another encoding of the values, over the tensors that are made so.
    alone = mounting.run("export", run / "weight_v000003", tmp_path / "f32", "--base", base.path, "--dtype", "f32", "--only", "hf")
    assert alone.code == 0
    for path in sorted((tmp_path / "f32/hf").glob("*.safetensors")):
        for name, array in load_file(path).items():
            wanted = expected[3][name].view(NUMPY["BF16"]).astype(np.float32)
            np.testing.assert_array_equal(array.reshape(-1), wanted, err_msg=name)

    # A difference that was damaged after it was published is no tensor.
    place = run / "weight_v000004"
    publish(place, 4, "overwrite", tensors, names[:1])
    file = next(place.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    mounting.wait_until(lambda: is_shown(mount, 4), what="version 4")
    whole = {row["name"]: row["path"] for row in manifest_of(mount, 4)}
    errors = {mounting.error_of((mount / f"4/full/{path}").read_bytes) for path in whole.values()}
    assert errors == {None, errno.EIO}
    said = mounting.run("status", mount.point, expect=None).out
    assert f"make tensor {names[0]} of version 4" in said and "expected the digest" in said, said


def manifest_of(mount: mounting.Mount, step: int) -> list[dict]:
    return json.loads((mount / f"{step}/.ckfs/manifest.json").read_text())["tensors"]


def summed(terms: list[tuple[float, np.ndarray]]) -> np.ndarray:
    """Products and sums in float32, one after the other."""
    products = [np.float32(weight) * array.astype(np.float32) for weight, array in terms]
    return functools.reduce(np.add, products)


def test_averages_of_steps_are_sums_in_float32(own, tmp_path):
    import torch
    from torch.distributed import checkpoint

    rng, steps = np.random.default_rng(7), {}
    for step in (100, 200, 300, 400):
        steps[step] = {"w": rng.standard_normal((64, 96), np.float32), "frozen": np.linspace(0, 1, 640, dtype=np.float32)}
        tensors = {name: torch.from_numpy(array) for name, array in steps[step].items()} | {"ids": torch.arange(8)}
        checkpoint.save(tensors, checkpoint_id=tmp_path / f"run/step-{step}", no_dist=True)
    run = tmp_path / "run"
    third = np.float32(1) / np.float32(3)
    moving = own(run, "--average", "last=3", "--steps", "all", "--layout", "stored")
    numbers = sorted(steps)
    for at, step in enumerate(numbers):
        last = numbers[max(0, at - 2) : at + 1]
        weight = third if len(last) == 3 else np.float32(1) / np.float32(len(last))
        found = np.fromfile(moving / f"{step}/full/w", np.float32).reshape(64, 96)
        np.testing.assert_array_equal(found, summed([(weight, steps[one]["w"]) for one in last]), err_msg=str(step))
    mesh = own(run, "--average", "100=-0.5,400=1.5", "--layout", "stored", "--mesh", "fsdp=4", "--source-io", "pread")
    wanted = summed([(-0.5, steps[100]["w"]), (1.5, steps[400]["w"])])
    np.testing.assert_array_equal(np.fromfile(mesh / "dev1/w", np.float32).reshape(16, 96), wanted[16:32])
    # Each source gives its rows of the shard.
    assert sum(mesh.stats_of_reads()["bytes_fetched"].values()) == 2 * 16 * 96 * 4
    assert np.fromfile(mesh / "full/frozen", np.float32).tobytes() == steps[100]["frozen"].tobytes()
    text = f'[[average]]\nsource = "{run}/step-200"\nweight = 0.4\n[[average]]\nsource = "run/step-300"\nweight = 0.6\n'
    (tmp_path / "average.toml").write_text(text)
    mounting.run("export", "--config", tmp_path / "average.toml", tmp_path / "out", "--layout", "stored", "--only", "full")
    wanted = summed([(0.4, steps[200]["w"]), (0.6, steps[300]["w"])])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "out/full/w", np.float32).reshape(64, 96), wanted)
    error = mounting.run("plan", run, "--average", "100=0.5,150=0.5", expect=1).err
    assert "expected a finished step 150 in the run" in error
    error = mounting.run("plan", run, "--average", "last=5", expect=1).err
    assert "--average last=5: expected 5 finished steps, found 4" in error


def test_versions_and_averages_of_a_bucket_are_served(repo, tmp_path):
    base = repo("llama")
    tensors = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in base.tensors.items()}
    names, history = sorted(tensors), [tensors.copy()]
    with servers.bucket_of("s3", tmp_path / "objects") as bucket:
        run = next((tmp_path / "objects").rglob("model"))
        for version, encoding in ((1, "overwrite"), (2, "xor")):
            publish(run / f"weight_v{version:06d}", version, encoding, tensors, names[version::2])
            history.append(tensors.copy())
        settings = bucket.environment | {"CKFS_CACHE": str(tmp_path / "cache")}
        served = functools.partial(Server, bucket.address, "--base", base.path, "--layout", "stored", home=tmp_path, **settings)
        with served("--steps", "all") as server:
            for version in (1, 2):
                for row in server.json(f"/files/{version}/.ckfs/manifest.json")["tensors"]:
                    found = server.get(f"/files/{version}/full/{row['path']}")
                    assert found == history[version][row["name"]].tobytes(), (version, row["name"])
        with served("--average", "1=0.25,2=0.75") as server:
            for row in server.json("/files/.ckfs/manifest.json")["tensors"]:
                terms = [(weight, history[at][row["name"]].view(NUMPY["BF16"])) for at, weight in ((1, 0.25), (2, 0.75))]
                wanted = summed(terms).astype(NUMPY["BF16"])
                if np.array_equal(terms[0][1], terms[1][1]):
                    wanted = terms[0][1]
                assert server.get(f"/files/full/{row['path']}") == wanted.tobytes(), row["name"]
