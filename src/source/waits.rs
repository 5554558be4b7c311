//! What a command waits for at services of the network: which service has brought nothing, since when, and until when it may.
//!
//! Each service notes its requests and what comes of them in a [`Pulse`]. The command looks at all of them from another thread, and
//! tells its user.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// A service that requested a pause within this time limits requests.
const PAUSE_RECENT: Duration = Duration::from_secs(2);

/// A request that begins this soon after the end of another continues its wait: else very many requests, one after the other, would
/// each wait for as long as all of them may.
const GOES_ON: Duration = Duration::from_secs(1);

/// The services of a command.
#[derive(Debug, Default)]
pub struct Waits {
    all: Mutex<Vec<Weak<Pulse>>>,
}

/// A service that has brought nothing for a while, though something was requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Its host.
    pub host: String,
    /// For how long it has brought nothing.
    pub quiet: Duration,
    /// For how long it still may.
    pub left: Duration,
    /// What it said instead, if it said anything.
    pub answer: Option<String>,
    /// Whether it brings something now and then, and asks for pauses in between.
    pub is_limited: bool,
}

/// The signs of life of one service.
#[derive(Debug)]
pub struct Pulse {
    host: String,
    /// For how long it may bring nothing.
    pub(crate) limit: Duration,
    state: Mutex<PulseState>,
}

#[derive(Debug)]
struct PulseState {
    /// Requests that something waits for, repetitions and pauses included.
    waiting: usize,
    /// When the first of these began, and when something came last.
    since: Instant,
    moved: Instant,
    /// When nothing was waited for any more.
    ended: Option<Instant>,
    /// When it requested a pause last.
    paused: Option<Instant>,
    answer: Option<String>,
}

impl PulseState {
    /// For how long it has brought nothing, though something waits.
    fn quiet(&self) -> Duration {
        self.since.max(self.moved).elapsed()
    }
}

/// A wait under way, until it is dropped.
#[derive(Debug)]
pub struct Awaited<'a>(&'a Pulse);

impl Waits {
    /// The pulse of a service that may bring nothing for `limit`.
    pub(crate) fn pulse(&self, host: &str, limit: Duration) -> Arc<Pulse> {
        let pulse = Arc::new(Pulse::new(host, limit));
        let mut all = self.all.lock();
        all.retain(|pulse| pulse.strong_count() > 0);
        all.push(Arc::downgrade(&pulse));
        pulse
    }

    /// The service that has brought nothing for the longest time, if that is `least` or more; else one that has been waited for
    /// as long and limits requests.
    pub fn longest(&self, least: Duration) -> Option<Wait> {
        let all = self.all.lock();
        let waits = all.iter().filter_map(|pulse| pulse.upgrade()?.wait(least));
        waits.filter(|wait| wait.quiet >= least || wait.is_limited).max_by_key(|wait| wait.quiet)
    }
}

impl Pulse {
    /// A service of which nothing is known.
    pub fn new(host: &str, limit: Duration) -> Self {
        let now = Instant::now();
        let state = PulseState { waiting: 0, since: now, moved: now, ended: None, paused: None, answer: None };
        Self { host: host.to_owned(), limit, state: Mutex::new(state) }
    }

    /// Something waits for it from now on.
    pub(crate) fn wait_begins(&self) -> Awaited<'_> {
        let mut state = self.state.lock();
        if state.waiting == 0 {
            // After a while it is asked as if nothing were known: it may have come back.
            let is_old = state.quiet() > self.limit * 2;
            if is_old || state.ended.is_none_or(|ended| ended.elapsed() > GOES_ON) {
                state.since = Instant::now();
            }
        }
        state.waiting += 1;
        Awaited(self)
    }

    /// Something came of a request.
    pub(crate) fn note_progress(&self) {
        self.state.lock().moved = Instant::now();
    }

    /// It said something else than what was requested, perhaps that it wants a pause.
    pub(crate) fn note_answer(&self, answer: String, wants_pause: bool) {
        let mut state = self.state.lock();
        if wants_pause {
            state.paused = Some(Instant::now());
        }
        state.answer = Some(answer);
    }

    /// For how long it has brought nothing, though something waits.
    pub fn quiet(&self) -> Duration {
        self.state.lock().quiet()
    }

    fn wait(&self, least: Duration) -> Option<Wait> {
        let state = self.state.lock();
        let quiet = state.quiet();
        let was_asked = state.paused.is_some_and(|paused| paused.elapsed() < PAUSE_RECENT);
        (state.waiting > 0).then(|| Wait {
            host: self.host.clone(),
            quiet,
            left: self.limit.saturating_sub(quiet),
            answer: state.answer.clone(),
            is_limited: quiet < least && was_asked && state.since.elapsed() >= least,
        })
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.ended = Some(Instant::now());
        state.waiting -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_service_that_brings_nothing_is_waited_for() {
        let waits = Waits::default();
        let pulse = waits.pulse("host", Duration::from_mins(1));
        assert_eq!(waits.longest(Duration::ZERO), None, "nothing was asked for");
        let waiting = pulse.wait_begins();
        std::thread::sleep(Duration::from_millis(30));
        pulse.note_answer("busy".to_owned(), true);
        let wait = waits.longest(Duration::from_millis(20)).unwrap();
        assert_eq!((wait.host.as_str(), wait.answer.as_deref()), ("host", Some("busy")));
        assert!(wait.left < Duration::from_mins(1) && wait.quiet >= Duration::from_millis(20), "{wait:?}");
        pulse.note_progress();
        let wait = waits.longest(Duration::from_millis(20)).unwrap();
        assert!(wait.is_limited, "something came, and little: {wait:?}");
        drop(waiting);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(waits.longest(Duration::from_millis(20)), None, "it is done");
        drop(pulse);
        assert_eq!(waits.longest(Duration::ZERO), None);
    }
}
