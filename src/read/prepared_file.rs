//! Virtual files prepared for reading: the image of each file, its lowered views, and how these are cut into tiles.

use std::{
    ops::RangeInclusive,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use ckfs_image::FileImage;
use ckfs_source::FileId;
use ckfs_tensor::Tiling;
use parking_lot::Mutex;

use super::{ReadError, stream::Streams, tile::TileKey};

/// Smallest tile, a huge page. Conversions of less than a megabyte at a time do not warm up caches and vector units.
pub(super) const TILE_BYTES_MIN: u64 = 2 << 20;
/// Largest tile. It is also at most an eighth of the cache, and at most a quarter of the room that other tiles in use leave.
const TILE_BYTES_MAX: u64 = 32 << 20;
/// Tiles of views over files that are not mapped, where the cache allows it. Each then fetches a megabyte or more, even if the
/// source type is a fraction as wide as the view's.
const FETCHED_TILE_BYTES: u64 = 8 << 20;
/// Source elements of each row that a transposing tile takes, where it can. A few cache lines would suffice for the processor's
/// caches. But each tile also touches pages of all rows again, which costs less in larger tiles.
const TRANSPOSED_ELEMENTS_MIN: u64 = 256;
/// Runs shorter than this are gathered in tiles, not again at each request. Others are served as they are: the kernel may copy them.
pub(super) const RUN_BYTES_MIN: u64 = 4096;

/// A virtual file prepared for reading: its image, and the tilings of its views, which are lowered when first needed.
#[derive(Debug)]
pub struct PreparedFile {
    pub(super) key: u64,
    pub(super) name: String,
    pub(super) image: FileImage,
    pub(super) tilings: Vec<OnceLock<Result<Arc<LoweredSegment>, ReadError>>>,
    pub(super) streams: Mutex<Streams>,
    /// The same, as far as source pages were requested.
    pub(super) page_streams: Mutex<Streams>,
    pub(super) failed: AtomicBool,
    pub(super) sources: OnceLock<Box<[FileId]>>,
}

/// A lowered view and how it is served.
#[derive(Debug)]
pub(super) struct LoweredSegment {
    pub(super) tiling: Tiling,
    /// The tiles; `None` where runs of source bytes are served unchanged.
    pub(super) grid: Option<Grid>,
    /// Whether all its sources are mapped.
    pub(super) mapped: bool,
}

/// How a target is cut into tiles: tile `i` is units `i * units - shift ..`, the first and the last cut short by the
/// target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) units: u64,
    shift: u64,
}

/// Memory for tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheRoom {
    /// All of it, in bytes.
    pub(super) cache_bytes: u64,
    /// The part that tiles in use leave now, in bytes.
    pub(super) free_bytes: u64,
}

impl Grid {
    /// The tiles of a view that begins at byte `start` of its file, a megabyte or more each. Where the tiling transposes, a tile
    /// takes a cache line or more of each source row, as far as the cache allows. Otherwise tiles end at multiples of their size
    /// in the file, as the kernel's requests do.
    ///
    /// If the sources of a transposed view are not mapped, each tile fetches a part of every source row. That is one request for
    /// each row, unless the part is the whole row. So the view is one tile if it fits half of the room; then each source byte is
    /// fetched once, in order. Otherwise tiles are as large as a quarter of the room. Then no byte is fetched twice, unless rows
    /// lie closer than [`ckfs_source::Source::gap_bytes`], in which case each tile fetches all of them.
    pub(super) fn new(tiling: &Tiling, start: u64, room: CacheRoom, mapped: bool) -> Self {
        let unit = tiling.unit_bytes();
        let CacheRoom { cache_bytes, free_bytes } = room;
        let Some(stride) = tiling.transposed_stride_units() else {
            let bytes =
                if mapped { TILE_BYTES_MIN } else { FETCHED_TILE_BYTES.min(cache_bytes / 8).max(TILE_BYTES_MIN) };
            let units = (bytes / unit).max(1);
            let shift = if start.is_multiple_of(unit) { start / unit % units } else { 0 };
            return Self { units, shift };
        };
        if !mapped && tiling.len_bytes() <= (cache_bytes / 2).min(free_bytes / 2) {
            return Self { units: tiling.len_units().max(1), shift: 0 };
        }
        let row_bytes = stride * unit;
        // A restore opens a hundred files at once and reads them in turn: their tiles should all fit.
        let part = if mapped { TILE_BYTES_MAX.min(cache_bytes / 8) } else { cache_bytes / 4 };
        let bytes_max = part.min(free_bytes / 4).max(TILE_BYTES_MIN);
        let mut rows = TRANSPOSED_ELEMENTS_MIN.max(TILE_BYTES_MIN / row_bytes.max(1));
        if !mapped {
            rows = rows.max(bytes_max / row_bytes.max(1));
        }
        while rows > 1 && rows * row_bytes > bytes_max {
            rows /= 2;
        }
        let units = if rows * row_bytes > bytes_max { (bytes_max / unit).max(1) } else { rows * stride };
        Self { units, shift: 0 }
    }

