//! What a mount is made with.

use std::time::Duration;

use ckfs_config::{MountSettings, WaitTime, WholeNumber};
use ckfs_service::budget;

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

impl MountOptions {
    /// What the settings say for a mount of `name`.
    pub fn of(settings: &MountSettings, name: &str) -> Self {
        let defaults = Self::default();
        Self {
            name: name.to_owned(),
            allow_other: settings.allow_other.unwrap_or(defaults.allow_other),
            threads: Some(budget(settings).threads),
            read_ahead_kib: settings.read_ahead_kb.map(WholeNumber::number).or(defaults.read_ahead_kib),
            passthrough: settings.passthrough.unwrap_or(defaults.passthrough),
            grace: settings.grace.map_or(defaults.grace, WaitTime::duration),
            drain: settings.drain.map_or(defaults.drain, WaitTime::duration),
        }
    }

    /// What the kernel was told when it was mounted, in words.
    pub(crate) fn of_mount(&self) -> String {
        let (user, others) = (nix::unistd::geteuid(), if self.allow_other { ", allow_other" } else { "" });
        format!("name {}, user {user}{others}", self.name)
    }
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
