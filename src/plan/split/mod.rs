//! How tensors are split over the mesh: specs, and the rules from which they come.

pub(in crate::plan) mod blocks;
pub mod logical;
pub(in crate::plan) mod packed;
pub mod shard;
pub mod spec;
pub(in crate::plan) mod styles;
pub(in crate::plan) mod whole;
