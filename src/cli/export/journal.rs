//! What an export has done so far, so that an interrupted one goes on where it was.
//!
//! The journal is a file in the target directory: one line about what is exported, then one for each complete file, with the
//! digest of its view and sources and what the system says of the file. A file is taken for complete only if all of that is as it
//! was: its bytes were synced before its line was written, and a change since then shows in its times. The journal is removed at the
//! end. Of several tasks that export together each has a journal of its own, and the one that writes the last files another.

use std::{
    collections::HashMap,
    fs::{self, File, TryLockError},
    io::{ErrorKind, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow};
use ckfs_host::if_there;
use ckfs_service::identity;
use serde_json::{Value, json};

use super::parts::ExportTask;

/// The name of a journal.
const NAME: &str = ".ckfs-export";

/// Opens a journal that no other process holds.
fn locked(directory: &Path, path: &Path) -> anyhow::Result<File> {
    let context = || path.display().to_string();
    loop {
        let mut options = File::options();
        options.read(true).append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
        let file = options.open(path).with_context(context)?;
        // A file system without locks has no way to tell.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(BusyTarget(directory.display().to_string()).into());
        }
        // The process that held it may have removed it.
        let is_same = |there: fs::Metadata| there.ino() == file.metadata().map_or(0, |found| found.ino());
        if fs::symlink_metadata(path).is_ok_and(is_same) {
            return Ok(file);
        }
    }
}

fn of_another(directory: &Path) -> anyhow::Error {
    anyhow!(
        "{}: has an interrupted export of another view, or of a source that has changed or is on a file system that does not \
         tell of changes; --force begins anew, and leaves files of other names there",
        directory.display()
    )
}

/// Checks that all journals but the one at `own` begin with `head`. With `force` others that no process holds are removed.
fn check_others(directory: &Path, own: &Path, head: &str, force: bool) -> anyhow::Result<()> {
    for path in interrupted(directory).iter().filter(|path| *path != own) {
        let Some(text) = text_of(path)? else { continue };
        // The task of one without a whole line begins, and will see this one.
        if parsed(&text).0.is_none_or(|found| found == head) {
            continue;
        }
        if !force {
            return Err(of_another(directory));
        }
        let _held = locked(directory, path)?;
        fs::remove_file(path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Another process writes to this directory.
#[derive(Debug, thiserror::Error)]
#[error("{0}: another export writes there now")]
pub(super) struct BusyTarget(String);

impl CompleteFiles {
    /// What the task `part` of the export that `what` names has completed; nothing if it has no journal.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub(super) fn of_task(directory: &Path, part: ExportTask, what: &str) -> anyhow::Result<Option<Self>> {
        let Some(text) = text_of(&path_of(directory, Some(part)))? else { return Ok(None) };
        let (head, stamps) = parsed(&text);
        let is_same = head == Some(head_of(what).as_str());
        Ok(is_same.then(|| Self { directory: directory.to_owned(), stamps }))
    }

    /// Whether the share of the task is complete, but for files that have changed since.
    pub(super) fn is_share(&self) -> bool {
        self.stamps.get("") == Some(&Value::Bool(true))
    }

    fn name(&self, path: &Path) -> Option<String> {
        path.strip_prefix(&self.directory).ok()?.to_str().map(str::to_owned)
    }

    /// Whether the file at `path` is complete: written for the same digest, and unchanged.
    pub(super) fn has(&self, path: &Path, digest: &str) -> bool {
        let noted = self.name(path).and_then(|name| self.stamps.get(&name));
        noted.is_some_and(|noted| stamp(path, digest).as_ref() == Some(noted))
    }
}

/// The journal of one export.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    pub(super) done: CompleteFiles,
}

/// The files that a journal says are complete.
#[derive(Debug)]
pub(super) struct CompleteFiles {
    directory: PathBuf,
    stamps: HashMap<String, Value>,
}

/// Called with the path of each file once it is complete.
pub(super) type Written<'a> = dyn FnMut(&Path) -> anyhow::Result<()> + 'a;

/// The journals in a directory: an export to it was interrupted, or other tasks are at it.
pub(super) fn interrupted(directory: &Path) -> Vec<PathBuf> {
    let is_journal = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.strip_prefix(NAME).is_some_and(|rest| rest.is_empty() || rest.starts_with("-part-"))
    };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_journal).collect()
}

fn path_of(directory: &Path, part: Option<ExportTask>) -> PathBuf {
    directory
        .join(part.map_or_else(|| NAME.to_owned(), |ExportTask { number, of }| format!("{NAME}-part-{number}-of-{of}")))
}

/// The first line of a journal.
fn head_of(what: &str) -> String {
    json!({ "ckfs_export": what }).to_string()
}

