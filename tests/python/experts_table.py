"""Writes src/plan/experts/models.toml: how transformers names the tensors of repositories when it loads them.

`python experts_table.py > ../../src/plan/experts/models.toml` with the pinned version of transformers. The rows come from the conversions
of transformers' own classes (`conversion_mapping.py`), as they apply to the class that loads a whole model of a type. It takes some
minutes, so the tests compare only the version of transformers, and small models of most types with what ckfs makes of them.
"""

import inspect
import json
import re
import signal
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping  # noqa: E402
from transformers.core_model_loading import WeightConverter, WeightRenaming, PrefixChange  # noqa: E402
from transformers.models.auto import modeling_auto as auto  # noqa: E402

NAMES = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
)
# The words for an expert's matrices that ckfs knows.
WORDS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# Seconds for one class on the meta device.
CLASS_SECONDS = 60


def class_of(model_type):
    """The class that loads a whole model of the type."""
    for names in NAMES:
        name = names.get(model_type)
        if name:
            return getattr(transformers, name if isinstance(name, str) else name[0], None)
    return None


def strict_of(kind):
    """What the classes beside a class keep in float32, where no model can be asked."""
    module = inspect.getmodule(kind)
    beside = vars(module).values() if module else ()
    classes = [other for other in beside if inspect.isclass(other) and other.__module__ == kind.__module__]
    return {word for other in classes for word in getattr(other, "_keep_in_fp32_modules_strict", None) or ()}


def transforms_of(model_type):
    """The conversions of a model type, as of the model's own class where it can be made from its default configuration; its class, and
    what it keeps in float32 whatever the type of all other floats is."""
    kind = class_of(model_type)

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(CLASS_SECONDS)
    try:
        config = CONFIG_MAPPING[model_type]()
        if not isinstance(config, kind.config_class):
            config = kind.config_class()
            config.model_type = model_type
        with torch.device("meta"):
            model = kind(config)
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        return transforms, kind, model._keep_in_fp32_modules_strict, list(model.state_dict())
    except Exception:  # noqa: BLE001 (a default configuration need not be a model)
        return get_checkpoint_conversion_mapping(model_type) or [], kind, strict_of(kind), []
    finally:
        signal.alarm(0)


def sources(transform):
    """Patterns, in the order in which they are tried."""
    for source in sorted(transform.source_patterns, key=lambda source: -len(source)):
        pattern = source.replace("*.", r".*\.")
        yield pattern + (r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else "")


def rename(transform):
    """[pattern, target] or [pattern, target, scope, base]."""
    scope = [] if transform.scope_prefix is None else [transform.scope_prefix, transform.base_model_prefix or ""]
    return ["|".join(sources(transform)), transform.target_patterns[0], *scope]


def is_merge(transform):
    return any(type(operation).__name__ == "MergeModulelist" for operation in transform.operations)


def renamed(name, rows):
    """The name, as the rows change it."""
    for pattern, target, *scope in rows:
        begin = ""
        if scope:
            base = f"{scope[1]}." if scope[1] else ""
            inner = f"{scope[0]}." if scope[0] else ""
            begin = next((text for text in (base + inner, inner) if name.startswith(text)), None)
            if begin is None:
                continue
        rest = name[len(begin) :]
        if found := re.search(pattern, rest):
            group = next((group for group in found.groups() if group is not None), "")
            name = begin + rest.replace(found[0], target.replace(r"\1", group), 1)
    return name


def unlike(state, renames, back, words):
    """Names of a state that do not come back from the names in a repository."""
    for name in state:
        single = re.sub(r"experts\.(gate_up_proj|up_proj|down_proj)$", rf"experts.0.{words[2]}.weight", name)
        if renamed(renamed(single, back), renames) != single:
            yield f"{name} (its name in a repository is not known)"


def row(model_type):
    transforms, kind, strict, state = transforms_of(model_type)
    experts, renames, back, others = {}, [], [], []
    for transform in transforms:
        if isinstance(transform, WeightConverter):
            operations = [type(operation).__name__ for operation in transform.operations]
            words = [re.search(r"experts\.\*\.(\w+)\.weight$", source) for source in transform._original_source_patterns]
            target = transform._original_target_patterns[0].rsplit(".", 1)[-1]
            words = [word[1] for word in words] if all(words) else []
            if words and set(words) <= WORDS and operations in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
                experts[target] = words
            elif operations == ["Transpose"] and transform.operations[0].check_dims:
                experts.setdefault("turned", True)
            else:
                others.append(f"{', '.join(transform._original_source_patterns)} ({', '.join(operations)})")
        elif type(transform) in (WeightRenaming, PrefixChange):
            renames.append(rename(transform))
            back.insert(0, rename(transform.reverse_transform()))
        else:
            others.append(f"{', '.join(transform._original_source_patterns)} ({type(transform).__name__})")
    result = {}
    if experts.get("turned"):
        result["experts"] = ["gate_proj", "up_proj", "down_proj"]
        result["either_way"] = True
    elif "gate_up_proj" in experts:
        gate, up = experts["gate_up_proj"]
        result["experts"] = [gate, up, experts["down_proj"][0]]
    elif "down_proj" in experts:
        result["experts"] = ["", experts["up_proj"][0], experts["down_proj"][0]]
    if renames:
        result["renames"] = renames
    if back and "experts" in result:
        result["back"] = back
    if strict and "experts" in result:
        result["f32"] = sorted(strict)
    # Numbers of layers are those of one release: layers beyond the configured ones are left out anyway.
    ignored = [text for text in getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or () if not re.search(r"\d", text)]
    others += [f"{text} (ignored in some layers)" for text in ignored if any(re.search(text, name) for name in state)]
    if "experts" in result:
        others += list(unlike(state, renames, back, result["experts"]))[:1]
    if others:
        result["others"] = [other.replace("\\", "") for other in others]
    if ignored and result:
        result["ignored"] = sorted(ignored)
    return result


def text():
    rows, unchanged = {}, []
    for model_type in sorted({name for names in NAMES for name in names}):
        if model_type not in CONFIG_MAPPING or class_of(model_type) is None:
            continue
        try:
            found = row(model_type)
        except ImportError:
            continue
        if not found:
            unchanged.append(model_type)
        else:
            rows.setdefault(json.dumps(found), []).append(model_type)
    lines = [
        "# How transformers names the tensors of repositories when it loads them. Written by tests/python/experts_table.py",
        f"# from transformers {transformers.__version__}.",
        "#",
        "# experts: the words of an expert's gate, up and down matrices in a repository. renames: regular expressions of names in a",
        "# repository, with what replaces the first match, in order; two more texts limit them to names under these prefixes. back: the",
        "# same from the names of modules. others: conversions of another kind. ignored: what the class leaves out. f32: modules that",
        "# the class keeps in float32. unchanged: types whose names stay.",
        f"unchanged = {json.dumps(unchanged)}",
    ]
    for found, types in sorted(rows.items(), key=lambda item: item[1]):
        lines += ["", "[[model]]", f"types = {json.dumps(types)}"]
        for key, value in json.loads(found).items():
            if key in ("renames", "back"):
                lines += [f"{key} = [", *(f"  {json.dumps(entry)}," for entry in value), "]"]
            else:
                lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")
