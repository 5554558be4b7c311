//! Files made whole, by all threads at once and in any order.
//!
//! A reader who will want everything need not be followed: the file is cut into parts, and each thread makes the next one that
//! nobody has begun, straight into the mapped file that will hold it. Parts follow the rows of transposed views.
#![allow(unsafe_code)]

use std::{
    fmt,
    fs::File,
    io,
    os::fd::AsRawFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use memmap2::{MmapOptions, MmapRaw};

use super::{Engine, OpenFile, ReadError, Reservation};
use crate::tensor::Turn;

/// Least and most bytes of a part.
const PART_BYTES_MIN: u64 = 1 << 20;
const PART_BYTES_MAX: u64 = 4 << 20;
/// Elements of each source row that a part of a transposed view takes at least: two cache lines of two-byte elements.
const TRANSPOSED_ELEMENTS_MIN: u64 = 64;
/// And at most, where there are so many for all threads. Each part touches pages of all the rows again, which costs less
/// the more of them it uses.
const TRANSPOSED_ELEMENTS_MAX: u64 = 1024;
/// Elements of two bytes in a cache line.
const LINE_ELEMENTS: u64 = 32;
/// Parts for each thread at least, so that none is left with much while others are done.
const PARTS_PER_THREAD: u64 = 2;

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

/// The mapped file that a whole file is made in, cut into parts that are each taken once.
struct Canvas {
    map: MmapRaw,
    /// Where parts begin, and where the last one ends.
    cuts: Vec<u64>,
    taken: Vec<AtomicBool>,
}

impl Canvas {
    /// Maps `target`, all memory of which is set aside, so that writing to it cannot fail.
    fn new(target: &File, cuts: Vec<u64>) -> io::Result<Self> {
        let len = cuts.last().and_then(|len| usize::try_from(*len).ok()).unwrap_or(0);
        let found = target.metadata()?.len();
        if found < len as u64 {
            return Err(io::Error::other(format!("expected a file of {len} bytes, found {found}")));
        }
        let map = MmapOptions::new().len(len).map_raw(target.as_raw_fd())?;
        let taken = cuts.iter().skip(1).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { map, cuts, taken })
    }

    /// Where part `index` begins, and its bytes, to whom asks first.
    #[allow(clippy::mut_from_ref, reason = "parts do not overlap, and each is given away once")]
    fn take(&self, index: usize) -> Option<(u64, &mut [u8])> {
        let [start, end] = *self.cuts.windows(2).nth(index)? else { return None };
        let place = |at: u64| usize::try_from(at).ok().filter(|at| *at <= self.map.len());
        let (from, to) = (place(start)?, place(end)?);
        if from > to || self.taken.get(index)?.swap(true, Ordering::Relaxed) {
            return None;
        }
        // SAFETY: the bytes lie in the map, which is writable and lives as long as `self`. Cuts rise, so parts do not overlap,
        // and each is given away once. The file is an unnamed one that nobody else writes to or shortens.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(from), to - from) };
        Some((start, bytes))
    }
}

type Done = Box<dyn FnOnce(Result<(), WholeError>) + Send>;

/// A file that is being made.
struct Making {
    engine: Arc<Engine>,
    file: Arc<OpenFile>,
    canvas: Canvas,
    next: AtomicUsize,
    /// Up to where source pages were asked for.
    asked: AtomicU64,
    left: AtomicUsize,
    failed: AtomicBool,
    outcome: Mutex<(Result<(), WholeError>, Option<Done>)>,
}

impl fmt::Debug for Making {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {} parts", self.file.name(), self.canvas.taken.len())
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
            let canvas = match engine.canvas(&file, &target, threads as u64) {
                Ok(canvas) => canvas,
                Err(error) => return done(Err(error)),
            };
            let parts = canvas.taken.len();
            if parts == 0 {
                return done(Ok(()));
            }
            let making = Arc::new(Making {
                engine,
                file,
                canvas,
                next: AtomicUsize::new(0),
                asked: AtomicU64::new(0),
                left: AtomicUsize::new(parts),
                failed: AtomicBool::new(false),
                outcome: Mutex::new((Ok(()), Some(Box::new(done)))),
            });
            for _ in 1..threads.min(parts) {
                let helping = Arc::clone(&making);
                making.engine.workers.submit(move || helping.work());
            }
            making.work();
        });
    }

    fn canvas(&self, file: &OpenFile, target: &File, threads: u64) -> Result<Canvas, WholeError> {
        Ok(Canvas::new(target, self.parts(file, threads)?)?)
    }

    /// Where the parts of a file begin, and where the last one ends.
    fn parts(&self, file: &OpenFile, threads: u64) -> Result<Vec<u64>, ReadError> {
        let len_bytes = file.len_bytes();
        let share = len_bytes / (threads * PARTS_PER_THREAD);
        let mut cuts = vec![0];
        let mut cut = |at: u64| {
            if cuts.last().is_none_or(|last| at - last >= PART_BYTES_MIN / 2) {
                cuts.push(at);
            }
        };
        for segment in 0..file.image().segments().len() {
            let (start, end) = (file.image().start_of(segment), file.image().start_of(segment + 1));
            cut(start);
            let (first, step) = if let Some(row_bytes) = self.transposed_row_bytes(file, segment)? {
                let most = (share / row_bytes).clamp(TRANSPOSED_ELEMENTS_MIN, TRANSPOSED_ELEMENTS_MAX);
                // As many and as large for each thread.
                let rows = ((end - start) / row_bytes).max(1);
                let parts = rows.div_ceil(most).next_multiple_of(threads);
                (start, rows.div_ceil(parts).next_multiple_of(LINE_ELEMENTS) * row_bytes)
            } else {
                let step = share.clamp(PART_BYTES_MIN, PART_BYTES_MAX).next_power_of_two();
                (start.next_multiple_of(step), step)
            };
            (first..end).step_by(usize::try_from(step).unwrap_or(usize::MAX)).for_each(&mut cut);
        }
        if cuts.last() < Some(&len_bytes) {
            cuts.push(len_bytes);
        }
        Ok(cuts)
    }

    /// Makes the bytes of a file from `start` on.
    fn make_part(&self, file: &OpenFile, start: u64, mut target: &mut [u8], turn: Turn) -> Result<(), ReadError> {
        for (segment, low, high) in file.image().spans(start, start + target.len() as u64) {
            let Some(part) = target.split_off_mut(..usize::try_from(high - low).unwrap_or(usize::MAX)) else { break };
            self.make_within(file, segment, low, high, part, turn)?;
        }
        if target.is_empty() { Ok(()) } else { Err(ReadError::Panicked) }
    }
}

impl Making {
    /// Makes parts until none is left that nobody has begun.
    fn work(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some((start, target)) = self.canvas.take(index) else { break };
            if !self.failed.load(Ordering::Relaxed) {
                self.ask_ahead(start);
                // Parts under way at one time are neighbours.
                let turn = Turn { index, of: self.engine.workers.count() };
                let make = || self.engine.make_part(&self.file, start, target, turn);
                let made = catch_unwind(AssertUnwindSafe(make)).unwrap_or(Err(ReadError::Panicked));
                if let Err(error) = made
                    && !self.failed.swap(true, Ordering::Relaxed)
                {
                    self.outcome.lock().unwrap_or_else(PoisonError::into_inner).0 = Err(error.into());
                }
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.finish();
            }
        }
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
