//! An elastic pool of threads over a queue.
//!
//! A thread starts when a job waits that no thread is coming for, up to a bound, and ends after it had no job for a while. The
//! thread that became idle last is woken first: its memory is in the processor's caches, and the others get to their end.
//!
//! Each pool has its kind of queue ([`Queue`]), which decides what is next. It is changed under the pool's lock
//! ([`Pool::update`]), and threads are woken or started as it then needs.
//!
//! A job must not wait for another job of its pool, unless it can run that one itself: all threads may be such jobs.

use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use super::{
    primitives::{Condvar, Mutex, lock, thread, wait},
    threads::CountedThread,
};

/// The jobs of a pool, and which one is next.
pub trait Queue: Send + 'static {
    /// A job.
    type Job: Send;
    /// What comes of a job that did not panic.
    type Done;

    /// Takes the job that is to run next; none if none may run now.
    fn take(&mut self) -> Option<Self::Job>;

    /// Number of jobs that [`Self::take`] would give now to as many threads.
    fn ready(&self) -> usize;

    /// Notes the end of a job.
    fn done(&mut self, done: Self::Done);
}

/// A job that is a closure.
pub type BoxedJob = Box<dyn FnOnce() + Send>;

impl Queue for VecDeque<BoxedJob> {
    type Job = BoxedJob;
    type Done = ();

    fn take(&mut self) -> Option<BoxedJob> {
        self.pop_front()
    }

    fn ready(&self) -> usize {
        self.len()
    }

    fn done(&mut self, (): ()) {}
}

/// Limits of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// Name of its threads.
    pub name: &'static str,
    /// Most threads.
    pub threads_max: usize,
    /// Time without a job after which a thread ends.
    pub idle: Duration,
}

/// Threads of a pool now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolThreads {
    /// All of them.
    pub all: usize,
    /// Those without a job.
    pub idle: usize,
}

struct State<Q> {
    queue: Q,
    threads_max: usize,
    threads: usize,
    /// What wakes each thread without a job.
    idle: Vec<Arc<Condvar>>,
    /// Threads that were woken or started and have not looked at the queue since.
    coming: usize,
    /// Why the last attempt to start a thread failed.
    refusal: Option<io::Error>,
    ended: bool,
}

struct Shared<Q: Queue> {
    name: &'static str,
    idle: Duration,
    run: Box<dyn Fn(Q::Job) -> Q::Done + Send + Sync>,
    state: Mutex<State<Q>>,
}

/// The pool. Dropping it lets its threads finish the queue, and end; they are not waited for, since this may run on one of them.
pub struct Pool<Q: Queue> {
    shared: Arc<Shared<Q>>,
}

impl Pool<VecDeque<BoxedJob>> {
    /// A pool of closures, run in their order.
    pub fn of_closures(options: PoolOptions) -> Self {
        Self::new(options, VecDeque::new(), |job| job())
    }

    /// Queues a job.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        self.update(|queue, _| queue.push_back(Box::new(job)));
    }
}

impl<Q: Queue> Pool<Q> {
    /// A pool whose threads call `run` with each job.
    pub fn new(options: PoolOptions, queue: Q, run: impl Fn(Q::Job) -> Q::Done + Send + Sync + 'static) -> Self {
        let PoolOptions { name, threads_max, idle } = options;
        let state = State { queue, threads_max, threads: 0, idle: Vec::new(), coming: 0, refusal: None, ended: false };
        Self { shared: Arc::new(Shared { name, idle, run: Box::new(run), state: Mutex::new(state) }) }
    }

    /// Changes the queue, which receives the present number of threads, and starts or wakes threads for what is ready then.
    pub fn update<R>(&self, change: impl FnOnce(&mut Q, PoolThreads) -> R) -> R {
        let mut state = lock(&self.shared.state);
        let threads = state.threads();
        let result = change(&mut state.queue, threads);
        self.shared.call_threads(&mut state);
        result
    }

    /// Looks at the queue. Nothing may become ready by that.
    pub fn look<R>(&self, look: impl FnOnce(&Q) -> R) -> R {
        look(&lock(&self.shared.state).queue)
    }

    /// Changes the most threads. Beyond it, threads end once their job has.
    pub fn set_threads_max(&self, threads_max: usize) {
        let mut state = lock(&self.shared.state);
        state.threads_max = threads_max;
        self.shared.call_threads(&mut state);
    }

    /// Takes something from the queue if the pool has no thread and the system starts none: the caller then runs or drops it. The
    /// reason is passed too.
    pub fn take_refused<R>(&self, take: impl FnOnce(&mut Q, &io::Error) -> Option<R>) -> Option<R> {
        let state = &mut *lock(&self.shared.state);
        let refusal = state.refusal.as_ref().filter(|_| state.threads == 0)?;
        take(&mut state.queue, refusal)
    }

    /// Its threads now.
    pub fn threads(&self) -> PoolThreads {
        lock(&self.shared.state).threads()
    }
}

impl<Q: Queue> Drop for Pool<Q> {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.ended = true;
        for idle in std::mem::take(&mut state.idle) {
            state.coming += 1;
            idle.notify_one();
        }
    }
}

impl<Q> State<Q> {
    fn threads(&self) -> PoolThreads {
        PoolThreads { all: self.threads, idle: self.idle.len() }
    }
}

impl<Q: Queue> Shared<Q> {
    /// Wakes or starts a thread for each job that is ready and that none is coming for.
    fn call_threads(self: &Arc<Self>, state: &mut State<Q>) {
        while state.queue.ready() > state.coming {
            if let Some(idle) = state.idle.pop() {
                idle.notify_one();
            } else if state.threads >= state.threads_max {
                return;
            } else {
                let shared = Arc::clone(self);
                let work = CountedThread::new(self.name).around(move || shared.work());
                if let Err(error) = thread::Builder::new().name(self.name.to_owned()).spawn(work) {
                    tracing::debug!("{}: no thread could be started: {error}", self.name);
                    state.refusal = Some(error);
                    return;
                }
                state.refusal = None;
                state.threads += 1;
            }
            state.coming += 1;
        }
    }

    fn work(self: &Arc<Self>) {
        let me = Arc::new(Condvar::new());
        let mut state = lock(&self.state);
        state.coming -= 1;
        while state.threads <= state.threads_max {
            if let Some(job) = state.queue.take() {
                // What else is ready may be so only since the last job ended.
                self.call_threads(&mut state);
                drop(state);
                let done = catch_unwind(AssertUnwindSafe(|| (self.run)(job)));
                state = lock(&self.state);
                if let Ok(done) = done {
                    state.queue.done(done);
                } else {
                    tracing::error!("{}: a job panicked", self.name);
                }
                continue;
            }
            if state.ended {
                break;
            }
            state.idle.push(Arc::clone(&me));
            let is_idle = |state: &State<Q>| state.idle.iter().any(|idle| Arc::ptr_eq(idle, &me));
            let mut is_over = false;
            while is_idle(&state) && !is_over {
                (state, is_over) = wait(&me, &self.state, state, self.idle);
            }
            if is_idle(&state) {
                state.idle.retain(|idle| !Arc::ptr_eq(idle, &me));
                break;
            }
            // Who wakes a thread takes it from the list.
            state.coming -= 1;
        }
        state.threads -= 1;
        // A job that this thread was woken for is left to others.
        self.call_threads(&mut state);
    }
}
