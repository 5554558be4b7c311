"""Members of configurations that speak of single layers, from the classes of the pinned transformers, and what the program
makes of each of them when it cuts a model to some of its layers.

    CKFS_BIN=target/debug/ckfs python tests/families/layer_lists.py [--list]

Two forms: one entry for each layer, and numbers of layers. Both are found in two ways:

- by value: a configuration of six layers and one of nine, whose lists or texts have as many entries;
- by use: `config.NAME[layer_idx]` and `layer_idx in config.NAME` (`layer_idx + 1 in`: numbers from 1) in the code of the model
  type, of members that its configuration has.

Each is put into the configuration of a small model, of which `hf/` is made with layers 1 to 3, renumbered. It must be cut, or
`hf/` left out with the member's name. Stages of towers are no layers.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pkgutil
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]

from classes import NEEDED, configurations
from mounting import find_ckfs
from repos import base_config, llama_tensors, write

# Members of this form that are something else: stages, convolutions before the layers, kernels, labels, outputs that are read,
# layers that predict further tokens by numbers of their own.
NO_LAYERS = {
    "conv_dim", "conv_kernel", "conv_stride", "tdnn_dim", "tdnn_kernel", "tdnn_dilation", "hidden_sizes", "depths", "id2label",
    "architectures", "out_features", "stage_names", "out_indices", "_out_indices", "_out_features", "adapter_config",
    "neck_ignore_stages", "mtp_local_layer_ids",
}  # fmt: skip
LAYERS, KEPT = 6, [1, 2, 3]
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
INDEX = r"(?:layer_idx|layer_index|layer_id|layer_number|layer_num|layer|idx|i)"
OF = r"(?:self\.config|text_config|config|self)"
ENTRY = re.compile(rf"{OF}\.(\w+)\[{INDEX}\]")
NUMBER = re.compile(rf"\b{INDEX.replace('layer|', '')}( \+ 1)? (?:not )?in (?:set\()?{OF}\.(\w+)")


@dataclass(frozen=True)
class Found:
    """A member of a form, and one model type that has it."""

    name: str
    # What the first layer's number is, for numbers of layers; `None` for one entry per layer.
    base: int | None
    # Six layers' entries, as JSON, if a configuration told them.
    entries: str = ""


@functools.cache
def code(package: str) -> str:
    """The text of the classes of a model: of models of which they are subclasses, too, since modules are copies."""
    module = importlib.import_module(package)
    names = [name for _, name, _ in pkgutil.iter_modules(module.__path__) if name.startswith(("configuration_", "modeling_"))]
    return "\n".join((Path(module.__path__[0]) / f"{name}.py").read_text() for name in names)


def by_value(config: type, model_type: str, count: str) -> dict[str, str]:
    """Members with an entry for each layer, with the first entry."""
    made = []
    for layers in (LAYERS, LAYERS + 3):
        try:
            given = copy.deepcopy(NEEDED.get(model_type, {})) | {count: layers}
            made.append(config(**given).to_dict())
        except Exception:  # noqa: BLE001  a configuration whose defaults are for another number of layers
            return {}
    small, large = made
    found = {}
    for name, value in small.items():
        other = large.get(name)
        if isinstance(value, (list, tuple, str)) and isinstance(other, type(value)):
            if len(value) == LAYERS and len(other) == LAYERS + 3:
                found[name] = json.dumps(value if isinstance(value, str) else list(value))
    return found


def derive() -> dict[Found, list[str]]:
    """All members of these forms, with the model types that have them."""
    found = defaultdict(list)
    for model_type, config in sorted(configurations().items()):
        annotated = {name for cls in config.__mro__ for name in vars(cls).get("__annotations__", {})}
        parameters = set(inspect.signature(config.__init__).parameters)
        own = annotated | parameters | set(getattr(config, "attribute_map", {}))
        count = next((name for name in COUNTS if name in own), None)
        if count is None:
            continue
        told = by_value(config, model_type, count)
        for name, value in told.items():
            # The numbers of all layers.
            is_numbers = json.loads(value) == list(range(LAYERS))
            found[Found(name, 0) if is_numbers else Found(name, None, value)].append(model_type)
        text = code(config.__module__.rsplit(".", 1)[0])
        for name in set(ENTRY.findall(text)) & own:
            if name not in told:
                found[Found(name, None)].append(model_type)
        # Code that looks whether a layer's number and one is in a list tells more than a loop over the list's own numbers.
        for name, base in {name: int(bool(after)) for after, name in sorted(NUMBER.findall(text))}.items():
            if name in own and name not in told:
                found[Found(name, base)].append(model_type)
    return {member: types for member, types in found.items() if member.name not in NO_LAYERS}


def cut(member: Found, root: Path) -> str:
    """What is wrong with the member in `hf/` of a part of the layers, or nothing."""
    if member.base is None:
        value = json.loads(member.entries) if member.entries else [2, 3, 5, 7, 11, 13]
        expected = [value[layer] for layer in KEPT]
        expected = "".join(expected) if isinstance(value, str) else expected
    else:
        value = [layer + member.base for layer in (1, 3, 4)]
        expected = [KEPT.index(layer) + member.base for layer in (1, 3)]
    config = base_config("llama", "LlamaForCausalLM", LAYERS) | {member.name: value}
    at = root / str(abs(hash(member)))
    path, out = at / "model", at / "out"
    write(path, {"model.safetensors": llama_tensors("lists", layers=LAYERS)}, config)
    flags = ["--layout", "hf", "--layers", f"{KEPT[0]}..{KEPT[-1] + 1}", "--renumber", "--only", "hf/config.json"]
    done = subprocess.run([find_ckfs(), "export", path, out, *flags], capture_output=True, text=True, timeout=120)
    if done.returncode:
        return f"left out: {member.name}" if f'"{member.name}"' in done.stderr else f"FAULT: {done.stderr.strip()[:300]}"
    made = json.loads((out / "hf/config.json").read_text()).get(member.name)
    return "" if made == expected else f"FAULT: {value} is {made}, expected {expected}"


def main() -> None:
    members = derive()
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda member: cut(member, Path(root)), members))
    faults = 0
    for (member, types), what in sorted(zip(members.items(), said), key=lambda row: row[0][0].name):
        form = "an entry per layer" if member.base is None else f"numbers from {member.base}"
        faults += what.startswith("FAULT")
        if what or "--list" in sys.argv:
            print(f"{member.name} ({form}; {types[0]} and {len(types) - 1} more): {what or 'cut'}")
    print(f"{len(members)} members of {len(set().union(*members.values()))} model types, {faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
