#![allow(unsafe_code)]
//! What each signal does to a mount.
//!
//! ```text
//! TERM INT QUIT   unmount; a second one cuts off what is still open
//! HUP             opens the log file anew
//! USR1            writes one line of statistics to the log
//! USR2            leaves the mount to the next process, if systemd or a keeper has the connection; else nothing
//! all others that would end the process and can be ignored   nothing
//! ```
//!
//! The first three groups are taken from a descriptor, so every thread blocks them. The last group is ignored.

use nix::{
    libc,
    sys::signal::{SigSet, Signal},
};

/// End a mount.
pub const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT];
/// Opens the log file anew.
pub const REOPEN: Signal = Signal::SIGHUP;
/// Writes statistics to the log.
pub const STATISTICS: Signal = Signal::SIGUSR1;
/// Leaves the mount to the next process, if something keeps the connection for it.
pub const LEAVE: Signal = Signal::SIGUSR2;

/// Raised where a write goes wrong, which returns an error as well. Ignored by every command.
const BY_WRITES: [i32; 2] = [libc::SIGXFSZ, libc::SIGPIPE];

/// Would end or stop a daemon for no reason of its own. `SIGTTOU` would stop one that logs to a terminal from the background.
const HARMLESS: [i32; 8] = [
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGSTKFLT,
    libc::SIGXCPU,
    libc::SIGTTOU,
];

/// The signals that a mount takes from a descriptor.
pub fn handled() -> SigSet {
    ENDING.into_iter().chain([REOPEN, STATISTICS, LEAVE]).collect()
}

/// Blocks [`handled`] in this thread and those it will start. To be called before the first thread is started.
///
/// # Errors
/// The system refuses, which it does not do for a valid set.
pub fn block() -> nix::Result<()> {
    handled().thread_block()
}

/// Lets a write fail with an error, instead of ending the process, if a limit forbids it or no process reads it.
pub fn ignore_write_failures() {
    BY_WRITES.into_iter().for_each(ignore);
}

/// Undoes [`ignore_write_failures`] and lets all signals through, for a program that takes this process over.
pub fn restore() {
    // A new program inherits what is blocked.
    let _ = SigSet::empty().thread_set_mask();
    for signal in BY_WRITES {
        // SAFETY: SIG_DFL installs no code of ours, as for SIG_IGN below.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Ignores the signals that mean nothing to a daemon, real-time signals included.
pub fn ignore_harmless() {
    ignore_write_failures();
    HARMLESS.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX()).for_each(ignore);
}

fn ignore(signal: i32) {
    // SAFETY: SIG_IGN installs no code of ours, so there is nothing that could run at a wrong time. An invalid number is
    // refused with an error and changes nothing.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// Runs `start` with all signals blocked: a thread that it starts never takes one.
pub fn with_all_blocked<T>(start: impl FnOnce() -> T) -> T {
    let before = SigSet::thread_get_mask();
    let blocked = SigSet::all().thread_block().is_ok();
    let result = start();
    if let (true, Ok(before)) = (blocked, before) {
        let _ = before.thread_set_mask();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_was_started_blocked_stays_so() {
        let before = SigSet::thread_get_mask().unwrap();
        let thread = with_all_blocked(|| std::thread::spawn(|| SigSet::thread_get_mask().unwrap()));
        assert!(thread.join().unwrap().contains(Signal::SIGTERM));
        assert_eq!(SigSet::thread_get_mask().unwrap(), before);
    }

    #[test]
    fn no_signal_has_two_meanings() {
        let handled: Vec<i32> =
            ENDING.into_iter().chain([REOPEN, STATISTICS, LEAVE]).map(|signal| signal as i32).collect();
        assert!(BY_WRITES.iter().chain(&HARMLESS).all(|ignored| !handled.contains(ignored)));
    }
}
