//! How a quantized repository says so: `quantization_config` of `config.json`, and `hf_quant_config.json`.

use ckfs_config::Quantize;
use serde_json::{Value, json};

/// The file that `ModelOpt` writes beside the weights.
pub(crate) const HF_QUANT_CONFIG: &str = "hf_quant_config.json";

/// What the fp8 of transformers says, with these rows and columns of a block.
pub(super) fn fp8(method: &str, block: [u64; 2], power_of_two: bool, left: &[String]) -> Value {
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
}

/// The `quantization_config` of a scheme. `left` are the modules of matrices that stay as they are.
pub(crate) fn quantization_config(scheme: Quantize, left: &[String]) -> Value {
    // What compressed-tensors says of codes: format, type, bits, strategy, elements of a group, and dtype of scales.
    let (format, kind, bits, strategy, size, scale_dtype) = match scheme {
        Quantize::Fp8Block => return fp8("fp8", [128, 128], false, left),
        Quantize::Fp8BlockUe8m0 => return fp8("fp8", [128, 128], true, left),
        Quantize::Mxfp8Sglang => return fp8("mxfp8", [1, 32], true, left),
        Quantize::Nvfp4Modelopt => return modelopt_in_config(left),
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
    let weights = numbers(kind, bits, strategy, size, scale_dtype);
    let activations = if format == "float-quantized" { activations(8, "token", None) } else { Value::Null };
    compressed_tensors(&[((format, weights, activations), vec!["Linear".to_owned()])], left)
}

/// What compressed-tensors says of modules that it stores alike: their format, and the numbers of weights and of activations, as
/// [`numbers`] and [`activations`] say them.
pub(super) type ModuleForm = (&'static str, Value, Value);

/// What compressed-tensors says of symmetric codes: type, bits, what shares a scale, and the dtype of scales.
pub(super) fn numbers(kind: &str, bits: u64, strategy: &str, size: Option<u64>, scale_dtype: Option<&str>) -> Value {
    json!({
        "actorder": null, "block_structure": null, "dynamic": false, "group_size": size, "num_bits": bits,
        "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": scale_dtype, "strategy": strategy,
        "symmetric": true, "type": kind, "zp_dtype": scale_dtype,
    })
}

/// The same of activations that are quantized to floats as they come.
pub(super) fn activations(bits: u64, strategy: &str, size: Option<u64>) -> Value {
    let mut numbers = numbers("float", bits, strategy, size, None);
    (numbers["dynamic"], numbers["observer"]) = (json!(true), Value::Null);
    numbers
}

/// The configuration of compressed-tensors, for groups of modules.
pub(super) fn compressed_tensors(groups: &[(ModuleForm, Vec<String>)], left: &[String]) -> Value {
    let of_group = |(number, ((format, weights, activations), targets)): (usize, &(ModuleForm, Vec<String>))| {
        let members = json!({
            "format": format,
            "input_activations": activations,
            "output_activations": null,
            "targets": targets,
            "weights": weights,
        });
        (format!("group_{number}"), members)
    };
    let mut formats: Vec<&str> = groups.iter().map(|((format, ..), _)| *format).collect();
    formats.dedup();
    json!({
        "config_groups": Value::Object(groups.iter().enumerate().map(of_group).collect()),
        "format": if let [format] = formats[..] { format } else { "mixed-precision" },
        "global_compression_ratio": null,
        "ignore": left,
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    })
}

/// What `ModelOpt` says in `config.json` of NVFP4 for weights alone.
/// With `NVFP4` engines quantize activations too, by an `input_scale` that no function of the weights gives.
pub(super) fn modelopt_in_config(left: &[String]) -> Value {
    json!({
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": null,
        "group_size": 16,
        "exclude_modules": left,
        "quant_method": "modelopt",
        "ignore": left,
    })
}

/// The content of [`HF_QUANT_CONFIG`], if this `config.json` is of `ModelOpt`.
pub(crate) fn quantization_file(config: &Value) -> Option<Value> {
    let mut told = config.get("quantization_config")?.as_object()?.clone();
    told.shift_remove("ignore");
    let is_modelopt = told.shift_remove("quant_method")? == "modelopt";
    let producer = json!({"name": "modelopt", "version": "0.47.0"});
    is_modelopt.then(|| json!({"producer": producer, "quantization": told}))
}
