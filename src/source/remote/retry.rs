//! Repeats failed requests: with pauses that grow, and with pauses that a service asks for, which all threads share.
//!
//! A service that asks for a pause also gets fewer requests at a time: half as many after each such reply, and one more after as many
//! good replies as there may be requests.

use std::{
    ops::ControlFlow,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{
    super::{
        ByteSpan,
        waits::{Pulse, Waits},
    },
    counters::RemoteCounters,
    error::{Failure, RemoteError},
    hedge::Hedging,
    interface::{Objects, RemoteFile, Sink},
};

/// First pause after a failed request.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause of the exponential backoff.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Most attempts in a row without progress, if nothing else bounds them.
const ATTEMPTS_MAX: u32 = 8;
/// Fewest bytes of an attempt that count as progress: what comes from a slow line before the next attempt begins. A server that
/// sends a few bytes and then none would otherwise be asked forever.
const PROGRESS_BYTES_MIN: u64 = 16 << 10;
/// Longest time of one attempt. A slow reply is cut off, and the next attempt goes on where it ended.
const ATTEMPT_MAX: Duration = Duration::from_mins(5);
/// Step in which a thread waits for a shared pause: another reply may prolong it.
const STEP: Duration = Duration::from_millis(50);

/// Most requests at a time to a service that does not limit them.
const PARALLEL_MAX: usize = 64;
/// Replies that ask for a pause within this time count as one: their requests were sent together.
const CUT_PERIOD: Duration = Duration::from_millis(200);

/// How long a request may take with all of its repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Until this time, as for a reader.
    At(Instant),
    /// Until the service has brought nothing, to this request or another, for the time limit of its gate: as for a command that
    /// needs very many requests.
    Quiet,
    /// As [`Deadline::Quiet`], but a pause that the service asks for may be longer than that: nobody waits.
    None,
}

impl Deadline {
    /// The time left, or `None` if it depends on what comes meanwhile.
    pub fn left(self) -> Option<Duration> {
        match self {
            Self::At(time) => Some(time.saturating_duration_since(Instant::now())),
            Self::Quiet | Self::None => None,
        }
    }

    /// Whether it is over.
    pub fn is_over(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}

/// The rate limit of a service, shared by all threads: the pause that it requested, and how many requests it gets at a time.
#[derive(Debug)]
pub struct Backoff {
    pub(super) counters: Arc<RemoteCounters>,
    closed: Mutex<Option<(Instant, RemoteError)>>,
    pulse: Arc<Pulse>,
    traffic: Mutex<Traffic>,
    freed: Condvar,
}

#[derive(Debug)]
struct Traffic {
    running: usize,
    most: usize,
    /// Good replies since `most` changed.
    good: usize,
    cut: Option<Instant>,
}

/// A request under way, until it is dropped.
#[derive(Debug)]
struct Running<'a>(&'a Backoff);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.traffic.lock().running -= 1;
        self.0.freed.notify_one();
    }
}

impl Backoff {
    /// The gate of a service that may bring nothing for `limit`. `waits` shows for how long it has.
    pub fn new(host: &str, limit: Duration, waits: &Waits, counters: Arc<RemoteCounters>) -> Self {
        let (pulse, traffic) =
            (waits.pulse(host, limit), Traffic { running: 0, most: PARALLEL_MAX, good: 0, cut: None });
        Self { counters, closed: Mutex::default(), pulse, traffic: Mutex::new(traffic), freed: Condvar::new() }
    }

    /// For how long the service may bring nothing.
    pub(super) fn limit(&self) -> Duration {
        self.pulse.limit
    }

    /// Closes the gate for `pause` from now on, since a reply requested it. A longer pause stays.
    pub fn close(&self, pause: Duration, why: &RemoteError) {
        let until = Instant::now() + pause;
        let mut closed = self.closed.lock();
        if closed.as_ref().is_none_or(|(current, _)| *current < until) {
            *closed = Some((until, why.clone()));
        }
        drop(closed);
        let mut traffic = self.traffic.lock();
        if traffic.cut.is_none_or(|cut| cut.elapsed() > CUT_PERIOD) {
            traffic.most = (traffic.most.min(traffic.running) / 2).max(1);
            (traffic.good, traffic.cut) = (0, Some(Instant::now()));
        }
    }

