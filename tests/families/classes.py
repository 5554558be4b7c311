"""All model classes of the pinned transformers, each built on the meta device: names, shapes and attributes, no weights.

`walk()` yields one `Built` for each class that has a configuration of its own and can be built. The scripts beside this one
derive data about families from it. A default configuration has up to a hundred layers, and the names of the first and last
few say all: `tiny` cuts the counts of layers, with the lists that have one entry for each layer, where the class accepts that.

    python tests/families/classes.py            what is built, and why the rest is not
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
warnings.filterwarnings("ignore")

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

transformers.logging.set_verbosity_error()

INDEXED = {
    "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "ple_layer_ids": [1], "eos_token_id": 2,
}  # fmt: skip
# Members that a class needs and that its configuration leaves empty.
NEEDED = {
    "autoformer": {"prediction_length": 8},
    "chameleon": {"vocabulary_map": {"<image>": 1}},
    "emu3": {"vocabulary_map": {"<image>": 1}},
    "ministral": {"head_dim": 64},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "hunyuan_vl_text": {"head_dim": 64},
    "hunyuan_vl": {"text_config": {"head_dim": 64}},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "esm": {"vocab_size": 33},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 31},
    "qwen4_exp_text": INDEXED,
    "qwen4_exp": {"text_config": INDEXED},
    "wav2vec2-bert": {"vocab_size": 33},
    "wav2vec2-conformer": {"vocab_size": 33},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
}
# A backbone of this library in the place of one of timm's.
RESNET = {"use_timm_backbone": False, "backbone": None, "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}}
STAGES = ["stem", "stage1", "stage2", "stage3", "stage4"]
ALL_STAGES = RESNET | {"backbone_config": {"model_type": "resnet", "out_features": STAGES}}
# The same for single classes, beside what their model types need.
NEEDED |= {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}},
    "BeitForSemanticSegmentation": {"out_indices": [3, 5, 7, 11]},
    "bridgetower": {"contrastive_hidden_size": 512, "logit_scale_init_value": 2.6592},
    "conditional_detr": RESNET,
    "dab-detr": RESNET,
    "deformable_detr": RESNET | {"backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]}},
    "detr": RESNET,
    "DetrForSegmentation": ALL_STAGES,
    "ConditionalDetrForSegmentation": ALL_STAGES,
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "table-transformer": RESNET,
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "qwen3_omni_moe": {"talker_config": {"text_config": {"shared_expert_intermediate_size": 64}}},
    "seamless_m4t_v2": {
        "variance_predictor_embed_dim": 1024, "variance_predictor_hidden_dim": 256, "variance_predictor_kernel_size": 3,
        "variance_pred_dropout": 0.5,
    },
    "vilt": {"num_images": 2, "modality_type_vocab_size": 3},
    "HieraForPreTraining": {"decoder_hidden_size": 512, "decoder_depth": 2, "decoder_num_heads": 16},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "PerceiverForMultimodalAutoencoding": {"num_cross_attention_heads": 1},
    "PerceiverForOpticalFlow": {"num_cross_attention_heads": 1},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 40},
    "cohere_compass": {"text_config": {"layer_types": ["full_attention"] * 40}},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_text": {"dropout_rate": 0.0},
}
# The classes that load a model type.
AUTO_NAMES = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
)
# Layers that a tiny configuration keeps: a first dense one, and each kind of a usual cycle of kinds.
LAYERS = 4
# Members of configurations that count layers, blocks or experts' layers of a tower.
COUNTS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "num_blocks", "encoder_num_hidden_layers", "decoder_num_hidden_layers",
)  # fmt: skip


@dataclass
class Built:
    """One class, and the model that it builds from its default configuration."""

    model_type: str
    cls: type[PreTrainedModel]
    config: PreTrainedConfig
    model: PreTrainedModel
    # Why the configuration is not cut, if it is not.
    uncut: str = ""


@dataclass
class Failed:
    """A class that was not built."""

    model_type: str
    cls: type[PreTrainedModel]
    reason: str
    trace: str = field(default="", repr=False)


@functools.cache
def configurations() -> dict[str, type[PreTrainedConfig]]:
    """The configuration classes by model type: those that `config.json` may name, at its top or in a member."""
    found = {}
    for model_type in CONFIG_MAPPING.keys():
        try:
            found[model_type] = CONFIG_MAPPING[model_type]
        except (ImportError, AttributeError, KeyError) as error:
            print(f"{model_type}: no configuration class: {error}", file=sys.stderr)
    return found


def lines_of(items: list[str]) -> list[str]:
    """Items of a TOML list, in lines of 128 characters."""
    lines, current = [], " "
    for item in items:
        if len(current) + len(item) + 2 > 128:
            lines.append(current)
            current = " "
        current += f" {item},"
    return [*lines, current]


def model_classes(model_type: str, config: type[PreTrainedConfig]) -> list[type[PreTrainedModel]]:
    """The classes of the module of a model type whose configuration is `config`."""
    package = config.__module__.rsplit(".", 1)[0]
    name = package.rsplit(".", 1)[1]
    module = model_type_to_module_name(model_type)
    candidates = [config.__module__.replace(".configuration_", ".modeling_"), f"{package}.modeling_{name}"]
    candidates.append(f"transformers.models.{module}.modeling_{module}")
    classes = []
    for module_name in dict.fromkeys(candidates):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith("transformers"):
                print(f"{model_type}: {module_name} needs {error.name}", file=sys.stderr)
            continue
        for _, cls in inspect.getmembers(module, inspect.isclass):
            is_here = cls.__module__ == module_name and issubclass(cls, PreTrainedModel)
            if is_here and getattr(cls, "config_class", None) is config and cls not in classes:
                classes.append(cls)
    return classes or classes_of_another(model_type)


def classes_of_another(model_type: str) -> list[type[PreTrainedModel]]:
    """The classes that load a model type whose code is another type's."""
    names = [mapping.get(model_type) for mapping in AUTO_NAMES]
    classes = [getattr(transformers, name, None) for name in dict.fromkeys(names) if isinstance(name, str)]
    return [cls for cls in classes if inspect.isclass(cls) and issubclass(cls, PreTrainedModel)]


