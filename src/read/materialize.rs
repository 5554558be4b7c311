//! Materializes a file: makes all of its bytes once, in pieces, into another file that the kernel then reads directly.
//!
//! The first thread that takes a piece makes it. A worker takes the next free piece. A reader takes the pieces that it needs, and
//! waits only for them. So each byte is fetched and decoded once, and a reader never waits for the whole file.
//!
//! In memory a thread makes a piece directly in the target, which each thread maps for itself. A transposed view is cut both ways:
//! into spans of its rows, and each span into work slices of the lines of the source. On a disk a thread makes a piece in a buffer
//! and writes it. A write to a full disk is an error, where a store to a mapped file would raise a signal.
//!
//! Pieces at both ends of the file are small. So a program that reads only the header, or the directory of an archive at the
//! end, causes little other work.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ckfs_image::Segment;
use ckfs_source::{Replied, SourceError};
use ckfs_sync::Reservation;
use ckfs_tensor::{Stores, WorkSlice, to_usize};
use memmap2::{MmapMut, MmapOptions, MmapRaw};
use parking_lot::{Condvar, Mutex};
use rustix::fs::{FallocateFlags, fallocate};

use super::{Engine, PreparedFile, ReadError, counters::add, reader::SegmentReader};

/// Least and most bytes of a piece that is written in order.
const PIECE_BYTES_MIN: u64 = 1 << 20;
const PIECE_BYTES_MAX: u64 = 4 << 20;
/// Bytes at the start of a file, and at its end, that are cut into the smallest pieces.
const HEAD_BYTES: u64 = 4 << 20;
const TAIL_BYTES: u64 = 1 << 20;
/// Least bytes of a work slice of a transposed span. Smaller than other pieces, because transposing takes several times as long.
const SLICE_BYTES_MIN: u64 = 512 << 10;
/// Most elements of each source line in one span. Each element goes to its own page of the target, and the processor's TLB holds
/// few pages. But each such span visits all lines of the source again.
const SPAN_ELEMENTS_MAX: u64 = 1024;
/// Elements of two bytes in a cache line.
const LINE_ELEMENTS: u64 = 32;
/// Lines of the source that stay together: the number transposed at once, so that threads write whole cache lines of the target.
const SLICED_LINES: u64 = 128;
/// Least pieces for each thread, so that no thread has much left when the others have finished.
const PIECES_PER_THREAD: u64 = 2;
/// Work slices of a transposed view for each thread, unless they would be small. Their times differ more between threads than
/// those of other pieces.
const SLICES_PER_THREAD: u64 = 8;
/// Memory is allocated in multiples of this many bytes: a huge page.
const MEMORY_STEP_BYTES: u64 = 2 << 20;
/// Time between checks whether a piece that another thread makes is still worth waiting for.
const GIVE_UP_PERIOD: Duration = Duration::from_millis(250);

/// Why a file was not materialized.
#[derive(Debug, thiserror::Error)]
pub enum MaterializeError {
    /// Its bytes could not be made.
    #[error("{0}")]
    Read(#[from] ReadError),
    /// There is no memory or no disk space for its bytes.
    #[error("{0}")]
    Room(#[from] io::Error),
}

/// The file that receives the bytes.
#[derive(Clone, Debug)]
pub enum MaterializeTarget {
    /// A file in memory, at least as long as the materialized one. Memory that was not allocated before is allocated piece by piece.
    Memory(Arc<File>),
    /// An empty file on a disk.
    Disk(Arc<File>),
}

/// A piece of a file, which one thread makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FilePiece {
    /// The bytes that contain it.
    start: u64,
    end: u64,
    /// The segment and the work slice, if other pieces make the rest of these bytes.
    sliced: Option<(usize, WorkSlice)>,
}

/// The state of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceState {
    Free,
    Taken,
    Made,
}

type Done = Box<dyn FnOnce(Result<(), MaterializeError>) + Send>;

/// The progress of materializing a file.
#[derive(Default)]
struct Progress {
    /// The state of each piece; empty until the file is cut.
    states: Vec<PieceState>,
    /// No piece before this one is free.
    next: usize,
    /// Pieces that are not made.
    left: usize,
    failed: bool,
    /// The first failure, until it is told.
    error: Option<MaterializeError>,
    /// Receives the result, once all of the file was requested.
    done: Option<Done>,
}

