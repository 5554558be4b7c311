//! 4-bit floats and 8-bit integers of bitsandbytes.
//!
//! Four bits: `X` holds two codes a byte, the *high* one first, over the flat tensor; an odd one's last nibble is unused. `X.quant_state.bitsandbytes__nf4`
//! (or `fp4`) is text, which tells shape, dtype and block. `W = map[q] * a[i / block]`, where `map` is `X.quant_map`, and `a` is `X.absmax` as F32, or nested:
//! `a = (nested_map[absmax[k]] * nested_absmax[k / nested_block]) + offset`. Decoded dtypes are those of the text. A `quant_map` that is
//! not bitsandbytes' own table is refused, since bitsandbytes computes with its own, whatever is stored.
//!
//! Eight bits: `W = (f32(q) * SCB[row]) * (1/127)`, two roundings, the last by the library's decimal for the factor. `weight_format` 0 is row by row,
//! and others are tiled for accelerators.

use std::{
    cmp::Ordering,
    collections::{HashMap, HashSet},
    sync::Arc,
};

use ckfs_tensor::{BitOrder, Bits, DType, Digit, Field, IndexMap, Operand, Operation, TensorId, Value, ViewError};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde_json::{Value as Json, json};

use super::{
    findings::{SchemeFindings, Told},
    listed::{Exceptions, config_of, decoded_dtype, excepted, refuse_orphans, text},
    parts::{Kinds, floats, module_of, needed, packed, slot},
    quantized::Template,
    stored::Stored,
};
use crate::problem::Problem;

/// How the names of 8-bit integers end.
const CODES: &str = "weight";
/// What stands before the kind of 4-bit floats in the name of the text that describes a tensor.
const STATE: &str = ".quant_state.bitsandbytes__";
/// The f32 of the library's decimal for 1/127, 7.874015718698502e-3.
const OVER_127: f32 = 7.874_016e-3;
/// Codes of the nested statistics.
const NESTED_CODES: usize = 256;

/// Its table `nf4`: quantiles of the normal distribution, the shortest decimals of these f32 numbers.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
/// Its table `fp4`, of which code 8 is +0.0.
const FP4: [f32; 16] = [
    0.0,
    0.005_208_333_5,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    0.0,
    -0.005_208_333_5,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

/// A tensor of 4-bit floats and its companions.
struct Packed<'a> {
    name: &'a str,
    kind: &'a str,
    codes: TensorId,
    state: TensorId,
    absmax: TensorId,
    map: TensorId,
    nested: Option<(TensorId, TensorId)>,
}

/// What distinguishes 4-bit tensors. Nested ones have an offset, and so usually a kind, of their own.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    extents: Vec<u64>,
    storage: DType,
    block: u64,
    is_nf4: bool,
    nested: Option<Nested>,
}

/// How statistics are quantized.
#[derive(PartialEq, Eq, Hash)]
struct Nested {
    block: u64,
    /// F32 bits.
    map: Arc<[u32]>,
    /// F32 bits.
    offset: u32,
}

/// Finds the tensors of the scheme.
pub(super) fn find(stored: &Stored<'_>, found: &mut SchemeFindings<'_>) -> Told {
    let config = config_of(stored, "bitsandbytes")?;
    let four = four_bits(stored, found, config);
    // Small reads from wherever the repository is: many at a time.
    let kinds_of: Vec<_> = (0..four.len()).into_par_iter().map(|at| kind_of(stored, config, &four[at])).collect();
    let mut kinds = Kinds::new();
    for (tensor, kind) in four.iter().zip(kinds_of) {
        let Some((kind, dtype)) = found.taken(kind) else { continue };
        let nested = tensor.nested.map(|(absmax, _)| absmax);
        let operands: Vec<TensorId> = [tensor.codes, tensor.absmax].into_iter().chain(nested).collect();
        kinds.add(found, kind, template_of_4_bits, (tensor.name, &operands, Some(dtype)));
    }
    let eight = eight_bits(stored, found, config);
    let nested = four.iter().filter(|tensor| tensor.nested.is_some()).count();
    let mut texts = Vec::new();
    if !four.is_empty() {
        texts.push(format!("{} weights of 4-bit floats, {nested} with nested statistics", four.len()));
    }
    if eight > 0 {
        texts.push(format!("{eight} weights of 8-bit integers"));
    }
    (!texts.is_empty()).then(|| {
        (
            format!("bitsandbytes: {}", texts.join(", ")),
            vec![("weights", json!(four.len() as u64 + eight)), ("with_nested_statistics", json!(nested))],
        )
    })
}

