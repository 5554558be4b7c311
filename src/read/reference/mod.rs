//! The reference evaluator: the bytes of a view by definition, one element at a time.
//!
//! It follows each element through the expression, operator by operator, and computes values with plain arithmetic. 8-bit floats
//! are computed by formula and search, 16-bit floats by the `half` crate, packed codes bit by bit. It shares no code with
//! lowering, tilings and kernels, so that both do not contain the same error; `ckfs verify` and the tests compare the
//! two. Hundreds of nanoseconds per element are acceptable here; a shortcut is not.

mod arithmetic;
mod encode;
mod error;
mod exponential;

use std::{error::Error, num::NonZeroUsize, ops::Range, rc::Rc};

use ckfs_tensor::{
    BitOrder, DType, Element, Field, Mosaic, MosaicBox, Op, Operand, Operation, Shape, SourceTensor, Step, TensorId,
    Term, Terms, Value, View, to_usize, unravel,
};
use lru::LruCache;
use smallvec::SmallVec;

pub use self::arithmetic::{add, divide, multiply, round, subtract, widen};
pub use self::encode::KnownScales;
pub use self::error::ReferenceError;
pub use self::exponential::exp;
use self::{arithmetic::narrow, encode::ScalesByDefinition};

/// Bytes fetched at once: the first size of which a read succeeds. A source that has only a part of a tensor, as a cache
/// without a network does, can refuse a block although it has the bytes that are requested.
const BLOCK_SIZES: [u64; 3] = [64 << 10, 512, 8];

/// Blocks kept, 64 MiB in all: enough for a transposing view to visit the same rows again.
const BLOCKS_KEPT: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// Rows or columns of factors kept: those of a matrix.
const FACTORS_KEPT: NonZeroUsize = NonZeroUsize::new(16 << 10).unwrap();

/// The result of a reader of tensor bytes.
pub type TensorBytes = Result<Vec<u8>, Box<dyn Error + Send + Sync>>;

/// Bytes `span` of the row-major elements of `view`. `read` returns a span of a tensor's bytes, counted from the tensor's
/// first.
///
/// # Errors
/// [`ReferenceError`].
pub fn evaluate(
    view: &View,
    span: Range<u64>,
    read: impl FnMut(TensorId, Range<u64>) -> TensorBytes,
) -> Result<Vec<u8>, ReferenceError> {
    Evaluator::new(read).evaluate(view, span)
}

/// An evaluator that keeps the blocks it read last, from one call to the next.
pub struct Evaluator<'a> {
    read: Box<dyn FnMut(TensorId, Range<u64>) -> TensorBytes + 'a>,
    /// By tensor and range of its bytes.
    blocks: LruCache<(TensorId, Range<u64>), Rc<Vec<u8>>>,
    /// The block of the byte before, which mostly has this one too.
    last_block: Option<(TensorId, Range<u64>, Rc<Vec<u8>>)>,
    /// The tensor stored as boxes that was read last, and which of its boxes.
    last_box: (Option<TensorId>, usize),
    /// Scales of large blocks that are encoded, which other evaluators know too.
    known: Option<KnownScales>,
    /// By tensor, terms and index of the first.
    factors: LruCache<(TensorId, Terms, u64), Rc<[u32]>>,
    /// Scales of blocks that are encoded.
    scales: Option<Box<ScalesByDefinition>>,
}

/// Number in the row-major order of `shape` of the element at `index`.
fn ravel(index: &[u64], shape: &Shape) -> u64 {
    index.iter().zip(shape.extents()).fold(0, |number, (position, extent)| number * extent + position)
}

impl<'a> Evaluator<'a> {
    /// An evaluator that fetches through `read`, in aligned blocks of 64 KiB, and in smaller ones where such a read fails.
    pub fn new(read: impl FnMut(TensorId, Range<u64>) -> TensorBytes + 'a) -> Self {
        Self {
            read: Box::new(read),
            blocks: LruCache::new(BLOCKS_KEPT),
            last_block: None,
            last_box: (None, 0),
            known: None,
            factors: LruCache::new(FACTORS_KEPT),
            scales: None,
        }
    }

