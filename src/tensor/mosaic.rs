//! Mosaics: tensors that are stored as boxes, each box a strided part of some file.
//!
//! A checkpoint may have 150 000 such tensors of 64 boxes each, so that all of them share a few flat arrays: a view of one is
//! a number. Its boxes become parts when the view is lowered, and not before.
//!
//! The boxes of a tensor are disjoint. Together they cover it, or a fill value is given for the elements in no box.
//! [`Mosaics::push`] checks that.

use std::sync::Arc;

pub use super::shape::row_major;
use super::{
    DType, Element, PerAxis, Shape, SourceTensor, TensorId,
    cover::{self, CoverFault},
};

/// One box of a tensor that is to be added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBox {
    /// First element of the box in the tensor, along each axis.
    pub origin: PerAxis,
    /// Extents of the box; none is 0.
    pub extents: PerAxis,
    /// Distance of neighbours along each axis where the box is stored, in elements.
    pub strides: PerAxis,
}

/// One box of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct MosaicBox<'a> {
    /// The stored elements, of which the first is the first of the box.
    pub tensor: TensorId,
    /// First element of the box in the tensor, along each axis.
    pub origin: &'a [u64],
    /// Extents of the box.
    pub extents: &'a [u64],
    /// Distance of neighbours along each axis in the stored elements; `None` if they are in row-major order.
    strides: Option<&'a [u64]>,
}

impl MosaicBox<'_> {
    /// Distance of neighbours along each axis in the stored elements.
    pub fn strides(&self) -> PerAxis {
        self.strides.map_or_else(|| row_major(self.extents), PerAxis::from_slice)
    }

    /// The stored elements from the first of the box to its last, of type `dtype`. `None` if they are too many.
    pub(crate) fn stored(&self, dtype: DType) -> Option<SourceTensor> {
        let shape = Shape::try_new(&[self.stored_elements()]).ok()?;
        Some(SourceTensor { id: self.tensor, dtype, shape })
    }

    /// Number of stored elements from the first of the box to its last.
    pub fn stored_elements(&self) -> u64 {
        stored_elements(self.extents, &self.strides())
    }
}

/// Number of stored elements from the first of a box to its last. Saturates.
pub fn stored_elements(extents: &[u64], strides: &[u64]) -> u64 {
    let last = |(extent, stride): (&u64, &u64)| extent.saturating_sub(1).saturating_mul(*stride);
    extents.iter().zip(strides).map(last).fold(1, u64::saturating_add)
}

#[derive(Clone, Debug)]
struct MosaicRow {
    shape: Shape,
    dtype: DType,
    fill: Option<Element>,
    boxes_end: u32,
    /// Whether each box has strides of its own in the array of numbers.
    strided: bool,
    numbers_end: usize,
}

/// The mosaics of a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct Mosaics {
    rows: Vec<MosaicRow>,
    /// By box: origin, extents, and strides where the row has them.
    numbers: Vec<u64>,
    /// Id of the first box.
    first: u32,
}

impl Mosaics {
    /// Adds a tensor. Returns its number.
    ///
    /// # Errors
    /// The faults of its boxes: those outside the shape, those that overlap, and, without `fill`, what is in no box.
    ///
    /// # Panics
    /// If a box has another rank than the shape or an extent of 0, or there are more than 2^32 boxes in all.
    pub fn push(
        &mut self,
        shape: Shape,
        dtype: DType,
        fill: Option<Element>,
        boxes: &[NewBox],
    ) -> Result<u32, Vec<CoverFault>> {
        let rank = shape.rank();
        let whole: Vec<_> = boxes.iter().map(|b| (b.origin.as_slice(), b.extents.as_slice())).collect();
        let faults = cover::faults(&shape, &whole, fill.is_none());
        if !faults.is_empty() {
            return Err(faults);
        }
        let strided = boxes.iter().any(|b| b.strides != row_major(&b.extents));
        for b in boxes {
            assert!(b.strides.len() == rank, "strides {:?} of a box of a tensor of shape {shape}", b.strides);
            self.numbers.extend_from_slice(&b.origin);
            self.numbers.extend_from_slice(&b.extents);
            self.numbers.extend(b.strides.iter().filter(|_| strided));
        }
        let boxes_end = self.boxes() + boxes.len();
        let boxes_end = u32::try_from(boxes_end).expect("a checkpoint has fewer than 2^32 boxes");
        let number = u32::try_from(self.rows.len()).expect("a checkpoint has fewer than 2^32 tensors");
        self.rows.push(MosaicRow { shape, dtype, fill, boxes_end, strided, numbers_end: self.numbers.len() });
        Ok(number)
    }

