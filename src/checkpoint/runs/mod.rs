//! A run: a directory in which a trainer leaves a checkpoint for each of its steps.
//!
//! A step is a directory whose name ends with its number, or has it after `step=`. What kind of checkpoint it holds, and whether its writer has finished
//! it, follows from the names in it and from small files that writers leave for this purpose. No weight file is read here.
//!
//! | kind | written as | finished when |
//! | --- | --- | --- |
//! | Orbax | `7`, `prefix_7` | no name has `.orbax-checkpoint-tmp`; `_CHECKPOINT_METADATA` has a time of commit, and all items that it names are there; on an object store `commit_success.txt` is there |
//! | torch.distributed.checkpoint | `step-7`, `step_7/trainer`, `checkpoint-7/pytorch_model_fsdp_0`, `step7/model_and_optim`, `…-step=7-…/weights` | `.metadata` is there, which rank 0 renames to this name at the end |
//! | transformers | `checkpoint-7` | `trainer_state.json` is beside the weights |
//! | Megatron-Core | `iter_0000007` | `latest_checkpointed_iteration.txt` in the run names this iteration or a later one |
//! | files of ranks | `global_step_7/actor`, `global_step_7/policy` | all ranks are there, and the run's tracker names this step or a later one |
//! | `DeepSpeed` | `global_step7`, `checkpoint-7/global_step7` | all ranks are there, and `latest` in the run names this step or a later one |
//! | version of weights | `weight_v000007`, whole or as differences from the version before | its index is there, which is written last |
//! | repository | `step_7`, any prefix, `000007/pretrained_model`, `epoch_0_step_7/model` | `STABLE` is there, which prime-rl writes last; without it, when nothing changes any more |
//!
//! [`StepDirectory`] lists a run. Whether bytes still change in a step that is finished by its marks tells
//! [`StepDirectory::measure`].

mod found;
mod judge;
mod local;
mod names;
mod ranks;
mod remote;
mod step_tree;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use ckfs_source::remote::open_url;
pub use found::{FoundStep, FoundSteps, StepKind, StepState};
pub(crate) use names::numbered;
pub use step_tree::Measure;

use self::{local::LocalSteps, remote::RemoteSteps, step_tree::StepTree};
use crate::{CheckpointError, OpenOptions};

/// The directory of a run, local or remote.
#[derive(Clone)]
pub struct StepDirectory {
    source: String,
    options: OpenOptions,
    is_remote: bool,
}

impl StepDirectory {
    /// The run at a path or an address of a service.
    ///
    /// # Errors
    /// No directory is there, or the source can be no directory of steps.
    pub fn new(source: &str, options: &OpenOptions) -> Result<Self, CheckpointError> {
        let is_remote = source.contains("://") && !Path::new(source).exists();
        let directory = Self { source: source.to_owned(), options: options.clone(), is_remote };
        if is_remote {
            if source.starts_with("hf://") {
                return Err(CheckpointError::NoSteps {
                    run: source.to_owned(),
                    found: "a repository of the Hub".into(),
                });
            }
            return Ok(directory);
        }
        let _looking = options.fetches.begin_path(Path::new(source), "list");
        match std::fs::metadata(source) {
            Ok(found) if found.is_dir() => Ok(directory),
            Ok(_) => Err(CheckpointError::NoSteps { run: source.to_owned(), found: "a file".to_owned() }),
            Err(error) => Err(CheckpointError::Listing { root: PathBuf::from(source), error }),
        }
    }

    /// The local directory; `None` of a remote run.
    pub fn local(&self) -> Option<&Path> {
        (!self.is_remote).then(|| Path::new(&self.source))
    }

    /// The steps that are there now, by number.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn list(&self) -> Result<FoundSteps, CheckpointError> {
        Ok(judge::steps_of(&*self.tree()?, (&FoundSteps::default(), &|_| false))?)
    }

    /// The steps that are there now, each with what its files come to where `wants` is true; `None` too of a step whose files
    /// cannot be listed. The finished steps of the listing `before` of which `holds` is true, by name, are taken as they were, and not
    /// looked into.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn list_some(
        &self,
        (before, holds): (&FoundSteps, &dyn Fn(&str) -> bool),
        wants: &dyn Fn(&FoundStep) -> bool,
    ) -> Result<(FoundSteps, Vec<Option<Measure>>), CheckpointError> {
        let tree = self.tree()?;
        let found = judge::steps_of(&*tree, (before, holds))?;
        let measure = |step: &FoundStep| wants(step).then(|| tree.measure(&step.name).ok()).flatten();
        let measures = found.steps.iter().map(measure).collect();
        Ok((found, measures))
    }

    /// What the files of a step come to now; `None` if they cannot be listed.
    pub fn measure(&self, name: &str) -> Option<Measure> {
        self.tree().ok()?.measure(name).ok()
    }

    /// The source of a step's checkpoint, as [`Checkpoint::open`](crate::Checkpoint::open) takes it.
    pub fn source_of(&self, step: &FoundStep) -> String {
        format!("{}/{}", self.source.trim_end_matches('/'), step.path)
    }

    fn tree(&self) -> Result<Box<dyn StepTree>, CheckpointError> {
        if !self.is_remote {
            return Ok(Box::new(LocalSteps::new(&self.source, &self.options)));
        }
        if let Some(found) = open_url(&self.source, &self.options.remote) {
            let found = found.map_err(CheckpointError::Remote)?;
            return Ok(Box::new(RemoteSteps::new(found, &self.options)));
        }
        let scheme = self.source.split_once("://").map_or("", |(scheme, _)| scheme);
        Err(CheckpointError::of_scheme(&self.source, scheme))
    }
}
