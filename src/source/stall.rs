//! Fetches in flight: which thread waits for which bytes of a source, since when, and whether it makes progress.
//!
//! Nothing can interrupt a thread that waits in `pread`, in `fstat` or in a page fault for storage that does not answer. So a
//! thread notes every such wait here before it begins and removes the note after it, and another thread checks the notes. A
//! fetch *stalls* if no bytes arrive for a time limit. A thread that reads says when bytes have come ([`WaitGuard::advance`]), and
//! reads in pieces, which distinguishes slow storage from storage that gives no answer (`WaitRegistry::piece_bytes`). That the thread
//! runs shows nothing: a client of NFS runs for each attempt to reach its server again. Only in a map does the thread itself use
//! the bytes, so there its running counts: each page that comes wakes it, and a computation over mapped bytes runs.
//!
//! A note costs two uncontended locks: each thread has a slot of its own that it tries first.

use std::{
    cell::Cell,
    fmt, fs,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use rustix::thread::gettid;

use super::{ByteSpan, FileId, waits::Waits};

/// Most fetches noted at a time: more than there are threads. Fetches beyond this number are not noted.
const NOTES_MAX: usize = 1024;

/// Age from which a fetch is checked for progress: a check costs some microseconds.
const PROBE_AGE: Duration = Duration::from_millis(20);

/// Storage that is slower than this is called without an answer.
pub(crate) const SLOWEST_BYTES_PER_SECOND: u64 = 64 << 10;

/// Fewest and most bytes to request in one call. The kernel reads ahead by the fewest in any case.
const PIECE_BYTES_MIN: usize = 128 << 10;
const PIECE_BYTES_MAX: usize = 8 << 20;

/// What a thread waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitTarget {
    /// Bytes of a file, by a call that returns when they have come.
    Bytes(FileId, ByteSpan),
    /// Bytes of a file in a map, and the work on them.
    Mapped(FileId, ByteSpan),
    /// A check whether a file is unchanged.
    Check(FileId),
    /// A path, before there are files, and the action on it.
    Path(Arc<Path>, &'static str),
}

impl WaitTarget {
    /// The file, if it has an id.
    pub const fn file(&self) -> Option<FileId> {
        match self {
            Self::Bytes(file, _) | Self::Mapped(file, _) | Self::Check(file) => Some(*file),
            Self::Path(..) => None,
        }
    }
}

impl fmt::Display for WaitTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(_, span) | Self::Mapped(_, span) => write!(f, "read bytes {span}"),
            Self::Check(_) => f.write_str("stat"),
            Self::Path(_, action) => f.write_str(action),
        }
    }
}

/// A fetch that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// What it waits for.
    pub target: WaitTarget,
    /// The thread's system-wide id.
    pub thread: i32,
    /// When it began.
    pub since: Instant,
    /// Time in which the thread has not run, as sampled.
    pub quiet: Duration,
    /// Time without bytes or an answer.
    pub silent: Duration,
}

/// A file that stalls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The file.
    pub file: Arc<Path>,
    /// The action without an answer, such as `read bytes 0..8`.
    pub what: String,
    /// Since when.
    pub since: Instant,
}

struct Note {
    target: WaitTarget,
    thread: i32,
    since: Instant,
    /// When bytes came last, or else `since`.
    advanced: Instant,
    /// The kernel's count for the thread at the last check, and the time since which it has this value.
    seen: Option<(u64, Instant)>,
}

#[repr(align(64))]
struct NoteSlot(Mutex<Option<Note>>);

/// The fetches in flight of one source.
pub struct WaitRegistry {
    places: Box<[NoteSlot]>,
    limit: Duration,
    /// Paths of the files that have ids.
    files: OnceLock<Vec<Arc<Path>>>,
    services: Arc<Waits>,
}

impl Default for WaitRegistry {
    fn default() -> Self {
        Self::new(Self::LIMIT)
    }
}

/// A fetch in flight, until this is dropped.
pub struct WaitGuard<'a> {
    fetches: &'a WaitRegistry,
    place: Option<usize>,
}

thread_local! {
    /// The slot that this thread tries first, and the thread's id.
    static OWN: Cell<Option<(usize, i32)>> = const { Cell::new(None) };
}

fn own() -> (usize, i32) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    OWN.get().unwrap_or_else(|| {
        let own = (NEXT.fetch_add(1, Ordering::Relaxed), gettid().as_raw_nonzero().get());
        OWN.set(Some(own));
        own
    })
}

impl WaitRegistry {
    /// The default time limit.
    pub const LIMIT: Duration = Duration::from_mins(1);

    /// No fetches yet; a fetch without progress for `limit` stalls.
    pub fn new(limit: Duration) -> Self {
        let places = (0..NOTES_MAX).map(|_| NoteSlot(Mutex::new(None))).collect();
        Self { places, limit, files: OnceLock::new(), services: Arc::default() }
    }

    /// What is waited for at services of the network.
    pub const fn services(&self) -> &Arc<Waits> {
        &self.services
    }

    /// Sets the paths of the files that have ids.
    pub(super) fn name_files(&self, files: impl Iterator<Item = Arc<Path>>) {
        self.files.get_or_init(|| files.collect());
    }

