"""Which tensors of a model are buffers, and which it keeps in float32, from the classes of the pinned transformers.

    python tests/families/buffers_and_float32.py > src/plan/library/transformers.toml
    python tests/families/buffers_and_float32.py --check       compares all classes with that file; prints differences

A buffer is no parameter: FSDP2 leaves it whole on every rank. The table lists the ends of their names, as short as they can
be without matching a parameter of the same model type. Ends, because the same module stands under other prefixes in other
classes. Two sources: the classes built from their default configuration, and, for buffers that only other configurations
make, the calls of `register_buffer` in the text of the module.

What stays in float32 follows `from_pretrained` for float16 and bfloat16: `_keep_in_fp32_modules_strict` for both,
`_keep_in_fp32_modules` for float16 only, each a regular expression that is searched in the module's name after the renaming of
the checkpoint; and what the class itself creates in float32 whatever the default dtype is. The table has these expressions as
they are, and the ends of names that they do not match: those of the repository where it names a tensor otherwise.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import multiprocessing
import os
import re
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from classes import Built, Failed, configurations, lines_of, model_classes, walk
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

DATA = Path(__file__).parents[2] / "src/plan/library/transformers.toml"
# A last word is taken for a buffer's in any model if it is one in this many times more model types than it is a parameter in.
COMMON_RATIO = 8
# In this many model types a buffer, in none a parameter: the last word of a buffer in known models too.
EVERYWHERE = 20


@dataclass
class Name:
    """What one class says of one name: of the module's, or of the repository's for the same tensor."""

    buffer: bool = False
    # Whether it is a float of the state, so that a dtype matters.
    is_float: bool = False
    # Kept in float32 by a list of the class, or by its own dtype: for bfloat16 and float16, for float16.
    strict: bool = False
    loose: bool = False


@dataclass
class Facts:
    """What the classes of a model type say."""

    names: dict[str, Name] = field(default_factory=dict)
    strict: set[str] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)
    # Last words of buffers in the module's text.
    registered: set[str] = field(default_factory=set)


def is_found(globs: set[str], name: str) -> bool:
    """As `build_glob_alternation` searches."""
    return any(re.search(glob.replace("*", ".*"), name) for glob in globs)


def general(name: str) -> str:
    """A name with `*` for numbers."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def saved_names(built: Built, state: dict[str, torch.Tensor]) -> dict[str, str]:
    """The name in the repository of each tensor that it names otherwise, with the module's name that it is loaded as."""
    model = built.model
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    if not mapping:
        return {}
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = {}
    for name in revert_weight_conversion(model, dict(state)):
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed = name
        if renamed in state and renamed != name:
            found[name] = renamed
    return found


def add_class(facts: Facts, built: Built) -> None:
    """Adds what one class says."""
    model = built.model
    strict = set(model._keep_in_fp32_modules_strict or [])
    loose = strict | set(model._keep_in_fp32_modules or [])
    buffers = dict(model.named_buffers(remove_duplicate=False))
    state = model.state_dict(keep_vars=True)
    module_names = {**{name: name for name in buffers}, **{name: name for name in state}}
    named = {**module_names, **saved_names(built, state)}
    for name, of_module in named.items():
        tensor = state.get(of_module)
        own = tensor is not None and tensor.dtype == torch.float32
        is_float = tensor is not None and tensor.is_floating_point()
        said = facts.names.setdefault(general(name), Name())
        said.buffer |= of_module in buffers
        said.is_float |= is_float
        said.strict |= is_float and (own or is_found(strict, of_module))
        said.loose |= is_float and (own or is_found(loose, of_module))


@functools.cache
def registered_buffers(module) -> set[str]:
    """The names that the text of a module gives to buffers, as far as they are literal."""
    text = inspect.getsource(module)
    called = re.findall(r"register_buffer\(\s*[\"'](\w+)[\"']", text)
    return {*called, *re.findall(r"self\.(\w+) = (?:torch\.)?nn\.Buffer\(", text)}


