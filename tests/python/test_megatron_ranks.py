"""Classic checkpoints of Megatron as sources: the parts are those that Megatron-Core's own modules have on each rank."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import os
import shutil
import tomllib
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


# What the layers of Megatron-Core read of their configuration and ckfs does not compare: names, shapes and types of the tensors tell it;
# config.json says it again; or it is of a run and changes no weight.
TOLD_BY_TENSORS = """
    add_bias_linear add_qkv_bias hidden_size ffn_hidden_size kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim qk_layernorm
    moe_ffn_hidden_size moe_grouped_gemm moe_use_legacy_grouped_gemm moe_layer_freq moe_router_enable_expert_bias moe_shared_expert_gate
    moe_shared_expert_intermediate_size mtp_num_layers num_layers num_moe_experts params_dtype hetereogenous_dist_checkpoint dsa_indexer_head_dim
    dsa_indexer_n_heads tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size virtual_pipeline_model_parallel_size
    pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split
"""
TOLD_BY_CONFIG = """
    activation_func layernorm_epsilon window_size window_attn_skip_freq moe_router_topk moe_router_pre_softmax mrope_section mscale mscale_all_dim beta_fast
    beta_slow original_max_position_embeddings rotary_scaling_factor rope_type dsa_indexer_topk moe_aux_loss_coeff attention_dropout hidden_dropout
"""
OF_A_RUN = """
    _cpu_offloading_context activation_func_fp8_input_store apply_query_key_layer_scaling apply_rope_fusion attention_backend attention_softmax_in_fp32
    batch_invariant_mode bf16 bias_activation_fusion bias_dropout_fusion cache_mla_latents calculate_per_token_loss clone_scatter_output_in_embedding
    context_parallel_size cp_comm_type cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
    cpu_offloading_weights cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_impl cuda_graph_retain_backward_graph cuda_graph_scope
    cuda_graph_warmup_steps deallocate_pipeline_outputs defer_embedding_wgrad_compute delay_wgrad_compute deterministic_mode disable_parameter_transpose_cache
    distribute_saved_activations embedding_init_method ep_overlap_early_attn_memory_release fine_grained_activation_offloading flash_decode fp16
    fp32_residual_connection fp4 fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin
    fp8_multi_head_attention fp8_recipe fused_single_qkv_rope gradient_accumulation_fusion inference_fuse_tp_communication init_method
    init_model_with_meta_device kitchen_attention_backend log_max_attention_logit masked_softmax_fusion memory_efficient_layer_norm
    microbatch_group_size_per_vp_stage min_offloaded_tensor_size mlp_chunks_for_prefill moe_deepep_num_sms moe_enable_routing_replay
    moe_expert_capacity_factor moe_flex_dispatcher_backend moe_hybridep_num_sms moe_input_jitter_eps moe_pad_expert_input_to_capacity moe_permute_fusion
    moe_router_dtype moe_router_force_load_balancing moe_router_fusion moe_router_load_balancing_type moe_router_padding_for_quantization
    moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy moe_z_loss_coeff mtp_loss_scaling_factor offload_modules
    output_layer_init_method overlap_moe_expert_parallel_comm perform_initialization persist_layer_norm qk_clip qk_clip_alpha qk_clip_threshold quant_recipe
    recompute_granularity recompute_method recompute_modules recompute_num_layers sequence_parallel symmetric_ar_type test_mode tp_comm_atomic_ag
    tp_comm_atomic_rs tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv
    tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_only_amax_red transformer_impl use_cpu_initialization
    use_fused_weighted_squared_relu use_kitchen use_kitchen_attention use_te_activation_func wgrad_deferral_limit
"""
# What Megatron-LM's `load_args_from_checkpoint` takes from the arguments beside the weights.
TAKEN_BY_MEGATRON = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels position_embedding_type rotary_base rotary_percent
    rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu apply_layernorm_1p normalization apply_query_key_layer_scaling
    attention_dropout hidden_dropout mtp_num_layers moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax moe_grouped_gemm
    moe_shared_expert_intermediate_size moe_router_score_function moe_router_enable_expert_bias moe_router_topk_scaling_factor
    hybrid_layer_pattern heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json moe_latent_size
"""


def test_every_argument_that_megatron_reads_is_compared_or_of_no_matter():
    from megatron.core.transformer import transformer_config as theirs

    table = tomllib.loads((mounting.ROOT / "src/plan/inverse/arguments.toml").read_text())
    known = {*table["assumed"], *table["config"], *f"{TOLD_BY_TENSORS} {TOLD_BY_CONFIG} {OF_A_RUN}".split()}
    fields = {field.name for kind in (theirs.TransformerConfig, theirs.MLATransformerConfig) for field in dataclasses.fields(kind)}
    core, read = Path(theirs.__file__).parents[1], set()
    for part in ("transformer", "models/gpt", "models/common", "tensor_parallel", "extensions", "dist_checkpointing", "resharding", "fusions"):
        for path in (core / part).rglob("*.py"):
            if path.name != "transformer_config.py":
                nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
                read |= {node.attr for node in nodes if ast.unparse(node.value).endswith("config")} & fields
    assert {"rotary_interleaved", "layernorm_zero_centered_gamma"} <= read
    assert read - known == set()
    assert set(TAKEN_BY_MEGATRON.split()) - known == set()


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


