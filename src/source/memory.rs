//! Memory for the bytes of sources and of what is made from them.

use std::{
    fmt,
    ops::{Deref, DerefMut},
};

use memmap2::{Advice, MmapMut};

/// Size of a huge page.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory that is zero at first. More than half of a huge page is a mapping of whole huge pages, where the system provides these:
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
        if len > HUGE_PAGE_BYTES / 2
            && let Ok(map) = MmapMut::map_anon(len.next_multiple_of(HUGE_PAGE_BYTES))
        {
            // Advice only: small pages work too.
            let _ = map.advise(Advice::HugePage);
            return Self { len, place: Place::Mapped(map) };
        }
        Self { len, place: Place::Allocated(vec![0; len].into_boxed_slice()) }
    }

    /// Bytes that such memory of `len` bytes occupies.
    pub fn occupied_bytes(len: usize) -> usize {
        if len > HUGE_PAGE_BYTES / 2 { len.next_multiple_of(HUGE_PAGE_BYTES) } else { len }
    }
}

impl Default for BufferMemory {
    /// No memory.
    fn default() -> Self {
        Self { len: 0, place: Place::Allocated(Box::default()) }
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

impl fmt::Debug for BufferMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory of {} bytes", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_as_long_as_asked_for() {
        for len in [0, 1, HUGE_PAGE_BYTES / 2, HUGE_PAGE_BYTES / 2 + 1, HUGE_PAGE_BYTES + 5] {
            let mut memory = BufferMemory::new(len);
            assert_eq!(memory.len(), len);
            assert!(memory.iter().all(|byte| *byte == 0));
            memory.fill(7);
            assert!(BufferMemory::occupied_bytes(len) >= len);
        }
        assert!(BufferMemory::default().is_empty());
    }
}
