#![allow(unsafe_code)]
//! How a mount is made and removed.
//!
//! Root mounts by mount(2), which lets the type be `fuse.ckfs`. Other users ask the setuid program `fusermount3`, which sends
//! the descriptor of `/dev/fuse` over a socket. In both cases the mount is known by its id from then on. It is
//! unmounted only if the path still leads to that id.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, IoSliceMut, Read},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::{fs::MetadataExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use ckfs_host::limits::may_administer;
use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags},
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg},
    unistd::{getegid, geteuid},
};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use tracing::{info, warn};

use super::{
    FS_TYPE,
    mount_user::{MountUser, mount_users},
    mountinfo::{Device, MountEntry, ckfs_mounts, is_stale, locate, mount_at, mounts},
    options::MountOptions,
    unmount::{UnmountError, unmount_once},
};

/// Why a mount was not made, or did not go on.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel has no FUSE, or this container does not see it.
    #[error("/dev/fuse: not found; load the module (modprobe fuse) or give the container the device")]
    NoDevice,
    /// The device cannot be opened.
    #[error("/dev/fuse: {0}")]
    Device(io::Error),
    /// Without the table of mounts none is found again.
    #[error(
        "/proc: not mounted here, and ckfs finds mounts by its files; mount -t proc proc /proc, or give the container one"
    )]
    NoProc,
    /// A daemon has it in the place of its standard streams.
    #[error("/dev/null: not found; mknod -m 666 /dev/null c 1 3, or bind the host's /dev into this root")]
    NoNull,
    /// The directory to mount on does not exist; it is not created.
    #[error("mountpoint {}: no such directory; create it first", path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The kernel refused.
    #[error("mount on {}: {errno}", path.display())]
    Mount {
        /// The path without symlinks.
        path: PathBuf,
        /// Why.
        errno: Errno,
    },
    /// This host lacks something else that a mount needs, or does not permit it.
    #[error("{0}")]
    Host(String),
    /// The mountpoint is none that can be mounted on, or a call of the system failed that any program needs.
    #[error("{0}")]
    Refused(String),
}

impl MountError {
    /// A call of the system failed.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::Refused(format!("{what}: {}", error.into()))
    }

    /// The first exchange with the kernel failed, or the connection broke.
    #[allow(clippy::needless_pass_by_value, reason = "maps errors")]
    pub(crate) fn session(error: io::Error) -> Self {
        Self::Host(format!("session with the kernel: {error}"))
    }
}

/// The error of a mountpoint.
fn refused(path: &Path, why: impl Display) -> MountError {
    MountError::Refused(format!("mountpoint {}: {why}", path.display()))
}

/// A mount that this process made.
#[derive(Debug)]
pub(crate) struct Mounted {
    /// As it was when the mount was made.
    pub(crate) entry: MountEntry,
    /// Number that no later mount gets, where the kernel has one.
    pub(crate) unique_id: Option<u64>,
}

/// State of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MountState {
    /// The path leads to it.
    Attached,
    /// It exists, but another mount lies above it.
    Covered,
    /// It is no longer in the table of mounts.
    Gone,
}

/// Checks what a mount needs of the host besides FUSE. A chroot or a sandbox may lack it.
///
/// # Errors
/// [`MountError::NoProc`], [`MountError::NoNull`]; [`MountError::NoDevice`] if no device is there at all.
pub fn check_host() -> Result<(), MountError> {
    let [has_mounts, has_null, has_fuse] =
        ["/proc/self/mountinfo", "/dev/null", "/dev/fuse"].map(|file| Path::new(file).exists());
    match (has_mounts, has_null, has_fuse) {
        (false, ..) => Err(MountError::NoProc),
        (true, false, false) => Err(MountError::NoDevice),
        (true, false, true) => Err(MountError::NoNull),
        (true, true, _) => Ok(()),
    }
}

/// Makes a mount on `mountpoint`; the descriptor is the connection to the kernel.
pub(crate) fn mount(mountpoint: &Path, options: &MountOptions) -> Result<(OwnedFd, Mounted), MountError> {
    let path = prepare(mountpoint)?;
    let source = format!("ckfs:{}", sanitize(&options.name));
    let fd = if geteuid().is_root() {
        match mount_as_root(&path, &source, options) {
            // Root without CAP_SYS_ADMIN, as in many containers.
            Err(MountError::Mount { errno: Errno::EPERM, .. }) => {
                mount_by_helper(&path, &source, options).map_err(|error| match may_administer() {
                    Some(false) => MountError::Host(format!(
                        "mount on {}: this process is root, and lacks CAP_SYS_ADMIN, which a mount needs; a container gets it with \
                         /dev/fuse by `--cap-add SYS_ADMIN --device /dev/fuse --security-opt apparmor=unconfined`; without it, \
                         `ckfs serve` and `ckfs export` need no mount ({error})",
                        path.display()
                    )),
                    Some(true) | None => error,
                })?
            }
            result => result?,
        }
    } else {
        mount_by_helper(&path, &source, options)?
    };
    let found = locate(&path).and_then(|location| mount_at(&location));
    match found {
        Ok(Some(entry)) if entry.is_ckfs() => {
            let unique_id = unique_mount_id(&entry.mountpoint);
            Ok((fd, Mounted { entry, unique_id }))
        }
        // Closing the descriptor leaves a stale mount beneath, which the next start removes.
        Ok(_) => Err(refused(&path, "covered by another mount while mounting")),
        Err(error) => Err(refused(&path, error)),
    }
}

