//! 8-bit floats of FBGEMM and transformers, and the 4-bit experts of DeepSeek V4 beside them.

use ckfs::tensor::DType;
use serde_json::json;

use crate::repository::{Repository, bf16_at, e2m1, e4m3, e8m0, f32_at, nibble_at, noise};

/// What is said of matrices of 8-bit floats whose scale is not there.
const LACKING: &str =
    "fp8, whose configuration says weight (F8_E4M3) with weight_scale or weight_scale_inv beside it, and found is";

#[test]
fn fbgemm_has_a_scale_per_row() {
    let config =
        json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]});
    let repository = || {
        Repository::new(config.clone())
            .noise("a.weight", DType::F8E4M3, &[7, 37])
            .noise("a.weight_scale", DType::F32, &[7, 1])
            .noise("a.input_scale_ub", DType::F32, &[1])
            .noise("lm_head.weight", DType::BF16, &[4, 4])
    };
    let opened = repository().open();
    assert_eq!((opened.decoded(), opened.left_out()), (vec!["a.weight"], vec!["a.input_scale_ub"]));
    let (codes, scales) = (opened.stored("a.weight"), opened.stored("a.weight_scale"));
    opened.check("a.weight", "scaled_fp8", &[7, 37], |n| e4m3(codes[n]) * f32_at(&scales, n / 37));
    repository().without("a.weight_scale").is_refused(&["\"a.weight\": expected a.weight_scale to decode it"]);
    repository()
        .instead("a.weight_scale", DType::F32, &[7])
        .is_refused(&["tensor \"a.weight_scale\": expected F32 [7, 1] to decode \"a.weight\", found F32 [7]"]);
}