    /// A message about a fetch that stalls.
    pub fn describe(&self, waiting: &Waiting) -> String {
        let path = if let WaitTarget::Path(path, _) = &waiting.target {
            Some(path)
        } else {
            waiting.target.file().and_then(|file| self.files.get()?.get(file.index()))
        };
        let path = path.map_or_else(|| "a source file".to_owned(), |path| path.display().to_string());
        let (what, seconds) = (&waiting.target, waiting.since.elapsed().as_secs_f32());
        format!(
            "{path}: stalled: {what} got no answer for {seconds:.1} s; look at its storage, or allow more with --source-timeout"
        )
    }

    /// The time limit.
    pub const fn limit(&self) -> Duration {
        self.limit
    }

    /// Notes that this thread is about to wait for `target`.
    pub fn begin(&self, target: WaitTarget) -> WaitGuard<'_> {
        let (first, thread) = own();
        let now = Instant::now();
        let note = Note { target, thread, since: now, advanced: now, seen: None };
        for index in (0..NOTES_MAX).map(|step| (first + step) % NOTES_MAX) {
            if let Some(mut place) = self.places[index].0.try_lock()
                && place.is_none()
            {
                *place = Some(note);
                return WaitGuard { fetches: self, place: Some(index) };
            }
        }
        WaitGuard { fetches: self, place: None }
    }

    /// As [`WaitRegistry::begin`], for a path.
    pub fn begin_path(&self, path: &Path, action: &'static str) -> WaitGuard<'_> {
        self.begin(WaitTarget::Path(Arc::from(path), action))
    }

    /// Fetches that stall, and those whose thread has not run for `least`. This compares with the last call to see a thread run,
    /// so it must be called several times within `least`.
    pub fn waiting(&self, least: Duration) -> Vec<Waiting> {
        let mut found = Vec::new();
        for index in 0..NOTES_MAX {
            let mut place = self.lock(index);
            let Some(note) = place.as_mut() else { continue };
            if note.since.elapsed() < PROBE_AGE {
                continue;
            }
            let counted = counted(note.thread);
            let rests = match &note.seen {
                Some((before, since)) if *before == counted => Some(since.elapsed()),
                Some(_) | None => {
                    note.seen = Some((counted, Instant::now()));
                    None
                }
            };
            let quiet = rests.unwrap_or_default();
            let silent = match note.target {
                WaitTarget::Mapped(..) => quiet,
                WaitTarget::Bytes(..) | WaitTarget::Check(_) | WaitTarget::Path(..) => note.advanced.elapsed(),
            };
            if silent >= self.limit || rests.is_some_and(|quiet| quiet >= least) {
                let Note { target, thread, since, .. } = note;
                found.push(Waiting { target: target.clone(), thread: *thread, since: *since, quiet, silent });
            }
        }
        found
    }

    /// Fetches that stall: see [`WaitRegistry::waiting`].
    pub fn stalled(&self) -> Vec<Waiting> {
        let mut found = self.waiting(self.limit);
        found.retain(|waiting| waiting.silent >= self.limit);
        found
    }

    /// Most bytes to request in one call. Storage that gives [`SLOWEST_BYTES_PER_SECOND`] answers each call in time.
    pub(crate) fn piece_bytes(&self) -> usize {
        let bytes = self.limit.as_millis() * u128::from(SLOWEST_BYTES_PER_SECOND) / 1000;
        let bytes =
            usize::try_from(bytes).map_or(PIECE_BYTES_MAX, |bytes| bytes.clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX));
        bytes - bytes % PIECE_BYTES_MIN
    }

    fn lock(&self, index: usize) -> MutexGuard<'_, Option<Note>> {
        self.places[index].0.lock()
    }
}

impl WaitGuard<'_> {
    /// Most bytes to request in one call: see [`WaitRegistry::piece_bytes`].
    pub(crate) fn piece_bytes(&self) -> usize {
        self.fetches.piece_bytes()
    }

    /// Notes that bytes arrived: the wait begins again.
    pub fn advance(&self) {
        if let Some(place) = self.place
            && let Some(note) = self.fetches.lock(place).as_mut()
        {
            note.seen = None;
            note.advanced = Instant::now();
        }
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            *self.fetches.lock(place) = None;
        }
    }
}

/// A number that grows whenever the thread runs, even if only because the next page has arrived; 0 where the system does not
/// provide it.
fn counted(thread: i32) -> u64 {
    // Nanoseconds on a processor come first, in kernels that count them.
    let times = fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap_or_default();
    match times.split_ascii_whitespace().next().and_then(|time| time.parse().ok()) {
        None | Some(0) => faults_and_ticks(thread).unwrap_or(0),
        Some(time) => time,
    }
}

