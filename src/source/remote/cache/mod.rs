//! The disk cache: one sparse file and one map of blocks for each object, named by content, shared by all processes of a user.
//!
//! * [`Cache`]: the directory, or memory where there is none; its bound and eviction;
//! * [`Entry`]: an object: which blocks are present, guards against eviction, checksums.
//!
//! What it deliberately does not do: fetch, or know repositories.

mod block_map;
mod directory;
mod entry;
pub(super) mod geometry;
mod lock;
mod meta;
mod own;
mod segment;
mod space;
#[cfg(test)]
mod tests;

pub use super::options::default_directory;
pub use directory::{Cache, usage};
pub use entry::{Entry, Guards};
pub use geometry::BLOCK_BYTES;
pub use meta::EntryMeta;
#[cfg(feature = "hub")]
pub(super) use own::claim;
pub use space::{CacheLimit, DiskSpace, Room};
