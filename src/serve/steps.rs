//! A run as the door serves it: each step is a tree of its own, and one revision of every repository.
//!
//! Looking into a step that is not planned yet waits for its storage, so another thread does it; a step that was planned is held while a
//! request looks into it, and lookups in it never wait.

use std::{
    collections::HashMap,
    num::NonZeroUsize,
    sync::{Arc, Weak},
    time::SystemTime,
};

use ckfs_config::{Config, RepoName, ViewConfig};
use ckfs_service::{
    identity,
    steps::{HeldStep, NoStep, Run, step_number},
};
use ckfs_volume::{Ino, Volume};
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use lru::LruCache;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::{
    gate::Visitor,
    reads::ServedReads,
    repositories::{self, BRANCH, NoRepository, ServedRepository, branch_of},
    tree::{FoundNode, NoNode, ServedTree, TreeDigest, TreeVersion},
};

/// The name of the newest step, as in a mount.
pub(super) const LATEST: &str = "latest";

/// Most threads that plan steps or wait for their storage.
const WAITING_MAX: usize = 32;

/// Most threads that read a run's status, which must be shown also while storage does not answer.
const LOOKING_MAX: usize = 4;

/// Most times that a step is looked for again because it was written anew meanwhile.
const TRIES: usize = 8;

/// Steps of which the commits are remembered.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// What is known of a step in one state.
#[derive(Debug)]
struct KnownStep {
    /// The volume by which it is known: another one may have other plans.
    volume: Weak<Volume>,
    /// The commits of its views, in their order.
    commits: Vec<String>,
    version: TreeDigest,
}

/// A step that can be looked into.
#[derive(Clone)]
pub(super) struct OpenStep {
    pub(super) held: HeldStep,
    /// `None` of a step that could not be planned.
    known: Option<Arc<KnownStep>>,
}

/// A view of the steps as a repository.
#[derive(Debug)]
struct RunView {
    /// Its name in the configuration.
    name: String,
    id: String,
}

/// A run that is served.
pub(super) struct ServedRun {
    pub(super) run: Arc<Run>,
    pub(super) reads: Arc<ServedReads>,
    views: Vec<RunView>,
    known: Mutex<LruCache<u64, Arc<KnownStep>>>,
    /// For what may wait for the storage of steps.
    pub(super) waiting: Semaphore,
    /// For what only takes a while.
    pub(super) looking: Semaphore,
    /// Steps that are being opened, by version: all that ask for one wait for one thread.
    opening: Mutex<HashMap<u64, Opening>>,
}

/// The result of opening a step, once it is there.
type Opening = Shared<BoxFuture<'static, Result<OpenStep, NoStep>>>;

impl ServedRun {
    pub(super) fn new(run: &Arc<Run>, reads: &Arc<ServedReads>, config: &Config, name: Option<&RepoName>) -> Self {
        let of_view = |view: &ViewConfig| {
            let id = repositories::id_of(view, name, || repositories::name_of_source(config));
            RunView { name: view.name.clone(), id }
        };
        Self {
            run: Arc::clone(run),
            reads: Arc::clone(reads),
            views: config.views.iter().map(of_view).collect(),
            known: Mutex::new(LruCache::new(REMEMBERED)),
            waiting: Semaphore::new(WAITING_MAX),
            looking: Semaphore::new(LOOKING_MAX),
            opening: Mutex::default(),
        }
    }

    /// The names of the repositories.
    pub(super) fn ids(&self) -> impl Iterator<Item = &str> {
        self.views.iter().map(|view| view.id.as_str())
    }

    /// The number that a name of a directory stands for: that of a step, or of the newest one.
    pub(super) fn number_of(&self, name: &str) -> Option<u64> {
        if name == LATEST { self.run.latest() } else { step_number(name) }
    }

    /// What is remembered of a step.
    fn recall(&self, held: &HeldStep) -> Option<OpenStep> {
        let Ok(volume) = held.volume() else { return Some(OpenStep { held: held.clone(), known: None }) };
        let known = self.known.lock().get(&held.version()).map(Arc::clone)?;
        let is_same = std::ptr::eq(known.volume.as_ptr(), Arc::as_ptr(volume));
        is_same.then(|| OpenStep { held: held.clone(), known: Some(known) })
    }

