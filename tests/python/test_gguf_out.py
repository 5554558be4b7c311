"""gguf/model.gguf: byte for byte what llama.cpp's converter writes of the same repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest

import mounting

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
import gguf_out_oracles as oracles  # noqa: E402
import gguf_out_repos as repos  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

VIEWS = "".join(
    f'[view.{of}]\nlayout = "gguf"\n' + (f'gguf_type = "{of}"\n' if of != "auto" else "") for of in oracles.TYPES
)


@pytest.mark.parametrize("name", repos.REPOS)
def test_files_are_those_of_the_converter(name, own, tmp_path):
    expected = json.loads(oracles.ORACLES.read_text())[name]
    (tmp_path / "views.toml").write_text(VIEWS)
    mounted = own(repos.make(name, tmp_path), "--config", tmp_path / "views.toml")
    for of in oracles.TYPES:
        found = oracles.digests(mounted / of / "gguf/model.gguf")
        assert found["keys"] == expected[of]["keys"], of
        assert found["tensors"] == expected[of]["tensors"], of
        assert found == expected[of], of


CARDS = {
    "none": "# A model",
    "empty": "---\n---\n",
    "lists": "---\nlicense: [mit, \"apache-2.0\"]\ntags:\n- a\n- 'b c'\nlanguage:\n- no\n- zh\npipeline_tag: x # y\n---\n",
    "origins": "---\nbase_model: org/M-7B-v1.2\ndatasets:\n- https://huggingface.co/a/b-c\n- https://x.org/y\n- plain\n---",
    "names": "---\r\nname: A Model\r\nmodel_creator: You\r\nmodel_type: foo\r\nbase_model:\r\nversion: v1\r\nsize_label: 3Q\r\n---",
    "twice": "---\nlicense: mit\nlicense: gpl\nname: null\nmodel_name: x\n---",
    "passed over": "---\nprompt: |-\n  license: \"x\n\nmodel-index:\n- name: x\n  results: [{a: 1}]\nlicense: 0bsd\n---",
}


def written(files: Path) -> dict:
    """The keys of the file of a repository, which is beside it then."""
    path = files.with_suffix(".gguf")
    with path.open("wb") as out:
        command = [mounting.find_ckfs(), "-q", "cat", files, "gguf/model.gguf", "--layout", "gguf"]
        subprocess.run(command, stdout=out, check=True)
    return gguf.GGUFReader(path).fields


def general_keys(path: Path) -> list:
    fields = gguf.GGUFReader(path).fields
    of_model = ("architecture", "file_type", "quantization_version")
    keys = [key for key in fields if key.startswith("general.") and key.split(".")[1] not in of_model]
    return [(key, fields[key].types, fields[key].contents()) for key in keys]


def test_keys_of_a_model_card_are_those_of_the_package(tmp_path):
    files = repos.make("Qwen3-8B", tmp_path)
    (files / "generation_config.json").unlink()
    ours, theirs = files.with_suffix(".gguf"), tmp_path / "theirs.gguf"
    for name, card in CARDS.items():
        (files / "README.md").write_bytes(card.encode())
        written(files)
        count = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(ours).tensors)
        metadata, writer = gguf.Metadata.load(None, files, None, count), gguf.GGUFWriter(theirs, "qwen3")
        metadata.size_label = metadata.size_label or gguf.size_label(count, count, 0, 0)
        writer.add_type("model")
        metadata.set_gguf_meta_model(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert general_keys(ours) == general_keys(theirs), name
    for card in (
        "version: 1.0", "license: mit\n gpl", "license: &a mit", "x: \"a\nlicense: mit\"", "tags:\n- a: b", "license: >\n  mit",
        "tags:\n- 2024-01-01", "license: a\u2028b", "name: [a]", "x", "- a", "language: no", "tags: [a, [b]]",
    ):
        (files / "README.md").write_text(f"---\n{card}\n---\n")
        refused = mounting.run("plan", files, "--layout", "gguf", expect=1).err
        assert "README.md: " in refused and "--set card=none" in refused, card
        mounting.run("plan", files, "--layout", "gguf", "--set", "card=none")


def test_each_pre_tokenizer_of_the_table_has_its_name(tmp_path):
    files = repos.make("Qwen3-8B", tmp_path)
    tokenizer = json.loads((files / "tokenizer.json").read_text())
    settings = json.loads((files / "tokenizer_config.json").read_text())
    others = {"ByteLevel": dict(type="ByteLevel"), "each digit": dict(type="Digits", individual_digits=True)}
    for row in tomllib.loads(oracles.TABLE.read_text())["pre"]:
        split = lambda pattern: dict(type="Split", pattern=dict(Regex=pattern))  # noqa: E731
        steps = [others.get(step) or split(step) for step in row["steps"]] + [dict(type="ByteLevel", use_regex=False)]
        tokenizer["pre_tokenizer"] = dict(type="Sequence", pretokenizers=steps)
        (files / "tokenizer.json").write_text(json.dumps(tokenizer))
        (files / "tokenizer_config.json").write_text(json.dumps(settings | dict(add_bos_token=row.get("adds_bos", True))))
        if "model_types" not in row:
            assert written(files)["tokenizer.ggml.pre"].contents() == row["name"]


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


@pytest.mark.parametrize("of", ["q8_0", "bf16", "f16"])
def test_values_are_those_of_the_package(of, own, tmp_path):
    """Rotated rows, stacked experts and norms, by a formula written apart, in the type of the gguf package."""
    for name, rows in {
        "Mistral-7B-v0.1": {
            "blk.1.attn_q.weight": ("model.layers.1.self_attn.q_proj.weight", lambda value: permuted(value, 4)),
            "blk.0.attn_k.weight": ("model.layers.0.self_attn.k_proj.weight", lambda value: permuted(value, 2)),
            "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj.weight", lambda value: value),
            "blk.1.ffn_norm.weight": ("model.layers.1.post_attention_layernorm.weight", lambda value: value),
        },
        "gemma-2-2b-it": {
            "blk.1.ffn_norm.weight": (
                "model.layers.1.pre_feedforward_layernorm.weight",
                lambda value: value.astype(np.float16) + np.float16(1),
            )
        },
        "Qwen3-30B-A3B": {
            "blk.1.ffn_up_exps.weight": (
                [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(4)],
                lambda value: value,
            ),
            "blk.1.ffn_gate_inp.weight": ("model.layers.1.mlp.gate.weight", lambda value: value),
        },
    }.items():
        files = repos.make(name, tmp_path)
        stored = {
            key: value.float().numpy() for path in files.glob("*.safetensors") for key, value in load_file(path).items()
        }
        mounted = own(files, "--layout", "gguf", "--gguf-type", of)
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(mounted / "gguf/model.gguf").tensors}
        for key, (names, change) in rows.items():
            value = np.stack([stored[one] for one in names]) if isinstance(names, list) else stored[names]
            value = np.ascontiguousarray(change(value)).astype(np.float32)
            is_plain = value.ndim == 1 or "gate_inp" in key
            # 24 columns for each of 4 heads are three blocks, 48 are none.
            kind = Kind.F32 if is_plain else Kind.F16 if of == "q8_0" and value.shape[-1] % 32 else Kind[of.upper()]
            with np.errstate(all="ignore"):
                blocks = gguf.quantize(value, kind)
            assert found[key].tensor_type == kind, key
            assert found[key].data.tobytes() == blocks.tobytes(), key
            assert (mounted / "full" / key).read_bytes() == blocks.tobytes(), key
        mounting.run("verify", mounted.point)


def test_a_file_of_a_file_is_the_same(own, tmp_path):
    """What is written is read: the model of the mount's file, written again with the same tokenizer, is the file."""
    files = repos.make("Llama-3.2-1B-Instruct", tmp_path)
    first = own(files, "--layout", "gguf", "--gguf-type", "f32")
    whole = (first / "gguf/model.gguf").read_bytes()
    (tmp_path / "again").mkdir()
    (tmp_path / "again/Llama-3.2-1B-Instruct.gguf").write_bytes(whole)
    again = own(
        tmp_path / "again/Llama-3.2-1B-Instruct.gguf", "--config-from", files, "--layout", "gguf", "--gguf-type", "f32"
    )
    assert (again / "gguf/model.gguf").read_bytes() == whole


