//! Fetches blocks into the cache: many requests at a time, those that readers wait for first.
//!
//! A demand for blocks becomes jobs, each one request of at most some MiB. A block that a job has already is not requested twice:
//! the reader waits for that job, and takes it to the front of the queue. Other processes that fetch the same blocks are found by
//! locks; their blocks are waited for.
//!
//! Memory is bounded by the threads: each has one chunk of a reply at a time.

use std::{
    collections::VecDeque,
    io,
    ops::{ControlFlow, Range},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ckfs_sync::{ChangeCount, Pool, PoolOptions, PoolThreads, Queue};

use super::{
    cache::{
        BLOCK_BYTES, Cache,
        geometry::{place, span_of},
    },
    counters::RemoteCounters,
    error::{Failure, RemoteError},
    object::{FetchError, Job, RemoteObject},
    retry::Deadline,
};

const MIB_BLOCKS: u64 = (1 << 20) / BLOCK_BYTES;
/// Blocks of one request, on average. Equal parts of a range are requested, so that no request has only what is left.
const REQUEST_BLOCKS: u64 = 8 * MIB_BLOCKS;
/// Requests that share a line and are of one length end together, and the line is then idle until the next ones are answered. So the
/// first requests of a busy time are of different lengths, from half of the usual one to one and a half, in this number of steps.
/// Those that follow begin one after another.
const STEPS: u64 = 32;
/// Shorter requests are no step.
const STEP_BLOCKS_MIN: u64 = MIB_BLOCKS;
/// Requests at a time.
const THREADS: usize = 40;
/// Of these, most for blocks that no reader waits for.
const AHEAD_THREADS: usize = 32;
/// Most jobs in the queue that no reader waits for.
const AHEAD_JOBS_MAX: usize = 4096;
/// Bytes that are written to the cache at a time.
const CHUNK_BYTES: u64 = 256 << 10;
/// A thread without work ends after this time.
const IDLE: Duration = Duration::from_secs(20);
/// A thread looks after this time whether another process has brought its blocks.
const LOOK: Duration = Duration::from_millis(10);
/// After this time without a new block by the other process, its blocks are fetched here as well.
const OTHER_PROCESS_MAX: Duration = Duration::from_secs(5);
/// Attempts to have all blocks of a demand at one time. More fail only where the cache is far too small.
const ROUNDS_MAX: usize = 6;

/// Ranges of blocks of one object.
pub(super) type Demand = (Arc<RemoteObject>, Vec<Range<u64>>);

/// Fetches blocks into the cache.
pub struct Fetcher {
    shared: Arc<Shared>,
    pool: Pool<JobQueue>,
}

#[derive(Debug)]
struct Shared {
    cache: Arc<Cache>,
    /// Blocks that came, and jobs that ended.
    progress: ChangeCount,
    closed: AtomicBool,
}

#[derive(Default)]
struct JobQueue {
    urgent: VecDeque<Arc<Job>>,
    ahead: VecDeque<Arc<Job>>,
    ahead_running: usize,
    /// Requests made since no thread had work, as far as they count as steps.
    steps: u64,
}

/// A job that begins, and whether a reader waits for it.
type BegunJob = (Arc<Job>, bool);

impl JobQueue {
    /// Steps so far in this busy time.
    fn steps(&mut self, threads: PoolThreads) -> u64 {
        if threads.idle == threads.all && self.urgent.is_empty() && self.ahead.is_empty() {
            self.steps = 0;
        }
        self.steps
    }

    fn take_urgent(&mut self) -> Option<Arc<Job>> {
        std::iter::from_fn(|| self.urgent.pop_front()).find(|job| job.begin())
    }

    /// Jobs that no reader waits for and that may begin now.
    fn ahead_free(&self) -> usize {
        self.ahead.len().min(AHEAD_THREADS.saturating_sub(self.ahead_running))
    }
}

impl Queue for JobQueue {
    type Job = BegunJob;
    /// With whether it ended: else another process has it, and it is to be looked at again.
    type Done = (BegunJob, bool);

    fn take(&mut self) -> Option<BegunJob> {
        if let Some(job) = self.take_urgent() {
            return Some((job, true));
        }
        while self.ahead_free() > 0 {
            // One that a reader waits for by now may have been run as such.
            if let Some(job) = self.ahead.pop_front().filter(|job| job.begin()) {
                self.ahead_running += 1;
                return Some((job, false));
            }
        }
        None
    }

    fn ready(&self) -> usize {
        self.urgent.len() + self.ahead_free()
    }

    fn done(&mut self, ((job, is_urgent), is_done): (BegunJob, bool)) {
        self.ahead_running -= usize::from(!is_urgent);
        if !is_done {
            // Another process has it. A reader may have begun to wait for it meanwhile.
            job.begun.store(false, Ordering::Release);
            if job.ahead.load(Ordering::Acquire) { &mut self.ahead } else { &mut self.urgent }.push_back(job);
        }
    }
}

impl Shared {
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

impl Fetcher {
    /// A fetcher into `cache`. Its threads start when there is work.
    pub fn new(cache: Arc<Cache>) -> Self {
        let shared = Arc::new(Shared { cache, progress: ChangeCount::default(), closed: AtomicBool::new(false) });
        let options = PoolOptions { name: "ckfs-fetch", threads_max: THREADS, idle: IDLE };
        let running = Arc::clone(&shared);
        Self { shared, pool: Pool::new(options, JobQueue::default(), move |job| run(&running, job)) }
    }

    /// The cache.
    pub fn cache(&self) -> &Arc<Cache> {
        &self.shared.cache
    }

    /// Brings blocks and waits until this process has verified all of them. Gaps of at most `gap_blocks` within the ranges of one
    /// object are fetched with them. The blocks may be evicted again at once: the caller takes guards and looks again.
    ///
    /// # Errors
    /// The first reason why blocks do not come, or that the deadline is over.
    pub fn fetch(&self, demands: &[Demand], gap_blocks: u64, deadline: Deadline) -> Result<(), FetchError> {
        // Of the last round, if a job of it failed.
        let mut failed = None;
        for _ in 0..ROUNDS_MAX {
            let mut missing = Vec::new();
            for (object, ranges) in demands {
                let absent = verify(object, ranges)?;
                if !absent.is_empty() {
                    missing.push((object, absent));
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            let mut awaited = Vec::new();
            for (object, absent) in &missing {
                let bytes: u64 = absent.iter().map(|blocks| object.entry.span_of(blocks).len()).sum();
                RemoteCounters::add(&self.cache().counters().miss_bytes, bytes);
                self.enqueue(object, &merged(absent, gap_blocks), false, deadline, &mut awaited);
            }
            self.run_without_threads();
            let done = || {
                // A request that was made ahead may never be answered, while a new one is: the next round makes that.
                if awaited.iter().any(|job| job.was_ahead && job.is_stuck()) {
                    return true;
                }
                let failed = |job: &Arc<Job>| matches!(job.outcome.get(), Some(Err(_)));
                awaited.iter().any(failed) || awaited.iter().all(|job| job.outcome.get().is_some()) || {
                    let here = |(object, absent): &(&Arc<RemoteObject>, Vec<Range<u64>>)| {
                        absent.iter().all(|blocks| object.entry.is_verified(blocks))
                    };
                    missing.iter().all(here)
                }
            };
            if !self.wait(deadline, done) {
                let (object, blocks) = (missing[0].0, &missing[0].1[0]);
                return Err(FetchError::Remote(Arc::clone(&object.name), Arc::new(late(object, blocks))));
            }
            let failures =
                awaited.iter().filter_map(|job| Some((job.was_ahead, job.outcome.get()?.as_ref().err()?.clone())));
            let failures: Vec<(bool, FetchError)> = failures.collect();
            // What was made ahead may have failed long ago, or for a reason of that request: this reader then requests it once.
            let are_ahead = !failures.is_empty() && failures.iter().all(|(was_ahead, _)| *was_ahead);
            failed = failures.into_iter().next().map(|(_, failure)| failure);
            if let Some(failure) = &failed {
                // A job that was made for another reader may have had less time.
                let again = match (failure, deadline) {
                    (FetchError::Remote(..), _) if are_ahead => !deadline.is_over(),
                    (FetchError::Remote(_, error), Deadline::At(_)) => error.is_transient() && !deadline.is_over(),
                    (_, _) => false,
                };
                if !again {
                    return Err(failure.clone());
                }
            }
        }
        Err(failed.unwrap_or(FetchError::NoRoom))
    }

    /// Requests blocks that will be needed soon, and does not wait for them. Returns whether the queue had room.
    pub fn prefetch(&self, object: &Arc<RemoteObject>, ranges: &[Range<u64>], gap_blocks: u64) -> bool {
        if self.pool.look(|queue| queue.ahead.len()) >= AHEAD_JOBS_MAX || self.cache().space_of(&object.entry).is_full()
        {
            return false;
        }
        let absent: Vec<Range<u64>> =
            ranges.iter().flat_map(|blocks| object.entry.absent(blocks).unwrap_or_default()).collect();
        if !absent.is_empty() {
            self.enqueue(object, &merged(&absent, gap_blocks), true, Deadline::None, &mut Vec::new());
        }
        true
    }

    /// Number of jobs that wait or run and that no reader waits for.
    pub fn ahead_jobs(&self) -> usize {
        self.pool.look(|queue| queue.ahead.len() + queue.ahead_running)
    }

    /// Waits until `done`, or until the deadline. Returns whether it was done.
    fn wait(&self, deadline: Deadline, mut done: impl FnMut() -> bool) -> bool {
        // Also without news: another process may have brought the blocks.
        const LOOK: Duration = Duration::from_millis(100);
        let mut watch = self.shared.progress.watch();
        loop {
            if done() {
                return true;
            }
            let left = deadline.left().unwrap_or(LOOK).min(LOOK);
            if left.is_zero() {
                return false;
            }
            watch.wait(left);
        }
    }

    /// Makes jobs of the blocks that no job has, and takes those that have some to the front.
    fn enqueue(
        &self,
        object: &Arc<RemoteObject>,
        ranges: &[Range<u64>],
        ahead: bool,
        deadline: Deadline,
        awaited: &mut Vec<Arc<Job>>,
    ) {
        let mut steps = self.pool.update(JobQueue::steps);
        let mut jobs = object.jobs.lock();
        let mut new = Vec::new();
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let mut owner = jobs.iter().find(|job| job.blocks.contains(&start)).cloned();
                if let Some(stuck) = owner.take_if(|job| !ahead && job.is_stuck()) {
                    // Its request may never be answered, while a new one is. It ends without help.
                    jobs.retain(|job| !Arc::ptr_eq(job, &stuck));
                }
                if let Some(job) = owner {
                    start = job.blocks.end;
                    awaited.push(Arc::clone(&job));
                    if !ahead && job.promote(deadline) && job.is_queued() {
                        new.push(job);
                    }
                    continue;
                }
                let next = jobs.iter().map(|job| job.blocks.start).filter(|first| *first > start).min();
                let end = start + first_part(range.end.min(next.unwrap_or(u64::MAX)) - start, steps);
                steps += u64::from(end - start >= STEP_BLOCKS_MIN);
                let job = Arc::new(Job::new(object, start..end, ahead, deadline));
                jobs.push(Arc::clone(&job));
                awaited.push(Arc::clone(&job));
                new.push(job);
                start = end;
            }
        }
        drop(jobs);
        self.pool.update(|queue, _| {
            queue.steps = steps;
            if ahead { &mut queue.ahead } else { &mut queue.urgent }.extend(new);
        });
    }

    /// Runs the urgent jobs here if the system starts no thread.
    fn run_without_threads(&self) {
        while let Some(job) = self.pool.take_refused(|queue, _| queue.take_urgent()) {
            fetch(&self.shared, &job, true);
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        // The jobs hold their objects, and these hold the jobs.
        let left: Vec<Arc<Job>> =
            self.pool.update(|queue, _| queue.urgent.drain(..).chain(queue.ahead.drain(..)).collect());
        for job in left {
            job.end(Err(FetchError::NoRoom));
        }
    }
}

/// Blocks of the first request for `blocks` of them, which is at least 1, after this number of steps.
fn first_part(blocks: u64, steps: u64) -> u64 {
    let usual = if steps < STEPS { REQUEST_BLOCKS / 2 + REQUEST_BLOCKS * steps / STEPS } else { REQUEST_BLOCKS };
    let requests = ((blocks + usual / 2) / usual).max(1);
    if requests > 1 && steps < STEPS { usual } else { blocks.div_ceil(requests) }
}

/// Compares checksums of present blocks. Returns the others.
fn verify(object: &RemoteObject, ranges: &[Range<u64>]) -> Result<Vec<Range<u64>>, FetchError> {
    let failed = |error| FetchError::of_cache(&object.entry, error);
    let mut absent = Vec::new();
    for blocks in ranges {
        let _guards = object.entry.guard(blocks).map_err(failed)?;
        absent.extend(object.entry.missing(blocks).map_err(failed)?);
    }
    Ok(absent)
}

/// Ranges in order, those merged that have a gap of at most `gap` between them.
pub(super) fn merged(ranges: &[Range<u64>], gap: u64) -> Vec<Range<u64>> {
    let mut sorted: Vec<Range<u64>> = ranges.to_vec();
    sorted.sort_by_key(|range| range.start);
    let mut all: Vec<Range<u64>> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match all.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap) => last.end = last.end.max(range.end),
            Some(_) | None => all.push(range),
        }
    }
    all
}

