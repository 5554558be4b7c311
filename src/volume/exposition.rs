//! `.ckfs/metrics` in the text format of `OpenMetrics`, which Prometheus reads.
//!
//! [`MetricText`] is the one writer of metrics as text: of a mount in this format, and of several in that of Prometheus.
//!
//! The format ends with `# EOF` and allows no blank lines, so the file is padded within the help text of its first family.

use std::{
    fmt::{Display, Write as _},
    sync::atomic::{AtomicU64, Ordering},
};

use ckfs_host::memory;
use ckfs_source::remote::LATENCY_BOUNDS_MS;

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

/// The metrics, [`METRICS_BYTES`] long.
pub(super) fn metrics(from: &Reported<'_>) -> Vec<u8> {
    let mut text = metrics_text(from);
    let end_of_help = text.find(".\n").unwrap_or(0);
    text.insert_str(end_of_help, &" ".repeat(METRICS_BYTES.saturating_sub(text.len())));
    text.into_bytes()
}

/// The metrics, as long as they are.
pub(super) fn metrics_text(from: &Reported<'_>) -> String {
    let mut text = MetricText::default();
    let build = format!("{PREFIX}_build");
    text.family(&build, "info", "Version of ckfs.", None);
    text.sample(&format!("{build}_info"), &[("version", env!("CARGO_PKG_VERSION"))], 1);
    let mut add = |name: &str, is_bytes, kind, help: &str, samples: &[Sample]| {
        let (name, unit) = if is_bytes {
            (format!("{PREFIX}_{name}_bytes"), Some("bytes"))
        } else {
            (format!("{PREFIX}_{name}"), None)
        };
        let (kind, suffix) = match kind {
            MetricKind::Counter => ("counter", "_total"),
            MetricKind::Gauge => ("gauge", ""),
        };
        text.family(&name, kind, &format!("{help}."), unit);
        let name = name + suffix;
        for (label, value) in samples {
            text.sample(&name, label.as_slice(), value);
        }
    };
    let degraded = [(None, u64::from(from.health().is_degraded()))];
    add("degraded", false, MetricKind::Gauge, "1 while something is wrong with the mount, else 0", &degraded);
    for row in from.rows() {
        if let Some(name) = row.family {
            add(name, row.is_bytes, row.kind, row.help, &[(None, row.value)]);
        }
    }
    let stalled = [(None, from.metrics.health.stalled_sources())];
    add("stalled_sources", false, MetricKind::Gauge, "Source files that do not answer now", &stalled);
    let counters = from.counters();
    let by_path =
        |bytes: &dyn Fn(ckfs_read::Path) -> u64| PATHS.map(|(path, name)| (Some(("path", name)), bytes(path)));
    let served = by_path(&|path| counters.served_bytes(path));
    add("served", true, MetricKind::Counter, "Bytes returned to readers, by how they were produced", &served);
    let fetched = by_path(&|path| counters.fetched_bytes(path));
    add("fetched", true, MetricKind::Counter, "Bytes read from source files, by purpose", &fetched);
    let ops = || RequestKind::ALL.iter().map(|op| (("op", op.name()), from.metrics.op(*op)));
    let by_op = |count: &dyn Fn(&OpMetrics) -> u64| -> Vec<Sample> {
        ops().map(|(label, row)| (Some(label), count(row))).collect()
    };
    let answered = by_op(&|row| row.count.load(Ordering::Relaxed));
    add("ops", false, MetricKind::Counter, "Requests answered", &answered);
    let errors = by_op(&|row| row.errors.load(Ordering::Relaxed));
    add("errors", false, MetricKind::Counter, "Requests answered with an error", &errors);
    add_memory(from, &mut |name, help, samples| add(name, true, MetricKind::Gauge, help, samples));
    let name = format!("{PREFIX}_latency_seconds");
    text.family(&name, "histogram", "Time from request to answer.", Some("seconds"));
    for (label, row) in ops() {
        let sum = row.total_ns.load(Ordering::Relaxed);
        add_latency(&mut text, &name, Some(label), (&LATENCY_BOUNDS_US, 1e6), &row.buckets, (sum, 1e9));
    }
    if let Some(remote) = from.source().remote() {
        let (name, counters) = (format!("{PREFIX}_remote_latency_seconds"), remote.counters());
        let help = "Time from a request to a remote service to the last byte of its reply.";
        text.family(&name, "histogram", help, Some("seconds"));
        let sum = counters.latency_sum_ms.load(Ordering::Relaxed);
        add_latency(&mut text, &name, None, (&LATENCY_BOUNDS_MS, 1e3), &counters.latency, (sum, 1e3));
    }
    text.finish()
}

