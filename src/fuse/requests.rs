//! Threads in place of those that wait for storage.
//!
//! A thread of fuser reads a request from the kernel, handles it, and reads the next. If all threads wait for storage that
//! gives no answer, no thread reads requests, and the whole mount hangs with one file. So there is one thread more than asked
//! for. Usually this thread is parked: with one thread too many, small reads lose a few percent, since the kernel wakes another
//! thread for each. The spare thread is called when all others have been inside requests for a while and one waits for
//! storage. It then reads requests and passes those that may wait to others ([`WaitingThreads`]), until another thread comes back. The
//! thread that ends a request next is parked in its place.
//!
//! A parked thread cannot see that the mount has ended. A thread that reads sees it, ends, and reports it here.
//!
//! When another process is to take the requests ([`Dispatchers::leave`]), every thread is parked for good at the end of its next one: each
//! request that this process has taken is answered by it.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::{Condvar, Mutex, MutexGuard};

#[derive(Debug, Default)]
struct Parked {
    /// Threads that have handled a request and were not seen to end.
    known: usize,
    /// Whether a thread is parked.
    has_one: bool,
    /// Whether no thread should be parked.
    called: bool,
    ended: bool,
    /// Threads that take no request any more.
    left: usize,
}

/// The threads that read requests.
#[derive(Debug)]
pub(crate) struct Dispatchers {
    /// Threads that usually read requests; there is one more.
    usual: usize,
    /// Threads of fuser inside requests that may wait.
    inside: AtomicUsize,
    /// Such requests that ended.
    passed: AtomicU64,
    /// Value of `passed` at the last turn of the watching thread.
    seen_passed: AtomicU64,
    /// Whether the number of parked threads is right: one is parked, or none should be.
    settled: AtomicBool,
    /// Whether no thread takes another request.
    leaving: AtomicBool,
    parked: Mutex<Parked>,
    changed: Condvar,
}

/// A thread of fuser inside a request that may wait.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Dispatchers);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.passed.fetch_add(1, Ordering::Relaxed);
        self.0.inside.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tells the end of a thread.
struct Known(Arc<Dispatchers>);

impl Drop for Known {
    fn drop(&mut self) {
        let mut parked = self.0.parked.lock();
        parked.known -= 1;
        parked.ended = true;
        self.0.changed.notify_all();
    }
}

thread_local! {
    static KNOWN: RefCell<Option<Known>> = const { RefCell::new(None) };
}

