//! `.ckfs/stats.json` and `.ckfs/metrics`.
//!
//! Both are generated for each reader and padded to a length that is fixed at mount. Their size is thus exact although their
//! content changes: JSON has white space at its end, the metrics have spaces within a help line (see
//! [`super::exposition`]).

use std::sync::atomic::{AtomicU64, Ordering};

use ckfs_host::{budget::Budget, memory};
use ckfs_read::{Counters, Engine, HeldBytes, Path};
use ckfs_source::{DecodedChunks, Source, remote::LATENCY_BOUNDS_MS};
use serde_json::{Map, Value, json};

use super::{
    health::HealthReport,
    metrics::{LATENCY_BOUNDS_US, Metrics, RequestKind},
};

/// Length of `stats.json`, names of changed sources aside.
const STATS_BYTES: usize = 64 << 10;

/// The ways in which bytes are served, by name.
pub(super) const PATHS: [(Path, &str); 4] = [
    (Path::Identical, "identical"),
    (Path::Contiguous, "runs"),
    (Path::Tiles, "tiles"),
    (Path::Generated, "generated"),
];

/// The inputs of both files.
pub(super) struct Reported<'a> {
    pub(super) metrics: &'a Metrics,
    pub(super) engine: &'a Engine,
    pub(super) budget: Option<&'a Budget>,
    /// Memory of all files in memory; `None` if memory holds none.
    pub(super) shared_bytes: Option<u64>,
    /// The command that mounts anew.
    pub(super) remount: &'a str,
}

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetricKind {
    /// It only grows.
    Counter,
    /// Its current value goes up and down.
    Gauge,
}

/// A number with its names.
#[derive(Debug)]
pub(super) struct MetricRow {
    /// Name in `stats.json`.
    pub(super) key: &'static str,
    /// Name in the metrics, without prefix, unit and suffix; `None` if the metrics have it with a label.
    pub(super) family: Option<&'static str>,
    pub(super) is_bytes: bool,
    pub(super) kind: MetricKind,
    pub(super) help: &'static str,
    pub(super) value: u64,
}

/// Memory in use now, by purpose: the label in the metrics, the key in `stats.json`, bytes. Mapped pages are those
/// of all files, including the program's own.
pub fn held_rows(held: HeldBytes, decoded_chunks: u64) -> [(&'static str, &'static str, u64); 7] {
    [
        ("tiles", "tiles_bytes", held.tiles as u64),
        ("materialized", "materialized_bytes", held.materialized as u64),
        ("dropped", "dropped_bytes", held.dropped as u64),
        ("spare_buffers", "spare_buffers_bytes", held.spare_buffers as u64),
        ("decoded_chunks", "decoded_chunks_bytes", decoded_chunks),
        ("thread_buffers", "thread_buffers_bytes", held.thread_buffers as u64),
        ("mapped", "mapped_bytes", memory::resident().file_bytes),
    ]
}

/// The parts of a budget, with names as in [`held`].
pub(super) fn parts(budget: &Budget) -> [(&'static str, &'static str, u64); 5] {
    [
        ("cache", "cache_bytes", budget.cache_bytes),
        ("spare_buffers", "spare_buffers_bytes", budget.spare_buffer_bytes),
        ("decoded_chunks", "decoded_chunks_bytes", budget.decoded_bytes),
        ("thread_buffers", "thread_buffers_bytes", budget.thread_buffers_bytes()),
        ("mapped", "mapped_bytes", budget.mapped_bytes.max(budget.revisit_window_bytes)),
    ]
}

/// What an engine holds now: see [`held_rows`].
pub(super) fn held(engine: &Engine) -> [(&'static str, &'static str, u64); 7] {
    held_rows(engine.held(), engine.checkpoint().source().chunks().map_or(0, DecodedChunks::held_bytes))
}

