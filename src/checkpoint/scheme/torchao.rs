//! Types of torchao whose scales belong to rows, blocks or groups, as transformers saves them.
//!
//! A parameter `X.weight` is stored as `X._weight_qdata`, `X._weight_scale` and perhaps `X._weight_zero_point`; one of another
//! name likewise, as a layer's experts in one tensor, whose axis comes first everywhere. The headers of the weight files say
//! what they are, under `X.weight`: `_type`, `_data` and `_tensor_data_names`. Files of other programs lack this.
//!
//! | type | codes | value |
//! |---|---|---|
//! | `Float8Tensor` | `F8_E4M3` `[out, in]` | `q * s`, a scale for a block, which is usually a row |
//! | `Int8Tensor` | I8 `[out, in]` | `(q - z) * s`, zero points I8 or none |
//! | `Int4Tensor` | I8 `[out, in/2]`, signed, the low nibble first | `q * s + z`, zero points are floats, both `[in/g, out]` |
//!
//! All of it in f32, each step rounded once. Other types stay raw by their names: `Int4TilePackedTo4dTensor` is tiled for an
//! accelerator. These names are of a prototype of the library: what differs from the table is refused.

use std::collections::{BTreeMap, HashSet};

use ckfs_tensor::{Bits, DType, Digit, Field, IndexMap, Operand, Operation, TensorId, Value, ViewError};
use serde_json::{Value as Json, json};

use super::{
    findings::{SchemeFindings, Told},
    listed::{Exceptions, config_of, decoded_dtype, excepted, text},
    parts::{Kinds, floats, is_scale, packed, slot},
    quantized::Template,
    stored::{Stored, last_word},
};

/// Types that are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Type {
    Float8,
    Int8,
    Int4,
}

/// All that distinguishes kinds of tensors.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    of: Type,
    extents: Vec<u64>,
    /// Elements of a block on each axis.
    block: Vec<u64>,
    scale: DType,
    has_zeros: bool,
}

/// Finds the tensors of the scheme.
pub(super) fn find(stored: &Stored<'_>, found: &mut SchemeFindings<'_>) -> Told {
    let config = config_of(stored, "torchao")?;
    let described = described(stored, found);
    let exceptions = Exceptions::of(config, "modules_to_not_convert");
    let mut kinds = Kinds::new();
    let mut counts: BTreeMap<Type, u64> = BTreeMap::new();
    let mut known = HashSet::new();
    for (name, row) in &described {
        let (module, parameter) = name.rsplit_once('.').unwrap_or(("", name));
        let part = |word: &str| {
            let dot = if module.is_empty() { "" } else { "." };
            format!("{module}{dot}_{parameter}_{word}")
        };
        let words = row.get("_tensor_data_names").and_then(Json::as_array).into_iter().flatten();
        let words: Vec<&str> = words.filter_map(Json::as_str).collect();
        let ids: Vec<TensorId> = words.iter().filter_map(|word| stored.find(&part(word))).collect();
        known.extend(&ids);
        let example = stored.find(&part("qdata")).or(ids.first().copied());
        let kind = text(row, "_type").unwrap_or("without a type");
        let of = match kind {
            "Float8Tensor" => Type::Float8,
            "Int8Tensor" => Type::Int8,
            "Int4Tensor" => Type::Int4,
            other => {
                found.unsupported(&format!("torchao {other}"), example);
                continue;
            }
        };
        if exceptions.has(module) {
            found.unsupported(&excepted("torchao"), example);
            continue;
        }
        let known = if of == Type::Float8 { &["qdata", "scale"][..] } else { &["qdata", "scale", "zero_point"] };
        if let Some(other) = words.iter().find(|word| !known.contains(word)) {
            found.unsupported(&format!("torchao {kind} with {other}"), example);
            continue;
        }
        *counts.entry(of).or_default() += 1;
        let has_zeros = words.contains(&"zero_point") || of == Type::Int4;
        let mut needed = |word: &str| found.needed(name, &part(word), stored.find(&part(word)));
        let (codes, scale) = (needed("qdata"), needed("scale"));
        let zeros = if has_zeros { needed("zero_point").map(Some) } else { Some(None) };
        let (Some(codes), Some(scale), Some(zeros)) = (codes, scale, zeros) else { continue };
        let (Some(kind), Some(dtype)) =
            (kind_of(stored, found, (name, row), (of, codes, scale, has_zeros)), dtype_of(found, name, row, of))
        else {
            continue;
        };
        let operands: Vec<TensorId> = [codes, scale].into_iter().chain(zeros).collect();
        kinds.add(found, kind, template, (name, &operands, Some(dtype)));
    }
    refuse_undescribed(stored, found, &known);
    let count: u64 = counts.values().sum();
    let texts: Vec<String> = counts.iter().map(|(of, count)| format!("{count} weights of {of:?}Tensor")).collect();
    (count > 0).then(|| (format!("torchao: {}", texts.join(", ")), vec![("weights", json!(count))]))
}

/// What headers tell of each parameter that is not plain, by its name. Two files must not tell different things.
fn described(stored: &Stored<'_>, found: &mut SchemeFindings<'_>) -> BTreeMap<String, Json> {
    let mut described: BTreeMap<String, Json> = BTreeMap::new();
    let mut files = HashSet::new();
    for (id, tensor) in stored.iter() {
        if !files.insert(tensor.file()) {
            continue;
        }
        for (name, text) in stored.metadata(id) {
            let Ok(row @ Json::Object(_)) = ckfs_format::json::tree(text.as_bytes()) else { continue };
            if row.get("_type").is_none_or(|of| of == "Tensor") {
                continue;
            }
            match described.get(name) {
                Some(other) if *other != row => {
                    found.refuse(name, "one description in all headers", "two that differ");
                }
                Some(_) => {}
                None => {
                    described.insert(name.clone(), row);
                }
            }
        }
    }
    described
}

