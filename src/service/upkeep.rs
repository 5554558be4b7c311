//! Repeated work: memory of closed files is released, sources in use are checked. And the prefetch of a mount, which brings what the
//! listed devices will read from a remote source, behind what readers ask for.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use ckfs_checkpoint::Checkpoint;
use ckfs_config::Prefetch;
use ckfs_plan::{FETCHED_BYTES, Plan};
use ckfs_source::{ByteSpan, FileId};

/// Time between checks of source files in use.
pub(super) const PERIOD: Duration = Duration::from_secs(3);

/// Most threads that check at a time. A thread that waits for storage without an answer is left to wait. The others
/// pass over the file that it waits for.
const CHECKERS_MAX: usize = 8;

/// Repeated work. Ends when it is dropped.
pub(super) type Upkeeping = mpsc::Sender<()>;

/// Calls `tend` and `check` after each period, `check` from a thread of its own, since it may hang with a file system. A
/// panic ends neither. Ends when the returned value is dropped.
///
/// # Errors
/// The system starts no thread.
pub(super) fn repeat(
    period: Duration,
    tend: impl Fn() + Send + 'static,
    check: impl Fn() + Send + Sync + 'static,
) -> io::Result<Upkeeping> {
    let (stop, stopped) = mpsc::channel();
    let check = Arc::new(check);
    thread::Builder::new().name("ckfs-watch".into()).spawn(move || {
        let checkers = Arc::new(());
        while stopped.recv_timeout(period) == Err(mpsc::RecvTimeoutError::Timeout) {
            // The panic has its line in the log.
            let _ = catch_unwind(AssertUnwindSafe(&tend));
            // Each has one, to its end.
            if Arc::strong_count(&checkers) > CHECKERS_MAX {
                continue;
            }
            let (check, counted) = (Arc::clone(&check), Arc::clone(&checkers));
            let work = move || {
                check();
                drop(counted);
            };
            if let Err(error) = thread::Builder::new().name("ckfs-look".into()).spawn(work) {
                tracing::debug!("a check of the sources is skipped: {error}");
            }
        }
    })?;
    Ok(stop)
}

/// Time between two offers to a source that has enough requests.
const PAUSE: Duration = Duration::from_millis(20);
/// Requests that wait at a time: readers' read-ahead has its place beside them.
const JOBS_MAX: usize = 128;

/// A running prefetch; ends when it is dropped.
pub(super) type Prefetching = Arc<()>;

/// Starts the prefetch of these plans, if the source is remote and the setting says so.
pub(super) fn prefetch(checkpoint: &Arc<Checkpoint>, plans: &[Arc<Plan>], setting: Prefetch) -> Option<Prefetching> {
    checkpoint.source().remote()?;
    let lists_a_part = plans.iter().any(|plan| (plan.devices.len() as u64) < plan.mesh.devices());
    let wanted = match setting {
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

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Instant,
    };

    use super::*;

    #[test]
    fn panics_end_no_upkeep() {
        let (tell, told) = mpsc::channel();
        let checks = AtomicUsize::new(0);
        let check = move || {
            let count = checks.fetch_add(1, Ordering::Relaxed);
            assert!(count >= 2 * CHECKERS_MAX, "a check that panics");
            let _ = tell.send(());
        };
        let upkeeping = repeat(Duration::from_millis(1), || panic!("work that panics"), check).unwrap();
        told.recv_timeout(Duration::from_secs(20)).expect("checks go on after panics");
        drop(upkeeping);
        let until = Instant::now() + Duration::from_secs(20);
        while told.recv_timeout(Duration::from_millis(100)) != Err(mpsc::RecvTimeoutError::Disconnected) {
            assert!(Instant::now() < until, "it ends with its owner");
        }
    }
}
