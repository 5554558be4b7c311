//! The byte-range engine.

use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    ReadError,
    buffer::BufferPool,
    counters::{Counters, Path, add},
    stream::Streams,
    tile::{Ask, Tile, TileCache, TileKey, TileRoom},
    worker::Workers,
};
use crate::{
    checkpoint::{Checkpoint, TensorInfo, printable},
    image::{FileImage, Segment},
    source::{ByteSpan, FileId, Source},
    tensor::{Decode, Gather, Origin, Piece, Share, Stores, Tiling, Window, fill, gather_with, needs, to_usize},
};

/// Smallest tile, a huge page. Conversions of less than a megabyte at a time leave caches and vectors cold.
const TILE_BYTES_MIN: u64 = 2 << 20;
/// Largest tile, where the cache allows it: an eighth of it, and a quarter of what other tiles in use leave.
const TILE_BYTES_MAX: u64 = 32 << 20;
/// Source elements that a tile takes, where it can, from each row that it transposes. A few cache lines would do for the
/// processor's caches; but each tile also touches pages of all the rows again, which costs less the larger the tile is.
const TRANSPOSED_ELEMENTS_MIN: u64 = 256;
/// Runs shorter than this are gathered in tiles rather than anew at each request.
const RUN_BYTES_MIN: u64 = 4096;
/// How far ahead of a sequential reader source pages are asked for.
const RUNS_AHEAD_BYTES: u64 = 8 << 20;
/// Source bytes between two that are wanted, from which on they are not asked for in one. The kernel reads over smaller gaps anyway.
const GAP_BYTES: u64 = 256 << 10;
/// A thread that has waited so long for storage is replaced meanwhile.
const SLOW: Duration = Duration::from_millis(500);
/// Where source bytes must be read into memory first, one piece may span this part of a thread's buffers, and more where most of
/// the span is used.
const WINDOW_PART: u64 = 4;

/// Limits of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Bytes of transformed data: of tiles, those being computed included, and of materialized and pre-zeroed files.
    pub tile_cache_bytes: usize,
    /// Bytes of unused buffers that are kept.
    pub spare_buffer_bytes: usize,
    /// Bytes of source data that a thread may read into memory of its own at once.
    pub thread_buffer_bytes: usize,
    /// Threads that compute ahead of sequential readers.
    pub workers: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { tile_cache_bytes: 256 << 20, spare_buffer_bytes: 64 << 20, thread_buffer_bytes: 64 << 20, workers: 2 }
    }
}

/// A virtual file made ready for reading: its image, and the tilings of its views once they are needed.
#[derive(Debug)]
pub struct OpenFile {
    key: u64,
    name: String,
    image: FileImage,
    tilings: Vec<OnceLock<Result<Arc<Prepared>, ReadError>>>,
    streams: Mutex<Streams>,
    failed: AtomicBool,
    sources: OnceLock<Box<[FileId]>>,
}

/// A lowered view and how it is served.
#[derive(Debug)]
struct Prepared {
    tiling: Tiling,
    /// The tiles; `None` where runs of source bytes are served as they are.
    grid: Option<Grid>,
}

/// How a target is cut into tiles: tile `i` is units `i * units - shift ..`, the first and the last cut short by the
/// target.
#[derive(Clone, Copy, Debug)]
struct Grid {
    units: u64,
    shift: u64,
}

impl Grid {
    /// The tile that holds a unit.
    fn index(self, unit: u64) -> u64 {
        (unit + self.shift) / self.units
    }

    /// Units of a tile.
    fn span(self, index: u64, len_units: u64) -> (u64, u64) {
        let first = (index * self.units).saturating_sub(self.shift);
        (first, ((index + 1) * self.units - self.shift).min(len_units))
    }
}

impl OpenFile {
    /// A file with a name for messages.
    pub fn new(name: String, image: FileImage) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let tilings = image.segments().iter().map(|_| OnceLock::new()).collect();
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        let (streams, failed, sources) = (Mutex::default(), AtomicBool::new(false), OnceLock::new());
        Self { key, name, image, tilings, streams, failed, sources }
    }

    /// The name for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.image.len_bytes()
    }

    /// The layout of the file.
    pub fn image(&self) -> &FileImage {
        &self.image
    }
}

/// How bytes are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub(super) path: Path,
    pub(super) stores: Stores,
    share: Share,
}

