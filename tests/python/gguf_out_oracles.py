"""What llama.cpp's converter writes of the repositories of gguf_out_repos.py, as digests; its names of pre-tokenizers.

    python tests/python/gguf_out_oracles.py LLAMA_CPP      LLAMA_CPP: a checkout; needs sentencepiece besides

writes gguf_out_oracles.json, which test_gguf_out.py compares with mounts, and checks src/plan/gguf/pre_tokenizers.toml.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tempfile
import tomllib
from pathlib import Path

import gguf_out_repos as repos

HERE = Path(__file__).resolve().parent
ORACLES = HERE / "gguf_out_oracles.json"
TABLE = HERE.parents[1] / "src/plan/gguf/pre_tokenizers.toml"
TYPES = ["f32", "f16", "bf16", "q8_0", "auto"]


def steps(tokenizer: dict) -> list[str]:
    """What the table has of a tokenizer.json."""
    found = []

    def add(step):
        step = step or {}
        if step.get("type") == "Sequence":
            for inner in step.get("normalizers", step.get("pretokenizers", [])):
                add(inner)
        elif step.get("type") == "Split":
            found.append(next(iter(step["pattern"].values())).replace("\r", r"\r").replace("\n", r"\n"))
        elif step.get("type") == "ByteLevel":
            found.extend(["ByteLevel"] if step.get("use_regex", True) else [])
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            found.append("each digit")
        elif step.get("type") not in (None, "NFC"):
            found.append(step["type"])

    add(tokenizer.get("normalizer"))
    add(tokenizer.get("pre_tokenizer"))
    return found


def name_of(files: Path) -> str:
    """The table's name of a repository's pre-tokenizer."""
    found = steps(json.loads((files / "tokenizer.json").read_text()))
    model_type = json.loads((files / "config.json").read_text())["model_type"]
    rows = tomllib.loads(TABLE.read_text())["pre"]
    return next(
        row["name"] for row in rows if row["steps"] == found and model_type in row.get("model_types", [model_type])
    )


def convert(files: Path, of: str, out: Path) -> None:
    """Runs the converter. Its own table has no small tokenizers: the name comes from the table here."""
    converter = importlib.import_module("convert_hf_to_gguf")
    base = importlib.import_module("conversion.base")
    before, base.TextModel.get_vocab_base_pre = (
        base.TextModel.get_vocab_base_pre,
        lambda self, tokenizer: name_of(files),
    )
    sys.argv = ["convert", str(files), "--outtype", of, "--outfile", str(out)]
    try:
        converter.main()
    finally:
        base.TextModel.get_vocab_base_pre = before


def digests(path: Path) -> dict:
    """Of a file: its length, its digest, that of all before the first tensor, and of each tensor."""
    import gguf

    data, reader = path.read_bytes(), gguf.GGUFReader(path)
    digest = lambda part: hashlib.sha256(part).hexdigest()[:16]  # noqa: E731
    return dict(
        bytes=len(data),
        file=digest(data),
        header=digest(data[: reader.data_offset]),
        keys=[key for key in reader.fields if not key.startswith("GGUF.")],
        tensors={
            tensor.name: f"{tensor.tensor_type.name} {tensor.shape[::-1].tolist()} {digest(tensor.data.tobytes())}"
            for tensor in reader.tensors
        },
    )


# Vocabularies that a checkout has, and the steps of their releases before merging. Those of DeepSeek are in its sources.
VOCABULARIES = {
    "gpt-2": dict(),
    "llama-bpe": dict(split=repos.LLAMA3_SPLIT, bos=True),
    "qwen2": dict(split=repos.QWEN2_SPLIT, nfc=True),
    "deepseek-llm": dict(split="DEEPSEEK_LLM", digits=True, bos=True),
    "deepseek-coder": dict(split="DEEPSEEK_CODER", digits=True, bos=True),
}


def splits_of(checkout: Path, word: str) -> list[str]:
    """The patterns that llama.cpp has for a pre-tokenizer, but for that of digits."""
    source = (checkout / "src/llama-vocab.cpp").read_text()
    part = source[source.index(f"case LLAMA_VOCAB_PRE_TYPE_{word}:") :]
    lines = [line.strip().rstrip(",") for line in part[: part.index("break;")].splitlines()]
    patterns = [json.loads(line) for line in lines if line.startswith('"')]
    return [pattern for pattern in patterns if pattern.strip("+") != r"\p{N}"]


def real_name(checkout: Path, vocabulary: str) -> tuple[str, list[str]]:
    """The converter's name of a tokenizer with the vocabulary of a model's release, and its steps."""
    import gguf
    from transformers import PreTrainedTokenizerFast

    reader = gguf.GGUFReader(checkout / f"models/ggml-vocab-{vocabulary}.gguf")
    texts = lambda key: [bytes(reader.fields[key].parts[at]).decode() for at in reader.fields[key].data]  # noqa: E731
    tokens, merges = texts("tokenizer.ggml.tokens"), texts("tokenizer.ggml.merges")
    kinds = [
        int(reader.fields["tokenizer.ggml.token_type"].parts[at][0])
        for at in reader.fields["tokenizer.ggml.token_type"].data
    ]
    with tempfile.TemporaryDirectory() as below:
        files = Path(below)
        arguments = dict(VOCABULARIES[vocabulary])
        if arguments.get("split", "").isupper():
            arguments["split"] = splits_of(checkout, arguments["split"])
        repos.of_bytes(files, **arguments)
        tokenizer = json.loads((files / "tokenizer.json").read_text())
        tokenizer["added_tokens"] = [
            dict(tokenizer["added_tokens"][0], id=at, content=text)
            for at, text in enumerate(tokens)
            if kinds[at] != 1 and kinds[at] != 5
        ]
        tokenizer["model"] |= dict(
            vocab={text: at for at, text in enumerate(tokens) if kinds[at] == 1},
            ignore_merges=vocabulary == "llama-bpe",
            merges=[merge.split(" ") for merge in merges],
        )
        if "bos" in arguments:
            [number] = reader.fields["tokenizer.ggml.bos_token_id"].parts[-1].tolist()
            text, first = dict(Sequence=dict(id="A", type_id=0)), dict(SpecialToken=dict(id=tokens[number], type_id=0))
            tokenizer["post_processor"] = dict(
                type="TemplateProcessing",
                single=[first, text],
                pair=[first, text],
                special_tokens={tokens[number]: dict(id=tokens[number], ids=[number], tokens=[tokens[number]])},
            )
        (files / "tokenizer.json").write_text(json.dumps(tokenizer))
        base = importlib.import_module("conversion.base")
        loaded = PreTrainedTokenizerFast(tokenizer_file=str(files / "tokenizer.json"))
        return base.TextModel.get_vocab_base_pre(None, loaded), steps(tokenizer)


def main() -> None:
    checkout = Path(sys.argv[1])
    sys.path[:0] = [str(checkout), str(checkout / "gguf-py")]
    found = {}
    with tempfile.TemporaryDirectory() as below:
        for name in repos.REPOS:
            files = repos.make(name, Path(below))
            found[name] = {}
            for of in TYPES:
                out = Path(below) / "out.gguf"
                convert(files, of, out)
                found[name][of] = digests(out)
    ORACLES.write_text(json.dumps(found, indent=0) + "\n")
    rows = {(row["name"], *row["steps"]) for row in tomllib.loads(TABLE.read_text())["pre"]}
    for vocabulary in VOCABULARIES if len(sys.argv) < 3 else ():
        name, found = real_name(checkout, vocabulary)
        print(vocabulary, "is", name)
        assert (name, *found) in rows, (name, found)


if __name__ == "__main__":
    main()
