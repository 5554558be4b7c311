//! Materialization: a whole file is produced once, in another file that the kernel then reads directly.
//!
//! Through the page cache, 1 GB costs its reader and ckfs almost a second of processor time, most of it for
//! handling pages of 4 KiB one by one. A materialized file is read at the speed of memory, or of its disk, memory maps
//! included. There is one mechanism; the storage of the bytes is a detail below it. In memory ([`memory`]) a file takes
//! room of the tile cache and is dropped a minute after it was closed. In a directory ([`disk`]) it is an unnamed file,
//! which stays until the mount ends. [`Policy`] selects the files at mount.
//!
//! At the first open of a file the kernel fixes how it is read until the last close: by the kernel itself, or through the page
//! cache. That determines when a file is materialized:
//!
//! * A file in memory: when it is opened. The open waits, because all threads together produce the file faster than one reader
//!   reads it, and the kernel then reads it directly. An open waits [`OPEN_WAIT`] at most: where a source is slow, the reader
//!   continues with the finished pieces, and waits only for the pieces that it reads. A program that opens a file only for its
//!   header causes all of it to be materialized: nothing at an open tells it from a program that reads the tensors.
//!   A file of which the disk cache of a remote source lacks bytes is not materialized: its reader takes them as they come,
//!   twice as fast as through memory, and the next open finds them.
//! * Any file, on a disk: once it is closed, in the background, by one thread.
//!
//! An open with `O_DIRECT` bypasses the cache, and starts nothing. Where there is no room, or a step fails, the reader is
//! answered as without materialization, and its read meets the failure.

mod disk;
mod entry;
mod memory;
mod policy;

