//! The life of a mount from its first request to its last.

mod changes;
mod serve;

pub use serve::{Exit, block_signals, interruptible, serve};
