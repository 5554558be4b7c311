//! Recycled buffers. A fresh megabyte costs 256 page faults, which take longer than a cast into it.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};

use super::{
    changes::ChangeCount,
    primitives::{Mutex, lock},
};

/// Memory of a buffer. The default is none.
pub trait RawMemory: DerefMut<Target = [u8]> + Default + Send {
    /// Memory of this length, with unspecified content.
    fn allocate(len: usize) -> Self;
}

impl RawMemory for Vec<u8> {
    fn allocate(len: usize) -> Self {
        vec![0; len]
    }
}

/// Which memory a pool makes for a buffer, and which it uses again.
#[derive(Clone, Copy, Debug)]
pub struct Sizing {
    /// Length of fresh memory for a buffer of this length.
    pub memory_len: fn(usize) -> usize,
    /// Longest memory for a buffer, in lengths of it.
    pub lengths_max: usize,
}

/// How much memory buffers may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferLimit {
    /// Only what is unused now.
    Spare,
    /// Most bytes of all buffers of the pool, unused ones included.
    Bytes(usize),
    /// The same, unless no buffer is in use.
    BytesUnlessAlone(usize),
    /// Any.
    None,
}

#[derive(Default)]
struct Spare<M> {
    memory: Vec<M>,
    /// Bytes of `memory`.
    bytes: usize,
    /// Most of them.
    bytes_max: usize,
    /// Bytes of buffers that were taken and not yet returned.
    taken_bytes: usize,
    /// Whether a buffer was taken since the last [`BufferPool::trim`].
    in_use: bool,
}

struct Shared<M> {
    spare: Mutex<Spare<M>>,
    sizing: Sizing,
    changes: Arc<ChangeCount>,
}

/// A pool of buffers. Clones share it.
pub struct BufferPool<M>(Arc<Shared<M>>);

impl<M> Clone for BufferPool<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// A buffer that returns to its pool when it is dropped.
pub struct Buffer<M: RawMemory> {
    /// None before [`Self::make`] for a buffer whose memory is fresh.
    memory: M,
    memory_len: usize,
    len: usize,
    pool: BufferPool<M>,
}

impl<M: RawMemory> BufferPool<M> {
    /// A pool that keeps at most `spare_bytes_max` bytes of unused buffers. `changes` is notified of each that comes back.
    pub fn new(sizing: Sizing, spare_bytes_max: usize, changes: Arc<ChangeCount>) -> Self {
        let spare = Spare { memory: Vec::new(), bytes: 0, bytes_max: spare_bytes_max, taken_bytes: 0, in_use: false };
        Self(Arc::new(Shared { spare: Mutex::new(spare), sizing, changes }))
    }

    /// Sets the most bytes of unused buffers.
    pub fn set_spare_bytes_max(&self, bytes: usize) {
        lock(&self.0.spare).bytes_max = bytes;
    }

    /// Bytes of unused buffers.
    pub fn spare_bytes(&self) -> usize {
        lock(&self.0.spare).bytes
    }

    /// Bytes of buffers in use.
    pub fn taken_bytes(&self) -> usize {
        lock(&self.0.spare).taken_bytes
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        let spare = lock(&self.0.spare);
        spare.bytes + spare.taken_bytes
    }

    /// Frees the unused buffers if none was taken since the last call.
    pub fn trim(&self) {
        let mut spare = lock(&self.0.spare);
        if !std::mem::take(&mut spare.in_use) {
            spare.bytes = 0;
            let idle = std::mem::take(&mut spare.memory);
            drop(spare);
            drop(idle);
        }
    }

    /// A buffer of `len` bytes with unspecified content.
    ///
    /// # Panics
    /// Never: without a limit there is always room.
    pub fn take(&self, len: usize) -> Buffer<M> {
        let [mut buffer] = self.reserve([len], BufferLimit::None).expect("there is no limit");
        buffer.make();
        buffer
    }

    /// Buffers of these lengths, if the limit leaves room for all of them. They count from now on; fresh memory is made later, by
    /// [`Buffer::make`]. Unused buffers are freed for it.
    pub fn reserve<const N: usize>(&self, lengths: [usize; N], limit: BufferLimit) -> Option<[Buffer<M>; N]> {
        let mut freed = Vec::new();
        let mut spare = lock(&self.0.spare);
        spare.in_use = true;
        let mut places: [Option<usize>; N] = [None; N];
        for (number, len) in lengths.iter().enumerate() {
            places[number] = spare.position(*len, self.0.sizing.lengths_max, &places);
        }
        let fresh: [usize; N] = std::array::from_fn(|number| match places[number] {
            Some(_) => 0,
            None => (self.0.sizing.memory_len)(lengths[number]),
        });
        let fresh_bytes: usize = fresh.iter().sum();
        loop {
            let unused = (0..spare.memory.len()).find(|at| !places.contains(&Some(*at)));
            let is_within = |bytes: usize| spare.bytes + spare.taken_bytes + fresh_bytes <= bytes;
            let has_room = match limit {
                BufferLimit::Spare => fresh_bytes == 0,
                BufferLimit::Bytes(bytes) => is_within(bytes),
                BufferLimit::BytesUnlessAlone(bytes) => {
                    is_within(bytes) || (unused.is_none() && spare.taken_bytes == 0)
                }
                BufferLimit::None => true,
            };
            if has_room {
                break;
            }
            let unused = unused.filter(|_| limit != BufferLimit::Spare)?;
            let memory = spare.memory.remove(unused);
            spare.bytes -= memory.len();
            freed.push(memory);
            places.iter_mut().flatten().filter(|at| **at > unused).for_each(|at| *at -= 1);
        }
        let buffers = std::array::from_fn(|number| {
            let memory = places[number].map(|at| std::mem::take(&mut spare.memory[at])).unwrap_or_default();
            let memory_len = memory.len() + fresh[number];
            spare.taken_bytes += memory_len;
            spare.bytes -= memory.len();
            Buffer { memory, memory_len, len: lengths[number], pool: self.clone() }
        });
        spare.memory.retain(|memory| !memory.is_empty());
        drop(spare);
        drop(freed);
        Some(buffers)
    }
}

