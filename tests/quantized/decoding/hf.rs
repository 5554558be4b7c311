//! `hf/` of a decoded repository is a plain one; without a wish it is the repository itself, and codes stay with their scales.

use std::collections::{BTreeMap, BTreeSet};

use ckfs::{
    plan::{CastRule, Dequantize, HfContent, Pattern, Plan, ViewOptions, report::view_text},
    tensor::DType,
};
use serde_json::{Value, json};

use super::{
    models::{self, Dress},
    twice::{Opened, options},
};

/// A text of `hf/`, rewritten or not.
fn text(opened: &Opened, plan: &Plan, path: &str) -> Value {
    let file = plan.hf.iter().find(|file| file.path == path).unwrap_or_else(|| panic!("no {path}"));
    match &file.content {
        HfContent::Text(text) => serde_json::from_slice(text).unwrap(),
        HfContent::Original(file) => serde_json::from_slice(&opened.original(*file)).unwrap(),
        HfContent::Weights { .. } => panic!("{path} is no text"),
    }
}

fn has(plan: &Plan, path: &str) -> bool {
    plan.hf.iter().any(|file| file.path == path)
}

/// Names, files and bytes of the weights of a `hf/` in which all that was quantized is decoded.
fn weights(plan: &Plan) -> BTreeMap<String, (String, DType, u64)> {
    let mut found = BTreeMap::new();
    for file in &plan.hf {
        let HfContent::Weights { tensors, metadata } = &file.content else { continue };
        assert_eq!(*metadata, [("format".to_owned(), "pt".to_owned())]);
        for (name, view) in tensors {
            let row = (file.path.clone(), view.dtype(), view.bytes().unwrap());
            assert!(found.insert(name.clone(), row).is_none(), "{name} twice");
        }
    }
    found
}

#[test]
fn nothing_of_a_decoded_repository_tells_that_it_was_quantized() {
    let wishes = [
        (ViewOptions { dequantize: Some(Dequantize::Own), ..options("hf", "") }, "bfloat16"),
        (ViewOptions { dequantize: Some(Dequantize::To(DType::F32)), ..options("hf", "") }, "float32"),
        (ViewOptions { dtype: Some(DType::F16), ..options("canonical", "") }, "float16"),
    ];
    for (prefix, dress) in [("", Dress::Int4), ("language_model.", Dress::Int4), ("", Dress::ModelOpt("NVFP4"))] {
        let opened = models::llama(prefix, dress).open_stored();
        for (options, dtype) in &wishes {
            let plan = opened.plan(options);
            let config = text(&opened, &plan, "config.json");
            for holder in [Some(&config), config.get("text_config")].into_iter().flatten() {
                assert_eq!((holder.get("quantization_config"), &holder["dtype"]), (None, &json!(dtype)));
            }
            assert_eq!(config.get("text_config").is_some(), !prefix.is_empty());
            assert!(!has(&plan, "hf_quant_config.json"));
            let weights = weights(&plan);
            let names: BTreeSet<&str> = weights.keys().map(String::as_str).collect();
            assert_eq!(names.len(), 2 + 2 * 9, "{names:?}");
            assert!(names.iter().all(|name| name.ends_with(".weight")), "{names:?}");
            let index = text(&opened, &plan, "model.safetensors.index.json");
            let map: BTreeMap<&str, &str> = (index["weight_map"].as_object().unwrap().iter())
                .map(|(name, file)| (name.as_str(), file.as_str().unwrap()))
                .collect();
            let told: BTreeMap<&str, &str> =
                weights.iter().map(|(name, row)| (name.as_str(), row.0.as_str())).collect();
            assert_eq!(map, told);
            assert_eq!(index["metadata"]["total_size"], json!(weights.values().map(|row| row.2).sum::<u64>()));
        }
    }
}

