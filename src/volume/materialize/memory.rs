//! Memory for materialized files: reserved room in the engine's cache, and a file that uses it.

use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    memory_files::{HUGE_PAGE_BYTES, MemoryFiles},
    prezeroed::{Busy, Prezeroed},
};
use crate::read::{Engine, Prefault, Reservation, counters::add};

/// Memory for files, as far as an engine's cache allows, and pre-zeroed buffers of it.
#[derive(Debug)]
pub(super) struct Memory {
    files: Arc<MemoryFiles>,
    prezeroed: Prezeroed,
    /// Held while room is moved, so that no memory is without its reservation.
    moving: Mutex<()>,
}

impl Memory {
    /// Memory for as many bytes as may be reserved in the engine's cache.
    ///
    /// # Errors
    /// As [`MemoryFiles::new`].
    pub(super) fn new(engine: &Arc<Engine>) -> io::Result<Self> {
        let files = Arc::new(MemoryFiles::new(engine.reservable_bytes() as u64)?);
        Ok(Self { prezeroed: Prezeroed::new(&files, engine), files, moving: Mutex::default() })
    }

    /// Maps source pages and zeroes buffers of likely sizes while no program reads.
    pub(super) fn expect(
        &self,
        prefault: Option<Prefault>,
        sizes: impl FnOnce() -> Vec<(u64, usize)> + Send + 'static,
    ) {
        let mut prefault = prefault;
        if let Err(error) = self.prezeroed.start(move || prefault.as_mut().is_some_and(Prefault::step), sizes) {
            tracing::info!("nothing is warmed up for materialized files: {error}");
        }
    }

    /// A file of `len_bytes` bytes, with memory already present as far as it was pre-zeroed, and its room in the cache.
    /// Buffers are dropped first to make room, then the files that `drop_oldest` drops.
    ///
    /// # Errors
    /// There is no room, or no memory.
    pub(super) fn take(
        &self,
        engine: &Engine,
        len_bytes: u64,
        drop_oldest: &mut dyn FnMut() -> bool,
    ) -> io::Result<(File, Reservation)> {
        let _moving = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
        self.measure_but(engine, None);
        let _paused = self.prezeroed.pause();
        let buffer = self.prezeroed.take(len_bytes);
        let room_bytes =
            usize::try_from(len_bytes.next_multiple_of(HUGE_PAGE_BYTES)).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mut room = engine.reserve(room_bytes);
        if room.is_none() {
            self.prezeroed.drop_all();
        }
        let room = loop {
            if let Some(room) = room {
                break room;
            }
            self.measure_but(engine, buffer.as_ref());
            room = engine.reserve(room_bytes);
            if room.is_none() && !drop_oldest() {
                return Err(io::Error::other(format!("no room for {room_bytes} bytes in the cache")));
            }
        };
        if let Some(buffer) = buffer
            && buffer.set_len(len_bytes).is_ok()
        {
            add(&engine.counters().prezeroed_files, 1);
            return Ok((buffer, room));
        }
        let file = self.files.unnamed(0)?;
        file.set_len(len_bytes)?;
        Ok((file, room))
    }

    /// Stops the zeroing of buffers until the result is dropped.
    pub(super) fn pause(&self) -> Busy {
        self.prezeroed.pause()
    }

    /// Memory of all files in bytes, including dropped ones that programs still map.
    pub(super) fn used_bytes(&self) -> u64 {
        self.files.used_bytes()
    }

    /// Notes that a program reads.
    pub(super) fn note_read(&self) {
        self.prezeroed.note_read();
    }

    /// Whether readers are expected soon.
    pub(super) fn expects(&self) -> bool {
        self.prezeroed.expects()
    }

    /// Measures the memory of dropped files that programs still map: the used bytes beyond the reserved ones.
    pub(super) fn measure(&self, engine: &Engine) {
        let _moving = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
        self.measure_but(engine, None);
    }

    /// As [`Self::measure`], except for a buffer that has no reservation.
    fn measure_but(&self, engine: &Engine, buffer: Option<&File>) {
        let buffer_bytes = buffer.and_then(|buffer| buffer.metadata().ok()).map_or(0, |found| found.blocks() * 512);
        let used = usize::try_from(self.files.used_bytes().saturating_sub(buffer_bytes)).unwrap_or(usize::MAX);
        engine.set_dropped_bytes(used.saturating_sub(engine.materialized_bytes() + engine.prezeroed_bytes()));
    }
}