/// Most stale mounts that are removed from one mountpoint.
const STALE_MAX: usize = 16;

/// Checks that `mountpoint` can be mounted on, and removes stale mounts of ours from it. The path without symlinks.
fn prepare(mountpoint: &Path) -> Result<PathBuf, MountError> {
    let missing = || MountError::Missing { path: mountpoint.to_owned() };
    let in_path = |error: io::Error| {
        if error.kind() == io::ErrorKind::NotFound { missing() } else { refused(mountpoint, error) }
    };
    for _ in 0..STALE_MAX {
        let location = locate(mountpoint).map_err(in_path)?;
        let Some(entry) = mount_at(&location).map_err(in_path)? else { break };
        // An automount point expects to be covered.
        if entry.fs_type == "autofs" {
            return Ok(location.path);
        }
        if !entry.is_ckfs() || !is_stale(&location.path) {
            let (source, fs_type) = (entry.source.to_string_lossy(), entry.fs_type);
            let why = format!("already mounted: {source} (type {fs_type}); unmount it first");
            return Err(refused(&location.path, why));
        }
        warn!("removing the stale mount on {}", location.path.display());
        let path = location.path;
        let failed = |error| refused(&path, format!("cannot remove the stale mount: {error}"));
        unmount_once(&path, true).map_err(failed)?;
    }
    let path = locate(mountpoint).map_err(in_path)?.path;
    check_place(mountpoint, &path)?;
    if !fs::metadata(&path).map_err(in_path)?.is_dir() {
        return Err(refused(mountpoint, "not a directory"));
    }
    // The device tells a directory of ours from one of a mount that covers ours.
    let device = fs::metadata(&path).map_err(in_path)?.dev();
    let around = |entry: &MountEntry| path.starts_with(&entry.mountpoint) && entry.device.number() == device;
    if let Some(entry) = ckfs_mounts().into_iter().find(around) {
        let mount = entry.mountpoint.display();
        return Err(refused(&path, format!("is a directory of the mount on {mount}; choose another one")));
    }
    if fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some()) {
        warn!("{} is not empty; what it holds is hidden while mounted", path.display());
    }
    Ok(path)
}

/// Refuses a directory that is none of files: this process's own descriptors would be covered.
fn check_place(mountpoint: &Path, real: &Path) -> Result<(), MountError> {
    let found = nix::sys::statfs::statfs(real);
    if found.is_ok_and(|found| found.filesystem_type() == nix::sys::statfs::PROC_SUPER_MAGIC) {
        let leads = if mountpoint == real { String::new() } else { format!("leads to {}, which ", real.display()) };
        let why = format!(
            "{leads}is in /proc, which shows processes and their descriptors; give a directory of a file system with files, or \
             /dev/fd/N for a descriptor that was passed"
        );
        return Err(refused(mountpoint, why));
    }
    Ok(())
}

/// Checks a mountpoint as mounting does, and changes nothing. A stale mount is none of its concerns: mounting removes it.
///
/// # Errors
/// [`MountError::Missing`], [`MountError::Refused`].
pub fn check_mountpoint(mountpoint: &Path) -> Result<(), MountError> {
    match fs::metadata(mountpoint) {
        Ok(found) if !found.is_dir() => Err(refused(mountpoint, "not a directory")),
        Ok(_) => match fs::canonicalize(mountpoint) {
            Ok(real) => check_place(mountpoint, &real),
            Err(_) => Ok(()),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(MountError::Missing { path: mountpoint.to_owned() })
        }
        // Anything else may be a stale mount.
        Err(_) => Ok(()),
    }
}

/// `name` with only those characters that the source column shows without escapes.
pub(crate) fn sanitize(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-@:/+".contains(c) { c } else { '_' };
    name.chars().take(200).map(plain).collect()
}

