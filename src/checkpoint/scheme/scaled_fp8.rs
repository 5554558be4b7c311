//! Matrices of 8-bit floats with a scale for all, for each row, or for a block: compressed-tensors `float-quantized` and
//! `naive-quantized` (GLM, Llama 4), FBGEMM (Llama 3.1 405B), `ModelOpt` FP8, and the fp8 of transformers without a block.
//!
//! `W[i, j] = f32(q[i, j]) * f32(s)`, in f32. `ModelOpt` itself casts both to the target before it multiplies, which gives other
//! numbers for a quarter of all elements in bf16. The scale of `X.weight` is `X.weight_scale`, in transformers `X.weight_scale_inv`, and is a
//! factor in both. The configuration says what shares it; shapes are never divided to find out.
//!
//! Experts in one tensor `X` `[experts, in, out]` have no `.weight` in their name. Their scale is `X_scale_inv` in transformers, `X_weight_scale` in
//! `ModelOpt`. FBGEMM has `X_scale` with one number for each expert and output, stored as `[experts, 1, out]` or as `[experts, out, 1]`.

use ckfs_tensor::{DType, IndexMap, Operand, Operation, TensorId, Value};
use serde_json::json;

use super::{
    finds::{Finds, Scheme, Summary},
    parts::{Kinds, blocks, floats, grid, is_fp8, is_wide_float, module_of, slot},
    quantized::{Template, TemplateError},
    settings::{Settings, Sharing, Told},
    stored::Stored,
};
use crate::table::TensorInfo;

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
    /// Whether a scale belongs to a column of one matrix, instead.
    by_column: bool,
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
        for (id, codes) in stored.iter().filter(|(_, codes)| codes.shape.len() >= 2) {
            let Some((kind, scale)) = kind_of(stored, &settings, found, (id, codes)) else { continue };
            let sharing = kind.sharing;
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

/// What kind of matrix or stack this is, and its scale, if it is one of this scheme and they agree.
fn kind_of(
    stored: &Stored<'_>,
    settings: &Settings<'_>,
    found: &mut Finds<'_>,
    (id, codes): (TensorId, TensorInfo<'_>),
) -> Option<(Kind, TensorId)> {
    // Stacks of experts have names of their own.
    let stack = settings.has_stacks() && is_fp8(codes.dtype);
    let module = module_of(codes.name, "weight").or(stack.then_some(codes.name)).filter(|_| !found.is_taken(id))?;
    let is_stack = module == codes.name;
    let scale = scale_of(stored, codes.name, is_stack, settings);
    // A plain weight, or 8-bit floats of a name that says nothing.
    if scale.is_none() && (!is_fp8(codes.dtype) || is_stack) {
        return None;
    }
    let Told::Fp8(sharing) = settings.of(module) else { return None };
    let Some(scale_id) = scale else {
        let inverse = if settings.is_fp8() { "_inv" } else { "" };
        found.refuse(codes.name, format!("its scale {}_scale{inverse}", codes.name), "no such tensor");
        return None;
    };
    let scale = stored.tensor(scale_id);
    if settings.is_fp8() && !is_single(scale.shape) {
        let method = "fp8 with several scales a matrix, but config.json gives no weight_block_size";
        found.unsupported(method, Some(id));
        return None;
    }
    if !is_fp8(codes.dtype) {
        found.refuse(codes.name, format!("8-bit floats, scaled by {:?}", scale.name), codes.dtype.to_string());
        return None;
    }
    if !is_wide_float(scale.dtype) && scale.dtype != DType::F8E8M0 {
        let expected = format!("a float as the scale of {:?}", codes.name);
        found.refuse(scale.name, expected, scale.dtype.to_string());
        return None;
    }
    if is_stack && let Some(input) = stored.find(&format!("{}_input_scale", codes.name)) {
        found.leave_out(input);
    }
    let by_column = is_stack && sharing == Sharing::Channel;
    let scale_extents = if by_column {
        column_extents(codes.shape, scale.shape)
    } else {
        scale_extents(codes.shape, scale.shape, sharing)
    };
    let (extents, codes, scale) = (codes.shape.to_vec(), codes.dtype, scale.dtype);
    Some((Kind { extents, codes, sharing, scale, scale_extents, by_column }, scale_id))
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
fn scale_of(stored: &Stored<'_>, codes: &str, is_stack: bool, settings: &Settings<'_>) -> Option<TensorId> {
    if is_stack && settings.is_modelopt() {
        return stored.find(&format!("{codes}_weight_scale"));
    }
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

/// The shape that the scales of the columns of a stack must have: one for each expert and column, on either axis.
fn column_extents(codes: &[u64], scale: &[u64]) -> Vec<u64> {
    let (stack, columns) = (&codes[..codes.len() - 2], codes[codes.len() - 1]);
    let beside = [stack, &[columns, 1]].concat();
    if scale == beside { beside } else { [stack, &[1, columns]].concat() }
}

fn template(kind: &Kind) -> Result<Template, TemplateError> {
    let extents = kind.extents.as_slice();
    let codes = slot(0, kind.codes, extents)?;
    let scale = slot(1, kind.scale, &kind.scale_extents)?;
    let block = kind.sharing.block((extents[extents.len() - 2], extents[extents.len() - 1]));
    let is_one = scale.shape.elements() == 1;
    let index = if is_one {
        IndexMap::new(&[])
    } else if kind.by_column {
        blocks(extents, (extents[extents.len() - 2].max(1), 1))
    } else {
        blocks(extents, block)
    };
    let shape = codes.shape.clone();
    Template::try_new(shape, Value::of(Operand::elements(codes)).then(Operation::Multiply, floats(scale, index)))
}
