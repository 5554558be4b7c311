//! `.ckfs/metrics` in the text format of `OpenMetrics`, which Prometheus reads.
//!
//! The format ends with `# EOF` and allows no blank lines, so the file is padded within the help text of its first family.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ckfs_host::memory;
use ckfs_source::remote::{LATENCY_BOUNDS_MS, RemoteCounters};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text::encode},
    metrics::{MetricType, info::Info},
    registry::{Registry, Unit},
};

use super::{
    metrics::{LATENCY_BOUNDS_US, OpMetrics, RequestKind},
    stats::{self, MetricKind, PATHS, Reported},
};

/// Length of the file.
pub(super) const METRICS_BYTES: usize = 64 << 10;

/// Before each name.
const PREFIX: &str = "ckfs";

/// One number of a family, with a label or without.
type Sample = (Option<(&'static str, &'static str)>, u64);

/// Numbers of one name.
#[derive(Debug)]
struct MetricFamily {
    name: &'static str,
    is_bytes: bool,
    kind: MetricKind,
    help: &'static str,
    samples: Vec<Sample>,
}

/// A histogram of times.
#[derive(Debug)]
struct Latency {
    seconds: f64,
    count: u64,
    buckets: Vec<(f64, u64)>,
}

/// All numbers at one moment.
#[derive(Debug)]
struct Snapshot {
    families: Vec<MetricFamily>,
    /// For each kind of request of the kernel, by name.
    latencies: Vec<(&'static str, Latency)>,
    /// Of requests to remote services, if there are any.
    remote_latency: Option<Latency>,
}

impl Snapshot {
    fn new(from: &Reported<'_>) -> Self {
        let mut families = Vec::new();
        let degraded = u64::from(from.health().is_degraded());
        let mut add = |name, is_bytes, kind, help, samples: Vec<Sample>| {
            families.push(MetricFamily { name, is_bytes, kind, help, samples });
        };
        add(
            "degraded",
            false,
            MetricKind::Gauge,
            "1 while something is wrong with the mount, else 0",
            vec![(None, degraded)],
        );
        for row in from.rows() {
            if let Some(name) = row.family {
                add(name, row.is_bytes, row.kind, row.help, vec![(None, row.value)]);
            }
        }
        let stalled = vec![(None, from.metrics.health.stalled_sources())];
        add("stalled_sources", false, MetricKind::Gauge, "Source files that do not answer now", stalled);
        let counters = from.counters();
        let by_path = |bytes: &dyn Fn(ckfs_read::Path) -> u64| {
            PATHS.iter().map(|(path, name)| (Some(("path", *name)), bytes(*path))).collect::<Vec<Sample>>()
        };
        let served = by_path(&|path| counters.served_bytes(path));
        add("served", true, MetricKind::Counter, "Bytes returned to readers, by how they were produced", served);
        let fetched = by_path(&|path| counters.fetched_bytes(path));
        add("fetched", true, MetricKind::Counter, "Bytes read from source files, by purpose", fetched);
        let by_op = |count: &dyn Fn(&OpMetrics) -> u64| {
            RequestKind::ALL
                .iter()
                .map(|op| (Some(("op", op.name())), count(from.metrics.op(*op))))
                .collect::<Vec<Sample>>()
        };
        let answered = by_op(&|row| row.count.load(Ordering::Relaxed));
        add("ops", false, MetricKind::Counter, "Requests answered", answered);
        let errors = by_op(&|row| row.errors.load(Ordering::Relaxed));
        add("errors", false, MetricKind::Counter, "Requests answered with an error", errors);
        add_memory(from, &mut add);
        let latencies = RequestKind::ALL.iter().map(|op| (op.name(), latency(from.metrics.op(*op)))).collect();
        Self {
            families,
            latencies,
            remote_latency: from.source().remote().map(|remote| remote_latency(remote.counters())),
        }
    }
}

/// Adds limit, budget and use of memory.
fn add_memory(from: &Reported<'_>, add: &mut dyn FnMut(&'static str, bool, MetricKind, &'static str, Vec<Sample>)) {
    let mut gauge = |name, help, samples| add(name, true, MetricKind::Gauge, help, samples);
    let parts = |rows: &[(&'static str, &str, u64)]| -> Vec<Sample> {
        rows.iter().map(|(part, _, bytes)| (Some(("part", *part)), *bytes)).collect()
    };
    gauge("memory_held", "Memory held now, by what it is for", parts(&stats::held(from.engine)));
    if let Some(budget) = from.budget {
        let limit = vec![(None, budget.limit.bytes)];
        gauge("memory_limit", "Least of the machine's memory and the limits of the control groups", limit);
        gauge("memory_budget", "Memory that each part may hold", parts(&stats::parts(budget)));
    }
    if let Some(bytes) = from.shared_bytes {
        gauge("memory_shared", "Memory of all files in memory, mapped by a process or not", vec![(None, bytes)]);
    }
    let resident = memory::resident();
    let kinds =
        [("anonymous", resident.anonymous_bytes), ("file", resident.file_bytes), ("shared", resident.shared_bytes)];
    let resident = kinds.map(|(kind, bytes)| (Some(("kind", kind)), bytes)).to_vec();
    gauge("memory_resident", "Memory that the kernel counts as this process's", resident);
}

/// A histogram of times. A second has `bounds_per_second` units of `bounds`, and `sums_per_second` units of `sum`.
#[expect(clippy::cast_precision_loss, reason = "the bounds are small, and a sum of seconds needs no more than 53 bits")]
fn histogram(bounds: &[u64], buckets: &[AtomicU64], sum: u64, bounds_per_second: f64, sums_per_second: f64) -> Latency {
    let bounds = bounds.iter().map(|bound| *bound as f64 / bounds_per_second).chain([f64::INFINITY]);
    let buckets: Vec<_> = bounds.zip(buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed))).collect();
    // Not a count of its own: another thread may count a request between the two loads.
    let count = buckets.iter().map(|(_, count)| count).sum();
    Latency { seconds: sum as f64 / sums_per_second, count, buckets }
}