impl<M: RawMemory> Spare<M> {
    /// Where memory for `len` bytes is that no other buffer has: long enough, and not much longer. What came back last is the most
    /// likely to be in the processor's caches.
    fn position(&self, len: usize, lengths_max: usize, others: &[Option<usize>]) -> Option<usize> {
        let longest = len.saturating_mul(lengths_max);
        let fits = |at: &usize| (len..=longest).contains(&self.memory[*at].len()) && !others.contains(&Some(*at));
        (0..self.memory.len()).rev().find(fits)
    }
}

impl<M: RawMemory> Buffer<M> {
    /// Makes the memory, if it was not used before.
    pub fn make(&mut self) {
        if self.memory.len() < self.memory_len {
            self.memory = M::allocate(self.memory_len);
        }
    }

    /// Bytes of memory that the buffer occupies, which may be more than its length.
    pub fn memory_bytes(&self) -> usize {
        self.memory_len
    }
}

impl<M: RawMemory> Drop for Buffer<M> {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        let mut spare = lock(&self.pool.0.spare);
        spare.taken_bytes -= self.memory_len;
        let is_kept = !memory.is_empty() && spare.bytes + memory.len() <= spare.bytes_max;
        let freed = if is_kept {
            spare.bytes += memory.len();
            spare.memory.push(memory);
            None
        } else {
            Some(memory)
        };
        drop(spare);
        self.pool.0.changes.note();
        drop(freed);
    }
}

impl<M: RawMemory> Deref for Buffer<M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.len]
    }
}

impl<M: RawMemory> DerefMut for Buffer<M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPARE_BYTES_MAX: usize = 32 << 20;

    fn sizing() -> Sizing {
        Sizing { memory_len: |len| len.next_multiple_of(64), lengths_max: 4 }
    }

    fn model(test: fn()) {
        shuttle::check_random(test, 1);
    }

    #[test]
    fn buffers_come_back() {
        model(|| {
            let pool = BufferPool::<Vec<u8>>::new(sizing(), SPARE_BYTES_MAX, Arc::default());
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
                drop(pool.take(SPARE_BYTES_MAX / 2));
            }
            assert!(pool.spare_bytes() <= SPARE_BYTES_MAX);
            pool.trim();
            assert!(pool.spare_bytes() > 0, "one was taken lately");
            pool.trim();
            assert_eq!(pool.spare_bytes(), 0);
            assert_eq!(pool.take(1 << 20).len(), 1 << 20);
            let pool = BufferPool::<Vec<u8>>::new(sizing(), 0, Arc::default());
            for (len, memory_bytes) in [(40, 64), (128, 128), (129, 192)] {
                let held = pool.take(len);
                assert_eq!((held.memory_bytes(), pool.taken_bytes()), (memory_bytes, memory_bytes));
            }
            assert_eq!(pool.bytes(), 0);
        });
    }

    #[test]
    fn reserved_buffers_keep_the_limit_and_use_what_is_there_first() {
        model(|| {
            let pool = BufferPool::<Vec<u8>>::new(sizing(), 1000, Arc::default());
            drop((pool.take(64), pool.take(128), pool.take(320)));
            assert_eq!(pool.spare_bytes(), 512);
            assert!(pool.reserve([64, 64], BufferLimit::Spare).is_some());
            assert!(pool.reserve([64, 640], BufferLimit::Spare).is_none() && pool.spare_bytes() == 512);
            // The one that came back first of those that are not used is freed.
            let [mut old, mut fresh] = pool.reserve([100, 640], BufferLimit::Bytes(1100)).unwrap();
            assert_eq!((old.memory_bytes(), pool.spare_bytes(), pool.bytes()), (128, 64, 832));
            old.make();
            fresh.make();
            assert_eq!((old.len(), fresh.len()), (100, 640));
            assert!(
                pool.reserve([640], BufferLimit::Bytes(1100)).is_none(),
                "no room, though all unused ones are freed"
            );
            assert_eq!(pool.bytes(), 768);
            assert!(pool.reserve([640], BufferLimit::BytesUnlessAlone(1100)).is_none());
            drop((old, fresh));
            assert_eq!(pool.spare_bytes(), 768);
            let [alone] = pool.reserve([6400], BufferLimit::BytesUnlessAlone(1100)).unwrap();
            assert_eq!((alone.memory_bytes(), pool.bytes()), (6400, 6400));
            // A buffer whose memory was never made leaves nothing behind.
            drop(alone);
            assert_eq!(pool.bytes(), 0);
            let [_one] = pool.reserve([6400], BufferLimit::None).unwrap();
            assert!(pool.reserve([6400], BufferLimit::None).is_some());
        });
    }
}
