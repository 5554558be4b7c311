//! The byte-range engine.

use std::{sync::Arc, time::Duration};

use ckfs_checkpoint::Checkpoint;
use ckfs_image::Segment;
use ckfs_source::{ByteSpan, FileId, ReadFailure, Replied, Served, Source};
use ckfs_sync::{Account, Reservation};
use ckfs_tensor::to_usize;
use parking_lot::Mutex;

use super::{
    ReadError,
    band_store::Encoded,
    buffer::{BufferPool, buffer_pool},
    counters::{Counters, Path, add},
    prepared_file::PreparedFile,
    tile::TileCache,
    worker::Workers,
};

/// After this time of waiting for storage a thread gets a substitute until it continues.
const SLOW: Duration = Duration::from_millis(500);

/// Limits of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Bytes of tiles, including those being computed, of materialized files, and of pre-zeroed buffers.
    pub tile_cache_bytes: usize,
    /// Most bytes of unused buffers that the engine keeps.
    pub spare_buffer_bytes: usize,
    /// Most bytes of source data that one thread may hold in its own buffers.
    pub thread_buffer_bytes: usize,
    /// Threads that compute ahead of sequential readers.
    pub workers: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { tile_cache_bytes: 256 << 20, spare_buffer_bytes: 64 << 20, thread_buffer_bytes: 64 << 20, workers: 2 }
    }
}

/// Reads spans of virtual files. Shared by all threads.
pub struct Engine {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) rooms: EngineRooms,
    pub(super) counters: Counters,
    /// Materialized files of this engine.
    pub(super) materialized: Account,
    /// Memory of dropped files of this engine that programs still map.
    dropped: Mutex<Reservation>,
    pub(super) encoded: Encoded,
    /// Whether other engines use the same memory and threads.
    is_shared: bool,
}

/// The memory and the threads of engines, for several that have one budget together.
#[derive(Clone)]
pub struct EngineRooms {
    pub(super) cache: Arc<TileCache>,
    pub(super) buffers: Arc<BufferPool>,
    pub(super) workers: Arc<Workers>,
    /// The threads that request source pages from the kernel, and wait for them.
    pub(super) requesters: Arc<Workers>,
    options: EngineOptions,
}

impl EngineRooms {
    /// Room within these limits.
    pub fn new(options: EngineOptions) -> Self {
        // Pages that are being read cannot be taken back: where memory is short nothing is requested ahead.
        let requesters = if options.tile_cache_bytes >= PAGES_CACHE_BYTES_MIN { REQUESTERS } else { 0 };
        Self {
            cache: Arc::new(TileCache::new(options.tile_cache_bytes)),
            buffers: Arc::new(buffer_pool(options.spare_buffer_bytes)),
            workers: Arc::new(Workers::new("ckfs-ahead", options.workers)),
            requesters: Arc::new(Workers::new("ckfs-pages", requesters)),
            options,
        }
    }

    /// An engine over a checkpoint, which shares these rooms with others.
    pub fn engine(&self, checkpoint: Arc<Checkpoint>) -> Engine {
        Engine {
            checkpoint,
            rooms: self.clone(),
            counters: Counters::default(),
            encoded: Encoded::default(),
            materialized: Account::default(),
            dropped: Mutex::new(self.cache.memory.dropped.reserve(0)),
            is_shared: true,
        }
    }

    /// Starts substitutes for the threads of all engines that wait for storage: those that [`Engine::slow_threads`] names.
    pub fn replace_waiting(&self, threads: &[i32]) {
        self.workers.replace_waiting(threads);
    }

    /// Frees memory that only earlier readers used. To be called every few seconds.
    pub fn trim(&self) {
        self.cache.drop_idle();
        self.buffers.trim();
    }

