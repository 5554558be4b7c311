//! Every file of a repository's directory. No file is passed over in silence: unreadable files and directories that are
//! not entered are listed with the reason.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs_source::{
    FoundFile, Opened, RootDir, SourceError, WaitRegistry, permission::DirectoryRules, private_directory,
    remote::RemoteTree, stall::WaitGuard,
};

use super::super::{
    file::{FileRole, IgnoreReason},
    json::io_error,
    weight_name::{at_top, is_any_index},
};

/// Most entries of a repository. Each one becomes an open file.
const ENTRIES_MAX: usize = 100_000;

/// Greatest depth of a directory.
const DEPTH_MAX: usize = 32;

/// A file in the listing.
pub(crate) struct Listed {
    pub(crate) path: String,
    pub(crate) role: FileRole,
    pub(crate) size_bytes: u64,
    pub(crate) state: Opening,
}

/// How far a file was opened.
pub(crate) enum Opening {
    /// There is nothing to open.
    Nothing,
    Found(FoundFile),
    Opened(Opened),
}

impl Listed {
    /// The file outside the repository that a symbolic link leads to.
    pub(crate) fn outside(&self) -> Option<&Path> {
        let Opening::Found(found) = &self.state else { return None };
        (!found.is_inside()).then(|| found.real())
    }

    /// Opens the file, if it was not opened yet; `fetches` notes the wait.
    pub(crate) fn open(
        &mut self,
        root: Option<&Arc<RootDir>>,
        fetches: &WaitRegistry,
    ) -> Result<Option<&Opened>, SourceError> {
        self.state = match std::mem::replace(&mut self.state, Opening::Nothing) {
            Opening::Found(found) => {
                let path = root.map_or_else(|| PathBuf::from(&self.path), |root| root.path().join(&self.path));
                let _opening = fetches.begin_path(&path, "open");
                Opening::Opened(found.open(root)?)
            }
            state @ (Opening::Opened(_) | Opening::Nothing) => state,
        };
        Ok(if let Opening::Opened(opened) = &self.state { Some(opened) } else { None })
    }

    /// Takes the open file; `fetches` notes the wait, if it was not opened yet.
    pub(crate) fn take(
        &mut self,
        root: Option<&Arc<RootDir>>,
        fetches: &WaitRegistry,
    ) -> Result<Option<Opened>, SourceError> {
        self.open(root, fetches)?;
        let state = std::mem::replace(&mut self.state, Opening::Nothing);
        Ok(if let Opening::Opened(opened) = state { Some(opened) } else { None })
    }
}

/// The configuration of a model.
pub(crate) const CONFIG: &str = "config.json";

/// A path for a message. Characters that control a terminal are escaped.
pub(crate) fn quoted(path: &Path) -> String {
    format!("{:?}", path.to_string_lossy())
}

/// The remedy for weights that a link takes from outside the repository.
pub(crate) fn warn_of_weights(path: &str, target: &Path) -> String {
    format!(
        "{path:?}: symbolic link to {}, outside the repository: its tensors are shown to those that may read the target; \
         --follow-symlinks accepts such links",
        quoted(target)
    )
}

/// Leaves out files that links take from outside the repository, except weights. The content of weights distinguishes
/// them from other files.
pub(crate) fn leave_out_links(files: &mut [Listed], warnings: &mut Vec<String>, left_out: impl Fn(&Listed) -> bool) {
    for file in files {
        let Some(target) = file.outside().map(Path::to_owned).filter(|_| left_out(file)) else { continue };
        let decides = file.path == CONFIG || (at_top(&file.path) && is_any_index(&file.path));
        let as_if = if decides { ", as if it were not there" } else { "" };
        warnings.push(format!(
            "{:?}: left out{as_if}: symbolic link to {}, outside the repository; --follow-symlinks reads it",
            file.path,
            quoted(&target)
        ));
        file.role = FileRole::Ignored(IgnoreReason::LeavesRepository);
        file.state = Opening::Nothing;
        file.size_bytes = 0;
    }
}

