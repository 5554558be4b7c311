//! What a server serves: one checkpoint, or the steps of a run; by path, and as repositories by name and revision.

use std::{sync::Arc, time::SystemTime};

use ckfs_config::RepoName;
use ckfs_image::OWN;
use ckfs_service::{Alive, AliveContent, OpenProblem, identity, steps::NoStep};
use ckfs_volume::{Upkeep, Volume};

use super::{
    gate::Visitor,
    reads::ServedReads,
    repositories::{BRANCH, NoRepository, ServedRepository, branch_of, id_of, of_view, own_name},
    steps::ServedRun,
    tree::{NoNode, ServedTree, TreeDigest, TreeVersion},
};

/// What is served.
#[derive(Clone)]
pub(super) enum ServedSource {
    /// One checkpoint.
    Checkpoint(Arc<ServedCheckpoint>),
    /// The steps of a run, which are the revisions of its repositories.
    Run(Arc<ServedRun>),
}

/// A checkpoint that is served.
pub(super) struct ServedCheckpoint {
    volume: Arc<Volume>,
    pub(super) tree: Arc<ServedTree>,
    /// One for each view that has one.
    repositories: Vec<ServedRepository>,
}

/// Where a path leads.
pub(super) enum ServedPlace {
    /// The rest of it from the root of a tree, in which lookups never wait.
    Tree(Arc<ServedTree>, Vec<String>),
    /// A file that is made at each request, as it is now.
    Text(Vec<u8>),
}

/// Whether a revision is the branch.
fn is_branch(revision: &str) -> bool {
    branch_of(revision) == BRANCH
}

impl ServedSource {
    /// What a service has, read by `reads`; `name` is that of the only repository, if the user says one.
    pub(super) fn new(service: &dyn Alive, reads: &Arc<ServedReads>, name: Option<&RepoName>) -> Self {
        let config = service.config();
        let volume = match service.content() {
            AliveContent::Checkpoint(volume) => Arc::clone(volume),
            AliveContent::Run(run) => return Self::Run(Arc::new(ServedRun::new(run, reads, config, name))),
        };
        let (commits, digest) = identity::of_volume(&volume, config.views.iter().map(|view| &*view.name));
        let version = TreeDigest { digest, since: SystemTime::now() };
        let tree = Arc::new(ServedTree::new(reads, TreeVersion::Volume { volume: Arc::clone(&volume), version }));
        let repositories = config.views.iter().zip(commits).filter_map(|(view, commit)| {
            of_view(&tree, &view.name, &id_of(view, name, || own_name(&volume, config)), commit)
        });
        let repositories = repositories.collect();
        Self::Checkpoint(Arc::new(ServedCheckpoint { volume, tree, repositories }))
    }

    /// All that is served as one file system.
    pub(super) fn fs(&self) -> &Arc<dyn Upkeep> {
        match self {
            Self::Checkpoint(served) => &served.tree.fs,
            Self::Run(run) => &run.reads.fs,
        }
    }

    /// The source's name for users.
    pub(super) fn label(&self) -> &str {
        match self {
            Self::Checkpoint(served) => served.volume.engine().checkpoint().label(),
            Self::Run(run) => run.run.label(),
        }
    }

    /// Where a path leads. Plans the step that it names.
    ///
    /// # Errors
    /// [`NoNode`].
    pub(super) async fn place(&self, visitor: Visitor, names: &[String]) -> Result<ServedPlace, NoNode> {
        let run = match self {
            Self::Checkpoint(served) => return Ok(ServedPlace::Tree(Arc::clone(&served.tree), names.to_vec())),
            Self::Run(run) => run,
        };
        let in_root = || Ok(ServedPlace::Tree(Arc::new(run.root()), names.to_vec()));
        let Some((first, rest)) = names.split_first() else { return in_root() };
        if first == OWN && visitor == Visitor::Trusted {
            let [name] = rest else { return in_root() };
            let name = name.clone();
            let text = run.in_thread(&run.looking, move |run| run.run.own_file(&name)).await?;
            return text.map(ServedPlace::Text).ok_or(NoNode::Absent);
        }
        // Links of the root are followed here: what one leads to may change until the next lookup.
        let Some(number) = run.number_of(first) else { return in_root() };
        if !run.may_pass(visitor) {
            return Err(NoNode::Denied);
        }
        let open = run.step(number).await?;
        // Only the reason is there of a step that cannot be planned: no file is absent because of that.
        if let Err(message) = open.held.volume()
            && rest.first().is_some_and(|name| name != OWN)
        {
            return Err(NoNode::Failed(match visitor {
                Visitor::Trusted => format!("step {number} cannot be planned: {message}"),
                Visitor::Stranger => format!("step {number} cannot be planned"),
            }));
        }
        Ok(ServedPlace::Tree(Arc::new(run.tree(&open)?), rest.to_vec()))
    }

