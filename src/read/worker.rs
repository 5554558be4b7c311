//! Threads that compute ahead of readers. Never needed for progress: a job that finds no room is dropped.

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
struct Queue {
    jobs: Mutex<(VecDeque<Job>, bool)>,
    more: Condvar,
}

/// A fixed number of threads and a bounded queue.
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

    /// Queues a job, unless the queue is full.
    pub(super) fn offer(&self, job: impl FnOnce() + Send + 'static) {
        let mut jobs = self.queue.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if self.count > 0 && jobs.0.len() < QUEUE_MAX {
            jobs.0.push_back(Box::new(job));
            drop(jobs);
            self.queue.more.notify_one();
        }
    }
}

fn work(queue: &Queue) {
    loop {
        let mut jobs = queue.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let job = loop {
            if jobs.1 {
                return;
            }
            match jobs.0.pop_front() {
                Some(job) => break job,
                None => jobs = queue.more.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(jobs);
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("a computation ahead of a reader panicked; the reader will repeat it");
        }
    }
}

impl Drop for Workers {
    /// Tells the threads to end. They are not waited for: this may run on one of them.
    fn drop(&mut self) {
        self.queue.jobs.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.queue.more.notify_all();
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} workers", self.count)
    }
}
