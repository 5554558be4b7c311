//! Repeated work: memory of closed files is released, sources in use are checked.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

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
