"""The download step of vLLM and of SGLang, by the engines' own module files, unmodified: `setup.sh` unpacks them from the published
distributions. What these files import of the rest of the engine, which needs a GPU's libraries, is a stand-in that does nothing.

    engine_process.py vllm|sglang MODEL [REVISION...]
    engine_process.py vllm|sglang --stream ADDRESS...

Prints a JSON document for each revision: what the engine found of the repository, the directory that it downloaded to, and a digest of each
tensor that its iterator gives; with --stream the tensors of files in a bucket, by Run:ai's model streamer.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path

ENGINES = Path(sys.prefix) / "engines"
# What else SGLang's files import at their beginning and the environment of the tests lacks. None of it is of the download step.
ABSENT = ("PIL", "orjson", "pybase64", "starlette", "triton")


class _Nothing(type):
    """A class of which everything is nothing: a base, a decorator, a constant, a flag that is off."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __bool__(cls) -> bool:
        return False

    def __iter__(cls) -> object:
        return iter(())

    def __or__(cls, other: object) -> object:
        return object

    __ror__ = __or__


def stand_in(name: str) -> type:
    return _Nothing(name, (_StandIn,), {})


class _StandIn:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()

    def __call__(self, *args: object, **_: object) -> object:
        # A decorator gives back what it is given.
        return args[0] if len(args) == 1 and callable(args[0]) else _StandIn()

    def __bool__(self) -> bool:
        return False


class _StandInModule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = stand_in(name)
        setattr(self, name, made)
        return made


class _Engine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of an engine that are to be real, and stand-ins for all others of it and for those that are absent."""

    def __init__(self, engine: str, real: set[str], absent: tuple[str, ...]) -> None:
        self.engine, self.real, self.absent = engine, real, absent

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in (self.engine, *self.absent):
            return None
        if name in self.real:
            return importlib.util.spec_from_file_location(name, ENGINES / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@functools.cache
def modules(engine: str, *names: str, absent: tuple[str, ...] = ()) -> list[types.ModuleType]:
    """The engine's own modules of these names."""
    names = tuple(f"{engine}.{name}" for name in names)
    finder = _Engine(engine, set(names), absent)
    sys.meta_path.insert(0, finder)
    found = [importlib.import_module(name) for name in names]
    # Libraries that are here ask later whether these are: they are not.
    finder.absent = ()
    for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
        del sys.modules[name]
    assert all(Path(module.__file__).is_relative_to(ENGINES) for module in found)
    return found


def digests(pairs: object) -> dict[str, str]:
    """A digest of each tensor's dtype, shape and bytes."""
    import torch

    found = {}
    for name, tensor in pairs:
        body = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + body).hexdigest()
    return found


INDEX = "model.safetensors.index.json"
PATTERNS = ["*.safetensors", "*.bin", "*.pt"]


def vllm(model: str, revision: str | None) -> dict[str, object]:
    repo, config, weights = modules(
        "vllm", "transformers_utils.repo_utils", "transformers_utils.config", "model_executor.model_loader.weight_utils"
    )
    resources = importlib.import_module("vllm.utils.cpu_resource_utils")
    resources.get_cgroup_memory_limit = resources.get_cgroup_memory_usage = lambda: None
    commit = repo.resolve_revision(model, revision)
    found: dict[str, object] = {
        "commit": commit.resolved,
        "files": sorted(repo.list_repo_files(model, revision=revision)),
        "config": repo.file_or_path_exists(model, "config.json", revision),
        "absent": repo.file_or_path_exists(model, "params.json", revision),
        "mistral": repo.is_mistral_model_repo(model, revision=revision),
        "config.json": repo.get_hf_file_to_dict("config.json", model, revision),
        "absent.json": repo.get_hf_file_to_dict("absent.json", model, revision),
        "headers": config.get_safetensors_params_metadata(model, revision=revision),
        "lm_head": config.checkpoint_has_lm_head(model, revision=revision),
        "small": sorted(path.name for path in Path(repo.get_non_weight_snapshot_path(model, revision)).iterdir()),
    }
    folder = weights.download_weights_from_hf(model, None, PATTERNS, revision, ignore_patterns=["original/**/*"])
    weights.download_safetensors_index_file_from_hf(model, INDEX, None, revision=revision)
    files = sorted(map(str, Path(folder).glob("*.safetensors")))
    files = weights.filter_files_not_needed_for_inference(weights.filter_duplicate_safetensors_files(files, folder, INDEX))
    found["folder"] = str(folder)
    found["tensors"] = digests(weights.safetensors_weights_iterator(files, False))
    return found


