//! The processes that use a mount, and so keep it busy.
//!
//! Best effort: a user does not see all processes of other users, and the kernel itself may use a mount, as for a loop device or
//! another mount. No function here touches the mount's files. Open files are known by the
//! mount id in `fdinfo`, mapped ones by their device, working directories by path.

use std::{collections::HashSet, fmt, fs, path::Path};

use super::mountinfo::{MountEntry, is_below, mount_id_of, mounts_of};

/// A process that keeps a mount busy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountUser {
    /// Process id.
    pub pid: u32,
    /// Name of its program, cut to 15 bytes by the kernel.
    pub name: String,
    /// How it uses the mount, in words; the first way that was found.
    pub hold: &'static str,
}

impl fmt::Display for MountUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {}, {})", self.name, self.pid, self.hold)
    }
}

/// Most processes that are listed; a training host may have hundreds.
const USERS_MAX: usize = 32;

/// Finds the processes that use `mount`.
pub(super) fn mount_users(mount: &MountEntry) -> Vec<MountUser> {
    users(|process| hold_of(process, mount))
}

/// A process of each mount namespace, of this one too, where the file system of `mount` is mounted: it lives as long.
pub(super) fn mounted_for(mount: &MountEntry) -> Vec<MountUser> {
    let mut seen = HashSet::new();
    users(|process| {
        let is_new = fs::read_link(process.join("ns/mnt")).map_or(true, |space| seen.insert(space));
        // Numbers of devices are used again.
        let is_it = |entry: &MountEntry| {
            (entry.device, &entry.fs_type, &entry.source) == (mount.device, &mount.fs_type, &mount.source)
        };
        (is_new && mounts_of(process).ok()?.iter().any(is_it)).then_some("mount namespace")
    })
}

fn users(mut hold_of: impl FnMut(&Path) -> Option<&'static str>) -> Vec<MountUser> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| {
        let process = Path::new("/proc").join(pid.to_string());
        let hold = hold_of(&process)?;
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default().trim_end().to_owned();
        Some(MountUser { pid, name, hold })
    })
    .take(USERS_MAX)
    .collect()
}

/// The processes in one line.
pub(crate) fn describe(users: &[MountUser]) -> String {
    if users.is_empty() {
        return "held by a process that cannot be seen".to_owned();
    }
    let names: Vec<String> = users.iter().map(ToString::to_string).collect();
    format!("held by {}", names.join(", "))
}

fn hold_of(process: &Path, mount: &MountEntry) -> Option<&'static str> {
    let opens = fs::read_dir(process.join("fdinfo"))
        .into_iter()
        .flatten()
        .flatten()
        .any(|entry| fs::read_to_string(entry.path()).is_ok_and(|info| mount_id_of(&info) == Some(mount.id)));
    if opens {
        return Some("open file");
    }
    let stands = ["cwd", "root"]
        .iter()
        .any(|link| fs::read_link(process.join(link)).is_ok_and(|path| is_below(&path, &mount.mountpoint)));
    if stands {
        return Some("working directory");
    }
    // Lines of `maps`: address, permissions, offset, device in hexadecimal, inode, path.
    let device = format!("{:02x}:{:02x}", mount.device.major, mount.device.minor);
    let maps = fs::read(process.join("maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    maps.lines().any(|line| line.split_ascii_whitespace().nth(3) == Some(&device)).then_some("mapped file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounts::mountinfo::{Device, locate, mounts};

    #[test]
    fn finds_this_process_and_what_it_holds() {
        let directory = tempfile::tempdir().unwrap();
        let file = fs::File::create(directory.path().join("file")).unwrap();
        let location = locate(directory.path()).unwrap();
        let mount = mounts().unwrap().into_iter().find(|entry| entry.id == location.mount_id).unwrap();
        let process = Path::new("/proc/self");
        assert_eq!(hold_of(process, &mount), Some("open file"));
        drop(file);
        assert!(mounted_for(&mount).iter().any(|user| user.hold == "mount namespace"));
        let elsewhere = MountEntry {
            id: u64::MAX,
            mountpoint: "/nowhere".into(),
            device: Device { major: 0, minor: 0xfff_ffff },
            ..mount
        };
        assert_eq!(hold_of(process, &elsewhere), None);
        assert_eq!(mounted_for(&elsewhere), []);
        let cwd = std::env::current_dir().unwrap();
        assert_eq!(hold_of(process, &MountEntry { mountpoint: cwd, ..elsewhere }), Some("working directory"));
    }

    #[test]
    fn describes_in_one_line() {
        assert_eq!(describe(&[]), "held by a process that cannot be seen");
        let user = MountUser { pid: 7, name: "cat".into(), hold: "mapped file" };
        assert_eq!(describe(&[user.clone(), user]), "held by cat (pid 7, mapped file), cat (pid 7, mapped file)");
    }
}
