//! Files of a run that name its last finished step.

use ckfs_source::SourceError;

use super::step_tree::StepTree;
use crate::tree::below;

/// Of Megatron, verl and slime.
pub(super) const MEGATRON: &str = "latest_checkpointed_iteration.txt";
/// Of `SkyRL`.
pub(super) const SKYRL: &str = "latest_ckpt_global_step.txt";
/// Of `DeepSpeed`: the name of a step.
pub(super) const DEEPSPEED: &str = "latest";

/// What the tracker files of a run say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Trackers {
    rows: Vec<(&'static str, Option<u64>)>,
}

impl Trackers {
    /// Reads those that are in a directory.
    pub(super) fn read(tree: &dyn StepTree, directory: &str) -> Result<Self, SourceError> {
        let mut rows = Vec::new();
        for name in [MEGATRON, SKYRL, DEEPSPEED] {
            if let Some(bytes) = tree.small(&below(directory, name))? {
                rows.push((name, last_number(&bytes)));
            }
        }
        Ok(Self { rows })
    }

    /// Whether what was finished by an earlier state of these files still is.
    pub(super) fn go_on_from(&self, earlier: &Self) -> bool {
        let mut pairs = self.rows.iter().zip(&earlier.rows);
        self.rows.len() == earlier.rows.len() && pairs.all(|(now, then)| now.0 == then.0 && now.1 >= then.1)
    }

    /// Whether one of these files is there.
    pub(super) fn has(&self, names: &[&str]) -> bool {
        self.rows.iter().any(|(name, _)| names.contains(name))
    }

    /// Why a step is not finished by the first of these files that is there. Without any of them, that the first is missing.
    pub(super) fn unfinished(&self, names: &[&'static str], number: u64) -> Option<String> {
        let Some((name, last)) = self.rows.iter().find(|(name, _)| names.contains(name)) else {
            return Some(format!("{} is missing in the run, which its writer keeps", names[0]));
        };
        match last {
            Some(last) if *last >= number => None,
            Some(last) => Some(format!("{name} names {last} as the last finished step")),
            None => Some(format!("{name} names no step")),
        }
    }
}

/// The number at the end of a text: `100`, or `global_step100`.
fn last_number(bytes: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(bytes).ok()?.trim();
    let digits = text.bytes().rev().take_while(u8::is_ascii_digit).count();
    text[text.len() - digits..].parse().ok()
}
