//! Zip archives without compression.

pub mod read;
pub mod write;
