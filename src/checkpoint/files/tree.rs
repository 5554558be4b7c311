//! The files of a checkpoint that is a tree of directories, before they are pinned.
//!
//! A Hugging Face repository is a few files, which are all listed and opened. A checkpoint of a trainer may have 100 000 of them,
//! most of which hold optimizer state. So directories are listed when they are needed, descriptions are read and closed, and
//! only the files that the checkpoint needs for reads stay open: they are pinned at the end.
//!
//! Dialects read through [`FileTree`] only, so that they work for every place that has directories and spans of bytes.

use std::{
    collections::HashMap,
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs_source::{
    ByteSpan, Opened, RootDir, SourceError, WaitRegistry, check_open_file_limit, permission::DirectoryRules,
    stall::WaitGuard,
};
use ckfs_tensor::to_usize;
use parking_lot::Mutex;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

/// Longest description that is read at once, in bytes.
pub(crate) const DESCRIPTION_BYTES_MAX: u64 = 256 << 20;

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TreeEntry {
    pub(crate) name: String,
    /// A directory, else a file. A symbolic link to a directory is not entered, and is neither.
    pub(crate) is_directory: bool,
}

/// A path below another.
pub(crate) fn below(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

/// Whether a file of this name is among the entries.
pub(crate) fn has(entries: &[TreeEntry], name: &str) -> bool {
    entries.iter().any(|entry| entry.name == name && !entry.is_directory)
}

/// The names of the directories among the entries.
pub(crate) fn directories(entries: &[TreeEntry]) -> impl Iterator<Item = &str> {
    entries.iter().filter(|entry| entry.is_directory).map(|entry| entry.name.as_str())
}

/// The names of the files among the entries.
pub(crate) fn file_names(entries: &[TreeEntry]) -> impl Iterator<Item = &str> {
    entries.iter().filter(|entry| !entry.is_directory).map(|entry| entry.name.as_str())
}

/// The entries of a directory that has these paths inside, in any order.
pub(crate) fn entries_of<'a>(inside: impl Iterator<Item = &'a str>) -> Vec<TreeEntry> {
    let mut entries: Vec<TreeEntry> = Vec::new();
    for path in inside {
        let (name, is_directory) = path.split_once('/').map_or((path, false), |(name, _)| (name, true));
        if !name.is_empty() && entries.last().is_none_or(|last| last.name != name) {
            entries.push(TreeEntry { name: name.to_owned(), is_directory });
        }
    }
    entries.sort_by(|left, right| left.name.cmp(&right.name));
    entries.dedup_by(|left, right| left.name == right.name);
    entries
}

/// The entries of a directory of this machine, sorted by name. What was deleted meanwhile is none, and no format or writer uses a name
/// that is not UTF-8.
pub(crate) fn entries_in(directory: &Path, listing: &WaitGuard<'_>) -> io::Result<Vec<TreeEntry>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(directory)? {
        listing.advance();
        let entry = entry?;
        match (entry.file_name().into_string(), entry.file_type()) {
            (Ok(name), Ok(kind)) => entries.push(TreeEntry { name, is_directory: kind.is_dir() }),
            (Ok(_), Err(error)) if error.kind() != ErrorKind::NotFound => return Err(error),
            (Ok(_) | Err(_), _) => {}
        }
    }
    entries.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(entries)
}

/// The files of a checkpoint. Paths are relative to its directory, with `/` between names; "" is the directory.
pub(crate) trait FileTree: Sync {
    /// The place of a path, for messages.
    fn shown(&self, path: &str) -> Arc<Path>;

    /// The error of a path with which this was not done.
    fn failed(&self, path: &str, action: &str, error: io::Error) -> SourceError {
        SourceError::io(self.shown(path), action, error)
    }

    /// The files and directories in a directory, sorted by name. Empty if there is no such directory.
    fn list(&self, directory: &str) -> Result<Vec<TreeEntry>, SourceError>;

    /// Length of a file in bytes; `None` if there is no such file.
    fn len_bytes(&self, path: &str) -> Result<Option<u64>, SourceError>;

    /// Fills `target` with the bytes of a file from `start` on.
    fn read(&self, path: &str, start: u64, target: &mut [u8]) -> Result<(), SourceError>;

    /// All bytes of a description, which is at most [`DESCRIPTION_BYTES_MAX`] long; `None` if there is no such file.
    fn description(&self, path: &str) -> Result<Option<Vec<u8>>, SourceError>;

    /// Whether directories appear one file at a time, so that only a file that is written last says that one is finished. Where
    /// directories are renamed when they are finished, their name says so.
    fn needs_commit_file(&self) -> bool {
        false
    }
}

/// A tree whose files can be pinned.
pub(crate) trait OpenTree: FileTree {
    /// Opens these files, in this order, `more` others being open; all that are not among them are closed.
    fn open_files(&self, paths: &[String], more: usize) -> Result<Vec<Opened>, SourceError>;

    /// The gates before a directory.
    fn gates(&self, directory: &str) -> DirectoryRules;

    /// The directories that contain these files, and those above them, with the gates before them. The first is the
    /// checkpoint's own, "".
    fn directories(&self, paths: &[String]) -> Vec<(String, DirectoryRules)> {
        let parents = paths.iter().flat_map(|path| path.match_indices('/').map(|(at, _)| &path[..at]));
        let mut all: Vec<&str> = parents.chain([""]).collect();
        all.sort_unstable();
        all.dedup();
        all.into_iter().map(|directory| (directory.to_owned(), self.gates(directory))).collect()
    }
}

