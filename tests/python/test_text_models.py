"""`--text-only`: the text part of a model that also sees is a model by itself, which transformers loads and computes alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mounting

TEXT = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EYE = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14, head_dim=8
)
LINEAR = TEXT | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
MOE = LINEAR | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
QWEN_EYE = dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=32, patch_size=14)
LLAMA4 = TEXT | dict(intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1, interleave_moe_layer_step=2)
LLAMA4_EYE = EYE | dict(vision_output_dim=16, projector_input_dim=16, projector_output_dim=16, pixel_shuffle_ratio=0.5)
CLIP, PIXTRAL = EYE | dict(model_type="clip_vision_model"), EYE | dict(model_type="pixtral")
PER_LAYER = TEXT | dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8)
SHARED = PER_LAYER | dict(num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2)

# Class of the whole model, configurations of the text model and of the other parts, class of the text model.
MODELS = {
    "gemma3": ("Gemma3", TEXT, EYE, dict(mm_tokens_per_image=4), "Gemma3ForCausalLM"),
    "gemma3-untied": ("Gemma3", TEXT, EYE, dict(mm_tokens_per_image=4, tie_word_embeddings=False), "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4", PER_LAYER | dict(num_kv_shared_layers=0), EYE, dict(audio_config=None), "Gemma4ForCausalLM"),
    "gemma4-shared": ("Gemma4", SHARED, EYE, dict(audio_config=None), "Gemma4ForCausalLM"),
    "gemma4-unified": ("Gemma4Unified", TEXT, {}, {}, "Gemma4UnifiedForCausalLM"),
    "llama4": ("Llama4", LLAMA4, LLAMA4_EYE, {}, "Llama4ForCausalLM"),
    "llava-llama": ("Llava", TEXT | dict(model_type="llama"), CLIP, {}, "LlamaForCausalLM"),
    "llava-mistral": ("Llava", TEXT | dict(model_type="mistral"), CLIP, {}, "MistralForCausalLM"),
    "llava-qwen2": ("Llava", TEXT | dict(model_type="qwen2"), CLIP, {}, "Qwen2ForCausalLM"),
    "mistral3": ("Mistral3", TEXT | dict(model_type="mistral"), PIXTRAL, {}, "MistralForCausalLM"),
    "ministral3": ("Mistral3", TEXT | dict(model_type="ministral3"), PIXTRAL, {}, "Ministral3ForCausalLM"),
    "qwen3.5": ("Qwen3_5", LINEAR, QWEN_EYE, {}, "Qwen3_5ForCausalLM"),
    "qwen3.5-moe": ("Qwen3_5Moe", MOE, QWEN_EYE, {}, "Qwen3_5MoeForCausalLM"),
}


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def whole(name: str, path: Path, **more: object) -> torch.nn.Module:
    """Saves a tiny model, in several files, with files of a processor and of a tokenizer."""
    family, text, eye, rest, _ = MODELS[name]
    torch.manual_seed(1)
    parts = dict(vision_config=dict(eye)) if eye else {}
    config = getattr(transformers, family + "Config")(text_config=dict(text), **parts, **rest)
    model = randomized(getattr(transformers, family + "ForConditionalGeneration")._from_config(config, attn_implementation="eager"))
    model.save_pretrained(path, **more)
    for file in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / file).write_text("{}")
    return model


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 21).reshape(2, 9)).logits.float().numpy()


def text_model(path: Path) -> torch.nn.Module:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values()), report
    return model


def exported(source: Path, to: Path, *flags: object) -> Path:
    mounting.run("export", source, to, "--text-only", "--only", "hf", *flags)
    return to / "hf"


@pytest.mark.parametrize("name", MODELS)
def test_the_text_part_computes_what_the_whole_does(name, tmp_path):
    model = whole(name, tmp_path / "whole", max_shard_size="40KB")
    path = exported(tmp_path / "whole", tmp_path / "text")
    text = text_model(path)
    assert type(text).__name__ == MODELS[name][4]
    # The whole Llama 4 of transformers 5.24 fails after its text model has computed the logits: it asks them for images.
    np.testing.assert_array_equal(logits(text), logits(model.language_model if name == "llama4" else model))
    # The names are those that the class itself saves.
    text.save_pretrained(tmp_path / "saved", max_shard_size="1GB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load_file(tmp_path / "saved/model.safetensors"))
    files = {file.name for file in path.iterdir()}
    assert not any("processor" in file for file in files) and {"tokenizer_config.json", "chat_template.jinja"} <= files


def test_gemma3n_without_its_towers(tmp_path):
    """The whole model needs a library for its eyes, so the repository is made from the text model."""
    more = dict(
        altup_num_inputs=2, laurel_rank=4, num_kv_shared_layers=1, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(1)
    config = transformers.Gemma3nTextConfig(**PER_LAYER, **more)
    model = randomized(transformers.Gemma3nForCausalLM._from_config(config, attn_implementation="eager"))
    model.save_pretrained(tmp_path / "alone")
    tensors = load_file(tmp_path / "alone/model.safetensors")
    names = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {f"model.{part}.a.weight": torch.zeros(4) for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")}
    (tmp_path / "whole").mkdir()
    save_file(names | others, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": config.to_dict()}
    (tmp_path / "whole/config.json").write_text(json.dumps(config | {"vision_config": {}, "audio_config": {}}))
    text = text_model(exported(tmp_path / "whole", tmp_path / "text"))
    np.testing.assert_array_equal(logits(text), logits(model))


def quantized(name: str, path: Path) -> None:
    """A repository with its projections in blocks of float8, as DeepSeek's."""
    whole(name, path)
    tensors, block = load_file(path / "model.safetensors"), 16
    for name in [name for name in tensors if name.startswith("language_model") and name.endswith("proj.weight")]:
        weight = tensors[name]
        rows, columns = (-(-extent // block) for extent in weight.shape)
        scale = torch.rand(rows, columns) * 0.01
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scale
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block], "fmt": "e4m3"}
    (path / "config.json").write_text(json.dumps(config))


