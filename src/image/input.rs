//! The input of formats: a view of a checkpoint, and values that several formats need.

use std::{
    sync::{Arc, OnceLock},
    time::{SystemTime, UNIX_EPOCH},
};

use ckfs_checkpoint::{Checkpoint, Container};
use ckfs_plan::{Layout, Plan, TensorKinds};

use super::bundle::Bundle;

/// A view of a checkpoint. Values that several formats need are computed at the first request.
pub struct FormatInput {
    /// The repository.
    pub checkpoint: Arc<Checkpoint>,
    /// The view.
    pub plan: Arc<Plan>,
    kinds: OnceLock<Arc<TensorKinds>>,
    bundle: OnceLock<Arc<Bundle>>,
}

impl FormatInput {
    /// A view of a checkpoint.
    pub fn new(checkpoint: Arc<Checkpoint>, plan: Arc<Plan>) -> Self {
        Self { checkpoint, plan, kinds: OnceLock::new(), bundle: OnceLock::new() }
    }

    /// The kinds of the plan's tensors.
    pub(super) fn kinds(&self) -> &Arc<TensorKinds> {
        self.kinds.get_or_init(|| Arc::new(TensorKinds::new(&self.plan)))
    }

    /// The shards that files of many tensors hold.
    pub(super) fn bundle(&self) -> &Arc<Bundle> {
        self.bundle.get_or_init(|| Arc::new(Bundle::new(Arc::clone(&self.plan), Arc::clone(self.kinds()))))
    }

    /// Whether the tensors are all that the source has, under its names: what else it has fits to them.
    pub(super) fn is_whole(&self) -> bool {
        let (checkpoint, plan) = (&self.checkpoint, &self.plan);
        plan.layout == Layout::Stored
            && checkpoint.tensors().len() == plan.bundle().count()
            && plan.bundle().all(|tensor| checkpoint.find(&tensor.name).is_some())
    }

    /// What goes with the tensors of a source of this kind into a format of the same kind.
    pub(super) fn objects(&self, container: Container) -> impl Iterator<Item = (&String, &Arc<[u8]>)> {
        let passes = self.checkpoint.container() == container && self.is_whole();
        self.checkpoint.opened.contents.tree.objects.iter().filter(move |_| passes)
    }

    /// When the newest source file was modified.
    pub(super) fn modified(&self) -> SystemTime {
        let source = self.checkpoint.source();
        source.files().map(|file| source.pin(file).modified).max().unwrap_or(UNIX_EPOCH)
    }
}
