//! Transposes of small blocks within the first-level cache.
//!
//! Element `c` of line `r` goes to `target[c * pitch + r]`. Elements of 1, 2, 4 and 8 bytes are transposed in registers on
//! x86-64, whose baseline has the instructions, and in wider registers where available. All others, and the edges of a block,
//! are transposed one by one.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "registers must stay registers")]

use super::kernel::Level;

/// Bytes of a line of the processor's caches.
const CACHE_LINE_BYTES: usize = 64;
/// Bytes from one target line to the next in nearly all blocks. With this constant pitch stores need no address arithmetic.
pub(super) const USUAL_PITCH: usize = 320;
/// Lines that are transposed together, a cache line of each at a time: this number of 2-byte elements fills a cache line.
pub(super) const BAND_LINES: usize = 32;
/// Prefetch distance in each line.
const LOOK_AHEAD_BYTES: usize = 2 * CACHE_LINE_BYTES;
/// Elements at the edge of a block that are converted together.
const EDGE_ELEMENTS: usize = 64;

/// Lines of a source that are transposed together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines<'a> {
    pub(super) source: &'a [u8],
    /// Source offset of each line, in bytes.
    pub(super) offsets: &'a [usize],
    /// Bytes of one target element.
    pub(super) unit: usize,
    /// Elements of each line, which become target lines.
    pub(super) columns: usize,
    /// The conversion during the transpose; without one, source and target elements are equal.
    pub(super) fused: Option<Fused<'a>>,
    /// Source offsets of the lines needed next. They are prefetched while these lines are processed, as processors do not
    /// prefetch so far ahead by themselves.
    pub(super) ahead: &'a [usize],
}

/// A conversion to BF16 in registers.
#[derive(Clone, Copy)]
pub(super) struct Fused<'a> {
    pub(super) kind: FusedKind,
    /// The same conversion of any number of elements, for values that are not ordinary and for the edges of a block.
    pub(super) exact: &'a dyn Fn(&[u8], &mut [u8]),
}

impl std::fmt::Debug for Fused<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.kind.fmt(f)
    }
}

/// The kinds of fused conversions. Factors are normal numbers of at most 1, so that the product of a subnormal is subnormal or zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FusedKind {
    /// BF16 values times a factor.
    Multiply(f32),
    /// F32 values, rounded.
    Round,
    /// F32 values, rounded, times a factor.
    RoundMultiply(f32),
}

impl FusedKind {
    fn source_unit(self) -> usize {
        match self {
            Self::Multiply(_) => 2,
            Self::Round | Self::RoundMultiply(_) => 4,
        }
    }
}

