//! The kernel's mounts: how one is made, known and removed. Nothing here answers a request.

mod daemon;
mod mount_user;
mod mounted;
mod mountinfo;
mod options;
mod passed;
mod unmount;

pub use mount_user::MountUser;
pub(super) use mount_user::describe;
pub use mounted::{MountError, check_host, check_mountpoint, receive_passed};
pub(super) use mounted::{
    MountState, Mounted, abort, mount, mount_as_root, receive_descriptor, receive_descriptors, sanitize, set_read_ahead,
};
pub use mountinfo::{Device, MountEntry, ckfs_mounts};
pub(super) use mountinfo::{is_in_chroot, is_stale, resolved};
pub use options::MountOptions;
pub(super) use passed::{Passed, adopt, adopt_kept, adopt_socket};
pub use passed::{check_passed, is_passed};
pub use unmount::{UnmountError, UnmountOptions, unmount};

/// File system type of ckfs mounts in the kernel's table.
pub const FS_TYPE: &str = "fuse.ckfs";
