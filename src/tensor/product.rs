//! Products of stored matrices as views.
//!
//! A matrix is stored in one span, or as boxes: each rank of a training has a part of its rows. The product is cut where boxes of
//! `left` begin along its rows, and boxes of `right` along its columns. Where the boxes divide the terms of a sum, the first ones are
//! one step, and each further product is added by itself: the order of additions, and so the result, does not depend on the boxes.

use super::{
    DType, Digit, Element, IndexMap, MosaicBox, Op, Operand, Operation, Shape, SourceTensor, Step, Terms, Value, View,
    ViewError, decode::Field, mosaic::row_major, shape::PerAxis,
};

impl View {
    /// The product of two matrices, in f32: each element is the sum of products of a row of `left` and a column of `right`, added from
    /// the first to the last. Both are tensors of the checkpoint as they are stored, in one span or as boxes.
    ///
    /// # Errors
    /// [`ViewError`] unless both are such matrices of floats, and `left` has as many columns as `right` has rows, at least one.
    pub fn matrix_product(left: &Self, right: &Self) -> Result<Self, ViewError> {
        let refused = || {
            let (left, right) = (left.shape(), right.shape());
            let expected = "expected a matrix and one with a row for each of its columns";
            ViewError(format!("product: {expected}, found {left} and {right}"))
        };
        let ([rows, terms], [others, columns]) = (left.shape().extents(), right.shape().extents()) else {
            return Err(refused());
        };
        let (Some(of_left), Some(of_right)) = (left.stored_boxes(), right.stored_boxes()) else {
            return Err(refused());
        };
        if terms != others || *terms == 0 {
            return Err(refused());
        }
        if *rows == 0 || *columns == 0 {
            return Ok(Self::fill(Shape::try_new(&[*rows, *columns])?, Element::zero(DType::F32)));
        }
        let (of_rows, of_columns) = (borders(&of_left, 0, *rows), borders(&of_right, 1, *columns));
        let mut bands = Vec::new();
        for row in of_rows.windows(2) {
            let mut band = Vec::new();
            for column in of_columns.windows(2) {
                let shape = Shape::try_new(&[row[1] - row[0], column[1] - column[0]])?;
                let value = sum_of_products((&of_left, row[0]), (&of_right, column[0]), *terms, &shape);
                band.push(Self::quantized(shape, value.ok_or_else(refused)?)?);
            }
            bands.push(Self::concat(1, &band)?);
        }
        Self::concat(0, &bands)
    }

    /// The boxes of a matrix of the checkpoint; one if it is stored in one span. `None` if it is no such matrix.
    fn stored_boxes(&self) -> Option<Vec<StoredBox>> {
        if let Op::Source(tensor) = self.op() {
            let extents = PerAxis::from_slice(tensor.shape.extents());
            let (origin, strides) = (PerAxis::from_elem(0, extents.len()), row_major(&extents));
            return Some(vec![StoredBox { tensor: tensor.clone(), origin, extents, strides }]);
        }
        let Op::Mosaic(mosaic) = self.op() else { return None };
        let stored = |part: MosaicBox<'_>| {
            let (origin, extents) = (PerAxis::from_slice(part.origin), PerAxis::from_slice(part.extents));
            Some(StoredBox { tensor: part.stored(mosaic.dtype())?, origin, extents, strides: part.strides() })
        };
        mosaic.boxes().map(stored).collect()
    }
}

/// A stored part of a matrix.
struct StoredBox {
    tensor: SourceTensor,
    /// Its first element in the matrix.
    origin: PerAxis,
    extents: PerAxis,
    /// Distances of neighbours in `tensor`.
    strides: PerAxis,
}

impl StoredBox {
    fn has(&self, index: [u64; 2]) -> bool {
        (0..2).all(|axis| index[axis].checked_sub(self.origin[axis]).is_some_and(|inside| inside < self.extents[axis]))
    }

    /// The elements of a sum's factor from `first` on: the product has the shape `shape`, of which `axis` goes along this matrix.
    fn factor(&self, first: [u64; 2], (shape, axis): (&Shape, usize), count: u64) -> Operand {
        let mut digits = vec![Digit::axis(shape.extents(), axis, self.strides[axis])];
        let offset: u64 = (0..2).map(|axis| (first[axis] - self.origin[axis]) * self.strides[axis]).sum();
        if offset > 0 {
            digits.push(Digit::constant(offset));
        }
        let index = IndexMap::new(&digits).with_terms(Terms { count, stride: self.strides[1 - axis] });
        Operand { field: Field::Float(self.tensor.dtype), index, tensor: self.tensor.clone() }
    }
}

/// Where boxes begin and end along an axis, 0 and `extent` among them, ascending.
fn borders(boxes: &[StoredBox], axis: usize, extent: u64) -> Vec<u64> {
    let ends = boxes.iter().flat_map(|part| [part.origin[axis], part.origin[axis] + part.extents[axis]]);
    let mut all: Vec<u64> = ends.chain([0, extent]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The sums of products of rows from `row` on and columns from `column` on. `None` if elements are in no box.
fn sum_of_products(
    (left, row): (&[StoredBox], u64),
    (right, column): (&[StoredBox], u64),
    terms: u64,
    shape: &Shape,
) -> Option<Value> {
    let mut sum: Option<Value> = None;
    let mut term = 0;
    while term < terms {
        let a = left.iter().find(|part| part.has([row, term]))?;
        let b = right.iter().find(|part| part.has([term, column]))?;
        let end = (a.origin[1] + a.extents[1]).min(b.origin[0] + b.extents[0]);
        let factors =
            |term, count| (a.factor([row, term], (shape, 0), count), b.factor([term, column], (shape, 1), count));
        match &mut sum {
            None => {
                let (load, factor) = factors(term, end - term);
                sum = Some(Value { load, steps: vec![Step::Dot(factor.into())] });
            }
            // Sums of parts would be added in another order.
            Some(sum) => sum.steps.extend((term..end).map(|term| {
                let (load, factor) = factors(term, 1);
                Step::Compute(Operation::Add, Value::of(load).then(Operation::Multiply, factor).into())
            })),
        }
        term = end;
    }
    sum
}
