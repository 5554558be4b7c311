//! Reads one segment of a virtual file.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
};

use ckfs_checkpoint::TensorInfo;
use ckfs_image::Segment;
use ckfs_source::{ByteSpan, FileId, ReadFailure, Replied, Served};
use ckfs_sync::{Demand, Reservation};
use ckfs_tensor::{Decode, Origin, Piece, Stores, Tiling, WorkSlice, to_usize};
use smallvec::SmallVec;

use super::{
    Engine, ReadError,
    buffer::Buffer,
    counters::{Path, add},
    fill::{FillMode, TouchedFiles},
    prepared_file::{CacheRoom, Grid, LoweredSegment, PreparedFile, RUN_BYTES_MIN},
    tile::Tile,
};

/// The content of a segment.
enum SegmentContent<'a> {
    Bytes(&'a [u8]),
    Spaces,
    View(Arc<LoweredSegment>),
}

/// A segment of a file, and the engine that reads it. Spans are in bytes of the segment.
pub(super) struct SegmentReader<'a> {
    engine: &'a Engine,
    file: &'a PreparedFile,
    segment: usize,
    content: SegmentContent<'a>,
}

impl<'a> SegmentReader<'a> {
    /// A reader of a segment. Lowers its view if it is not lowered yet.
    pub(super) fn new(engine: &'a Engine, file: &'a PreparedFile, segment: usize) -> Result<Self, ReadError> {
        let content = match &file.image().segments()[segment] {
            Segment::Bytes(bytes) => SegmentContent::Bytes(bytes),
            Segment::Spaces(_) => SegmentContent::Spaces,
            Segment::View(_) => SegmentContent::View(engine.prepare(file, segment)?),
        };
        Ok(Self { engine, file, segment, content })
    }

