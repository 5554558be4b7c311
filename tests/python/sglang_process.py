"""Digests of the states of SGLang's ranks, as SGLang's own classes make them of the repositories of `sglang_repos.py`.

    PYTHONPATH=WHEEL python tests/python/sglang_process.py tests/python/sglang_states.json
    PYTHONPATH=WHEEL python tests/python/sglang_process.py load REPOSITORY '[[STATE, RANKS, SPREAD, OPTION], …]'
    PYTHONPATH=WHEEL python tests/python/sglang_process.py update REPOSITORY DIRECTORY …

WHEEL is an unpacked `sglang-0.5.23` wheel; beside the environment of the tests its imports need `triton pillow orjson msgspec pyzmq fastapi
pybase64 einops setproctitle partial_json_parser dill openai xgrammar sentencepiece apache-tvm-ffi`. The model's class, its layers, its
`load_weights`, `process_weights_after_loading` and the rule by which a state leaves out shared tensors are SGLang's, unchanged, on the CPU.
What has no part in names and values is replaced: process groups by numbers, and packages that are not installed by empty ones. Where a
class asks for the GPU (shared experts), the answer is one of capability 9.0.

`load` fills models by SGLang's own `ShardedStateLoader` from directories of states, and compares each with the one that is loaded from
the repository: its state, and what attention derives from it. `update` loads a model from a repository, gives it the weights of each
directory in place by SGLang's own `update_weights_from_disk`, and compares its state with that of a model that is loaded from there.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import vllm_process
from vllm_process import Group, code_of, digest

# SGLang's option for a parameter of the layout.
ARGUMENTS = {"": {}, "fuse_shared=false": {"disable_shared_experts_fusion": True}, "moe_runner=triton": {"moe_runner_backend": "triton"}}


def prepare() -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    vllm_process.STUBS |= {"IPython", "vllm"}
    sys.meta_path.append(vllm_process.Finder())
    import logging

    import torch
    import transformers
    import sglang.srt.model_loader.loader as loader
    import sglang.srt.models.deepseek_v2 as deepseek
    import sglang.srt.models.glm4_moe as glm4_moe
    from sglang.srt.layers.rotary_embedding import get_rope

    logging.disable(logging.WARNING)
    # As the code in the model's own repository, which SGLang runs for it.
    transformers.AutoConfig.register("kimi_k2", type("KimiK2Config", (transformers.DeepseekV3Config,), {"model_type": "kimi_k2"}))
    # The one for the CPU takes no plain rotation; neither has a part in the state.
    deepseek.get_rope_wrapper = lambda *args, device=None, **more: get_rope(*args, **more)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    resolve = loader.resolve_shared_experts_config

    def on_a_gpu(*args: object) -> object:
        try:
            deepseek._is_cuda = glm4_moe._is_cuda = True
            return resolve(*args)
        finally:
            deepseek._is_cuda = glm4_moe._is_cuda = False

    loader.resolve_shared_experts_config = on_a_gpu


def place(repo: Path, rank: int, ranks: int, spread: bool, option: str) -> object:
    """Makes this process a rank of an engine, and gives the model's configuration."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ARGUMENTS[option]
    if json.loads((repo / "config.json").read_text())["model_type"] == "gpt_oss" and not spread and not arguments:
        # SGLang's choice where its package of kernels is installed.
        arguments = {"moe_runner_backend": "triton_kernel"}
    args = ServerArgs(
        model_path=str(repo), tp_size=ranks, ep_size=ranks if spread else 1, device="cpu", skip_tokenizer_init=True, dtype="bfloat16",
        **arguments,
    )  # fmt: skip
    get_parallel().clear_stamp()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    parallel, whole = get_parallel(), Group(rank, ranks)
    parallel.override_permanently(
        pp_group=Group(0, 1), world_group=whole, tp_group=whole, attn_tp_group=whole,
        moe_tp_group=Group(parallel.moe_tp_rank, parallel.moe_tp_size), moe_ep_group=Group(parallel.moe_ep_rank, parallel.moe_ep_size),
    )  # fmt: skip
    initialize_moe_config()
    return ModelConfig.from_server_args(args)


