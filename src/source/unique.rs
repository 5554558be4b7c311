//! Temporary files in a directory that several processes share.

use std::{
    fs, io,
    path::Path,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

/// A part of a name that no other call returns, in this process or another. The number of a process is not enough: processes of
/// two containers that share a directory may have the same one.
pub(super) fn unique() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    static BEGUN: LazyLock<u128> =
        LazyLock::new(|| SystemTime::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_nanos()));
    format!("{}-{:x}-{}", std::process::id(), *BEGUN, NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Puts what `make` makes in the place of a file, at once. Until then its name, beside the file, begins with `part`.
pub(super) fn replace(path: &Path, part: &str, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let new = path.with_file_name(format!("{part}{}", unique()));
    make(&new).and_then(|()| fs::rename(&new, path)).inspect_err(|_| drop(fs::remove_file(&new)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ() {
        assert_ne!(unique(), unique());
    }
}