/// The content of a repository's directory.
#[derive(Default)]
pub(crate) struct Listing {
    /// All files, sorted by path.
    pub(crate) files: Vec<Listed>,
    /// The listed directories, with the gates before them. The first one is the repository's own, called "".
    pub(crate) directories: Vec<(String, DirectoryRules)>,
}

/// All files of a repository. Symbolic links to files are followed, as the hub's cache consists of links.
pub(crate) fn list(root: &RootDir, fetches: &WaitRegistry) -> io::Result<Listing> {
    let mut listing = Listing::default();
    walk(root, "", 0, &fetches.begin_path(root.path(), "list"), &mut listing)?;
    listing.files.sort_by(|left, right| left.path.cmp(&right.path));
    Ok(listing)
}

/// All files of a remote repository.
///
/// # Errors
/// The cache cannot be used.
pub(crate) fn of_remote(tree: &RemoteTree) -> Result<Listing, SourceError> {
    let mut listing = Listing::default();
    let mut directories = BTreeSet::from([""]);
    for (place, file) in tree.repository().files.iter().enumerate() {
        directories.extend(file.path.match_indices('/').map(|(end, _)| &file.path[..end]));
        let found = FoundFile::cached(tree.remote(place)?)
            .map_err(|error| io_error(tree.repository().name_of(file), "open its entry in the cache", error))?;
        let (path, size_bytes, state) = (file.path.clone(), file.size_bytes, Opening::Found(found));
        listing.files.push(Listed { path, role: FileRole::Other, size_bytes, state });
    }
    listing.directories = directories.iter().map(|path| ((*path).to_owned(), private_directory())).collect();
    listing.files.sort_by(|left, right| left.path.cmp(&right.path));
    Ok(listing)
}

fn walk(
    root: &RootDir,
    relative: &str,
    depth: usize,
    looking: &WaitGuard<'_>,
    listing: &mut Listing,
) -> io::Result<()> {
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
        let name = match entry.file_name().into_string() {
            Ok(name) => name,
            // Weights are not passed over.
            Err(name) if name.as_encoded_bytes().ends_with(b".safetensors") => {
                let message = format!("{}: file name {} is not UTF-8", dir.display(), name.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
            Err(name) => {
                let path = format!("{prefix}{}", name.to_string_lossy());
                let role = FileRole::Ignored(IgnoreReason::NotUtf8);
                listing.files.push(Listed { path, role, size_bytes: 0, state: Opening::Nothing });
                continue;
            }
        };
        let path = format!("{prefix}{name}");
        let own = entry.file_type().map_err(with_path)?;
        let mut add = |role, size_bytes, state| {
            listing.files.push(Listed { path: path.clone(), role, size_bytes, state });
        };
        let mut ignore = |reason| add(FileRole::Ignored(reason), 0, Opening::Nothing);
        if own.is_dir() {
            if matches!(name.as_str(), ".git" | ".cache") {
                ignore(IgnoreReason::Bookkeeping);
            } else if entry.path().join(".ckfs").is_dir() {
                // Otherwise the repository would contain itself.
                ignore(IgnoreReason::Mount);
            } else {
                walk(root, &path, depth + 1, looking, listing)?;
            }
            continue;
        }
        match root.find(&path) {
            // Or the entry has been removed meanwhile.
            Err(error) if own.is_symlink() || error.kind() == io::ErrorKind::NotFound => {
                ignore(IgnoreReason::DanglingLink);
            }
            Err(error) => return Err(with_path(error)),
            Ok(found) if found.metadata().is_dir() => ignore(IgnoreReason::LinkedDirectory),
            Ok(found) if found.metadata().is_file() => {
                add(FileRole::Other, found.metadata().len(), Opening::Found(found));
            }
            Ok(_) => ignore(IgnoreReason::Special),
        }
    }
    Ok(())
}
