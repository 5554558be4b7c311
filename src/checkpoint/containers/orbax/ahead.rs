//! Chunks that are to be decoded before a reader asks for them: which ones, in which order, by how many threads, and how many bytes
//! of them no reader has requested yet.

use std::{
    collections::{HashMap, VecDeque},
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use lru::LruCache;

/// A chunk: number of the decoded file, and number in it.
pub(super) type ChunkKey = (u32, u64);

/// Most chunks that may wait to be decoded. More are refused: the reader that needs them decodes them itself.
const QUEUE_MAX: usize = 256;

/// Time after a reader requested a chunk in which nobody is expected to want it again. Expectations come from other threads, perhaps
/// after the reader, and a chunk that was read to its end may be gone then.
const ASKED_LATELY: Duration = Duration::from_millis(500);

/// Most chunks of which it is known when a reader requested them.
const ASKED_MAX: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// A chunk that was decoded ahead is no longer expected to be read after readers have requested this many others.
const STALE_AFTER: u64 = 256;

/// A chunk that a reader will want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpectedChunk {
    pub(super) key: ChunkKey,
    /// Bytes of the decoded chunk.
    pub(super) len: u64,
    /// Bytes of its stored form that are read from a file.
    pub(super) stored_len: u64,
}

/// A chunk that was decoded ahead, or is being decoded.
#[derive(Clone, Copy, Debug)]
struct Unread {
    len: u64,
    /// Number of chunks that readers had requested.
    since: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Ahead {
    queue: VecDeque<ExpectedChunk>,
    unread: HashMap<ChunkKey, Unread>,
    unread_bytes: u64,
    /// Threads that decode ahead.
    threads: usize,
    /// Chunks that readers have requested so far.
    asked: u64,
    /// When a reader requested a chunk.
    asked_at: LruCache<ChunkKey, Instant>,
}

impl Default for Ahead {
    fn default() -> Self {
        let asked_at = LruCache::new(ASKED_MAX);
        Self { queue: VecDeque::new(), unread: HashMap::new(), unread_bytes: 0, threads: 0, asked: 0, asked_at }
    }
}

impl Ahead {
    /// Queues a chunk, unless it is queued already, too many are, or a reader has just had it.
    pub(super) fn expect(&mut self, chunk: ExpectedChunk) {
        if self.asked_at.peek(&chunk.key).is_some_and(|asked| asked.elapsed() < ASKED_LATELY) {
            return;
        }
        if self.queue.len() < QUEUE_MAX && !self.queue.iter().any(|queued| queued.key == chunk.key) {
            self.queue.push_back(chunk);
        }
    }

    /// A reader asks for a chunk: it need not be decoded ahead any more.
    pub(super) fn ask(&mut self, key: ChunkKey) {
        self.asked += 1;
        self.asked_at.put(key, Instant::now());
        self.queue.retain(|queued| queued.key != key);
        self.forget(key);
    }

    /// A chunk is no longer in memory, or was requested.
    pub(super) fn forget(&mut self, key: ChunkKey) {
        if let Some(unread) = self.unread.remove(&key) {
            self.unread_bytes -= unread.len;
        }
    }

    /// The chunk to decode next, if chunks that no reader has requested yet then take at most `bytes_max` bytes.
    pub(super) fn next(&self, bytes_max: u64) -> Option<ExpectedChunk> {
        self.queue.front().copied().filter(|next| self.unread_bytes.saturating_add(next.len) <= bytes_max)
    }

    /// Takes the next chunk from the queue, to decode it.
    pub(super) fn begin(&mut self) {
        if let Some(ExpectedChunk { key, len, .. }) = self.queue.pop_front() {
            self.forget(key);
            self.unread.insert(key, Unread { len, since: self.asked });
            self.unread_bytes += len;
        }
    }

    /// A chunk whose reader has not come, if chunks wait to be decoded for others.
    pub(super) fn stale(&self) -> Option<ChunkKey> {
        self.queue.front()?;
        let is_stale = |unread: &Unread| self.asked - unread.since >= STALE_AFTER;
        self.unread.iter().find(|(_, unread)| is_stale(unread)).map(|(key, _)| *key)
    }

    /// Drops the queue.
    pub(super) fn cancel(&mut self) {
        self.queue.clear();
    }

    /// Whether one more thread of at most `threads_max` is needed. It counts from now on.
    pub(super) fn start_thread(&mut self, threads_max: usize) -> bool {
        let is_needed = self.threads < threads_max.min(self.queue.len());
        self.threads += usize::from(is_needed);
        is_needed
    }

    /// A thread ends.
    pub(super) fn end_thread(&mut self) {
        self.threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(number: u64) -> ExpectedChunk {
        ExpectedChunk { key: (0, number), len: 100, stored_len: 50 }
    }

    #[test]
    fn chunks_are_decoded_in_order_and_few_before_they_are_read() {
        let mut ahead = Ahead::default();
        (0..5).chain(0..5).for_each(|number| ahead.expect(chunk(number)));
        ahead.ask((0, 1));
        assert_eq!(ahead.next(250), Some(chunk(0)));
        ahead.begin();
        assert_eq!(ahead.next(250), Some(chunk(2)));
        ahead.begin();
        assert_eq!(ahead.next(250), None, "two are unread");
        ahead.ask((0, 0));
        assert_eq!(ahead.next(250), Some(chunk(3)));
        ahead.forget((0, 2));
        assert_eq!(ahead.next(100), Some(chunk(3)));
        ahead.cancel();
        assert_eq!((ahead.next(1000), ahead.unread_bytes), (None, 0));
    }

    #[test]
    fn a_chunk_that_a_reader_just_had_is_not_expected() {
        let mut ahead = Ahead::default();
        ahead.ask((0, 1));
        (0..2).for_each(|number| ahead.expect(chunk(number)));
        ahead.begin();
        assert_eq!(ahead.next(1000), None, "the expectation came late");
        *ahead.asked_at.peek_mut(&(0, 1)).unwrap() -= ASKED_LATELY;
        ahead.expect(chunk(1));
        assert_eq!(ahead.next(1000), Some(chunk(1)), "another reader");
    }

    #[test]
    fn a_chunk_whose_reader_does_not_come_is_stale() {
        let mut ahead = Ahead::default();
        ahead.expect(chunk(0));
        ahead.begin();
        (1..STALE_AFTER).for_each(|number| ahead.ask((1, number)));
        ahead.expect(chunk(1));
        assert_eq!(ahead.stale(), None);
        ahead.ask((1, 0));
        assert_eq!(ahead.stale(), Some((0, 0)));
        ahead.cancel();
        assert_eq!(ahead.stale(), None, "nobody needs its room");
    }

    #[test]
    fn there_are_as_many_threads_as_chunks_up_to_a_limit() {
        let mut ahead = Ahead::default();
        assert!(!ahead.start_thread(4));
        (0..2000).for_each(|number| ahead.expect(chunk(number)));
        assert_eq!((0..9).filter(|_| ahead.start_thread(4)).count(), 4);
        ahead.end_thread();
        assert!(ahead.start_thread(4));
        assert_eq!(ahead.queue.len(), QUEUE_MAX);
    }
}
