//! Files made whole in memory when they are opened, for the kernel to read by itself.
//!
//! Through the page cache, a GB costs its reader and ckfs the better part of a second of processor time, most of it for
//! handling four-kilobyte pages one by one. A file that will be read from end to end is therefore better made at once, by all
//! threads, in a file of huge pages, which the kernel then reads at the speed of memory, memory maps included. Such a file
//! takes room of the tile cache; it is kept a little longer than it is open, in case that it is opened again.
//!
//! The pages belong to a `tmpfs` of our own that is mounted nowhere: it ends with the process, and nobody else sees it.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    fs::{FallocateFlags, Mode, OFlags, fallocate, openat},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen},
};

use super::{Ino, WhenWhole, looks::Use};
use crate::read::{Engine, OpenFile, ReadError, Reservation, WholeError, counters::add};

/// Smaller files are not worth a file of their own: a request or two of the kernel's read them.
const BYTES_MIN: u64 = 1 << 20;
/// Memory is taken in huge pages.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// How long a file is kept once it is closed.
const IDLE: Duration = Duration::from_mins(1);

/// Who closes a whole file sooner has looked at its header.
const BRIEF: Duration = Duration::from_millis(50);
/// The kernel reads so far beyond what it is asked for, at most.
const AHEAD_BYTES: u64 = 8 << 20;

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
    engine: Weak<Engine>,
}

struct Shared {
    memory: OwnedFd,
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
        let memory = memory_files(engine.reservable_bytes() as u64)?;
        let shared = Arc::new(Shared { memory, states: Mutex::default() });
        // That unnamed files work there is found out now, not when the first one is opened.
        shared.unnamed()?;
        Ok(Self { shared, engine: Arc::downgrade(engine) })
    }

    /// Whether a file of so many bytes is made whole: half of the cache at most, so that it does not take turns with others.
    pub(super) fn accepts(&self, len_bytes: u64) -> bool {
        let most = self.engine.upgrade().map_or(0, |engine| engine.reservable_bytes() as u64 / 3 * 2);
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
        let room_bytes = file.len_bytes().next_multiple_of(HUGE_PAGE_BYTES);
        let Some(room) = make_room(&mut states, &engine, room_bytes) else {
            drop(states);
            return then(None);
        };
        states.insert(ino, State::Making(vec![(pin, then)]));
        drop(states);
        let landing = Landing { shared: Arc::clone(&self.shared), ino, file: Arc::clone(file), landed: false };
        let target = match self.shared.target(file.len_bytes()) {
            Ok(target) => Arc::new(target),
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
        drop(states);
    }
}

/// Ends the making of a file even if whoever makes it panics or ends, so that nobody waits forever.
struct Landing {
    shared: Arc<Shared>,
    ino: Ino,
    file: Arc<OpenFile>,
    landed: bool,
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
            self.shared.land(self.ino, &self.file, Err(ReadError::Panicked.into()));
        }
    }
}

/// Room for one more file: what is closed goes for it, what was closed longest ago first.
fn make_room(states: &mut HashMap<Ino, State>, engine: &Engine, bytes: u64) -> Option<Reservation> {
    let bytes = usize::try_from(bytes).ok()?;
    loop {
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

fn keep(whole: &Arc<WholeFile>, pin: &Pin, then: WhenWhole) {
    let _ = pin.made.set((Arc::clone(whole), Instant::now()));
    then(Some(Arc::clone(&whole.file)));
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<Ino, State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unnamed(&self) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        Ok(openat(&self.memory, ".", flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// A file with memory for so many bytes. There may be none, as files that were dropped may still be mapped.
    fn target(&self, bytes: u64) -> io::Result<File> {
        let file = self.unnamed()?;
        fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        Ok(file)
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

/// A file system in memory of at most so many bytes, in huge pages, that is mounted nowhere.
fn memory_files(bytes: u64) -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let set = |key: &str, value: &str| fsconfig_set_string(&context, key, value);
    set("source", "ckfs")?;
    set("mode", "0700")?;
    set("size", &bytes.max(HUGE_PAGE_BYTES).to_string())?;
    // Only a wish: kernels may be built without.
    let _ = set("huge", "always");
    fsconfig_create(&context)?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}
