//! Decoded chunks in memory: a byte-bounded cache, one decoding per chunk, and buffers that are used again.
//!
//! All memory counts against one bound: chunks that are kept, chunks that readers still copy from, stored bytes while they are
//! decoded, and spare buffers. A thread that needs room waits until there is some. Only a chunk that is larger than the bound by
//! itself is decoded nevertheless, and then alone.
//!
//! Fresh memory costs a page fault for every 4 KiB, a fifth of the time that decoding takes, so that buffers are kept for the next
//! chunk. A chunk whose bytes were all read once is likely not needed again: its buffer is used before fresh memory is, so that one
//! reader of a large tensor takes the memory of a few chunks only.
//!
//! Chunks may be decoded ahead of their readers ([`ChunkPool::expect`]). These take at most half of the bound, and only room that is
//! free or that chunks leave which were read.

use std::{
    collections::{HashSet, VecDeque},
    fmt,
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ckfs_source::BufferMemory;
use ckfs_tensor::to_usize;
use lru::LruCache;

use super::ahead::{Ahead, ChunkKey, ExpectedChunk};

/// Bound until one is set, in bytes.
const BYTES_MAX: u64 = 256 << 20;

/// Time after which a thread that waits for another checks whether it should go on waiting.
const PATIENCE: Duration = Duration::from_millis(200);

/// Waits in which nothing changed, after which a thread goes on without room if no thread decodes: it may wait for a chunk that it
/// holds itself.
const IDLE_WAITS_MAX: u32 = 5;

/// The cache.
pub(super) struct ChunkPool {
    state: Mutex<State>,
    /// Room, or a chunk, has become available.
    changed: Condvar,
}

struct State {
    bytes_max: u64,
    ready: LruCache<ChunkKey, Arc<Decoded>>,
    decoding: HashSet<ChunkKey>,
    /// Chunks whose bytes were all read, the first ones first.
    consumed: VecDeque<ChunkKey>,
    /// Bytes of all buffers, in use and spare.
    bytes: u64,
    spare: Vec<BufferMemory>,
    spare_bytes: u64,
    decoded: u64,
    ahead: Ahead,
}

impl fmt::Debug for ChunkPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkPool").field("bytes_max", &self.lock().bytes_max).finish_non_exhaustive()
    }
}

/// A buffer of the pool, returned to it when dropped.
pub(super) struct ChunkBuffer<'p> {
    pool: &'p ChunkPool,
    /// At least as long as asked for.
    bytes: BufferMemory,
    len: usize,
}

impl ChunkBuffer<'_> {
    pub(super) fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl Drop for ChunkBuffer<'_> {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.bytes));
    }
}

/// A decoded chunk, counted until its last user has dropped it.
pub(super) struct Decoded {
    pool: Arc<ChunkPool>,
    bytes: BufferMemory,
    len: usize,
    /// Bytes that were read so far, each time counted.
    read: AtomicU64,
}

impl Deref for Decoded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Drop for Decoded {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.bytes));
    }
}

/// Notes that this thread decodes a chunk, until it is dropped.
struct Decoding<'p>(&'p ChunkPool, ChunkKey);

impl Drop for Decoding<'_> {
    fn drop(&mut self) {
        self.0.lock().decoding.remove(&self.1);
        self.0.changed.notify_all();
    }
}

