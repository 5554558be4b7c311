//! The bytes of operands, and the codes in them.

use super::{BitOrder, Bits};

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

pub(super) fn next<'a>(windows: &mut impl Iterator<Item = &'a Window<'a>>) -> Window<'a> {
    let Some(window) = windows.next() else { panic!("fewer windows than operands") };
    *window
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
