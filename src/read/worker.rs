//! Worker threads. They make pieces of materialized files, which go first, and compute ahead of readers. A job of the second kind
//! is optional: it is dropped if the queue is full.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use ckfs_sync::{BoxedJob, Pool, PoolOptions, Queue};
use parking_lot::Mutex;
use rustix::thread::{Pid, gettid};

/// Most jobs that may wait. More would be stale before they ran.
const QUEUE_MAX: usize = 64;

/// Most substitutes for threads that wait for storage.
const SPARES_MAX: usize = 64;

/// A thread ends after this time without a job.
const IDLE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct WorkQueue {
    /// Jobs that a reader or an opening waits for.
    awaited: VecDeque<BoxedJob>,
    ahead: VecDeque<BoxedJob>,
}

impl Queue for WorkQueue {
    type Job = BoxedJob;
    type Done = ();

    fn take(&mut self) -> Option<BoxedJob> {
        self.awaited.pop_front().or_else(|| self.ahead.pop_front())
    }

    fn ready(&self) -> usize {
        self.awaited.len() + self.ahead.len()
    }

    fn done(&mut self, (): ()) {}
}

/// Threads inside jobs.
type Busy = Arc<Mutex<Vec<Pid>>>;

/// Notes that this thread is inside a job, until it is dropped.
struct BusyThread<'a>(&'a Busy, Pid);

impl Drop for BusyThread<'_> {
    fn drop(&mut self) {
        self.0.lock().retain(|thread| *thread != self.1);
    }
}

/// Threads and their queue.
pub(super) struct Workers {
    pool: Pool<WorkQueue>,
    busy: Busy,
    /// The usual number of threads.
    pub(super) count: usize,
}

impl Workers {
    /// At most `count` threads.
    pub(super) fn new(name: &'static str, count: usize) -> Self {
        let busy = Busy::default();
        let of_job = Arc::clone(&busy);
        let run = move |job: BoxedJob| {
            let thread = gettid();
            of_job.lock().push(thread);
            let _busy = BusyThread(&of_job, thread);
            job();
        };
        let options = PoolOptions { name, threads_max: count, idle: IDLE };
        Self { pool: Pool::new(options, WorkQueue::default(), run), busy, count }
    }

    /// Allows one substitute for each of these threads in `waiting`, the threads that wait for storage, so that the usual
    /// number can work at any time. Substitutes end when they are no longer needed.
    pub(super) fn replace_waiting(&self, waiting: &[i32]) {
        let is_stuck = |thread: &&Pid| waiting.contains(&thread.as_raw_nonzero().get());
        let stuck = self.busy.lock().iter().filter(is_stuck).count();
        self.pool.set_threads_max(self.count + stuck.min(SPARES_MAX));
    }

    /// Queues a job, unless too many wait.
    pub(super) fn offer(&self, job: impl FnOnce() + Send + 'static) {
        if self.count > 0 {
            self.pool.update(|queue, _| {
                if queue.ahead.len() < QUEUE_MAX {
                    queue.ahead.push_back(Box::new(job));
                }
            });
        }
    }

    /// Queues a job before all offered ones. Without threads the caller runs it at once.
    pub(super) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        if self.count == 0 {
            return job();
        }
        self.pool.update(|queue, _| queue.awaited.push_back(Box::new(job)));
        while let Some(job) = self.pool.take_refused(|queue, _| queue.awaited.pop_front()) {
            job();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[test]
    fn every_job_is_done() {
        let workers = Workers::new("test", 3);
        let (tell, told) = mpsc::channel();
        for _ in 0..200 {
            let job = |kind: u32| {
                let tell = tell.clone();
                move || tell.send(kind).unwrap()
            };
            workers.submit(job(0));
            workers.submit(job(1));
            workers.offer(job(2));
            let mut kinds = Vec::new();
            for _ in 0..3 {
                kinds.push(told.recv_timeout(Duration::from_secs(30)).unwrap());
            }
            kinds.sort_unstable();
            assert_eq!(kinds, [0, 1, 2]);
        }
    }

    #[test]
    fn a_thread_that_waits_for_storage_is_replaced_meanwhile() {
        let workers = Workers::new("test", 1);
        let (tell, told) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let tell_thread = tell.clone();
        workers.submit(move || {
            tell_thread.send(gettid()).unwrap();
            wait.recv().unwrap();
        });
        let stuck = told.recv_timeout(Duration::from_secs(30)).unwrap();
        workers.submit(move || tell.send(gettid()).unwrap());
        told.recv_timeout(Duration::from_millis(50)).unwrap_err();
        workers.replace_waiting(&[stuck.as_raw_nonzero().get(), 1]);
        assert_ne!(told.recv_timeout(Duration::from_secs(30)).unwrap(), stuck);
        assert_eq!(workers.pool.threads().all, 2);
        go.send(()).unwrap();
        workers.replace_waiting(&[]);
        let until = std::time::Instant::now() + Duration::from_secs(30);
        // One of them ends with its next job.
        while workers.pool.threads().all > 1 && std::time::Instant::now() < until {
            workers.submit(|| ());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(workers.pool.threads().all, 1);
    }

    #[test]
    fn a_panic_ends_no_thread_and_without_threads_jobs_are_done_at_once() {
        for count in [0, 1] {
            let workers = Workers::new("test", count);
            let (tell, told) = mpsc::channel();
            if count > 0 {
                workers.submit(|| panic!("as a test"));
            }
            workers.submit(move || tell.send(()).unwrap());
            told.recv_timeout(Duration::from_secs(30)).unwrap();
        }
    }
}