impl Lines<'_> {
    /// Bytes of one source element.
    fn source_unit(&self) -> usize {
        self.fused.map_or(self.unit, |fused| fused.kind.source_unit())
    }

    /// Prefetches bytes soon after byte `at` of some lines, or the start of the lines that follow them.
    #[inline(always)]
    fn look_ahead<const LINES: usize>(&self, first: usize, at: usize) {
        let line = self.columns * self.source_unit();
        let next = at + LOOK_AHEAD_BYTES.min(line);
        let (lines, skip) = if next < line { (self.offsets, next) } else { (self.ahead, next - line) };
        if let Some(starts) = lines.get(first..).and_then(|lines| lines.first_chunk::<LINES>()) {
            for start in starts {
                prefetch_line(self.source, start + skip);
            }
        }
    }

    /// Asserts that all lines lie in the source, and their target lines in `length` bytes.
    fn check(&self, target_pitch: usize, length: usize) {
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
pub(super) fn prefetch(source: &[u8], start: usize, length: usize) {
    for line in 0..length.div_ceil(CACHE_LINE_BYTES) {
        prefetch_line(source, start + line * CACHE_LINE_BYTES);
    }
}

/// Prefetches the cache line at `start`.
#[inline(always)]
fn prefetch_line(source: &[u8], start: usize) {
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

/// Copies `source` to `target` with streaming stores, past the processor's caches; only whole cache lines are copied like this.
/// Other threads see the bytes in order only after [`fence`].
#[inline(always)]
pub(super) fn stream(source: &[u8], target: &mut [u8]) {
    assert_eq!(source.len(), target.len(), "bytes to copy");
    #[cfg(target_arch = "x86_64")]
    if target.as_ptr().addr().is_multiple_of(CACHE_LINE_BYTES) && target.len().is_multiple_of(CACHE_LINE_BYTES) {
        use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
        let (from, to) = (source.as_ptr(), target.as_mut_ptr());
        for at in (0..target.len()).step_by(16) {
            // SAFETY: SSE2 is part of x86-64. Both slices have 16 bytes from `at` on, as the length is a multiple of 16. Those
            // of `target` are aligned to 16 bytes, as it begins at a multiple of 64.
            #[allow(unused_unsafe, reason = "some of these are safe where the compiler knows SSE2 to be enabled")]
            unsafe {
                _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
            }
        }
        return;
    }
    target.copy_from_slice(source);
}

/// Makes the bytes copied by [`stream`] visible to other threads before any later write of this thread.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64; a fence touches no memory.
    #[allow(unused_unsafe, reason = "safe where the compiler knows SSE to be enabled")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Transposes `lines` to `target`, whose lines are `pitch` bytes apart.
pub(super) fn transpose(level: Level, lines: Lines<'_>, target: &mut [u8], pitch: usize) {
    lines.check(pitch, target.len());
    let (rows, columns) = registers(level, lines, target, pitch);
    for (edge_rows, edge_columns) in [(rows..lines.offsets.len(), 0), (0..rows, columns)] {
        if let Some(fused) = lines.fused {
            converted_edge(lines, fused, edge_rows, edge_columns, target, pitch);
            continue;
        }
        match lines.unit {
            1 => edge::<1>(lines, edge_rows, edge_columns, target, pitch),
            2 => edge::<2>(lines, edge_rows, edge_columns, target, pitch),
            3 => edge::<3>(lines, edge_rows, edge_columns, target, pitch),
            4 => edge::<4>(lines, edge_rows, edge_columns, target, pitch),
            8 => edge::<8>(lines, edge_rows, edge_columns, target, pitch),
            16 => edge::<16>(lines, edge_rows, edge_columns, target, pitch),
            unit => {
                for row in edge_rows {
                    for column in edge_columns..lines.columns {
                        let (from, to) = (lines.offsets[row] + column * unit, column * pitch + row * unit);
                        target[to..to + unit].copy_from_slice(&lines.source[from..from + unit]);
                    }
                }
            }
        }
    }
}

/// Converts and transposes some lines from element `column_start` on.
fn converted_edge(
    lines: Lines<'_>,
    fused: Fused<'_>,
    rows: std::ops::Range<usize>,
    column_start: usize,
    target: &mut [u8],
    pitch: usize,
) {
    let width = fused.kind.source_unit();
    let mut converted = [0; 2 * EDGE_ELEMENTS];
    for row in rows {
        for column in (column_start..lines.columns).step_by(EDGE_ELEMENTS) {
            let count = EDGE_ELEMENTS.min(lines.columns - column);
            let converted = &mut converted[..2 * count];
            (fused.exact)(&lines.source[lines.offsets[row] + column * width..][..count * width], converted);
            for (index, element) in converted.as_chunks::<2>().0.iter().enumerate() {
                target[(column + index) * pitch + row * 2..][..2].copy_from_slice(element);
            }
        }
    }
}

/// Transposes some lines from element `column_start` on, one element at a time.
#[inline(always)]
fn edge<const UNIT: usize>(
    lines: Lines<'_>,
    rows: std::ops::Range<usize>,
    column_start: usize,
    target: &mut [u8],
    pitch: usize,
) {
    if rows.is_empty() {
        return;
    }
    for column in column_start..lines.columns {
        let line = &mut target[column * pitch..];
        for row in rows.clone() {
            let from = lines.offsets[row] + column * UNIT;
            line[row * UNIT..][..UNIT].copy_from_slice(&lines.source[from..][..UNIT]);
        }
    }
}

/// Transposes the lines and elements that fill registers. Returns the numbers of both.
#[cfg(not(target_arch = "x86_64"))]
fn registers(_: Level, _: Lines<'_>, _: &mut [u8], _: usize) -> (usize, usize) {
    (0, 0)
}

/// Transposes the lines and elements that fill registers. Returns the numbers of both.
#[cfg(target_arch = "x86_64")]
fn registers(level: Level, lines: Lines<'_>, target: &mut [u8], pitch: usize) -> (usize, usize) {
    lines.check(pitch, target.len());
    // SAFETY: all lines and their target lines lie in the slices by the check above.
    unsafe {
        if pitch == USUAL_PITCH {
            registers_with::<USUAL_PITCH>(level, lines, target, pitch)
        } else {
            registers_with::<0>(level, lines, target, pitch)
        }
    }
}

/// As [`registers`], for lines that are `PITCH` bytes apart if that is not 0.
#[cfg(target_arch = "x86_64")]
unsafe fn registers_with<const PITCH: usize>(
    level: Level,
    lines: Lines<'_>,
    target: &mut [u8],
    pitch: usize,
) -> (usize, usize) {
    // SAFETY: the lines were checked. SSE2 is part of x86-64, and the level says whether there is AVX2.
    unsafe {
        if let Some(fused) = lines.fused {
            let exact = fused.exact;
            return match (fused.kind, level.has_avx2()) {
                (FusedKind::Multiply(factor), true) => {
                    x86::two_bytes::<2, true, PITCH>(lines, exact, factor, target, pitch)
                }
                (FusedKind::Round, true) => x86::two_bytes::<4, false, PITCH>(lines, exact, 1.0, target, pitch),
                (FusedKind::RoundMultiply(factor), true) => {
                    x86::two_bytes::<4, true, PITCH>(lines, exact, factor, target, pitch)
                }
                (_, false) => (0, 0),
            };
        }
        match (lines.unit, level.has_avx2()) {
            (1, false) => x86::narrow_1::<PITCH>(lines, target, pitch),
            (2, false) => x86::narrow_2::<PITCH>(lines, target, pitch),
            (4, false) => x86::narrow_4::<PITCH>(lines, target, pitch),
            (8, false) => x86::narrow_8::<PITCH>(lines, target, pitch),
            (1, true) => x86::wide_1::<PITCH>(lines, target, pitch),
            (2, true) => x86::two_bytes::<2, false, PITCH>(lines, &|_, _| (), 1.0, target, pitch),
            (4, true) => x86::wide_4::<PITCH>(lines, target, pitch),
            (8, true) => x86::wide_8::<PITCH>(lines, target, pitch),
            _ => (0, 0),
        }
    }
}

/// Transposes in registers. Each function processes all whole blocks of lines that fill its registers, and returns the numbers of
/// lines and of their elements. Its caller guarantees that [`Lines::check`] has passed, and that the processor has its
/// instructions.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows their instructions to be enabled")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, _CMP_UNORD_Q, _mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpackhi_epi16,
        _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpacklo_epi8, _mm_unpacklo_epi16, _mm_unpacklo_epi32,
        _mm_unpacklo_epi64, _mm256_add_epi16, _mm256_add_epi32, _mm256_adds_epu16, _mm256_and_si256,
        _mm256_blend_epi16, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps,
        _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_max_epu16, _mm256_min_epu16, _mm256_mul_ps,
        _mm256_or_si256, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_si256, _mm256_slli_epi32,
        _mm256_srli_epi32, _mm256_sub_epi16, _mm256_subs_epu16, _mm256_testz_si256, _mm256_unpackhi_epi8,
        _mm256_unpackhi_epi16, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi8,
        _mm256_unpacklo_epi16, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
    };
    use std::array::from_fn;

    use super::{BAND_LINES, CACHE_LINE_BYTES, Lines, prefetch_line};

    /// Loads 16 bytes of each line.
    macro_rules! load_16 {
        ($from:expr) => {
            _mm_loadu_si128($from.cast())
        };
    }

    /// Loads 32 bytes of each line.
    macro_rules! load_32 {
        ($from:expr) => {
            _mm256_loadu_si256($from.cast())
        };
    }

    /// Stores one target line.
    macro_rules! store_16 {
        ($line:expr, $to:expr, $apart:expr) => {
            _mm_storeu_si128($to.cast(), $line)
        };
    }

    /// Stores two target lines, `$apart` bytes apart.
    macro_rules! store_32 {
        ($line:expr, $to:expr, $apart:expr) => {
            _mm_storeu_si128($to.cast(), _mm256_castsi256_si128($line));
            _mm_storeu_si128($to.add($apart).cast(), _mm256_extracti128_si256::<1>($line));
        };
    }

    /// Defines a function for blocks of `$side` lines by `$parts` times as many elements.
    ///
    /// A round is a perfect shuffle of the lines: line `i` is interleaved with line `i + N / 2`, giving lines `2 i` and
    /// `2 i + 1`. As many of these as a line has bits of index transpose a square. The halves of a wider register are
    /// squares of their own.
    macro_rules! define {
        ($($(#[$meta:meta])* fn $name:ident($side:literal, $parts:literal, $rounds:literal, $load:ident, $store:ident, $low:ident, $high:ident);)*) => {$(
            $(#[$meta])*
            pub(super) unsafe fn $name<const PITCH: usize>(
                lines: Lines<'_>,
                target: &mut [u8],
                pitch: usize,
            ) -> (usize, usize) {
                let pitch = if PITCH > 0 { PITCH } else { pitch };
                let (groups, rest) = lines.offsets.as_chunks::<$side>();
                let (ahead, _) = lines.ahead.as_chunks::<$side>();
                let width = $side * $parts;
                let columns = lines.columns / width * width;
                for (index, offsets) in groups.iter().enumerate() {
                    let row = index * $side;
                    for column in (0..columns).step_by(width) {
                        let at = column * lines.unit;
                        if at.is_multiple_of(CACHE_LINE_BYTES)
                            && let Some(ahead) = ahead.get(index)
                        {
                            for next in ahead {
                                prefetch_line(lines.source, next + at);
                            }
                        }
                        let from = lines.source.as_ptr();
                        let to = target.as_mut_ptr();
                        // SAFETY: the block touches `width` elements of `$side` lines and of their target: `column + width` is at
                        // most `columns`, and `row + $side` at most the number of lines. They lie in the slices, and the
                        // processor has the instructions, both by the contract of the module.
                        unsafe {
                            let mut block: [_; $side] = from_fn(|line| $load!(from.add(offsets[line] + at)));
                            for _ in 0..$rounds {
                                let now = block;
                                for line in 0..$side / 2 {
                                    block[2 * line] = $low(now[line], now[line + $side / 2]);
                                    block[2 * line + 1] = $high(now[line], now[line + $side / 2]);
                                }
                            }
                            for (line, made) in block.into_iter().enumerate() {
                                let to = to.add((column + line) * pitch + row * lines.unit);
                                $store!(made, to, $side * pitch);
                            }
                        }
                    }
                }
                (lines.offsets.len() - rest.len(), columns)
            }
        )*};
    }

    define! {
        fn narrow_1(16, 1, 4, load_16, store_16, _mm_unpacklo_epi8, _mm_unpackhi_epi8);
        fn narrow_2(8, 1, 3, load_16, store_16, _mm_unpacklo_epi16, _mm_unpackhi_epi16);
        fn narrow_4(4, 1, 2, load_16, store_16, _mm_unpacklo_epi32, _mm_unpackhi_epi32);
        fn narrow_8(2, 1, 1, load_16, store_16, _mm_unpacklo_epi64, _mm_unpackhi_epi64);
        #[target_feature(enable = "avx2")]
        fn wide_1(16, 2, 4, load_32, store_32, _mm256_unpacklo_epi8, _mm256_unpackhi_epi8);
        #[target_feature(enable = "avx2")]
        fn wide_4(4, 2, 2, load_32, store_32, _mm256_unpacklo_epi32, _mm256_unpackhi_epi32);
        #[target_feature(enable = "avx2")]
        fn wide_8(2, 2, 1, load_32, store_32, _mm256_unpacklo_epi64, _mm256_unpackhi_epi64);
    }

    /// As the functions above, with 16 elements of 8 lines at a time, from elements of `SOURCE` bytes to elements of two. Wider
    /// elements are rounded to BF16. With `MULTIPLY` they are then multiplied by `factor` and rounded again. `exact` converts
    /// blocks with values that are not ordinary.
    ///
    /// One cache line of all lines of a band is processed before the next, so that whole cache lines of the target are written.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn two_bytes<const SOURCE: usize, const MULTIPLY: bool, const PITCH: usize>(
        lines: Lines<'_>,
        exact: &dyn Fn(&[u8], &mut [u8]),
        factor: f32,
        target: &mut [u8],
        pitch: usize,
    ) -> (usize, usize) {
        let pitch = if PITCH > 0 { PITCH } else { pitch };
        let (groups, rest) = lines.offsets.as_chunks::<8>();
        let columns = lines.columns / 16 * 16;
        let step = CACHE_LINE_BYTES / SOURCE;
        for (band, groups) in groups.chunks(BAND_LINES / 8).enumerate() {
            for first in (0..columns).step_by(step) {
                for (index, offsets) in groups.iter().enumerate() {
                    let row = band * BAND_LINES + index * 8;
                    lines.look_ahead::<8>(row, first * SOURCE);
                    for column in (first..columns.min(first + step)).step_by(16) {
                        let at = column * SOURCE;
                        let from = lines.source.as_ptr();
                        let to = target.as_mut_ptr();
                        // SAFETY: as in `define`, with 16 elements of 8 lines.
                        unsafe {
                            let (mut block, mut seen) = ([_mm256_setzero_si256(); 8], Seen::nothing());
                            for (made, offset) in block.iter_mut().zip(offsets) {
                                *made = bf16::<SOURCE, MULTIPLY>(from.add(offset + at), factor, &mut seen);
                            }
                            if (SOURCE == 4 || MULTIPLY) && seen.any_odd() {
                                for (made, offset) in block.iter_mut().zip(offsets) {
                                    let mut converted = [0; 32];
                                    exact(&lines.source[offset + at..][..16 * SOURCE], &mut converted);
                                    if SOURCE == 4 {
                                        let elements = converted.as_chunks::<2>().0;
                                        let placed: [_; 16] = from_fn(|place| elements[place % 2 * 8 + place / 2]);
                                        converted.copy_from_slice(placed.as_flattened());
                                    }
                                    *made = _mm256_loadu_si256(converted.as_ptr().cast());
                                }
                            }
                            for _ in 0..3 {
                                let now = block;
                                for line in 0..4 {
                                    block[2 * line] = _mm256_unpacklo_epi16(now[line], now[line + 4]);
                                    block[2 * line + 1] = _mm256_unpackhi_epi16(now[line], now[line + 4]);
                                }
                            }
                            for (place, made) in block.into_iter().enumerate() {
                                // The place in the first half of a line, and the distance to the same place in the second half.
                                let (line, apart) =
                                    if SOURCE == 4 { (place % 2 * 8 + place / 2, 4) } else { (place, 8) };
                                let to = to.add((column + line) * pitch + row * 2);
                                store_32!(made, to, apart * pitch);
                            }
                        }
                    }
                }
            }
        }
        (lines.offsets.len() - rest.len(), columns)
    }

    /// Tells whether any element is a NaN, or any product is not ordinary: neither zero, nor finite and far from subnormal.
    struct Seen {
        /// NaNs set bits here.
        nan: __m256i,
        /// The greatest magnitudes of products, as integers.
        greatest: __m256i,
        /// The least magnitudes minus one, so that zero is above all others.
        least: __m256i,
    }

    impl Seen {
        #[target_feature(enable = "avx2")]
        #[inline]
        fn nothing() -> Self {
            let zero = _mm256_setzero_si256();
            Self { nan: zero, greatest: zero, least: _mm256_set1_epi16(-1) }
        }

        #[target_feature(enable = "avx2")]
        #[inline]
        fn multiplied(&mut self, products: __m256i) {
            let magnitude = _mm256_and_si256(products, _mm256_set1_epi16(0x7fff));
            self.greatest = _mm256_max_epu16(self.greatest, magnitude);
            self.least = _mm256_min_epu16(self.least, _mm256_sub_epi16(magnitude, _mm256_set1_epi16(1)));
        }

        #[target_feature(enable = "avx2")]
        #[inline]
        fn any_odd(&self) -> bool {
            // Exponents from 2 to 254 are at least 2^-125 and finite.
            let (finite, normal) = (_mm256_set1_epi16((255 << 7) - 1), _mm256_set1_epi16((2 << 7) - 1));
            let large = _mm256_subs_epu16(self.greatest, finite);
            let small = _mm256_subs_epu16(normal, self.least);
            let odd = _mm256_or_si256(self.nan, _mm256_or_si256(large, small));
            _mm256_testz_si256(odd, odd) == 0
        }
    }

    /// Converts the 16 elements at `from`, and notes their magnitudes. For elements of 4 bytes, the second eight lie between the
    /// first, which saves instructions: element `8 i + j` is at place `2 j + i`.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn bf16<const SOURCE: usize, const MULTIPLY: bool>(
        from: *const u8,
        factor: f32,
        seen: &mut Seen,
    ) -> __m256i {
        let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
        // To nearest, ties to even, in the upper half; correct for all values except NaNs.
        let round = |bits: __m256i| {
            let even = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even)
        };
        let multiply = |bits: __m256i| {
            round(_mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(factor))))
        };
        // SAFETY: the caller guarantees that 16 elements of `SOURCE` bytes at `from` may be read.
        let eight = |index: usize| unsafe { _mm256_loadu_si256(from.add(32 * index).cast()) };
        let mut made = eight(0);
        if SOURCE == 4 {
            let (first, second) = (made, eight(1));
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second));
            seen.nan = _mm256_or_si256(seen.nan, _mm256_castps_si256(nan));
            let (one, half) = (_mm256_set1_epi16(1), _mm256_set1_epi16(i16::MIN));
            let high = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(first), second);
            let low = _mm256_blend_epi16::<0b1010_1010>(first, _mm256_slli_epi32::<16>(second));
            // Adds one where the lower half is more than a half, or exactly a half with an odd upper half.
            let above = _mm256_subs_epu16(_mm256_adds_epu16(low, _mm256_and_si256(high, one)), half);
            made = _mm256_add_epi16(high, _mm256_min_epu16(above, one));
        }
        if MULTIPLY {
            // Every other element is the upper half of four bytes already.
            let (even, odd) = (multiply(_mm256_slli_epi32::<16>(made)), multiply(_mm256_and_si256(made, upper)));
            made = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd);
        }
        if MULTIPLY {
            seen.multiplied(made);
        }
        made
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DType, Load, Program, Step, convert_row, convert_scalar};
    use super::*;

    #[test]
    fn every_shape_and_unit_is_transposed() {
        for unit in [1, 2, 3, 4, 5, 8, 12, 16] {
            for (rows, columns) in
                [(1, 1), (1, 9), (9, 1), (8, 8), (16, 16), (17, 33), (64, 40), (3, 64), (64, 3), (31, 16), (16, 31)]
            {
                let (source_pitch, target_pitch) = (columns * unit + 3, rows * unit + 5);
                let source: Vec<u8> = (0..rows * source_pitch)
                    .map(|byte: usize| ((byte * 7 + byte / 251) % 256).to_le_bytes()[0])
                    .collect();
                let offsets: Vec<usize> = (0..rows).map(|row| row * source_pitch).collect();
                for level in Level::available() {
                    let mut target = vec![0xee; columns * target_pitch];
                    let lines = Lines { source: &source, offsets: &offsets, unit, columns, fused: None, ahead: &[] };
                    transpose(level, lines, &mut target, target_pitch);
                    for (column, line) in target.chunks(target_pitch).enumerate() {
                        for (row, cell) in line[..rows * unit].chunks(unit).enumerate() {
                            let expected = &source[row * source_pitch + column * unit..][..unit];
                            assert_eq!(cell, expected, "{unit} {rows} {columns} at {level:?}");
                        }
                        let between = &line[rows * unit..];
                        assert!(between.iter().all(|byte| *byte == 0xee), "{unit}: wrote between target rows");
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "exceed 15 source or 16 target bytes")]
    fn short_sources_are_refused() {
        let lines = Lines { source: &[0; 15], offsets: &[0, 8], unit: 4, columns: 2, fused: None, ahead: &[] };
        transpose(Level::PORTABLE, lines, &mut [0; 16], 8);
    }

    #[test]
    #[should_panic(expected = "exceed 16 source or 15 target bytes")]
    fn short_targets_are_refused() {
        let lines = Lines { source: &[0; 16], offsets: &[8, 0], unit: 4, columns: 2, fused: None, ahead: &[] };
        transpose(Level::PORTABLE, lines, &mut [0; 15], 8);
    }

    /// A program that `kind` implements, and its result for one element after another.
    fn expected(kind: FusedKind, flush: bool, source: &[u8]) -> (Program, Vec<u8>) {
        let multiply = |factor: f32| Step::multiply(factor, flush);
        let (source_type, steps) = match kind {
            FusedKind::Multiply(factor) => (DType::BF16, vec![multiply(factor)]),
            FusedKind::Round => (DType::F32, vec![]),
            FusedKind::RoundMultiply(factor) => (DType::F32, vec![Step::Round(DType::BF16), multiply(factor)]),
        };
        let program = Program { load: Load::Element(source_type), target: DType::BF16, steps };
        let width = kind.source_unit();
        let mut made = vec![0; source.len() / width * 2];
        for (element, made) in source.chunks(width).zip(made.chunks_mut(2)) {
            convert_scalar(&program, element, made);
        }
        (program, made)
    }

    #[test]
    fn fused_conversions_agree_with_single_elements() {
        // Every BF16, and F32 values of every sign, exponent and upper mantissa at and around the boundaries of rounding. Their
        // order gives blocks of ordinary values as well as mixed ones.
        let narrow: Vec<u8> = (0..1_u32 << 16).flat_map(|index| index.to_le_bytes()[..2].to_vec()).collect();
        let wide: Vec<u8> = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff]
            .into_iter()
            .flat_map(|low: u32| (0..1_u32 << 16).flat_map(move |high| (high << 16 | low).to_le_bytes()))
            .collect();
        let factors = [0.088_388_346_f32, -1.0, 0.5, -3e-20, f32::MIN_POSITIVE];
        let kinds =
            factors.into_iter().flat_map(|factor| [FusedKind::Multiply(factor), FusedKind::RoundMultiply(factor)]);
        for kind in kinds.chain([FusedKind::Round]) {
            for flush in [false, true] {
                let width = kind.source_unit();
                let source = if width == 2 { &narrow } else { &wide };
                let (program, expected) = expected(kind, flush, source);
                let exact = |source: &[u8], target: &mut [u8]| convert_row(&program, source, target);
                let fused = Some(Fused { kind, exact: &exact });
                // Neither the rows nor the columns of the last shape fill registers.
                for (rows, columns) in [(source.len() / width / 256, 256), (source.len() / width / 1021, 1021)] {
                    let offsets: Vec<usize> = (0..rows).map(|row| row * columns * width).collect();
                    let pitch = rows * 2;
                    for level in Level::available() {
                        let mut target = vec![0xee; columns * pitch];
                        let lines = Lines { source, offsets: &offsets, unit: 2, columns, fused, ahead: &offsets };
                        transpose(level, lines, &mut target, pitch);
                        for (column, line) in target.chunks(pitch).enumerate() {
                            for (row, made) in line.chunks(2).enumerate() {
                                let index = row * columns + column;
                                let expected = &expected[2 * index..][..2];
                                let from = &source[index * width..][..width];
                                assert_eq!(made, expected, "{kind:?}, {flush}, {from:x?} at {level:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn streamed_bytes_are_copied() {
        let source: Vec<u8> = (0..=255).collect();
        for start in [0, 1, 64] {
            for length in [0, 1, 64, 128, 130] {
                let mut target = [0xee; 320];
                let aligned = target.as_ptr().align_offset(64) + start;
                stream(&source[..length], &mut target[aligned..aligned + length]);
                fence();
                assert_eq!(target[aligned..aligned + length], source[..length], "{start} {length}");
                assert!(target[aligned + length..].iter().all(|byte| *byte == 0xee));
            }
        }
    }
}
