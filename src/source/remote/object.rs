//! A remote object with its entry in the cache, and the jobs that fetch its blocks.

use std::{
    io,
    ops::Range,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{
    super::{ByteSpan, FileId, Health, SourceError},
    cache::Entry,
    error::RemoteError,
    interface::RemoteFile,
    retry::{Deadline, Retrying},
};

/// The second attempt of a read comes within this time after the first has failed, and asks for at most this part of its bytes,
/// unless the first was for no more than a page.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(50);
const ATTEMPT_DIVISOR: u64 = 4;
/// Bytes of the sources of a page, with scales.
const PAGE_SOURCE_BYTES: u64 = 64 << 10;
/// No reader waits for a request of another one that brought no byte for this time.
const STUCK: Duration = Duration::from_secs(2);

/// A read whose time was over.
#[derive(Debug)]
struct Late {
    at: Instant,
    spans: Vec<ByteSpan>,
    error: Arc<RemoteError>,
}

/// A remote object with its entry in the cache.
pub struct RemoteObject {
    /// The object.
    pub file: RemoteFile,
    /// Its name in messages.
    pub name: Arc<Path>,
    /// Its entry.
    pub entry: Arc<Entry>,
    /// Its service.
    pub service: Arc<Retrying>,
    /// Jobs that are not done. No two of them have the same block.
    pub(super) jobs: Mutex<Vec<Arc<Job>>>,
    /// Reads that timed out within the last 50 ms: the kernel sends several at a time.
    late: Mutex<Vec<Late>>,
    /// State of the comparison with the digest that the service names.
    pub(super) digest: DigestState,
}

impl RemoteObject {
    /// An object without jobs.
    pub fn new(file: RemoteFile, name: Arc<Path>, entry: Arc<Entry>, service: Arc<Retrying>) -> Self {
        let (jobs, late, digest) = (Mutex::default(), Mutex::default(), DigestState::default());
        Self { file, name, entry, service, jobs, late, digest }
    }

    /// Notes the end of a read of spans: with an error if its time was over, else without.
    pub(super) fn record_result(&self, spans: &[ByteSpan], late: Option<&Arc<RemoteError>>) {
        let mut all = self.late.lock();
        all.retain(|late| late.at.elapsed() < ATTEMPT_PAUSE);
        match late {
            Some(error) => all.push(Late { at: Instant::now(), spans: spans.into(), error: Arc::clone(error) }),
            None => all.clear(),
        }
    }

    /// The error of the read whose second attempt this is, if its time was over. The kernel asks a second time for the page that its
    /// reader wants, alone, before it tells the reader that it did not come with its neighbours: to the reader both are one read, which
    /// must not take twice as long. What comes after that is a new read.
    pub(super) fn take_recent_timeout(&self, spans: &[ByteSpan]) -> Option<Arc<RemoteError>> {
        let mut all = self.late.lock();
        let bytes = |spans: &[ByteSpan]| spans.iter().map(|span| span.len()).sum::<u64>();
        let is_part = |late: &Late| {
            let inside = |span: &ByteSpan| late.spans.iter().any(|own| own.contains(*span));
            let (asked, first) = (bytes(spans), bytes(&late.spans));
            let is_page = first <= PAGE_SOURCE_BYTES || asked.saturating_mul(ATTEMPT_DIVISOR) <= first;
            spans.iter().all(inside) && is_page
        };
        let late = all.iter().find(|late| late.at.elapsed() < ATTEMPT_PAUSE && is_part(late))?;
        let error = Arc::clone(&late.error);
        all.clear();
        Some(error)
    }
}

/// State of the comparison of an object with its digest in this process.
#[derive(Default)]
pub(super) struct DigestState {
    /// Held while a thread compares: others wait for its result.
    pub(super) comparing: Mutex<()>,
    /// Whether a thread beside the readers compares.
    pub(super) beside: AtomicBool,
    /// Whether a reader had bytes of it, or the checkpoint was opened with some, such as its header.
    served: AtomicBool,
    /// Whether it was placed into the cache of the service's own client, or cannot be.
    pub(super) shared: AtomicBool,
    /// The error, if the digest was wrong although readers had bytes, or wrong twice.
    pub(super) wrong: OnceLock<SourceError>,
    /// Told of wrong bytes that readers had, of its file.
    pub(super) health: OnceLock<(Arc<Health>, FileId)>,
    /// Called when the last block has come.
    pub(super) on_whole: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl DigestState {
    /// Notes that blocks have come.
    pub(super) fn note_brought(&self, entry: &Entry) {
        if let Some(on_whole) = self.on_whole.get().filter(|_| self.is_served() && entry.is_whole()) {
            on_whole();
        }
    }

    /// Whether a reader had bytes of it.
    pub(super) fn is_served(&self) -> bool {
        self.served.load(Ordering::Acquire)
    }

    /// Notes that a reader gets bytes of it. Returns whether that is the first time.
    pub(super) fn note_served(&self) -> bool {
        // A store by every reader would move the cache line between processors.
        !self.served.load(Ordering::Relaxed) && !self.served.swap(true, Ordering::AcqRel)
    }
}

/// Why blocks did not come.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FetchError {
    /// The service: of the object of this name.
    #[error("{1}")]
    Remote(Arc<Path>, Arc<RemoteError>),
    /// The cache has no room: the bytes are to be read without it.
    #[error("the disk cache has no room")]
    NoRoom,
    /// The cache's files failed.
    #[error("{0}")]
    Cache(Arc<io::Error>),
}

impl FetchError {
    /// The reason that an error of an entry's files is, which is told.
    pub(super) fn of_cache(entry: &Entry, error: io::Error) -> Self {
        // A segment is left to another process for a moment, which needs its room.
        if error.kind() == io::ErrorKind::WouldBlock {
            return Self::NoRoom;
        }
        entry.note_failure(&error);
        Self::Cache(Arc::new(error))
    }
}

/// Blocks of an object to be fetched with one request.
pub(super) struct Job {
    pub(super) object: Arc<RemoteObject>,
    pub(super) blocks: Range<u64>,
    /// Whether no reader waited for it when it was made.
    pub(super) was_ahead: bool,
    /// Whether no reader waits for it.
    pub(super) ahead: AtomicBool,
    pub(super) deadline: Mutex<Deadline>,
    /// When it began, or brought bytes last.
    moved: Mutex<Option<Instant>>,
    /// Whether a thread runs it, or it is done.
    pub(super) begun: AtomicBool,
    pub(super) outcome: OnceLock<Result<(), FetchError>>,
}

impl Job {
    pub(super) fn new(object: &Arc<RemoteObject>, blocks: Range<u64>, ahead: bool, deadline: Deadline) -> Self {
        Self {
            object: Arc::clone(object),
            blocks,
            was_ahead: ahead,
            ahead: AtomicBool::new(ahead),
            deadline: Mutex::new(deadline),
            moved: Mutex::default(),
            begun: AtomicBool::new(false),
            outcome: OnceLock::new(),
        }
    }

    /// Begins it, unless another thread has. Returns whether this thread runs it.
    pub(super) fn begin(&self) -> bool {
        let begins = !self.begun.swap(true, Ordering::AcqRel);
        if begins {
            self.note_bytes();
        }
        begins
    }

    /// Notes that bytes came.
    pub(super) fn note_bytes(&self) {
        *self.moved.lock() = Some(Instant::now());
    }

    /// Whether its request is under way and has brought no byte for [`STUCK`], though the service does not ask for a pause.
    pub(super) fn is_stuck(&self) -> bool {
        let moved = *self.moved.lock();
        let is_silent = !self.is_queued() && moved.is_some_and(|moved| moved.elapsed() > STUCK);
        is_silent && self.object.service.gate.closed_for().is_none()
    }

    pub(super) fn is_queued(&self) -> bool {
        !self.begun.load(Ordering::Acquire)
    }

    /// A reader waits for it from now on. Returns whether none did before.
    pub(super) fn promote(&self, deadline: Deadline) -> bool {
        let mut own = self.deadline.lock();
        if let (Deadline::At(current), Deadline::At(wanted)) = (*own, deadline) {
            *own = Deadline::At(current.max(wanted));
        }
        self.ahead.swap(false, Ordering::AcqRel)
    }

    /// Ends it: its object knows it no longer.
    pub(super) fn end(self: &Arc<Self>, outcome: Result<(), FetchError>) {
        let _ = self.outcome.set(outcome);
        self.begun.store(true, Ordering::Release);
        self.object.jobs.lock().retain(|job| !Arc::ptr_eq(job, self));
    }
}
