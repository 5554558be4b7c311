//! What belongs to the cache: the directory that carries its marker, and in it only names of the cache's own form.
//!
//! The user names a directory that may hold anything, such as a bare git repository, which has an `objects` too. Nothing that the
//! cache did not make is read, changed or removed. No link within the directory is followed: another user may have put it there.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use nix::unistd::geteuid;
use rustix::{
    fs::{CWD, Mode, OFlags, fchmod, fstat, mkdirat, openat},
    io::Errno,
};

use super::super::super::{
    digest::{SHA1_DIGITS, SHA256_DIGITS, is_hex},
    unique::{open_at, replace_at, write_new},
};

/// Name of the map in an entry's directory.
pub(super) const MAP: &str = "map";
/// That of the sparse file with the bytes.
pub(super) const DATA: &str = "data";
/// That of the file that says what the entry is of.
pub(super) const META: &str = "meta.json";
/// Name of the directory of entries.
const OBJECTS: &str = "objects";
/// The file by which backup programs know a cache, with the text that it must begin with.
const TAG: (&str, &str) = ("CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n# the disk cache of ckfs\n");
/// The file in the directory of entries that says whose it is.
const MARKER: (&str, &str) = ("ckfs-cache", "the disk cache of ckfs: everything else here may be removed\n");
/// Beginnings of the names of entries that are being made or removed.
const UNFINISHED: [&str; 2] = ["new.", "removed."];
/// All may read what the cache's own files say.
const READABLE: Mode = Mode::RUSR.union(Mode::WUSR).union(Mode::RGRP).union(Mode::ROTH);
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);

/// Whether a name is that of an entry, complete or not.
pub(super) fn is_own_name(name: &str) -> bool {
    let is_part =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-'));
    let digits = |prefix: &str, count| name.strip_prefix(prefix).is_some_and(|rest| is_hex(rest, count));
    digits("v-", SHA256_DIGITS)
        // Of earlier versions.
        || digits("sha256-", SHA256_DIGITS)
        || digits("git-", SHA1_DIGITS)
        || UNFINISHED.iter().any(|prefix| name.strip_prefix(prefix).is_some_and(is_part))
}

/// Whether a file in an entry is the cache's own.
fn is_own_part(name: &str) -> bool {
    [DATA, MAP, META].contains(&name) || name.strip_prefix(META).is_some_and(|rest| rest.starts_with('.'))
}

