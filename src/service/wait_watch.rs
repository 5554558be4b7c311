//! Waits for storage and services while nothing is served yet.
//!
//! A thread that waits for storage without an answer cannot be interrupted. So another thread watches the waits and says when one is
//! over its limit. A volume that is served watches its requests by itself ([`Watchdog`](super::Watchdog)) and needs this thread only
//! until then.
//!
//! Requests to services end by themselves in time. The same thread says what is waited for, and until when.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant, SystemTime},
};

use ckfs_config::{MountSettings, TimeLimit};
use ckfs_host::limits;
use ckfs_source::{Wait, WaitRegistry};

/// Checks per time limit, and the longest time between two checks.
const LOOKS: u32 = 8;
const PERIOD_MAX: Duration = Duration::from_millis(500);

/// A wait for a service is logged after this time, or after a quarter of the time limit.
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// Time between two lines about waits.
const TOLD_PERIOD: Duration = Duration::from_secs(10);

/// Watches fetches until it is dropped. No thread of it is left then, for signals that the process handles from now on.
#[derive(Debug)]
pub struct WaitWatch {
    stop: Option<mpsc::Sender<()>>,
    watching: Option<thread::JoinHandle<()>>,
}

impl Drop for WaitWatch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(watching) = self.watching.take() {
            // A panic there has its line in the log.
            let _ = watching.join();
        }
    }
}

/// An empty record of waits, with the time limit of the settings.
pub fn wait_registry(settings: &MountSettings) -> Arc<WaitRegistry> {
    Arc::new(WaitRegistry::new(settings.source_timeout.map_or(WaitRegistry::LIMIT, TimeLimit::duration)))
}

/// Calls `give_up` with a message when a fetch stalls, from another thread. While a service is waited for, `note` learns at each look
/// what the wait is, in words; afterwards it learns `None` once.
///
/// # Errors
/// The system starts no thread.
pub fn watch(
    fetches: &Arc<WaitRegistry>,
    mut note: impl FnMut(Option<(&Wait, &str)>) + Send + 'static,
    give_up: impl FnOnce(&str) + Send + 'static,
) -> io::Result<WaitWatch> {
    let (stop, stopped) = mpsc::channel::<()>();
    let fetches = Arc::clone(fetches);
    let limit = fetches.limit();
    let (period, told_after) = ((limit / LOOKS).min(PERIOD_MAX), TOLD_AFTER.min(limit / 4));
    let started = thread::Builder::new().name("ckfs-wait-watch".into()).spawn(move || {
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
    Ok(WaitWatch { stop: Some(stop), watching: Some(started) })
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
