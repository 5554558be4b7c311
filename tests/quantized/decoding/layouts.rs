//! Layouts over codes equal, bit for bit, the same layouts over the decoded tensors.

use ckfs::{
    plan::{Dequantize, ViewOptions},
    tensor::DType,
};

use super::{
    models::{self, Dress},
    twice::{Twice, options},
};

/// Every file that is shown of the codes has the bytes of the same file over decoded tensors.
#[track_caller]
fn same(twice: &Twice, options: &ViewOptions, files_min: usize) {
    let (stored, decoded) = (twice.open_stored().files(options), twice.open_decoded().files(options));
    let names = |files: &std::collections::BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&stored), names(&decoded));
    assert!(stored.len() >= files_min, "{} files", stored.len());
    // A rewritten text may be spaced otherwise.
    let json = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
    for (path, bytes) in &stored {
        if path == "sharded_state/config.json" {
            assert_eq!(json(bytes), json(&decoded[path]));
            continue;
        }
        assert!(*bytes == decoded[path], "{path} of {} bytes differs", bytes.len());
    }
}

const MESHES: [&str; 2] = ["", "fsdp=2,tensor=2"];

#[test]
fn maxtext_of_gpt_oss_in_mxfp4() {
    let twice = models::gpt_oss();
    for (layout, leaves) in [("maxtext", 40), ("maxtext-unscanned", 80)] {
        for mesh in MESHES {
            same(&twice, &options(layout, mesh), leaves);
        }
    }
}

#[test]
fn maxtext_of_deepseek_in_int4() {
    for model_type in ["deepseek_v3", "kimi_k2"] {
        let twice = models::kimi(model_type);
        for (layout, leaves) in [("maxtext", 30), ("maxtext-unscanned", 40)] {
            for mesh in MESHES {
                same(&twice, &options(layout, mesh), leaves);
            }
        }
    }
}

#[test]
fn vllm_of_llama_in_int4() {
    let twice = models::llama("", Dress::Int4);
    for mesh in ["", "tensor=2"] {
        same(&twice, &options("vllm", mesh), 10);
    }
}

/// Heads, and the shared expert, are as many as two ranks can share.
#[test]
fn vllm_of_kimi_in_int4() {
    let twice = models::kimi("kimi_k2");
    for mesh in ["", "tensor=2", "tensor=2,ep=1"] {
        same(&twice, &options("vllm", mesh), 3);
    }
}

#[test]
fn names_of_the_family_and_of_the_repository() {
    for twice in [models::gpt_oss(), models::kimi("deepseek_v3"), models::llama("", Dress::Int4)] {
        for layout in ["canonical", "hf"] {
            for dequantize in [Dequantize::Own, Dequantize::To(DType::BF16)] {
                let options = ViewOptions { dequantize: Some(dequantize), ..options(layout, "fsdp=2,tensor=2") };
                same(&twice, &options, 20);
            }
        }
    }
}

#[test]
fn experts_of_gpt_oss_have_the_shapes_of_the_decoded_repository() {
    let opened = models::gpt_oss().open_stored();
    let plan = opened.plan(&ViewOptions { dequantize: Some(Dequantize::Own), ..options("hf", "") });
    for (name, extents) in [("gate_up_proj", [4, 64, 64]), ("down_proj", [4, 32, 64])] {
        let name = format!("model.layers.3.mlp.experts.{name}");
        let tensor = plan.tensors.iter().find(|tensor| tensor.name == name).unwrap();
        assert_eq!((tensor.view.dtype(), tensor.view.shape().extents()), (DType::BF16, extents.as_slice()));
    }
    assert_eq!((plan.decoded[0].scheme, plan.decoded[0].tensors), ("mxfp4", 8));
    assert_eq!(plan.decoded[0].bytes, 2 * 4 * 4 * (64 * 64 + 32 * 64));
}

/// Without a wish these layouts have a dtype all the same: MaxText's its own, vLLM's that of the model.
#[test]
fn layouts_that_need_floats_decode_by_themselves() {
    for (layout, twice, dtype) in [
        ("maxtext", models::gpt_oss(), Some(DType::BF16)),
        ("maxtext-unscanned", models::gpt_oss(), Some(DType::BF16)),
        ("maxtext", models::llama("", Dress::Int4), Some(DType::BF16)),
        ("vllm", models::llama("", Dress::Int4), None),
    ] {
        let opened = twice.open_stored();
        for keep_dtype in [false, true] {
            let plan = opened.plan(&ViewOptions { keep_dtype, ..options(layout, "") });
            assert_eq!((plan.dtype, plan.kept_raw), (dtype.filter(|_| !keep_dtype), 0), "{layout}");
            assert_eq!(plan.decoded.len(), 1, "{layout}");
            let is_codes = |dtype: DType| !matches!(dtype, DType::BF16 | DType::F32);
            assert!(plan.tensors.iter().all(|tensor| !is_codes(tensor.view.dtype())), "{layout}");
            // Nobody has asked for another repository.
            assert!(plan.hf.iter().all(|file| matches!(file.content, ckfs::plan::HfContent::Original(_))), "{layout}");
        }
    }
}

/// Beside the shards of vLLM's ranks nothing says that they are quantized, though `hf/` is the repository as it is stored.
#[test]
fn the_shards_of_vllm_are_told_as_plain() {
    for dress in [Dress::Int4, Dress::ModelOpt("NVFP4")] {
        let files = models::llama("", dress).open_stored().files(&options("vllm", ""));
        let config: serde_json::Value = serde_json::from_slice(&files["sharded_state/config.json"]).unwrap();
        assert_eq!((config.get("quantization_config"), config["dtype"].as_str()), (None, Some("bfloat16")));
        assert!(files.contains_key("sharded_state/model-rank-0-part-0.safetensors"));
        assert!(!files.contains_key("sharded_state/hf_quant_config.json"));
    }
}
