//! Second requests beside those whose first byte takes much longer than that of their peers: the first answer wins.
//!
//! What counts is the wait for the first byte. Its moving average and deviation over all requests to a service say what is
//! much longer. Second requests are few: one for each [`REPLIES_PER_HEDGE`] replies, some at a time, and none for a while after
//! the service requested a pause.

#[cfg(feature = "hub")]
use std::{future::Future, pin::pin};
use std::{sync::Arc, time::Duration};

#[cfg(feature = "hub")]
use futures_util::future::{Either, select};
use parking_lot::Mutex;

use super::counters::RemoteCounters;
#[cfg(feature = "hub")]
use super::error::{Failure, RemoteError};

/// Replies after which their average counts.
const REPLIES_MIN: u64 = 16;
/// Replies that allow one second request.
const REPLIES_PER_HEDGE: u64 = 20;
/// Second requests that replies may save up.
const SAVED_MAX: u64 = 4;
/// Second requests at a time.
const RUNNING_MAX: u32 = 4;
/// No second request is sent earlier than this.
const AFTER_MIN: Duration = Duration::from_millis(300);
/// The wait that is much longer: this multiple of the average, or the average and this multiple of the deviation.
const AVERAGES: u64 = 4;
const DEVIATIONS: u64 = 6;
/// Weight of the last reply in an average, as a divisor.
const AVERAGE_DIVISOR: u64 = 8;

/// When a second request may be sent to a service.
#[derive(Debug)]
pub struct Hedging {
    counters: Arc<RemoteCounters>,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    replies: u64,
    /// Moving averages in microseconds: the wait for the first byte, and its distance from the average.
    wait_us: u64,
    deviation_us: u64,
    /// Replies since the last second request, bounded.
    saved: u64,
    running: u32,
}

impl State {
    fn after(&self) -> Option<Duration> {
        let long = (self.wait_us * AVERAGES).max(self.wait_us + self.deviation_us * DEVIATIONS);
        (self.replies >= REPLIES_MIN).then(|| Duration::from_micros(long).max(AFTER_MIN))
    }
}

impl Hedging {
    /// Nothing is known of the service.
    pub fn new(counters: Arc<RemoteCounters>) -> Self {
        Self { counters, state: Mutex::default() }
    }

    /// Notes the wait for the first byte of a reply.
    pub(super) fn note_reply(&self, wait: Duration) {
        let mut state = self.state.lock();
        // A straggler must not make the next ones look usual.
        let wait = state.after().map_or(wait, |after| wait.min(after));
        let us = u64::try_from(wait.as_micros()).unwrap_or(u64::MAX / 16);
        if state.replies == 0 {
            (state.wait_us, state.deviation_us) = (us, us / 2);
        } else {
            let move_to = |old: u64, new: u64| old - old / AVERAGE_DIVISOR + new / AVERAGE_DIVISOR;
            state.deviation_us = move_to(state.deviation_us, us.abs_diff(state.wait_us));
            state.wait_us = move_to(state.wait_us, us);
        }
        state.replies += 1;
        state.saved = (state.saved + 1).min(SAVED_MAX * REPLIES_PER_HEDGE);
    }

    /// The service requested a pause.
    pub(super) fn note_pause(&self) {
        self.state.lock().saved = 0;
    }
}

/// A second request under way.
#[cfg(feature = "hub")]
#[derive(Debug)]
struct Running<'a>(&'a Hedging);

#[cfg(feature = "hub")]
impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.state.lock().running -= 1;
    }
}

#[cfg(feature = "hub")]
impl Hedging {
    /// The wait after which a second request is sent; `None` while too little is known.
    fn after(&self) -> Option<Duration> {
        self.state.lock().after()
    }

    /// Begins a second request, if one is allowed.
    fn begin(&self) -> Option<Running<'_>> {
        let mut state = self.state.lock();
        if state.running >= RUNNING_MAX || state.saved < REPLIES_PER_HEDGE {
            return None;
        }
        state.saved -= REPLIES_PER_HEDGE;
        state.running += 1;
        Some(Running(self))
    }

    /// The first answer to a request, which is sent a second time if no answer comes for long. `request` sends it; its
    /// future ends with the first byte, or with an error. The other request is dropped, and its connection with it.
    ///
    /// # Errors
    /// The error of the last answer, or the first one that a repetition would not change.
    pub(super) async fn first_of<T, F>(&self, request: impl Fn() -> F) -> Result<T, RemoteError>
    where
        F: Future<Output = Result<T, RemoteError>>,
    {
        let mut first = pin!(request());
        let Some(after) = self.after() else { return first.await };
        if let Ok(answer) = tokio::time::timeout(after, first.as_mut()).await {
            return answer;
        }
        let Some(_running) = self.begin() else { return first.await };
        RemoteCounters::add(&self.counters.requests, 1);
        RemoteCounters::add(&self.counters.hedges, 1);
        match select(first, pin!(request())).await {
            Either::Left((Err(error), second)) if self.may_pass(&error) => self.won(second.await),
            Either::Right((Err(error), first)) if self.may_pass(&error) => first.await,
            Either::Left((answer, _)) => answer,
            Either::Right((answer, _)) => self.won(answer),
        }
    }

    fn may_pass(&self, error: &RemoteError) -> bool {
        if matches!(error.failure, Failure::Busy(_)) {
            self.note_pause();
        }
        error.is_transient()
    }

    fn won<T>(&self, answer: Result<T, RemoteError>) -> Result<T, RemoteError> {
        answer.inspect(|_| RemoteCounters::add(&self.counters.hedge_wins, 1))
    }
}

#[cfg(all(test, feature = "hub"))]
mod tests {
    use super::*;

    fn after_replies(count: u64, wait_ms: u64) -> Hedging {
        let hedging = Hedging::new(Arc::default());
        (0..count).for_each(|_| hedging.note_reply(Duration::from_millis(wait_ms)));
        hedging
    }

    #[test]
    fn what_is_long_follows_the_replies() {
        assert_eq!(after_replies(REPLIES_MIN - 1, 30).after(), None);
        assert_eq!(after_replies(100, 30).after(), Some(AFTER_MIN), "a fast service");
        let slow = after_replies(1000, 1000).after().unwrap();
        assert!((Duration::from_secs(3)..=Duration::from_secs(8)).contains(&slow), "{slow:?}");
    }

    #[test]
    fn a_straggler_moves_the_average_little() {
        let hedging = after_replies(100, 100);
        let before = hedging.after().unwrap();
        hedging.note_reply(Duration::from_hours(1));
        assert!(hedging.after().unwrap() <= before * 2);
    }

    #[test]
    fn second_requests_are_few() {
        let hedging = after_replies(REPLIES_PER_HEDGE - 1, 10);
        assert!(hedging.begin().is_none());
        hedging.note_reply(Duration::from_millis(10));
        assert!(hedging.begin().is_some());
        assert!(hedging.begin().is_none(), "one request for this number of replies");
        let hedging = after_replies(10_000, 10);
        let running: Vec<_> = std::iter::from_fn(|| hedging.begin()).collect();
        assert_eq!(running.len() as u64, SAVED_MAX.min(u64::from(RUNNING_MAX)));
        drop(running);
        assert_eq!(hedging.state.lock().running, 0);
        let hedging = after_replies(10_000, 10);
        hedging.note_pause();
        assert!(hedging.begin().is_none(), "after a pause");
    }
}
