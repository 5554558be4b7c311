"""The program against all model types of the pinned transformers: for one class of each, a repository with the names, shapes and
dtypes that it saves (files without data: holes), and what `ckfs plan` says of it. Run by hand; it takes some minutes.

    CKFS_BIN=target/debug/ckfs python tests/families/table.py [MODEL TYPE...]

Compared are, in layout `hf` over `fsdp=2`: that every tensor is shown, which are whole (the buffers), and which stay in float32
under `--dtype bf16` and `--dtype f16`.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]

import torch
from buffers_and_float32 import is_found, saved_names
from classes import Built, build_class, configurations, is_abstract, model_classes
from mounting import find_ckfs
from transformers.core_model_loading import revert_weight_conversion

CODES = {torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL", torch.uint8: "U8"}
# The class that holds most of a model, by the end of its name; else the last one.
ENDS = ("ForConditionalGeneration", "ForCausalLM", "Model")


def write(path: Path, built: Built, state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Writes the repository. Returns the module's name of each tensor in it."""
    saved = revert_weight_conversion(built.model, dict(state))
    renamed = saved_names(built, state)
    header, end = {}, 0
    for name, tensor in saved.items():
        code = "F32" if tensor.is_floating_point() else CODES[tensor.dtype]
        size = tensor.numel() * {"I64": 8, "BOOL": 1, "U8": 1}.get(code, 4)
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    built.config.architectures = [built.cls.__name__]
    built.config.save_pretrained(path)
    return {name: renamed.get(name, name) for name in saved}


def plan(path: Path, *flags: str) -> dict[str, dict]:
    command = [find_ckfs(), "plan", path, "--json", "--layout", "hf", "--allow-missing", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip()[:300])
    return {tensor["name"]: tensor for tensor in json.loads(done.stdout)["views"][0]["tensors"]}


def faults(built: Built) -> list[str]:
    """What the program says otherwise than the class."""
    model = built.model
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    state = model.state_dict()
    strict = set(model._keep_in_fp32_modules_strict or [])
    lists = {"bf16": strict, "f16": strict | set(model._keep_in_fp32_modules or [])}
    found = []
    with tempfile.TemporaryDirectory() as directory:
        of_module = write(Path(directory), built, state)
        for dtype, globs in lists.items():
            shown = plan(Path(directory), "--mesh", "fsdp=2", "--dtype", dtype)
            found += [f"{name}: not shown" for name in of_module.keys() - shown.keys()]
            for name in of_module.keys() & shown.keys():
                inner, tensor = of_module[name], shown[name]
                if inner not in state:
                    continue
                is_whole = not any(tensor["spec"])
                if tensor["shape"] and (inner in buffers) != is_whole:
                    found.append(f"{name}: {'whole' if is_whole else 'split'}, {'buffer' if inner in buffers else 'parameter'}")
                if state[inner].is_floating_point():
                    kept = is_found(globs, inner) or state[inner].dtype == torch.float32
                    if kept != (tensor["dtype"] == "F32"):
                        found.append(f"{name}: {tensor['dtype']} under {dtype}, {'kept' if kept else 'not kept'} by the class")
    return found


def main() -> None:
    compared = wrong = 0
    for model_type, config in sorted(configurations().items()):
        if sys.argv[1:] and model_type not in sys.argv[1:]:
            continue
        classes = [cls for cls in model_classes(model_type, config) if not is_abstract(cls)]
        ranked = sorted(classes, key=lambda cls: next((at for at, end in enumerate(ENDS) if cls.__name__.endswith(end)), 9))
        for cls in ranked[:1]:
            built = build_class(model_type, cls, config, torch.bfloat16)
            if not isinstance(built, Built):
                continue
            try:
                found = faults(built)
            except Exception as error:  # noqa: BLE001  a configuration that its own class does not save, a plan that is refused
                found = [f"{type(error).__name__}: {error}"]
            compared += 1
            wrong += bool(found)
            if found:
                print(f"{model_type} ({cls.__name__}): {len(found)} faults", *found[:4], sep="\n    ")
    print(f"{compared} model types compared, {wrong} with faults")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