    /// Notes a good reply.
    fn note_reply(&self) {
        self.pulse.note_progress();
        let mut traffic = self.traffic.lock();
        if traffic.most < PARALLEL_MAX {
            traffic.good += 1;
            if traffic.good >= traffic.most {
                traffic.most += 1;
                traffic.good = 0;
                self.freed.notify_one();
            }
        }
    }

    /// The time until it opens.
    pub(crate) fn closed_for(&self) -> Option<Duration> {
        let closed = self.closed.lock();
        let left = closed.as_ref()?.0.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// The reply that requested the last pause.
    fn reason(&self) -> Option<RemoteError> {
        self.closed.lock().as_ref().map(|(_, why)| why.clone())
    }

    /// The time left for a request.
    fn left(&self, deadline: Deadline) -> Duration {
        deadline.left().unwrap_or_else(|| self.pulse.limit.saturating_sub(self.pulse.quiet()))
    }

    /// Waits until it is open, and until the service may get another request. Returns the time for which it stays closed if that is
    /// beyond the deadline, without waiting.
    fn pass(&self, deadline: Deadline) -> Result<Running<'_>, Option<Duration>> {
        loop {
            while let Some(closed) = self.closed_for() {
                if deadline != Deadline::None && self.left(deadline) < closed {
                    return Err(Some(closed));
                }
                // Not all threads at the same time.
                thread::sleep(closed.min(STEP) + jitter(closed.min(STEP)));
            }
            let mut traffic = self.traffic.lock();
            if traffic.running < traffic.most {
                traffic.running += 1;
                return Ok(Running(self));
            }
            self.freed.wait_for(&mut traffic, STEP);
            drop(traffic);
            if self.left(deadline).is_zero() {
                return Err(None);
            }
        }
    }
}

/// A part of `most` that differs from call to call.
fn jitter(most: Duration) -> Duration {
    static SEED: AtomicU64 = AtomicU64::new(0x9E37_79B9_7F4A_7C15);
    let mut x = SEED.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed) ^ u64::from(std::process::id());
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    most.mul_f64(f64::from(u32::try_from((x ^ (x >> 31)) >> 40).unwrap_or(0)) / f64::from(1_u32 << 24))
}

/// The pause after this number of failed attempts in a row: doubled each time, and between half and all of that.
fn pause_after(attempts: u32) -> Duration {
    let pause = PAUSE_MIN.saturating_mul(1 << attempts.saturating_sub(1).min(10)).min(PAUSE_MAX);
    pause / 2 + jitter(pause / 2)
}

/// Repeats `attempt` until it succeeds, fails for good, or the deadline is over. `progress` tells whether the last attempt
/// brought anything; attempts that do are not counted.
///
/// # Errors
/// The last error. If the service asks for a longer pause than the deadline allows, the message says so.
pub(crate) fn retry<T>(
    gate: &Backoff,
    deadline: Deadline,
    mut attempt: impl FnMut(Instant) -> Result<T, RemoteError>,
    mut progress: impl FnMut() -> bool,
) -> Result<T, RemoteError> {
    let (counters, mut fruitless) = (&gate.counters, 0);
    let mut last: Option<RemoteError> = None;
    let begun = Instant::now();
    let _waiting = gate.pulse.wait_begins();
    loop {
        let running = match gate.pass(deadline) {
            Ok(running) => running,
            Err(Some(closed)) => return Err(longer_than_allowed(last, gate, closed)),
            Err(None) => return Err(last.unwrap_or_else(|| out_of_time(gate))),
        };
        RemoteCounters::add(&counters.requests, 1);
        let sent = Instant::now();
        let error = match attempt(sent + gate.left(deadline).min(ATTEMPT_MAX)) {
            Ok(value) => {
                counters.note_latency(sent.elapsed());
                gate.note_reply();
                return Ok(value);
            }
            Err(error) => error,
        };
        if !error.is_transient() {
            RemoteCounters::add(&counters.failures, 1);
            return Err(error);
        }
        gate.pulse.note_answer(error.reason(), matches!(error.failure, Failure::Busy(_)));
        fruitless = if progress() { 1 } else { fruitless + 1 };
        let mut pause = pause_after(fruitless);
        let is_busy = matches!(error.failure, Failure::Busy(_));
        let mut asked = false;
        if let Failure::Busy(wanted) = error.failure {
            // A service that asks for no pause at all gets the growing one.
            let wanted = wanted.filter(|wanted| *wanted >= PAUSE_MIN);
            // Nobody waits: one pause of any length is no reason to give up.
            asked = wanted.is_some() && deadline == Deadline::None && last.is_none();
            pause = wanted.unwrap_or(pause);
            RemoteCounters::add(&counters.pauses, 1);
            RemoteCounters::add(&counters.pause_ms, u64::try_from(pause.as_millis()).unwrap_or(u64::MAX));
            gate.close(pause, &error);
        }
        drop(running);
        let over = gate.left(deadline) <= pause && !asked;
        let bounded = matches!(deadline, Deadline::At(_)) || is_busy;
        if over || (!bounded && fruitless >= ATTEMPTS_MAX) {
            RemoteCounters::add(&counters.failures, 1);
            return Err(given_up(error, gate, pause, over.then(|| begun.elapsed())));
        }
        tracing::debug!("{error}; again in {} ms", pause.as_millis());
        if !is_busy {
            thread::sleep(pause);
        }
        RemoteCounters::add(&counters.retries, 1);
        last = Some(error);
    }
}