#[test]
fn transformers_has_one_scale_for_each_matrix() {
    let config = json!({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": null});
    for (suffix, scale) in [("_scale_inv", &[][..]), ("_scale_inv", &[1]), ("_scale", &[1, 1])] {
        let opened = Repository::new(config.clone())
            .noise("a.weight", DType::F8E4M3, &[7, 37])
            .bytes(&format!("a.weight{suffix}"), DType::BF16, scale, vec![0xb3, 0x3c])
            .noise("a.activation_scale", DType::BF16, &[])
            .open();
        assert_eq!(opened.left_out(), ["a.activation_scale"]);
        let (codes, scale) = (opened.stored("a.weight"), opened.stored(&format!("a.weight{suffix}")));
        opened.check("a.weight", "scaled_fp8", &[7, 37], |n| e4m3(codes[n]) * bf16_at(&scale, 0));
    }
    // Experts in one tensor have one scale each.
    let opened = Repository::new(config.clone())
        .noise("experts.gate_up_proj", DType::F8E4M3, &[3, 4, 5])
        .noise("experts.gate_up_proj_scale_inv", DType::F32, &[3, 1, 1])
        .open();
    let (codes, scales) = (opened.stored("experts.gate_up_proj"), opened.stored("experts.gate_up_proj_scale_inv"));
    opened.check("experts.gate_up_proj", "scaled_fp8", &[3, 4, 5], |n| e4m3(codes[n]) * f32_at(&scales, n / 20));
    Repository::new(config.clone())
        .noise("a.weight", DType::F8E4M3, &[7, 37])
        .is_refused(&["tensor \"a.weight\": expected a.weight_scale_inv to decode it, found no such tensor"]);
    // The block size is never guessed without a configuration.
    Repository::new(config)
        .noise("a.weight", DType::F8E4M3, &[7, 37])
        .noise("a.weight_scale_inv", DType::F32, &[2, 5])
        .stays_raw("fp8 with several scales a matrix, but config.json gives no weight_block_size", 1);
    let unexplained = Repository::new(json!(null)).noise("a.weight", DType::F8E4M3, &[7, 37]);
    let unexplained = unexplained.noise("a.weight_scale", DType::F32, &[7, 1]);
    unexplained.stays_raw("tensors of codes and scales, but no quantization_config", 1);
}

#[test]
fn all_scales_missing_is_refused_though_a_block_is_configured() {
    let config = json!({"quant_method": "fp8", "weight_block_size": [4, 8]});
    let repository = Repository::new(config).noise("a.weight", DType::F8E4M3, &[7, 37]);
    repository.is_refused(&["tensor \"a.weight\": expected a.weight_scale_inv to decode it, found no such tensor"]);
}

#[test]
fn what_stands_beside_a_scale_must_be_a_matrix_of_codes() {
    let blocks = json!({"quant_method": "fp8", "weight_block_size": [4, 8]});
    let one = json!({"quant_method": "fp8", "weight_block_size": null});
    for config in [blocks, one] {
        for (dtype, shape) in [(DType::F8E4M3, &[259][..]), (DType::BF16, &[7, 37]), (DType::F8E8M0, &[7, 37])] {
            Repository::new(config.clone())
                .noise("a.weight", dtype, shape)
                .noise("a.weight_scale_inv", DType::F32, &[1])
                .is_refused(&["tensor \"a.weight\": expected "]);
        }
    }
    // A module that the configuration leaves alone may have any tensors.
    let plain = json!({"quant_method": "fp8", "weight_block_size": [4, 8], "modules_to_not_convert": ["a"]});
    let repository = Repository::new(plain)
        .noise("a.weight", DType::BF16, &[7, 37])
        .noise("a.weight_scale_inv", DType::F32, &[2, 5])
        .noise("b.weight", DType::F8E4M3, &[7, 37])
        .noise("b.weight_scale_inv", DType::F32, &[2, 5]);
    assert_eq!(repository.open().decoded(), ["b.weight"]);
}

#[test]
fn four_bit_experts_of_deepseek_v4_are_beside_blocks_of_fp8() {
    let config = json!({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [4, 8]});
    let expert = "layers.0.ffn.experts.0.w1";
    let repository = || {
        Repository::new(config.clone())
            .noise("layers.0.attn.wq_a.weight", DType::F8E4M3, &[6, 20])
            .noise("layers.0.attn.wq_a.scale", DType::F8E8M0, &[2, 3])
            .noise(&format!("{expert}.weight"), DType::I8, &[3, 32])
            .bytes(&format!("{expert}.scale"), DType::F8E8M0, &[3, 2], vec![0, 254, 255, 126, 127, 129])
            .bytes("layers.0.ffn.gate.tid2eid", DType::I32, &[2, 2], noise(1, 16))
    };
    let opened = repository().open();
    let found = opened.checkpoint.quantized();
    assert!(found.unsupported.is_empty(), "{:?}", found.unsupported);
    assert_eq!(opened.decoded(), ["layers.0.attn.wq_a.weight", &format!("{expert}.weight")]);
    let (codes, scales) = (opened.stored(&format!("{expert}.weight")), opened.stored(&format!("{expert}.scale")));
    opened.check(&format!("{expert}.weight"), "mx", &[3, 64], |n| e2m1(nibble_at(&codes, n)) * e8m0(scales[n / 32]));
    let (codes, scales) = (opened.stored("layers.0.attn.wq_a.weight"), opened.stored("layers.0.attn.wq_a.scale"));
    opened.check("layers.0.attn.wq_a.weight", "block_fp8", &[6, 20], |n| {
        e4m3(codes[n]) * e8m0(scales[n / 20 / 4 * 3 + n % 20 / 8])
    });
    repository()
        .without(&format!("{expert}.scale"))
        .is_refused(&[&format!("tensor \"{expert}.weight\": expected {expert}.scale to decode it")]);
    repository().instead(&format!("{expert}.scale"), DType::F8E8M0, &[3, 4]).is_refused(&[&format!(
        "tensor \"{expert}.scale\": expected F8_E8M0 [3, 2] to decode \"{expert}.weight\", found F8_E8M0 [3, 4]"
    )]);
    repository()
        .instead(&format!("{expert}.scale"), DType::F32, &[3, 2])
        .is_refused(&[&format!("tensor \"{expert}.scale\": expected F8_E8M0 [3, 2]")]);
}

/// A stack of experts has one scale for each output. transformers stores them on the middle axis, or on the last but one of its own.
#[test]
fn stacks_of_fbgemm_have_a_scale_per_column() {
    let config = json!({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]});
    for scale in [[3, 1, 5], [3, 5, 1]] {
        let repository = || {
            Repository::new(config.clone()).noise("experts.gate_up_proj", DType::F8E4M3, &[3, 4, 5]).noise(
                "experts.gate_up_proj_scale",
                DType::F32,
                &scale,
            )
        };
        let opened = repository().open();
        let (codes, scales) = (opened.stored("experts.gate_up_proj"), opened.stored("experts.gate_up_proj_scale"));
        opened.check("experts.gate_up_proj", "scaled_fp8", &[3, 4, 5], |n| {
            e4m3(codes[n]) * f32_at(&scales, n / 20 * 5 + n % 5)
        });
        repository()
            .instead("experts.gate_up_proj_scale", DType::F32, &[3, 4, 1])
            .is_refused(&["tensor \"experts.gate_up_proj_scale\": expected F32 [3, 1, 5] to decode"]);
        repository()
            .without("experts.gate_up_proj_scale")
            .stays_raw(&format!("fbgemm_{LACKING} gate_up_proj (F8_E4M3) alone"), 1);
    }
}

/// transformers would load the codes of such a module as if they were its numbers.
#[test]
fn codes_that_the_configuration_leaves_unquantized_stay_raw() {
    let repository = |mut config: serde_json::Value, entry: &str| {
        config["modules_to_not_convert"] = json!(["lm_head", entry]);
        Repository::new(config).noise("layers.0.mlp.gate.weight", DType::F8E4M3, &[6, 20]).noise(
            "layers.0.mlp.gate.weight_scale",
            DType::F32,
            &[6, 1],
        )
    };
    let blocks = json!({"quant_method": "fp8", "weight_block_size": [1, 20]});
    for (config, method) in [
        (blocks, "fp8"),
        (json!({"quant_method": "fp8"}), "fp8"),
        (json!({"quant_method": "fbgemm_fp8"}), "fbgemm_fp8"),
    ] {
        for entry in ["layers.0.mlp.gate", "mlp.gate", "gate", "layers.0.mlp", "layers.*.gate", "layers.0.*"] {
            let method = format!("{method}, but its configuration leaves this tensor unquantized");
            repository(config.clone(), entry).stays_raw(&method, 1);
        }
    }
    for entry in ["gate_proj", "mlp.gat", "ate", "layers.1.*", "*.mlp"] {
        let opened = repository(json!({"quant_method": "fbgemm_fp8"}), entry).open();
        assert_eq!(opened.decoded(), ["layers.0.mlp.gate.weight"], "{entry}");
    }
}

/// Their scales may have any name: without them 8-bit floats are no numbers of the model.
#[test]
fn matrices_of_8_bit_floats_without_a_known_scale_stay_raw() {
    for method in ["fp8", "mxfp4", "awq"] {
        let repository = Repository::new(json!({"quant_method": method})).noise("a.codes", DType::F8E4M3, &[7, 37]);
        let says = if method == "fp8" { format!("{LACKING} codes (F8_E4M3) alone") } else { method.to_owned() };
        repository.stays_raw(&says, 1);
    }
    // The block of another method's configuration is not this one's.
    let other = json!({"quant_method": "quark", "weight_block_size": [4, 8]});
    Repository::new(other)
        .noise("a.weight", DType::F8E4M3, &[7, 37])
        .noise("a.weight_scale_inv", DType::F32, &[2, 5])
        .stays_raw("quark", 1);
    // 8-bit floats of a model that is not quantized are its numbers.
    let plain = Repository::new(json!(null)).noise("a.weight", DType::F8E4M3, &[7, 37]).open();
    assert!(plain.checkpoint.quantized().unsupported.is_empty());
}
