"""The table of families: the program against all model types of the pinned transformers, one row each.

    CKFS_BIN=target/debug/ckfs python tests/families/table.py [MODEL TYPE...]

For one class of each model type a repository is written with the names and shapes that it saves (files without data: holes),
and compared is what `ckfs plan` says of it, in layout `hf`:

- `tensors`: every tensor is shown, with its shape;
- `ties`: `lm_head` is the embedding exactly where transformers ties it, with the class's own configuration, and with
  `tie_word_embeddings` said otherwise, at the top and in the text model's;
- `float32`: what stays in float32 under `--dtype bf16` and `--dtype f16`;
- `buffers`: over `fsdp=2`, buffers are whole, and parameters are split;
- `split`: over `tensor=2`, each module is cut as the plan of transformers says, or its whole block is whole, and of the other
  blocks inputs are cut if and only if the output is.

Run by hand; it takes some minutes. `-` says that there is nothing to compare. Exits with 1 if any row has a fault.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from buffers_and_float32 import is_found, saved_names
from classes import Built, Failed, build_class, configurations, is_abstract, model_classes
from mounting import find_ckfs
from tensor_parallel import plan_of, wrong_cuts
from ties import HEAD, HEADED, TIE, config_json, is_head, said, text_of, tied
from transformers.core_model_loading import revert_weight_conversion

# Another word for layers in what a class saves, which the program shows under the word of the model's releases, by model type: the
# renames of Kimi K2.5 that give its tower `blocks` do so to the text model's layers when they are turned round.
RESPELLED = {"kimi_k25": ("language_model.model.blocks.", "language_model.model.layers.")}
CODES = {torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL", torch.uint8: "U8"}
# The class that holds most of a model, by the end of its name; else the last one.
ENDS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "Model")
COLUMNS = ("tensors", "ties", "float32", "buffers", "split")

Faults = dict[str, list[str] | None]


def write(path: Path, tensors: dict[str, torch.Tensor], config: dict) -> Path:
    """Writes a repository whose weights are a hole."""
    path.mkdir()
    header, end = {}, 0
    for name, tensor in tensors.items():
        code = "F32" if tensor.is_floating_point() else CODES[tensor.dtype]
        size = tensor.numel() * {"I64": 8, "BOOL": 1, "U8": 1}.get(code, 4)
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (path / "config.json").write_text(json.dumps(config))
    return path


def plan(path: Path, *flags: str) -> dict[str, dict]:
    command = [find_ckfs(), "plan", path, "--json", "--layout", "hf", "--allow-missing", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(flags)}: {done.stderr.strip()[:300]}")
    return {tensor["name"]: tensor for tensor in json.loads(done.stdout)["views"][0]["tensors"]}


def compare_ties(
    root: Path, built: Built, saved: dict[str, torch.Tensor], of_module: dict[str, str], config: dict
) -> list[str] | None:
    """What the program says otherwise of the head."""
    state = built.model.state_dict()
    if not any(map(is_head, state)) or not any(word in built.cls.__name__ for word in HEADED):
        return None
    # A repository may have another name for it.
    headless = {name: tensor for name, tensor in saved.items() if not is_head(of_module[name])}
    text = text_of(built.config)
    found = []
    words = [(None, None), (True, None), (False, None), (None, True), (None, False), (False, True)]
    for number, (outer, inner) in enumerate(words if text else words[:3]):
        told = said(config, text, outer, inner)
        try:
            pair = tied(built, told)
        except StrictDataclassClassValidationError:
            # A class may refuse to be told so.
            continue
        shown = plan(write(root / f"ties{number}", headless, told), "--tied", "alias").get(HEAD)
        what = f"{TIE} {outer}, in {text} {inner}"
        if (shown is not None) != (pair is not None):
            found.append(f"{what}: {'tied' if pair else 'not tied'} by transformers, {'tied' if shown else 'not tied'} by ckfs")
        elif shown and shown["shape"] != list(state[pair[1]].shape):
            found.append(f"{what}: {HEAD} of shape {shown['shape']}, the embedding is {pair[1]}")
    return found


def compare(built: Built, root: Path) -> Faults:
    """What the program says otherwise than the class, by column."""
    model, state = built.model, built.model.state_dict()
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    strict = set(model._keep_in_fp32_modules_strict or [])
    lists = {"bf16": strict, "f16": strict | set(model._keep_in_fp32_modules or [])}
    built.config.architectures = [built.cls.__name__]
    config = config_json(built)
    saved = revert_weight_conversion(model, dict(state))
    renamed = saved_names(built, state)
    of_module = {name: renamed.get(name, name) for name in saved}
    ties = {head for head in getattr(model, "all_tied_weights_keys", {}) if is_head(head)}
    stored = {name: tensor for name, tensor in saved.items() if of_module[name] not in ties}
    path = write(root / "model", stored, config)
    found: Faults = {column: [] for column in COLUMNS}
    with ThreadPoolExecutor(2) as pool:
        cut = pool.submit(plan, path, "--mesh", "tensor=2")
        by_dtype = {dtype: pool.submit(plan, path, "--mesh", "fsdp=2", "--dtype", dtype) for dtype in lists}
        shown = {dtype: future.result() for dtype, future in by_dtype.items()}
        cut = cut.result()
    ties = compare_ties(root, built, saved, of_module, config)
    saved_word, shown_word = RESPELLED.get(built.model_type, ("", ""))
    stored = {name.replace(saved_word, shown_word, 1): tensor for name, tensor in stored.items()}
    of_module = {name.replace(saved_word, shown_word, 1): module for name, module in of_module.items()}
    for dtype, tensors in shown.items():
        found["tensors"] += [f"{name}: not shown" for name in stored.keys() - tensors.keys()]
        for name in stored.keys() & tensors.keys():
            inner, tensor = of_module[name], tensors[name]
            if tensor["shape"] != list(stored[name].shape):
                found["tensors"].append(f"{name}: {tensor['shape']}, expected {list(stored[name].shape)}")
            if inner not in state:
                continue
            is_whole = not any(tensor["spec"])
            if tensor["shape"] and (inner in buffers) != is_whole:
                kind = "buffer" if inner in buffers else "parameter"
                found["buffers"].append(f"{name}: {'whole' if is_whole else 'split'}, a {kind}")
            if state[inner].is_floating_point():
                kept = is_found(lists[dtype], inner) or state[inner].dtype == torch.float32
                if kept != (tensor["dtype"] == "F32"):
                    by_class = "kept" if kept else "not kept"
                    found["float32"].append(f"{name}: {tensor['dtype']} under {dtype}, {by_class} by the class")
    found["ties"] = ties
    found["split"] = list(wrong_cuts(cut.values(), plan_of(config | {"model_type": built.model_type})))
    return found


def main_class(model_type: str, config: type) -> Built | Failed | None:
    """The class that holds most of a model, of those that can be built."""
    classes = [cls for cls in model_classes(model_type, config) if not is_abstract(cls)]
    ranked = sorted(classes, key=lambda cls: next((at for at, end in enumerate(ENDS) if cls.__name__.endswith(end)), 9))
    failed = None
    for cls in ranked:
        built = build_class(model_type, cls, config, torch.bfloat16)
        if isinstance(built, Built):
            return built
        failed = failed or built
    return failed


def main() -> None:
    print(f"{'model type':40} {'class':44} {' '.join(f'{column:7}' for column in COLUMNS)}")
    compared = wrong = without = 0
    for model_type, config in sorted(configurations().items()):
        if sys.argv[1:] and model_type not in sys.argv[1:]:
            continue
        built = main_class(model_type, config)
        if not isinstance(built, Built):
            without += 1
            print(f"{model_type:40} not built: {built.reason if built else 'no class of its own'}")
            continue
        with tempfile.TemporaryDirectory() as directory:
            try:
                found = compare(built, Path(directory))
            except Exception as error:  # noqa: BLE001  a configuration that its own class does not save, a plan that is refused
                found = dict.fromkeys(COLUMNS) | {"tensors": [f"{type(error).__name__}: {error}"]}
        cells = ["-" if faults is None else f"{len(faults)} wrong" if faults else "ok" for faults in found.values()]
        print(f"{model_type:40} {built.cls.__name__:44} {' '.join(f'{cell:7}' for cell in cells)}", flush=True)
        for column, faults in found.items():
            for fault in (faults or [])[:4]:
                print(f"    {column}: {fault}", flush=True)
        compared += 1
        wrong += any(found.values())
    print(f"{compared} model types compared, {wrong} with faults, {without} without a class that can be built")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
