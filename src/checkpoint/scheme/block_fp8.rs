//! Matrices of 8-bit floats with a scale per block, as DeepSeek, Qwen and `MiniMax` publish them.
//!
//! `W[i, j] = f32(q[i, j]) * f32(s[i / rows, j / columns])`; the last block of either axis may be partial. The scale of `X.weight`
//! is `X.weight_scale_inv`, `X.weight_scale` or `X.scale`, and a stack of matrices has a stack of scales. The block comes from
//! the configuration only: dividing the shapes gives the wrong block where the last one is partial (576 rows on 5 scale rows
//! are blocks of 128, not 115). A scale of another shape than the blocks make is refused, one number for all of a matrix too.

use std::collections::HashMap;

use ckfs_tensor::{DType, Digit, Field, IndexMap, Operand, Operation, SourceTensor, TensorId, Value};
use serde_json::{Value as Json, json};

use super::{
    finds::{Finds, Scheme, Summary},
    parts::is_fp8,
    quantized::{Template, TemplateError, TemplateId},
    settings::{self, Settings, Told},
    stored::Stored,
};
use crate::problem::Problem;

/// The scheme.
#[derive(Debug)]
pub(super) struct BlockFp8;

/// A matrix and its scale.
struct Pair {
    weight: TensorId,
    scale: TensorId,
    /// What follows the weight's name in that of the scale.
    suffix: &'static str,
}

impl Scheme for BlockFp8 {
    fn name(&self) -> &'static str {
        "block_fp8"
    }

    fn find(&self, stored: &Stored<'_>, found: &mut Finds<'_>) -> Option<Summary> {
        let settings = Settings::read(stored);
        let block = block(stored.config().filter(|_| settings.is_fp8())?, found)?;
        let mut pairs = Vec::new();
        let mut bare = Vec::new();
        for (id, weight) in stored.iter().filter(|(_, weight)| is_fp8(weight.dtype)) {
            let [stack @ .., rows, columns] = weight.shape else { continue };
            let module = weight.name.strip_suffix(".weight").unwrap_or(weight.name);
            if found.is_taken(id) || settings.of(module) == Told::Plain {
                continue;
            }
            let Some((scale_id, suffix)) = scale_of(stored, weight.name) else {
                bare.push(id);
                continue;
            };
            let scale = stored.tensor(scale_id);
            let mut expected = stack.to_vec();
            expected.extend([rows.div_ceil(block.0), columns.div_ceil(block.1)]);
            if scale.shape != expected {
                let (weight_shape, found_shape) = (weight.shape.to_vec(), scale.shape.to_vec());
                let (weight, scale) = (weight.name.to_owned(), scale.name.to_owned());
                let shape = Problem::ScaleShape { weight, weight_shape, scale, block, expected, found: found_shape };
                found.problem(shape);
                continue;
            }
            if !may_scale(scale.dtype) {
                let (weight, scale_name) = (weight.name.to_owned(), scale.name.to_owned());
                found.problem(Problem::ScaleType { weight, scale: scale_name, found: scale.dtype });
                continue;
            }
            pairs.push(Pair { weight: id, scale: scale_id, suffix });
        }
        for id in bare {
            let name = stored.tensor(id).name;
            found.refuse(name, format!("a scale {name}_scale_inv for blocks of {}x{}", block.0, block.1), "none");
        }
        let first = pairs.first()?;
        let (suffix, scale_dtype) = (first.suffix, stored.tensor(first.scale).dtype);
        add(stored, found, &pairs, block);
        let (rows, columns, count) = (block.0, block.1, pairs.len());
        Some(Summary {
            scheme: self.name(),
            text: format!("fp8 in blocks of {rows}x{columns}, {count} weights with {scale_dtype} scales *{suffix}"),
            details: vec![
                ("block", json!([rows, columns])),
                ("weights", json!(count)),
                ("scale_suffix", json!(suffix)),
                ("scale_dtype", json!(scale_dtype.code())),
            ],
        })
    }
}

/// Shape and type of a weight, and of its scale.
type Kind<'a> = (&'a [u64], DType, &'a [u64], DType);

fn add(stored: &Stored<'_>, found: &mut Finds<'_>, pairs: &[Pair], block: (u64, u64)) {
    let mut templates: HashMap<Kind<'_>, Option<TemplateId>> = HashMap::new();
    for Pair { weight: id, scale: scale_id, .. } in pairs {
        let (weight, scale) = (stored.tensor(*id), stored.tensor(*scale_id));
        let key = (weight.shape, weight.dtype, scale.shape, scale.dtype);
        let template = *templates.entry(key).or_insert_with(|| {
            let operands = stored.operand(0, *id).zip(stored.operand(1, *scale_id));
            let template = operands.map(|(weight, scale)| template(weight, scale, block));
            found.template(weight.name, template?)
        });
        if let Some(template) = template {
            found.tensor(weight.name, template, &[*id, *scale_id], None);
        }
    }
}

fn template(weight: SourceTensor, scale: SourceTensor, block: (u64, u64)) -> Result<Template, TemplateError> {
    let shape = weight.shape.clone();
    let extents = shape.extents();
    let (row, column) = (extents.len() - 2, extents.len() - 1);
    let grid = scale.shape.extents();
    let mut digits = Vec::with_capacity(grid.len());
    for axis in 0..grid.len() {
        let group = if axis == row {
            block.0
        } else if axis == column {
            block.1
        } else {
            1
        };
        let stride = grid[axis + 1..].iter().product();
        digits.push(Digit::axis(extents, axis, stride).grouped(group));
    }
    // Bytes that are no floats are exponents by convention.
    let dtype = if scale.dtype == DType::U8 { DType::F8E8M0 } else { scale.dtype };
    let scale = Operand { tensor: scale, field: Field::Float(dtype), index: IndexMap::new(&digits) };
    Template::try_new(shape.clone(), Value::of(Operand::elements(weight)).then(Operation::Multiply, scale))
}

/// The block that the configuration gives, where it gives one.
fn block(config: &Json, found: &mut Finds<'_>) -> Option<(u64, u64)> {
    let block = config.get("weight_block_size").filter(|block| !block.is_null())?;
    let parsed = settings::block(block);
    if parsed.is_none() {
        found.problem(Problem::BlockSize { found: block.to_string() });
    }
    parsed
}

/// Types that scales come in; bytes without a float type are exponents by convention.
const fn may_scale(dtype: DType) -> bool {
    dtype.is_float() || matches!(dtype, DType::F8E8M0 | DType::U8)
}

/// The scale that belongs to a weight by its name, and how it is named.
fn scale_of(stored: &Stored<'_>, weight: &str) -> Option<(TensorId, &'static str)> {
    let beside = ["_scale_inv", "_scale"].into_iter();
    let of_module = weight.strip_suffix(".weight").map(|module| (module, ".scale"));
    let mut names = beside.map(|suffix| (weight, suffix)).chain(of_module);
    names.find_map(|(stem, suffix)| Some((stored.find(&format!("{stem}{suffix}"))?, suffix)))
}
