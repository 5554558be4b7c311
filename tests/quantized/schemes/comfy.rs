//! 8-bit floats of `ComfyUI`, and codes whose scales have names that no library here has.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use crate::repository::{Repository, e4m3, f32_at};

const CODES: &[u64] = &[7, 37];

/// One module of 8-bit floats, without any configuration.
fn codes() -> Repository {
    Repository::new(Value::Null).noise("a.weight", DType::F8E4M3, CODES)
}

/// The same with its format, as `ComfyUI` writes it beside the weight.
fn with_format(format: &Value) -> Repository {
    let text = format.to_string().into_bytes();
    let len = text.len() as u64;
    codes().noise("a.weight_scale", DType::F32, &[]).bytes("a.comfy_quant", DType::U8, &[len], text)
}

#[test]
fn a_matrix_has_one_scale_by_name() {
    for extents in [&[][..], &[1]] {
        let repository =
            || codes().noise("a.scale_weight", DType::F32, extents).noise("a.scale_input", DType::F32, &[]);
        for (opened, left_out) in [
            (repository().open(), vec!["a.scale_input"]),
            (repository().noise("net.scaled_fp8", DType::F8E4M3, &[2]).open(), vec!["a.scale_input", "net.scaled_fp8"]),
        ] {
            let mut found = opened.left_out();
            found.sort_unstable();
            assert_eq!((opened.decoded(), found), (vec!["a.weight"], left_out));
            let (codes, scale) = (opened.stored("a.weight"), opened.stored("a.scale_weight"));
            opened.check("a.weight", "comfy_fp8", CODES, |n| e4m3(codes[n]) * f32_at(&scale, 0));
        }
    }
    codes().noise("a.scale_weight", DType::F32, &[7, 1]).stays_raw("ComfyUI fp8 with several scales a matrix", 1);
    // What is no 8-bit float is scaled too where the file is marked; elsewhere the name may be that of a parameter.
    let wide =
        || Repository::new(Value::Null).noise("a.weight", DType::F16, CODES).noise("a.scale_weight", DType::F32, &[]);
    assert!(wide().open().checkpoint.quantized().unsupported.is_empty());
    wide().noise("scaled_fp8", DType::F8E4M3, &[0]).stays_raw("ComfyUI scale_weight beside F16", 1);
}

#[test]
fn a_matrix_has_a_format_beside_it_or_in_the_header() {
    let format = json!({"format": "float8_e4m3fn", "full_precision_matrix_mult": true});
    let mut in_header = codes().noise("a.weight_scale", DType::F32, &[]);
    let header = json!({"format_version": "1.0", "layers": {"a": format}});
    in_header.metadata = vec![("_quantization_metadata".to_owned(), header.to_string())];
    for repository in [with_format(&format), in_header] {
        let opened = repository.open();
        let (codes, scale) = (opened.stored("a.weight"), opened.stored("a.weight_scale"));
        opened.check("a.weight", "comfy_fp8", CODES, |n| e4m3(codes[n]) * f32_at(&scale, 0));
    }
    for (format, method) in [
        (json!({"format": "nvfp4"}), "ComfyUI nvfp4"),
        (json!({"format": "float8_e5m2"}), "ComfyUI float8_e5m2, but stored as F8_E4M3"),
        (json!({"format": "float8_e4m3fn", "convrot": true}), "ComfyUI float8_e4m3fn with convrot"),
        (json!({}), "ComfyUI without a format"),
    ] {
        with_format(&format).stays_raw(method, 1);
    }
    with_format(&json!({"format": "float8_e4m3fn"}))
        .without("a.weight_scale")
        .stays_raw("ComfyUI float8_e4m3fn without weight_scale", 1);
    let damaged = codes().bytes("a.comfy_quant", DType::U8, &[3], b"{1}".to_vec());
    damaged.is_refused(&["\"a.comfy_quant\": expected bytes of JSON"]);
}

/// Whatever a scale is called: cast as if they were numbers, codes would be wrong by the scale.
#[test]
fn codes_are_known_by_any_scale() {
    for (scale, word) in [
        ("a.scale_inv", "scale_inv"),
        ("a.weight_scales", "weight_scales"),
        ("a.w_scale", "w_scale"),
        ("a.weight.scale", "scale"),
        ("a.weight_amax", "weight_amax"),
        ("a.weight_quantizer._amax", "_amax"),
        ("a.inputScale", "inputScale"),
        ("a_scale", "a_scale"),
    ] {
        let method = |dtype: DType| format!("{dtype} codes beside a scale {word:?}, but no quantization_config");
        for dtype in [DType::F8E4M3, DType::F8E5M2, DType::F8E4M3Fnuz, DType::F8E5M2Fnuz, DType::F8E8M0, DType::I8] {
            let codes = codes().instead("a.weight", dtype, CODES);
            codes.noise(scale, DType::F32, &[]).stays_raw(&method(dtype), 1);
        }
    }
    let both = codes().noise("a.input_scale", DType::F32, &[]).noise("a.w_scale", DType::F32, &[]);
    both.stays_raw("F8_E4M3 codes beside a scale \"w_scale\", but no quantization_config", 1);
    let marked = codes().noise("a.weight_s", DType::F32, &[]).noise("scaled_fp8", DType::F8E4M3, &[2]);
    marked.stays_raw("F8_E4M3 codes, as a mark of ComfyUI says, without a scale of a known name", 1);
    // 8-bit floats that are numbers: nothing that is a scale belongs to them.
    for other in ["b.scale", "a.bias", "norm.logit_scale"] {
        let plain = codes().noise(other, DType::F32, &[]).open();
        assert!(plain.checkpoint.quantized().unsupported.is_empty(), "{other}");
    }
}