#[test]
fn companions_that_no_decoder_reads_are_dropped_and_listed() {
    let opened = models::llama("", Dress::Int4).open_stored();
    for layout in ["canonical", "hf", "maxtext", "vllm"] {
        let dequantize = (layout.len() < 5 || layout == "canonical").then_some(Dequantize::Own);
        let plan = opened.plan(&ViewOptions { dequantize, ..options(layout, "") });
        let told: Vec<(&str, u64)> = plan.dropped.iter().map(|group| (group.name.as_str(), group.count)).collect();
        assert_eq!(told.iter().map(|row| row.1).sum::<u64>(), 2 * (1 + 7 + 7), "{layout}");
        for name in ["self_attn.k_scale", "mlp.up_proj.input_scale", "self_attn.q_proj.weight_shape"] {
            assert!(told.contains(&(&format!("model.layers.{{0-1}}.{name}"), 2)), "{layout}: {told:?}");
        }
        let text = view_text(&opened.checkpoint, &plan);
        assert!(text.contains("\ndropped     30 tensors which no decoder reads: model.layers.{0-1}.mlp."), "{text}");
    }
    let raw = opened.plan(&options("hf", ""));
    assert!(raw.dropped.is_empty());
    assert!(raw.tensors.iter().any(|tensor| tensor.name.ends_with("k_scale")));
}

#[test]
fn without_a_wish_the_repository_is_itself_and_codes_are_whole_on_every_device() {
    for dress in [Dress::Int4, Dress::ModelOpt("NVFP4")] {
        let opened = models::llama("", dress).open_stored();
        let plan = opened.plan(&options("hf", "tensor=2"));
        assert!(plan.decoded.is_empty());
        assert!(plan.hf.iter().all(|file| matches!(file.content, HfContent::Original(_))));
        let names: BTreeSet<&str> = plan.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let stored: BTreeSet<&str> = opened.checkpoint.tensors().map(|(_, info)| info.name).collect();
        assert_eq!(names, stored);
        let is_split = |name: &str| {
            let tensor = plan.tensors.iter().find(|tensor| tensor.name == name).unwrap();
            !plan.spec(tensor).is_replicated()
        };
        for name in names.iter().filter(|name| name.contains("proj")) {
            assert!(!is_split(name), "{name}");
        }
        assert!(is_split("model.embed_tokens.weight"));
        let note = "tensors of quantized weights";
        assert!(plan.warnings.iter().any(|said| said.contains(note) && said.contains("whole on every device")));
    }
}

/// A module that a rule keeps as it is stored keeps all that belongs to it, and `hf/` goes on saying how it is stored.
#[test]
fn a_part_that_stays_raw_stays_readable() {
    let opened = models::llama("", Dress::Int4).open_stored();
    let keep = CastRule { pattern: Pattern::parse("*.q_proj.weight").unwrap(), dtype: None };
    let plan = opened.plan(&ViewOptions { dequantize: Some(Dequantize::Own), casts: vec![keep], ..options("hf", "") });
    let of_module = |module: &str| {
        let stem = format!("model.layers.1.self_attn.{module}.");
        let names = plan.tensors.iter().filter_map(|tensor| tensor.name.strip_prefix(&stem).map(str::to_owned));
        names.collect::<Vec<_>>()
    };
    assert_eq!(of_module("q_proj"), ["input_scale", "weight_packed", "weight_scale", "weight_shape"]);
    assert_eq!(of_module("k_proj"), ["weight"]);
    assert_eq!((plan.decoded[0].tensors, plan.kept_raw), (12, 2));
    assert_eq!(plan.dropped.iter().map(|group| group.count).sum::<u64>(), 2 * (1 + 6 + 6));
    assert!(text(&opened, &plan, "config.json").get("quantization_config").is_some());
    let note = "hf/ has 2 quantized tensors as stored beside 12 decoded ones";
    assert!(plan.warnings.iter().any(|said| said.starts_with(note)), "{:?}", plan.warnings);
}
