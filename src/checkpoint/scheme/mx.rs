//! Small floats with an exponent for 32 of a row, matrix by matrix: compressed-tensors `mxfp4-pack-quantized` (Kimi K3) and `mxfp8-quantized`
//! (`MiniMax` M3), `ModelOpt` MXFP8, and the 4-bit experts of DeepSeek V4.
//!
//! `W = code * 2^(e - 127)`; exponent 255 is NaN. Codes of 4 bits are two a byte, the low one first: `X.weight_packed` U8, in DeepSeek V4 `X.weight` I8.
//! Exponents are `X.weight_scale` U8, in DeepSeek V4 `X.scale` `F8_E8M0`, of shape `[out, in/32]`. Experts that are stacked in one tensor are in
//! `mxfp4`.

use ckfs_tensor::{DType, Field, Operand, Operation, Value};
use serde_json::json;

use super::{
    finds::{Finds, Scheme, Summary},
    parts::{Kinds, blocks, floats, module_of, needed, packed, slot},
    quantized::{Template, TemplateError},
    settings::{Settings, Sharing, Told},
    stored::Stored,
};

/// The scheme.
#[derive(Debug)]
pub(super) struct Mx;

/// Elements that share an exponent.
const GROUP: u64 = 32;

/// How codes and exponents are stored, and how their names end.
struct Way {
    codes: &'static str,
    dtype: DType,
    exponents: &'static str,
    exponent_dtype: DType,
    is_packed: bool,
}

const MXFP4: Way = Way {
    codes: "weight_packed",
    dtype: DType::U8,
    exponents: "weight_scale",
    exponent_dtype: DType::U8,
    is_packed: true,
};
const MXFP8: Way = Way { codes: "weight", dtype: DType::F8E4M3, is_packed: false, ..MXFP4 };
const DEEPSEEK: Way =
    Way { codes: "weight", dtype: DType::I8, exponents: "scale", exponent_dtype: DType::F8E8M0, is_packed: true };

impl Scheme for Mx {
    fn name(&self) -> &'static str {
        "mx"
    }

    fn find(&self, stored: &Stored<'_>, found: &mut Finds<'_>) -> Option<Summary> {
        let settings = Settings::read(stored);
        if !settings.is_known() {
            return None;
        }
        let mut counts = [(&MXFP4, 0u64), (&MXFP8, 0), (&DEEPSEEK, 0)];
        for (way, count) in &mut counts {
            let wanted = match (way.codes, way.dtype) {
                ("weight_packed", _) if settings.is_compressed_tensors() => Told::Mxfp4,
                ("weight", DType::F8E4M3) => Told::Mxfp8,
                ("weight", DType::I8) if settings.is_fp8() => Told::Fp8(Sharing::Tensor),
                _ => continue,
            };
            if !settings.may_say(&wanted) {
                continue;
            }
            *count = find_way(stored, &settings, found, way, &wanted);
        }
        let words = ["mxfp4", "mxfp8", "4-bit experts of DeepSeek V4"];
        let counts = words.iter().zip(counts.iter().map(|(_, count)| *count)).filter(|(_, count)| *count > 0);
        let texts: Vec<String> = counts.clone().map(|(word, count)| format!("{word}, {count} weights")).collect();
        let total: u64 = counts.map(|(_, count)| count).sum();
        (total > 0).then(|| Summary {
            scheme: self.name(),
            text: texts.join("; "),
            details: vec![("weights", json!(total)), ("group", json!(GROUP))],
        })
    }
}

/// Finds all matrices that are stored this way, and how many there are.
fn find_way(stored: &Stored<'_>, settings: &Settings<'_>, found: &mut Finds<'_>, way: &Way, wanted: &Told) -> u64 {
    let mut kinds = Kinds::new();
    let mut count = 0;
    for (id, codes) in stored.iter() {
        let Some(module) = module_of(codes.name, way.codes).filter(|_| !found.is_taken(id)) else { continue };
        // Names of plain weights end so too.
        let is_code = codes.dtype == way.dtype || way.codes != "weight";
        let exponents = || stored.find(&format!("{module}.{}", way.exponents));
        let is_scaled = way.dtype != DType::I8 && exponents().is_some();
        if (!is_code && !is_scaled) || codes.shape.len() < 2 || settings.of(module) != *wanted {
            continue;
        }
        count += 1;
        let Some(exponents) = needed(stored, found, (module, way.codes), way.exponents) else { continue };
        let mut extents = codes.shape.to_vec();
        let columns = extents.pop().unwrap_or(0).saturating_mul(if way.is_packed { 2 } else { 1 });
        extents.push(columns);
        if !columns.is_multiple_of(GROUP) {
            found.refuse(codes.name, "rows of a multiple of 32 elements", columns.to_string());
            continue;
        }
        let template = kinds.template(found, codes.name, extents, |extents| template(extents, way));
        if let Some(template) = template {
            found.tensor(&format!("{module}.weight"), template, &[id, exponents], None);
        }
    }
    count
}

fn template(extents: &[u64], way: &Way) -> Result<Template, TemplateError> {
    let last = extents.len() - 1;
    let divided = |by: u64| [&extents[..last], &[extents[last] / by]].concat();
    let codes = slot(0, way.dtype, &divided(if way.is_packed { 2 } else { 1 }))?;
    let exponents = floats(slot(1, way.exponent_dtype, &divided(GROUP))?, blocks(extents, (1, GROUP)));
    let codes = if way.is_packed { packed(codes, extents, Field::e2m1()) } else { Operand::elements(codes) };
    let shape = slot(0, DType::F32, extents)?.shape;
    Template::try_new(shape, Value::of(codes).then(Operation::Multiply, exponents))
}
