//! `ModelOpt`: one algorithm for all modules or one for each, given in `config.json`, in `hf_quant_config.json`, or in both.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use crate::repository::{Repository, e2m1, e4m3, e8m0, f32_at, nibble_at};

fn in_config(algorithm: &str) -> Value {
    json!({"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.gate"],
           "producer": {"name": "modelopt", "version": "0.47.0"}})
}

fn in_file(algorithm: &str) -> Value {
    json!({"producer": {"name": "modelopt", "version": "0.47.0"},
           "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.gate"]}})
}

/// One matrix `[5, 64]` of each algorithm.
fn matrix(repository: Repository, module: &str, algorithm: &str) -> Repository {
    let name = |word: &str| format!("{module}.{word}");
    let repository = repository.noise(&name("input_scale"), DType::F32, &[]);
    match algorithm {
        "NVFP4" | "W4A16_NVFP4" => repository
            .noise(&name("weight"), DType::U8, &[5, 32])
            .noise(&name("weight_scale"), DType::F8E4M3, &[5, 4])
            .bytes(&name("weight_scale_2"), DType::F32, &[], 0.000_728_1f32.to_le_bytes().to_vec()),
        "FP8" => repository.noise(&name("weight"), DType::F8E4M3, &[5, 64]).bytes(
            &name("weight_scale"),
            DType::F32,
            &[],
            0.003_712f32.to_le_bytes().to_vec(),
        ),
        _ => {
            repository.noise(&name("weight"), DType::F8E4M3, &[5, 64]).noise(&name("weight_scale"), DType::U8, &[5, 2])
        }
    }
}

/// Whether the matrix of that name is decoded by the formula of its algorithm.
fn check(opened: &crate::repository::Opened, module: &str, algorithm: &str) {
    let part = |word: &str| opened.stored(&format!("{module}.{word}"));
    let (codes, scales, name) = (part("weight"), part("weight_scale"), format!("{module}.weight"));
    match algorithm {
        "NVFP4" | "W4A16_NVFP4" => {
            let second = f32_at(&part("weight_scale_2"), 0);
            opened.check(&name, "nvfp4", &[5, 64], |n| e2m1(nibble_at(&codes, n)) * (e4m3(scales[n / 16]) * second));
        }
        "FP8" => opened.check(&name, "scaled_fp8", &[5, 64], |n| e4m3(codes[n]) * f32_at(&scales, 0)),
        _ => opened.check(&name, "mx", &[5, 64], |n| e4m3(codes[n]) * e8m0(scales[n / 32])),
    }
}

#[test]
fn one_algorithm_for_all_from_either_file() {
    for algorithm in ["NVFP4", "W4A16_NVFP4", "FP8", "MXFP8"] {
        let places = [
            (in_config(algorithm), None),
            (in_config(algorithm), Some(in_file(algorithm))),
            (Value::Null, Some(in_file(algorithm))),
            (json!({"quant_method": "modelopt"}), Some(in_file(algorithm))),
        ];
        for (config, file) in places {
            let mut repository = matrix(Repository::new(config), "layers.0.q_proj", algorithm)
                .noise("layers.0.mlp.gate.weight", DType::BF16, &[4, 8])
                .noise("layers.0.attn.k_proj.k_scale", DType::F32, &[]);
            repository.modelopt = file;
            let opened = repository.open();
            assert_eq!(opened.decoded(), ["layers.0.q_proj.weight"]);
            assert_eq!(opened.left_out(), ["layers.0.attn.k_proj.k_scale", "layers.0.q_proj.input_scale"]);
            assert!(opened.checkpoint.quantized().unsupported.is_empty());
            check(&opened, "layers.0.q_proj", algorithm);
        }
    }
}

/// As Llama 4 is published: the experts of a layer are one tensor, whose companions have names after its own.
#[test]
fn stacks_of_experts_have_one_scale() {
    let stack = "layers.0.experts.gate_up_proj";
    let repository = |algorithm: &str| {
        Repository::new(in_config(algorithm))
            .bytes(&format!("{stack}_weight_scale"), DType::F32, &[], 0.003_712f32.to_le_bytes().to_vec())
            .noise(&format!("{stack}_input_scale"), DType::F32, &[])
    };
    let opened = repository("FP8").noise(stack, DType::F8E4M3, &[3, 4, 5]).open();
    assert_eq!(opened.left_out(), [format!("{stack}_input_scale")]);
    let codes = opened.stored(stack);
    opened.check(stack, "scaled_fp8", &[3, 4, 5], |n| e4m3(codes[n]) * 0.003_712);
    // Nothing tells how the 4-bit floats of a stack are packed.
    repository("NVFP4")
        .noise(stack, DType::U8, &[3, 4, 8])
        .stays_raw(
            "modelopt, whose configuration says weight (U8, two 4-bit floats each) with weight_scale (F8_E4M3) and weight_scale_2 \
             (F32) beside it, and found is gate_up_proj (U8) with gate_up_proj_input_scale (F32), gate_up_proj_weight_scale (F32) \
             beside it",
            1,
        );
}