impl ChunkPool {
    pub(super) fn new() -> Arc<Self> {
        let state = State {
            bytes_max: BYTES_MAX,
            ready: LruCache::unbounded(),
            decoding: HashSet::new(),
            consumed: VecDeque::new(),
            bytes: 0,
            spare: Vec::new(),
            spare_bytes: 0,
            decoded: 0,
            ahead: Ahead::default(),
        };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Sets the most bytes of all buffers.
    pub(super) fn bound(&self, bytes_max: u64) {
        self.lock().bytes_max = bytes_max;
        loop {
            let room = self.lock().make_room([], Urgency::Wanted);
            if !matches!(room, Room::Dropped(_)) {
                return;
            }
        }
    }

    /// Bytes of all buffers now, spare ones included.
    pub(super) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Number of chunks decoded so far.
    pub(super) fn decoded(&self) -> u64 {
        self.lock().decoded
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The chunk of this key, if it is in memory.
    pub(super) fn find(&self, key: ChunkKey) -> Option<Arc<Decoded>> {
        let mut state = self.lock();
        let found = state.ready.get(&key).cloned()?;
        state.ahead.ask(key);
        Some(found)
    }

    /// The chunk of this key, which has `len` bytes. If it is not in memory, one thread decodes it: `decode` fills a buffer for the
    /// stored bytes, of `stored_len`, and from it the one for the chunk. Other threads that want it wait, and ask `goes_on` from
    /// time to time whether they should.
    ///
    /// # Errors
    /// That of `decode` or of `goes_on`.
    pub(super) fn get<E>(
        self: &Arc<Self>,
        key: ChunkKey,
        (len, stored_len): (u64, u64),
        goes_on: &dyn Fn() -> Result<(), E>,
        decode: impl FnOnce(&mut [u8], &mut [u8]) -> Result<(), E>,
    ) -> Result<Arc<Decoded>, E> {
        let mut idle_waits = 0;
        let mut state = self.lock();
        let [target, stored] = loop {
            if let Some(found) = state.ready.get(&key).cloned() {
                state.ahead.ask(key);
                return Ok(found);
            }
            if !state.decoding.contains(&key) {
                let is_last_resort = idle_waits >= IDLE_WAITS_MAX && state.decoding.is_empty();
                let urgency = if is_last_resort { Urgency::LastResort } else { Urgency::Wanted };
                match state.make_room([len, stored_len], urgency) {
                    Room::Enough(buffers) => break buffers,
                    Room::Dropped(chunk) => {
                        // Its buffer comes back under this lock.
                        drop(state);
                        drop(chunk);
                        state = self.lock();
                        continue;
                    }
                    Room::None => {}
                }
            }
            let (waited, timeout) = self.changed.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner);
            drop(waited);
            goes_on()?;
            idle_waits = if timeout.timed_out() { idle_waits + 1 } else { 0 };
            state = self.lock();
        };
        state.ahead.ask(key);
        state.decoding.insert(key);
        drop(state);
        self.decode((key, len, stored_len), [target, stored], decode)
    }

    /// Decodes a chunk that is noted as being decoded.
    fn decode<E>(
        self: &Arc<Self>,
        (key, len, stored_len): (ChunkKey, u64, u64),
        [target, stored]: [BufferMemory; 2],
        decode: impl FnOnce(&mut [u8], &mut [u8]) -> Result<(), E>,
    ) -> Result<Arc<Decoded>, E> {
        let decoding = Decoding(self, key);
        let mut stored = ChunkBuffer { pool: self, bytes: stored, len: to_usize(stored_len) };
        let mut target = ChunkBuffer { pool: self, bytes: target, len: to_usize(len) };
        stored.grow();
        target.grow();
        decode(stored.get(), target.get())?;
        drop(stored);
        let (pool, bytes) = (Arc::clone(self), std::mem::take(&mut target.bytes));
        let decoded = Arc::new(Decoded { pool, bytes, len: to_usize(len), read: AtomicU64::new(0) });
        let mut state = self.lock();
        state.decoded += 1;
        let before = state.ready.push(key, Arc::clone(&decoded));
        drop(state);
        drop((before, decoding));
        Ok(decoded)
    }

    /// Notes that a reader will want a chunk. Returns whether the caller is to start a thread, of at most `threads_max`, that calls
    /// [`Self::decode_next`] until this returns `false`.
    pub(super) fn expect(&self, chunk: ExpectedChunk, threads_max: usize) -> bool {
        let mut state = self.lock();
        if !state.ready.contains(&chunk.key) && !state.decoding.contains(&chunk.key) {
            state.ahead.expect(chunk);
        }
        state.ahead.start_thread(threads_max)
    }

    /// Decodes the expected chunk that comes next, if there is room. `false` if not: then the calling thread no longer counts.
    pub(super) fn decode_next<E>(
        self: &Arc<Self>,
        decode: impl FnOnce(ChunkKey, &mut [u8], &mut [u8]) -> Result<(), E>,
    ) -> bool {
        let mut state = self.lock();
        let (ExpectedChunk { key, len, stored_len }, buffers) = loop {
            let room = match state.ahead.next(state.bytes_max / 2) {
                Some(next) => match state.make_room([next.len, next.stored_len], Urgency::Ahead) {
                    Room::Enough(buffers) => break (next, buffers),
                    Room::Dropped(chunk) => Some(chunk),
                    Room::None => None,
                },
                None => None,
            };
            let Some(dropped) = room.or_else(|| state.pop_stale()) else {
                state.ahead.end_thread();
                return false;
            };
            // Its buffer comes back under this lock.
            drop(state);
            drop(dropped);
            state = self.lock();
        };
        state.ahead.begin();
        state.decoding.insert(key);
        drop(state);
        let decode = |stored: &mut [u8], target: &mut [u8]| decode(key, stored, target);
        let made = catch_unwind(AssertUnwindSafe(|| self.decode((key, len, stored_len), buffers, decode)));
        if !matches!(made, Ok(Ok(_))) {
            self.lock().ahead.forget(key);
        }
        true
    }

    /// A thread that [`Self::expect`] asked for could not start.
    pub(super) fn end_ahead_thread(&self) {
        self.lock().ahead.end_thread();
    }

    /// No chunk is expected any more.
    pub(super) fn cancel_ahead(&self) {
        self.lock().ahead.cancel();
    }

    /// Notes that `bytes` bytes of a chunk were read.
    pub(super) fn note_read(&self, key: ChunkKey, bytes: u64) {
        let mut state = self.lock();
        let Some(chunk) = state.ready.peek(&key) else { return };
        let (before, len) = (chunk.read.fetch_add(bytes, Ordering::Relaxed), chunk.len as u64);
        if before < len && before.saturating_add(bytes) >= len {
            state.consumed.push_back(key);
        }
    }

    /// Takes a buffer back. It is kept for the next chunk.
    fn give(&self, buffer: BufferMemory) {
        if buffer.is_empty() {
            return;
        }
        let mut state = self.lock();
        let bytes = buffer.len() as u64;
        let mut freed = None;
        if state.spare_bytes + bytes <= state.bytes_max / 4 {
            state.spare_bytes += bytes;
            state.spare.push(buffer);
        } else {
            state.bytes -= bytes;
            freed = Some(buffer);
        }
        drop(state);
        self.changed.notify_all();
        drop(freed);
    }
}

impl ChunkBuffer<'_> {
    /// Makes a fresh buffer as long as asked for; one that was used before is long enough.
    fn grow(&mut self) {
        if self.bytes.len() < self.len {
            self.bytes = BufferMemory::new(BufferMemory::occupied_bytes(self.len));
        }
    }
}