    /// Bytes in use now, by purpose.
    pub fn held(&self) -> HeldBytes {
        let Self { cache, buffers, .. } = self;
        HeldBytes {
            tiles: cache.bytes(),
            materialized: cache.memory.reserved.bytes(),
            dropped: cache.memory.dropped.bytes(),
            spare_buffers: buffers.spare_bytes(),
            thread_buffers: buffers.taken_bytes().saturating_sub(cache.bytes()),
        }
    }
}

/// Memory that engines use now, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldBytes {
    /// Tiles, including those being computed.
    pub tiles: usize,
    /// Materialized files in memory.
    pub materialized: usize,
    /// Dropped files that programs still map.
    pub dropped: usize,
    /// Unused buffers.
    pub spare_buffers: usize,
    /// Buffers in use, without those that hold tiles.
    pub thread_buffers: usize,
}

/// Least bytes of the cache with which source pages are requested ahead of readers.
const PAGES_CACHE_BYTES_MIN: usize = 64 << 20;

/// Runs of at least this many bytes are sent from the page cache of their source, most of them alone in a request of the kernel.
const LONG_RUN_BYTES: u64 = 1 << 20;

/// Threads that request source pages. Each waits for 2 MiB at a time: together they keep a fast disk busy.
const REQUESTERS: usize = 8;

