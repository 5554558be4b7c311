//! Pre-zeroed buffers: files in memory that a thread zeroes while no open waits.
//!
//! The kernel zeroes a page before a process gets it, and on a virtual machine the host may have to allocate one first. This
//! takes between a third and most of the time of a materialization. So one thread zeroes files of the sizes that are
//! probably needed next. It pauses while files are materialized and read, and drops the buffers if none was needed for a while.
//!
//! A buffer is used once. The memory of a materialized file that was dropped never becomes one: it may still be mapped.

use std::{
    cmp::Reverse,
    fs::File,
    io,
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use super::memory_files::{HUGE_PAGE_BYTES, MemoryFiles, allocate};
use crate::{
    read::{Engine, Reservation, warm::Warm},
    tensor::to_usize,
};

/// Buffers take at most this fraction (one in three) of the memory that materialized files may take.
const PART: usize = 3;
/// Most buffers at a time: each is an open file descriptor.
const COUNT_MAX: usize = 64;
/// How long buffers are kept after the last materialization, or after the mount.
const IDLE: Duration = Duration::from_mins(1);
/// No buffer is zeroed for this time after the last sign of a reader, which needs the processor and the memory now. The kernel
/// reads materialized files by itself; between their open and their close ckfs sees no sign of it.
const QUIET: Duration = Duration::from_secs(1);
/// Written over each page to allocate it. A file of huge pages is zeroed by one page per write.
static ZEROS: [u8; 2 << 20] = [0; 2 << 20];

/// A file that is zeroed from the beginning as far as time allowed, and exactly that long.
#[derive(Debug)]
struct ZeroedBuffer {
    file: File,
    /// Its intended length.
    bytes: u64,
    zeroed_bytes: u64,
    _room: Reservation,
}

#[derive(Debug, Default)]
struct BufferState {
    /// Sizes in bytes of the desired buffers, a size once per buffer, the most desired first.
    wanted: Vec<u64>,
    ready: Vec<ZeroedBuffer>,
    /// Whether buffers outside the list have memory: one that is being zeroed, and some that are being dropped.
    zeroing: bool,
    /// Files in materialization now.
    in_progress: usize,
    /// Start of the latest one; without it no buffers are zeroed.
    used: Option<Instant>,
    /// The last sign of a reader.
    read: Option<Instant>,
    ended: bool,
}

#[derive(Debug)]
struct SharedBuffers {
    files: Arc<MemoryFiles>,
    engine: Weak<Engine>,
    bytes_max: u64,
    state: Mutex<BufferState>,
    changed: Condvar,
}

/// Pre-zeroed buffers of the sizes that are probably needed next.
#[derive(Debug)]
pub(super) struct Prezeroed {
    shared: Arc<SharedBuffers>,
}

/// While one exists, no buffers are zeroed.
#[derive(Debug)]
pub(super) struct Busy {
    shared: Arc<SharedBuffers>,
}

impl Prezeroed {
    /// Buffers in `files` for at most a part of the memory that may be reserved in `engine`. There are none before [`Self::start`].
    pub(super) fn new(files: &Arc<MemoryFiles>, engine: &Arc<Engine>) -> Self {
        // With 0 bytes for buffers the thread only runs `first`.
        let bytes_max = if Warm::chosen().zero { (engine.reservable_bytes() / PART) as u64 } else { 0 };
        let (files, engine) = (Arc::clone(files), Arc::downgrade(engine));
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { shared: Arc::new(SharedBuffers { files, engine, bytes_max, state, changed }) }
    }

    /// Starts the thread. `sizes` reports the sizes of the files that are probably needed first, and how many of each. The thread
    /// runs `first` before it zeroes buffers, step by step while no program reads, until `first` returns false.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(super) fn start(
        &self,
        mut first: impl FnMut() -> bool + Send + 'static,
        sizes: impl FnOnce() -> Vec<(u64, usize)> + Send + 'static,
    ) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        // Not at a lower priority: an open waits for a page that is being zeroed.
        thread::Builder::new().name("ckfs-prezero".to_owned()).spawn(move || {
            let mut wanted = rounds(sizes());
            let mut state = shared.lock();
            wanted.extend_from_slice(&state.wanted);
            state.want(wanted, shared.bytes_max);
            state.used = Some(Instant::now());
            shared.run(state, &mut first);
        })?;
        Ok(())
    }

    /// Notes that a file is being materialized, until the result is dropped.
    pub(super) fn pause(&self) -> Busy {
        self.shared.lock().in_progress += 1;
        Busy { shared: Arc::clone(&self.shared) }
    }

    /// A buffer for a file of `bytes` bytes, if there is one of about that size. Its length is its zeroed part.
    pub(super) fn take(&self, bytes: u64) -> Option<File> {
        let mut state = self.shared.lock();
        state.used = Some(Instant::now());
        // A buffer that is being zeroed returns after its current page, which may take the host long to allocate.
        while state.zeroing && !state.has_ready(bytes) {
            state = self.shared.wait(state);
        }
        // There was no buffer of this size: more of it are desired than there were.
        if state.ready.iter().any(|buffer| buffer.bytes == bytes)
            && let Some(index) = state.wanted.iter().position(|wanted| *wanted == bytes)
        {
            state.wanted.remove(index);
        }
        let mut wanted = std::mem::take(&mut state.wanted);
        wanted.insert(0, bytes);
        state.want(wanted, self.shared.bytes_max);
        let least = |buffer: &ZeroedBuffer| (buffer.bytes.abs_diff(bytes), Reverse(buffer.zeroed_bytes));
        let nearest = state.ready.iter().enumerate().min_by_key(|(_, buffer)| least(buffer));
        // The cut-off part is lost, so it should not be the greater part.
        let index = nearest.filter(|(_, buffer)| buffer.bytes / 2 <= bytes).map(|(index, _)| index);
        let buffer = index.map(|index| state.ready.swap_remove(index));
        drop(state);
        buffer.map(|buffer| buffer.file)
    }

    /// Whether readers are expected: a file was materialized recently, or the first may still come.
    pub(super) fn expects(&self) -> bool {
        self.shared.lock().used.is_some_and(|used| used.elapsed() < IDLE)
    }

    /// Notes that a program reads.
    pub(super) fn note_read(&self) {
        self.shared.lock().read = Some(Instant::now());
    }

    /// Drops all buffers, as other code needs their memory, until the next file is materialized.
    pub(super) fn drop_all(&self) {
        let mut state = self.shared.lock();
        state.used = None;
        let ready = std::mem::take(&mut state.ready);
        drop(state);
        drop(ready);
    }
}

