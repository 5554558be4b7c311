//! Waiting for a change that is not under the lock of who waits, such as a buffer that comes back.

use std::time::Duration;

use super::primitives::{AtomicUsize, Condvar, Mutex, Ordering, lock, wait};

/// Something that changes. To note a change costs one load while nobody watches.
#[derive(Debug, Default)]
pub struct ChangeCount {
    watchers: AtomicUsize,
    count: Mutex<u64>,
    changed: Condvar,
}

/// Sees every change from its making on, so that a look after that and a wait after the look miss none.
#[derive(Debug)]
pub struct Watch<'a> {
    of: &'a ChangeCount,
    seen: u64,
}

impl ChangeCount {
    /// Notes a change, made before this call.
    pub fn note(&self) {
        // A watcher that is not counted yet looks after the change.
        if self.watchers.load(Ordering::SeqCst) > 0 {
            *lock(&self.count) += 1;
            self.changed.notify_all();
        }
    }

    /// Begins to watch.
    pub fn watch(&self) -> Watch<'_> {
        self.watchers.fetch_add(1, Ordering::SeqCst);
        Watch { of: self, seen: *lock(&self.count) }
    }
}

impl Watch<'_> {
    /// Waits for a change since the watch began, or since the last wait. False if the time was over before.
    pub fn wait(&mut self, time: Duration) -> bool {
        let mut count = lock(&self.of.count);
        let mut is_over = false;
        while *count == self.seen && !is_over {
            (count, is_over) = wait(&self.of.changed, &self.of.count, count, time);
        }
        std::mem::replace(&mut self.seen, *count) != *count
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.of.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}
