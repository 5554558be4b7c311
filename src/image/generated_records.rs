//! Files of very many rows; any span is generated when it is read.
//!
//! Metadata with a row for each tensor and each device takes gigabytes for a large model on many devices. Such
//! a file is never stored: its [`GeneratedRecords`] know the length of each row without its bytes, and [`GeneratedFile`] generates the blocks of rows
//! that a read touches. The file is a list of *groups*, for example one for each tensor; a group is a list of *blocks*, for
//! example of 256 devices each. Only the starts of the groups are stored, 8 bytes for each.
//!
//! The law: a block's bytes are always the same, and their number agrees with the block's ends.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;

/// The contents of a file of rows.
pub trait GeneratedRecords: Send + Sync {
    /// First byte of each group, ascending, and after them the length of the file.
    fn starts(&self) -> &[u64];

    /// Ends of a group's blocks, counted from the group's first byte; ascending. The last is the length of the group.
    /// By default a group is one block.
    fn block_ends(&self, group: usize) -> Vec<u64> {
        vec![self.starts()[group + 1] - self.starts()[group]]
    }

    /// Appends the bytes of a block.
    fn write(&self, group: usize, block: usize, out: &mut Vec<u8>);
}

/// Most bytes of blocks that a file caches for later reads. One block is kept whatever its size: readers read it in parts.
const KEPT_BYTES_MAX: u64 = 4 << 20;

/// Most blocks that a file caches.
const KEPT_MAX: usize = 16;

type BlockKey = (usize, usize);

