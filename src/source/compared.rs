//! A record of the blobs of the Hub's cache that were compared with their digest and found right, so that the next command need not
//! read them as a whole again.
//!
//! A line names a file by device, inode, size and times, to the nanosecond, and its digest. Any change gives a file another time of
//! status change, which no program can set, so the line counts no longer. Three things a line cannot show, and so it is not used:
//! bytes that a crash of the system takes away (a line counts until the system starts again), a change within the resolution of
//! the file system's clock (a file that changed less than [`SETTLED`] before it was read is not noted), and files of other hosts.
//!
//! The record is one file, replaced as a whole. It counts if it and its directory belong to this user and nobody else can write them;
//! no link to it is followed. It is only a saving: what cannot be read or written is as if there were no record.

use std::{
    fs::DirBuilder,
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use nix::unistd::geteuid;
use parking_lot::Mutex;
use rustix::fs::{CWD, Mode, OFlags, fstat, openat};

use super::{
    content_name::this_start,
    unique::{open_at, replace_at},
};

/// Name of the record in its directory.
const NAME: &str = "compared";
/// Most lines. The oldest go first.
const LINES_MAX: usize = 4096;
/// Longest record in bytes; a line has some 160.
const BYTES_MAX: u64 = 1 << 20;
/// A file that changed less than this before its bytes were read is not noted: a later change may have the same time.
pub(super) const SETTLED: Duration = Duration::from_secs(2);

/// The files that were compared since the system started.
#[derive(Debug)]
pub struct ComparedFiles {
    directory: PathBuf,
    /// First line: what the record is, and since which start of the system it counts.
    head: String,
    lines: Mutex<Lines>,
}

#[derive(Debug)]
struct Lines {
    all: Vec<String>,
    /// How many at the end are not in the file yet.
    new: usize,
}

impl ComparedFiles {
    /// The record in a directory of this user's, which is made when there is something to write.
    pub fn open(directory: &Path) -> Self {
        let head = format!("ckfs compared 1, start {}", this_start());
        let all = own_directory(directory).and_then(|opened| read(&opened, &head)).unwrap_or_default();
        Self { directory: directory.to_owned(), head, lines: Mutex::new(Lines { all, new: 0 }) }
    }

    /// Whether a file is in the record.
    pub(super) fn holds(&self, line: &str) -> bool {
        self.lines.lock().all.iter().any(|known| known == line)
    }

    /// Notes a file. [`ComparedFiles::save`] writes it down.
    pub(super) fn note(&self, line: String) {
        let mut lines = self.lines.lock();
        if !lines.all.contains(&line) {
            lines.all.push(line);
            lines.new += 1;
        }
    }

    /// Writes down what was noted, beside what other processes have written meanwhile.
    pub(super) fn save(&self) {
        let mut lines = self.lines.lock();
        if lines.new == 0 {
            return;
        }
        let known = lines.all.len() - std::mem::take(&mut lines.new);
        let new = lines.all.split_off(known);
        let write = || -> io::Result<Vec<String>> {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
            let directory = own_directory(&self.directory)?;
            let mut all = read(&directory, &self.head).unwrap_or_default();
            all.retain(|line| !new.contains(line));
            all.extend(new.iter().cloned());
            all.drain(..all.len().saturating_sub(LINES_MAX));
            let text = format!("{}\n{}\n", self.head, all.join("\n"));
            replace_at(&directory, NAME, &format!("{NAME}."), &text, Mode::RUSR | Mode::WUSR)?;
            Ok(all)
        };
        match write() {
            Ok(all) => lines.all = all,
            Err(error) => {
                tracing::debug!("{}: not written: {error}", self.directory.join(NAME).display());
                lines.all.extend(new);
            }
        }
    }
}

/// Opens a directory that belongs to this user alone.
fn own_directory(path: &Path) -> io::Result<OwnedFd> {
    let directory = openat(CWD, path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let found = fstat(&directory)?;
    own(found.st_uid, found.st_mode)?;
    Ok(directory)
}

/// Refuses what another user owns or may write.
fn own(uid: u32, mode: u32) -> io::Result<()> {
    let is_own = uid == geteuid().as_raw() && mode & 0o022 == 0;
    if is_own { Ok(()) } else { Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user may write it")) }
}

/// The lines of the record, without those of an earlier start of the system.
fn read(directory: &OwnedFd, head: &str) -> io::Result<Vec<String>> {
    let file = open_at(directory, NAME)?;
    let found = file.metadata()?;
    own(found.uid(), found.mode())?;
    if !found.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut text = String::new();
    file.take(BYTES_MAX).read_to_string(&mut text)?;
    let mut lines = text.lines();
    Ok(if lines.next() == Some(head) { lines.map(str::to_owned).collect() } else { Vec::new() })
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::*;

    fn open(directory: &Path) -> ComparedFiles {
        ComparedFiles::open(directory)
    }

    #[test]
    fn processes_add_to_one_record_and_the_oldest_lines_go() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("state/ckfs");
        let (first, second) = (open(&directory), open(&directory));
        assert!(!directory.exists(), "nothing to write yet");
        first.note("a".to_owned());
        first.save();
        second.note("b".to_owned());
        second.save();
        assert!(second.holds("a") && second.holds("b") && !first.holds("b"));
        let found = |record: &ComparedFiles| record.lines.lock().all.clone();
        assert_eq!(found(&open(&directory)), ["a", "b"]);
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        (0..LINES_MAX).for_each(|number| first.note(format!("line {number}")));
        first.save();
        let all = found(&open(&directory));
        assert_eq!((all.len(), all[0].as_str()), (LINES_MAX, "line 0"));
    }

    #[test]
    fn a_record_that_others_can_write_or_of_an_earlier_start_does_not_count() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("ckfs");
        let record = open(&directory);
        record.note("a".to_owned());
        record.save();
        let (file, counts) = (directory.join(NAME), || open(&directory).holds("a"));
        assert!(counts());
        let allow = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        for (path, open_mode, own_mode) in [(&file, 0o620, 0o600), (&directory, 0o702, 0o700)] {
            allow(path, open_mode);
            assert!(!counts(), "{}", path.display());
            allow(path, own_mode);
            assert!(counts());
        }
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replace("start ", "start 0")).unwrap();
        assert!(!counts());
        fs::write(&file, text).unwrap();
        assert!(counts());
        let other = place.path().join("other");
        fs::rename(&file, &other).unwrap();
        symlink(&other, &file).unwrap();
        assert!(!counts(), "a link");
    }

    #[test]
    fn a_planted_link_leads_no_writer_elsewhere() {
        let place = tempfile::tempdir().unwrap();
        let (directory, other) = (place.path().join("ckfs"), place.path().join("other"));
        fs::create_dir(&other).unwrap();
        symlink(&other, &directory).unwrap();
        let record = open(&directory);
        record.note("a".to_owned());
        record.save();
        assert_eq!(fs::read_dir(&other).unwrap().count(), 0);
        assert!(record.holds("a"), "in this process it counts");
    }
}