    /// These mosaics, their boxes having the ids from `first` on.
    #[must_use]
    pub fn numbered_from(mut self, first: TensorId) -> Self {
        self.first = first.0;
        self
    }

    /// Adds all tensors of others, with numbers after its own.
    ///
    /// # Panics
    /// If there are more than 2^32 boxes in all.
    pub fn append(&mut self, others: &Self) {
        let (boxes, numbers) = (self.boxes(), self.numbers.len());
        self.numbers.extend_from_slice(&others.numbers);
        self.rows.extend(others.rows.iter().map(|row| MosaicRow {
            boxes_end: u32::try_from(boxes + row.boxes_end as usize).expect("a checkpoint has fewer than 2^32 boxes"),
            numbers_end: numbers + row.numbers_end,
            ..row.clone()
        }));
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Number of boxes of all tensors.
    pub fn boxes(&self) -> usize {
        self.rows.last().map_or(0, |row| row.boxes_end as usize)
    }

    /// Memory of the arrays, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<MosaicRow>() + self.numbers.capacity() * size_of::<u64>()
    }

    /// Box `box_number`, counted over all tensors, of the tensor that has it.
    ///
    /// # Panics
    /// If it has no such box.
    pub fn box_of(&self, number: u32, box_number: usize) -> MosaicBox<'_> {
        let before = self.before(number).0;
        assert!((before..before + self.count(number)).contains(&box_number), "box {box_number} of tensor {number}");
        self.at(number, box_number - before)
    }

    /// Number of boxes of a tensor.
    pub fn count(&self, number: u32) -> usize {
        self.rows[number as usize].boxes_end as usize - self.before(number).0
    }

    /// The boxes of a tensor, in the order in which they were given.
    pub fn boxes_of(&self, number: u32) -> impl ExactSizeIterator<Item = MosaicBox<'_>> {
        (0..self.count(number)).map(move |index| self.at(number, index))
    }

    /// Boxes and numbers before a tensor's own.
    fn before(&self, number: u32) -> (usize, usize) {
        let before = (number as usize).checked_sub(1).map(|before| &self.rows[before]);
        before.map_or((0, 0), |row| (row.boxes_end as usize, row.numbers_end))
    }

    fn at(&self, number: u32, index: usize) -> MosaicBox<'_> {
        let row = &self.rows[number as usize];
        let (boxes, numbers) = self.before(number);
        let rank = row.shape.rank();
        let parts = if row.strided { 3 } else { 2 };
        let start = numbers + index * parts * rank;
        let part = |part: usize| &self.numbers[start + part * rank..start + (part + 1) * rank];
        let id = u32::try_from(boxes + index).expect("a checkpoint has fewer than 2^32 boxes");
        MosaicBox {
            tensor: TensorId(self.first + id),
            origin: part(0),
            extents: part(1),
            strides: row.strided.then(|| part(2)),
        }
    }
}

/// One mosaic, as views hold it.
#[derive(Clone, Debug)]
pub struct Mosaic {
    all: Arc<Mosaics>,
    number: u32,
    id: TensorId,
}

impl Mosaic {
    /// Tensor `number` of these, which the checkpoint's table has as `id`.
    pub const fn new(all: Arc<Mosaics>, number: u32, id: TensorId) -> Self {
        Self { all, number, id }
    }

    fn row(&self) -> &MosaicRow {
        &self.all.rows[self.number as usize]
    }

    /// The tensor in the checkpoint's table.
    pub const fn id(&self) -> TensorId {
        self.id
    }

    /// Its shape.
    pub fn shape(&self) -> &Shape {
        &self.row().shape
    }

    /// Type of its elements.
    pub fn dtype(&self) -> DType {
        self.row().dtype
    }

    /// The value of elements in no box, if it may have some.
    pub fn fill(&self) -> Option<Element> {
        self.row().fill
    }

    /// Its boxes.
    pub fn boxes(&self) -> impl ExactSizeIterator<Item = MosaicBox<'_>> {
        self.all.boxes_of(self.number)
    }

    /// Box `index`.
    ///
    /// # Panics
    /// If there is no such box.
    pub fn get(&self, index: usize) -> MosaicBox<'_> {
        self.all.at(self.number, index)
    }

    /// The regions in no box, each with its first element and its extents.
    pub(crate) fn gaps(&self) -> Vec<(PerAxis, PerAxis)> {
        if self.fill().is_none() {
            return Vec::new();
        }
        let boxes: Vec<_> = self.boxes().map(|b| (b.origin, b.extents)).collect();
        cover::gaps(self.shape(), &boxes)
    }
}