/// Starts of groups, from the groups' lengths.
pub(super) fn starts(lengths: impl Iterator<Item = u64>) -> Vec<u64> {
    let ends = lengths.scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Starts of so many groups of one block each, which are written to learn their lengths.
pub(super) fn written_starts(rows: &dyn GeneratedRecords, groups: usize) -> Vec<u64> {
    let mut count = byte_counter();
    starts((0..groups).map(|group| count(&|out| rows.write(group, 0, out))))
}

type WriteBytes<'a> = &'a dyn Fn(&mut Vec<u8>);

/// Counts the bytes that a call writes.
pub(super) fn byte_counter() -> impl FnMut(WriteBytes<'_>) -> u64 {
    let mut bytes = Vec::new();
    move |write| {
        bytes.clear();
        write(&mut bytes);
        bytes.len() as u64
    }
}

/// A file of rows.
pub struct GeneratedFile {
    rows: Arc<dyn GeneratedRecords>,
    /// Blocks that were partly read, the most recent first.
    kept: Mutex<VecDeque<(BlockKey, Arc<[u8]>)>>,
}

impl GeneratedFile {
    /// A file of these rows.
    pub fn new(rows: Arc<dyn GeneratedRecords>) -> Self {
        Self { rows, kept: Mutex::default() }
    }

    /// Length of the file.
    pub fn len_bytes(&self) -> u64 {
        self.rows.starts().last().copied().unwrap_or(0)
    }

    /// `len` bytes from `offset` on, fewer at the end of the file.
    ///
    /// # Panics
    /// If a block does not have the bytes that its ends state.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let end = offset.saturating_add(len as u64).min(self.len_bytes());
        let mut bytes = Vec::new();
        let starts = self.rows.starts();
        let mut at = offset;
        let mut group = starts.partition_point(|start| *start <= at).saturating_sub(1);
        while at < end {
            let ends = self.rows.block_ends(group);
            assert_eq!(ends.last().copied().unwrap_or(0), starts[group + 1] - starts[group], "length of group {group}");
            let first = ends.partition_point(|end| starts[group] + end <= at);
            for block in first..ends.len() {
                let low = starts[group] + if block == 0 { 0 } else { ends[block - 1] };
                let high = starts[group] + ends[block];
                if at >= end {
                    break;
                }
                self.take((group, block), low..high, at..end.min(high), &mut bytes);
                at = end.min(high);
            }
            group += 1;
        }
        bytes
    }

    /// Appends the bytes `wanted` of a block, whose position in the file is `whole`; both are byte ranges of the file.
    fn take(&self, key: BlockKey, whole: std::ops::Range<u64>, wanted: std::ops::Range<u64>, bytes: &mut Vec<u8>) {
        let place = |at: u64| usize::try_from(at - whole.start).expect("a block fits memory");
        let part = place(wanted.start)..place(wanted.end);
        if let Some(kept) = self.kept(key) {
            bytes.extend_from_slice(&kept[part]);
            return;
        }
        if wanted == whole {
            let before = bytes.len();
            self.rows.write(key.0, key.1, bytes);
            assert_eq!(bytes.len() - before, part.len(), "length of block {key:?}");
            return;
        }
        let mut block = Vec::with_capacity(place(whole.end));
        self.rows.write(key.0, key.1, &mut block);
        assert_eq!(block.len(), place(whole.end), "length of block {key:?}");
        bytes.extend_from_slice(&block[part]);
        self.keep(key, block.into());
    }

    fn kept(&self, key: BlockKey) -> Option<Arc<[u8]>> {
        let kept = self.kept.lock();
        kept.iter().find(|(known, _)| *known == key).map(|(_, bytes)| Arc::clone(bytes))
    }

    fn keep(&self, key: BlockKey, bytes: Arc<[u8]>) {
        let mut kept = self.kept.lock();
        kept.push_front((key, bytes));
        let ends = starts(kept.iter().take(KEPT_MAX).map(|(_, bytes)| bytes.len() as u64));
        let count = ends.iter().skip(1).take_while(|end| **end <= KEPT_BYTES_MAX).count();
        kept.truncate(count.max(1));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Groups of blocks of these bytes.
    #[derive(Debug)]
    struct Written {
        groups: Vec<Vec<Vec<u8>>>,
        starts: Vec<u64>,
    }

    impl Written {
        fn new(groups: Vec<Vec<Vec<u8>>>) -> Self {
            let length = |group: &Vec<Vec<u8>>| group.iter().map(|block| block.len() as u64).sum();
            Self { starts: starts(groups.iter().map(length)), groups }
        }
    }

    impl GeneratedRecords for Written {
        fn starts(&self) -> &[u64] {
            &self.starts
        }

        fn block_ends(&self, group: usize) -> Vec<u64> {
            starts(self.groups[group].iter().map(|block| block.len() as u64)).split_off(1)
        }

        fn write(&self, group: usize, block: usize, out: &mut Vec<u8>) {
            out.extend(&self.groups[group][block]);
        }
    }

    proptest! {
        #[test]
        fn any_span_is_that_of_the_whole(
            groups in prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..5), 0..7),
            spans in prop::collection::vec((0_u64..99, 0_usize..40), 1..20),
        ) {
            let whole = groups.concat().concat();
            let file = GeneratedFile::new(Arc::new(Written::new(groups)));
            prop_assert_eq!(file.len_bytes(), whole.len() as u64);
            for (offset, len) in spans {
                let start = usize::try_from(offset).unwrap().min(whole.len());
                prop_assert_eq!(file.read(offset, len), &whole[start..whole.len().min(start + len)]);
            }
            prop_assert_eq!(file.read(0, usize::MAX), whole);
        }
    }

    #[test]
    fn the_block_cache_is_bounded() {
        let block = vec![7; 1 << 20];
        let file = GeneratedFile::new(Arc::new(Written::new(vec![
            vec![block; 40],
            vec![vec![1; 9 << 20]],
            vec![vec![2; 3]; 50],
        ])));
        let kept = || file.kept.lock().iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        for at in 0..40 {
            assert_eq!(file.read((at << 20) + 5, 9), [7; 9]);
            assert!(kept() <= KEPT_BYTES_MAX, "{}", kept());
        }
        assert_eq!(file.read((40 << 20) + 5, 9), [1; 9]);
        assert_eq!(kept(), 9 << 20, "a block that is larger than the limit is kept alone");
        for at in 0..50 {
            assert_eq!(file.read((49 << 20) + 3 * at + 1, 1), [2]);
        }
        assert_eq!(file.kept.lock().len(), KEPT_MAX);
    }
}
