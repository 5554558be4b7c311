//! The map of an entry: which blocks are present, with a checksum of each.
//!
//! ```text
//! 0      magic, block size, object size, CRC32C of these      4096 bytes
//! 4096   one word for each block: CRC32C of its bytes, then the mark of presence
//! ```
//!
//! Words are written after the bytes of their blocks, so that a process may die at any instruction. A word that an operating
//! system lost, kept too long or tore is found by the checksum. The file is never mapped: a full disk is an error of a call, not
//! a signal.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};

use super::geometry::{BLOCK_BYTES, block_count};

const MAGIC: [u8; 8] = *b"ckfsmap1";
const HEADER_BYTES: u64 = 4096;
const WORD_BYTES: u64 = 8;
/// Marks the word of a present block.
const PRESENT: u32 = 0x5052_5345;

/// The map of an entry.
#[derive(Debug)]
pub(super) struct BlockMap {
    file: File,
}

impl BlockMap {
    /// Writes an empty map for an object of this size.
    pub(super) fn create(file: File, size_bytes: u64) -> io::Result<Self> {
        file.write_all_at(&header(size_bytes), 0)?;
        file.set_len(HEADER_BYTES + block_count(size_bytes) * WORD_BYTES)?;
        Ok(Self { file })
    }

    /// The map of an entry, or `None` if it is not of an object of this size.
    pub(super) fn open(file: File, size_bytes: u64) -> io::Result<Option<Self>> {
        let expected = header(size_bytes);
        let mut found = vec![0; expected.len()];
        let whole = file.metadata()?.len() == HEADER_BYTES + block_count(size_bytes) * WORD_BYTES;
        if !whole {
            return Ok(None);
        }
        file.read_exact_at(&mut found, 0)?;
        Ok((found == expected).then_some(Self { file }))
    }

    /// The file, for its locks.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// The checksums of blocks; `None` where a block is not present.
    pub(super) fn read(&self, blocks: &Range<u64>) -> io::Result<Vec<Option<u32>>> {
        let mut bytes = vec![0; super::geometry::place((blocks.end - blocks.start) * WORD_BYTES)];
        self.file.read_exact_at(&mut bytes, HEADER_BYTES + blocks.start * WORD_BYTES)?;
        let word = |bytes: &[u8]| {
            let (crc, mark) = bytes.split_at(4);
            (mark == PRESENT.to_le_bytes()).then(|| u32::from_le_bytes([crc[0], crc[1], crc[2], crc[3]]))
        };
        Ok(bytes.chunks_exact(8).map(word).collect())
    }

    /// The next blocks from `first` on whose words were ever written; `None` if there are none. All words between are absent: they are
    /// holes of the file, and are not read.
    pub(super) fn written(&self, first: u64) -> io::Result<Option<Range<u64>>> {
        // The position that these calls set is used by nothing else.
        let start = match seek(&self.file, SeekFrom::Data(HEADER_BYTES + first * WORD_BYTES)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let end = seek(&self.file, SeekFrom::Hole(start))?;
        let block = |place: u64| place.saturating_sub(HEADER_BYTES) / WORD_BYTES;
        Ok(Some(block(start).max(first)..block(end + WORD_BYTES - 1).max(first + 1)))
    }

    /// Marks blocks from `first` on as present. Their bytes were written before.
    pub(super) fn mark(&self, first: u64, checksums: &[u32]) -> io::Result<()> {
        let words = checksums.iter().flat_map(|crc| crc.to_le_bytes().into_iter().chain(PRESENT.to_le_bytes()));
        self.file.write_all_at(&words.collect::<Vec<u8>>(), HEADER_BYTES + first * WORD_BYTES)
    }

    /// Marks blocks as absent.
    pub(super) fn clear(&self, blocks: &Range<u64>) -> io::Result<()> {
        let bytes = vec![0; super::geometry::place((blocks.end - blocks.start) * WORD_BYTES)];
        self.file.write_all_at(&bytes, HEADER_BYTES + blocks.start * WORD_BYTES)
    }
}

fn header(size_bytes: u64) -> Vec<u8> {
    let mut header = Vec::with_capacity(28);
    header.extend(MAGIC);
    header.extend(BLOCK_BYTES.to_le_bytes());
    header.extend(size_bytes.to_le_bytes());
    header.extend(crc32c::crc32c(&header).to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_never_written_is_found_without_reading_it() {
        let (count, marked) = (1 << 20, 700_000);
        let map = BlockMap::create(tempfile::tempfile().unwrap(), count * BLOCK_BYTES).unwrap();
        map.mark(marked, &[7, 8, 9]).unwrap();
        let mut found = 0..0;
        while !found.contains(&marked) {
            found = map.written(found.end).unwrap().unwrap();
        }
        // By pages of the file.
        assert!(found.contains(&(marked + 2)) && found.end - found.start <= 1 << 14, "{found:?}");
        assert_eq!(map.written(found.end).unwrap(), None);
    }

    #[test]
    fn words_are_read_as_written_and_a_map_of_another_object_is_refused() {
        let size = 5 * BLOCK_BYTES + 1;
        let file = tempfile::tempfile().unwrap();
        let map = BlockMap::create(file.try_clone().unwrap(), size).unwrap();
        assert_eq!(map.read(&(0..6)).unwrap(), [None; 6]);
        map.mark(2, &[7, 0]).unwrap();
        assert_eq!(map.read(&(1..5)).unwrap(), [None, Some(7), Some(0), None]);
        assert!(map.written(0).unwrap().is_some_and(|blocks| blocks.contains(&2) && blocks.contains(&3)));
        map.clear(&(2..3)).unwrap();
        assert_eq!(map.read(&(0..6)).unwrap(), [None, None, None, Some(0), None, None]);
        assert!(BlockMap::open(file.try_clone().unwrap(), size).unwrap().is_some());
        assert!(BlockMap::open(file.try_clone().unwrap(), size + 1).unwrap().is_none());
        file.write_all_at(b"x", 3).unwrap();
        assert!(BlockMap::open(file, size).unwrap().is_none());
    }
}
