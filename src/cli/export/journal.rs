//! What an export has done so far, so that an interrupted one goes on where it was.
//!
//! The journal is a file in the target directory: one line about what is exported, then one for each complete file, with the
//! digest of its view and sources and what the system says of the file. A file is taken for complete only if all of that is as it
//! was: its bytes were synced before its line was written, and a change since then shows in its times. The journal is removed at the
//! end.

use std::{
    collections::HashMap,
    fs::{self, File, TryLockError},
    io::Write,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use ckfs_service::identity;
use serde_json::{Value, json};

/// The name of a journal.
const NAME: &str = ".ckfs-export";

/// The journal of one export.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    directory: PathBuf,
    done: HashMap<String, Value>,
}

/// Called with the path of each file once it is complete.
pub(super) type Written<'a> = dyn FnMut(&Path) -> anyhow::Result<()> + 'a;

/// The path of the journal in a directory, if an export to it was interrupted.
pub(super) fn interrupted(directory: &Path) -> Option<PathBuf> {
    Some(directory.join(NAME)).filter(|path| path.is_file())
}

/// What the system says of a complete file. Whoever writes to it or replaces it changes one of these.
fn stamp(path: &Path, digest: &str) -> Option<Value> {
    let found = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file)?;
    let times = [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
    Some(json!([digest, found.size(), found.ino(), times]))
}

/// The attribute of the directory of a complete export.
const ATTRIBUTE: &str = "user.ckfs.export";

/// The digest that tells whether the files at `paths` are as an export of `digest` left them; `None` if one is not there. A path
/// without a stamp holds a text about the mount.
pub(super) fn state(digest: &str, paths: impl Iterator<Item = (PathBuf, bool)>) -> Option<String> {
    let row = |(path, has_stamp): (PathBuf, bool)| {
        let is_there = || fs::symlink_metadata(&path).map(|_| Value::Null).ok();
        let stamp = if has_stamp { stamp(&path, digest) } else { is_there() }?;
        Some((path.display().to_string(), stamp.to_string()))
    };
    let rows: Vec<_> = paths.map(row).collect::<Option<_>>()?;
    Some(identity::of_views(rows.iter().map(|(path, stamp)| (path.as_str(), stamp.as_str()))))
}

/// The state that a complete export left in a directory.
pub(super) fn completed(directory: &Path) -> Option<String> {
    let mut value = [0_u8; 64];
    let len = rustix::fs::getxattr(directory, ATTRIBUTE, &mut value[..]).ok()?;
    String::from_utf8(value.get(..len)?.to_vec()).ok()
}

/// Notes the state of a complete export. A file system without attributes has none: a repeated export is then refused.
pub(super) fn complete(directory: &Path, state: &str) {
    let flags = rustix::fs::XattrFlags::empty();
    if let Err(error) = rustix::fs::setxattr(directory, ATTRIBUTE, state.as_bytes(), flags) {
        tracing::debug!("{}: {ATTRIBUTE}: {error}", directory.display());
    }
}

