//! Which of the tasks of an export a process is.

use std::{fmt, str::FromStr};

use ckfs_config::{ModelPart, value::SettingValue};
use ckfs_service::identity;

use super::super::tree::PathNode;

/// Most tasks.
const TASKS_MAX: usize = 1 << 16;

/// Which of how many tasks this one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportTask {
    /// From 1.
    pub(super) number: usize,
    pub(super) of: usize,
}

/// What `--part` is in an export.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExportPart {
    /// One of its tasks.
    Task(ExportTask),
    /// A part of the model.
    Model(ModelPart),
}

impl FromStr for ExportPart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') || text.starts_with(|letter: char| letter.is_ascii_digit()) {
            return text.parse().map(Self::Task);
        }
        ModelPart::from_word(text).map(Self::Model)
    }
}

impl FromStr for ExportTask {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(number, of)| Some((number.parse().ok()?, of.parse().ok()?)));
        let (number, of): (usize, usize) = parsed.ok_or("expected K/N, for example 2/8")?;
        if !(1..=TASKS_MAX).contains(&of) || number > of {
            return Err(format!("expected K/N with K from 1 to N and N at most {TASKS_MAX}; 0/N is N/N"));
        }
        Ok(Self { number: if number == 0 { of } else { number }, of })
    }
}

impl fmt::Display for ExportTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl ExportTask {
    /// All tasks of the same export.
    pub(super) fn all(self) -> impl Iterator<Item = Self> {
        (1..=self.of).map(move |number| Self { number, ..self })
    }

    /// What all tasks of an export have in common: the plan and the sources, which files, and in how many shares.
    pub(super) fn what(self, digest: &str, nodes: &[PathNode]) -> String {
        let of = format!("{digest} parts {}", self.of);
        identity::of_views(nodes.iter().map(|node| (node.path.as_str(), of.as_str())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_counted_from_one_or_from_zero() {
        let part = |text: &str| text.parse::<ExportTask>().map(|part| part.to_string());
        assert_eq!(part("2/8"), Ok("2/8".to_owned()));
        assert_eq!((part("0/4"), part("4/4")), (Ok("4/4".to_owned()), Ok("4/4".to_owned())));
        for wrong in ["5/4", "1/0", "0/0", "1", "a/2", "-1/2", "1/2/3", "1/65537"] {
            assert!(part(wrong).unwrap_err().starts_with("expected K/N"), "{wrong}");
        }
    }
}