/// For whom room is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Urgency {
    /// For a reader to come. No chunk that may still be read is dropped for it.
    Ahead,
    /// For a reader that waits.
    Wanted,
    /// For a reader that has waited long enough: the bound no longer counts.
    LastResort,
}

/// What became of an attempt to make room.
enum Room<const N: usize> {
    /// There is enough: spare buffers, or empty ones that are to be made as long as asked for. They count from now on.
    Enough([BufferMemory; N]),
    /// This chunk is to be dropped, without the lock.
    Dropped(Arc<Decoded>),
    /// Others must first give buffers back.
    None,
}

/// Whether a spare buffer serves for `len` bytes: it is long enough, and not much longer.
fn fits(buffer: &[u8], len: u64) -> bool {
    (len..=len.saturating_mul(2)).contains(&(buffer.len() as u64))
}

impl State {
    /// A chunk whose bytes were all read and that no reader uses now, no longer kept.
    fn pop_consumed(&mut self) -> Option<Arc<Decoded>> {
        while let Some(key) = self.consumed.pop_front() {
            if self.ready.peek(&key).is_some_and(|chunk| Arc::strong_count(chunk) == 1) {
                return self.ready.pop(&key);
            }
        }
        None
    }

    /// A chunk that was decoded ahead and whose reader did not come, no longer kept.
    fn pop_stale(&mut self) -> Option<Arc<Decoded>> {
        while let Some(key) = self.ahead.stale() {
            self.ahead.forget(key);
            if let Some(chunk) = self.ready.pop(&key) {
                return Some(chunk);
            }
        }
        None
    }

