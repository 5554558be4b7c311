#!/usr/bin/env python3
"""Follows a run of MaxText's own trainer, and compares each step with MaxText's own export of it. Run by hand:

    $(tests/python/setup.sh)/bin/python tests/maxtext/follow.py --maxtext $(tests/maxtext/setup.sh)/bin/python
    $(tests/python/setup.sh)/bin/python tests/maxtext/follow.py --root ROOT   # ROOT made by tests/maxtext/root.sh

Tiny models train on CPU devices, with the settings of `RUNS`: parameters split over devices, saved at every second step, three
steps kept. `ckfs mount --steps all --layout hf` follows. Each step that appears is loaded by transformers while the training goes
on, and its logits are computed. At the end MaxText's `to_huggingface` exports a copy of each step, made when it appeared. Names,
all bits of all tensors, and all bits of the logits must be equal; steps differ from one another; and the mount must show what the
trainer kept, count what it deleted, and be healthy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CKFS = os.environ.get("CKFS_BIN", str(HERE.parents[1] / "target/release/ckfs"))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
FLAGS = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
KEPT, PERIOD, LIMIT_SECONDS = 3, 2, 600

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
MODEL = [
    "override_model_config=true", "base_emb_dim=32", "base_mlp_dim=48", "base_num_query_heads=4", "base_num_kv_heads=2",
    "head_dim=8", "vocab_size=64", "use_multimodal=false", "hardware=cpu", "skip_jax_distributed_system=true", "log_config=false",
]  # fmt: skip
TRAINING = [
    "dataset_type=synthetic", "attention=dot_product", "dtype=float32", "matmul_precision=highest", "learning_rate=0.01",
    "warmup_steps_fraction=0.0", "per_device_batch_size=1", "max_target_length=1024", "enable_checkpointing=true",
    f"checkpoint_period={PERIOD}", f"max_num_checkpoints_to_keep={KEPT}", "enable_goodput_recording=false",
]  # fmt: skip
LLAMA = SIZES | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
}  # fmt: skip
QWEN3 = SIZES | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "max_position_embeddings": 40960,
}  # fmt: skip
# By name: MaxText's name of the model, config.json, layers, type of the weights, MaxText's settings.
RUNS = {
    "llama-scanned-async": (
        "llama3.1-8b", LLAMA, 3, "float32", ["scan_layers=true", "async_checkpointing=true", "ici_fsdp_parallelism=4"],
    ),
    "llama-unscanned-sync": (
        "llama3.1-8b", LLAMA, 2, "float32", ["scan_layers=false", "async_checkpointing=false", "ici_fsdp_parallelism=4"],
    ),
    "qwen3-bf16-fsdp-tensor": (
        "qwen3-0.6b", QWEN3, 3, "bfloat16",
        ["scan_layers=true", "async_checkpointing=true", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"],
    ),
    "llama-zarr2-arrays": (
        "llama3.1-8b", LLAMA, 2, "float32",
        [
            "scan_layers=true", "async_checkpointing=true", "ici_fsdp_parallelism=4", "checkpoint_storage_use_ocdbt=false",
            "checkpoint_storage_use_zarr3=false",
        ],
    ),
}  # fmt: skip


class MaxText:
    """Its Python, which may be in the root of another system."""

    def __init__(self, python: str | None, root: Path | None) -> None:
        self.root = root
        self.command = ["chroot", str(root), "/opt/venv-maxtext/bin/python"] if root else [str(python)]

    def inside(self, path: Path) -> str:
        return f"/{path.relative_to(self.root)}" if self.root else str(path)

    def start(self, log: Path, *args: str, **more: str) -> subprocess.Popen:
        held = open(log, "w")
        folder = None if self.root else log.parent
        return subprocess.Popen([*self.command, *args], env=os.environ | FLAGS | more, cwd=folder, stdout=held, stderr=held)


def check(true: bool, what: str) -> None:
    if not true:
        raise SystemExit(f"WRONG: {what}")


def read(folder: Path) -> tuple[dict, object]:
    """All tensors as transformers loads them, and the logits of some tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.arange(48)[None]).logits
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, logits


def files(folder: Path) -> dict:
    """All tensors as safetensors reads them."""
    from safetensors.torch import load_file

    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    return found


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def note_delays(run: Path, mnt: Path, delays: dict[int, float], ending: threading.Event) -> None:
    """The time from the moment when the trainer gave a step its name, which it does last, to its appearance."""
    while not ending.wait(0.02):
        for step in steps_in(mnt):
            if step not in delays:
                with contextlib.suppress(FileNotFoundError):
                    delays[step] = time.time() - (run / str(step)).stat().st_ctime


def same(left, right) -> bool:
    """Bit for bit."""
    import torch

    raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*raw)


def read_apart(folder: Path, result: Path) -> bool:
    """Reads a step in a process of its own: the kernel ends a program that maps a file of a step which its trainer deletes."""

    def read_and_save() -> None:
        torch.set_num_threads(1)
        torch.save((files(folder), *read(folder)), result)

    import torch

    reader = multiprocessing.get_context("fork").Process(target=read_and_save)
    reader.start()
    reader.join()
    return reader.exitcode == 0


