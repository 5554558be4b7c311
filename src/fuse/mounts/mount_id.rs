#![allow(unsafe_code)]
//! The kernel's unique mount id (`STATX_MNT_ID_UNIQUE`, Linux 6.8), which is never used again.
//!
//! Mount ids and device numbers of the table of mounts are used again at once: a mount made right after another was removed
//! often has both. Since Linux 6.8 there is a second id that is unique for as long as the system is up.

use std::{ffi::CString, mem::MaybeUninit, os::unix::ffi::OsStrExt, path::Path};

/// The unique id of the topmost mount at `path`; `None` if the kernel has none or the path cannot be examined.
///
/// The file system is not asked: attributes that the kernel has are good enough, as none are used.
pub(super) fn unique_mount_id(path: &Path) -> Option<u64> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let flags = libc::AT_NO_AUTOMOUNT | libc::AT_SYMLINK_NOFOLLOW | libc::AT_STATX_DONT_SYNC;
    let mut answer = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: `path` is a C string and `answer` has room for the structure that the call fills; both outlive the call,
    // which keeps neither.
    let result =
        unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, libc::STATX_MNT_ID_UNIQUE, answer.as_mut_ptr()) };
    if result != 0 {
        return None;
    }
    // SAFETY: the structure consists of integers, for which all zeros are valid, and was zeroed before the call.
    let answer = unsafe { answer.assume_init() };
    (answer.stx_mask & libc::STATX_MNT_ID_UNIQUE != 0).then_some(answer.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_mounts_apart() {
        let proc = unique_mount_id(Path::new("/proc"));
        assert_eq!(proc, unique_mount_id(Path::new("/proc/self/status")));
        assert!(proc.is_none() || proc != unique_mount_id(Path::new("/")));
        assert_eq!(unique_mount_id(Path::new("/no/such/path")), None);
    }
}
