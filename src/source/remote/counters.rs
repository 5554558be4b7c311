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
    /// Pauses that a service asked for.
    pub pauses: AtomicU64,
    /// Milliseconds of those pauses.
    pub pause_ms: AtomicU64,
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
    pub fn note_latency(&self, time: Duration) {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let bucket = LATENCY_BOUNDS_MS.iter().position(|bound| ms <= *bound).unwrap_or(LATENCY_BOUNDS_MS.len());
        Self::add(&self.latency[bucket], 1);
        Self::add(&self.latency_sum_ms, ms);
    }

    /// All counts with their names, except for the latencies.
    pub fn named(&self) -> [(&'static str, u64); 13] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("requests", read(&self.requests)),
            ("fetched_bytes", read(&self.fetched_bytes)),
            ("retries", read(&self.retries)),
            ("pauses", read(&self.pauses)),
            ("pause_ms", read(&self.pause_ms)),
            ("failures", read(&self.failures)),
            ("failed_reads", read(&self.failed_reads)),
            ("hit_bytes", read(&self.hit_bytes)),
            ("prefetch_hit_bytes", read(&self.prefetch_hit_bytes)),
            ("miss_bytes", read(&self.miss_bytes)),
            ("uncached_bytes", read(&self.uncached_bytes)),
            ("evicted_bytes", read(&self.evicted_bytes)),
            ("bad_blocks", read(&self.bad_blocks)),
        ]
    }
}
