//! Whether the program that waits for an answer is being killed.
//!
//! The kernel waits for the answer of a request that was passed to a daemon even if its program is killed meanwhile. It reports
//! the signal for some requests only (not for those of `O_DIRECT`), and fuser declines that report. So the thread that watches
//! requests asks the kernel for the signals of the programs that wait.

use std::{fs, num::NonZeroU32};

/// A thread that waits for an answer, by the number that it has in this process's namespace; none if it has no number there.
pub type Client = Option<NonZeroU32>;

/// The bit of SIGKILL in a set of signals. The kernel marks every thread of a process with it that any signal ends.
const KILLED: u64 = 1 << (libc::SIGKILL - 1);

/// Whether a thread ends as soon as its system call does.
pub(super) fn is_killed(client: NonZeroU32) -> bool {
    // Without the file nothing is known: the thread has ended, or other users' processes are hidden.
    fs::read_to_string(format!("/proc/{client}/status")).is_ok_and(|status| has_fatal_signal(&status))
}

/// Whether SIGKILL is pending, for the thread or for its process, by the text of `proc_pid_status(5)`.
fn has_fatal_signal(status: &str) -> bool {
    let set = |line: &str| {
        let set = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(set.trim(), 16).ok()
    };
    status.lines().filter_map(set).any(|set| set & KILLED != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pending_sigkill_is_seen_and_no_other_signal() {
        let status = |own: &str, shared: &str| {
            format!("Name:\tSigPnd: 100\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t0000000000000100\n")
        };
        for (own, shared, killed) in [
            ("0000000000000000", "0000000000000000", false),
            ("0000000000000100", "0000000000000000", true),
            ("0000000000000000", "0000000000000100", true),
            ("0000000000004002", "0000000000010000", false),
            ("x", "", false),
        ] {
            assert_eq!(has_fatal_signal(&status(own, shared)), killed, "{own} {shared}");
        }
        assert!(!is_killed(NonZeroU32::new(std::process::id()).unwrap()) && !is_killed(NonZeroU32::MAX));
    }
}