def loaded(config: object, repo: Path) -> object:
    """The model, loaded from the repository."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator

    with set_default_torch_dtype(torch.bfloat16):
        model = _initialize_model(config, LoadConfig())
        for parameter in model.parameters():
            # What no weight is loaded into is then noticed.
            parameter.data.fill_(7)
        files = sorted(map(str, repo.glob("model*.safetensors")))
        DefaultModelLoader.load_weights_and_postprocess(model, safetensors_weights_iterator(files), torch.device("cpu"))
    return model


def state_of(model: object) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What SGLang's `ShardedStateLoader` would save and load."""
    import torch
    from sglang.srt.model_loader.loader import ShardedStateLoader

    found = {}
    for name, tensor in ShardedStateLoader._filter_subtensors(model.state_dict()).items():
        raw = np.ascontiguousarray(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        found[name] = (code_of(str(tensor.dtype)), tuple(tensor.shape), raw.tobytes())
    return found


def derived(model: object) -> dict[str, bytes]:
    """What DeepSeek's attention computes of `kv_b_proj` after loading, which is in no state."""
    import torch

    found = {}
    for name, module in model.named_modules():
        for word in ("w_kc", "w_vc"):
            if isinstance(tensor := vars(module).get(word), torch.Tensor):
                found[f"{name}.{word}"] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def load(repo: Path, state: Path, ranks: int, spread: bool, option: str) -> None:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import ShardedStateLoader

    for rank in range(ranks):
        config = place(repo, rank, ranks, spread, option)
        wanted = loaded(config, repo)
        config.model_path = str(state)
        loader = ShardedStateLoader(LoadConfig(load_format="sharded_state"))
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        assert state_of(model) == state_of(wanted), rank
        assert derived(model) == derived(wanted), rank
        print(f"{ranks} {spread} {option} rank {rank}: {len(state_of(model))} tensors, {len(derived(model))} derived")


def update(repo: Path, versions: list[Path]) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    config = place(repo, 0, 1, False, "")
    model = loaded(config, repo)
    updater = WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, model_config=config, custom_weight_loaders={}, get_model=lambda: model,
        update_model_fields=lambda *_, **__: None, recapture_cuda_graph=lambda: None, get_model_runner=lambda: None,
    )  # fmt: skip
    before = state_of(model)
    for version in versions:
        done, said = updater.update_weights_from_disk(str(version), "auto")
        assert done, said
        state = state_of(model)
        assert state == state_of(loaded(place(version, 0, 1, False, ""), version)), version
        print(f"{version}: {sum(state[name] != before[name] for name in state)} of {len(state)} tensors changed")
        before = state


def main(out: Path) -> None:
    import sglang_repos

    made: dict[str, dict[str, str | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, build in sglang_repos.BUILDERS.items():
            repo = build(Path(folder) / name)
            for ranks, spread, option in sglang_repos.settings(repo, name):
                for rank in range(ranks):
                    key = f"tp={ranks} ep={ranks if spread else 1} {option or 'default'} rank={rank}"
                    config = place(repo.path, rank, ranks, spread, option)
                    try:
                        state = state_of(loaded(config, repo.path))
                    except RuntimeError as error:
                        # gpt-oss' experts that are not quantized have no loader for ranks with experts of their own.
                        assert (name, spread) == ("gpt_oss", True) and "match" in str(error), error
                        made.setdefault(name, {})[key] = None
                        continue
                    made.setdefault(name, {})[key] = digest(state)
                    if kept := os.environ.get("CKFS_SGLANG_STATES"):
                        (Path(kept) / f"{name} {key}.pickle").write_bytes(pickle.dumps(state))
            print(name, flush=True)
    out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    prepare()
    if sys.argv[1] == "load":
        for state, *setting in json.loads(sys.argv[3]):
            load(Path(sys.argv[2]), Path(state), *setting)
    elif sys.argv[1] == "update":
        update(Path(sys.argv[2]), [Path(version) for version in sys.argv[3:]])
    else:
        main(Path(sys.argv[1]))
