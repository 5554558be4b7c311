//! Transposes of small blocks within the first-level cache.
//!
//! Element `c` of line `r` goes to `target[c * pitch + r]`. Elements of 1, 2, 4 and 8 bytes are transposed in registers on
//! x86-64, whose baseline has the instructions; all others, and the edges of a block, one by one.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "registers must stay registers")]

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
#[inline(always)]
pub(super) fn prefetch(source: &[u8], start: usize, length: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (start..start + length).step_by(CACHE_LINE_BYTES) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let at = source.as_ptr().wrapping_add(offset);
        // SAFETY: a prefetch has no effect but on time, whatever the address.
        #[allow(unused_unsafe, reason = "safe where the compiler knows SSE to be enabled")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(at.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, start, length);
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
pub(super) fn transpose(lines: Lines<'_>, target: &mut [u8], pitch: usize) {
    lines.check(pitch, target.len());
    let (rows, columns) = registers(lines, target, pitch);
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
fn registers(_: Lines<'_>, _: &mut [u8], _: usize) -> (usize, usize) {
    (0, 0)
}

/// Transposes as many lines and elements of them as fill registers, and says how many those were.
#[cfg(target_arch = "x86_64")]
fn registers(lines: Lines<'_>, target: &mut [u8], pitch: usize) -> (usize, usize) {
    lines.check(pitch, target.len());
    // SAFETY: `SIDE * unit` is 16 in each case, and all lines and what they become lie in the slices by the check above.
    unsafe {
        match lines.unit {
            1 => squares::<16>(lines, target, pitch, |from, offsets, to| x86::square_1(from, offsets, to, pitch)),
            2 => squares::<8>(lines, target, pitch, |from, offsets, to| x86::square_2(from, offsets, to, pitch)),
            4 => squares::<4>(lines, target, pitch, |from, offsets, to| x86::square_4(from, offsets, to, pitch)),
            8 => squares::<2>(lines, target, pitch, |from, offsets, to| x86::square_8(from, offsets, to, pitch)),
            _ => (0, 0),
        }
    }
}

/// Does all whole squares of `SIDE` lines by 16 bytes, and says how many lines and elements those were.
///
/// # Safety
/// `SIDE` elements are 16 bytes, and [`Lines::check`] has passed.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn squares<const SIDE: usize>(
    lines: Lines<'_>,
    target: &mut [u8],
    pitch: usize,
    square: impl Fn(*const u8, &[usize; SIDE], *mut u8),
) -> (usize, usize) {
    let (groups, rest) = lines.offsets.as_chunks::<SIDE>();
    let columns = lines.columns / SIDE * SIDE;
    for (index, offsets) in groups.iter().enumerate() {
        let row = index * SIDE;
        let ahead = lines.ahead.get(row..lines.ahead.len().min(row + SIDE)).unwrap_or_default();
        for column in (0..columns).step_by(SIDE) {
            let at = column * lines.unit;
            if at.is_multiple_of(CACHE_LINE_BYTES) {
                for next in ahead {
                    prefetch(lines.source, next + at, CACHE_LINE_BYTES);
                }
            }
            let from = lines.source.as_ptr().wrapping_add(at);
            let to = target.as_mut_ptr().wrapping_add(column * pitch + row * lines.unit);
            // The square touches `SIDE` lines of 16 bytes at both ends: elements of the lines and what they become, as
            // `column + SIDE` is at most `columns` and `row + SIDE` at most the number of lines.
            square(from, offsets, to);
        }
    }
    (lines.offsets.len() - rest.len(), columns)
}

/// Squares of 16-byte lines, with SSE2, which is part of x86-64. Each function asks of its caller that all lines of the
/// square, 16 bytes at `from + offsets[i]` and at `to + i * pitch`, are valid
/// and do not overlap.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpackhi_epi16, _mm_unpackhi_epi32,
        _mm_unpackhi_epi64, _mm_unpacklo_epi8, _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
    };

    #[inline(always)]
    unsafe fn load<const N: usize>(from: *const u8, offsets: &[usize; N]) -> [__m128i; N] {
        // SAFETY: SSE2 is there; the lines are valid by the contract of the module.
        std::array::from_fn(|index| unsafe { _mm_loadu_si128(from.wrapping_add(offsets[index]).cast()) })
    }

    #[inline(always)]
    unsafe fn store<const N: usize>(lines: [__m128i; N], to: *mut u8, pitch: usize) {
        for (index, line) in lines.into_iter().enumerate() {
            // SAFETY: as in `load`.
            unsafe { _mm_storeu_si128(to.add(index * pitch).cast(), line) };
        }
    }

    /// One perfect shuffle of the lines: line `i` is interleaved with line `i + N / 2`, giving lines `2 i` and
    /// `2 i + 1`. As many of these as a line has bits of index transpose the square.
    macro_rules! shuffle {
        ($lines:ident, $count:literal, $low:ident, $high:ident) => {{
            let mut next = $lines;
            for index in 0..$count / 2 {
                // SAFETY: SSE2 is part of x86-64.
                unsafe {
                    next[2 * index] = $low($lines[index], $lines[index + $count / 2]);
                    next[2 * index + 1] = $high($lines[index], $lines[index + $count / 2]);
                }
            }
            next
        }};
    }

    #[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows SSE2 to be enabled")]
    #[inline(always)]
    pub(super) unsafe fn square_1(from: *const u8, offsets: &[usize; 16], to: *mut u8, pitch: usize) {
        // SAFETY: passed on.
        let mut lines = unsafe { load::<16>(from, offsets) };
        for _ in 0..4 {
            lines = shuffle!(lines, 16, _mm_unpacklo_epi8, _mm_unpackhi_epi8);
        }
        // SAFETY: passed on.
        unsafe { store(lines, to, pitch) };
    }

    #[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows SSE2 to be enabled")]
    #[inline(always)]
    pub(super) unsafe fn square_2(from: *const u8, offsets: &[usize; 8], to: *mut u8, pitch: usize) {
        // SAFETY: passed on.
        let mut lines = unsafe { load::<8>(from, offsets) };
        for _ in 0..3 {
            lines = shuffle!(lines, 8, _mm_unpacklo_epi16, _mm_unpackhi_epi16);
        }
        // SAFETY: passed on.
        unsafe { store(lines, to, pitch) };
    }

    #[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows SSE2 to be enabled")]
    #[inline(always)]
    pub(super) unsafe fn square_4(from: *const u8, offsets: &[usize; 4], to: *mut u8, pitch: usize) {
        // SAFETY: passed on.
        let mut lines = unsafe { load::<4>(from, offsets) };
        for _ in 0..2 {
            lines = shuffle!(lines, 4, _mm_unpacklo_epi32, _mm_unpackhi_epi32);
        }
        // SAFETY: passed on.
        unsafe { store(lines, to, pitch) };
    }

    #[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows SSE2 to be enabled")]
    #[inline(always)]
    pub(super) unsafe fn square_8(from: *const u8, offsets: &[usize; 2], to: *mut u8, pitch: usize) {
        // SAFETY: passed on.
        let lines = unsafe { load::<2>(from, offsets) };
        let lines = shuffle!(lines, 2, _mm_unpacklo_epi64, _mm_unpackhi_epi64);
        // SAFETY: passed on.
        unsafe { store(lines, to, pitch) };
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
                let mut target = vec![0xee; columns * target_pitch];
                let offsets: Vec<usize> = (0..rows).map(|row| row * source_pitch).collect();
                transpose(
                    Lines { source: &source, offsets: &offsets, unit, columns, ahead: &[] },
                    &mut target,
                    target_pitch,
                );
                for (column, line) in target.chunks(target_pitch).enumerate() {
                    for (row, cell) in line[..rows * unit].chunks(unit).enumerate() {
                        assert_eq!(
                            cell,
                            &source[row * source_pitch + column * unit..][..unit],
                            "{unit} {rows} {columns}"
                        );
                    }
                    assert!(line[rows * unit..].iter().all(|byte| *byte == 0xee), "{unit}: wrote between target rows");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "exceed 15 source or 16 target bytes")]
    fn short_sources_are_refused() {
        transpose(Lines { source: &[0; 15], offsets: &[0, 8], unit: 4, columns: 2, ahead: &[] }, &mut [0; 16], 8);
    }

    #[test]
    #[should_panic(expected = "exceed 16 source or 15 target bytes")]
    fn short_targets_are_refused() {
        transpose(Lines { source: &[0; 16], offsets: &[8, 0], unit: 4, columns: 2, ahead: &[] }, &mut [0; 15], 8);
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