    /// Makes room for buffers of these lengths, or a step towards it.
    fn make_room<const N: usize>(&mut self, lengths: [u64; N], urgency: Urgency) -> Room<N> {
        loop {
            let mut used: [Option<usize>; N] = [None; N];
            for (number, len) in lengths.iter().enumerate() {
                let is_free = |at: &usize| !used.contains(&Some(*at)) && fits(&self.spare[*at], *len);
                let found = (0..self.spare.len()).find(is_free);
                used[number] = found;
            }
            let fresh = lengths.iter().zip(&used).filter(|(_, used)| used.is_none());
            let fresh: u64 = fresh.map(|(len, _)| BufferMemory::occupied_bytes(to_usize(*len)) as u64).sum();
            // Nobody else has a buffer: a chunk that is larger than the bound is decoded alone.
            let nothing_else = self.ready.is_empty() && used.iter().flatten().count() == self.spare.len();
            let alone = nothing_else && self.bytes == self.spare_bytes;
            if fresh > 0
                && let Some(chunk) = self.pop_consumed()
            {
                return Room::Dropped(chunk);
            }
            let is_excepted = urgency == Urgency::LastResort || (alone && urgency == Urgency::Wanted);
            if self.bytes + fresh <= self.bytes_max || is_excepted {
                self.bytes += fresh;
                // A buffer that is none is made later, without the lock.
                let buffers: [BufferMemory; N] = std::array::from_fn(|number| {
                    used[number].map_or_else(BufferMemory::default, |at| std::mem::take(&mut self.spare[at]))
                });
                self.spare.retain(|buffer| !buffer.is_empty());
                self.spare_bytes = self.spare.iter().map(|buffer| buffer.len() as u64).sum();
                return Room::Enough(buffers);
            }
            if let Some(at) = (0..self.spare.len()).find(|at| !used.contains(&Some(*at))) {
                let freed = self.spare.swap_remove(at);
                self.spare_bytes -= freed.len() as u64;
                self.bytes -= freed.len() as u64;
            } else if urgency != Urgency::Ahead
                && let Some((key, chunk)) = self.ready.pop_lru()
            {
                self.ahead.forget(key);
                return Room::Dropped(chunk);
            } else {
                return Room::None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        thread,
    };

    use super::*;

    fn get(pool: &Arc<ChunkPool>, number: u64, len: u64, calls: &AtomicU64) -> Result<Arc<Decoded>, String> {
        pool.get((0, number), (len, len / 2), &|| Ok(()), |stored, target| {
            calls.fetch_add(1, Ordering::Relaxed);
            assert_eq!((stored.len() as u64, target.len() as u64), (len / 2, len));
            stored.fill(1);
            thread::sleep(Duration::from_micros(200));
            if number == 13 {
                return Err("unlucky".to_owned());
            }
            target.fill(number.to_le_bytes()[0]);
            Ok(())
        })
    }

    #[test]
    fn a_chunk_is_decoded_once_for_all_readers() {
        let (pool, calls) = (ChunkPool::new(), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for number in 0..10 {
                        let chunk = get(&pool, number, 1000, &calls).unwrap();
                        assert!(chunk.iter().all(|byte| u64::from(*byte) == number) && chunk.len() == 1000);
                    }
                });
            }
        });
        assert_eq!((calls.load(Ordering::Relaxed), pool.decoded()), (10, 10));
    }

    #[test]
    fn memory_stays_under_the_bound_whatever_readers_do() {
        let (pool, calls) = (ChunkPool::new(), AtomicU64::new(0));
        pool.bound(8_000);
        thread::scope(|scope| {
            for reader in 0..6 {
                let (pool, calls) = (&pool, &calls);
                scope.spawn(move || {
                    for step in 0..60 {
                        let number = (step * 7 + reader) % 30;
                        let chunk = get(pool, number, 1000 + number % 3 * 500, calls);
                        pool.note_read((0, number), 700);
                        assert_eq!(chunk.is_err(), number == 13);
                        assert!(pool.bytes() <= 8_000, "{}", pool.bytes());
                        let chunk = chunk.iter().flat_map(|chunk| chunk.iter());
                        assert!(chunk.into_iter().all(|byte| u64::from(*byte) == number));
                    }
                });
            }
        });
        // One that is too large is decoded alone, and does not stay the only one.
        let large = get(&pool, 1, 100_000, &calls).unwrap_or_else(|error| panic!("{error}"));
        drop(large);
        for number in 2..9 {
            get(&pool, number, 1000, &calls).unwrap();
        }
        assert!(pool.bytes() <= 8_000, "{}", pool.bytes());
        pool.bound(0);
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn room_is_waited_for_while_others_change_theirs() {
        let (pool, calls) = (ChunkPool::new(), AtomicU64::new(0));
        pool.bound(3_000);
        let held = get(&pool, 0, 1000, &calls).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| get(&pool, 1, 1500, &calls).unwrap().len());
            // Many more changes than idle waits, none of which makes room.
            for _ in 0..40 {
                pool.changed.notify_all();
                thread::sleep(Duration::from_millis(1));
                assert!(pool.bytes() <= 3_000, "{}", pool.bytes());
            }
            drop(held);
            assert_eq!(waiting.join().unwrap(), 1500);
        });
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_reader_that_holds_the_room_that_it_waits_for_goes_on() {
        let (pool, calls) = (ChunkPool::new(), AtomicU64::new(0));
        pool.bound(3_000);
        let held = get(&pool, 0, 1000, &calls).unwrap();
        assert_eq!(get(&pool, 1, 1500, &calls).unwrap().len() + held.len(), 2500);
    }

    #[test]
    fn a_chunk_that_was_read_gives_its_buffer_to_the_next() {
        let (pool, calls) = (ChunkPool::new(), AtomicU64::new(0));
        for number in 20..60 {
            get(&pool, number, 1000, &calls).unwrap();
            pool.note_read((0, number), 400);
            pool.note_read((0, number), 600);
        }
        // Two chunks, and the buffer of stored bytes.
        assert!(pool.bytes() <= 3_000, "{}", pool.bytes());
        let (pool, calls) = (ChunkPool::new(), AtomicU64::new(0));
        for number in 20..60 {
            get(&pool, number, 1000, &calls).unwrap();
            pool.note_read((0, number), 999);
        }
        assert!(pool.bytes() >= 40_000, "{}", pool.bytes());
    }

    #[test]
    fn a_reader_that_waits_for_another_can_give_up() {
        let pool = ChunkPool::new();
        let blocked = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _ = pool.get((0, 0), (8, 8), &|| Ok::<_, String>(()), |_, _| {
                    blocked.store(1, Ordering::Relaxed);
                    while blocked.load(Ordering::Relaxed) < 2 {
                        thread::yield_now();
                    }
                    Ok(())
                });
            });
            while blocked.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            let stalled = pool.get((0, 0), (8, 8), &|| Err("stalled"), |_, _| Ok(()));
            assert_eq!(stalled.err(), Some("stalled"));
            blocked.store(2, Ordering::Relaxed);
        });
    }

    fn expected(number: u64, len: u64) -> ExpectedChunk {
        ExpectedChunk { key: (0, number), len, stored_len: len / 2 }
    }

    /// Decodes ahead in this thread, as long as there is room.
    fn decode_ahead(pool: &Arc<ChunkPool>, calls: &AtomicU64) {
        let decode = |key: ChunkKey, _: &mut [u8], target: &mut [u8]| {
            calls.fetch_add(1, Ordering::Relaxed);
            assert_ne!(key.1, 17, "as a test");
            target.fill(key.1.to_le_bytes()[0]);
            if key.1 == 13 { Err("unlucky") } else { Ok(()) }
        };
        while pool.decode_next(decode) {}
    }

    #[test]
    fn chunks_ahead_take_no_room_from_what_is_read() {
        let (pool, calls, ahead) = (ChunkPool::new(), AtomicU64::new(0), AtomicU64::new(0));
        pool.bound(10_000);
        for number in 0..6 {
            get(&pool, number, 1000, &calls).unwrap();
        }
        for number in 0..12 {
            pool.expect(expected(number, 1000), 1);
        }
        decode_ahead(&pool, &ahead);
        // Six are there, three more fit with the stored bytes of one.
        assert_eq!((ahead.load(Ordering::Relaxed), pool.decoded()), (3, 9));
        assert!((0..9).all(|number| pool.find((0, number)).is_some()) && pool.bytes() <= 10_000);
        // A chunk that was read leaves its room.
        pool.note_read((0, 0), 1000);
        assert!(pool.expect(expected(9, 1000), 1));
        decode_ahead(&pool, &ahead);
        assert_eq!((ahead.load(Ordering::Relaxed), pool.decoded()), (4, 10));
        assert!(pool.find((0, 0)).is_none() && pool.find((0, 9)).is_some() && pool.bytes() <= 10_000);
    }

    #[test]
    fn at_most_half_of_the_bound_is_ahead_and_failures_count_for_nothing() {
        let (pool, calls) = (ChunkPool::new(), AtomicU64::new(0));
        pool.bound(10_000);
        for number in [13, 17, 1, 2, 3, 4, 5, 6, 7, 8] {
            pool.expect(expected(number, 1000), 1);
        }
        decode_ahead(&pool, &calls);
        assert_eq!((calls.load(Ordering::Relaxed), pool.decoded()), (7, 5), "two fail, five are half of the bound");
        // Its reader meets the failure by itself.
        assert_eq!(get(&pool, 13, 1000, &calls).err().unwrap(), "unlucky");
        // Readers of more other chunks than the limit: those ahead are not expected to be read any more.
        (0..300).for_each(|number| drop(get(&pool, number % 2 + 1, 1000, &calls).unwrap()));
        assert!(pool.expect(expected(20, 1000), 1));
        decode_ahead(&pool, &calls);
        assert!(pool.find((0, 20)).is_some() && pool.bytes() <= 10_000);
    }

    #[test]
    fn readers_and_threads_ahead_decode_each_chunk_once() {
        let (pool, calls) = (ChunkPool::new(), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for number in 0..200 {
                        for next in number + 1..number + 4 {
                            if pool.expect(expected(next, 1000), 2) {
                                scope.spawn(|| {
                                    while pool.decode_next(|key, stored, target| {
                                        calls.fetch_add(1, Ordering::Relaxed);
                                        assert_eq!((stored.len(), target.len()), (500, 1000));
                                        target.fill(key.1.to_le_bytes()[0]);
                                        Ok::<(), ()>(())
                                    }) {}
                                });
                            }
                        }
                        let decode = |_: &mut [u8], target: &mut [u8]| {
                            calls.fetch_add(1, Ordering::Relaxed);
                            target.fill(u8::try_from(number).unwrap());
                            Ok::<(), ()>(())
                        };
                        let chunk = pool.get((0, number), (1000, 500), &|| Ok(()), decode).unwrap();
                        assert!(chunk.iter().all(|byte| u64::from(*byte) == number));
                    }
                });
            }
        });
        let decoded = pool.decoded();
        assert_eq!(calls.load(Ordering::Relaxed), decoded);
        // The last reader expects up to three chunks beyond the last one that is read.
        assert!((200..=203).contains(&decoded), "{decoded}");
    }
}
