//! Decoded chunks in memory: a byte-bounded cache, one decoding per chunk, and buffers that are used again.
//!
//! All memory counts against one bound: chunks that are kept, chunks that readers still copy from, stored bytes while they are
//! decoded, and spare buffers. A thread that needs room waits until there is some. Only a chunk that is larger than the bound by
//! itself is decoded all the same, and then alone.
//!
//! Fresh memory costs a page fault for every 4 KiB, a fifth of the time that decoding takes, so that buffers are kept for the next
//! chunk.

use std::{
    collections::HashSet,
    fmt,
    ops::Deref,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lru::LruCache;

use crate::tensor::to_usize;

/// Bound until one is set, in bytes.
const BYTES_MAX: u64 = 256 << 20;

/// Time after which a thread that waits for another checks whether it should go on waiting.
const PATIENCE: Duration = Duration::from_millis(200);

/// A chunk: number of the decoded file, and number in it.
pub(super) type ChunkKey = (u32, u64);

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
    /// Bytes of all buffers, in use and spare.
    bytes: u64,
    spare: Vec<Vec<u8>>,
    spare_bytes: u64,
    decoded: u64,
}

impl fmt::Debug for ChunkPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkPool").field("bytes_max", &self.lock().bytes_max).finish_non_exhaustive()
    }
}

/// A buffer of the pool, which goes back to it.
pub(super) struct Buffer<'p> {
    pool: &'p ChunkPool,
    /// At least as long as asked for.
    bytes: Vec<u8>,
    len: usize,
}

impl Buffer<'_> {
    pub(super) fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.bytes));
    }
}

/// A decoded chunk, counted until its last user has dropped it.
pub(super) struct Decoded {
    pool: Arc<ChunkPool>,
    bytes: Vec<u8>,
    len: usize,
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
            bytes: 0,
            spare: Vec::new(),
            spare_bytes: 0,
            decoded: 0,
        };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Sets the most bytes of all buffers.
    pub(super) fn bound(&self, bytes_max: u64) {
        self.lock().bytes_max = bytes_max;
        loop {
            let room = self.lock().make_room(&[]);
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
        self.lock().ready.get(&key).cloned()
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
        let mut state = self.lock();
        loop {
            if let Some(found) = state.ready.get(&key) {
                return Ok(Arc::clone(found));
            }
            if !state.decoding.contains(&key) {
                match state.make_room(&[len, stored_len]) {
                    Room::Enough => break,
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
            state = self.changed.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner).0;
            drop(state);
            goes_on()?;
            state = self.lock();
        }
        state.decoding.insert(key);
        let (stored, target) = (state.take(stored_len), state.take(len));
        drop(state);
        let decoding = Decoding(self, key);
        let mut stored = Buffer { pool: self, bytes: stored, len: to_usize(stored_len) };
        let mut target = Buffer { pool: self, bytes: target, len: to_usize(len) };
        stored.grow();
        target.grow();
        decode(stored.get(), target.get())?;
        drop(stored);
        let decoded = Decoded { pool: Arc::clone(self), bytes: std::mem::take(&mut target.bytes), len: to_usize(len) };
        target.len = 0;
        let decoded = Arc::new(decoded);
        let mut state = self.lock();
        state.decoded += 1;
        let before = state.ready.push(key, Arc::clone(&decoded));
        drop(state);
        drop((before, decoding));
        Ok(decoded)
    }

    /// Takes a buffer back. It is kept for the next chunk.
    fn give(&self, buffer: Vec<u8>) {
        if buffer.capacity() == 0 {
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

impl Buffer<'_> {
    /// Makes a fresh buffer as long as asked for; one that was used before is long enough.
    fn grow(&mut self) {
        if self.bytes.len() < self.len {
            self.bytes = vec![0; self.len];
        }
    }
}

/// What became of an attempt to make room.
enum Room {
    /// There is enough.
    Enough,
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
    /// Makes room for buffers of these lengths, or a step towards it.
    fn make_room(&mut self, lengths: &[u64]) -> Room {
        loop {
            let mut kept: Vec<bool> = vec![false; self.spare.len()];
            let mut fresh = 0;
            for len in lengths {
                match (0..self.spare.len()).rev().find(|at| !kept[*at] && fits(&self.spare[*at], *len)) {
                    Some(at) => kept[at] = true,
                    None => fresh += len,
                }
            }
            if self.bytes + fresh <= self.bytes_max {
                return Room::Enough;
            }
            if let Some(at) = kept.iter().position(|kept| !kept) {
                let freed = self.spare.swap_remove(at);
                self.spare_bytes -= freed.len() as u64;
                self.bytes -= freed.len() as u64;
            } else if let Some((_, chunk)) = self.ready.pop_lru() {
                return Room::Dropped(chunk);
            } else if self.bytes == self.spare_bytes {
                // Nobody else has a buffer: a chunk that is larger than the bound is decoded alone.
                return Room::Enough;
            } else {
                return Room::None;
            }
        }
    }

    /// A buffer for `len` bytes, spare or empty. Its bytes count from now on.
    fn take(&mut self, len: u64) -> Vec<u8> {
        if let Some(at) = self.spare.iter().rposition(|buffer| fits(buffer, len)) {
            let buffer = self.spare.swap_remove(at);
            self.spare_bytes -= buffer.len() as u64;
            return buffer;
        }
        self.bytes += len;
        Vec::new()
    }
}
