//! A run in a directory of this machine.

use std::{
    fs,
    io::{self, ErrorKind, Read as _},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use ckfs_source::{SourceError, WaitRegistry};

use super::step_tree::{Measure, SMALL_BYTES_MAX, StepTree};
use crate::{
    OpenOptions,
    tree::{TreeEntry, below, entries_in},
};

/// Greatest depth of a step's directories.
const DEPTH_MAX: usize = 16;

/// A directory of this machine.
pub(super) struct LocalSteps {
    root: PathBuf,
    fetches: Arc<WaitRegistry>,
}

impl LocalSteps {
    pub(super) fn new(root: &str, options: &OpenOptions) -> Self {
        Self { root: PathBuf::from(root), fetches: Arc::clone(&options.fetches) }
    }

    fn at(&self, path: &str) -> PathBuf {
        if path.is_empty() { self.root.clone() } else { self.root.join(path) }
    }

    fn walk(&self, directory: &str, depth: usize, found: &mut Measure) -> Result<(), SourceError> {
        let place = self.at(directory);
        let looking = self.fetches.begin_path(&place, "list");
        let own = fs::symlink_metadata(&place).map_err(|error| SourceError::io(&*place, "stat", error))?;
        add(found, directory, &own, false);
        for entry in self.list(directory)? {
            looking.advance();
            let path = below(directory, &entry.name);
            if entry.is_directory && depth < DEPTH_MAX {
                self.walk(&path, depth + 1, found)?;
            } else if !entry.is_directory {
                match fs::symlink_metadata(self.at(&path)) {
                    Ok(meta) => add(found, &path, &meta, true),
                    // It is being deleted.
                    Err(error) if is_absent(&error) => found.add(&path, None, SystemTime::UNIX_EPOCH, &[]),
                    Err(error) => return Err(SourceError::io(self.at(&path), "stat", error)),
                }
            }
        }
        Ok(())
    }
}

/// Adds a file or a directory to a measure.
fn add(found: &mut Measure, path: &str, meta: &fs::Metadata, is_file: bool) {
    let seconds = Duration::from_secs(u64::try_from(meta.ctime()).unwrap_or(0));
    let nanoseconds = Duration::from_nanos(u64::try_from(meta.ctime_nsec()).unwrap_or(0));
    let changed = SystemTime::UNIX_EPOCH + seconds + nanoseconds;
    if is_file {
        // Not the time of the last change of its state: a hard link to it changes that, and nothing else.
        let state = [meta.ino(), meta.mtime().cast_unsigned(), meta.mtime_nsec().cast_unsigned()];
        found.add(path, Some(meta.len()), changed, &state);
    } else {
        found.add(path, None, changed, &[meta.ino()]);
    }
}

/// A trainer may delete what was just listed.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

impl StepTree for LocalSteps {
    fn own_name(&self) -> String {
        let _looking = self.fetches.begin_path(&self.root, "look");
        let real = fs::canonicalize(&self.root).unwrap_or_else(|_| self.root.clone());
        real.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn list(&self, directory: &str) -> Result<Vec<TreeEntry>, SourceError> {
        let place = self.at(directory);
        let looking = self.fetches.begin_path(&place, "list");
        match entries_in(&place, &looking) {
            Err(error) if !directory.is_empty() && is_absent(&error) => Ok(Vec::new()),
            entries => entries.map_err(|error| SourceError::io(&*place, "list", error)),
        }
    }

    fn len_bytes(&self, path: &str) -> Result<Option<u64>, SourceError> {
        let place = self.at(path);
        let _looking = self.fetches.begin_path(&place, "stat");
        match fs::metadata(&place) {
            Ok(found) => Ok(found.is_file().then_some(found.len())),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(SourceError::io(&*place, "stat", error)),
        }
    }

    fn small(&self, path: &str) -> Result<Option<Vec<u8>>, SourceError> {
        let place = self.at(path);
        if self.len_bytes(path)?.is_none_or(|len| len > SMALL_BYTES_MAX) {
            return Ok(None);
        }
        let _reading = self.fetches.begin_path(&place, "read");
        let mut bytes = Vec::new();
        let read = fs::File::open(&place).and_then(|file| file.take(SMALL_BYTES_MAX).read_to_end(&mut bytes));
        match read {
            Ok(_) => Ok(Some(bytes)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(SourceError::io(&*place, "read", error)),
        }
    }

    fn measure(&self, directory: &str) -> Result<Measure, SourceError> {
        let mut found = Measure::begin();
        self.walk(directory, 0, &mut found)?;
        Ok(found.end())
    }

    fn needs_commit_file(&self) -> bool {
        false
    }
}
