//! What no scheme decodes is refused by name wherever floats are needed, also where it is only a part of the repository.

use ckfs::{
    config::Quantize,
    plan::{CastRule, Dequantize, HfContent, Pattern, Plan, Subset, ViewOptions},
    tensor::DType,
};
use serde_json::json;

use super::{
    models::{self, Dress},
    twice::options,
};

#[test]
fn decoding_is_refused_where_a_part_has_no_decoder() {
    let opened = models::llama("", Dress::ModelOpt("W4A16_AWQ")).open_stored();
    let found = opened.checkpoint.quantized();
    assert_eq!((found.tensors.len(), found.unsupported.len()), (2 * 3, 1), "MLPs are NVFP4");
    let cast = CastRule { pattern: Pattern::parse("*norm.weight").unwrap(), dtype: Some(DType::F32) };
    let wishes = [
        ViewOptions { dequantize: Some(Dequantize::Own), ..options("hf", "") },
        ViewOptions { dequantize: Some(Dequantize::To(DType::F32)), ..options("canonical", "") },
        ViewOptions { dtype: Some(DType::BF16), ..options("canonical", "") },
        ViewOptions { dtype: Some(DType::F32), ..options("hf", "") },
        ViewOptions { casts: vec![cast], ..options("canonical", "") },
        options("maxtext", ""),
        options("maxtext-unscanned", ""),
        options("vllm", ""),
        ViewOptions { keep_dtype: true, ..options("maxtext", "") },
        ViewOptions { keep_dtype: true, ..options("vllm", "") },
    ];
    for options in wishes {
        let error =
            Plan::build(&opened.checkpoint, &options).err().unwrap_or_else(|| panic!("{options:?}")).to_string();
        for expected in [
            "quantized as ModelOpt W4A16_AWQ, which ckfs does not decode",
            "model.layers.0.self_attn.q_proj.weight and 7 more",
        ] {
            assert!(error.contains(expected), "expected {expected:?} in {error}");
        }
    }
    // As it is stored it may be had.
    for layout in ["canonical", "hf"] {
        assert!(opened.plan(&options(layout, "tensor=2")).decoded.is_empty());
    }
}

#[test]
fn every_way_is_named_at_once() {
    let mut twice = models::llama("", Dress::ModelOpt("W4A16_AWQ"));
    let Some((_, file)) = &mut twice.file else { panic!("ModelOpt has a file") };
    for layer in 0..2 {
        let module = format!("model.layers.{layer}.mlp.down_proj");
        file["quantization"]["quantized_layers"][module]["quant_algo"] = "W4A8_MXFP4_FP8".into();
    }
    let opened = twice.open_stored();
    let options = ViewOptions { dtype: Some(DType::BF16), ..options("hf", "") };
    let error = Plan::build(&opened.checkpoint, &options).unwrap_err();
    assert_eq!(error.problems.len(), 2, "{error}");
    for expected in [
        "q_proj.weight and 7 more: quantized as ModelOpt W4A16_AWQ",
        "down_proj.weight and 1 more: quantized as ModelOpt W4A8_MXFP4_FP8",
    ] {
        assert!(error.to_string().contains(expected), "expected {expected:?} in {error}");
    }
}

/// Weights may need something at run time, plain ones too: what says so is not left behind.
#[test]
fn a_member_that_nothing_acts_upon_stops_what_would_lose_it() {
    let with = |key: &str, value: &serde_json::Value, is_plain: bool| {
        let mut llama = models::llama("", Dress::Int4);
        llama.quantization[key] = value.clone();
        if is_plain {
            llama.config["quantization_config"] = llama.quantization.clone();
            return llama.open_decoded();
        }
        llama.open_stored()
    };
    let apply = json!([{"targets": ["re:.*down_proj$"], "location": "input"}]);
    let rotated = json!({"config_groups": {"R4": {"type": "hadamard", "apply": apply}}});
    let pruned = json!({"method": "prune"});
    let lost = [("transform_config", &rotated), ("moe_sparsity_config", &pruned), ("newer", &json!(1))];
    for (key, value, is_plain) in lost.into_iter().flat_map(|(key, value)| [(key, value, true), (key, value, false)]) {
        let opened = with(key, value, is_plain);
        let wishes = [
            ViewOptions { dtype: Some(DType::F32), ..options("hf", "") },
            ViewOptions { dequantize: Some(Dequantize::Own), ..options("canonical", "") },
            ViewOptions { quantize: Some(Quantize::Fp8Channel), ..options("hf", "") },
            options("vllm", ""),
            options("maxtext", ""),
        ];
        for options in wishes {
            let error = Plan::build(&opened.checkpoint, &options).unwrap_err().to_string();
            let expected =
                format!("config.json: quantized as compressed-tensors with {key}, which ckfs does not decode");
            assert!(error.contains(&expected), "expected {expected:?} in {error}");
        }
        let plan = opened.plan(&options("hf", ""));
        assert!(plan.hf.iter().all(|file| matches!(file.content, HfContent::Original(_))), "{key} {is_plain}");
    }
    // That of a larger model is not the text model's.
    let mut larger = models::llama("language_model.", Dress::Int4);
    larger.config["quantization_config"] = json!({"quant_method": "compressed-tensors", "transform_config": rotated});
    let subset = Subset { text_only: true, ..Subset::default() };
    let plan =
        Plan::build(&larger.open_decoded().checkpoint, &ViewOptions { subset, ..options("canonical", "") }).unwrap();
    let expected = "would be lost: compressed-tensors with transform_config";
    assert!(
        plan.hf.is_empty() && plan.warnings.iter().any(|warning| warning.contains(expected)),
        "{:?}",
        plan.warnings
    );
    let nothing = json!({"config_groups": {}});
    for (key, value) in [("transform_config", &nothing), ("newer", &json!(null)), ("version", &json!("1"))] {
        assert!(with(key, value, false).checkpoint.quantized().unsupported.is_empty(), "{key}");
        assert!(with(key, value, true).checkpoint.quantized().stale.is_some(), "{key}");
    }
}
