//! This machine and this process: the log, signals, limits, memory. Knows nothing of checkpoints or FUSE.
//!
//! | module | holds |
//! | --- | --- |
//! | [`budget`] | how much of the memory limit each part of the program may hold |
//! | [`limits`] | the limits of this process, in words, and how many threads can be started |
//! | [`log`] | one sink for all log lines: never blocks a request, never fails |
//! | [`memory`] | the memory limit: the machine's, or that of a control group |
//! | [`repeats`] | counting of lines that repeat |
//! | [`signal`] | what each signal does |
//! | [`system_log`] | syslog and the journal, by their sockets |
//! | [`target`] | where lines are written: standard error, a file, the system's log |
//!
//! A failure here is never a reason to stop serving: what cannot be written is counted, and the count is said when writing
//! works again.

pub mod budget;
pub mod limits;
pub mod log;
pub mod memory;
pub mod repeats;
pub mod signal;
pub mod system_log;
pub mod target;

pub use log::Log;
pub use target::{LogTarget, stderr_is_colored};

/// Writes to standard error; a failure is ignored, since there is nowhere to report it.
pub fn tell(text: &str) {
    use std::io::Write;
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
