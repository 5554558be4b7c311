//! The state directory. It alone says what is published: the next plugin goes on by it.
//!
//! ```text
//! volumes/DIGEST.json   a volume that is published at one target, which DIGEST is of
//! mounts/KEY/mnt        what the daemon of KEY serves
//! mounts/KEY/config.toml, mounts/KEY/ckfs/   its configuration, and its own state: log, socket
//! ```

use std::{
    fs, io,
    os::unix::{
        fs::{DirBuilderExt, FileTypeExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use ckfs_fuse::{MountEntry, UnmountError, UnmountOptions, ckfs_mounts, unmount};
use ckfs_host::{ask_within, if_there};
use nix::{
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tracing::warn;

use crate::volume::short_digest;

/// Listens at a path, in place of a process that is gone.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        if UnixStream::connect(path).is_ok() {
            return Err(named(io::Error::other("another process answers there")));
        }
        fs::remove_file(path).map_err(named)?;
    }
    UnixListener::bind(path).map_err(named)
}

/// Longest time for the answer of a mount.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How long files of a volume that is taken away may stay open.
const BUSY_LIMIT: Duration = Duration::from_secs(5);

/// A volume at a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Published {
    pub(crate) volume: String,
    pub(crate) target: PathBuf,
    /// Its daemon.
    pub(crate) key: String,
    /// Whether the daemon has secrets, which are kept nowhere.
    pub(crate) has_secrets: bool,
}

/// How a mount is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PointHealth {
    /// It answers, with its statistics.
    Live(Value),
    /// Nothing is mounted.
    None,
    /// Its daemon is gone.
    Stale,
    /// It does not answer.
    Stuck,
}

#[derive(Debug)]
pub(crate) struct State {
    root: PathBuf,
}

/// The mount at a path without links.
pub(crate) fn mount_at(path: &Path) -> Option<MountEntry> {
    ckfs_mounts().into_iter().rfind(|entry| entry.mountpoint == path)
}

/// How the mount at a path is.
pub(crate) fn health(path: &Path) -> PointHealth {
    if mount_at(path).is_none() {
        return PointHealth::None;
    }
    let file = path.join(".ckfs/stats.json");
    match ask_within(ANSWER_LIMIT, "ckfs-health", move || fs::read(file)) {
        Ok(Some(Ok(stats))) => PointHealth::Live(serde_json::from_slice(&stats).unwrap_or_default()),
        Ok(Some(Err(error))) if matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED)) => {
            PointHealth::Stale
        }
        _ => PointHealth::Stuck,
    }
}

/// Binds a mount to a target, unless it is there already. Another one there is of a daemon that is gone, and is taken away.
pub(crate) fn bind(from: &Path, target: &Path) -> io::Result<()> {
    let wanted = mount_at(from).map(|entry| entry.device);
    match mount_at(target).map(|entry| entry.device) {
        found if found.is_some() && found == wanted => return Ok(()),
        Some(_) => detach(target)?,
        None => {}
    }
    fs::DirBuilder::new().recursive(true).mode(0o750).create(target)?;
    Ok(mount(Some(from), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?)
}

/// Takes away all mounts of ckfs at a target.
pub(crate) fn detach(target: &Path) -> io::Result<()> {
    while mount_at(target).is_some() {
        umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?;
    }
    Ok(())
}

impl State {
    /// # Errors
    /// The directory cannot be made.
    pub(crate) fn new(root: &Path) -> io::Result<Self> {
        let make = |path: &Path| fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
        ["volumes", "mounts"].iter().try_for_each(|name| make(&root.join(name)))?;
        // The table of mounts has paths without links.
        Ok(Self { root: root.canonicalize()? })
    }

    /// The directory of a daemon.
    pub(crate) fn place(&self, key: &str) -> PathBuf {
        self.root.join("mounts").join(key)
    }

    fn file(&self, target: &Path) -> PathBuf {
        use std::os::unix::ffi::OsStrExt;
        let digest = short_digest(Sha256::new_with_prefix(target.as_os_str().as_bytes()));
        self.root.join("volumes").join(digest).with_extension("json")
    }

    /// What is published at a target.
    pub(crate) fn find(&self, target: &Path) -> Option<Published> {
        serde_json::from_slice(&fs::read(self.file(target)).ok()?).ok()
    }

    /// Everything that is published.
    pub(crate) fn all(&self) -> Vec<Published> {
        let entries = fs::read_dir(self.root.join("volumes")).into_iter().flatten().flatten();
        entries.filter_map(|entry| serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()).collect()
    }

    /// The daemons that have a directory.
    pub(crate) fn keys(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root.join("mounts")).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    pub(crate) fn write(&self, published: &Published) -> io::Result<()> {
        let file = self.file(&published.target);
        let partial = file.with_extension("part");
        fs::write(&partial, serde_json::to_vec(published)?)?;
        fs::rename(partial, file)
    }

    pub(crate) fn remove(&self, target: &Path) -> io::Result<()> {
        if_there(fs::remove_file(self.file(target)))
    }

    /// Ends the daemon of a key that no volume has any more, and removes its directory.
    pub(crate) fn tear_down(&self, key: &str) -> io::Result<()> {
        if self.all().iter().any(|published| published.key == key) {
            return Ok(());
        }
        let place = self.place(key);
        let point = place.join("mnt");
        if mount_at(&point).is_some() {
            let options = UnmountOptions { wait: BUSY_LIMIT, ..UnmountOptions::default() };
            match unmount(&point, options) {
                Ok(()) | Err(UnmountError::NotMounted { .. }) => {}
                Err(error) => {
                    warn!("{error}; taken away while it is used");
                    detach(&point)?;
                }
            }
        }
        if_there(fs::remove_dir_all(&place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_published_outlives_its_writer() {
        let directory = tempfile::tempdir().unwrap();
        let state = State::new(directory.path()).unwrap();
        let published = |target: &str, key: &str| Published {
            volume: "v".into(),
            target: target.into(),
            key: key.into(),
            has_secrets: false,
        };
        for found in [published("/a", "1"), published("/b", "1"), published("/a", "2")] {
            state.write(&found).unwrap();
        }
        fs::create_dir_all(state.place("1")).unwrap();
        fs::create_dir_all(state.place("2")).unwrap();
        let next = State::new(directory.path()).unwrap();
        assert_eq!(next.find(Path::new("/a")), Some(published("/a", "2")));
        assert_eq!((next.all().len(), next.keys().len()), (2, 2));
        next.remove(Path::new("/a")).unwrap();
        next.remove(Path::new("/a")).unwrap();
        next.tear_down("2").unwrap();
        next.tear_down("1").unwrap();
        assert_eq!(next.keys(), ["1"]);
        assert_eq!(health(&next.place("1")), PointHealth::None);
    }

    #[test]
    fn a_socket_is_taken_over_from_a_process_that_is_gone() {
        let path = tempfile::tempdir().unwrap().keep().join("s");
        let first = listen(&path).unwrap();
        assert!(listen(&path).unwrap_err().to_string().ends_with("another process answers there"));
        drop(first);
        listen(&path).unwrap();
    }
}
