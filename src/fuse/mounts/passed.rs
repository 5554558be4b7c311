#![allow(unsafe_code)]
//! A mount that another process made: the mountpoint `/dev/fd/N` names its descriptor of `/dev/fuse`.
//!
//! A process with privileges opens `/dev/fuse`, mounts with `fd=N` and passes the descriptor on. This process then serves without
//! any privilege, and perhaps without seeing the mount. So it cannot unmount: the process that mounted does that.

use std::{
    fs,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::{mounted::MountError, mountinfo::Device};

/// Device number of `/dev/fuse` on every Linux.
const FUSE_DEVICE: (u64, u64) = (10, 229);

/// Time for the kernel's first request, which it sends when the mount is made.
const FIRST_REQUEST_MS: u16 = 2000;

/// A mount that another process made and will remove.
#[derive(Debug)]
pub(crate) struct Passed {
    /// `/dev/fd/N`, as given.
    pub(crate) path: PathBuf,
    /// Its device, where the kernel says it (since Linux 6.18).
    pub(crate) device: Option<Device>,
}

/// The number of the descriptor that a mountpoint `/dev/fd/N` names.
pub(crate) fn passed_number(mountpoint: &Path) -> Option<RawFd> {
    let number = mountpoint.to_str()?.strip_prefix("/dev/fd/")?;
    number.parse().ok().filter(|_| number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether a mountpoint names a descriptor that this process inherited: `/dev/fd/N`.
pub fn is_passed(mountpoint: &Path) -> bool {
    passed_number(mountpoint).is_some()
}

fn refused(path: &Path, found: impl Into<String>) -> MountError {
    let (path, found) = (path.display(), found.into());
    MountError::Refused(format!(
        "{path}: expected a descriptor of /dev/fuse, open for reading and writing and mounted by the process that passed it; found \
         {found}"
    ))
}

/// Checks that `/dev/fd/N` is a descriptor of `/dev/fuse`, open for reading and writing. Takes nothing.
///
/// # Errors
/// [`MountError::Refused`].
pub fn check_passed(mountpoint: &Path) -> Result<(), MountError> {
    let number = passed_number(mountpoint).ok_or_else(|| refused(mountpoint, "no number of a descriptor"))?;
    if number <= 2 {
        return Err(refused(mountpoint, "a standard stream"));
    }
    let Ok(metadata) = fs::metadata(format!("/proc/self/fd/{number}")) else {
        return Err(refused(mountpoint, "no open descriptor of this number"));
    };
    let (major, minor) = (libc::major(metadata.rdev()), libc::minor(metadata.rdev()));
    if !metadata.file_type().is_char_device() {
        let name = fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
        return Err(refused(mountpoint, format!("no character device but {}", name.display())));
    }
    if (u64::from(major), u64::from(minor)) != FUSE_DEVICE {
        return Err(refused(mountpoint, format!("the device {major}:{minor}")));
    }
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| i32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    match flags.map(|flags| flags & libc::O_ACCMODE) {
        Some(libc::O_RDWR) | None => Ok(()),
        Some(libc::O_RDONLY) => Err(refused(mountpoint, "one open for reading only")),
        Some(_) => Err(refused(mountpoint, "one open for writing only")),
    }
}

/// Takes the descriptor over, and makes sure that it belongs to a mount that no process serves yet.
pub(crate) fn adopt(mountpoint: &Path) -> Result<(OwnedFd, Passed), MountError> {
    check_passed(mountpoint)?;
    let number = passed_number(mountpoint).ok_or_else(|| refused(mountpoint, "no number of a descriptor"))?;
    // SAFETY: the descriptor is open and is one of /dev/fuse, as was just checked, and no standard stream. This process has opened
    // none of that device by itself before it mounts, so no other value owns this one. It is taken once, since a mount is
    // served once.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(|errno| refused(mountpoint, errno.desc()))?;
    wait_for_mount(&fd).map_err(|found| refused(mountpoint, found))?;
    let device = device_of(&fd);
    Ok((fd, Passed { path: mountpoint.to_owned(), device }))
}

/// Takes over a socket that this process inherited; `None` if the number is that of no socket.
///
/// Must be called at most once, and before this process opens anything.
pub(crate) fn adopt_socket(number: RawFd) -> Option<UnixStream> {
    let is_socket =
        fs::metadata(format!("/proc/self/fd/{number}")).is_ok_and(|metadata| metadata.file_type().is_socket());
    if number <= 2 || !is_socket {
        return None;
    }
    // SAFETY: the descriptor is open, as was just checked. The process has opened none by itself so far, so no other value owns
    // it; the caller takes it once.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).ok()?;
    Some(fd.into())
}

/// Takes over descriptors that systemd has kept, of `/dev/fuse` first.
///
/// Must be called at most once, with the numbers that systemd has told this process.
pub(crate) fn adopt_kept(numbers: &[RawFd]) -> Vec<OwnedFd> {
    // SAFETY: systemd passes them to this process, so that no other value owns them; the caller takes them once.
    let mut kept: Vec<_> = numbers.iter().map(|number| unsafe { OwnedFd::from_raw_fd(*number) }).collect();
    kept.sort_by_key(|fd| check_passed(Path::new(&format!("/dev/fd/{}", fd.as_raw_fd()))).is_err());
    kept
}

/// Waits for the kernel's first request.
fn wait_for_mount(fd: &OwnedFd) -> Result<(), String> {
    loop {
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(FIRST_REQUEST_MS)) {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.desc().to_owned()),
            Ok(0) => return Err("one of a mount that another process serves already".to_owned()),
            Ok(_) if fds[0].revents().is_some_and(|found| found.contains(PollFlags::POLLIN)) => return Ok(()),
            Ok(_) => return Err("one without a mount: it was never mounted, or is unmounted again".to_owned()),
        }
    }
}

/// The device of the mount behind a descriptor.
fn device_of(fd: &OwnedFd) -> Option<Device> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    let minor = info.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok())?;
    Some(Device { major: 0, minor })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_number_names_a_descriptor() {
        for (path, number) in [
            ("/dev/fd/3", Some(3)),
            ("/dev/fd/", None),
            ("/dev/fd/+3", None),
            ("/dev/fd/3/x", None),
            ("/dev/fd/99999999999", None),
            ("/mnt/3", None),
        ] {
            assert_eq!(passed_number(Path::new(path)), number, "{path}");
            assert_eq!(is_passed(Path::new(path)), number.is_some(), "{path}");
        }
    }

    #[test]
    fn what_is_no_descriptor_of_fuse_is_named() {
        let file = tempfile::tempfile().unwrap();
        let null = fs::File::open("/dev/null").unwrap();
        for (number, found) in [
            (0, "a standard stream".to_owned()),
            (1_000_000, "no open descriptor of this number".to_owned()),
            (file.as_raw_fd(), "no character device but ".to_owned()),
            (null.as_raw_fd(), "the device 1:3".to_owned()),
        ] {
            let error = check_passed(Path::new(&format!("/dev/fd/{number}"))).unwrap_err().to_string();
            assert!(error.starts_with(&format!("/dev/fd/{number}: expected ")) && error.contains(&found), "{error}");
        }
    }
}
