//! The life of a mount from its first request to its last.

mod changes;
mod keeper;
mod serve;
mod successor;
mod supervisor;

pub use keeper::keep;
pub use serve::{block_signals, interruptible, serve, serve_service};
pub use successor::Succession;
pub use supervisor::Exit;
