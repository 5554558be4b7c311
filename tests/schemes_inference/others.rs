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
