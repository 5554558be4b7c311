//! Transposes of small blocks within the first-level cache.
//!
//! Element `c` of line `r` goes to `target[c * pitch + r]`. Elements of 1, 2, 4 and 8 bytes are transposed in registers on
//! x86-64, whose baseline has the instructions, in wider ones where there are; all others, and the edges of a block, one by
//! one.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "registers must stay registers")]

use super::kernel::Level;

/// Bytes of a line of the processor's caches.
const CACHE_LINE_BYTES: usize = 64;

/// Lines of a source that are transposed together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines<'a> {
    pub(super) source: &'a [u8],
    /// Where each line begins.
    pub(super) offsets: &'a [usize],
    /// Bytes of one element.
    pub(super) unit: usize,
    /// Elements of each line, which become target lines.
    pub(super) columns: usize,
    /// Where lines begin that will be wanted next: each part of them is asked for while the same part of these is worked on,
    /// as processors do not look so far ahead by themselves.
    pub(super) ahead: &'a [usize],
}

impl Lines<'_> {
    /// Asserts that all lines lie in the source, and what they become in `length` bytes.
    fn check(&self, target_pitch: usize, length: usize) {
        let line = self.columns.checked_mul(self.unit);
        let end = |start: usize| start.checked_add(line?);
        let reach = self.columns.saturating_sub(1).checked_mul(target_pitch);
        let target_end = reach.and_then(|reach| reach.checked_add(self.offsets.len().checked_mul(self.unit)?));
        let fits = self.offsets.iter().all(|start| end(*start).is_some_and(|end| end <= self.source.len()))
            && target_end.is_some_and(|end| end <= length);
        assert!(
            fits,
            "{} lines of {} elements of {} bytes exceed {} source or {length} target bytes",
            self.offsets.len(),
            self.columns,
            self.unit,
            self.source.len()
        );
    }
}

/// Asks for the cache lines of `length` bytes from `start` on; what lies beyond the source is of no use, but does no harm.
pub(super) fn prefetch(source: &[u8], start: usize, length: usize) {
    for line in 0..length.div_ceil(CACHE_LINE_BYTES) {
        prefetch_line(source, start + line * CACHE_LINE_BYTES);
    }
}

/// Asks for the cache line at `start`.
#[inline(always)]
fn prefetch_line(source: &[u8], start: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect but on time, whatever the address.
    #[allow(unused_unsafe, reason = "safe where the compiler knows SSE to be enabled")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(source.as_ptr().wrapping_add(start).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, start);
}

/// Copies `source` to `target` past the processor's caches, which soon forget that they held it; only whole cache lines go
/// that way. Others see it in order only after [`fence`].
pub(super) fn stream(source: &[u8], target: &mut [u8]) {
    assert_eq!(source.len(), target.len(), "bytes to copy");
    #[cfg(target_arch = "x86_64")]
    if target.as_ptr().addr().is_multiple_of(CACHE_LINE_BYTES) && target.len().is_multiple_of(CACHE_LINE_BYTES) {
        use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
        let (from, to) = (source.as_ptr(), target.as_mut_ptr());
        for at in (0..target.len()).step_by(16) {
            // SAFETY: SSE2 is part of x86-64. Both slices have 16 bytes from `at` on, as the length is a multiple of that,
            // and those of `target` are aligned to 16 bytes, as it begins at a multiple of 64.
            #[allow(unused_unsafe, reason = "some of these are safe where the compiler knows SSE2 to be enabled")]
            unsafe {
                _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
            }
        }
        return;
    }
    target.copy_from_slice(source);
}

/// Lets others see what [`stream`] has copied before anything that this thread writes later.
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

/// Transposes as many lines and elements of them as fill registers, and says how many those were.
#[cfg(not(target_arch = "x86_64"))]
fn registers(_: Level, _: Lines<'_>, _: &mut [u8], _: usize) -> (usize, usize) {
    (0, 0)
}

/// Transposes as many lines and elements of them as fill registers, and says how many those were.
#[cfg(target_arch = "x86_64")]
fn registers(level: Level, lines: Lines<'_>, target: &mut [u8], pitch: usize) -> (usize, usize) {
    lines.check(pitch, target.len());
    // SAFETY: all lines and what they become lie in the slices by the check above. SSE2 is part of x86-64, and the level says
    // whether there is AVX2.
    unsafe {
        match (lines.unit, level.has_avx2()) {
            (1, false) => x86::narrow_1(lines, target, pitch),
            (2, false) => x86::narrow_2(lines, target, pitch),
            (4, false) => x86::narrow_4(lines, target, pitch),
            (8, false) => x86::narrow_8(lines, target, pitch),
            (1, true) => x86::wide_1(lines, target, pitch),
            (2, true) => x86::wide_2(lines, target, pitch),
            (4, true) => x86::wide_4(lines, target, pitch),
            (8, true) => x86::wide_8(lines, target, pitch),
            _ => (0, 0),
        }
    }
}

