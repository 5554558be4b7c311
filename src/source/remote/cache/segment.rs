//! What this process knows of a segment: whether it holds the lock, and which blocks it has verified.

use std::{
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::geometry::{SEGMENT_BLOCKS, place};

const BITS: u64 = 64;

/// One bit for each block of a segment; costs nothing until the first is set.
#[derive(Debug, Default)]
pub(super) struct BlockBits {
    words: OnceLock<Box<[AtomicU64]>>,
}

impl BlockBits {
    /// Sets the bits of `blocks`, counted within the segment. Returns the number that were not set.
    pub(super) fn set(&self, blocks: Range<u64>) -> u64 {
        let words = self.words.get_or_init(|| (0..SEGMENT_BLOCKS / BITS).map(|_| AtomicU64::new(0)).collect());
        let mut new = 0;
        for_each_word(blocks, |word, mask| {
            new += u64::from((mask & !words[word].fetch_or(mask, Ordering::AcqRel)).count_ones());
        });
        new
    }

    /// Clears the bits of `blocks`. Returns the number that were set.
    pub(super) fn clear(&self, blocks: Range<u64>) -> u64 {
        let Some(words) = self.words.get() else { return 0 };
        let mut old = 0;
        for_each_word(blocks, |word, mask| {
            // Most calls find nothing: a write would move the cache line between processors.
            if words[word].load(Ordering::Acquire) & mask != 0 {
                old += u64::from((mask & words[word].fetch_and(!mask, Ordering::AcqRel)).count_ones());
            }
        });
        old
    }

    /// Whether all bits of `blocks` are set.
    pub(super) fn has_all(&self, blocks: Range<u64>) -> bool {
        let Some(words) = self.words.get() else { return blocks.is_empty() };
        let mut all = true;
        for_each_word(blocks, |word, mask| all &= words[word].load(Ordering::Acquire) & mask == mask);
        all
    }

    /// Whether one bit is set.
    #[cfg(test)]
    pub(super) fn has(&self, block: u64) -> bool {
        self.has_all(block..block + 1)
    }
}

fn for_each_word(blocks: Range<u64>, mut work: impl FnMut(usize, u64)) {
    let mut at = blocks.start;
    while at < blocks.end {
        let word = at / BITS;
        let end = ((word + 1) * BITS).min(blocks.end);
        let count = end - at;
        let ones = if count == BITS { u64::MAX } else { (1 << count) - 1 };
        work(place(word), ones << (at % BITS));
        at = end;
    }
}

/// Segments that are made together.
const GROUP: usize = 1024;

/// The segments of an object. What is never used takes no memory: the length of an object is a number that its service says.
#[derive(Debug)]
pub(super) struct SegmentMap {
    groups: Box<[OnceLock<Box<[CachedSegment]>>]>,
}

impl SegmentMap {
    /// This number of segments.
    pub(super) fn new(count: usize) -> Self {
        Self { groups: (0..count.div_ceil(GROUP)).map(|_| OnceLock::new()).collect() }
    }

    /// The segment at a place, which is made if it was never used.
    pub(super) fn at(&self, place: usize) -> &CachedSegment {
        let make = || (0..GROUP).map(|_| CachedSegment::default()).collect();
        &self.groups[place / GROUP].get_or_init(make)[place % GROUP]
    }

    /// The segment at a place, if one near it was ever used.
    pub(super) fn used(&self, place: usize) -> Option<&CachedSegment> {
        Some(&self.groups[place / GROUP].get()?[place % GROUP])
    }

    /// All that may have been used, with their places.
    pub(super) fn all_used(&self) -> impl Iterator<Item = (usize, &CachedSegment)> {
        let groups = self.groups.iter().enumerate().filter_map(|(number, group)| Some((number, group.get()?)));
        groups.flat_map(|(number, group)| {
            group.iter().enumerate().map(move |(at, segment)| (number * GROUP + at, segment))
        })
    }
}

/// A segment in this process.
#[derive(Debug, Default)]
pub(super) struct CachedSegment {
    /// Shared by those that read or write its bytes; exclusive for eviction. Only `try_write` is ever used, so that a reader may
    /// take it twice.
    users: RwLock<()>,
    /// Whether this process holds the shared lock against other processes. Set under `holding`.
    held: AtomicBool,
    holding: Mutex<()>,
    /// Blocks whose bytes this process has verified or written itself. Valid while the lock is held.
    pub(super) verified: BlockBits,
    /// Those of them that no reader has requested yet.
    pub(super) ahead: BlockBits,
    /// Time of the last use, in milliseconds of the process.
    used_ms: AtomicU64,
    /// Until this time the lock is not taken again, so that another process may evict. In milliseconds of the process.
    given_up_until_ms: AtomicU64,
}

impl CachedSegment {
    /// Notes a use: `now_ms` in milliseconds of the process.
    pub(super) fn touch(&self, now_ms: u64) {
        // A store by every reader would move the cache line between processors.
        if self.used_ms.load(Ordering::Relaxed) != now_ms {
            self.used_ms.store(now_ms, Ordering::Relaxed);
        }
    }

    /// Time of the last use.
    pub(super) fn used_ms(&self) -> u64 {
        self.used_ms.load(Ordering::Relaxed)
    }

    /// Keeps the segment from eviction by this process until the guard is dropped. `hold` takes the lock that keeps other processes
    /// from it, if this process does not have it.
    pub(super) fn guard<E>(&self, hold: impl FnOnce() -> Result<(), E>) -> Result<RwLockReadGuard<'_, ()>, E> {
        let guard = self.users.read();
        if !self.held.load(Ordering::Acquire) {
            let _holding = self.holding.lock();
            if !self.held.load(Ordering::Acquire) {
                hold()?;
                self.held.store(true, Ordering::Release);
            }
        }
        Ok(guard)
    }

    /// The segment alone, or `None` if a thread of this process uses it.
    pub(super) fn alone(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.users.try_write()
    }

    /// Leaves the segment to other processes until a time, in milliseconds of the process. The caller is [`Self::alone`].
    pub(super) fn give_up(&self, until_ms: u64) {
        self.given_up_until_ms.store(until_ms, Ordering::Release);
    }

    /// Whether the segment is left to other processes at this time.
    pub(super) fn is_given_up(&self, now_ms: u64) -> bool {
        now_ms < self.given_up_until_ms.load(Ordering::Acquire)
    }

    /// Whether this process holds the lock.
    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// Forgets what this process knows, since it gives up the lock. The caller is [`Self::alone`]. Returns the number of blocks
    /// that were verified.
    pub(super) fn forget(&self) -> u64 {
        self.held.store(false, Ordering::Release);
        self.ahead.clear(0..SEGMENT_BLOCKS);
        self.verified.clear(0..SEGMENT_BLOCKS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_counted_once() {
        let bits = BlockBits::default();
        assert!(!bits.has(0) && bits.has_all(5..5) && bits.clear(0..9) == 0);
        assert_eq!(bits.set(60..200), 140);
        assert_eq!(bits.set(0..61), 60);
        assert!(bits.has_all(0..200) && !bits.has(200) && !bits.has_all(199..201));
        assert_eq!(bits.clear(64..128), 64);
        assert!(bits.has(63) && !bits.has(64) && !bits.has(127) && bits.has(128));
        assert_eq!(bits.set(0..SEGMENT_BLOCKS), SEGMENT_BLOCKS - 136);
    }

    #[test]
    fn a_used_segment_is_not_given_alone_and_a_reader_may_take_it_twice() {
        let segment = CachedSegment::default();
        let mut held = 0;
        let mut hold = || {
            held += 1;
            Ok::<(), ()>(())
        };
        let first = segment.guard(&mut hold).unwrap();
        let second = segment.guard(&mut hold).unwrap();
        assert!(segment.alone().is_none());
        drop((first, second));
        let alone = segment.alone().unwrap();
        segment.verified.set(0..3);
        assert_eq!((segment.is_held(), segment.forget(), segment.is_held()), (true, 3, false));
        drop(alone);
        drop(segment.guard(&mut hold).unwrap());
        assert_eq!(held, 2);
    }
}
