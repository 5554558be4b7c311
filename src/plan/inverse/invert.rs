//! Inverting the view of a leaf: from a leaf over targets to the parts of targets over the stored leaf.
//!
//! The walk starts at the root of the leaf's view with the stored tensor, and undoes one operator at each step. At a target it
//! has a view of the target's elements, or of those of them that the leaf holds: a *part*, at regular places of each axis.

use ckfs_tensor::{Keep, Op, StridedIndices, TensorId, View};

/// Regular places on an axis: `start`, `start + step`, … `count` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Places {
    pub(super) start: u64,
    pub(super) step: u64,
    pub(super) count: u64,
}

impl Places {
    /// All places of an axis.
    pub(super) const fn all(extent: u64) -> Self {
        Self { start: 0, step: 1, count: extent }
    }

    /// These places, where the axis is itself a choice of places: place `n` is `start + step * n`.
    const fn within(self, start: u64, step: u64) -> Self {
        let apart = if self.count > 1 { step * self.step } else { 1 };
        Self { start: start + step * self.start, step: apart, count: self.count }
    }

    /// One past the last place.
    pub(super) const fn end(self) -> u64 {
        if self.count == 0 { self.start } else { self.start + self.step * (self.count - 1) + 1 }
    }

    /// The numbers `first..last` of those places that are in `low..high`.
    fn inside(self, low: u64, high: u64) -> (u64, u64) {
        let number = |bound: u64| bound.saturating_sub(self.start).div_ceil(self.step).min(self.count);
        (number(low), number(high))
    }
}

/// The elements of a target that a leaf holds.
#[derive(Clone, Debug)]
pub(super) struct LeafPart {
    pub(super) target: TensorId,
    /// Where they are, for each axis of the target.
    pub(super) places: Vec<Places>,
    /// Their values.
    pub(super) view: View,
    /// Whether the rule leaves the leaf in f32, whatever the dtype of the target.
    pub(super) is_forced: bool,
}

/// A rule without an inverse.
fn no_inverse(what: &str) -> String {
    format!("the rule {what}, which has no inverse")
}

/// The parts of targets that a stored leaf holds. `leaf` is its view over targets; `stored` has the same shape.
///
/// # Errors
/// The rule has no inverse.
pub(super) fn invert(leaf: &View, stored: View) -> Result<Vec<LeafPart>, String> {
    let mut parts = Vec::new();
    let places = leaf.shape().extents().iter().map(|extent| Places::all(*extent)).collect();
    undo(leaf, places, stored, false, &mut parts)?;
    Ok(parts)
}

/// The extent of the axis of a leaf that its rule pads, and how much of it is the target's.
pub(super) fn padded(leaf: &View) -> Option<(u64, u64)> {
    match (leaf.op(), leaf.op().operands()) {
        (Op::Pad { of, axis, .. }, _) => Some((leaf.shape().extents()[*axis], of.shape().extents()[*axis])),
        (Op::Stack { .. } | Op::Gather { .. }, _) => None,
        (_, [of]) => padded(of),
        _ => None,
    }
}

