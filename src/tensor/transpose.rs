//! Transposes of small blocks: from a scratch in the first-level cache to rows of the target.
//!
//! The block's source rows lie in the scratch one after another; element `[r, c]` goes to `target[c * pitch + r]`, so
//! that every target row receives one contiguous segment, whole cache lines where the block is large enough. Elements
//! of 1, 2, 4 and 8 bytes are transposed in registers on x86-64, whose baseline has the instructions; all others, and
//! the edges of a block, one by one.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "registers must stay registers")]

/// A block in the scratch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Bytes of one element.
    pub(super) unit: usize,
    /// Source rows, which become target columns.
    pub(super) rows: usize,
    /// Source columns, which become target rows.
    pub(super) columns: usize,
    /// Bytes from one source row to the next in the scratch.
    pub(super) source_pitch: usize,
    /// Bytes from one target row to the next.
    pub(super) target_pitch: usize,
}

impl Block {
    /// Asserts that all of the block lies in both slices.
    fn check(&self, source: &[u8], target: &[u8]) {
        let end = |lines: usize, pitch: usize, cells: usize| {
            let start = lines.saturating_sub(1).checked_mul(pitch)?;
            start.checked_add(cells.checked_mul(self.unit)?)
        };
        let fits = end(self.rows, self.source_pitch, self.columns).is_some_and(|end| end <= source.len())
            && end(self.columns, self.target_pitch, self.rows).is_some_and(|end| end <= target.len());
        assert!(fits, "{self:?} exceeds {} source or {} target bytes", source.len(), target.len());
    }
}

