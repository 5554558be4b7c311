//! The daemon of a mount, to see its end.

use std::{
    fs,
    path::Path,
    process, thread,
    time::{Duration, Instant},
};

use ckfs_host::ask_within;

/// Longest time for the mount's answer who its daemon is: one that does not answer is not waited for.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// How long the first process may take to notice the end of one that it has adopted: what looks at the daemon finds it until then. In
/// a container it may never look.
const REAP_LIMIT: Duration = Duration::from_secs(2);

/// Time between looks.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// A process, named so that another with its number is not taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Daemon {
    pub(super) pid: u32,
    /// Ticks from the start of the system to that of the process.
    started: u64,
}

/// The daemon of a mount, as far as it can be seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FoundDaemon {
    By(Daemon),
    /// It has ended: the mount is stale.
    Ended,
    /// The mount does not say, or the process is not visible.
    Unknown,
}

impl Daemon {
    /// The daemon of the mount on `path`.
    pub(super) fn of(path: &Path) -> FoundDaemon {
        let stats = path.join(".ckfs/stats.json");
        let stats = match ask_within(ANSWER_LIMIT, "ckfs-daemon", move || fs::read(stats)) {
            Ok(Some(Ok(stats))) => stats,
            Ok(Some(Err(error))) if error.raw_os_error() == Some(libc::ENOTCONN) => return FoundDaemon::Ended,
            Ok(_) | Err(_) => return FoundDaemon::Unknown,
        };
        let stats: Option<serde_json::Value> = serde_json::from_slice(&stats).ok();
        let pid = stats.and_then(|stats| u32::try_from(stats["pid"].as_u64()?).ok());
        pid.and_then(Self::running).map_or(FoundDaemon::Unknown, FoundDaemon::By)
    }

    fn running(pid: u32) -> Option<Self> {
        let started = ProcessState::of(pid)?.started;
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
        let (begun, mut ended) = (Instant::now(), None);
        loop {
            match ProcessState::of(self.pid).filter(|found| found.started == self.started) {
                None => return true,
                Some(found) if found.has_ended => {
                    let since = *ended.get_or_insert_with(Instant::now);
                    if !found.is_adopted || since.elapsed() >= REAP_LIMIT {
                        return true;
                    }
                }
                Some(_) if begun.elapsed() >= limit => return false,
                Some(_) => {}
            }
            thread::sleep(LOOK_PERIOD);
        }
    }
}

/// What the system tells of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessState {
    started: u64,
    /// It has ended, and its parent has not noticed that yet.
    has_ended: bool,
    /// Its parent is the first process.
    is_adopted: bool,
}

impl ProcessState {
    fn of(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// By the text of `proc_pid_stat(5)`.
    fn parse(text: &str) -> Option<Self> {
        // Numbers of the fields there, less the three up to the state.
        const PARENT: usize = 4 - 3;
        const THREADS: usize = 20 - 3;
        const STARTED: usize = 22 - 3;
        // The name, in parentheses, may hold anything.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // The first thread may have ended before others, which have the files open.
        let has_ended = matches!(fields.first(), Some(&("Z" | "X")))
            && fields.get(THREADS).is_none_or(|count| matches!(*count, "0" | "1"));
        let is_adopted = fields.get(PARENT) == Some(&"1");
        Some(Self { started: fields.get(STARTED)?.parse().ok()?, has_ended, is_adopted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_ended_when_its_last_thread_has() {
        let text = |state: &str, threads: &str| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 {threads} 0 5128 0 0")
        };
        for (state, threads, has_ended) in [("S", "3", false), ("Z", "1", true), ("Z", "2", false), ("X", "0", true)] {
            let expected = ProcessState { started: 5128, has_ended, is_adopted: true };
            assert_eq!(ProcessState::parse(&text(state, threads)), Some(expected), "{state} {threads}");
        }
        let refused = (ProcessState::parse(""), ProcessState::parse("7 (a) S"), Daemon::running(process::id()));
        assert_eq!(refused, (None, None, None));
        let of = |pid: u32| Daemon { pid, started: ProcessState::of(pid).unwrap().started };
        let this = of(process::id());
        assert!(!this.ends_within(Duration::ZERO));
        assert!(Daemon { started: 1, ..this }.ends_within(Duration::ZERO));
        // A child that has ended, and that its parent has not waited for yet.
        let mut child = process::Command::new("true").spawn().unwrap();
        let ended = of(child.id());
        assert!(ended.ends_within(Duration::from_secs(30)) && ProcessState::of(child.id()).unwrap().has_ended);
        child.wait().unwrap();
        assert!(ended.ends_within(Duration::ZERO));
    }
}
