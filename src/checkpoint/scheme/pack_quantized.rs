//! Integers packed into words of 32 bits, as compressed-tensors publishes them (Kimi K2 Thinking and later).
//!
//! `X.weight_packed` I32 `[out, ceil(in * b / 32)]` holds element `i` of a row at its bits `[i * b, (i + 1) * b)`, counted from the low bit of
//! the first word. `W = (q - 2^(b-1)) * s`, or with zero points `W = ((q - 2^(b-1)) - (z - 2^(b-1))) * s`. `X.weight_scale` has one scale
//! for a group of a row, for a row, or for all. `X.weight_zero_point` I32 `[ceil(out * b / 32), groups]` is packed along the *output* axis.
//!
//! Rows of groups are as wide as their scales say: groups divide rows. `X.weight_shape` must say the same; it is read for one matrix of
//! each kind, since a model has up to hundreds of thousands of them. Where a row or the matrix has one scale, the width is
//! read from each `X.weight_shape`. Where the configuration says so, `X.weight_g_idx` has the group of each column, as that of GPTQ. Fields of 3, 5, 6 and 7 bits are packed in two ways that nothing tells apart, so they stay raw.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use ckfs_tensor::{DType, Digit, IndexMap, Operand, Operation, TensorId, Value, ViewError};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde_json::json;

use super::{
    findings::{SchemeFindings, Told},
    parts::{Kinds, blocks, floats, grid, group_order, is_scale, module_of, packed, slot, unsigned},
    quantization_config::{Library, ModuleQuantization, QuantizationConfig, Sharing},
    quantized::Template,
    stored::Stored,
};
use crate::{problem::Problem, table::TensorInfo};

/// How the codes' names end.
const CODES: &str = "weight_packed";

/// A matrix and its companions.
struct Matrix<'a> {
    module: &'a str,
    codes: TensorId,
    scale: TensorId,
    zero: Option<TensorId>,
    /// `weight_shape`.
    shape: TensorId,
    /// `weight_g_idx`.
    order: Option<TensorId>,
    bits: u64,
    sharing: Sharing,
}

/// All that distinguishes kinds of matrices.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    out: u64,
    inner: u64,
    bits: u64,
    sharing: Sharing,
    scale: DType,
    /// A scale that all elements share may be `[1]` or `[]`.
    scale_is_bare: bool,
    has_zeros: bool,
    /// Groups of columns, where they are not in order.
    order: Option<Arc<[u64]>>,
}

/// Finds the tensors of the scheme.
pub(super) fn find(stored: &Stored<'_>, found: &mut SchemeFindings<'_>) -> Told {
    let settings = QuantizationConfig::read(stored);
    if settings.library() != Some(Library::CompressedTensors) {
        return None;
    }
    let matrices = matrices(stored, &settings, found);
    // Small reads from wherever the repository is: many at a time.
    let read = |matrix: &Matrix<'_>| {
        let (out, inner) = width_and_height(stored, matrix)?;
        let group = if let Sharing::Group(size) = matrix.sharing { size } else { inner };
        let order = matrix.order.map(|id| group_order(stored, id, (inner, group.max(1)), matrix.codes));
        Ok((out, inner, order.transpose()?.flatten()))
    };
    let shapes: Vec<_> = (0..matrices.len()).into_par_iter().map(|at| read(&matrices[at])).collect();
    let (mut kinds, mut checked) = (Kinds::new(), HashSet::new());
    for (matrix, shape) in matrices.iter().zip(shapes) {
        let Some((out, inner, order)) = found.taken(shape) else { continue };
        if checked.insert((out, inner, matrix.bits, matrix.sharing)) {
            found.taken(compare_with_shape(stored, matrix, (out, inner)));
        }
        let (codes, scale) = (stored.tensor(matrix.codes), stored.tensor(matrix.scale));
        if !is_scale(found, &scale, codes.name) {
            continue;
        }
        let (bits, sharing, has_zeros) = (matrix.bits, matrix.sharing, matrix.zero.is_some());
        let (scale, scale_is_bare) = (scale.dtype, scale.shape.is_empty());
        let kind = Kind { out, inner, bits, sharing, scale, scale_is_bare, has_zeros, order };
        let operands: Vec<TensorId> = [matrix.codes, matrix.scale].into_iter().chain(matrix.zero).collect();
        kinds.add(found, kind, template, (&format!("{}.weight", matrix.module), &operands, None));
    }
    let first = matrices.first()?;
    let count = matrices.len();
    let ways: BTreeSet<_> = matrices.iter().map(|matrix| (matrix.bits, matrix.sharing)).collect();
    let ways: Vec<String> = ways.iter().map(|(bits, sharing)| format!("{bits}-bit integers, {sharing}")).collect();
    let dtype = stored.tensor(first.scale).dtype;
    Some((
        format!("packed {}: {count} weights with {dtype} scales", ways.join("; ")),
        vec![
            ("weights", json!(count)),
            ("with_zero_points", json!(matrices.iter().filter(|matrix| matrix.zero.is_some()).count())),
            ("scale_dtype", json!(dtype.code())),
        ],
    ))
}