/// Refuses codes and companions of which no header tells what they are.
fn refuse_undescribed(stored: &Stored<'_>, found: &mut SchemeFindings<'_>, known: &HashSet<TensorId>) {
    for (id, tensor) in stored.iter() {
        let last = last_word(tensor.name);
        let is_part = ["_qdata", "_scale", "_zero_point"].iter().any(|word| last.ends_with(word));
        if last.starts_with('_') && is_part && !known.contains(&id) {
            let expected = "what it is in __metadata__ of its file, as torchao writes it";
            found.refuse(tensor.name, expected, "nothing about it");
        }
    }
}

/// The type of the decoded tensor.
fn dtype_of(found: &mut SchemeFindings<'_>, name: &str, row: &Json, of: Type) -> Option<DType> {
    let key = if of == Type::Int4 { "activation_dtype" } else { "dtype" };
    let told = row.get("_data").and_then(|data| data.get(key)).unwrap_or(&Json::Null);
    let dtype = decoded_dtype(text(told, "_data"));
    if dtype.is_none() {
        found.refuse(name, format!("{key} float32, float16 or bfloat16 in __metadata__"), told.to_string());
    }
    dtype
}

/// What kind of tensor the description and the codes are, if they agree.
fn kind_of(
    stored: &Stored<'_>,
    found: &mut SchemeFindings<'_>,
    (name, row): (&str, &Json),
    (of, codes, scale, has_zeros): (Type, TensorId, TensorId, bool),
) -> Option<Kind> {
    let (codes, scale) = (stored.tensor(codes), stored.tensor(scale));
    let told = |key: &str| row.get("_data").and_then(|data| data.get(key)).unwrap_or(&Json::Null);
    let mut extents = codes.shape.to_vec();
    if of == Type::Int4 {
        let [.., _, columns] = extents.as_mut_slice() else {
            found.refuse(codes.name, "two axes or more", format!("{:?}", codes.shape));
            return None;
        };
        *columns = columns.saturating_mul(2);
    }
    let shape = told("shape");
    if !shape.is_null() && *shape != json!(extents) {
        found.refuse(name, format!("shape {extents:?} in __metadata__, as its codes have"), shape.to_string());
        return None;
    }
    let sizes = told("block_size").as_array();
    let sizes: Option<Vec<u64>> = sizes.and_then(|sizes| sizes.iter().map(Json::as_u64).collect());
    let divides = |block: &Vec<u64>| {
        let mut pairs = extents.iter().zip(block);
        block.len() == extents.len() && pairs.all(|(extent, size)| *size > 0 && extent.is_multiple_of(*size))
    };
    // Groups of 4-bit integers are those of one row.
    let is_of_row = |block: &Vec<u64>| block.iter().rev().skip(1).all(|size| *size == 1);
    let Some(block) = sizes.filter(divides).filter(|block| of != Type::Int4 || is_of_row(block)) else {
        let expected = format!("a block_size in __metadata__ that divides {extents:?}");
        found.refuse(name, expected, told("block_size").to_string());
        return None;
    };
    is_scale(found, &scale, name).then_some(Kind { of, extents, block, scale: scale.dtype, has_zeros })
}

fn template(kind: &Kind) -> Result<Template, ViewError> {
    let Kind { of, extents, block, .. } = kind;
    let shape = slot(0, DType::F32, extents)?.shape;
    let signed = |width| Field::Integer(Bits { signed: true, ..Bits::unsigned(width) });
    let mut grid: Vec<u64> = extents.iter().zip(block).map(|(extent, size)| extent / size).collect();
    let mut strides: Vec<u64> = (0..grid.len()).map(|axis| grid[axis + 1..].iter().product()).collect();
    let mut halves = extents.clone();
    if let (Type::Int4, [.., row_stride, group_stride], [.., rows, groups], [.., columns]) =
        (of, strides.as_mut_slice(), grid.as_mut_slice(), halves.as_mut_slice())
    {
        // Its groups are before its rows.
        (*row_stride, *group_stride) = (1, *rows);
        std::mem::swap(rows, groups);
        *columns /= 2;
    }
    let index = |bits: u64| {
        let digit = |axis: usize| Digit::axis(extents, axis, strides[axis] * bits).grouped(block[axis]);
        IndexMap::new(&(0..strides.len()).map(digit).collect::<Vec<_>>())
    };
    let mut value = Value::of(match of {
        Type::Float8 => Operand::elements(slot(0, DType::F8E4M3, extents)?),
        Type::Int8 => packed(slot(0, DType::I8, extents)?, extents, signed(8)),
        Type::Int4 => packed(slot(0, DType::I8, &halves)?, extents, signed(4)),
    });
    if *of == Type::Int8 && kind.has_zeros {
        let zeros = Operand { tensor: slot(2, DType::I8, &grid)?, field: signed(8), index: index(8) };
        value = value.then(Operation::Subtract, zeros);
    }
    value = value.then(Operation::Multiply, floats(slot(1, kind.scale, &grid)?, index(1)));
    if *of == Type::Int4 {
        value = value.then(Operation::Add, floats(slot(2, kind.scale, &grid)?, index(1)));
    }
    Template::try_new(shape, value)
}
