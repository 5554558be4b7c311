//! Read-ahead for sequential readers: computes tiles and requests source pages before a reader asks for them.

use std::sync::Arc;

use ckfs_image::Segment;
use ckfs_source::{ByteSpan, DecodedChunks, FileId, RemoteSource};
use ckfs_sync::Demand;
use ckfs_tensor::{Origin, Tiling, needs, to_usize};
use parking_lot::Mutex;

use super::{
    Engine,
    prepared_file::{LoweredSegment, PreparedFile, TILE_BYTES_MIN},
};

/// Least and most bytes ahead of a sequential reader for which source pages are requested: enough for a fast disk to be busy all
/// the time.
const PAGES_AHEAD_BYTES: (u64, u64) = (8 << 20, 64 << 20);
/// Where memory is short.
const PAGES_AHEAD_BYTES_MIN: u64 = 1 << 20;
/// The least part of what a remote source wants to know ahead.
const REMOTE_AHEAD_PART: u64 = 4;
/// A remote source is asked for more when one of these parts of it is used: its line must not become idle.
const REMOTE_PARTS: u64 = 8;
/// Bytes of a source file that one thread requests at a time. They begin at multiples of this, as huge pages of the file do.
const REQUEST_BYTES: u64 = 2 << 20;
/// Least bytes of tiles that are computed ahead of a sequential reader.
const TILES_AHEAD_BYTES: u64 = 8 << 20;
/// Needed source bytes with a gap of at least this many bytes between them are requested separately. The kernel reads over smaller
/// gaps anyway.
const GAP_BYTES: u64 = 256 << 10;

/// Source pages to request, in order.
type PageRequests = Mutex<std::vec::IntoIter<(FileId, ByteSpan)>>;

impl Engine {
    /// Starts work on the bytes that a sequential reader will need next.
    pub(super) fn read_ahead(self: &Arc<Self>, file: &Arc<PreparedFile>, start: u64, end: u64) {
        if start == end {
            return;
        }
        self.pages_ahead(file, start, end);
        let mut budget = self.options().tile_cache_bytes as u64 / 4;
        // At first one tile. Later two for each thread: one that it computes, and one to continue with.
        let tile_bytes = self.tile_bytes_at(file, end - 1);
        let least = TILES_AHEAD_BYTES.max(tile_bytes).min(budget).max(TILE_BYTES_MIN);
        let most = tile_bytes.saturating_mul(2 * self.options().workers as u64).min(budget).max(least);
        let noted = file.streams.lock().note(start, end, least..=most, 2);
        let Some((from, to)) = noted else { return };
        for (segment, low, high) in file.image.spans(from, to.min(file.len_bytes()).max(from)) {
            let Some(prepared) = self.view_of(file, segment) else { continue };
            let Some(grid) = prepared.grid else { continue };
            let unit = prepared.tiling.unit_bytes();
            let tile_bytes = grid.units * unit;
            for index in prepared.tiles(grid, low, high) {
                if tile_bytes > budget || self.rooms.cache.has(&file.tile_key(segment, index)) {
                    continue;
                }
                budget -= tile_bytes;
                let (engine, file, prepared) = (Arc::downgrade(self), Arc::clone(file), Arc::clone(&prepared));
                let (first, last) = grid.span(index, prepared.tiling.len_units());
                let start = file.image.start_of(segment);
                let (low, high) = (start + first * unit, start + last * unit);
                let is_next = low <= end + tile_bytes;
                self.rooms.workers.offer(move || {
                    let Some(engine) = engine.upgrade() else { return };
                    // The reader may have passed these bytes while this job waited. A tile in use is worth more than one ahead.
                    let awaited = file.streams.lock().awaits(low, high);
                    let cache = &engine.rooms.cache;
                    let fits = if is_next { cache.has_room(high - low) } else { cache.has_much_room(high - low) };
                    if !awaited || !fits {
                        return;
                    }
                    let compute = |room| engine.compute(&prepared.tiling, (first, last), room);
                    let (key, bytes) = (file.tile_key(segment, index), to_usize(high - low));
                    // A failure here is not reported: the reader that needs the tile will meet it again.
                    drop(engine.rooms.cache.get(key, Demand::Prefetch, bytes, &engine.counters, &|| None, compute));
                });
            }
        }
    }

    /// Requests the source pages that a sequential reader will need next.
    fn pages_ahead(self: &Arc<Self>, file: &Arc<PreparedFile>, start: u64, end: u64) {
        let most = self.most_pages_ahead();
        let (least, most, parts) = if self.source().remote().is_some() {
            (most / REMOTE_AHEAD_PART, most, REMOTE_PARTS)
        } else {
            (PAGES_AHEAD_BYTES.0.min(most), most.max(self.chunks_ahead_bytes()), 2)
        };
        let noted = file.page_streams.lock().note(start, end, least..=most, parts);
        if let Some((from, to)) = noted {
            self.request_pages_beside(file, from, to.min(file.len_bytes()));
        }
    }

    /// Bytes ahead of a reader that have a chunk for each thread in them, after half of them were read: so that all threads
    /// decode. How many of these chunks are in memory is for the source to bound.
    fn chunks_ahead_bytes(&self) -> u64 {
        let chunk_bytes_max = self.source().chunks().map_or(0, DecodedChunks::chunk_bytes_max);
        chunk_bytes_max.saturating_mul(2 * self.options().workers as u64)
    }

