//! Counts of remote reads, for statistics and metrics.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Upper bounds of the buckets of [`RemoteCounters::latency`], in milliseconds.
pub const LATENCY_BOUNDS_MS: [u64; 12] = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000];

/// The counts, as rows have them: the name after `remote_`, and what it counts.
macro_rules! counters {
    ($($name:ident $help:literal;)*) => {
        /// Counts of remote reads. All only grow.
        #[derive(Debug, Default)]
        pub struct RemoteCounters {
            $(#[doc = $help] pub $name: AtomicU64,)*
            /// Time of successful requests until their last byte: one count for each bound of [`LATENCY_BOUNDS_MS`], and one beyond.
            pub latency: [AtomicU64; LATENCY_BOUNDS_MS.len() + 1],
            /// Milliseconds of all of them.
            pub latency_sum_ms: AtomicU64,
        }

        impl RemoteCounters {
            /// All counts, except for the latencies.
            pub fn rows(&self) -> [CountRow; 15] {
                [$(CountRow {
                    key: concat!("remote_", stringify!($name)),
                    help: $help,
                    value: self.$name.load(Ordering::Relaxed),
                }),*]
            }
        }
    };
}

counters! {
    requests "Requests sent to remote services";
    fetched_bytes "Bytes of replies of remote services";
    retries "Requests that repeat a failed one";
    pauses "Pauses that a remote service asked for";
    hedges "Second requests beside those whose first byte took long";
    hedge_wins "Second requests that were answered first";
    pause_ms "Milliseconds of these pauses";
    failures "Requests to remote services that failed for good";
    failed_reads "Reads of remote files that failed";
    hit_bytes "Bytes found in the disk cache, of earlier runs or other processes";
    prefetch_hit_bytes "Bytes found in the disk cache since they were fetched ahead";
    miss_bytes "Bytes that readers waited for";
    uncached_bytes "Bytes passed to readers without the disk cache, which has no room";
    evicted_bytes "Bytes removed from the disk cache to make room";
    bad_blocks "Blocks of the disk cache with a wrong checksum";
}

impl RemoteCounters {
    /// Adds to a count.
    pub fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    /// Counts a successful request.
    pub(crate) fn note_latency(&self, time: Duration) {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let bucket = LATENCY_BOUNDS_MS.iter().position(|bound| ms <= *bound).unwrap_or(LATENCY_BOUNDS_MS.len());
        Self::add(&self.latency[bucket], 1);
        Self::add(&self.latency_sum_ms, ms);
    }
}

/// A count with its names.
#[derive(Clone, Copy, Debug)]
pub struct CountRow {
    /// Name in statistics; in metrics it is without the unit `_bytes`.
    pub key: &'static str,
    /// What it counts.
    pub help: &'static str,
    /// The count.
    pub value: u64,
}

impl CountRow {
    /// Whether it counts bytes.
    pub fn is_bytes(&self) -> bool {
        self.key.ends_with("_bytes")
    }
}
