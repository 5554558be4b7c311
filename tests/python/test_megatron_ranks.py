"""Classic checkpoints of Megatron as sources: the parts are those that Megatron-Core's own modules have on each rank."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

import forked
import mounting

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core has no package for this Python", allow_module_level=True)

HERE = Path(__file__).parent
DENSE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SPARSE = DENSE | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
# Configuration; ranks of tensor parallelism, stages, chunks of a stage, ranks of expert parallelism.
CASES = {
    "one": (DENSE, 1, 1, 1, 1), "tensor": (DENSE, 2, 1, 1, 1), "pipeline": (DENSE, 1, 2, 1, 1), "both": (DENSE, 2, 2, 1, 1),
    "chunks": (DENSE, 1, 2, 2, 1), "tied": (DENSE | {"tie_word_embeddings": True}, 2, 2, 1, 1), "experts": (SPARSE, 1, 1, 1, 2),
    "all": (SPARSE, 2, 2, 1, 2),
}  # fmt: skip


def repository(config: dict, directory: Path) -> dict[str, torch.Tensor]:
    """A repository of Hugging Face with random weights, written by transformers."""
    import transformers

    torch.manual_seed(5)
    kind = {"llama": "Llama", "qwen3_moe": "Qwen3Moe"}[config["model_type"]]
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{k: v for k, v in config.items() if k != "architectures"}))
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def of_megatron(config: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under the names of Megatron's own layers, whole."""
    groups, heads, size = config["num_key_value_heads"], config["num_attention_heads"], config["head_dim"]
    out = {"embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"], "decoder.final_layernorm.weight": tensors["model.norm.weight"]}
    if "lm_head.weight" in tensors:
        out["output_layer.weight"] = tensors["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for source, target in {
            "input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm", "self_attn.o_proj": "self_attention.linear_proj",
            "self_attn.q_norm": "self_attention.q_layernorm", "self_attn.k_norm": "self_attention.k_layernorm", "mlp.gate": "mlp.router",
            "mlp.down_proj": "mlp.linear_fc2",
        }.items():  # fmt: skip
            if f"{ours}{source}.weight" in tensors:
                out[f"{theirs}{target}.weight"] = tensors[f"{ours}{source}.weight"]
        parts = [tensors[f"{ours}self_attn.{name}_proj.weight"].reshape(groups, -1, size, config["hidden_size"]) for name in "qkv"]
        assert parts[0].shape[1] == heads // groups
        out[f"{theirs}self_attention.linear_qkv.weight"] = torch.cat(parts, 1).reshape(-1, config["hidden_size"])
        if f"{ours}mlp.gate_proj.weight" in tensors:
            out[f"{theirs}mlp.linear_fc1.weight"] = torch.cat([tensors[f"{ours}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        for expert in range(config.get("num_experts") or 0):
            source, target = f"{ours}mlp.experts.{expert}.", f"{theirs}mlp.experts.local_experts.{expert}."
            out[f"{target}linear_fc1.weight"] = torch.cat([tensors[f"{source}{name}_proj.weight"] for name in ("gate", "up")])
            out[f"{target}linear_fc2.weight"] = tensors[f"{source}down_proj.weight"]
    return out


@pytest.fixture(scope="session")
def saved(base: Path):
    """The checkpoint of a case and its repository, made once."""
    done = {}

    def of(case: str) -> Path:
        if case in done:
            return done[case]
        config, *sizes = CASES[case]
        directory = base / "megatron_ranks" / case
        directory.mkdir(parents=True)
        torch.save(of_megatron(config, repository(config, directory / "hf")), directory / "whole.pt")
        (directory / "config.json").write_text(json.dumps(config))
        world = sizes[0] * sizes[1] * sizes[3]
        words = [directory / "run", directory / "config.json", directory / "whole.pt", *sizes]
        words += ["tied"] if config["tie_word_embeddings"] else []
        forked.run_ranks(world, forked.MEGATRON, HERE / "megatron_ranks_process.py", *words)
        done[case] = directory
        return directory

    return of


@pytest.mark.parametrize("case", CASES)
def test_the_repository_comes_back(saved, tmp_path, case):
    directory = saved(case)
    arguments = ["--layout", "hf", "--config-from", directory / "hf", "--only", "hf"]
    mounting.run("export", directory / "run", tmp_path / "back", *arguments)
    expected, found = load_file(directory / "hf/model.safetensors"), load_file(tmp_path / "back/hf/model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    step = directory / "run/iter_0000007"
    assert "no difference" in mounting.run("verify", step, *arguments[:-2]).out


def refused(source: Path) -> str:
    return mounting.run("plan", source, expect=1).err


def edited(path: Path, edit) -> None:
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


def test_what_is_missing_or_of_another_save_is_named(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved("both") / "run", run)
    step = run / "iter_0000007"
    path = step / "mp_rank_01_000/model_optim_rng.pt"
    kept = path.read_bytes()
    for length in (0, 1000, len(kept) - 1):
        path.write_bytes(kept[:length])
        assert "mp_rank_01_000/model_optim_rng.pt" in refused(run)
    path.unlink()
    assert "expected the files of 4 ranks, found 3; missing: tensor 1, pipeline 0, expert 0" in refused(run)
    path.write_bytes(kept)
    edited(path, lambda state: state.update(iteration=9))
    assert "they are of different saves" in refused(run)
    path.write_bytes(kept)
    edited(path, lambda state: state["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"))
    assert "not there on rank 1" in refused(run)
    path.write_bytes(kept)
    edited(path, lambda state: state["model"].update({"decoder.layers.0.mixer.weight": torch.ones(2)}))
    assert "nothing says how it is cut" in refused(run)
    path.write_bytes(kept)
    edited(path, lambda state: state.update(rng_state=os.system))
    assert "posix.system" in refused(run)
    for file in step.rglob("*.pt"):
        edited(file, lambda state: setattr(state["args"], "num_layers", 5))
    path.write_bytes(kept)
    assert "other arguments of the training" in refused(run)
    edited(path, lambda state: setattr(state["args"], "num_layers", 5))
    assert "4 layers on all stages, and the arguments say Some(5)" in refused(run) or "num_layers" in refused(run)