impl Engine {
    /// An engine over a checkpoint.
    pub fn new(checkpoint: Arc<Checkpoint>, options: EngineOptions) -> Self {
        Self { is_shared: false, ..EngineRooms::new(options).engine(checkpoint) }
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    pub(super) fn options(&self) -> &EngineOptions {
        &self.rooms.options
    }

    pub(super) fn source(&self) -> &dyn Source {
        self.checkpoint.source().as_ref()
    }

    /// Checks that the sources of a file are unchanged, so that opening a file whose source has changed fails.
    ///
    /// # Errors
    /// [`ReadError::Changed`].
    pub fn check(&self, file: &PreparedFile) -> Result<(), ReadError> {
        self.sources_of(file).iter().try_for_each(|id| self.check_original(*id))
    }

    /// The source files of a file.
    pub fn sources_of<'a>(&self, file: &'a PreparedFile) -> &'a [FileId] {
        file.sources.get_or_init(|| {
            let mut sources = std::collections::BTreeSet::new();
            for segment in file.image.segments() {
                if let Segment::View(view) = segment {
                    view.for_each_stored(&mut |tensor| {
                        sources.insert(self.checkpoint.tensor(tensor).file());
                    });
                }
            }
            sources.into_iter().collect()
        })
    }

    /// Whether a file is nothing but long runs of source bytes beside what is no tensor: to have its bytes in another file too would
    /// cost a copy, and memory for it.
    pub fn is_untransformed(&self, file: &PreparedFile) -> bool {
        let is_long_runs =
            |segment| self.prepare(file, segment).is_ok_and(|lowered| lowered.tiling.is_run_copy(LONG_RUN_BYTES));
        let mut segments = file.image.segments().iter().enumerate();
        segments.all(|(index, segment)| !matches!(segment, Segment::View(_)) || is_long_runs(index))
    }

    /// The error of a file if one of its sources stalls.
    pub(super) fn stall(&self, file: &PreparedFile) -> Option<ReadError> {
        let stalled = self.sources_of(file).iter().find(|id| self.source().health().is_stalled(**id))?;
        self.source().check(*stalled).err().map(ReadError::from)
    }

    /// Whether any thread has been waiting for storage for a while.
    pub fn is_waiting(&self) -> bool {
        !self.source().health().fetches.waiting(SLOW / 10).is_empty()
    }

    /// Updates which source files stall. Starts substitutes for threads that wait for storage, so that other files are made
    /// meanwhile. To be called several times a second while there are readers.
    pub fn note_stalls(&self) {
        let threads = self.slow_threads();
        if !self.is_shared {
            self.rooms.replace_waiting(&threads);
        }
    }

    /// Updates which source files stall, and names the threads that wait for storage: [`EngineRooms::replace_waiting`] of engines that
    /// share their threads takes those of all of them.
    pub fn slow_threads(&self) -> Vec<i32> {
        let waiting = self.source().health().note_stalls();
        let slow = waiting.iter().filter(|waiting| waiting.quiet >= SLOW);
        slow.map(|waiting| waiting.thread).collect()
    }

    /// Checks that a source file is unchanged.
    ///
    /// # Errors
    /// [`ReadError::Changed`].
    pub fn check_original(&self, file: FileId) -> Result<(), ReadError> {
        Ok(self.source().check_path(file)?)
    }

    /// Bytes in use now, by purpose. Only the materialized files are this engine's own where others share its memory.
    pub fn held(&self) -> HeldBytes {
        HeldBytes { materialized: self.materialized.bytes(), ..self.rooms.held() }
    }

    /// Sets how many bytes of memory dropped files occupy. Tiles and materialized files get that much less.
    pub fn set_dropped_bytes(&self, bytes: usize) {
        self.dropped.lock().resize(bytes);
    }

    /// Whether other engines use the same memory and threads.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Drops the tiles of a file that will not be read again through this [`PreparedFile`].
    pub fn forget(&self, file: &PreparedFile) {
        self.rooms.cache.forget_file(file.key);
    }

    /// Frees memory that only earlier readers used. To be called every few seconds.
    pub fn trim(&self) {
        self.rooms.trim();
        if let Some(maps) = self.source().maps() {
            maps.trim();
        }
    }

    /// Reads a source file unchanged, up to its pinned end.
    ///
    /// # Errors
    /// [`ReadError`] if it has changed or cannot be read.
    pub fn read_original(
        &self,
        file: FileId,
        start: u64,
        len: usize,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<ReadError>> {
        let source = self.source();
        let end = start.saturating_add(len as u64).min(source.len_bytes(file));
        let start = start.min(end);
        let result = self.serve_source(file, start, end, Path::Identical, reply);
        result.inspect_err(|failure| self.count_failure(&failure.error))
    }

    /// As [`Self::read_original`], into memory of the caller, which ends within the file.
    ///
    /// # Errors
    /// [`ReadError`]; the content of the target is then unspecified.
    pub fn read_original_into(&self, file: FileId, start: u64, target: &mut [u8]) -> Result<(), ReadError> {
        let result = self.copy_source(file, start, target, Path::Identical);
        result.inspect_err(|error| self.count_failure(error))
    }

    /// Copies a span of a source file. The kernel finds the pages of a file faster by `pread` than through a map.
    pub(super) fn copy_source(&self, file: FileId, start: u64, target: &mut [u8], path: Path) -> Result<(), ReadError> {
        self.source().read_into(file, start, target)?;
        self.source().check(file)?;
        self.counters.fetch(path, target.len() as u64);
        self.counters.serve(path, target.len() as u64);
        Ok(())
    }

    pub(super) fn count_failure(&self, error: &ReadError) {
        add(&self.counters.failed_reads, 1);
        add(&self.counters.stalled_reads, u64::from(error.is_stall()));
    }

    pub(super) fn serve_source(
        &self,
        file: FileId,
        start: u64,
        end: u64,
        path: Path,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<ReadError>> {
        let source = self.source();
        let len = end - start;
        let count = || {
            self.counters.fetch(path, len);
            self.counters.serve(path, len);
        };
        let span = ByteSpan::new(start, end).filter(|_| len > 0);
        let served = span.zip(source.maps()).and_then(|(span, maps)| {
            maps.with_kernel_bytes(file, span, &mut |bytes| {
                add(&self.counters.zero_copy, 1);
                count();
                reply(Served::Kernel(bytes))
            })
        });
        if let Some(result) = served {
            return result.map_err(|failure| failure.map(ReadError::from));
        }
        let mut buffer = self.rooms.buffers.take(to_usize(len));
        source.read_into(file, start, &mut buffer).map_err(ReadError::from)?;
        source.check(file).map_err(ReadError::from)?;
        count();
        Ok(reply(Served::Memory(&buffer)))
    }
}