/// The error of a request that is not repeated any more; `over` is its time if that was the reason.
fn given_up(error: RemoteError, gate: &Backoff, pause: Duration, over: Option<Duration>) -> RemoteError {
    match (&error.failure, over) {
        (Failure::Busy(Some(_)), _) => longer_than_allowed(Some(error), gate, pause),
        (_, Some(time)) if !error.message.contains("--source-timeout") => {
            let told = format!("given up after {:.1} s; --source-timeout allows more", time.as_secs_f32());
            RemoteError { message: format!("{}; {told}", error.message), ..error }
        }
        (_, _) => error,
    }
}

/// The error of a request that was not sent, since the service gets few at a time.
fn out_of_time(gate: &Backoff) -> RemoteError {
    gate.reason().unwrap_or_else(|| {
        RemoteError::new(Failure::Transient, "", "", "no request could be sent within --source-timeout")
    })
}

/// The error of a reader who cannot wait for the end of a pause. Where no request was sent for this reader, the reply to another one
/// tells the status; what was requested then is not its object.
fn longer_than_allowed(last: Option<RemoteError>, gate: &Backoff, pause: Duration) -> RemoteError {
    let seconds = pause.as_secs_f32().ceil();
    let told = format!("the service asks for a pause of {seconds} s, longer than --source-timeout allows");
    match (last, gate.reason()) {
        (Some(error), _) => RemoteError { message: format!("{}; {told}", error.message), ..error },
        (None, Some(other)) => RemoteError { message: told, what: String::new(), span: None, ..other },
        (None, None) => RemoteError::new(Failure::Busy(Some(pause)), "", "", told),
    }
}

/// A service with repetitions.
pub struct Retrying {
    /// The service.
    pub(super) objects: Arc<dyn Objects>,
    pub(super) gate: Backoff,
    hedging: Hedging,
    /// Moving averages over requests: microseconds until the first byte, and bytes in a millisecond after it.
    first_byte_us: AtomicU64,
    bytes_per_ms: AtomicU64,
    planned_gap_bytes: OnceLock<u64>,
}

/// Bounds of [`Retrying::gap_bytes`].
const GAP_BYTES_MIN: u64 = 64 << 10;
const GAP_BYTES_MAX: u64 = 1 << 20;
/// Bytes in a millisecond of one connection before a long reply tells it: what stores give to one.
const BYTES_PER_MS: u64 = 80_000;
/// The wait for a first byte before the first reply tells it.
const FIRST_BYTE_US: u64 = 3000;
/// Replies of at least this many bytes tell the speed of a connection.
const TIMED_BYTES_MIN: u64 = 256 << 10;
/// Weight of the last request in a moving average, as a divisor.
const AVERAGE_DIVISOR: u64 = 8;

/// Moves an average towards a value.
fn average(old: &AtomicU64, value: u64) {
    let before = old.load(Ordering::Relaxed);
    let after = if before == 0 { value } else { before - before / AVERAGE_DIVISOR + value / AVERAGE_DIVISOR };
    old.store(after, Ordering::Relaxed);
}

