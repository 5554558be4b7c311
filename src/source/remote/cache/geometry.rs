//! Blocks and segments of a cached object.

use std::ops::Range;

use super::super::super::ByteSpan;

/// Bytes of a block, the unit of presence. A contiguous shard brings one block more than its bytes on average. A large mesh cuts
/// slices of 0.1 MB: 2 KiB keep the excess below 2 % of them. Each block costs 8 bytes of the map.
pub const BLOCK_BYTES: u64 = 2 << 10;
/// Longest object, in bytes: 64 TiB, more than any service holds. A longer one is refused, before anything is made for
/// it.
pub(crate) const OBJECT_BYTES_MAX: u64 = 1 << 46;
/// A hole of a file takes whole ones of these.
pub(super) const HOLE_BYTES: u64 = 4 << 10;
/// Blocks of a segment, the unit of eviction.
pub(in super::super) const SEGMENT_BLOCKS: u64 = 8192;
/// Bytes of a segment.
pub(in super::super) const SEGMENT_BYTES: u64 = BLOCK_BYTES * SEGMENT_BLOCKS;

/// Number of blocks of an object.
pub(in super::super) const fn block_count(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(BLOCK_BYTES)
}

/// The blocks that hold bytes of a span.
pub(in super::super) const fn blocks_of(span: ByteSpan) -> Range<u64> {
    if span.is_empty() {
        return 0..0;
    }
    span.start() / BLOCK_BYTES..span.end().div_ceil(BLOCK_BYTES)
}

/// The bytes of blocks of an object of this size.
pub(in super::super) fn span_of(blocks: &Range<u64>, size_bytes: u64) -> ByteSpan {
    let start = (blocks.start * BLOCK_BYTES).min(size_bytes);
    ByteSpan::new(start, (blocks.end * BLOCK_BYTES).min(size_bytes).max(start)).expect("the end is at least the start")
}

/// The segments that hold blocks, as places in a list.
pub(in super::super) fn segments_of(blocks: &Range<u64>) -> Range<usize> {
    if blocks.is_empty() {
        return 0..0;
    }
    place(blocks.start / SEGMENT_BLOCKS)..place(blocks.end.div_ceil(SEGMENT_BLOCKS))
}

/// The blocks of a segment of an object with this many blocks.
pub(in super::super) fn blocks_of_segment(segment: usize, block_count: u64) -> Range<u64> {
    let start = segment as u64 * SEGMENT_BLOCKS;
    start..(start + SEGMENT_BLOCKS).min(block_count)
}

/// Blocks in parts of at most this many.
pub(super) fn steps(blocks: Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
    let end = blocks.end;
    blocks.step_by(place(step)).map(move |start| start..(start + step).min(end))
}

/// A number as a place in memory.
pub(in super::super) fn place(number: u64) -> usize {
    usize::try_from(number).expect("what is in memory or mapped has places of 64 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_blocks_and_segments() {
        let span = |start, end| ByteSpan::new(start, end).unwrap();
        assert_eq!(blocks_of(span(5, 5)), 0..0);
        assert_eq!(blocks_of(span(BLOCK_BYTES - 1, BLOCK_BYTES)), 0..1);
        assert_eq!(blocks_of(span(BLOCK_BYTES - 1, BLOCK_BYTES + 1)), 0..2);
        assert_eq!(span_of(&(1..2), BLOCK_BYTES + 3), span(BLOCK_BYTES, BLOCK_BYTES + 3));
        assert_eq!(block_count(0), 0);
        assert_eq!(segments_of(&(0..0)), 0..0);
        assert_eq!(segments_of(&(SEGMENT_BLOCKS - 1..SEGMENT_BLOCKS + 1)), 0..2);
        assert_eq!(blocks_of_segment(1, SEGMENT_BLOCKS + 5), SEGMENT_BLOCKS..SEGMENT_BLOCKS + 5);
    }
}
