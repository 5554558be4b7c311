//! The source bytes that the listed devices of a plan read: what a host must have before its trainer can start.

use std::{collections::BTreeSet, ops::Range};

use smallvec::SmallVec;

use super::super::{Plan, PlannedTensor};
use crate::{
    checkpoint::Checkpoint,
    source::{ByteSpan, FileId},
    tensor::{Origin, Region, Runs, Shape, TensorId, Tiling, needs},
};

/// Receives the spans of one piece in one file, ascending. `false` ends the walk.
pub(in crate::plan) type Emit<'a> = dyn FnMut(FileId, &[ByteSpan]) -> bool + 'a;

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
            if !self.for_each_needed_of(checkpoint, tensor, devices, gap_bytes, emit)? {
                break;
            }
        }
        Ok(())
    }

    /// As [`Self::for_each_needed`], for one tensor. Returns false if `emit` ended it.
    pub(in crate::plan) fn for_each_needed_of(
        &self,
        checkpoint: &Checkpoint,
        tensor: &PlannedTensor,
        devices: &[u64],
        gap_bytes: u64,
        emit: &mut Emit<'_>,
    ) -> Result<bool, String> {
        let regions = devices.iter().map(|device| self.region(tensor, *device));
        for region in joined(tensor.view.shape(), regions) {
            if !for_each_of_region(checkpoint, tensor, &region, gap_bytes, emit)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The ranges of a region, one per axis.
type Ranges = SmallVec<[Range<u64>; 4]>;

/// Regions with the same elements as these, fewer where several make up a box: the devices of a host mostly hold neighbouring
/// parts, and a view of very many experts is then lowered once and not for each device. Empty ones are left out.
fn joined(shape: &Shape, regions: impl Iterator<Item = Region>) -> Vec<Region> {
    let held = regions.filter(|region| !region.shape().is_empty());
    let distinct: BTreeSet<SmallVec<[(u64, u64); 4]>> =
        held.map(|region| region.ranges().map(|range| (range.start, range.end)).collect()).collect();
    let mut boxes: Vec<Ranges> =
        distinct.into_iter().map(|ranges| ranges.into_iter().map(|(start, end)| start..end).collect()).collect();
    loop {
        let before = boxes.len();
        (0..shape.rank()).for_each(|axis| join_along(&mut boxes, axis));
        if boxes.len() == before {
            break;
        }
    }
    boxes.iter().filter_map(|ranges| Region::within(shape, ranges)).collect()
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

fn for_each_of_region(
    checkpoint: &Checkpoint,
    tensor: &PlannedTensor,
    region: &Region,
    gap_bytes: u64,
    emit: &mut Emit<'_>,
) -> Result<bool, String> {
    let failed = |reason: String| format!("{}: {reason}", tensor.name);
    let view = tensor.view.region(region).map_err(|error| failed(error.to_string()))?;
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
pub(in crate::plan) fn runs_of(tiling: &Tiling) -> impl Iterator<Item = (TensorId, Runs)> {
    tiling.pieces().iter().flat_map(move |piece| {
        let Origin::Tensor { offset, decoder, .. } = piece.origin else { return Vec::new() };
        match tiling.decoders()[decoder as usize].value() {
            Some(value) => {
                let of_operand = |need: crate::tensor::Need<'_>| {
                    let id = need.operand.tensor.id;
                    need.runs.into_iter().map(move |runs| (id, runs))
                };
                needs(value, offset, &piece.loops).into_iter().flat_map(of_operand).collect()
            }
            None => Runs::of(tiling, piece).into_vec(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The elements of regions of a shape with two axes.
    fn elements(regions: &[Region]) -> BTreeSet<(u64, u64)> {
        let of_region = |region: &Region| {
            let ranges: Ranges = region.ranges().collect();
            let columns = ranges[1].clone();
            ranges[0].clone().flat_map(move |row| columns.clone().map(move |column| (row, column))).collect::<Vec<_>>()
        };
        regions.iter().flat_map(of_region).collect()
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
            assert_eq!(elements(&joined), elements(&given));
            assert_eq!(joined.len(), expected, "{given:?}");
        }
    }
}
