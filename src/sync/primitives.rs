//! The primitives that this crate is built on: those of the standard library, and in its own tests those of `shuttle`, which tries
//! the orders in which threads may run.

use std::{sync::PoisonError, time::Duration};

#[cfg(test)]
pub(crate) use shuttle::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};
#[cfg(not(test))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// The lock of a mutex, whatever happened to a thread that held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification. True if the time was over before.
#[cfg(not(test))]
pub(crate) fn wait<'a, T>(
    condvar: &Condvar,
    _mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    time: Duration,
) -> (MutexGuard<'a, T>, bool) {
    let (guard, waited) = condvar.wait_timeout(guard, time).unwrap_or_else(PoisonError::into_inner);
    (guard, waited.timed_out())
}

#[cfg(test)]
std::thread_local! {
    /// Whether a wait of a model may end by its time. If not, a lost notification is a thread that waits forever.
    pub(crate) static TIMES_END: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// As above: in a model the time of a wait is over at any moment, or never.
#[cfg(test)]
pub(crate) fn wait<'a, T>(
    condvar: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    _time: Duration,
) -> (MutexGuard<'a, T>, bool) {
    use shuttle::rand::Rng;
    if TIMES_END.get() && shuttle::rand::thread_rng().gen_bool(0.5) {
        drop(guard);
        thread::yield_now();
        return (lock(mutex), true);
    }
    (condvar.wait(guard).unwrap_or_else(PoisonError::into_inner), false)
}