/// The error of a reader whose time is over.
fn late(object: &RemoteObject, blocks: &Range<u64>) -> RemoteError {
    let message = "no answer within --source-timeout";
    RemoteError::new(Failure::Transient, object.service.objects.host(), &object.file.key, message)
        .of_span(object.entry.span_of(blocks))
}

/// Runs a job in a thread of the pool.
fn run(shared: &Shared, job: BegunJob) -> (BegunJob, bool) {
    let (begun, is_urgent) = &job;
    // A panic must leave neither the job nor its readers behind.
    let is_done = catch_unwind(AssertUnwindSafe(|| fetch(shared, begun, *is_urgent))).unwrap_or_else(|_| {
        let _ = begun.object.entry.claim(&begun.blocks, false);
        let panicked = io::Error::other("the thread that fetched them panicked");
        begun.end(Err(FetchError::Cache(Arc::new(panicked))));
        shared.progress.note();
        true
    });
    (job, is_done)
}

/// Runs a job to its end. Returns false if another process fetches its blocks and no reader waits for them.
fn fetch(shared: &Shared, job: &Arc<Job>, is_urgent: bool) -> bool {
    let (entry, mut claimed) = (&job.object.entry, false);
    let mut quiet_since = Instant::now();
    let mut left = u64::MAX;
    let outcome = loop {
        if !claimed {
            claimed = entry.claim(&job.blocks, true).unwrap_or(true);
        }
        let absent = match entry.absent(&job.blocks) {
            Ok(absent) => absent,
            Err(error) => break Err(FetchError::of_cache(entry, error)),
        };
        let count = absent.iter().map(|blocks| blocks.end - blocks.start).sum();
        if count == 0 {
            break Ok(());
        }
        if claimed || quiet_since.elapsed() > OTHER_PROCESS_MAX {
            break absent.iter().try_for_each(|blocks| request(shared, job, blocks));
        }
        if count < left {
            (left, quiet_since) = (count, Instant::now());
        }
        if shared.is_closed() {
            break Err(FetchError::NoRoom);
        }
        thread::sleep(LOOK);
        if !is_urgent {
            return false;
        }
    };
    if claimed {
        // Before the end: a job for the same blocks of this process may follow, and this would drop its claim.
        let _ = entry.claim(&job.blocks, false);
    }
    job.end(outcome);
    shared.progress.note();
    job.object.digest.note_brought(entry);
    true
}

