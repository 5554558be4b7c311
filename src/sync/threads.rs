//! The process's threads, counted by use, and the helpers of a thread that has more work than one thread does in time.
//!
//! Each use has a name, which its threads have too (`ckfs-fetch`). [`running`] is what `ckfs status` shows.

use std::{
    collections::BTreeMap,
    io,
    num::NonZeroUsize,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
};

/// Threads that run, by use.
static RUNNING: Mutex<BTreeMap<&'static str, usize>> = Mutex::new(BTreeMap::new());

fn running_now() -> MutexGuard<'static, BTreeMap<&'static str, usize>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The threads that run now, by the name of their use: those of pools, helpers, and those that [`spawn`] started.
pub fn running() -> Vec<(&'static str, usize)> {
    running_now().iter().filter(|(_, count)| **count > 0).map(|(name, count)| (*name, *count)).collect()
}

/// Threads that can run at a time, as it was when it was first asked for: to find it out takes reads of several files.
pub fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| thread::available_parallelism().map_or(1, NonZeroUsize::get))
}

/// A thread that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct CountedThread(&'static str);

impl CountedThread {
    pub(crate) fn new(name: &'static str) -> Self {
        *running_now().entry(name).or_default() += 1;
        Self(name)
    }

    /// Work that is counted until it ends.
    pub(crate) fn around<F: FnOnce()>(self, work: F) -> impl FnOnce() + use<F> {
        move || {
            let _counted = self;
            work();
        }
    }

    /// Counts a thread if fewer than `most` of its use run.
    fn below(name: &'static str, most: usize) -> Option<Self> {
        let mut running = running_now();
        let count = running.entry(name).or_default();
        (*count < most).then(|| {
            *count += 1;
            Self(name)
        })
    }
}

impl Drop for CountedThread {
    fn drop(&mut self) {
        if let Some(count) = running_now().get_mut(self.0) {
            *count -= 1;
        }
    }
}

/// Starts a thread that is counted.
///
/// # Errors
/// The system starts none.
pub fn spawn(name: &'static str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let work = CountedThread::new(name).around(work);
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// A use of threads that are started for one job each, with the most of them at a time in the process.
#[derive(Debug)]
pub struct Helpers {
    name: &'static str,
    most: fn() -> usize,
}

impl Helpers {
    /// A use of this name, with at most `most()` threads.
    pub const fn new(name: &'static str, most: fn() -> usize) -> Self {
        Self { name, most }
    }

    /// Starts a thread for `work`. False if there are enough, or the system starts none.
    pub fn spawn(&self, work: impl FnOnce() + Send + 'static) -> bool {
        let Some(counted) = CountedThread::below(self.name, (self.most)()) else { return false };
        thread::Builder::new().name(self.name.to_owned()).spawn(counted.around(work)).is_ok()
    }

    /// Runs `own` here and `help` in up to `count` threads beside it; returns when all have ended. `own` must be able to do all of
    /// the work: there are fewer threads if others have them, or the system starts no more.
    ///
    /// # Panics
    /// If `help` does in a thread.
    pub fn beside<R>(&self, count: usize, help: impl Fn() + Sync, own: impl FnOnce() -> R) -> R {
        let (help, most) = (&help, (self.most)());
        thread::scope(|scope| {
            for counted in (0..count).map_while(|_| CountedThread::below(self.name, most)) {
                let work = counted.around(help);
                if let Err(error) = thread::Builder::new().name(self.name.to_owned()).spawn_scoped(scope, work) {
                    tracing::debug!("{}: no more threads: {error}", self.name);
                    break;
                }
            }
            own()
        })
    }

    /// Passes each item to `work`, in at most `most` threads, of which this is one; after a failure no more of them.
    ///
    /// # Errors
    /// The first failure.
    ///
    /// # Panics
    /// If `work` does in a thread.
    pub fn each<T: Send, E: Send + Sync>(
        &self,
        most: usize,
        items: Vec<T>,
        work: impl Fn(T) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let helpers = most.min(items.len()).saturating_sub(1);
        let (left, failure) = (Mutex::new(items.into_iter()), OnceLock::new());
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while failure.get().is_none()
                && let Some(item) = next()
            {
                if let Err(error) = work(item) {
                    failure.get_or_init(|| error);
                }
            }
        };
        self.beside(helpers, work, work);
        failure.into_inner().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    };

    use super::*;

    fn count(name: &str) -> usize {
        running().iter().find(|(found, _)| *found == name).map_or(0, |(_, count)| *count)
    }

    #[test]
    fn helpers_are_counted_and_no_more_than_allowed() {
        static USE: Helpers = Helpers::new("test-beside", || 3);
        let (begun, ended) = (Barrier::new(4), AtomicUsize::new(0));
        let help = || {
            begun.wait();
            ended.fetch_add(1, Ordering::SeqCst);
        };
        let found = USE.beside(9, help, || {
            let found = count("test-beside");
            begun.wait();
            found
        });
        assert_eq!((found, ended.into_inner(), count("test-beside")), (3, 3, 0));
        assert_eq!(USE.beside(0, || panic!("no help is wanted"), || 7), 7);
    }

    #[test]
    fn each_item_is_passed_once_and_none_after_a_failure() {
        static USE: Helpers = Helpers::new("test-each", || 3);
        let (met, sum) = (Barrier::new(4), AtomicUsize::new(0));
        let done = USE.each(4, (1..=8).collect(), |item| {
            met.wait();
            sum.fetch_add(item, Ordering::SeqCst);
            Ok::<(), ()>(())
        });
        assert_eq!((done, sum.into_inner()), (Ok(()), 36), "by four at a time");
        let passed = Mutex::new(Vec::new());
        let failed = USE.each(1, vec![1, 2, 3, 4], |item| {
            passed.lock().unwrap().push(item);
            if item < 2 { Ok(()) } else { Err(item) }
        });
        assert_eq!((failed, passed.into_inner().unwrap()), (Err(2), vec![1, 2]));
    }

    #[test]
    fn a_thread_that_is_one_too_many_is_refused() {
        static USE: Helpers = Helpers::new("test-spawn", || 1);
        let (go, wait) = mpsc::channel::<()>();
        assert!(USE.spawn(move || wait.recv().unwrap()));
        assert!(!USE.spawn(|| ()) && count("test-spawn") == 1);
        go.send(()).unwrap();
        while count("test-spawn") > 0 {
            thread::yield_now();
        }
        assert!(USE.spawn(|| ()));
    }

    #[test]
    fn a_panic_ends_the_count() {
        static USE: Helpers = Helpers::new("test-panic", || 1);
        let panicked = std::panic::catch_unwind(|| USE.beside(1, || panic!("as a test"), || ()));
        assert!(panicked.is_err() && count("test-panic") == 0);
    }
}
