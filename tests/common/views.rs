//! Random views.
//!
//! A view is drawn top-down: for a wanted shape and dtype some operator that yields it is chosen, then its operands
//! likewise. All choices come from a list of numbers; after its end they are zero, and zero always means the simplest choice.
//! proptest thus shrinks a failing view by shortening the list and lowering its numbers.

use std::{fmt, ops::Deref};

use ckfs::tensor::{
    BitOrder, Bits, DType, Digit, Element, Field, IndexMap, Keep, Operand, Operation, Shape, SourceTensor, Step,
    TensorId, Value, View,
};
use proptest::prelude::*;

/// Most elements of a drawn shape.
const ELEMENTS_MAX: u64 = 400;

const FLOATS: [DType; 8] = [
    DType::BF16,
    DType::F32,
    DType::F16,
    DType::F8E4M3,
    DType::F64,
    DType::F8E5M2,
    DType::F8E4M3Fnuz,
    DType::F8E5M2Fnuz,
];

/// A supply of choices.
#[derive(Clone, Debug)]
pub struct Choices {
    numbers: std::vec::IntoIter<u32>,
    tensors: u32,
    /// Whether views have no quantized tensors.
    plain: bool,
}

impl Choices {
    pub fn new(numbers: Vec<u32>) -> Self {
        Self { numbers: numbers.into_iter(), tensors: 0, plain: false }
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        u64::from(self.numbers.next().unwrap_or(0)) % limit
    }

