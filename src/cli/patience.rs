//! Commands do not wait forever for storage without an answer, nor in silence for a service of the network.
//!
//! A thread that waits for such storage cannot be interrupted. So another thread watches the waits and ends the
//! process. A mount that answers watches its requests by itself and needs this thread only until then.
//!
//! Requests to services end by themselves in time. The same thread says what is waited for, and until when.

use std::{
    io,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant, SystemTime},
};

use ckfs_config::{MountSettings, TimeLimit};
use ckfs_host::limits;
use ckfs_source::{Fetches, Wait};

use super::output::error_text;

/// Checks per time limit, and the longest time between two checks.
const LOOKS: u32 = 8;
const PERIOD_MAX: Duration = Duration::from_millis(500);

/// A wait for a service is told after this time, or after a quarter of the time limit.
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// Time between two lines about waits.
const TOLD_PERIOD: Duration = Duration::from_secs(10);

/// Watches fetches until it is dropped. No thread of it is left then, for signals that the process handles from now on.
#[derive(Debug)]
pub(super) struct Patience {
    stop: Option<mpsc::Sender<()>>,
    watching: Option<thread::JoinHandle<()>>,
}

impl Drop for Patience {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(watching) = self.watching.take() {
            // A panic there has its line in the log.
            let _ = watching.join();
        }
    }
}

/// The record of a command's fetches, with the time limit of its settings.
pub(super) fn fetches(settings: &MountSettings) -> Arc<Fetches> {
    Arc::new(Fetches::new(settings.source_timeout.map_or(Fetches::LIMIT, TimeLimit::duration)))
}

/// Calls `give_up` with a message when a fetch stalls, from another thread. While a service is waited for, `note` learns at each look
/// what the wait is, in words; afterwards it learns `None` once.
///
/// # Errors
/// The system starts no thread.
pub(super) fn watch(
    fetches: &Arc<Fetches>,
    mut note: impl FnMut(Option<(&Wait, &str)>) + Send + 'static,
    give_up: impl FnOnce(&str) + Send + 'static,
) -> io::Result<Patience> {
    let (stop, stopped) = mpsc::channel::<()>();
    let fetches = Arc::clone(fetches);
    let limit = fetches.limit();
    let (period, told_after) = ((limit / LOOKS).min(PERIOD_MAX), TOLD_AFTER.min(limit / 4));
    let started = thread::Builder::new().name("ckfs-patience".into()).spawn(move || {
        let (mut told, mut noted): (Option<Instant>, bool) = (None, false);
        while stopped.recv_timeout(period) == Err(mpsc::RecvTimeoutError::Timeout) {
            if let Some(stalled) = fetches.stalled().first() {
                return give_up(&fetches.describe(stalled));
            }
            let wait = fetches.services().longest(told_after);
            if let Some(wait) = &wait {
                let text = in_words(wait, limit, SystemTime::now());
                note(Some((wait, &text)));
                if told.is_none_or(|told| told.elapsed() >= TOLD_PERIOD) {
                    tracing::warn!("{text}");
                    told = Some(Instant::now());
                }
            } else if noted {
                note(None);
            }
            noted = wait.is_some();
        }
    });
    let started = started.map_err(|error| io::Error::new(error.kind(), format!("{error}{}", limits::hint())))?;
    Ok(Patience { stop: Some(stop), watching: Some(started) })
}

/// What is waited for, since when, and until when.
fn in_words(wait: &Wait, limit: Duration, now: SystemTime) -> String {
    let Wait { host, quiet, left, answer, is_limited } = wait;
    let answer = answer.as_ref().map_or_else(String::new, |answer| format!(", last: {answer}"));
    let limit = limit.as_secs_f32();
    if *is_limited {
        return format!(
            "{host}: it limits requests{answer}; fewer are sent at a time; given up when nothing comes for {limit} s \
             (--source-timeout)"
        );
    }
    let seconds = (now + *left).duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs()) % 86_400;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!(
        "{host}: has brought nothing for {:.0} s{answer}; waiting until {hour:02}:{minute:02}:{second:02} UTC (--source-timeout {limit} s)",
        quiet.as_secs_f32().max(1.0)
    )
}

/// Ends this process with an error when a fetch stalls.
fn ending(fetches: &Arc<Fetches>) -> io::Result<Patience> {
    let note = |_: Option<(&Wait, &str)>| {};
    watch(fetches, note, |message| {
        ckfs_host::tell(&format!("{}\n", error_text(message)));
        std::process::exit(1);
    })
}

/// Ends this process with an error when a fetch stalls, from now on.
///
/// # Errors
/// As [`watch`].
pub(super) fn end_on_stall(fetches: &Arc<Fetches>) -> io::Result<()> {
    // The thread runs to the end of the process.
    std::mem::forget(ending(fetches)?);
    Ok(())
}

/// Calls `work`, which looks at `path`. If the path gives no answer within the time limit of the settings, this process ends
/// with an error that names it. Without a thread to watch it, which the system may refuse, `work` takes its time.
pub(super) fn within<T>(settings: &MountSettings, path: &Path, action: &'static str, work: impl FnOnce() -> T) -> T {
    let fetches = fetches(settings);
    let _patience = ending(&fetches);
    let _looking = fetches.begin_path(path, action);
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_with_its_end() {
        let mut wait = Wait {
            host: "h".into(),
            quiet: Duration::from_millis(1200),
            left: Duration::from_secs(4),
            answer: Some("the service asks for a pause (status 503)".into()),
            is_limited: false,
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400 + 3_661);
        let text = in_words(&wait, Duration::from_secs(5), now);
        assert_eq!(
            text,
            "h: has brought nothing for 1 s, last: the service asks for a pause (status 503); waiting until 01:01:05 UTC (--source-timeout 5 s)"
        );
        (wait.is_limited, wait.answer) = (true, None);
        let text = in_words(&wait, Duration::from_secs(5), now);
        assert!(text.starts_with("h: it limits requests; ") && text.contains("for 5 s"), "{text}");
    }
}
