//! What the daemon's memory is for: one budget with named parts.
//!
//! All parts are derived from one limit (see [`super::memory`]). No part, and no least size of a part, is more than a quarter of
//! it, unless the user gave the size of the cache. The parts:
//!
//! | part | holds | of the limit |
//! | --- | --- | --- |
//! | cache | tiles, also those being computed; materialized and pre-zeroed files, also dropped ones that programs still map | 1/8, at least 256 MiB or 1/4, at most 16 GiB |
//! | spare buffers | buffers kept for the next tile or reply | 1/4 of the cache, at least 32 MiB or 1/16 |
//! | decoded chunks | chunks of Orbax checkpoints that are decoded, and the buffers to decode them | 1/8, at most 4 GiB; more for the largest chunk, as far as the limit allows |
//! | thread buffers | what each thread works in beside tiles: replies, and source bytes where a source is not mapped | at most 64 MiB a thread, 1/4 for all |
//! | mapped pages | pages of sources in the process's maps; the page cache has them anyway | 160 MiB or 1/4; 1/4 while transposed tiles visit the same pages again |
//!
//! Mapped pages may reach twice their part for a moment: the process counts what it touches and drops the pages of a whole part at
//! once. The kernel can take these pages back at any time.
//!
//! What is not in the budget: the program itself and the table of tensors (some 0.5 kB a tensor), what parsers make of descriptions
//! while they are read ([`super::parse_room`]), generated files that are being read (4 MiB), and page cache that is not mapped,
//! which the kernel reclaims.

use super::memory::Limit;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Part of the limit that no part of the budget exceeds.
const PART_MAX: u64 = 4;
/// The cache's part of the limit, and its least and most bytes.
const CACHE_PART: u64 = 8;
const CACHE_BYTES: (u64, u64) = (256 * MIB, 16 * GIB);
/// Least bytes of spare buffers: a few for each thread.
const SPARE_BYTES_MIN: u64 = 32 * MIB;
/// The part of the limit for decoded chunks, and its most bytes: a few chunks for each core.
const DECODED_PART: u64 = 8;
const DECODED_BYTES_MAX: u64 = 4 * GIB;
/// Least and most bytes of one thread's own buffers. A reply has up to 1 MiB.
const THREAD_BYTES: (u64, u64) = (MIB, 64 * MIB);
/// The limit divided by this is the most threads that start by default.
const LIMIT_BYTES_PER_THREAD: u64 = 32 * MIB;
/// Least and most threads by default, where the limit allows the least.
const THREADS: (usize, usize) = (2, 16);
/// Mapped pages of sources, usually.
const MAPPED_BYTES: u64 = 160 * MIB;

/// The parts of the memory that the daemon may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// What it is derived from.
    pub limit: Limit,
    /// Threads that serve requests; as many more compute ahead.
    pub threads: usize,
    /// Tiles, materialized and pre-zeroed files, in bytes.
    pub cache_bytes: u64,
    /// Unused buffers that are kept, in bytes.
    pub spare_buffer_bytes: u64,
    /// Decoded chunks of sources that have any, in bytes.
    pub decoded_bytes: u64,
    /// Buffers of one thread, in bytes.
    pub thread_buffer_bytes: u64,
    /// Mapped pages of sources, in bytes.
    pub mapped_bytes: u64,
    /// The same while the same pages are visited again and again, in bytes.
    pub revisit_window_bytes: u64,
}

impl Budget {
    /// The budget of a process with this limit on `cores` cores. `cache_bytes` and `threads` are what the user chose, if
    /// anything.
    pub fn new(limit: Limit, cores: usize, cache_bytes: Option<u64>, threads: Option<usize>) -> Self {
        let part_max = limit.bytes / PART_MAX;
        let (least, most) = CACHE_BYTES;
        let by_default = (limit.bytes / CACHE_PART).clamp(least.min(part_max), most);
        let cache_bytes = cache_bytes.unwrap_or(by_default);
        let most_threads = usize::try_from(limit.bytes / LIMIT_BYTES_PER_THREAD).unwrap_or(usize::MAX).max(1);
        let threads = threads.unwrap_or_else(|| cores.clamp(THREADS.0, THREADS.1).min(most_threads)).max(1);
        let of_one = part_max / (2 * threads as u64);
        Self {
            threads,
            cache_bytes,
            spare_buffer_bytes: (cache_bytes / 4).max(SPARE_BYTES_MIN.min(part_max / 4)),
            decoded_bytes: (limit.bytes / DECODED_PART).min(DECODED_BYTES_MAX),
            thread_buffer_bytes: of_one.clamp(THREAD_BYTES.0, THREAD_BYTES.1),
            mapped_bytes: MAPPED_BYTES.min(part_max),
            revisit_window_bytes: part_max,
            limit,
        }
    }

