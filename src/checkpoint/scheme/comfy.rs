//! Matrices of 8-bit floats with one scale, as `ComfyUI` saves them, for the most part without any configuration.
//!
//! | form | codes | scale | marks |
//! |---|---|---|---|
//! | scaled fp8 | `X.weight` | `X.scale_weight`, one number | a tensor `scaled_fp8` in the file |
//! | mixed precision | `X.weight` | `X.weight_scale`, one number | `X.comfy_quant`, bytes of JSON, or `_quantization_metadata` in the header |
//!
//! `W = f32(q) * f32(s)`, in f32. `ComfyUI` casts both to the type it computes in before it multiplies, which gives other numbers
//! where that is bf16. Other formats of the second form (rotated int8, 4 bits with scales that are tiled for an accelerator) stay
//! raw by their names, and so do members of the JSON that are not known here.

use ckfs_tensor::{DType, TensorId};
use hashbrown::{HashMap, HashSet};
use rayon::prelude::*;
use serde_json::Value as Json;

use super::{
    findings::SchemeFindings,
    listed::text,
    parts::{FP8, is_fp8, is_wide_float, module_of},
    quantization_config::Sharing,
    row::{
        CODES, CodeAxes, CodesSpec, Configured, ModuleConfig, PART, PartExtents, PartSpec, PartType, ROW, Rows,
        SchemeRow, ShownBy,
    },
    stored::Stored,
};
use crate::table::TensorInfo;

/// The last word of the name of the tensor that marks a file of the first form.
pub(crate) const MARK: &str = "scaled_fp8";
/// That of the tensor which says how a module is quantized.
const FORMAT: &str = "comfy_quant";
/// The member of a header that says it of all modules.
const METADATA: &str = "_quantization_metadata";

/// By the format that is given for a module, and by the name of its scale alone.
pub(super) static ROWS: [SchemeRow; 2] = [row(&[SCALE]), row(&[PartSpec { suffixes: &[".scale_weight"], ..SCALE }])];

const SCALE: PartSpec = PartSpec {
    suffixes: &[".weight_scale", ".scale_weight"],
    dtype: PartType::Float(is_wide_float),
    extents: PartExtents::AnySingle,
    ..PART
};

const fn row(parts: &'static [PartSpec]) -> SchemeRow {
    let codes = CodesSpec { dtypes: &FP8, types: "8-bit floats", shown: ShownBy::Name, axes: CodeAxes::Any, ..CODES };
    let label = "ComfyUI fp8, {count} weights with a scale per tensor";
    SchemeRow { label, codes, parts, left_out: &[".scale_input", ".input_scale", ".comfy_quant"], ..ROW }
}

pub(super) fn read<'a>(rows: Rows, stored: &Stored<'a>, found: &mut SchemeFindings<'_>) -> Configured<'a> {
    let told = told(stored, found);
    if told.is_empty() && !stored.has_word("scale_weight") {
        return None;
    }
    let is_marked = is_marked(stored);
    let modules = ModuleConfig::new(rows, move |stored, _, module| {
        let Some(codes) = stored.companion(module, "weight").map(|id| stored.tensor(id)) else { return Ok(None) };
        let row = match told.get(module) {
            Some(told) => of_format(stored, module, &codes, told),
            None => of_scaled(stored, module, &codes, is_marked),
        };
        Ok(row?.map(|row| (row, Sharing::Tensor)))
    });
    // Whose row a module is of is said of all.
    Some(ModuleConfig { rows: vec![0], mark: Some(MARK), ..modules })
}

/// Whether a file of the repository says that it has codes of `ComfyUI`.
pub(super) fn is_marked(stored: &Stored<'_>) -> bool {
    stored.has_word(MARK) || stored.has_word(FORMAT) || !headers(stored).is_empty()
}

