//! The threads of a way in that handle requests, and those that stand in for them while storage gives no answer.

use std::{collections::VecDeque, time::Duration};

use ckfs_sync::{BoxedJob, Pool, PoolOptions};
use parking_lot::Mutex;

/// The threads that take and handle requests, as the watchdog sees them.
pub trait Handlers: Send + Sync + 'static {
    /// Makes sure that a thread takes requests although others wait for storage, which `is_waiting` tells. Whether there were requests
    /// since the last call.
    fn tend(&self, is_waiting: &dyn Fn() -> bool) -> bool;

    /// The threads that stand in for others.
    fn stand_ins(&self) -> Vec<&WaitingThreads>;
}

/// Threads whose requests were given up and that others stand in for, at most. Programs can be killed and started again without
/// end while storage gives no answer.
const STUCK_MAX: usize = 256;

/// How long a thread waits for a request.
const IDLE: Duration = Duration::from_secs(10);

/// Threads beyond the usual ones.
#[derive(Debug, Default)]
struct Beyond {
    extra: usize,
    /// Those that wait for storage although their request was answered.
    stuck: usize,
}

/// Handles requests that may wait for storage, each in a thread, which are started when needed. More requests than threads wait in
/// a queue.
pub struct WaitingThreads {
    pool: Pool<VecDeque<BoxedJob>>,
    usual: usize,
    beyond: Mutex<Beyond>,
}

impl WaitingThreads {
    /// At most `usual` threads of a name, not counting those whose requests were given up.
    pub fn new(name: &'static str, usual: usize) -> Self {
        let options = PoolOptions { name, threads_max: usual, idle: IDLE };
        Self { pool: Pool::of_closures(options), usual, beyond: Mutex::default() }
    }

    /// Has a job done. Dropped undone if there is no thread and the system starts none.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        self.pool.submit(job);
        let refused = || {
            self.pool.take_refused(|jobs, error| {
                tracing::error!("cannot start a thread for a request: {error}");
                jobs.pop_front()
            })
        };
        while let Some(undone) = refused() {
            drop(undone);
        }
    }

    /// Jobs that wait for a thread.
    pub fn queued(&self) -> usize {
        self.pool.look(VecDeque::len)
    }

    /// Changes how many threads there may be beyond the usual ones.
    pub fn change_extra(&self, change: impl FnOnce(usize) -> usize) {
        self.change(|beyond| beyond.extra = change(beyond.extra));
    }

    /// Notes that a thread's request was given up, so that another may stand in for it; or that such a thread is back.
    pub(super) fn note_stuck(&self, is_stuck: bool) {
        self.change(|beyond| if is_stuck { beyond.stuck += 1 } else { beyond.stuck -= 1 });
    }

    fn change(&self, change: impl FnOnce(&mut Beyond)) {
        let mut beyond = self.beyond.lock();
        change(&mut beyond);
        self.pool.set_threads_max(self.usual + beyond.extra + beyond.stuck.min(STUCK_MAX));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn jobs_that_wait_do_not_keep_others_and_what_is_lost_is_replaced() {
        const USUAL: usize = 64;
        let threads = Arc::new(WaitingThreads::new("ckfs-test", USUAL));
        let (tell, told) = mpsc::channel();
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock();
        for _ in 0..USUAL {
            let (tell, gate) = (tell.clone(), Arc::clone(&gate));
            threads.submit(move || {
                tell.send("begun").unwrap();
                drop(gate.lock());
            });
        }
        for _ in 0..USUAL {
            assert_eq!(told.recv_timeout(SOON), Ok("begun"));
        }
        let other = tell.clone();
        threads.submit(move || other.send("queued").unwrap());
        told.recv_timeout(Duration::from_millis(20)).unwrap_err();
        assert_eq!(threads.queued(), 1);
        threads.note_stuck(true);
        assert_eq!(told.recv_timeout(SOON), Ok("queued"));
        threads.note_stuck(false);
        drop(closed);
    }
}
