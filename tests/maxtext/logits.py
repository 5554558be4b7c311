#!/usr/bin/env python3
"""Compares the logits of MaxText's own `load_parameters_path` on a mount and on the output of `to_maxtext`. Run by hand:

    tests/maxtext/logits.py [--dir /var/tmp/ckfs-maxtext]

For a tiny Llama 3.1 and a tiny Gemma 2, both of generated weights, scanned and not: MaxText 0.2.5 from PyPI converts the repository; ckfs mounts
it; MaxText's `from_pretrained` loads each, on 8 CPU devices with the mesh fsdp=4,tensor=2, and computes logits in f32. They must be equal bit for bit, and
different from those of a model with nothing loaded. `scan_layers` is left out of the settings at loading where MaxText can find it in the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CKFS = os.environ.get("CKFS_BIN", str(HERE.parents[1] / "target/release/ckfs"))
MESH = "fsdp=4,tensor=2"
FLAGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 64, 4, 2, 32, 96, 500
COMMON = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
    "intermediate_size": MLP, "vocab_size": VOCAB, "torch_dtype": "bfloat16",
}  # fmt: skip
# By MaxText's name: config.json, norms of a layer, MaxText's number of layers and vocabulary, and flags of ckfs.
MODELS = {
    "llama3.1-8b": {
        "config": COMMON | {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": False,
        },
        "norms": ["input_layernorm", "post_attention_layernorm"],
        "layers": 3, "vocab": VOCAB, "flags": [],
    },
    "gemma2-2b": {
        "config": COMMON | {
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "query_pre_attn_scalar": HEAD,
        },
        "norms": [
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
        ],
        "layers": 2, "vocab": 512, "flags": ["--set", "vocab_size=512"],
    },
}  # fmt: skip


def write(path: Path, model: dict) -> None:
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    path.mkdir(parents=True)
    draw = np.random.default_rng(11)
    tensors = {}

    def put(name: str, *shape: int, scale: float = 1.0) -> None:
        tensors[name] = (draw.standard_normal(shape, np.float32) * scale).astype(ml_dtypes.bfloat16)

    put("model.embed_tokens.weight", VOCAB, HIDDEN)
    put("model.norm.weight", HIDDEN)
    if not model["config"]["tie_word_embeddings"]:
        put("lm_head.weight", VOCAB, HIDDEN, scale=0.125)
    for layer in range(model["config"]["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows, columns in [
            ("self_attn.q_proj", HEADS * HEAD, HIDDEN), ("self_attn.k_proj", KV_HEADS * HEAD, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD, HIDDEN), ("self_attn.o_proj", HIDDEN, HEADS * HEAD),
            ("mlp.gate_proj", MLP, HIDDEN), ("mlp.up_proj", MLP, HIDDEN), ("mlp.down_proj", HIDDEN, MLP),
        ]:  # fmt: skip
            put(f"{at}.{name}.weight", rows, columns, scale=0.125)
        for name in model["norms"]:
            put(f"{at}.{name}.weight", HIDDEN, scale=0.5)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(model["config"]))


def settings(name: str) -> list[str]:
    model = MODELS[name]
    return [
        f"model_name={name}", "override_model_config=true", f"base_emb_dim={HIDDEN}", f"base_num_query_heads={HEADS}",
        f"base_num_kv_heads={KV_HEADS}", f"head_dim={HEAD}", f"base_mlp_dim={MLP}", f"vocab_size={model['vocab']}",
        f"base_num_decoder_layers={model['layers']}", "hardware=cpu", "skip_jax_distributed_system=true",
        "use_multimodal=false", "log_config=false",
    ]  # fmt: skip


def convert(name: str) -> None:
    """`to_maxtext`, unmodified except for this model's sizes in its table of Hugging Face configurations."""
    import runpy

    from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS

    HF_MODEL_CONFIGS[name].update({key: value for key, value in MODELS[name]["config"].items() if key != "torch_dtype"})
    runpy.run_module("maxtext.checkpoint_conversion.to_maxtext", run_name="__main__", alter_sys=True)


def logits(name: str, path: str, out: str, *more: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    config = pyconfig.initialize(
        ["", *settings(name), *([f"load_parameters_path={path}"] if path else []), "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2",
         "dtype=float32", "matmul_precision=highest", "attention=dot_product", "max_target_length=16", "run_name=logits",
         "per_device_batch_size=1", "enable_checkpointing=false", *more]
    )  # fmt: skip
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (8, 16)), jnp.int32)
    inputs = [tokens, jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (8, 16)), jnp.ones((8, 16), jnp.int32)]
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    model = model_creation_utils.from_pretrained(config, mesh=mesh)
    with mesh:
        found = model(*inputs, enable_dropout=False)
    found = found[0] if isinstance(found, tuple) else found
    print("scan_layers", config.scan_layers, file=sys.stderr)
    np.save(out, np.asarray(found, np.float32))


def child(work: Path, what: str, *args: str) -> None:
    log = work / "child.log"
    with open(log, "w") as held:
        command = [sys.executable, str(HERE / "logits.py"), f"--{what}", *args]
        done = subprocess.run(command, env=os.environ | FLAGS, stdout=held, stderr=held, cwd=work, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{log.read_text()[-6000:]}")


def main() -> None:
    import numpy as np

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp/ckfs-maxtext"))
    parser.add_argument("--scans", nargs="*", default=["true", "false"])
    args = parser.parse_args()
    work = args.dir / "logits"
    shutil.rmtree(work, ignore_errors=True)
    for name, model in MODELS.items():
        repo, point = work / name, work / f"{name}-mnt"
        write(repo, model)
        point.mkdir()
        for scan in args.scans:
            out = work / f"{name}-{scan}"
            child(work, "convert", name, *settings(name), f"--hf_model_path={repo}", f"base_output_directory={out}", f"scan_layers={scan}")
            layout = "maxtext" if scan == "true" else "maxtext-unscanned"
            subprocess.run([CKFS, "mount", repo, point, "--layout", layout, "--mesh", MESH, "-q", *model["flags"]], check=True)
            try:
                arrays = {}
                for way, path in {"converted": out / "0/items", "mounted": point / "orbax/0/items", "nothing": ""}.items():
                    file = work / f"{way}.npy"
                    more = [] if path else [f"scan_layers={scan}"]
                    child(work, "logits", name, str(path), str(file), *more)
                    arrays[way] = np.load(file)
                a, b, nothing = arrays.values()
                same = a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))
                print(
                    f"{name} scan_layers={scan}: logits {a.shape}, {a.min():.3f} to {a.max():.3f}, deviation {a.std():.3f};",
                    "equal bit for bit" if same else f"DIFFERENT by up to {np.abs(a - b).max()}",
                    f"(nothing loaded: differs by up to {np.abs(a - nothing).max():.3f})",
                    flush=True,
                )
                assert same and np.isfinite(a).all() and a.std() > 0
            finally:
                subprocess.run([CKFS, "umount", point], check=True)
    shutil.rmtree(work)


if __name__ == "__main__":
    what, rest = sys.argv[1:2], sys.argv[2:]
    if what == ["--convert"]:
        sys.argv = sys.argv[:1] + rest[1:]
        convert(rest[0])
    elif what == ["--logits"]:
        logits(*rest)
    else:
        main()
