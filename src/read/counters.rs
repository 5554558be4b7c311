//! Counters of the read path.

use std::sync::atomic::{AtomicU64, Ordering};

/// How bytes are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// A source file, unchanged. Bytes that the kernel reads directly are not counted.
    Identical,
    /// Runs of source bytes, unconverted.
    Contiguous,
    /// Transformed data, by tiles.
    Tiles,
    /// Bytes that ckfs generates: headers, metadata.
    Generated,
}

/// Counts since mount.
#[derive(Debug, Default)]
pub struct Counters {
    served: [AtomicU64; 4],
    fetched: [AtomicU64; 4],
    /// Requests answered with mapped source bytes, without a copy.
    pub zero_copy: AtomicU64,
    /// Tiles found in the cache.
    pub tile_hits: AtomicU64,
    /// Tiles computed on demand.
    pub tile_misses: AtomicU64,
    /// Requests that waited for a tile that another thread was computing.
    pub tile_waits: AtomicU64,
    /// Tiles dropped to stay within the cache's limit.
    pub tile_evictions: AtomicU64,
    /// Requests computed without a tile, because the tiles in use left no room for one more.
    pub tile_bypasses: AtomicU64,
    /// Tiles computed ahead of a sequential reader.
    pub prefetched: AtomicU64,
    /// Of these, tiles that a reader then requested.
    pub prefetch_hits: AtomicU64,
    /// Tensor files materialized, in memory or on a disk.
    pub materialized_files: AtomicU64,
    /// Bytes of these.
    pub materialized_bytes: AtomicU64,
    /// Reads that failed.
    pub failed_reads: AtomicU64,
    /// Opens that failed because of a source.
    pub failed_opens: AtomicU64,
    /// Of both, those that failed because storage gave no answer in time.
    pub stalled_reads: AtomicU64,
}

/// Adds to a counter.
pub fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn serve(&self, path: Path, bytes: u64) {
        add(&self.served[path as usize], bytes);
    }

    pub(super) fn fetch(&self, path: Path, bytes: u64) {
        add(&self.fetched[path as usize], bytes);
    }

    /// Bytes sent to readers.
    pub fn served_bytes(&self, path: Path) -> u64 {
        self.served[path as usize].load(Ordering::Relaxed)
    }

    /// Bytes read from source files. An element counts once for each piece that needed it.
    pub fn fetched_bytes(&self, path: Path) -> u64 {
        self.fetched[path as usize].load(Ordering::Relaxed)
    }
}