    /// The same, of several that compute each scale of a large block once.
    pub fn with_scales(read: impl FnMut(TensorId, Range<u64>) -> TensorBytes + 'a, known: &KnownScales) -> Self {
        Self { known: Some(known.clone()), ..Self::new(read) }
    }

    /// Bytes `span` of the row-major elements of `view`.
    ///
    /// # Errors
    /// [`ReferenceError`].
    pub fn evaluate(&mut self, view: &View, span: Range<u64>) -> Result<Vec<u8>, ReferenceError> {
        let (dtype, elements) = (view.dtype(), view.shape().elements());
        let width = dtype.bits();
        let bits = elements * width;
        if !bits.is_multiple_of(8) {
            return Err(ReferenceError::new(format!("{elements} elements of {dtype} do not fill whole bytes")));
        }
        if span.start > span.end || span.end > bits / 8 {
            let Range { start, end } = span;
            return Err(ReferenceError::new(format!("bytes {start}..{end} of a view of {} bytes", bits / 8)));
        }
        // Unit by unit, each of elements that fill whole bytes.
        let unit = dtype.unit();
        let first = span.start / unit.bytes;
        let mut bytes = Vec::new();
        for number in first..span.end.div_ceil(unit.bytes) {
            let mut bits = 0_u128;
            for element in (number * unit.elements..(number + 1) * unit.elements).rev() {
                bits = bits << width | u128::from(self.element(view, &unravel(element, view.shape().extents()))?);
            }
            bytes.extend_from_slice(&bits.to_le_bytes()[..to_usize(unit.bytes)]);
        }
        let skipped = to_usize(span.start - first * unit.bytes);
        Ok(bytes.into_iter().skip(skipped).take(to_usize(span.end - span.start)).collect())
    }

