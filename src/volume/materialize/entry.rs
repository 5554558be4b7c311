//! One file that may be materialized: its progress, and the opens that wait for it.

use std::{
    fs::File,
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use ckfs_read::{FileRoom, MaterializeError, Materializing, PreparedFile, ReadError};
use parking_lot::Mutex;

use super::policy::When;
use crate::{Access, WhenMaterialized};

/// Progress of a file.
#[derive(Default)]
pub(super) enum MaterializedState {
    /// No piece was materialized.
    #[default]
    Absent,
    /// Some pieces are materialized, or all are in progress.
    Partial(Partial),
    /// All pieces are materialized, and no open waits.
    Complete(Partial),
    /// Materialization failed.
    Failed,
}

/// A file with materialized pieces.
pub(super) struct Partial {
    pub(super) pieces: Arc<Materializing>,
    pub(super) target: Arc<File>,
    _room: Option<FileRoom>,
    /// Opens that wait for it.
    pub(super) waiting: Vec<WhenMaterialized>,
}

impl Partial {
    pub(super) fn new(pieces: &Arc<Materializing>, target: Arc<File>, room: Option<FileRoom>) -> Self {
        Self { pieces: Arc::clone(pieces), target, _room: room, waiting: Vec::new() }
    }
}

/// A file that may be materialized. Its open handles own it, so it lives while one is open.
pub(crate) struct FileEntry {
    pub(super) when: When,
    pub(super) state: Mutex<MaterializedState>,
    /// Time of the last open, or of the last check that found it open.
    used: Mutex<Instant>,
    /// Whether it was closed before.
    was_closed: AtomicBool,
}

impl FileEntry {
    pub(super) fn new(when: When) -> Self {
        Self { when, state: Mutex::default(), used: Mutex::new(Instant::now()), was_closed: AtomicBool::new(false) }
    }

    /// Time of the last open, or of the last check that found it open.
    pub(super) fn used(&self) -> Instant {
        *self.used.lock()
    }

    pub(super) fn note_used(&self) {
        *self.used.lock() = Instant::now();
    }

    /// Notes that it is closed; returns whether that is the first time.
    pub(super) fn note_closed(&self) -> bool {
        !self.was_closed.swap(true, Ordering::Relaxed)
    }

    /// The file with all bytes, if it is complete.
    pub(super) fn complete(&self) -> Option<Arc<File>> {
        match &*self.state.lock() {
            MaterializedState::Complete(complete) => Some(Arc::clone(&complete.target)),
            MaterializedState::Absent | MaterializedState::Partial(_) | MaterializedState::Failed => None,
        }
    }

    /// How the kernel should treat an open of the file.
    pub(crate) fn access(&self) -> Access {
        if let Some(complete) = self.complete() {
            return Access::Passthrough(complete);
        }
        match self.when {
            When::Opened => Access::Materialize,
            When::Closed => Access::Cached,
        }
    }

    /// The pieces that are materialized or in progress.
    pub(super) fn pieces(&self) -> Option<Arc<Materializing>> {
        match &*self.state.lock() {
            MaterializedState::Partial(file) | MaterializedState::Complete(file) => Some(Arc::clone(&file.pieces)),
            MaterializedState::Absent | MaterializedState::Failed => None,
        }
    }

    /// Ends the wait of opens: their reads use the pieces as each is finished.
    pub(super) fn stop_waiting(&self) {
        let waiting = match &mut *self.state.lock() {
            MaterializedState::Partial(partial) => mem::take(&mut partial.waiting),
            MaterializedState::Absent | MaterializedState::Complete(_) | MaterializedState::Failed => Vec::new(),
        };
        for then in waiting {
            then(None);
        }
    }

    /// Ends the materialization: the mount ends.
    pub(super) fn abandon(&self) {
        let state = mem::replace(&mut *self.state.lock(), MaterializedState::Failed);
        if let MaterializedState::Partial(partial) = state {
            partial.pieces.abandon();
            for then in partial.waiting {
                then(None);
            }
        }
    }

    /// Notes the end, and passes the file to all waiting opens. Without a file they read through the page cache, and a
    /// failure occurs again there.
    fn end(&self, result: &Result<(), MaterializeError>, name: &str) {
        let mut state = self.state.lock();
        // Else it was abandoned meanwhile.
        let MaterializedState::Partial(Partial { pieces, target, waiting, .. }) = &mut *state else { return };
        let (pieces, target, waiting) = (Arc::clone(pieces), Arc::clone(target), mem::take(waiting));
        let ended = mem::replace(&mut *state, MaterializedState::Failed);
        if let Err(error) = result {
            if self.when == When::Closed {
                tracing::warn!(file = name, "not materialized: {error}");
            } else {
                tracing::debug!(file = name, "not materialized: {error}");
            }
        } else if let MaterializedState::Partial(partial) = ended {
            *state = MaterializedState::Complete(partial);
        }
        let file = result.is_ok().then_some(target);
        drop(state);
        self.note_used();
        // Counted first: a program that sees the file passed through also sees it counted.
        if file.is_some() {
            pieces.count();
        }
        for then in waiting {
            then(file.clone());
        }
    }
}

/// Ends the materialization of a file even if its thread panics or ends, so that no open waits forever.
pub(super) struct CompletionGuard {
    entry: Arc<FileEntry>,
    file: Arc<PreparedFile>,
    is_ended: bool,
}

impl CompletionGuard {
    pub(super) fn new(entry: &Arc<FileEntry>, file: &Arc<PreparedFile>) -> Self {
        Self { entry: Arc::clone(entry), file: Arc::clone(file), is_ended: false }
    }

    pub(super) fn end(mut self, result: &Result<(), MaterializeError>) {
        self.is_ended = true;
        self.entry.end(result, self.file.name());
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if !self.is_ended {
            let error = ReadError::Internal { what: "the file was given up before it was materialized" };
            self.entry.end(&Err(error.into()), self.file.name());
        }
    }
}
