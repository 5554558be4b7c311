//! Files made whole in memory when they are opened, for the kernel to read by itself.
//!
//! Through the page cache, a GB costs its reader and ckfs the better part of a second of processor time, most of it for
//! handling four-kilobyte pages one by one. A file that will be read from end to end is therefore better made at once, by all
//! threads, in a file of huge pages, which the kernel then reads at the speed of memory, memory maps included. Such a file
//! takes room of the tile cache; it is kept a little longer than it is open, in case that it is opened again.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    Ino, WhenWhole,
    blanks::{Blanks, Busy},
    looks::Use,
    memory_files::{HUGE_PAGE_BYTES, MemoryFiles, set_aside},
};
use crate::read::{Engine, MapsAhead, OpenFile, ReadError, Reservation, WholeError, counters::add};

/// Smaller files are not worth a file of their own: a request or two of the kernel's read them.
const BYTES_MIN: u64 = 1 << 20;
/// How long a file is kept once it is closed.
const IDLE: Duration = Duration::from_mins(1);

/// Who closes a whole file sooner has looked at its header.
const BRIEF: Duration = Duration::from_millis(50);
/// The kernel reads so far beyond what it is asked for, at most, unless it was told to read ahead more. Then who looks at a
/// header is taken for a reader, and the file is not made whole for a while.
const AHEAD_BYTES: u64 = 2 << 20;

/// A file whose bytes were all made.
#[derive(Debug)]
pub(super) struct WholeFile {
    file: Arc<File>,
    _room: Reservation,
}

/// Keeps a whole file as long as a handle is open.
pub(super) type Pin = Arc<Pinned>;

/// What a handle has of a file.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    /// The whole file, and since when it could be read.
    made: OnceLock<(Arc<WholeFile>, Instant)>,
    /// Bytes that were read otherwise.
    read_bytes: AtomicU64,
}

impl Pinned {
    /// Counts bytes that were not read from a whole file.
    pub(super) fn note_read(&self, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What was done with a file whose first `header_bytes` are not tensors.
    pub(super) fn used(&self, header_bytes: u64) -> Use {
        match self.made.get() {
            Some((_, since)) if since.elapsed() > BRIEF => Use::Unknown,
            None if self.read_bytes.load(Ordering::Relaxed) > header_bytes + AHEAD_BYTES => Use::Read,
            Some(_) | None => Use::Looked,
        }
    }
}

enum State {
    /// Who waits for it.
    Making(Vec<(Pin, WhenWhole)>),
    /// And when it was last opened or seen open.
    Made(Arc<WholeFile>, Instant),
}

/// The whole files of a volume.
pub(super) struct WholeFiles {
    shared: Arc<Shared>,
    memory: Arc<MemoryFiles>,
    blanks: Blanks,
    engine: Weak<Engine>,
}

#[derive(Default)]
struct Shared {
    states: Mutex<HashMap<Ino, State>>,
}

impl std::fmt::Debug for WholeFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WholeFiles").finish_non_exhaustive()
    }
}

impl WholeFiles {
    /// Whole files in memory, as far as the engine's cache allows.
    ///
    /// # Errors
    /// The system gives us no file system in memory, as it does only to root.
    pub(super) fn new(engine: &Arc<Engine>) -> io::Result<Self> {
        let memory = Arc::new(MemoryFiles::new(engine.reservable_bytes() as u64)?);
        let blanks = Blanks::new(&memory, engine);
        Ok(Self { shared: Arc::default(), memory, blanks, engine: Arc::downgrade(engine) })
    }

    /// Makes memory ready for files that will be opened, and their sources' pages. `likely` goes through some of them and tells how
    /// long they are and how many are alike.
    pub(super) fn expect(&self, mut maps: MapsAhead, likely: impl FnOnce(&mut dyn FnMut(u64, usize)) + Send + 'static) {
        let Some(most) = self.engine.upgrade().map(|engine| most_bytes(&engine)) else { return };
        let sizes = move || {
            let mut sizes = BTreeMap::new();
            likely(&mut |bytes, count| {
                if (BYTES_MIN..=most).contains(&bytes) {
                    *sizes.entry(bytes).or_default() += count;
                }
            });
            sizes.into_iter().collect()
        };
        if let Err(error) = self.blanks.start(move || maps.step(), sizes) {
            tracing::info!("no memory is made ready for whole files: {error}");
        }
    }

