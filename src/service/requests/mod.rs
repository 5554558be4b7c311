//! Requests that wait for bytes, whatever way they come in: each is answered once, in time, and counted.

mod pending;
mod table;
mod waiting_threads;
mod watchdog;

pub use pending::{Pending, ReplySlot, panic_text, read_whole};
pub use table::{Client, Refuse, Requests};
pub use waiting_threads::{Handlers, WaitingThreads};
pub use watchdog::{Heartbeat, Watchdog};
