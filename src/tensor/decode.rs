//! The steps that turn source bytes into one target element.
//!
//! A decoder is either a plain copy or a *program*. A program loads a value as f32: exactly, except from f64, which is rounded
//! once as in torch. It applies the steps in order in f32, and rounds the result once to the target type. Rounding is to
//! nearest, ties to even, everywhere; a product and a sum are two roundings, never one. Layout operators do not occur
//! here: they commute with decoding and become the pieces of a tiling.
//!
//! A plain tensor is loaded element by element. A quantized one is a [`Value`]: codes, with scales, zero points or biases. So are
//! the sum and the product of two tensors.
//! Each of these is an [`Operand`] with its own tensor and its own [`IndexMap`], which maps the logical element `n` (its
//! row-major number) to a place in that tensor.

use std::sync::{Arc, LazyLock};

use smallvec::SmallVec;

use super::{DType, Shape, shape::to_usize};

/// Row of a checkpoint's tensor table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub u32);

/// A named array of the checkpoint, as views refer to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Its row in the tensor table.
    pub id: TensorId,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Shape,
}

/// How source elements become target elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Decode {
    /// Bytes are copied unchanged.
    Copy,
    /// Values are converted.
    Program(Program),
}

impl Decode {
    /// Bytes of one source element for a target element of `target_bytes` bytes, or `None` if sources are not whole elements
    /// of one tensor.
    pub fn source_bytes(&self, target_bytes: u64) -> Option<u64> {
        match self {
            Self::Copy => Some(target_bytes),
            Self::Program(Program { load: Load::Element(dtype), .. }) => dtype.element_bytes(),
            Self::Program(Program { load: Load::Value(_), .. }) => None,
        }
    }

    /// The stored value of a quantized tensor, if the decoder reads one.
    pub fn value(&self) -> Option<&Arc<Value>> {
        match self {
            Self::Program(Program { load: Load::Value(value), .. }) => Some(value),
            Self::Program(Program { load: Load::Element(_), .. }) | Self::Copy => None,
        }
    }
}

/// A conversion of one element: load as f32, apply the steps, round to the target.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The first value.
    pub load: Load,
    /// Arithmetic after the load, in order. Empty for a plain cast. The operands of these steps are constants.
    pub steps: Vec<Step>,
    /// Type of the elements written; a float type.
    pub target: DType,
}

/// The first value of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Load {
    /// Element `n` of the tensor that a piece names; of a float type.
    Element(DType),
    /// Element `n` of a quantized tensor.
    Value(Arc<Value>),
}

/// An f32 computed from stored elements: one is loaded, and the steps are applied in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// The first value.
    pub load: Operand,
    /// Arithmetic on it, in order.
    pub steps: Vec<Step>,
}

/// A stored tensor as a decoder reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// The tensor.
    pub tensor: SourceTensor,
    /// The type of one stored element. It need not be the tensor's dtype: packed codes are stored as integers of any width.
    pub field: Field,
    /// The index of the stored element for logical element `n`.
    pub index: IndexMap,
}

/// How a stored element is read as an f32.
#[derive(Clone, Debug, PartialEq)]
pub enum Field {
    /// A float of this type, or the bare exponent `F8_E8M0`. The index counts elements.
    Float(DType),
    /// An integer of a given width. The index counts bits.
    Integer(Bits),
    /// An f32 from a table of f32 bits, indexed by an unsigned code of a given width. The index counts bits.
    Table(Bits, Arc<[u32]>),
}

/// An integer of at most 16 bits in a stream of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits {
    /// Its width.
    pub width: u32,
    /// Whether it is a two's complement number.
    pub signed: bool,
    /// Which bit of a byte is the first.
    pub order: BitOrder,
}

/// Which bits of a byte come first in a stream of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitOrder {
    /// The lowest. A field may cross bytes: it is then a little-endian number.
    LowFirst,
    /// The highest. A field lies within one byte.
    HighFirst,
}

/// Widest integer field. All of its values are f32 numbers.
pub(crate) const FIELD_BITS_MAX: u32 = 16;

impl Bits {
    /// An unsigned field, low bits first.
    pub const fn unsigned(width: u32) -> Self {
        Self { width, signed: false, order: BitOrder::LowFirst }
    }
}

