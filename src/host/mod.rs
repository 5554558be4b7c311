//! This machine: its memory and its limits.
//!
//! The layer knows nothing of checkpoints or mounts: it reads what the kernel says and gives numbers to the layers beside it.

pub mod budget;
pub mod memory;
