"""How the names of each model type begin, from the classes of the pinned transformers.

    python tests/families/names.py > src/plan/library/names.toml
    python tests/families/names.py --check       compares all classes with that file; prints differences

A repository of which no name begins as those of its model type has the names of a wrapper or of another program: the library
would load none of its tensors. The table lists the first word of each name, of every class of a model type: the module's names,
those of repositories that the library renames when it loads them, and both without the prefix of the base model, since a head's
class loads the tensors of the model alone. `model` is also a wrapper's word: of it the second words are told. Before them stands
how the names of the classes begin: a class that begins otherwise is not the library's.
"""

from __future__ import annotations

import difflib
import multiprocessing
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from buffers_and_float32 import general
from classes import Failed, configurations, walk
from transformers.core_model_loading import revert_weight_conversion

DATA = Path(__file__).parents[2] / "src/plan/library/names.toml"


def gather_part(model_types: list[str]) -> dict[str, tuple[list[str], set[str]]]:
    """The names of the classes of some model types, and how the names of their tensors begin."""
    found: dict[str, tuple[list[str], set[str]]] = defaultdict(lambda: ([], set()))
    for built in walk(model_types):
        classes, begins = found[built.model_type]
        classes.append(built.cls.__name__)
        if isinstance(built, Failed):
            continue
        state = built.model.state_dict(keep_vars=True)
        base = f"{built.model.base_model_prefix}."
        for name in {*state, *revert_weight_conversion(built.model, dict(state))}:
            for each in {name, name.removeprefix(base)}:
                first, *rest = general(each).split(".")
                begins.add(f"model.{rest[0]}" if first == "model" and rest else first)
    return dict(found)


def gather() -> dict[str, tuple[list[str], set[str]]]:
    """What all classes say, by model type."""
    model_types = sorted(configurations())
    count = os.cpu_count() or 1
    parts = [model_types[at :: 8 * count] for at in range(8 * count)]
    found = {}
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(gather_part, parts):
            found |= part
    return dict(sorted(found.items()))


def table(found: dict[str, tuple[list[str], set[str]]]) -> str:
    """The file."""
    lines = [
        f"# How names begin in transformers {transformers.__version__}, by model type: those of its classes, then those of its tensors.",
        "# Made by tests/families/names.py, which says what the members mean. Not to be edited by hand.",
        "",
    ]
    for model_type, (classes, begins) in found.items():
        if begins:
            lines.append(f"'{model_type}' = '{' '.join((os.path.commonprefix(classes), *sorted(begins)))}'")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = table(gather())
    if "--check" not in sys.argv:
        sys.stdout.write(text)
        return
    lines = (DATA.read_text().splitlines(), text.splitlines())
    changed = list(difflib.unified_diff(*lines, "the file", "the classes", lineterm="", n=1))
    print(*changed, sep="\n", file=sys.stderr)
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
