//! The kernel's mounts: how one is made, known and removed. Nothing here answers a request.

mod mount_id;
mod mount_user;
mod mounted;
mod mountinfo;
mod options;
mod unmount;

pub(super) use mount_user::describe;
pub use mount_user::{Hold, MountUser};
pub use mounted::MountError;
pub(super) use mounted::{MountState, Mounted, mount};
pub(super) use mountinfo::is_stale;
pub use mountinfo::{Device, MountEntry, ckfs_mounts};
pub use options::MountOptions;
pub use unmount::{UnmountError, UnmountOptions, unmount};

/// File system type of ckfs mounts in the kernel's table.
pub const FS_TYPE: &str = "fuse.ckfs";
