//! Memory for materialized files: reserved room in the engine's cache, and a file that uses it.

use std::{fs::File, io};

use ckfs_read::{Engine, FileRoom};
use ckfs_source::page_size::allocation_page_bytes;
use parking_lot::Mutex;

use super::memory_files::MemoryFiles;

/// Memory for files, as far as an engine's cache allows.
#[derive(Debug)]
pub(super) struct Memory {
    files: MemoryFiles,
    /// Held while room is moved, so that no memory is without its reservation.
    moving: Mutex<()>,
}

impl Memory {
    /// Memory for as many bytes as may be reserved in the engine's cache.
    ///
    /// # Errors
    /// As [`MemoryFiles::new`].
    pub(super) fn new(engine: &Engine) -> io::Result<Self> {
        let files = MemoryFiles::new(engine.reservable_bytes() as u64)?;
        Ok(Self { files, moving: Mutex::default() })
    }

    /// A file of `len_bytes` bytes without content, and its room in the cache. To make room, the files that `drop_oldest` drops
    /// go first.
    ///
    /// # Errors
    /// There is no room, or no memory.
    pub(super) fn take(
        &self,
        engine: &Engine,
        len_bytes: u64,
        drop_oldest: &mut dyn FnMut() -> bool,
    ) -> io::Result<(File, FileRoom)> {
        let _moving = self.moving.lock();
        let room_bytes = usize::try_from(len_bytes.next_multiple_of(allocation_page_bytes() as u64))
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        let room = loop {
            self.note_dropped(engine);
            if let Some(room) = engine.reserve(room_bytes) {
                break room;
            }
            if !drop_oldest() {
                return Err(io::Error::other(format!("no room for {room_bytes} bytes in the cache")));
            }
        };
        let file = self.files.unnamed(0)?;
        file.set_len(len_bytes)?;
        Ok((file, room))
    }

    /// Memory of all files in bytes, including dropped ones that programs still map.
    pub(super) fn used_bytes(&self) -> u64 {
        self.files.used_bytes()
    }

    /// Measures the memory of dropped files that programs still map: the used bytes beyond the reserved ones.
    pub(super) fn measure(&self, engine: &Engine) {
        let _moving = self.moving.lock();
        self.note_dropped(engine);
    }

    fn note_dropped(&self, engine: &Engine) {
        let used = usize::try_from(self.files.used_bytes()).unwrap_or(usize::MAX);
        engine.set_dropped_bytes(used.saturating_sub(engine.held().materialized));
    }
}
