"""Parts of a model, renamed tensors and adapters, read by transformers and peft."""

import json

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException


def tiny_llama(layers: int = 3, tied: bool = False) -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def assert_same(found: dict, expected: dict):
    assert set(found) == set(expected), f"missing {set(expected) - set(found)}, unexpected {set(found) - set(expected)}"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


ADAPTERS = {
    "list": (dict(target_modules=["q_proj", "v_proj"]), False),
    "regex": (dict(target_modules=r".*\.(1|2)\.mlp\.(up|down)_proj"), False),
    "all-linear": (dict(target_modules="all-linear"), False),
    "layers": (dict(target_modules=["k_proj"], layers_to_transform=[0, 2]), False),
    "saved": (dict(target_modules=["o_proj"], modules_to_save=["lm_head"]), False),
    "dora": (dict(target_modules=["gate_proj"], use_dora=True), False),
    "embedding": (dict(target_modules=["embed_tokens", "q_proj"]), False),
    "embedding, its base saved": (dict(target_modules=["embed_tokens", "q_proj"]), False),
    "head, its base saved": (dict(target_modules=["lm_head", "q_proj"]), False),
    "end of names": (dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm"]), False),
    "ranks": (dict(target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2}, use_rslora=True), False),
    "bias": (dict(target_modules=["q_proj"], lora_bias=True), False),
    "tied": (dict(target_modules=["q_proj"]), True),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_lora_has_the_names_of_a_peft_model(kind, own, tmp_path):
    options, tied = ADAPTERS[kind]
    tiny_llama(tied=tied).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_()
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers="base saved" in kind)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").state_dict()

    flags = ["--tied", "alias"] if tied else []
    mounted = own(tmp_path / "base", "--layout", "hf", "--lora", tmp_path / "adapter", *flags)
    assert_same(load_file(mounted / "safetensors/dev0.safetensors"), expected)


@pytest.mark.parametrize("layers, renumber, kept", [("0..2", False, [0, 1]), ("2..4", True, [2, 3])])
def test_fewer_layers_are_a_smaller_model(layers, renumber, kept, own, tmp_path):
    whole = tiny_llama(layers=4)
    whole.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    mounted = own(tmp_path / "base", "--layers", layers, *(["--renumber"] if renumber else []))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(mounted / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert loaded.config.num_hidden_layers == len(kept)
    whole.model.layers = torch.nn.ModuleList(whole.model.layers[layer] for layer in kept)
    assert_same(loaded.state_dict(), whole.state_dict())


def test_renames_reach_hf_and_its_index(own, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    mounted = own(tmp_path / "base", "--layout", "hf", "--strip-prefix", "model.", "--rename", r"layers\.(\d+)=>h.$1")
    expected = {
        name.removeprefix("model.").replace("layers.", "h."): tensor for name, tensor in model.state_dict().items()
    }
    assert_same(load_file(mounted / "safetensors/dev0.safetensors"), expected)
    index = json.loads((mounted / "hf/model.safetensors.index.json").read_text())["weight_map"]
    in_files = {name: load_file(mounted / "hf" / file)[name] for name, file in index.items()}
    assert_same(in_files, expected)


@pytest.mark.parametrize("devices", ["0-1", "2-3"])
def test_a_reader_of_the_whole_refuses_some_devices(devices, own, tmp_path):
    """The files of some devices would leave gaps in the whole tensors, so they are no checkpoint of the whole."""
    model = tiny_llama(layers=1)
    model.save_pretrained(tmp_path / "base")
    mounted = own(tmp_path / "base", "--layout", "hf", "--mesh", "fsdp=4", "--devices", devices)
    expected = model.state_dict()

    def load(reader):
        state = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state

    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(dcp.HuggingFaceStorageReader(str(mounted / "safetensors")))
    assert_same(load(dcp.FileSystemReader(mounted / "dcp")), expected)
    own_rows = load_file(mounted / f"safetensors/dev{devices[0]}.safetensors")["lm_head.weight"]
    assert torch.equal(own_rows, expected["lm_head.weight"].chunk(4)[int(devices[0])])
