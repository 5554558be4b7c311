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
    marker::PhantomData,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ckfs_source::{BufferMemory, SourceError};
use ckfs_sync::{
    Buffer, BufferLimit, BufferPool, ChangeCount, Demand, Next, Request, RoomPolicy, Shelf, SingleFlight, Situation,
    Sizing, Verdict, Weight,
};
use ckfs_tensor::to_usize;

use super::ahead::{Ahead, ChunkKey, ExpectedChunk};

/// Bound until one is set, in bytes.
const BYTES_MAX: usize = 256 << 20;

/// Waits in which nothing changed, after which a thread goes on without room if no thread decodes: it may wait for a chunk that it
/// holds itself.
const IDLE_WAITS_MAX: u32 = 5;

/// A decoded chunk, counted until its last user has dropped it.
pub(super) struct Decoded {
    bytes: Buffer<BufferMemory>,
    /// Bytes that were read so far, each time counted.
    read: AtomicU64,
}

impl Deref for Decoded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Weight for Decoded {
    fn weight_bytes(&self) -> usize {
        self.bytes.memory_bytes()
    }
}

/// Buffers for a chunk, and for its stored bytes.
type ChunkRoom = [Buffer<BufferMemory>; 2];

/// Who gets buffers, and which chunks are dropped for it.
struct ChunkRooms<E> {
    bytes_max: usize,
    buffers: BufferPool<BufferMemory>,
    ahead: Ahead,
    error: PhantomData<fn() -> E>,
}

impl<E> ChunkRooms<E> {
    /// A chunk that was decoded ahead and whose reader did not come, no longer kept.
    fn pop_stale(&mut self, shelf: &mut Shelf<ChunkKey, Decoded>) -> Option<Arc<Decoded>> {
        while let Some(key) = self.ahead.stale() {
            self.ahead.forget(key);
            if let Some(chunk) = shelf.remove(&key) {
                return Some(chunk);
            }
        }
        None
    }

    /// The chunk that was not used for the longest time, no longer kept.
    fn pop_lru(&mut self, shelf: &mut Shelf<ChunkKey, Decoded>) -> Option<Arc<Decoded>> {
        let (key, chunk) = shelf.pop_lru()?;
        self.ahead.forget(key);
        Some(chunk)
    }
}

impl<E: Clone> RoomPolicy<ChunkKey, Decoded> for ChunkRooms<E> {
    /// Bytes of the chunk, and of its stored form.
    type Ask = [u64; 2];
    type Room = ChunkRoom;
    type Error = E;

    fn room(
        &mut self,
        shelf: &mut Shelf<ChunkKey, Decoded>,
        _: &ChunkKey,
        ask: &[u64; 2],
        demand: Demand,
        situation: Situation,
    ) -> Verdict<ChunkRoom, Decoded> {
        let lengths = ask.map(to_usize);
        let spare = (self.buffers.bytes() <= self.bytes_max).then_some(BufferLimit::Spare);
        if let Some(room) = spare.and_then(|spare| self.buffers.reserve(lengths, spare)) {
            return Verdict::Make(room, Vec::new());
        }
        if let Some(chunk) = shelf.pop_consumed() {
            return Verdict::Drop(chunk);
        }
        let is_last_resort = situation.idle_waits >= IDLE_WAITS_MAX && situation.flights == 0;
        let limit = match demand {
            Demand::Reader if is_last_resort => BufferLimit::None,
            // A chunk that is larger than the bound is decoded alone.
            Demand::Reader if shelf.is_empty() => BufferLimit::BytesUnlessAlone(self.bytes_max),
            Demand::Reader | Demand::Prefetch => BufferLimit::Bytes(self.bytes_max),
        };
        if let Some(room) = self.buffers.reserve(lengths, limit) {
            return Verdict::Make(room, Vec::new());
        }
        // No chunk that may still be read is dropped for one that nobody waits for.
        let dropped = (demand == Demand::Reader).then(|| self.pop_lru(shelf)).flatten();
        dropped.map_or(Verdict::Wait, Verdict::Drop)
    }

    fn asked(&mut self, key: &ChunkKey) {
        self.ahead.ask(*key);
    }

    /// Each reader decodes a damaged chunk again: another's time may have been over.
    fn is_shared(&self, _: &E) -> bool {
        false
    }
}

/// The cache.
pub(super) struct ChunkPool<E: Clone = SourceError> {
    chunks: SingleFlight<ChunkKey, Decoded, ChunkRooms<E>>,
    buffers: BufferPool<BufferMemory>,
    decoded: AtomicU64,
}