def sglang(model: str, revision: str | None) -> dict[str, object]:
    common, utils, weights = modules(
        "sglang", "srt.utils.hf_transformers.common", "srt.utils.common", "srt.model_loader.weight_utils", absent=ABSENT
    )
    weights.find_local_repo_dir = utils.find_local_repo_dir
    weights.is_in_ci = weights.is_cpu = lambda: False
    found: dict[str, object] = {
        "config": common._remote_file_exists(model, "config.json", revision),
        "absent": common._remote_file_exists(model, "hf_quant_config.json", revision),
        "gguf": common.resolve_hf_gguf_reference(model, revision),
        "fp8_experts": utils.has_fp8_weights_in_checkpoint(model),
        "small": sorted(path.name for path in Path(common.download_from_hf(model)).iterdir()),
    }
    folder = weights.download_weights_from_hf(model, None, PATTERNS, revision, ignore_patterns=["original/**/*"])
    # Once more: what is there is complete, by the index, and is not asked for again.
    assert weights.download_weights_from_hf(model, None, PATTERNS, revision) == folder
    weights.download_safetensors_index_file_from_hf(model, INDEX, None, revision)
    files = sorted(map(str, Path(folder).glob("*.safetensors")))
    files = weights.filter_files_not_needed_for_inference(weights.filter_duplicate_safetensors_files(files, folder, INDEX))
    found["folder"] = str(folder)
    found["tensors"] = digests(weights.safetensors_weights_iterator(files))
    return found


def streamed(engine: str, addresses: list[str]) -> dict[str, object]:
    (weights,) = modules(engine, "model_executor.model_loader.weight_utils" if engine == "vllm" else "srt.model_loader.weight_utils")
    if engine == "vllm":
        return {"tensors": digests(weights.runai_safetensors_weights_iterator(addresses, False))}
    weights.set_runai_streamer_env(stand_in("LoadConfig")())
    return {"tensors": digests(weights.runai_safetensors_weights_iterator(addresses))}


def encoders(folder: str, prefixes: dict[str, str]) -> list[str]:
    """The files that vLLM reads with --mm-encoder-only. `prefixes` is what the model's class has as `hf_to_vllm_mapper`."""
    (weights,) = modules("vllm", "model_executor.model_loader.weight_utils")

    def map_name(name: str) -> str:
        for old, new in prefixes.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        return name

    mapper = types.SimpleNamespace(orig_to_new_prefix=prefixes, map_name=map_name) if prefixes else None
    text = weights.resolve_mm_encoder_only_lm_prefixes(["language_model"], weights_mapper=mapper)
    files = sorted(map(str, Path(folder).glob("*.safetensors")))
    return weights.filter_mm_encoder_only_safetensors_files(files, folder, INDEX, text, weights_mapper=mapper)


def main() -> None:
    if sys.argv[2] == "--encoders":
        print(json.dumps(encoders(sys.argv[3], json.loads(sys.argv[4]))))
        return
    if sys.argv[2] == "--stream":
        print(json.dumps(streamed(sys.argv[1], sys.argv[3:])))
        return
    for revision in sys.argv[3:] or [None]:
        print(json.dumps({"vllm": vllm, "sglang": sglang}[sys.argv[1]](sys.argv[2], revision)))


if __name__ == "__main__":
    main()
