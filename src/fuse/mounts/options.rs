//! What a mount is made with.

use std::time::Duration;

/// How to mount and serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Name of what is mounted; the table of mounts shows `ckfs:<name>`.
    pub name: String,
    /// Lets all users read, not only the user of this process.
    pub allow_other: bool,
    /// Threads that handle requests; by default one per core, from 2 to 16.
    pub threads: Option<usize>,
    /// The kernel's read-ahead in KiB, where it may be set; `None` leaves it alone.
    pub read_ahead_kib: Option<u32>,
    /// Lets the kernel read byte-identical files by itself, where it may.
    pub passthrough: bool,
    /// How long to try to unmount while files are open, before the mount is detached.
    pub grace: Duration,
    /// How long to serve files that are still open after the mount was detached, before the connection is aborted.
    pub drain: Duration,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            name: String::new(),
            allow_other: false,
            threads: None,
            read_ahead_kib: Some(READ_AHEAD_KIB),
            passthrough: true,
            grace: Duration::from_secs(5),
            drain: Duration::from_secs(20),
        }
    }
}

/// Default read-ahead: one of the largest requests. Readers in sequence gain a fifth over the kernel's 128 KiB and nothing
/// more from 4 MiB, while a fault on a scattered page of a mapped file waits for all of the read-ahead.
const READ_AHEAD_KIB: u32 = 1024;