impl<E: Clone> ChunkPool<E> {
    pub(super) fn new() -> Self {
        let changes = Arc::<ChangeCount>::default();
        let sizing = Sizing { memory_len: BufferMemory::occupied_bytes, lengths_max: 2 };
        let buffers = BufferPool::new(sizing, BYTES_MAX / 4, Arc::clone(&changes));
        let (ahead, error) = (Ahead::default(), PhantomData);
        let rooms = ChunkRooms { bytes_max: BYTES_MAX, buffers: buffers.clone(), ahead, error };
        Self { chunks: SingleFlight::new(rooms, changes), buffers, decoded: AtomicU64::new(0) }
    }

    /// Sets the most bytes of all buffers.
    pub(super) fn bound(&self, bytes_max: u64) {
        let bytes_max = to_usize(bytes_max);
        self.buffers.set_spare_bytes_max(bytes_max / 4);
        loop {
            let dropped = self.chunks.with(|inside| {
                inside.policy.bytes_max = bytes_max;
                if self.buffers.reserve([], BufferLimit::Bytes(bytes_max)).is_some() {
                    return None;
                }
                inside.shelf.pop_consumed().or_else(|| inside.policy.pop_lru(&mut inside.shelf))
            });
            if dropped.is_none() {
                return;
            }
        }
    }

    /// Bytes of all buffers now, spare ones included.
    pub(super) fn bytes(&self) -> u64 {
        self.buffers.bytes() as u64
    }

    /// Number of chunks decoded so far.
    pub(super) fn decoded(&self) -> u64 {
        self.decoded.load(Ordering::Relaxed)
    }

    /// The chunk of this key, if it is in memory.
    pub(super) fn find(&self, key: ChunkKey) -> Option<Arc<Decoded>> {
        self.chunks.find(&key)
    }

    /// The chunk of this key, which has `len` bytes. If it is not in memory, one thread decodes it: `decode` fills a buffer for the
    /// stored bytes, of `stored_len`, and from it the one for the chunk. Other threads that want it wait, and ask `goes_on` from
    /// time to time whether they should.
    ///
    /// # Errors
    /// That of `decode` or of `goes_on`.
    pub(super) fn get(
        &self,
        key: ChunkKey,
        (len, stored_len): (u64, u64),
        goes_on: &dyn Fn() -> Result<(), E>,
        decode: impl FnOnce(&mut [u8], &mut [u8]) -> Result<(), E>,
    ) -> Result<Arc<Decoded>, E> {
        let give_up = || goes_on().err();
        let request = Request { demand: Demand::Reader, give_up: &give_up, event: &|_| () };
        let made = self.chunks.get(key, &[len, stored_len], &request, |room| self.decode(room, decode));
        made.expect("who finds no room waits for some")
    }

    fn decode(
        &self,
        [mut target, mut stored]: ChunkRoom,
        decode: impl FnOnce(&mut [u8], &mut [u8]) -> Result<(), E>,
    ) -> Result<Decoded, E> {
        stored.make();
        target.make();
        decode(&mut stored, &mut target)?;
        self.decoded.fetch_add(1, Ordering::Relaxed);
        Ok(Decoded { bytes: target, read: AtomicU64::new(0) })
    }

    /// Notes that a reader will want a chunk. Returns whether the caller is to have one thread more, of at most `threads_max`, call
    /// [`Self::decode_next`] until this returns `false`.
    pub(super) fn expect(&self, chunk: ExpectedChunk, threads_max: usize) -> bool {
        self.chunks.with(|inside| {
            if !inside.has(&chunk.key) {
                inside.policy.ahead.expect(chunk);
            }
            inside.policy.ahead.start_thread(threads_max)
        })
    }

    /// Decodes the expected chunk that comes next, if there is room. `false` if not: then the calling thread no longer counts.
    pub(super) fn decode_next(&self, decode: impl FnOnce(ChunkKey, &mut [u8], &mut [u8]) -> Result<(), E>) -> bool {
        let made = self.chunks.prefetch(
            |inside| {
                let (shelf, rooms) = (&mut inside.shelf, &mut inside.policy);
                if let Some(next) = rooms.ahead.next(rooms.bytes_max as u64 / 2) {
                    let ask = [next.len, next.stored_len];
                    match rooms.room(shelf, &next.key, &ask, Demand::Prefetch, Situation::default()) {
                        Verdict::Make(room, _) => {
                            rooms.ahead.begin();
                            return Next::Make(next.key, room);
                        }
                        Verdict::Drop(chunk) => return Next::Drop(chunk),
                        Verdict::Wait | Verdict::Refuse => {}
                    }
                }
                rooms.pop_stale(shelf).map_or_else(
                    || {
                        rooms.ahead.end_thread();
                        Next::None
                    },
                    Next::Drop,
                )
            },
            |key, room| self.decode(room, |stored, target| decode(key, stored, target)),
        );
        if let Some((key, false)) = made {
            self.chunks.with(|inside| inside.policy.ahead.forget(key));
        }
        made.is_some()
    }

    /// A thread that [`Self::expect`] asked for could not start.
    pub(super) fn end_ahead_thread(&self) {
        self.chunks.with(|inside| inside.policy.ahead.end_thread());
    }

