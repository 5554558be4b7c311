//! Every file of a repository's directory. Nothing is passed over in silence: what cannot be read or is not looked into is
//! listed with the reason.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{FileRole, IgnoreReason};

/// Most entries of a repository. Each becomes an open file.
const ENTRIES_MAX: usize = 100_000;

/// Deepest directory.
const DEPTH_MAX: usize = 32;

/// A file as found.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    pub(super) path: String,
    pub(super) role: FileRole,
    pub(super) size_bytes: u64,
}

/// All files under `root`, sorted by path. Symbolic links to files are followed: that is how the hub's cache is made.
pub(super) fn list(root: &Path) -> io::Result<Vec<Listed>> {
    let mut found = Vec::new();
    walk(root, "", 0, &mut found)?;
    found.sort_by(|left, right| left.path.cmp(&right.path));
    Ok(found)
}

fn walk(dir: &Path, prefix: &str, depth: usize, found: &mut Vec<Listed>) -> io::Result<()> {
    if depth > DEPTH_MAX || found.len() > ENTRIES_MAX {
        let message =
            format!("{}: more than {ENTRIES_MAX} files or {DEPTH_MAX} levels: not a model repository", dir.display());
        return Err(io::Error::other(message));
    }
    let with_path = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", dir.display()));
    for entry in fs::read_dir(dir).map_err(with_path)? {
        let entry = entry.map_err(with_path)?;
        let name = entry.file_name().into_string().map_err(|name| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{}: file name {} is not UTF-8", dir.display(), name.display()),
            )
        })?;
        let path = format!("{prefix}{name}");
        let own = entry.file_type().map_err(with_path)?;
        let target = match if own.is_symlink() { fs::metadata(entry.path()) } else { entry.metadata() } {
            Ok(meta) => Some(meta),
            Err(error) if own.is_symlink() && leads_nowhere(&error) => None,
            Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", entry.path().display()))),
        };
        let ignored = |reason| Listed { path: path.clone(), role: FileRole::Ignored(reason), size_bytes: 0 };
        match target {
            None => found.push(ignored(IgnoreReason::DanglingLink)),
            Some(meta) if meta.is_dir() && own.is_symlink() => found.push(ignored(IgnoreReason::LinkedDirectory)),
            Some(meta) if meta.is_dir() && matches!(name.as_str(), ".git" | ".cache") => {
                found.push(ignored(IgnoreReason::Bookkeeping));
            }
            // Or the repository would hold itself.
            Some(meta) if meta.is_dir() && entry.path().join(".ckfs").is_dir() => {
                found.push(ignored(IgnoreReason::Mount));
            }
            Some(meta) if meta.is_dir() => walk(&entry.path(), &format!("{path}/"), depth + 1, found)?,
            Some(meta) if meta.is_file() => found.push(Listed { path, role: FileRole::Other, size_bytes: meta.len() }),
            Some(_) => found.push(ignored(IgnoreReason::Special)),
        }
    }
    Ok(())
}

/// Whether following a symbolic link failed since nothing that can be seen is at its end.
fn leads_nowhere(error: &io::Error) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    matches!(error.kind(), NotFound | NotADirectory | PermissionDenied) || error.raw_os_error() == Some(libc::ELOOP)
}

/// The absolute path of a listed file.
pub(super) fn absolute(root: &Path, path: &str) -> PathBuf {
    root.join(path)
}
