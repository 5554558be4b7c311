//! Matrices of 8-bit floats with a scale for all, for each row, or for a block: compressed-tensors `float-quantized` and
//! `naive-quantized` (GLM, Llama 4), FBGEMM (Llama 3.1 405B), `ModelOpt` FP8, and the fp8 of transformers without a block.
//!
//! `W[i, j] = f32(q[i, j]) * f32(s)`, in f32. `ModelOpt` itself casts both to the target before it multiplies, which gives other
//! numbers for a quarter of all elements in bf16. The scale of `X.weight` is `X.weight_scale`, in transformers `X.weight_scale_inv`, and is a
//! factor in both. The configuration says what shares it; shapes are never divided to find out.

use serde_json::json;

use super::{
    finds::{Finds, Scheme, Summary},
    parts::{Kinds, blocks, floats, grid, is_fp8, is_wide_float, module_of, slot},
    quantized::{Template, TemplateError},
    settings::{Settings, Sharing, Told},
    stored::Stored,
};
use crate::tensor::{DType, IndexMap, Operand, Operation, TensorId, Value};

/// The scheme.
#[derive(Debug)]
pub(super) struct ScaledFp8;

/// Codes and their scale, of these types and shapes.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    extents: Vec<u64>,
    codes: DType,
    sharing: Sharing,
    scale: DType,
    scale_extents: Vec<u64>,
}

impl Scheme for ScaledFp8 {
    fn name(&self) -> &'static str {
        "scaled_fp8"
    }

    fn find(&self, stored: &Stored<'_>, found: &mut Finds<'_>) -> Option<Summary> {
        let settings = Settings::read(stored);
        if !settings.is_known() || (settings.is_fp8() && has_block(stored)) {
            return None;
        }
        let mut kinds = Kinds::new();
        let mut ways: Vec<(Sharing, u64)> = Vec::new();
        for (id, codes) in stored.iter() {
            // Stacks of experts have names of their own, in transformers only.
            let stack = settings.is_fp8() && is_fp8(codes.dtype);
            let Some(module) = module_of(codes.name, "weight").or(stack.then_some(codes.name)) else { continue };
            if codes.shape.len() < 2 || found.is_taken(id) {
                continue;
            }
            let scale = scale_of(stored, codes.name, &settings);
            // A plain weight, or 8-bit floats of a name that says nothing.
            if scale.is_none() && (!is_fp8(codes.dtype) || module == codes.name) {
                continue;
            }
            let Told::Fp8(sharing) = settings.of(module) else { continue };
            let Some(scale) = scale else {
                let inverse = if settings.is_fp8() { "_inv" } else { "" };
                found.refuse(codes.name, format!("its scale {}_scale{inverse}", codes.name), "no such tensor");
                continue;
            };
            let of_scale = stored.tensor(scale);
            if settings.is_fp8() && !is_single(of_scale.shape) {
                found.unsupported(
                    "fp8 with several scales a matrix, but config.json gives no weight_block_size",
                    Some(id),
                );
                continue;
            }
            if !is_fp8(codes.dtype) {
                found.refuse(
                    codes.name,
                    format!("8-bit floats, scaled by {:?}", of_scale.name),
                    codes.dtype.to_string(),
                );
                continue;
            }
            if !is_wide_float(of_scale.dtype) && of_scale.dtype != DType::F8E8M0 {
                let expected = format!("a float as the scale of {:?}", codes.name);
                found.refuse(of_scale.name, expected, of_scale.dtype.to_string());
                continue;
            }
            let kind = Kind {
                extents: codes.shape.to_vec(),
                codes: codes.dtype,
                sharing,
                scale: of_scale.dtype,
                scale_extents: scale_extents(codes.shape, of_scale.shape, sharing),
            };
            if let Some(template) = kinds.template(found, codes.name, kind, template) {
                found.tensor(codes.name, template, &[id, scale], None);
            }
            match ways.iter_mut().find(|(other, _)| *other == sharing) {
                Some((_, count)) => *count += 1,
                None => ways.push((sharing, 1)),
            }
        }
        let count: u64 = ways.iter().map(|(_, count)| count).sum();
        let text: Vec<String> = ways.iter().map(|(sharing, count)| format!("{count} weights with {sharing}")).collect();
        (count > 0).then(|| Summary {
            scheme: self.name(),
            text: format!("fp8, {}", text.join(", ")),
            details: vec![("weights", json!(count))],
        })
    }
}

/// Whether a block is configured, if only by mistake: blocks are another scheme.
fn has_block(stored: &Stored<'_>) -> bool {
    let configured = stored.config().and_then(|config| config.get("weight_block_size"));
    configured.is_some_and(|block| !block.is_null())
}

/// Whether a scale of this shape is one number for each matrix.
fn is_single(scale: &[u64]) -> bool {
    scale.iter().rev().take(2).product::<u64>() == 1
}

/// The scale of these codes.
fn scale_of(stored: &Stored<'_>, codes: &str, settings: &Settings<'_>) -> Option<TensorId> {
    let inverse = || stored.find(&format!("{codes}_scale_inv"));
    let found = stored.find(&format!("{codes}_scale"));
    if settings.is_fp8() { inverse().or(found) } else { found }
}

/// The shape that the scale must have. One scale for all may be `[]` or `[1]`, and for a stack it is one for each matrix or one.
fn scale_extents(codes: &[u64], scale: &[u64], sharing: Sharing) -> Vec<u64> {
    let block = sharing.block((codes[codes.len() - 2], codes[codes.len() - 1]));
    match (sharing, scale) {
        (Sharing::Tensor, [] | [1]) => scale.to_vec(),
        (Sharing::Tensor, _) if codes.len() == 2 && scale != [1, 1] => vec![1],
        (Sharing::Tensor | Sharing::Channel | Sharing::Group(_) | Sharing::Block(..), _) => grid(codes, block),
    }
}

fn template(kind: &Kind) -> Result<Template, TemplateError> {
    let extents = kind.extents.as_slice();
    let codes = slot(0, kind.codes, extents)?;
    let scale = slot(1, kind.scale, &kind.scale_extents)?;
    let block = kind.sharing.block((extents[extents.len() - 2], extents[extents.len() - 1]));
    let is_one = scale.shape.elements() == 1;
    let index = if is_one { IndexMap::new(&[]) } else { blocks(extents, block) };
    let shape = codes.shape.clone();
    Template::try_new(shape, Value::of(Operand::elements(codes)).then(Operation::Multiply, floats(scale, index)))
}