    /// No chunk is expected any more.
    pub(super) fn cancel_ahead(&self) {
        self.chunks.with(|inside| inside.policy.ahead.cancel());
    }

    /// Notes that `bytes` bytes of a chunk were read.
    pub(super) fn note_read(&self, key: ChunkKey, bytes: u64) {
        self.chunks.with(|inside| {
            let Some(chunk) = inside.shelf.peek(&key) else { return };
            let (before, len) = (chunk.read.fetch_add(bytes, Ordering::Relaxed), chunk.len() as u64);
            if before < len && before.saturating_add(bytes) >= len {
                inside.shelf.note_consumed(key);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        thread,
        time::Duration,
    };

    use super::*;

    type TestPool = ChunkPool<&'static str>;

    fn get(pool: &TestPool, number: u64, len: u64, calls: &AtomicU64) -> Result<Arc<Decoded>, &'static str> {
        pool.get((0, number), (len, len / 2), &|| Ok(()), |stored, target| {
            calls.fetch_add(1, Ordering::Relaxed);
            assert_eq!((stored.len() as u64, target.len() as u64), (len / 2, len));
            stored.fill(1);
            thread::sleep(Duration::from_micros(200));
            if number == 13 {
                return Err("unlucky");
            }
            target.fill(number.to_le_bytes()[0]);
            Ok(())
        })
    }

    #[test]
    fn a_chunk_is_decoded_once_for_all_readers() {
        let (pool, calls) = (TestPool::new(), AtomicU64::new(0));
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
        let (pool, calls) = (TestPool::new(), AtomicU64::new(0));
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
        let (pool, calls) = (TestPool::new(), AtomicU64::new(0));
        pool.bound(3_000);
        let held = get(&pool, 0, 1000, &calls).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| get(&pool, 1, 1500, &calls).unwrap().len());
            // Many more changes than idle waits, none of which makes room.
            for _ in 0..40 {
                drop(pool.buffers.reserve([0], BufferLimit::None));
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
        let (pool, calls) = (TestPool::new(), AtomicU64::new(0));
        pool.bound(3_000);
        let held = get(&pool, 0, 1000, &calls).unwrap();
        assert_eq!(get(&pool, 1, 1500, &calls).unwrap().len() + held.len(), 2500);
    }

    #[test]
    fn a_chunk_that_was_read_gives_its_buffer_to_the_next() {
        let (pool, calls) = (TestPool::new(), AtomicU64::new(0));
        for number in 20..60 {
            get(&pool, number, 1000, &calls).unwrap();
            pool.note_read((0, number), 400);
            pool.note_read((0, number), 600);
        }
        // Two chunks, and the buffer of stored bytes.
        assert!(pool.bytes() <= 3_000, "{}", pool.bytes());
        let (pool, calls) = (TestPool::new(), AtomicU64::new(0));
        for number in 20..60 {
            get(&pool, number, 1000, &calls).unwrap();
            pool.note_read((0, number), 999);
        }
        assert!(pool.bytes() >= 40_000, "{}", pool.bytes());
    }

    #[test]
    fn a_reader_that_waits_for_another_can_give_up() {
        let pool = TestPool::new();
        let blocked = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _ = pool.get((0, 0), (8, 8), &|| Ok(()), |_, _| {
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
    fn decode_ahead(pool: &TestPool, calls: &AtomicU64) {
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
        let (pool, calls, ahead) = (TestPool::new(), AtomicU64::new(0), AtomicU64::new(0));
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
        let (pool, calls) = (TestPool::new(), AtomicU64::new(0));
        pool.bound(10_000);
        for number in [13, 17, 1, 2, 3, 4, 5, 6, 7, 8] {
            pool.expect(expected(number, 1000), 1);
        }
        decode_ahead(&pool, &calls);
        assert_eq!((calls.load(Ordering::Relaxed), pool.decoded()), (7, 5), "two fail, five are half of the bound");
        // Its reader will meet the failure.
        assert_eq!(get(&pool, 13, 1000, &calls).err().unwrap(), "unlucky");
        // Readers of more other chunks than the limit: those ahead are not expected to be read any more.
        (0..300).for_each(|number| drop(get(&pool, number % 2 + 1, 1000, &calls).unwrap()));
        assert!(pool.expect(expected(20, 1000), 1));
        decode_ahead(&pool, &calls);
        assert!(pool.find((0, 20)).is_some() && pool.bytes() <= 10_000);
    }

    #[test]
    fn readers_and_threads_ahead_decode_each_chunk_once() {
        let (pool, calls) = (TestPool::new(), AtomicU64::new(0));
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
                                        Ok(())
                                    }) {}
                                });
                            }
                        }
                        let decode = |_: &mut [u8], target: &mut [u8]| {
                            calls.fetch_add(1, Ordering::Relaxed);
                            target.fill(u8::try_from(number).unwrap());
                            Ok(())
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