def gather_part(model_types: list[str]) -> tuple[dict[str, Facts], list[str]]:
    """What the classes of some model types say, and which of them cannot be built."""
    all_facts: dict[str, Facts] = defaultdict(Facts)
    failed = []
    configs = configurations()
    for model_type in model_types:
        for cls in model_classes(model_type, configs[model_type]):
            facts = all_facts[model_type]
            facts.strict |= set(cls._keep_in_fp32_modules_strict or [])
            facts.loose |= set(cls._keep_in_fp32_modules or [])
            facts.registered |= registered_buffers(inspect.getmodule(cls))
        for built in walk([model_type], torch.bfloat16):
            if isinstance(built, Failed):
                failed.append(f"{built.model_type} {built.cls.__name__}: {built.reason}")
            else:
                add_class(all_facts[model_type], built)
    return dict(all_facts), failed


def gather() -> tuple[dict[str, Facts], list[str]]:
    """What all classes say, by model type."""
    model_types = sorted(configurations())
    count = os.cpu_count() or 1
    parts = [model_types[at :: 8 * count] for at in range(8 * count)]
    all_facts, failed = {}, []
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        for found, more in pool.map(gather_part, parts):
            all_facts |= found
            failed += more
    return all_facts, sorted(failed)


def last(name: str) -> str:
    """The last word of a name."""
    return name.rsplit(".", 1)[-1]


def ends(name: str, words_min: int = 1):
    """The ends of a name, the shortest first, whole words each. `^` begins the whole name."""
    words = name.split(".")
    for count in range(min(words_min, len(words)), len(words) + 1):
        yield ".".join(words[-count:])
    yield "^" + name


def has_end(name: str, end: str) -> bool:
    """Whether whole words at the end of a name are these."""
    return name == end or name.endswith("." + end) or "^" + name == end


def shortest_ends(wanted: set[str], others: set[str], usual: set[str]) -> list[str]:
    """Ends that match all of `wanted` and none of `others`, each as short as it can be. `usual` last words of parameters say
    nothing alone."""
    taken = {end for name in others for end in ends(name)}
    found = set()
    for name in wanted:
        found.add(next(end for end in ends(name, 1 + (last(name) in usual)) if end not in taken))
    return sorted(found)


@dataclass
class Row:
    """The table's row for a model type. Under any narrower dtype stays in float32 what an expression of `keep` or an end of
    `keep_ends` matches, but no end of `cast_ends`: names of the repository that the expressions match by chance."""

    buffers: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    keep_ends: list[str] = field(default_factory=list)
    # The same under float16 only.
    keep_f16: list[str] = field(default_factory=list)
    keep_f16_ends: list[str] = field(default_factory=list)
    cast_ends: list[str] = field(default_factory=list)

    def is_buffer(self, name: str) -> bool:
        return any(has_end(name, end) for end in self.buffers)

    def keeps(self, name: str, f16: bool) -> bool:
        globs = {*self.keep, *(self.keep_f16 if f16 else [])}
        named = [*self.keep_ends, *(self.keep_f16_ends if f16 else [])]
        is_kept = is_found(globs, name) or any(has_end(name, end) for end in named)
        return is_kept and not any(has_end(name, end) for end in self.cast_ends)


@dataclass
class Common:
    """What holds for many model types."""

    # Last words of buffers in every model.
    everywhere: list[str]
    # Last words of buffers in models that the library does not have, and those of them that stay in float32.
    buffers: list[str]
    keep: list[str]
    # Last words of parameters in most model types that have them.
    usual: set[str]


def common(all_facts: dict[str, Facts]) -> Common:
    """What holds for many model types. Of a single word, `embed` or `scale`, nothing follows in a model that nobody knows."""
    buffers, others, kept, cast = (defaultdict(set) for _ in range(4))
    for model_type, facts in all_facts.items():
        for name, said in facts.names.items():
            (buffers if said.buffer else others)[last(name)].add(model_type)
            if said.is_float:
                (kept if said.strict else cast)[last(name)].add(model_type)
    everywhere = {word for word, types in buffers.items() if len(types) >= EVERYWHERE and word not in others}
    in_most = {word for word, types in buffers.items() if len(types) >= COMMON_RATIO * len(others[word])}
    of_unknown = sorted(word for word in in_most - everywhere if "_" in word)
    keep = [word for word in of_unknown if len(kept[word]) > max(4, 4 * len(cast[word]))]
    usual = {word for word, types in others.items() if len(types) * COMMON_RATIO > len(buffers[word])}
    return Common(sorted(everywhere), of_unknown, keep, usual)


