//! What is known in this process of the comparison of an object with its digest.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;

use super::{
    super::{SourceError, digest::KnownDigest},
    cache::Entry,
};

/// What a service is told to have sent.
const ADVICE: &str = "these are not the bytes that the service lists; the copy in the disk cache was dropped, and is fetched again \
                      by the next mount or command";
/// A digest that is not the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mismatch {
    pub(super) expected: KnownDigest,
    pub(super) found: String,
}

impl Mismatch {
    /// The error of a file.
    pub(super) fn error(&self, file: Arc<std::path::Path>) -> SourceError {
        SourceError::corrupt(file, &self.expected, &self.found, ADVICE)
    }
}

/// Told of wrong bytes that readers had.
type OnWrong = Box<dyn Fn(&Mismatch) + Send + Sync>;

/// Called when the last block has come.
type OnWhole = Box<dyn Fn() + Send + Sync>;

/// State of the comparison of an object in this process.
#[derive(Default)]
pub(super) struct DigestState {
    /// Held while a thread compares: others wait for its result.
    pub(super) comparing: Mutex<()>,
    /// Whether a thread beside the readers compares.
    pub(super) beside: AtomicBool,
    /// Whether a reader had bytes of it, or the checkpoint was opened with some, such as its header.
    served: AtomicBool,
    /// Whether it was placed into the cache of the service's own client, or cannot be.
    pub(super) shared: AtomicBool,
    /// The digest, if it was wrong although readers had bytes, or wrong twice.
    pub(super) wrong: OnceLock<Mismatch>,
    on_wrong: OnceLock<OnWrong>,
    pub(super) on_whole: OnceLock<OnWhole>,
}

impl DigestState {
    /// Sets what is called when bytes that readers had are found to be wrong.
    pub(super) fn set_on_wrong(&self, on_wrong: OnWrong) {
        let _ = self.on_wrong.set(on_wrong);
    }

    /// Notes that blocks have come.
    pub(super) fn note_brought(&self, entry: &Entry) {
        if let Some(on_whole) = self.on_whole.get().filter(|_| self.is_served() && entry.is_whole()) {
            on_whole();
        }
    }

    /// Whether a reader had bytes of it.
    pub(super) fn is_served(&self) -> bool {
        self.served.load(Ordering::Acquire)
    }

    /// Notes that a reader gets bytes of it. Returns whether that is the first time.
    pub(super) fn note_served(&self) -> bool {
        // A store by every reader would move the cache line between processors.
        !self.served.load(Ordering::Relaxed) && !self.served.swap(true, Ordering::AcqRel)
    }

    /// Keeps the first mismatch, and tells of it.
    pub(super) fn lost(&self, mismatch: Mismatch) -> Mismatch {
        let kept = self.wrong.get_or_init(|| mismatch).clone();
        if let Some(on_wrong) = self.on_wrong.get() {
            on_wrong(&kept);
        }
        kept
    }
}
