//! The steps of a run, as they were found.

use super::tracker::Trackers;
use crate::words::words;

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
