"""What `mlx_lm.convert` writes of small models, as digests: its package is in no environment of the tests.

    python mlx_oracles.py FOLDER      converts, and writes mlx_oracles.json; FOLDER is where `pip install --no-deps mlx-lm` put it
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RECORD = Path(__file__).with_name("mlx_oracles.json")

SCHEMES = {f"mlx:{bits}bit-g{group}": ("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)}
SCHEMES["mlx:mxfp4"] = ("mxfp4", 4, 32)
"""Mode, bits and group of each scheme."""

MODELS = {
    "llama": "mlx:4bit-g64",
    "mistral": "mlx:3bit-g32",
    "qwen2": "mlx:6bit-g32",
    "qwen3": "mlx:mxfp4",
    "gemma2": "mlx:8bit-g32",
    "phi3": "mlx:2bit-g128",
    "olmo2": "mlx:5bit-g64",
}
"""Each in one scheme."""

CONVERT = """
import sys
sys.path.append(sys.argv[1])
from mlx_lm.convert import convert
convert(sys.argv[2], sys.argv[3], quantize=True, q_mode=sys.argv[4], q_bits=int(sys.argv[5]), q_group_size=int(sys.argv[6]))
"""


def digests(blob: bytes) -> dict[str, str]:
    """Dtype, shape and bytes of each tensor of a file, as one short digest."""
    end, found = 8 + int.from_bytes(blob[:8], "little"), {}
    for name, entry in json.loads(blob[8:end]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            what = f"{entry['dtype']} {entry['shape']} ".encode() + blob[end + low : end + high]
            found[name] = hashlib.sha256(what).hexdigest()[:16]
    return found


SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_model(model_type: str, target: Path) -> None:
    """A small model with weights that depend on its kind alone, in bfloat16, and a tokenizer of some words."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models
    from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

    import tiny_models

    model = tiny_models.class_of(model_type)(CONFIG_MAPPING[model_type](**SIZES)).to(torch.bfloat16)
    model.save_pretrained(target)
    path, generator = target / "model.safetensors", torch.Generator().manual_seed(7)
    weights = {name: torch.randn(weight.shape, generator=generator) * 0.05 for name, weight in sorted(load_file(path).items())}
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, path, metadata={"format": "pt"})
    # mlx_lm reads this older key, and no other.
    config = json.loads((target / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "one", "two"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>").save_pretrained(target)


def main(folder: str) -> None:
    version = next(Path(folder).glob("mlx_lm-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    record = {"mlx-lm": version, "models": {}}
    with tempfile.TemporaryDirectory() as base:
        for model_type, scheme in MODELS.items():
            source, target = Path(base) / model_type, Path(base) / f"{model_type}-mlx"
            write_model(model_type, source)
            command = [sys.executable, "-c", CONVERT, folder, source, target, *map(str, SCHEMES[scheme])]
            subprocess.run(command, check=True)
            config = json.loads((target / "config.json").read_text())
            record["models"][model_type] = {
                "scheme": scheme,
                "source": digests((source / "model.safetensors").read_bytes()),
                "tensors": digests((target / "model.safetensors").read_bytes()),
                "quantization": {key: config[key] for key in ("quantization", "quantization_config")},
            }
            print(model_type, scheme, len(record["models"][model_type]["tensors"]), flush=True)
    for row in record["models"].values():
        row["source"] = hashlib.sha256(json.dumps(row["source"], sort_keys=True).encode()).hexdigest()
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
