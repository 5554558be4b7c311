//! Why a configuration cannot be opened.

use std::io;

use ckfs_checkpoint::CheckpointError;
use ckfs_host::limits;
use ckfs_plan::PlanError;

/// Why a configuration cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Everything wrong with the repository.
    #[error("{error}")]
    Checkpoint {
        /// The source, as a complete path or a name.
        source_name: String,
        /// What is wrong.
        #[source]
        error: CheckpointError,
    },
    /// Everything wrong with the plans, or with the source as one of these plans.
    #[error("{text}")]
    View {
        /// All of it: views, problems, and what would help.
        text: String,
        /// A text for each problem.
        problems: Vec<String>,
    },
    /// What is around them: settings, the mountpoint, limits of the system.
    #[error("{0}")]
    Surroundings(String),
}

impl OpenError {
    /// One thing is wrong with a source or a plan.
    pub(super) fn of_view(text: String) -> Self {
        Self::View { problems: vec![text.clone()], text }
    }

    /// There is no source.
    pub(super) fn no_source() -> Self {
        Self::Surroundings("no source".to_owned())
    }

    /// The system refused `what`, which concerns threads.
    pub fn of_threads(what: &str, error: &io::Error) -> Self {
        Self::Surroundings(format!("{what}: {error}{}", limits::hint()))
    }

    /// Whether the source or the plan of a view is wrong, and not what is around them.
    pub fn concerns_view(&self) -> bool {
        !matches!(self, Self::Surroundings(_))
    }

    /// A text for each problem.
    pub fn problems(&self) -> Vec<String> {
        match self {
            Self::Checkpoint { error, .. } => error.texts(),
            Self::View { problems, .. } => problems.clone(),
            Self::Surroundings(text) => vec![text.clone()],
        }
    }
}

impl From<PlanError> for OpenError {
    fn from(error: PlanError) -> Self {
        Self::View { text: error.to_string(), problems: error.texts() }
    }
}