/// Adds limit, budget and use of memory.
fn add_memory(from: &Reported<'_>, gauge: &mut dyn FnMut(&str, &str, &[Sample])) {
    let parts = |rows: &[(&'static str, &str, u64)]| -> Vec<Sample> {
        rows.iter().map(|(part, _, bytes)| (Some(("part", *part)), *bytes)).collect()
    };
    gauge("memory_held", "Memory held now, by what it is for", &parts(&stats::held(from.engine)));
    if let Some(budget) = from.budget {
        let limit = [(None, budget.limit.bytes)];
        gauge("memory_limit", "Least of the machine's memory and the limits of the control groups", &limit);
        gauge("memory_budget", "Memory that each part may hold", &parts(&stats::parts(budget)));
    }
    if let Some(bytes) = from.shared_bytes {
        gauge("memory_shared", "Memory of all files in memory, mapped by a process or not", &[(None, bytes)]);
    }
    let resident = memory::resident();
    let kinds =
        [("anonymous", resident.anonymous_bytes), ("file", resident.file_bytes), ("shared", resident.shared_bytes)];
    let resident = kinds.map(|(kind, bytes)| (Some(("kind", kind)), bytes));
    gauge("memory_resident", "Memory that the kernel counts as this process's", &resident);
}

/// Adds the samples of a histogram of times: its bounds and its sum, each with how many of its units a second has.
#[expect(clippy::cast_precision_loss, reason = "the bounds are small, and a sum of seconds needs no more than 53 bits")]
fn add_latency(
    text: &mut MetricText,
    name: &str,
    label: Option<(&str, &str)>,
    (bounds, bounds_per_second): (&[u64], f64),
    buckets: &[AtomicU64],
    (sum, sums_per_second): (u64, f64),
) {
    let counts: Vec<u64> = buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
    text.sample(&format!("{name}_sum"), label.as_slice(), float(sum as f64 / sums_per_second));
    // Not a count of its own: another thread may count a request between the two loads.
    text.sample(&format!("{name}_count"), label.as_slice(), counts.iter().sum::<u64>());
    let bounds = bounds.iter().map(|bound| *bound as f64 / bounds_per_second).chain([f64::INFINITY]);
    let (bucket, mut up_to) = (format!("{name}_bucket"), 0);
    for (bound, count) in bounds.zip(counts) {
        up_to += count;
        let bound = float(bound);
        let labels: Vec<(&str, &str)> = std::iter::once(("le", bound.as_str())).chain(label).collect();
        text.sample(&bucket, &labels, up_to);
    }
}

/// Families of samples as text.
#[derive(Debug, Default)]
pub struct MetricText(String);

impl MetricText {
    /// Begins a family: what the samples that follow have in common. A unit is the last word of the name.
    pub fn family(&mut self, name: &str, kind: &str, help: &str, unit: Option<&str>) {
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        if let Some(unit) = unit {
            let _ = writeln!(self.0, "# UNIT {name} {unit}");
        }
    }

    /// Adds a sample of the last family.
    pub fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        if !labels.is_empty() {
            let labels: Vec<String> = labels.iter().map(|(name, value)| label(name, value)).collect();
            let _ = write!(self.0, "{{{}}}", labels.join(","));
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// Adds a line that is a sample already.
    pub fn line(&mut self, sample: &str) {
        self.0.push_str(sample);
        self.0.push('\n');
    }

    /// The text as it is.
    pub fn text(self) -> String {
        self.0
    }

    /// The text with the end that `OpenMetrics` wants.
    pub fn finish(mut self) -> String {
        self.0.push_str("# EOF\n");
        self.0
    }
}

/// A label with its value between quotation marks.
pub fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// A number that is no integer: with a point, and never with an exponent.
fn float(value: f64) -> String {
    if value == f64::INFINITY {
        return "+Inf".to_owned();
    }
    let text = value.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_and_labels_are_written_as_the_format_says() {
        let mut text = MetricText::default();
        text.family("a_bytes", "counter", "Bytes\\\nof a.", Some("bytes"));
        text.sample("a_bytes_total", &[("path", "x\"\\\n"), ("op", "read")], 3);
        text.family("b", "gauge", "B.", None);
        text.sample("b", &[], float(1.0));
        let expected = "# HELP a_bytes Bytes\\\\\\nof a.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\n\
                        a_bytes_total{path=\"x\\\"\\\\\\n\",op=\"read\"} 3\n# HELP b B.\n# TYPE b gauge\nb 1.0\n# EOF\n";
        assert_eq!(text.finish(), expected);
        let texts = [0.0, 0.00005, 0.25, 1.0, 30.0, f64::INFINITY].map(float);
        assert_eq!(texts, ["0.0", "0.00005", "0.25", "1.0", "30.0", "+Inf"]);
    }
}
