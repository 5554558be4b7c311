"""Parts of models that are models by themselves, from the classes of the pinned transformers.

    python tests/families/parts.py > src/plan/repository/parts.toml
    CKFS_BIN=target/debug/ckfs python tests/families/parts.py --check     compares all classes with that file and with `--part`

A part is a module of the whole model's class with a configuration of its own, a member of the whole one, that a class of the library
builds again from that member alone: `load_state_dict` takes the part's state, strictly. Names are those of repositories, as the library
saves whole models, and those of the module. With `--check` a repository of the whole model, whose tensors are holes in a file, is planned
with `--part`: names, shapes and configuration must be those of the part's class.
"""

from __future__ import annotations

import copy
import difflib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from classes import NEEDED, Built, Failed, build, build_class, configurations, lines_of, tiny
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto as auto

DATA = Path(__file__).parents[2] / "src/plan/repository/parts.toml"
MEMBERS = {"vision_config": "vision", "audio_config": "audio", "thinker_config.vision_config": "vision", "thinker_config.audio_config": "audio"}
# Towers of models whose member may be of several types, beside that of their default configuration.
OTHERS = ("clip_vision_model", "siglip_vision_model", "pixtral")
WHOLE = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)
# Encoders of models whose decoder has the same configuration: no member is theirs alone.
ENCODERS = '''
[[part]]
model_types = ["whisper"]
part = "encoder"
names = { "model.encoder." = "" }
architecture = "WhisperEncoder"

[[part]]
model_types = ["t5gemma"]
part = "encoder"
names = { "model.encoder." = "encoder." }
architecture = "T5GemmaEncoderModel"
set = { is_encoder_decoder = false }
'''


@dataclass(order=True)
class Part:
    model_type: str = field(compare=False)
    part: str
    architecture: str
    member: str
    prefixes: tuple[str, ...]
    built: Built = field(compare=False, repr=False, default=None)
    alone: PreTrainedModel = field(compare=False, repr=False, default=None)
    # The type of the configuration, where the member may be of several.
    nested: str = ""


