"""Which output heads are the embedding, from the classes of the pinned transformers.

    python tests/families/ties.py > src/checkpoint/dialects/tied.toml
    python tests/families/ties.py --check       compares that file with the classes; prints differences

`config.json` may say `tie_word_embeddings` at its top and in the text model's configuration. For each model type with an
`lm_head`, the class that has it is asked for all nine ways of saying and not saying so: what is tied is what
`_tied_weights_keys` of each of its modules say under the configuration of that module.
"""

from __future__ import annotations

import difflib
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from transformers import PreTrainedModel
from classes import Built, build_class, configurations, is_abstract, lines_of, model_classes
from transformers.core_model_loading import revert_weight_conversion

DATA = Path(__file__).parents[2] / "src/checkpoint/dialects/tied.toml"
HEAD, TIE = "lm_head.weight", "tie_word_embeddings"
# Members with the configuration of a text model.
TEXTS = ("text_config", "llm_config", "language_config", "thinker_config")
SAID = (None, True, False)
# Classes with a head, the one that holds most of a model first.
HEADED = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "LMHead")
# What the text of classes says that cannot be built here: their towers are of a library that is not installed.
UNBUILT = {"by_default": ["gemma3n"], "by_whole": ["gemma3n"], "by_either": ["fast_vlm"]}
# Lists of the types whose whole, or text model's, configuration ties by default where either may.
EITHER = ("either_whole", "either_text")
# Embeddings under names of other programs.
OTHER_EMBEDDINGS = ("tok_embeddings.weight",)


# Words in the names of classes that may have a head.
MAY_HAVE = (*HEADED, "ForMaskedLM", "ForPreTraining", "DoubleHeads", "ForSpeechToText")


def is_head(name: str) -> bool:
    return ("." + name).endswith("." + HEAD)


def headed(model_type: str, config: type) -> Built | None:
    """The class with a head."""
    classes = [cls for cls in model_classes(model_type, config) if not is_abstract(cls)]
    ranked = sorted(classes, key=lambda cls: next((at for at, word in enumerate(HEADED) if word in cls.__name__), 9))
    for cls in ranked:
        built = build_class(model_type, cls, config, torch.float32)
        if isinstance(built, Built) and any(map(is_head, built.model.state_dict())):
            return built
    return None


def other_head(built: Built) -> tuple[str, str] | None:
    """The head of another name than lm_head and the embedding that it is, unless the configuration says that it is not."""
    head = built.model.get_output_embeddings()
    names = [name for name, module in built.model.named_modules() if head is not None and module is head]
    if not names or is_head(f"{names[0]}.weight"):
        return None
    pairs = built.model.get_expanded_tied_weights_keys(all_submodels=True)
    return (f"{names[0]}.weight", pairs[f"{names[0]}.weight"]) if f"{names[0]}.weight" in pairs else None


def other_heads(model_types: list[str]) -> dict[str, tuple[str, str]]:
    """By class with a tied head of another name: head and embedding, as a repository has them."""
    found = {}
    for model_type in model_types:
        config = configurations()[model_type]
        classes = [cls for cls in model_classes(model_type, config) if any(word in cls.__name__ for word in MAY_HAVE)]
        for cls in classes:
            built = build_class(model_type, cls, config, torch.float32)
            pair = other_head(built) if isinstance(built, Built) else None
            if pair:
                marked = [{name: built.model.get_parameter(name)} for name in pair]
                found[cls.__name__] = tuple(next(iter(revert_weight_conversion(built.model, one)), *one) for one in marked)
    return found


def text_of(config) -> str | None:
    """The member with the text model's configuration."""
    return next((key for key in TEXTS if hasattr(getattr(config, key, None), TIE)), None)


def config_json(built: Built) -> dict:
    """What `save_pretrained` writes: with all that is not a default. What single layers have beside follows from their kinds."""

    def without(value):
        if isinstance(value, dict):
            return {key: without(member) for key, member in value.items() if key != "per_layer_config"}
        return value

    return without(json.loads(built.config.to_json_string()))


def told(built: Built, config: dict):
    """The configuration that transformers reads from this `config.json`."""
    cls = type(built.config)
    return cls.from_dict(cls._decode_special_floats(json.loads(json.dumps(config))))


def tied(built: Built, config: dict) -> tuple[str, str] | None:
    """Head and embedding, if they are tied with this `config.json`."""
    read = told(built, config)
    parts = [getattr(read, text_of(read) or "", None), read]
    words = {type(part): getattr(part, TIE, False) for part in parts if part is not None}
    modules = [module.config for module in built.model.modules() if isinstance(module, PreTrainedModel)]
    before = [(part, getattr(part, TIE, None)) for part in modules]
    for part in modules:
        if type(part) in words:
            setattr(part, TIE, words[type(part)])
    try:
        pairs = built.model.get_expanded_tied_weights_keys(all_submodels=True)
    finally:
        for part, value in before:
            setattr(part, TIE, value)
    heads = sorted(filter(is_head, pairs), key=len)
    return (heads[0], pairs[heads[0]]) if heads else None


def said(config: dict, text: str | None, outer: bool | None, inner: bool | None) -> dict:
    """The configuration, saying this."""
    made = {key: value for key, value in config.items() if key != TIE} | ({} if outer is None else {TIE: outer})
    if text:
        own = {key: value for key, value in dict(made.get(text) or {}).items() if key != TIE}
        made[text] = own | ({} if inner is None else {TIE: inner})
    return made


