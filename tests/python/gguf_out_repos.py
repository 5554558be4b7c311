"""Small repositories of each family that is written as GGUF, with tokenizers of the kinds that their releases have."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

TINY = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
MOE = dict(moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=512,
)
LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    long_factor=[1.0 + i / 7 for i in range(8)],
    short_factor=[1.0 + i / 70 for i in range(8)],
)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=1024)
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = GPT4O_SPLIT.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")

# By name of the directory: class of the configuration, what it has besides, dtype, tokenizer, and its arguments.
REPOS = {
    "Llama-3.2-1B-Instruct": (
        "LlamaConfig",
        dict(rope_parameters=LLAMA3, head_dim=32),
        "bfloat16",
        "bytes",
        dict(split=LLAMA3_SPLIT, bos=True),
    ),
    "llama-two-7b-hf": ("LlamaConfig", dict(attention_bias=True), "float16", "pieces", {}),
    "tied_llama": ("LlamaConfig", dict(tie_word_embeddings=True), "float32", "fallback", {}),
    "SmolLM-135M": ("LlamaConfig", {}, "bfloat16", "bytes", dict(digits=True)),
    "Mistral-7B-v0.1": ("MistralConfig", dict(head_dim=24), "bfloat16", "pieces", dict(prefix=True)),
    "Mistral-Nemo-12B": ("MistralConfig", dict(head_dim=16), "bfloat16", "bytes", dict(split=TEKKEN_SPLIT, bos=True)),
    "Qwen2.5-0.5B-Instruct": (
        "Qwen2Config",
        dict(rope_parameters=YARN),
        "bfloat16",
        "bytes",
        dict(split=QWEN2_SPLIT, nfc=True, more=["<|endoftext|>"]),
    ),
    "Qwen1.5-MoE-A2.7B": (
        "Qwen2MoeConfig",
        MOE | dict(shared_expert_intermediate_size=64),
        "bfloat16",
        "bytes",
        dict(split=QWEN2_SPLIT, nfc=True, more=["<|endoftext|>"]),
    ),
    "Qwen3-8B": (
        "Qwen3Config",
        dict(head_dim=32),
        "bfloat16",
        "bytes",
        dict(split=QWEN2_SPLIT, nfc=True, more=["<|endoftext|>"]),
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        MOE | dict(head_dim=32, norm_topk_prob=True),
        "bfloat16",
        "bytes",
        dict(split=QWEN2_SPLIT, nfc=True, more=["<|endoftext|>"]),
    ),
    "gemma-2-2b-it": ("Gemma2Config", dict(head_dim=32, sliding_window=64), "float16", "pieces", {}),
    "gemma-3-1b-it": ("Gemma3TextConfig", dict(head_dim=32, sliding_window=64), "bfloat16", "pieces", {}),
    "Phi-3-mini-4k-instruct": ("Phi3Config", dict(pad_token_id=0), "bfloat16", "pieces", {}),
    "Phi-3.5-mini-instruct": (
        "Phi3Config",
        dict(pad_token_id=0, rope_parameters=LONG, original_max_position_embeddings=256),
        "bfloat16",
        "pieces",
        {},
    ),
    "GLM-4-9B-0414": (
        "Glm4Config",
        dict(head_dim=16, pad_token_id=0),
        "bfloat16",
        "bytes",
        dict(split=LLAMA3_SPLIT, more=["<|endoftext|>", "<|user|>"]),
    ),
    "DeepSeek-V2-Lite": (
        "DeepseekV2Config",
        LATENT | dict(q_lora_rank=None, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
        "bfloat16",
        "bytes",
        dict(split=LLAMA3_SPLIT),
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        LATENT | dict(q_lora_rank=32, n_group=2, topk_group=1, scoring_func="sigmoid"),
        "bfloat16",
        "bytes",
        dict(split=LLAMA3_SPLIT),
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
        "bfloat16",
        "bytes",
        dict(split=GPT4O_SPLIT),
    ),
    "gpt-oss-120b": (
        "GptOssConfig",
        dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
        "mxfp4",
        "bytes",
        dict(split=GPT4O_SPLIT),
    ),
    "Qwen3-Reranker-0.6B": (
        "Qwen3Config",
        dict(head_dim=32, tie_word_embeddings=True),
        "bfloat16",
        "bytes",
        dict(split=QWEN2_SPLIT, nfc=True, more=["yes", "no"]),
    ),
    "ranks-by-its-card": (
        "Qwen3Config",
        dict(head_dim=32),
        "bfloat16",
        "bytes",
        dict(split=QWEN2_SPLIT, nfc=True, more=["no", "yes"]),
    ),
}
CARDS = {
    "gpt-oss-120b": """---
