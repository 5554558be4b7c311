"""`ckfs serve` with --quantize and --dequantize: what a client of the Hub downloads is what `ckfs export` writes, and transformers
loads the same model from either."""

from __future__ import annotations

from pathlib import Path

import pytest

import mounting
from serving import Server, run_client
from test_serve import files_below

# One of each form of codes and scales that transformers loads.
SCHEMES = ["fp8-block", "fp8-block:ue8m0", "fp8-tensor", "mxfp8", "mxfp4", "nvfp4", "int8-channel", "int4-g32"]

SAME = """
    import os, sys, torch, transformers
    from huggingface_hub import snapshot_download

    def files(root):
        found = {{}}
        for above, _, names in os.walk(root):
            for name in names:
                path = os.path.join(above, name)
                found[os.path.relpath(path, root)] = open(path, "rb").read()
        return found

    for repository, exported in {pairs!r}:
        downloaded, written = files(snapshot_download(repository)), files(exported)
        assert downloaded.keys() == written.keys(), repository
        for name in written:
            assert downloaded[name] == written[name], (repository, name)
        how = getattr(transformers.AutoConfig.from_pretrained(repository), "quantization_config", None)
        more = {{}}
        if how and how["quant_method"] == "compressed-tensors":
            more["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
        logits = []
        for name in (repository, exported):
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **more)
            with torch.no_grad():
                logits.append(model(torch.arange(1, 17)[None]).logits)
        assert logits[0].isfinite().all() and torch.equal(*logits), repository
        print(repository, how["quant_method"] if how else None)
"""
"""Takes names of repositories, each with the directory of the same files."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve-quantized-home")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in bf16, in several files of weights."""
    import torch
    import transformers

    path = tmp_path_factory.mktemp("serve-quantized") / "model"
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=416,
        head_dim=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path, max_shard_size="300KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def test_transformers_loads_what_is_quantized_on_read(model: Path, home: Path, tmp_path: Path) -> None:
    """Every scheme is a view of one server."""
    config, exported = tmp_path / "serve.toml", tmp_path / "exported"
    views = {scheme.replace(":", "-"): scheme for scheme in SCHEMES}
    tables = [f'[view.{name}]\nlayout = "hf"\nquantize = "{scheme}"\n' for name, scheme in views.items()]
    config.write_text(f'source = "{model}"\n' + "".join(tables))
    mounting.run("export", "--config", config, exported)
    with Server("--config", config, "--listen", "0", home=home) as server:
        for name in views:
            for path, body in files_below(exported / name / "hf").items():
                assert server.get(f"/files/{name}/hf/{path}") == body, (name, path)
        pairs = [(f"ckfs/{name}", str(exported / name / "hf")) for name in views]
        out = run_client(SAME.format(pairs=pairs), tmp_path, HF_ENDPOINT=server.url)
    told = dict(line.split() for line in out.splitlines() if line.startswith("ckfs/"))
    assert told.keys() == {f"ckfs/{name}" for name in views} and "None" not in told.values()


@pytest.mark.parametrize("scheme", ["fp8-block", "int4-g32"])
def test_transformers_loads_what_is_decoded_on_read(model: Path, home: Path, tmp_path: Path, scheme: str) -> None:
    stored, exported, flags = tmp_path / "stored", tmp_path / "exported", ("--layout", "hf", "--dequantize")
    mounting.run("export", model, stored, "--only", "hf/*", "--layout", "hf", "--quantize", scheme)
    mounting.run("export", stored / "hf", exported, "--only", "hf/*", *flags)
    with Server(stored / "hf", "--name", "my/model", *flags, home=home) as server:
        for path, body in files_below(exported / "hf").items():
            assert server.get(f"/files/hf/{path}") == body, path
        pairs = [("my/model", str(exported / "hf"))]
        out = run_client(SAME.format(pairs=pairs), tmp_path, HF_ENDPOINT=server.url)
    assert "my/model None" in out.splitlines()
