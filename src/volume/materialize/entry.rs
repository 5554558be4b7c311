//! One file that may be materialized: how far it is, and which opens wait for it.

use std::{
    fs::File,
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use super::{policy::When, prezeroed::Busy};
use crate::{
    read::{MaterializeError, Materializing, OpenFile, ReadError, Reservation},
    volume::{Access, WhenMaterialized},
};

/// How far a file is.
#[derive(Default)]
pub(super) enum State {
    /// Nothing was made.
    #[default]
    Absent,
    /// Some pieces were made, or all are being made.
    Making(Making),
    /// All was made.
    Made(Made),
    /// It was tried in vain.
    Failed,
}

/// A file of which something was made.
pub(super) struct Making {
    pub(super) pieces: Arc<Materializing>,
    pub(super) target: Arc<File>,
    pub(super) room: Option<Reservation>,
    /// Whether all of it was asked for.
    pub(super) is_begun: bool,
    /// Opens that wait for it.
    pub(super) waiting: Vec<WhenMaterialized>,
}

/// A file whose bytes were all made.
pub(super) struct Made {
    pub(super) target: Arc<File>,
    pieces: Arc<Materializing>,
    _room: Option<Reservation>,
}

/// A file that may be materialized. Handles of the file hold it; while one does, it is kept.
pub(in crate::volume) struct Entry {
    pub(super) when: When,
    state: Mutex<State>,
    /// When it was last opened or seen open.
    used: Mutex<Instant>,
    /// Bytes of tensors that were asked for by reads.
    asked_bytes: AtomicU64,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("when", &self.when).finish_non_exhaustive()
    }
}

impl Entry {
    pub(super) fn new(when: When) -> Self {
        Self { when, state: Mutex::default(), used: Mutex::new(Instant::now()), asked_bytes: AtomicU64::new(0) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it was last opened or seen open.
    pub(super) fn used(&self) -> Instant {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_used(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Counts bytes of tensors that a read asks for; all such bytes so far.
    pub(super) fn note_asked(&self, bytes: u64) -> u64 {
        self.asked_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes
    }

    /// Whether it failed; a file in memory may be tried again when it is opened anew.
    pub(super) fn has_failed(&self) -> bool {
        matches!(*self.lock(), State::Failed)
    }

    /// The file with all bytes, if there is one.
    pub(super) fn made(&self) -> Option<Arc<File>> {
        match &*self.lock() {
            State::Made(made) => Some(Arc::clone(&made.target)),
            State::Absent | State::Making(_) | State::Failed => None,
        }
    }

    /// How the kernel should treat an open of the file.
    pub(in crate::volume) fn access(&self) -> Access {
        if let Some(made) = self.made() {
            return Access::Passthrough(made);
        }
        match self.when {
            When::Opened => Access::Materialize,
            When::Read if self.is_begun() => Access::Materialize,
            When::Read | When::Closed => Access::Cached,
        }
    }

    /// What was made or is being made.
    pub(super) fn pieces(&self) -> Option<Arc<Materializing>> {
        match &*self.lock() {
            State::Making(Making { pieces, .. }) | State::Made(Made { pieces, .. }) => Some(Arc::clone(pieces)),
            State::Absent | State::Failed => None,
        }
    }

    /// Whether all of it was asked for and is not made yet.
    pub(super) fn is_begun(&self) -> bool {
        matches!(&*self.lock(), State::Making(Making { is_begun: true, .. }))
    }

    /// Lets opens that wait go on without: they read what is made, as it is made.
    pub(super) fn stop_waiting(&self) {
        let waiting = match &mut *self.lock() {
            State::Making(making) => mem::take(&mut making.waiting),
            State::Absent | State::Made(_) | State::Failed => Vec::new(),
        };
        for then in waiting {
            then(None);
        }
    }

    /// Gives all up: the mount ends.
    pub(super) fn abandon(&self) {
        let state = mem::replace(&mut *self.lock(), State::Failed);
        if let State::Making(making) = state {
            making.pieces.abandon();
            for then in making.waiting {
                then(None);
            }
        }
    }

    /// Notes the end, and hands the file to all opens that wait. Without a file they read through the page cache, and meet a
    /// failure there.
    fn end(&self, result: Result<(), MaterializeError>, name: &str) {
        let mut state = self.lock();
        let (pieces, target, room, waiting) = match mem::replace(&mut *state, State::Failed) {
            State::Making(Making { pieces, target, room, waiting, .. }) => (pieces, target, room, waiting),
            // It was given up meanwhile.
            other @ (State::Absent | State::Made(_) | State::Failed) => return *state = other,
        };
        let file = match result {
            Ok(()) => {
                let made = Made { target: Arc::clone(&target), pieces: Arc::clone(&pieces), _room: room };
                *state = State::Made(made);
                Some(target)
            }
            Err(error) if self.when == When::Closed => {
                tracing::warn!(file = name, "not materialized: {error}");
                None
            }
            Err(error) => {
                tracing::debug!(file = name, "not materialized: {error}");
                None
            }
        };
        drop(state);
        self.note_used();
        // A program that finds it counted finds it there.
        if file.is_some() {
            pieces.count();
        }
        for then in waiting {
            then(file.clone());
        }
    }
}

/// Ends the making of a file even if the thread that makes it panics or ends, so that no open waits forever.
pub(super) struct CompletionGuard {
    entry: Arc<Entry>,
    file: Arc<OpenFile>,
    is_ended: bool,
    /// As long as it is being made.
    _busy: Option<Busy>,
}

impl CompletionGuard {
    pub(super) fn new(entry: &Arc<Entry>, file: &Arc<OpenFile>, busy: Option<Busy>) -> Self {
        Self { entry: Arc::clone(entry), file: Arc::clone(file), is_ended: false, _busy: busy }
    }

    pub(super) fn end(mut self, result: Result<(), MaterializeError>) {
        self.is_ended = true;
        self.entry.end(result, self.file.name());
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if !self.is_ended {
            let error = ReadError::Internal { what: "the file was given up before it was materialized" };
            self.entry.end(Err(error.into()), self.file.name());
        }
    }
}
