//! Small models in the dress of published ones.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use super::twice::Twice;

/// Where modules are quantized, in the words of compressed-tensors.
fn packed(ignore: &Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
           "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null, "output_activations": null,
               "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32}}},
           "ignore": ignore})
}

/// gpt-oss of four layers, whose experts are MXFP4.
pub(crate) fn gpt_oss() -> Twice {
    let (hidden, inter, experts, heads, kv, head) = (64, 32, 4, 6, 2, 8);
    let config = json!({
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "torch_dtype": "bfloat16", "num_hidden_layers": 4,
        "hidden_size": hidden, "intermediate_size": inter, "num_local_experts": experts, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": head, "vocab_size": 20, "tie_word_embeddings": false, "attention_bias": true,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    });
    let exempt = json!(["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]);
    let mut twice = Twice::new(config, json!({"quant_method": "mxfp4", "modules_to_not_convert": exempt}));
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        twice.plain(name, DType::BF16, &[20, hidden]);
    }
    twice.plain("model.norm.weight", DType::BF16, &[hidden]);
    for layer in 0..4 {
        let mut plain = |name: &str, extents: &[u64]| {
            twice.plain(&format!("model.layers.{layer}.{name}"), DType::BF16, extents);
        };
        plain("input_layernorm.weight", &[hidden]);
        plain("post_attention_layernorm.weight", &[hidden]);
        for (name, out) in [("q", heads * head), ("k", kv * head), ("v", kv * head)] {
            plain(&format!("self_attn.{name}_proj.weight"), &[out, hidden]);
            plain(&format!("self_attn.{name}_proj.bias"), &[out]);
        }
        plain("self_attn.o_proj.weight", &[hidden, heads * head]);
        plain("self_attn.o_proj.bias", &[hidden]);
        plain("self_attn.sinks", &[heads]);
        plain("mlp.router.weight", &[experts, hidden]);
        plain("mlp.router.bias", &[experts]);
        plain("mlp.experts.gate_up_proj_bias", &[experts, 2 * inter]);
        plain("mlp.experts.down_proj_bias", &[experts, hidden]);
        let stacks = format!("model.layers.{layer}.mlp.experts");
        twice.mxfp4(&format!("{stacks}.gate_up_proj"), [experts, 2 * inter, hidden]);
        twice.mxfp4(&format!("{stacks}.down_proj"), [experts, hidden, inter]);
    }
    twice
}

/// DeepSeek V3 of three layers, the first one dense, whose experts are INT4 as those of Kimi K2 Thinking.
pub(crate) fn kimi(model_type: &str) -> Twice {
    let (hidden, inter) = (64, 32);
    let config = json!({
        "model_type": model_type, "torch_dtype": "bfloat16", "hidden_size": hidden, "num_attention_heads": 2,
        "num_hidden_layers": 3, "q_lora_rank": 6, "kv_lora_rank": 4, "first_k_dense_replace": 1, "n_routed_experts": 2,
        "vocab_size": 10, "tie_word_embeddings": false, "moe_intermediate_size": inter, "intermediate_size": 96,
        "n_shared_experts": 1,
    });
    let ignore =
        json!(["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]);
    let mut twice = Twice::new(config, packed(&ignore));
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        twice.plain(name, DType::BF16, &[10, hidden]);
    }
    twice.plain("model.norm.weight", DType::BF16, &[hidden]);
    for layer in 0..3 {
        let prefix = format!("model.layers.{layer}");
        for (name, extents) in [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_a_proj", vec![6, hidden]),
            ("self_attn.q_a_layernorm", vec![6]),
            ("self_attn.q_b_proj", vec![12, 6]),
            ("self_attn.kv_a_proj_with_mqa", vec![6, hidden]),
            ("self_attn.kv_a_layernorm", vec![4]),
            ("self_attn.kv_b_proj", vec![14, 4]),
            ("self_attn.o_proj", vec![hidden, 6]),
        ] {
            twice.plain(&format!("{prefix}.{name}.weight"), DType::BF16, &extents);
        }
        let block = |name: &str, width: u64| {
            ["gate", "up", "down"].map(|part| {
                let extents = if part == "down" { [hidden, width] } else { [width, hidden] };
                (format!("{prefix}.mlp.{name}{part}_proj"), extents)
            })
        };
        let plain = if layer == 0 { block("", 96) } else { block("shared_experts.", inter) };
        for (module, extents) in plain {
            twice.plain(&format!("{module}.weight"), DType::BF16, &extents);
        }
        if layer > 0 {
            twice.plain(&format!("{prefix}.mlp.gate.weight"), DType::BF16, &[2, hidden]);
            twice.plain(&format!("{prefix}.mlp.gate.e_score_correction_bias"), DType::F32, &[2]);
            for (module, [out, inner]) in [block("experts.0.", inter), block("experts.1.", inter)].concat() {
                twice.int4(&module, out, inner);
            }
        }
    }
    twice
}

/// How a small llama is quantized.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dress {
    /// By compressed-tensors, all matrices but the head, with scales for activations and caches.
    Int4,
    /// By `ModelOpt`: attention in this algorithm, MLPs in NVFP4.
    ModelOpt(&'static str),
}

/// The matrices of a small llama of two layers, below `prefix`, and all of it.
pub(crate) fn llama(prefix: &str, dress: Dress) -> Twice {
    let (hidden, inter) = (64, 96);
    let text = json!({
        "model_type": "llama", "dtype": "bfloat16", "num_hidden_layers": 2, "hidden_size": hidden, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": inter, "vocab_size": 40, "tie_word_embeddings": true,
    });
    let is_text = prefix.is_empty();
    let config = if is_text { text } else { json!({"model_type": "llava", "dtype": "bfloat16", "text_config": text}) };
    let mut twice = Twice::new(config, packed(&json!(["lm_head"])));
    let mut algorithms = serde_json::Map::new();
    twice.plain(&format!("{prefix}model.embed_tokens.weight"), DType::BF16, &[40, hidden]);
    twice.plain(&format!("{prefix}model.norm.weight"), DType::BF16, &[hidden]);
    for layer in 0..2 {
        let stem = format!("{prefix}model.layers.{layer}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            twice.plain(&format!("{stem}.{norm}.weight"), DType::BF16, &[hidden]);
        }
        for (module, out, inner) in [
            ("self_attn.q_proj", 64, hidden),
            ("self_attn.k_proj", 32, hidden),
            ("self_attn.v_proj", 32, hidden),
            ("self_attn.o_proj", hidden, 64),
            ("mlp.gate_proj", inter, hidden),
            ("mlp.up_proj", inter, hidden),
            ("mlp.down_proj", hidden, inter),
        ] {
            let module = format!("{stem}.{module}");
            match dress {
                Dress::Int4 => twice.int4(&module, out, inner),
                Dress::ModelOpt(algorithm) => {
                    twice.nvfp4(&module, out, inner);
                    let algorithm = if module.contains("self_attn") { algorithm } else { "NVFP4" };
                    algorithms.insert(module.clone(), json!({"quant_algo": algorithm, "group_size": 16}));
                }
            }
            twice.companion(&format!("{module}.input_scale"), DType::F32, &[]);
        }
        twice.companion(&format!("{stem}.self_attn.k_scale"), DType::F32, &[1]);
    }
    if dress != Dress::Int4 {
        twice.quantization = Value::Null;
        let quantization = json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms});
        twice.file =
            Some(("hf_quant_config.json", json!({"producer": {"name": "modelopt"}, "quantization": quantization})));
    }
    twice
}