/// The text of a journal, if there is one.
fn text_of(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// The first line of a journal, if it is whole, and what the others say of complete files. The text ends with a whole line, unless the
/// system failed while one was written.
fn parsed(text: &str) -> (Option<&str>, HashMap<String, Value>) {
    let mut lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    let head = lines.next();
    (head, lines.filter_map(|line| serde_json::from_str::<(String, Value)>(line).ok()).collect())
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

/// Notes the state of a complete export, and returns whether that was possible. A file system without attributes has none: a repeated
/// export is then refused.
pub(super) fn complete(directory: &Path, state: &str) -> bool {
    let flags = rustix::fs::XattrFlags::empty();
    let noted = rustix::fs::setxattr(directory, ATTRIBUTE, state.as_bytes(), flags);
    noted.inspect_err(|error| tracing::debug!("{}: {ATTRIBUTE}: {error}", directory.display())).is_ok()
}

/// Removes the journals of an export that several tasks have completed.
pub(super) fn end_of_tasks(directory: &Path, part: ExportTask) -> anyhow::Result<()> {
    for path in part.all().map(|part| path_of(directory, Some(part))) {
        if_there(fs::remove_file(&path)).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

impl Journal {
    /// Begins an export of what `what` names to a directory, or goes on with the one that was interrupted.
    ///
    /// # Errors
    /// Another export writes there, or the interrupted one was of something else.
    pub(super) fn open(directory: &Path, part: Option<ExportTask>, what: &str, force: bool) -> anyhow::Result<Self> {
        let path = path_of(directory, part);
        let context = || path.display().to_string();
        let mut file = locked(directory, &path)?;
        let text = text_of(&path)?.unwrap_or_default();
        let (found, mut stamps) = parsed(&text);
        let head = head_of(what);
        let is_same = found == Some(head.as_str());
        // Read, written, and read again: of two tasks that begin at the same time and disagree at least one sees the other.
        let mut checked = check_others(directory, &path, &head, force);
        if checked.is_ok() && !is_same && !stamps.is_empty() && !force {
            checked = Err(of_another(directory));
        }
        if checked.is_ok() {
            if !is_same || force {
                stamps.clear();
                file.set_len(0).and_then(|()| writeln!(file, "{head}")).with_context(context)?;
            } else if !text.ends_with('\n') {
                writeln!(file).with_context(context)?;
            }
            checked = check_others(directory, &path, &head, force);
        }
        if let Err(error) = checked {
            if stamps.is_empty() {
                let _ = fs::remove_file(&path);
            }
            return Err(error);
        }
        Ok(Self { file, path, done: CompleteFiles { directory: directory.to_owned(), stamps } })
    }

    /// Whether the interrupted export has begun to write to the directory at `path`.
    pub(super) fn has_begun(&self, path: &Path) -> bool {
        self.done.name(path).is_some_and(|name| self.done.stamps.contains_key(&name))
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
        let Some(name) = self.done.name(path) else { return Ok(()) };
        let line = format!("{}\n", json!([name, stamp]));
        self.file.write_all(line.as_bytes()).with_context(|| self.path.display().to_string())
    }

    /// Notes whether the share of this task is complete: all files written, and their sources compared after that.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub(super) fn note_share(&mut self, is_complete: bool) -> anyhow::Result<()> {
        let directory = self.done.directory.clone();
        self.add(&directory, &is_complete.into())
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
        let mut journal = Journal::open(directory.path(), None, "a", false).unwrap();
        let second = Journal::open(directory.path(), None, "a", false).unwrap_err().to_string();
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

        let mut journal = Journal::open(directory.path(), None, "a", false).unwrap();
        let complete = ["same", "edited", "gone", "replaced", "cut"].map(|name| journal.done.has(&at(name), "view"));
        assert_eq!(complete, [true, false, false, false, false]);
        assert!(!journal.done.has(&at("same"), "another view"));
        journal.note(&at("edited"), "view").unwrap();
        drop(journal);
        assert!(Journal::open(directory.path(), None, "a", false).unwrap().done.has(&at("edited"), "view"));

        let other = Journal::open(directory.path(), None, "b", false).unwrap_err().to_string();
        assert!(other.contains("an interrupted export of another view"), "{other}");
        let anew = Journal::open(directory.path(), None, "b", true).unwrap();
        assert!(!anew.done.has(&at("same"), "view"));
        anew.end().unwrap();
        assert_eq!(interrupted(directory.path()), Vec::<PathBuf>::new());
    }
    #[test]
    fn each_task_has_a_journal_and_all_are_of_one_export() {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = ("1/2".parse().unwrap(), "2/2".parse::<ExportTask>().unwrap());
        let open = |part, what, force| Journal::open(directory.path(), Some(part), what, force);
        let path = directory.path().join("file");
        fs::write(&path, "bytes").unwrap();
        let mut one = open(first, "a", false).unwrap();
        one.note(&path, "view").unwrap();
        assert!(open(first, "a", false).unwrap_err().is::<BusyTarget>());
        for force in [false, true] {
            let refused = open(second, "b", force).unwrap_err().to_string();
            assert!(refused.contains(if force { "writes there now" } else { "of another view" }), "{refused}");
            assert_eq!(interrupted(directory.path()).len(), 1, "a refused task leaves nothing");
        }
        drop(one);
        let two = open(second, "a", false).unwrap();
        let of_task = |part, what| CompleteFiles::of_task(directory.path(), part, what).unwrap();
        assert!(!of_task(first, "a").unwrap().is_share());
        for is_complete in [true, false, true] {
            open(first, "a", false).unwrap().note_share(is_complete).unwrap();
            assert_eq!(of_task(first, "a").unwrap().is_share(), is_complete);
        }
        assert!(of_task(first, "a").unwrap().has(&path, "view"));
        assert!(!of_task(second, "a").unwrap().has(&path, "view") && of_task(first, "b").is_none());
        drop(two);
        // One who begins anew forgets what no process writes.
        drop(open(second, "b", true).unwrap());
        assert!(of_task(first, "a").is_none() && of_task(second, "b").is_some());
        end_of_tasks(directory.path(), second).unwrap();
        assert!(interrupted(directory.path()).is_empty());
    }
}