impl Field {
    /// Fields of 4 bits, low first, that hold the float `E2M1` of the OCP: a sign, two bits of exponent, one of mantissa.
    pub fn e2m1() -> Self {
        static TABLE: LazyLock<Arc<[u32]>> = LazyLock::new(|| {
            let magnitudes = [0.0_f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            magnitudes.iter().copied().chain(magnitudes.iter().map(|magnitude| -magnitude)).map(f32::to_bits).collect()
        });
        Self::Table(Bits::unsigned(4), Arc::clone(&TABLE))
    }

    /// Zero points stored one too small in fields of `width` bits, low first: the sum wraps within the field.
    pub fn one_more(width: u32) -> Self {
        let count = 1_u16 << width.min(FIELD_BITS_MAX - 1);
        let table = (0..count).map(|code| f32::from((code + 1) % count).to_bits());
        Self::Table(Bits::unsigned(width), table.collect())
    }

    /// Bits of a stored element.
    pub fn bits(&self) -> u64 {
        match self {
            Self::Float(dtype) => dtype.bits(),
            Self::Integer(bits) | Self::Table(bits, _) => u64::from(bits.width),
        }
    }

    /// Bits from one index to the next.
    pub fn index_bits(&self) -> u64 {
        match self {
            Self::Float(dtype) => dtype.bits(),
            Self::Integer(_) | Self::Table(..) => 1,
        }
    }
}

/// `a / b`, fast for the divisors of most digits.
#[inline]
pub(super) const fn over(a: u64, b: u64) -> u64 {
    if b == 1 { a } else { a / b }
}

/// `a % b`, fast if `a` is smaller than `b`.
#[inline]
pub(super) const fn within(a: u64, b: u64) -> u64 {
    if a < b { a } else { a % b }
}

/// `a / b`, rounded up, fast for most strides.
#[inline]
pub(super) const fn over_up(a: u64, b: u64) -> u64 {
    if b == 1 { a } else { a.div_ceil(b) }
}

/// One summand of an index. The coordinate of `n` on an axis is `x = n / divisor % modulus`. The digit is
/// `y = x / group % turn`. The summand is `stride` times `y`, or times entry `y` of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digit {
    /// Elements from one position on the axis to the next.
    pub divisor: u64,
    /// Extent of the axis.
    pub modulus: u64,
    /// Positions that have the same digit.
    pub group: u64,
    /// Number of digits after which they repeat.
    pub turn: u64,
    /// The amount by which the index grows when the digit grows by one.
    pub stride: u64,
    /// Replacements of the digits, as for the groups of act-order.
    pub table: Option<Arc<[u64]>>,
}

impl Digit {
    /// The position on an axis of a row-major shape, times `stride`.
    pub fn axis(shape: &[u64], axis: usize, stride: u64) -> Self {
        let divisor = shape.get(axis + 1..).unwrap_or_default().iter().product::<u64>().max(1);
        let modulus = shape.get(axis).copied().unwrap_or(1).max(1);
        Self { divisor, modulus, group: 1, turn: u64::MAX, stride, table: None }
    }

    /// A summand that is always `offset`: a digit with the one value 0, whose entry in the table is 1.
    pub fn constant(offset: u64) -> Self {
        Self { divisor: 1, modulus: 1, group: 1, turn: u64::MAX, stride: offset, table: Some(Arc::from([1])) }
    }

    /// This digit, equal for every `group` neighbours on the axis.
    #[must_use]
    pub fn grouped(self, group: u64) -> Self {
        Self { group, ..self }
    }

    /// This digit, repeating after `turn` digits.
    #[must_use]
    pub fn turning(self, turn: u64) -> Self {
        Self { turn, ..self }
    }

    /// This digit, replaced by the entries of a table.
    #[must_use]
    pub fn through(self, table: Arc<[u64]>) -> Self {
        Self { table: Some(table), ..self }
    }

    /// Elements from one start of the axis to the next.
    pub fn period(&self) -> u64 {
        self.divisor.saturating_mul(self.modulus)
    }

    /// Number of different digits.
    pub fn count(&self) -> u64 {
        self.modulus.div_ceil(self.group).min(self.turn)
    }

    /// The digit of element `n`.
    pub fn of(&self, n: u64) -> u64 {
        within(over(within(over(n, self.divisor), self.modulus), self.group), self.turn)
    }

    /// The amount that digit `y` adds to the index.
    ///
    /// # Panics
    /// If a table lacks the digit. Views exclude this.
    pub(crate) fn summand(&self, y: u64) -> u64 {
        let y = self.table.as_ref().map_or(y, |table| table[to_usize(y)]);
        y * self.stride
    }

