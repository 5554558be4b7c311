//! How a repository names, fuses and ties its tensors.

pub mod dialect;
pub mod own_head;
pub mod prefix;
pub(super) mod promised;
pub(super) mod tied;
