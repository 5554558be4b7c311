//! What nothing here decodes.

use ckfs::tensor::DType;
use serde_json::json;

use crate::repository::Repository;

#[test]
fn other_libraries_stay_raw_by_name() {
    let hqq = Repository::new(json!({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}))
        .noise("a.W_q", DType::U8, &[8, 32])
        .noise("a.scale", DType::F16, &[16, 1])
        .noise("a.zero", DType::F16, &[16, 1]);
    hqq.stays_raw("hqq", 1);
    let aqlm = Repository::new(json!({"quant_method": "aqlm", "in_group_size": 8, "nbits_per_codebook": 16}))
        .noise("a.codes", DType::I16, &[16, 4, 1])
        .noise("a.codebooks", DType::F16, &[1, 16, 1, 8])
        .noise("a.scales", DType::F16, &[16, 1, 1, 1]);
    aqlm.stays_raw("aqlm", 1);
    let exl2 = Repository::new(json!({"quant_method": "exl2", "version": "0.0.1", "bits": 4.0}))
        .noise("a.q_weight", DType::I32, &[8, 16])
        .noise("a.q_scale", DType::I32, &[2, 2])
        .noise("a.q_scale_max", DType::F16, &[2]);
    exl2.stays_raw("exl2", 2);
}

#[test]
fn a_configuration_without_codes_is_of_no_matter() {
    for config in [
        json!({"quant_method": "awq", "bits": 4}),
        json!({"quant_method": "gptq", "bits": 4, "group_size": 128}),
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
        json!({"bits": 4, "group_size": 64}),
        json!({"quant_method": "torchao"}),
    ] {
        let plain = Repository::new(config).noise("a.weight", DType::BF16, &[4, 4]).open();
        let found = plain.checkpoint.quantized();
        assert!(found.tensors.is_empty() && found.unsupported.is_empty() && found.schemes.is_empty());
    }
}

/// The configuration speaks of weights that are plain: it was left behind. That of a cache is none of weights.
#[test]
fn a_configuration_that_was_left_behind_is_known() {
    for (config, stale) in [
        (json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), Some("fp8")),
        (json!({"bits": 4, "group_size": 64}), Some("a quantization_config without quant_method")),
        (json!({"quant_method": "modelopt", "quant_algo": null, "kv_cache_quant_algo": "FP8"}), None),
        (json!(null), None),
    ] {
        let plain = Repository::new(config).noise("a.weight", DType::BF16, &[4, 4]).open();
        assert_eq!(plain.checkpoint.quantized().stale.as_deref(), stale);
    }
}

/// A list of modules may hold expressions: what cannot be used is not passed over.
#[test]
fn a_list_of_modules_with_a_damaged_expression_is_named() {
    let with = |entry: &str| {
        let config = json!({"quant_method": "fbgemm_fp8", "modules_to_not_convert": [entry]});
        let repository = Repository::new(config).noise("a.weight", DType::F8E4M3, &[7, 37]);
        repository.noise("a.weight_scale", DType::F32, &[7, 1]).open()
    };
    let said = with("model.(layers");
    let said: Vec<_> = said.checkpoint.quantized().unsupported.iter().map(|of| of.method.clone()).collect();
    assert_eq!(said, ["modules that \"model.(layers\" leaves out, an expression that cannot be used here"]);
    assert!(with("(?!a)b").checkpoint.quantized().unsupported.is_empty());
}

/// As old repositories are, whose configuration was in a file of its own.
#[test]
fn codes_of_every_library_are_noticed_without_a_configuration() {
    let repository = || Repository::new(json!(null));
    let noticed = |repository: Repository| {
        repository.stays_raw("tensors of codes and scales, but no quantization_config", 1);
    };
    let gptq = repository().noise("a.qweight", DType::I32, &[4, 16]).noise("a.qzeros", DType::I32, &[1, 2]);
    noticed(gptq.noise("a.scales", DType::F16, &[1, 16]));
    noticed(repository().noise("a.W_q", DType::U8, &[8, 32]).noise("a.scale", DType::F16, &[16, 1]));
    let torchao = repository().noise("a._weight_qdata", DType::I8, &[4, 8]);
    noticed(torchao.noise("a._weight_scale", DType::F32, &[4, 1]));
    let bitsandbytes = repository().noise("a.weight", DType::U8, &[64, 1]).noise("a.weight.absmax", DType::F32, &[2]);
    noticed(bitsandbytes);
    noticed(repository().noise("a.weight", DType::I8, &[4, 8]).noise("a.SCB", DType::F32, &[4]));
    noticed(repository().noise("a.weight", DType::U32, &[4, 8]).noise("a.scales", DType::BF16, &[4, 1]));
    noticed(repository().noise("a.up", DType::U8, &[2, 4, 8]).noise("a.up_weight_scale", DType::F32, &[]));
    // Integers of a model that is not quantized.
    let plain = repository().noise("a.qweight", DType::I32, &[4, 16]).noise("a.table", DType::I32, &[4, 16]).open();
    assert!(plain.checkpoint.quantized().unsupported.is_empty());
}

/// A nested configuration may have the member and leave it empty.
#[test]
fn a_null_in_the_text_model_does_not_hide_the_configuration() {
    let mut repository = Repository::new(json!({"quant_method": "fbgemm_fp8"}))
        .noise("a.weight", DType::F8E4M3, &[7, 37])
        .noise("a.weight_scale", DType::F32, &[7, 1]);
    repository.config["text_config"] = json!({"quantization_config": null, "dtype": null, "torch_dtype": null});
    let opened = repository.open();
    let tensor = &opened.checkpoint.quantized().tensors[0];
    assert_eq!((&*tensor.name, tensor.dtype), ("a.weight", DType::F16));
}