impl Dispatchers {
    /// For a session of `usual` threads and one more.
    pub(crate) fn new(usual: usize) -> Self {
        Self {
            usual,
            inside: AtomicUsize::new(0),
            passed: AtomicU64::new(0),
            seen_passed: AtomicU64::new(0),
            settled: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            parked: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Begins a request that may wait; none if this is the last thread that reads requests.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let before = self.inside.fetch_add(1, Ordering::Relaxed);
        let inside = Inside(self);
        (before < self.usual).then_some(inside)
    }

    /// To be called by a thread that has ended a request: it may be parked here.
    pub(crate) fn park(self: &Arc<Self>) {
        KNOWN.with_borrow_mut(|known| {
            if known.is_none() {
                self.parked.lock().known += 1;
                *known = Some(Known(Arc::clone(self)));
            }
        });
        let is_leaving = || self.leaving.load(Ordering::Relaxed);
        if self.settled.load(Ordering::Relaxed) && !is_leaving() {
            return;
        }
        let mut parked = self.parked.lock();
        if is_leaving() {
            return self.stay(parked);
        }
        // Another must be there to see the end of the mount.
        if parked.has_one || parked.called || parked.ended || parked.known < 2 {
            return;
        }
        parked.has_one = true;
        self.settled.store(true, Ordering::Relaxed);
        while !parked.called && !parked.ended && !is_leaving() {
            self.changed.wait(&mut parked);
        }
        parked.has_one = false;
        if is_leaving() {
            self.stay(parked);
        }
    }

    /// Parks a thread for good.
    fn stay(&self, mut parked: MutexGuard<'_, Parked>) {
        parked.left += 1;
        loop {
            self.changed.wait(&mut parked);
        }
    }

    /// From now on no thread takes a request after the one that it waits for or handles. Whether no thread takes any.
    pub(crate) fn leave(&self) -> bool {
        let parked = self.parked.lock();
        self.leaving.store(true, Ordering::Relaxed);
        self.changed.notify_all();
        parked.left > self.usual
    }

    /// Calls the parked thread if all others are inside requests, none of which ended since this was last called, and
    /// `is_waiting`; lets one park again once another is back. Whether there were requests since.
    pub(crate) fn look(&self, is_waiting: impl FnOnce() -> bool) -> bool {
        let (inside, passed) = (self.inside.load(Ordering::Relaxed), self.passed.load(Ordering::Relaxed));
        let seen = self.seen_passed.swap(passed, Ordering::Relaxed);
        let full = inside >= self.usual;
        if full && seen == passed && is_waiting() {
            let mut parked = self.parked.lock();
            if !parked.called {
                tracing::debug!("all {inside} threads wait for storage; another reads requests");
            }
            parked.called = true;
            self.settled.store(true, Ordering::Relaxed);
            self.changed.notify_all();
        } else if !full {
            let mut parked = self.parked.lock();
            if parked.called {
                parked.called = false;
                self.settled.store(parked.has_one, Ordering::Relaxed);
            }
        }
        inside > 0 || seen != passed
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn the_last_thread_hands_over_and_one_rests_until_it_is_called() {
        let dispatchers = Arc::new(Dispatchers::new(1));
        dispatchers.park();
        assert!(!dispatchers.parked.lock().has_one, "the only thread known must not rest");
        let (tell, told) = mpsc::channel();
        let parked = Arc::clone(&dispatchers);
        let second = thread::spawn(move || {
            parked.park();
            tell.send(()).unwrap();
        });
        while !dispatchers.parked.lock().has_one {
            thread::yield_now();
        }
        let stuck = dispatchers.enter().unwrap();
        assert!(dispatchers.enter().is_none());
        dispatchers.look(|| panic!("requests went on since"));
        assert!(dispatchers.look(|| false));
        told.recv_timeout(Duration::from_millis(20)).unwrap_err();
        dispatchers.look(|| true);
        told.recv_timeout(SOON).unwrap();
        second.join().unwrap();
        drop(stuck);
        dispatchers.look(|| true);
        assert!(!dispatchers.parked.lock().called);
    }

    #[test]
    fn all_threads_stay_when_another_process_takes_the_requests() {
        let dispatchers = Arc::new(Dispatchers::new(1));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let parked = Arc::clone(&dispatchers);
                thread::spawn(move || {
                    loop {
                        parked.park();
                        thread::yield_now();
                    }
                })
            })
            .collect();
        while !dispatchers.leave() {
            dispatchers.look(|| true);
            thread::yield_now();
        }
        assert!(dispatchers.leave() && threads.iter().all(|thread| !thread.is_finished()));
    }

    #[test]
    fn the_end_of_a_thread_ends_the_rest() {
        let dispatchers = Arc::new(Dispatchers::new(1));
        let (first, second) = (Arc::clone(&dispatchers), Arc::clone(&dispatchers));
        let (go, wait) = mpsc::channel::<()>();
        let first = thread::spawn(move || {
            first.park();
            wait.recv().unwrap();
        });
        while dispatchers.parked.lock().known == 0 {
            thread::yield_now();
        }
        let second = thread::spawn(move || second.park());
        while !dispatchers.parked.lock().has_one {
            thread::yield_now();
        }
        go.send(()).unwrap();
        first.join().unwrap();
        second.join().unwrap();
    }
}
