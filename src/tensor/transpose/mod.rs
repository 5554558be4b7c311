//! Transposes of small blocks within the first-level cache.
//!
//! Element `c` of line `r` goes to `target[c * pitch + r]`. Elements of 1, 2, 4 and 8 bytes are transposed in registers where a
//! processor has AVX2. All others, and the edges of a block, are transposed one by one.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "registers must stay registers")]

mod lines;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use self::lines::{BAND_LINES, CACHE_LINE_BYTES, Fused, FusedKind, Lines, prefetch};
use super::kernel::Level;

/// Elements at the edge of a block that are converted together.
const EDGE_ELEMENTS: usize = 64;

/// Whether this processor has streaming stores that are used here. Elsewhere [`stream`] copies as usual.
pub(super) const STREAMS: bool = cfg!(target_arch = "x86_64");

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

/// Copies `source` to `target` as [`stream`] does, wherever `target` begins and ends: the parts of cache lines at its ends by usual
/// stores.
pub(super) fn stream_run(source: &[u8], target: &mut [u8]) {
    let head = target.as_ptr().align_offset(CACHE_LINE_BYTES).min(target.len());
    let lines = (target.len() - head) / CACHE_LINE_BYTES * CACHE_LINE_BYTES;
    let (head, rest) = target.split_at_mut(head);
    let (lines, tail) = rest.split_at_mut(lines);
    let (from_head, rest) = source.split_at(head.len());
    let (from_lines, from_tail) = rest.split_at(lines.len());
    head.copy_from_slice(from_head);
    stream(from_lines, lines);
    tail.copy_from_slice(from_tail);
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
    if !level.has_avx2() {
        return (0, 0);
    }
    // SAFETY: all lines and their target lines lie in the slices by the check above. The level says that there is AVX2.
    unsafe {
        if let Some(fused) = lines.fused {
            let exact = fused.exact;
            return match fused.kind {
                FusedKind::Multiply(factor) => x86::two_bytes::<2, true>(lines, exact, factor, target, pitch),
                FusedKind::Round => x86::two_bytes::<4, false>(lines, exact, 1.0, target, pitch),
                FusedKind::RoundMultiply(factor) => x86::two_bytes::<4, true>(lines, exact, factor, target, pitch),
            };
        }
        match lines.unit {
            1 => x86::wide_1(lines, target, pitch),
            2 => x86::two_bytes::<2, false>(lines, &|_, _| (), 1.0, target, pitch),
            4 => x86::wide_4(lines, target, pitch),
            8 => x86::wide_8(lines, target, pitch),
            _ => (0, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DType, Load, Program, Step, convert_row};
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
            convert_row(&program, element, made);
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