    /// The bits of one element, low bits first.
    fn element(&mut self, view: &View, index: &[u64]) -> Result<u64, ReferenceError> {
        let mut inner: SmallVec<[u64; 8]> = SmallVec::from_slice(index);
        match view.op() {
            Op::Source(tensor) => self.element_of(tensor, stored_bytes(tensor), ravel(index, &tensor.shape)),
            Op::Mosaic(mosaic) => self.mosaic_element(mosaic, index),
            Op::Fill(element) => Ok(fill_bits(element)),
            Op::Slice { of, axis, start, step, stop: _ } => {
                inner[*axis] = start + inner[*axis] * step;
                self.element(of, &inner)
            }
            Op::Gather { of, axis, runs } => {
                let mut place = inner[*axis];
                for run in runs.iter() {
                    if place < run.count {
                        let at = i128::from(run.first) + i128::from(place) * i128::from(run.step);
                        inner[*axis] = u64::try_from(at).expect("views check indexes");
                        return self.element(of, &inner);
                    }
                    place -= run.count;
                }
                unreachable!("the runs have as many indexes as the axis of the view")
            }
            Op::Transpose { of, axes } => {
                for (position, axis) in index.iter().zip(axes) {
                    inner[*axis] = *position;
                }
                self.element(of, &inner)
            }
            Op::Reshape { of } => self.element(of, &unravel(ravel(index, view.shape()), of.shape().extents())),
            Op::Stack { of, axis } => {
                let which = inner.remove(*axis);
                self.element(&of[usize::try_from(which).expect("an index into a vector")], &inner)
            }
            Op::Concat { of, axis } => {
                let mut operands = of.iter();
                loop {
                    let operand = operands.next().expect("the extents of the operands sum to the view's");
                    let extent = operand.shape().extents()[*axis];
                    if inner[*axis] < extent {
                        return self.element(operand, &inner);
                    }
                    inner[*axis] -= extent;
                }
            }
            Op::Pad { of, axis, before, after: _ } => {
                let extent = of.shape().extents()[*axis];
                match inner[*axis].checked_sub(*before) {
                    Some(position) if position < extent => {
                        inner[*axis] = position;
                        self.element(of, &inner)
                    }
                    Some(_) | None => Ok(0),
                }
            }
            Op::Cast { of } => Ok(round(view.dtype(), self.value(of, index)?)),
            Op::Multiply { of, factor, flush } => {
                Ok(round(view.dtype(), multiply(self.value(of, index)?, factor.to_bits(), *flush)))
            }
            Op::Add { of, addend } => Ok(round(view.dtype(), add(self.value(of, index)?, addend.to_bits()))),
            Op::Exp { of } => Ok(round(view.dtype(), exp(self.value(of, index)?))),
            Op::Sum { of: [left, right] } => {
                let (left, right) = (self.value(left, index)?, self.value(right, index)?);
                Ok(round(view.dtype(), add(left, right)))
            }
            Op::Product { of: [left, right], flush } => {
                let (left, right) = (self.value(left, index)?, self.value(right, index)?);
                Ok(round(view.dtype(), multiply(left, right, *flush)))
            }
            Op::Encoded { of, part } => {
                let known = || self.known.clone().unwrap_or_default();
                let mut scales = self.scales.take().unwrap_or_else(|| Box::new(ScalesByDefinition::new(known())));
                let bits = scales.element(of, *part, index, &mut |view, index| self.value(view, index));
                self.scales = Some(scales);
                bits
            }
            Op::Quantized(value) => {
                let number = ravel(index, view.shape());
                if view.dtype().is_float() {
                    return Ok(round(view.dtype(), self.decoded(value, number)?));
                }
                // Packed integers, the last byte first.
                let width = view.dtype().bits() / 8;
                (0..width).rev().try_fold(0, |bits, byte| {
                    Ok(bits << 8 | round(DType::U8, self.decoded(value, number * width + byte)?))
                })
            }
        }
    }

