//! Makes many files at once in memory of the caller: for a program that wants arrays, not files.
//!
//! The files are cut into parts ([`Engine::cut`]), which threads take in order. A thread makes its part directly in the caller's
//! memory, without the tile cache: each byte goes once from the map, or from the fetched block, to its place. Source pages of the
//! next parts are requested meanwhile.
//!
//! The threads own the memory of their parts. So a caller that is interrupted does not wait for a thread that waits for storage:
//! the memory stays until the thread returns.

use std::{
    collections::{BTreeSet, VecDeque},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ckfs_image::Segment;
use ckfs_source::FileId;
use ckfs_sync::{Pool, PoolOptions};
use ckfs_tensor::{Tiling, to_usize};
use parking_lot::{Condvar, Mutex};

use super::{Engine, PreparedFile, ReadError};

/// Most bytes of a part that is made in order.
const PART_BYTES_MAX: u64 = 4 << 20;
/// Least bytes of a part: less than this is not worth the work of another thread.
const PART_BYTES_MIN: u64 = 512 << 10;
/// Parts for each thread, so that no thread has much left when the others have finished.
const PARTS_PER_THREAD: u64 = 4;
/// Most elements of each source line in one part of a transposed view. Each element goes to its own page of the target, and the
/// processor's TLB holds few pages.
const PART_ELEMENTS_MAX: u64 = 1024;
/// Least elements of each source line: those of a cache line, where they have two bytes.
const LINE_ELEMENTS: u64 = 32;
/// Bytes of a part of a transposed view over files that are not mapped. Each part fetches its share of every source line.
const FETCHED_PART_BYTES: u64 = 128 << 20;
/// An idle thread of a load ends after this time.
const IDLE: Duration = Duration::from_millis(10);

/// Memory that receives bytes of a file. Only the thread that has it writes to it.
pub trait LoadTarget: Send {
    /// The memory.
    fn bytes(&mut self) -> &mut [u8];
}

/// A part of a file, and the memory for its bytes.
pub struct LoadPart {
    /// The file.
    pub file: Arc<PreparedFile>,
    /// Its bytes.
    pub span: Range<u64>,
    /// Memory of the part's length.
    pub target: Box<dyn LoadTarget>,
}

/// The state of a load.
#[derive(Default)]
struct LoadProgress {
    parts: VecDeque<LoadPart>,
    /// Parts that no thread has finished. A failed part counts as finished.
    left: usize,
    /// Bytes ahead of the taken parts for which source pages were requested.
    ahead_bytes: u64,
    /// Number of parts, from the first of `parts`, for which they were requested.
    ahead_parts: usize,
    error: Option<ReadError>,
}

/// Parts that threads are making.
pub struct Loading {
    engine: Arc<Engine>,
    threads: Pool<VecDeque<ckfs_sync::BoxedJob>>,
    progress: Mutex<LoadProgress>,
    changed: Condvar,
    made_bytes: AtomicU64,
    sources: Box<[FileId]>,
}

impl Engine {
    /// The parts in which several threads make a file, in order; together they are the file.
    ///
    /// # Errors
    /// [`ReadError::Tiling`] if a view has no tiling.
    pub fn cut(&self, file: &PreparedFile, threads: usize) -> Result<Vec<Range<u64>>, ReadError> {
        let mut parts = Vec::new();
        for (segment, content) in file.image().segments().iter().enumerate() {
            let (start, end) = (file.image().start_of(segment), file.image().start_of(segment + 1));
            let Segment::View(_) = content else {
                parts.push(start..end);
                continue;
            };
            let prepared = self.prepare(file, segment)?;
            let (tiling, mut low) = (&prepared.tiling, start);
            for border in borders(tiling, threads as u64, prepared.mapped) {
                parts.push(low..start + border);
                low = start + border;
            }
        }
        Ok(parts)
    }

    /// Starts to make parts by at most so many threads. Sources of the files are compared with their state at the opening first.
    ///
    /// # Errors
    /// [`ReadError::Changed`], or the system starts no thread.
    pub fn load(self: &Arc<Self>, parts: Vec<LoadPart>, threads: usize) -> Result<Arc<Loading>, ReadError> {
        let mut sources = BTreeSet::new();
        let mut last = None;
        for part in &parts {
            if last.replace(Arc::as_ptr(&part.file)) != Some(Arc::as_ptr(&part.file)) {
                sources.extend(self.sources_of(&part.file).iter().copied());
            }
        }
        sources.iter().try_for_each(|id| self.check_original(*id))?;
        let threads = threads.clamp(1, parts.len().max(1));
        let options = PoolOptions { name: "ckfs-load", threads_max: threads, idle: IDLE };
        let left = parts.len();
        let load = Arc::new(Loading {
            engine: Arc::clone(self),
            threads: Pool::of_closures(options),
            progress: Mutex::new(LoadProgress { parts: parts.into(), left, ..LoadProgress::default() }),
            changed: Condvar::new(),
            made_bytes: AtomicU64::new(0),
            sources: sources.into_iter().collect(),
        });
        for _ in 0..threads.min(left) {
            let working = Arc::clone(&load);
            load.threads.submit(move || working.work());
        }
        let refused = load.threads.take_refused(|jobs, _| {
            jobs.clear();
            Some(())
        });
        if refused.is_some() { Err(ReadError::Internal { what: "the system starts no thread" }) } else { Ok(load) }
    }

    /// Makes a part in this thread.
    ///
    /// # Errors
    /// [`ReadError`]; the content of the memory is then unspecified.
    pub fn load_part(&self, mut part: LoadPart) -> Result<(), ReadError> {
        self.make_span(&part.file, part.span.start, part.target.bytes())
    }
}

impl Loading {
    /// Bytes made so far.
    pub fn made_bytes(&self) -> u64 {
        self.made_bytes.load(Ordering::Relaxed)
    }

    /// Has the threads stop after the parts that they are making.
    pub fn stop(&self) {
        let mut progress = self.progress.lock();
        progress.left -= progress.parts.len();
        let dropped = std::mem::take(&mut progress.parts);
        drop(progress);
        drop(dropped);
        self.changed.notify_all();
    }

    /// Waits until no thread makes a part, at most for `time`. Returns whether that is so.
    pub fn wait(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut progress = self.progress.lock();
        while progress.left > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return false;
            };
            self.changed.wait_for(&mut progress, left);
        }
        true
    }

    /// The result so far: the first failure, or that a source gives no answer for longer than its time limit. To be called several
    /// times a second while the load is waited for, since it also lets other files go on while one waits.
    ///
    /// # Errors
    /// The failure; the content of all memory is then unspecified.
    pub fn result(&self) -> Result<(), ReadError> {
        if let Some(error) = &self.progress.lock().error {
            return Err(error.clone());
        }
        self.engine.note_stalls();
        let source = self.engine.source();
        let stalled = self.sources.iter().find(|id| source.health().is_stalled(**id));
        stalled.map_or(Ok(()), |id| Ok(source.check(*id)?))
    }

    fn work(&self) {
        while let Some(part) = self.take() {
            let engine = &self.engine;
            let made = catch_unwind(AssertUnwindSafe(|| {
                let bytes = part.span.end - part.span.start;
                engine.load_part(part).map(|()| bytes)
            }));
            let made = made.unwrap_or(Err(ReadError::Panicked));
            let mut dropped = VecDeque::new();
            let mut progress = self.progress.lock();
            progress.left -= 1;
            match made {
                Ok(bytes) => {
                    self.made_bytes.fetch_add(bytes, Ordering::Relaxed);
                }
                Err(error) => {
                    engine.count_failure(&error);
                    progress.error.get_or_insert(error);
                    progress.left -= progress.parts.len();
                    dropped = std::mem::take(&mut progress.parts);
                }
            }
            let done = progress.left == 0;
            drop(progress);
            drop(dropped);
            if done {
                self.changed.notify_all();
            }
        }
    }

    /// The next part, after the source pages of those that follow were requested.
    fn take(&self) -> Option<LoadPart> {
        let engine = &self.engine;
        let most = engine.most_pages_ahead();
        let mut requests = Vec::new();
        let mut progress = self.progress.lock();
        let part = progress.parts.pop_front()?;
        if progress.ahead_parts > 0 {
            progress.ahead_parts -= 1;
            progress.ahead_bytes -= part.span.end - part.span.start;
        }
        while progress.ahead_bytes < most {
            let Some(next) = progress.parts.get(progress.ahead_parts) else { break };
            let (file, span) = (Arc::clone(&next.file), next.span.clone());
            progress.ahead_bytes += span.end - span.start;
            progress.ahead_parts += 1;
            requests.push((file, span));
        }
        drop(progress);
        for (file, span) in requests {
            engine.request_pages_beside(&file, span.start, span.end);
        }
        Some(part)
    }
}

