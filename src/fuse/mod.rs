//! The only user of fuser: mounts, converts requests to calls of a volume ([`ckfs_volume::FileSystem`]), replies, unmounts.
//!
//! | module | holds |
//! | --- | --- |
//! | `session` | [`serve`]: mount, threads, signals, draining, the end; what the kernel keeps of files whose source has changed; one process after another for the same mount |
//! | `mounts` | how a mount is made and removed, as root and through `fusermount3`; the kernel's table of mounts; which processes keep a mount busy |
//! | `connection` | the connection to the kernel as what outlives a process |
//! | `private` | a mount that only one command and its children see, made in namespaces of their own |
//! | `adapter`, `open_mode` | requests of fuser as calls of the file system, and their replies; how the kernel opens a file |
//! | `requests` | the threads that take requests, and those that serve others while all wait for storage |
//! | `daemon` | starting in the background, telling the starter and systemd; the arguments of `mount.ckfs`, as mount(8) passes them |
//!
//! ckfs mounts and unmounts by itself. fuser's unmount can remove a mount that is not its own, gives up when
//! files are open, and hides the type `fuse.ckfs`. Here a mount is known by its mount id, and only the mount with
//! the expected id is unmounted. Nothing here knows what a tensor is.

mod adapter;
mod connection;
mod daemon;
mod mounts;
mod open_mode;
mod private;
mod reply_data;
mod requests;
mod session;

pub use connection::pass_on_nothing;
pub use daemon::{
    DEVICE_VARIABLE, DaemonError, HelperError, HelperRequest, Readiness, Started, is_daemon, parse_mount_helper,
    start_attached, start_background,
};
pub use mounts::{
    Device, FS_TYPE, MountEntry, MountError, MountOptions, MountUser, UnmountError, UnmountOptions, check_host,
    check_mountpoint, check_passed, ckfs_mounts, is_passed, receive_passed, unmount,
};
pub use private::{PrivateMount, run_inside};
pub use session::{Exit, Succession, block_signals, interruptible, keep, serve, serve_service};
