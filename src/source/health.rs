//! The health of a source's files: whether they can be trusted, and whether their storage answers. Every source uses it.
//!
//! A file that differs from the pinned one is *poisoned* for good. A file whose storage does not answer *stalls* ([`super::stall`])
//! until the requested bytes come. A source notes both here, and the layers above check only here.

use std::{
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;

use super::{FileId, Poison, SourceError, Stall, Waiting, stall::WaitRegistry};

/// The state of each file of a source.
pub struct Health {
    files: Vec<FileHealth>,
    poisoned: AtomicU64,
    on_poisoned: Mutex<Vec<OnPoisoned>>,
    /// The waits for storage.
    pub fetches: Arc<WaitRegistry>,
    stalls: Mutex<Vec<(FileId, Stall)>>,
    /// Files after those of `files`, each with the file whose bytes it shows in another form.
    others: OnceLock<Vec<FileId>>,
}

/// Called after a file was poisoned.
type OnPoisoned = Box<dyn Fn() + Send + Sync>;

#[derive(Debug)]
struct FileHealth {
    path: Arc<Path>,
    poison: OnceLock<Poison>,
    /// Whether its storage does not answer.
    stalled: AtomicBool,
}

impl Health {
    /// The health of files that are all good; a file's id is its position in `paths`. `fetches` notes the waits for storage.
    pub fn new(paths: impl Iterator<Item = Arc<Path>>, fetches: Arc<WaitRegistry>) -> Self {
        let file = |path| FileHealth { path, poison: OnceLock::new(), stalled: AtomicBool::new(false) };
        let files: Vec<FileHealth> = paths.map(file).collect();
        fetches.name_files(files.iter().map(|file| file.path.clone()));
        let (poisoned, on_poisoned, stalls) = (AtomicU64::new(0), Mutex::default(), Mutex::default());
        Self { files, poisoned, on_poisoned, fetches, stalls, others: OnceLock::new() }
    }

    /// Adds files that show the bytes of others in another form. Their ids follow; each is as healthy as the file that is given
    /// for it.
    ///
    /// # Panics
    /// If this was called before.
    pub fn name_others(&self, stored_in: Vec<FileId>) {
        assert!(self.others.set(stored_in).is_ok(), "files in another form are added once");
    }

    /// The file whose state counts for `file`: itself, or the one that it shows in another form.
    fn origin(&self, file: FileId) -> FileId {
        let other = file.index().checked_sub(self.files.len());
        let named = other.and_then(|other| self.others.get()?.get(other));
        named.copied().unwrap_or(file)
    }

    fn file(&self, file: FileId) -> &FileHealth {
        &self.files[self.origin(file).index()]
    }

    /// Has `callback` called after each file that is found poisoned. It must not wait.
    pub fn on_poisoned(&self, callback: OnPoisoned) {
        self.on_poisoned.lock().push(callback);
    }

    /// Checks that a file may be used.
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
        let stalls = self.stalls.lock();
        let origin = self.origin(file);
        let what = stalls.iter().find(|(id, _)| *id == origin).map(|(_, stall)| stall.what.clone());
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
            self.on_poisoned.lock().iter().for_each(|callback| callback());
        }
        kept.error.clone()
    }

    /// Number of files found poisoned so far.
    pub fn poisoned(&self) -> u64 {
        self.poisoned.load(Ordering::Relaxed)
    }

    /// The error that poisoned a file, if it is poisoned. Does not check the file.
    pub fn poison(&self, file: FileId) -> Option<Poison> {
        self.file(file).poison.get().cloned()
    }

    /// Whether a file was found poisoned. Does not check the file.
    pub fn is_poisoned(&self, file: FileId) -> bool {
        self.file(file).poison.get().is_some()
    }

    /// Updates which files stall. Returns those fetches, and all whose thread has not run since the last call. To be called several
    /// times within the limit of a stall. The start of a stall and its end are logged.
    pub fn note_stalls(&self) -> Vec<Waiting> {
        let mut found: Vec<(FileId, Stall)> = Vec::new();
        let waiting = self.fetches.waiting(Duration::ZERO);
        for Waiting { target, since, silent, .. } in &waiting {
            if *silent < self.fetches.limit() {
                continue;
            }
            let Some(id) = target.file().filter(|id| found.iter().all(|(known, _)| known != id)) else { continue };
            let file = self.file(id).path.clone();
            found.push((id, Stall { file, what: target.to_string(), since: *since }));
        }
        let mut known = self.stalls.lock();
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

    /// The files that stalled at the last call of [`Health::note_stalls`].
    pub fn stalls(&self) -> Vec<Stall> {
        let stalls = self.stalls.lock();
        stalls.iter().map(|(_, stall)| stall.clone()).collect()
    }

    /// Whether a file is among them.
    pub fn is_stalled(&self, file: FileId) -> bool {
        self.file(file).stalled.load(Ordering::Relaxed)
    }
}