/// Whether the configuration loads in that many bits, where it tells.
fn loads(config: &Json, bits: u32) -> Option<bool> {
    let told = |key: String| config.get(&key).and_then(Json::as_bool);
    told(format!("load_in_{bits}bit")).or_else(|| told(format!("_load_in_{bits}bit")))
}

/// All tensors of 4-bit floats whose companions are there.
fn four_bits<'a>(stored: &Stored<'a>, found: &mut SchemeFindings<'_>, config: &Json) -> Vec<Packed<'a>> {
    let exceptions = Exceptions::of(config, "llm_int8_skip_modules");
    let mut tensors = Vec::new();
    let mut described = HashSet::new();
    for (state, info) in stored.iter() {
        let Some((name, kind)) = info.name.split_once(STATE) else { continue };
        if !described.insert(name) {
            found.refuse(info.name, format!("one quant_state of {name:?}"), "several");
            continue;
        }
        if loads(config, 4) == Some(false) {
            found.refuse(info.name, "no 4-bit floats, as load_in_4bit false says", "a quant_state");
            continue;
        }
        let Some(codes) = stored.find(name) else {
            found.refuse(info.name, format!("codes {name} beside it"), "no such tensor");
            continue;
        };
        if exceptions.has(name) {
            found.unsupported(&excepted("bitsandbytes"), Some(codes));
            continue;
        }
        found.leave_out(state);
        let mut needed = |word: &str| {
            let companion = format!("{name}.{word}");
            found.needed(name, &companion, stored.find(&companion))
        };
        let is_nested = stored.find(&format!("{name}.nested_absmax")).is_some()
            || stored.find(&format!("{name}.nested_quant_map")).is_some();
        let (absmax, map) = (needed("absmax"), needed("quant_map"));
        let nested =
            if is_nested { needed("nested_absmax").zip(needed("nested_quant_map")).map(Some) } else { Some(None) };
        if let (Some(absmax), Some(map), Some(nested)) = (absmax, map, nested) {
            found.leave_out(map);
            if let Some((_, map)) = nested {
                found.leave_out(map);
            }
            tensors.push(Packed { name, kind, codes, state, absmax, map, nested });
        }
    }
    for (_, info) in stored.iter() {
        let name = module_of(info.name, "absmax").or_else(|| {
            // A column of bytes, as codes are stored, and nothing beside it.
            let is_column = info.dtype == DType::U8 && matches!(info.shape, [_, 1]);
            (is_column && loads(config, 4) == Some(true)).then_some(info.name)
        });
        if let Some(name) = name.filter(|name| !described.contains(name)) {
            found.refuse(info.name, format!("{name}{STATE}nf4 or {name}{STATE}fp4 beside it"), "no such tensor");
        }
    }
    tensors
}

