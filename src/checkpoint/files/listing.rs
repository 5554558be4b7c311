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
    /// The file, until it is opened.
    pub(crate) found: Option<FoundFile>,
    pub(crate) opened: Option<Opened>,
}

impl Listed {
    /// A file of which there is nothing to open.
    pub(crate) fn new(path: String, role: FileRole, size_bytes: u64) -> Self {
        Self { path, role, size_bytes, found: None, opened: None }
    }

    /// The file outside the repository that a symbolic link leads to.
    pub(crate) fn outside(&self) -> Option<&Path> {
        self.found.as_ref().filter(|found| !found.is_inside()).map(FoundFile::real)
    }

    /// Opens the file, if it was not opened yet; `fetches` notes the wait.
    pub(crate) fn open(
        &mut self,
        root: Option<&Arc<RootDir>>,
        fetches: &WaitRegistry,
    ) -> Result<Option<&Opened>, SourceError> {
        if let Some(found) = self.found.take() {
            let path = root.map_or_else(|| PathBuf::from(&self.path), |root| root.path().join(&self.path));
            let _opening = fetches.begin_path(&path, "open");
            self.opened = Some(found.open(root)?);
        }
        Ok(self.opened.as_ref())
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
        file.found = None;
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
        let found = FoundFile::cached(tree.remote(place)?).map_err(|error| {
            SourceError::io(PathBuf::from(tree.repository().name_of(file)), "open its entry in the cache", error)
        })?;
        let listed = Listed::new(file.path.clone(), FileRole::Other, file.size_bytes);
        listing.files.push(Listed { found: Some(found), ..listed });
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
                listing.files.push(Listed::new(path, FileRole::Ignored(IgnoreReason::NotUtf8), 0));
                continue;
            }
        };
        let path = format!("{prefix}{name}");
        let own = entry.file_type().map_err(with_path)?;
        let mut ignore = |reason| listing.files.push(Listed::new(path.clone(), FileRole::Ignored(reason), 0));
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
                let listed = Listed::new(path, FileRole::Other, found.metadata().len());
                listing.files.push(Listed { found: Some(found), ..listed });
            }
            Ok(_) => ignore(IgnoreReason::Special),
        }
    }
    Ok(())
}
