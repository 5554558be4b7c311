//! The text of several mounts as one, in the format of Prometheus (text/plain, version 0.0.4).
//!
//! A mount writes `OpenMetrics`. There a counter's family has the name without `_total`, and an info's without `_info`; here the family
//! has the name of its samples. All samples of a family stand together, each with the label of its mount.

use std::collections::BTreeMap;

use ckfs_volume::{MetricText, label};

/// The content type of the text.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The samples of a family.
#[derive(Debug, Default)]
struct Family {
    help: String,
    kind: String,
    samples: Vec<String>,
}

/// Families of several mounts, by name.
#[derive(Debug, Default)]
pub(super) struct Merged(BTreeMap<String, Family>);

impl Merged {
    /// Adds the text of a mount.
    pub(super) fn add(&mut self, mount: &str, text: &str) {
        let label = label("mount", mount);
        // Help comes before the type, which changes the family's name.
        let mut helps: BTreeMap<&str, String> = BTreeMap::new();
        let mut family = String::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap_or((rest, ""));
                helps.insert(name, unpadded(help));
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap_or((rest, "untyped"));
                let (suffix, kind) = match kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                family = format!("{name}{suffix}");
                let entry = self.0.entry(family.clone()).or_default();
                kind.clone_into(&mut entry.kind);
                entry.help = helps.get(name).cloned().unwrap_or_default();
            } else if !line.starts_with('#')
                && let Some(sample) = labelled(line, &label)
                && let Some(entry) = self.0.get_mut(&family)
            {
                entry.samples.push(sample);
            }
        }
    }

    /// The text; `states` has each mount and whether it answers.
    pub(super) fn finish(mut self, states: &[(String, bool)]) -> String {
        let mut samples = MetricText::default();
        for (mount, up) in states {
            samples.sample("ckfs_up", &[("mount", mount)], u8::from(*up));
        }
        let up = Family {
            help: "Whether the mount answers.".to_owned(),
            kind: "gauge".to_owned(),
            samples: samples.text().lines().map(str::to_owned).collect(),
        };
        self.0.insert("ckfs_up".to_owned(), up);
        let mut text = MetricText::default();
        for (name, family) in &self.0 {
            text.family(name, &family.kind, &family.help, None);
            family.samples.iter().for_each(|sample| text.line(sample));
        }
        text.text()
    }
}

/// A help text without the spaces with which a mount fills its file, before the last period.
fn unpadded(help: &str) -> String {
    help.strip_suffix('.').map_or_else(|| help.trim_end().to_owned(), |text| format!("{}.", text.trim_end()))
}

/// A sample with one label more, before those that it has.
fn labelled(line: &str, label: &str) -> Option<String> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    Some(match rest.strip_prefix('{') {
        Some(rest) if rest.starts_with('}') => format!("{name}{{{label}{rest}"),
        Some(rest) => format!("{name}{{{label},{rest}"),
        None => format!("{name}{{{label}}}{rest}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_family_stand_together() {
        let text = "# HELP ckfs_a Some a.\n# TYPE ckfs_a counter\nckfs_a_total 1\n# HELP ckfs_build Version   .\n\
                    # TYPE ckfs_build info\nckfs_build_info{version=\"1\"} 1\n# TYPE ckfs_g gauge\n# UNIT ckfs_g bytes\nckfs_g{} 2\n# EOF\n";
        let mut merged = Merged::default();
        merged.add("/m", text);
        merged.add("/\"n\\", text);
        let found = merged.finish(&[("/m".to_owned(), true), ("/x".to_owned(), false)]);
        assert_eq!(
            found,
            "# HELP ckfs_a_total Some a.\n# TYPE ckfs_a_total counter\nckfs_a_total{mount=\"/m\"} 1\n\
             ckfs_a_total{mount=\"/\\\"n\\\\\"} 1\n# HELP ckfs_build_info Version.\n# TYPE ckfs_build_info gauge\n\
             ckfs_build_info{mount=\"/m\",version=\"1\"} 1\nckfs_build_info{mount=\"/\\\"n\\\\\",version=\"1\"} 1\n\
             # HELP ckfs_g \n# TYPE ckfs_g gauge\nckfs_g{mount=\"/m\"} 2\nckfs_g{mount=\"/\\\"n\\\\\"} 2\n\
             # HELP ckfs_up Whether the mount answers.\n# TYPE ckfs_up gauge\nckfs_up{mount=\"/m\"} 1\n\
             ckfs_up{mount=\"/x\"} 0\n"
        );
    }

    #[test]
    fn lines_of_another_form_are_left_out() {
        let mut merged = Merged::default();
        merged.add("/m", "nonsense\nckfs_x 1\n# TYPE\n# TYPE a gauge\nb\n");
        assert!(!merged.finish(&[]).contains("nonsense"));
    }
}