    /// The same for indexes.
    pub fn index(&mut self, limit: usize) -> usize {
        self.below(limit as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    pub fn permutation(&mut self, rank: usize) -> Vec<usize> {
        let mut axes: Vec<usize> = (0..rank).collect();
        for at in 1..rank {
            let other = at - self.index(at + 1);
            axes.swap(at, other);
        }
        axes
    }

    fn tensor(&mut self, dtype: DType, extents: &[u64]) -> SourceTensor {
        self.tensors += 1;
        SourceTensor { id: TensorId(self.tensors), dtype, shape: Shape::try_new(extents).unwrap() }
    }

    /// Rank 0 to 5, extents 0 to 7, few of them 0.
    pub fn extents(&mut self) -> Vec<u64> {
        let mut extents = Vec::new();
        let mut elements = 1;
        for _ in 0..self.below(6) {
            let extent = self.of(&[2, 3, 1, 4, 5, 6, 7, 2, 3, 1, 4, 6, 2, 3, 4, 0]);
            elements *= extent.max(1);
            if elements > ELEMENTS_MAX {
                break;
            }
            extents.push(extent);
        }
        extents
    }

    /// Extents with as many elements as `extents`.
    fn regrouped(&mut self, extents: &[u64]) -> Vec<u64> {
        let elements: u64 = extents.iter().product();
        if elements == 0 {
            let mut extents = self.extents();
            extents.truncate(4);
            let at = self.index(extents.len() + 1);
            extents.insert(at, 0);
            return extents;
        }
        let mut primes = Vec::new();
        let mut rest = elements;
        for prime in [2, 3, 5, 7, 11, 13, 17, 19] {
            while rest.is_multiple_of(prime) {
                primes.push(prime);
                rest /= prime;
            }
        }
        primes.push(rest);
        let rank = self.index(5) + 1;
        let mut extents = vec![1; rank];
        for prime in primes {
            let axis = self.index(rank);
            extents[axis] *= prime;
        }
        extents
    }

    fn constant(&mut self) -> f32 {
        self.of(&[1.0, -2.5, 0.088_388_35, 1e-3, 3e38, 1e-40, 0.0, f32::INFINITY, -1.0, 45.254_834])
    }

    fn element(&mut self, dtype: DType) -> Element {
        let Some(width) = dtype.element_bytes() else { return Element::zero(dtype) };
        let seed = self.below(1 << 20);
        Element::from_bytes(dtype, &seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[..width as usize]).unwrap()
    }

    /// A view of the given shape and dtype, at most `depth` operators high. Layout operators touch only the axes before the
    /// last `kept` ones.
    pub fn view(&mut self, extents: &[u64], dtype: DType, depth: u32, kept: usize) -> View {
        let choice = if depth == 0 { 0 } else { self.below(25) };
        let deeper = depth.saturating_sub(1);
        let free = extents.len() - kept;
        let some_axis = free > 0;
        match choice {
            0 => self.source(extents, dtype),
            1 | 2 if some_axis => self.sliced(extents, dtype, deeper, kept),
            3 | 4 => {
                let mut axes = self.permutation(free);
                axes.extend(free..extents.len());
                let mut inner = vec![0; extents.len()];
                axes.iter().zip(extents).for_each(|(axis, extent)| inner[*axis] = *extent);
                self.view(&inner, dtype, deeper, kept).transpose(&axes).unwrap()
            }
            8 | 9 if some_axis => {
                let axis = self.index(free);
                let mut inner = extents.to_vec();
                let count = inner.remove(axis);
                if count == 0 || count > 8 {
                    return self.view(extents, dtype, deeper, kept);
                }
                let of: Vec<View> = (0..count).map(|_| self.view(&inner, dtype, deeper, kept)).collect();
                View::stack(axis, &of).unwrap()
            }
            10 if some_axis => {
                let axis = self.index(free);
                let mut rest = extents[axis];
                let mut of = Vec::new();
                while of.is_empty() || (rest > 0 && of.len() < 4) {
                    let mut inner = extents.to_vec();
                    inner[axis] = if of.len() == 3 { rest } else { self.below(rest + 1) };
                    rest -= inner[axis];
                    of.push(self.view(&inner, dtype, deeper, kept));
                }
                if rest > 0 {
                    let mut inner = extents.to_vec();
                    inner[axis] = rest;
                    of.push(self.view(&inner, dtype, deeper, kept));
                }
                View::concat(axis, &of).unwrap()
            }
            11 if some_axis => {
                let axis = self.index(free);
                let before = self.below(extents[axis] + 1);
                let after = self.below(extents[axis] - before + 1);
                let mut inner = extents.to_vec();
                inner[axis] -= before + after;
                self.view(&inner, dtype, deeper, kept).pad(axis, before, after).unwrap()
            }
            12 => View::fill(Shape::try_new(extents).unwrap(), self.element(dtype)),
            13 if dtype.is_float() => {
                let from = self.of(&FLOATS);
                self.view(extents, from, deeper, kept).cast(dtype).unwrap()
            }
            14 | 15 if dtype.is_float() => {
                let (from, keep) =
                    if dtype == DType::F32 { (self.of(&FLOATS), Keep::F32) } else { (dtype, Keep::Operand) };
                let operand = self.view(extents, from, deeper, kept);
                let constant = self.constant();
                if choice == 14 {
                    let flush = self.below(2) == 1;
                    operand.multiply(constant, flush, keep).unwrap()
                } else {
                    operand.add(constant, keep).unwrap()
                }
            }
            20 | 21 if dtype.is_float() && !self.plain => {
                // Only tensors that are stored element by element are combined.
                self.plain = true;
                let view = self.pair(extents, dtype, deeper, kept);
                self.plain = false;
                view
            }
            20 | 21 if dtype.is_float() => self.pair(extents, dtype, deeper, kept),
            22 if dtype.is_float() => self.view(extents, dtype, deeper, kept).exp().unwrap(),
            23 | 24 if some_axis => self.gathered(extents, dtype, deeper, kept),
            16 if dtype.is_float() && extents.len() == 2 && !self.plain => self.dequantized(extents, dtype),
            17 if dtype.is_float() && extents.len() == 2 => self.product(extents).cast(dtype).unwrap(),
            18 | 19 if dtype.is_float() && !self.plain => self.quantized(extents).cast(dtype).unwrap(),
            _ => {
                let mut inner = self.regrouped(&extents[..free]);
                inner.extend_from_slice(&extents[free..]);
                self.view(&inner, dtype, deeper, kept).reshape(&Shape::try_new(extents).unwrap()).unwrap()
            }
        }
    }

    /// The sum or the product of two views.
    fn pair(&mut self, extents: &[u64], dtype: DType, deeper: u32, kept: usize) -> View {
        let (from, keep) = if dtype == DType::F32 { (self.of(&FLOATS), Keep::F32) } else { (dtype, Keep::Operand) };
        let left = self.view(extents, from, deeper, kept);
        // Often of the same cuts, so that parts meet in many ways.
        let right = match self.below(6) {
            0 => left.clone(),
            1 => View::fill(Shape::try_new(extents).unwrap(), self.element(from)),
            _ => self.view(extents, from, deeper, kept),
        };
        let (left, right) = if self.below(4) == 0 { (right, left) } else { (left, right) };
        match self.below(3) {
            0 => left.add_view(&right, keep).unwrap(),
            flush => left.multiply_view(&right, flush == 1, keep).unwrap(),
        }
    }

    /// Elements of an axis by their indexes, downwards, or in any order.
    fn gathered(&mut self, extents: &[u64], dtype: DType, deeper: u32, kept: usize) -> View {
        let axis = self.index(extents.len() - kept);
        let count = extents[axis];
        let large = extents.iter().product::<u64>() > 4000;
        let mut inner = extents.to_vec();
        if self.below(2) == 0 {
            let step = if large { 1 } else { self.of(&[1, 2, 3]) };
            let stop = self.below(3).cast_signed() - 1;
            let start = stop + if count == 0 { 0 } else { ((count - 1) * step + 1 + self.below(step)).cast_signed() };
            inner[axis] = (start + 1).cast_unsigned() + self.below(3);
            return self.view(&inner, dtype, deeper, kept).slice_down(axis, start, stop, step).unwrap();
        }
        inner[axis] = if large { count.max(1) } else { self.below(2 * count + 1) + 1 };
        let mut indexes: Vec<u64> = Vec::new();
        while (indexes.len() as u64) < count {
            // A new place, or a run on from the one before.
            let next = match (self.below(4), indexes.last()) {
                (1, Some(last)) if last + 1 < inner[axis] => last + 1,
                (2, Some(last)) if *last >= 1 => last - 1,
                (3, Some(last)) => *last,
                _ => self.below(inner[axis]),
            };
            indexes.push(next);
        }
        self.view(&inner, dtype, deeper, kept).gather(axis, &indexes).unwrap()
    }

    fn source(&mut self, extents: &[u64], dtype: DType) -> View {
        let group = dtype.unit().elements;
        if extents.iter().product::<u64>().is_multiple_of(group) {
            return View::source(self.tensor(dtype, extents));
        }
        // A tensor holds whole bytes: take one of several elements instead.
        let mut larger = extents.to_vec();
        larger.push(group);
        let which = self.below(group);
        let cut = View::source(self.tensor(dtype, &larger)).slice(extents.len(), which, which + 1, 1).unwrap();
        cut.reshape(&Shape::try_new(extents).unwrap()).unwrap()
    }

    fn sliced(&mut self, extents: &[u64], dtype: DType, deeper: u32, kept: usize) -> View {
        let axis = self.index(extents.len() - kept);
        // The operand of a slice is larger than the slice; this bound keeps its generation fast.
        let large = extents.iter().product::<u64>() > 4000;
        let step = if large { 1 } else { self.of(&[1, 2, 3, 1, 4]) };
        let start = self.below(4);
        let tail = self.below(3);
        let mut inner = extents.to_vec();
        let reach = if extents[axis] == 0 { 0 } else { (extents[axis] - 1) * step + 1 };
        inner[axis] = start + reach + tail;
        let stop = if reach == 0 { start } else { start + reach + tail.min(step - 1) };
        self.view(&inner, dtype, deeper, kept).slice(axis, start, stop, step).unwrap()
    }

    /// The product of two matrices.
    pub fn product(&mut self, extents: &[u64]) -> View {
        let terms = self.of(&[1, 2, 3, 8, 17]);
        let dtypes = [DType::BF16, DType::F32, DType::F16, DType::F8E4M3];
        let (left, right) = (self.of(&dtypes), self.of(&dtypes));
        let (left, right) = (self.tensor(left, &[extents[0], terms]), self.tensor(right, &[terms, extents[1]]));
        View::matrix_product(&View::source(left), &View::source(right)).unwrap()
    }

    /// A matrix to which a product of two others is added, as an adapter is merged.
    pub fn merged(&mut self, extents: &[u64; 2]) -> View {
        let is_transposed = self.below(3) == 1;
        let added =
            if is_transposed { self.product(&[extents[1], extents[0]]).reverse_axes() } else { self.product(extents) };
        let added = added.multiply(self.constant(), false, Keep::F32).unwrap();
        let base = self.of(&[DType::BF16, DType::F32, DType::F16]);
        let base = View::source(self.tensor(base, extents)).cast(DType::F32).unwrap();
        let dtype = self.of(&[DType::BF16, DType::F32, DType::F16, DType::F8E4M3]);
        base.add_view(&added, Keep::F32).unwrap().cast(dtype).unwrap()
    }

    /// A larger merged matrix under some layout operators.
    pub fn merged_view(&mut self) -> View {
        let extents = [self.of(&[3, 1, 8, 9, 20]), self.of(&[64, 96, 100, 37, 1040, 2048, 7])];
        let view = self.merged(&extents);
        self.laid_out(view)
    }

    fn dequantized(&mut self, extents: &[u64], dtype: DType) -> View {
        let quantized = self.of(&[DType::F8E4M3, DType::F8E5M2, DType::BF16, DType::F8E4M3Fnuz]);
        let scale = self.of(&[DType::F32, DType::BF16, DType::F8E8M0, DType::F16]);
        let block = (self.below(4) + 1, self.below(4) + 1);
        let grid = [extents[0].div_ceil(block.0), extents[1].div_ceil(block.1)];
        let (weights, scales) = (self.tensor(quantized, extents), self.tensor(scale, &grid));
        View::dequantize(weights, scales, block, dtype).unwrap()
    }

    /// A tensor decoded from random operands.
    pub fn quantized(&mut self, extents: &[u64]) -> View {
        let value = self.value(extents, 2);
        View::quantized(Shape::try_new(extents).unwrap(), value).unwrap()
    }

    fn value(&mut self, extents: &[u64], depth: u32) -> Value {
        let mut value = Value::of(self.operand(extents));
        for _ in 0..self.below(4) {
            let operation = self.of(&[
                Operation::Multiply,
                Operation::Subtract,
                Operation::Divide,
                Operation::Add,
                Operation::MultiplyFlush,
            ]);
            value = match self.below(4) {
                0 => value.then(operation, self.constant()),
                1 => {
                    value.steps.push(Step::Round(self.of(&[DType::BF16, DType::F16, DType::F8E4M3])));
                    value
                }
                _ if depth > 0 => {
                    let by = self.value(extents, depth - 1);
                    value.then(operation, by)
                }
                _ => value,
            };
        }
        value
    }

    fn field(&mut self) -> Field {
        let order = self.of(&[BitOrder::LowFirst, BitOrder::LowFirst, BitOrder::HighFirst]);
        let width = match order {
            BitOrder::LowFirst => self.of(&[4, 8, 4, 2, 3, 1, 5, 6, 7, 16, 11]),
            BitOrder::HighFirst => self.of(&[4, 8, 2, 1]),
        };
        let bits = Bits { width, signed: self.below(3) == 1, order };
        match self.below(4) {
            0 => Field::Integer(bits),
            1 if width <= 8 => {
                let mut bit = 0x9e37_79b9u32;
                let table = (0..1 << width).map(|_| {
                    bit = bit.rotate_left(7).wrapping_mul(0x85eb_ca6b) ^ width;
                    bit
                });
                Field::Table(bits, table.collect())
            }
            1 => Field::e2m1(),
            _ => Field::Float(self.of(&[DType::F32, DType::BF16, DType::F8E8M0, DType::F8E4M3, DType::F16])),
        }
    }

    /// A tensor packed along the axes in some order, each with all positions, groups, words of shuffled fields, or a table.
    fn operand(&mut self, extents: &[u64]) -> Operand {
        let field = self.field();
        let elements: u64 = extents.iter().product();
        let unit = field.bits() / field.index_bits();
        let mut stride = unit;
        let mut digits = Vec::new();
        if self.below(4) == 1 && elements > 0 {
            let group = self.of(&[1, 1, 2, 4, 3, 32]);
            digits.push(Digit::axis(&[elements], 0, stride).grouped(group));
            stride *= elements.div_ceil(group);
        } else {
            let mut axes = self.permutation(extents.len());
            axes.reverse();
            for axis in axes {
                let (extent, digit) = (extents[axis].max(1), Digit::axis(extents, axis, stride));
                match self.below(6) {
                    1 => {
                        let group = self.below(4) + 1;
                        digits.push(digit.grouped(group));
                        stride *= extent.div_ceil(group);
                    }
                    2 => {
                        let (fine, coarse) = (self.of(&[2, 4, 3]), self.of(&[4, 2, 1]));
                        let word = fine * coarse;
                        digits.push(Digit { stride: stride * coarse, ..digit.clone() }.turning(fine));
                        digits.push(digit.clone().grouped(fine).turning(coarse));
                        digits.push(Digit { stride: stride * word, ..digit }.grouped(word));
                        stride *= extent.div_ceil(word) * word;
                    }
                    3 => {
                        let count = self.below(5) + 1;
                        let table: Vec<u64> = (0..extent).map(|_| self.below(count)).collect();
                        digits.push(digit.through(table.into()));
                        stride *= count;
                    }
                    4 => {}
                    _ => {
                        digits.push(digit);
                        stride *= extent;
                    }
                }
                if self.below(4) == 1 && axis == extents.len() - 1 {
                    // Rows of whole words.
                    stride = stride.next_multiple_of(32 * unit);
                }
            }
        }
        let bits = stride * field.index_bits();
        let tensor = match &field {
            Field::Float(dtype) => self.tensor(*dtype, &[stride]),
            Field::Integer(_) | Field::Table(..) => self.tensor(DType::U8, &[bits.div_ceil(8)]),
        };
        Operand { tensor, field, index: IndexMap::new(&digits) }
    }

    /// A larger quantized matrix under some layout operators.
    pub fn quantized_view(&mut self) -> View {
        let extents = [self.of(&[3, 1, 8, 9, 20]), self.of(&[64, 96, 100, 37, 1040, 2048, 7])];
        let dtype = self.of(&[DType::BF16, DType::F32, DType::F16, DType::F8E4M3]);
        let view = self.quantized(&extents).cast(dtype).unwrap();
        self.laid_out(view)
    }

    fn laid_out(&mut self, mut view: View) -> View {
        for _ in 0..self.below(4) {
            let extents = view.shape().extents().to_vec();
            let axis = self.index(extents.len());
            view = match self.below(6) {
                0 => view.reverse_axes(),
                1 | 2 => {
                    let start = self.below(extents[axis]);
                    let stop = start + 1 + self.below(extents[axis] - start);
                    view.slice(axis, start, stop, self.of(&[1, 1, 2, 3])).unwrap()
                }
                3 => view.pad(axis, self.below(3), self.below(3)).unwrap(),
                4 => {
                    let shape = Shape::try_new(&self.regrouped(&extents)).unwrap();
                    view.reshape(&shape).unwrap()
                }
                _ => View::concat(axis, &[view.clone(), view]).unwrap(),
            };
        }
        view
    }

    /// A view without quantized tensors.
    pub fn plain_view(&mut self, extents: &[u64], dtype: DType) -> View {
        self.plain = true;
        let depth = self.below(5) as u32 + 1;
        let view = self.view(extents, dtype, depth, 0);
        self.plain = false;
        view
    }

    /// A view of a random shape and dtype. For types narrower than a byte the last axis holds whole bytes, and with
    /// `aligned` no operator takes it apart, so that the view has a tiling.
    pub fn any_view(&mut self, aligned: bool) -> View {
        let float = self.below(3) > 0;
        let dtype = if float { self.of(&FLOATS) } else { self.of(DType::ALL) };
        self.any_view_of(dtype, aligned)
    }

    pub fn any_view_of(&mut self, dtype: DType, aligned: bool) -> View {
        let mut extents = self.extents();
        let group = dtype.unit().elements;
        let mut kept = 0;
        if group > 1 {
            extents.push(group * (self.below(3) + 1));
            kept = usize::from(aligned);
        }
        let depth = self.below(9) as u32 + 1;
        self.view(&extents, dtype, depth, kept)
    }
}

/// A drawn view, shown as its expression.
pub struct Drawn(View);

impl Deref for Drawn {
    type Target = View;

    fn deref(&self) -> &View {
        &self.0
    }
}

impl fmt::Debug for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut result = write!(f, "{} {} = {}", self.dtype(), self.shape(), self.0);
        self.for_each_source(&mut |tensor| {
            result = result.and_then(|()| write!(f, "; #{} is {} {}", tensor.id.0, tensor.dtype, tensor.shape));
        });
        result
    }
}

/// Lists of choices for one view.
pub fn choices() -> impl Strategy<Value = Choices> {
    proptest::collection::vec(any::<u32>(), 0..400).prop_map(Choices::new)
}

/// Views that have a tiling.
pub fn any_view() -> impl Strategy<Value = Drawn> {
    choices().prop_map(|mut choices| Drawn(choices.any_view(true)))
}

/// Views of floats, for element operators.
pub fn any_float_view() -> impl Strategy<Value = Drawn> {
    choices().prop_map(|mut choices| {
        let dtype = choices.of(&FLOATS);
        Drawn(choices.any_view_of(dtype, true))
    })
}
