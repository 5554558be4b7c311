//! The engine's buffers. Large ones are whole huge pages, where the system provides these ([`BufferMemory`]).

use std::sync::Arc;

use ckfs_source::BufferMemory;
use ckfs_sync::Sizing;

/// Smaller buffers are allocated in multiples of this, so that a buffer serves nearby sizes too. Buffers below this size are
/// allocated at their exact length.
const STEP_BYTES: usize = 64 << 10;

pub(super) type BufferPool = ckfs_sync::BufferPool<BufferMemory>;
pub(super) type Buffer = ckfs_sync::Buffer<BufferMemory>;

/// A pool that keeps at most `spare_bytes_max` bytes of unused buffers.
pub(super) fn buffer_pool(spare_bytes_max: usize) -> BufferPool {
    BufferPool::new(Sizing { memory_len, lengths_max: 4 }, spare_bytes_max, Arc::default())
}

/// Length of a fresh buffer's memory.
fn memory_len(len: usize) -> usize {
    match BufferMemory::occupied_bytes(len) {
        bytes if bytes > len || len < STEP_BYTES => bytes,
        bytes => bytes.next_multiple_of(STEP_BYTES),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_have_memory_for_nearby_sizes() {
        let pool = buffer_pool(0);
        for (len, memory_bytes) in [(40, 40), (70 << 10, 128 << 10), ((1 << 20) + 1, 2 << 20)] {
            let held = pool.take(len);
            assert_eq!((held.memory_bytes(), pool.taken_bytes()), (memory_bytes, memory_bytes));
        }
        assert_eq!((pool.taken_bytes(), pool.spare_bytes()), (0, 0));
    }
}
