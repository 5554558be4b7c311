//! Loops in bytes: their one form, their bounds, and walks and copies along them.

use smallvec::SmallVec;

use super::{
    super::kernel::row::copy_elements,
    job::{Loop, Loops, normalize},
};

/// A loop in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Axis {
    pub(super) extent: usize,
    pub(super) target: usize,
    pub(super) source: usize,
}

pub(super) type Axes = SmallVec<[Axis; 8]>;

/// `elements * width` as bytes in memory.
pub(super) fn bytes(elements: u64, width: usize) -> usize {
    let product = usize::try_from(elements).ok().and_then(|elements| elements.checked_mul(width));
    let Some(product) = product else { panic!("{elements} elements of {width} bytes exceed memory") };
    product
}

/// The loops in bytes, without those of extent 1, by ascending target stride, merged where both sides chain.
pub(super) fn canonical(loops: &[Loop], source_bytes: usize, target_bytes: usize) -> Axes {
    assert!(loops.iter().all(|step| step.extent >= 1), "a loop of extent 0: {loops:?}");
    let mut steps = Loops::from_slice(loops);
    normalize(&mut steps);
    let axis = |step: &Loop| Axis {
        extent: bytes(step.extent, 1),
        target: bytes(step.target_stride, target_bytes),
        source: bytes(step.source_stride, source_bytes),
    };
    steps.iter().rev().map(axis).collect()
}

/// Asserts that the last element of the loops ends within `length` bytes.
pub(super) fn check_bounds(
    side: &str,
    start: usize,
    axes: &[Axis],
    stride: fn(&Axis) -> usize,
    unit: usize,
    length: usize,
) {
    let end = axes
        .iter()
        .fold(start.checked_add(unit), |end, axis| end?.checked_add((axis.extent - 1).checked_mul(stride(axis))?));
    assert!(end.is_some_and(|end| end <= length), "the loops reach byte {end:?} of {length} {side} bytes");
}

/// A loop position, in bytes of each slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    pub(super) source: usize,
    pub(super) target: usize,
}

impl Position {
    pub(super) fn step(self, axis: Axis, steps: usize) -> Self {
        Self { source: self.source + steps * axis.source, target: self.target + steps * axis.target }
    }
}

/// Visits all positions of the loops; the first loop runs fastest.
pub(super) fn each(axes: &[Axis], place: Position, visit: &mut impl FnMut(Position)) {
    match axes.split_last() {
        None => visit(place),
        Some((outer, inner)) => {
            for index in 0..outer.extent {
                each(inner, place.step(*outer, index), visit);
            }
        }
    }
}

/// Fills `target` with elements of `unit` bytes, `stride` apart in `source`.
pub(super) fn copy_line(unit: usize, source: &[u8], stride: usize, target: &mut [u8]) {
    if stride == unit {
        target.copy_from_slice(&source[..target.len()]);
    } else {
        copy_elements(unit, source, stride, target, unit, target.len() / unit);
    }
}