    /// Most bytes of source pages to request ahead. While local ones are read the kernel cannot take them back, and they count as
    /// memory of the daemon's control group. A remote source needs many requests under way at a time.
    pub(super) fn most_pages_ahead(&self) -> u64 {
        let local = || PAGES_AHEAD_BYTES.1.min(self.options().tile_cache_bytes as u64 / 4).max(PAGES_AHEAD_BYTES_MIN);
        self.source().remote().map_or_else(local, RemoteSource::ahead_bytes)
    }

    /// Requests the source pages that `start..end` of a file is made from, in other threads, since they wait for storage: in one of
    /// them while all pages are cached, then in all of them.
    pub(super) fn request_pages_beside(self: &Arc<Self>, file: &Arc<PreparedFile>, start: u64, end: u64) {
        let (engine, file) = (Arc::downgrade(self), Arc::clone(file));
        self.rooms.requesters.offer(move || {
            if let Some(engine) = engine.upgrade() {
                let requests = engine.pages_of(&file, start, end);
                engine.request_pages(&Arc::new(Mutex::new(requests.into_iter())), true);
            }
        });
    }

    /// Makes requests until none is left. If this thread is alone, the first that waits for storage calls the others.
    fn request_pages(self: &Arc<Self>, requests: &Arc<PageRequests>, mut alone: bool) {
        let Some(maps) = self.source().maps() else { return };
        while let Some((file, span)) = { requests.lock().next() } {
            if maps.is_partial(file, span) || !maps.will_need(file, span) || !std::mem::take(&mut alone) {
                continue;
            }
            for _ in 1..self.rooms.requesters.count {
                let (engine, requests) = (Arc::downgrade(self), Arc::clone(requests));
                self.rooms.requesters.offer(move || {
                    if let Some(engine) = engine.upgrade() {
                        engine.request_pages(&requests, false);
                    }
                });
            }
        }
    }

    /// A segment's view, lowered. A read will meet a failure again.
    fn view_of(&self, file: &PreparedFile, segment: usize) -> Option<Arc<LoweredSegment>> {
        let Segment::View(_) = &file.image.segments()[segment] else { return None };
        self.prepare(file, segment).ok()
    }

    /// Bytes of the tile that holds a byte of a file; 0 where none does.
    fn tile_bytes_at(&self, file: &PreparedFile, at: u64) -> u64 {
        let Some((segment, ..)) = file.image.spans(at, at + 1).next() else { return 0 };
        let Some(prepared) = self.view_of(file, segment) else { return 0 };
        prepared.grid.map_or(0, |grid| grid.units * prepared.tiling.unit_bytes())
    }

    /// The source pages that `start..end` of a file is made from, in order. Every part of a transposed view needs all of its source
    /// pages, so that they are requested together, with the view's first byte. A remote source is asked for its bytes at once.
    fn pages_of(&self, file: &PreparedFile, start: u64, end: u64) -> Vec<(FileId, ByteSpan)> {
        let mut pages = Vec::new();
        for (segment, low, high) in file.image.spans(start, end) {
            let Some(prepared) = self.view_of(file, segment) else { continue };
            let tiling = &prepared.tiling;
            let span = match tiling.transposed_stride_units() {
                None => (low, high),
                Some(_) if low == 0 => (0, tiling.len_bytes()),
                Some(_) => continue,
            };
            let most = self.options().tile_cache_bytes as u64;
            self.for_each_needed(tiling, span, most, &mut |file, spans| {
                if let Some(remote) = self.source().remote() {
                    remote.prefetch(file, spans);
                }
                let parts = spans.iter().flat_map(|span| span.split_at_multiples(REQUEST_BYTES));
                pages.extend(parts.map(|part| (file, part)));
            });
        }
        pages
    }

    /// Whether a remote source would have to bring bytes for a file.
    pub fn lacks_bytes(&self, file: &PreparedFile) -> bool {
        let Some(remote) = self.source().remote() else { return false };
        let mut lacks = false;
        for segment in 0..file.image.segments().len() {
            let Some(prepared) = self.view_of(file, segment) else { continue };
            let tiling = &prepared.tiling;
            self.for_each_needed(tiling, (0, tiling.len_bytes()), u64::MAX, &mut |file, spans| {
                lacks = lacks || !remote.absent_spans(file, spans).is_empty();
            });
            if lacks {
                break;
            }
        }
        lacks
    }

    /// Calls `each` with the source spans of a span, at most `most` bytes of them.
    fn for_each_needed(
        &self,
        tiling: &Tiling,
        (low, high): (u64, u64),
        most: u64,
        each: &mut dyn FnMut(FileId, &[ByteSpan]),
    ) {
        let unit = tiling.unit_bytes();
        let mut left = most;
        // A remote source decides over which gaps it reads.
        let gap = self.source().remote().map_or(GAP_BYTES, |_| self.source().gap_bytes());
        tiling.cut(low / unit, high.div_ceil(unit), &mut |piece| {
            // A reader meets the failure of a view that is encoded.
            let _ = tiling.for_each_stored_piece(&piece, &mut |tiling, piece| {
                let Origin::Tensor { decoder, .. } = piece.origin else { return };
                for need in needs(&tiling.decoders()[decoder as usize], tiling.unit_bytes(), piece) {
                    let info = self.checkpoint.tensor(need.tensor);
                    let mut spans: Vec<ByteSpan> = Vec::new();
                    for (start, end) in need.spans(gap) {
                        let bounding = ByteSpan::of_len(start, left.min(end - start));
                        if let Some(span) = bounding.and_then(|bounding| info.span().slice(bounding)) {
                            left -= span.len();
                            spans.push(span);
                        }
                    }
                    each(info.file(), &spans);
                }
            });
        });
    }
}
