//! Experts of gpt-oss.

use ckfs::tensor::DType;
use serde_json::json;

use crate::repository::{Repository, e2m1, e8m0, nibble_at, noise};

const EXPERTS: &str = "model.layers.0.mlp.experts";

fn repository() -> Repository {
    let mut exponents = noise(5, 2 * 5 * 3);
    exponents[..6].copy_from_slice(&[0, 1, 254, 255, 127, 128]);
    Repository::new(json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}))
        .noise(&format!("{EXPERTS}.gate_up_proj_blocks"), DType::U8, &[2, 6, 1, 16])
        .noise(&format!("{EXPERTS}.gate_up_proj_scales"), DType::U8, &[2, 6, 1])
        .noise(&format!("{EXPERTS}.gate_up_proj_bias"), DType::BF16, &[2, 6])
        .noise(&format!("{EXPERTS}.down_proj_blocks"), DType::U8, &[2, 5, 3, 16])
        .bytes(&format!("{EXPERTS}.down_proj_scales"), DType::U8, &[2, 5, 3], exponents)
        .noise(&format!("{EXPERTS}.down_proj_bias"), DType::BF16, &[2, 5])
}

#[test]
fn experts_are_turned_and_exponent_255_is_nan() {
    let opened = repository().open();
    let names = ["down_proj", "gate_up_proj"].map(|word| format!("{EXPERTS}.{word}"));
    assert_eq!(opened.decoded(), names, "biases are as they are");
    assert!(opened.left_out().is_empty());
    for (name, out, groups) in [(&names[0], 5usize, 3usize), (&names[1], 6, 1)] {
        let (codes, exponents) = (opened.stored(&format!("{name}_blocks")), opened.stored(&format!("{name}_scales")));
        let inner = 32 * groups;
        opened.check(name, "mxfp4", &[2, inner as u64, out as u64], |n| {
            let (expert, i, o) = (n / (inner * out), n / out % inner, n % out);
            let row = expert * out + o;
            e2m1(nibble_at(&codes, row * inner + i)) * e8m0(exponents[row * groups + i / 32])
        });
    }
    assert_eq!(opened.checkpoint.quantized().schemes[0].text, "mxfp4, 2 stacks of experts");
}

#[test]
fn all_that_does_not_agree_is_refused_at_once() {
    let (down, up) = (format!("{EXPERTS}.down_proj"), format!("{EXPERTS}.gate_up_proj"));
    let repository = repository()
        .without(&format!("{down}_scales"))
        .instead(&format!("{up}_scales"), DType::F32, &[2, 6, 1])
        .noise("a_blocks", DType::U8, &[2, 5, 48])
        .noise("b_blocks", DType::U8, &[2, 5, 3, 16])
        .noise("b_scales", DType::U8, &[2, 5, 4])
        .noise("c_blocks", DType::I8, &[2, 5, 3, 16])
        .noise("c_scales", DType::U8, &[2, 5, 3])
        .noise("d_scales", DType::U8, &[2, 5, 3]);
    repository.is_refused(&[
        &format!("tensor \"{down}_blocks\": expected {down}_scales to decode it, found no such tensor"),
        &format!("tensor \"{up}_scales\": expected U8 [2, 6, 1] to decode \"{up}\", found F32 [2, 6, 1]"),
        "tensor \"a_blocks\": expected shape [experts, out, in/32, 16], found [2, 5, 48]",
        "tensor \"b_scales\": expected U8 [2, 5, 3] to decode \"b\", found U8 [2, 5, 4]",
        "tensor \"c_blocks\": expected U8 [2, 5, 3, 16] to decode \"c\", found I8 [2, 5, 3, 16]",
        "tensor \"d_scales\": expected codes d_blocks beside it, found no such tensor",
    ]);
}

#[test]
fn codes_without_a_configuration_stay_raw_and_a_configuration_without_codes_is_ignored() {
    let mut repository = repository();
    repository.config = json!({"model_type": "gpt_oss"});
    repository.stays_raw("tensors of codes and scales, but no quantization_config", 2);
    let plain = Repository::new(json!({"quant_method": "mxfp4"})).noise("a.weight", DType::BF16, &[4, 4]).open();
    let found = plain.checkpoint.quantized();
    assert!(found.tensors.is_empty() && found.unsupported.is_empty() && found.schemes.is_empty());
    for entry in ["model.layers.*.mlp.experts", "model.layers.0.mlp", "down_proj", "experts.down_proj"] {
        let mut repository = self::repository().without(&format!("{EXPERTS}.gate_up_proj_blocks"));
        repository = repository.without(&format!("{EXPERTS}.gate_up_proj_scales"));
        repository.config["quantization_config"]["modules_to_not_convert"] = json!([entry]);
        repository.stays_raw("mxfp4, but its configuration leaves this tensor unquantized", 1);
    }
    // The configuration refers to tensors that are not plain numbers.
    let other = Repository::new(json!({"quant_method": "quark"})).noise("a.codes", DType::U8, &[4, 4]);
    other.stays_raw("quark", 1);
}
