//! One thing that is alive, whatever it is: what every way in needs of it.

use std::{io, sync::Arc};

use ckfs_config::Config;
use ckfs_volume::{HealthProblem, Upkeep, Volume};

use super::steps::{Run, StepPlace};

/// One thing that can be served: a checkpoint ([`Service`](super::Service)), or the steps of a run ([`RunService`](super::steps::RunService)).
pub trait Alive {
    /// Starts the threads that keep it alive: they check sources, release memory, prefetch, look for steps. They end with it.
    ///
    /// # Errors
    /// The system starts no thread.
    fn start(&mut self) -> io::Result<()>;

    /// To be called when its files can be read at a place. A run has its command started for each new step from now on.
    fn note_reached(&self, place: StepPlace) {
        drop(place);
    }

    /// Which of both it is.
    fn content(&self) -> AliveContent<'_>;

    /// All of it as one file system.
    fn file_system(&self) -> Arc<dyn Upkeep>;

    /// The source's name for users.
    fn label(&self) -> &str;

    /// The configuration, with what was found when it was opened.
    fn config(&self) -> &Config;
}

/// Something that is wrong with it now.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct OpenProblem {
    /// Its type, in words.
    pub kind: String,
    /// The file or directory.
    pub file: String,
    /// The latest cause.
    pub cause: String,
}

impl From<HealthProblem> for OpenProblem {
    fn from(problem: HealthProblem) -> Self {
        Self { kind: problem.kind.name().to_owned(), file: problem.file, cause: problem.cause }
    }
}

/// What is served: one checkpoint or the steps of a run.
#[derive(Clone, Copy)]
pub enum AliveContent<'a> {
    /// One checkpoint.
    Checkpoint(&'a Arc<Volume>),
    /// The steps of a run.
    Run(&'a Arc<Run>),
}
