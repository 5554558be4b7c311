//! The experts of gpt-oss: 4-bit floats with an exponent for 32, all experts of a layer in one tensor.
//!
//! `X_blocks` U8 `[experts, out, in/32, 16]` has two codes a byte, the low one first, and `X_scales` U8 `[experts, out, in/32]` bare
//! exponents: `W = e2m1 * 2^(e - 127)`. The decoded `X` is `[experts, in, out]`, as transformers has it: `gate_up_proj` `[experts,
//! hidden, 2 * inter]`, `down_proj` `[experts, inter, hidden]`. Biases are not quantized.
//!
//! Exponent 255 is NaN, as the OCP's definition of the format says, and code 8 is -0.0. transformers computes infinity and 0
//! for exponent 255, which no published file has.

use ckfs_tensor::DType;
use serde_json::json;

use super::{
    findings::SchemeFindings,
    listed::{Exceptions, config_of, excepted},
    quantization_config::Sharing,
    row::{
        CODES, CodeAxes, CodeForm, CodesSpec, Configured, ModuleConfig, PART, PartSpec, ROW, Rows, SchemeRow, ShownBy,
    },
    stored::Stored,
};

/// Elements that share an exponent.
const GROUP: u64 = 32;

/// The rows of the scheme.
pub(super) static ROWS: [SchemeRow; 1] = [SchemeRow {
    label: "mxfp4, {count} stacks of experts",
    codes: CodesSpec {
        suffix: "_blocks",
        decoded: "",
        dtypes: &[DType::U8],
        shown: ShownBy::Name,
        element: CodeForm::E2m1,
        axes: CodeAxes::Groups(GROUP / 2),
        shape: "[experts, out, in/32, 16]",
        transposed: &[0, 2, 1],
        ..CODES
    },
    parts: &[PartSpec { suffixes: &["_scales"], ..PART }],
    ..ROW
}];

pub(super) fn read<'a>(rows: Rows, stored: &Stored<'a>, found: &mut SchemeFindings<'_>) -> Configured<'a> {
    let exceptions = Exceptions::of(config_of(stored, "mxfp4")?, "modules_to_not_convert");
    for (_, scales) in stored.iter().filter(|(_, scales)| scales.dtype == DType::U8) {
        if let Some(name) = scales.name.strip_suffix("_scales")
            && stored.find(&format!("{name}_blocks")).is_none()
        {
            found.refuse(scales.name, format!("codes {name}_blocks beside it"), "no such tensor");
        }
    }
    let modules = ModuleConfig::new(rows, move |_, row, stem| {
        if exceptions.has(stem) { Err(excepted("mxfp4")) } else { Ok(Some((row, Sharing::Group(GROUP)))) }
    });
    Some(ModuleConfig { details: vec![("group", json!(GROUP))], ..modules })
}