/// The ends of the parts of a view, in bytes from its first.
fn borders(tiling: &Tiling, threads: u64, mapped: bool) -> Vec<u64> {
    let (len, unit) = (tiling.len_bytes(), tiling.unit_bytes());
    let part = (len / (threads * PARTS_PER_THREAD)).clamp(PART_BYTES_MIN, PART_BYTES_MAX);
    let step = match tiling.transposed_stride_units() {
        None => (part / unit).max(1) * unit,
        Some(stride) => {
            let row = stride * unit;
            let rows = (len / row).max(1);
            let most =
                if mapped { PART_ELEMENTS_MAX.max(PART_BYTES_MIN / row) } else { FETCHED_PART_BYTES.div_ceil(row) };
            let fair =
                if mapped { rows.div_ceil(threads * PARTS_PER_THREAD).max(PART_BYTES_MIN.div_ceil(row)) } else { rows };
            fair.min(most).next_multiple_of(LINE_ELEMENTS) * row
        }
    };
    let mut ends: Vec<u64> = (step..len).step_by(to_usize(step)).collect();
    ends.push(len);
    // A part that lies in one run of a file is read into its place by the kernel.
    if tiling.is_run_copy(PART_BYTES_MAX) {
        let starts = tiling.pieces().iter().map(|piece| piece.start * unit);
        ends.extend(starts.filter(|start| *start > 0));
        ends.sort_unstable();
        ends.dedup();
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckfs_tensor::{DType, Shape, SourceTensor, TensorId, View};

    fn source(id: u32, extents: &[u64]) -> View {
        let shape = Shape::try_new(extents).unwrap();
        View::source(SourceTensor { id: TensorId(id), dtype: DType::BF16, shape })
    }

    #[test]
    fn parts_end_where_runs_and_rows_end() {
        let layers = [source(0, &[3000, 1024]), source(1, &[3000, 1024])];
        let stack = View::stack(0, &layers).unwrap().lower().unwrap();
        let ends = borders(&stack, 2, true);
        assert!(ends.contains(&(3000 * 2048)) && *ends.last().unwrap() == 6000 * 2048, "{ends:?}");
        let wide = ends.iter().scan(0, |low, end| Some(end - std::mem::replace(low, *end))).max();
        assert!(wide.unwrap() <= PART_BYTES_MAX);
        let transposed = source(0, &[4096, 8192]).reverse_axes().lower().unwrap();
        for (threads, mapped, parts) in [(1, true, 8), (2, true, 8), (16, true, 64), (16, false, 1)] {
            let ends = borders(&transposed, threads, mapped);
            assert!(ends.iter().all(|end| end.is_multiple_of(8192 * 32)), "whole rows, and lines of the source");
            assert_eq!(ends.len(), parts, "{threads} threads");
        }
        let small = source(0, &[7]).lower().unwrap();
        assert_eq!(borders(&small, 8, true), [14]);
    }
}
