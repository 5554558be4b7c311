"""Small models of transformers' own classes, made from the default configuration of each with small numbers in it."""

import inspect

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

# What a configuration is given, where it has a member of that name.
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24, "ffn_hidden_size": 48, "dense_intermediate_size": 48, "moe_shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2, "num_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8,
    "num_nextn_predict_layers": 0, "num_mtp_modules": 0, "zero_expert_num": 0, "sliding_window": 16,
    "moe_shared_expert_overlap": False, "moe_latent_size": None,
}  # fmt: skip
# What some of them need besides: shapes that follow from each other, and lists with an entry for each layer.
ALSO = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
    "minimax": {"layer_types": ["full_attention", "linear_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron_h": {"hybrid_override_pattern": "ME*", "layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3},
    "hunyuan_v1_moe": {"moe_topk": 2, "num_experts": 4},
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4, "head_dim": 16, "n_group": 1, "layer_types": ["indexed_attention", "indexed_attention"]},
        "vision_config": {"num_hidden_layers": 2, "hidden_size": 32, "adapter_in_dim": 32, "adapter_out_dim": 32, "num_local_experts": 4, "mlp_layer_types": ["dense", "sparse"]},
        "audio_config": {"num_hidden_layers": 2, "adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 16, "num_key_value_heads": None},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [24, 16], "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {"depth": 2, "num_heads": 4},
    },
    "glm5_next": {
        "text_config": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4},
        "vision_config": {"depth": 2, "num_heads": 4, "out_hidden_size": 32, "projection_intermediate_size": 48},
    },
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16},
    "inkling2": {"text_config": {"unpadded_vocab_size": 60}, "vision_config": {"text_hidden_size": 32}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"], "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4, "ple_layer_ids": [1], "ple_embed_dim": 32,
        "ngram_vocab_size_base": 100, "heads_per_ngram": 2, "split_ngram_parts": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    # Its towers' own members depend on each other.
    "nemotron_h_omni": {"vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "video_temporal_patch_size": 2}},
    "qwen3_omni_moe_thinker": {
        "audio_config": {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "output_dim": 32, "downsample_hidden_size": 16},
    },
}


def class_of(model_type):
    """The class of the whole model, or None."""
    names = [
        mapping.get(model_type)
        for mapping in (
            auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            auto.MODEL_MAPPING_NAMES,
        )
    ]
    classes = [getattr(transformers, name if isinstance(name, str) else name[0]) for name in names if name]
    # A class of the text model alone has another configuration. The code of some types is another type's.
    own = [kind for kind in classes if issubclass(CONFIG_MAPPING[model_type], kind.config_class)]
    return next(iter(own + classes), None)


def config_of(kind, also):
    """A small configuration of a configuration's class."""
    default = kind()
    known = {**default.to_dict()}
    known = set(known) | {name for name in inspect.signature(kind.__init__).parameters}
    small = {name: value for name, value in SMALL.items() if name in known}
    layers = {**small, **also}.get("num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(default, name, None)
        if isinstance(kinds, (list, tuple)) and kinds:
            # One of each kind, as far as there are layers for them.
            kept = list(dict.fromkeys(kinds))[:layers]
            small[name] = (kept + list(kinds[-1:]) * layers)[:layers]
    nested = {}
    for name, part in (kind.sub_configs or {}).items():
        own = getattr(default, name, None)
        if inspect.isclass(part) and own is not None:
            # Of any type: that of the default.
            nested[name] = config_of(type(own) if part is transformers.AutoConfig else part, also.get(name, {}))
    return kind(**{**small, **also, **nested})


def model_of(model_type):
    """A small model of the type, with random weights."""
    torch.manual_seed(0)
    kind = class_of(model_type)
    config = CONFIG_MAPPING[model_type]
    return kind(config_of(config, ALSO.get(model_type, {}))).to(torch.bfloat16).eval()