impl How {
    const fn cached(path: Path) -> Self {
        Self { path, stores: Stores::Cached, share: Share::WHOLE }
    }
}

/// Source files touched while bytes were made.
pub(super) type Touched = SmallVec<[FileId; 2]>;

pub(super) fn touch(touched: &mut Touched, file: FileId) {
    if !touched.contains(&file) {
        touched.push(file);
    }
}

/// Reads spans of virtual files. Shared by all threads.
pub struct Engine {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) cache: TileCache,
    pub(super) buffers: BufferPool,
    pub(super) workers: Workers,
    pub(super) counters: Counters,
    options: EngineOptions,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine over a checkpoint.
    pub fn new(checkpoint: Arc<Checkpoint>, options: EngineOptions) -> Self {
        Self {
            checkpoint,
            cache: TileCache::new(options.tile_cache_bytes),
            buffers: BufferPool::new(options.spare_buffer_bytes),
            workers: Workers::new(options.workers),
            counters: Counters::default(),
            options,
        }
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    pub(super) fn source(&self) -> &dyn Source {
        self.checkpoint.source().as_ref()
    }

    /// Checks that the sources of a file are what they were, so that opening a file whose source has changed fails.
    ///
    /// # Errors
    /// [`ReadError::Changed`].
    pub fn check(&self, file: &OpenFile) -> Result<(), ReadError> {
        self.sources_of(file).iter().try_for_each(|id| self.check_original(*id))
    }

    /// The source files that a file is made of.
    pub fn sources_of<'a>(&self, file: &'a OpenFile) -> &'a [FileId] {
        file.sources.get_or_init(|| {
            let mut sources = std::collections::BTreeSet::new();
            for segment in file.image.segments() {
                if let Segment::View(view) = segment {
                    view.for_each_source(&mut |tensor| {
                        sources.insert(self.checkpoint.tensor(tensor.id).file());
                    });
                }
            }
            sources.into_iter().collect()
        })
    }

    /// The error of a file of which a source stalls.
    fn stall(&self, file: &OpenFile) -> Option<ReadError> {
        let stalled = self.sources_of(file).iter().find(|id| self.source().is_stalled(**id))?;
        self.source().check(*stalled).err().map(|error| ReadError::Changed { error })
    }

    /// Whether some thread has been waiting for storage for a while.
    pub fn is_waiting(&self) -> bool {
        !self.source().waiting(SLOW / 10).is_empty()
    }

    /// Looks which source files stall, and starts threads in place of those that wait for storage, so that others' files are
    /// made meanwhile. To be called several times a second while there are readers.
    pub fn note_stalls(&self) {
        let waiting = self.source().note_stalls();
        let slow = waiting.iter().filter(|waiting| waiting.quiet >= SLOW);
        let threads: Vec<i32> = slow.map(|waiting| waiting.thread).collect();
        self.workers.relieve(&threads);
    }

    /// Checks that a source file is what it was.
    ///
    /// # Errors
    /// [`ReadError::Changed`].
    pub fn check_original(&self, file: FileId) -> Result<(), ReadError> {
        self.source().check_path(file).map_err(|error| ReadError::Changed { error })
    }

    /// Bytes of tiles held now, those being computed included.
    pub fn cached_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Bytes of whole files held now.
    pub fn whole_bytes(&self) -> usize {
        self.cache.reserved_bytes().saturating_sub(self.cache.spare_bytes())
    }

    /// Bytes of blank files held now.
    pub fn blank_bytes(&self) -> usize {
        self.cache.spare_bytes()
    }

    /// Bytes of unused buffers held now.
    pub fn spare_buffer_bytes(&self) -> usize {
        self.buffers.kept_bytes()
    }

    /// Bytes of buffers in use now, beside those that tiles are in.
    pub fn thread_buffer_bytes(&self) -> usize {
        self.buffers.taken_bytes().saturating_sub(self.cache.bytes())
    }

    /// Bytes of memory that dropped files take now because programs still map them.
    pub fn dropped_bytes(&self) -> usize {
        self.cache.dropped_bytes()
    }

    /// Notes how much memory dropped files take: there is that much less for others.
    pub fn set_dropped_bytes(&self, bytes: usize) {
        self.cache.set_dropped_bytes(bytes);
    }

    /// Drops what is kept of a file that will not be read again under this [`OpenFile`].
    pub fn forget(&self, file: &OpenFile) {
        self.cache.forget_file(file.key);
    }

    /// Keeps source pages mapped for readers who will come, until some seconds after this was last called.
    pub fn keep_maps(&self) {
        self.source().will_return();
    }

    /// Gives back memory that was of use to readers who are gone. To be called every few seconds.
    pub fn settle(&self) {
        self.cache.drop_idle();
        self.buffers.settle();
        self.source().settle();
    }

    /// Reads a source file as it is, up to its pinned end.
    ///
    /// # Errors
    /// [`ReadError`] if it has changed or cannot be read.
    pub fn read_original(
        &self,
        file: FileId,
        start: u64,
        len: usize,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        let source = self.source();
        let end = start.saturating_add(len as u64).min(source.len_bytes(file));
        let start = start.min(end);
        let result = self.lend_or_read(file, start, end, Path::Identical, reply);
        result.inspect_err(|error| self.count_failure(error))
    }

    fn count_failure(&self, error: &ReadError) {
        add(&self.counters.failed_reads, 1);
        add(&self.counters.stalled_reads, u64::from(error.is_stall()));
    }

    fn lend_or_read(
        &self,
        file: FileId,
        start: u64,
        end: u64,
        path: Path,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        let source = self.source();
        let changed = |error| ReadError::Changed { error };
        let len = end - start;
        let count = || {
            self.counters.fetch(path, len);
            self.counters.serve(path, len);
        };
        let span = ByteSpan::new(start, end).filter(|_| len > 0);
        let lent = span.and_then(|span| {
            source.lend_to(file, span, &mut |bytes| {
                add(&self.counters.lent, 1);
                count();
                reply(bytes);
            })
        });
        if let Some(result) = lent {
            return result.map_err(changed);
        }
        let mut buffer = self.buffers.take(to_usize(len));
        source.read_into(file, start, &mut buffer).map_err(changed)?;
        source.check(file).map_err(changed)?;
        count();
        reply(&buffer);
        Ok(())
    }

    /// Reads `len` bytes at `start`, fewer only at the end of the file, and hands them to `reply`, exactly once if the
    /// result is `Ok`. They are counted before that: a reader that has the bytes finds them in the counters.
    ///
    /// # Errors
    /// [`ReadError`]; the first of a file is logged. If `reply` was called all the same, a source changed just then, and the
    /// bytes are not to be trusted.
    pub fn read(
        self: &Arc<Self>,
        file: &Arc<OpenFile>,
        start: u64,
        len: usize,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        let end = start.saturating_add(len as u64).min(file.len_bytes());
        let start = start.min(end);
        // First of all, so that others compute what comes next while this thread computes what is wanted now.
        self.look_ahead(file, start, end);
        let result = self.read_span(file, start, end, reply);
        if let Err(error) = &result {
            self.count_failure(error);
            // A stall was logged by the source, and the file will be good again.
            if !error.is_stall() && !file.failed.swap(true, Ordering::Relaxed) {
                let error = printable(&error.to_string()).into_owned();
                tracing::error!(file = file.name, start, end, "read failed: {error}");
            }
        }
        result
    }

    fn read_span(&self, file: &OpenFile, start: u64, end: u64, reply: &mut dyn FnMut(&[u8])) -> Result<(), ReadError> {
        let mut spans = file.image.spans(start, end);
        let Some((segment, low, high)) = spans.next() else {
            reply(&[]);
            return Ok(());
        };
        if spans.next().is_none() {
            return self.read_within(file, segment, low, high, reply);
        }
        let mut buffer = self.buffers.take(to_usize(end - start));
        let mut at = 0;
        for (segment, low, high) in file.image.spans(start, end) {
            let mut part = |bytes: &[u8]| {
                buffer[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
            };
            // What is lent may only be handed to the kernel, so parts are copied by guarded ways.
            self.copy_within(file, segment, low, high, &mut part)?;
        }
        reply(&buffer);
        Ok(())
    }

    /// Reads a span of one segment, lending source bytes where possible.
    fn read_within(
        &self,
        file: &OpenFile,
        segment: usize,
        low: u64,
        high: u64,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        if let Segment::View(_) = &file.image.segments()[segment] {
            let prepared = self.prepare(file, segment)?;
            if prepared.grid.is_none()
                && let Some((source, start, end)) = self.single_run(&prepared.tiling, low, high)
            {
                return self.lend_or_read(source, start, end, Path::Runs, reply);
            }
        }
        self.copy_within(file, segment, low, high, reply)
    }

    /// Reads a span of one segment into memory of our own.
    fn copy_within(
        &self,
        file: &OpenFile,
        segment: usize,
        low: u64,
        high: u64,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        if let Segment::Bytes(bytes) = &file.image.segments()[segment] {
            let (from, to) = (to_usize(low), to_usize(high));
            self.counters.serve(Path::Made, high - low);
            reply(&bytes[from..to]);
            return Ok(());
        }
        if let Segment::Spaces(_) = &file.image.segments()[segment] {
            let mut buffer = self.buffers.take(to_usize(high - low));
            buffer.fill(b' ');
            self.counters.serve(Path::Made, high - low);
            reply(&buffer);
            return Ok(());
        }
        let prepared = self.prepare(file, segment)?;
        match prepared.grid {
            Some(grid) => self.read_tiles(file, segment, &prepared, grid, low, high, reply),
            None => self.read_alone(&prepared.tiling, low, high, Path::Runs, reply),
        }
    }

    /// Makes a span of one segment, neither with tiles of the cache nor for it.
    pub(super) fn make_within(
        &self,
        file: &OpenFile,
        segment: usize,
        low: u64,
        high: u64,
        target: &mut [u8],
    ) -> Result<(), ReadError> {
        let prepared = match &file.image.segments()[segment] {
            Segment::View(_) => self.prepare(file, segment)?,
            Segment::Bytes(_) | Segment::Spaces(_) => {
                return self.copy_within(file, segment, low, high, &mut |bytes| target.copy_from_slice(bytes));
            }
        };
        let (tiling, unit) = (&prepared.tiling, prepared.tiling.unit_bytes());
        let path = if prepared.grid.is_some() { Path::Tiles } else { Path::Runs };
        if prepared.grid.is_none()
            && let Some((source, start, _)) = self.single_run(tiling, low, high)
        {
            // Copied by the kernel, which finds the pages of a file faster than a map of it does.
            self.source().read_into(source, start, target).map_err(|error| ReadError::Changed { error })?;
            self.check_touched(&[source])?;
            self.counters.fetch(path, high - low);
        } else if low.is_multiple_of(unit) && high.is_multiple_of(unit) {
            let mut touched = Touched::new();
            let how = How { path, stores: Stores::Streamed, share: Share::WHOLE };
            self.fill_span(tiling, low / unit, high / unit, target, &mut touched, how)?;
            self.check_touched(&touched)?;
        } else {
            return self.read_alone(tiling, low, high, path, &mut |bytes| target.copy_from_slice(bytes));
        }
        self.counters.serve(path, high - low);
        Ok(())
    }

    /// Makes a share of a span of a segment that transposes its source, which begins and ends between rows. The rest of the target
    /// is left alone.
    pub(super) fn make_share(
        &self,
        file: &OpenFile,
        segment: usize,
        low: u64,
        high: u64,
        target: &mut [u8],
        share: Share,
    ) -> Result<(), ReadError> {
        let prepared = self.prepare(file, segment)?;
        let (tiling, unit) = (&prepared.tiling, prepared.tiling.unit_bytes());
        let mut touched = Touched::new();
        let how = How { path: Path::Tiles, stores: Stores::Streamed, share };
        let made = self.fill_span(tiling, low / unit, high / unit, target, &mut touched, how)?;
        self.check_touched(&touched)?;
        self.counters.serve(Path::Tiles, made * unit);
        Ok(())
    }

    /// Bytes of one row of a segment that transposes its source: what one element of each source row makes.
    pub(super) fn transposed_row_bytes(&self, file: &OpenFile, segment: usize) -> Result<Option<u64>, ReadError> {
        let Segment::View(_) = &file.image.segments()[segment] else { return Ok(None) };
        let prepared = self.prepare(file, segment)?;
        Ok(prepared.tiling.transposed_stride_units().map(|stride| stride * prepared.tiling.unit_bytes()))
    }

    fn prepare(&self, file: &OpenFile, segment: usize) -> Result<Arc<Prepared>, ReadError> {
        let prepared = file.tilings[segment].get_or_init(|| {
            let Segment::View(view) = &file.image.segments()[segment] else {
                return Err(ReadError::Internal { what: "only a view is lowered" });
            };
            let tiling = view.lower().map_err(|error| ReadError::Tiling { error })?;
            let start = file.image.start_of(segment);
            let grid = is_made(&tiling).then(|| self.grid(&tiling, start));
            Ok(Arc::new(Prepared { tiling, grid }))
        });
        prepared.clone()
    }

    /// The tiles of a view that begins at byte `start` of its file: a megabyte or more each, and where the tiling
    /// transposes, enough that each source row gives a cache line or more, as far as the cache allows. Otherwise tiles end
    /// at multiples of their size in the file, as the kernel's requests do.
    fn grid(&self, tiling: &Tiling, start: u64) -> Grid {
        let unit = tiling.unit_bytes();
        let Some(stride) = tiling.transposed_stride_units() else {
            let units = (TILE_BYTES_MIN / unit).max(1);
            let shift = if start.is_multiple_of(unit) { start / unit % units } else { 0 };
            return Grid { units, shift };
        };
        // A restore opens a hundred files at once and reads them in turns: their tiles should all fit.
        let cache_bytes = self.options.tile_cache_bytes;
        let free = cache_bytes.saturating_sub(self.cache.bytes_in_use()) as u64;
        let bytes_max = TILE_BYTES_MAX.min(cache_bytes as u64 / 8).min(free / 4).max(TILE_BYTES_MIN);
        let row_bytes = stride * unit;
        let mut rows = TRANSPOSED_ELEMENTS_MIN.max(TILE_BYTES_MIN / row_bytes.max(1));
        while rows > 1 && rows * row_bytes > bytes_max {
            rows /= 2;
        }
        let units = if rows * row_bytes > bytes_max { (bytes_max / unit).max(1) } else { rows * stride };
        Grid { units, shift: 0 }
    }

    /// The source file and span of a target span, if it is one unconverted run.
    fn single_run(&self, tiling: &Tiling, low: u64, high: u64) -> Option<(FileId, u64, u64)> {
        let unit = tiling.unit_bytes();
        let (first, last) = (low / unit, high.div_ceil(unit));
        let mut cuts: SmallVec<[Piece; 2]> = SmallVec::new();
        tiling.cut(first, last, &mut |piece| {
            if cuts.len() < 2 {
                cuts.push(piece);
            }
        });
        let [piece] = cuts.as_slice() else { return None };
        let Origin::Tensor { tensor, offset, decoder } = piece.origin else { return None };
        let copied = tiling.decoders()[decoder as usize] == Decode::Copy;
        if !copied || piece.contiguous_units() != last - first {
            return None;
        }
        let info = self.checkpoint.tensor(tensor);
        let start = info.span().start() + offset * unit + (low - first * unit);
        Some((info.file(), start, start + (high - low)))
    }

    /// Makes a span for this request alone.
    fn read_alone(
        &self,
        tiling: &Tiling,
        low: u64,
        high: u64,
        path: Path,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        let unit = tiling.unit_bytes();
        let (first, last) = (low / unit, high.div_ceil(unit));
        let mut buffer = self.buffers.take(to_usize((last - first) * unit));
        let mut touched = Touched::new();
        self.fill_span(tiling, first, last, &mut buffer, &mut touched, How::cached(path))?;
        self.check_touched(&touched)?;
        let skip = to_usize(low - first * unit);
        let len = to_usize(high - low);
        self.counters.serve(path, high - low);
        reply(&buffer[skip..skip + len]);
        Ok(())
    }

    fn check_touched(&self, touched: &[FileId]) -> Result<(), ReadError> {
        touched.iter().try_for_each(|file| self.source().check(*file).map_err(|error| ReadError::Changed { error }))
    }

    #[expect(clippy::too_many_arguments, reason = "a span of a segment of a file, and how it is served")]
    fn read_tiles(
        &self,
        file: &OpenFile,
        segment: usize,
        prepared: &Prepared,
        grid: Grid,
        low: u64,
        high: u64,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        let unit = prepared.tiling.unit_bytes();
        let (first, last) = (grid.index(low / unit), grid.index((high - 1) / unit));
        if first == last {
            return self.read_tile(file, segment, prepared, grid, first, low, high, reply);
        }
        let mut buffer = self.buffers.take(to_usize(high - low));
        let mut at = 0;
        for index in first..=last {
            let (start, end) = grid.span(index, prepared.tiling.len_units());
            let (low, high) = (low.max(start * unit), high.min(end * unit));
            self.read_tile(file, segment, prepared, grid, index, low, high, &mut |bytes| {
                buffer[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
            })?;
        }
        reply(&buffer);
        Ok(())
    }

    /// Reads a span of one tile.
    #[expect(clippy::too_many_arguments, reason = "a span of a tile of a segment of a file, and how it is served")]
    fn read_tile(
        &self,
        file: &OpenFile,
        segment: usize,
        prepared: &Prepared,
        grid: Grid,
        index: u64,
        low: u64,
        high: u64,
        reply: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        let unit = prepared.tiling.unit_bytes();
        let (start, end) = grid.span(index, prepared.tiling.len_units());
        let key = tile_key(file, segment, index);
        let bytes = usize::try_from((end - start) * unit).unwrap_or(usize::MAX);
        let compute = |room| self.compute(&prepared.tiling, grid, index, room);
        let give_up = || self.stall(file);
        let Some(outcome) = self.cache.get(key, Ask::Wanted, bytes, &self.counters, &give_up, compute) else {
            add(&self.counters.tile_bypasses, 1);
            return self.read_alone(&prepared.tiling, low, high, Path::Tiles, reply);
        };
        let tile = outcome?;
        // It may have been made long ago.
        self.check_touched(&tile.files).inspect_err(|_| self.cache.forget(&key))?;
        let place = |byte: u64| to_usize(byte - start * unit);
        let (from, to) = (place(low), place(high));
        self.counters.serve(Path::Tiles, high - low);
        reply(&tile.bytes[from..to]);
        self.note_served(file, segment, index, &tile, to - from);
        Ok(())
    }

    /// Drops a tile once all of it was handed out: the kernel has it in its page cache now, and its memory, still in the
    /// processor's caches, is better used for the next one.
    fn note_served(&self, file: &OpenFile, segment: usize, index: u64, tile: &Tile, bytes: usize) {
        let before = tile.served.fetch_add(bytes as u64, Ordering::Relaxed);
        if before + bytes as u64 >= tile.bytes.len() as u64 {
            self.cache.hand_out(&tile_key(file, segment, index));
        }
    }

    fn compute(&self, tiling: &Tiling, grid: Grid, index: u64, mut room: TileRoom) -> Result<Tile, ReadError> {
        let (first, last) = grid.span(index, tiling.len_units());
        let mut bytes = self.buffers.take(to_usize((last - first) * tiling.unit_bytes()));
        room.resize(bytes.memory_bytes());
        let mut files = Touched::new();
        self.fill_span(tiling, first, last, &mut bytes, &mut files, How::cached(Path::Tiles))?;
        self.check_touched(&files)?;
        Ok(Tile { bytes, room, files, ahead: AtomicBool::new(false), served: AtomicU64::new(0) })
    }

    /// Fills `target`, which is for units `first..last` of a tiling, with those that are asked for, and says how many they are.
    fn fill_span(
        &self,
        tiling: &Tiling,
        first: u64,
        last: u64,
        target: &mut [u8],
        touched: &mut Touched,
        how: How,
    ) -> Result<u64, ReadError> {
        let unit = tiling.unit_bytes();
        let (mut made, mut result) = (0, Ok(()));
        tiling.cut_share(how.share, first, last, &mut |piece| {
            if result.is_err() {
                return;
            }
            made += piece.units();
            match piece.origin {
                Origin::Fill { bytes } => {
                    fill(&bytes[..to_usize(unit)], &piece.loops, piece.start - first, target);
                }
                Origin::Tensor { .. } => result = self.gather_piece(tiling, &piece, first, target, touched, how),
            }
        });
        result.map(|()| made)
    }

    fn gather_piece(
        &self,
        tiling: &Tiling,
        piece: &Piece,
        first: u64,
        target: &mut [u8],
        touched: &mut Touched,
        how: How,
    ) -> Result<(), ReadError> {
        let Origin::Tensor { tensor, offset, decoder } = piece.origin else { return Ok(()) };
        let decode = &tiling.decoders()[decoder as usize];
        let unit = tiling.unit_bytes();
        let job = Gather {
            decode,
            target_bytes: unit,
            loops: &piece.loops,
            source_offset: offset,
            target_offset: piece.start - first,
        };
        if let Some(value) = decode.value() {
            return self.gather_value(value, &job, target, touched, how);
        }
        let info = self.checkpoint.tensor(tensor);
        touch(touched, info.file());
        let source_bytes = decode.source_bytes(unit).expect("what decodes no value reads elements");
        self.counters.fetch(how.path, piece.units() * source_bytes);
        self.gather_from(&info, &job, source_bytes, target, how.stores)
    }

    /// Carries out a job over the source bytes it spans, elements of `source_bytes`. Where they are not mapped and span much more
    /// than memory should hold, the loop with the largest source steps is done turn by turn.
    fn gather_from(
        &self,
        info: &TensorInfo<'_>,
        job: &Gather<'_>,
        source_bytes: u64,
        target: &mut [u8],
        stores: Stores,
    ) -> Result<(), ReadError> {
        let hull: u64 = job.loops.iter().map(|l| (l.extent - 1) * l.source_stride).sum::<u64>() + 1;
        let start = job.source_offset * source_bytes;
        let window = ByteSpan::of_len(start, hull * source_bytes);
        let Some(span) = window.and_then(|window| info.span().slice(window)) else {
            return Err(ReadError::Internal { what: "a piece leaves its tensor" });
        };
        let used: u64 = job.loops.iter().map(|l| l.extent).product::<u64>() * source_bytes;
        if 2 * used < span.len() {
            // The pages between hold what other tiles need.
            self.source().will_return();
        }
        let mut work = |bytes: &[u8]| gather_with(stores, job, &[Window { bytes, start }], target);
        if let Some(result) = self.source().with_map(info.file(), span, &mut work) {
            return result.map_err(|error| ReadError::source(info, span, error));
        }
        let few_bytes = self.few_bytes(used);
        if span.len() > few_bytes {
            let turn = &mut |turn: &Gather<'_>| self.gather_from(info, turn, source_bytes, target, stores);
            if let Some(done) = job.in_turns(turn) {
                return done;
            }
        }
        let mut buffer = self.buffers.take(to_usize(span.len()));
        let read = self.source().read_into(info.file(), span.start(), &mut buffer);
        read.map_err(|error| ReadError::source(info, span, error))?;
        gather_with(stores, job, &[Window { bytes: &buffer, start }], target);
        Ok(())
    }

    /// The longest span, in bytes, that is read into memory at once where `used` bytes of it are needed: a short one in any case, a
    /// longer one if a quarter of it is needed, and none beyond a thread's buffer.
    pub(super) fn few_bytes(&self, used: u64) -> u64 {
        let most_bytes = self.options.thread_buffer_bytes as u64;
        (4 * used).clamp(most_bytes / WINDOW_PART, most_bytes)
    }

    /// Starts on what a sequential reader will want next.
    fn look_ahead(self: &Arc<Self>, file: &Arc<OpenFile>, start: u64, end: u64) {
        if start == end {
            return;
        }
        let mut budget = self.options.tile_cache_bytes as u64 / 4;
        // At first the next tile; in the long run one that each thread works on, and one that it can go on with.
        let tile_bytes = self.tile_bytes_at(file, end - 1);
        let least = RUNS_AHEAD_BYTES.max(tile_bytes).min(budget).max(TILE_BYTES_MIN);
        let most = tile_bytes.saturating_mul(2 * self.options.workers as u64).min(budget).max(least);
        let noted = file.streams.lock().unwrap_or_else(PoisonError::into_inner).note(start, end, least..=most);
        let Some((from, to)) = noted else { return };
        for (segment, low, high) in file.image.spans(from, to.min(file.len_bytes()).max(from)) {
            let Segment::View(_) = &file.image.segments()[segment] else { continue };
            let Ok(prepared) = self.prepare(file, segment) else { continue };
            let Some(grid) = prepared.grid else {
                self.advise(&prepared.tiling, low, high, RUNS_AHEAD_BYTES);
                continue;
            };
            let unit = prepared.tiling.unit_bytes();
            let tile_bytes = grid.units * unit;
            for index in grid.index(low / unit)..=grid.index((high - 1) / unit) {
                if tile_bytes > budget || self.cache.has(&tile_key(file, segment, index)) {
                    continue;
                }
                budget -= tile_bytes;
                let (engine, file, prepared) = (Arc::downgrade(self), Arc::clone(file), Arc::clone(&prepared));
                let (first, last) = grid.span(index, prepared.tiling.len_units());
                let start = file.image.start_of(segment);
                let (low, high) = (start + first * unit, start + last * unit);
                let is_next = low <= end + tile_bytes;
                self.workers.offer(move || {
                    let Some(engine) = engine.upgrade() else { return };
                    // The reader may have come past while this waited, and a tile in use is worth more than one ahead.
                    let awaited = file.streams.lock().unwrap_or_else(PoisonError::into_inner).awaits(low, high);
                    let cache = &engine.cache;
                    let fits = if is_next { cache.has_room(high - low) } else { cache.has_much_room(high - low) };
                    if !awaited || !fits {
                        return;
                    }
                    let compute = |room| engine.compute(&prepared.tiling, grid, index, room);
                    let (key, bytes) = (tile_key(&file, segment, index), usize::try_from(high - low));
                    // A failure here is not reported: the reader who needs the tile meets it again.
                    let bytes = bytes.unwrap_or(usize::MAX);
                    drop(engine.cache.get(key, Ask::Ahead, bytes, &engine.counters, &|| None, compute));
                });
            }
        }
    }

    /// Bytes of the tile that holds a byte of a file; 0 where none does.
    fn tile_bytes_at(&self, file: &OpenFile, at: u64) -> u64 {
        let Some((segment, ..)) = file.image.spans(at, at + 1).next() else { return 0 };
        let Segment::View(_) = &file.image.segments()[segment] else { return 0 };
        let Ok(prepared) = self.prepare(file, segment) else { return 0 };
        prepared.grid.map_or(0, |grid| grid.units * prepared.tiling.unit_bytes())
    }

    /// Asks for the source pages that `start..end` of a file is made of. A transposed view's are asked for with its first byte, as
    /// all of it is made of the same.
    pub(super) fn ask(&self, file: &OpenFile, start: u64, end: u64) {
        let most = self.options.tile_cache_bytes as u64;
        for (segment, low, high) in file.image.spans(start, end) {
            let Segment::View(_) = &file.image.segments()[segment] else { continue };
            // The thread that makes these bytes meets a failure again.
            let Ok(prepared) = self.prepare(file, segment) else { continue };
            let tiling = &prepared.tiling;
            if tiling.transposed_stride_units().is_none() {
                self.advise(tiling, low, high, most);
            } else if low == 0 {
                self.advise(tiling, 0, tiling.len_bytes(), most);
            }
        }
    }

    /// Asks for the source pages of a span, at most so many bytes of them.
    fn advise(&self, tiling: &Tiling, low: u64, high: u64, most: u64) {
        let unit = tiling.unit_bytes();
        let mut left = most;
        tiling.cut(low / unit, high.div_ceil(unit), &mut |piece| {
            let Origin::Tensor { tensor, offset, decoder } = piece.origin else { return };
            let decode = &tiling.decoders()[decoder as usize];
            if let Some(value) = decode.value() {
                for need in needs(value, offset, &piece.loops) {
                    let info = self.checkpoint.tensor(need.operand.tensor.id);
                    for runs in &need.runs {
                        runs.for_each_span(GAP_BYTES, &mut |start, len| {
                            let hull = ByteSpan::of_len(start, left.min(len));
                            if let Some(span) = hull.and_then(|hull| info.span().slice(hull)) {
                                left -= span.len();
                                self.source().will_need(info.file(), span);
                            }
                        });
                    }
                }
                return;
            }
            let info = self.checkpoint.tensor(tensor);
            let unit = decode.source_bytes(unit).expect("what decodes no value reads elements");
            piece.source_hulls(GAP_BYTES / unit, &mut |start, units| {
                let hull = ByteSpan::of_len((offset + start) * unit, left.min(units * unit));
                if let Some(span) = hull.and_then(|hull| info.span().slice(hull)) {
                    left -= span.len();
                    self.source().will_need(info.file(), span);
                }
            });
        });
    }
}

/// Whether bytes are made from source bytes in memory. Otherwise they are runs of them, which the kernel may copy.
pub(super) fn is_made(tiling: &Tiling) -> bool {
    !tiling.is_run_copy(RUN_BYTES_MIN)
}

fn tile_key(file: &OpenFile, segment: usize, index: u64) -> TileKey {
    TileKey { file: file.key, segment: u32::try_from(segment).expect("a file has fewer than 2^32 segments"), index }
}