/// All matrices that the configuration and names say are packed so, and whose companions are there.
fn matrices<'a>(
    stored: &Stored<'a>,
    settings: &QuantizationConfig<'_>,
    found: &mut SchemeFindings<'_>,
) -> Vec<Matrix<'a>> {
    const BESIDE: [&str; 4] = ["weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"];
    let candidate = |(codes, info): (TensorId, TensorInfo<'a>)| {
        let module = module_of(info.name, CODES)?;
        let ModuleQuantization::Packed { bits, symmetric, sharing, has_order } = settings.of(module) else {
            return None;
        };
        let beside = BESIDE.map(|word| stored.companion(module, word));
        Some((module, codes, (bits, sharing), (symmetric, has_order), beside))
    };
    // Several threads look up the names.
    let candidates: Vec<_> = stored.par_iter().filter_map(candidate).collect();
    let mut matrices = Vec::new();
    for (module, codes, (bits, sharing), (symmetric, has_order), beside) in candidates {
        if found.is_taken(codes) {
            continue;
        }
        let [scale, zero, shape, order] = beside;
        if symmetric && zero.is_some() {
            found.unsupported("compressed-tensors pack-quantized, symmetric and with zero points", Some(codes));
            continue;
        }
        if order.is_some() && !has_order {
            found.unsupported("compressed-tensors pack-quantized with weight_g_idx, and without actorder", Some(codes));
            continue;
        }
        let name = format!("{module}.{CODES}");
        let mut needed = |at: usize, id| found.needed(&name, &format!("{module}.{}", BESIDE[at]), id);
        let scale = needed(0, scale);
        let zero = if symmetric { Some(None) } else { needed(1, zero).map(Some) };
        let shape = needed(2, shape);
        let order = if has_order { needed(3, order).map(Some) } else { Some(None) };
        for id in [shape, order.flatten()].into_iter().flatten() {
            found.leave_out(id);
        }
        if let (Some(scale), Some(zero), Some(shape), Some(order)) = (scale, zero, shape, order) {
            matrices.push(Matrix { module, codes, scale, zero, shape, order, bits, sharing });
        }
    }
    matrices
}

/// Rows and columns of a decoded matrix: what its words and its companions agree on.
fn width_and_height(stored: &Stored<'_>, matrix: &Matrix<'_>) -> Result<(u64, u64), Problem> {
    let (codes, scale) = (stored.tensor(matrix.codes), stored.tensor(matrix.scale));
    let [out, words] = *codes.shape else {
        return Err(Problem::of_tensor(codes.name, "shape [out, words]".to_owned(), format!("{:?}", codes.shape)));
    };
    let shape = stored.tensor(matrix.shape);
    if !matches!((shape.dtype, shape.shape), (DType::I64 | DType::I32, [2])) {
        let found = format!("{} {:?}", shape.dtype, shape.shape);
        return Err(Problem::of_tensor(shape.name, "I64 or I32 [2]".to_owned(), found));
    }
    let inner = if let Sharing::Group(size) = matrix.sharing {
        let groups = scale.shape.last().copied().unwrap_or(0);
        groups.saturating_mul(size)
    } else {
        let numbers = shape_numbers(stored, matrix)?;
        let inner = u64::try_from(numbers[1]);
        match (u64::try_from(numbers[0]), inner) {
            (Ok(rows), Ok(inner)) if rows == out => inner,
            _ => return Err(Problem::of_tensor(shape.name, format!("[{out}, in]"), format!("{numbers:?}"))),
        }
    };
    let needed = inner.checked_mul(matrix.bits).map(|bits| bits.div_ceil(32));
    if needed != Some(words) {
        let expected = needed.map_or_else(|| "fewer columns".to_owned(), |words| format!("I32 [{out}, {words}]"));
        let (bits, found) = (matrix.bits, format!("{} {:?}", codes.dtype, codes.shape));
        return Err(Problem::of_tensor(codes.name, format!("{expected} for {inner} columns of {bits} bits"), found));
    }
    Ok((out, inner))
}

