#!/usr/bin/env python3
"""Trains a tiny gpt-oss from a mount of its quantized repository. Run by hand, with MaxText 0.2.5 from PyPI:

    $(tests/maxtext/setup.sh)/bin/python tests/maxtext/train.py [--dir /var/tmp/ckfs-maxtext] [--steps 5]

A repository in MXFP4, as gpt-oss is published, and one of the same tensors decoded to bf16 by this script are mounted with the
layout of MaxText. MaxText's unmodified trainer starts from each (`load_parameters_path`), and from nothing, on four CPU devices. The losses of the two
mounts must be equal in all printed digits, fall, and differ from those of the start from nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "python")]
CKFS = os.environ.get("CKFS_BIN", str(HERE.parents[1] / "target/release/ckfs"))
FLAGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
SETTINGS = [
    "model_name=gpt-oss-20b", "override_model_config=true", "base_emb_dim=64", "base_num_query_heads=4", "base_num_kv_heads=2",
    "head_dim=16", "base_mlp_dim=96", "base_moe_mlp_dim=96", "num_experts=3", "num_experts_per_tok=2", "sliding_window_size=8",
    "base_num_decoder_layers=2", "vocab_size=64", "max_position_embeddings=64", "original_max_position_embeddings=64",
    "scan_layers=true", "ici_fsdp_parallelism=4", "per_device_batch_size=1", "max_target_length=16", "dataset_type=synthetic",
    "attention=dot_product", "sparse_matmul=false", "megablox=false", "dtype=float32", "weight_dtype=bfloat16",
    "matmul_precision=highest", "learning_rate=0.01", "warmup_steps_fraction=0.0", "hardware=cpu",
    "skip_jax_distributed_system=true", "enable_checkpointing=true", "async_checkpointing=false", "enable_goodput_recording=false", "log_config=false",
    "reuse_example_batch=1", "use_multimodal=false",
]  # fmt: skip


def write(quantized: Path, decoded: Path) -> None:
    import numpy as np
    import quantized_repos
    from safetensors.numpy import load_file, save_file

    import ml_dtypes

    repo = quantized_repos.gpt_oss(quantized, "calm")
    tensors = {}
    for file in sorted(quantized.glob("*.safetensors")):
        tensors |= load_file(file)
    for name, values in repo.values.items():
        tensors[name] = np.asarray(values).astype(ml_dtypes.bfloat16)
    for name in [name for name in tensors if name.endswith(("_blocks", "_scales"))]:
        del tensors[name]
    decoded.mkdir()
    save_file(tensors, decoded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (decoded / "config.json").write_text(json.dumps(config))


def losses(work: Path, name: str, steps: int, parameters: Path | None) -> list[str]:
    """The losses that MaxText's trainer prints."""
    source = [f"load_parameters_path={parameters}"] if parameters else []
    command = [
        sys.executable, "-m", "maxtext.trainers.pre_train.train", *SETTINGS, *source, f"steps={steps}",
        f"base_output_directory={work / 'out'}", f"run_name={name}",
    ]  # fmt: skip
    log = work / f"{name}.log"
    with open(log, "w") as held:
        done = subprocess.run(command, env=os.environ | FLAGS, stdout=held, stderr=held, cwd=work, check=False)
    text = log.read_text()
    found = re.findall(r"completed step: \d+.*?loss: ([0-9.]+)", text)
    if done.returncode or len(found) != steps:
        raise SystemExit(f"{' '.join(command)}\n{text[-6000:]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp/ckfs-maxtext"))
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    work = args.dir / "train"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write(work / "quantized", work / "decoded")
    found = {"nothing": losses(work, "nothing", args.steps, None)}
    for name in ("decoded", "quantized"):
        point = work / f"{name}-mnt"
        point.mkdir()
        subprocess.run([CKFS, "mount", work / name, point, "--layout", "maxtext", "--mesh", "fsdp=4", "-q"], check=True)
        try:
            found[name] = losses(work, name, args.steps, point / "orbax/0/items")
        finally:
            subprocess.run([CKFS, "umount", point], check=True)
    for name, numbers in found.items():
        print(f"{name}: losses {' '.join(numbers)}")
    assert found["quantized"] == found["decoded"], "the losses differ"
    assert found["quantized"] != found["nothing"], "nothing was loaded"
    numbers = [float(number) for number in found["quantized"]]
    assert numbers[-1] < numbers[0], "the loss does not fall"
    shutil.rmtree(work)
    print("equal in all digits, and falling")


if __name__ == "__main__":
    main()
