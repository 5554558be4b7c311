//! The daemon of a mount, to see its end.

use std::{
    fs,
    path::Path,
    process,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// Longest time for the mount's answer who its daemon is: one that does not answer is not waited for.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Time between looks.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// A process, named so that another with its number is not taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Daemon {
    pub(super) pid: u32,
    /// Ticks from the start of the system to that of the process.
    started: u64,
}

impl Daemon {
    /// The daemon of the mount on `path`, if the mount names it and the process is visible from here.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let stats = path.join(".ckfs/stats.json");
        let (answer, answered) = mpsc::channel();
        // The mount may never answer.
        let asking = thread::Builder::new().name("ckfs-daemon".into()).spawn(move || {
            let _ = answer.send(fs::read(stats));
        });
        let stats = asking.ok().and_then(|_| answered.recv_timeout(ANSWER_LIMIT).ok())?.ok()?;
        let stats: serde_json::Value = serde_json::from_slice(&stats).ok()?;
        Self::running(u32::try_from(stats["pid"].as_u64()?).ok()?)
    }

    fn running(pid: u32) -> Option<Self> {
        let started = started(pid)?;
        // A daemon in another namespace has another number there.
        let serves = || {
            let mut descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
            descriptors
                .any(|entry| fs::read_link(entry.path()).is_ok_and(|to| to == Path::new("/dev/fuse")))
                .then_some(())
        };
        serves().filter(|()| pid != process::id()).map(|()| Self { pid, started })
    }

    /// Waits for its end; whether it has ended.
    pub(super) fn ends_within(self, limit: Duration) -> bool {
        let begun = Instant::now();
        loop {
            if started(self.pid) != Some(self.started) {
                return true;
            }
            if begun.elapsed() >= limit {
                return false;
            }
            thread::sleep(LOOK_PERIOD);
        }
    }
}

/// When a process was started; none if it has ended, also if its parent has not noticed that yet.
fn started(pid: u32) -> Option<u64> {
    of_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The same by the text of `proc_pid_stat(5)`.
fn of_stat(text: &str) -> Option<u64> {
    // Numbers of the fields there, less the three up to the state.
    const THREADS: usize = 20 - 3;
    const STARTED: usize = 22 - 3;
    // The name, in parentheses, may hold anything.
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // The first thread may have ended before others, which have the files open.
    let ended = matches!(fields.first(), Some(&("Z" | "X")))
        && fields.get(THREADS).is_none_or(|count| matches!(*count, "0" | "1"));
    if ended { None } else { fields.get(STARTED)?.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_ended_when_its_last_thread_has() {
        let text = |state: &str, threads: &str| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 {threads} 0 5128 0 0")
        };
        for (state, threads, expected) in
            [("S", "3", Some(5128)), ("Z", "1", None), ("Z", "2", Some(5128)), ("X", "0", None)]
        {
            assert_eq!(of_stat(&text(state, threads)), expected, "{state} {threads}");
        }
        assert_eq!((of_stat(""), of_stat("7 (a) S"), Daemon::running(process::id())), (None, None, None));
        let this = Daemon { pid: process::id(), started: started(process::id()).unwrap() };
        assert!(!this.ends_within(Duration::ZERO));
        assert!(Daemon { started: 1, ..this }.ends_within(Duration::ZERO));
    }
}
