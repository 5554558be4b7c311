"""`--part`: one part of a model as a repository, with the state that its own class has in the whole model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import repos
import servers
from mounting import find_ckfs, run
from test_text_models import EYE, LLAMA4, LLAMA4_EYE, PIXTRAL, QWEN_EYE, TEXT, randomized

HERE = Path(__file__).parent
ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]})
QWEN25_EYE = QWEN_EYE | dict(fullatt_block_indexes=[0], window_size=28)
QWEN3_EYE = QWEN_EYE | dict(num_position_embeddings=16, deepstack_visual_indexes=[0])
SOUND = dict(
    d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
    decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=20, max_target_positions=20, vocab_size=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip


def seeing(family: str, text: dict, eye: dict, **more: object):
    config = getattr(transformers, family + "Config")(text_config=dict(text), vision_config=dict(eye), **more)
    return getattr(transformers, family + "ForConditionalGeneration")._from_config(config)


def t5gemma():
    side = TEXT | dict(num_hidden_layers=2)
    config = transformers.T5GemmaConfig(encoder=dict(side), decoder=dict(side), vocab_size=64)
    return transformers.T5GemmaForConditionalGeneration._from_config(config)


def hearing(family: str, **more: object):
    sound = {name: value for name, value in SOUND.items() if "decoder" not in name and not name.endswith("token_id")}
    return getattr(transformers, family + "ForConditionalGeneration")._from_config(
        getattr(transformers, family + "Config")(text_config=dict(TEXT), audio_config=sound | more)
    )


# The whole model, the part, its class, and where that is in the whole.
PARTS = {
    "gemma3": (lambda: seeing("Gemma3", TEXT, EYE, mm_tokens_per_image=4), "vision", "SiglipVisionModel", "model.vision_tower"),
    "mistral3": (lambda: seeing("Mistral3", TEXT | dict(model_type="mistral"), PIXTRAL), "vision", "PixtralVisionModel", "model.vision_tower"),
    "llama4": (lambda: seeing("Llama4", LLAMA4, LLAMA4_EYE), "vision", "Llama4VisionModel", "vision_model"),
    "qwen2.5-vl": (lambda: seeing("Qwen2_5_VL", TEXT | ROPE, QWEN25_EYE), "vision", "Qwen2_5_VisionTransformerPretrainedModel", "model.visual"),
    "qwen3-vl": (lambda: seeing("Qwen3VL", TEXT | ROPE, QWEN3_EYE), "vision", "Qwen3VLVisionModel", "model.visual"),
    "whisper": (lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SOUND)), "encoder", "WhisperEncoder", "model.encoder"),
    "qwen2-audio": (lambda: hearing("Qwen2Audio"), "audio", "Qwen2AudioEncoder", "model.audio_tower"),
    "voxtral": (lambda: hearing("Voxtral", hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2), "audio", "VoxtralEncoder", "model.audio_tower"),
    "t5gemma": (t5gemma, "encoder", "T5GemmaEncoderModel", "model"),
}  # fmt: skip


def class_of(name: str):
    """A class of transformers, exported or not."""
    if found := getattr(transformers, name, None):
        return found
    module = {"Qwen2_5_VisionTransformerPretrainedModel": "qwen2_5_vl", "Qwen3VLVisionModel": "qwen3_vl", "WhisperEncoder": "whisper"}[name]
    return getattr(__import__(f"transformers.models.{module}.modeling_{module}", fromlist=[name]), name)


def exported(source: Path | str, to: Path, part: str) -> Path:
    run("export", source, to, "--layout", "hf", "--part", part, "--only", "hf")
    return to / "hf"


def same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", PARTS)
def test_the_class_of_a_part_loads_its_state(name, tmp_path):
    make, part, class_name, place = PARTS[name]
    torch.manual_seed(1)
    model = randomized(make())
    model.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    path = exported(tmp_path / "whole", tmp_path / "part", part)
    loaded, report = class_of(class_name).from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    state = model.state_dict()
    own = {key.removeprefix(f"{place}."): tensor for key, tensor in state.items() if key.startswith(f"{place}.")}
    same_state(loaded.state_dict(), {key: own[key] for key in loaded.state_dict()})
    assert json.loads((path / "config.json").read_text())["architectures"] == [class_name]
    # The index names what is there, and nothing else.
    index = json.loads((path / "model.safetensors.index.json").read_text())
    stored = {key: file.name for file in path.glob("*.safetensors") for key in load_file(file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in path.glob("*.safetensors") for t in load_file(file).values())


def test_a_tower_of_unknown_type_is_no_model(tmp_path):
    """Its class depends on the type in the configuration: none is guessed."""
    randomized(PARTS["gemma3"][0]()).save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    del config["vision_config"]["model_type"]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    error = run("plan", tmp_path / "model", "--layout", "hf", "--part", "vision", expect=1).err
    assert "has no part vision that is a model by itself" in error


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "llama4"])
def test_the_text_part_is_the_class_of_text_alone(name, tmp_path):
    torch.manual_seed(1)
    model = randomized(PARTS[name][0]())
    model.save_pretrained(tmp_path / "whole")
    path = exported(tmp_path / "whole", tmp_path / "text", "text")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    inner = model.language_model.model if name == "llama4" else model.model.language_model
    same_state(loaded.model.state_dict(), inner.state_dict())


def test_layers_that_predict_keep_their_names_and_the_configuration(tmp_path):
    made = repos.deepseek_v3(tmp_path / "whole")
    declared = made.config["num_hidden_layers"] - 1
    more = {"num_hidden_layers": declared, "num_nextn_predict_layers": 1}
    made = repos.write(tmp_path / "v3", made.files, made.config | more)
    own = {name: tensor for name, tensor in made.tensors.items() if (m := re.match(r"model\.layers\.(\d+)\.", name)) and int(m[1]) >= declared}
    assert 0 < len(own) < len(made.tensors)
    path = exported(made.path, tmp_path / "mtp", "mtp")
    stored = {key: tensor for file in path.glob("*.safetensors") for key, tensor in load_file(file).items()}
    assert stored.keys() == own.keys()
    for name, tensor in own.items():
        assert stored[name].reshape(-1).view(torch.uint8).numpy().tobytes() == tensor.data, name
    assert json.loads((path / "config.json").read_text()) == made.config


def test_predictors_beside_the_layers(tmp_path):
    """As Qwen3-Next has them."""
    tensors = repos.llama_tensors("next")
    more = {name.replace("model.layers.0", "mtp.layers.0"): tensor for name, tensor in tensors.items() if "layers.0." in name}
    config = repos.base_config("qwen3_next", "Qwen3NextForCausalLM", 3)
    made = repos.write(tmp_path / "next", repos.split(tensors | more, 2), config)
    path = exported(made.path, tmp_path / "mtp", "mtp")
    assert {key for file in path.glob("*.safetensors") for key in load_file(file)} == more.keys()
    # What engines load of a draft model: its own layers, and what it shares with the model.
    path = exported(made.path, tmp_path / "draft", "draft")
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {key for file in path.glob("*.safetensors") for key in load_file(file)} == more.keys() | shared


def test_only_the_part_is_read(tmp_path):
    """The plan has the part's tensors, and those read no others."""
    torch.manual_seed(1)
    randomized(PARTS["gemma3"][0]()).save_pretrained(tmp_path / "whole")
    done = subprocess.run(
        [find_ckfs(), "plan", tmp_path / "whole", "--layout", "hf", "--part", "vision", "--json"], capture_output=True, text=True, check=True
    )
    path = exported(tmp_path / "whole", tmp_path / "part", "vision")
    stored = {name: tensor.nbytes for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    planned = {tensor["name"]: tensor["bytes"] for tensor in json.loads(done.stdout)["views"][0]["tensors"]}
    assert {name.removeprefix("model.").removeprefix("vision_tower.") for name in planned} == stored.keys()
    assert sum(planned.values()) == sum(stored.values())


SINCE_52 = {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.", "lm_head.": "language_model.lm_head."}
SINCE_52 |= {"model.multi_modal_projector.": "multi_modal_projector."}
QWEN = {"model.language_model.": "language_model.model.", "model.visual.": "visual.", "lm_head.": "language_model.lm_head."}
# `hf_to_vllm_mapper` of the classes of vLLM 0.33.
MAPPERS = {
    "gemma3": SINCE_52, "mistral3": SINCE_52 | {"model.": "language_model.model."}, "qwen2.5-vl": QWEN | {"model.": "language_model.model."},
    "qwen3-vl": QWEN, "qwen2-audio": {}, "llama4": {},
}  # fmt: skip


@pytest.mark.parametrize("name", MAPPERS)
def test_encoders_are_what_an_engine_reads_without_the_text_model(name, tmp_path):
    """The weights that vLLM's own loader keeps with --mm-encoder-only, of files with one tensor each."""
    torch.manual_seed(1)
    randomized(PARTS[name][0]()).save_pretrained(tmp_path / "whole", max_shard_size=1)
    (tmp_path / "whole/preprocessor_config.json").write_text("{}")
    command = [sys.executable, HERE / "engine_process.py", "vllm", "--encoders", tmp_path / "whole", json.dumps(MAPPERS[name])]
    files = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    wanted = {key: tensor for file in files for key, tensor in load_file(file).items()}
    path = exported(tmp_path / "whole", tmp_path / "part", "encoder")
    found = {key: tensor for file in path.glob("*.safetensors") for key, tensor in load_file(file).items()}
    same_state(found, wanted)
    assert 0 < len(files) < len([*(tmp_path / "whole").glob("*.safetensors")])
    assert json.loads((path / "config.json").read_text()) == json.loads((tmp_path / "whole/config.json").read_text())
    assert (path / "preprocessor_config.json").exists()


@pytest.mark.parametrize("part", ["vision", "encoder"])
def test_of_a_bucket_no_more_is_fetched_than_the_part(part, clean, tmp_path):
    torch.manual_seed(1)
    eye = EYE | dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    bucket = tmp_path / "root/bucket/model"
    seeing("Gemma3", TEXT | dict(vocab_size=20000, hidden_size=512), eye, mm_tokens_per_image=4).save_pretrained(bucket)
    stub = servers.Stub("store", tmp_path / "root")
    for name, value in servers.STUB_SETTINGS["s3"](stub.url).items():
        clean.setenv(name, value)
    path = exported("s3://bucket/model", tmp_path / "part", part)
    part = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    fetched = stub.stats()["object_bytes"]
    stub.close()
    assert 0.9 * part < fetched < 1.01 * part < 0.5 * sum(file.stat().st_size for file in bucket.iterdir())


def test_a_part_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    def refused(source: Path, part: str) -> str:
        done = subprocess.run([find_ckfs(), "plan", source, "--layout", "hf", "--part", part], capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr

    plain = repos.llama(tmp_path / "plain").path
    assert "llama has no part vision that is a model by itself: expected text" in refused(plain, "vision")
    torch.manual_seed(1)
    randomized(PARTS["gemma3"][0]()).save_pretrained(tmp_path / "gemma")
    assert "llama has no part encoder" in refused(plain, "encoder")
    for part in ("audio", "mtp"):
        assert f"gemma3 has no part {part} that is a model by itself: expected vision, encoder, text" in refused(tmp_path / "gemma", part)
    randomized(PARTS["qwen2.5-vl"][0]()).save_pretrained(tmp_path / "qwen")
    assert "no class of transformers is known that is the text model" in refused(tmp_path / "qwen", "text")
