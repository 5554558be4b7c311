//! `.ckfs/metrics` in the text format of `OpenMetrics`, which Prometheus reads.
//!
//! The format ends with `# EOF` and allows no blank lines, so the file is padded within the help text of its first family.

use std::sync::atomic::{AtomicU64, Ordering};

use ckfs_host::memory;
use ckfs_source::remote::{LATENCY_BOUNDS_MS, RemoteCounters};

use super::{
    metric_text::{MetricText, float},
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

impl MetricFamily {
    fn write(&self, text: &mut MetricText) {
        let (name, unit) = if self.is_bytes {
            (format!("{PREFIX}_{}_bytes", self.name), Some("bytes"))
        } else {
            (format!("{PREFIX}_{}", self.name), None)
        };
        let (kind, suffix) = match self.kind {
            MetricKind::Counter => ("counter", "_total"),
            MetricKind::Gauge => ("gauge", ""),
        };
        text.family(&name, kind, &format!("{}.", self.help), unit);
        let name = name + suffix;
        self.samples.iter().for_each(|(label, value)| text.sample(&name, label.as_slice(), value));
    }
}

impl Latency {
    fn write(&self, text: &mut MetricText, name: &str, label: Option<(&str, &str)>) {
        text.sample(&format!("{name}_sum"), label.as_slice(), float(self.seconds));
        text.sample(&format!("{name}_count"), label.as_slice(), self.count);
        let (bucket, mut up_to) = (format!("{name}_bucket"), 0);
        for (bound, count) in &self.buckets {
            up_to += count;
            let bound = float(*bound);
            let labels: Vec<(&str, &str)> = std::iter::once(("le", bound.as_str())).chain(label).collect();
            text.sample(&bucket, &labels, up_to);
        }
    }
}

impl Snapshot {
    fn text(&self, padding: usize) -> String {
        let mut text = MetricText::default();
        let build = format!("{PREFIX}_build");
        text.family(&build, "info", &format!("Version of ckfs{}.", " ".repeat(padding)), None);
        text.sample(&format!("{build}_info"), &[("version", env!("CARGO_PKG_VERSION"))], 1);
        self.families.iter().for_each(|family| family.write(&mut text));
        let name = format!("{PREFIX}_latency_seconds");
        text.family(&name, "histogram", "Time from request to answer.", Some("seconds"));
        self.latencies.iter().for_each(|(op, latency)| latency.write(&mut text, &name, Some(("op", *op))));
        if let Some(latency) = &self.remote_latency {
            let name = format!("{PREFIX}_remote_latency_seconds");
            let help = "Time from a request to a remote service to the last byte of its reply.";
            text.family(&name, "histogram", help, Some("seconds"));
            latency.write(&mut text, &name, None);
        }
        text.finish()
    }
}

/// The metrics, as long as they are.
pub(super) fn metrics_text(from: &Reported<'_>) -> String {
    Snapshot::new(from).text(0)
}

/// The metrics, [`METRICS_BYTES`] long.
pub(super) fn metrics(from: &Reported<'_>) -> Vec<u8> {
    let snapshot = Snapshot::new(from);
    let bare = snapshot.text(0);
    snapshot.text(METRICS_BYTES.saturating_sub(bare.len())).into_bytes()
}
