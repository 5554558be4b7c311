//! A step of a run in one state of its directory, and its volume while there is one.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use ckfs_config::Average;
use ckfs_source::WaitRegistry;
use ckfs_volume::{Attr, BUFFER_BYTES, FileSystem, Ino, NodeKind, Nodes, Permission, Volume};
use parking_lot::{Condvar, Mutex};

use super::{failed::FailedStep, settle::ListedStep};

/// Bits of an inode number or a handle that belong to the step's volume.
pub(super) const INNER_BITS: u32 = 40;

/// How long a thread that plans a step waits for storage until another may begin in its place.
const QUIET: Duration = Duration::from_secs(1);

/// The slot and the number within it.
pub(super) const fn split(number: u64) -> (u64, u64) {
    (number >> INNER_BITS, number & ((1 << INNER_BITS) - 1))
}

/// What a step shows.
#[derive(Clone)]
pub(super) enum StepContent {
    Volume(Arc<Volume>),
    Failed(Arc<FailedStep>),
}

impl StepContent {
    /// Its nodes, by their numbers within the step.
    pub(super) fn nodes(&self) -> &dyn Nodes {
        match self {
            Self::Volume(volume) => &**volume,
            Self::Failed(failed) => &**failed,
        }
    }

    /// Its files, likewise. Their calls may wait for storage.
    pub(super) fn files(&self) -> &dyn FileSystem {
        match self {
            Self::Volume(volume) => &**volume,
            Self::Failed(failed) => &**failed,
        }
    }

    /// Its volume, or why it could not be planned.
    pub(super) fn volume(&self) -> Result<&Arc<Volume>, &str> {
        match self {
            Self::Volume(volume) => Ok(volume),
            Self::Failed(failed) => Err(&failed.message),
        }
    }
}

/// How far a step has been planned.
#[derive(Default)]
pub(super) enum SlotState {
    #[default]
    Absent,
    /// A thread plans it.
    Opening,
    Ready(StepContent),
    /// Ended: its directory is gone or another.
    Ended,
}

/// See the module's documentation.
pub(super) struct Slot {
    /// Its number among all slots of the run, from 1.
    pub(super) index: u64,
    pub(super) step: ListedStep,
    /// Of the step's directory, before it is planned.
    pub(super) permission: Permission,
    pub(super) state: Mutex<SlotState>,
    /// Signals that the state has changed.
    pub(super) changed: Condvar,
    /// What the first volume was: a later one must be the same.
    pub(super) fingerprint: OnceLock<u64>,
    /// The average that it shows, if it shows one.
    pub(super) average: OnceLock<Option<Average>>,
    /// Tensors of the volume, by which its memory is judged.
    pub(super) weight: AtomicU64,
    /// The largest chunk that is decoded whole, in bytes.
    pub(super) chunk_bytes: AtomicU64,
    made: Instant,
    /// Milliseconds from then to the last request.
    used_ms: AtomicU64,
    /// The waits of the thread that plans it.
    pub(super) waits: Mutex<Option<Arc<WaitRegistry>>>,
}

impl Slot {
    pub(super) fn new(index: u64, step: ListedStep, permission: Permission) -> Self {
        Self {
            index,
            step,
            permission,
            state: Mutex::default(),
            changed: Condvar::new(),
            fingerprint: OnceLock::new(),
            average: OnceLock::new(),
            weight: AtomicU64::new(0),
            chunk_bytes: AtomicU64::new(0),
            made: Instant::now(),
            used_ms: AtomicU64::new(0),
            waits: Mutex::default(),
        }
    }

    /// The number of a node in the run.
    pub(super) const fn outer(&self, inner: Ino) -> Ino {
        Ino(self.index << INNER_BITS | inner.0)
    }

    /// Sets the state, and wakes those that wait for it. An ended slot stays so. Returns the former content.
    pub(super) fn set(&self, next: SlotState) -> Option<StepContent> {
        let mut state = self.state.lock();
        if matches!(*state, SlotState::Ended) {
            drop(state);
            return if let SlotState::Ready(content) = next { Some(content) } else { None };
        }
        let former = std::mem::replace(&mut *state, next);
        drop(state);
        self.changed.notify_all();
        if let SlotState::Ready(content) = former { Some(content) } else { None }
    }

    /// What it shows now, if it is planned.
    pub(super) fn content(&self) -> Option<StepContent> {
        if let SlotState::Ready(content) = &*self.state.lock() { Some(content.clone()) } else { None }
    }

    /// Its volume, if it is planned and has one.
    pub(super) fn volume(&self) -> Option<Arc<Volume>> {
        self.content()?.volume().ok().cloned()
    }

    /// Notes a request.
    pub(super) fn note_used(&self) {
        let used = self.made.elapsed().as_millis();
        self.used_ms.store(u64::try_from(used).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Time since the last request.
    pub(super) fn idle(&self) -> Duration {
        self.made.elapsed().saturating_sub(Duration::from_millis(self.used_ms.load(Ordering::Relaxed)))
    }

    /// Takes the volume out, if no request and no reader uses it.
    pub(super) fn take_unused(&self) -> Option<Arc<Volume>> {
        let mut state = self.state.lock();
        let SlotState::Ready(StepContent::Volume(volume)) = &*state else { return None };
        // Requests get their share under this lock.
        if Arc::strong_count(volume) > 1 || volume.has_open_files() {
            return None;
        }
        let former = std::mem::take(&mut *state);
        if let SlotState::Ready(StepContent::Volume(volume)) = former { Some(volume) } else { None }
    }

    fn waits(&self) -> Option<Arc<WaitRegistry>> {
        self.waits.lock().clone()
    }

    /// What the thread that plans it waits for, if that is storage that does not answer.
    pub(super) fn stall(&self) -> Option<String> {
        let waits = self.waits()?;
        waits.stalled().first().map(|stalled| waits.describe(stalled))
    }

    /// Whether the thread that plans it waits for storage that does not answer.
    pub(super) fn is_stalled(&self) -> bool {
        self.stall().is_some()
    }

    /// Whether it has waited for storage for a while, which may be slow or not answer at all. To be asked several times within that.
    pub(super) fn is_quiet(&self) -> bool {
        self.waits().is_some_and(|waits| !waits.waiting(QUIET).is_empty())
    }

    /// Attributes of the step's directory before it is planned.
    pub(super) fn plain_attr(&self) -> Attr {
        Attr {
            ino: self.outer(Ino::ROOT),
            kind: NodeKind::Directory,
            size_bytes: 0,
            links: 2,
            modified: self.step.measure.as_ref().map_or(SystemTime::UNIX_EPOCH, |measure| measure.changed),
            permission: self.permission,
            buffer_bytes: BUFFER_BYTES,
        }
    }
}
