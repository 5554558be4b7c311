//! Blank files in memory, made ready while nobody waits.
//!
//! The kernel clears a page before it gives it away, and on a virtual machine the host may have to find one first. For a file
//! that is made whole this takes from a third of the time to most of it, although it has nothing to do with what will be in
//! the file. So files like those that will likely be made next are cleared beforehand, by one thread that pauses
//! while files are made and read, and dropped if none was needed for a while.
//!
//! A blank is used once. The memory of a whole file that was dropped never becomes a blank: it may still be mapped.

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

use super::memory_files::{HUGE_PAGE_BYTES, MemoryFiles, set_aside};
use crate::{
    read::{Engine, Reservation},
    tensor::to_usize,
};

/// Of the memory that whole files may take, blanks take this part.
const PART: usize = 3;
/// Most blanks at a time: each is an open file.
const COUNT_MAX: usize = 64;
/// How long blanks are kept after the last file was made, or the mount.
const IDLE: Duration = Duration::from_mins(1);
/// For so long after the last sign of a reader none are made: he needs the processor and the memory now. The kernel reads whole
/// files by itself, of which there is no sign between their opening and their closing.
const QUIET: Duration = Duration::from_secs(1);
/// Written over each page so that it is there. A file of huge pages is cleared by one page each time.
static ZEROS: [u8; 2 << 20] = [0; 2 << 20];

/// A file that is cleared from the beginning as far as there was time, and no longer than that.
#[derive(Debug)]
struct Blank {
    file: File,
    /// How long it should become.
    bytes: u64,
    cleared_bytes: u64,
    _room: Reservation,
}

#[derive(Debug, Default)]
struct State {
    /// Sizes in bytes that blanks should have, a size once for each, the most wanted first.
    wanted: Vec<u64>,
    ready: Vec<Blank>,
    /// Whether blanks that are not among these have memory: one that a page is added to, and some on their way out.
    clearing: bool,
    /// Files being made now.
    making: usize,
    /// When the last one was begun; none are made ready if it is not known.
    used: Option<Instant>,
    /// The last sign of a reader.
    read: Option<Instant>,
    ended: bool,
}

#[derive(Debug)]
struct Shared {
    files: Arc<MemoryFiles>,
    engine: Weak<Engine>,
    bytes_max: u64,
    state: Mutex<State>,
    changed: Condvar,
}

/// Blank files of the sizes that are likely wanted next.
#[derive(Debug)]
pub(super) struct Blanks {
    shared: Arc<Shared>,
}

/// While there is one, no blanks are made.
#[derive(Debug)]
pub(super) struct Busy {
    shared: Arc<Shared>,
}

impl Blanks {
    /// Blanks in `files` for at most a part of what may be reserved in `engine`. There are none until they are started.
    pub(super) fn new(files: &Arc<MemoryFiles>, engine: &Arc<Engine>) -> Self {
        let bytes_max = (engine.reservable_bytes() / PART) as u64;
        let (files, engine) = (Arc::clone(files), Arc::downgrade(engine));
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { shared: Arc::new(Shared { files, engine, bytes_max, state, changed }) }
    }

    /// Starts to make blanks. `sizes` tells in which sizes files may be wanted first, and how many of each. What `first` does is
    /// done before, in steps while nobody reads, until it says that there is no more.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(super) fn start(
        &self,
        mut first: impl FnMut() -> bool + Send + 'static,
        sizes: impl FnOnce() -> Vec<(u64, usize)> + Send + 'static,
    ) -> io::Result<()> {
        let maker = Arc::clone(&self.shared);
        // Not of a lower priority: who opens a file waits for a page that is being cleared.
        thread::Builder::new().name("ckfs-blank".to_owned()).spawn(move || {
            let mut wanted = rounds(sizes());
            let mut state = maker.lock();
            wanted.extend_from_slice(&state.wanted);
            state.want(wanted, maker.bytes_max);
            state.used = Some(Instant::now());
            maker.make(state, &mut first);
        })?;
        Ok(())
    }

    /// Begins to make a file of so many bytes, in a blank of about that size if there is one. It is as long as it is cleared.
    pub(super) fn take(&self, bytes: u64) -> (Option<File>, Busy) {
        let mut state = self.shared.lock();
        state.making += 1;
        state.used = Some(Instant::now());
        // The one that a page is added to comes back after it, which the host may take long for.
        while state.clearing && !state.has_ready(bytes) {
            state = self.shared.wait(state);
        }
        // Where there was none of this size, more are wanted than there were.
        if state.ready.iter().any(|blank| blank.bytes == bytes)
            && let Some(index) = state.wanted.iter().position(|wanted| *wanted == bytes)
        {
            state.wanted.remove(index);
        }
        let mut wanted = std::mem::take(&mut state.wanted);
        wanted.insert(0, bytes);
        state.want(wanted, self.shared.bytes_max);
        let least = |blank: &Blank| (blank.bytes.abs_diff(bytes), Reverse(blank.cleared_bytes));
        let nearest = state.ready.iter().enumerate().min_by_key(|(_, blank)| least(blank));
        // What is cut off is lost, so it should not be the greater part.
        let index = nearest.filter(|(_, blank)| blank.bytes / 2 <= bytes).map(|(index, _)| index);
        let blank = index.map(|index| state.ready.swap_remove(index));
        drop(state);
        (blank.map(|blank| blank.file), Busy { shared: Arc::clone(&self.shared) })
    }

    /// Whether readers are expected: a file was made of late, or could have been for the first time.
    pub(super) fn expects(&self) -> bool {
        self.shared.lock().used.is_some_and(|used| used.elapsed() < IDLE)
    }

    /// Notes that somebody reads.
    pub(super) fn note_read(&self) {
        self.shared.lock().read = Some(Instant::now());
    }

    /// Gives all blanks up, as their memory is wanted for something else, until the next file is made.
    pub(super) fn drop_all(&self) {
        let mut state = self.shared.lock();
        state.used = None;
        let ready = std::mem::take(&mut state.ready);
        drop(state);
        drop(ready);
    }
}