use std::{
    collections::HashMap,
    fs::File,
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use ckfs_read::{Engine, MaterializeTarget, Materializing, PreparedFile};
use ckfs_source::Replied;
use parking_lot::Mutex;

pub use self::policy::{BundleSizes, Policy};
use self::{
    disk::{ClosedFile, Disk, OnDisk},
    entry::{CompletionGuard, MaterializedState, Partial},
    memory::Memory,
};
pub(super) use self::{
    entry::FileEntry,
    policy::{BYTES_MIN, FileClass, When},
};
use super::{Ino, WhenMaterialized};

/// Longest time that an open waits for its file.
const OPEN_WAIT: Duration = Duration::from_secs(2);
/// How long a file in memory is kept after its last close.
const IDLE: Duration = Duration::from_mins(1);

type FileEntries = Mutex<HashMap<Ino, Arc<FileEntry>>>;

/// Storage of the files.
enum FileStorage {
    Memory(Memory),
    /// The directory, and its thread's queue.
    Disk(Disk, mpsc::Sender<ClosedFile>),
}

/// The materialized files of a volume.
pub(super) struct Materializer {
    storage: FileStorage,
    entries: Arc<FileEntries>,
    engine: Weak<Engine>,
    /// Whether the kernel reads files directly.
    pub(super) is_on: AtomicBool,
    /// Waiting opens, in the order in which their time ends.
    deadlines: mpsc::Sender<(Instant, Weak<FileEntry>)>,
}

impl Drop for Materializer {
    fn drop(&mut self) {
        let entries = std::mem::take(&mut *self.entries.lock());
        for entry in entries.into_values() {
            entry.abandon();
        }
    }
}

impl Materializer {
    /// The files that a policy selects, in memory as far as the engine's cache allows, or in a directory; `None` if it selects none.
    /// `on_disk` is called for each file that is complete in the directory.
    ///
    /// # Errors
    /// The system gives us no file system in memory, as it does only for root; the directory cannot hold unnamed files; or the
    /// system cannot start a thread.
    pub(super) fn new(policy: &Policy, engine: &Arc<Engine>, on_disk: OnDisk) -> io::Result<Option<Self>> {
        let entries: Arc<FileEntries> = Arc::default();
        let storage = if let Some(directory) = policy.directory() {
            let disk = Disk::new(directory.clone())?;
            let closed = disk.clone().start(Arc::clone(engine), on_disk)?;
            FileStorage::Disk(disk, closed)
        } else if policy.in_memory() {
            FileStorage::Memory(Memory::new(engine)?)
        } else {
            return Ok(None);
        };
        let (deadlines, waiting) = mpsc::channel();
        thread::Builder::new().name("ckfs-open-wait".to_owned()).spawn(move || stop_waiting(&waiting))?;
        Ok(Some(Self { storage, entries, engine: Arc::downgrade(engine), is_on: AtomicBool::new(false), deadlines }))
    }

    /// An empty file of the directory, if files are on a disk.
    pub(super) fn trial(&self) -> Option<File> {
        match &self.storage {
            FileStorage::Memory(_) => None,
            // That it cannot be made was an error of `new`.
            FileStorage::Disk(disk, _) => disk.unnamed().ok(),
        }
    }

    /// Notes the open of a file that may be materialized. The caller keeps the entry while the file is open.
    pub(super) fn hold(&self, ino: Ino, when: When) -> Option<Arc<FileEntry>> {
        if !self.is_on.load(Ordering::Relaxed) {
            return None;
        }
        let mut entries = self.entries.lock();
        let entry = entries.entry(ino).or_insert_with(|| Arc::new(FileEntry::new(when)));
        // In this order: a thread that has locked an entry's state owns the entry, and may wait for `entries`.
        if when != When::Closed
            && Arc::strong_count(entry) == 1
            && matches!(*entry.state.lock(), MaterializedState::Failed)
        {
            *entry = Arc::new(FileEntry::new(when));
        }
        entry.note_used();
        Some(Arc::clone(entry))
    }

    /// As [`Self::hold`], for an open with `O_DIRECT`: only a file that is complete already.
    pub(super) fn hold_complete(&self, ino: Ino) -> Option<Arc<FileEntry>> {
        let entry = self.entries.lock().get(&ino).map(Arc::clone)?;
        entry.complete().is_some().then_some(entry)
    }

    /// Materializes a file that is being opened, unless it is complete or in progress. Calls `then` at once or from another thread.
    pub(super) fn materialize(&self, entry: &Arc<FileEntry>, file: &Arc<PreparedFile>, then: WhenMaterialized) {
        let mut state = entry.state.lock();
        let mut begun = None;
        if let MaterializedState::Absent = &*state
            && let Some(partial) = self.prepare(file)
        {
            begun = Some(Arc::clone(&partial.pieces));
            *state = MaterializedState::Partial(partial);
        }
        match &mut *state {
            MaterializedState::Complete(Partial { target, .. }) => {
                let target = Arc::clone(target);
                drop(state);
                then(Some(target));
            }
            MaterializedState::Absent | MaterializedState::Failed => {
                drop(state);
                then(None);
            }
            MaterializedState::Partial(partial) => {
                partial.waiting.push(then);
                drop(state);
                if let Some(pieces) = begun {
                    let guard = CompletionGuard::new(entry, file);
                    pieces.make_all(move |result| guard.end(&result));
                }
                // The receiver is gone once the thread has ended, and then no open waits.
                let _ = self.deadlines.send((Instant::now() + OPEN_WAIT, Arc::downgrade(entry)));
            }
        }
    }

    /// Passes bytes of a file to `reply`, from pieces that are finished or are produced for this read. `None`, without a
    /// call of `reply`, if the read must be answered as without materialization.
    pub(super) fn read(
        entry: &Arc<FileEntry>,
        file: &Arc<PreparedFile>,
        start: u64,
        len: usize,
        reply: &mut dyn FnMut(&[u8]) -> Replied,
    ) -> Option<Replied> {
        let end = start.saturating_add(len as u64).min(file.len_bytes());
        let start = start.min(end);
        entry.pieces()?.read(start, end, reply)
    }

    /// Notes that a file is closed.
    pub(super) fn close(&self, ino: Ino, entry: &Arc<FileEntry>, file: &Arc<PreparedFile>) {
        if let FileStorage::Disk(_, closed) = &self.storage
            && entry.note_closed()
        {
            // The receiver is gone once the thread has ended; then no files are left.
            let _ = closed.send(ClosedFile { ino, entry: Arc::clone(entry), file: Arc::clone(file) });
        }
    }

    /// Room and a target for a file with no piece yet; `None` if there is no room.
    fn prepare(&self, file: &Arc<PreparedFile>) -> Option<Partial> {
        let FileStorage::Memory(memory) = &self.storage else { return None };
        let engine = self.engine.upgrade()?;
        let found = memory.take(&engine, file.len_bytes(), &mut || self.drop_oldest());
        let (target, room) =
            found.inspect_err(|error| tracing::debug!(file = file.name(), "not materialized: {error}")).ok()?;
        let target = Arc::new(target);
        let pieces = Materializing::new(&engine, file, MaterializeTarget::Memory(Arc::clone(&target))).ok()?;
        Some(Partial::new(&Arc::new(pieces), target, Some(room)))
    }

    /// Drops the file that was closed longest ago; false if there was none.
    fn drop_oldest(&self) -> bool {
        let mut entries = self.entries.lock();
        let closed = entries.iter().filter(|(_, entry)| Arc::strong_count(entry) == 1);
        let Some((_, oldest)) = closed.map(|(ino, entry)| (entry.used(), *ino)).min() else { return false };
        let dropped = entries.remove(&oldest);
        drop(entries);
        dropped.is_some()
    }

    /// Memory of all files in memory in bytes, mapped or not.
    pub(super) fn used_bytes(&self) -> Option<u64> {
        match &self.storage {
            FileStorage::Memory(memory) => Some(memory.used_bytes()),
            FileStorage::Disk(..) => None,
        }
    }

    /// Drops files in memory that were closed for longer than [`IDLE`].
    pub(super) fn drop_idle(&self) {
        let FileStorage::Memory(memory) = &self.storage else { return };
        let mut dropped = Vec::new();
        self.entries.lock().retain(|_, entry| {
            if Arc::strong_count(entry) > 1 {
                entry.note_used();
            }
            let is_kept = entry.used().elapsed() <= IDLE;
            if !is_kept {
                dropped.push(Arc::clone(entry));
            }
            is_kept
        });
        drop(dropped);
        if let Some(engine) = self.engine.upgrade() {
            memory.measure(&engine);
        }
    }
}

/// Ends the waits whose time is over. All waits are equally long, so they end in order.
fn stop_waiting(waiting: &mpsc::Receiver<(Instant, Weak<FileEntry>)>) {
    for (until, entry) in waiting {
        thread::sleep(until.saturating_duration_since(Instant::now()));
        if let Some(entry) = entry.upgrade() {
            entry.stop_waiting();
        }
    }
}
