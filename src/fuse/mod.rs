//! The only user of fuser: mounts, converts requests to [`crate::volume::FileSystem`] calls, replies, unmounts.
//!
//! | module | holds |
//! | --- | --- |
//! | [`session`] | [`serve`]: mount, threads, signals, draining, the end |
//! | `mount` | how a mount comes to be and goes, as root and through `fusermount3` |
//! | [`mountinfo`] | the kernel's table of mounts; unmounting from outside the daemon |
//! | [`holder`] | which processes keep a mount busy |
//! | `requests`, `lookout`, `spare` | requests that wait for storage: when they end, and the threads that serve the others meanwhile |
//! | `changes` | what the kernel keeps of files whose source has changed |
//! | [`daemon`] | starting in the background, telling the starter and systemd |
//! | [`helper`] | the arguments of `mount.ckfs`, as mount(8) passes them |
//!
//! Mounting and unmounting are ours, not fuser's: its own unmount can remove a mount that is not its own, gives up when
//! files are open, and hides the type `fuse.ckfs`. A mount is known here by its mount id, and nothing is unmounted whose
//! id is not the expected one. Nothing here knows what a tensor is.

mod adapter;
mod changes;
pub mod daemon;
pub mod helper;
pub mod holder;
mod lookout;
mod mount;
mod mount_id;
pub mod mountinfo;
mod open_mode;
mod reply_data;
mod requests;
pub mod session;
mod spare;

pub use daemon::{DaemonError, Readiness, Started, start_background};
pub use helper::{HelperError, HelperRequest, parse_mount_helper};
pub use mount::MountError;
pub use mountinfo::{MountEntry, UnmountError, UnmountOptions, ckfs_mounts, unmount};
pub use session::{Exit, MountOptions, block_signals, interruptible, serve};

/// Type of our mounts in the kernel's table.
pub const FS_TYPE: &str = "fuse.ckfs";
