//! Memory for the bytes of sources and of what is made from them.

use std::ops::{Deref, DerefMut};

use memmap2::{Advice, MmapMut};

use super::page_size::{allocation_page_bytes, uses_huge_pages};

/// Smaller memory is the allocator's.
const MAPPED_BYTES_MIN: usize = (1 << 20) + 1;

/// Memory that is zero at first. From 1 MiB on it is a mapping of whole huge pages, where the system has them in a suitable size:
/// one page fault where small pages take 512, and the kernel copies from them with fewer page lookups.
pub struct BufferMemory {
    len: usize,
    place: Place,
}

enum Place {
    Mapped(MmapMut),
    Allocated(Box<[u8]>),
}

impl BufferMemory {
    /// Memory of `len` bytes.
    pub fn new(len: usize) -> Self {
        if len >= MAPPED_BYTES_MIN
            && let Ok(map) = MmapMut::map_anon(Self::occupied_bytes(len))
        {
            if uses_huge_pages() {
                // Advice only: small pages work too.
                let _ = map.advise(Advice::HugePage);
            }
            return Self { len, place: Place::Mapped(map) };
        }
        Self { len, place: Place::Allocated(vec![0; len].into_boxed_slice()) }
    }

    /// Bytes that such memory of `len` bytes occupies.
    pub fn occupied_bytes(len: usize) -> usize {
        if len >= MAPPED_BYTES_MIN { len.next_multiple_of(allocation_page_bytes()) } else { len }
    }
}

impl Default for BufferMemory {
    /// No memory.
    fn default() -> Self {
        Self { len: 0, place: Place::Allocated(Box::default()) }
    }
}

impl ckfs_sync::RawMemory for BufferMemory {
    fn allocate(len: usize) -> Self {
        Self::new(len)
    }
}

impl Deref for BufferMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.place {
            Place::Mapped(map) => &map[..self.len],
            Place::Allocated(bytes) => bytes,
        }
    }
}

impl DerefMut for BufferMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.place {
            Place::Mapped(map) => &mut map[..self.len],
            Place::Allocated(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_as_long_as_asked_for() {
        for len in [0, 1, MAPPED_BYTES_MIN - 1, MAPPED_BYTES_MIN, (2 << 20) + 5] {
            let mut memory = BufferMemory::new(len);
            assert_eq!(memory.len(), len);
            assert!(memory.iter().all(|byte| *byte == 0));
            memory.fill(7);
            assert!(BufferMemory::occupied_bytes(len) >= len);
        }
        assert!(BufferMemory::default().is_empty());
    }
}
