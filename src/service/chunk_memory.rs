//! Memory to decode chunks that have no byte ranges, checked before anything is served.
//!
//! A compressed chunk is decoded whole, however small its stored bytes are: a few hundred kilobytes may be gigabytes of zeros. If the
//! largest chunk needs more than its part of the budget, the part grows as far as the limit allows.

use std::collections::BTreeSet;

use ckfs_checkpoint::Checkpoint;
use ckfs_host::budget::Budget;
use ckfs_plan::report::human_bytes;
use ckfs_tensor::TensorId;
use ckfs_volume::ViewPlan;

use super::error::OpenError;

/// Makes room in the budget for the largest chunk that these plans need. Returns the memory that it takes, in bytes.
///
/// # Errors
/// It does not fit the limit. The error names the tensor, both sizes, and what to do.
pub(super) fn admit(checkpoint: &Checkpoint, plans: &[ViewPlan], budget: &mut Budget) -> Result<u64, OpenError> {
    let Some((bytes, tensor)) = largest(checkpoint, plans) else { return Ok(0) };
    let most_bytes = budget.decoded_bytes_max();
    if bytes <= most_bytes {
        budget.decoded_bytes = budget.decoded_bytes.max(bytes);
        return Ok(bytes);
    }
    let (source, tensor) = (checkpoint.source(), checkpoint.tensor(tensor));
    let stored = source.coded(tensor.file(), tensor.span().start()).and_then(|coded| coded.stored);
    let stored = stored.map(|span| format!(", stored in {}", human_bytes(span.len()))).unwrap_or_default();
    let (limit, origin) = (human_bytes(budget.limit.bytes), &budget.limit.origin);
    Err(OpenError::of_view(format!(
        "{}, tensor {}: a chunk is compressed as a whole and takes {} of memory to decode{stored}; {} are free for it within the \
         limit of {limit} ({origin}). Allow more memory, lower --cache-bytes (now {}), leave the tensor out with --exclude, or \
         save the checkpoint in smaller chunks",
        source.path(tensor.file()).display(),
        tensor.name,
        human_bytes(bytes),
        human_bytes(most_bytes),
        human_bytes(budget.cache_bytes),
    )))
}

/// The most memory that a chunk takes, in bytes, and its first tensor.
fn largest(checkpoint: &Checkpoint, plans: &[ViewPlan]) -> Option<(u64, TensorId)> {
    let chunks = checkpoint.source().chunks()?;
    let (mut largest, mut seen) = (None, BTreeSet::new());
    for tensor in plans.iter().flat_map(|view| &view.plan.tensors) {
        tensor.view.for_each_stored(&mut |id| {
            let file = checkpoint.tensor(id).file();
            if seen.insert(file.index()) {
                let bytes = chunks.memory_bytes(file);
                if bytes > largest.map_or(0, |(most, _)| most) {
                    largest = Some((bytes, id));
                }
            }
        });
    }
    largest
}