def test_a_decoded_text_part_computes_what_the_decoded_whole_does(tmp_path):
    quantized("llava-llama", tmp_path / "whole")
    mounting.run("export", tmp_path / "whole", tmp_path / "decoded", "--only", "hf", "--dequantize=f32")
    load = transformers.AutoModelForImageTextToText.from_pretrained
    model = load(tmp_path / "decoded/hf", dtype=torch.float32, attn_implementation="eager")
    path = exported(tmp_path / "whole", tmp_path / "text", "--dequantize=f32")
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    np.testing.assert_array_equal(logits(text_model(path)), logits(model))
    # Codes without their description are no model.
    found = mounting.run("plan", tmp_path / "whole", "--text-only")
    assert "hf/ is left out: quantization_config in config.json names modules of the whole model" in found.out + found.err


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5-moe"])
def test_the_text_part_of_an_orbax_checkpoint_with_the_repositorys_names(name, tmp_path):
    model = whole(name, tmp_path / "whole")
    mounting.run("export", tmp_path / "whole", tmp_path / "orbax", "--layout", "hf", "--only", "orbax")
    (tmp_path / "companion").mkdir()
    for file in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "whole" / file, tmp_path / "companion")
    path = exported(tmp_path / "orbax/orbax", tmp_path / "text", "--layout", "hf", "--config-from", tmp_path / "companion")
    np.testing.assert_array_equal(logits(text_model(path)), logits(model))
    assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors", "tokenizer_config.json"}


def test_the_text_part_of_maxtexts_checkpoint(tmp_path):
    """Of a checkpoint with the tower, and of one that a repository with the tower fills."""
    fixture = Path(__file__).resolve().parents[1] / "fixtures/maxtext/gemma3/hf"
    mounting.run("export", fixture, tmp_path / "maxtext", "--layout", "maxtext-unscanned", "--only", "orbax")
    expected = text_model(exported(fixture, tmp_path / "text"))
    for number, more in enumerate([[], ["--fill-from", fixture]]):
        flags = ["--layout", "hf", "--config-from", fixture, *more]
        found = text_model(exported(tmp_path / "maxtext/orbax", tmp_path / f"back{number}", *flags))
        assert type(found).__name__ == "Gemma3ForCausalLM"
        # MaxText's checkpoint has rounded products of norms.
        near = 0.05 * np.abs(logits(expected)).max()
        np.testing.assert_allclose(logits(found), logits(expected), atol=near)