def of_megatron_fsdp(whole: dict[str, torch.Tensor], layers: int) -> dict:
    """What Megatron-FSDP saves as `fsdp_dtensor`: the model, the optimizer by names of parameters, and what is no tensor."""
    model = {}
    for name, tensor in whole.items():
        if name.startswith("decoder.layers.") and int(name.split(".")[2]) >= layers:
            continue
        halves = zip(("_w", "_v"), tensor.chunk(2)) if "linear_fc1.weight" in name else [("", tensor)]
        model |= {f"module.{name}{word}": half for word, half in halves}
    kept = {name: {key: torch.randn(tensor.shape) for key in ("exp_avg", "exp_avg_sq")} for name, tensor in model.items()}
    optimizer = {"state": kept, "param_to_group_meta": {name: {"lr": 1e-3, "step": 7} for name in model}}
    return {"model": model, "optimizer": optimizer, "args": argparse.Namespace(num_layers=4, swiglu=True), "iteration": 7}


def test_fsdp_dtensor_is_a_source_and_its_training_state_passes(saved, own, tmp_path):
    from torch.distributed import checkpoint

    directory = saved("one")
    whole = torch.load(directory / "whole.pt")
    state = of_megatron_fsdp(whole, layers=4)
    checkpoint.save(state, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    arguments = ["--layout", "hf", "--config-from", directory / "hf"]
    mounting.run("export", tmp_path / "iter_0000007", tmp_path / "back", *arguments, "--only", "hf")
    expected, found = load_file(directory / "hf/model.safetensors"), load_file(tmp_path / "back/hf/model.safetensors")
    assert set(found) == set(expected) and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    mounted = own(tmp_path / "iter_0000007", "--training-state", "--mesh", "fsdp=4")
    loaded = of_megatron_fsdp({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, layers=4)
    loaded["optimizer"]["param_to_group_meta"] = {name: {"lr": 0.0, "step": 0} for name in loaded["model"]}
    loaded |= {"args": None, "iteration": 0}
    checkpoint.load(loaded, checkpoint_id=mounted / "dcp", no_dist=True)
    torch.testing.assert_close(loaded.pop("model"), state.pop("model"), rtol=0, atol=0)
    torch.testing.assert_close(loaded["optimizer"].pop("state"), state["optimizer"].pop("state"), rtol=0, atol=0)
    assert loaded == state
    # Of two stages, which both number their layers from 0, only one is there.
    checkpoint.save(of_megatron_fsdp(whole, layers=2), checkpoint_id=tmp_path / "stages", no_dist=True)
    assert "layers.{2-3}." in mounting.run("plan", tmp_path / "stages", *arguments, expect=1).err


def refused(source: Path) -> str:
    return mounting.run("plan", source, expect=1).err


def edited(path: Path, edit) -> None:
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


def test_arguments_that_change_what_rows_mean_are_refused_by_name(saved, tmp_path):
    directory = saved("experts")
    run = tmp_path / "run"
    shutil.copytree(directory / "run", run)
    step = next(run.glob("iter_*"))
    for name, value in {"rotary_interleaved": True, "moe_mlp_glu_interleave_size": 32, "apply_layernorm_1p": True, "num_attention_heads": 2}.items():
        for file in step.rglob("*.pt"):
            edited(file, lambda state: setattr(state["args"], name, value))
        said = mounting.run("plan", run, "--layout", "hf", "--config-from", directory / "hf", expect=1).err
        assert f"the arguments of the training say {name}=" in said
        assert mounting.run("plan", run).out
    # Those of a distributed checkpoint, with what else may be there.
    from torch.distributed import checkpoint

    tensors = {"embedding.word_embeddings.weight": torch.ones(64, 32)}
    for at, more in {"common": {}, "metadata": {"args": argparse.Namespace(rotary_interleaved=True)}}.items():
        checkpoint.save(tensors | more, checkpoint_id=tmp_path / at, no_dist=True)
    torch.save({"args": argparse.Namespace(rotary_interleaved=True), "other": Path("x")}, tmp_path / "common/common.pt")
    for at in ("common", "metadata"):
        said = mounting.run("plan", tmp_path / at, "--layout", "hf", "--config-from", directory / "hf", expect=1).err
        assert "the arguments of the training say rotary_interleaved=true" in said, said


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
    assert "4 layers on all stages, and the arguments say 5" in refused(run) or "num_layers" in refused(run)
    for file in step.rglob("*.pt"):
        edited(file, lambda state: setattr(state["args"], "num_query_groups", 3))
    assert "keys and values of 3 groups over 2 ranks" in refused(run)
