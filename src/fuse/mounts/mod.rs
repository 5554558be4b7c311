//! The kernel's mounts: how one is made, known and removed. Nothing here answers a request.

mod holder;
mod mount_id;
mod mounted;
mod mountinfo;
mod options;
mod unmount;

pub(super) use holder::describe;
pub use holder::{Hold, Holder};
pub use mounted::MountError;
pub(super) use mounted::{Mounted, Standing, mount};
pub(super) use mountinfo::is_stale;
pub use mountinfo::{Device, MountEntry, ckfs_mounts};
pub use options::MountOptions;
pub use unmount::{UnmountError, UnmountOptions, unmount};

/// Type of our mounts in the kernel's table.
pub const FS_TYPE: &str = "fuse.ckfs";