    /// Whether a file of so many bytes is made whole: half of the cache at most, so that it does not take turns with others.
    pub(super) fn accepts(&self, len_bytes: u64) -> bool {
        let most = self.engine.upgrade().map_or(0, |engine| most_bytes(&engine));
        (BYTES_MIN..=most).contains(&len_bytes)
    }

    /// Whether a file is made or under way.
    pub(super) fn has(&self, ino: Ino) -> bool {
        self.shared.lock().contains_key(&ino)
    }

    /// Makes a file, or finds it made or under way. `pin` keeps it from then on.
    pub(super) fn make(&self, ino: Ino, file: &Arc<OpenFile>, pin: Pin, then: WhenWhole) {
        let Some(engine) = self.engine.upgrade() else { return then(None) };
        let mut states = self.shared.lock();
        match states.get_mut(&ino) {
            Some(State::Making(waiting)) => return waiting.push((pin, then)),
            Some(State::Made(whole, used)) => {
                *used = Instant::now();
                let whole = Arc::clone(whole);
                drop(states);
                return keep(&whole, &pin, then);
            }
            None => {}
        }
        // Its room becomes the file's.
        self.measure(&engine, None);
        let (blank, busy) = self.blanks.take(file.len_bytes());
        let room_bytes = file.len_bytes().next_multiple_of(HUGE_PAGE_BYTES);
        let Some(room) = self.make_room(&mut states, &engine, room_bytes, blank.as_ref()) else {
            drop(states);
            return then(None);
        };
        states.insert(ino, State::Making(vec![(pin, then)]));
        drop(states);
        let landing =
            Landing { shared: Arc::clone(&self.shared), ino, file: Arc::clone(file), landed: false, _busy: busy };
        let target = match self.target(blank, file.len_bytes()) {
            Ok((target, ready)) => {
                add(&engine.counters().blank_files, u64::from(ready));
                Arc::new(target)
            }
            Err(error) => return landing.land(Err(error.into())),
        };
        let (whole, counting) = (Arc::clone(&target), Arc::clone(&engine));
        engine.make_whole(file, &target, move |result| {
            let counters = counting.counters();
            add(&counters.whole_files, u64::from(result.is_ok()));
            add(&counters.whole_bytes, if result.is_ok() { landing.file.len_bytes() } else { 0 });
            landing.land(result.map(|()| WholeFile { file: whole, _room: room }));
        });
    }

    /// A file with memory for so many bytes, the blank if it can be made as long, and whether it is the blank.
    fn target(&self, blank: Option<File>, bytes: u64) -> io::Result<(File, bool)> {
        if let Some(blank) = blank
            && set_aside(&blank, bytes).is_ok()
        {
            return Ok((blank, true));
        }
        let file = self.memory.unnamed(bytes).or_else(|_| {
            // Files that were dropped take memory as long as they are mapped.
            self.blanks.drop_all();
            self.memory.unnamed(bytes)
        });
        Ok((file?, false))
    }

    /// Room for one more file. Blanks go for it, then what is closed, what was closed longest ago first.
    /// The `blank` is the new file's memory already, and nobody's reservation.
    fn make_room(
        &self,
        states: &mut HashMap<Ino, State>,
        engine: &Engine,
        bytes: u64,
        blank: Option<&File>,
    ) -> Option<Reservation> {
        let bytes = usize::try_from(bytes).ok()?;
        if let Some(room) = engine.reserve(bytes) {
            return Some(room);
        }
        self.blanks.drop_all();
        loop {
            self.measure(engine, blank);
            if let Some(room) = engine.reserve(bytes) {
                return Some(room);
            }
            let closed = states.iter().filter_map(|(ino, state)| match state {
                State::Made(whole, used) if Arc::strong_count(whole) == 1 => Some((*used, *ino)),
                State::Made(..) | State::Making(_) => None,
            });
            let (_, oldest) = closed.min()?;
            states.remove(&oldest);
        }
    }