/// `value` has the elements of `of` at `places`.
fn undo(
    of: &View,
    mut places: Vec<Places>,
    value: View,
    is_forced: bool,
    parts: &mut Vec<LeafPart>,
) -> Result<(), String> {
    match of.op() {
        Op::Source(tensor) => parts.push(LeafPart { target: tensor.id, places, view: value, is_forced }),
        // A constant tells nothing of a target.
        Op::Fill(_) => {}
        Op::Slice { of, axis, start, step, .. } => {
            places[*axis] = places[*axis].within(*start, *step);
            undo(of, places, value, is_forced, parts)?;
        }
        Op::Gather { of, axis, runs } => {
            let mut low = 0;
            for run in runs.iter() {
                undo_run(of, (*axis, low, *run), &places, &value, is_forced, parts)?;
                low += run.count;
            }
        }
        Op::Transpose { of, axes } => {
            let mut back = vec![0; axes.len()];
            for (to, from) in axes.iter().enumerate() {
                back[*from] = to;
            }
            let places = back.iter().map(|axis| places[*axis]).collect();
            undo(of, places, value.transpose(&back)?, is_forced, parts)?;
        }
        Op::Reshape { of: operand } => {
            let all = |(places, extent): (&Places, &u64)| *places == Places::all(*extent);
            if !places.iter().zip(of.shape().extents()).all(all) {
                return Err(no_inverse("reshapes a tensor and takes a part of it"));
            }
            let places = operand.shape().extents().iter().map(|extent| Places::all(*extent)).collect();
            undo(operand, places, value.reshape(operand.shape())?, is_forced, parts)?;
        }
        Op::Stack { of, axis } => {
            let chosen = places.remove(*axis);
            let mut extents = value.shape().extents().to_vec();
            extents.remove(*axis);
            for number in 0..chosen.count {
                let operand =
                    usize::try_from(chosen.start + chosen.step * number).expect("a stack is a list in memory");
                let value = value.slice(*axis, number, number + 1, 1)?.reshape_to(&extents)?;
                undo(&of[operand], places.clone(), value, is_forced, parts)?;
            }
        }
        Op::Concat { of, axis } => {
            let mut low = 0;
            for operand in of {
                let run = whole(operand, *axis);
                undo_run(operand, (*axis, low, run), &places, &value, is_forced, parts)?;
                low += run.count;
            }
        }
        Op::Pad { of, axis, before, .. } => {
            undo_run(of, (*axis, *before, whole(of, *axis)), &places, &value, is_forced, parts)?;
        }
        // The dtype of the result is the user's or the leaf's.
        Op::Cast { of } => undo(of, places, value, is_forced, parts)?,
        // Rules of an inverse have the constants that undo them. One rounding comes at the end.
        Op::Multiply { of: operand, factor, flush } => {
            let is_forced = is_forced || operand.dtype() != of.dtype();
            undo(operand, places, value.multiply(*factor, *flush, Keep::F32)?, is_forced, parts)?;
        }
        Op::Add { of: operand, addend } => {
            let is_forced = is_forced || operand.dtype() != of.dtype();
            undo(operand, places, value.add(*addend, Keep::F32)?, is_forced, parts)?;
        }
        Op::Exp { .. } => return Err(no_inverse("computes exp of a tensor")),
        Op::Sum { .. } => return Err(no_inverse("adds two tensors")),
        Op::Product { .. } => return Err(no_inverse("multiplies two tensors")),
        Op::Quantized(_) | Op::Mosaic(_) | Op::Encoded { .. } => return Err(no_inverse("decodes a stored tensor")),
    }
    Ok(())
}

/// All indexes of an axis.
fn whole(of: &View, axis: usize) -> StridedIndices {
    StridedIndices { first: 0, step: 1, count: of.shape().extents()[axis] }
}

/// Undoes a run of a gather, or a whole operand, whose indexes are at `low`, `low + 1`, … of an axis.
fn undo_run(
    of: &View,
    (axis, low, run): (usize, u64, StridedIndices),
    places: &[Places],
    value: &View,
    is_forced: bool,
    parts: &mut Vec<LeafPart>,
) -> Result<(), String> {
    let chosen = places[axis];
    let (first, last) = chosen.inside(low, low + run.count);
    if first >= last {
        return Ok(());
    }
    let index = |number: u64| {
        let place = chosen.start + chosen.step * number - low;
        StridedIndices { count: place + 1, ..run }.last()
    };
    let mut part = |first: u64, last: u64| {
        let (count, mut value) = (last - first, value.slice(axis, first, last, 1)?);
        if run.step < 0 && count > 1 {
            let top = i64::try_from(count - 1).expect("a run has as many indexes as an axis may have");
            value = value.slice_down(axis, top, -1, 1)?;
        }
        let mut places = places.to_vec();
        let step = if count > 1 { chosen.step * run.step.unsigned_abs() } else { 1 };
        places[axis] = Places { start: index(first).min(index(last - 1)), step, count };
        undo(of, places, value, is_forced, parts)
    };
    if run.step == 0 { (first..last).try_for_each(|number| part(number, number + 1)) } else { part(first, last) }
}