/// What the headers say, one text for each file that says something.
fn headers<'a>(stored: &Stored<'a>) -> Vec<&'a str> {
    let mut files = HashSet::new();
    let first = stored.iter().filter(|(_, tensor)| files.insert(tensor.file()));
    let members: Vec<_> = first.flat_map(|(id, _)| stored.metadata(id)).collect();
    members.into_iter().filter(|(key, _)| key == METADATA).map(|(_, text)| text.as_str()).collect()
}

/// How modules are quantized, by their names, as headers and tensors say it.
fn told(stored: &Stored<'_>, found: &mut SchemeFindings<'_>) -> HashMap<String, Json> {
    let mut told = HashMap::new();
    for header in headers(stored) {
        let layers = ckfs_format::json::tree(header.as_bytes()).ok();
        match layers.and_then(|mut header| header.get_mut("layers").map(Json::take)) {
            Some(Json::Object(layers)) => told.extend(layers),
            Some(_) | None => found.refuse(METADATA, "a JSON object with layers in the header's __metadata__", header),
        }
    }
    let of_modules: Vec<(TensorId, &str)> =
        stored.iter().filter_map(|(id, tensor)| Some((id, module_of(tensor.name, FORMAT)?))).collect();
    // Small reads from wherever the repository is: many at a time.
    let texts: Vec<_> = of_modules.par_iter().map(|(id, _)| stored.read(*id)).collect();
    for ((_, module), text) in of_modules.into_iter().zip(texts) {
        let Some(text) = found.taken(text) else { continue };
        match ckfs_format::json::tree(&text) {
            Ok(format) => _ = told.insert(module.to_owned(), format),
            Err(error) => found.refuse(&format!("{module}.{FORMAT}"), "bytes of JSON", error),
        }
    }
    told
}

/// The row of a module whose format is given, or the name of the format that is not decoded.
fn of_format(stored: &Stored<'_>, module: &str, codes: &TensorInfo<'_>, told: &Json) -> Result<Option<usize>, String> {
    let format = text(told, "format").unwrap_or("without a format");
    let expected = match format {
        "float8_e4m3fn" => DType::F8E4M3,
        "float8_e5m2" => DType::F8E5M2,
        other => return Err(format!("ComfyUI {other}")),
    };
    // The second says how activations are multiplied with the weight.
    let known = ["format", "full_precision_matrix_mult"];
    let other = told.as_object().and_then(|members| members.keys().find(|key| !known.contains(&key.as_str())));
    if let Some(other) = other {
        return Err(format!("ComfyUI {format} with {other}"));
    }
    if codes.dtype != expected {
        return Err(format!("ComfyUI {format}, but stored as {}", codes.dtype));
    }
    let scale = stored.companion(module, "weight_scale").or_else(|| stored.companion(module, "scale_weight"));
    scale.map_or_else(|| Err(format!("ComfyUI {format} without weight_scale")), |scale| checked(stored, scale, 0))
}

/// The same by the name of a scale alone.
fn of_scaled(
    stored: &Stored<'_>,
    module: &str,
    codes: &TensorInfo<'_>,
    is_marked: bool,
) -> Result<Option<usize>, String> {
    let Some(scale) = stored.companion(module, "scale_weight") else { return Ok(None) };
    if is_fp8(codes.dtype) {
        return checked(stored, scale, 1);
    }
    // Its loader multiplies whatever it finds. Without the mark it may be a parameter of some model.
    if is_marked { Err(format!("ComfyUI scale_weight beside {}", codes.dtype)) } else { Ok(None) }
}

/// The row, if the scale is one number.
fn checked(stored: &Stored<'_>, scale: TensorId, row: usize) -> Result<Option<usize>, String> {
    let info = stored.tensor(scale);
    if info.shape.iter().product::<u64>() != 1 {
        return Err("ComfyUI fp8 with several scales a matrix".to_owned());
    }
    if is_wide_float(info.dtype) { Ok(Some(row)) } else { Err(format!("ComfyUI fp8 with a scale of {}", info.dtype)) }
}
