"""`sharded_state/` against vLLM: digests of what vLLM's own model classes and weight loaders make of the same repositories, for
each rank of tensor, expert and pipeline parallelism (`vllm_process.py` wrote them to `vllm_states.json`). Beside that each rank's
parameters are cut and fused here from whole tensors, and loaded by the rule of vLLM's `ShardedStateLoader`: every key of the
state, and no other.

With `CKFS_VLLM_LOADER=.../sharded_state_loader.py`, that file of an unmodified vLLM loads the states too; the rest of vLLM,
which is a download of hundreds of megabytes, is stubbed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import mounting
import repos
import vllm_process
import vllm_repos
from repos import HEAD_DIM, HEADS, INTER, KV_HEADS, VOCAB

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

FAMILIES = ["llama", "llama_tied", "llama_f32", "qwen2", "qwen3_moe", "mixtral"]
PADDED = -(-VOCAB // 64) * 64
STATES = json.loads((Path(__file__).parent / "vllm_states.json").read_text())


def part(array: np.ndarray, axis: int, rank: int, ranks: int) -> np.ndarray:
    """The rank's even part of an axis."""
    size, rest = divmod(array.shape[axis], ranks)
    assert rest == 0
    return np.take(array, range(rank * size, (rank + 1) * size), axis)


def heads_of(array: np.ndarray, heads: int, rank: int, ranks: int) -> np.ndarray:
    """Rows of the rank's heads; with fewer heads than ranks, the head that it shares with its neighbours."""
    if heads >= ranks:
        return part(array, 0, rank, ranks)
    head = rank // (ranks // heads)
    return array[head * HEAD_DIM : (head + 1) * HEAD_DIM]


