"""Digests of the states of vLLM's ranks, as vLLM's own classes make them of the repositories of `vllm_repos.py`.

    PYTHONPATH=WHEEL python tests/python/vllm_process.py tests/python/vllm_states.json
    PYTHONPATH=WHEEL python tests/python/vllm_process.py update REPOSITORY DIRECTORY …

WHEEL is an unpacked `vllm-0.33.0` wheel. The model's class, its layers, its `load_weights` and the rule by which a state leaves out
shared tensors are vLLM's, unchanged, on the CPU. What has no part in names and values is replaced: process groups by numbers, the
choice of a kernel for experts, and packages that are not installed by empty ones.

`update` loads a model from a repository, gives it the weights of each directory in place by vLLM's own `reload_weights(weights_path=…)`,
layer by layer, and compares its state with that of a model that is loaded from there.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import pickle
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

STUBS = {"xgrammar", "torchvision", "llguidance", "outlines_core", "lmformatenforcer", "torchaudio", "flashinfer", "numba"}
# Tensor ranks, pipeline ranks, whether experts are spread over the ranks.
SETTINGS = [
    (1, 1, False), (2, 1, False), (4, 1, False), (2, 2, False), (1, 4, False), (2, 1, True), (4, 1, True), (2, 2, True),
]  # fmt: skip


def code_of(dtype: str) -> str:
    return {"torch.bfloat16": "BF16", "torch.float32": "F32"}[dtype]


def digest(state: dict[str, tuple[str, tuple[int, ...], bytes]]) -> str:
    """Of names, dtypes, shapes and bytes."""
    sum256 = hashlib.sha256()
    for name, (code, shape, data) in sorted(state.items()):
        sum256.update(f"{name} {code} {list(shape)}\n".encode() + data)
    return sum256.hexdigest()


class Nothing(type):
    """A class that has every member."""

    def __getattr__(cls, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class Stub(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class Finder:
    """Finds the packages of `STUBS` where they are not installed."""

    def find_spec(self, name: str, _path: object = None, _target: object = None):
        known = name.partition(".")[0] in STUBS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: Stub) -> None: ...


class Group:
    """A process group of which only numbers are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size, self.ranks = size, list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = types.SimpleNamespace(size=lambda: size, rank=lambda: rank)


def prepare() -> None:
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    sys.meta_path.append(Finder())
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as experts
    import vllm.model_executor.models.registry as registry
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    experts.select_unquantized_moe_backend = lambda moe_config: (UnquantizedMoeBackend.TRITON, None)
    # In this process: another would lack what was replaced.
    info = registry._ModelInfo
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: info.from_model_cls(self.load_model_cls())


def loaded(repo: Path, rank: tuple[int, int], setting: tuple[int, int, bool]) -> tuple[object, object]:
    """The configuration and the model of one tensor and pipeline rank, loaded from the repository."""
    import torch
    import vllm.distributed.parallel_state as groups
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
    from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
    from vllm.utils.torch_utils import set_default_torch_dtype

    (tp, pp), (tps, pps, spread) = rank, setting
    # Its keys are addresses, which models of one process share.
    _model_to_pp_missing_layer_names.clear()
    groups._TP, groups._PP, groups._EP = Group(tp, tps), Group(pp, pps), Group(tp, tps)
    groups._WORLD = Group(pp * tps + tp, tps * pps)
    for name in ("_DP", "_PCP", "_DCP", "_ETP", "_EPLB"):
        setattr(groups, name, Group(0, 1))
    model_config = ModelConfig(
        model=str(repo), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, enforce_eager=True
    )
    parallel = ParallelConfig(
        tensor_parallel_size=tps, pipeline_parallel_size=pps, enable_expert_parallel=spread,
        distributed_executor_backend="external_launcher" if tps * pps > 1 else None,
    )  # fmt: skip
    config = VllmConfig(
        model_config=model_config, parallel_config=parallel, device_config=DeviceConfig("cpu"), load_config=LoadConfig()
    )
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(config, model_config=model_config)
        for parameter in model.parameters():
            # What no weight is loaded into is then noticed.
            parameter.data.fill_(7)
        model.load_weights(safetensors_weights_iterator(sorted(map(str, repo.glob("model*.safetensors"))), False))
    return config, model


def state_of(model: object) -> dict:
    """The state that vLLM's `ShardedStateLoader` would save and load."""
    import torch
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    state = ShardedStateLoader._filter_subtensors(model.state_dict())
    raw = {name: np.ascontiguousarray(tensor.detach().reshape(-1).view(torch.uint8).numpy()) if tensor.dim() else
           tensor.reshape(1).view(torch.uint8).numpy() for name, tensor in state.items()}  # fmt: skip
    return {name: (code_of(str(state[name].dtype)), tuple(state[name].shape), raw[name].tobytes()) for name in state}


def update(repo: Path, versions: list[Path]) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    alone = (0, 0), (1, 1, False)

    def processed(place: Path) -> tuple[object, object]:
        config, model = loaded(place, *alone)
        with set_current_vllm_config(config):
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        return config, model

    config, model = processed(repo)
    before = state_of(model)
    for version in versions:
        with set_current_vllm_config(config):
            reload_weights(config, model, weights_iterator=None, weights_path=str(version), is_checkpoint_format=True)
        state = state_of(model)
        assert state == state_of(processed(version)[1]), version
        print(f"{version}: {sum(state[name] != before[name] for name in state)} of {len(state)} tensors changed")
        before = state


def main(out: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import vllm_repos

    made: dict[str, dict[str, str | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, build in vllm_repos.BUILDERS.items():
            repo = build(Path(folder) / name)
            dense = not any("experts" in tensor for tensor in repo.tensors)
            for tps, pps, spread in SETTINGS:
                if (spread and dense) or pps > repo.config.get("text_config", repo.config)["num_hidden_layers"]:
                    continue
                for pp in range(pps):
                    for tp in range(tps):
                        key = f"tp={tps} pp={pps} ep={int(spread)} rank={tp} stage={pp}"
                        try:
                            state = state_of(loaded(repo.path, (tp, pp), (tps, pps, spread))[1])
                        except ZeroDivisionError:
                            # gpt-oss has no copies of key/value heads.
                            made.setdefault(name, {})[key] = None
                            continue
                        made.setdefault(name, {})[key] = digest(state)
                        if kept := os.environ.get("CKFS_VLLM_STATES"):
                            (Path(kept) / f"{name} {key}.pickle").write_bytes(pickle.dumps(state))
            print(name, flush=True)
    out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    prepare()
    if sys.argv[1] == "update":
        update(Path(sys.argv[2]), [Path(version) for version in sys.argv[3:]])
    else:
        main(Path(sys.argv[1]))
