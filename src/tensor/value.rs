//! The value of one logical element of a quantized tensor, by definition.
//!
//! [`decode_scalar`] is the reference for all code that decodes many elements at a time.

use super::{
    BitOrder, Bits, Decode, Field, Load, Operand, Operation, Step, Term, Value,
    convert::{apply_constants, convert_scalar, element_bytes},
    float,
    kernel::row,
};

/// Bytes of an operand's tensor.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// Number of the first, counted from the tensor's first.
    pub start: u64,
}

impl<'a> Window<'a> {
    /// All bytes of a tensor.
    pub const fn whole(bytes: &'a [u8]) -> Self {
        Self { bytes, start: 0 }
    }

    /// The bytes from byte `at` of the tensor on.
    ///
    /// # Panics
    /// If the window ends before that byte. The needed bytes of a piece are determined before any read, which excludes this.
    pub(super) fn from(&self, at: u64) -> &'a [u8] {
        let found = at.checked_sub(self.start).and_then(|at| self.bytes.get(usize::try_from(at).ok()?..));
        let Some(found) = found else {
            panic!("byte {at} lies outside the window of {} bytes at {}", self.bytes.len(), self.start);
        };
        found
    }
}

/// Decodes element `n` to `target`, with one window per operand; of a plain program, the one window holds the element.
///
/// # Panics
/// If a window lacks bytes that the element needs, or a type does not convert.
pub fn decode_scalar(decode: &Decode, windows: &[Window<'_>], n: u64, target: &mut [u8]) {
    let element = |bytes: usize| &windows[0].from(n * bytes as u64)[..bytes];
    match decode {
        Decode::Copy => target.copy_from_slice(element(target.len())),
        Decode::Program(program) => match &program.load {
            Load::Element(dtype) => convert_scalar(program, element(element_bytes(*dtype)), target),
            Load::Value(value) => {
                let value = scalar(value, &mut windows.iter(), n);
                float::narrow_one(program.target, apply_constants(&program.steps, value), target);
            }
        },
    }
}

fn scalar<'a>(value: &Value, windows: &mut impl Iterator<Item = &'a Window<'a>>, n: u64) -> u32 {
    let window = next(windows);
    let loaded = match value.dot() {
        Some(right) => dot((&value.load, window), (right, next(windows)), n),
        None => stored(&value.load.field, window, value.load.index.at(n)),
    };
    value.steps.iter().fold(loaded, |left, step| match step {
        // It is the loaded value.
        Step::Dot(_) => left,
        Step::Compute(operation, Term::Value(value)) => row::one(*operation)(left, scalar(value, windows, n)),
        Step::Round(_) | Step::Exp | Step::Compute(_, Term::Constant(_)) => {
            apply_constants(std::slice::from_ref(step), left)
        }
    })
}

/// The sum of products of two operands for element `n`, as f32 bits.
fn dot((left, of_left): (&Operand, Window<'_>), (right, of_right): (&Operand, Window<'_>), n: u64) -> u32 {
    let (first, second) = (left.index.at(n), right.index.at(n));
    let strides = (left.index.terms().stride, right.index.terms().stride);
    let product = |term: u64| {
        let a = stored(&left.field, of_left, first + term * strides.0);
        let b = stored(&right.field, of_right, second + term * strides.1);
        row::one(Operation::Multiply)(a, b)
    };
    (1..left.index.terms().count).fold(product(0), |sum, term| row::one(Operation::Add)(sum, product(term)))
}

pub(super) fn next<'a>(windows: &mut impl Iterator<Item = &'a Window<'a>>) -> Window<'a> {
    let Some(window) = windows.next() else { panic!("fewer windows than operands") };
    *window
}

/// The stored element at an index, as f32 bits.
fn stored(field: &Field, window: Window<'_>, index: u64) -> u32 {
    match field {
        Field::Float(dtype) => {
            let bytes = element_bytes(*dtype);
            float::widen_one(*dtype, &window.from(index * bytes as u64)[..bytes])
        }
        Field::Integer(bits) => integer(*bits, code(*bits, window, index)),
        Field::Table(bits, table) => table[code(*bits, window, index) as usize],
    }
}

/// The field at bit `at`, as an unsigned number.
pub(super) fn code(bits: Bits, window: Window<'_>, at: u64) -> u32 {
    let bytes = window.from(at / 8);
    let (first, mask) = ((at % 8).to_le_bytes()[0], (1 << bits.width) - 1);
    if bits.order == BitOrder::HighFirst {
        return (u32::from(bytes[0]) >> (8 - bits.width - u32::from(first))) & mask;
    }
    let last = (u32::from(first) + bits.width - 1) / 8;
    let word = (0..=last as usize).fold(0, |word, at| word | u32::from(bytes[at]) << (8 * at));
    (word >> first) & mask
}

/// F32 bits of an integer code.
#[allow(clippy::cast_precision_loss, reason = "at most 16 bits")]
pub(super) fn integer(bits: Bits, code: u32) -> u32 {
    let sign = 32 - bits.width;
    let value = if bits.signed { ((code << sign).cast_signed() >> sign) as f32 } else { code as f32 };
    value.to_bits()
}
