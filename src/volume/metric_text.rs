//! The one writer of metrics as text: of a mount in the format of `OpenMetrics`, and of several in that of Prometheus.

use std::fmt::{Display, Write as _};

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
pub(super) fn float(value: f64) -> String {
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
