//! `.ckfs/stats.json` and `.ckfs/metrics`.
//!
//! Both are taken anew at each open and padded to a fixed length (with white space, which JSON and Prometheus' text format
//! ignore), so that their size is exact although their content changes.

use std::{fmt::Write, sync::atomic::Ordering};

use serde_json::{Value, json};

use super::metrics::{LATENCY_BOUNDS_US, Metrics, Op};
use crate::read::{Counters, Engine, Path};

/// Length of `stats.json`.
pub(super) const STATS_BYTES: usize = 32 << 10;
/// Length of `metrics`.
pub(super) const METRICS_BYTES: usize = 64 << 10;

const PATHS: [(Path, &str); 4] = [(Path::Identical, "a"), (Path::Runs, "b"), (Path::Tiles, "c"), (Path::Made, "made")];

fn padded(mut text: String, len: usize) -> Vec<u8> {
    // One line of blanks: readers by line see it as one empty line.
    let fill = len.saturating_sub(text.len() + 1);
    text.extend(std::iter::repeat_n(' ', fill));
    text.push('\n');
    text.into_bytes()
}

/// The counters by name, with a line of explanation each.
fn named(counters: &Counters, metrics: &Metrics, engine: &Engine) -> Vec<(&'static str, &'static str, u64)> {
    let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    vec![
        ("lent_reads", "Reads answered from mapped source bytes without a copy.", get(&counters.lent)),
        ("tile_hits", "Tiles found in the cache.", get(&counters.tile_hits)),
        ("tile_misses", "Tiles computed on demand.", get(&counters.tile_misses)),
        ("tile_waits", "Reads that waited for a tile another was computing.", get(&counters.tile_waits)),
        ("tile_evictions", "Tiles dropped to stay within the limit.", get(&counters.tile_evictions)),
        ("tile_bypasses", "Reads computed alone, as tiles in use left no room.", get(&counters.tile_bypasses)),
        ("tile_bytes", "Bytes of tiles held now.", engine.cached_bytes() as u64),
        ("prefetched_tiles", "Tiles computed ahead of a sequential reader.", get(&counters.prefetched)),
        ("prefetch_hits", "Of these, tiles then asked for.", get(&counters.prefetch_hits)),
        ("copied_files", "Tensor files copied for the kernel to read by itself.", get(&counters.copied_files)),
        ("copied_bytes", "Bytes of copied tensor files.", get(&counters.copied_bytes)),
        ("whole_files", "Tensor files made whole in memory when they were opened.", get(&counters.whole_files)),
        ("whole_bytes", "Bytes of these.", get(&counters.whole_bytes)),
        (
            "blank_files",
            "Of these files, those made in memory that was ready, if only in part.",
            get(&counters.blank_files),
        ),
        ("whole_bytes_held", "Bytes of memory that they take now.", engine.whole_bytes() as u64),
        ("blank_bytes_held", "Bytes of memory made ready for more of them.", engine.blank_bytes() as u64),
        ("failed_reads", "Reads that failed.", get(&counters.failed_reads)),
        ("poisoned_sources", "Source files found changed since mount.", engine.checkpoint().source().poisoned()),
        ("panics", "Requests whose handler panicked.", get(&metrics.panics)),
        ("passthrough_opens", "Opens that the kernel serves by itself.", get(&metrics.passthrough_opens)),
        ("in_flight", "Requests being handled now.", get(&metrics.in_flight)),
    ]
}

/// The statistics as JSON, padded.
pub(super) fn stats(metrics: &Metrics, engine: &Engine) -> Vec<u8> {
    let counters = engine.counters();
    let ops: serde_json::Map<String, Value> = Op::ALL
        .iter()
        .map(|op| {
            let row = metrics.op(*op);
            let buckets: Vec<u64> = row.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
            let value = json!({
                "count": row.count.load(Ordering::Relaxed),
                "errors": row.errors.load(Ordering::Relaxed),
                "total_ns": row.total_ns.load(Ordering::Relaxed),
                "latency": buckets,
            });
            (op.name().to_owned(), value)
        })
        .collect();
    let by_path = |bytes: &dyn Fn(Path) -> u64| -> Value {
        PATHS
            .iter()
            .map(|(path, name)| ((*name).to_owned(), Value::from(bytes(*path))))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let mut all = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "bytes_served": by_path(&|path| counters.served_bytes(path)),
        "bytes_fetched": by_path(&|path| counters.fetched_bytes(path)),
        "latency_bounds_us": LATENCY_BOUNDS_US,
        "ops": ops,
    });
    for (name, _, value) in named(counters, metrics, engine) {
        all[name] = value.into();
    }
    padded(serde_json::to_string_pretty(&all).expect("numbers and words are JSON"), STATS_BYTES)
}

/// The statistics in Prometheus' text format, padded.
pub(super) fn metrics(metrics: &Metrics, engine: &Engine) -> Vec<u8> {
    let counters = engine.counters();
    let mut text = String::new();
    for (name, help, value) in named(counters, metrics, engine) {
        let gauge = matches!(name, "tile_bytes" | "in_flight" | "poisoned_sources");
        let (kind, suffix) = if gauge { ("gauge", "") } else { ("counter", "_total") };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# HELP ckfs_{name}{suffix} {help}\n# TYPE ckfs_{name}{suffix} {kind}\nckfs_{name}{suffix} {value}"
        );
    }
    let rows: [(&str, &dyn Fn(Path) -> u64); 2] =
        [("served", &|path| counters.served_bytes(path)), ("fetched", &|path| counters.fetched_bytes(path))];
    for (what, bytes) in rows {
        let _ = writeln!(text, "# TYPE ckfs_bytes_{what}_total counter");
        for (path, name) in PATHS {
            let _ = writeln!(text, "ckfs_bytes_{what}_total{{path=\"{name}\"}} {}", bytes(path));
        }
    }
    let rows: [(&str, &dyn Fn(Op) -> u64); 2] = [
        ("ops", &|op| metrics.op(op).count.load(Ordering::Relaxed)),
        ("errors", &|op| metrics.op(op).errors.load(Ordering::Relaxed)),
    ];
    for (what, count) in rows {
        let _ = writeln!(text, "# TYPE ckfs_{what}_total counter");
        for op in Op::ALL {
            let _ = writeln!(text, "ckfs_{what}_total{{op=\"{}\"}} {}", op.name(), count(*op));
        }
    }
    let _ = writeln!(text, "# TYPE ckfs_latency_seconds histogram");
    for op in Op::ALL {
        let (row, name) = (metrics.op(*op), op.name());
        let mut seen = 0;
        for (bound, bucket) in LATENCY_BOUNDS_US.iter().map(Some).chain([None]).zip(&row.buckets) {
            seen += bucket.load(Ordering::Relaxed);
            let bound =
                bound.map_or_else(|| "+Inf".to_owned(), |us| format!("{}.{:06}", us / 1_000_000, us % 1_000_000));
            let _ = writeln!(text, "ckfs_latency_seconds_bucket{{op=\"{name}\",le=\"{bound}\"}} {seen}");
        }
        let ns = row.total_ns.load(Ordering::Relaxed);
        let _ = writeln!(
            text,
            "ckfs_latency_seconds_sum{{op=\"{name}\"}} {}.{:09}",
            ns / 1_000_000_000,
            ns % 1_000_000_000
        );
        let _ = writeln!(text, "ckfs_latency_seconds_count{{op=\"{name}\"}} {seen}");
    }
    padded(text, METRICS_BYTES)
}
