//! Counts of remote reads, for statistics and metrics.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Upper bounds of the buckets of [`RemoteCounters::latency`], in milliseconds.
pub const LATENCY_BOUNDS_MS: [u64; 12] = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000];

/// Counts of remote reads. All only grow.
#[derive(Debug, Default)]
pub struct RemoteCounters {
    /// Requests sent.
    pub requests: AtomicU64,
    /// Bytes of replies.
    pub fetched_bytes: AtomicU64,
    /// Requests that repeat a failed one.
    pub retries: AtomicU64,
    /// Pauses that a service requested.
    pub pauses: AtomicU64,
    /// Milliseconds of those pauses.
    pub pause_ms: AtomicU64,
    /// Second requests beside those whose first byte took long.
    pub hedges: AtomicU64,
    /// Second requests that were answered first.
    pub hedge_wins: AtomicU64,
    /// Requests that failed for good.
    pub failures: AtomicU64,
    /// Reads of files that failed.
    pub failed_reads: AtomicU64,
    /// Bytes that readers found in the cache, fetched in an earlier run or by another process.
    pub hit_bytes: AtomicU64,
    /// Bytes that readers found in the cache because they were fetched ahead of them.
    pub prefetch_hit_bytes: AtomicU64,
    /// Bytes that readers waited for.
    pub miss_bytes: AtomicU64,
    /// Bytes passed to readers without the cache, since the disk has no room.
    pub uncached_bytes: AtomicU64,
    /// Bytes removed from the cache to make room.
    pub evicted_bytes: AtomicU64,
    /// Cached blocks whose checksum was wrong.
    pub bad_blocks: AtomicU64,
    /// Time of successful requests until their last byte: one count for each bound of [`LATENCY_BOUNDS_MS`], and one beyond.
    pub latency: [AtomicU64; LATENCY_BOUNDS_MS.len() + 1],
    /// Milliseconds of all of them.
    pub latency_sum_ms: AtomicU64,
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

    /// All counts, except for the latencies.
    pub fn rows(&self) -> [CountRow; 15] {
        let row = |key, help, counter: &AtomicU64| CountRow { key, help, value: counter.load(Ordering::Relaxed) };
        [
            row("remote_requests", "Requests sent to remote services", &self.requests),
            row("remote_fetched_bytes", "Bytes of replies of remote services", &self.fetched_bytes),
            row("remote_retries", "Requests that repeat a failed one", &self.retries),
            row("remote_pauses", "Pauses that a remote service asked for", &self.pauses),
            row("remote_hedges", "Second requests beside those whose first byte took long", &self.hedges),
            row("remote_hedge_wins", "Second requests that were answered first", &self.hedge_wins),
            row("remote_pause_ms", "Milliseconds of these pauses", &self.pause_ms),
            row("remote_failures", "Requests to remote services that failed for good", &self.failures),
            row("remote_failed_reads", "Reads of remote files that failed", &self.failed_reads),
            row(
                "remote_hit_bytes",
                "Bytes found in the disk cache, of earlier runs or other processes",
                &self.hit_bytes,
            ),
            row(
                "remote_prefetch_hit_bytes",
                "Bytes found in the disk cache since they were fetched ahead",
                &self.prefetch_hit_bytes,
            ),
            row("remote_miss_bytes", "Bytes that readers waited for", &self.miss_bytes),
            row(
                "remote_uncached_bytes",
                "Bytes passed to readers without the disk cache, which has no room",
                &self.uncached_bytes,
            ),
            row("remote_evicted_bytes", "Bytes removed from the disk cache to make room", &self.evicted_bytes),
            row("remote_bad_blocks", "Blocks of the disk cache with a wrong checksum", &self.bad_blocks),
        ]
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
