//! Prefetch of a mount: brings what the listed devices will read from a remote source, behind what readers ask for.

use std::{sync::Arc, thread, time::Duration};

use ckfs_checkpoint::Checkpoint;
use ckfs_config::Prefetch;
use ckfs_plan::{FETCHED_BYTES, Plan};
use ckfs_source::{ByteSpan, FileId};

/// Time between two offers to a source that has enough requests.
const PAUSE: Duration = Duration::from_millis(20);
/// Requests that wait at a time: readers' read-ahead has its place beside them.
const JOBS_MAX: usize = 128;

/// A running prefetch; ends when it is dropped.
pub(super) type Prefetching = Arc<()>;

/// Starts the prefetch of these plans, if the source is remote and the setting says so.
pub(super) fn start(checkpoint: &Arc<Checkpoint>, plans: &[Arc<Plan>], prefetch: Prefetch) -> Option<Prefetching> {
    checkpoint.source().remote()?;
    let lists_a_part = plans.iter().any(|plan| (plan.devices.len() as u64) < plan.mesh.devices());
    let wanted = match prefetch {
        Prefetch::Auto => lists_a_part,
        Prefetch::On => true,
        Prefetch::Off => false,
    };
    if !wanted {
        return None;
    }
    let prefetching = Prefetching::default();
    let (checkpoint, plans, wanted) = (Arc::clone(checkpoint), plans.to_vec(), Arc::downgrade(&prefetching));
    let run = move || {
        let Some(remote) = checkpoint.source().remote() else { return };
        let mut offer = |file: FileId, spans: &[ByteSpan]| {
            while wanted.strong_count() > 0 {
                if remote.ahead_jobs() < JOBS_MAX && remote.prefetch(file, spans) {
                    return true;
                }
                thread::sleep(PAUSE);
            }
            false
        };
        for plan in &plans {
            if let Err(reason) = plan.for_each_needed(&checkpoint, &plan.devices, FETCHED_BYTES, &mut offer) {
                tracing::warn!("prefetch: {reason}");
            }
        }
        tracing::debug!("prefetch: everything is requested");
    };
    match thread::Builder::new().name("ckfs-prefetch".into()).spawn(run) {
        Ok(_) => Some(prefetching),
        Err(error) => {
            tracing::warn!("nothing is prefetched: {error}");
            None
        }
    }
}