def follow(maxtext: MaxText, work: Path, name: str, steps: int) -> None:
    import torch
    from back import write_tokenizer

    # Before the readers begin, which have it then.
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401

    called, config, layers, dtype, settings = RUNS[name]
    model, kept, mnt, run = work / "model", work / "kept", work / "mnt", work / "out/run/checkpoints"
    for folder in (model, kept, mnt, run):
        folder.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "dtype": dtype}))
    write_tokenizer(model, config["vocab_size"])
    common = [*MODEL, f"model_name={called}", f"base_num_decoder_layers={layers}", f"weight_dtype={dtype}", *settings]

    command = [CKFS, "mount", run, mnt, "--steps", "all", "--layout", "hf", "--config-from", model, "-q"]
    subprocess.run(list(map(str, command)), check=True)
    log = work / "train.log"
    trainer = maxtext.start(
        log, "-m", "maxtext.trainers.pre_train.train", *common, *TRAINING, f"steps={steps}", "run_name=run",
        f"base_output_directory={maxtext.inside(work / 'out')}", **DEVICES,
    )  # fmt: skip
    seen, delays, live = {}, {}, 0
    ending = threading.Event()
    watching = threading.Thread(target=note_delays, args=(run, mnt, delays, ending))
    watching.start()
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            ended = trainer.poll() is not None
            shown = steps_in(mnt)
            for step in shown:
                if step in seen:
                    continue
                is_read = read_apart(mnt / f"{step}/hf", work / f"{step}.pt")
                try:
                    shutil.copytree(run / str(step), kept / str(step))
                except (OSError, shutil.Error):
                    is_read = False
                if not is_read:
                    shutil.rmtree(kept / str(step), ignore_errors=True)
                    check(step not in steps_in(run), f"step {step} cannot be read")
                    print(f"step {step}: its trainer deleted it meanwhile")
                    continue
                seen[step] = torch.load(work / f"{step}.pt")
                live += not ended and trainer.poll() is None
            on_disk = steps_in(run)
            if ended and shown == on_disk and set(shown) <= seen.keys():
                break
            check(time.monotonic() < deadline, f"shown {shown}, on disk {on_disk}\n{log.read_text()[-3000:]}")
            time.sleep(0.02)
        check(trainer.returncode == 0, log.read_text()[-6000:])
        check(len(shown) == KEPT and (mnt / "latest").readlink() == Path(str(shown[-1])), f"shown {shown}")
        stats = json.loads((mnt / ".ckfs/stats.json").read_text())
        check(stats["health"] == "healthy" and stats["steps"]["failed_plans"] == 0, str(stats["problems"]))
    finally:
        trainer.kill()
        trainer.wait()
        ending.set()
        watching.join()
        subprocess.run([CKFS, "umount", "--wait", "20s", str(mnt)], check=False)

    exporter = maxtext.start(
        work / "export.log", maxtext.inside(work / "follow.py"), "--export", *(str(step) for step in sorted(seen)), "--",
        maxtext.inside(work), *common,
    )  # fmt: skip
    check(exporter.wait(LIMIT_SECONDS) == 0, (work / "export.log").read_text()[-6000:])
    before = None
    for step, (stored, tensors, logits) in sorted(seen.items()):
        at = work / f"exported/{step}"
        # Its own names 28 layers of Qwen 3, whatever the settings, and transformers refuses it.
        shutil.copy(model / "config.json", at / "config.json")
        expected, (own, own_logits) = files(at), read(at)
        for left, right in ((stored, expected), (tensors, own)):
            check(left.keys() == right.keys(), f"step {step}: {left.keys() ^ right.keys()}")
            for key, tensor in left.items():
                check(same(tensor, right[key]), f"step {step}: {key}: {tensor.dtype}, {right[key].dtype}")
        check(same(logits, own_logits), f"step {step}: the logits")
        check(before is None or not same(logits, before), f"step {step} has the logits of the step before it")
        before = logits
    # Of those that were shown, the trainer deleted all but the kept ones.
    gone = stats["steps"]["appeared"] - KEPT
    check(gone > 0 and stats["steps"]["deleted"] == gone and stats["steps"]["rewritten"] == 0, str(stats["steps"]))
    check(live >= 3, f"only {live} steps were read while the training went on")
    print(
        f"{name}: {len(seen)} of {len(delays)} steps that appeared were read, {live} of them during the training; "
        f"{len(expected)} tensors and the logits of each are equal to MaxText's export; a step appeared "
        f"{min(delays.values()):.2f}-{max(delays.values()):.2f} s (median {statistics.median(delays.values()):.2f}) after its "
        "last file",
        flush=True,
    )


def export(steps: list[str], work: str, settings: list[str]) -> None:
    """In MaxText's Python: its converter, for each step."""
    import jax
    from absl import flags

    jax.config.update("jax_platforms", "cpu")
    from maxtext.checkpoint_conversion import to_huggingface

    for step in steps:
        words = [
            "to_huggingface", *settings, f"load_parameters_path={work}/kept/{step}/items",
            f"base_output_directory={work}/exported/{step}", f"--hf_model_path={work}/model", "--override_model_architecture",
        ]  # fmt: skip
        to_huggingface.main(flags.FLAGS(words))


def main() -> None:
    if sys.argv[1:2] == ["--export"]:
        split = sys.argv.index("--")
        export(sys.argv[2:split], sys.argv[split + 1], sys.argv[split + 2 :])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--maxtext", help="the Python of MaxText's environment")
    parser.add_argument("--root", type=Path, help="the root of another system with that environment, instead")
    parser.add_argument("--dir", type=Path, help="below the root, if there is one")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--keep", action="store_true", help="keeps everything that was written")
    args = parser.parse_args()
    check(bool(args.maxtext) != bool(args.root), "give one of --maxtext and --root")
    base = args.dir or (args.root or Path("/")) / "var/tmp/ckfs-follow"
    for name in args.runs:
        work = base / name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        shutil.copy(__file__, work / "follow.py")
        follow(MaxText(args.maxtext, args.root), work, name, args.steps)
        if not args.keep:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
