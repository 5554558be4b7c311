//! What several schemes share: operands of the usual kinds, one template for each kind of tensor, and names of companions.
//!
//! Shapes here are those that *must* be stored, worked out from the codes and the configuration. [`SchemeFindings::tensor`] compares
//! them with what is stored, so that a scheme does not.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use ckfs_tensor::{Bits, DType, Digit, Field, IndexMap, Operand, Shape, SourceTensor, TensorId, ViewError};

use super::{
    findings::SchemeFindings,
    quantized::Template,
    stored::{Stored, last_word},
};
use crate::{problem::Problem, table::TensorInfo};

/// Operand `number` of a template, which must be stored as `dtype` with these extents.
///
/// # Errors
/// [`ViewError`] if there are more than eight axes or too many elements.
pub(super) fn slot(number: u32, dtype: DType, extents: &[u64]) -> Result<SourceTensor, ViewError> {
    let shape = Shape::try_new(extents)?;
    Ok(SourceTensor { id: TensorId(number), dtype, shape })
}

/// Codes of a value of shape `extents`, side by side along its last axis. Each row of codes fills whole elements of the tensor;
/// what is left over at a row's end is not read. Codes are as wide as `field`.
pub(super) fn packed(tensor: SourceTensor, extents: &[u64], field: Field) -> Operand {
    let (rows, columns) = rows_and_columns(extents);
    let row_bits = tensor.shape.elements() * tensor.dtype.bits() / rows.max(1);
    let width = field.bits();
    let flat = [rows, columns];
    let index = IndexMap::new(&[Digit::axis(&flat, 0, row_bits), Digit::axis(&flat, 1, width)]);
    Operand { tensor, field, index }
}

/// Unsigned integers of `width` bits, low bits first.
pub(super) const fn unsigned(width: u32) -> Field {
    Field::Integer(Bits::unsigned(width))
}

/// The shape of the scales of a value: `[.., ceil(rows / block.0), ceil(columns / block.1)]`, one grid for each matrix.
pub(super) fn grid(extents: &[u64], block: (u64, u64)) -> Vec<u64> {
    let mut grid = extents.to_vec();
    if let [.., rows, columns] = grid.as_mut_slice() {
        (*rows, *columns) = (rows.div_ceil(block.0), columns.div_ceil(block.1));
    }
    grid
}

/// Where in such a grid the scale of each element is. The last blocks of either axis may be partial.
pub(super) fn blocks(extents: &[u64], block: (u64, u64)) -> IndexMap {
    let grid = grid(extents, block);
    let digit = |axis: usize| {
        let group = match extents.len() - axis {
            2 => block.0,
            1 => block.1,
            _ => 1,
        };
        Digit::axis(extents, axis, grid[axis + 1..].iter().product()).grouped(group)
    };
    IndexMap::new(&(0..extents.len()).map(digit).collect::<Vec<_>>())
}

/// Floats of the tensor's own type. Bytes are exponents (`F8_E8M0`) by convention.
pub(super) fn floats(tensor: SourceTensor, index: IndexMap) -> Operand {
    let dtype = if tensor.dtype == DType::U8 { DType::F8E8M0 } else { tensor.dtype };
    Operand { tensor, field: Field::Float(dtype), index }
}

/// All axes but the last as one, and the last.
pub(super) fn rows_and_columns(extents: &[u64]) -> (u64, u64) {
    match extents {
        [rows @ .., columns] => (rows.iter().product(), *columns),
        [] => (1, 1),
    }
}

/// 8-bit floats of all four kinds.
pub(super) const FP8: [DType; 4] = [DType::F8E4M3, DType::F8E5M2, DType::F8E4M3Fnuz, DType::F8E5M2Fnuz];

/// Whether these are 8-bit floats.
pub(super) fn is_fp8(dtype: DType) -> bool {
    FP8.contains(&dtype)
}

/// Floats that are wide enough for a scale.
pub(super) fn is_wide_float(dtype: DType) -> bool {
    dtype.is_float() && !is_fp8(dtype)
}