    /// The greatest summand, or `None` if it overflows or a table lacks a digit.
    fn last(&self) -> Option<u64> {
        let count = self.count();
        let greatest = match &self.table {
            None => count - 1,
            Some(table) => *table.get(..usize::try_from(count).ok()?)?.iter().max()?,
        };
        greatest.checked_mul(self.stride)
    }
}

/// From a logical element to the index of a stored one: a sum of digits. Without digits it is always 0.
///
/// A factor of a sum of products has several stored elements for each logical one, its *terms*: the first at that index, the others
/// one after the other at a fixed distance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexMap {
    digits: Arc<[Digit]>,
    terms: Terms,
}

/// The stored elements of one logical element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// Their number.
    pub count: u64,
    /// The distance of each from the one before.
    pub stride: u64,
}

impl Terms {
    /// A single stored element.
    pub const ONE: Self = Self { count: 1, stride: 0 };
}

/// That a digit divides by zero, or its table is too short.
fn wrong_digit(number: usize) -> String {
    format!("digit {number} of its index divides by zero, overflows or has a table that is too short")
}

/// That values of a type have none in f32.
fn not_float(dtype: DType) -> String {
    format!("{dtype} values are not converted")
}

/// That the two sides of a sum of products have different numbers of terms, or none, or a value that is no such sum has several.
fn wrong_terms(one: u64, other: u64) -> String {
    format!("a sum of products with {one} terms on one side and {other} on the other")
}

impl IndexMap {
    /// The sum of these digits.
    pub fn new(digits: &[Digit]) -> Self {
        Self { digits: digits.into(), terms: Terms::ONE }
    }

    /// These digits, with several stored elements for each logical one.
    #[must_use]
    pub(crate) fn with_terms(self, terms: Terms) -> Self {
        Self { terms, ..self }
    }

    /// The digits.
    pub fn digits(&self) -> &[Digit] {
        &self.digits
    }

    /// The stored elements of each logical one.
    pub const fn terms(&self) -> Terms {
        self.terms
    }

    /// Whether the index is a sum of positions on axes, each times a number, and of constants.
    pub(super) fn is_affine(&self) -> bool {
        let is_plain = |digit: &Digit| digit.group == 1 && digit.turn >= digit.modulus && digit.table.is_none();
        self.digits.iter().all(|digit| is_plain(digit) || digit.modulus == 1)
    }

    /// The index of element `n`, of its first term.
    ///
    /// # Panics
    /// If a table lacks a digit. Views exclude this.
    pub fn at(&self, n: u64) -> u64 {
        self.digits.iter().map(|digit| digit.summand(digit.of(n))).sum()
    }

    /// The strides, in elements, at which axes of the digits repeat and at which their positions change. Each divides the one before.
    pub(super) fn borders(&self) -> impl Iterator<Item = u64> {
        let mut borders: SmallVec<[u64; 8]> =
            self.digits.iter().flat_map(|digit| [digit.period(), digit.divisor]).filter(|border| *border > 1).collect();
        borders.sort_unstable_by(|a, b| b.cmp(a));
        borders.dedup();
        borders.into_iter()
    }

    /// The greatest index.
    fn last(&self) -> Result<u64, String> {
        let last_term = self.terms.count.saturating_sub(1).checked_mul(self.terms.stride);
        let mut sum = last_term.ok_or_else(|| wrong_digit(0))?;
        for (at, digit) in self.digits.iter().enumerate() {
            let positive = [digit.divisor, digit.modulus, digit.group, digit.turn].iter().all(|number| *number > 0);
            let last = if positive { digit.last() } else { None };
            sum = last.and_then(|last| sum.checked_add(last)).ok_or_else(|| wrong_digit(at))?;
        }
        let mut borders = self.borders();
        let mut outer = borders.next();
        while let (Some(coarse), Some(fine)) = (outer, borders.next()) {
            if !coarse.is_multiple_of(fine) {
                let axes = format!("one begins every {coarse} elements, another every {fine}");
                return Err(format!("the axes of its index do not nest: {axes}"));
            }
            outer = Some(fine);
        }
        Ok(sum)
    }
}

impl Operand {
    /// The elements of a tensor, unchanged.
    pub fn elements(tensor: SourceTensor) -> Self {
        let index = IndexMap::new(&[Digit::axis(&[tensor.shape.elements()], 0, 1)]);
        Self { field: Field::Float(tensor.dtype), tensor, index }
    }