/// Whether an entry holds nothing but what the cache makes.
pub(super) fn holds_own_parts(entry: &Path) -> io::Result<bool> {
    for part in fs::read_dir(entry)? {
        let part = part?;
        if !part.file_type()?.is_file() || !part.file_name().to_str().is_some_and(is_own_part) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a path is a directory of this user, and no link.
pub(super) fn is_own_directory(path: &Path) -> io::Result<bool> {
    let found = fs::symlink_metadata(path)?;
    Ok(found.is_dir() && found.uid() == geteuid().as_raw())
}

/// Opens a file of an entry, and follows no link.
pub(super) fn open_part(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// The directory of entries in `dir`, which is made if it is not there. It is returned without links.
///
/// # Errors
/// It is not the cache's, belongs to another user, or cannot be made.
pub(in super::super) fn claim(dir: &Path) -> io::Result<PathBuf> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    // The user's own path may contain links.
    let parent = openat(CWD, dir, DIRECTORY, Mode::empty())?;
    let path = fs::canonicalize(dir)?.join(OBJECTS);
    match mkdirat(&parent, OBJECTS, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let refuse = |kind, what: String| io::Error::new(kind, format!("{} {what}", path.display()));
    let objects =
        openat(&parent, OBJECTS, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()).map_err(|errno| match errno {
            Errno::LOOP | Errno::NOTDIR => {
                refuse(io::ErrorKind::NotADirectory, "is a link, or no directory".to_owned())
            }
            errno => errno.into(),
        })?;
    let found = fstat(&objects)?;
    if found.st_uid != geteuid().as_raw() {
        return Err(refuse(io::ErrorKind::PermissionDenied, format!("belongs to user {}", found.st_uid)));
    }
    if !has_text(&objects, MARKER)? {
        if let Some(foreign) = foreign_name(&parent, &path)? {
            let what =
                format!("is not a cache of ckfs: it holds {foreign:?}; --cache-dir names a directory of its own");
            return Err(refuse(io::ErrorKind::AlreadyExists, what));
        }
        replace_at(&objects, MARKER.0, UNFINISHED[0], MARKER.1, READABLE)?;
    }
    if found.st_mode & 0o077 != 0 {
        fchmod(&objects, Mode::RWXU)?;
    }
    // Only a service to backup programs.
    let _ = write_new(&parent, TAG.0, TAG.1, READABLE);
    Ok(path)
}

/// Whether `dir` has a file of this user with this name, and this text at its beginning.
fn has_text(dir: &OwnedFd, (name, text): (&str, &str)) -> io::Result<bool> {
    let file = match open_at(dir, name) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::LOOP) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    };
    let found = file.metadata()?;
    let mut start = Vec::new();
    if found.is_file() && found.uid() == geteuid().as_raw() {
        file.take(text.len() as u64).read_to_end(&mut start)?;
    }
    Ok(start == text.as_bytes())
}

/// A name in a directory without marker that keeps it from becoming the cache's. One of an earlier version, which made no marker,
/// is known by the tag beside it.
fn foreign_name(parent: &OwnedFd, objects: &Path) -> io::Result<Option<String>> {
    let is_cache = has_text(parent, TAG)?;
    for entry in fs::read_dir(objects)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let is_marker = name == MARKER.0 || UNFINISHED.iter().any(|prefix| name.starts_with(prefix));
        if !(is_own_name(&name) && (is_cache || is_marker)) {
            // Another process may have made the marker meanwhile.
            return Ok((name != MARKER.0).then_some(name));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::{super::super::super::unique::unique, *};

    #[test]
    fn names_of_the_cache_are_told_from_others() {
        for name in [format!("v-{}", "0".repeat(64)), format!("git-{}", "a".repeat(40)), format!("new.{}", unique())] {
            assert!(is_own_name(&name), "{name}");
        }
        for name in ["pack", "info", "ab", "v-", "v-00", "new.", "removed.x/y", "sha256-../x", "data"] {
            assert!(!is_own_name(name), "{name}");
        }
    }

    #[test]
    fn a_directory_of_others_is_refused_and_left_as_it_is() {
        for names in [&["pack/x", "ab/cdef"][..], &["v-1/x"], &["sub/x"]] {
            let dir = tempfile::tempdir().unwrap();
            for name in names {
                let path = dir.path().join(OBJECTS).join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "kept").unwrap();
            }
            let mode = fs::metadata(dir.path().join(OBJECTS)).unwrap().mode();
            let error = claim(dir.path()).unwrap_err().to_string();
            assert!(error.contains("is not a cache of ckfs"), "{error}");
            for name in names {
                assert_eq!(fs::read_to_string(dir.path().join(OBJECTS).join(name)).unwrap(), "kept");
            }
            assert_eq!(fs::metadata(dir.path().join(OBJECTS)).unwrap().mode(), mode);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was made");
        }
    }

    #[test]
    fn links_lead_nowhere() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        symlink(other.path(), dir.path().join(OBJECTS)).unwrap();
        let error = claim(dir.path()).unwrap_err().to_string();
        assert!(error.contains("is a link"), "{error}");
        fs::remove_file(dir.path().join(OBJECTS)).unwrap();
        symlink(other.path().join("made"), dir.path().join(TAG.0)).unwrap();
        claim(dir.path()).unwrap();
        assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_empty_directory_and_the_cache_of_an_earlier_version_are_taken() {
        let dir = tempfile::tempdir().unwrap();
        let objects = dir.path().join(OBJECTS);
        let old = objects.join(format!("sha256-{}", "a".repeat(64)));
        fs::create_dir_all(&old).unwrap();
        claim(dir.path()).unwrap_err();
        fs::write(dir.path().join(TAG.0), TAG.1).unwrap();
        claim(dir.path()).unwrap();
        fs::remove_file(dir.path().join(TAG.0)).unwrap();
        fs::create_dir(objects.join("theirs")).unwrap();
        claim(dir.path()).expect("the marker is enough");
        let empty = tempfile::tempdir().unwrap();
        fs::create_dir(empty.path().join(OBJECTS)).unwrap();
        claim(empty.path()).unwrap();
    }
}
