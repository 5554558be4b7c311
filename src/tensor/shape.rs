//! Shapes, and boxes of elements inside them.

use std::{fmt, ops::Range};

use smallvec::SmallVec;

/// Highest number of axes a tensor or view may have. Real checkpoints need 6 (a stacked 3-D convolution).
pub const RANK_MAX: usize = 8;

/// One number per axis.
pub type PerAxis = SmallVec<[u64; 4]>;

/// Why operands do not form a view, or extents no shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ViewError(pub(super) String);

impl ViewError {
    /// That the product of the extents does not fit 64 bits.
    pub(super) fn overflow(extents: &[u64]) -> Self {
        Self(format!("the number of elements of {extents:?} does not fit 64 bits"))
    }

    /// That an axis number is not below the rank.
    pub fn axis(op: &str, axis: usize, shape: &Shape) -> Self {
        Self(format!("{op}: axis {axis}, but the shape {shape} has {} axes", shape.rank()))
    }

    /// That a list of axes is not a permutation.
    pub fn permutation(axes: &[usize], shape: &Shape) -> Self {
        Self(format!("transpose: {axes:?} is not a permutation of the axes of {shape}"))
    }
}

impl From<ViewError> for String {
    fn from(error: ViewError) -> Self {
        error.0
    }
}

/// Extents of a tensor, outermost axis first. At most [`RANK_MAX`] axes; the number of bits of its elements, at up to
/// 64 bits each, fits `u64`, so that products of extents never need checking again.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(PerAxis);

impl Shape {
    /// The shape with these extents.
    ///
    /// # Errors
    /// [`ViewError`] if there are too many axes or elements. Zero extents do not hide an overflow of the others.
    pub fn try_new(extents: &[u64]) -> Result<Self, ViewError> {
        if extents.len() > RANK_MAX {
            return Err(ViewError(format!("{} axes, at most {RANK_MAX} are supported", extents.len())));
        }
        let mut bits = 64u64;
        for extent in extents {
            bits = bits.checked_mul((*extent).max(1)).ok_or_else(|| ViewError::overflow(extents))?;
        }
        Ok(Self(PerAxis::from_slice(extents)))
    }

    /// The shape of a single element without axes.
    pub fn scalar() -> Self {
        Self::default()
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Extents, outermost first.
    pub fn extents(&self) -> &[u64] {
        &self.0
    }

    /// Number of elements: the product of the extents, 1 without axes.
    pub fn elements(&self) -> u64 {
        self.0.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.0.contains(&0)
    }

    /// Distance, in elements of the row-major order, between neighbours along each axis.
    pub fn strides(&self) -> PerAxis {
        row_major(&self.0)
    }

    /// The region that covers the whole shape.
    pub fn whole(&self) -> Region {
        Region { origin: PerAxis::from_elem(0, self.rank()), extent: self.clone() }
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.extents())
    }
}

/// Distances of neighbours in row-major order.
pub fn row_major(extents: &[u64]) -> PerAxis {
    let mut strides = PerAxis::from_elem(1, extents.len());
    for axis in (1..extents.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(extents[axis].max(1));
    }
    strides
}

/// The position along each axis of item `number` of a grid, in row-major order.
pub fn unravel(mut number: u64, grid: &[u64]) -> PerAxis {
    let mut position = PerAxis::from_elem(0, grid.len());
    for (place, extent) in position.iter_mut().zip(grid).rev() {
        *place = number % (*extent).max(1);
        number /= (*extent).max(1);
    }
    position
}

/// A number of bytes or elements as `usize`.
///
/// # Panics
/// Never: the program is built for machines of 64 bits only.
pub fn to_usize(number: u64) -> usize {
    const { assert!(usize::BITS == 64, "offsets in files are offsets in memory") };
    usize::try_from(number).expect("usize has 64 bits")
}

/// A box of elements: an origin and an extent along each axis. May be empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    origin: PerAxis,
    extent: Shape,
}

impl Region {
    /// The box of these half-open ranges, one per axis of `shape`, or `None` if a range leaves the shape or runs
    /// backwards or their number is not the rank.
    pub fn within(shape: &Shape, ranges: &[Range<u64>]) -> Option<Self> {
        let fits = ranges.len() == shape.rank()
            && ranges
                .iter()
                .zip(shape.extents())
                .all(|(range, extent)| range.start <= range.end && range.end <= *extent);
        fits.then(|| Self {
            origin: ranges.iter().map(|range| range.start).collect(),
            extent: Shape(ranges.iter().map(|range| range.end - range.start).collect()),
        })
    }

    /// First element along each axis.
    pub fn origin(&self) -> &[u64] {
        &self.origin
    }

    /// Shape of the box.
    pub fn shape(&self) -> &Shape {
        &self.extent
    }

    /// The half-open range along each axis.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.origin.iter().zip(self.extent.extents()).map(|(origin, extent)| *origin..origin + extent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_are_row_major() {
        let shape = Shape::try_new(&[2, 3, 4]).unwrap();
        assert_eq!(shape.strides().as_slice(), [12, 4, 1]);
        assert_eq!(shape.elements(), 24);
        assert_eq!(Shape::scalar().elements(), 1);
        assert!(Shape::scalar().strides().is_empty());
    }

    #[test]
    fn oversized_shapes_are_refused() {
        let error = |extents: &[u64]| Shape::try_new(extents).unwrap_err().to_string();
        assert_eq!(error(&[1; 9]), "9 axes, at most 8 are supported");
        assert!(error(&[1 << 40, 1 << 30]).ends_with("does not fit 64 bits"));
        assert!(error(&[0, 1 << 40, 1 << 30]).ends_with("does not fit 64 bits"));
        assert!(Shape::try_new(&[0, 5]).unwrap().is_empty());
    }

    #[test]
    fn regions_stay_inside() {
        let shape = Shape::try_new(&[4, 6]).unwrap();
        let region = Region::within(&shape, &[1..4, 6..6]).unwrap();
        assert_eq!(region.shape().extents(), [3, 0]);
        assert!(Region::within(&shape, &[1..5, 0..6]).is_none());
        assert!(Region::within(&shape, &[Range { start: 2, end: 1 }, 0..6]).is_none());
        assert!(Region::within(&shape, &shape.whole().ranges().take(1).collect::<Vec<_>>()).is_none());
        assert_eq!(shape.whole().shape(), &shape);
    }
}
