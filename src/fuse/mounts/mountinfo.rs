//! The kernel's table of mounts, and which mount a path leads to.
//!
//! A path alone does not name a mount: mounts stack, and the topmost may not be a ckfs mount. A mount is known by its id.
//! No function here sends a request to the file system that it looks at, so all work on a mount whose daemon is dead or stuck.
//! The one exception, `is_stale`, asks in another thread and with a time limit.
//!
//! Own code, because `procfs` (0.18) leaves `\040` in mount points as it is and refuses the whole table for one path that is
//! not UTF-8 or one line that it does not know.

use std::{
    ffi::OsString,
    fmt, fs, io,
    os::{
        fd::AsRawFd,
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use ckfs_host::{ask_within, memory::unescape};
use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    sys::stat::{Mode, makedev},
};

use super::FS_TYPE;

/// Number of the device behind a mount; for FUSE the minor number also names the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// Major number, 0 for FUSE.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl Device {
    /// The number that `stat` gives for files on the mount.
    pub fn number(self) -> u64 {
        makedev(u64::from(self.major), u64::from(self.minor))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// One line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Mount id; unique among the mounts that exist at a time.
    pub id: u64,
    /// Id of the mount that this one is mounted on.
    pub parent: u64,
    /// Device.
    pub device: Device,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Options of the mount, comma-separated.
    pub options: String,
    /// File system type.
    pub fs_type: String,
    /// What is mounted, for ckfs `ckfs:<name>`.
    pub source: OsString,
    /// Options of the file system, comma-separated.
    pub fs_options: String,
}

impl MountEntry {
    /// Whether this is a mount of ckfs.
    pub(crate) fn is_ckfs(&self) -> bool {
        self.fs_type == FS_TYPE
    }

    /// Whether a FUSE mount lets in other users than the one that mounted it.
    pub fn allows_other(&self) -> bool {
        self.fs_options.split(',').any(|option| option == "allow_other")
    }
}

/// All mounts that this process sees.
///
/// # Errors
/// The table cannot be read, as when `/proc` is not mounted.
pub(super) fn mounts() -> io::Result<Vec<MountEntry>> {
    mounts_of(Path::new("/proc/self"))
}

/// All mounts that the process of this directory of `/proc` sees.
pub(super) fn mounts_of(process: &Path) -> io::Result<Vec<MountEntry>> {
    Ok(parse(&fs::read(process.join("mountinfo"))?))
}

/// All ckfs mounts that this process sees, live and stale; none if the table cannot be read.
pub fn ckfs_mounts() -> Vec<MountEntry> {
    let mut mounts = mounts().unwrap_or_default();
    mounts.retain(MountEntry::is_ckfs);
    mounts
}

/// Whether `/` of this process is not the root of a mount, as in most chroots. False if the table cannot be read.
pub(crate) fn is_in_chroot() -> bool {
    mounts().is_ok_and(|mounts| !mounts.iter().any(|entry| entry.mountpoint == Path::new("/")))
}

/// Parses the table; lines that do not have its form are left out.
fn parse(table: &[u8]) -> Vec<MountEntry> {
    table.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse::<u64>().ok();
    let (id, parent) = (number()?, number()?);
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = Device { major: major.parse().ok()?, minor: minor.parse().ok()? };
    let _root = fields.next()?;
    let mountpoint = PathBuf::from(OsString::from_vec(unescape(fields.next()?)));
    let options = String::from_utf8_lossy(fields.next()?).into_owned();
    // Any number of optional fields, then a lone dash.
    fields.find(|field| *field == b"-")?;
    let fs_type = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    let source = OsString::from_vec(unescape(fields.next()?));
    let fs_options = String::from_utf8_lossy(fields.next().unwrap_or_default()).into_owned();
    Some(MountEntry { id, parent, device, mountpoint, options, fs_type, source, fs_options })
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MountLocation {
    /// The path without symlinks.
    pub(super) path: PathBuf,
    /// Id of the mount that it lies in, which is the topmost one there.
    pub(super) mount_id: u64,
}

/// Finds out what `path` leads to, without asking the file system that is mounted there.
///
/// Opening with `O_PATH` and reading back the descriptor's link and mount id is answered by the kernel alone; resolving
/// the path in the usual way would fail or hang on a mount whose daemon is gone.
pub(super) fn locate(path: &Path) -> io::Result<MountLocation> {
    // Not by `OpenOptions`: it drops this flag where the C library is musl, which counts it among the access modes.
    let file = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let resolved = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let mount_id = mount_id_of(&info).ok_or_else(|| io::Error::other("no mount id in /proc/self/fdinfo"))?;
    Ok(MountLocation { path: resolved, mount_id })
}

/// A path without symlinks, found as [`locate`] does; as it is if that fails.
pub(crate) fn resolved(path: &Path) -> PathBuf {
    locate(path).map_or_else(|_| path.to_owned(), |location| location.path)
}

/// The line `mnt_id:` of a `/proc/<pid>/fdinfo` file.
pub(super) fn mount_id_of(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
}

/// The mount whose root `location` is; `None` if it only lies somewhere inside a mount.
pub(super) fn mount_at(location: &MountLocation) -> io::Result<Option<MountEntry>> {
    let entry = mounts()?.into_iter().find(|entry| entry.id == location.mount_id);
    Ok(entry.filter(|entry| entry.mountpoint == location.path))
}

/// Time that a mount has to answer.
const STALE_CHECK_LIMIT: Duration = Duration::from_secs(5);

/// Whether the mount at `path` has lost its daemon. A mount that does not answer in time is not stale but stuck.
pub(crate) fn is_stale(path: &Path) -> bool {
    let path = path.to_owned();
    matches!(
        ask_within(STALE_CHECK_LIMIT, "ckfs-stale", move || nix::sys::statfs::statfs(&path)),
        Ok(Some(Err(Errno::ENOTCONN | Errno::ECONNABORTED | Errno::ECONNREFUSED)))
    )
}

/// `path` without its "deleted" mark, in bytes, for comparing with mount points.
pub(super) fn is_below(path: &Path, mountpoint: &Path) -> bool {
    let path = path.as_os_str().as_bytes();
    Path::new(std::ffi::OsStr::from_bytes(path.strip_suffix(b" (deleted)").unwrap_or(path))).starts_with(mountpoint)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_the_table() {
        let table = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
            29 26 0:26 / /a\\040b\\134c rw - fuse.ckfs ckfs:o/m@1 ro,user_id=0\n\
            30 26 0:27 / /x rw shared:1 master:7 - tmpfs tm\\011p rw\n\
            \nnonsense\n31 26 0 / /x rw - tmpfs t rw\n32 26 0:1 / /x rw tmpfs t rw\n";
        let entries = parse(table);
        assert_eq!(entries.len(), 3);
        assert_eq!(
            entries[1],
            MountEntry {
                id: 29,
                parent: 26,
                device: Device { major: 0, minor: 26 },
                mountpoint: "/a b\\c".into(),
                options: "rw".into(),
                fs_type: "fuse.ckfs".into(),
                source: "ckfs:o/m@1".into(),
                fs_options: "ro,user_id=0".into(),
            }
        );
        assert!(entries[1].is_ckfs() && !entries[0].is_ckfs());
        assert_eq!(entries[2].source, "tm\tp");
        assert!(!entries[1].allows_other());
        let other = parse(b"1 2 0:3 / /x rw - fuse.ckfs ckfs:x ro,user_id=0,allow_other\n");
        assert!(other[0].allows_other());
    }

    #[test]
    fn unescapes_only_what_is_escaped() {
        for (field, expected) in [("a\\040b", "a b"), ("a\\04", "a\\04"), ("\\", "\\"), ("\\999", "\\999"), ("", "")] {
            assert_eq!(unescape(field.as_bytes()), expected.as_bytes(), "{field}");
        }
        assert_eq!(unescape(b"\\777"), b"\\777", "not a byte");
    }

    #[test]
    fn locates_mounts_and_what_lies_within() {
        let proc = locate(Path::new("/proc")).unwrap();
        assert_eq!(mount_at(&proc).unwrap().unwrap().fs_type, "proc");
        let inside = locate(Path::new("/proc/self/..")).unwrap();
        assert_eq!(inside.path, Path::new("/proc"));
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(mount_at(&locate(directory.path()).unwrap()).unwrap(), None);
    }

    #[test]
    fn below_is_by_component() {
        assert!(is_below(Path::new("/a/b"), Path::new("/a/b")));
        assert!(is_below(Path::new("/a/b/c (deleted)"), Path::new("/a/b")));
        assert!(is_below(Path::new("/a/b (deleted)"), Path::new("/a/b")));
        assert!(!is_below(Path::new("/a/bc"), Path::new("/a/b")));
    }

    proptest! {
        #[test]
        fn never_panics_on_any_table(table: Vec<u8>) {
            parse(&table);
        }

        #[test]
        fn any_mountpoint_survives_escaping(name in "[ -~\t\n]{1,20}") {
            let escaped: String = name.bytes().map(|byte| match byte {
                b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}"),
                _ => char::from(byte).to_string(),
            }).collect();
            let line = format!("1 2 0:3 / /{escaped} rw - fuse.ckfs ckfs:x ro\n");
            let entries = parse(line.as_bytes());
            prop_assert_eq!(entries.len(), 1);
            prop_assert_eq!(&entries[0].mountpoint, &PathBuf::from(format!("/{name}")));
        }
    }
}
