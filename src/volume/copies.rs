//! Copies of tensor files that the kernel reads by itself.
//!
//! A file that was opened is made once more, whole, into an unnamed file of a directory. Whoever opens it afterwards is sent to
//! the copy, which the kernel reads without asking: at the speed of any local file, memory maps included. Copies are made in
//! the background, one at a time, once the file is closed, since the kernel does not change how an open file is read. They
//! are never found again by another process: they have no name, and their space is free once this one ends.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

use nix::sys::statvfs::statvfs;

use super::Ino;
use crate::{
    read::{Engine, OpenFile, ReadError, counters::add},
    source::Served,
};

/// Bytes made at a time.
const STEP_BYTES: usize = 4 << 20;
/// The part of a file system that copies leave free: one in so many bytes.
const KEPT_FREE: u64 = 20;

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
enum CopyError {
    #[error("{} has {free_bytes} bytes free, of which a 20th of its size is kept; expected {needed_bytes}", dir.display())]
    Full { dir: PathBuf, free_bytes: u64, needed_bytes: u64 },
    #[error("{}: {error}", dir.display())]
    Io { dir: PathBuf, error: io::Error },
    #[error("{0}")]
    Read(ReadError),
    #[error("the file system ends")]
    Ended,
}

#[derive(Debug)]
enum Copy {
    Wanted,
    Made(Arc<File>),
    /// It was tried in vain, and is not tried again.
    Failed,
}

#[derive(Debug, Default)]
struct Shared {
    copies: Mutex<HashMap<Ino, Copy>>,
    ended: AtomicBool,
}

/// The copies of a volume's files.
#[derive(Debug)]
pub(super) struct Copies {
    shared: Arc<Shared>,
    wanted: mpsc::Sender<(Ino, Arc<OpenFile>)>,
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
    }
}

impl Copies {
    /// Copies in the directory `dir`, and the thread that makes them.
    ///
    /// # Errors
    /// The directory cannot hold unnamed files, or there is no thread.
    pub(super) fn new(dir: PathBuf, engine: Arc<Engine>) -> io::Result<Self> {
        unnamed(&dir)?;
        let shared = Arc::new(Shared::default());
        let (wanted, queue) = mpsc::channel::<(Ino, Arc<OpenFile>)>();
        let worker = Arc::clone(&shared);
        thread::Builder::new().name("ckfs-copy".into()).spawn(move || {
            for (ino, file) in queue {
                let copy = match worker.make(&dir, &engine, &file) {
                    Ok(copy) => Copy::Made(Arc::new(copy)),
                    Err(CopyError::Ended) => return,
                    Err(error) => {
                        tracing::warn!(file = file.name(), "not copied: {error}");
                        Copy::Failed
                    }
                };
                let made_bytes = if let Copy::Made(_) = &copy { file.len_bytes() } else { 0 };
                let made = u64::from(matches!(copy, Copy::Made(_)));
                worker.copies.lock().unwrap_or_else(PoisonError::into_inner).insert(ino, copy);
                // Whoever sees it counted finds it there.
                add(&engine.counters().copied_files, made);
                add(&engine.counters().copied_bytes, made_bytes);
            }
        })?;
        Ok(Self { shared, wanted })
    }

    /// The copy of a file, if there is one.
    pub(super) fn get(&self, ino: Ino) -> Option<Arc<File>> {
        match self.shared.copies.lock().unwrap_or_else(PoisonError::into_inner).get(&ino)? {
            Copy::Made(copy) => Some(Arc::clone(copy)),
            Copy::Wanted | Copy::Failed => None,
        }
    }

    /// Asks for a copy of a file, if it was not asked for before.
    pub(super) fn want(&self, ino: Ino, file: &Arc<OpenFile>) {
        let mut copies = self.shared.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.entry(ino).or_insert_with(|| {
            // Nobody receives once the thread has ended; then there are no copies.
            let _ = self.wanted.send((ino, Arc::clone(file)));
            Copy::Wanted
        });
    }
}

/// A file without a name in `dir`.
fn unnamed(dir: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(dir)
}

impl Shared {
    fn make(&self, dir: &Path, engine: &Arc<Engine>, file: &Arc<OpenFile>) -> Result<File, CopyError> {
        let failed = |error: io::Error| CopyError::Io { dir: dir.to_owned(), error };
        let len_bytes = file.len_bytes();
        let space = statvfs(dir).map_err(|errno| failed(errno.into()))?;
        let (free_bytes, all_bytes) =
            (space.blocks_available() * space.fragment_size(), space.blocks() * space.fragment_size());
        if free_bytes.saturating_sub(all_bytes / KEPT_FREE) < len_bytes {
            return Err(CopyError::Full { dir: dir.to_owned(), free_bytes, needed_bytes: len_bytes });
        }
        let copy = unnamed(dir).map_err(failed)?;
        for start in (0..len_bytes).step_by(STEP_BYTES) {
            if self.ended.load(Ordering::Relaxed) {
                return Err(CopyError::Ended);
            }
            let mut written = Ok(());
            let write = &mut |bytes: Served<'_>| written = bytes.write_all_at(&copy, start);
            engine.read(file, start, STEP_BYTES, write).map_err(CopyError::Read)?;
            written.map_err(failed)?;
        }
        engine.check(file).map_err(CopyError::Read)?;
        let found = copy.metadata().map_err(failed)?.len();
        if found != len_bytes {
            return Err(failed(io::Error::other(format!("expected {len_bytes} bytes, found {found}"))));
        }
        Ok(copy)
    }
}