/// The thread's page faults, and its processor time in ticks, which every kernel counts.
fn faults_and_ticks(thread: i32) -> Option<u64> {
    // Numbers of the fields in proc_pid_stat(5), less the three up to the state: minor faults, major faults, user time, system time.
    const FIELDS: [usize; 4] = [7, 9, 11, 12];
    let text = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(FIELDS.iter().filter_map(|field| fields.get(*field)?.parse::<u64>().ok()).fold(0, u64::wrapping_add))
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    const SHORT: Duration = Duration::from_millis(40);

    fn bytes(start: u64) -> WaitTarget {
        WaitTarget::Bytes(FileId(0), ByteSpan::of_len(start, 8).unwrap())
    }

    /// Checks until a fetch waits.
    fn look(fetches: &WaitRegistry) -> Vec<Waiting> {
        let until = Instant::now() + Duration::from_mins(2);
        loop {
            let found = fetches.stalled();
            if !found.is_empty() || Instant::now() > until {
                return found;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_thread_that_waits_is_found_until_it_makes_progress() {
        let fetches = Arc::new(WaitRegistry::new(SHORT));
        let (go, wait) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let stuck = Arc::clone(&fetches);
        let thread = thread::spawn(move || {
            let outer = stuck.begin(WaitTarget::Check(FileId(7)));
            drop(outer);
            let fetching = stuck.begin(bytes(3));
            tell.send(()).unwrap();
            wait.recv().unwrap();
            drop(fetching);
        });
        told.recv().unwrap();
        // On a busy machine it may be as old as the limit by now.
        let early = fetches.waiting(Duration::ZERO);
        assert!(early.iter().all(|waiting| waiting.silent >= SHORT), "too young: {early:?}");
        let found = look(&fetches);
        assert_eq!(found.iter().map(|waiting| &waiting.target).collect::<Vec<_>>(), [&bytes(3)]);
        assert_eq!(found[0].target.to_string(), "read bytes 3..11");
        go.send(()).unwrap();
        thread.join().unwrap();
        assert_eq!(fetches.stalled(), []);
    }

    #[test]
    fn a_thread_that_computes_does_not_stall() {
        let fetches = WaitRegistry::new(Duration::from_millis(300));
        let done = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _fetching = fetches.begin(WaitTarget::Mapped(FileId(0), ByteSpan::of_len(0, 8).unwrap()));
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            // Processor time is counted in ticks of up to 10 ms, and this machine may be busy.
            let found = (0..40).map(|_| {
                thread::sleep(Duration::from_millis(10));
                fetches.stalled().len()
            });
            let found = found.max();
            done.store(true, Ordering::Relaxed);
            assert_eq!(found, Some(0));
        });
    }

    #[test]
    fn a_thread_that_runs_without_an_answer_stalls_and_one_that_gets_bytes_does_not() {
        // As a client of NFS does that tries again and again to reach its server.
        for target in [bytes(0), WaitTarget::Check(FileId(1)), WaitTarget::Path(Arc::from(Path::new("/x")), "open")] {
            let fetches = WaitRegistry::new(Duration::from_millis(300));
            let done = std::sync::atomic::AtomicBool::new(false);
            thread::scope(|scope| {
                let running = |advances: bool| {
                    let (fetches, done, target) = (&fetches, &done, target.clone());
                    move || {
                        let fetching = fetches.begin(target);
                        while !done.load(Ordering::Relaxed) {
                            if advances {
                                fetching.advance();
                            }
                            std::hint::spin_loop();
                        }
                    }
                };
                scope.spawn(running(true));
                thread::sleep(Duration::from_millis(600));
                let advancing = fetches.stalled().len();
                scope.spawn(running(false));
                let found = look(&fetches);
                done.store(true, Ordering::Relaxed);
                let found: Vec<_> = found.iter().map(|waiting| &waiting.target).collect();
                assert_eq!((advancing, found), (0, vec![&target]));
            });
        }
    }

    #[test]
    fn pieces_follow_the_limit() {
        for (limit_ms, kib) in [(1, 128), (2_000, 128), (10_000, 640), (60_000, 3_840), (3_600_000, 8_192)] {
            assert_eq!(WaitRegistry::new(Duration::from_millis(limit_ms)).piece_bytes(), kib << 10, "{limit_ms}");
        }
        assert_eq!(WaitRegistry::new(Duration::MAX).piece_bytes(), PIECE_BYTES_MAX);
    }

    #[test]
    fn both_ways_to_count_see_a_thread_run() {
        let (_, thread) = own();
        let run = |counted: &dyn Fn() -> u64| {
            let (before, begun) = (counted(), Instant::now());
            while counted() == before && begun.elapsed() < Duration::from_secs(10) {}
            counted() > before
        };
        assert!(run(&|| counted(thread)) && run(&|| faults_and_ticks(thread).unwrap()));
        assert_eq!((counted(-1), faults_and_ticks(-1)), (0, None));
    }

    #[test]
    fn fetches_nest_and_too_many_go_unnoted() {
        let fetches = WaitRegistry::new(SHORT);
        let all: Vec<_> = (0..=NOTES_MAX).map(|start| fetches.begin(bytes(start as u64))).collect();
        assert_eq!(all.iter().filter(|fetching| fetching.place.is_none()).count(), 1);
        drop(all);
        assert!((0..NOTES_MAX).all(|index| fetches.lock(index).is_none()));
    }
}
