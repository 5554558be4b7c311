//! Whether the files of a source can be trusted and answer: poison and stalls, kept the same way by every source.
//!
//! A file found different from what was pinned is *poisoned* for good. A file whose storage does not answer *stalls*
//! ([`super::stall`]) until what was asked of it comes. A source notes both here; the layers above ask here and nowhere else.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use super::{
    FileId, Poison, SourceError, Stall, Waiting,
    stall::{Fetches, Fetching, WaitTarget},
};

/// The state of each file of a source.
#[derive(Debug)]
pub struct Health {
    files: Vec<FileHealth>,
    poisoned: AtomicU64,
    fetches: Arc<Fetches>,
    stalls: Mutex<Vec<(FileId, Stall)>>,
}

#[derive(Debug)]
struct FileHealth {
    path: Arc<Path>,
    poison: OnceLock<Poison>,
    /// Whether its storage does not answer.
    stalled: AtomicBool,
}

impl Health {
    /// Of files that are all good; their ids are their places in `paths`. `fetches` notes what is waited for.
    pub fn new(paths: impl Iterator<Item = Arc<Path>>, fetches: Arc<Fetches>) -> Self {
        let file = |path| FileHealth { path, poison: OnceLock::new(), stalled: AtomicBool::new(false) };
        let files: Vec<FileHealth> = paths.map(file).collect();
        fetches.name_files(files.iter().map(|file| file.path.clone()));
        Self { files, poisoned: AtomicU64::new(0), fetches, stalls: Mutex::default() }
    }

    fn file(&self, file: FileId) -> &FileHealth {
        &self.files[file.index()]
    }

    /// Notes that this thread is about to wait for `target`.
    pub fn begin(&self, target: WaitTarget) -> Fetching<'_> {
        self.fetches.begin(target)
    }

    /// Whether anything may be asked of a file.
    ///
    /// # Errors
    /// The error that poisoned it, or [`SourceError::Stalled`].
    pub fn usable(&self, file: FileId) -> Result<(), SourceError> {
        let state = self.file(file);
        if let Some(poison) = state.poison.get() {
            return Err(poison.error.clone());
        }
        if state.stalled.load(Ordering::Relaxed) { Err(self.stalled(file)) } else { Ok(()) }
    }

    fn stalled(&self, file: FileId) -> SourceError {
        let stalls = self.stalls.lock().unwrap_or_else(PoisonError::into_inner);
        let what = stalls.iter().find(|(id, _)| *id == file).map(|(_, stall)| stall.what.clone());
        SourceError::Stalled {
            file: self.file(file).path.clone(),
            what: what.unwrap_or_else(|| "read".to_owned()),
            limit: self.fetches.limit(),
        }
    }

    /// Marks a file as lost for good. The first error counts and is logged; it is returned then and later.
    pub fn condemn(&self, file: FileId, error: SourceError) -> SourceError {
        let mut first = false;
        let kept = self.file(file).poison.get_or_init(|| {
            first = true;
            Poison { error, since: SystemTime::now() }
        });
        if first {
            self.poisoned.fetch_add(1, Ordering::Relaxed);
            tracing::error!("{}; every read that needs this file fails from now on", kept.error);
        }
        kept.error.clone()
    }

    /// Number of files found poisoned so far.
    pub fn poisoned(&self) -> u64 {
        self.poisoned.load(Ordering::Relaxed)
    }

    /// What poisoned a file, if it is poisoned. Does not look at it.
    pub fn poison(&self, file: FileId) -> Option<Poison> {
        self.file(file).poison.get().cloned()
    }

    /// Whether a file was found poisoned. Does not look at it.
    pub fn is_poisoned(&self, file: FileId) -> bool {
        self.file(file).poison.get().is_some()
    }

    /// How long a file may give no answer before it stalls.
    pub fn stall_limit(&self) -> Duration {
        self.fetches.limit()
    }

    /// Looks which files stall now, and returns all fetches that have got on with nothing since this was last called, stalled
    /// or not. To be called several times within [`Health::stall_limit`]; the first sight of a stall and its end are logged.
    pub fn note_stalls(&self) -> Vec<Waiting> {
        let mut found: Vec<(FileId, Stall)> = Vec::new();
        let waiting = self.fetches.waiting(Duration::ZERO);
        for Waiting { target, since, quiet, .. } in &waiting {
            if *quiet < self.fetches.limit() {
                continue;
            }
            let Some(id) = target.file().filter(|id| found.iter().all(|(known, _)| known != id)) else { continue };
            let file = self.file(id).path.clone();
            found.push((id, Stall { file, what: target.to_string(), since: *since }));
        }
        let mut known = self.stalls.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, stall) in &found {
            if !self.file(*id).stalled.swap(true, Ordering::Relaxed) {
                let (file, seconds) = (stall.file.display(), stall.since.elapsed().as_secs_f32());
                tracing::error!(
                    "{file}: stalled: {} got no answer for {seconds:.1} s; reads fail until it comes",
                    stall.what
                );
            }
        }
        for (id, stall) in known.iter().filter(|(id, _)| found.iter().all(|(still, _)| still != id)) {
            self.file(*id).stalled.store(false, Ordering::Relaxed);
            let seconds = stall.since.elapsed().as_secs_f32();
            tracing::warn!("{}: answers again after {seconds:.1} s", stall.file.display());
        }
        *known = found;
        waiting
    }

    /// The files that stalled when [`Health::note_stalls`] last looked.
    pub fn stalls(&self) -> Vec<Stall> {
        let stalls = self.stalls.lock().unwrap_or_else(PoisonError::into_inner);
        stalls.iter().map(|(_, stall)| stall.clone()).collect()
    }

    /// Whether a file is among them.
    pub fn is_stalled(&self, file: FileId) -> bool {
        self.file(file).stalled.load(Ordering::Relaxed)
    }

    /// Fetches that got on with nothing for `least`, which is to be asked several times within it.
    pub fn waiting(&self, least: Duration) -> Vec<Waiting> {
        self.fetches.waiting(least)
    }
}