impl Drop for Blanks {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.shared.lock().making -= 1;
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

impl State {
    /// Sets the sizes that are wanted, as many from the first as fit.
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

    /// Whether one of this size is cleared to its end.
    fn has_ready(&self, bytes: u64) -> bool {
        self.ready.iter().any(|blank| blank.bytes == bytes && blank.cleared_bytes == bytes)
    }

    /// Takes out the blank to be cleared next, and those that nobody wants. If there is none of a size that is wanted before
    /// the blank's, it is that size.
    fn next(&mut self) -> (Next, Vec<Blank>) {
        let mut unwanted = std::mem::take(&mut self.ready);
        let mut next = Next::Nothing;
        for bytes in &self.wanted {
            match unwanted.iter().position(|blank| blank.bytes == *bytes) {
                Some(index) => {
                    let blank = unwanted.swap_remove(index);
                    if matches!(next, Next::Nothing) && blank.cleared_bytes < blank.bytes {
                        next = Next::Clear(blank);
                    } else {
                        self.ready.push(blank);
                    }
                }
                None if matches!(next, Next::Nothing) => next = Next::Missing(*bytes),
                None => {}
            }
        }
        (next, unwanted)
    }
}

/// What to do for blanks.
#[derive(Debug)]
enum Next {
    /// One of this size is wanted.
    Missing(u64),
    /// This one is not cleared to its end.
    Clear(Blank),
    /// There are enough.
    Nothing,
}

impl Blank {
    /// Adds one page more.
    fn clear_page(&mut self) -> io::Result<()> {
        let left = to_usize(self.bytes - self.cleared_bytes);
        let page = &ZEROS[..left.min(ZEROS.len())];
        let end = self.cleared_bytes + page.len() as u64;
        // What is written to a hole may come in small pages.
        set_aside(&self.file, end)?;
        self.file.write_all_at(page, self.cleared_bytes)?;
        self.cleared_bytes = end;
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for<'a>(&'a self, state: MutexGuard<'a, State>, most: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Makes blanks, a page at a time, whenever no file is being made or read.
    fn make<'a>(&'a self, mut state: MutexGuard<'a, State>, first: &mut dyn FnMut() -> bool) {
        let mut left_first = true;
        while !state.ended {
            let left = state.used.map_or(Duration::ZERO, |used| IDLE.saturating_sub(used.elapsed()));
            if state.making > 0 || (left.is_zero() && state.ready.is_empty()) {
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
                Next::Clear(blank) => Some(blank.bytes),
                Next::Nothing => None,
            };
            if size.is_none() && unwanted.is_empty() {
                state = self.wait_for(state, left);
                continue;
            }
            state.clearing = true;
            drop(state);
            let work = || {
                // They make room for the next.
                drop(unwanted);
                let mut blank = match next {
                    Next::Clear(blank) => blank,
                    Next::Missing(bytes) => self.blank(bytes)?,
                    Next::Nothing => return None,
                };
                blank.clear_page().is_ok().then_some(blank)
            };
            let cleared = catch_unwind(AssertUnwindSafe(work)).unwrap_or(None);
            state = self.lock();
            state.clearing = false;
            self.changed.notify_all();
            match cleared {
                Some(blank) => state.ready.push(blank),
                // There is no room for it, or no memory. Others may find some.
                None => state.wanted.retain(|wanted| Some(*wanted) != size),
            }
        }
    }

    /// A blank of this size that nothing is in yet, if nothing else needs the memory.
    fn blank(&self, bytes: u64) -> Option<Blank> {
        let room_bytes = usize::try_from(bytes.next_multiple_of(HUGE_PAGE_BYTES)).ok()?;
        let room = self.engine.upgrade()?.reserve_spare(room_bytes)?;
        let file = self.files.unnamed(0).ok()?;
        Some(Blank { file, bytes, cleared_bytes: 0, _room: room })
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
    fn what_does_not_fit_is_left_out() {
        const PAGE: u64 = HUGE_PAGE_BYTES;
        let mut state = State::default();
        state.want(vec![PAGE + 1, 3 * PAGE, 1, PAGE], 4 * PAGE);
        assert_eq!(state.wanted, [PAGE + 1, 1, PAGE], "in whole pages");
        assert!(matches!(state.next(), (Next::Missing(bytes), unwanted) if bytes == PAGE + 1 && unwanted.is_empty()));
        state.want(vec![u64::MAX / 2, PAGE], 0);
        assert!(state.wanted.is_empty() && matches!(state.next(), (Next::Nothing, _)));
    }
}
