//! Temporary files in a directory that several processes share.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::fd::OwnedFd,
    path::Path,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use rustix::fs::{AtFlags, Mode, OFlags, openat, renameat, unlinkat};

/// A part of a name that no other call returns, in this process or another. The number of a process is not enough: processes of
/// two containers that share a directory may have the same one.
pub(super) fn unique() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    static BEGUN: LazyLock<u128> =
        LazyLock::new(|| SystemTime::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_nanos()));
    format!("{}-{:x}-{}", std::process::id(), *BEGUN, NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Writes a new file in an open directory.
pub(super) fn write_new(dir: &OwnedFd, name: &str, text: &str, mode: Mode) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    File::from(openat(dir, name, flags, mode)?).write_all(text.as_bytes())
}

/// Opens a file in an open directory to read it, and follows no link.
pub(super) fn open_at(dir: &OwnedFd, name: &str) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::empty()).map(File::from)
}

/// Puts a file with this text in the place of another in an open directory, at once. Until then its name begins with `part`.
pub(super) fn replace_at(dir: &OwnedFd, name: &str, part: &str, text: &str, mode: Mode) -> io::Result<()> {
    let new = format!("{part}{}", unique());
    let written = write_new(dir, &new, text, mode).and_then(|()| Ok(renameat(dir, new.as_str(), dir, name)?));
    written.inspect_err(|_| {
        let _ = unlinkat(dir, new.as_str(), AtFlags::empty());
    })
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
