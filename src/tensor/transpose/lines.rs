//! The lines that are transposed together: their bounds, their conversion, and prefetches along them.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "registers must stay registers")]

/// Bytes of a line of the processor's caches.
pub(crate) const CACHE_LINE_BYTES: usize = 64;
/// Lines that are transposed together, a cache line of each at a time: this number of 2-byte elements fills a cache line.
pub(crate) const BAND_LINES: usize = 32;

/// Lines of a source that are transposed together.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    pub(crate) source: &'a [u8],
    /// Source offset of each line, in bytes.
    pub(crate) offsets: &'a [usize],
    /// Bytes of one target element.
    pub(crate) unit: usize,
    /// Elements of each line, which become target lines.
    pub(crate) columns: usize,
    /// The conversion during the transpose; without one, source and target elements are equal.
    pub(crate) fused: Option<Fused<'a>>,
    /// Source offsets of the lines needed next. They are prefetched while these lines are processed, as processors do not
    /// prefetch so far ahead by themselves.
    pub(crate) ahead: &'a [usize],
}

/// A conversion to BF16 in registers.
#[derive(Clone, Copy)]
pub(crate) struct Fused<'a> {
    pub(crate) kind: FusedKind,
    /// The same conversion of any number of elements, for values that are not ordinary and for the edges of a block.
    pub(crate) exact: &'a dyn Fn(&[u8], &mut [u8]),
}

/// The kinds of fused conversions. Factors are normal numbers of at most 1, so that the product of a subnormal is subnormal or zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FusedKind {
    /// BF16 values times a factor.
    Multiply(f32),
    /// F32 values, rounded.
    Round,
    /// F32 values, rounded, times a factor.
    RoundMultiply(f32),
}

impl FusedKind {
    pub(super) fn source_unit(self) -> usize {
        match self {
            Self::Multiply(_) => 2,
            Self::Round | Self::RoundMultiply(_) => 4,
        }
    }
}

impl Lines<'_> {
    /// Bytes of one source element.
    pub(super) fn source_unit(&self) -> usize {
        self.fused.map_or(self.unit, |fused| fused.kind.source_unit())
    }

    /// Asserts that all lines lie in the source, and their target lines in `length` bytes.
    pub(super) fn check(&self, target_pitch: usize, length: usize) {
        assert!(self.fused.is_none() || self.unit == 2, "elements of {} bytes are no BF16", self.unit);
        let line = self.columns.checked_mul(self.source_unit());
        let end = |start: usize| start.checked_add(line?);
        let last = self.columns.saturating_sub(1).checked_mul(target_pitch);
        let target_end = last.and_then(|last| last.checked_add(self.offsets.len().checked_mul(self.unit)?));
        let fits = self.offsets.iter().all(|start| end(*start).is_some_and(|end| end <= self.source.len()))
            && target_end.is_some_and(|end| end <= length);
        assert!(
            fits,
            "{} lines of {} elements of {} bytes exceed {} source or {length} target bytes",
            self.offsets.len(),
            self.columns,
            self.source_unit(),
            self.source.len()
        );
    }
}

/// Prefetches the cache lines of `length` bytes from `start` on. Addresses beyond the source are useless, but harmless.
pub(crate) fn prefetch(source: &[u8], start: usize, length: usize) {
    for line in 0..length.div_ceil(CACHE_LINE_BYTES) {
        prefetch_line(source, start + line * CACHE_LINE_BYTES);
    }
}

/// Prefetches the cache line at `start`.
#[inline(always)]
pub(super) fn prefetch_line(source: &[u8], start: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch affects only the time of later loads, whatever the address.
    #[allow(unused_unsafe, reason = "safe where the compiler knows SSE to be enabled")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(source.as_ptr().wrapping_add(start).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, start);
}
