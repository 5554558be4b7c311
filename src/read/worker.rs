//! Threads that compute: ahead of readers, where a job that finds no room is dropped and nobody misses it, and whole files
//! for those who wait for them, which goes first.

use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

/// Jobs that may wait; more would be stale before they ran.
const QUEUE_MAX: usize = 64;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Jobs {
    /// Somebody waits for these.
    awaited: VecDeque<Job>,
    ahead: VecDeque<Job>,
    ended: bool,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

/// A fixed number of threads and their queue.
pub(super) struct Workers {
    queue: Arc<Queue>,
    count: usize,
}

impl Workers {
    /// Starts `count` threads; if the system refuses some, there are fewer.
    pub(super) fn new(count: usize) -> Self {
        let queue = Arc::new(Queue::default());
        let started = (0..count).filter(|index| {
            let queue = Arc::clone(&queue);
            thread::Builder::new().name(format!("ckfs-ahead-{index}")).spawn(move || work(&queue)).is_ok()
        });
        Self { count: started.count(), queue }
    }

    /// Threads there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Queues a job, unless too many wait.
    pub(super) fn offer(&self, job: impl FnOnce() + Send + 'static) {
        let mut jobs = self.queue.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if self.count > 0 && jobs.ahead.len() < QUEUE_MAX {
            jobs.ahead.push_back(Box::new(job));
            drop(jobs);
            self.queue.more.notify_one();
        }
    }

    /// Queues a job before all that were only offered. Without threads it is done at once.
    pub(super) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        if self.count == 0 {
            return job();
        }
        self.queue.jobs.lock().unwrap_or_else(PoisonError::into_inner).awaited.push_back(Box::new(job));
        self.queue.more.notify_one();
    }
}

fn work(queue: &Queue) {
    loop {
        let mut jobs = queue.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let job = loop {
            if jobs.ended {
                return;
            }
            match jobs.awaited.pop_front().or_else(|| jobs.ahead.pop_front()) {
                Some(job) => break job,
                None => jobs = queue.more.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(jobs);
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("a computation panicked; who needs its bytes will meet it again");
        }
    }
}

impl Drop for Workers {
    /// Tells the threads to end. They are not waited for: this may run on one of them.
    fn drop(&mut self) {
        self.queue.jobs.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        self.queue.more.notify_all();
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} workers", self.count)
    }
}