/// Mounts by mount(2), which needs the capability to in the mount namespace's user namespace.
pub(crate) fn mount_as_root(path: &Path, source: &str, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let device = File::options().read(true).write(true).open("/dev/fuse").map_err(|source| {
        if source.kind() == io::ErrorKind::NotFound { MountError::NoDevice } else { MountError::Device(source) }
    })?;
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        geteuid(),
        getegid()
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOATIME;
    match nix::mount::mount(Some(source), path, Some(FS_TYPE), flags, Some(data.as_str())) {
        Ok(()) => Ok(device.into()),
        Err(Errno::ENODEV) => Err(MountError::NoDevice),
        Err(errno) => Err(MountError::Mount { path: path.to_owned(), errno }),
    }
}

/// Lets `fusermount3` mount and receives the descriptor of `/dev/fuse` from it.
fn mount_by_helper(path: &Path, source: &str, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let subtype = FS_TYPE.split_once('.').map_or(FS_TYPE, |(_, subtype)| subtype);
    let mut arguments = format!("ro,nodev,nosuid,noatime,default_permissions,fsname={source},subtype={subtype}");
    if options.allow_other {
        arguments.push_str(",allow_other");
    }
    let failed = |error: io::Error| MountError::Host(format!("fusermount3: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let child = Command::new("fusermount3")
        .args(["-o", &arguments, "--"])
        .arg(path)
        // The socket is its standard input, so that the child inherits no other descriptor.
        .env("_FUSE_COMMFD", "0")
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound {
            let message = "only root can mount without fusermount3, and that was not found; install fuse3";
            return MountError::Host(message.to_owned());
        }
        failed(error)
    })?;
    let received = receive_descriptor(&ours);
    let mut message = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut message).map_err(failed)?;
    }
    let status = child.wait().map_err(failed)?;
    match received {
        Ok(Some(fd)) if status.success() => Ok(fd),
        Err(errno) => Err(failed(errno.into())),
        Ok(_) => {
            let message = message.trim().trim_start_matches("fusermount3: ");
            let message = if message.is_empty() { status.to_string() } else { message.to_owned() };
            Err(MountError::Host(format!("fusermount3: {message}")))
        }
    }
}

/// Receives one descriptor; `None` if the other side went away without sending it.
pub(crate) fn receive_descriptor(socket: &UnixStream) -> nix::Result<Option<OwnedFd>> {
    Ok(receive_descriptors(socket)?.1.pop())
}

/// Receives a byte, 0 if there is none, and the descriptors with it.
pub(crate) fn receive_descriptors(socket: &UnixStream) -> nix::Result<(u8, Vec<OwnedFd>)> {
    let mut byte = [0_u8];
    let (_, descriptors) = receive_passed(socket, &mut byte)?;
    Ok((byte[0], descriptors))
}