/// A file that is being materialized, or was.
pub struct Materializing {
    engine: Arc<Engine>,
    file: Arc<PreparedFile>,
    target: MaterializeTarget,
    /// The file's pieces, by their start.
    pieces: OnceLock<Result<Box<[FilePiece]>, ReadError>>,
    /// Another map of the target, from which finished pieces are read.
    view: OnceLock<Option<MmapRaw>>,
    /// End of the bytes of the file for which source pages were requested.
    requested: AtomicU64,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// Memory of the tile cache that a materialized file takes, until this is dropped.
#[derive(Debug)]
pub struct FileRoom {
    _in_cache: Reservation,
    /// The same bytes among those of the engine, which may share the cache.
    _own: Reservation,
}

impl Engine {
    /// Reserves memory of the tile cache for another use, if tiles in use leave that much.
    pub fn reserve(&self, bytes: usize) -> Option<FileRoom> {
        let in_cache = self.rooms.cache.reserve(bytes)?;
        Some(FileRoom { _in_cache: in_cache, _own: self.materialized.reserve(bytes) })
    }

    /// Most bytes that may be reserved at once.
    pub fn reservable_bytes(&self) -> usize {
        self.rooms.cache.reservable_bytes()
    }

    /// The pieces of a file, by their start; together they cover it. The work slices of one transposed span have the same start
    /// and end.
    fn pieces(&self, file: &PreparedFile, threads: u64, sliced: bool) -> Result<Box<[FilePiece]>, ReadError> {
        let len_bytes = file.len_bytes();
        let most = (len_bytes / (threads * PIECES_PER_THREAD)).clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
        let step = most.next_power_of_two();
        let (mut pieces, mut open) = (Vec::new(), 0);
        let close = |pieces: &mut Vec<FilePiece>, open: &mut u64, end: u64, least: u64| {
            if end - *open >= least {
                pieces.push(FilePiece { start: *open, end, sliced: None });
                *open = end;
            }
        };
        for (segment, content) in file.image().segments().iter().enumerate() {
            let (start, end) = (file.image().start_of(segment), file.image().start_of(segment + 1));
            let mut row = None;
            if sliced && matches!(content, Segment::View(_)) {
                let lowered = self.prepare(file, segment)?;
                row = lowered.sliced_row_bytes().map(|bytes| (bytes, lowered.mapped));
            }
            let Some((row_bytes, is_mapped)) = row.filter(|_| end - start >= PIECE_BYTES_MIN) else {
                close(&mut pieces, &mut open, start, PIECE_BYTES_MIN / 2);
                let mut at = start;
                loop {
                    let is_end = at < HEAD_BYTES || at + TAIL_BYTES >= len_bytes;
                    at = (at + 1).next_multiple_of(if is_end { PIECE_BYTES_MIN } else { step });
                    if at >= end {
                        break;
                    }
                    close(&mut pieces, &mut open, at, if is_end { 1 } else { PIECE_BYTES_MIN / 2 });
                }
                continue;
            };
            close(&mut pieces, &mut open, start, 1);
            let rows = ((end - start) / row_bytes).max(1);
            // Without maps each span would fetch its part of every source line separately.
            let span_rows_max = if is_mapped { SPAN_ELEMENTS_MAX.max(PIECE_BYTES_MIN / row_bytes) } else { rows };
            let spans = rows.div_ceil(span_rows_max);
            let span_rows = rows.div_ceil(spans).next_multiple_of(LINE_ELEMENTS).min(rows);
            let span_bytes = span_rows * row_bytes;
            // The same number for each thread, unless they would be small.
            let wanted = (threads * SLICES_PER_THREAD).div_ceil(spans).next_multiple_of(threads);
            let of = wanted.min(span_bytes.div_ceil(SLICE_BYTES_MIN)).max(1);
            while open < end {
                let (start, end) = (open, end.min(open + span_bytes));
                let slice = |index| Some((segment, WorkSlice { index, of, lines: SLICED_LINES }));
                pieces.extend((0..of).map(|index| FilePiece { start, end, sliced: slice(index) }));
                open = end;
            }
        }
        close(&mut pieces, &mut open, len_bytes, 1);
        Ok(pieces.into_boxed_slice())
    }