    /// What is wrong now.
    pub(super) async fn problems(&self) -> Vec<OpenProblem> {
        match self {
            Self::Checkpoint(served) => served.volume.open_problems().into_iter().map(OpenProblem::from).collect(),
            Self::Run(run) => {
                run.in_thread(&run.looking, |run| run.run.open_problems()).await.unwrap_or_else(|error| {
                    let (kind, file) = ("error in ckfs".to_owned(), String::new());
                    vec![OpenProblem { kind, file, cause: error.to_string() }]
                })
            }
        }
    }

    /// The metrics as Prometheus reads them.
    pub(super) async fn metrics_text(&self) -> Result<String, NoStep> {
        match self {
            Self::Checkpoint(served) => Ok(served.volume.metrics_text()),
            Self::Run(run) => run.in_thread(&run.looking, |run| run.run.metrics_text()).await,
        }
    }

    /// The names of all repositories.
    pub(super) fn ids(&self) -> Vec<String> {
        match self {
            Self::Checkpoint(served) => served.repositories.iter().map(|repository| repository.id.clone()).collect(),
            Self::Run(run) => run.ids().map(str::to_owned).collect(),
        }
    }

    /// All repositories at the branch; of a run that has no step yet, none.
    pub(super) async fn repositories(&self, visitor: Visitor) -> Vec<ServedRepository> {
        let mut all = Vec::new();
        match self {
            Self::Checkpoint(served) => {
                all.extend(served.repositories.iter().filter(|found| found.is_open_to(visitor)).cloned());
            }
            Self::Run(run) => {
                for id in run.ids() {
                    all.extend(self.repository(visitor, id, BRANCH).await.ok());
                }
            }
        }
        all
    }

    /// The repository of a name, at a revision: the branch, a step of a run, or a commit.
    ///
    /// # Errors
    /// [`NoRepository`].
    pub(super) async fn repository(
        &self,
        visitor: Visitor,
        id: &str,
        revision: &str,
    ) -> Result<ServedRepository, NoRepository> {
        let found = match self {
            Self::Checkpoint(served) => {
                let mut named = served.repositories.iter().filter(|found| found.id == id).peekable();
                named.peek().ok_or(NoRepository::Name)?;
                let found = named.find(|found| is_branch(revision) || found.commit == revision).cloned();
                found.ok_or_else(|| NoRepository::Revision(format!("there is {BRANCH}")))?
            }
            Self::Run(run) => run.find(visitor, id, revision).await?,
        };
        if found.is_open_to(visitor) { Ok(found) } else { Err(NoRepository::Denied) }
    }

    /// Whether a revision has another commit as soon as a step comes.
    pub(super) fn is_moving(&self, revision: &str) -> bool {
        matches!(self, Self::Run(_)) && is_branch(revision)
    }

    /// The branches of a repository: the branch, and the steps of a run by their numbers, from the first on.
    ///
    /// # Errors
    /// [`NoRepository`].
    pub(super) async fn branches(
        &self,
        visitor: Visitor,
        id: &str,
    ) -> Result<Vec<(String, ServedRepository)>, NoRepository> {
        let run = match self {
            Self::Checkpoint(_) => {
                return Ok(vec![(BRANCH.to_owned(), self.repository(visitor, id, BRANCH).await?)]);
            }
            Self::Run(run) => run,
        };
        let steps = run.branches(visitor, id).await?;
        let newest = steps.last().filter(|(number, _)| Some(*number) == run.run.latest());
        let newest = newest.map(|(_, found)| (BRANCH.to_owned(), found.clone()));
        let steps = steps.into_iter().map(|(number, found)| (number.to_string(), found));
        Ok(newest.into_iter().chain(steps).collect())
    }
}
