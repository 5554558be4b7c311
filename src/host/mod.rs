//! This machine and this process: the log, signals, limits, memory. Knows nothing of checkpoints or FUSE.
//!
//! | module | holds |
//! | --- | --- |
//! | [`budget`] | how much of the memory limit each part of the program may hold |
//! | [`limits`] | the limits of this process, in words, and how many threads can be started |
//! | [`log`] | one sink for all log lines: never blocks a request, never fails |
//! | [`memory`] | the memory limit: the machine's, or that of a control group |
//! | [`parse_room`] | the memory for what parsers make of descriptions |
//! | [`relative_path`] | paths that come from input and stay inside a directory |
//! | [`repeats`] | counting of lines that repeat |
//! | [`signal`] | what each signal does |
//! | [`system_log`] | syslog and the journal, by their sockets |
//! | [`systemd`] | notifications to systemd |
//! | [`target`] | where lines are written: standard error, a file, the system's log |
//!
//! A failure here is never a reason to stop serving: what cannot be written is counted, and the count is said when writing
//! works again.

pub mod budget;
pub mod limits;
pub mod log;
pub mod memory;
pub mod parse_room;
pub mod relative_path;
pub mod repeats;
pub mod signal;
pub mod system_log;
pub mod systemd;
pub mod target;

use std::{
    io::{self, IoSlice},
    os::fd::{AsRawFd, RawFd},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

pub use log::Log;
use nix::{
    errno::Errno,
    sys::{
        resource::{UsageWho, getrusage},
        socket::{ControlMessage, MsgFlags, sendmsg},
        time::TimeValLike,
    },
};
pub use relative_path::{PathFlaw, RelativePath};
pub use target::{
    LogTarget, hand_over_file, last_mount_file, last_mounts_directory, state_directory, stderr_is_colored,
    stderr_is_journal,
};

/// The moment `after` from now, or a year from now if the clock does not go that far. An addition would panic.
pub fn deadline(after: Duration) -> Instant {
    const FAR: Duration = Duration::from_hours(365 * 24);
    let now = Instant::now();
    now.checked_add(after).or_else(|| now.checked_add(FAR)).unwrap_or(now)
}

/// Time that this thread has taken of a processor.
pub fn thread_cpu_time() -> Duration {
    let used = getrusage(UsageWho::RUSAGE_THREAD).map(|used| used.user_time() + used.system_time());
    let us = used.map_or(0, |used| used.num_microseconds());
    Duration::from_micros(u64::try_from(us).unwrap_or(0))
}

/// The answer to `ask`, which may never come: another thread asks. `None` after `limit`.
///
/// # Errors
/// The system starts no thread.
pub fn ask_within<T: Send + 'static>(
    limit: Duration,
    thread: &str,
    ask: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (answer, answered) = mpsc::channel();
    thread::Builder::new().name(thread.to_owned()).spawn(move || {
        let _ = answer.send(ask());
    })?;
    Ok(answered.recv_timeout(limit).ok())
}

/// Sends bytes, at least one, and descriptors with them.
///
/// # Errors
/// Those of `sendmsg(2)`.
pub fn send_descriptors(socket: &impl AsRawFd, bytes: &[u8], descriptors: &[RawFd]) -> nix::Result<()> {
    let control = [ControlMessage::ScmRights(descriptors)];
    loop {
        match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], &control, MsgFlags::MSG_NOSIGNAL, None) {
            Err(Errno::EINTR) => {}
            result => return result.map(drop),
        }
    }
}

/// What removing something has come to: that it was not there is no failure.
///
/// # Errors
/// Any other.
pub fn if_there(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// Writes to standard error; a failure is ignored, since there is nowhere to report it.
pub fn tell(text: &str) {
    use std::io::Write;
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_too_long_for_a_deadline() {
        for after in [Duration::ZERO, Duration::from_secs(5), Duration::from_secs(1 << 63), Duration::MAX] {
            let left = deadline(after).saturating_duration_since(Instant::now());
            assert!(
                left <= after && left + Duration::from_secs(2) > after.min(Duration::from_hours(365 * 24)),
                "{after:?}"
            );
        }
    }
}
