//! Loops in bytes: their one form, their bounds, and walks and copies along them.

use smallvec::SmallVec;

use super::job::Loop;

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
    let mut axes: Axes = loops
        .iter()
        .inspect(|step| assert!(step.extent >= 1, "a loop of extent 0: {loops:?}"))
        .filter(|step| step.extent > 1)
        .map(|step| Axis {
            extent: bytes(step.extent, 1),
            target: bytes(step.target_stride, target_bytes),
            source: bytes(step.source_stride, source_bytes),
        })
        .collect();
    axes.sort_unstable_by_key(|axis| axis.target);
    axes.dedup_by(|outer, inner| {
        let chained = inner.extent.checked_mul(inner.target) == Some(outer.target)
            && inner.extent.checked_mul(inner.source) == Some(outer.source);
        if chained {
            inner.extent *= outer.extent;
        }
        chained
    });
    axes
}

/// Asserts that the last element of the loops ends within `length` bytes.
pub(super) fn check_bounds(
    side: &str,
    start: usize,
    axes: impl Iterator<Item = (usize, usize)>,
    unit: usize,
    length: usize,
) {
    let end =
        axes.fold(start.checked_add(unit), |end, (extent, stride)| end?.checked_add((extent - 1).checked_mul(stride)?));
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

/// Copies `count` elements of `unit` bytes, each side with its own stride in bytes.
pub(super) fn copy_elements(unit: usize, source: &[u8], from: usize, target: &mut [u8], to: usize, count: usize) {
    match unit {
        1 => copy_units::<1>(source, from, target, to, count),
        2 => copy_units::<2>(source, from, target, to, count),
        3 => copy_units::<3>(source, from, target, to, count),
        4 => copy_units::<4>(source, from, target, to, count),
        8 => copy_units::<8>(source, from, target, to, count),
        16 => copy_units::<16>(source, from, target, to, count),
        unit => {
            for index in 0..count {
                target[index * to..][..unit].copy_from_slice(&source[index * from..][..unit]);
            }
        }
    }
}

fn copy_units<const UNIT: usize>(source: &[u8], from: usize, target: &mut [u8], to: usize, count: usize) {
    if to == UNIT {
        for (index, element) in target.as_chunks_mut::<UNIT>().0[..count].iter_mut().enumerate() {
            element.copy_from_slice(&source[index * from..][..UNIT]);
        }
        return;
    }
    for index in 0..count {
        target[index * to..][..UNIT].copy_from_slice(&source[index * from..][..UNIT]);
    }
}