/// A directory of this machine.
pub(crate) struct LocalTree {
    root: Arc<RootDir>,
    follows_symlinks: bool,
    fetches: Arc<WaitRegistry>,
    /// Files that are open, by path.
    opened: Mutex<HashMap<String, Arc<Opened>>>,
}

impl LocalTree {
    /// The tree below `root`. Symbolic links that leave it are followed only if `follows_symlinks`.
    pub(crate) fn new(root: Arc<RootDir>, follows_symlinks: bool, fetches: Arc<WaitRegistry>) -> Self {
        Self { root, follows_symlinks, fetches, opened: Mutex::default() }
    }

    /// Opens a file, wherever it is read next; `None` if there is none.
    fn find(&self, path: &str) -> Result<Option<Opened>, SourceError> {
        let _opening = self.fetches.begin_path(&self.shown(path), "open");
        let found = match self.root.find(path) {
            Ok(found) => found,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            Err(error) => return Err(self.failed(path, "open", error)),
        };
        if !found.is_inside() && !self.follows_symlinks {
            let message = format!(
                "a symbolic link out of the checkpoint, to {}; --follow-symlinks accepts it",
                found.real().display()
            );
            return Err(self.failed(path, "open", io::Error::other(message)));
        }
        if found.metadata().is_dir() { Ok(None) } else { found.open(Some(&self.root)).map(Some) }
    }

    /// The open file of a path that stays open.
    fn open(&self, path: &str) -> Result<Option<Arc<Opened>>, SourceError> {
        let lock = || self.opened.lock();
        if let Some(opened) = lock().get(path) {
            return Ok(Some(Arc::clone(opened)));
        }
        let Some(opened) = self.find(path)? else { return Ok(None) };
        Ok(Some(Arc::clone(lock().entry(path.to_owned()).or_insert_with(|| Arc::new(opened)))))
    }

    fn existing(&self, path: &str) -> Result<Arc<Opened>, SourceError> {
        self.open(path)?.ok_or_else(|| self.failed(path, "open", ErrorKind::NotFound.into()))
    }
}

impl OpenTree for LocalTree {
    fn open_files(&self, paths: &[String], more: usize) -> Result<Vec<Opened>, SourceError> {
        check_open_file_limit(paths.len() + more)?;
        paths.par_iter().try_for_each(|path| self.existing(path).map(drop))?;
        let mut opened = std::mem::take(&mut *self.opened.lock());
        let take = |path: &String| {
            let opened = opened.remove(path).and_then(Arc::into_inner);
            opened.ok_or_else(|| self.failed(path, "open", io::Error::other("named twice, or still in use")))
        };
        paths.iter().map(take).collect()
    }

    fn gates(&self, directory: &str) -> DirectoryRules {
        self.root.directory_gates(directory)
    }
}

impl FileTree for LocalTree {
    fn shown(&self, path: &str) -> Arc<Path> {
        let shown: PathBuf = if path.is_empty() { self.root.path().to_owned() } else { self.root.path().join(path) };
        shown.into()
    }

    fn list(&self, directory: &str) -> Result<Vec<TreeEntry>, SourceError> {
        let shown = self.shown(directory);
        let listing = self.fetches.begin_path(&shown, "list");
        let failed = |error| self.failed(directory, "list", error);
        if !directory.is_empty() {
            // A directory that a link leads to may be anywhere.
            match fs::symlink_metadata(&shown) {
                Ok(found) if found.is_dir() => {}
                Ok(_) => return Ok(Vec::new()),
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
                Err(error) => return Err(failed(error)),
            }
        }
        entries_in(&shown, &listing).map_err(failed)
    }

    fn len_bytes(&self, path: &str) -> Result<Option<u64>, SourceError> {
        let Some(opened) = self.open(path)? else { return Ok(None) };
        opened.len_bytes().map(Some).map_err(|error| self.failed(path, "stat", error))
    }

    fn read(&self, path: &str, start: u64, target: &mut [u8]) -> Result<(), SourceError> {
        let opened = self.existing(path)?;
        let reading = self.fetches.begin_path(opened.path(), "read");
        opened.read_exact_at(target, start, &reading).map_err(|error| {
            let span = ByteSpan::of_len(start, target.len() as u64);
            let span = span.map_or_else(|| format!("from {start}"), |span| span.to_string());
            self.failed(path, &format!("read bytes {span}"), error)
        })
    }

    fn description(&self, path: &str) -> Result<Option<Vec<u8>>, SourceError> {
        let Some(opened) = self.find(path)? else { return Ok(None) };
        let reading = self.fetches.begin_path(opened.path(), "read");
        let failed = |error| self.failed(path, "read", error);
        let len = opened.len_bytes().map_err(failed)?;
        if len > DESCRIPTION_BYTES_MAX {
            let message = format!("expected at most {DESCRIPTION_BYTES_MAX} bytes, found {len}");
            return Err(failed(io::Error::other(message)));
        }
        let mut bytes = vec![0; to_usize(len)];
        opened.read_exact_at(&mut bytes, 0, &reading).map_err(failed)?;
        Ok(Some(bytes))
    }
}
