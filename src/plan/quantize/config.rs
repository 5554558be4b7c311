//! How a quantized repository says so: `quantization_config` of `config.json`, and `hf_quant_config.json`.

use ckfs_config::Quantize;
use serde_json::{Value, json};

/// The file that `ModelOpt` writes beside the weights.
pub(crate) const HF_QUANT_CONFIG: &str = "hf_quant_config.json";

/// The `quantization_config` of a scheme. `left` are the modules of matrices that stay as they are.
pub(crate) fn quantization_config(scheme: Quantize, left: &[String]) -> Value {
    let fp8 = |method: &str, block: [u64; 2], power_of_two: bool| {
        let mut config = json!({
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": left,
            "quant_method": method,
            "weight_block_size": block,
        });
        if power_of_two {
            config["scale_fmt"] = json!("ue8m0");
        }
        config
    };
    // What compressed-tensors says of codes: format, type, bits, strategy, elements of a group, and dtype of scales.
    let (format, kind, bits, strategy, size, scale_dtype) = match scheme {
        Quantize::Fp8Block => return fp8("fp8", [128, 128], false),
        Quantize::Fp8BlockUe8m0 => return fp8("fp8", [128, 128], true),
        Quantize::Mxfp8Sglang => return fp8("mxfp8", [1, 32], true),
        Quantize::Nvfp4Modelopt => {
            let mut config = modelopt(left);
            config["quant_method"] = json!("modelopt");
            config["ignore"] = json!(left);
            return config;
        }
        Quantize::Mlx(bits, group) => return json!({"group_size": group, "bits": bits, "mode": "affine"}),
        Quantize::MlxMxfp4 => return json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        Quantize::Fp8Channel => ("float-quantized", "float", 8, "channel", None, None),
        Quantize::Fp8Tensor => ("float-quantized", "float", 8, "tensor", None, None),
        Quantize::Mxfp8 => ("mxfp8-quantized", "float", 8, "group", Some(32), Some("torch.uint8")),
        Quantize::Mxfp4 => ("mxfp4-pack-quantized", "float", 4, "group", Some(32), Some("torch.uint8")),
        Quantize::Nvfp4 => ("nvfp4-pack-quantized", "float", 4, "tensor_group", Some(16), Some("torch.float8_e4m3fn")),
        Quantize::Int8Channel => ("pack-quantized", "int", 8, "channel", None, None),
        Quantize::Int4(group) => ("pack-quantized", "int", 4, "group", Some(group), None),
    };
    // Activations are quantized as they come.
    let activations = json!({
        "actorder": null, "block_structure": null, "dynamic": true, "group_size": null, "num_bits": 8, "observer": null,
        "observer_kwargs": {}, "scale_dtype": null, "strategy": "token", "symmetric": true, "type": "float", "zp_dtype": null,
    });
    let weights = json!({
        "actorder": null, "block_structure": null, "dynamic": false, "group_size": size, "num_bits": bits,
        "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": scale_dtype, "strategy": strategy,
        "symmetric": true, "type": kind, "zp_dtype": scale_dtype,
    });
    json!({
        "config_groups": {
            "group_0": {
                "format": format,
                "input_activations": (format == "float-quantized").then_some(activations),
                "output_activations": null,
                "targets": ["Linear"],
                "weights": weights,
            },
        },
        "format": format,
        "global_compression_ratio": null,
        "ignore": left,
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    })
}

/// What `ModelOpt` says of its NVFP4 for weights alone. With `NVFP4` engines quantize activations too, by an `input_scale` that no
/// function of the weights gives.
fn modelopt(left: &[String]) -> Value {
    json!({
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": null,
        "group_size": 16,
        "exclude_modules": left,
    })
}

/// The content of [`HF_QUANT_CONFIG`], for schemes that have it.
pub(crate) fn quantization_file(scheme: Quantize, left: &[String]) -> Option<Value> {
    let producer = json!({"name": "modelopt", "version": "0.47.0"});
    (scheme == Quantize::Nvfp4Modelopt).then(|| json!({"producer": producer, "quantization": modelopt(left)}))
}