def saved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state under the names of a repository."""
    return revert_weight_conversion(model, dict(model.state_dict()))


def part_of(built: Built, member: str) -> Part | str | None:
    """The part that has this member of the configuration, or why it is no model by itself."""
    config = built.config
    for word in member.split("."):
        above, config = config, getattr(config, word, None)
    if not isinstance(config, transformers.PreTrainedConfig):
        return None
    modules = [(name, m) for name, m in built.model.named_modules() if name and isinstance(m, PreTrainedModel) and type(m.config) is type(config)]
    if not modules:
        return "no module has this configuration"
    name, module = modules[0]
    if any(not other.startswith(f"{name}.") for other, _ in modules[1:]):
        return "several modules have this configuration"
    cls = type(module)
    if cls.config_class is not type(config):
        return f"{cls.__name__} has another configuration"
    try:
        alone = build(cls, copy.deepcopy(config), torch.float32)
        alone.load_state_dict(module.state_dict(), strict=True, assign=True)
    except Exception as error:  # noqa: BLE001  any class may refuse in its own way
        return f"{cls.__name__}: {str(error).splitlines()[0]}"
    whole, own = saved(built.model), saved(alone)
    prefixes = []
    for key in whole:
        # The prefix under which the first tensor of the part is saved.
        first = next(iter(own))
        if key.endswith(f".{first}") or key == first:
            prefixes.append(key.removesuffix(first))
    shapes = lambda state: {key: tuple(tensor.shape) for key, tensor in state.items()}  # noqa: E731
    for prefix in prefixes:
        there = {key.removeprefix(prefix): shape for key, shape in shapes(whole).items() if key.startswith(prefix)}
        if prefix and there == shapes(own):
            both = tuple(sorted({prefix, f"{name}."}))
            is_any = (above.sub_configs or {}).get(member.rpartition(".")[2]) is transformers.AutoConfig
            return Part(built.model_type, MEMBERS[member], cls.__name__, member, both, built, alone, config.model_type if is_any else "")
    return f"{cls.__name__}: saved under other names"


def with_tower(built: Built, member: str, tower: str) -> Built | None:
    """The same class with another tower."""
    try:
        given = configurations()[tower]()
        config = type(built.config)(**NEEDED.get(built.model_type, {}) | {member: given})
        return Built(built.model_type, built.cls, tiny(config), build(built.cls, tiny(config), torch.float32))
    except Exception:  # noqa: BLE001  any class may refuse in its own way
        return None


def found_of(model_type: str) -> tuple[list[Part], list[str]]:
    names = dict.fromkeys(mapping[model_type] for mapping in WHOLE if model_type in mapping)
    parts, reasons = {}, []
    # Some have no `forward`, for which they are bases elsewhere.
    for cls in [getattr(transformers, name) for name in names if hasattr(transformers, name)]:
        built = build_class(model_type, cls, configurations()[model_type], torch.float32)
        if isinstance(built, Failed):
            reasons.append(f"{model_type} {built.cls.__name__}: {built.reason}")
            continue
        for member, word in MEMBERS.items():
            part = part_of(built, member)
            if isinstance(part, Part):
                parts.setdefault((word, part.nested), part)
                for tower in OTHERS if part.nested and word == "vision" else ():
                    other = with_tower(built, member, tower)
                    other = part_of(other, member) if other else None
                    if isinstance(other, Part):
                        parts.setdefault((word, other.nested), other)
            elif part:
                reasons.append(f"{model_type} {word}: {part}")
    return list(parts.values()), reasons


def planned(part: Part) -> str:
    """What `--part` makes otherwise than the class, if anything."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        at, header = 0, {}
        for name, tensor in saved(part.built.model).items():
            size = tensor.numel() * 4
            header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        index = {"metadata": {"total_size": at}, "weight_map": dict.fromkeys(header, "model-00001-of-00001.safetensors")}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        with open(path / "model-00001-of-00001.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
        part.built.config.architectures = [type(part.built.model).__name__]
        part.built.config.save_pretrained(path)
        ckfs = os.environ["CKFS_BIN"]
        flags = ["--layout", "hf", "--part", part.part]
        done = subprocess.run([ckfs, "cat", path, "hf/model.safetensors.index.json", *flags], capture_output=True, text=True)
        if done.returncode:
            return done.stderr
        index = json.loads(done.stdout)
        own = saved(part.alone)
        if index["weight_map"].keys() != own.keys():
            return f"names differ: {sorted(index['weight_map'].keys() ^ own.keys())[:4]}"
        if index["metadata"]["total_size"] != sum(4 * tensor.numel() for tensor in own.values()):
            return "sizes differ"
        config = json.loads(subprocess.run([ckfs, "cat", path, "hf/config.json", *flags], capture_output=True, text=True, check=True).stdout)
        if config["architectures"] != [part.architecture]:
            return f"class {config['architectures']}"
        member = json.loads((path / "config.json").read_text())
        for word in part.member.split("."):
            member = member[word]
        differ = [key for key in {*member, *config} - {"architectures", "dtype", "transformers_version"} if config.get(key) != member.get(key)]
        return f"configuration differs: {differ}" if differ else ""


def gather_part(model_types: list[str]) -> tuple[list[str], list[str], list[str]]:
    rows, reasons, differ = [], [], []
    for model_type in model_types:
        parts, more = found_of(model_type)
        reasons += more
        for part in parts:
            if "CKFS_BIN" in os.environ and (text := planned(part)):
                differ.append(f"{model_type} {part.part}: {text}")
            rows.append((part.model_type, part.part, part.architecture, part.member, part.nested, part.prefixes))
    return rows, reasons, differ


def table(rows: list[tuple]) -> str:
    """Model types whose other columns are alike share a row."""
    alike: dict[tuple, list[str]] = {}
    for model_type, *rest in sorted(rows):
        alike.setdefault(tuple(rest), []).append(model_type)
    text = []
    for (part, architecture, member, nested, prefixes), types in alike.items():
        listed = "\n".join(["model_types = [", *lines_of([json.dumps(name) for name in types]), "]"])
        if len(types) < 4:
            listed = f"model_types = {json.dumps(types)}"
        names = ", ".join(f'"{prefix}" = ""' for prefix in prefixes)
        text.append(f'\n[[part]]\n{listed}\npart = "{part}"\nnames = {{ {names} }}\narchitecture = "{architecture}"\nmember = "{member}"\n')
        text[-1] += f'nested = "{nested}"\n' if nested else ""
    return "".join(text)


def main() -> None:
    types = sorted(configurations())
    count = os.cpu_count() or 1
    chunks = [types[at :: 8 * count] for at in range(8 * count)]
    rows, reasons, differ = [], [], []
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        for own, more, other in pool.map(gather_part, chunks):
            rows, reasons, differ = rows + own, reasons + more, differ + other
    head = (
        f"# Parts of models that transformers {transformers.__version__} has a class for: model_type of the whole model, beginnings of the part's names with\n"
        "# what they become, class, the member with its configuration (none: the whole one), its type where it may be of several, and members\n"
        "# that are another in it. "
        "Made by tests/families/parts.py, which compares each row with the class.\n"
    )
    text = head + ENCODERS + table(rows)
    if sys.argv[1:] != ["--check"]:
        print(text, end="")
        print(*sorted(reasons), sep="\n", file=sys.stderr)
        return
    changes = list(difflib.unified_diff(DATA.read_text().splitlines(), text.splitlines(), "parts.toml", "classes", lineterm=""))
    print(*changes, *differ, sep="\n")
    print(f"{len(rows)} parts, {len(reasons)} that are no models by themselves")
    sys.exit(1 if changes or differ else 0)


if __name__ == "__main__":
    main()
