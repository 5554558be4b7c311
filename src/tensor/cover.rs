//! Whether boxes cover a shape: the boxes outside it, those that overlap, and what is in no box.
//!
//! The shape is cut in two at a border of some box, each half is examined with the boxes that reach into it, and so on until
//! a part is one box, or in none. Boxes in a grid, which is what programs write, are never cut, so that `n` of them take
//! `n log n` steps. Boxes that interlock are cut; a stated number of cuts bounds the time of any input.

use std::fmt;

use super::{Shape, shape::PerAxis};

/// Most faults of a kind that are listed.
const LISTED_MAX: usize = 8;

/// Visits of a box, on average, before a cover counts as too intricate. Grids of 2^32 boxes need 33.
const VISITS_PER_BOX: usize = 48;

/// First element and extents of a box.
type Box<'a> = (&'a [u64], &'a [u64]);

/// A fault of the boxes of a tensor. Boxes are named by their positions in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoverFault {
    /// A box that is not inside the shape.
    Outside(usize),
    /// Two boxes with common elements.
    Overlap(usize, usize),
    /// A region, given by its first element and its extents, that is in no box.
    Missing(PerAxis, PerAxis),
    /// Too many interlocking boxes to examine.
    Intricate,
}

impl fmt::Display for CoverFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside(index) => write!(f, "box {index} is outside the tensor"),
            Self::Overlap(first, second) => write!(f, "boxes {first} and {second} overlap"),
            Self::Missing(origin, extents) => write!(f, "elements {} are in no box", region_text(origin, extents)),
            Self::Intricate => f.write_str("the boxes interlock in too many places"),
        }
    }
}

/// A region as ranges: `[0..4, 2..6]`.
pub fn region_text(origin: &[u64], extents: &[u64]) -> String {
    let range = |(start, extent): (&u64, &u64)| *start..start.saturating_add(*extent);
    format!("{:?}", origin.iter().zip(extents).map(range).collect::<Vec<_>>())
}

