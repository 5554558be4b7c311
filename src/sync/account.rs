//! Bytes that count until their owner drops them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// A sum of bytes. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Account(Arc<AtomicUsize>);

impl Account {
    /// Counts bytes until the result is dropped.
    pub fn reserve(&self, bytes: usize) -> Reservation {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Reservation { account: self.clone(), bytes }
    }

    /// All bytes now.
    pub fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Bytes that count against a limit until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    account: Account,
    bytes: usize,
}

impl Reservation {
    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets the actual size in bytes.
    pub fn resize(&mut self, bytes: usize) {
        self.account.0.fetch_add(bytes, Ordering::Relaxed);
        self.account.0.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.account.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