    /// Reads a span. Makes no copy where the source has these bytes mapped.
    pub(super) fn read(
        &self,
        low: u64,
        high: u64,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<ReadError>> {
        match &self.content {
            SegmentContent::Bytes(bytes) => {
                self.engine.counters.serve(Path::Generated, high - low);
                return Ok(reply(Served::Memory(&bytes[to_usize(low)..to_usize(high)])));
            }
            SegmentContent::View(prepared) => match prepared.grid {
                Some(grid) if prepared.tiles(grid, low, high).count() == 1 => {
                    return Ok(self.read_tile(prepared, grid, low, high, |bytes| reply(Served::Memory(bytes)))?);
                }
                Some(_) => {}
                None => {
                    if let Some((tensor, start, end)) = self.single_run(&prepared.tiling, low, high) {
                        return self.engine.serve_source(tensor.file(), start, end, Path::Contiguous, reply);
                    }
                    return Ok(self.read_alone(prepared, low, high, |bytes| reply(Served::Memory(bytes)))?);
                }
            },
            SegmentContent::Spaces => {}
        }
        let mut buffer = self.engine.rooms.buffers.take(to_usize(high - low));
        self.copy_into(low, high, &mut buffer, Stores::Cached)?;
        Ok(reply(Served::Memory(&buffer)))
    }

    /// Reads a span into `target`, which is as long. With streamed stores it is made there without the tile cache.
    pub(super) fn copy_into(&self, low: u64, high: u64, target: &mut [u8], stores: Stores) -> Result<(), ReadError> {
        let engine = self.engine;
        let SegmentContent::View(prepared) = &self.content else {
            engine.counters.serve(Path::Generated, high - low);
            if let SegmentContent::Bytes(bytes) = &self.content {
                target.copy_from_slice(&bytes[to_usize(low)..to_usize(high)]);
            } else {
                target.fill(b' ');
            }
            return Ok(());
        };
        let (tiling, unit) = (&prepared.tiling, prepared.tiling.unit_bytes());
        if let Some(grid) = prepared.grid.filter(|_| stores == Stores::Cached) {
            return prepared.tiles(grid, low, high).try_for_each(|index| {
                let (start, end) = grid.span(index, tiling.len_units());
                let (from, to) = (low.max(start * unit), high.min(end * unit));
                let place = &mut target[to_usize(from - low)..to_usize(to - low)];
                self.read_tile(prepared, grid, from, to, |bytes| place.copy_from_slice(bytes))
            });
        }
        let path = path(prepared);
        if prepared.grid.is_none()
            && let Some((tensor, start, end)) = self.single_run(tiling, low, high)
        {
            // The kernel finds the pages of a file faster by `pread` than through a map.
            let copied = engine.copy_source(tensor.file(), start, target, path);
            return copied.map_err(|error| match (error, ByteSpan::new(start, end)) {
                (ReadError::Changed(error), Some(span)) => ReadError::source(&tensor, span, error),
                (error, _) => error,
            });
        }
        if low.is_multiple_of(unit) && high.is_multiple_of(unit) {
            let mode = FillMode { stores, ..FillMode::cached(path) };
            engine.fill_checked(tiling, low / unit..high / unit, target, mode)?;
            engine.counters.serve(path, high - low);
            return Ok(());
        }
        self.read_alone(prepared, low, high, |bytes| target.copy_from_slice(bytes))
    }

    /// Makes a work slice of a span that transposes its source. The span begins and ends between rows. The rest of the target
    /// stays unchanged.
    pub(super) fn make_work_slice(
        &self,
        low: u64,
        high: u64,
        target: &mut [u8],
        slice: WorkSlice,
    ) -> Result<(), ReadError> {
        let SegmentContent::View(prepared) = &self.content else {
            return Err(ReadError::Internal { what: "only a view has work slices" });
        };
        let (engine, tiling, unit) = (self.engine, &prepared.tiling, prepared.tiling.unit_bytes());
        let mode = FillMode { path: Path::Tiles, stores: Stores::Streamed, slice };
        let (made, _) = engine.fill_checked(tiling, low / unit..high / unit, target, mode)?;
        engine.counters.serve(Path::Tiles, made * unit);
        Ok(())
    }

    /// The tensor and the span of its file of a target span, if it is one unconverted run.
    fn single_run(&self, tiling: &Tiling, low: u64, high: u64) -> Option<(TensorInfo<'_>, u64, u64)> {
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
        let info = self.engine.checkpoint.tensor(tensor);
        let start = info.span().start() + offset * unit + (low - first * unit);
        Some((info, start, start + (high - low)))
    }

    /// Makes a span for this request alone.
    fn read_alone<R>(
        &self,
        prepared: &LoweredSegment,
        low: u64,
        high: u64,
        reply: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, ReadError> {
        let (engine, tiling, unit) = (self.engine, &prepared.tiling, prepared.tiling.unit_bytes());
        let (first, last) = (low / unit, high.div_ceil(unit));
        let mut buffer = engine.rooms.buffers.take(to_usize((last - first) * unit));
        let path = path(prepared);
        engine.fill_checked(tiling, first..last, &mut buffer, FillMode::cached(path))?;
        let skip = to_usize(low - first * unit);
        let len = to_usize(high - low);
        engine.counters.serve(path, high - low);
        Ok(reply(&buffer[skip..skip + len]))
    }

    /// Reads a span that lies in one tile.
    fn read_tile<R>(
        &self,
        prepared: &LoweredSegment,
        grid: Grid,
        low: u64,
        high: u64,
        reply: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, ReadError> {
        let (engine, unit) = (self.engine, prepared.tiling.unit_bytes());
        let index = grid.index(low / unit);
        let (start, end) = grid.span(index, prepared.tiling.len_units());
        let key = self.file.tile_key(self.segment, index);
        let bytes = to_usize((end - start) * unit);
        let compute = |room| engine.compute(&prepared.tiling, (start, end), room);
        let give_up = || engine.stall(self.file);
        let Some(outcome) = engine.rooms.cache.get(key, Demand::Reader, bytes, &engine.counters, &give_up, compute)
        else {
            add(&engine.counters.tile_bypasses, 1);
            return self.read_alone(prepared, low, high, reply);
        };
        let tile = outcome?;
        // The tile may have been made long ago.
        engine.check_touched(&tile.files).inspect_err(|_| engine.rooms.cache.forget(&key))?;
        let place = |byte: u64| to_usize(byte - start * unit);
        let (from, to) = (place(low), place(high));
        engine.counters.serve(Path::Tiles, high - low);
        let replied = reply(&tile.bytes[from..to]);
        // After a tile is fully consumed the kernel has it in its page cache. Its memory is still in the processor's caches, and
        // serves better for the next tile.
        if tile.serve((to - from) as u64) {
            engine.rooms.cache.note_consumed(&key);
        }
        Ok(replied)
    }
}

/// The path under which the bytes of a view are counted.
fn path(prepared: &LoweredSegment) -> Path {
    if prepared.grid.is_some() { Path::Tiles } else { Path::Contiguous }
}

impl Engine {
    /// The tiling of a segment that is a view, and its tiles.
    pub(super) fn prepare(&self, file: &PreparedFile, segment: usize) -> Result<Arc<LoweredSegment>, ReadError> {
        let prepared = file.tilings[segment].get_or_init(|| {
            let Segment::View(view) = &file.image.segments()[segment] else {
                return Err(ReadError::Internal { what: "only a view is lowered" });
            };
            let tiling = view.lower()?;
            let start = file.image.start_of(segment);
            let mut mapped = true;
            view.for_each_stored(&mut |tensor| {
                mapped = mapped && self.source().maps_of(self.checkpoint.tensor(tensor).file()).is_some();
            });
            let cache_bytes = self.options().tile_cache_bytes;
            let free_bytes = cache_bytes.saturating_sub(self.rooms.cache.bytes_in_use());
            let room = CacheRoom { cache_bytes: cache_bytes as u64, free_bytes: free_bytes as u64 };
            let is_made = !tiling.is_run_copy(RUN_BYTES_MIN);
            let grid = is_made.then(|| Grid::new(&tiling, start, room, mapped));
            Ok(Arc::new(LoweredSegment { tiling, grid, mapped }))
        });
        prepared.clone()
    }

    /// Makes units of a tiling as a tile.
    pub(super) fn compute(
        &self,
        tiling: &Tiling,
        (first, last): (u64, u64),
        room: Reservation,
    ) -> Result<Tile, ReadError> {
        self.make_tile(to_usize((last - first) * tiling.unit_bytes()), room, |bytes| {
            Ok(self.fill_checked(tiling, first..last, bytes, FillMode::cached(Path::Tiles))?.1)
        })
    }

    /// Makes a tile of `len` bytes. `make` fills them, and returns the files that they were made from.
    pub(super) fn make_tile(
        &self,
        len: usize,
        mut room: Reservation,
        make: impl FnOnce(&mut Buffer) -> Result<TouchedFiles, ReadError>,
    ) -> Result<Tile, ReadError> {
        let mut bytes = self.rooms.buffers.take(len);
        room.resize(bytes.memory_bytes());
        let files = make(&mut bytes)?;
        Ok(Tile { bytes, room, files, ahead: AtomicBool::new(false), served: AtomicU64::new(0) })
    }

    /// Fills `target` with units of a tiling, and checks then that the source files are unchanged. Returns the number of units made,
    /// and the files.
    fn fill_checked(
        &self,
        tiling: &Tiling,
        units: Range<u64>,
        target: &mut [u8],
        mode: FillMode,
    ) -> Result<(u64, TouchedFiles), ReadError> {
        let mut touched = TouchedFiles::new();
        let made = self.fill_span(tiling, units.start, units.end, target, &mut touched, mode)?;
        self.check_touched(&touched)?;
        Ok((made, touched))
    }

    pub(super) fn check_touched(&self, touched: &[FileId]) -> Result<(), ReadError> {
        touched.iter().try_for_each(|file| Ok(self.source().check(*file)?))
    }
}