impl Retrying {
    /// Repeats the failed requests to `objects` behind a gate.
    pub fn new(gate: Backoff, objects: Arc<dyn Objects>) -> Self {
        let (first_byte_us, bytes_per_ms) = (AtomicU64::new(0), AtomicU64::new(0));
        let hedging = Hedging::new(Arc::clone(&gate.counters));
        let planned_gap_bytes = OnceLock::new();
        Self { objects, gate, hedging, first_byte_us, bytes_per_ms, planned_gap_bytes }
    }

    /// Most bytes between two needed spans of one strided piece that are fetched with them: reading over them takes one
    /// connection no longer than another request does.
    pub fn gap_bytes(&self) -> u64 {
        let known = |average: &AtomicU64, otherwise| match average.load(Ordering::Relaxed) {
            0 => otherwise,
            value => value,
        };
        let (wait_us, rate) = (known(&self.first_byte_us, FIRST_BYTE_US), known(&self.bytes_per_ms, BYTES_PER_MS));
        (wait_us.saturating_mul(rate) / 1000).clamp(GAP_BYTES_MIN, GAP_BYTES_MAX)
    }

    /// As [`Self::gap_bytes`], for bytes that no reader waits for: rounded down to a power of two and frozen at the first use, so
    /// that fetch and plan agree.
    pub(crate) fn planned_gap_bytes(&self) -> u64 {
        *self.planned_gap_bytes.get_or_init(|| 1 << self.gap_bytes().ilog2())
    }

    /// Notes the times of a reply that began at `begun` and had its first byte at `first`.
    fn note_speed(&self, begun: Instant, first: Instant, bytes: u64) {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.hedging.note_reply(first.duration_since(begun));
        average(&self.first_byte_us, us(first.duration_since(begun)));
        if bytes >= TIMED_BYTES_MIN {
            average(&self.bytes_per_ms, bytes.saturating_mul(1000) / us(first.elapsed()).max(1));
        }
    }

    /// Passes the bytes of `span` to `sink`, in order, each byte once.
    ///
    /// # Errors
    /// The last error of an attempt.
    ///
    /// # Panics
    /// If an attempt passes more bytes than were requested.
    pub fn read(
        &self,
        file: &RemoteFile,
        span: ByteSpan,
        deadline: Deadline,
        sink: &mut Sink<'_>,
    ) -> Result<(), RemoteError> {
        let mut next = span.start();
        let (mut before, mut ended, mut unnoted) = (next, false, 0);
        let done = std::cell::Cell::new(next);
        let result = retry(
            &self.gate,
            deadline,
            |until| {
                let rest = ByteSpan::new(next, span.end()).expect("no more bytes than the span are counted");
                let (begun, mut first) = (Instant::now(), None);
                let result = self.objects.read(file, rest, until, &self.hedging, &mut |bytes| {
                    let len = bytes.len().min(usize::try_from(span.end() - next).unwrap_or(usize::MAX));
                    RemoteCounters::add(&self.gate.counters.fetched_bytes, len as u64);
                    next += len as u64;
                    done.set(next);
                    unnoted += len as u64;
                    if unnoted >= PROGRESS_BYTES_MIN {
                        unnoted = 0;
                        self.gate.pulse.note_progress();
                    }
                    first.get_or_insert_with(Instant::now);
                    if sink(&bytes[..len]).is_break() {
                        ended = true;
                        return ControlFlow::Break(());
                    }
                    ControlFlow::Continue(())
                });
                if matches!(&result, Err(error) if matches!(error.failure, Failure::Busy(_))) {
                    self.hedging.note_pause();
                }
                if let (Some(first), Ok(())) = (first, &result) {
                    self.note_speed(begun, first, next - rest.start());
                }
                match result {
                    Ok(()) if !ended && next < span.end() => Err(RemoteError::new(
                        Failure::Transient,
                        self.objects.host(),
                        &file.key,
                        format!("the reply ended {} bytes early", span.end() - next),
                    )
                    .of_span(rest)),
                    Err(_) if ended || next == span.end() => Ok(()),
                    other => other,
                }
            },
            || done.get() - std::mem::replace(&mut before, done.get()) >= PROGRESS_BYTES_MIN,
        );
        result.map_err(|error| match (error.what.is_empty(), error.span) {
            (true, _) => {
                RemoteError { host: self.objects.host().to_owned(), what: file.key.clone(), span: Some(span), ..error }
            }
            (false, None) => error.of_span(span),
            (false, Some(_)) => error,
        })
    }
}