/// The memory that is held, that the kernel counts, and that may be held.
pub fn memory_json(held: &[(&str, &str, u64)], shared_bytes: Option<u64>, budget: Option<&Budget>) -> Value {
    let members = |rows: &[(&str, &str, u64)]| -> Map<String, Value> {
        rows.iter().map(|(_, key, bytes)| ((*key).to_owned(), Value::from(*bytes))).collect()
    };
    let resident = memory::resident();
    let mut all = json!({
        "held": members(held),
        "shared_bytes": shared_bytes,
        "process": {
            "rss_anon_bytes": resident.anonymous_bytes,
            "rss_file_bytes": resident.file_bytes,
            "rss_shmem_bytes": resident.shared_bytes,
        },
    });
    if let Some(budget) = budget {
        all["limit_bytes"] = budget.limit.bytes.into();
        all["limit_origin"] = budget.limit.origin.to_string().into();
        let mut parts = members(&parts(budget));
        parts.insert("total_bytes".to_owned(), budget.total_bytes().into());
        all["budget"] = parts.into();
    }
    all
}

/// Threads of pools and helpers now, by use. All others are there as long as the daemon.
fn threads_by_use() -> Map<String, Value> {
    let uses = ckfs_sync::running().into_iter();
    uses.map(|(name, count)| (name.trim_start_matches("ckfs-").to_owned(), Value::from(count))).collect()
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Counts and times of requests, by their kind.
pub fn ops(metrics: &Metrics) -> Map<String, Value> {
    let row = |op: &RequestKind| {
        let row = metrics.op(*op);
        let value = json!({
            "count": get(&row.count),
            "errors": get(&row.errors),
            "total_ns": get(&row.total_ns),
            "latency": row.buckets.iter().map(get).collect::<Vec<u64>>(),
        });
        (op.name().to_owned(), value)
    };
    RequestKind::ALL.iter().map(row).collect()
}

impl Reported<'_> {
    pub(super) fn counters(&self) -> &Counters {
        self.engine.counters()
    }

    pub(super) fn source(&self) -> &dyn Source {
        self.engine.checkpoint().source().as_ref()
    }

    /// The mount's problems.
    pub(super) fn health(&self) -> HealthReport {
        let source = self.source();
        self.metrics
            .health
            .report(source.files().filter_map(|file| Some((source.path(file), source.health().poison(file)?))))
    }

    /// The numbers by name, with one line of explanation each.
    pub(super) fn rows(&self) -> Vec<MetricRow> {
        let (counters, engine, metrics) = (self.counters(), self.engine, self.metrics);
        let row = |key, family, is_bytes, kind, help, value| MetricRow { key, family, is_bytes, kind, help, value };
        let count =
            |key, help, counter: &AtomicU64| row(key, Some(key), false, MetricKind::Counter, help, get(counter));
        let bytes = |key, family, help, counter: &AtomicU64| {
            row(key, Some(family), true, MetricKind::Counter, help, get(counter))
        };
        let held = |key, help, value: usize| row(key, None, true, MetricKind::Gauge, help, value as u64);
        let now = |key, family, help, value| row(key, Some(family), false, MetricKind::Gauge, help, value);
        let mut rows = vec![
            count("zero_copy_reads", "Reads answered from mapped source bytes without a copy", &counters.zero_copy),
            count("tile_hits", "Tiles found in the cache", &counters.tile_hits),
            count("tile_misses", "Tiles computed on demand", &counters.tile_misses),
            count("tile_waits", "Reads that waited for a tile another read was computing", &counters.tile_waits),
            count("tile_evictions", "Tiles dropped to stay within the limit", &counters.tile_evictions),
            count(
                "tile_bypasses",
                "Reads computed without the cache because tiles in use left no room",
                &counters.tile_bypasses,
            ),
            held("tile_bytes", "Bytes of tiles held now", engine.held().tiles),
            row(
                "decoded_chunks",
                Some("decoded_chunks"),
                false,
                MetricKind::Counter,
                "Chunks of the source decoded so far, each counted again when it was dropped in between",
                self.source().chunks().map_or(0, DecodedChunks::decoded_count),
            ),
            count("prefetched_tiles", "Tiles computed ahead of a sequential reader", &counters.prefetched),
            count("prefetch_hits", "Tiles computed ahead that a reader then asked for", &counters.prefetch_hits),
            count("materialized_files", "Files materialized, in memory or on a disk", &counters.materialized_files),
            bytes("materialized_bytes", "materialized", "Bytes of materialized files", &counters.materialized_bytes),
            held(
                "materialized_bytes_held",
                "Bytes of materialized files in memory held now",
                engine.held().materialized,
            ),
            count("failed_reads", "Reads that failed", &counters.failed_reads),
            count("failed_opens", "Opens that failed because of a source", &counters.failed_opens),
            count(
                "stalled_reads",
                "Reads and opens that failed because their source gave no answer in time",
                &counters.stalled_reads,
            ),
            now(
                "poisoned_sources",
                "poisoned_sources",
                "Source files found changed since mount; reads of them fail",
                self.source().health().poisoned(),
            ),
            count("panics", "Requests whose handler panicked", &metrics.panics),
            count("passthrough_opens", "Opens that the kernel serves by itself", &metrics.passthrough_opens),
            now("in_flight", "in_flight_requests", "Requests being handled now", get(&metrics.in_flight)),
            now("threads", "threads", "Threads of the daemon now", memory::threads()),
        ];
        let remote = self.source().remote().map(|remote| remote.counters().rows()).into_iter().flatten();
        rows.extend(remote.map(|count| MetricRow {
            key: count.key,
            family: Some(count.key.trim_end_matches("_bytes")),
            is_bytes: count.is_bytes(),
            kind: MetricKind::Counter,
            help: count.help,
            value: count.value,
        }));
        rows
    }

    /// Bytes by the paths that they took.
    pub(super) fn by_path(&self) -> Map<String, Value> {
        let counters = self.counters();
        let members = |bytes: &dyn Fn(Path) -> u64| -> Map<String, Value> {
            PATHS.iter().map(|(path, name)| ((*name).to_owned(), Value::from(bytes(*path)))).collect()
        };
        Map::from_iter([
            ("bytes_served".to_owned(), members(&|path| counters.served_bytes(path)).into()),
            ("bytes_fetched".to_owned(), members(&|path| counters.fetched_bytes(path)).into()),
        ])
    }

    /// The statistics as JSON, padded to `len` bytes.
    pub(super) fn stats(&self, len: usize) -> Vec<u8> {
        let mut health = self.health();
        loop {
            let text = self.stats_text(&health);
            // The report counts the omitted problems.
            if text.len() < len || !health.leave_one_out() {
                return padded(text, len);
            }
        }
    }

    fn stats_text(&self, health: &HealthReport) -> String {
        serde_json::to_string_pretty(&self.members(health)).unwrap_or_default()
    }

    /// The statistics by name.
    pub(super) fn members(&self, health: &HealthReport) -> Map<String, Value> {
        let mut all = Map::new();
        all.insert("version".to_owned(), env!("CARGO_PKG_VERSION").into());
        all.insert("pid".to_owned(), std::process::id().into());
        if let Value::Object(members) = health.to_json(self.remount) {
            all.extend(members);
        }
        all.extend(self.by_path());
        let members = json!({
            "memory": memory_json(&held(self.engine), self.shared_bytes, self.budget),
            "threads_by_use": threads_by_use(),
            "latency_bounds_us": LATENCY_BOUNDS_US,
            "ops": ops(self.metrics),
        });
        if let Value::Object(members) = members {
            all.extend(members);
        }
        if let Some(remote) = self.source().remote() {
            all.insert("remote_latency_bounds_ms".to_owned(), json!(LATENCY_BOUNDS_MS));
            all.insert(
                "remote_latency".to_owned(),
                json!(remote.counters().latency.iter().map(get).collect::<Vec<u64>>()),
            );
        }
        all.extend(self.rows().into_iter().map(|row| (row.key.to_owned(), Value::from(row.value))));
        all
    }
}

/// Length of `stats.json` of a volume: with room for the names of all its sources.
pub(super) fn stats_bytes(source: &dyn Source) -> usize {
    let name = |file| Value::from(source.path(file).display().to_string()).to_string();
    // Each is a line with spaces before it and a comma after it.
    STATS_BYTES + source.files().map(|file| name(file).len() + 8).sum::<usize>()
}

fn padded(mut text: String, len: usize) -> Vec<u8> {
    // One line of spaces: programs that read by line see it as one empty line.
    let fill = len.saturating_sub(text.len() + 1);
    text.extend(std::iter::repeat_n(' ', fill));
    text.push('\n');
    text.into_bytes()
}
