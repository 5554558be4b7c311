//! What a server serves: one checkpoint, or the steps of a run.

use std::sync::Arc;

use ckfs_image::OWN;
use ckfs_service::steps::NoStep;
use ckfs_volume::{Upkeep, Volume};

use super::{
    gate::Visitor,
    steps::ServedRun,
    tree::{NoNode, ServedTree},
};

/// What is served.
#[derive(Clone)]
pub(super) enum ServedSource {
    /// One checkpoint.
    Volume(Arc<Volume>, Arc<ServedTree>),
    /// The steps of a run.
    Run(Arc<ServedRun>),
}

/// Where a path leads.
pub(super) enum ServedPlace {
    /// The rest of it from the root of a tree, in which lookups never wait.
    Tree(Arc<ServedTree>, Vec<String>),
    /// A file that is made at each request, as it is now.
    Text(Arc<[u8]>),
}

/// Why a path leads nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// As of a node.
    Node(NoNode),
    /// The step cannot be read: why.
    Failed(String),
}

impl From<NoStep> for NoPlace {
    fn from(reason: NoStep) -> Self {
        match reason {
            NoStep::Absent => Self::Node(NoNode::Absent),
            NoStep::Failed(message) => Self::Failed(message),
        }
    }
}

/// Something that is wrong.
#[derive(Clone, Debug)]
pub(super) struct ServedProblem {
    pub(super) kind: String,
    pub(super) file: String,
    pub(super) cause: String,
}

impl ServedSource {
    /// All that is served as one file system.
    pub(super) fn fs(&self) -> &Arc<dyn Upkeep> {
        match self {
            Self::Volume(_, tree) => &tree.fs,
            Self::Run(run) => &run.fs,
        }
    }

    /// Where a path leads. Plans the step that it names.
    ///
    /// # Errors
    /// [`NoPlace`].
    pub(super) async fn place(&self, visitor: Visitor, names: &[String]) -> Result<ServedPlace, NoPlace> {
        let run = match self {
            Self::Volume(_, tree) => return Ok(ServedPlace::Tree(Arc::clone(tree), names.to_vec())),
            Self::Run(run) => run,
        };
        let in_root = || Ok(ServedPlace::Tree(Arc::new(run.root()), names.to_vec()));
        let Some((first, rest)) = names.split_first() else { return in_root() };
        if first == OWN && visitor == Visitor::Trusted {
            let [name] = rest else { return in_root() };
            let name = name.clone();
            let text = run.aside(move |run| run.run().own_file(&name)).await?;
            return text.map(ServedPlace::Text).ok_or(NoPlace::Node(NoNode::Absent));
        }
        // Links of the root are followed here: what one leads to may change until the next lookup.
        let Some(number) = run.number_of(first) else { return in_root() };
        if !run.may_pass(visitor) {
            return Err(NoPlace::Node(NoNode::Denied));
        }
        let open = run.step(number).await?;
        // Only the reason is there of a step that cannot be planned: no file is absent because of that.
        if let Err(message) = open.held.volume()
            && rest.first().is_some_and(|name| name != OWN)
        {
            return Err(NoPlace::Failed(match visitor {
                Visitor::Trusted => format!("step {number} cannot be planned: {message}"),
                Visitor::Stranger => format!("step {number} cannot be planned"),
            }));
        }
        Ok(ServedPlace::Tree(Arc::new(run.tree(&open)?), rest.to_vec()))
    }

    /// What is wrong now.
    pub(super) async fn problems(&self) -> Vec<ServedProblem> {
        match self {
            Self::Volume(volume, _) => {
                let problem = |problem: ckfs_volume::HealthProblem| ServedProblem {
                    kind: problem.kind.name().to_owned(),
                    file: problem.file,
                    cause: problem.cause,
                };
                volume.open_problems().into_iter().map(problem).collect()
            }
            Self::Run(run) => {
                let problem = |problem: ckfs_service::steps::RunProblem| ServedProblem {
                    kind: problem.kind,
                    file: problem.file,
                    cause: problem.cause,
                };
                let found = run.aside(|run| run.run().open_problems()).await;
                let failed = |error: NoStep| {
                    let (kind, file) = ("error in ckfs".to_owned(), String::new());
                    vec![ServedProblem { kind, file, cause: error.to_string() }]
                };
                found.map_or_else(failed, |found| found.into_iter().map(problem).collect())
            }
        }
    }

    /// The metrics as Prometheus reads them.
    pub(super) async fn metrics_text(&self) -> Result<String, NoStep> {
        match self {
            Self::Volume(volume, _) => Ok(volume.metrics_text()),
            Self::Run(run) => run.aside(|run| run.run().metrics_text()).await,
        }
    }
}