/// Reads what describes a tensor: its kind, and its dtype when decoded.
fn kind_of(stored: &Stored<'_>, config: &Json, tensor: &Packed<'_>) -> Result<(Kind, DType), Problem> {
    let info = stored.tensor(tensor.state);
    let read: Option<Json> = ckfs_format::json::tree(&stored.read(tensor.state)?).ok();
    let state = read.ok_or_else(|| Problem::of_tensor(info.name, "JSON", "other bytes"))?;
    let told = |key: &str| state.get(key).unwrap_or(&Json::Null);
    let wrong = |key: &str, expected: &str| Problem::of_tensor(info.name, format_args!("{key}: {expected}"), told(key));
    let is_nf4 = match tensor.kind {
        "nf4" => true,
        "fp4" => false,
        other => return Err(Problem::of_tensor(info.name, "a quant_state of nf4 or fp4", other)),
    };
    if *told("quant_type") != tensor.kind {
        return Err(wrong("quant_type", tensor.kind));
    }
    if let Some(configured) = text(config, "bnb_4bit_quant_type").filter(|configured| *configured != tensor.kind) {
        let expected = format_args!("{configured}, which is bnb_4bit_quant_type");
        return Err(Problem::of_tensor(info.name, expected, tensor.kind));
    }
    let dtype = decoded_dtype(told("dtype").as_str()).ok_or_else(|| wrong("dtype", "float32, float16 or bfloat16"))?;
    let positive = |key: &str| {
        let size = told(key).as_u64().filter(|size| *size > 0);
        size.ok_or_else(|| wrong(key, "a positive number"))
    };
    let block = positive("blocksize")?;
    let extents: Option<Vec<u64>> =
        told("shape").as_array().and_then(|extents| extents.iter().map(Json::as_u64).collect());
    let extents = extents.ok_or_else(|| wrong("shape", "numbers"))?;
    let expected = if is_nf4 { &NF4 } else { &FP4 };
    let map = table(stored, tensor.map, expected.len())?;
    // As numbers: of two zeros with other signs the library has its own.
    if map.iter().zip(expected).any(|(stored, own)| f32::from_bits(*stored).partial_cmp(own) != Some(Ordering::Equal)) {
        let expected = format_args!("the table of {}", tensor.kind);
        return Err(Problem::of_tensor(stored.tensor(tensor.map).name, expected, "other numbers"));
    }
    let is_nested = state.get("nested_offset").is_some();
    if is_nested != tensor.nested.is_some() {
        let companion = if is_nested { "nested_absmax beside it" } else { "nested_offset, for nested_absmax is there" };
        return Err(Problem::of_tensor(info.name, companion, "none"));
    }
    let nested = match tensor.nested {
        None => None,
        Some((_, map)) => {
            if !matches!(told("nested_dtype").as_str(), Some("float32")) {
                return Err(wrong("nested_dtype", "float32"));
            }
            #[allow(clippy::cast_possible_truncation, reason = "the library too adds it as f32")]
            let offset = told("nested_offset").as_f64().ok_or_else(|| wrong("nested_offset", "a number"))? as f32;
            let map = table(stored, map, NESTED_CODES)?.into();
            Some(Nested { block: positive("nested_blocksize")?, map, offset: offset.to_bits() })
        }
    };
    let storage = stored.tensor(tensor.codes).dtype;
    if !matches!(storage, DType::U8 | DType::BF16 | DType::F16 | DType::F32) {
        return Err(Problem::of_tensor(tensor.name, "bytes of codes, as U8, BF16, F16 or F32", storage));
    }
    Ok((Kind { extents, storage, block, is_nf4, nested }, dtype))
}

