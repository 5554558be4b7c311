//! The bytes of a complete entry, from its first to its last.

use std::{io, os::unix::fs::FileExt};

use super::cache::{
    BLOCK_BYTES, Entry,
    geometry::{block_count, place},
};

/// Blocks that are read at a time.
const STEP_BLOCKS: u64 = 64;

/// Passes the bytes of a complete entry on, in order, with their checksums compared. Returns false at a block that is not present.
///
/// # Errors
/// The files cannot be read, or `work` fails.
pub(super) fn for_each_part(entry: &Entry, mut work: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<bool> {
    let mut buffer = vec![0; place(STEP_BLOCKS * BLOCK_BYTES)];
    let count = block_count(entry.size_bytes());
    for start in (0..count).step_by(place(STEP_BLOCKS)) {
        let blocks = start..(start + STEP_BLOCKS).min(count);
        let _guards = entry.guard(&blocks)?;
        if !entry.missing(&blocks)?.is_empty() {
            return Ok(false);
        }
        let span = entry.span_of(&blocks);
        let bytes = &mut buffer[..place(span.len())];
        entry.data().read_exact_at(bytes, span.start())?;
        work(bytes)?;
    }
    Ok(true)
}