/// Asks for the cache lines of `length` bytes from `start` on, as far as they lie in `source`.
#[inline]
pub(super) fn prefetch(source: &[u8], start: usize, length: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (start..start + length).step_by(64) {
        if let Some(byte) = source.get(offset) {
            // SAFETY: prefetching has no effect but on time; the address is that of a live byte anyway.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(byte).cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, start, length);
}

/// Transposes `block` from `source` to `target`, both beginning with its first element.
pub(super) fn transpose(block: Block, source: &[u8], target: &mut [u8]) {
    block.check(source, target);
    let (rows, columns) = registers(block, source, target);
    for (edge_rows, edge_columns) in [(rows..block.rows, 0), (0..rows, columns)] {
        match block.unit {
            1 => edge::<1>(block, edge_rows, edge_columns, source, target),
            2 => edge::<2>(block, edge_rows, edge_columns, source, target),
            3 => edge::<3>(block, edge_rows, edge_columns, source, target),
            4 => edge::<4>(block, edge_rows, edge_columns, source, target),
            8 => edge::<8>(block, edge_rows, edge_columns, source, target),
            16 => edge::<16>(block, edge_rows, edge_columns, source, target),
            unit => {
                for row in edge_rows {
                    for column in edge_columns..block.columns {
                        let from = row * block.source_pitch + column * unit;
                        let to = column * block.target_pitch + row * unit;
                        target[to..to + unit].copy_from_slice(&source[from..from + unit]);
                    }
                }
            }
        }
    }
}

/// Transposes rows `rows` of the columns from `column_start` on, one element at a time.
#[inline(always)]
fn edge<const UNIT: usize>(
    block: Block,
    rows: std::ops::Range<usize>,
    column_start: usize,
    source: &[u8],
    target: &mut [u8],
) {
    for column in column_start..block.columns {
        let line = &mut target[column * block.target_pitch..];
        for row in rows.clone() {
            let from = row * block.source_pitch + column * UNIT;
            line[row * UNIT..][..UNIT].copy_from_slice(&source[from..][..UNIT]);
        }
    }
}

/// Transposes as many rows and columns as fill registers, and says how many those were.
#[cfg(not(target_arch = "x86_64"))]
fn registers(_: Block, _: &[u8], _: &mut [u8]) -> (usize, usize) {
    (0, 0)
}

/// Transposes as many rows and columns as fill registers, and says how many those were.
#[cfg(target_arch = "x86_64")]
fn registers(block: Block, source: &[u8], target: &mut [u8]) -> (usize, usize) {
    let side = match block.unit {
        1 => 16,
        2 => 8,
        4 => 4,
        8 => 2,
        _ => return (0, 0),
    };
    let (rows, columns) = (block.rows / side * side, block.columns / side * side);
    block.check(source, target);
    for column in (0..columns).step_by(side) {
        for row in (0..rows).step_by(side) {
            let from = source[row * block.source_pitch + column * block.unit..].as_ptr();
            let to = target[column * block.target_pitch + row * block.unit..].as_mut_ptr();
            // SAFETY: each kernel touches `side` lines of 16 bytes (`side * unit` is 16) at both ends. As `row + side`
            // is at most `rows` and `column + side` at most `columns`, those are cells of the block, all of which lie
            // in the slices by the check above. The slices cannot overlap, one being borrowed mutably.
            unsafe {
                match block.unit {
                    1 => x86::square_1(from, block.source_pitch, to, block.target_pitch),
                    2 => x86::square_2(from, block.source_pitch, to, block.target_pitch),
                    4 => x86::square_4(from, block.source_pitch, to, block.target_pitch),
                    _ => x86::square_8(from, block.source_pitch, to, block.target_pitch),
                }
            }
        }
    }
    (rows, columns)
}

/// Squares of 16-byte lines, with SSE2, which is part of x86-64. Each function asks of its caller that all lines of
/// the square, 16 bytes at `from + i * source_pitch` and at `to + i * target_pitch`, are valid and do not overlap.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_setzero_si128, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpackhi_epi16,
        _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpacklo_epi8, _mm_unpacklo_epi16, _mm_unpacklo_epi32,
        _mm_unpacklo_epi64,
    };

    #[inline(always)]
    unsafe fn load<const N: usize>(from: *const u8, pitch: usize) -> [__m128i; N] {
        // SAFETY: SSE2 is there; the lines are valid by the contract of the module.
        unsafe {
            let mut lines = [_mm_setzero_si128(); N];
            for (index, line) in lines.iter_mut().enumerate() {
                *line = _mm_loadu_si128(from.add(index * pitch).cast());
            }
            lines
        }
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
    pub(super) unsafe fn square_1(from: *const u8, source_pitch: usize, to: *mut u8, target_pitch: usize) {
        // SAFETY: passed on.
        let mut lines = unsafe { load::<16>(from, source_pitch) };
        for _ in 0..4 {
            lines = shuffle!(lines, 16, _mm_unpacklo_epi8, _mm_unpackhi_epi8);
        }
        // SAFETY: passed on.
        unsafe { store(lines, to, target_pitch) };
    }

    #[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows SSE2 to be enabled")]
    pub(super) unsafe fn square_2(from: *const u8, source_pitch: usize, to: *mut u8, target_pitch: usize) {
        // SAFETY: passed on.
        let mut lines = unsafe { load::<8>(from, source_pitch) };
        for _ in 0..3 {
            lines = shuffle!(lines, 8, _mm_unpacklo_epi16, _mm_unpackhi_epi16);
        }
        // SAFETY: passed on.
        unsafe { store(lines, to, target_pitch) };
    }

    #[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows SSE2 to be enabled")]
    pub(super) unsafe fn square_4(from: *const u8, source_pitch: usize, to: *mut u8, target_pitch: usize) {
        // SAFETY: passed on.
        let mut lines = unsafe { load::<4>(from, source_pitch) };
        for _ in 0..2 {
            lines = shuffle!(lines, 4, _mm_unpacklo_epi32, _mm_unpackhi_epi32);
        }
        // SAFETY: passed on.
        unsafe { store(lines, to, target_pitch) };
    }

    #[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows SSE2 to be enabled")]
    pub(super) unsafe fn square_8(from: *const u8, source_pitch: usize, to: *mut u8, target_pitch: usize) {
        // SAFETY: passed on.
        let lines = unsafe { load::<2>(from, source_pitch) };
        let lines = shuffle!(lines, 2, _mm_unpacklo_epi64, _mm_unpackhi_epi64);
        // SAFETY: passed on.
        unsafe { store(lines, to, target_pitch) };
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
                transpose(Block { unit, rows, columns, source_pitch, target_pitch }, &source, &mut target);
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
    #[should_panic(expected = "exceeds 15 source or 16 target bytes")]
    fn short_slices_are_refused() {
        let block = Block { unit: 4, rows: 2, columns: 2, source_pitch: 8, target_pitch: 8 };
        transpose(block, &[0; 15], &mut [0; 16]);
    }
}