    /// Bits of the tensor.
    pub(super) fn tensor_bits(&self) -> u64 {
        self.tensor.shape.elements() * self.tensor.dtype.bits()
    }

    /// Checks that every element has a place in the tensor.
    fn check(&self) -> Result<(), String> {
        let (bits, table) = match &self.field {
            Field::Float(dtype) if dtype.is_float() || *dtype == DType::F8E8M0 => (None, None),
            Field::Float(dtype) => return Err(not_float(*dtype)),
            Field::Integer(bits) => (Some(bits), None),
            Field::Table(bits, table) => (Some(bits), Some(table.len())),
        };
        if let Some(bits) = bits {
            let whole = bits.order == BitOrder::LowFirst || matches!(bits.width, 1 | 2 | 4 | 8);
            let known = (1..=FIELD_BITS_MAX).contains(&bits.width) && whole;
            let is_short = table.is_some_and(|entries| entries < 1 << bits.width);
            // A high-first field must not cross bytes: all summands of its index are multiples of its width.
            let crosses = bits.order == BitOrder::HighFirst
                && self.index.digits().iter().any(|digit| !digit.stride.is_multiple_of(u64::from(bits.width)));
            if !known || is_short || crosses {
                let read =
                    "at most 16 bits are read, high first only of 1, 2, 4 or 8, tables have an entry for each code";
                let width = bits.width;
                return Err(format!("fields of {width} bits with a table of {table:?} entries: {read}"));
            }
        }
        let last = self.index.last()?;
        let needed = last.checked_mul(self.field.index_bits()).and_then(|bits| bits.checked_add(self.field.bits()));
        let needed_bits = needed.unwrap_or(u64::MAX);
        if needed_bits > self.tensor_bits() {
            let (found_bits, SourceTensor { dtype, shape, .. }) = (self.tensor_bits(), &self.tensor);
            return Err(format!("reads {needed_bits} bits of a tensor {dtype} {shape}, which has {found_bits}"));
        }
        Ok(())
    }
}

impl Value {
    /// A stored element, unchanged.
    pub fn of(load: Operand) -> Self {
        Self { load, steps: Vec::new() }
    }

    /// This value with one more step.
    #[must_use]
    pub fn then(mut self, operation: Operation, by: impl Into<Term>) -> Self {
        self.steps.push(Step::Compute(operation, by.into()));
        self
    }

    /// The second factor, if this is a sum of products of two operands.
    pub fn dot(&self) -> Option<&Operand> {
        if let Some(Step::Dot(operand)) = self.steps.first() { Some(operand) } else { None }
    }

    /// The scale, if this is a stored float of `codes` times a scale.
    pub fn scale_of(&self, codes: DType) -> Option<&Self> {
        match self.steps.as_slice() {
            [Step::Compute(Operation::Multiply, Term::Value(scale))] => {
                (self.load.field == Field::Float(codes)).then_some(scale)
            }
            _ => None,
        }
    }

    /// Whether each `run` neighbours, from a multiple of `run` on, have the same stored elements and so the same value.
    pub(super) fn is_shared_by(&self, run: u64) -> bool {
        let mut shared = true;
        self.for_each_operand(&mut |operand| {
            let digits = operand.index.digits();
            let in_runs = |digit: &Digit| {
                digit.divisor.saturating_mul(digit.group).is_multiple_of(run) && digit.period().is_multiple_of(run)
            };
            shared &= digits.iter().all(in_runs);
        });
        shared
    }

    /// Calls `visit` with each operand, in the order of the kernels' windows: the loaded one comes first.
    pub fn for_each_operand<'a>(&'a self, visit: &mut dyn FnMut(&'a Operand)) {
        visit(&self.load);
        for step in &self.steps {
            match step {
                Step::Compute(_, Term::Value(value)) => value.for_each_operand(visit),
                Step::Dot(operand) => visit(operand),
                Step::Compute(_, Term::Constant(_)) | Step::Round(_) | Step::Exp => {}
            }
        }
    }

    /// This value with other operands: `map` returns the replacement of each, in the order of [`Self::for_each_operand`].
    #[must_use]
    pub fn map_operands(&self, map: &mut dyn FnMut(&Operand) -> Operand) -> Self {
        let load = map(&self.load);
        let steps = self.steps.iter().map(|step| match step {
            Step::Compute(operation, Term::Value(value)) => Step::Compute(*operation, value.map_operands(map).into()),
            Step::Dot(operand) => Step::Dot(map(operand).into()),
            Step::Compute(_, Term::Constant(_)) | Step::Round(_) | Step::Exp => step.clone(),
        });
        Self { load, steps: steps.collect() }
    }

