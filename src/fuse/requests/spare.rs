//! Threads in place of those that wait for storage.
//!
//! A thread of fuser reads a request from the kernel, handles it, and reads the next. If all threads wait for storage that
//! gives no answer, no thread reads requests, and the whole mount hangs with one file. So there is one thread more than asked
//! for. Usually this thread rests: with one thread too many, small reads lose a few percent, since the kernel wakes another
//! thread for each. The spare thread is called when all others have been inside requests for a while and one waits for
//! storage. It then reads requests and passes those that may wait to the [`Overflow`], until another thread comes back. The
//! thread that ends a request next rests in its place.
//!
//! A thread that rests cannot see that the mount has ended. A thread that reads sees it, ends, and reports it here.

use std::{
    cell::RefCell,
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use ckfs_sync::{BoxedJob, Pool, PoolOptions};

#[derive(Debug, Default)]
struct Resting {
    /// Threads that have handled a request and were not seen to end.
    known: usize,
    rests: bool,
    /// Whether no thread should rest.
    called: bool,
    ended: bool,
}

/// The threads that read requests.
#[derive(Debug)]
pub(crate) struct Readers {
    /// Threads that usually read requests; there is one more.
    usual: usize,
    /// Threads of fuser inside requests that may wait.
    inside: AtomicUsize,
    /// Such requests that ended.
    passed: AtomicU64,
    /// Value of `passed` at the last turn of the watching thread.
    seen_passed: AtomicU64,
    /// Whether the number of resting threads is right: one rests, or none should.
    settled: AtomicBool,
    resting: Mutex<Resting>,
    changed: Condvar,
}

/// A thread of fuser inside a request that may wait.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Readers);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.passed.fetch_add(1, Ordering::Relaxed);
        self.0.inside.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tells the end of a thread.
struct Known(Arc<Readers>);

impl Drop for Known {
    fn drop(&mut self) {
        let mut resting = self.0.lock();
        resting.known -= 1;
        resting.ended = true;
        self.0.changed.notify_all();
    }
}

thread_local! {
    static KNOWN: RefCell<Option<Known>> = const { RefCell::new(None) };
}

impl Readers {
    /// For a session of `usual` threads and one more.
    pub(crate) fn new(usual: usize) -> Self {
        Self {
            usual,
            inside: AtomicUsize::new(0),
            passed: AtomicU64::new(0),
            seen_passed: AtomicU64::new(0),
            settled: AtomicBool::new(false),
            resting: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Begins a request that may wait; none if this is the last thread that reads requests.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let before = self.inside.fetch_add(1, Ordering::Relaxed);
        let inside = Inside(self);
        (before < self.usual).then_some(inside)
    }

    /// To be called by a thread that has ended a request: it may rest here.
    pub(crate) fn rest(self: &Arc<Self>) {
        KNOWN.with_borrow_mut(|known| {
            if known.is_none() {
                self.lock().known += 1;
                *known = Some(Known(Arc::clone(self)));
            }
        });
        if self.settled.load(Ordering::Relaxed) {
            return;
        }
        let mut resting = self.lock();
        // Another must be there to see the end of the mount.
        if resting.rests || resting.called || resting.ended || resting.known < 2 {
            return;
        }
        resting.rests = true;
        self.settled.store(true, Ordering::Relaxed);
        while !resting.called && !resting.ended {
            resting = self.changed.wait(resting).unwrap_or_else(PoisonError::into_inner);
        }
        resting.rests = false;
    }

    /// Calls the thread that rests if all others are inside requests, none of which ended since this was last called, and
    /// `is_waiting`; lets one rest again once another is back. Whether there were requests since.
    pub(crate) fn look(&self, is_waiting: impl FnOnce() -> bool) -> bool {
        let (inside, passed) = (self.inside.load(Ordering::Relaxed), self.passed.load(Ordering::Relaxed));
        let seen = self.seen_passed.swap(passed, Ordering::Relaxed);
        let full = inside >= self.usual;
        if full && seen == passed && is_waiting() {
            let mut resting = self.lock();
            if !resting.called {
                tracing::debug!("all {inside} threads wait for storage; another reads requests");
            }
            resting.called = true;
            self.settled.store(true, Ordering::Relaxed);
            self.changed.notify_all();
        } else if !full {
            let mut resting = self.lock();
            if resting.called {
                resting.called = false;
                self.settled.store(resting.rests, Ordering::Relaxed);
            }
        }
        inside > 0 || seen != passed
    }

    fn lock(&self) -> MutexGuard<'_, Resting> {
        self.resting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads of the overflow at most, not counting those whose requests were given up.
const OVERFLOW_MAX: usize = 64;

/// Threads whose requests were given up and that others stand in for, at most. Programs can be killed and started again without
/// end while storage gives no answer.
const STUCK_MAX: usize = 256;

/// How long such a thread waits for a request.
const OVERFLOW_IDLE: Duration = Duration::from_secs(10);

/// Handles requests that no thread of fuser should wait for, each in a thread, which are started when needed. More requests
/// than threads wait in a queue.
#[derive(Debug)]
pub(crate) struct Overflow {
    pool: Pool<VecDeque<BoxedJob>>,
    /// Threads that wait for storage although their request was answered.
    stuck: Mutex<usize>,
}

impl Default for Overflow {
    fn default() -> Self {
        let options = PoolOptions { name: "ckfs-overflow", threads_max: OVERFLOW_MAX, idle: OVERFLOW_IDLE };
        Self { pool: Pool::of_closures(options), stuck: Mutex::default() }
    }
}

impl Overflow {
    /// Has a job done. Dropped undone if there is no thread and the system starts none.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        self.pool.submit(job);
        let refused = || {
            self.pool.take_refused(|jobs, error| {
                tracing::error!("cannot start a thread for a request: {error}");
                jobs.pop_front()
            })
        };
        while let Some(undone) = refused() {
            drop(undone);
        }
    }

    /// Notes that a thread's request was given up: another may stand in for it.
    pub(crate) fn mark_stuck(&self) {
        self.change_stuck(|stuck| stuck + 1);
    }

    /// Notes that such a thread is back.
    pub(crate) fn unmark_stuck(&self) {
        self.change_stuck(|stuck| stuck - 1);
    }

    fn change_stuck(&self, change: impl FnOnce(usize) -> usize) {
        let mut stuck = self.stuck.lock().unwrap_or_else(PoisonError::into_inner);
        *stuck = change(*stuck);
        self.pool.set_threads_max(OVERFLOW_MAX + (*stuck).min(STUCK_MAX));
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn the_last_thread_hands_over_and_one_rests_until_it_is_called() {
        let readers = Arc::new(Readers::new(1));
        readers.rest();
        assert!(!readers.lock().rests, "the only thread known must not rest");
        let (tell, told) = mpsc::channel();
        let resting = Arc::clone(&readers);
        let second = thread::spawn(move || {
            resting.rest();
            tell.send(()).unwrap();
        });
        while !readers.lock().rests {
            thread::yield_now();
        }
        let stuck = readers.enter().unwrap();
        assert!(readers.enter().is_none());
        readers.look(|| panic!("requests went on since"));
        assert!(readers.look(|| false));
        told.recv_timeout(Duration::from_millis(20)).unwrap_err();
        readers.look(|| true);
        told.recv_timeout(SOON).unwrap();
        second.join().unwrap();
        drop(stuck);
        readers.look(|| true);
        assert!(!readers.lock().called);
    }

    #[test]
    fn the_end_of_a_thread_ends_the_rest() {
        let readers = Arc::new(Readers::new(1));
        let (first, second) = (Arc::clone(&readers), Arc::clone(&readers));
        let (go, wait) = mpsc::channel::<()>();
        let first = thread::spawn(move || {
            first.rest();
            wait.recv().unwrap();
        });
        while readers.lock().known == 0 {
            thread::yield_now();
        }
        let second = thread::spawn(move || second.rest());
        while !readers.lock().rests {
            thread::yield_now();
        }
        go.send(()).unwrap();
        first.join().unwrap();
        second.join().unwrap();
    }

    #[test]
    fn jobs_that_wait_do_not_keep_others_and_what_is_lost_is_replaced() {
        let overflow = Arc::new(Overflow::default());
        let (tell, told) = mpsc::channel();
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock().unwrap();
        for _ in 0..OVERFLOW_MAX {
            let (tell, gate) = (tell.clone(), Arc::clone(&gate));
            overflow.submit(move || {
                tell.send("begun").unwrap();
                drop(gate.lock());
            });
        }
        for _ in 0..OVERFLOW_MAX {
            assert_eq!(told.recv_timeout(SOON), Ok("begun"));
        }
        let other = tell.clone();
        overflow.submit(move || other.send("queued").unwrap());
        told.recv_timeout(Duration::from_millis(20)).unwrap_err();
        overflow.mark_stuck();
        assert_eq!(told.recv_timeout(SOON), Ok("queued"));
        overflow.unmark_stuck();
        drop(closed);
    }
}