/// Transposes in registers. Each function does all whole blocks of lines that fill its registers and says how many lines and
/// elements of them those were. It asks of its caller that [`Lines::check`] has passed, and that the processor has its
/// instructions.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows their instructions to be enabled")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpackhi_epi16, _mm_unpackhi_epi32,
        _mm_unpackhi_epi64, _mm_unpacklo_epi8, _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
        _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_unpackhi_epi8,
        _mm256_unpackhi_epi16, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi8,
        _mm256_unpacklo_epi16, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
    };

    use super::{CACHE_LINE_BYTES, Lines, prefetch_line};

    /// Loads 16 bytes of each line.
    macro_rules! load_16 {
        ($from:expr) => {
            _mm_loadu_si128($from.cast::<__m128i>())
        };
    }

    /// Loads 32 bytes of each line.
    macro_rules! load_32 {
        ($from:expr) => {
            _mm256_loadu_si256($from.cast::<__m256i>())
        };
    }

    /// Stores one target line.
    macro_rules! store_16 {
        ($line:expr, $to:expr, $apart:expr) => {
            _mm_storeu_si128($to.cast::<__m128i>(), $line)
        };
    }

    /// Stores two target lines, `$apart` bytes apart.
    macro_rules! store_32 {
        ($line:expr, $to:expr, $apart:expr) => {
            _mm_storeu_si128($to.cast::<__m128i>(), _mm256_castsi256_si128($line));
            _mm_storeu_si128($to.add($apart).cast::<__m128i>(), _mm256_extracti128_si256::<1>($line));
        };
    }

    /// Defines a function that does blocks of `$side` lines by `$parts` times as many elements.
    ///
    /// A round is a perfect shuffle of the lines: line `i` is interleaved with line `i + N / 2`, giving lines `2 i` and
    /// `2 i + 1`. As many of these as a line has bits of index transpose a square. The halves of a wider register are
    /// squares of their own.
    macro_rules! define {
        ($($(#[$meta:meta])* fn $name:ident($side:literal, $parts:literal, $rounds:literal, $load:ident, $store:ident, $low:ident, $high:ident);)*) => {$(
            $(#[$meta])*
            pub(super) unsafe fn $name(lines: Lines<'_>, target: &mut [u8], pitch: usize) -> (usize, usize) {
                let (groups, rest) = lines.offsets.as_chunks::<$side>();
                let width = $side * $parts;
                let columns = lines.columns / width * width;
                for (index, offsets) in groups.iter().enumerate() {
                    let row = index * $side;
                    let ahead = lines.ahead.get(row..lines.ahead.len().min(row + $side)).unwrap_or_default();
                    for column in (0..columns).step_by(width) {
                        let at = column * lines.unit;
                        if at.is_multiple_of(CACHE_LINE_BYTES) {
                            for next in ahead {
                                prefetch_line(lines.source, next + at);
                            }
                        }
                        let from = lines.source.as_ptr();
                        let to = target.as_mut_ptr();
                        // SAFETY: the block touches `width` elements of `$side` lines and what they become, as
                        // `column + width` is at most `columns` and `row + $side` at most the number of lines; they lie in
                        // the slices, and the instructions are there, both by the contract of the module.
                        unsafe {
                            let mut block: [_; $side] = std::array::from_fn(|line| $load!(from.add(offsets[line] + at)));
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
        fn wide_2(8, 2, 3, load_32, store_32, _mm256_unpacklo_epi16, _mm256_unpackhi_epi16);
        #[target_feature(enable = "avx2")]
        fn wide_4(4, 2, 2, load_32, store_32, _mm256_unpacklo_epi32, _mm256_unpackhi_epi32);
        #[target_feature(enable = "avx2")]
        fn wide_8(2, 2, 1, load_32, store_32, _mm256_unpacklo_epi64, _mm256_unpackhi_epi64);
    }
}

#[cfg(test)]
mod tests {
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
                    let lines = Lines { source: &source, offsets: &offsets, unit, columns, ahead: &[] };
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
        let lines = Lines { source: &[0; 15], offsets: &[0, 8], unit: 4, columns: 2, ahead: &[] };
        transpose(Level::PORTABLE, lines, &mut [0; 16], 8);
    }

    #[test]
    #[should_panic(expected = "exceed 16 source or 15 target bytes")]
    fn short_targets_are_refused() {
        let lines = Lines { source: &[0; 16], offsets: &[8, 0], unit: 4, columns: 2, ahead: &[] };
        transpose(Level::PORTABLE, lines, &mut [0; 15], 8);
    }

    #[test]
    fn what_is_streamed_is_copied() {
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
