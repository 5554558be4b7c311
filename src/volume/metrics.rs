//! Counters of the mount's activity, as shown in `.ckfs/stats.json` and `.ckfs/metrics`.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::health::{ProblemKind, VolumeHealth};

macro_rules! ops {
    ($($variant:ident $name:literal,)*) => {
        /// A kind of request.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum RequestKind {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl RequestKind {
            /// Every kind of request.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Name in the statistics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

ops! {
    Lookup "lookup",
    GetAttr "getattr",
    ReadLink "readlink",
    Open "open",
    Read "read",
    Release "release",
    OpenDir "opendir",
    ReadDir "readdir",
    ReadDirPlus "readdirplus",
    GetXattr "getxattr",
    ListXattr "listxattr",
    StatFs "statfs",
    Refused "refused",
}

/// Upper bounds of the latency histogram's buckets, in microseconds; the last bucket has none.
pub const LATENCY_BOUNDS_US: [u64; 14] =
    [10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000, 250_000, 1_000_000, 10_000_000];

/// Counts of one kind of request.
#[derive(Debug, Default)]
pub struct OpMetrics {
    /// Requests answered.
    pub count: AtomicU64,
    /// Of these, answered with an error.
    pub errors: AtomicU64,
    /// Time from request to answer, summed, in nanoseconds.
    pub total_ns: AtomicU64,
    /// Requests by time to answer; bucket `i` holds those of at most `LATENCY_BOUNDS_US``[i]`.
    pub buckets: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
}

/// Counters of the mount's requests, and its problems.
#[derive(Debug, Default)]
pub struct Metrics {
    ops: [OpMetrics; RequestKind::ALL.len()],
    /// Handlers that panicked; each such request is answered with EIO.
    pub panics: AtomicU64,
    /// Opens whose file the kernel reads directly from the backing file.
    pub passthrough_opens: AtomicU64,
    /// Requests being handled now.
    pub in_flight: AtomicU64,
    /// The mount's problems.
    pub health: VolumeHealth,
}

impl Metrics {
    /// Counts of one kind of request.
    pub fn op(&self, op: RequestKind) -> &OpMetrics {
        &self.ops[op as usize]
    }

    /// Counts a panic of a request's handler with the message `cause`.
    pub fn note_panic(&self, request: &str, cause: &str) {
        self.panics.fetch_add(1, Ordering::Relaxed);
        self.health.note(ProblemKind::Panic, request, cause);
    }

    /// Counts one answered request.
    pub fn record(&self, op: RequestKind, elapsed: Duration, failed: bool) {
        let row = self.op(op);
        row.count.fetch_add(1, Ordering::Relaxed);
        row.errors.fetch_add(u64::from(failed), Ordering::Relaxed);
        let ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        row.total_ns.fetch_add(ns, Ordering::Relaxed);
        let bucket = LATENCY_BOUNDS_US.iter().position(|bound| ns <= bound * 1_000).unwrap_or(LATENCY_BOUNDS_US.len());
        row.buckets[bucket].fetch_add(1, Ordering::Relaxed);
    }
}