    /// Makes a piece of a file in `target`, which is the piece's part of the file.
    fn make_piece(&self, file: &PreparedFile, piece: FilePiece, target: &mut [u8]) -> Result<(), ReadError> {
        if let Some((segment, slice)) = piece.sliced {
            let start = file.image().start_of(segment);
            let reader = SegmentReader::new(self, file, segment)?;
            return reader.make_work_slice(piece.start - start, piece.end - start, target, slice);
        }
        self.make_span(file, piece.start, target)
    }

    /// Makes the bytes of a file from `start` on in `target`, without the tile cache and without read-ahead: for a program that
    /// reads each byte once, in an order of its own.
    ///
    /// # Errors
    /// [`ReadError`]; the content of the target is then unspecified. The file ends within the target.
    pub fn make_span(&self, file: &PreparedFile, start: u64, target: &mut [u8]) -> Result<(), ReadError> {
        self.fill_by_segments(file, start, target, Stores::Streamed)
    }
}

impl Materializing {
    /// Prepares to materialize a file in `target`. Makes nothing yet.
    ///
    /// # Errors
    /// A target in memory is shorter than the file, or its length cannot be read.
    pub fn new(engine: &Arc<Engine>, file: &Arc<PreparedFile>, target: MaterializeTarget) -> io::Result<Self> {
        if let MaterializeTarget::Memory(memory) = &target {
            let (expected, found) = (file.len_bytes(), memory.metadata()?.len());
            if found < expected {
                return Err(io::Error::other(format!("expected a file of {expected} bytes, found {found}")));
            }
        }
        Ok(Self {
            engine: Arc::clone(engine),
            file: Arc::clone(file),
            target,
            pieces: OnceLock::new(),
            view: OnceLock::new(),
            requested: AtomicU64::new(0),
            progress: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Has all threads of the engine make the remaining pieces; one of them then calls `done`. If the engine ends before, `done`
    /// is dropped.
    pub fn make_all(self: &Arc<Self>, done: impl FnOnce(Result<(), MaterializeError>) + Send + 'static) {
        self.progress.lock().done = Some(Box::new(done));
        let first = Arc::clone(self);
        // Lowering the views of a file with many of them may take a while. The caller need not wait for it.
        self.engine.rooms.workers.submit(move || {
            let helpers = first.pieces().map_or(0, <[FilePiece]>::len).min(first.threads()).saturating_sub(1);
            for _ in 0..helpers {
                let helping = Arc::clone(&first);
                first.engine.rooms.workers.submit(move || helping.work());
            }
            first.work();
        });
    }

    /// Makes the remaining pieces in this thread, and returns the result.
    ///
    /// # Errors
    /// [`MaterializeError`]; the content of the target is then unspecified.
    pub fn make_here(&self) -> Result<(), MaterializeError> {
        let (tell, told) = std::sync::mpsc::channel();
        self.progress.lock().done = Some(Box::new(move |result| drop(tell.send(result))));
        self.work();
        told.recv().unwrap_or(Err(ReadError::Internal { what: "another thread still makes a piece" }.into()))
    }

    /// Counts the file as materialized.
    pub fn count(&self) {
        add(&self.engine.counters.materialized_files, 1);
        add(&self.engine.counters.materialized_bytes, self.file.len_bytes());
    }

    /// Has the threads stop soon, because no reader needs the file any more.
    pub fn abandon(&self) {
        self.fail(ReadError::Internal { what: "the file was abandoned before it was materialized" }.into());
    }

    /// Passes the bytes `start..end`, which end within the file, to `reply` once they are made. This thread makes the pieces that
    /// no thread has taken.
    ///
    /// `None`, without a call of `reply`, if the bytes are not available here: a piece failed, a source has changed or
    /// stalls, or the target is on a disk. A reader then reads another way, and meets the error of the source there.
    ///
    /// # Panics
    /// If `end` is beyond the end of the file.
    pub fn read(&self, start: u64, end: u64, reply: &mut dyn FnMut(&[u8]) -> Replied) -> Option<Replied> {
        let MaterializeTarget::Memory(_) = self.target else { return None };
        let Ok(pieces) = self.pieces() else { return None };
        let mut map = None;
        if !touched(pieces, start, end).all(|index| self.have(index, pieces, &mut map)) {
            return None;
        }
        drop(map);
        // A piece may have been made long ago.
        if self.check_sources().is_err() {
            return None;
        }
        let view = self.view.get_or_init(|| self.view().ok()).as_ref()?;
        let (from, len) = (to_usize(start), to_usize(end - start));
        assert!(from + len <= view.len(), "bytes {start}..{end} end within {} bytes", view.len());
        // SAFETY: the bytes are inside the map, which lives as long as `self`. Their memory is allocated and stays: the file has no
        // name, and no code shortens it. All pieces that contain them are made, and a piece that is made is never written again.
        let bytes = unsafe { std::slice::from_raw_parts(view.as_ptr().add(from), len) };
        Some(reply(bytes))
    }

    /// Checks that the open sources of the file are unchanged.
    fn check_sources(&self) -> Result<(), SourceError> {
        self.engine.sources_of(&self.file).iter().try_for_each(|id| self.engine.source().check(*id))
    }

    /// Waits until a piece is made, or makes it. Returns whether the piece is made.
    fn have(&self, index: usize, pieces: &[FilePiece], map: &mut Option<MmapMut>) -> bool {
        let mut progress = self.progress.lock();
        loop {
            if progress.failed {
                return false;
            }
            match progress.states[index] {
                PieceState::Made => return true,
                PieceState::Free => {
                    progress.states[index] = PieceState::Taken;
                    drop(progress);
                    self.make(index, pieces[index], map);
                    progress = self.progress.lock();
                }
                PieceState::Taken => {
                    let waited = self.changed.wait_for(&mut progress, GIVE_UP_PERIOD);
                    if waited.timed_out() && self.engine.stall(&self.file).is_some() {
                        return false;
                    }
                }
            }
        }
    }

    fn threads(&self) -> usize {
        self.engine.rooms.workers.count.max(1)
    }

    fn pieces(&self) -> Result<&[FilePiece], ReadError> {
        let cut = self.pieces.get_or_init(|| {
            let sliced = matches!(self.target, MaterializeTarget::Memory(_));
            let pieces = self.engine.pieces(&self.file, self.threads() as u64, sliced)?;
            let mut progress = self.progress.lock();
            progress.states = vec![PieceState::Free; pieces.len()];
            progress.left = pieces.len();
            Ok(pieces)
        });
        cut.as_deref().map_err(Clone::clone)
    }

    /// Makes pieces until none is free.
    fn work(&self) {
        let pieces = match self.pieces() {
            Ok(pieces) => pieces,
            Err(error) => return self.fail(error.into()),
        };
        let mut map = None;
        while let Some(index) = self.take_next() {
            self.ask_ahead(pieces[index].start);
            self.make(index, pieces[index], &mut map);
        }
        self.finish_if_made();
    }

    fn take_next(&self) -> Option<usize> {
        let mut progress = self.progress.lock();
        if progress.failed {
            return None;
        }
        let next = progress.next;
        let found = progress.states.iter().skip(next).position(|stage| *stage == PieceState::Free)? + next;
        progress.next = found + 1;
        progress.states[found] = PieceState::Taken;
        Some(found)
    }

    /// Makes a piece that this thread has taken.
    fn make(&self, index: usize, piece: FilePiece, map: &mut Option<MmapMut>) {
        let made = catch_unwind(AssertUnwindSafe(|| self.try_make(piece, map)));
        if let Err(error) = made.unwrap_or(Err(ReadError::Panicked.into())) {
            return self.fail(error);
        }
        let mut progress = self.progress.lock();
        progress.states[index] = PieceState::Made;
        progress.left -= 1;
        drop(progress);
        self.changed.notify_all();
        self.finish_if_made();
    }

    fn try_make(&self, piece: FilePiece, map: &mut Option<MmapMut>) -> Result<(), MaterializeError> {
        match &self.target {
            MaterializeTarget::Memory(memory) => {
                // A store to a page for which there is no memory would raise a signal.
                let low = piece.start / MEMORY_STEP_BYTES * MEMORY_STEP_BYTES;
                let high = piece.end.next_multiple_of(MEMORY_STEP_BYTES).min(self.file.len_bytes());
                fallocate(&**memory, FallocateFlags::empty(), low, high - low).map_err(io::Error::from)?;
                let map = match map {
                    Some(map) => map,
                    None => map.insert(self.map(memory)?),
                };
                let place = map.get_mut(to_usize(piece.start)..to_usize(piece.end));
                let target = place.ok_or(ReadError::Internal { what: "a piece lies outside its file" })?;
                Ok(self.engine.make_piece(&self.file, piece, target)?)
            }
            MaterializeTarget::Disk(disk) => {
                let mut buffer = self.engine.rooms.buffers.take(to_usize(piece.end - piece.start));
                self.engine.make_piece(&self.file, piece, &mut buffer)?;
                Ok(disk.write_all_at(&buffer, piece.start)?)
            }
        }
    }

    /// A map of all of the target, for one thread to write to.
    fn map(&self, memory: &File) -> io::Result<MmapMut> {
        let len = usize::try_from(self.file.len_bytes()).map_err(io::Error::other)?;
        // SAFETY: the file has no name and no code shortens it, and the memory of a piece is allocated before a thread writes to it.
        // Other threads write to the file meanwhile, through maps of their own. One thread writes each byte, and making a piece reads
        // none: the spans of two work slices are the same bytes, of which each slice writes its own.
        unsafe { MmapOptions::new().len(len).map_mut(memory) }
    }

    /// A map of all of the target, for reading finished pieces.
    fn view(&self) -> io::Result<MmapRaw> {
        let MaterializeTarget::Memory(memory) = &self.target else { return Err(io::ErrorKind::Unsupported.into()) };
        let len = usize::try_from(self.file.len_bytes()).map_err(io::Error::other)?;
        MmapOptions::new().len(len).map_raw_read_only(&**memory)
    }

    fn ask_ahead(&self, start: u64) {
        let end = self.file.len_bytes().min(start.saturating_add(self.engine.most_pages_ahead()));
        let requested = self.requested.fetch_max(end, Ordering::Relaxed);
        if requested < end {
            self.engine.request_pages_beside(&self.file, requested.max(start), end);
        }
    }

    /// Notes the first failure and wakes all threads that wait.
    fn fail(&self, error: MaterializeError) {
        let mut progress = self.progress.lock();
        progress.failed = true;
        // A later call that requests all of the file receives it too.
        progress.error.get_or_insert(error);
        drop(progress);
        self.changed.notify_all();
        self.finish_if_made();
    }

    /// Calls `done` with the result, if all pieces are made or one failed, and all of the file was requested.
    fn finish_if_made(&self) {
        let mut progress = self.progress.lock();
        if !progress.failed && progress.left > 0 {
            return;
        }
        let Some(done) = progress.done.take() else { return };
        let (failed, error) = (progress.failed, progress.error.take());
        drop(progress);
        done(match error {
            Some(error) => Err(error),
            None if failed => {
                Err(ReadError::Internal { what: "the file failed before all of it was requested" }.into())
            }
            // A piece may have been made long before the last one.
            None => self.engine.check(&self.file).map_err(MaterializeError::from),
        });
    }
}

/// The pieces that `start..end` touches.
fn touched(pieces: &[FilePiece], start: u64, end: u64) -> Range<usize> {
    let first = pieces.partition_point(|piece| piece.end <= start);
    let last = pieces.partition_point(|piece| piece.start < end);
    first..last.max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_touches_all_slices_of_the_pieces_that_it_lies_in() {
        let slice = |index| Some((0, WorkSlice { index, of: 2, lines: 1 }));
        let pieces: Vec<FilePiece> = [(0, 4, None), (4, 8, slice(0)), (4, 8, slice(1)), (8, 9, None)]
            .map(|(start, end, sliced)| FilePiece { start, end, sliced })
            .into();
        for ((start, end), expected) in [
            ((0, 1), 0..1),
            ((0, 4), 0..1),
            ((3, 5), 0..3),
            ((5, 6), 1..3),
            ((7, 9), 1..4),
            ((8, 9), 3..4),
            ((9, 9), 4..4),
        ] {
            assert_eq!(touched(&pieces, start, end), expected, "{start}..{end}");
        }
    }
}
