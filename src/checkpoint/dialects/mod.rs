//! How a repository names, fuses, ties and quantizes its tensors.

pub mod dialect;
pub mod own_head;
pub mod prefix;
pub(super) mod promised;
pub mod quantization;
pub(super) mod tied;
