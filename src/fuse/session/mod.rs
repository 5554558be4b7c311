//! The life of a mount from its first request to its last.

mod changes;
mod serve;
mod supervisor;

pub use serve::{block_signals, interruptible, serve, serve_service};
pub use supervisor::Exit;