license: other
license_name: some-licence
license_link: https://example.org/LICENSE#terms
language:
- en
- no
pipeline_tag: text-generation
tags:
- vllm
- "two words"
base_model:
- org/Base-Model-7B-v1.2
- https://huggingface.co/other/Model-3B
datasets: [org/data-v2, 'plain']
extra_gated_prompt: >-
  license: "of no key
widget:
- text: "Hello"
---
# A model
""",
    "ranks-by-its-card": "---\nlicense: apache-2.0\n---\r\n# Qwen3-Reranker-8B\n",
}


def byte_letters() -> list[str]:
    """The letters that stand for bytes."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "a"), ("o", "n"), ("3", "3"), ("Ġ", "Ġ"), ("a", "in")]


def of_bytes(files: Path, split=None, bos=False, digits=False, nfc=False, more=()) -> None:
    """A tokenizer of pairs of bytes: tokenizer.json and its settings."""
    vocabulary = {letter: number for number, letter in enumerate(byte_letters())}
    for pair in MERGES:
        vocabulary["".join(pair)] = len(vocabulary)
    special = ["<|begin|>", "<|end|>", "<|im_end|>", *more]
    first = len(vocabulary)
    added = [
        dict(id=first + at, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for at, text in enumerate(special)
    ]
    added += [
        dict(added[0], id=first + len(special), content="<tool_call>", special=False),
        dict(added[0], id=first + len(special) + 1, content="<|think|>", special=False),
    ]
    steps = [dict(type="Digits", individual_digits=True)] if digits else []
    splits = [split] if isinstance(split, str) else split or []
    steps = [dict(type="Split", pattern=dict(Regex=one), behavior="Isolated", invert=False) for one in splits] + steps
    steps.append(dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=split is None))
    processor = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=False, use_regex=True)
    if bos:
        token = dict(SpecialToken=dict(id="<|begin|>", type_id=0))
        text = [dict(Sequence=dict(id=name, type_id=at)) for at, name in enumerate("AB")]
        template = dict(
            type="TemplateProcessing",
            single=[token, text[0]],
            pair=[token, text[0], dict(SpecialToken=dict(id="<|begin|>", type_id=1)), text[1]],
            special_tokens={"<|begin|>": dict(id="<|begin|>", ids=[first], tokens=["<|begin|>"])},
        )
        processor = dict(type="Sequence", processors=[processor, template])
    tokenizer = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=added,
        normalizer=dict(type="NFC") if nfc else None,
        pre_tokenizer=steps[0] if len(steps) == 1 else dict(type="Sequence", pretokenizers=steps),
        post_processor=processor,
        decoder=dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True),
        model=dict(
            type="BPE",
            dropout=None,
            unk_token=None,
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=bos,
            vocab=vocabulary,
            merges=[list(pair) for pair in MERGES],
        ),
    )
    (files / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template="{{ messages[0].content }}ü",
    )
    if bos:
        settings |= dict(bos_token="<|begin|>", add_bos_token=True)
    else:
        settings |= dict(bos_token=None, add_prefix_space=False)
    (files / "tokenizer_config.json").write_text(json.dumps(settings))
    (files / "generation_config.json").write_text(
        json.dumps(dict(temperature=0.6, top_p=0.9, top_k=20, do_sample=True))
    )


def piece(text: str, score: float, kind: int) -> bytes:
    raw = text.encode()
    inner = (
        b"\n"
        + bytes([len(raw)])
        + raw
        + b"\x15"
        + struct.pack("<f", score)
        + (b"\x18" + bytes([kind]) if kind != 1 else b"")
    )
    return b"\n" + bytes([len(inner)]) + inner


