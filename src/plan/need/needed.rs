//! The source bytes that the listed devices of a plan read: what a host must have before its trainer can start.

use std::{collections::HashSet, ops::Range};

use ckfs_checkpoint::Checkpoint;
use ckfs_source::{ByteSpan, FileId};
use ckfs_tensor::{ByteRuns, Op, Region, Shape, TensorId, Tiling, View, to_usize};
use smallvec::SmallVec;

use super::super::{Plan, PlannedTensor};

/// Receives the spans of one piece in one file, ascending. `false` ends the walk.
pub(crate) type Emit<'a> = dyn FnMut(FileId, &[ByteSpan]) -> bool + 'a;

impl Plan {
    /// Emits the spans that `devices` read for all bundled tensors, in the order of the tensors: each weight once, as files that
    /// bundle tensors hold it. Bytes that several devices or tensors read may be emitted several times. Gaps of less than
    /// `gap_bytes` are filled, which keeps the number of spans small.
    ///
    /// # Errors
    /// The name of a tensor whose view cannot be lowered, with the reason. A plan that can be mounted has none.
    pub fn for_each_needed(
        &self,
        checkpoint: &Checkpoint,
        devices: &[u64],
        gap_bytes: u64,
        emit: &mut Emit<'_>,
    ) -> Result<(), String> {
        for tensor in self.bundle() {
            for part in self.needed_parts(tensor, devices) {
                if !for_each_of_part(checkpoint, tensor, &part, gap_bytes, emit)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The parts of a tensor that `devices` hold, each element once, in pieces of [`OPERANDS`] operands of a stack.
    pub(crate) fn needed_parts(&self, tensor: &PlannedTensor, devices: &[u64]) -> Vec<Region> {
        let (shape, axis) = (tensor.view.shape(), stacked_axis(&tensor.view));
        let boxes = joined(shape, devices.iter().map(|device| self.region(tensor, *device)));
        boxes.iter().flat_map(|ranges| cut(ranges, axis)).filter_map(|ranges| Region::within(shape, &ranges)).collect()
    }
}

/// Operands of the outermost stack that are lowered together: few enough to share the work among threads.
const OPERANDS: u64 = 8;

/// The axis along which the operands of a stack lie, if the view is one, cast or transposed perhaps.
fn stacked_axis(view: &View) -> Option<usize> {
    if let Op::Stack { axis, .. } = view.op() {
        return Some(*axis);
    }
    if let Op::Transpose { of, axes } = view.op() {
        let inner = stacked_axis(of)?;
        return axes.iter().position(|axis| *axis == inner);
    }
    if let Op::Cast { of } = view.op() { stacked_axis(of) } else { None }
}

/// A box in pieces along an axis.
fn cut(ranges: &Ranges, axis: Option<usize>) -> Vec<Ranges> {
    let Some(axis) = axis else { return vec![ranges.clone()] };
    let all = ranges[axis].clone();
    let piece = |start: u64| {
        let mut piece = ranges.clone();
        piece[axis] = start..(start + OPERANDS).min(all.end);
        piece
    };
    all.clone().step_by(to_usize(OPERANDS)).map(piece).collect()
}

/// The ranges of a region, one per axis.
type Ranges = SmallVec<[Range<u64>; 4]>;

/// Regions with the same elements as these, fewer where several make up a box: the devices of a host mostly hold neighbouring
/// parts, and a view of very many experts is then lowered once and not for each device. Empty ones are left out.
fn joined(shape: &Shape, regions: impl Iterator<Item = Region>) -> Vec<Ranges> {
    let held = regions.filter(|region| !region.shape().is_empty());
    let distinct: HashSet<Ranges> = held.map(|region| region.ranges().collect()).collect();
    let mut boxes: Vec<Ranges> = distinct.into_iter().collect();
    loop {
        let before = boxes.len();
        (0..shape.rank()).for_each(|axis| join_along(&mut boxes, axis));
        if boxes.len() == before {
            break;
        }
    }
    boxes
}

/// Joins boxes that touch or overlap along an axis and are alike along the others.
fn join_along(boxes: &mut Vec<Ranges>, axis: usize) {
    let others = |ranges: &Ranges| -> SmallVec<[(u64, u64); 4]> {
        let other = ranges.iter().enumerate().filter(|(at, _)| *at != axis);
        other.map(|(_, range)| (range.start, range.end)).collect()
    };
    boxes.sort_by_cached_key(|ranges| (others(ranges), ranges[axis].start));
    boxes.dedup_by(|next, last| {
        let joins = next[axis].start <= last[axis].end && others(next) == others(last);
        if joins {
            last[axis].end = last[axis].end.max(next[axis].end);
        }
        joins
    });
}

/// As [`Plan::for_each_needed`], for a part of a tensor. Returns false if `emit` ended it.
pub(crate) fn for_each_of_part(
    checkpoint: &Checkpoint,
    tensor: &PlannedTensor,
    part: &Region,
    gap_bytes: u64,
    emit: &mut Emit<'_>,
) -> Result<bool, String> {
    let failed = |reason: String| format!("{}: {reason}", tensor.name);
    let view = tensor.view.region(part).map_err(|error| failed(error.to_string()))?;
    let tiling = view.lower().map_err(|error| failed(error.to_string()))?;
    for (id, runs) in runs_of(&tiling) {
        let info = checkpoint.tensor(id);
        let (file, first) = (info.file(), info.span().start());
        let mut spans: Vec<ByteSpan> = Vec::new();
        runs.for_each_span(gap_bytes, &mut |start, len| spans.extend(ByteSpan::of_len(first + start, len)));
        if !spans.is_empty() && !emit(file, &spans) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The runs of all pieces, of quantized tensors those of every operand.
pub(crate) fn runs_of(tiling: &Tiling) -> impl Iterator<Item = (TensorId, ByteRuns)> {
    tiling.pieces().iter().flat_map(|piece| ByteRuns::of_some(tiling, piece, &|_| true))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The elements of regions of a shape with two axes.
    fn elements(boxes: &[Ranges]) -> BTreeSet<(u64, u64)> {
        let of_box = |ranges: &Ranges| {
            let columns = ranges[1].clone();
            ranges[0].clone().flat_map(move |row| columns.clone().map(move |column| (row, column))).collect::<Vec<_>>()
        };
        boxes.iter().flat_map(of_box).collect()
    }

    #[test]
    fn joined_regions_have_the_same_elements_and_boxes_are_one() {
        let shape = Shape::try_new(&[8, 6]).unwrap();
        let region = |rows: Range<u64>, columns: Range<u64>| Region::within(&shape, &[rows, columns]).unwrap();
        for (given, expected) in [
            (vec![], 0),
            (vec![region(2..2, 0..6)], 0),
            (vec![region(0..4, 0..3), region(0..4, 0..3)], 1),
            (vec![region(4..8, 3..6), region(0..4, 0..3), region(0..4, 3..6), region(4..8, 0..3)], 1),
            (vec![region(0..2, 0..6), region(6..8, 0..6), region(2..4, 0..6)], 2),
            (vec![region(0..4, 0..3), region(4..8, 3..6)], 2),
            (vec![region(0..4, 0..6), region(4..8, 0..3), region(4..6, 3..6)], 3),
        ] {
            let joined = joined(&shape, given.iter().cloned());
            let given: Vec<Ranges> = given.iter().map(|region| region.ranges().collect()).collect();
            assert_eq!(elements(&joined), elements(&given));
            assert_eq!(joined.len(), expected, "{given:?}");
        }
    }
    #[test]
    fn pieces_of_a_box_have_its_elements_once() {
        for (ranges, axis, expected) in [
            ([3..20, 0..2], Some(0), 3),
            ([0..8, 0..2], Some(0), 1),
            ([0..2, 1..10], Some(1), 2),
            ([0..20, 0..2], None, 1),
        ] {
            let given: Ranges = ranges.into_iter().collect();
            let pieces = cut(&given, axis);
            assert_eq!(pieces.len(), expected, "{given:?}");
            let extents = |ranges: &Ranges| ranges.iter().map(|range| range.end - range.start).product::<u64>();
            assert_eq!(pieces.iter().map(extents).sum::<u64>(), extents(&given));
            assert_eq!(elements(&pieces), elements(&[given]));
        }
    }
}
