//! Notifications of changes in directories, where the kernel gives them.
//!
//! Notifications say that something changed, and where, not how: the receiver looks again. The kernel reports nothing that other hosts change on
//! a network file system, and drops notifications when too many wait, so that a look from time to time is needed nevertheless.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno as NixErrno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::statfs::statfs,
};
use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};

use super::pinned::REMOTE_MAGIC;

/// Most directories that are watched. The system's own limit is often 8192 for all programs of a user.
const WATCHES_MAX: usize = 2048;

/// Bytes of notifications that are read at a time.
const BUFFER_BYTES: usize = 8192;

/// What woke a watcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// Something changed in a watched directory.
    Changed,
    /// The time is up.
    Timeout,
    /// The other descriptor is ready or closed.
    Stopped,
}

/// Watched directories.
#[derive(Debug)]
pub struct DirectoryWatch {
    inotify: OwnedFd,
    watched: BTreeMap<PathBuf, i32>,
    /// What changed; `None` if notifications were lost.
    changed: Option<BTreeSet<PathBuf>>,
}

impl DirectoryWatch {
    /// No directory yet.
    ///
    /// # Errors
    /// The system gives no more watchers.
    pub fn new() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        Ok(Self { inotify, watched: BTreeMap::new(), changed: Some(BTreeSet::new()) })
    }

    /// Watches these directories, the first ones if they are very many, and no others. Returns whether all of them are watched;
    /// one that is gone counts as watched.
    pub fn set(&mut self, directories: &[PathBuf]) -> bool {
        let wanted: BTreeSet<&PathBuf> = directories.iter().take(WATCHES_MAX).collect();
        let gone: Vec<PathBuf> = self.watched.keys().filter(|path| !wanted.contains(path)).cloned().collect();
        for path in gone {
            if let Some(watch) = self.watched.remove(&path) {
                // The kernel may have removed it with the directory.
                let _ = inotify::remove_watch(&self.inotify, watch);
            }
        }
        let mut all = directories.len() <= WATCHES_MAX;
        for path in wanted {
            // Added again each time: a directory of this name may be another one by now. The kernel knows the same one.
            match inotify::add_watch(&self.inotify, path.as_path(), flags()) {
                Ok(watch) => {
                    let earlier = self.watched.insert(path.clone(), watch).filter(|earlier| *earlier != watch);
                    if let Some(earlier) = earlier {
                        let _ = inotify::remove_watch(&self.inotify, earlier);
                    }
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    self.watched.remove(path);
                }
                Err(_) => all = false,
            }
        }
        all
    }

    /// Waits for a change, at most for `limit`, or until `stop` is ready.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self, limit: Duration, stop: BorrowedFd<'_>) -> io::Result<Woken> {
        // Rounded up, so that the last turn does not spin.
        let timeout = PollTimeout::try_from(limit + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.inotify.as_fd(), PollFlags::POLLIN), PollFd::new(stop, PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(_) | Err(NixErrno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if fds[1].any() != Some(false) {
            return Ok(Woken::Stopped);
        }
        if fds[0].any() == Some(false) {
            return Ok(Woken::Timeout);
        }
        self.drain()?;
        Ok(Woken::Changed)
    }

    /// The files and directories that changed since the last call, as far as the kernel gave names; `None` if anything may have.
    pub fn take_changed(&mut self) -> Option<BTreeSet<PathBuf>> {
        self.changed.replace(BTreeSet::new())
    }

    /// Takes the notifications that wait.
    fn drain(&mut self) -> io::Result<()> {
        let directories: BTreeMap<i32, &PathBuf> = self.watched.iter().map(|(path, watch)| (*watch, path)).collect();
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut reader = Reader::new(self.inotify.as_fd(), &mut buffer);
        loop {
            match reader.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => self.changed = None,
                Ok(event) => {
                    // A directory that is not watched any more had its changes before.
                    let Some(directory) = directories.get(&event.wd()) else { continue };
                    let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
                    let path = name.map_or_else(|| (*directory).clone(), |name| directory.join(name));
                    if let Some(changed) = &mut self.changed {
                        changed.insert(path);
                    }
                }
                Err(Errno::WOULDBLOCK) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// The events: names that come and go, and files that their writer closes. Not each write: a checkpoint has millions.
fn flags() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVED_FROM
        | WatchFlags::DELETE
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::CLOSE_WRITE
        | WatchFlags::ONLYDIR
}

/// Whether other hosts may change a directory without this one's kernel knowing.
pub fn is_on_network(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| REMOTE_MAGIC.contains(&i128::from(found.filesystem_type().0)))
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Instant};

    use super::*;

    #[test]
    fn changes_wake_and_silence_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::create_dir(path("a")).unwrap();
        let mut watch = DirectoryWatch::new().unwrap();
        let (stop, stopping) = io::pipe().unwrap();
        let wait = |watch: &mut DirectoryWatch, ms| watch.wait(Duration::from_millis(ms), stop.as_fd()).unwrap();
        let all = [directory.path().to_owned(), path("a"), path("absent")];
        assert!(watch.set(&all));
        assert_eq!(wait(&mut watch, 20), Woken::Timeout);
        fs::write(path("a/file"), "x").unwrap();
        assert_eq!(wait(&mut watch, 10_000), Woken::Changed);
        assert_eq!(wait(&mut watch, 20), Woken::Timeout);
        assert_eq!(watch.take_changed(), Some(BTreeSet::from([path("a/file")])));
        assert_eq!(watch.take_changed(), Some(BTreeSet::new()));
        // Replaced by another directory of the name: the new one is watched after the next call.
        fs::rename(path("a"), path("old")).unwrap();
        fs::create_dir(path("a")).unwrap();
        assert!(watch.set(&all));
        while wait(&mut watch, 50) == Woken::Changed {}
        fs::write(path("a/new"), "x").unwrap();
        assert_eq!(wait(&mut watch, 10_000), Woken::Changed);
        assert!(watch.set(&[path("a")]));
        while wait(&mut watch, 50) == Woken::Changed {}
        fs::write(path("other"), "x").unwrap();
        assert_eq!(wait(&mut watch, 50), Woken::Timeout);
        drop(stopping);
        let since = Instant::now();
        assert_eq!(wait(&mut watch, 60_000), Woken::Stopped);
        assert!(since.elapsed() < Duration::from_secs(30) && !is_on_network(directory.path()));
    }
}
