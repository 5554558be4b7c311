"""Repositories that libraries save: a plain llama, quantized by each library and written by its own functions, on the CPU.

The numpy reference decodes them; this file contains nothing about the packing of a scheme.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

import quantized_formats as formats
import quantized_repos
import repos
from quantized_repos import MODULES, Quantized, Sizes
from repos import Repo

SIZES = Sizes()


def plain(path: Path) -> Repo:
    """A llama of random weights, two files."""
    maker = quantized_repos.Maker(path, "calm", "BF16")
    width, narrow = SIZES.heads * SIZES.head, SIZES.narrow * SIZES.head
    shapes = {
        "q_proj": (width, SIZES.hidden),
        "k_proj": (narrow, SIZES.hidden),
        "v_proj": (narrow, SIZES.hidden),
        "o_proj": (SIZES.hidden, width),
    }
    shapes |= {
        "gate_proj": (SIZES.inter, SIZES.hidden),
        "up_proj": (SIZES.inter, SIZES.hidden),
        "down_proj": (SIZES.hidden, SIZES.inter),
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        maker.plain(name, SIZES.vocab, SIZES.hidden)
    maker.plain("model.norm.weight", SIZES.hidden)
    for module in MODULES:
        maker.plain(f"{module}.weight", *shapes[module.rsplit(".", 1)[1]])
    for n in range(2):
        for word in repos.LLAMA_NORMS:
            maker.plain(f"model.layers.{n}.{word}.weight", SIZES.hidden)
    return maker.write(quantized_repos.llama_config(SIZES, "BF16")).repo


def by_transformers(source: Path, path: Path, config: object) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16, device_map="cpu")
    model.save_pretrained(path, max_shard_size="60KB")


def bitsandbytes(source: Path, path: Path, kind: str, nested: bool) -> None:
    import torch
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return by_transformers(source, path, BitsAndBytesConfig(load_in_8bit=True))
    kinds = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": torch.bfloat16}
    return by_transformers(source, path, BitsAndBytesConfig(load_in_4bit=True, **kinds))


def torchao(source: Path, path: Path, word: str) -> None:
    from torchao import quantization
    from transformers import TorchAoConfig

    by_transformers(source, path, TorchAoConfig(getattr(quantization, word)()))


def compressed_tensors(source: Path, path: Path, format: str, **args: object) -> None:
    """Scales are set from the largest weight of each group, as an observer does; the library packs and saves."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=format)
    ignore = ["lm_head", quantized_repos.UNQUANTIZED]
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, format=format, ignore=ignore))
    largest = {("int", 4): 7.0, ("int", 8): 127.0, ("float", 8): 448.0, ("float", 4): 6.0}[args["type"], args["num_bits"]]
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight, scale = module.weight.detach().float(), module.weight_scale
        groups = weight.reshape(weight.shape[0], scale.shape[-1], -1)
        wanted = (
            (groups.amax(-1) - groups.amin(-1)) / (2 * largest + 1)
            if not args.get("symmetric", True)
            else groups.abs().amax(-1) / largest
        )
        if hasattr(module, "weight_global_scale"):
            module.weight_global_scale.data.fill_(448 * 6 / float(weight.abs().max()))
            wanted = (wanted * module.weight_global_scale.detach()).to(torch.float8_e4m3fn).float()
        if not args.get("symmetric", True):
            module.weight_zero_point.data.copy_((-largest - 1 - groups.amin(-1) / wanted).round().clamp(-largest - 1, largest))
        scale.data.copy_(wanted)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path, max_shard_size="60KB")
    compressor.update_config(path)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
# By the name of a builder in quantized_repos that stores in the same way.
SAVED: dict[str, Callable[[Path, Path], None]] = {
    "pack-int4-group": lambda source, path: compressed_tensors(source, path, "pack-quantized", **INT4),
    "pack-int4-group-zeros": lambda source, path: compressed_tensors(source, path, "pack-quantized", symmetric=False, **INT4),
    "pack-int8-channel": lambda source, path: compressed_tensors(
        source, path, "pack-quantized", num_bits=8, type="int", strategy="channel"
    ),
    "ct-fp8-channel": lambda source, path: compressed_tensors(
        source, path, "float-quantized", num_bits=8, type="float", strategy="channel"
    ),
    "ct-nvfp4": lambda source, path: compressed_tensors(
        source, path, "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "bnb-nf4": lambda source, path: bitsandbytes(source, path, "nf4", False),
    "bnb-nf4-nested": lambda source, path: bitsandbytes(source, path, "nf4", True),
    "bnb-fp4": lambda source, path: bitsandbytes(source, path, "fp4", False),
    "bnb-int8": lambda source, path: bitsandbytes(source, path, "int8", False),
    "torchao-float8": lambda source, path: torchao(source, path, "Float8WeightOnlyConfig"),
    "torchao-int8": lambda source, path: torchao(source, path, "Int8WeightOnlyConfig"),
}


def saved(name: str, source: Repo, path: Path) -> Quantized:
    """The repository that the library writes, read back and decoded."""
    SAVED[name](source.path, path)
    files = {file.name: repos.parse_safetensors(file)[0] for file in sorted(path.glob("*.safetensors"))}
    repo = Repo(path, files, json.loads((path / "config.json").read_text()))
    scheme, made = formats.SCHEMES[name], Quantized(repo, "BF16", {}, {}, set(), {})
    tensors = repo.tensors
    for module in MODULES:
        if f"{module}.{scheme.codes}" not in tensors or tensors[f"{module}.{scheme.codes}"].code == "BF16":
            continue
        parts = {key.removeprefix(f"{module}."): tensor for key, tensor in tensors.items() if key.startswith(f"{module}.")}
        weight = f"{module}.weight"
        made.values[weight] = scheme.decode(parts, *source.tensors[weight].shape)
        made.replaced[f"{module}.{scheme.codes}"] = weight
        made.gone |= {f"{module}.{word}" for word in parts}
        made.companions[weight] = [f"{module}.{word}" for word in parts if word not in (scheme.codes, *scheme.dropped)]
    return made


def resemblance(made: Quantized, source: Repo) -> float:
    """The largest relative error of a decoded matrix against its original weights."""
    worst = 0.0
    for name, values in made.values.items():
        original = source.tensors[name].array().astype(np.float64)
        worst = max(worst, float(np.linalg.norm(values - original) / np.linalg.norm(original)))
    return worst