/// Receives one message, and the descriptors with it: how many bytes it has, at most those of `message`. The descriptors are those of a
/// process that mounts for this one, of `/dev/fuse` or others.
///
/// # Errors
/// Those of `recvmsg(2)`.
pub fn receive_passed(socket: &UnixStream, message: &mut [u8]) -> nix::Result<(usize, Vec<OwnedFd>)> {
    let mut parts = [IoSliceMut::new(message)];
    let mut space = nix::cmsg_space!([RawFd; 32]);
    let message = loop {
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Err(Errno::EINTR) => {}
            result => break result?,
        }
    };
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(received) = control {
            // SAFETY: the kernel has just installed these descriptors for this process in this call, so they are open and
            // no other code owns them; each is wrapped once.
            descriptors.extend(received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok((message.bytes, descriptors))
}

impl Mounted {
    /// The mount that another daemon has served, if it is still what the path leads to.
    pub(crate) fn taken(mountpoint: &Path, device: &str, unique_id: Option<u64>) -> Result<Self, MountError> {
        let found = locate(mountpoint).and_then(|location| mount_at(&location));
        match found.map_err(|error| refused(mountpoint, error))? {
            Some(entry)
                if entry.is_ckfs()
                    && entry.device.to_string() == device
                    && unique_mount_id(&entry.mountpoint) == unique_id =>
            {
                Ok(Self { entry, unique_id })
            }
            _ => Err(refused(mountpoint, "covered by another mount, or no longer that of its daemon")),
        }
    }

    /// Where it was mounted.
    pub(crate) fn path(&self) -> &Path {
        &self.entry.mountpoint
    }

    /// Its state now. If the table cannot be read it counts as attached, so that unmounting is tried.
    pub(crate) fn state(&self) -> MountState {
        let Ok(entry) = self.current() else { return MountState::Attached };
        let Some(entry) = entry else { return MountState::Gone };
        match locate(&entry.mountpoint) {
            Ok(location) if location.mount_id == self.entry.id => {
                // A later mount may have been given the same numbers.
                if unique_mount_id(&entry.mountpoint) == self.unique_id {
                    MountState::Attached
                } else {
                    MountState::Gone
                }
            }
            Ok(_) | Err(_) => MountState::Covered,
        }
    }

    /// Unmounts, if the path still leads to this mount. Returns the state that it found.
    pub(crate) fn unmount(&self, lazy: bool) -> Result<MountState, UnmountError> {
        match self.state() {
            MountState::Attached => {
                // A mount that was moved is unmounted where it is now.
                let moved = self.current().ok().flatten().map(|entry| entry.mountpoint);
                unmount_once(moved.as_deref().unwrap_or(self.path()), lazy).map(|()| MountState::Gone)
            }
            state @ (MountState::Covered | MountState::Gone) => Ok(state),
        }
    }

    /// A search for the processes that use the mount.
    pub(crate) fn users(&self) -> impl FnOnce() -> Vec<MountUser> + Send + use<> {
        let entry = self.entry.clone();
        move || mount_users(&entry)
    }

    /// Its line in the table of mounts: the line with the same numbers, type and source.
    fn current(&self) -> io::Result<Option<MountEntry>> {
        let key = |entry: &MountEntry| (entry.id, entry.device, entry.fs_type.clone(), entry.source.clone());
        Ok(mounts()?.into_iter().find(|entry| key(entry) == key(&self.entry)))
    }
}

/// The unique id of the topmost mount at `path` (`STATX_MNT_ID_UNIQUE`, Linux 6.8), which is never used again while the system is up.
/// Mount ids and device numbers of the table of mounts are used again at once: a mount made right after another was removed often has
/// both. `None` if the kernel has none or the path cannot be examined.
///
/// The file system is not asked: attributes that the kernel has are good enough, as none are used.
fn unique_mount_id(path: &Path) -> Option<u64> {
    let asked = StatxFlags::from_bits_retain(libc::STATX_MNT_ID_UNIQUE);
    let flags = AtFlags::NO_AUTOMOUNT | AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let answer = statx(CWD, path, flags, asked).ok()?;
    (answer.stx_mask & asked.bits() != 0).then_some(answer.stx_mnt_id)
}

/// Raises the kernel's read-ahead for a mount, which only root may.
pub(crate) fn set_read_ahead(device: Device, kib: u32) {
    let file = format!("/sys/class/bdi/{device}/read_ahead_kb");
    match fs::write(&file, kib.to_string()) {
        Ok(()) => info!("read-ahead is {kib} KiB"),
        Err(error) => info!("read-ahead stays at the kernel's default: {file}: {error}"),
    }
}

/// Ends the connection of a mount to the kernel: all requests fail from now on.
pub(crate) fn abort(device: Device) {
    const CONNECTIONS: &str = "/sys/fs/fuse/connections";
    let file = format!("{CONNECTIONS}/{}/abort", device.minor);
    // If the control files are not mounted, root mounts them for the moment.
    let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let mounted = !Path::new(&file).exists()
        && nix::mount::mount(Some("fusectl"), CONNECTIONS, Some("fusectl"), flags, None::<&str>).is_ok();
    if let Err(error) = fs::write(&file, "1") {
        // The end of this process closes the connection just as well.
        info!("{file}: {error}");
    }
    if mounted && let Err(errno) = nix::mount::umount2(CONNECTIONS, MntFlags::MNT_DETACH) {
        warn!("{CONNECTIONS}: {errno}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_names_need_no_escapes() {
        for (name, expected) in
            [("org/model@main", "org/model@main"), ("a b,c\\d\n", "a_b_c_d_"), ("modèle", "mod_le"), ("", "")]
        {
            assert_eq!(sanitize(name), expected);
        }
        assert_eq!(sanitize(&"x".repeat(500)).len(), 200);
    }

    #[test]
    fn refuses_mountpoints_that_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let text = |path: &Path| prepare(path).unwrap_err().to_string();
        assert_eq!(text(&file), format!("mountpoint {}: not a directory", file.display()));
        assert!(matches!(prepare(&directory.path().join("missing")), Err(MountError::Missing { .. })));
        let below = file.join("below");
        assert_eq!(text(&below), format!("mountpoint {}: Not a directory (os error 20)", below.display()));
        let occupied = text(Path::new("/proc"));
        assert!(occupied.starts_with("mountpoint /proc: already mounted: "), "{occupied}");
        assert!(occupied.ends_with(" (type proc); unmount it first"), "{occupied}");
        assert_eq!(prepare(directory.path()).unwrap(), directory.path().canonicalize().unwrap());
    }

    #[test]
    fn receives_nothing_from_a_closed_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(receive_descriptor(&ours).unwrap().is_none());
    }

    #[test]
    fn tells_mounts_apart() {
        let proc = unique_mount_id(Path::new("/proc"));
        assert_eq!(proc, unique_mount_id(Path::new("/proc/self/status")));
        assert!(proc.is_none() || proc != unique_mount_id(Path::new("/")));
        assert_eq!(unique_mount_id(Path::new("/no/such/path")), None);
    }
}
