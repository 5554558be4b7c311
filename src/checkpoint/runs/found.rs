//! The steps of a run, as they were found, and the files of a run that name its last finished step.

use ckfs_source::SourceError;

use super::step_tree::StepTree;
use crate::{tree::below, words::words};

words! {
    /// What a step's directory holds.
    pub enum StepKind {
        /// A checkpoint of Orbax.
        Orbax = "Orbax",
        /// A directory of `torch.distributed.checkpoint`.
        TorchDcp = "torch.distributed.checkpoint",
        /// A checkpoint of transformers' Trainer.
        Transformers = "transformers",
        /// A checkpoint of Megatron: distributed, or one file a rank.
        Megatron = "Megatron",
        /// One file of shards a rank, as verl and `SkyRL` write them.
        RankFiles = "files of ranks",
        /// One file a rank, as `DeepSpeed` writes them.
        DeepSpeed = "DeepSpeed",
        /// Weights as in a repository of Hugging Face.
        Repository = "repository",
        /// A version of weights that a trainer publishes, whole or as differences.
        Version = "weights",
        /// Nothing that is known, so far.
        Unknown = "unknown",
    }
}

/// Whether the writer of a step has finished it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepState {
    /// Its writer's marks say so.
    Complete,
    /// Nothing says so, and nothing says the contrary: it is finished when its files do not change any more.
    Unmarked,
    /// Something is missing: what, in words.
    Unfinished(String),
}

/// A step's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundStep {
    /// Its number.
    pub number: u64,
    /// Its directory, relative to the run.
    pub name: String,
    /// The directory of its checkpoint, relative to the run: `name` or a directory in it.
    pub path: String,
    /// What it holds.
    pub kind: StepKind,
    /// Whether it is finished.
    pub state: StepState,
}

/// All steps of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundSteps {
    /// The directory that holds them, relative to the run; "" for the run's own.
    pub directory: String,
    /// The steps, by number. No two have the same.
    pub steps: Vec<FoundStep>,
    /// Whether the directory is itself a checkpoint.
    pub is_checkpoint: bool,
    /// What files of the run say of all steps.
    pub(super) trackers: Trackers,
    /// Whether its writer is prime-rl.
    pub(super) is_stable: bool,
}

impl FoundSteps {
    /// Whether at least one of them holds a checkpoint, or a part of one.
    pub fn is_run(&self) -> bool {
        self.steps.iter().any(|step| step.kind != StepKind::Unknown)
    }
}

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