    /// Memory of all these files, mapped or not.
    pub(super) fn used_bytes(&self) -> u64 {
        self.memory.used_bytes()
    }

    /// Finds out how much memory dropped files take because programs still map them: what is used beyond what is reserved, and
    /// beyond `blank`. To be called with the states locked, so that nothing is between its memory and its reservation.
    fn measure(&self, engine: &Engine, blank: Option<&File>) {
        let blank_bytes = blank.and_then(|blank| blank.metadata().ok()).map_or(0, |found| found.blocks() * 512);
        let used = usize::try_from(self.memory.used_bytes().saturating_sub(blank_bytes)).unwrap_or(usize::MAX);
        engine.set_dropped_bytes(used.saturating_sub(engine.whole_bytes() + engine.blank_bytes()));
    }

    /// Notes that somebody reads a file, whole or not.
    pub(super) fn note_read(&self) {
        self.blanks.note_read();
    }

    /// Whether readers are expected soon.
    pub(super) fn expects(&self) -> bool {
        self.blanks.expects()
    }

    /// Drops files that nobody has had open for a while.
    pub(super) fn drop_idle(&self) {
        let mut dropped = Vec::new();
        let mut states = self.shared.lock();
        for state in states.values_mut() {
            if let State::Made(whole, used) = state
                && Arc::strong_count(whole) > 1
            {
                *used = Instant::now();
            }
        }
        states.retain(|_, state| match state {
            State::Made(whole, used) if used.elapsed() > IDLE => {
                dropped.push(Arc::clone(whole));
                false
            }
            State::Made(..) | State::Making(_) => true,
        });
        drop(dropped);
        if let Some(engine) = self.engine.upgrade() {
            self.measure(&engine, None);
        }
        drop(states);
    }
}

/// Ends the making of a file even if whoever makes it panics or ends, so that nobody waits forever.
struct Landing {
    shared: Arc<Shared>,
    ino: Ino,
    file: Arc<OpenFile>,
    landed: bool,
    /// As long as it is being made.
    _busy: Busy,
}

impl Landing {
    fn land(mut self, result: Result<WholeFile, WholeError>) {
        self.landed = true;
        self.shared.land(self.ino, &self.file, result);
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if !self.landed {
            self.shared.land(
                self.ino,
                &self.file,
                Err(ReadError::Internal { what: "the file was given up before it was whole" }.into()),
            );
        }
    }
}

/// Most bytes of a file: half of the cache.
fn most_bytes(engine: &Engine) -> u64 {
    engine.reservable_bytes() as u64 / 3 * 2
}

fn keep(whole: &Arc<WholeFile>, pin: &Pin, then: WhenWhole) {
    let _ = pin.made.set((Arc::clone(whole), Instant::now()));
    then(Some(Arc::clone(&whole.file)));
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<Ino, State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands the result to all who wait. Without a file they read through the page cache, and meet a failure there.
    fn land(&self, ino: Ino, file: &OpenFile, result: Result<WholeFile, WholeError>) {
        let whole =
            result.map(Arc::new).inspect_err(|error| tracing::debug!(file = file.name(), "not made whole: {error}"));
        let mut states = self.lock();
        let waiting = match states.remove(&ino) {
            Some(State::Making(waiting)) => waiting,
            Some(State::Made(..)) | None => Vec::new(),
        };
        if let Ok(whole) = &whole {
            states.insert(ino, State::Made(Arc::clone(whole), Instant::now()));
        }
        drop(states);
        for (pin, then) in waiting {
            match &whole {
                Ok(whole) => keep(whole, &pin, then),
                Err(_) => then(None),
            }
        }
    }
}