    /// The most bytes of decoded chunks with which all parts still fit the limit, or the present part if that is more.
    pub fn decoded_bytes_max(&self) -> u64 {
        let others = self.total_bytes() - self.decoded_bytes;
        self.limit.bytes.saturating_sub(others).max(self.decoded_bytes)
    }

    /// Buffers of all threads, in bytes.
    pub fn thread_buffers_bytes(&self) -> u64 {
        self.thread_buffer_bytes.saturating_mul(2 * self.threads as u64)
    }

    /// All parts together, in bytes.
    pub fn total_bytes(&self) -> u64 {
        let mapped_bytes = self.mapped_bytes.max(self.revisit_window_bytes);
        let parts = [self.spare_buffer_bytes, self.decoded_bytes, self.thread_buffers_bytes(), mapped_bytes];
        parts.into_iter().fold(self.cache_bytes, u64::saturating_add)
    }

    /// The largest cache with which all parts fit the limit, in bytes, if the budget's does not fit.
    pub fn cache_bytes_that_fit(&self) -> Option<u64> {
        if self.total_bytes() <= self.limit.bytes {
            return None;
        }
        let mapped_bytes = self.mapped_bytes.max(self.revisit_window_bytes);
        let others = self.thread_buffers_bytes().saturating_add(mapped_bytes).saturating_add(self.decoded_bytes);
        // A quarter of the cache more is spare buffers.
        Some(self.limit.bytes.saturating_sub(others) / 5 * 4)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::memory::LimitOrigin, *};

    fn budget(limit_bytes: u64, cores: usize, cache_bytes: Option<u64>) -> Budget {
        Budget::new(Limit { bytes: limit_bytes, origin: LimitOrigin::Machine }, cores, cache_bytes, None)
    }

    #[test]
    fn decoded_chunks_may_take_what_the_other_parts_leave() {
        for limit_bytes in [64 * MIB, 512 * MIB, 24 * GIB, 2048 * GIB] {
            let mut budget = budget(limit_bytes, 8, None);
            let most_bytes = budget.decoded_bytes_max();
            assert!(most_bytes >= budget.decoded_bytes, "{limit_bytes}");
            budget.decoded_bytes = most_bytes;
            assert!(budget.total_bytes() <= limit_bytes && budget.decoded_bytes_max() == most_bytes, "{limit_bytes}");
        }
        // A cache beyond the limit leaves the part that chunks always have.
        let large = budget(GIB, 8, Some(4 * GIB));
        assert_eq!(large.decoded_bytes_max(), large.decoded_bytes);
    }

    #[test]
    fn no_part_exceeds_a_quarter_and_all_fit() {
        for limit in [32 * MIB, 64 * MIB, 100 * MIB, 256 * MIB, 512 * MIB, GIB, 4 * GIB, 24 * GIB, 64 * GIB, 2048 * GIB]
        {
            for cores in [1, 2, 8, 64] {
                let budget = budget(limit, cores, None);
                let parts = [
                    budget.cache_bytes,
                    budget.spare_buffer_bytes,
                    budget.decoded_bytes,
                    budget.thread_buffers_bytes(),
                    budget.mapped_bytes,
                    budget.revisit_window_bytes,
                ];
                assert!(parts.iter().all(|part| *part <= limit / 4), "{budget:?}");
                assert!(
                    budget.total_bytes() <= limit / 16 * 15 && budget.cache_bytes_that_fit().is_none(),
                    "{budget:?}"
                );
            }
        }
    }

    #[test]
    fn a_large_machine_has_what_it_always_had() {
        let large = budget(64 * GIB, 64, None);
        assert_eq!((large.cache_bytes, large.threads), (8 * GIB, 16));
        assert_eq!((large.mapped_bytes, large.revisit_window_bytes), (160 * MIB, 16 * GIB));
        assert_eq!(large.thread_buffer_bytes, 64 * MIB);
        assert_eq!(budget(2048 * GIB, 64, None).cache_bytes, 16 * GIB);
        assert_eq!(budget(GIB, 4, None).cache_bytes, 256 * MIB);
        let small = budget(64 * MIB, 64, None);
        assert_eq!((small.cache_bytes, small.threads, small.spare_buffer_bytes), (16 * MIB, 2, 4 * MIB));
        assert_eq!(budget(16 * MIB, 64, None).threads, 1);
    }

    #[test]
    fn a_chosen_cache_is_kept_and_one_that_fits_is_named() {
        let chosen = budget(256 * MIB, 2, Some(GIB));
        assert_eq!(chosen.cache_bytes, GIB);
        let fits = chosen.cache_bytes_that_fit().unwrap();
        assert!(fits < 256 * MIB && budget(256 * MIB, 2, Some(fits)).cache_bytes_that_fit().is_none(), "{fits}");
        assert_eq!(budget(256 * MIB, 2, Some(0)).cache_bytes_that_fit(), None);
        assert!(budget(MIB, 2, Some(u64::MAX)).cache_bytes_that_fit().is_some());
    }
}
