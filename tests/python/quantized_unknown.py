"""Repositories of quantization methods that no scheme decodes: the program must refuse each by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

import repos
from quantized_formats import Noise, Parts
from quantized_repos import AWQ, Sizes, gptq, llama_config, one_group
from repos import Draw, Repo, Tensor


def unknown(path: Path, config: dict, parts: Callable[[Noise], Parts]) -> Repo:
    """A llama of one layer whose query projection has these parts; all other tensors are plain."""
    draw, sizes = Draw(path.name), Sizes()
    tensors = {
        name: draw(name, "F16", *shape)
        for name, shape in {
            "model.embed_tokens.weight": (64, 96), "lm_head.weight": (64, 96), "model.norm.weight": (96,),
            "model.layers.0.self_attn.o_proj.weight": (96, 96), "model.layers.0.input_layernorm.weight": (96,),
        }.items()
    }  # fmt: skip
    tensors |= {f"model.layers.0.self_attn.q_proj.{word}": part for word, part in parts(Noise(path.name, "calm")).items()}
    config = llama_config(sizes, "F16", quantization_config=config) | {"num_hidden_layers": 1}
    return repos.write(path, {"model.safetensors": tensors}, config)


# By name: the configuration, the parts, and a word that the refusal must contain.
UNKNOWN: dict[str, tuple[dict, Callable[[Noise], Parts], str]] = {
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
        lambda noise: {
            "W_q": noise.codes("U8", 48, 96),
            "scale": noise.floats("F16", 144, 1),
            "zero": noise.floats("F16", 144, 1),
        },
        "hqq",
    ),
    "aqlm": (
        {"quant_method": "aqlm", "in_group_size": 8, "out_group_size": 1, "num_codebooks": 1, "nbits_per_codebook": 16},
        lambda noise: {
            "codes": Tensor("I16", (96, 12, 1), noise.bytes(96 * 12 * 2).tobytes()),
            "codebooks": noise.floats("F16", 1, 256, 1, 8),
            "scales": noise.floats("F16", 96, 1, 1, 1),
        },
        "aqlm",
    ),
    "exl2": (
        {"quant_method": "exl2", "version": "0.2.4", "bits": 4.0, "head_bits": 6},
        lambda noise: {
            "q_weight": noise.codes("I32", 12, 96),
            "q_scale": noise.codes("I32", 3, 12),
            "q_scale_max": noise.floats("F16", 3),
            "q_groups": Tensor("I16", (6,), noise.bytes(12).tobytes()),
            "q_invperm": noise.codes("I32", 96),
        },
        "exl2",
    ),
    "gptq-3": (
        gptq(3, 32, "gptq")["quantization_config"],
        lambda noise: {
            "qweight": noise.codes("I32", 9, 96),
            "qzeros": noise.codes("I32", 3, 9),
            "scales": noise.floats("F16", 3, 96),
            "g_idx": Tensor.of("I32", np.arange(96) // 32),
        },
        "gptq",
    ),
    "gptq-marlin": (
        gptq(4, 32, "marlin")["quantization_config"],
        lambda noise: {"B": noise.codes("I32", 6, 192), "s": noise.floats("F16", 3, 96)},
        "marlin",
    ),
    "awq-gemv": (
        AWQ["quantization_config"] | {"version": "gemv"},
        lambda noise: {
            "qweight": noise.codes("I32", 96, 12),
            "qzeros": noise.codes("I32", 96, 1),
            "scales": noise.floats("F16", 96, 8),
        },
        "gemv",
    ),
    "awq-marlin": (
        AWQ["quantization_config"] | {"version": "marlin"},
        lambda noise: {
            "qweight": noise.codes("I32", 6, 192),
            "qzeros": noise.codes("I32", 3, 12),
            "scales": noise.floats("F16", 3, 96),
        },
        "marlin",
    ),
    "ct-marlin-24": (
        one_group("marlin-24", "int", 4, "group", group_size=32)["quantization_config"],
        lambda noise: {
            "weight_packed": noise.codes("I32", 3, 192),
            "scale_packed": noise.floats("F16", 3, 96),
            "meta": Tensor("I16", (96, 6), noise.bytes(96 * 6 * 2).tobytes()),
        },
        "marlin-24",
    ),
    "modelopt-awq": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        lambda noise: {
            "weight": noise.codes("U8", 48, 96),
            "weight_scale": noise.floats("F32", 96, 3),
            "pre_quant_scale": noise.floats("F16", 96),
        },
        "W4A16_AWQ",
    ),
}
