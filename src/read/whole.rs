//! Files made whole, by all threads at once and in any order.
//!
//! A reader who will want everything need not be followed: the file is cut into parts, and each thread makes the next one that
//! nobody has begun, straight into the file that will hold it, which each maps for itself. Parts of a transposed view are cut
//! both ways: into spans of its rows, and those into shares of the lines of the source.
#![allow(unsafe_code)]

use std::{
    fmt,
    fs::File,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use memmap2::{MmapMut, MmapOptions};

use super::{Engine, OpenFile, ReadError, Reservation};
use crate::tensor::{Share, to_usize};

/// Least and most bytes of a part that is written in order.
const PART_BYTES_MIN: u64 = 1 << 20;
const PART_BYTES_MAX: u64 = 4 << 20;
/// Least bytes of a share of a transposed span. Smaller than other parts, as these take several times as long.
const SHARE_BYTES_MIN: u64 = 512 << 10;
/// Most elements of each source line that are taken together. Each takes a page of the target, and the processor does not know
/// many pages at once; but each such span visits all lines of the source again.
const SPAN_ELEMENTS_MAX: u64 = 1024;
/// Elements of two bytes in a cache line.
const LINE_ELEMENTS: u64 = 32;
/// Lines of the source that stay together: as many as are transposed at once, so that whole cache lines of the target are
/// written.
const SHARED_LINES: u64 = 128;
/// Parts for each thread at least, so that none is left with much while others are done.
const PARTS_PER_THREAD: u64 = 2;
/// Shares of a transposed view for each thread, unless they would be small: threads differ more in how long these take them.
const SHARES_PER_THREAD: u64 = 8;

/// Source pages are asked for so many bytes of the file ahead.
const AHEAD_BYTES: u64 = 32 << 20;

/// Why a file was not made whole.
#[derive(Debug, thiserror::Error)]
pub enum WholeError {
    /// Its bytes could not be made.
    #[error("{0}")]
    Read(#[from] ReadError),
    /// There is no memory for them.
    #[error("{0}")]
    Memory(#[from] io::Error),
}

/// A part of a file, which one thread makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    /// The bytes that it lies in.
    start: u64,
    end: u64,
    /// The segment and the share of it, if others make the rest of these bytes.
    shared: Option<(usize, Share)>,
}

/// The file that a whole file is made in, all memory of which is set aside.
struct Canvas {
    target: Arc<File>,
    len: usize,
}

impl Canvas {
    fn new(target: Arc<File>, len_bytes: u64) -> io::Result<Self> {
        let found = target.metadata()?.len();
        if found < len_bytes {
            return Err(io::Error::other(format!("expected a file of {len_bytes} bytes, found {found}")));
        }
        Ok(Self { target, len: usize::try_from(len_bytes).map_err(io::Error::other)? })
    }

    /// A map of all of it, for one thread.
    fn map(&self) -> io::Result<MmapMut> {
        // SAFETY: the file is an unnamed one that nobody shortens, and all its memory is there. Others write to it meanwhile,
        // through maps of their own. Each byte is written by one thread, and making a part reads none: the spans of two shares
        // are the same bytes, of which each writes its own.
        unsafe { MmapOptions::new().len(self.len).map_mut(&*self.target) }
    }
}

type Done = Box<dyn FnOnce(Result<(), WholeError>) + Send>;

/// A file that is being made.
struct Making {
    engine: Arc<Engine>,
    file: Arc<OpenFile>,
    canvas: Canvas,
    parts: Vec<Part>,
    next: AtomicUsize,
    /// Up to where source pages were asked for.
    asked: AtomicU64,
    left: AtomicUsize,
    failed: AtomicBool,
    outcome: Mutex<(Result<(), WholeError>, Option<Done>)>,
}

impl fmt::Debug for Making {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {} parts", self.file.name(), self.parts.len())
    }
}

impl Engine {
    /// Sets aside memory of the tile cache for something else, if tiles in use leave as much.
    pub fn reserve(&self, bytes: usize) -> Option<Reservation> {
        self.cache.reserve(bytes)
    }

    /// Sets aside memory that nothing else has now.
    pub fn reserve_spare(&self, bytes: usize) -> Option<Reservation> {
        self.cache.reserve_spare(bytes)
    }

    /// Most bytes that may be set aside at once.
    pub fn reservable_bytes(&self) -> usize {
        self.cache.reservable_bytes()
    }

    /// Makes all bytes of a file in `target`, an unnamed file as large as it whose memory is all set aside. Threads of the engine
    /// do, and one of them then calls `done`; none does if the engine ends before.
    pub fn make_whole(
        self: &Arc<Self>,
        file: &Arc<OpenFile>,
        target: &Arc<File>,
        done: impl FnOnce(Result<(), WholeError>) + Send + 'static,
    ) {
        let (engine, file, target) = (Arc::clone(self), Arc::clone(file), Arc::clone(target));
        // Lowering the views of a file of many may take a while, which the caller need not wait for.
        self.workers.submit(move || {
            let threads = engine.workers.count().max(1);
            let begin = || {
                let parts = engine.parts(&file, threads as u64)?;
                Ok((Canvas::new(target, file.len_bytes())?, parts))
            };
            let (canvas, parts) = match begin() {
                Ok(begun) => begun,
                Err(error) => return done(Err(error)),
            };
            let count = parts.len();
            if count == 0 {
                return done(Ok(()));
            }
            let making = Arc::new(Making {
                engine,
                file,
                canvas,
                parts,
                next: AtomicUsize::new(0),
                asked: AtomicU64::new(0),
                left: AtomicUsize::new(count),
                failed: AtomicBool::new(false),
                outcome: Mutex::new((Ok(()), Some(Box::new(done)))),
            });
            for _ in 1..threads.min(count) {
                let helping = Arc::clone(&making);
                making.engine.workers.submit_beside(move || helping.work());
            }
            making.work();
        });
    }

    /// The parts of a file.
    fn parts(&self, file: &OpenFile, threads: u64) -> Result<Vec<Part>, ReadError> {
        let len_bytes = file.len_bytes();
        let most = len_bytes / (threads * PARTS_PER_THREAD);
        let step = most.clamp(PART_BYTES_MIN, PART_BYTES_MAX).next_power_of_two();
        let (mut parts, mut open) = (Vec::new(), 0);
        let close = |parts: &mut Vec<Part>, open: &mut u64, end: u64, least: u64| {
            if end - *open >= least {
                parts.push(Part { start: *open, end, shared: None });
                *open = end;
            }
        };
        for segment in 0..file.image().segments().len() {
            let (start, end) = (file.image().start_of(segment), file.image().start_of(segment + 1));
            let row_bytes = self.transposed_row_bytes(file, segment)?;
            let Some(row_bytes) = row_bytes.filter(|_| end - start >= PART_BYTES_MIN) else {
                close(&mut parts, &mut open, start, PART_BYTES_MIN / 2);
                for end in (start.next_multiple_of(step)..end).step_by(to_usize(step)) {
                    close(&mut parts, &mut open, end, PART_BYTES_MIN / 2);
                }
                continue;
            };
            close(&mut parts, &mut open, start, 1);
            let rows = ((end - start) / row_bytes).max(1);
            // Without maps each span would fetch its part of every source line.
            let whole_lines = !self.is_mapped(file, segment)?;
            let span_rows_max = if whole_lines { rows } else { SPAN_ELEMENTS_MAX.max(PART_BYTES_MIN / row_bytes) };
            let spans = rows.div_ceil(span_rows_max);
            let span_rows = rows.div_ceil(spans).next_multiple_of(LINE_ELEMENTS).min(rows);
            let span_bytes = span_rows * row_bytes;
            // As many for each thread, unless they would be small.
            let wanted = (threads * SHARES_PER_THREAD).div_ceil(spans).next_multiple_of(threads);
            let of = wanted.min(span_bytes.div_ceil(SHARE_BYTES_MIN)).max(1);
            while open < end {
                let (start, end) = (open, end.min(open + span_bytes));
                let share = |index| Some((segment, Share { index, of, lines: SHARED_LINES }));
                parts.extend((0..of).map(|index| Part { start, end, shared: share(index) }));
                open = end;
            }
        }
        close(&mut parts, &mut open, len_bytes, 1);
        Ok(parts)
    }

    /// Makes a part of a file in its place in `target`.
    fn make_part(&self, file: &OpenFile, part: Part, mut target: &mut [u8]) -> Result<(), ReadError> {
        if let Some((segment, share)) = part.shared {
            let start = file.image().start_of(segment);
            return self.make_share(file, segment, part.start - start, part.end - start, target, share);
        }
        for (segment, low, high) in file.image().spans(part.start, part.end) {
            let Some(place) = target.split_off_mut(..to_usize(high - low)) else { break };
            self.make_within(file, segment, low, high, place)?;
        }
        if target.is_empty() {
            Ok(())
        } else {
            Err(ReadError::Internal { what: "the segments of a part do not fill it" })
        }
    }
}

impl Making {
    /// Makes parts until none is left that nobody has begun.
    fn work(&self) {
        let mut map = None;
        while let Some(part) = self.parts.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if !self.failed.load(Ordering::Relaxed) {
                self.ask_ahead(part.start);
                let made = catch_unwind(AssertUnwindSafe(|| self.make(*part, &mut map)));
                if let Err(error) = made.unwrap_or(Err(ReadError::Panicked.into()))
                    && !self.failed.swap(true, Ordering::Relaxed)
                {
                    self.outcome.lock().unwrap_or_else(PoisonError::into_inner).0 = Err(error);
                }
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.finish();
            }
        }
    }

    fn make(&self, part: Part, map: &mut Option<MmapMut>) -> Result<(), WholeError> {
        let map = match map {
            Some(map) => map,
            None => map.insert(self.canvas.map()?),
        };
        let place = |at: u64| to_usize(at);
        let target = map
            .get_mut(place(part.start)..place(part.end))
            .ok_or(ReadError::Internal { what: "a part lies outside its file" })?;
        Ok(self.engine.make_part(&self.file, part, target)?)
    }

    fn ask_ahead(&self, start: u64) {
        let end = self.file.len_bytes().min(start + AHEAD_BYTES);
        let asked = self.asked.fetch_max(end, Ordering::Relaxed);
        if asked < end {
            self.engine.ask(&self.file, asked, end);
        }
    }

    fn finish(&self) {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let (result, done) = (std::mem::replace(&mut outcome.0, Ok(())), outcome.1.take());
        drop(outcome);
        // A part may have been made long before the last one.
        let result = result.and_then(|()| self.engine.check(&self.file).map_err(WholeError::from));
        if let Some(done) = done {
            done(result);
        }
    }
}
