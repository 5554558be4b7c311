//! Tensors that every device holds whole: buffers. FSDP splits parameters and leaves buffers as they are, so a rank's local state
//! has all of them.

use std::collections::BTreeSet;

use ckfs_checkpoint::Checkpoint;
use rayon::prelude::*;

use super::super::{
    draft::Draft,
    library::Model,
    mesh::Mesh,
    name_group::{NameGroup, fold},
};

/// Marks the drafts that are whole on every device, and names their tensors. `is_told` tells of a draft that is split by other
/// rules; `is_back` says that the drafts have the names of a repository, and their tensors those of a trainer. In a model that
/// nobody knows, a single number is taken for a buffer too: a part of it is all or nothing.
pub(crate) fn keep(
    drafts: &mut [Draft],
    checkpoint: &Checkpoint,
    model: &Model,
    mesh: &Mesh,
    is_back: bool,
    is_told: &(dyn Fn(&Draft) -> bool + Sync),
) -> Vec<NameGroup> {
    if mesh.devices() < 2 {
        return Vec::new();
    }
    let whole = |draft: &mut Draft| {
        if is_told(draft) {
            return Vec::new();
        }
        let mut stored = Vec::new();
        if is_back {
            stored.push(draft.name.as_str());
        } else {
            draft.view.for_each_stored(&mut |id| stored.push(checkpoint.tensor(id).name));
        }
        let is_buffer = !stored.is_empty() && stored.iter().all(|name| model.is_buffer(name));
        let unstacked = draft.view.shape().extents().get(draft.roles.stacked..).unwrap_or_default();
        let is_single = !model.is_known && unstacked.iter().all(|extent| *extent == 1);
        if !is_buffer && !is_single {
            return Vec::new();
        }
        let stored = stored.into_iter().map(str::to_owned).collect();
        draft.roles.whole = true;
        stored
    };
    let names: BTreeSet<String> = drafts.par_iter_mut().flat_map_iter(whole).collect::<Vec<_>>().into_iter().collect();
    fold(names.iter().map(String::as_str), &[])
}