def members(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and those nested in it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from members(value)


def kept_layers(part: PreTrainedConfig, count: int) -> list[int]:
    """The first few layers; the last of them give way to layers of kinds that are not among them."""
    kept = list(range(LAYERS))
    for value in vars(part).values():
        if isinstance(value, (list, tuple)) and len(value) == count and all(isinstance(kind, str) for kind in value):
            missing = [kind for kind in dict.fromkeys(value) if kind not in {value[at] for at in kept}]
            for place, kind in enumerate(missing[: LAYERS - 1]):
                kept[-1 - place] = list(value).index(kind)
    return sorted(kept)


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with at most `LAYERS` layers in each tower."""
    config = copy.deepcopy(config)
    for part in members(config):
        for name in COUNTS:
            count = vars(part).get(name)
            if not isinstance(count, int) or isinstance(count, bool) or count <= LAYERS:
                continue
            kept = kept_layers(part, count)
            for key, value in list(vars(part).items()):
                if isinstance(value, (list, tuple)) and len(value) == count:
                    setattr(part, key, type(value)(value[at] for at in kept))
                elif isinstance(value, dict) and value and all(str(layer).isdigit() for layer in value):
                    own = {str(layer): more for layer, more in value.items()}
                    kind = type(next(iter(value)))
                    setattr(part, key, {kind(place): own[str(at)] for place, at in enumerate(kept) if str(at) in own})
            setattr(part, name, LAYERS)
    return config


def build(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device, made as `from_pretrained` makes it for this dtype."""
    before = torch.get_default_dtype()
    for part in members(config):
        part.dtype = dtype
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), init.meta_device_safe_creation_ops(), init.no_init_weights():
            return cls(config)
    finally:
        torch.set_default_dtype(before)


def is_abstract(cls: type[PreTrainedModel]) -> bool:
    """Whether a class is only a base of others."""
    own = [base for base in cls.__mro__ if base not in (torch.nn.Module, PreTrainedModel)]
    return cls.__name__.endswith("PreTrainedModel") or not any("forward" in vars(base) for base in own)


def build_class(
    model_type: str, cls: type[PreTrainedModel], config: type[PreTrainedConfig], dtype: torch.dtype
) -> Built | Failed:
    """One class from its default configuration, cut where the class accepts that."""
    reasons = []
    for cut in (True, False):
        try:
            default = config(**copy.deepcopy(NEEDED.get(model_type, {}) | NEEDED.get(cls.__name__, {})))
            used = tiny(default) if cut else default
            # A class may build what its configuration refuses when it is read from a file.
            getattr(used, "validate", lambda: None)()
            return Built(model_type, cls, used, build(cls, used, dtype), reasons[0] if reasons else "")
        except Exception as error:  # noqa: BLE001  any class may refuse in its own way
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            trace = traceback.format_exc()
    return Failed(model_type, cls, reasons[-1], trace)


def walk(only: list[str] | None = None, dtype: torch.dtype = torch.float32) -> Iterator[Built | Failed]:
    """Every class that is no mere base, by model type."""
    found = configurations()
    for model_type in sorted(only or found):
        config = found[model_type]
        for cls in model_classes(model_type, config):
            if not is_abstract(cls):
                yield build_class(model_type, cls, config, dtype)


def main() -> None:
    """Prints what is built."""
    built, failed = 0, []
    for found in walk(sys.argv[1:]):
        if isinstance(found, Failed):
            failed.append(found)
            print(f"{found.model_type} {found.cls.__name__}: {found.reason}")
        else:
            built += 1
            if found.uncut:
                print(f"{found.model_type} {found.cls.__name__}: built uncut, as: {found.uncut}")
    print(f"{built} classes built, {len(failed)} not, {time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
