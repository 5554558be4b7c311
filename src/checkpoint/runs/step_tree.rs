//! What is asked of a run's directory, wherever it is.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::SystemTime,
};

use ckfs_source::SourceError;

use crate::tree::TreeEntry;

/// What the files of a step come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measure {
    /// Their bytes.
    pub bytes: u64,
    /// How many there are.
    pub files: u64,
    /// When one of them, or a directory of them, changed last, by the clock of the storage.
    pub changed: SystemTime,
    /// A digest of names, lengths, times and identities: two that are equal are of the same files in the same state.
    pub stamp: u64,
    /// The same of each file and directory: a digest of its path, and one of its state. Sorted.
    parts: Arc<Vec<(u64, u64)>>,
}

impl Measure {
    /// Nothing yet.
    pub(super) fn begin() -> Self {
        Self { bytes: 0, files: 0, changed: SystemTime::UNIX_EPOCH, stamp: 0, parts: Arc::default() }
    }

    /// Whether all files of an earlier measure are there as they were. There may be more.
    pub fn contains(&self, earlier: &Self) -> bool {
        earlier.parts.iter().all(|part| self.parts.binary_search(part).is_ok())
    }

    /// A measure of one file in this state, for tests.
    pub fn of_state(state: u64) -> Self {
        let mut measure = Self::begin();
        measure.add("file", Some(1), SystemTime::UNIX_EPOCH, &[state]);
        measure.end()
    }

    /// Adds a file, or a directory, which has no length.
    pub(super) fn add(&mut self, path: &str, len_bytes: Option<u64>, changed: SystemTime, state: &[u64]) {
        self.changed = self.changed.max(changed);
        self.bytes = self.bytes.saturating_add(len_bytes.unwrap_or(0));
        self.files += u64::from(len_bytes.is_some());
        Arc::make_mut(&mut self.parts).push((digest(path), digest((len_bytes, state))));
    }

    /// This measure, of all that was added.
    pub(super) fn end(mut self) -> Self {
        Arc::make_mut(&mut self.parts).sort_unstable();
        Self { stamp: digest(&self.parts), ..self }
    }
}

/// A run's directory. Paths are relative to it; "" is the directory itself.
pub(super) trait StepTree {
    /// The name of the directory itself.
    fn own_name(&self) -> String;

    /// The entries of a directory, sorted by name; none if it is not there.
    fn list(&self, directory: &str) -> Result<Vec<TreeEntry>, SourceError>;

    /// Length of a file in bytes; `None` if it is not there.
    fn len_bytes(&self, path: &str) -> Result<Option<u64>, SourceError>;

    /// All bytes of a small file; `None` if it is not there, or longer than a few megabytes.
    fn small(&self, path: &str) -> Result<Option<Vec<u8>>, SourceError>;

    /// What the files below a directory come to.
    fn measure(&self, directory: &str) -> Result<Measure, SourceError>;

    /// Whether files appear one at a time in a directory that has its final name from the start.
    fn needs_commit_file(&self) -> bool;
}

/// Longest small file, in bytes.
pub(super) const SMALL_BYTES_MAX: u64 = 4 << 20;

/// A digest, which is the same wherever this process takes it.
pub(super) fn digest(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
