//! The limit of open files: every source file stays open.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::SourceError;

/// Descriptors that a mount needs besides those of its source files, with some to spare.
const OTHER_DESCRIPTORS: u64 = 48;

/// Raises the soft limit of open files to the hard one: every source file stays open, and a repository may have hundreds. Returns
/// the new limit.
pub(super) fn raise_open_file_limit() -> Option<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if soft >= hard {
        return Some(soft);
    }
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => Some(hard),
        Err(errno) => {
            tracing::debug!("cannot raise the limit of open files from {soft} to {hard}: {errno}");
            Some(soft)
        }
    }
}

/// Refuses more source files than the limit of open files allows. To be called before they are opened.
///
/// # Errors
/// [`SourceError::FileLimit`].
pub fn check_open_file_limit(files: usize) -> Result<(), SourceError> {
    let Some(limit) = raise_open_file_limit() else { return Ok(()) };
    let needed = files as u64 + OTHER_DESCRIPTORS;
    if limit < needed { Err(SourceError::FileLimit { files, needed, limit }) } else { Ok(()) }
}