def row(facts: Facts, shared: Common) -> Row:
    """What the table says of a model type."""
    names = {name: said for name, said in facts.names.items() if last(name) not in shared.everywhere}
    buffers = {name for name, said in names.items() if said.buffer}
    found = Row(buffers=shortest_ends(buffers, set(names) - buffers, shared.usual))
    taken = {last(name) for name in set(names) - buffers}
    known = {last(end) for end in found.buffers} | set(shared.everywhere)
    found.buffers = sorted({*found.buffers, *(facts.registered - taken - known - shared.usual)})
    found.keep = sorted(facts.strict)
    found.keep_f16 = sorted(facts.loose - facts.strict)
    floats = {name: said for name, said in facts.names.items() if said.is_float}
    cast = {name for name in floats if found.keeps(name, True) and not floats[name].loose}
    found.cast_ends = shortest_ends(cast, set(floats) - cast, shared.usual)
    strict = {name for name, said in floats.items() if said.strict and not found.keeps(name, False)}
    found.keep_ends = shortest_ends(strict, {name for name, said in floats.items() if not said.strict}, shared.usual)
    loose = {name for name, said in floats.items() if said.loose and not found.keeps(name, True)}
    found.keep_f16_ends = shortest_ends(loose, {name for name, said in floats.items() if not said.loose}, shared.usual)
    return found


def toml_list(values: list[str]) -> str:
    return "[" + ", ".join("'" + value + "'" for value in values) + "]"


def wrapped(key: str, values: list[str]) -> str:
    line = f"{key} = {toml_list(values)}"
    if len(line) <= 128:
        return line
    return "\n".join([f"{key} = [", *lines_of([f"'{value}'" for value in values]), "]"])


def table(shared: Common, rows: dict[str, Row]) -> str:
    """The file."""
    lines = [
        f"# What the classes of transformers {transformers.__version__} say of each model type: which tensors are buffers, and which stay in",
        "# float32. Made by tests/families/buffers_and_float32.py, which says what the members mean. Not to be edited by hand.",
        "",
        "# Last words of the names of buffers in every model.",
        wrapped("everywhere", shared.everywhere),
        "",
        "# The same in models that the library does not have, and what stays in float32 there.",
        wrapped("common_buffers", shared.buffers),
        wrapped("common_keep", shared.keep),
        "",
        "# Model types of which there is no more to say.",
        wrapped("plain", [model_type for model_type, found in rows.items() if found == Row()]),
    ]
    for model_type, found in rows.items():
        if found == Row():
            continue
        lines += ["", f"[model.{model_type}]" if re.fullmatch(r"[\w-]+", model_type) else f"[model.'{model_type}']"]
        lines += [wrapped(key, values) for key, values in vars(found).items() if values]
    return "\n".join(lines) + "\n"


def problems_of(all_facts: dict[str, Facts], shared: Common, rows: dict[str, Row]) -> list[str]:
    """Names of which the row of a model type does not say what the classes say."""
    found = []
    for model_type, facts in all_facts.items():
        own = rows[model_type]
        for name, said in facts.names.items():
            is_buffer = last(name) in shared.everywhere or own.is_buffer(name)
            told = Name(is_buffer, said.is_float, own.keeps(name, False), own.keeps(name, True))
            if not said.is_float:
                told.strict, told.loose = said.strict, said.loose
            if told != said:
                found.append(f"{model_type}: {name}: the classes say {said}, the table {told}")
    return found


def main() -> None:
    all_facts, failed = gather()
    shared = common(all_facts)
    rows = {model_type: row(facts, shared) for model_type, facts in sorted(all_facts.items())}
    problems = problems_of(all_facts, shared, rows)
    text = table(shared, rows)
    if "--check" in sys.argv:
        found = DATA.read_text()
        changed = difflib.unified_diff(found.splitlines(), text.splitlines(), "the file", "the classes", lineterm="", n=1)
        problems.extend(changed)
    else:
        sys.stdout.write(text)
    print(*problems, sep="\n", file=sys.stderr)
    if "--failed" in sys.argv:
        print(*failed, sep="\n", file=sys.stderr)
    print(f"{len(all_facts)} model types, {len(failed)} classes not built, {len(problems)} problems", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
