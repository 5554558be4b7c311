//! 4-bit integers of AWQ, as its kernel `gemm` reads them.
//!
//! `X.qweight` I32 `[in, out/8]`, `X.qzeros` I32 `[in/g, out/8]`, `X.scales` `[in/g, out]`: `W[o, i] = (q - z) * s`, stored the other way
//! round. Field `k` of a word, counted from its low bits, is column `[0, 2, 4, 6, 1, 3, 5, 7][k]` of the word's eight. The
//! product is rounded once, from f32; rounding it to the scale's f16 first gives another bf16 for 3 % of all elements.
//!
//! The kernels `gemv`, `marlin` and `exllama` have words in other orders. They stay raw.

use ckfs_tensor::{DType, Operation};
use serde_json::{Value as Json, json};

use super::{
    findings::SchemeFindings,
    listed::{Exceptions, config_of, excepted, group_size, member, refuse_orphans},
    parts::is_wide_float,
    quantization_config::Sharing,
    row::{
        CODES, CodeAxes, CodeForm, CodesSpec, Configured, ModuleConfig, PART, PartSpec, PartType, ROW, Rows, SchemeRow,
        ShownBy, step,
    },
    stored::Stored,
};

/// The rows of the scheme.
pub(super) static ROWS: [SchemeRow; 1] = [SchemeRow {
    label: "{count} weights of 4-bit integers, {sharing}",
    codes: CodesSpec {
        suffix: ".qweight",
        dtypes: &[DType::I32],
        shown: ShownBy::Name,
        element: CodeForm::EvenThenOdd,
        axes: CodeAxes::Two,
        shape: "[in, out/8]",
        by_column: true,
        transposed: &[1, 0],
        ..CODES
    },
    parts: &[
        PartSpec { suffixes: &[".qzeros"], dtype: PartType::One(DType::I32), element: CodeForm::EvenThenOdd, ..PART },
        PartSpec { suffixes: &[".scales"], dtype: PartType::Float(is_wide_float), ..PART },
    ],
    value: &[step(Operation::Subtract, 0), step(Operation::Multiply, 1)],
    ..ROW
}];

pub(super) fn read<'a>(rows: Rows, stored: &Stored<'a>, found: &mut SchemeFindings<'_>) -> Configured<'a> {
    let config = config_of(stored, "awq")?;
    refuse_orphans(stored, found, &["qzeros", "scales"], "qweight");
    let exceptions = Exceptions::of(config, "modules_to_not_convert");
    let group = group(config);
    let details = vec![("group", json!(group.clone().ok().flatten()))];
    let modules = ModuleConfig::new(rows, move |_, row, stem| {
        let group = group.clone()?;
        if exceptions.has(stem) {
            return Err(excepted("awq"));
        }
        Ok(Some((row, group.map_or(Sharing::Channel, Sharing::Group))))
    });
    Some(ModuleConfig { words: ("awq gemm: ".to_owned(), "; "), details, ..modules })
}

/// Rows that share a scale, `None` if all do, or the name of what is not decoded. What is not configured is as it is in transformers:
/// 4 bits, kernel `gemm`, zero points. Groups are never guessed.
fn group(config: &Json) -> Result<Option<u64>, String> {
    let version = member(config, &["version", "format"]).map_or(Some("gemm"), Json::as_str).unwrap_or("unknown");
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(format!("awq {}", version.to_lowercase()));
    }
    if let Some(bits) = member(config, &["bits", "w_bit"]).filter(|bits| **bits != 4) {
        return Err(format!("awq of {bits} bits"));
    }
    if member(config, &["zero_point"]).is_some_and(|zero| *zero != true) {
        return Err("awq without zero points".to_owned());
    }
    let size = member(config, &["group_size", "q_group_size"]).ok_or_else(|| "no group_size".to_owned());
    size.and_then(group_size).map_err(|what| format!("awq with {what}"))
}
