"""Tiny Hugging Face repositories, written byte by byte from a seed.

This file does not use the safetensors package. The writer below is the whole format in twenty lines, so that mistakes
in the package and in ckfs cannot compensate each other. Each builder returns a `Repo`, which knows its contents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

# safetensors code -> numpy type. Types narrower than a byte are absent: their arrays are bytes, see `Tensor.array`.
NUMPY = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "C64": np.complex64, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
CODES = [*NUMPY, *PACKED_BITS]


def element_bits(code: str) -> int:
    return PACKED_BITS.get(code) or np.dtype(NUMPY[code]).itemsize * 8


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A named array of a checkpoint: safetensors code, shape in elements, little-endian C-order bytes."""

    code: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        assert len(self.data) * 8 == int(np.prod(self.shape, dtype=np.int64)) * element_bits(self.code)

    def array(self) -> np.ndarray:
        """The values; for packed types the bytes, whose last axis then counts bytes instead of elements."""
        if self.code in PACKED_BITS:
            return np.frombuffer(self.data, np.uint8).reshape(*self.shape[:-1], -1)
        return np.frombuffer(self.data, NUMPY[self.code]).reshape(self.shape)

    @staticmethod
    def of(code: str, array: np.ndarray) -> Tensor:
        array = np.asarray(array).astype(NUMPY[code])
        return Tensor(code, array.shape, array.tobytes())


@dataclasses.dataclass
class Repo:
    """A repository as written: tensors by file, in file order, and the other files."""

    path: Path
    files: dict[str, dict[str, Tensor]]
    config: dict

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for file in self.files.values() for name, tensor in file.items()}

    def file_of(self, name: str) -> Path:
        return self.path / next(file for file, tensors in self.files.items() if name in tensors)


def safetensors_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, align: int = 8) -> bytes:
    """One safetensors file: u64 header length, JSON header padded with spaces, the data without gaps."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + len(tensor.data)
        header[name] = {"dtype": tensor.code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())


def parse_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """Tensors, metadata and the offset of the data; refuses gaps, overlaps and trailing bytes."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    base, end, tensors = 8 + length, 0, {}
    for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = row["data_offsets"]
        assert begin == end, f"{path}: {name} begins at {begin}, expected {end}"
        tensors[name], end = Tensor(row["dtype"], tuple(row["shape"]), raw[base + begin : base + stop]), stop
    assert base + end == len(raw), f"{path}: {len(raw)} bytes, the header accounts for {base + end}"
    return tensors, metadata, base


class Draw:
    """Deterministic values: each tensor's come from its own name, so repos can share names and still differ."""

    def __init__(self, seed: str) -> None:
        self.seed = seed

    def __call__(self, name: str, code: str, *shape: int) -> Tensor:
        rng = np.random.default_rng(zlib.crc32(f"{self.seed}/{name}".encode()))
        if code in PACKED_BITS or code in ("BOOL", "C64", "F8_E8M0") or np.dtype(NUMPY[code]).kind in "iu":
            size = int(np.prod(shape, dtype=np.int64)) * element_bits(code) // 8
            raw = rng.integers(0, 2 if code == "BOOL" else 256, size, np.uint8)
            return Tensor(code, shape, raw.tobytes())
        return Tensor.of(code, rng.standard_normal(shape, np.float32) * 0.7)