/// Requests blocks and writes them to the cache as they come.
fn request(shared: &Shared, job: &Job, blocks: &Range<u64>) -> Result<(), FetchError> {
    let object = &job.object;
    let (entry, span) = (&object.entry, span_of(blocks, object.file.size_bytes));
    let mut chunk: Vec<u8> = Vec::with_capacity(place(CHUNK_BYTES.min(span.len())));
    let (mut first, mut got, mut failure) = (blocks.start, 0_u64, None);
    let mut write = |chunk: &mut Vec<u8>| {
        let written = store(shared, job, first, chunk);
        first += (chunk.len() as u64).div_ceil(BLOCK_BYTES);
        chunk.clear();
        written
    };
    // By itself: within the call the lock would be held until the request ends, and readers ask for it.
    let deadline = *job.deadline.lock();
    let fetched = object.service.read(&object.file, span, deadline, &mut |mut bytes| {
        job.note_bytes();
        while !bytes.is_empty() {
            let room = place(CHUNK_BYTES) - chunk.len();
            let (part, rest) = bytes.split_at(bytes.len().min(room));
            chunk.extend_from_slice(part);
            got += part.len() as u64;
            bytes = rest;
            if chunk.len() as u64 == CHUNK_BYTES || got == span.len() {
                if let Err(error) = write(&mut chunk) {
                    failure = Some(error);
                    return ControlFlow::Break(());
                }
                shared.progress.note();
            }
        }
        if shared.is_closed() {
            failure = Some(FetchError::NoRoom);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    });
    if let Some(failure) = failure {
        return Err(failure);
    }
    let result = fetched.map_err(|error| FetchError::Remote(Arc::clone(&object.name), Arc::new(error)));
    // The whole blocks of a reply that broke off count.
    let whole = chunk.len() / place(BLOCK_BYTES) * place(BLOCK_BYTES);
    chunk.truncate(whole);
    if !chunk.is_empty() && result.is_err() {
        let _ = write(&mut chunk);
    }
    debug_assert!(result.is_err() || entry.span_of(blocks).len() == got);
    result
}

/// Writes blocks to the cache, if it has room.
fn store(shared: &Shared, job: &Job, first: u64, bytes: &[u8]) -> Result<(), FetchError> {
    let space = shared.cache.space_of(&job.object.entry);
    // Held until the bytes count as used.
    let _room = space.reserve(bytes.len() as u64).ok_or(FetchError::NoRoom)?;
    job.object.entry.store(first, bytes, job.ahead.load(Ordering::Acquire)).map_err(|error| {
        if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            space.note_full();
            FetchError::NoRoom
        } else {
            FetchError::of_cache(&job.object.entry, error)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_equal_parts_of_4_to_16_mib() {
        const MIB: u64 = MIB_BLOCKS;
        for (blocks, expected) in [
            (1, 1),
            (8 * MIB, 8 * MIB),
            (8 * MIB + 1, 8 * MIB + 1),
            (12 * MIB - 1, 12 * MIB - 1),
            (12 * MIB, 6 * MIB),
            (16 * MIB, 8 * MIB),
            (78 * MIB, 78 * MIB / 10 + 1),
        ] {
            assert_eq!(first_part(blocks, STEPS), expected, "{blocks} blocks");
        }
    }

    #[test]
    fn the_first_requests_are_of_different_lengths() {
        let lengths: Vec<u64> = (0..STEPS).map(|steps| first_part(1000 * MIB_BLOCKS, steps)).collect();
        assert_eq!(lengths[0], 4 * MIB_BLOCKS);
        assert!(lengths.is_sorted_by(|left, right| left < right), "{lengths:?}");
        assert!(lengths[31] < 12 * MIB_BLOCKS);
        assert_eq!(first_part(5 * MIB_BLOCKS, 0), 5 * MIB_BLOCKS, "no request has only what is left");
        assert_eq!(first_part(6 * MIB_BLOCKS, 0), 4 * MIB_BLOCKS);
        assert_eq!(first_part(3, 0), 3);
    }
}