    /// One element of a tensor that is stored as boxes. The box of the element before is tried first.
    fn mosaic_element(&mut self, mosaic: &Mosaic, index: &[u64]) -> Result<u64, ReferenceError> {
        let has = |part: &MosaicBox<'_>| {
            let ranges = part.origin.iter().zip(part.extents).map(|(start, extent)| *start..start + extent);
            ranges.zip(index).all(|(range, position)| range.contains(position))
        };
        let (before, number) = self.last_box;
        let last = (before == Some(mosaic.id())).then(|| mosaic.get(number)).filter(has);
        let found = last.map(|part| (number, part)).or_else(|| mosaic.boxes().enumerate().find(|(_, part)| has(part)));
        let Some((number, part)) = found else {
            return Ok(mosaic.fill().as_ref().map_or(0, fill_bits));
        };
        self.last_box = (Some(mosaic.id()), number);
        let strides = part.strides();
        let mut at = 0;
        for axis in 0..index.len() {
            at += (index[axis] - part.origin[axis]) * strides[axis];
        }
        let stored = SourceTensor { id: part.tensor, dtype: mosaic.dtype(), shape: Shape::scalar() };
        let bits = part.stored_elements() * mosaic.dtype().bits();
        self.element_of(&stored, bits.div_ceil(8), at)
    }

    /// Element `number` of a quantized tensor, as f32 bits: the loaded value, then one operation after the other, each with its
    /// own rounding.
    fn decoded(&mut self, value: &Value, number: u64) -> Result<u32, ReferenceError> {
        let mut result = self.stored(&value.load, number, 0)?;
        for step in &value.steps {
            result = match step {
                Step::Round(dtype) => widen(*dtype, round(*dtype, result)),
                Step::Exp => exp(result),
                Step::Dot(operand) => self.sum_of_products(&value.load, operand, number)?,
                Step::Compute(operation, term) => {
                    let right = match term {
                        Term::Constant(constant) => *constant,
                        Term::Value(value) => self.decoded(value, number)?,
                    };
                    match operation {
                        Operation::Multiply => multiply(result, right, false),
                        Operation::MultiplyFlush => multiply(result, right, true),
                        Operation::Divide => divide(result, right),
                        Operation::Add => add(result, right),
                        Operation::Subtract => subtract(result, right),
                    }
                }
            };
        }
        Ok(result)
    }

    /// The products of the terms of two operands for element `number`, added from the first to the last.
    fn sum_of_products(&mut self, left: &Operand, right: &Operand, number: u64) -> Result<u32, ReferenceError> {
        let (left, right) = (self.factor(left, number)?, self.factor(right, number)?);
        let mut sum = None;
        for (a, b) in left.iter().zip(right.iter()) {
            let product = multiply(*a, *b, false);
            sum = Some(sum.map_or(product, |sum| add(sum, product)));
        }
        Ok(sum.expect("views check that there is a term"))
    }

    /// All terms of an operand for element `number`, as f32 bits. Elements of one row or column of a product have one side in common.
    fn factor(&mut self, operand: &Operand, number: u64) -> Result<Rc<[u32]>, ReferenceError> {
        let key = (operand.tensor.id, operand.index.terms(), place_of(operand, number));
        if let Some(known) = self.factors.get(&key) {
            return Ok(Rc::clone(known));
        }
        let terms = 0..operand.index.terms().count;
        let found: Rc<[u32]> = terms.map(|term| self.stored(operand, number, term)).collect::<Result<_, _>>()?;
        self.factors.put(key, Rc::clone(&found));
        Ok(found)
    }

    /// The stored value of a term of an operand for element `number`, as f32 bits.
    fn stored(&mut self, operand: &Operand, number: u64, term: u64) -> Result<u32, ReferenceError> {
        let index = place_of(operand, number) + term * operand.index.terms().stride;
        let bits = match &operand.field {
            Field::Float(dtype) => {
                let stored = SourceTensor { dtype: *dtype, ..operand.tensor.clone() };
                return Ok(widen(*dtype, self.element_of(&stored, stored_bytes(&operand.tensor), index)?));
            }
            Field::Integer(bits) | Field::Table(bits, _) => bits,
        };
        // Bit by bit.
        let mut code = 0;
        for place in 0..u64::from(bits.width) {
            let at = index + place;
            let byte = self.tensor_byte(operand.tensor.id, stored_bytes(&operand.tensor), at / 8)?;
            code = match bits.order {
                BitOrder::LowFirst => code | u32::from(byte >> (at % 8) & 1) << place,
                BitOrder::HighFirst => code << 1 | u32::from(byte >> (7 - at % 8) & 1),
            };
        }
        if let Field::Table(_, table) = &operand.field {
            return Ok(table[usize::try_from(code).expect("views check tables")]);
        }
        let negative = bits.signed && code >> (bits.width - 1) == 1;
        let number = f64::from(code) - if negative { 2f64.powi(bits.width.cast_signed()) } else { 0.0 };
        Ok(narrow(number).to_bits())
    }

    /// One element, as f32 bits.
    fn value(&mut self, view: &View, index: &[u64]) -> Result<u32, ReferenceError> {
        Ok(widen(view.dtype(), self.element(view, index)?))
    }

    /// The same for a tensor of `len_bytes`, whatever its shape.
    fn element_of(&mut self, tensor: &SourceTensor, len_bytes: u64, number: u64) -> Result<u64, ReferenceError> {
        let width = tensor.dtype.bits();
        let bytes = number * width / 8..((number + 1) * width).div_ceil(8);
        let mut bits = 0u128;
        for (place, at) in bytes.enumerate() {
            bits |= u128::from(self.tensor_byte(tensor.id, len_bytes, at)?) << (8 * place);
        }
        let bits = bits >> (number * width % 8);
        Ok(low_bits(u64::try_from(bits & u128::from(u64::MAX)).unwrap_or_default(), width))
    }

    fn tensor_byte(&mut self, tensor: TensorId, len_bytes: u64, at: u64) -> Result<u8, ReferenceError> {
        if let Some((of, span, bytes)) = &self.last_block
            && *of == tensor
            && span.contains(&at)
        {
            return Ok(bytes[to_usize(at - span.start)]);
        }
        let block = |size: u64| at / size * size..(at / size * size + size).min(len_bytes);
        let in_block = |span: &Range<u64>| usize::try_from(at - span.start).expect("less than a block");
        for size in BLOCK_SIZES {
            let span = block(size);
            if let Some(bytes) = self.blocks.get(&(tensor, span.clone())) {
                let byte = bytes[in_block(&span)];
                self.last_block = Some((tensor, span, Rc::clone(bytes)));
                return Ok(byte);
            }
        }
        let mut failure = None;
        for size in BLOCK_SIZES {
            let span = block(size);
            let Range { start, end } = span;
            match (self.read)(tensor, start..end) {
                Ok(bytes) if u64::try_from(bytes.len()) == Ok(end - start) => {
                    let (byte, bytes) = (bytes[in_block(&span)], Rc::new(bytes));
                    self.last_block = Some((tensor, span.clone(), Rc::clone(&bytes)));
                    self.blocks.put((tensor, span), bytes);
                    return Ok(byte);
                }
                Ok(bytes) => {
                    let found = bytes.len();
                    return Err(ReferenceError::new(format!(
                        "tensor #{}: asked for bytes {start}..{end}, got {found} bytes",
                        tensor.0
                    )));
                }
                Err(cause) => {
                    failure =
                        Some(ReferenceError::of_read(format!("tensor #{}: bytes {start}..{end}", tensor.0), cause));
                }
            }
        }
        Err(failure.expect("there are sizes"))
    }
}