#[test]
fn an_algorithm_for_each_layer() {
    let layers = json!({
        "layers.0.q": {"quant_algo": "NVFP4", "group_size": 16}, "layers.0.k": {"quant_algo": "FP8"},
        "layers.0.v": {"quant_algo": "MXFP8", "group_size": 32}, "layers.0.w": {"quant_algo": "W4A16_AWQ", "group_size": 128},
    });
    let config = || json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers});
    let mut repository = Repository::new(config());
    for (module, algorithm) in [("layers.0.q", "NVFP4"), ("layers.0.k", "FP8"), ("layers.0.v", "MXFP8")] {
        repository = matrix(repository, module, algorithm);
    }
    let opened = repository.open();
    check(&opened, "layers.0.q", "NVFP4");
    check(&opened, "layers.0.k", "FP8");
    check(&opened, "layers.0.v", "MXFP8");
    let other = Repository::new(config()).noise("layers.0.w.weight", DType::U8, &[4, 128]).noise(
        "layers.0.w.weight_scale",
        DType::BF16,
        &[8, 1],
    );
    other.stays_raw("ModelOpt W4A16_AWQ", 1);
    matrix(Repository::new(config()), "layers.9.q", "NVFP4")
        .stays_raw("modelopt, but its configuration leaves this tensor unquantized", 1);
}

#[test]
fn algorithms_that_are_not_decoded_stay_raw_by_name() {
    for algorithm in ["W4A16_AWQ", "NVFP4_AWQ", "NVFP4_SVD", "FP8_PB_WO", "W4A8_MXFP4_FP8"] {
        for (config, file) in [(in_config(algorithm), None), (Value::Null, Some(in_file(algorithm)))] {
            let mut repository = matrix(Repository::new(config), "a", "NVFP4");
            repository.modelopt = file;
            repository.stays_raw(&format!("ModelOpt {algorithm}"), 1);
        }
    }
    let mut of_32 = in_config("NVFP4");
    of_32["group_size"] = json!(32);
    matrix(Repository::new(of_32), "a", "NVFP4").stays_raw("ModelOpt NVFP4 in groups of 32", 1);
    let scaled =
        matrix(Repository::new(in_config("NVFP4")), "a", "NVFP4").noise("a.pre_quant_scale", DType::BF16, &[64]);
    scaled.stays_raw("ModelOpt NVFP4 with pre_quant_scale", 1);
    let mut differ = matrix(Repository::new(in_config("FP8")), "a", "FP8");
    differ.modelopt = Some(in_file("NVFP4"));
    differ.stays_raw("ModelOpt NVFP4 by hf_quant_config.json, FP8 by config.json", 1);
    let mut differ = matrix(Repository::new(json!({"quant_method": "fp8"})), "a", "FP8");
    differ.modelopt = Some(in_file("FP8"));
    differ.stays_raw("fp8 by config.json, ModelOpt by hf_quant_config.json", 1);
    // A head that is quantized although it is excluded is what its codes and scales say; alone, codes stay raw.
    let head = || matrix(Repository::new(in_config("NVFP4")), "lm_head", "NVFP4");
    check(&head().open(), "lm_head", "NVFP4");
    head()
        .without("lm_head.weight_scale_2")
        .stays_raw("modelopt, but its configuration leaves this tensor unquantized", 1);
    let excluded = matrix(Repository::new(in_config("FP8")), "layers.0.gate", "FP8");
    excluded.stays_raw("modelopt, but its configuration leaves this tensor unquantized", 1);
}

#[test]
fn all_that_does_not_agree_is_refused_at_once() {
    let all = |algorithm: &str, modules: &[&str]| {
        let repository = Repository::new(in_config(algorithm));
        modules.iter().fold(repository, |repository, module| matrix(repository, module, algorithm))
    };
    all("NVFP4", &["a", "b", "c", "d"])
        .without("a.weight_scale")
        .without("b.weight_scale_2")
        .instead("c.weight_scale", DType::F8E4M3, &[5, 8])
        .instead("d.weight", DType::BF16, &[5, 64])
        .is_refused(&[
            "tensor \"a.weight\": expected a.weight_scale to decode it, found no such tensor",
            "tensor \"b.weight\": expected b.weight_scale_2 to decode it, found no such tensor",
            "tensor \"c.weight_scale\": expected F8_E4M3 [5, 4] to decode \"c.weight\", found F8_E4M3 [5, 8]",
            "tensor \"d.weight\": expected U8 [5, 64] to decode \"d.weight\", found BF16 [5, 64]",
        ]);
    all("FP8", &["a", "b"]).without("a.weight_scale").instead("b.weight_scale", DType::F32, &[5, 1]).is_refused(&[
        "tensor \"a.weight\": expected a.weight_scale to decode it, found no such tensor",
        "tensor \"b.weight_scale\": expected F32 [1] to decode \"b.weight\", found F32 [5, 1]",
    ]);
    all("MXFP8", &["a", "b"]).without("a.weight_scale").instead("b.weight_scale", DType::U8, &[5, 1]).is_refused(&[
        "tensor \"a.weight\": expected a.weight_scale to decode it, found no such tensor",
        "tensor \"b.weight_scale\": expected U8 [5, 2] to decode \"b.weight\", found U8 [5, 1]",
    ]);
    // The configuration says NVFP4, the tensors FP8.
    matrix(Repository::new(in_config("NVFP4")), "a", "FP8").stays_raw(
        "modelopt, whose configuration says weight (U8, two 4-bit floats each) with weight_scale (F8_E4M3) and weight_scale_2 (F32) \
         beside it, and found is weight (F8_E4M3) with input_scale (F32), weight_scale (F32) beside it",
        1,
    );
}