def test_a_read_touches_what_it_needs(own, tmp_path, monkeypatch):
    """Header and a tensor at the end: neither the embedding nor the output head before it, of 32 MB each, is read."""
    monkeypatch.setitem(repos.TINY, "vocab_size", 250_000)
    files = repos.make("Mistral-7B-v0.1", tmp_path)
    mounted = own(files, "--layout", "gguf", "--gguf-type", "q8_0", "--materialize", "none")
    with open(mounted / "gguf/model.gguf", "rb") as model:
        assert model.read(4) == b"GGUF"
        model.seek(-20_000, 2)
        model.read()
    fetched = mounted.stats_of_reads()["bytes_fetched"]
    # What the kernel reads ahead depends on how fast it is answered.
    assert 10_000 < sum(fetched.values()) < 24_000_000, fetched


def test_what_has_no_file_is_refused_by_name(fresh, tmp_path):
    files = repos.make("Qwen2.5-0.5B-Instruct", tmp_path)

    def refused(*more: object) -> str:
        return mounting.run("plan", files, "--layout", "gguf", *more, expect=1).err

    assert "expected --gguf-type" in refused("--dtype", "f16")
    assert "llama.cpp's" in refused("--add-prefix", "x.")
    assert "found q4_k" in mounting.run(
        "plan", files, "--layout", "gguf", "--gguf-type", "q4_k", expect=None
    ).err.replace('"', "")
    assert "the only parameters are pre=NAME and card=none" in refused("--set", "scan=true")
    assert "a pattern leaves out a part" in refused("--exclude", "*.bias")
    assert "no --include or --exclude" in refused("--exclude", "blk.*.attn_q.bias")
    assert "the first is 1" in refused("--layers", "1..2")
    mounting.run("plan", files, "--layout", "gguf")
    tokenizer = json.loads((files / "tokenizer.json").read_text())
    split = tokenizer["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"]["Regex"] = r"\w+"
    (files / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "--set pre=NAME" in refused()
    mounting.run("plan", files, "--layout", "gguf", "--set", "pre=qwen2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (files / name).rename(tmp_path / name)
    assert "expected tokenizer.model or tokenizer.json" in refused()
    (files / "tokenizer.model").write_bytes(b"\x0a\xff")
    assert "expected a model of SentencePiece" in refused()
    (files / "tokenizer.model").unlink()
    config = json.loads((files / "config.json").read_text())
    (files / "config.json").write_text(json.dumps(config | dict(architectures=["Qwen2ForSequenceClassification"])))
    found = refused()
    assert "Qwen2ForSequenceClassification" in found and "LlamaForCausalLM" in found


def test_a_tensor_that_is_missing_is_refused(fresh, tmp_path):
    """llama.cpp takes an absent bias for none."""
    files = repos.make("Qwen2.5-0.5B-Instruct", tmp_path)
    index = json.loads((files / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.q_proj.bias"
    file = files / index["weight_map"].pop(name)
    (files / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    assert f"missing tensor {name}" in mounting.run("plan", files, "--layout", "gguf", expect=1).err
    assert "1 tensor" in mounting.run("plan", files, "--layout", "gguf", "--allow-missing").out


def test_a_number_without_a_code_is_an_error_of_its_tensor(own, tmp_path):
    files = repos.make("Mistral-7B-v0.1", tmp_path)
    tensors = load_file(files / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    shutil.copy(files / "model.safetensors", tmp_path / "before")
    save_file(tensors, files / "model.safetensors", metadata={"format": "pt"})
    mounted = own(files, "--layout", "gguf", "--gguf-type", "q8_0")
    with pytest.raises(OSError):
        (mounted / "full/blk.0.ffn_up.weight").read_bytes()
    (mounted / "full/blk.0.ffn_gate.weight").read_bytes()
    whole = Path(mounted / "gguf/model.gguf")
    with pytest.raises(OSError):
        whole.read_bytes()