fn latency(row: &OpMetrics) -> Latency {
    histogram(&LATENCY_BOUNDS_US, &row.buckets, row.total_ns.load(Ordering::Relaxed), 1e6, 1e9)
}

fn remote_latency(counters: &RemoteCounters) -> Latency {
    let sum_ms = counters.latency_sum_ms.load(Ordering::Relaxed);
    histogram(&LATENCY_BOUNDS_MS, &counters.latency, sum_ms, 1e3, 1e3)
}

fn encode_number(encoder: &mut MetricEncoder<'_>, kind: MetricKind, value: u64) -> fmt::Result {
    match kind {
        MetricKind::Counter => encoder.encode_counter::<NoLabelSet, u64, u64>(&value, None),
        MetricKind::Gauge => encoder.encode_gauge(&value),
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in &self.families {
            let unit = family.is_bytes.then_some(Unit::Bytes);
            let kind = match family.kind {
                MetricKind::Counter => MetricType::Counter,
                MetricKind::Gauge => MetricType::Gauge,
            };
            let help = format!("{}.", family.help);
            let mut encoder = encoder.encode_descriptor(family.name, &help, unit.as_ref(), kind)?;
            for (label, value) in &family.samples {
                match label {
                    Some(label) => encode_number(&mut encoder.encode_family(&[*label])?, family.kind, *value)?,
                    None => encode_number(&mut encoder, family.kind, *value)?,
                }
            }
        }
        let (name, help) = ("latency", "Time from request to answer.");
        let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
        for (op, Latency { seconds, count, buckets }) in &self.latencies {
            let label = [("op", *op)];
            family.encode_family(&label)?.encode_histogram::<NoLabelSet>(*seconds, *count, buckets, None)?;
        }
        if let Some(Latency { seconds, count, buckets }) = &self.remote_latency {
            let (name, help) =
                ("remote_latency", "Time from a request to a remote service to the last byte of its reply.");
            let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
            family.encode_histogram::<NoLabelSet>(*seconds, *count, buckets, None)?;
        }
        Ok(())
    }
}

fn text(snapshot: &Arc<Snapshot>, padding: usize) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", format!("Version of ckfs{}", " ".repeat(padding)), version);
    registry.register_collector(Box::new(Arc::clone(snapshot)));
    let mut text = String::with_capacity(METRICS_BYTES);
    encode(&mut text, &registry)?;
    Ok(text)
}

/// The metrics, [`METRICS_BYTES`] long.
///
/// # Errors
/// None: a string takes any text.
pub(super) fn metrics(from: &Reported<'_>) -> Result<Vec<u8>, fmt::Error> {
    let snapshot = Arc::new(Snapshot::new(from));
    let bare = text(&snapshot, 0)?;
    text(&snapshot, METRICS_BYTES.saturating_sub(bare.len())).map(String::into_bytes)
}