/// Bytes of a tensor.
fn stored_bytes(tensor: &SourceTensor) -> u64 {
    (tensor.shape.elements() * tensor.dtype.bits()).div_ceil(8)
}

/// The index of an operand's first term for element `number`.
fn place_of(operand: &Operand, number: u64) -> u64 {
    let mut index = 0;
    for digit in operand.index.digits() {
        let position = number / digit.divisor % digit.modulus;
        let mut place = position / digit.group % digit.turn;
        if let Some(table) = &digit.table {
            place = table[usize::try_from(place).expect("views check tables")];
        }
        index += place * digit.stride;
    }
    index
}

/// The bits of a constant.
fn fill_bits(element: &Element) -> u64 {
    let bits = element.unit_bytes().iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
    low_bits(bits, element.dtype().bits())
}

fn low_bits(bits: u64, width: u64) -> u64 {
    if width < 64 { bits & ((1 << width) - 1) } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckfs_tensor::Element;

    fn tensor(id: u32, dtype: DType, extents: &[u64]) -> View {
        View::source(SourceTensor { id: TensorId(id), dtype, shape: Shape::try_new(extents).unwrap() })
    }

    fn part(bytes: &[u8], span: Range<u64>) -> Vec<u8> {
        let at = |byte| usize::try_from(byte).unwrap();
        bytes[at(span.start)..at(span.end)].to_vec()
    }

    #[test]
    fn packed_elements_move_as_groups_of_bits() {
        // 4-bit elements 1, 2, 3, 4 reversed in pairs, then 6-bit ones transposed.
        let bytes = |_, span| Ok(part(&[0x21, 0x43, 0x65], span));
        let view = tensor(0, DType::F4, &[2, 2]).reverse_axes();
        assert_eq!(evaluate(&view, 0..2, bytes).unwrap(), [0x31, 0x42]);
        let six = u32::from_le_bytes([0x21, 0x43, 0x65, 0]);
        let [a, b, c, d] = [0, 6, 12, 18].map(|shift| six >> shift & 0x3f);
        let swapped = (a | c << 6 | b << 12 | d << 18).to_le_bytes();
        let view = tensor(0, DType::F6E2M3, &[2, 2]).reverse_axes();
        for (start, end) in [(0, 3), (0, 1), (1, 2), (2, 3), (1, 3), (1, 1)] {
            let found = evaluate(&view, start..end, bytes).unwrap();
            assert_eq!(found, part(&swapped, start..end), "{start}..{end}");
        }
    }

    #[test]
    fn any_span_is_that_part_of_the_whole() {
        let noise = |_, span: Range<u64>| Ok(span.map(|at| (at * 37 % 251).to_le_bytes()[0]).collect());
        let views = [
            tensor(0, DType::F4, &[3, 4]),
            tensor(0, DType::F6E3M2, &[3, 4]).reverse_axes(),
            tensor(0, DType::BF16, &[3, 2]).pad(0, 1, 1).unwrap().cast(DType::F32).unwrap(),
            tensor(0, DType::C64, &[2, 2]),
        ];
        for view in views {
            let len = view.bytes().unwrap();
            let whole = evaluate(&view, 0..len, noise).unwrap();
            assert_eq!(whole.len() as u64, len);
            for start in 0..=len {
                for end in start..=len {
                    let found = evaluate(&view, start..end, noise).unwrap();
                    assert_eq!(found, part(&whole, start..end), "{view} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_fetched_once() {
        let mut spans = Vec::new();
        let mut evaluator = Evaluator::new(|_, span| {
            spans.push(span.clone());
            Ok(vec![0; usize::try_from(span.end - span.start).unwrap()])
        });
        let view = tensor(0, DType::U16, &[300, 200]).reverse_axes();
        evaluator.evaluate(&view, 0..1000).unwrap();
        evaluator.evaluate(&view, 1000..2000).unwrap();
        drop(evaluator);
        assert_eq!(spans, [0..65536, 65536..120_000]);
    }

    #[test]
    fn of_a_source_that_has_a_part_of_a_tensor_only_that_part_is_needed() {
        let has = 5000..9000;
        let read = |_, span: Range<u64>| {
            let is_there = has.start <= span.start && span.end <= has.end;
            let bytes = span.map(|at| at.to_le_bytes()[0]).collect();
            if is_there { Ok(bytes) } else { Err("not here".into()) }
        };
        let view = tensor(0, DType::U8, &[100_000]);
        let found = evaluate(&view, has.clone(), read).unwrap();
        assert_eq!(found, has.clone().map(|at| at.to_le_bytes()[0]).collect::<Vec<_>>());
        assert!(evaluate(&view, has.start - 1..has.end, read).is_err());
        assert!(evaluate(&view, has.start..has.end + 1, read).is_err());
    }

    #[test]
    fn failures_name_the_tensor_and_the_span() {
        let view = tensor(7, DType::U8, &[4]);
        let missing = evaluate(&view, 0..4, |_, _| Err("gone".into())).unwrap_err();
        assert_eq!(missing.to_string(), "tensor #7: bytes 0..4");
        assert_eq!(missing.source().unwrap().to_string(), "gone");
        let short = evaluate(&view, 0..4, |_, _| Ok(vec![0; 3])).unwrap_err();
        assert_eq!(short.to_string(), "tensor #7: asked for bytes 0..4, got 3 bytes");
        let none = |_, _: Range<u64>| Ok(Vec::new());
        let beyond = evaluate(&view, 2..5, none).unwrap_err();
        assert_eq!(beyond.to_string(), "bytes 2..5 of a view of 4 bytes");
        let odd = View::fill(Shape::try_new(&[3]).unwrap(), Element::zero(DType::F4));
        assert_eq!(evaluate(&odd, 0..1, none).unwrap_err().to_string(), "3 elements of F4 do not fill whole bytes");
        assert!(evaluate(&view, 3..3, none).unwrap().is_empty());
    }
}