def expected(repo: repos.Repo, rank: int, ranks: int) -> dict[str, np.ndarray]:
    """The contents of a rank's state."""
    source = {name: tensor.array() for name, tensor in repo.tensors.items()}
    tied, kind = repo.config["tie_word_embeddings"], repo.config["model_type"]

    def vocabulary(name: str) -> np.ndarray:
        rows = np.zeros((PADDED, source[name].shape[1]), source[name].dtype)
        rows[:VOCAB] = source[name]
        return part(rows, 0, rank, ranks)

    state = {"model.norm.weight": source["model.norm.weight"]}
    state["lm_head.weight"] = vocabulary("model.embed_tokens.weight" if tied else "lm_head.weight")
    if not tied:
        state["model.embed_tokens.weight"] = vocabulary("model.embed_tokens.weight")
    for n in range(repo.config["num_hidden_layers"]):
        at = f"model.layers.{n}."
        for kept in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if f"{at}{kept}.weight" in source:
                state[f"{at}{kept}.weight"] = source[f"{at}{kept}.weight"]
        for scale in "kqv":
            state[f"{at}self_attn.attn._{scale}_scale"] = np.float32(1)
        state[f"{at}self_attn.attn._prob_scale"] = np.float32(1)
        for what in ("weight", "bias"):
            if f"{at}self_attn.q_proj.{what}" in source:
                fused = [
                    heads_of(source[f"{at}self_attn.{word}_proj.{what}"], heads, rank, ranks)
                    for word, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
                ]
                state[f"{at}self_attn.qkv_proj.{what}"] = np.concatenate(fused)
        state[f"{at}self_attn.o_proj.weight"] = part(source[f"{at}self_attn.o_proj.weight"], 1, rank, ranks)

        def fuse(gate: str, up: str) -> np.ndarray:
            return np.concatenate([part(source[gate], 0, rank, ranks), part(source[up], 0, rank, ranks)])

        if kind == "qwen3_moe":
            moe, words, experts = f"{at}mlp.", ("gate_proj", "up_proj", "down_proj"), repo.config["num_experts"]
            # Its experts also refer to the router; of a tensor's two names the first in the alphabet is kept.
            state[f"{moe}experts.gate.weight"] = source[f"{moe}gate.weight"]
        elif kind == "mixtral":
            moe, words, experts = f"{at}block_sparse_moe.", ("w1", "w3", "w2"), repo.config["num_local_experts"]
            state[f"{moe}gate.weight"] = source[f"{moe}gate.weight"]
        else:
            state[f"{at}mlp.gate_up_proj.weight"] = fuse(f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight")
            state[f"{at}mlp.down_proj.weight"] = part(source[f"{at}mlp.down_proj.weight"], 1, rank, ranks)
            continue
        gate, up, down = ([f"{moe}experts.{e}.{word}.weight" for e in range(experts)] for word in words)
        state[f"{moe}experts.routed_experts.w13_weight"] = np.stack([fuse(*pair) for pair in zip(gate, up)])
        state[f"{moe}experts.routed_experts.w2_weight"] = np.stack([part(source[name], 1, rank, ranks) for name in down])
    return state


def module(state: dict[str, np.ndarray], dtype: torch.dtype, *, tied: bool, router_twice: bool) -> torch.nn.Module:
    """A module with these parameters and buffers, none of which has the right value yet."""
    root = torch.nn.Module()

    def place(name: str, tensor: torch.Tensor) -> None:
        *path, last = name.split(".")
        at = root
        for word in path:
            if not hasattr(at, word):
                at.add_module(word, torch.nn.Module())
            at = getattr(at, word)
        if isinstance(tensor, torch.nn.Parameter):
            at.register_parameter(last, tensor)
        else:
            at.register_buffer(last, tensor)

    for name, array in state.items():
        if name.endswith("_scale"):
            place(name, torch.full((), 7.0))
            continue
        weight = torch.nn.Parameter(torch.full(array.shape, 7.0, dtype=dtype), requires_grad=False)
        place(name, weight)
        if tied and name == "lm_head.weight":
            place("model.embed_tokens.weight", weight)
        if router_twice and name.endswith("experts.gate.weight"):
            place(name.replace("experts.gate", "gate"), weight)
    return root


def load_by_the_rules(root: torch.nn.Module, file: Path) -> None:
    """The loader's rule, used where vLLM's own loader is not available."""
    state, seen = {}, set()
    for name, tensor in sorted(root.state_dict().items()):
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor
    for name, tensor in safetensors_torch.load_file(file).items():
        parameter = state.pop(name)
        assert (tensor.shape, tensor.dtype) == (parameter.shape, parameter.dtype), name
        parameter.copy_(tensor)
    assert not state, f"missing: {sorted(state)}"


def vllm_loader(path: str, rank: int, ranks: int, stage: int = 0, stages: int = 1):
    """`ShardedStateLoader` of an unmodified vLLM, for one rank."""

    def stub(name: str, **members: object) -> None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)

    class Base:
        def __init__(self, load_config: object) -> None:
            self.load_config = load_config

    class Logger(logging.Logger):
        def info_once(self, *_: object) -> None: ...

        def warning(self, *said: object, **_: object) -> None:
            raise AssertionError(str(said))

    packages = ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader", "vllm.transformers_utils")
    for package in packages:
        stub(package, __path__=[])
    stub("vllm.config", ModelConfig=object)
    stub("vllm.config.load", LoadConfig=object)
    stub("vllm.logger", init_logger=Logger)
    stub("vllm.model_executor.model_loader.base_loader", BaseModelLoader=Base)
    iterators = {"download_weights_from_hf": None, "runai_safetensors_weights_iterator": None}
    stub("vllm.model_executor.model_loader.weight_utils", **iterators)
    stub("vllm.transformers_utils.s3_utils", glob=None)
    stub("vllm.transformers_utils.utils", is_s3=lambda _: False)
    all_stages, all_ranks = types.SimpleNamespace(world_size=stages), types.SimpleNamespace(world_size=ranks)
    stub(
        "vllm.distributed",
        get_pp_group=lambda: all_stages, get_tp_group=lambda: all_ranks,
        get_pipeline_model_parallel_rank=lambda: stage, get_tensor_model_parallel_rank=lambda: rank,
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("sharded_state_loader", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    config = types.SimpleNamespace(model_loader_extra_config=None, load_format="sharded_state")
    return found.ShardedStateLoader(config)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_loads_its_state(name, ranks, shared, repo):
    if (name, ranks) == ("qwen3_moe", 4):
        pytest.skip("its experts are six wide")
    made = repo(name)
    mounted = shared(name, "--layout", "vllm", *(("--mesh", f"tensor={ranks}") if ranks > 1 else ()))
    state = mounted / "sharded_state"
    ours = {file.name for file in state.iterdir()}
    assert ours == {f"model-rank-{rank}-part-0.safetensors" for rank in range(ranks)} | {
        "config.json", "tokenizer_config.json", "README.md"
    }  # fmt: skip
    assert (state / "config.json").read_bytes() == (made.path / "config.json").read_bytes()
    dtype = torch.float32 if name == "llama_f32" else torch.bfloat16
    for rank in range(ranks):
        file = state / f"model-rank-{rank}-part-0.safetensors"
        wanted = expected(made, rank, ranks)
        found, metadata, _ = repos.parse_safetensors(file)
        assert metadata == {"format": "pt"}
        assert set(found) == set(wanted)
        for key, array in wanted.items():
            assert found[key].shape == np.shape(array), key
            mounting.same_bytes(found[key].data, np.asarray(array), (rank, key))
        root = module(wanted, dtype, tied=made.config["tie_word_embeddings"], router_twice=name == "qwen3_moe")
        if path := os.environ.get("CKFS_VLLM_LOADER"):
            model = types.SimpleNamespace(model=str(state), model_weights=None)
            vllm_loader(path, rank, ranks).load_weights(root, model)
        else:
            load_by_the_rules(root, file)
        loaded = root.state_dict()
        for key, array in wanted.items():
            plain = loaded[key].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            mounting.same_bytes(plain, np.asarray(array), (rank, key))
        if made.config["tie_word_embeddings"]:
            assert torch.equal(loaded["model.embed_tokens.weight"], loaded["lm_head.weight"])


def test_ranks_are_numbered_along_the_tensor_axis(own, repo):
    """Copies of a rank are one file, for any position of its axis in the mesh and any listed devices."""
    made = repo("llama")
    for mesh, devices in (("data=2,tensor=2", "2-3"), ("tp=2,data=3", "1,4"), ("tensor=2,fsdp=1", "0-1")):
        mounted = own(made.path, "--layout", "vllm", "--mesh", mesh, "--devices", devices)
        for rank in range(2):
            found, _, _ = repos.parse_safetensors(mounted / f"sharded_state/model-rank-{rank}-part-0.safetensors")
            for key, array in expected(made, rank, 2).items():
                mounting.same_bytes(found[key].data, np.asarray(array), (mesh, rank, key))


def test_tensors_that_vllm_cannot_split_are_refused(repo):
    source = repo("llama").path
    refused = mounting.run("plan", source, "--layout", "vllm", "--mesh", "tensor=3", expect=1)
    assert "mesh axis tensor=3 does not divide the model's 4 attention heads" in refused.err and "sizes of tensor that fit: 1, 2, 4" in refused.err
    refused = mounting.run("plan", repo("qwen3_moe").path, "--layout", "vllm", "--mesh", "tensor=4", expect=1)
    assert "mesh axis tensor=4 does not divide the model's moe_intermediate_size 6" in refused.err
    mounting.run("plan", repo("bert").path, "--layout", "vllm", expect=1)


def test_older_names_by_parameters(own, repo):
    """Before vLLM had `routed_experts`, and without scales of attention in the state."""
    options = ("--set", "experts=", "--set", "router_in_experts=false", "--set", "attention_scales=false")
    mounted = own(repo("qwen3_moe").path, "--layout", "vllm", "--mesh", "tensor=2", *options)
    found, _, _ = repos.parse_safetensors(mounted / "sharded_state/model-rank-1-part-0.safetensors")
    assert "model.layers.1.mlp.experts.w13_weight" in found and "model.layers.1.mlp.gate.weight" in found
    assert not [name for name in found if "_scale" in name or "routed" in name]


def state_of(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found, _, _ = repos.parse_safetensors(file)
    return {name: (tensor.code, tensor.shape, tensor.data) for name, tensor in found.items()}


def rank_file(rank: int, stage: int, stages: int) -> str:
    whose = f"rank-{rank}" if stages == 1 else f"pp-{stage}-tp-{rank}"
    return f"model-{whose}-part-0.safetensors"


def load_with_vllm(path: str, state: Path, found: dict, place: tuple[int, int, int, int]) -> None:
    """Loads a rank's file by vLLM's own loader into a module with the same names, and compares."""
    root, tensors = torch.nn.Module(), safetensors_torch.load_file(state / rank_file(place[0], place[2], place[3]))
    for name, tensor in tensors.items():
        *words, last = name.split(".")
        at = root
        for word in words:
            if not hasattr(at, word):
                at.add_module(word, torch.nn.Module())
            at = getattr(at, word)
        at.register_buffer(last, torch.full_like(tensor, 7))
    vllm_loader(path, *place).load_weights(root, types.SimpleNamespace(model=str(state), model_weights=None))
    loaded = root.state_dict()
    assert set(loaded) == set(found) and all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", vllm_repos.BUILDERS)
def test_states_are_those_of_vllms_own_classes(name, own, tmp_path):
    made = vllm_repos.BUILDERS[name](tmp_path / name)

    def setting(key: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", key)[:3]))

    for (tps, pps, spread), keys in itertools.groupby(STATES[name], setting):
        options = ["--layout", "vllm", "--mesh", f"pp={pps},tensor={tps}"]
        options += ["--set", "expert_parallel=true"] if spread else []
        if STATES[name][f"tp={tps} pp={pps} ep={spread} rank=0 stage=0"] is None:
            refused = mounting.run("plan", made.path, *options, expect=1)
            assert "vLLM refuses such ranks" in refused.err
            continue
        state = own(made.path, *options) / "sharded_state"
        files = set()
        for key in keys:
            *_, rank, stage = map(int, re.findall(r"\d+", key))
            files.add(rank_file(rank, stage, pps))
            found = state_of(state / rank_file(rank, stage, pps))
            assert (state / rank_file(rank, stage, pps)).stat().st_size > sum(len(data) for _, _, data in found.values())
            assert vllm_process.digest(found) == STATES[name][key], (key, sorted(found))
            if path := os.environ.get("CKFS_VLLM_LOADER"):
                load_with_vllm(path, state, found, (rank, tps, stage, pps))
        assert {file.name for file in state.glob("*.safetensors")} == files


def test_experts_are_spread_over_data_parallel_ranks_too(own, tmp_path):
    """With `--data-parallel-size 2 --tensor-parallel-size 2 --enable-expert-parallel` all four ranks share the experts."""
    made = vllm_repos.deepseek_v3(tmp_path / "deepseek_v3")
    both = own(made.path, "--layout", "vllm", "--mesh", "ep=2,tensor=2")
    experts = own(made.path, "--layout", "vllm", "--mesh", "tensor=4", "--set", "expert_parallel=true")
    others = own(made.path, "--layout", "vllm", "--mesh", "tensor=2")
    for rank in range(4):
        found = state_of(both / "sharded_state" / rank_file(rank, 0, 1))
        one = state_of(experts / "sharded_state" / rank_file(rank, 0, 1))
        other = state_of(others / "sharded_state" / rank_file(rank % 2, 0, 1))
        assert set(found) == set(one) == set(other)
        for key in found:
            assert found[key] == (one if "routed_experts.w" in key else other)[key], (rank, key)


def test_ranks_that_share_no_experts_evenly_are_refused(tmp_path):
    made = vllm_repos.olmoe(tmp_path / "olmoe")
    refused = mounting.run("plan", made.path, "--layout", "vllm", "--mesh", "ep=3", expect=1)
    assert "number of experts is not a multiple" in refused.err
    refused = mounting.run("plan", made.path, "--layout", "vllm", "--mesh", "pp=4", expect=1)
    assert "fewer layers than stages" in refused.err


def test_stages_hold_their_own_tensors_in_every_format(own, tmp_path):
    """Other formats of the same mount: a device holds no rows of another stage's tensors, and all devices hold all together."""
    made = vllm_repos.llama(tmp_path / "llama")
    mounted = own(made.path, "--layout", "vllm", "--mesh", "pp=2,tensor=2")
    name = "model.layers.2.mlp.down_proj.weight"
    rows = [state_of(mounted / f"safetensors/dev{device}.safetensors")[name][1] for device in range(4)]
    assert rows == [(0, 12), (0, 12), (16, 12), (16, 12)]
    mounting.run("verify", mounted.point)
