//! Compares blobs of the Hub's cache with the digest that they are named by.
//!
//! A blob is an ordinary file: a full disk, a broken download or an editor may have left other bytes in it. Small ones are compared
//! when they are opened, before anything is made of them. Large ones take a second per GB or more. A command compares those that it
//! has read before it ends. A mount compares them one after the other in a thread of low priority, once its readers pause; but not
//! those of a network file system, which every host of a cluster would otherwise read as a whole.
//!
//! Those that were found right are noted in a record of the user's ([`ComparedFiles`]): each is read once until it changes.

use std::{
    io,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::SystemTime,
};

use parking_lot::Mutex;

use super::pinned::Pinned;
use crate::{
    ByteSpan, ComparedFiles, FileId, Health, SourceError,
    compared::SETTLED,
    digest::{Compared, Digester, KnownDigest},
    stall::WaitRegistry,
};

/// Bytes read at a time.
const STEP_BYTES: usize = 1 << 20;
/// Bytes of files that are compared when they are opened, smallest first.
const OPENED_BYTES_MAX: u64 = 128 << 20;
/// Calls of [`Comparisons::step`] without a reader between them, after which the next file is compared.
const QUIET_STEPS: u32 = 2;
/// Calls after which it is compared although readers come.
const STEPS_MAX: u32 = 60;

/// What the error says and advises.
const ADVICE: &str = "the cache names the file by its digest, so that it is damaged or was edited; delete the blob and load it again \
                      (`hf download`), or copy the snapshot to a directory of your own to keep what was edited";

/// A blob that is named by its digest.
struct Blob {
    pinned: Arc<Pinned>,
    digest: KnownDigest,
    health: Arc<Health>,
    file: FileId,
    record: Option<Arc<ComparedFiles>>,
    is_used: AtomicBool,
    /// Whether the bytes have the digest. Held while they are compared.
    is_right: Mutex<bool>,
}

/// The blobs among files.
pub(super) struct Comparisons {
    /// For each file; `None` where no digest is known.
    blobs: Arc<[Option<Blob>]>,
    /// Whether a reader came since the last step.
    is_busy: AtomicBool,
    quiet_steps: AtomicU32,
    steps: AtomicU32,
    is_running: Arc<AtomicBool>,
}

impl Blob {
    /// Compares the bytes, unless they were. `advance` is called after each step.
    fn compare(&self, advance: &dyn Fn()) -> Result<(), SourceError> {
        let mut is_right = self.is_right.lock();
        if *is_right {
            return Ok(());
        }
        let record = self.record.as_ref().filter(|_| !self.pinned.is_remote);
        let line = || format!("{} {}", self.digest.hex(), self.pinned.identity.line());
        if record.is_some_and(|record| record.holds(&line())) {
            *is_right = true;
            return Ok(());
        }
        let begun = SystemTime::now();
        let found = self.found(advance).map_err(|error| self.pinned.io("read its bytes to compare them", error))?;
        if found == self.digest.hex() {
            *is_right = true;
            // A later change has another time, if the clock has moved on.
            let is_settled = self.pinned.identity.is_older_than(begun, SETTLED);
            if let Some(record) = record.filter(|_| is_settled)
                && matches!(self.pinned.difference(nix::sys::stat::fstat(&self.pinned.file)), Ok(None))
            {
                record.note(line());
            }
            return Ok(());
        }
        // A file that changed meanwhile has an error of its own.
        if let Some(changed) = self.pinned.difference(nix::sys::stat::fstat(&self.pinned.file))? {
            return Err(self.health.condemn(self.file, changed));
        }
        let path = Arc::clone(&self.pinned.pin.path);
        Err(self.health.condemn(self.file, SourceError::corrupt(path, &self.digest, &found, ADVICE)))
    }

    /// The digest of the bytes.
    fn found(&self, advance: &dyn Fn()) -> io::Result<String> {
        let all = ByteSpan::new(0, self.pinned.pin.len_bytes).expect("a span may begin at 0");
        let mut digester = Digester::new(&self.digest, all.len());
        let read = all.for_each_piece(&self.pinned.file, STEP_BYTES, |bytes| {
            digester.update(bytes);
            advance();
            ControlFlow::Continue(())
        });
        read.map(|()| digester.finish())
    }

    fn save(&self) {
        if let Some(record) = &self.record {
            record.save();
        }
    }

    /// Whether it was read and not yet compared. False while another thread compares it.
    fn is_due(&self) -> bool {
        self.is_used.load(Ordering::Relaxed) && self.is_right.try_lock().is_some_and(|is_right| !*is_right)
    }
}

impl Comparisons {
    /// The blobs among files.
    pub(super) fn new(files: &[Arc<Pinned>], health: &Arc<Health>, record: Option<&Arc<ComparedFiles>>) -> Self {
        let blob = |(place, pinned): (usize, &Arc<Pinned>)| {
            let digest = pinned.digest.clone()?;
            let (is_used, is_right) = (AtomicBool::new(false), Mutex::new(false));
            let (pinned, health, file) = (Arc::clone(pinned), Arc::clone(health), FileId::at(place));
            Some(Blob { pinned, digest, health, file, record: record.map(Arc::clone), is_used, is_right })
        };
        Self {
            blobs: files.iter().enumerate().map(blob).collect(),
            is_busy: AtomicBool::new(false),
            quiet_steps: AtomicU32::new(0),
            steps: AtomicU32::new(0),
            is_running: Arc::default(),
        }
    }