def write(path: Path, files: dict[str, dict[str, Tensor]], config: dict, *, index: bool | None = None) -> Repo:
    """Writes the repo; `index` defaults to true for several files."""
    path.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        (path / file).write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    if len(files) > 1 if index is None else index:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        total = sum(len(tensor.data) for tensors in files.values() for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (path / "model.safetensors.index.json").write_text(text)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    (path / "README.md").write_text("# a repo made by the tests\n")
    return Repo(path, files, config)


def split(tensors: dict[str, Tensor], count: int) -> dict[str, dict[str, Tensor]]:
    """Distributes tensors over `count` files as transformers names them."""
    names, files = list(tensors), {}
    for part in range(count):
        chosen = names[part * len(names) // count : (part + 1) * len(names) // count]
        files[f"model-{part + 1:05}-of-{count:05}.safetensors"] = {name: tensors[name] for name in chosen}
    return files


HIDDEN, INTER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 16, 24, 32, 4, 2, 4


def base_config(model_type: str, architecture: str, layers: int, dtype: str = "bfloat16", **more: object) -> dict:
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_size": HIDDEN, "intermediate_size": INTER,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


def attention(draw: Draw, at: str, code: str, *, bias: bool = False, qk_norm: bool = False) -> dict[str, Tensor]:
    out, width, narrow = {}, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for word, rows, columns in (("q", width, HIDDEN), ("k", narrow, HIDDEN), ("v", narrow, HIDDEN), ("o", HIDDEN, width)):
        name = f"{at}.self_attn.{word}_proj"
        out[f"{name}.weight"] = draw(f"{name}.weight", code, rows, columns)
        if bias and word != "o":
            out[f"{name}.bias"] = draw(f"{name}.bias", code, rows)
    for word in ("q_norm", "k_norm") if qk_norm else ():
        out[f"{at}.self_attn.{word}.weight"] = draw(f"{at}.self_attn.{word}", code, HEAD_DIM)
    return out


def gated_mlp(draw: Draw, at: str, code: str, inter: int = INTER) -> dict[str, Tensor]:
    return {
        f"{at}.gate_proj.weight": draw(f"{at}.gate", code, inter, HIDDEN),
        f"{at}.up_proj.weight": draw(f"{at}.up", code, inter, HIDDEN),
        f"{at}.down_proj.weight": draw(f"{at}.down", code, HIDDEN, inter),
    }


def norms(draw: Draw, at: str, code: str, *words: str) -> dict[str, Tensor]:
    return {f"{at}.{word}.weight": draw(f"{at}.{word}", code, HIDDEN) for word in words}


def ends(draw: Draw, code: str, *, tied: bool, prefix: str = "model.") -> dict[str, Tensor]:
    out = {
        f"{prefix}embed_tokens.weight": draw("embed", code, VOCAB, HIDDEN),
        f"{prefix}norm.weight": draw("norm", code, HIDDEN),
    }
    if not tied:
        out["lm_head.weight"] = draw("lm_head", code, VOCAB, HIDDEN)
    return out


LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")


def llama_tensors(seed: str, code: str = "BF16", layers: int = 3, *, tied: bool = False) -> dict[str, Tensor]:
    draw = Draw(seed)
    out = ends(draw, code, tied=tied)
    for n in range(layers):
        at = f"model.layers.{n}"
        out |= attention(draw, at, code) | gated_mlp(draw, f"{at}.mlp", code) | norms(draw, at, code, *LLAMA_NORMS)
    return out


def llama(path: Path, code: str = "BF16", layers: int = 3, tied: bool = False, parts: int = 2) -> Repo:
    """GQA, two files with an index, tied or untied."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    config = base_config("llama", "LlamaForCausalLM", layers, names[code], tie_word_embeddings=tied)
    tensors = llama_tensors(path.name, code, layers, tied=tied)
    files = split(tensors, parts) if parts > 1 else {"model.safetensors": tensors}
    return write(path, files, config)


def llama_tied(path: Path) -> Repo:
    return llama(path, tied=True, layers=2, parts=1)


def llama_f32(path: Path) -> Repo:
    return llama(path, "F32", 2)


def qwen2(path: Path) -> Repo:
    """Biases on q, k and v."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=False)
    for n in range(2):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", bias=True) | gated_mlp(draw, f"{at}.mlp", "BF16")
        out |= norms(draw, at, "BF16", *LLAMA_NORMS)
    return write(path, {"model.safetensors": out}, base_config("qwen2", "Qwen2ForCausalLM", 2))


def qwen3_moe(path: Path) -> Repo:
    """One tensor per expert, q and k norms, a router; files cut in the middle of a layer."""
    draw, experts, inter = Draw(path.name), 4, 6
    out = ends(draw, "BF16", tied=False)
    for n in range(2):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", qk_norm=True) | norms(draw, at, "BF16", *LLAMA_NORMS)
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", "BF16", experts, HIDDEN)
        for e in range(experts):
            out |= gated_mlp(draw, f"{at}.mlp.experts.{e}", "BF16", inter)
    config = base_config(
        "qwen3_moe", "Qwen3MoeForCausalLM", 2, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=inter
    )
    return write(path, split(out, 3), config)


def mixtral(path: Path) -> Repo:
    """`w1 w2 w3` per expert, and a consolidated copy with other names beside the set."""
    draw, experts = Draw(path.name), 2
    out = ends(draw, "BF16", tied=False)
    for n in range(2):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16") | norms(draw, at, "BF16", *LLAMA_NORMS)
        moe = f"{at}.block_sparse_moe"
        out[f"{moe}.gate.weight"] = draw(f"{moe}.gate", "BF16", experts, HIDDEN)
        for e in range(experts):
            out[f"{moe}.experts.{e}.w1.weight"] = draw(f"{moe}.{e}.w1", "BF16", INTER, HIDDEN)
            out[f"{moe}.experts.{e}.w2.weight"] = draw(f"{moe}.{e}.w2", "BF16", HIDDEN, INTER)
            out[f"{moe}.experts.{e}.w3.weight"] = draw(f"{moe}.{e}.w3", "BF16", INTER, HIDDEN)
    config = base_config("mixtral", "MixtralForCausalLM", 2, num_local_experts=experts, num_experts_per_tok=2)
    repo = write(path, split(out, 2), config)
    copy = {"tok_embeddings.weight": out["model.embed_tokens.weight"], "output.weight": out["lm_head.weight"]}
    (path / "consolidated.safetensors").write_bytes(safetensors_bytes(copy))
    return repo


def phi3(path: Path) -> Repo:
    """Fused `qkv_proj` and `gate_up_proj`."""
    draw, width, narrow = Draw(path.name), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    out = ends(draw, "BF16", tied=False)
    for n in range(2):
        at = f"model.layers.{n}"
        out[f"{at}.self_attn.qkv_proj.weight"] = draw(f"{at}.qkv", "BF16", width + 2 * narrow, HIDDEN)
        out[f"{at}.self_attn.o_proj.weight"] = draw(f"{at}.o", "BF16", HIDDEN, width)
        out[f"{at}.mlp.gate_up_proj.weight"] = draw(f"{at}.gate_up", "BF16", 2 * INTER, HIDDEN)
        out[f"{at}.mlp.down_proj.weight"] = draw(f"{at}.down", "BF16", HIDDEN, INTER)
        out |= norms(draw, at, "BF16", *LLAMA_NORMS)
    return write(path, {"model.safetensors": out}, base_config("phi3", "Phi3ForCausalLM", 2, pad_token_id=0))


def gemma3(path: Path) -> Repo:
    """Four norms per layer, q and k norms, tied, with a vision tower and a projector."""
    draw = Draw(path.name)
    out = ends(draw, "BF16", tied=True, prefix="language_model.model.")
    for n in range(2):
        at = f"language_model.model.layers.{n}"
        out |= attention(draw, at, "BF16", qk_norm=True) | gated_mlp(draw, f"{at}.mlp", "BF16")
        out |= norms(draw, at, "BF16", *LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    tower = "vision_tower.vision_model"
    out[f"{tower}.embeddings.patch_embedding.weight"] = draw("patch", "BF16", 8, 3, 2, 2)
    out[f"{tower}.embeddings.patch_embedding.bias"] = draw("patch bias", "BF16", 8)
    out[f"{tower}.embeddings.position_embedding.weight"] = draw("position", "BF16", 4, 8)
    for n in range(3):
        at = f"{tower}.encoder.layers.{n}"
        for word in ("q_proj", "k_proj", "v_proj", "out_proj"):
            out[f"{at}.self_attn.{word}.weight"] = draw(f"{at}.{word}", "BF16", 8, 8)
            out[f"{at}.self_attn.{word}.bias"] = draw(f"{at}.{word} bias", "BF16", 8)
        for word in ("layer_norm1", "layer_norm2"):
            out[f"{at}.{word}.weight"] = draw(f"{at}.{word}", "BF16", 8)
            out[f"{at}.{word}.bias"] = draw(f"{at}.{word} bias", "BF16", 8)
    out["multi_modal_projector.mm_input_projection_weight"] = draw("projection", "BF16", 8, HIDDEN)
    text = base_config("gemma3_text", "Gemma3ForCausalLM", 2, tie_word_embeddings=True)
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8, "num_hidden_layers": 3}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "vision_config": vision, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return write(path, split(out, 2), config)


def bert(path: Path) -> Repo:
    """An encoder with biases everywhere, float32, and an integer buffer."""
    draw, code = Draw(path.name), "F32"
    out = {"embeddings.position_ids": Tensor.of("I64", np.arange(16)[None])}
    for word, rows in (("word", VOCAB), ("position", 16), ("token_type", 2)):
        out[f"embeddings.{word}_embeddings.weight"] = draw(word, code, rows, HIDDEN)

    def affine(name: str, *shape: int) -> None:
        out[f"{name}.weight"] = draw(f"{name}.weight", code, *shape)
        out[f"{name}.bias"] = draw(f"{name}.bias", code, shape[0])

    affine("embeddings.LayerNorm", HIDDEN)
    for n in range(2):
        at = f"encoder.layer.{n}"
        for word in ("query", "key", "value"):
            affine(f"{at}.attention.self.{word}", HIDDEN, HIDDEN)
        affine(f"{at}.attention.output.dense", HIDDEN, HIDDEN)
        affine(f"{at}.attention.output.LayerNorm", HIDDEN)
        affine(f"{at}.intermediate.dense", INTER, HIDDEN)
        affine(f"{at}.output.dense", HIDDEN, INTER)
        affine(f"{at}.output.LayerNorm", HIDDEN)
    affine("pooler.dense", HIDDEN, HIDDEN)
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": HIDDEN, "intermediate_size": INTER,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": VOCAB, "max_position_embeddings": 16,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
    }  # fmt: skip
    return write(path, {"model.safetensors": out}, config)


def gpt_oss(path: Path) -> Repo:
    """Experts already stacked in the repo, `[experts, in, out]`, sinks and biases; a foreign set in `original/`."""
    draw, experts = Draw(path.name), 2
    out = ends(draw, "BF16", tied=False)
    for n in range(2):
        at = f"model.layers.{n}"
        out |= attention(draw, at, "BF16", bias=True) | norms(draw, at, "BF16", *LLAMA_NORMS)
        out[f"{at}.self_attn.o_proj.bias"] = draw(f"{at}.o bias", "BF16", HIDDEN)
        out[f"{at}.self_attn.sinks"] = draw(f"{at}.sinks", "BF16", HEADS)
        out[f"{at}.mlp.router.weight"] = draw(f"{at}.router", "BF16", experts, HIDDEN)
        out[f"{at}.mlp.router.bias"] = draw(f"{at}.router bias", "BF16", experts)
        out[f"{at}.mlp.experts.gate_up_proj"] = draw(f"{at}.gate_up", "BF16", experts, HIDDEN, 2 * INTER)
        out[f"{at}.mlp.experts.gate_up_proj_bias"] = draw(f"{at}.gate_up bias", "BF16", experts, 2 * INTER)
        out[f"{at}.mlp.experts.down_proj"] = draw(f"{at}.down", "BF16", experts, INTER, HIDDEN)
        out[f"{at}.mlp.experts.down_proj_bias"] = draw(f"{at}.down bias", "BF16", experts, HIDDEN)
    config = base_config("gpt_oss", "GptOssForCausalLM", 2, num_local_experts=experts, num_experts_per_tok=1)
    repo = write(path, {"model.safetensors": out}, config)
    (path / "original").mkdir()
    foreign = {"block.0.attn.norm.scale": draw("foreign", "F32", HIDDEN)}
    (path / "original/model.safetensors").write_bytes(safetensors_bytes(foreign))
    return repo


def deepseek_v3(path: Path) -> Repo:
    """MLA, one dense layer then two with experts, a shared expert and a float32 router bias, all bf16."""
    draw, experts, inter, code = Draw(path.name), 2, 6, "BF16"
    out = ends(draw, code, tied=False)
    for n in range(3):
        at = f"model.layers.{n}"
        for word, rows, columns in (
            ("q_a_proj", 6, HIDDEN), ("q_b_proj", HEADS * 6, 6), ("kv_a_proj_with_mqa", 10, HIDDEN),
            ("kv_b_proj", HEADS * 8, 8), ("o_proj", HIDDEN, HEADS * HEAD_DIM),
        ):  # fmt: skip
            out[f"{at}.self_attn.{word}.weight"] = draw(f"{at}.{word}", code, rows, columns)
        out[f"{at}.self_attn.q_a_layernorm.weight"] = draw(f"{at}.q_a_norm", code, 6)
        out[f"{at}.self_attn.kv_a_layernorm.weight"] = draw(f"{at}.kv_a_norm", code, 8)
        out |= norms(draw, at, code, *LLAMA_NORMS)
        if n == 0:
            out |= gated_mlp(draw, f"{at}.mlp", code)
            continue
        out[f"{at}.mlp.gate.weight"] = draw(f"{at}.gate", code, experts, HIDDEN)
        out[f"{at}.mlp.gate.e_score_correction_bias"] = draw(f"{at}.correction", "F32", experts)
        out |= gated_mlp(draw, f"{at}.mlp.shared_experts", code, inter)
        for e in range(experts):
            out |= gated_mlp(draw, f"{at}.mlp.experts.{e}", code, inter)
    config = base_config(
        "deepseek_v3", "DeepseekV3ForCausalLM", 3, n_routed_experts=experts, n_shared_experts=1,
        first_k_dense_replace=1, moe_intermediate_size=inter, q_lora_rank=6, kv_lora_rank=8, qk_rope_head_dim=2,
        qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    return write(path, split(out, 2), config)


BLOCK = 128


def block_fp8(path: Path, scale_code: str) -> Repo:
    """Block-quantized matrices with partial blocks at both edges; scales partly in another file."""
    draw = Draw(path.name)
    config = base_config("deepseek_v3", "DeepseekV3ForCausalLM", 2) | {
        "hidden_size": 200, "intermediate_size": 300, "first_k_dense_replace": 2, "q_lora_rank": 130,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
        },
    }  # fmt: skip
    out: dict[str, Tensor] = {
        "model.embed_tokens.weight": draw("embed", "BF16", VOCAB, 200),
        "model.norm.weight": draw("norm", "BF16", 200),
        "lm_head.weight": draw("lm_head", "BF16", VOCAB, 200),
    }
    scales: dict[str, Tensor] = {}
    for n in range(2):
        at = f"model.layers.{n}"
        for word, rows, columns in (
            ("self_attn.q_a_proj", 130, 200), ("self_attn.q_b_proj", 140, 130),
            ("self_attn.kv_a_proj_with_mqa", 192, 200), ("self_attn.kv_b_proj", 150, 140), ("self_attn.o_proj", 200, 129), ("mlp.gate_proj", 300, 200), ("mlp.up_proj", 300, 200),
            ("mlp.down_proj", 200, 300),
        ):  # fmt: skip
            name = f"{at}.{word}"
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            quantized = rng.integers(0, 256, rows * columns, np.uint8)
            out[f"{name}.weight"] = Tensor("F8_E4M3", (rows, columns), quantized.tobytes())
            grid = rng.uniform(1e-4, 3e-2, (-(-rows // BLOCK), -(-columns // BLOCK))).astype(np.float32)
            (scales if n else out)[f"{name}.weight_scale_inv"] = Tensor.of(scale_code, grid)
        sizes = {word: 200 for word in LLAMA_NORMS} | {"self_attn.q_a_layernorm": 130, "self_attn.kv_a_layernorm": 140}
        out |= {f"{at}.{word}.weight": draw(f"{at}.{word}", "BF16", size) for word, size in sizes.items()}
    files = {"model-00001-of-00002.safetensors": out, "model-00002-of-00002.safetensors": scales}
    return write(path, files, config)


def block_fp8_f32(path: Path) -> Repo:
    return block_fp8(path, "F32")


def block_fp8_bf16(path: Path) -> Repo:
    return block_fp8(path, "BF16")


LAYERS_OF_TWO_FILES = 4


def two_files(path: Path) -> Repo:
    """`a` and `b`, each in a file of its own of 9 MiB, so that one can be damaged while the other must remain readable."""
    draw, files = Draw(path.name), {}
    for number, word in enumerate("ab"):
        files[f"model-0000{number + 1}-of-00002.safetensors"] = {
            f"model.layers.{n}.{word}.weight": draw(f"{word}{n}", "F32", 768, 768) for n in range(LAYERS_OF_TWO_FILES)
        }
    return write(path, files, {"model_type": "unheard_of"})


def every_dtype(path: Path) -> Repo:
    """Each type of safetensors 0.8, of an unknown family; 6-bit rows of 8 elements fill 6 bytes."""
    draw = Draw(path.name)
    out = {f"blocks.{n}.{code.lower()}": draw(f"{n}/{code}", code, 6, 8) for n in range(2) for code in CODES}
    out["scalar"] = draw("scalar", "F32")
    out["empty"] = Tensor("F32", (0, 3), b"")
    return write(path, {"model.safetensors": out}, {"model_type": "unheard_of"})


def wide(path: Path) -> Repo:
    """A llama of 79 MB in three layers, so that shards are larger than headers, tiles and the kernel's read-ahead."""
    draw, out, hidden, narrow, inter, vocab = Draw(path.name), {}, 1024, 512, 2816, 2048
    for n in range(3):
        for word, rows, columns in (
            ("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", narrow, hidden), ("self_attn.v_proj", narrow, hidden),
            ("self_attn.o_proj", hidden, hidden), ("mlp.gate_proj", inter, hidden), ("mlp.up_proj", inter, hidden),
            ("mlp.down_proj", hidden, inter),
        ):  # fmt: skip
            name = f"model.layers.{n}.{word}.weight"
            out[name] = draw(name, "BF16", rows, columns)
        for word in LLAMA_NORMS:
            name = f"model.layers.{n}.{word}.weight"
            out[name] = draw(name, "BF16", hidden)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        out[name] = draw(name, "BF16", vocab, hidden)
    out["model.norm.weight"] = draw("norm", "BF16", hidden)
    sizes = {"hidden_size": hidden, "intermediate_size": inter, "vocab_size": vocab, "head_dim": 128}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    return write(path, split(out, 3), base_config("llama", "LlamaForCausalLM", 3) | sizes)


UNEVEN_SIZES = (13, 10, 6, 2)


def uneven(path: Path) -> Repo:
    """First axes that do not divide evenly over four devices; of 6 and 2 rows some devices get none."""
    draw = Draw(path.name)
    out = {f"block{size}.weight": draw(f"{size}", "F32", size, 3) for size in UNEVEN_SIZES}
    out |= {f"block{size}.bias": draw(f"{size} bias", "BF16", size) for size in UNEVEN_SIZES}
    return write(path, {"model.safetensors": out}, {"model_type": "unheard_of"})


def two_files_without_index(path: Path) -> Repo:
    tensors = llama_tensors(path.name, "BF16", 2)
    config = base_config("llama", "LlamaForCausalLM", 2)
    return write(path, split(tensors, 2), config, index=False)


def edge_values(path: Path) -> Repo:
    """Every 16-bit pattern, a spread of float32 patterns and all 8-bit ones: the inputs of cast tests."""
    all16 = np.arange(1 << 16, dtype=np.uint16)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001], np.uint32)
    patterns32 = (high[:, None] | tails[None]).astype(np.uint32)
    all8 = np.arange(256, dtype=np.uint8)
    out = {
        "all_bf16": Tensor("BF16", (256, 256), all16.tobytes()),
        "all_f16": Tensor("F16", (256, 256), all16.tobytes()),
        "many_f32": Tensor("F32", patterns32.shape, patterns32.tobytes()),
        **{f"all_{code.lower()}": Tensor(code, (16, 16), all8.tobytes()) for code in CODES if code.startswith("F8_")},
    }
    return write(path, {"model.safetensors": out}, {"model_type": "unheard_of", "torch_dtype": "float32"})


def hub_cache(path: Path) -> Repo:
    """`models--org--tiny` as huggingface_hub lays it out: snapshots of symlinks into blobs, a ref to the commit."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    home = path / "models--org--tiny"
    repo = llama(home / "snapshots" / revision, layers=2)
    (home / "blobs").mkdir()
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(revision)
    for file in sorted(repo.path.iterdir()):
        content = file.read_bytes()
        in_lfs = file.suffix == ".safetensors"
        git = hashlib.sha1(b"blob %d\0" % len(content) + content)
        blob = home / "blobs" / (hashlib.sha256(content) if in_lfs else git).hexdigest()
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    return repo


BUILDERS = {
    builder.__name__: builder
    for builder in (
        llama, llama_tied, llama_f32, qwen2, qwen3_moe, mixtral, phi3, gemma3, bert, gpt_oss, deepseek_v3, block_fp8_f32,
        block_fp8_bf16, every_dtype, uneven, two_files_without_index, edge_values, hub_cache,
    )
}  # fmt: skip