/// Whether a tensor can be the scale of these codes. If not, that is noted.
pub(super) fn is_scale(found: &mut SchemeFindings<'_>, scale: &TensorInfo<'_>, codes: &str) -> bool {
    let is_scale = is_wide_float(scale.dtype);
    if !is_scale {
        found.refuse(scale.name, format_args!("a float as the scale of {codes:?}"), scale.dtype);
    }
    is_scale
}

/// One template for each kind of tensor, where `Key` holds all that distinguishes kinds.
#[derive(Debug)]
pub(super) struct Kinds<Key>(HashMap<Key, Option<Arc<Template>>>);

impl<Key: Eq + Hash> Kinds<Key> {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    /// Adds a decoded tensor of this kind: its name, its operands and its own dtype, as [`SchemeFindings::tensor`] takes them. `make` makes
    /// the template of the first one; why there is none is noted then.
    pub(super) fn add(
        &mut self,
        found: &mut SchemeFindings<'_>,
        kind: Key,
        make: impl FnOnce(&Key) -> Result<Template, ViewError>,
        tensor: (&str, &[TensorId], Option<DType>),
    ) {
        let template = self.0.entry(kind).or_insert_with_key(|kind| found.template(tensor.1[0], make(kind)));
        if let Some(template) = template {
            found.tensor(tensor, Arc::clone(template));
        }
    }
}

/// The module of a stored name, if that ends in `.<word>`.
pub(super) fn module_of<'a>(name: &'a str, word: &str) -> Option<&'a str> {
    name.strip_suffix(word)?.strip_suffix('.')
}

/// The tensor `<module>.<word>`, which decoding needs. If it is missing, that is reported with its name.
pub(super) fn needed(
    stored: &Stored<'_>,
    found: &mut SchemeFindings<'_>,
    names: (&str, &str),
    word: &str,
) -> Option<TensorId> {
    let (module, codes) = names;
    found.needed(&format!("{module}.{codes}"), &format!("{module}.{word}"), stored.companion(module, word))
}

/// The group of each of the `inner` inputs of these codes, of so many each; `None` if they are in order.
///
/// # Errors
/// [`Problem`] if it is no index of groups, or its bytes do not come.
pub(super) fn group_order(
    stored: &Stored<'_>,
    id: TensorId,
    (inner, group): (u64, u64),
    codes: TensorId,
) -> Result<Option<Arc<[u64]>>, Problem> {
    let info = stored.tensor(id);
    let refused = |expected: String, found: String| Problem::of_tensor(info.name, expected, found);
    if info.dtype != DType::I32 || info.shape != [inner] {
        let expected = format!("I32 [{inner}], a group for each input of {}", stored.tensor(codes).name);
        return Err(refused(expected, format!("{} {:?}", info.dtype, info.shape)));
    }
    let groups = inner.div_ceil(group);
    let mut in_order = true;
    let mut order = Vec::new();
    for (at, bytes) in (0u64..).zip(stored.read(id)?.as_chunks::<4>().0) {
        let found = i32::from_le_bytes(*bytes);
        let row = u64::try_from(found).ok().filter(|row| *row < groups);
        let row = row.ok_or_else(|| refused(format!("groups below {groups}"), format!("{found} for input {at}")))?;
        in_order &= row == at / group;
        order.push(row);
    }
    Ok((!in_order).then(|| order.into()))
}

/// Ends of the names of scales of activations and of caches, which no weight needs.
const ACTIVATIONS: [&str; 11] = [
    "input_scale",
    "input_scale_ub",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "activation_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
];

/// Leaves out the scales of activations and caches of a repository in which something is quantized.
pub(super) fn leave_out_activations(stored: &Stored<'_>, found: &mut SchemeFindings<'_>) {
    for (id, tensor) in stored.iter() {
        let word = last_word(tensor.name);
        // A parameter of such a name that is no single number is not a scale of that kind.
        let is_scalar = tensor.shape.iter().product::<u64>() == 1;
        if is_scalar && ACTIVATIONS.contains(&word) && !found.is_taken(id) {
            found.leave_out(id);
        }
    }
}
