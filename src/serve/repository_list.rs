//! All repositories of a server, by name and revision.

use std::sync::Arc;

use ckfs_config::{Config, RepoName};
use ckfs_volume::Volume;

use super::{
    gate::Visitor,
    repositories::{BRANCH, NoRepository, ServedRepository, of_own_organization, of_view, own_name},
    steps::ServedRun,
    tree::ServedTree,
};

/// Whether a revision is the branch.
fn is_branch(revision: &str) -> bool {
    revision.strip_prefix("refs/heads/").unwrap_or(revision) == BRANCH
}

/// All repositories.
pub(super) enum Repositories {
    /// Those of one checkpoint.
    Fixed(Vec<ServedRepository>),
    /// Those of a run, whose revisions are steps.
    Run(Arc<ServedRun>),
}

impl Repositories {
    /// A repository for each view of a volume that has one; `commits` are those of the views, in their order.
    pub(super) fn new(
        tree: &Arc<ServedTree>,
        volume: &Volume,
        config: &Config,
        name: Option<&RepoName>,
        commits: &[String],
    ) -> Self {
        let of_view = |(view, commit): (&ckfs_config::ViewConfig, &String)| {
            let id = if view.name.is_empty() {
                name.map_or_else(|| own_name(volume, config), |name| name.as_str().to_owned())
            } else {
                of_own_organization(&view.name)
            };
            of_view(tree, &view.name, &id, commit.clone())
        };
        Self::Fixed(config.views.iter().zip(commits).filter_map(of_view).collect())
    }

    /// The names of all of them.
    pub(super) fn ids(&self) -> Vec<String> {
        match self {
            Self::Fixed(all) => all.iter().map(|repository| repository.id.clone()).collect(),
            Self::Run(run) => run.ids().map(str::to_owned).collect(),
        }
    }

    /// All of them at the branch; of a run that has no step yet, none.
    pub(super) async fn all(&self, visitor: Visitor) -> Vec<ServedRepository> {
        match self {
            Self::Fixed(all) => all.iter().filter(|repository| repository.is_open_to(visitor)).cloned().collect(),
            Self::Run(run) => {
                let mut all = Vec::new();
                for id in run.ids() {
                    all.extend(self.find(visitor, id, BRANCH).await.ok());
                }
                all
            }
        }
    }

    /// The repository of a name, at a revision: the branch, a step of a run, or a commit.
    ///
    /// # Errors
    /// [`NoRepository`].
    pub(super) async fn find(
        &self,
        visitor: Visitor,
        id: &str,
        revision: &str,
    ) -> Result<ServedRepository, NoRepository> {
        let found = match self {
            Self::Fixed(all) => Self::find_fixed(all, id, revision)?,
            Self::Run(run) => run.find(visitor, id, revision).await?,
        };
        if found.is_open_to(visitor) { Ok(found) } else { Err(NoRepository::Denied) }
    }

    /// Whether a revision has another commit as soon as a step comes.
    pub(super) fn is_moving(&self, revision: &str) -> bool {
        matches!(self, Self::Run(_)) && is_branch(revision)
    }

    fn find_fixed(all: &[ServedRepository], id: &str, revision: &str) -> Result<ServedRepository, NoRepository> {
        let mut named = all.iter().filter(|repository| repository.id == id).peekable();
        if named.peek().is_none() {
            return Err(NoRepository::Name);
        }
        let of_revision = |repository: &&ServedRepository| is_branch(revision) || repository.commit == revision;
        named.find(of_revision).cloned().ok_or_else(|| NoRepository::Revision(format!("there is {BRANCH}")))
    }

    /// The branches of a repository, each with its commit: the branch, and the steps of a run by their numbers.
    ///
    /// # Errors
    /// [`NoRepository`].
    pub(super) async fn branches(&self, visitor: Visitor, id: &str) -> Result<Vec<(String, String)>, NoRepository> {
        let run = match self {
            Self::Fixed(_) => return Ok(vec![(BRANCH.to_owned(), self.find(visitor, id, BRANCH).await?.commit)]),
            Self::Run(run) => run,
        };
        let steps = run.branches(visitor, id).await?;
        let latest = run.run().latest();
        let newest = steps
            .last()
            .filter(|(number, _)| Some(*number) == latest)
            .map(|(_, commit)| (BRANCH.to_owned(), commit.clone()));
        let steps = steps.into_iter().map(|(number, commit)| (number.to_string(), commit));
        Ok(newest.into_iter().chain(steps).collect())
    }
}