impl Drop for Prezeroed {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.shared.lock().in_progress -= 1;
        self.shared.changed.notify_all();
    }
}

/// One of each size, the smallest first, then a second of each, and so on.
fn rounds(mut sizes: Vec<(u64, usize)>) -> Vec<u64> {
    sizes.sort_unstable();
    let most = sizes.iter().map(|(_, count)| *count).max().unwrap_or(0).min(COUNT_MAX);
    let round = |round| sizes.iter().filter(move |(_, count)| *count > round).map(|(bytes, _)| *bytes);
    (0..most).flat_map(round).take(COUNT_MAX).collect()
}

impl BufferState {
    /// Sets the desired sizes: as many from the front of the list as fit.
    fn want(&mut self, mut sizes: Vec<u64>, bytes_max: u64) {
        sizes.truncate(COUNT_MAX);
        let mut total = 0;
        sizes.retain(|bytes| {
            let rounded = bytes.next_multiple_of(HUGE_PAGE_BYTES);
            let fits = rounded <= bytes_max - total;
            total += if fits { rounded } else { 0 };
            fits
        });
        self.wanted = sizes;
    }

    /// Whether a buffer of this size is fully zeroed.
    fn has_ready(&self, bytes: u64) -> bool {
        self.ready.iter().any(|buffer| buffer.bytes == bytes && buffer.zeroed_bytes == bytes)
    }

    /// Takes out the buffer to be zeroed next, and those of sizes no longer desired. If a size that is desired before
    /// the buffer's has no buffer, the result is that size.
    fn next(&mut self) -> (Next, Vec<ZeroedBuffer>) {
        let mut unwanted = std::mem::take(&mut self.ready);
        let mut next = Next::Nothing;
        for bytes in &self.wanted {
            match unwanted.iter().position(|buffer| buffer.bytes == *bytes) {
                Some(index) => {
                    let buffer = unwanted.swap_remove(index);
                    if matches!(next, Next::Nothing) && buffer.zeroed_bytes < buffer.bytes {
                        next = Next::Zero(buffer);
                    } else {
                        self.ready.push(buffer);
                    }
                }
                None if matches!(next, Next::Nothing) => next = Next::Missing(*bytes),
                None => {}
            }
        }
        (next, unwanted)
    }
}

/// The thread's next step for buffers.
#[derive(Debug)]
enum Next {
    /// A buffer of this size is missing.
    Missing(u64),
    /// This buffer is not fully zeroed.
    Zero(ZeroedBuffer),
    /// There are enough.
    Nothing,
}

