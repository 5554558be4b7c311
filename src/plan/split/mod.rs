//! How tensors are split over the mesh: specs, and the rules from which they come.

pub(crate) mod blocks;
pub mod logical;
pub(crate) mod packed;
pub mod shard;
pub mod spec;
pub(crate) mod styles;
pub(crate) mod whole;
