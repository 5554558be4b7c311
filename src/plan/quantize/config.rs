//! How a quantized repository says so: `quantization_config` of `config.json`, and `hf_quant_config.json`.

use ckfs_config::Quantize;
use serde_json::{Value, json};

/// The file that `ModelOpt` writes beside the weights.
pub(crate) const HF_QUANT_CONFIG: &str = "hf_quant_config.json";

/// What compressed-tensors says of codes.
struct Group {
    format: &'static str,
    kind: &'static str,
    bits: u32,
    strategy: &'static str,
    size: Option<u64>,
    scale_dtype: Option<&'static str>,
    /// Whether activations are quantized as they come, and how.
    activations: Option<Value>,
}

fn group(scheme: Quantize) -> Option<Group> {
    let (channel, tensor, grouped) = ("channel", "tensor", "group");
    let fp8 = |strategy: &'static str| Group {
        format: "float-quantized",
        kind: "float",
        bits: 8,
        strategy,
        size: None,
        scale_dtype: None,
        activations: Some(activations("float", 8, "token", None)),
    };
    let packed = |format, bits, size: Option<u64>| Group {
        format,
        kind: "int",
        bits,
        strategy: if size.is_none() { channel } else { grouped },
        size,
        scale_dtype: None,
        activations: None,
    };
    let small = |format, bits, strategy, size, scale_dtype| Group {
        format,
        kind: "float",
        bits,
        strategy,
        size: Some(size),
        scale_dtype: Some(scale_dtype),
        activations: None,
    };
    Some(match scheme {
        Quantize::Fp8Channel => fp8(channel),
        Quantize::Fp8Tensor => fp8(tensor),
        Quantize::Mxfp8 => small("mxfp8-quantized", 8, grouped, 32, "torch.uint8"),
        Quantize::Mxfp4 => small("mxfp4-pack-quantized", 4, grouped, 32, "torch.uint8"),
        Quantize::Nvfp4 => small("nvfp4-pack-quantized", 4, "tensor_group", 16, "torch.float8_e4m3fn"),
        Quantize::Int8Channel => packed("pack-quantized", 8, None),
        Quantize::Int4(size) => packed("pack-quantized", 4, Some(size)),
        Quantize::Fp8Block | Quantize::Fp8BlockUe8m0 | Quantize::Mxfp8Sglang | Quantize::Nvfp4Modelopt => return None,
    })
}

fn activations(kind: &str, bits: u32, strategy: &str, group: Option<u64>) -> Value {
    json!({
        "actorder": null, "block_structure": null, "dynamic": true, "group_size": group, "num_bits": bits,
        "observer": null, "observer_kwargs": {}, "scale_dtype": null, "strategy": strategy, "symmetric": true,
        "type": kind, "zp_dtype": null,
    })
}

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
    match scheme {
        Quantize::Fp8Block => return fp8("fp8", [128, 128], false),
        Quantize::Fp8BlockUe8m0 => return fp8("fp8", [128, 128], true),
        Quantize::Mxfp8Sglang => return fp8("mxfp8", [1, 32], true),
        Quantize::Nvfp4Modelopt => {
            let mut config = modelopt(left);
            config["quant_method"] = json!("modelopt");
            config["ignore"] = json!(left);
            return config;
        }
        Quantize::Fp8Channel
        | Quantize::Fp8Tensor
        | Quantize::Mxfp8
        | Quantize::Mxfp4
        | Quantize::Nvfp4
        | Quantize::Int8Channel
        | Quantize::Int4(_) => {}
    }
    let Some(group) = group(scheme) else { return Value::Null };
    let weights = json!({
        "actorder": null, "block_structure": null, "dynamic": false, "group_size": group.size, "num_bits": group.bits,
        "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": group.scale_dtype,
        "strategy": group.strategy, "symmetric": true, "type": group.kind, "zp_dtype": group.scale_dtype,
    });
    json!({
        "config_groups": {
            "group_0": {
                "format": group.format,
                "input_activations": group.activations,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": weights,
            },
        },
        "format": group.format,
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