/// The F32 bits of a table of this number of codes.
fn table(stored: &Stored<'_>, id: TensorId, codes: usize) -> Result<Vec<u32>, Problem> {
    let info = stored.tensor(id);
    if info.dtype != DType::F32 || info.shape != [codes as u64] {
        let (expected, found) = (format!("F32 [{codes}]"), format!("{} {:?}", info.dtype, info.shape));
        return Err(Problem::of_tensor(info.name, expected, found));
    }
    Ok(stored.read(id)?.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
}

fn template_of_4_bits(kind: &Kind) -> Result<Template, ViewError> {
    let shape = slot(0, DType::F32, &kind.extents)?.shape;
    let count = shape.elements();
    let flat = |stride| Digit::axis(&[count], 0, stride);
    // Whole elements of whatever type the bytes are stored as.
    let stored = count.saturating_mul(4).div_ceil(kind.storage.bits());
    let map = if kind.is_nf4 { &NF4 } else { &FP4 };
    let bits = Bits { width: 4, signed: false, order: BitOrder::HighFirst };
    let codes = Operand {
        tensor: slot(0, kind.storage, &[stored, 1])?,
        field: Field::Table(bits, map.iter().map(|value| value.to_bits()).collect()),
        index: IndexMap::new(&[flat(4)]),
    };
    let blocks = count.div_ceil(kind.block);
    let largest = match &kind.nested {
        None => {
            let absmax = slot(1, DType::F32, &[blocks])?;
            Value::of(floats(absmax, IndexMap::new(&[flat(1).grouped(kind.block)])))
        }
        Some(nested) => {
            let absmax = Operand {
                tensor: slot(1, DType::U8, &[blocks])?,
                field: Field::Table(Bits::unsigned(8), Arc::clone(&nested.map)),
                index: IndexMap::new(&[flat(8).grouped(kind.block)]),
            };
            let group = kind.block.saturating_mul(nested.block);
            let of_blocks = slot(2, DType::F32, &[blocks.div_ceil(nested.block)])?;
            let of_blocks = floats(of_blocks, IndexMap::new(&[flat(1).grouped(group)]));
            let scaled = Value::of(absmax).then(Operation::Multiply, of_blocks);
            scaled.then(Operation::Add, f32::from_bits(nested.offset))
        }
    };
    Template::try_new(shape, Value::of(codes).then(Operation::Multiply, largest))
}

/// Finds all matrices of 8-bit integers, and says how many there are.
fn eight_bits(stored: &Stored<'_>, found: &mut SchemeFindings<'_>, config: &Json) -> u64 {
    let exceptions = Exceptions::of(config, "llm_int8_skip_modules");
    let mut kinds = Kinds::new();
    let mut count = 0;
    refuse_orphans(stored, found, &["SCB", "weight_format"], CODES);
    let formats = stored.iter().filter(|(_, info)| info.name.ends_with(".weight_format") && info.span().len() == 1);
    let formats: Vec<TensorId> = formats.map(|(id, _)| id).collect();
    let mut formats: HashMap<_, _> = formats.into_par_iter().map(|id| (id, stored.read(id))).collect();
    for (id, codes) in stored.iter() {
        let Some(module) = module_of(codes.name, CODES).filter(|_| !found.is_taken(id)) else { continue };
        let statistics = stored.companion(module, "SCB");
        if statistics.is_none() && codes.dtype != DType::I8 {
            continue;
        }
        if loads(config, 8) == Some(false) {
            found.refuse(codes.name, "no 8-bit integers, as load_in_8bit false says", codes.dtype.to_string());
            continue;
        }
        if exceptions.has(module) {
            found.unsupported(&excepted("bitsandbytes"), Some(id));
            continue;
        }
        if let Some(format) = stored.companion(module, "weight_format") {
            let info = stored.tensor(format);
            let Some(bytes) = found.taken(formats.remove(&format).unwrap_or(Ok(Vec::new()))) else { continue };
            // As the library numbers them.
            let tiles = |number: &u8| ["row", "col32", "col_turing", "col_ampere"].get(usize::from(*number));
            match bytes.first().and_then(tiles) {
                Some(&"row") => found.leave_out(format),
                Some(tiles) => {
                    found.unsupported(&format!("bitsandbytes int8 {tiles}"), Some(id));
                    continue;
                }
                None => {
                    let what = format!("{:?} in {} bytes", bytes, info.span().len());
                    found.refuse(info.name, "one byte of 0 to 3", what);
                    continue;
                }
            }
        }
        count += 1;
        let Some(statistics) = needed(stored, found, (module, CODES), "SCB") else { continue };
        let [out, inner] = *codes.shape else {
            found.refuse(codes.name, "shape [out, in]", format!("{:?}", codes.shape));
            continue;
        };
        kinds.add(found, [out, inner], template_of_8_bits, (codes.name, &[id, statistics], None));
    }
    count
}

fn template_of_8_bits(extents: &[u64; 2]) -> Result<Template, ViewError> {
    let codes = slot(0, DType::I8, extents)?;
    let shape = codes.shape.clone();
    let signed = Field::Integer(Bits { signed: true, ..Bits::unsigned(8) });
    let statistics = floats(slot(1, DType::F32, &extents[..1])?, IndexMap::new(&[Digit::axis(extents, 0, 1)]));
    let value = Value::of(packed(codes, extents, signed)).then(Operation::Multiply, statistics);
    Template::try_new(shape, value.then(Operation::Multiply, OVER_127))
}
