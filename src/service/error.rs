//! Why a configuration cannot be opened.

use std::{io, path::PathBuf};

use ckfs_checkpoint::CheckpointError;
use ckfs_config::ConfigError;
use ckfs_host::limits;
use ckfs_volume::VolumeError;

/// Why a configuration cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The configuration names no source.
    #[error("no source")]
    NoSource,
    /// A command that shows one checkpoint was given a run.
    #[error(
        "--steps: for mount, serve, plan, export and verify; give the directory of one step here, and leave it out"
    )]
    StepsElsewhere,
    /// A path cannot be made independent of the working directory.
    #[error("{path}: {source}")]
    Path {
        /// The path, as the configuration has it.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The system starts no thread.
    #[error("{what}: {source}{}", limits::hint())]
    Threads {
        /// What the thread was for.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Everything wrong with the repository.
    #[error("{error}")]
    Checkpoint {
        /// The source, as a complete path or a name.
        source_name: String,
        /// What is wrong.
        #[source]
        error: CheckpointError,
    },
    /// The source is a part of a mount, or of a set of files, which holds a part of each tensor only.
    #[error("{0}")]
    Shards(String),
    /// Everything wrong with the plans.
    #[error("{text}")]
    Plans {
        /// All of it: views, problems, and what would help.
        text: String,
        /// A text for each problem.
        problems: Vec<String>,
    },
    /// A chunk of the source needs more memory to decode than there is.
    #[error("{0}")]
    ChunkMemory(String),
    /// The configuration cannot be written down.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The plans cannot be laid out as files.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The directory for materialized files cannot hold such.
    #[error("{}: no place for materialized files: {source}", directory.display())]
    Materialize {
        /// The directory.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The mountpoint is inside the run that it would show.
    #[error("mountpoint {}: inside the run {}, which is searched for steps; mount outside of it", mountpoint.display(), run.display())]
    InRun {
        /// The mountpoint.
        mountpoint: PathBuf,
        /// The run.
        run: PathBuf,
    },
    /// The mountpoint would cover a file of the source.
    #[error("mountpoint {}: would cover the source file {}", mountpoint.display(), file.display())]
    Covered {
        /// The mountpoint.
        mountpoint: PathBuf,
        /// The file.
        file: PathBuf,
    },
}

impl OpenError {
    /// Whether the source or the plan of a view is wrong, and not what is around them.
    pub fn concerns_view(&self) -> bool {
        match self {
            Self::Checkpoint { .. } | Self::Plans { .. } | Self::Volume(_) | Self::Shards(_) | Self::ChunkMemory(_) => {
                true
            }
            Self::NoSource
            | Self::Path { .. }
            | Self::Threads { .. }
            | Self::Config(_)
            | Self::StepsElsewhere
            | Self::InRun { .. }
            | Self::Materialize { .. }
            | Self::Covered { .. } => false,
        }
    }

    /// A text for each problem.
    pub fn problems(&self) -> Vec<String> {
        match self {
            Self::Checkpoint { error, .. } => error.texts(),
            Self::Plans { problems, .. } => problems.clone(),
            Self::Volume(error) => ckfs_plan::PlanError { problems: error.problems.clone() }.texts(),
            Self::NoSource
            | Self::Path { .. }
            | Self::Threads { .. }
            | Self::StepsElsewhere
            | Self::InRun { .. }
            | Self::Shards(_)
            | Self::ChunkMemory(_)
            | Self::Config(_)
            | Self::Materialize { .. }
            | Self::Covered { .. } => vec![self.to_string()],
        }
    }
}