def answers(model_types: list[str]) -> dict[str, tuple[bool, dict, str | None]]:
    """By model type with a head: whether it has a text model's configuration, what is tied by what is said, and the name of
    the embedding in a repository."""
    found = {}
    for model_type in model_types:
        built = headed(model_type, configurations()[model_type])
        if built is None:
            continue
        config, text = config_json(built), text_of(built.config)
        by_word, source = {}, None
        try:
            for outer in SAID:
                for inner in SAID if text else (None,):
                    pair = tied(built, said(config, text, outer, inner))
                    by_word[outer, inner] = pair is not None
                    source = source or (pair and pair[1])
        except Exception as error:  # noqa: BLE001  a configuration that its own class does not read
            print(f"{model_type}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        if source:
            marked = {name: tensor for name, tensor in built.model.state_dict().items() if name == source}
            source = next(iter(revert_weight_conversion(built.model, marked)), source)
        found[model_type] = (bool(text), by_word, source)
    return found


def gather(ask) -> dict[str, tuple]:
    """What all model types answer."""
    count = os.cpu_count() or 1
    model_types = sorted(configurations())
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        parts = pool.map(ask, [model_types[at :: 8 * count] for at in range(8 * count)])
        return dict(sorted({key: found for part in parts for key, found in part.items()}.items()))


def defaults_of(by_word: dict) -> tuple[bool, bool]:
    """What the whole model's configuration and the text model's say if they say nothing, where either may tie."""
    return by_word[None, False], by_word[False, None]


def rule(has_text: bool, by_word: dict) -> str:
    """The list that a model type is in, beside `by_default`; "" where its own configuration counts, the only one."""
    if len(set(by_word.values())) == 1:
        return "always" if by_word[None, None] else "never"
    if not has_text:
        return ""
    words = [(outer, inner) for outer in SAID for inner in SAID]
    if all(by_word[word] == by_word[word[0], None] for word in words):
        return "by_whole"
    if all(by_word[word] == by_word[None, word[1]] for word in words):
        return "by_text"
    # What is left out counts as the default of its configuration.
    defaults = defaults_of(by_word)
    either = {word: any(own if said is None else said for said, own in zip(word, defaults)) for word in words}
    if by_word == either:
        return "by_either"
    return "" if by_word == {(outer, inner): bool(inner if outer is None else outer) for outer, inner in words} else "?"



def quoted(names) -> list[str]:
    return [f'"{name}"' for name in sorted(names)]


def short(embedding: str) -> str:
    """An embedding's name without a prefix. A word that says little goes with the one before it."""
    words = 2 + (embedding.split(".")[-2] in ("w", "embeddings"))
    return ".".join(embedding.split(".")[-words:])


def table_of_others(others: dict[str, tuple[str, str]]) -> list[str]:
    """The lines of heads of other names."""
    lines = [
        "",
        "# Heads of other names, each with the classes that have it: they are the embedding unless the configuration says no.",
        "[heads]",
    ]
    for head in sorted({head for head, _ in others.values()}):
        lines += [f'"{head}" = [', *lines_of(quoted(cls for cls, (own, _) in others.items() if own == head)), "]"]
    return lines


def table(found: dict[str, tuple[bool, dict, str | None]], others: dict[str, tuple[str, str]]) -> str:
    """The file."""
    lists = {name: [] for name in ("by_default", "always", "never", "by_either", *EITHER, "by_text", "by_whole")}
    embeddings = {*OTHER_EMBEDDINGS, *(short(embedding) for _, embedding in others.values())}
    for model_type, (has_text, by_word, source) in found.items():
        kind = rule(has_text, by_word)
        if kind:
            lists[kind].append(model_type)
        if kind == "?":
            raise ValueError(f"{model_type}: no rule ties so: {by_word}")
        if kind == "by_either":
            for name, default in zip(EITHER, defaults_of(by_word)):
                lists[name] += [model_type] if default else []
        if by_word[None, None] and kind not in ("always", "never"):
            lists["by_default"].append(model_type)
        if source:
            embeddings.add(short(source))
    for name, more in UNBUILT.items():
        lists[name] += [model_type for model_type in more if model_type not in found]
    texts = {
        "by_default": "Tied if nothing is said.",
        "always": "Tied whatever is said: for these models the word has another meaning.",
        "never": "Never tied: no class of theirs has a tied head.",
        "by_either": "Tied if the whole model's configuration says so, or that of the text model.",
        "either_whole": "Of these, the whole model's configuration says so if it says nothing.",
        "either_text": "Of these, the text model's configuration says so if it says nothing.",
        "by_text": "Only the configuration of the text model counts.",
        "by_whole": "Only the configuration of the whole model counts, though there is one of a text model.",
    }
    lines = [
        f"# The output heads that are the embedding: how transformers {transformers.__version__} reads `tie_word_embeddings`, by",
        "# model_type. The lists are of models whose head is called lm_head. Made by tests/families/ties.py. Not to be edited by hand.",
    ]
    for name, text in texts.items():
        lines += ["", f"# {text}", f"{name} = [", *lines_of(quoted(lists[name])), "]"]
    lines += ["", "# Names of embeddings that a head may be, without a prefix.", "embeddings = ["]
    lines += [*lines_of(quoted(embeddings)), "]", *table_of_others(others)]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = table(gather(answers), gather(other_heads))
    if "--check" not in sys.argv:
        sys.stdout.write(text)
        return
    found = DATA.read_text().splitlines()
    changed = list(difflib.unified_diff(found, text.splitlines(), "the file", "the classes", lineterm="", n=1))
    print(*changed, sep="\n", file=sys.stderr)
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
