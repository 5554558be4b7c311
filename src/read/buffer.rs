//! Recycled buffers. A fresh megabyte costs 256 page faults, which take longer than a cast into it.
//!
//! Large buffers are whole huge pages, where the system provides these ([`BufferMemory`]).

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use ckfs_source::BufferMemory;

/// Smaller buffers are allocated in multiples of this, so that a buffer serves nearby sizes too. Buffers below this size are
/// allocated at their exact length.
const STEP_BYTES: usize = 64 << 10;

/// Length of a fresh buffer's memory.
fn memory_len(len: usize) -> usize {
    match BufferMemory::occupied_bytes(len) {
        bytes if bytes > len || len < STEP_BYTES => bytes,
        bytes => bytes.next_multiple_of(STEP_BYTES),
    }
}

#[derive(Default)]
struct Kept {
    memory: Vec<BufferMemory>,
    bytes: usize,
    /// Whether a buffer was taken since the last [`BufferPool::trim`].
    in_use: bool,
}

/// A pool of buffers. Clones share it.
#[derive(Clone)]
pub(super) struct BufferPool {
    kept: Arc<Mutex<Kept>>,
    /// Bytes of buffers that were taken and not yet returned.
    taken_bytes: Arc<AtomicUsize>,
    kept_bytes_max: usize,
}

/// A buffer that returns to its pool when it is dropped.
pub(super) struct Buffer {
    memory: Option<BufferMemory>,
    len: usize,
    pool: BufferPool,
}

impl BufferPool {
    /// A pool that keeps at most `kept_bytes_max` bytes of unused buffers.
    pub(super) fn new(kept_bytes_max: usize) -> Self {
        Self { kept: Arc::default(), taken_bytes: Arc::default(), kept_bytes_max }
    }

    /// Bytes of unused buffers.
    pub(super) fn kept_bytes(&self) -> usize {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    /// Bytes of buffers in use, tiles included.
    pub(super) fn taken_bytes(&self) -> usize {
        self.taken_bytes.load(Ordering::Relaxed)
    }

    /// Frees the unused buffers if none was taken since the last call.
    pub(super) fn trim(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::take(&mut kept.in_use) {
            kept.bytes = 0;
            let idle = std::mem::take(&mut kept.memory);
            drop(kept);
            drop(idle);
        }
    }

    /// A buffer of `len` bytes with unspecified content.
    pub(super) fn take(&self, len: usize) -> Buffer {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.in_use = true;
        // The buffer returned last is the most likely to be in the processor's caches.
        let fits = |memory: &BufferMemory| memory.len() >= len && memory.len() / 4 <= len;
        let memory = kept.memory.iter().rposition(fits).map(|at| kept.memory.remove(at));
        kept.bytes -= memory.as_ref().map_or(0, |memory| memory.len());
        drop(kept);
        let memory = memory.unwrap_or_else(|| BufferMemory::new(memory_len(len)));
        self.taken_bytes.fetch_add(memory.len(), Ordering::Relaxed);
        Buffer { memory: Some(memory), len, pool: self.clone() }
    }
}

impl Buffer {
    /// Bytes of memory that the buffer occupies, which may be more than its length.
    pub(super) fn memory_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        self.pool.taken_bytes.fetch_sub(memory.len(), Ordering::Relaxed);
        let mut kept = self.pool.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.bytes + memory.len() <= self.pool.kept_bytes_max {
            kept.bytes += memory.len();
            kept.memory.push(memory);
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory[..self.len])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory[..len])
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "buffer of {} bytes", self.len)
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("pool of buffers")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEPT_BYTES_MAX: usize = 32 << 20;

    #[test]
    fn buffers_come_back() {
        let pool = BufferPool::new(KEPT_BYTES_MAX);
        for len in [1 << 20, 3 << 20] {
            let mut first = pool.take(len);
            first[0] = 7;
            let address = first.as_ptr();
            drop(first);
            let second = pool.take(len - 5);
            assert_eq!((second.as_ptr(), second.len()), (address, len - 5));
            let third = pool.take(len);
            assert_ne!(third.as_ptr(), address);
        }
        assert_eq!(pool.take(100).len(), 100, "a far larger buffer is not taken");
        for _ in 0..3 {
            drop(pool.take(KEPT_BYTES_MAX / 2));
        }
        let kept_bytes = || pool.kept.lock().unwrap().bytes;
        assert!(kept_bytes() <= KEPT_BYTES_MAX);
        pool.trim();
        assert!(kept_bytes() > 0, "one was taken lately");
        pool.trim();
        assert_eq!(kept_bytes(), 0);
        assert_eq!(pool.take(1 << 20).len(), 1 << 20);
        let pool = BufferPool::new(0);
        for (len, memory_bytes) in [(40, 40), (70 << 10, 128 << 10), ((1 << 20) + 1, 2 << 20)] {
            let held = pool.take(len);
            assert_eq!((held.memory_bytes(), pool.taken_bytes()), (memory_bytes, memory_bytes));
        }
        assert_eq!((pool.taken_bytes(), pool.kept_bytes()), (0, 0));
    }
}
