//! The file system without FUSE: a tree of immutable nodes, their attributes and their bytes.
//!
//! [`FileSystem`] is what readers call, [`Nodes`] the part of it that waits for no storage, [`Upkeep`] what a server calls beside it.

mod as_part;
mod exposition;
mod file_system;
pub mod health;
mod live_reads;
mod materialize;
pub mod metrics;
mod nodes;
mod opening;
mod permissions;
mod stats;
mod tree;
mod upkeep;
mod volume;
mod watching;

pub use ckfs_image::{OmittedFormat, unavailable, unavailable_text};
pub use ckfs_source::permission::{Mounter, Overrides, Permission};
pub use ckfs_source::{ReadFailure, Replied, Served};
pub use exposition::{MetricText, label};
pub use file_system::{
    Access, Attr, BUFFER_BYTES, DirEntry, FileSystem, FsError, Handle, Ino, NodeKind, NodeScope, Nodes, NodesRef,
    OpenedFile, StatFs, follow,
};
pub use health::{HealthProblem, ProblemKind, VolumeHealth};
pub use live_reads::LiveReads;
pub use materialize::{BundleSizes, Policy};
pub use metrics::{LATENCY_BOUNDS_US, Metrics, RequestKind};
pub use permissions::{PermittedReaders, directory_permission, readers, readers_of};
pub use stats::{held_rows, memory_json, ops};
pub use upkeep::{NoPassthrough, OnChange, Upkeep, WhenMaterialized};
pub use volume::{ViewPlan, Volume, VolumeOptions};
