"""Writes src/plan/experts/models.toml: how transformers names the tensors of repositories when it loads them.

`python experts_table.py > ../../src/plan/experts/models.toml` with the pinned version of transformers. The rows come from the conversions
of transformers' own classes (`conversion_mapping.py`), as they apply to the class that loads a whole model of a type. It takes some
minutes, so the tests compare only the version of transformers, and small models of most types with what ckfs makes of them.
"""

import copy
import itertools
import json
import math
import re
import signal
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from classes import NEEDED, build, tiny  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping  # noqa: E402
from transformers.core_model_loading import (  # noqa: E402
    GroupWeightRename,
    Inkling2IndexOffsetWeightRename,
    LayerPairCollapse,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
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


def built(model_type, kind):
    """A model of the class on the meta device, of few layers where it accepts that. None if it cannot be made in time."""

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    for cut in (True, False):
        signal.alarm(CLASS_SECONDS)
        try:
            config = CONFIG_MAPPING[model_type](**copy.deepcopy(NEEDED.get(model_type, {})))
            if not isinstance(config, kind.config_class):
                config = kind.config_class()
                config.model_type = model_type
            return build(kind, tiny(config) if cut else config, torch.bfloat16)
        except Exception:  # noqa: BLE001 (a default configuration need not be a model)
            continue
        finally:
            signal.alarm(0)
    return None


def compiled(pattern):
    """A source pattern, as transformers compiles it."""
    pattern = pattern.replace("*.", r".*\.")
    return pattern + (r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else "")


def sources(transform):
    """Patterns, in the order in which they are tried."""
    return [compiled(source) for source in sorted(transform.source_patterns, key=lambda source: -len(source))]


def scope(transform):
    return [] if transform.scope_prefix is None else [transform.scope_prefix, transform.base_model_prefix or ""]


def rename(transform):
    """[pattern, target] or [pattern, target, scope, base]."""
    return ["|".join(sources(transform)), transform.target_patterns[0], *scope(transform)]


def group(transform):
    """The renames of a group, so that none is applied to what another has made, and the pattern that must be there."""
    pairs = list(zip(map(compiled, transform.source_patterns), transform.target_patterns))
    guard = pairs[0][0]
    return [{"from": source, "to": target, "scope": scope(transform), "guard": guard} for source, target in reversed(pairs)]


def halves_of_layers(transform):
    """The renames of layers that are stored as two blocks each."""
    rows = []
    for block, digits in ((0, "02468"), (1, "13579")):
        for word in ("mixer", "attn_alpha", "mlp_alpha"):
            before = f"layers.{block}.{word}"
            after = re.escape(transform.rename_source_key(before)[0]).replace(r"layers\.0\.", r"layers.\1.")
            source = rf"layers\.(\d*[{digits}])\.{word}(?=\.|$)"
            rows.append({"from": source, "to": after, "scope": scope(transform), "number": {"divided": 2, "plus": 0}})
    return rows


def numbered(transform):
    """The rename of a number in a list to the layer that it stands for."""
    pattern, target = rename(transform)[:2]
    return {"from": pattern, "to": target, "scope": scope(transform), "number": {"divided": 1, "plus": transform.offset}}


def sized(kind, config, name, axis):
    """The length of a tensor's axis as a sum of products of the configuration's numbers, and these numbers: the change of the
    length with each of them, and with several of them, is what their product adds."""
    numbers = {key: value for key, value in config.to_dict().items() if type(value) is int and value > 1}

    def length(members):
        """The length with these members doubled. None if that is no model, or not one with the tensor."""
        changed = copy.deepcopy(config)
        try:
            for member in members:
                setattr(changed, member, 2 * numbers[member])
            return build(kind, changed, torch.bfloat16).state_dict()[name].shape[axis]
        except Exception:  # noqa: BLE001 (a number may have to fit another)
            return None

    usual = length(())
    # What changes the length alone, or in a pair that must change together.
    singles = [member for member in numbers if length((member,)) not in (usual, None)]
    subsets = [part for count in range(len(singles) + 1) for part in itertools.combinations(singles, count)]
    lengths = {part: length(part) for part in subsets}
    if None in lengths.values():
        return None
    change = {
        part: sum((-1) ** (len(part) - len(less)) * lengths[less] for less in subsets if set(less) <= set(part))
        for part in subsets
    }
    terms = []
    for part in subsets:
        added = sum((-1) ** (len(more) - len(part)) * change[more] for more in subsets if set(part) <= set(more))
        product = math.prod(numbers[member] for member in part)
        if added % product or added < 0:
            return None
        if added:
            terms.append([added // product, list(part)])
    return terms, {member: numbers[member] for member in singles}


def split(transform, model):
    """The parts of a tensor that have other lengths, if the numbers of the configuration tell these."""
    operation = transform.operations[0]
    names = [name for name in model.state_dict() if transform.target_patterns[0] in name]
    if not names:
        return None
    kind, default = type(model), type(model.config)()
    parts = [names[0].replace(transform.target_patterns[0], part) for part in transform.target_patterns]
    found = [sized(kind, model.config, part, operation.dim) for part in parts]
    if None in found:
        return None
    defaults = {member: getattr(default, member) for _, numbers in found for member in numbers}
    return {"op": "split", "axis": operation.dim, "sizes": [terms for terms, _ in found], "defaults": defaults}


def text_member(config):
    """The member of a configuration with the text model's, "" if that is the whole."""
    text = config.get_text_config()
    return next((key for key in config.sub_configs or {} if getattr(config, key, None) is text), ""), text


def heads(config, key):
    """The members of a configuration that tell how many heads there are, and their number where none is there."""
    part = getattr(config, key, config) if key else config
    word = "num_attention_heads"
    return list(dict.fromkeys([word, (part.attribute_map or {}).get(word, word)])), getattr(part, word, 1)


def operation(one, transform, config, model):
    """An operation of a converter as a row. None if it is not known."""
    name, targets = type(one).__name__, transform.target_patterns
    if name in ("Chunk", "Concatenate"):
        return {"op": name.lower(), "axis": one.dim}
    if name == "Split" and one.dim == 0 and [target[-6:] for target in targets] == ["q_proj", "k_proj", "v_proj"]:
        return {"op": "heads"}
    if name == "Split" and len(transform.operations) == 1 and model is not None:
        return split(transform, model)
    if name == "Inkling2UnpadVocab" and not one.inverse and config is not None:
        member, text = text_member(config)
        return {"op": "rows", "config": member, "member": "unpadded_vocab_size", "default": type(text)().unpadded_vocab_size}
    if name == "ErnieFuseAndSplitTextVisionExperts" and one.stack_dim == 0:
        return {"op": "groups", "axis": one.concat_dim}
    if name == "Transpose" and not one.check_dims:
        return {"op": "transpose", "axes": [one.dim0, one.dim1]}
    if name == "Interleave" and not one.inverse:
        return {"op": "interleave", "axis": one.dim}
    if name == "MergeModulelist" and one.dim == 0:
        return {"op": "stack"}
    if name == "PermuteForRope" and not one.inverse and config is not None:
        members, count = heads(config, one.subconfig_key)
        only = {"only": one.permute_layer_names} if one.permute_layer_names is not None else {}
        return {"op": "rope", "config": one.subconfig_key or "", "heads": members, "default": count, **only}
    return None


def member(name, default):
    """A number of the configuration in an expression."""
    return f"(config.{name} ?? {default})"


def applied(one, views, made):
    """The expressions of what an operation makes, by those of what it takes. `made` is the number of tensors that are made in all."""
    kind = one["op"]
    if kind in ("concatenate", "groups"):
        found = [views] if kind == "concatenate" else [views[at::made] for at in range(made)]
        return [each[0] if len(each) == 1 else f"concat({one['axis']}, {', '.join(each)})" for each in found]
    if kind == "stack":
        return views
    if kind in ("chunk", "heads", "split"):
        (view,) = views
        if kind == "chunk":
            parts = [f"extent({view}, {one['axis']}) // {made}"] * made
        elif kind == "heads":
            queries, keys = "config.num_attention_heads", "(config.num_key_value_heads ?? config.num_attention_heads)"
            head = f"(config.head_dim ?? extent({view}, 0) / ({queries} + 2 * {keys}))"
            parts = [f"{queries} * {head}", f"{keys} * {head}", f"{keys} * {head}"]
        else:
            def product(factor, names):
                numbers = [member(name, one["defaults"][name]) for name in names]
                return " * ".join(numbers if factor == 1 and numbers else [str(factor), *numbers])

            parts = [" + ".join(product(*term) for term in terms) for terms in one["sizes"]]
        return [f"part({view}, {one.get('axis', 0)}, {at}, {', '.join(parts)})" for at in range(len(parts))]
    before = "config."
    if one.get("config"):
        before += one["config"] + "."
    if kind == "rows":
        return [f"slice({view}, 0, 0, {before}{one['member']} ?? {one['default']})" for view in views]
    if kind == "transpose":
        return [f"swap({view}, {one['axes'][0]}, {one['axes'][1]})" for view in views]
    if kind == "interleave":
        return [f"halves({view}, {one['axis']}, 1)" for view in views]
    heads = " ?? ".join([*(before + name for name in one["heads"]), str(one["default"])])
    names = one["names"]
    turns = ["only" not in one or any(word in name for word in one["only"]) for name in names]
    return [f"halves({view}, 0, {heads})" if turn else view for view, turn in zip(views, turns)]


def views(operations, patterns, targets):
    """The expressions of what a converter makes, over `x0`, `x1`, … for its patterns."""
    groups = len(targets) if operations[0]["op"] == "groups" else 1
    found = [f"x{number}" for number in range(len(patterns) * groups)]
    for one in operations:
        found = applied({**one, "names": targets}, found, len(targets))
    return found


def several(operations, patterns):
    """How several tensors of one pattern are joined. None if there is one of each."""
    first = operations[0]
    if first["op"] == "concatenate" and first["axis"] == 0 and len(patterns) == 1:
        return "concat"
    return first["op"] if first["op"] in ("stack", "groups") else None


def converter(transform, config, model):
    """A converter as a row. None if an operation of it is not known."""
    operations = [operation(one, transform, config, model) for one in transform.operations]
    if None in operations or any("\\1" in target for target in transform.target_patterns):
        return None
    patterns, targets = [compiled(source) for source in transform.source_patterns], list(transform.target_patterns)
    row = {"from": patterns, "to": [list(pair) for pair in zip(targets, views(operations, patterns, targets), strict=True)]}
    if several(operations, patterns):
        row["several"] = several(operations, patterns)
    return {**row, "scope": scope(transform)} if scope(transform) else row


def is_merge(operations):
    return operations in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


def general(name):
    """A name with `*` for numbers."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def unlike(model, transforms, ignored):
    """Whether names of the state would change, or names that the class saves would not be found, by the conversions alone: then
    transformers compares with the names of the state."""
    state = model.state_dict()
    fresh = copy.deepcopy(transforms)
    renamings = [entry for entry in fresh if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in fresh if isinstance(entry, WeightConverter)]
    if any(rename_source_key(name, renamings, converters)[0] != name for name in state):
        return True
    for entry in renamings:
        if isinstance(entry, GroupWeightRename):
            entry._active = None
    try:
        saved = sorted(revert_weight_conversion(model, dict(state)))
    except Exception:  # noqa: BLE001 (on the meta device)
        saved = []
    return any(rename_source_key(name, renamings, converters)[0] not in state for name in saved) or any(
        re.search(pattern, name) for pattern in ignored for name in state
    )


def layers_of(pattern, state):
    """Words of a tensor that stands beside each match of a pattern, and in no other layer. None if there is no such tensor, or
    every layer has a match."""
    matches = {name for name in state if re.search(pattern, name)}
    modules = {name[: re.search(pattern, name).start()] for name in matches}
    starred = {general(module) for module in modules}
    children = {}
    for name in state:
        words = name.split(".")
        for end in range(1, len(words)):
            module = ".".join(words[:end]) + "."
            if general(module) in starred and name not in matches:
                children.setdefault(module, set()).add(general(".".join(words[end:])))
    with_match = [children.get(module, set()) for module in modules]
    without = [words for module, words in children.items() if module not in modules]
    if not with_match or not without:
        return None
    return next(iter(sorted(set.intersection(*with_match) - set.union(*without), key=len)), None)


def row(model_type):
    kind = class_of(model_type)
    model = built(model_type, kind)
    config = model.config if model is not None else None
    if model is not None:
        transforms = get_model_conversion_mapping(model, add_legacy=False)
    else:
        transforms = get_checkpoint_conversion_mapping(model_type) or []
    experts, renames, back, converters, others = {}, [], [], [], []
    for transform in transforms:
        if isinstance(transform, WeightConverter):
            operations = [type(operation).__name__ for operation in transform.operations]
            words = [re.search(r"experts\.\*\.(\w+)\.weight$", source) for source in transform._original_source_patterns]
            target = transform._original_target_patterns[0].rsplit(".", 1)[-1]
            words = [word[1] for word in words] if all(words) else []
            if words and set(words) <= WORDS and is_merge(operations):
                experts[target] = words
            elif operations == ["Transpose"] and transform.operations[0].check_dims:
                experts.setdefault("turned", True)
            elif (known := converter(transform, config, model)) is not None:
                converters.append(known)
            else:
                others.append(f"{', '.join(transform._original_source_patterns)} ({', '.join(operations)})")
        elif type(transform) in (WeightRenaming, PrefixChange):
            renames.append(rename(transform))
            back.insert(0, rename(transform.reverse_transform()))
        elif type(transform) is LayerPairCollapse:
            renames += halves_of_layers(transform)
        elif type(transform) is Inkling2IndexOffsetWeightRename:
            renames.append(numbered(transform))
        elif type(transform) is GroupWeightRename:
            renames += group(transform)
            back = [[rule["from"], rule["to"], *rule["scope"]] for rule in reversed(group(transform.reverse_transform()))] + back
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
    if converters:
        result["converters"] = converters
    # Numbers of layers are those of one release: layers beyond the configured ones are left out anyway.
    ignored = [text for text in getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or () if not re.search(r"\d", text)]
    state = model.state_dict() if model is not None else {}
    beside = {text: words for text in ignored if (words := layers_of(text, state))}
    always = [text for text in ignored if text not in beside]
    if model is not None and (transforms or ignored) and unlike(model, transforms, always):
        result["state"] = sorted({general(name) for name in state})
        result["base"] = model.base_model_prefix
    if others:
        result["others"] = [other.replace("\\", "") for other in others]
    if ignored and result:
        result["ignored"] = sorted(always)
    if beside:
        result["beside"] = sorted([text, words] for text, words in beside.items())
    return result


def inline(value):
    """A value of TOML in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


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
        "# repository, with what replaces the first match, in order; two more texts limit them to names under these prefixes; number:",
        "# what becomes of the number in the match. back: the same from the names of modules. converters: names of results,",
        "# each with an expression over the tensors whose names match, `x0` that of the first pattern; several: how those of a pattern are",
        "# joined first. others: conversions of another kind. state: the names of the state, where what a name becomes depends on them, and",
        "# base: the prefix that is then put before a name or taken from it. ignored: what the class leaves out. beside: what it leaves out",
        "# unless this tensor is there too. unchanged: types whose names stay.",
        f"unchanged = {json.dumps(unchanged)}",
    ]
    for found, types in sorted(rows.items(), key=lambda item: item[1]):
        lines += ["", "[[model]]", f"types = {json.dumps(types)}"]
        for key, value in json.loads(found).items():
            if key in ("renames", "back", "converters", "state"):
                lines += [f"{key} = [", *(f"  {inline(entry)}," for entry in value), "]"]
            else:
                lines.append(f"{key} = {inline(value)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")
