//! Materialized files in a directory: unnamed, so that no process finds them, and their space is freed when this process ends.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
};

use ckfs_read::{Engine, MaterializeError, MaterializeTarget, Materializing, PreparedFile};
use nix::sys::statvfs::statvfs;

use super::{
    super::Ino,
    entry::{CompletionGuard, FileEntry, MaterializedState, Partial},
};

/// One part in this many of a file system stays free.
const KEPT_FREE: u64 = 20;

/// A file to materialize.
pub(super) struct ClosedFile {
    pub(super) ino: Ino,
    pub(super) entry: Arc<FileEntry>,
    pub(super) file: Arc<PreparedFile>,
}

/// What is called for a complete file.
pub(super) type OnDisk = Box<dyn Fn(Ino) + Send>;

/// A directory for files.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    directory: PathBuf,
}

impl Disk {
    /// Files in a directory.
    ///
    /// # Errors
    /// It cannot hold unnamed files.
    pub(super) fn new(directory: PathBuf) -> io::Result<Self> {
        let disk = Self { directory };
        disk.unnamed()?;
        Ok(disk)
    }

    /// Starts the thread that materializes the files that it receives, one at a time, and calls `on_disk` for each that is complete.
    /// It ends when all senders are gone.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(super) fn start(self, engine: Arc<Engine>, on_disk: OnDisk) -> io::Result<mpsc::Sender<ClosedFile>> {
        let (closed, queue) = mpsc::channel::<ClosedFile>();
        thread::Builder::new().name("ckfs-to-disk".to_owned()).spawn(move || {
            for ClosedFile { ino, entry, file } in queue {
                self.make(&engine, &entry, &file);
                if entry.complete().is_some() {
                    on_disk(ino);
                }
            }
        })?;
        Ok(closed)
    }

    fn make(&self, engine: &Arc<Engine>, entry: &Arc<FileEntry>, file: &Arc<PreparedFile>) {
        let guard = CompletionGuard::new(entry, file);
        let begun = self.target(file.len_bytes()).and_then(|target| {
            let target = Arc::new(target);
            let pieces = Arc::new(Materializing::new(engine, file, MaterializeTarget::Disk(Arc::clone(&target)))?);
            let partial = Partial::new(&pieces, target, None);
            let mut state = entry.state.lock();
            match &*state {
                MaterializedState::Absent => *state = MaterializedState::Partial(partial),
                // The mount has ended.
                MaterializedState::Partial(_) | MaterializedState::Complete(_) | MaterializedState::Failed => {
                    return Ok(None);
                }
            }
            Ok(Some(pieces))
        });
        match begun {
            Ok(Some(pieces)) => guard.end(&pieces.make_here()),
            Ok(None) => guard.end(&Ok(())),
            Err(error) => {
                *entry.state.lock() = MaterializedState::Failed;
                tracing::warn!(file = file.name(), "not materialized: {error}");
                guard.end(&Err(MaterializeError::Room(error)));
            }
        }
    }

    /// An empty file, if there is room for one of `len_bytes` bytes.
    fn target(&self, len_bytes: u64) -> io::Result<File> {
        let failed = |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", self.directory.display()));
        let space = statvfs(&self.directory).map_err(|errno| failed(&errno))?;
        let (free_bytes, all_bytes) =
            (space.blocks_available() * space.fragment_size(), space.blocks() * space.fragment_size());
        if free_bytes.saturating_sub(all_bytes / KEPT_FREE) < len_bytes {
            let kept = format!("{free_bytes} bytes are free, of which a {KEPT_FREE}th of the file system is kept");
            return Err(failed(&format!("{kept}; expected {len_bytes}")));
        }
        self.unnamed().map_err(|error| failed(&error))
    }

    /// An empty file without a name.
    pub(super) fn unnamed(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(&self.directory)
    }
}
