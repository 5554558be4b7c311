//! Reads past the cache: several requests at a time, straight into the memory of the reader.

use std::{
    ops::ControlFlow,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use smallvec::SmallVec;

use super::{
    super::{ByteSpan, FetchPart},
    counters::RemoteCounters,
    error::{Failure, RemoteError},
    handle::Remote,
    retry::Deadline,
};

/// Most bytes of one request. Smaller than those into the cache: a reader waits for all of them.
const REQUEST_BYTES: usize = 2 << 20;
/// Requests of one reader at a time, and of all readers together beyond one for each.
const AT_A_TIME: usize = 16;
const HELPERS_MAX: usize = 32;

/// Threads that help readers now.
static HELPERS: AtomicUsize = AtomicUsize::new(0);

/// Bytes that one request brings, with gaps between them.
#[derive(Debug)]
struct Run<'a> {
    start: u64,
    end: u64,
    /// In order and apart, each with its first byte in the object.
    targets: SmallVec<[(u64, &'a mut [u8]); 1]>,
}

/// Cuts parts into runs. Parts in order, with gaps of at most `gap_bytes` between them, share one.
fn runs_of<'a>(parts: &'a mut [FetchPart<'_>], gap_bytes: u64) -> Vec<Run<'a>> {
    let mut runs: Vec<Run<'a>> = Vec::new();
    for part in parts {
        let mut start = part.start;
        for target in part.target.chunks_mut(REQUEST_BYTES) {
            let end = start + target.len() as u64;
            let joins = |run: &&mut Run<'a>| {
                start >= run.end && start - run.end <= gap_bytes && end - run.start <= REQUEST_BYTES as u64
            };
            match runs.last_mut().filter(joins) {
                Some(run) => {
                    run.end = end;
                    run.targets.push((start, target));
                }
                None => runs.push(Run { start, end, targets: SmallVec::from_iter([(start, target)]) }),
            }
            start = end;
        }
    }
    runs
}

impl Run<'_> {
    fn span(&self) -> ByteSpan {
        ByteSpan::new(self.start, self.end).expect("a run ends after its start")
    }

    fn read(&mut self, remote: &Remote, deadline: Deadline) -> Result<(), RemoteError> {
        let (object, span) = (&remote.object, self.span());
        let (mut at, mut place) = (self.start, 0);
        object.service.read(&object.file, span, deadline, &mut |mut bytes| {
            while let Some((start, target)) = self.targets.get_mut(place).filter(|_| !bytes.is_empty()) {
                // Before the target it is a gap, whose bytes are not needed.
                let is_gap = at < *start;
                let wanted = if is_gap { *start - at } else { *start + target.len() as u64 - at };
                let (now, rest) = bytes.split_at(usize::try_from(wanted).unwrap_or(usize::MAX).min(bytes.len()));
                if !is_gap {
                    let from = usize::try_from(at - *start).unwrap_or(usize::MAX);
                    target[from..from + now.len()].copy_from_slice(now);
                    place += usize::from(from + now.len() == target.len());
                }
                at += now.len() as u64;
                bytes = rest;
            }
            ControlFlow::Continue(())
        })?;
        if at < self.end {
            let message = format!("the reply ended {} bytes early", self.end - at);
            let (host, key) = (object.service.host(), &object.file.key);
            return Err(RemoteError::new(Failure::Transient, host, key, message).of_span(span));
        }
        Ok(())
    }
}

/// A thread that helps, counted while it does.
struct Helper;

impl Helper {
    fn new() -> Option<Self> {
        let more = |count: usize| (count < HELPERS_MAX).then_some(count + 1);
        HELPERS.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok().map(|_| Self)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        HELPERS.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Remote {
    /// Fills parts without the cache. They lie in the object.
    ///
    /// # Errors
    /// The first error of the service, with the span of the request; the targets are then unspecified.
    pub fn read_uncached(
        &self,
        parts: &mut [FetchPart<'_>],
        deadline: Deadline,
    ) -> Result<(), (ByteSpan, RemoteError)> {
        let needed: u64 = parts.iter().map(|part| part.target.len() as u64).sum();
        let gap_bytes = if parts.len() > 1 { self.object.service.gap_bytes() } else { 0 };
        let runs = runs_of(parts, gap_bytes);
        let helpers = runs.len().min(AT_A_TIME).saturating_sub(1);
        let (left, failed) = (Mutex::new(runs.into_iter()), Mutex::new(None));
        let work = || {
            while lock(&failed).is_none() {
                let Some(mut run) = lock(&left).next() else { return };
                if let Err(error) = run.read(self, deadline) {
                    lock(&failed).get_or_insert((run.span(), error));
                }
            }
        };
        thread::scope(|scope| {
            for helper in (0..helpers).map_while(|_| Helper::new()) {
                let help = move || {
                    let _helper = helper;
                    work();
                };
                if thread::Builder::new().name("ckfs-past".into()).spawn_scoped(scope, help).is_err() {
                    break;
                }
            }
            work();
        });
        if let Some(failure) = lock(&failed).take() {
            return Err(failure);
        }
        RemoteCounters::add(&self.fetcher.cache().counters().uncached_bytes, needed);
        Ok(())
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_parts_share_a_request_and_long_ones_are_cut() {
        const MIB: u64 = 1 << 20;
        let mut targets: Vec<Vec<u8>> = [10, 20, 5 << 20, 7].map(|len| vec![0; len]).into();
        let starts = [100, 200, MIB, 50];
        let mut parts: Vec<FetchPart<'_>> =
            targets.iter_mut().zip(starts).map(|(target, start)| FetchPart { start, target }).collect();
        let found: Vec<(u64, u64, usize)> =
            runs_of(&mut parts, 90).iter().map(|run| (run.start, run.end, run.targets.len())).collect();
        let expected = [(100, 220, 2), (MIB, 3 * MIB, 1), (3 * MIB, 5 * MIB, 1), (5 * MIB, 6 * MIB, 1), (50, 57, 1)];
        assert_eq!(found, expected);
        assert_eq!(runs_of(&mut parts, 89).len(), 6, "the gap is 90 bytes");
    }
}