def of_pieces(files: Path, prefix=False) -> None:
    """A tokenizer of SentencePiece: tokenizer.model and its settings."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [
        ("▁", -1.5, 1),
        ("▁the", -2.25, 1),
        ("é", -3.0, 1),
        ("▁a", -4.0, 1),
        ("[user]", 0.0, 4),
        ("old", -9.0, 5),
    ]
    # Then the settings of the trainer, SentencePiece's unigrams, and of the normalizer.
    model = b"".join(piece(*one) for one in pieces) + b"\x12\x05\x18\x01\x98\x02\x01" + b"\x1a\x00"
    (files / "tokenizer.model").write_bytes(model)
    count = len(pieces)
    decoder = {str(at): dict(content=text, special=True) for at, text in enumerate(("<unk>", "<s>", "</s>"))}
    decoder |= {
        str(count): dict(content="<start_of_turn>", special=True),
        str(count + 1): dict(content="▁▁", special=False),
        str(count + 2): dict(content="<unused7>", special=False),
    }
    settings = dict(
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token=dict(content="</s>"),
        unk_token="<unk>",
        add_bos_token=True,
        add_eos_token=False,
        added_tokens_decoder=decoder,
        chat_template=[dict(name="default", template="{{ bos_token }}"), dict(name="tool use", template="{{ tools }}")],
    )
    if prefix:
        settings |= dict(add_prefix_space=True)
    (files / "tokenizer_config.json").write_text(json.dumps(settings))
    (files / "added_tokens.json").write_text(json.dumps({"<extra>": count + 3}))


def of_fallback(files: Path) -> None:
    """A tokenizer.json of characters that falls back to bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for text in ("▁", "t", "h", "e", "he", "▁t", "▁the"):
        vocabulary[text] = len(vocabulary)
    merges = [["h", "e"], ["▁", "t"], ["▁t", "he"]]
    added = [
        dict(id=at, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for at, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    added.append(dict(added[0], id=len(vocabulary), content="<pad>", special=True))
    added.append(dict(added[0], id=len(vocabulary) + 1, content="<tool>", special=False))
    spaces = dict(type="Replace", pattern=dict(String=" "), content="▁")
    steps = [
        dict(type="Replace", pattern=dict(String="▁"), content=" "),
        dict(type="ByteFallback"),
        dict(type="Fuse"),
        dict(type="Strip", content=" ", start=1, stop=0),
    ]
    token = dict(SpecialToken=dict(id="<s>", type_id=0))
    text = dict(Sequence=dict(id="A", type_id=0))
    tokenizer = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=added,
        normalizer=dict(type="Sequence", normalizers=[dict(type="Prepend", prepend="▁"), spaces]),
        pre_tokenizer=None,
        post_processor=dict(
            type="TemplateProcessing",
            single=[token, text],
            pair=[token, text, token, dict(Sequence=dict(id="B", type_id=1))],
            special_tokens={"<s>": dict(id="<s>", ids=[1], tokens=["<s>"])},
        ),
        decoder=dict(type="Sequence", decoders=steps),
        model=dict(
            type="BPE",
            dropout=None,
            unk_token="<unk>",
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=False,
            vocab=vocabulary,
            merges=merges,
        ),
    )
    (files / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )
    (files / "tokenizer_config.json").write_text(json.dumps(settings))
    (files / "chat_template.jinja").write_text("{{ messages }}\n")


TOKENIZERS = {"bytes": of_bytes, "pieces": of_pieces, "fallback": of_fallback}


def make(name: str, below: Path) -> Path:
    """The repository of this name, in a directory of its own."""
    of_config, more, dtype, tokenizer, arguments = REPOS[name]
    files = below / name
    files.mkdir(parents=True)
    config = getattr(transformers, of_config)(**TINY | dict(bos_token_id=1, eos_token_id=2, pad_token_id=None) | more)
    has_codes, dtype = dtype == "mxfp4", dtype.replace("mxfp4", "bfloat16")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.config.architectures = [type(model).__name__]
    if has_codes:
        model.config.quantization_config = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    model.config.save_pretrained(files)
    if name in CARDS:
        (files / "README.md").write_bytes(CARDS[name].encode())
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    tensors, generator = {}, np.random.Generator(np.random.PCG64(7))
    for key, shape in stored(config, shapes).items():
        if has_codes and key.endswith("_proj") and "experts" in key:
            experts, inner, outer = shape
            for end, extents in (("blocks", (experts, outer, inner // 32, 16)), ("scales", (experts, outer, inner // 32))):
                codes = generator.integers(0, 255, extents, dtype=np.uint8)
                tensors[f"{key}_{end}"] = torch.from_numpy(codes)
            continue
        values = generator.standard_normal(shape, dtype=np.float32) / 8
        # A row of zeros, and one of numbers that have no scale.
        if len(shape) == 2 and shape[0] > 1:
            values[0, :32], values[1, :32] = 0, values[1, :32] * np.float32(1e-38)
        tensors[key] = torch.from_numpy(values).to(getattr(torch, dtype))
    names = sorted(tensors)
    half = len(names) // 2 if name.startswith("Qwen") else len(names)
    parts = [names[:half], names[half:]] if half < len(names) else [names]
    weight_map = {}
    for at, part in enumerate(parts):
        file = "model.safetensors" if len(parts) == 1 else f"model-{at + 1:05}-of-{len(parts):05}.safetensors"
        save_file({key: tensors[key] for key in part}, files / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if len(parts) > 1:
        (files / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
    TOKENIZERS[tokenizer](files, **arguments)
    return files


def stored(config, shapes: dict) -> dict:
    """Shapes by the names that releases have: an expert's matrices each by itself."""
    found = {}
    for key, shape in shapes.items():
        if config.model_type != "gpt_oss" and key.endswith("experts.gate_up_proj"):
            for expert in range(shape[0]):
                for part in ("gate_proj", "up_proj"):
                    found[key.replace("gate_up_proj", f"{expert}.{part}.weight")] = (shape[1] // 2, shape[2])
        elif config.model_type != "gpt_oss" and key.endswith("experts.down_proj"):
            for expert in range(shape[0]):
                found[key.replace("down_proj", f"{expert}.down_proj.weight")] = shape[1:]
        else:
            found[key] = shape
    return found