    /// Checks that every operand can be read for every logical element.
    ///
    /// # Errors
    /// The tensor of the first operand that cannot, and why.
    pub fn check(&self) -> Result<(), (TensorId, String)> {
        let of_this = |error| (self.load.tensor.id, error);
        self.load.check().map_err(of_this)?;
        if let (Some(_), Field::Integer(_) | Field::Table(..)) = (self.dot(), &self.load.field) {
            return Err(of_this(not_float(self.load.tensor.dtype)));
        }
        let terms = self.load.index.terms().count;
        let others = self.dot().map_or(1, |operand| operand.index.terms().count);
        if terms != others || terms == 0 {
            return Err(of_this(wrong_terms(terms, others)));
        }
        let after_first = self.steps.iter().skip(1);
        if let Some(Step::Dot(operand)) = after_first.into_iter().find(|step| matches!(step, Step::Dot(_))) {
            return Err((operand.tensor.id, wrong_terms(1, operand.index.terms().count)));
        }
        self.steps.iter().try_for_each(|step| match step {
            Step::Round(dtype) if !dtype.is_float() => Err(of_this(not_float(*dtype))),
            Step::Dot(operand) => match operand.field {
                Field::Float(_) => operand.check().map_err(|error| (operand.tensor.id, error)),
                Field::Integer(_) | Field::Table(..) => Err((operand.tensor.id, not_float(operand.tensor.dtype))),
            },
            Step::Compute(_, Term::Value(value)) => value.check(),
            Step::Round(_) | Step::Exp | Step::Compute(_, Term::Constant(_)) => Ok(()),
        })
    }
}

/// One arithmetic step on an f32 value.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Round to this float type and widen again.
    Round(DType),
    /// One operation in f32 with the value as left operand and a term as right operand.
    Compute(Operation, Term),
    /// The f32 nearest to `e` to the power of the value.
    Exp,
    /// The sum of products of the terms of the loaded operand and those of this one, which are as many: the first product, plus the
    /// second, plus the third and so on. Each product and each sum is rounded to f32. Only the first step of a value can be this one.
    Dot(Box<Operand>),
}

/// Arithmetic in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The product.
    Multiply,
    /// The product, with subnormal operands and products replaced by zero of the same sign, as XLA computes on CPUs.
    MultiplyFlush,
    /// The quotient.
    Divide,
    /// The sum.
    Add,
    /// The difference.
    Subtract,
}

/// The right operand of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Term {
    /// The bits of an f32: a product with -0 is not one with 0.
    Constant(u32),
    /// The value of the same logical element from other tensors.
    Value(Box<Value>),
}

impl From<f32> for Term {
    fn from(constant: f32) -> Self {
        Self::Constant(constant.to_bits())
    }
}

impl From<Value> for Term {
    fn from(value: Value) -> Self {
        Self::Value(Box::new(value))
    }
}

impl From<Operand> for Term {
    fn from(operand: Operand) -> Self {
        Value::of(operand).into()
    }
}

impl Step {
    /// The product with a constant.
    pub const fn multiply(factor: f32, flush: bool) -> Self {
        let operation = if flush { Operation::MultiplyFlush } else { Operation::Multiply };
        Self::Compute(operation, Term::Constant(factor.to_bits()))
    }

    /// The sum with a constant.
    pub const fn add(addend: f32) -> Self {
        Self::Compute(Operation::Add, Term::Constant(addend.to_bits()))
    }
}

/// The index of the scale of each element of a matrix in blocks. Element `[i, j]` has scale
/// `[i / block.0, j / block.1]`. The last block of either axis may be partial.
///
/// The formula is that of DeepSeek's `weight_dequant` (`inference/kernel.py` of its repositories); the block comes from
/// `quantization_config.weight_block_size`, never from dividing the shapes.
pub fn block_index(rows: u64, columns: u64, block: (u64, u64)) -> IndexMap {
    let (shape, width) = ([rows, columns], columns.div_ceil(block.1));
    IndexMap::new(&[Digit::axis(&shape, 0, width).grouped(block.0), Digit::axis(&shape, 1, 1).grouped(block.1)])
}
