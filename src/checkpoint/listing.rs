//! Every file of a repository's directory. Nothing is passed over in silence: what cannot be read or is not looked into is
//! listed with the reason.

use std::{fs, io, path::Path, sync::Arc};

use super::file::{FileRole, IgnoreReason};
use crate::source::{Beneath, Fetches, Found, Opened, SourceError, permission::DirectoryGates, stall::Fetching};

/// Most entries of a repository. Each becomes an open file.
const ENTRIES_MAX: usize = 100_000;

/// Deepest directory.
const DEPTH_MAX: usize = 32;

/// A file as found.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) path: String,
    pub(super) role: FileRole,
    pub(super) size_bytes: u64,
    pub(super) state: State,
}

/// How far a file was opened.
#[derive(Debug)]
pub(super) enum State {
    /// There is nothing to open.
    Nothing,
    Found(Found),
    Opened(Opened),
}

impl Listed {
    /// The file outside the repository that a symbolic link leads to.
    pub(super) fn outside(&self) -> Option<&Path> {
        match &self.state {
            State::Found(found) if !found.is_inside() => Some(found.real()),
            State::Found(_) | State::Opened(_) | State::Nothing => None,
        }
    }

    /// Opens the file, if it was not opened yet; `fetches` notes the wait.
    pub(super) fn open(&mut self, root: &Arc<Beneath>, fetches: &Fetches) -> Result<Option<&Opened>, SourceError> {
        self.state = match std::mem::replace(&mut self.state, State::Nothing) {
            State::Found(found) => {
                let _opening = fetches.begin_path(&root.path().join(&self.path), "open");
                State::Opened(found.open(Some(root))?)
            }
            state @ (State::Opened(_) | State::Nothing) => state,
        };
        Ok(match &self.state {
            State::Opened(opened) => Some(opened),
            State::Found(_) | State::Nothing => None,
        })
    }

    /// Takes the open file; `fetches` notes the wait, if it was not opened yet.
    pub(super) fn take(&mut self, root: &Arc<Beneath>, fetches: &Fetches) -> Result<Option<Opened>, SourceError> {
        self.open(root, fetches)?;
        Ok(match std::mem::replace(&mut self.state, State::Nothing) {
            State::Opened(opened) => Some(opened),
            State::Found(_) | State::Nothing => None,
        })
    }
}

/// What a repository's directory holds.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// All files, sorted by path.
    pub(super) files: Vec<Listed>,
    /// The directories that were listed, and the gates before them. The first is the repository's own, called "".
    pub(super) directories: Vec<(String, DirectoryGates)>,
}

/// All files of a repository. Symbolic links to files are followed: that is how the hub's cache is made.
pub(super) fn list(root: &Beneath, fetches: &Fetches) -> io::Result<Listing> {
    let mut listing = Listing::default();
    walk(root, "", 0, &fetches.begin_path(root.path(), "list"), &mut listing)?;
    listing.files.sort_by(|left, right| left.path.cmp(&right.path));
    Ok(listing)
}

fn walk(root: &Beneath, relative: &str, depth: usize, looking: &Fetching<'_>, listing: &mut Listing) -> io::Result<()> {
    let dir = root.path().join(relative);
    let prefix = if relative.is_empty() { String::new() } else { format!("{relative}/") };
    if depth > DEPTH_MAX || listing.files.len() > ENTRIES_MAX {
        let message =
            format!("{}: more than {ENTRIES_MAX} files or {DEPTH_MAX} levels: not a model repository", dir.display());
        return Err(io::Error::other(message));
    }
    let with_path = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", dir.display()));
    listing.directories.push((relative.to_owned(), root.directory_gates(relative)));
    for entry in fs::read_dir(&dir).map_err(with_path)? {
        looking.advance();
        let entry = entry.map_err(with_path)?;
        let name = entry.file_name().into_string().map_err(|name| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{}: file name {} is not UTF-8", dir.display(), name.display()),
            )
        })?;
        let path = format!("{prefix}{name}");
        let own = entry.file_type().map_err(with_path)?;
        let mut add = |role, size_bytes, state| {
            listing.files.push(Listed { path: path.clone(), role, size_bytes, state });
        };
        let mut ignore = |reason| add(FileRole::Ignored(reason), 0, State::Nothing);
        if own.is_dir() {
            if matches!(name.as_str(), ".git" | ".cache") {
                ignore(IgnoreReason::Bookkeeping);
            } else if entry.path().join(".ckfs").is_dir() {
                // Or the repository would hold itself.
                ignore(IgnoreReason::Mount);
            } else {
                walk(root, &path, depth + 1, looking, listing)?;
            }
            continue;
        }
        match root.find(&path) {
            // Or it was removed meanwhile.
            Err(error) if own.is_symlink() || error.kind() == io::ErrorKind::NotFound => {
                ignore(IgnoreReason::DanglingLink);
            }
            Err(error) => return Err(with_path(error)),
            Ok(found) if found.metadata().is_dir() => ignore(IgnoreReason::LinkedDirectory),
            Ok(found) if found.metadata().is_file() => {
                add(FileRole::Other, found.metadata().len(), State::Found(found));
            }
            Ok(_) => ignore(IgnoreReason::Special),
        }
    }
    Ok(())
}
