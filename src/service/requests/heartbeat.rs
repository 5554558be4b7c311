//! Signs of life for systemd, which restarts a service that gives none (`WatchdogSec=`).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ckfs_host::systemd::{self, NotifyState};

use super::Watchdog;

/// The signs of life of a daemon. One is given only if the watchdog thread had a turn since the last one: if that thread answers
/// requests whose storage hangs and makes sure that a thread takes new ones.
///
/// The state of the sources does not matter. A restart mends no storage, and it would cut off the readers of all other files.
#[derive(Debug)]
pub struct Heartbeat {
    period: Duration,
    /// Turns of the watchdog thread.
    turns: Arc<AtomicU64>,
    seen_turns: u64,
    told: Instant,
}

impl Heartbeat {
    /// None unless systemd expects signs of life of this process.
    pub fn of(watchdog: &Watchdog) -> Option<Self> {
        systemd::watchdog_period().map(|period| Self::new(period, watchdog.turns()))
    }

    fn new(period: Duration, turns: Arc<AtomicU64>) -> Self {
        let seen_turns = turns.load(Ordering::Relaxed);
        Self { period, turns, seen_turns, told: Instant::now() }
    }

    /// Time between two signs.
    pub fn period(&self) -> Duration {
        self.period
    }

    /// Gives a sign, if it is time for one. The thread that calls this must be alive for it, too.
    pub fn beat(&mut self) {
        if self.is_due() {
            systemd::notify(&[NotifyState::Watchdog]);
        }
    }

    /// Whether it is time for a sign, and the watchdog thread had a turn since the last one. The sign counts as given then.
    fn is_due(&mut self) -> bool {
        let turns = self.turns.load(Ordering::Relaxed);
        let is_due = self.told.elapsed() >= self.period && turns != self.seen_turns;
        if is_due {
            (self.seen_turns, self.told) = (turns, Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_thread_that_has_no_turns_is_not_alive() {
        let turns = Arc::new(AtomicU64::new(7));
        let mut heartbeat = Heartbeat::new(Duration::ZERO, Arc::clone(&turns));
        assert!(!heartbeat.is_due(), "no turn since the beginning");
        turns.store(8, Ordering::Relaxed);
        assert!(heartbeat.is_due());
        assert!(!heartbeat.is_due(), "no turn since the last sign");
        turns.store(9, Ordering::Relaxed);
        assert!(heartbeat.is_due());
        let mut heartbeat = Heartbeat::new(Duration::from_hours(1), Arc::clone(&turns));
        turns.store(10, Ordering::Relaxed);
        assert!(!heartbeat.is_due(), "it is not yet time");
    }
}
