//! Worker threads. They make pieces of materialized files, which go first, and compute ahead of readers. A job of the second kind
//! is optional: it is dropped if the queue is full.

use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use rustix::thread::{Pid, gettid};

/// Most jobs that may wait. More would be stale before they ran.
const QUEUE_MAX: usize = 64;

/// Most substitutes for threads that wait for storage.
const SPARES_MAX: usize = 64;

type QueuedJob = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Jobs {
    /// Jobs that a reader or an opening waits for.
    awaited: VecDeque<QueuedJob>,
    ahead: VecDeque<QueuedJob>,
    /// Threads without a job; the one that became idle last is last.
    idle: Vec<Arc<IdleWorker>>,
    /// All threads that run.
    threads: Vec<Pid>,
    /// Threads beyond the usual number, and how many there should be.
    spares: usize,
    spares_wanted: usize,
    ended: bool,
}

/// A thread as it waits for a job.
struct IdleWorker {
    thread: Pid,
    wake: Condvar,
}

#[derive(Default)]
struct JobQueue {
    jobs: Mutex<Jobs>,
}

/// A fixed number of threads and their queue.
pub(super) struct Workers {
    queue: Arc<JobQueue>,
    count: usize,
}

impl Workers {
    /// Starts `count` threads, named `name` with a number; if the system refuses some, there are fewer.
    pub(super) fn new(name: &str, count: usize) -> Self {
        let queue = Arc::new(JobQueue::default());
        let started = (0..count).filter(|index| {
            let queue = Arc::clone(&queue);
            thread::Builder::new().name(format!("{name}-{index}")).spawn(move || work(&queue, false)).is_ok()
        });
        Self { count: started.count(), queue }
    }

    /// The usual number of threads.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Starts one substitute for each of these threads in `waiting`, the threads that wait for storage, so that the usual
    /// number can work at any time. Substitutes end when they are idle and no longer needed.
    pub(super) fn replace_waiting(&self, waiting: &[i32]) {
        let mut jobs = self.queue.lock();
        let stuck = jobs.threads.iter().filter(|thread| waiting.contains(&thread.as_raw_nonzero().get())).count();
        jobs.spares_wanted = stuck.min(SPARES_MAX);
        let missing = jobs.spares_wanted.saturating_sub(jobs.spares);
        for _ in 0..missing {
            let queue = Arc::clone(&self.queue);
            if thread::Builder::new().name("ckfs-spare".to_owned()).spawn(move || work(&queue, true)).is_ok() {
                jobs.spares += 1;
            }
        }
        if jobs.spares > jobs.spares_wanted {
            // Idle substitutes check whether they are still needed.
            for worker in std::mem::take(&mut jobs.idle) {
                worker.wake.notify_one();
            }
        }
    }

    /// Queues a job, unless too many wait.
    pub(super) fn offer(&self, job: impl FnOnce() + Send + 'static) {
        let mut jobs = self.queue.lock();
        if self.count > 0 && jobs.ahead.len() < QUEUE_MAX {
            jobs.ahead.push_back(Box::new(job));
            let worker = jobs.idle.pop();
            drop(jobs);
            if let Some(worker) = worker {
                worker.wake.notify_one();
            }
        }
    }

    /// Queues a job before all offered ones. Without threads the caller runs it at once.
    pub(super) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        if self.count == 0 {
            return job();
        }
        if let Some(worker) = self.queue.add(Box::new(job)) {
            worker.wake.notify_one();
        }
    }
}

impl JobQueue {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job that a caller waits for. Returns the thread to wake for it, if one is idle.
    fn add(&self, job: QueuedJob) -> Option<Arc<IdleWorker>> {
        let mut jobs = self.lock();
        jobs.awaited.push_back(job);
        jobs.idle.pop()
    }
}

fn work(queue: &JobQueue, spare: bool) {
    let worker = Arc::new(IdleWorker { thread: gettid(), wake: Condvar::new() });
    queue.lock().threads.push(worker.thread);
    while let Some(job) = queue.next(&worker, spare) {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("a computation panicked; a read that needs its bytes will repeat it");
        }
    }
}

impl JobQueue {
    /// The next job of a thread; waits for one. `None` if the thread should end.
    fn next(&self, worker: &Arc<IdleWorker>, spare: bool) -> Option<QueuedJob> {
        let mut jobs = self.lock();
        loop {
            let unwanted = spare && jobs.spares > jobs.spares_wanted;
            if jobs.ended || unwanted {
                jobs.spares -= usize::from(spare);
                jobs.threads.retain(|thread| *thread != worker.thread);
                return None;
            }
            if let Some(job) = jobs.awaited.pop_front().or_else(|| jobs.ahead.pop_front()) {
                return Some(job);
            }
            jobs.idle.push(Arc::clone(worker));
            // The thread that wakes this worker removes it from the list.
            while jobs.idle.iter().any(|idle| Arc::ptr_eq(idle, worker)) {
                jobs = worker.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Drop for Workers {
    /// Tells the threads to end. They are not waited for: this may run on one of them.
    fn drop(&mut self) {
        let mut jobs = self.queue.lock();
        jobs.ended = true;
        for worker in jobs.idle.drain(..) {
            worker.wake.notify_one();
        }
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} workers", self.count)
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
        assert_eq!(workers.queue.lock().spares, 1);
        go.send(()).unwrap();
        workers.replace_waiting(&[]);
        let until = std::time::Instant::now() + Duration::from_secs(30);
        while workers.queue.lock().spares > 0 && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(workers.queue.lock().threads, [stuck]);
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