impl ZeroedBuffer {
    /// Zeroes one more page.
    fn zero_page(&mut self) -> io::Result<()> {
        let left = to_usize(self.bytes - self.zeroed_bytes);
        let page = &ZEROS[..left.min(ZEROS.len())];
        let end = self.zeroed_bytes + page.len() as u64;
        // The kernel may fill holes with small pages.
        allocate(&self.file, end)?;
        self.file.write_all_at(page, self.zeroed_bytes)?;
        self.zeroed_bytes = end;
        Ok(())
    }
}

impl SharedBuffers {
    fn lock(&self) -> MutexGuard<'_, BufferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, BufferState>) -> MutexGuard<'a, BufferState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for<'a>(&'a self, state: MutexGuard<'a, BufferState>, most: Duration) -> MutexGuard<'a, BufferState> {
        self.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Zeroes buffers, one page at a time, whenever no file is being materialized or read.
    fn run<'a>(&'a self, mut state: MutexGuard<'a, BufferState>, first: &mut dyn FnMut() -> bool) {
        let mut left_first = true;
        while !state.ended {
            let left = state.used.map_or(Duration::ZERO, |used| IDLE.saturating_sub(used.elapsed()));
            if state.in_progress > 0 || (left.is_zero() && state.ready.is_empty()) {
                state = self.wait(state);
                continue;
            }
            let idle = left.is_zero();
            let until_quiet = state.read.map_or(Duration::ZERO, |read| QUIET.saturating_sub(read.elapsed()));
            if !idle && !until_quiet.is_zero() {
                state = self.wait_for(state, left.min(until_quiet));
                continue;
            }
            if left_first && !idle {
                drop(state);
                left_first = catch_unwind(AssertUnwindSafe(&mut *first)).unwrap_or(false);
                state = self.lock();
                continue;
            }
            let (next, unwanted) = if idle { (Next::Nothing, std::mem::take(&mut state.ready)) } else { state.next() };
            let size = match &next {
                Next::Missing(bytes) => Some(*bytes),
                Next::Zero(buffer) => Some(buffer.bytes),
                Next::Nothing => None,
            };
            if size.is_none() && unwanted.is_empty() {
                state = self.wait_for(state, left);
                continue;
            }
            state.zeroing = true;
            drop(state);
            let work = || {
                // They make room for the next buffer.
                drop(unwanted);
                let mut buffer = match next {
                    Next::Zero(buffer) => buffer,
                    Next::Missing(bytes) => self.buffer(bytes)?,
                    Next::Nothing => return None,
                };
                buffer.zero_page().is_ok().then_some(buffer)
            };
            let zeroed = catch_unwind(AssertUnwindSafe(work)).unwrap_or(None);
            state = self.lock();
            state.zeroing = false;
            self.changed.notify_all();
            match zeroed {
                Some(buffer) => state.ready.push(buffer),
                // There is no room for it, or no memory. Buffers of other sizes may fit.
                None => state.wanted.retain(|wanted| Some(*wanted) != size),
            }
        }
    }

    /// An empty buffer of this size, if nothing else needs the memory.
    fn buffer(&self, bytes: u64) -> Option<ZeroedBuffer> {
        let room_bytes = usize::try_from(bytes.next_multiple_of(HUGE_PAGE_BYTES)).ok()?;
        let room = self.engine.upgrade()?.reserve_spare(room_bytes)?;
        let file = self.files.unnamed(0).ok()?;
        Some(ZeroedBuffer { file, bytes, zeroed_bytes: 0, _room: room })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_turns_and_the_smallest_goes_first() {
        assert_eq!(rounds(vec![(30, 1), (10, 4), (20, 2)]), [10, 20, 30, 10, 20, 10, 10]);
        assert_eq!(rounds(Vec::new()), [0; 0]);
        assert_eq!(rounds(vec![(10, usize::MAX), (20, usize::MAX)]).len(), COUNT_MAX);
    }

    #[test]
    fn sizes_that_do_not_fit_are_left_out() {
        const PAGE: u64 = HUGE_PAGE_BYTES;
        let mut state = BufferState::default();
        state.want(vec![PAGE + 1, 3 * PAGE, 1, PAGE], 4 * PAGE);
        assert_eq!(state.wanted, [PAGE + 1, 1, PAGE], "in whole pages");
        assert!(matches!(state.next(), (Next::Missing(bytes), unwanted) if bytes == PAGE + 1 && unwanted.is_empty()));
        state.want(vec![u64::MAX / 2, PAGE], 0);
        assert!(state.wanted.is_empty() && matches!(state.next(), (Next::Nothing, _)));
    }
}
