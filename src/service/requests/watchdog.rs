//! The thread that watches requests. It answers requests whose storage gives no answer and those of programs that are being
//! killed, and it makes sure that a thread takes requests meanwhile. Its turns are behind the signs of life for systemd, which restarts a
//! service that gives none (`WatchdogSec=`).

use std::{
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ckfs_host::systemd::{self, NotifyState};
use ckfs_volume::Upkeep;

use super::{
    table::{Requests, WaitingRequest, is_killed},
    waiting_threads::Handlers,
};

/// Time between two turns while there are requests, and otherwise.
const BUSY_PERIOD: Duration = Duration::from_millis(50);
const IDLE_PERIOD: Duration = Duration::from_millis(500);
/// How long a client waits until it is checked for signals: nearly all answers come sooner.
const CLIENT_AGE: Duration = Duration::from_millis(100);
/// Least number of turns within the time that a request may wait.
const LOOKS: u32 = 8;

/// Answers requests that wait for too long, until it is dropped.
pub struct Watchdog {
    fs: Arc<dyn Upkeep>,
    requests: Arc<Requests>,
    handlers: Arc<dyn Handlers>,
    /// Turns of the thread that have ended.
    turns: Arc<AtomicU64>,
}

impl Watchdog {
    /// Starts a thread that watches these requests of `fs`, which `handlers` handle. It ends some time after the returned value is
    /// dropped.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(fs: &Arc<dyn Upkeep>, requests: &Arc<Requests>, handlers: Arc<dyn Handlers>) -> io::Result<Arc<Self>> {
        let (fs, requests) = (Arc::clone(fs), Arc::clone(requests));
        let watchdog = Arc::new(Self { fs, requests, handlers, turns: Arc::default() });
        let watched = Arc::downgrade(&watchdog);
        thread::Builder::new().name("ckfs-watchdog".to_owned()).spawn(move || run(&watched))?;
        Ok(watchdog)
    }

    /// One turn. Returns the time until the next.
    fn look(&self) -> Duration {
        self.fs.note_stalls();
        let limit = self.fs.stall_limit();
        self.expire(limit);
        self.abandon();
        let had_requests = self.handlers.tend(&|| self.fs.is_waiting());
        let busy = had_requests || self.requests.any();
        let period = if busy { BUSY_PERIOD } else { IDLE_PERIOD };
        period.min(limit / LOOKS).max(Duration::from_millis(1))
    }

    /// Answers the requests that have waited for `limit` and whose file's source gives no answer. Other requests go on waiting:
    /// their bytes are being computed.
    fn expire(&self, limit: Duration) {
        let mut stalled = self.requests.of_late(limit, |request| Some(request.ino));
        stalled.retain(|ino| self.fs.is_stalled(*ino));
        let is_expired = |request: &WaitingRequest| request.since.elapsed() >= limit && stalled.contains(&request.ino);
        for expired in self.requests.take_out(is_expired) {
            let (op, ino) = (expired.op, expired.ino);
            self.answer(expired, libc::EIO);
            self.fs.note_given_up(op, ino);
        }
    }

    /// Answers the requests of clients that are being killed, whatever they wait for: until then a client cannot end.
    fn abandon(&self) {
        let mut killed = self.requests.of_late(CLIENT_AGE, |request| request.client);
        killed.retain(|client| is_killed(*client));
        let is_abandoned = |request: &WaitingRequest| request.client.is_some_and(|client| killed.contains(&client));
        for abandoned in self.requests.take_out(is_abandoned) {
            let (ino, op) = (abandoned.ino.0, abandoned.op.name());
            tracing::debug!(ino, op, "the client is killed; its request is given up");
            self.answer(abandoned, libc::EINTR);
        }
    }

    fn answer(&self, request: WaitingRequest, errno: i32) {
        let WaitingRequest { op, since, elsewhere, reply, .. } = request;
        if elsewhere {
            self.handlers.stand_ins().iter().for_each(|threads| threads.note_stuck(true));
        }
        reply.refuse(errno);
        let metrics = self.fs.metrics();
        metrics.in_flight.fetch_sub(1, Ordering::Relaxed);
        metrics.record(op, since.elapsed(), true);
    }
}

fn run(watchdog: &Weak<Watchdog>) {
    while let Some(watchdog) = watchdog.upgrade() {
        let period = watchdog.look();
        watchdog.turns.fetch_add(1, Ordering::Relaxed);
        drop(watchdog);
        thread::sleep(period);
    }
}

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
        systemd::watchdog_period().map(|period| Self::new(period, Arc::clone(&watchdog.turns)))
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