/// The two numbers of `weight_shape`.
fn shape_numbers(stored: &Stored<'_>, matrix: &Matrix<'_>) -> Result<[i64; 2], Problem> {
    let bytes = stored.read(matrix.shape)?;
    let (rows, columns) = bytes.split_at(bytes.len() / 2);
    Ok([little_endian(rows), little_endian(columns)])
}

/// Compares `weight_shape` with what the words and the scales say.
fn compare_with_shape(stored: &Stored<'_>, matrix: &Matrix<'_>, (out, inner): (u64, u64)) -> Result<(), Problem> {
    let numbers = shape_numbers(stored, matrix)?;
    if numbers.map(u64::try_from) == [Ok(out), Ok(inner)] {
        return Ok(());
    }
    let (shape, codes) = (stored.tensor(matrix.shape).name, stored.tensor(matrix.codes).name);
    let (bits, sharing) = (matrix.bits, matrix.sharing);
    let expected = format!("[{out}, {inner}], the shape of {codes:?} in {bits}-bit integers, {sharing}");
    Err(Problem::of_tensor(shape, expected, format_args!("{numbers:?}")))
}

/// The signed number of four or eight bytes.
fn little_endian(bytes: &[u8]) -> i64 {
    let unsigned = bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    // Sizes are positive, and a negative number of four bytes becomes one that no tensor has.
    unsigned.cast_signed()
}

fn template(kind: &Kind) -> Result<Template, ViewError> {
    let extents = [kind.out, kind.inner];
    let half = match kind.bits {
        1 => 1.0,
        2 => 2.0,
        4 => 8.0,
        _ => 128.0,
    };
    let width = u32::try_from(kind.bits).expect("at most 8, as checked");
    let block = kind.sharing.block((kind.out, kind.inner));
    let grid = grid(&extents, block);
    let codes = slot(0, DType::I32, &[kind.out, (kind.inner * kind.bits).div_ceil(32)])?;
    let scale = match (kind.sharing, kind.scale_is_bare) {
        (Sharing::Tensor, true) => slot(1, kind.scale, &[])?,
        (Sharing::Tensor, false) => slot(1, kind.scale, &[1])?,
        (Sharing::Channel | Sharing::Group(_) | Sharing::Block(..), _) => slot(1, kind.scale, &grid)?,
    };
    let of_group = |stride| match &kind.order {
        Some(order) => Digit::axis(&extents, 1, stride).through(Arc::clone(order)),
        None => Digit::axis(&extents, 1, stride).grouped(block.1),
    };
    let mut value = Value::of(packed(codes, &extents, unsigned(width))).then(Operation::Subtract, half);
    if kind.has_zeros {
        // Zero points of a column of groups lie in words of 32 bits, each for 32 / b neighbouring rows.
        let groups = grid[1];
        let fields = 32 / kind.bits;
        let tensor = slot(2, DType::I32, &[kind.out.div_ceil(fields), groups])?;
        let index = IndexMap::new(&[
            Digit::axis(&extents, 0, groups * 32).grouped(fields),
            of_group(32),
            Digit::axis(&extents, 0, kind.bits).turning(fields),
        ]);
        let zero = Operand { tensor, field: unsigned(width), index };
        value = value.then(Operation::Subtract, Value::of(zero).then(Operation::Subtract, half));
    }
    let index = match kind.sharing {
        Sharing::Tensor => IndexMap::new(&[]),
        Sharing::Group(_) => IndexMap::new(&[Digit::axis(&extents, 0, grid[1]), of_group(1)]),
        Sharing::Channel | Sharing::Block(..) => blocks(&extents, block),
    };
    let shape = slot(0, DType::F32, &extents)?.shape;
    Template::try_new(shape, value.then(Operation::Multiply, floats(scale, index)))
}