    /// The tile that holds a unit.
    pub(super) fn index(self, unit: u64) -> u64 {
        (unit + self.shift) / self.units
    }

    /// First unit of a tile, and one past its last.
    pub(super) fn span(self, index: u64, len_units: u64) -> (u64, u64) {
        let first = (index * self.units).saturating_sub(self.shift);
        (first, ((index + 1) * self.units - self.shift).min(len_units))
    }
}

impl LoweredSegment {
    /// The tiles that hold bytes `low..high`.
    pub(super) fn tiles(&self, grid: Grid, low: u64, high: u64) -> RangeInclusive<u64> {
        let unit = self.tiling.unit_bytes();
        grid.index(low / unit)..=grid.index((high - 1) / unit)
    }

    /// Bytes of one row, if the view transposes its source: one element of each source row. `None` where slices of the source's lines
    /// would each read all of an operand.
    pub(super) fn sliced_row_bytes(&self) -> Option<u64> {
        let stride =
            self.tiling.transposed_stride_units().filter(|_| !(self.mapped && self.tiling.has_index_tables()))?;
        Some(stride * self.tiling.unit_bytes())
    }
}

impl PreparedFile {
    /// A file with a name for messages.
    pub fn new(name: String, image: FileImage) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let tilings = image.segments().iter().map(|_| OnceLock::new()).collect();
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        let (streams, page_streams) = (Mutex::default(), Mutex::default());
        let (failed, sources) = (AtomicBool::new(false), OnceLock::new());
        Self { key, name, image, tilings, streams, page_streams, failed, sources }
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

    /// The name of a tile in the cache.
    pub(super) fn tile_key(&self, segment: usize, index: u64) -> TileKey {
        TileKey { file: self.key, segment: u32::try_from(segment).expect("a file has fewer than 2^32 segments"), index }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckfs_tensor::{DType, Shape, SourceTensor, TensorId, View};

    fn tiling(rows: u64, columns: u64) -> Tiling {
        let shape = Shape::try_new(&[rows, columns]).unwrap();
        View::source(SourceTensor { id: TensorId(0), dtype: DType::BF16, shape }).reverse_axes().lower().unwrap()
    }

    #[test]
    fn a_transposed_view_without_maps_is_one_tile_if_it_fits_half_of_the_room() {
        const MIB: u64 = 1 << 20;
        let matrix = tiling(4096, 8192); // 64 MiB, rows of 8 KiB in the view
        let units = |cache: u64, free: u64, mapped| {
            let room = CacheRoom { cache_bytes: cache * MIB, free_bytes: free * MIB };
            Grid::new(&matrix, 0, room, mapped).units * 2 / MIB
        };
        assert_eq!(units(128, 128, false), 64, "whole");
        assert_eq!(units(127, 127, false), 31, "a quarter of the cache");
        assert_eq!(units(1024, 100, false), 25, "a quarter of what is free");
        assert_eq!(units(1024, 0, false), 2, "the least");
        assert_eq!(units(1024, 1024, true), 2, "a map needs no more");
        let cast = {
            let shape = Shape::try_new(&[4096, 8192]).unwrap();
            let source = View::source(SourceTensor { id: TensorId(0), dtype: DType::BF16, shape });
            source.cast(DType::F32).unwrap().lower().unwrap()
        };
        let room = CacheRoom { cache_bytes: 256 * MIB, free_bytes: 256 * MIB };
        let bytes = |mapped| Grid::new(&cast, 0, room, mapped).units * 4 / MIB;
        assert_eq!((bytes(true), bytes(false)), (2, 8));
    }
}