impl Journal {
    /// Begins an export of what `what` names to a directory, or goes on with the one that was interrupted.
    ///
    /// # Errors
    /// Another export writes there, or the interrupted one was of something else.
    pub(super) fn open(directory: &Path, what: &str, force: bool) -> anyhow::Result<Self> {
        let path = directory.join(NAME);
        let context = || path.display().to_string();
        let mut options = File::options();
        options.read(true).append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
        let mut file = options.open(&path).with_context(context)?;
        // A file system without locks has no way to tell.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            bail!("{}: another export writes there now", directory.display());
        }
        // The text ends with a whole line, unless the system failed while one was written.
        let text = String::from_utf8_lossy(&fs::read(&path).with_context(context)?).into_owned();
        let mut lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        let head = json!({ "ckfs_export": what }).to_string();
        let is_same = lines.next() == Some(head.as_str());
        let mut done = HashMap::new();
        for line in lines {
            if let Ok(Value::Array(row)) = serde_json::from_str(line)
                && let [Value::String(path), stamp] = row.as_slice()
            {
                done.insert(path.clone(), stamp.clone());
            }
        }
        if !is_same && !done.is_empty() && !force {
            bail!(
                "{}: has an interrupted export of another view, or of a source that has changed or is on a file system that does not \
                 tell of changes; --force begins anew, and leaves files of other names there",
                directory.display()
            );
        }
        if !is_same || force {
            done.clear();
            file.set_len(0).and_then(|()| writeln!(file, "{head}")).with_context(context)?;
        } else if !text.ends_with('\n') {
            writeln!(file).with_context(context)?;
        }
        Ok(Self { file, path, directory: directory.to_owned(), done })
    }

    fn name(&self, path: &Path) -> Option<String> {
        path.strip_prefix(&self.directory).ok()?.to_str().map(str::to_owned)
    }

    /// Whether the file at `path` is complete: written for the same digest, and unchanged.
    pub(super) fn has(&self, path: &Path, digest: &str) -> bool {
        let noted = self.name(path).and_then(|name| self.done.get(&name));
        noted.is_some_and(|noted| stamp(path, digest).as_ref() == Some(noted))
    }

    /// Whether the interrupted export has begun to write to the directory at `path`.
    pub(super) fn has_begun(&self, path: &Path) -> bool {
        self.name(path).is_some_and(|name| self.done.contains_key(&name))
    }

    /// Notes that the directory at `path` is written to from now on.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub(super) fn begin(&mut self, path: &Path) -> anyhow::Result<()> {
        self.add(path, &Value::Null)
    }

    /// Notes that the file at `path` is complete. It was synced before.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub(super) fn note(&mut self, path: &Path, digest: &str) -> anyhow::Result<()> {
        stamp(path, digest).map_or(Ok(()), |stamp| self.add(path, &stamp))
    }

    fn add(&mut self, path: &Path, stamp: &Value) -> anyhow::Result<()> {
        let Some(name) = self.name(path) else { return Ok(()) };
        let line = format!("{}\n", json!([name, stamp]));
        self.file.write_all(line.as_bytes()).with_context(|| self.path.display().to_string())
    }

    /// Ends an export that is complete.
    ///
    /// # Errors
    /// The journal cannot be removed.
    pub(super) fn end(self) -> anyhow::Result<()> {
        fs::remove_file(&self.path).with_context(|| self.path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_are_as_they_were_written_are_complete() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mut journal = Journal::open(directory.path(), "a", false).unwrap();
        let second = Journal::open(directory.path(), "a", false).unwrap_err().to_string();
        assert!(second.ends_with("another export writes there now"), "{second}");
        for name in ["same", "edited", "gone", "replaced"] {
            fs::write(at(name), name).unwrap();
            journal.note(&at(name), "view").unwrap();
        }
        drop(journal);
        // A line that was cut off says nothing.
        File::options().append(true).open(at(NAME)).unwrap().write_all(b"[\"cut\", [\"vi").unwrap();
        // Of the same length, in a later tick of the clock that the file system uses.
        std::thread::sleep(std::time::Duration::from_millis(50));
        fs::write(at("edited"), "edites").unwrap();
        fs::remove_file(at("gone")).unwrap();
        fs::write(at("new"), "replaced").unwrap();
        fs::rename(at("new"), at("replaced")).unwrap();

        let mut journal = Journal::open(directory.path(), "a", false).unwrap();
        let complete = ["same", "edited", "gone", "replaced", "cut"].map(|name| journal.has(&at(name), "view"));
        assert_eq!(complete, [true, false, false, false, false]);
        assert!(!journal.has(&at("same"), "another view"));
        journal.note(&at("edited"), "view").unwrap();
        drop(journal);
        assert!(Journal::open(directory.path(), "a", false).unwrap().has(&at("edited"), "view"));

        let other = Journal::open(directory.path(), "b", false).unwrap_err().to_string();
        assert!(other.contains("an interrupted export of another view"), "{other}");
        let anew = Journal::open(directory.path(), "b", true).unwrap();
        assert!(!anew.has(&at("same"), "view"));
        anew.end().unwrap();
        assert_eq!(interrupted(directory.path()), None);
    }
}