    /// Makes the commits of a step. Takes a while for a plan of many tensors.
    fn remember(&self, held: HeldStep) -> OpenStep {
        if let Some(open) = self.recall(&held) {
            return open;
        }
        let Ok(volume) = held.volume() else { return OpenStep { held, known: None } };
        let (commits, digest) = identity::of_volume(volume, self.views.iter().map(|view| &*view.name));
        let before = self.known.lock().get(&held.version()).map(|known| known.version.clone());
        // A step that is planned again is not newer for that.
        let version = before.filter(|before| before.digest == digest);
        let version = version.unwrap_or_else(|| TreeDigest { digest, since: SystemTime::now() });
        let known = Arc::new(KnownStep { volume: Arc::downgrade(volume), commits, version });
        self.known.lock().put(held.version(), Arc::clone(&known));
        OpenStep { held, known: Some(known) }
    }

    /// Has another thread do what takes a while, or what may wait for the storage of steps: each has its bound.
    ///
    /// # Errors
    /// The work panicked.
    pub(super) async fn in_thread<T: Send + 'static>(
        self: &Arc<Self>,
        bound: &Semaphore,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, NoStep> {
        // The semaphores are never closed.
        let _permit = bound.acquire().await;
        let run = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || work(&run)).await;
        done.map_err(|error| NoStep::Failed(format!("a request failed: {error}")))
    }

    /// A step in a state, planned if it is not.
    async fn version(self: &Arc<Self>, version: u64) -> Result<OpenStep, NoStep> {
        if let Some(open) = self.run.held(version)?.and_then(|held| self.recall(&held)) {
            return Ok(open);
        }
        let opening = self.opening.lock().entry(version).or_insert_with(|| self.open(version)).clone();
        opening.await
    }

    /// Begins to open a step.
    fn open(self: &Arc<Self>, version: u64) -> Opening {
        let run = Arc::clone(self);
        // A task of its own: it goes on when all that ask have gone away.
        let opened = tokio::spawn(async move {
            let open = move |run: &Self| Ok(run.remember(run.run.hold(version)?));
            let result = run.in_thread(&run.waiting, open).await.and_then(|result| result);
            // A request that arrives from here on opens the step anew, or finds it open.
            run.opening.lock().remove(&version);
            result
        });
        let lost = |_| Err(NoStep::Failed("the step was not opened".to_owned()));
        opened.map(move |opened| opened.unwrap_or_else(lost)).boxed().shared()
    }

    /// Does what looks at several steps, anew if it fails while steps come or go.
    ///
    /// # Errors
    /// The last one.
    pub(super) fn unchanged<T>(&self, work: impl Fn() -> Result<T, NoNode>) -> Result<T, NoNode> {
        let steps =
            || -> Vec<Option<u64>> { self.run.steps().iter().map(|step| self.run.version(step.number)).collect() };
        let mut before = steps();
        for _ in 1..TRIES {
            let done = work();
            let after = steps();
            if !matches!(done, Err(NoNode::Failed(_))) || before == after {
                return done;
            }
            before = after;
        }
        work()
    }

    /// A step that is shown, planned if it is not.
    pub(super) async fn step(self: &Arc<Self>, number: u64) -> Result<OpenStep, NoStep> {
        for _ in 0..TRIES {
            let version = self.run.version(number).ok_or(NoStep::Absent)?;
            match self.version(version).await {
                // It is written anew, or deleted.
                Err(NoStep::Absent) => {}
                found => return found,
            }
        }
        Err(NoStep::Failed(format!("step {number} is written anew again and again")))
    }

    /// The root with the steps. Its listing plans none of them.
    pub(super) fn root(self: &Arc<Self>) -> ServedTree {
        let run = Arc::clone(self);
        let digest_of_node = move |ino| {
            let open = run.remember(run.run.hold(Run::version_of_node(ino)?).ok()?);
            Some((open.known?.version.clone(), open.held))
        };
        ServedTree::new(&self.reads, TreeVersion::Run(Box::new(digest_of_node)))
    }

    /// The tree of a step, whose paths begin with the step's number.
    pub(super) fn tree(&self, open: &OpenStep) -> Result<ServedTree, NoStep> {
        let attr = open.held.root().map_err(|error| NoStep::Failed(error.to_string()))?;
        let root = FoundNode { path: open.held.number().to_string(), attr };
        let version = open.known.as_ref().map(|known| known.version.clone());
        let version = TreeVersion::Step { held: open.held.clone(), version };
        Ok(ServedTree { root, ..ServedTree::new(&self.reads, version) })
    }

    /// A repository of a step.
    fn repository(&self, open: &OpenStep, place: usize) -> Result<ServedRepository, NoRepository> {
        let number = open.held.number();
        if let Err(message) = open.held.volume() {
            return Err(NoRepository::Failed(format!("step {number}: {message}")));
        }
        let view = &self.views[place];
        let commit = open.known.as_ref().and_then(|known| known.commits.get(place)).cloned();
        let tree = self.tree(open).map_err(|error| NoRepository::Failed(error.to_string()))?;
        let made = commit.and_then(|commit| repositories::of_view(&Arc::new(tree), &view.name, &view.id, commit));
        made.ok_or_else(|| NoRepository::Revision(format!("step {number} has no hf/ (see `ckfs plan`)")))
    }

    /// Whether a visitor may go from the directory of the run to its steps.
    pub(super) fn may_pass(&self, visitor: Visitor) -> bool {
        self.reads.fs.attr(Ino::ROOT).is_ok_and(|root| visitor.may_pass(&root))
    }

    /// Whether a visitor may see which steps there are.
    fn may_list(&self, visitor: Visitor) -> bool {
        self.reads.fs.attr(Ino::ROOT).is_ok_and(|root| visitor.may_list(&root))
    }

    /// A repository at a revision: a step, the branch, which is the newest step, or a commit.
    ///
    /// # Errors
    /// [`NoRepository`].
    pub(super) async fn find(
        self: &Arc<Self>,
        visitor: Visitor,
        id: &str,
        revision: &str,
    ) -> Result<ServedRepository, NoRepository> {
        if !self.may_pass(visitor) {
            return Err(NoRepository::Denied);
        }
        let place = self.views.iter().position(|view| view.id == id).ok_or(NoRepository::Name)?;
        let branch = branch_of(revision);
        let number = if branch == BRANCH { self.run.latest() } else { step_number(branch) };
        let found = match number {
            Some(number) => self.step(number).await,
            None if identity::is_commit(revision) => self.step_of_commit(visitor, place, revision).await,
            None => Err(NoStep::Absent),
        };
        match found {
            Ok(open) => self.repository(&open, place),
            Err(NoStep::Absent) => Err(NoRepository::Revision(self.revisions(visitor))),
            Err(NoStep::Failed(message)) => Err(NoRepository::Failed(message)),
        }
    }

    /// What there is in place of an unknown revision.
    fn revisions(&self, visitor: Visitor) -> String {
        if !self.may_list(visitor) {
            return format!("there is {BRANCH}");
        }
        match (self.run.steps().first(), self.run.latest()) {
            (Some(first), Some(latest)) if first.number != latest => {
                format!("there is {BRANCH}, and the steps from {} to {latest}", first.number)
            }
            (_, Some(latest)) => format!("there is {BRANCH}, which is step {latest}"),
            (_, None) => "no step is finished yet".to_owned(),
        }
    }

    /// The step whose view has a commit. A commit of before the server's start may be of any step, so those that are not known are
    /// planned, from the newest on; each once. For strangers only the newest is: a commit that nobody told them costs nothing.
    async fn step_of_commit(
        self: &Arc<Self>,
        visitor: Visitor,
        place: usize,
        commit: &str,
    ) -> Result<OpenStep, NoStep> {
        let has = |known: &KnownStep| known.commits.get(place).is_some_and(|known| known == commit);
        let found = self.known.lock().iter().find(|(_, known)| has(known)).map(|(version, _)| *version);
        if let Some(version) = found {
            let open = self.version(version).await?;
            return if open.known.as_deref().is_some_and(has) { Ok(open) } else { Err(NoStep::Absent) };
        }
        let most = if visitor == Visitor::Trusted { usize::MAX } else { 1 };
        for step in self.run.steps().iter().rev().take(most) {
            let version = self.run.version(step.number);
            if version.is_none_or(|version| self.known.lock().contains(&version)) {
                continue;
            }
            match self.step(step.number).await {
                Ok(open) if open.known.as_deref().is_some_and(has) => return Ok(open),
                Ok(_) | Err(NoStep::Absent) => {}
                // It may be the one.
                Err(failed @ NoStep::Failed(_)) => return Err(failed),
            }
        }
        Err(NoStep::Absent)
    }

    /// A repository's revisions: the number of each step that has it, and what it is there. Plans those that are not known.
    pub(super) async fn branches(
        self: &Arc<Self>,
        visitor: Visitor,
        id: &str,
    ) -> Result<Vec<(u64, ServedRepository)>, NoRepository> {
        if !self.may_list(visitor) {
            return Err(NoRepository::Denied);
        }
        let place = self.views.iter().position(|view| view.id == id).ok_or(NoRepository::Name)?;
        let mut branches = Vec::new();
        for step in self.run.steps() {
            match self.step(step.number).await {
                Ok(open) => {
                    let found = self.repository(&open, place).ok().filter(|found| found.is_open_to(visitor));
                    branches.extend(found.map(|found| (step.number, found)));
                }
                Err(NoStep::Absent) => {}
                Err(NoStep::Failed(message)) => return Err(NoRepository::Failed(message)),
            }
        }
        Ok(branches)
    }
}