/// All faults of boxes, as far as [`LISTED_MAX`] of a kind. What is in no box is one only if `complete`.
pub(super) fn faults(shape: &Shape, boxes: &[Box<'_>], complete: bool) -> Vec<CoverFault> {
    let rank = shape.rank();
    let mut found = Vec::new();
    for (index, (origin, extents)) in boxes.iter().enumerate() {
        let ranks = (origin.len(), extents.len());
        assert!(
            ranks == (rank, rank) && !extents.contains(&0),
            "box {index} of a tensor of shape {shape}: {extents:?}"
        );
        let ends = origin.iter().zip(*extents).map(|(start, extent)| start.checked_add(*extent));
        if ends.zip(shape.extents()).any(|(end, extent)| end.is_none_or(|end| end > *extent)) {
            found.push(CoverFault::Outside(index));
        }
    }
    if !found.is_empty() {
        found.truncate(LISTED_MAX);
        return found;
    }
    if is_partition_of_an_axis(shape, boxes) {
        return found;
    }
    let (mut overlaps, mut gaps) = (Vec::new(), Vec::new());
    let done = divide(shape, boxes, &mut |fault| {
        let kind = if let CoverFault::Missing(..) = fault { &mut gaps } else { &mut overlaps };
        if kind.len() < LISTED_MAX && !kind.contains(&fault) {
            kind.push(fault);
        }
    });
    if !done && overlaps.is_empty() {
        found.push(CoverFault::Intricate);
    }
    found.append(&mut overlaps);
    if complete {
        found.append(&mut gaps);
    }
    found
}

/// The regions that are in none of these boxes, which have no faults.
pub(super) fn gaps(shape: &Shape, boxes: &[Box<'_>]) -> Vec<(PerAxis, PerAxis)> {
    let mut gaps = Vec::new();
    if !is_partition_of_an_axis(shape, boxes) {
        divide(shape, boxes, &mut |fault| {
            if let CoverFault::Missing(origin, extents) = fault {
                gaps.push((origin, extents));
            }
        });
    }
    gaps
}

/// Whether the boxes, in their order, are slices of the shape along one axis, each beginning where the one before ends: the
/// most common cover.
fn is_partition_of_an_axis(shape: &Shape, boxes: &[Box<'_>]) -> bool {
    let Some((_, first)) = boxes.first() else { return shape.is_empty() };
    let axis = first.iter().zip(shape.extents()).position(|(extent, whole)| extent != whole).unwrap_or(0);
    let mut end = 0;
    for (origin, extents) in boxes {
        let others = (0..shape.rank()).filter(|other| *other != axis);
        for other in others {
            if extents[other] != shape.extents()[other] {
                return false;
            }
        }
        // Without axes there is one element.
        let (start, extent) = (origin.get(axis).unwrap_or(&end), extents.get(axis).unwrap_or(&1));
        if *start != end {
            return false;
        }
        end += extent;
    }
    end == shape.extents().get(axis).copied().unwrap_or(1)
}

/// A region that is to be examined, and the boxes that reach into it.
struct Region {
    start: PerAxis,
    end: PerAxis,
    boxes: Vec<usize>,
}

/// Divides the shape until each part is one box, or is emitted as in none or in several. Returns whether the boxes were simple enough
/// to finish.
fn divide(shape: &Shape, boxes: &[Box<'_>], emit: &mut dyn FnMut(CoverFault)) -> bool {
    if shape.is_empty() {
        return true;
    }
    let mut visits_left = VISITS_PER_BOX.saturating_mul(boxes.len() + 64);
    let start = PerAxis::from_elem(0, shape.rank());
    let all = Region { start, end: PerAxis::from_slice(shape.extents()), boxes: (0..boxes.len()).collect() };
    let mut left = vec![all];
    while let Some(region) = left.pop() {
        let Region { start, end, boxes: inside } = &region;
        match visits_left.checked_sub(inside.len() + 1) {
            Some(after) => visits_left = after,
            None => return false,
        }
        let Some((axis, at)) = cut(&region, boxes) else {
            // No border is inside the region: each of its boxes holds all of it.
            match inside[..] {
                [] => {
                    let extents = start.iter().zip(end).map(|(start, end)| end - start).collect();
                    emit(CoverFault::Missing(start.clone(), extents));
                }
                [_] => {}
                [first, second, ..] => emit(CoverFault::Overlap(first, second)),
            }
            continue;
        };
        let range = |index: &usize| {
            let (origin, extents) = boxes[*index];
            origin[axis]..origin[axis] + extents[axis]
        };
        let mut low = Region { start: start.clone(), end: end.clone(), boxes: Vec::new() };
        let mut high = Region { start: start.clone(), end: end.clone(), boxes: Vec::new() };
        (low.end[axis], high.start[axis]) = (at, at);
        low.boxes = inside.iter().copied().filter(|index| range(index).start < at).collect();
        high.boxes = inside.iter().copied().filter(|index| range(index).end > at).collect();
        left.extend([high, low]);
    }
    true
}

/// Where to cut a region: the middle border of the axis on which that goes through the fewest boxes. `None` if no border is
/// inside.
fn cut(region: &Region, boxes: &[Box<'_>]) -> Option<(usize, u64)> {
    let mut best: Option<(usize, usize, u64)> = None;
    let mut borders = Vec::new();
    for axis in 0..region.start.len() {
        let inside = region.start[axis] + 1..region.end[axis];
        let range = |index: &usize| {
            let (origin, extents) = boxes[*index];
            (origin[axis], origin[axis] + extents[axis])
        };
        borders.clear();
        borders.extend(region.boxes.iter().map(range).flat_map(|(start, end)| [start, end]));
        borders.retain(|border| inside.contains(border));
        if borders.is_empty() {
            continue;
        }
        let middle = borders.len() / 2;
        let (_, at, _) = borders.select_nth_unstable(middle);
        let crossed = |index: &&usize| {
            let (start, end) = range(index);
            start < *at && *at < end
        };
        let crossings = region.boxes.iter().filter(crossed).count();
        if best.is_none_or(|(least, ..)| crossings < least) {
            best = Some((crossings, axis, *at));
        }
        if crossings == 0 {
            break;
        }
    }
    best.map(|(_, axis, at)| (axis, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults_of(extents: &[u64], boxes: &[(&[u64], &[u64])], complete: bool) -> Vec<String> {
        let shape = Shape::try_new(extents).unwrap();
        faults(&shape, boxes, complete).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn covers_are_accepted_in_any_order() {
        let none: &[String] = &[];
        assert_eq!(faults_of(&[], &[(&[], &[])], true), none);
        assert_eq!(faults_of(&[4], &[(&[2], &[2]), (&[0], &[2])], true), none);
        assert_eq!(faults_of(&[4, 6], &[(&[0, 0], &[3, 6]), (&[3, 0], &[1, 6])], true), none);
        assert_eq!(faults_of(&[4, 6], &[(&[0, 0], &[4, 6])], true), none);
        assert_eq!(faults_of(&[0, 6], &[], true), none);
        let pinwheel: [(&[u64], &[u64]); 5] =
            [(&[0, 0], &[1, 2]), (&[0, 2], &[2, 1]), (&[2, 1], &[1, 2]), (&[1, 0], &[2, 1]), (&[1, 1], &[1, 1])];
        assert_eq!(faults_of(&[3, 3], &pinwheel, true), none);
    }

    #[test]
    fn each_fault_is_named() {
        assert_eq!(faults_of(&[4], &[(&[2], &[3])], true), ["box 0 is outside the tensor"]);
        assert_eq!(faults_of(&[4], &[(&[u64::MAX], &[3])], true), ["box 0 is outside the tensor"]);
        assert_eq!(
            faults_of(&[4], &[(&[0], &[2]), (&[1], &[2])], true),
            ["boxes 0 and 1 overlap", "elements [3..4] are in no box"]
        );
        assert_eq!(faults_of(&[4], &[(&[0], &[2])], false), Vec::<String>::new());
        assert_eq!(faults_of(&[2, 2], &[], true), ["elements [0..2, 0..2] are in no box"]);
        let whole: (&[u64], &[u64]) = (&[0, 0], &[2, 2]);
        assert_eq!(faults_of(&[2, 2], &[whole; 3], true), ["boxes 0 and 1 overlap"]);
        assert_eq!(faults_of(&[], &[(&[], &[]), (&[], &[])], true), ["boxes 0 and 1 overlap"]);
    }

    #[test]
    fn a_large_grid_takes_few_steps() {
        let boxes: Vec<([u64; 2], [u64; 2])> =
            (0..256).flat_map(|row| (0..256).map(move |column| ([row * 3, column * 2], [3, 2]))).collect();
        let mut listed: Vec<Box<'_>> = boxes.iter().map(|(origin, extents)| (&origin[..], &extents[..])).collect();
        let shape = Shape::try_new(&[768, 512]).unwrap();
        assert_eq!(faults(&shape, &listed, true), []);
        listed.remove(1000);
        let missing = CoverFault::Missing(PerAxis::from_slice(&boxes[1000].0), PerAxis::from_slice(&[3, 2]));
        assert_eq!(faults(&shape, &listed, true), [missing]);
    }

    #[test]
    fn boxes_that_interlock_without_end_are_given_up() {
        // Each long box crosses all the others.
        let n = 3000;
        let rows = (0..n).map(|row| ([row, 0], [1, n]));
        let columns = (0..n).map(|column| ([0, column], [n, 1]));
        let boxes: Vec<([u64; 2], [u64; 2])> = rows.chain(columns).collect();
        let listed: Vec<Box<'_>> = boxes.iter().map(|(origin, extents)| (&origin[..], &extents[..])).collect();
        assert!(!faults(&Shape::try_new(&[n, n]).unwrap(), &listed, true).is_empty());
    }
}