    /// Compares the small blobs.
    ///
    /// # Errors
    /// The first that has another digest.
    pub(super) fn compare_small(&self, fetches: &WaitRegistry) -> Result<(), SourceError> {
        let mut blobs: Vec<&Blob> = self.blobs.iter().flatten().collect();
        blobs.sort_by_key(|blob| blob.pinned.pin.len_bytes);
        let mut bytes = 0_u64;
        for blob in blobs {
            bytes = bytes.saturating_add(blob.pinned.pin.len_bytes);
            if bytes > OPENED_BYTES_MAX {
                break;
            }
            let reading = fetches.begin_path(&blob.pinned.pin.path, "read");
            blob.compare(&|| reading.advance())?;
        }
        if let Some(blob) = self.blobs.iter().flatten().next() {
            blob.save();
        }
        Ok(())
    }

    /// Notes that a reader gets bytes of a file.
    pub(super) fn note_used(&self, place: usize) {
        if let Some(blob) = &self.blobs[place] {
            // Stores by every reader would move the cache lines between processors.
            if !blob.is_used.load(Ordering::Relaxed) {
                blob.is_used.store(true, Ordering::Relaxed);
            }
            if !self.is_busy.load(Ordering::Relaxed) {
                self.is_busy.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether a reader got bytes of a file. True without a known digest.
    pub(super) fn is_used(&self, place: usize) -> bool {
        self.blobs[place].as_ref().is_none_or(|blob| blob.is_used.load(Ordering::Relaxed))
    }

    /// Compares a file, and waits for the result. `advance` is called after each step.
    ///
    /// # Errors
    /// It has another digest, or cannot be read.
    pub(super) fn compare(&self, place: usize, advance: &dyn Fn()) -> Result<Compared, SourceError> {
        let Some(blob) = &self.blobs[place] else { return Ok(Compared::Unknown) };
        blob.compare(advance)?;
        blob.save();
        Ok(Compared::Right)
    }

    /// Notes that a caller has compared a file and found it right.
    pub(super) fn note_right(&self, place: usize) {
        if let Some(blob) = &self.blobs[place] {
            *blob.is_right.lock() = true;
        }
    }

    /// Compares blobs that were read, in its own thread, once readers pause. To be called every few seconds.
    pub(super) fn step(&self) {
        let was_busy = self.is_busy.swap(false, Ordering::Relaxed);
        let can_compare = |blob: &Blob| blob.is_due() && !blob.pinned.is_remote;
        if self.is_running.load(Ordering::Acquire) || !self.blobs.iter().flatten().any(can_compare) {
            return;
        }
        let quiet = if was_busy { 0 } else { self.quiet_steps.load(Ordering::Relaxed) + 1 };
        self.quiet_steps.store(quiet, Ordering::Relaxed);
        if self.steps.fetch_add(1, Ordering::Relaxed) < STEPS_MAX && quiet < QUIET_STEPS {
            return;
        }
        self.steps.store(0, Ordering::Relaxed);
        self.is_running.store(true, Ordering::Release);
        let (blobs, is_running) = (Arc::clone(&self.blobs), Arc::clone(&self.is_running));
        let work = move || {
            // Of this thread only.
            let _ = rustix::process::nice(19);
            for blob in blobs.iter().flatten().filter(|blob| can_compare(blob)) {
                if let Err(error) = blob.compare(&|| ()) {
                    // A file with a wrong digest was reported where that was found.
                    tracing::debug!("{error}");
                }
                blob.save();
            }
            is_running.store(false, Ordering::Release);
        };
        if ckfs_sync::spawn("ckfs-compare", work).is_err() {
            self.is_running.store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        path::Path,
        thread,
        time::Duration,
    };

    use super::{super::LocalFiles, *};
    use crate::{FoundFile, SourceIo};

    const RIGHT: &[u8] = b"hello";
    /// printf hello | sha256sum
    const NAME: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    fn blob(directory: &Path, bytes: &[u8]) -> std::path::PathBuf {
        let blobs = directory.join("blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(NAME), bytes).unwrap();
        blobs.join(NAME)
    }

    fn pin(path: &Path, record: &Arc<ComparedFiles>) -> Result<LocalFiles, SourceError> {
        let opened = FoundFile::named(path).unwrap().open(None).unwrap();
        LocalFiles::pin(vec![opened], SourceIo::Auto, Arc::default(), Some(record))
    }

    #[test]
    fn a_blob_is_noted_once_its_times_tell_of_every_change() {
        let directory = tempfile::tempdir().unwrap();
        let (state, path) = (directory.path().join("state"), blob(directory.path(), RIGHT));
        let record = || Arc::new(ComparedFiles::open(&state));
        let line = |files: &LocalFiles| format!("{NAME} {}", files.files[0].identity.line());
        let files = pin(&path, &record()).unwrap();
        assert!(!record().holds(&line(&files)), "it has only just changed");
        thread::sleep(SETTLED + Duration::from_millis(100));
        pin(&path, &record()).unwrap();
        assert!(record().holds(&line(&files)));
        // As many bytes, and the time of the content as before: the time of the status is another.
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        fs::write(&path, "hellO").unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        let error = pin(&path, &record()).err().unwrap().to_string();
        assert!(error.contains(NAME) && error.contains("damaged"), "{error}");
    }

    #[test]
    fn what_the_record_knows_is_not_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let (state, path) = (directory.path().join("state"), blob(directory.path(), b"other"));
        let record = Arc::new(ComparedFiles::open(&state));
        assert!(matches!(pin(&path, &record), Err(SourceError::Lost { .. })));
        let pinned = Pinned::new(FoundFile::named(&path).unwrap().open(None).unwrap(), SourceIo::Auto).unwrap();
        record.note(format!("{NAME} {}", pinned.identity.line()));
        pin(&path, &record).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(SystemTime::now()).unwrap();
        assert!(matches!(pin(&path, &record), Err(SourceError::Lost { .. })), "a change ends it");
    }
}
