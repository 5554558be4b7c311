//! Recycled buffers. A fresh megabyte costs 256 page faults, more than casting into it does.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
};

/// Bytes of unused buffers that are kept.
const KEPT_BYTES_MAX: usize = 32 << 20;

#[derive(Debug, Default)]
struct Kept {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// A pool of buffers. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct BufferPool {
    kept: Arc<Mutex<Kept>>,
}

/// A buffer that goes back to its pool.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    len: usize,
    pool: BufferPool,
}

impl BufferPool {
    /// A buffer of `len` bytes that hold anything.
    pub(super) fn take(&self, len: usize) -> Buffer {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = kept.buffers.iter().position(|b| b.capacity() >= len && b.capacity() / 2 <= len);
        let mut bytes = fitting.map_or_else(Vec::new, |at| kept.buffers.swap_remove(at));
        kept.bytes -= bytes.capacity();
        drop(kept);
        if bytes.capacity() == 0 {
            // Zeroed pages come from the kernel as they are touched; rounding up lets buffers of nearby sizes recycle.
            bytes = vec![0; len.next_multiple_of(64 << 10)];
        }
        // Only what was never written before is zeroed: a recycled buffer keeps its full length between uses.
        bytes.resize(bytes.capacity(), 0);
        Buffer { bytes, len, pool: self.clone() }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut kept = self.pool.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.bytes + bytes.capacity() <= KEPT_BYTES_MAX {
            kept.bytes += bytes.capacity();
            kept.buffers.push(bytes);
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer of {} bytes", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back() {
        let pool = BufferPool::default();
        let mut first = pool.take(1 << 20);
        first[0] = 7;
        let address = first.as_ptr();
        drop(first);
        let second = pool.take((1 << 20) - 5);
        assert_eq!((second.as_ptr(), second.len()), (address, (1 << 20) - 5));
        let third = pool.take(1 << 20);
        assert_ne!(third.as_ptr(), address);
        drop((second, third));
        assert_eq!(pool.take(100).len(), 100, "a far larger buffer is not taken");
        for _ in 0..3 {
            drop(pool.take(KEPT_BYTES_MAX / 2));
        }
        assert!(pool.kept.lock().unwrap().bytes <= KEPT_BYTES_MAX);
    }
}
