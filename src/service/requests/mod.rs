//! Requests that wait for bytes, whatever way they come in: each is answered once, in time, and counted.

mod client;
mod handlers;
mod heartbeat;
mod pending;
mod read_whole;
mod table;
mod watchdog;

pub use client::Client;
pub use handlers::Handlers;
pub use heartbeat::Heartbeat;
pub use pending::{Pending, Refuse, ReplySlot, panic_text};
pub use read_whole::read_whole;
pub use table::Requests;
pub use watchdog::Watchdog;
