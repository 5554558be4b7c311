//! Unmounting by mount id.
//!
//! A path alone does not name a mount: mounts stack, and the topmost may not be a ckfs mount. So [`unmount`] first asks for the
//! id of the mount that the path leads to, and refuses every mount but one of ckfs.

use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use ckfs_host::deadline;
use nix::{
    errno::Errno,
    mount::{MntFlags, umount2},
    unistd::geteuid,
};

use super::{
    FS_TYPE,
    daemon::{Daemon, FoundDaemon},
    mount_user::{MountUser, describe, mount_users, mounted_for},
    mountinfo::{is_stale, locate, mount_at},
};
use tracing::warn;

/// How to unmount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnmountOptions {
    /// Detach at once, even if files are open; those stay readable until they are closed.
    pub lazy: bool,
    /// Touch the mount only if its daemon is gone; a live one is left alone, without an error. For cleaning up.
    pub stale_only: bool,
    /// How long to go on trying while files are open.
    pub wait: Duration,
}

/// Why a mount was not removed.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    /// The path cannot be examined.
    #[error("{}: {source}", path.display())]
    Path {
        /// The path as given.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Nothing is mounted there.
    #[error("{}: not mounted", path.display())]
    NotMounted {
        /// The path without symlinks.
        path: PathBuf,
    },
    /// Files are open, or a process has its working directory there.
    #[error("{}: busy: {}", path.display(), describe(holders))]
    Busy {
        /// The path without symlinks.
        path: PathBuf,
        /// The processes that use it, as far as this process can see.
        holders: Vec<MountUser>,
    },
    /// Another file system is mounted there, or the kernel or `fusermount3` refuses.
    #[error("{0}")]
    Refused(String),
}

/// How long to wait for the daemon's end after its mount was removed. It has the files of the source open until then.
const END_LIMIT: Duration = Duration::from_mins(1);

/// How long a mount may be busy while no visible process uses it.
const UNSEEN_LIMIT: Duration = Duration::from_secs(1);

/// Unmounts the ckfs mount at `mountpoint`, live or stale. Anything else there is refused.
///
/// # Errors
/// See [`UnmountError`].
pub fn unmount(mountpoint: &Path, options: UnmountOptions) -> Result<(), UnmountError> {
    let in_path = |source| UnmountError::Path { path: mountpoint.to_owned(), source };
    let location = locate(mountpoint).map_err(in_path)?;
    let path = location.path.clone();
    let Some(entry) = mount_at(&location).map_err(in_path)? else {
        return if options.stale_only { Ok(()) } else { Err(UnmountError::NotMounted { path }) };
    };
    if options.stale_only && !(entry.is_ckfs() && is_stale(&path)) {
        return Ok(());
    }
    if !entry.is_ckfs() {
        let (path, fs_type) = (path.display(), entry.fs_type);
        return Err(UnmountError::Refused(format!("{path}: expected a mount of type {FS_TYPE}, found {fs_type}")));
    }
    // With --lazy it goes on until the last file is closed.
    let daemon = if options.lazy { FoundDaemon::Ended } else { Daemon::of(&path) };
    let begun = Instant::now();
    let until = deadline(options.wait);
    loop {
        match unmount_once(&path, options.lazy) {
            Ok(()) => {
                let path = path.display();
                match daemon {
                    FoundDaemon::By(daemon) if !daemon.ends_within(END_LIMIT) => {
                        let (pid, mut why) = (daemon.pid, String::new());
                        let holders = mounted_for(&entry);
                        if !holders.is_empty() {
                            why = format!(": its file system is still mounted elsewhere, {}", describe(&holders));
                        }
                        warn!(
                            "{path}: unmounted, but its daemon (process {pid}) still runs and has the source's files open{why}"
                        );
                    }
                    FoundDaemon::Unknown => warn!(
                        "{path}: unmounted; its daemon is not visible from here and may run, with the source's files open, for \
                         a while yet"
                    ),
                    FoundDaemon::By(_) | FoundDaemon::Ended => {}
                }
                return Ok(());
            }
            Err(UnmountError::Busy { .. }) if Instant::now() < until => thread::sleep(Duration::from_millis(100)),
            Err(UnmountError::Busy { path, .. }) => {
                let holders = mount_users(&entry);
                // If no process is visible, a file that was closed a moment ago may still be on its way out.
                if !holders.is_empty() || begun.elapsed() >= UNSEEN_LIMIT {
                    return Err(UnmountError::Busy { holders, path });
                }
                thread::sleep(Duration::from_millis(100));
            }
            result => return result,
        }
    }
}

/// Asks for one unmount of what `path` leads to. The caller has made sure that this is the right mount.
///
/// [`UnmountError::Busy`] comes without processes: the search for them takes long.
pub(super) fn unmount_once(path: &Path, lazy: bool) -> Result<(), UnmountError> {
    let flags = if lazy { MntFlags::MNT_DETACH } else { MntFlags::empty() };
    match umount2(path, flags | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::EBUSY) => Err(UnmountError::Busy { path: path.to_owned(), holders: Vec::new() }),
        // Only the setuid program may unmount for users.
        Err(Errno::EPERM) if !geteuid().is_root() => unmount_by_helper(path, lazy),
        Err(errno) => Err(UnmountError::Refused(format!("{}: unmount: {errno}", path.display()))),
    }
}

fn unmount_by_helper(path: &Path, lazy: bool) -> Result<(), UnmountError> {
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(path);
    let refused = |why: String| UnmountError::Refused(format!("{}: {why}", path.display()));
    let output = command.stdin(Stdio::null()).output().map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound {
            refused("only root can unmount without fusermount3, and that was not found; install fuse3".to_owned())
        } else {
            refused(format!("fusermount3: {error}"))
        }
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(output.stderr.trim_ascii());
    let mut message = said.trim_start_matches("fusermount3: ").to_owned();
    if message.contains("/etc/mtab") {
        // Small images of containers lack this link.
        message.push_str("; as root: ln -s /proc/self/mounts /etc/mtab");
    }
    if message.to_ascii_lowercase().contains("busy") {
        return Err(UnmountError::Busy { path: path.to_owned(), holders: Vec::new() });
    }
    Err(refused(format!("fusermount3: {message}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_is_no_mount_of_ours() {
        let directory = tempfile::tempdir().unwrap();
        let options = UnmountOptions::default();
        assert!(matches!(unmount(directory.path(), options), Err(UnmountError::NotMounted { .. })));
        assert!(matches!(unmount(&directory.path().join("no"), options), Err(UnmountError::Path { .. })));
        let foreign = unmount(Path::new("/proc"), options).unwrap_err().to_string();
        assert_eq!(foreign, "/proc: expected a mount of type fuse.ckfs, found proc");
        let stale_only = UnmountOptions { stale_only: true, ..options };
        assert!(unmount(Path::new("/proc"), stale_only).is_ok());
        assert!(unmount(directory.path(), stale_only).is_ok());
    }
}
