//! A remote object together with what fetches it, and reads past the cache: several requests at a time, straight into the memory of
//! the reader.

use std::{
    io,
    ops::{ControlFlow, Range},
    os::unix::fs::FileExt,
    sync::Arc,
    time::Instant,
};

use ckfs_sync::Helpers;
use smallvec::SmallVec;

use super::{
    super::{ByteSpan, FetchPart},
    cache::{
        BLOCK_BYTES, Guards,
        geometry::{blocks_of, place as place_of},
    },
    counters::RemoteCounters,
    error::RemoteError,
    fetcher::Fetcher,
    object::{FetchError, RemoteObject},
    retry::Deadline,
};

/// Attempts to have all blocks of a read at one time.
const ROUNDS_MAX: usize = 6;
/// Most bytes of one request. Smaller than those into the cache: a reader waits for all of them.
const REQUEST_BYTES: usize = 2 << 20;
/// Requests of one reader at a time.
const AT_A_TIME: usize = 16;

/// Threads that help readers: requests of all readers together beyond one for each.
static HELPERS: Helpers = Helpers::new("ckfs-past", || 32);

/// A remote object together with what fetches it. Cheap to clone.
#[derive(Clone)]
pub struct Remote {
    /// The object.
    pub object: Arc<RemoteObject>,
    /// What fetches its blocks.
    pub fetcher: Arc<Fetcher>,
}

impl Remote {
    /// Fills `target` with the bytes of a span. Waits as long as the service asks for, as opening a checkpoint does.
    ///
    /// # Errors
    /// The bytes do not come, or the object ends earlier.
    pub fn read_span(&self, span: ByteSpan, target: &mut [u8]) -> io::Result<()> {
        let object = &self.object;
        if !object.file.span().contains(span) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        object.digest.note_served();
        match self.ready(&[span], Some(Deadline::Quiet)) {
            Ok(_guards) => object.entry.data.read_exact_at(target, span.start()),
            Err(FetchError::NoRoom | FetchError::Cache(_)) => {
                let part = FetchPart { start: span.start(), target };
                self.read_uncached(&mut [part], Deadline::Quiet).map_err(|(_, error)| io::Error::other(error))
            }
            Err(FetchError::Remote(_, error)) => Err(io::Error::other(error)),
        }
    }

    /// Makes spans present. Returns guards that keep them. Without a deadline, it is that of a read which begins when bytes have to
    /// come.
    pub(super) fn ready(&self, spans: &[ByteSpan], mut deadline: Option<Deadline>) -> Result<Guards<'_>, FetchError> {
        let (object, entry) = (&self.object, &self.object.entry);
        let failed = |error| FetchError::of_cache(entry, error);
        for _ in 0..ROUNDS_MAX {
            let (mut guards, mut absent) = (Guards::new(), Vec::new());
            for span in spans {
                let blocks = blocks_of(*span);
                entry.guard_more(&blocks, &mut guards).map_err(failed)?;
                if entry.is_verified(&blocks) {
                    entry.note_read(&blocks);
                } else {
                    absent.extend(entry.missing(&blocks).map_err(failed)?);
                }
            }
            if absent.is_empty() {
                return Ok(guards);
            }
            drop(guards);
            if self.fetcher.cache().space_of(entry).is_full() {
                return Err(FetchError::NoRoom);
            }
            if let Some(error) = object.take_recent_timeout(spans) {
                return Err(FetchError::Remote(Arc::clone(&object.name), error));
            }
            let until = *deadline.get_or_insert_with(|| self.deadline());
            // Gaps are merged only within a strided piece, whose spans come in one call.
            let gap = if spans.len() > 1 { object.service.gap_bytes() / BLOCK_BYTES } else { 0 };
            let brought = self.fetcher.fetch(&[(Arc::clone(object), absent)], gap, until);
            let late = match &brought {
                Err(FetchError::Remote(_, error)) if is_late(error, until) => Some(error),
                Ok(()) | Err(_) => None,
            };
            object.record_result(spans, late);
            brought?;
        }
        Err(FetchError::NoRoom)
    }

    /// The deadline of a read that begins now.
    pub(super) fn deadline(&self) -> Deadline {
        Deadline::At(Instant::now() + self.object.service.gate.limit())
    }

    /// The blocks of spans.
    pub fn blocks(spans: &[ByteSpan]) -> Vec<Range<u64>> {
        spans.iter().map(|span| blocks_of(*span)).filter(|blocks| !blocks.is_empty()).collect()
    }

    /// Fills parts without the cache. They lie in the object.
    ///
    /// # Errors
    /// The first error of the service, with the span of the request; the targets are then unspecified.
    pub(crate) fn read_uncached(
        &self,
        parts: &mut [FetchPart<'_>],
        deadline: Deadline,
    ) -> Result<(), (ByteSpan, RemoteError)> {
        let needed: u64 = parts.iter().map(|part| part.target.len() as u64).sum();
        let gap_bytes = if parts.len() > 1 { self.object.service.gap_bytes() } else { 0 };
        let requests = coalesced(parts, gap_bytes);
        HELPERS.each(AT_A_TIME, requests, |mut request| {
            request.read(self, deadline).map_err(|error| (request.span(), error))
        })?;
        RemoteCounters::add(&self.fetcher.cache().counters().uncached_bytes, needed);
        Ok(())
    }
}

/// Whether a read failed since its time is over, or would be before another attempt.
pub(super) fn is_late(error: &RemoteError, deadline: Deadline) -> bool {
    error.is_transient() || deadline.is_over()
}

/// Bytes that one request brings, with gaps between them.
#[derive(Debug)]
struct CoalescedRequest<'a> {
    start: u64,
    end: u64,
    /// In order and apart, each with its first byte in the object.
    targets: SmallVec<[(u64, &'a mut [u8]); 1]>,
}

/// Cuts parts into requests. Parts in order, with gaps of at most `gap_bytes` between them, share one.
fn coalesced<'a>(parts: &'a mut [FetchPart<'_>], gap_bytes: u64) -> Vec<CoalescedRequest<'a>> {
    let mut requests: Vec<CoalescedRequest<'a>> = Vec::new();
    for part in parts {
        let mut start = part.start;
        for target in part.target.chunks_mut(REQUEST_BYTES) {
            let end = start + target.len() as u64;
            let joins = |request: &&mut CoalescedRequest<'a>| {
                start >= request.end && start - request.end <= gap_bytes && end - request.start <= REQUEST_BYTES as u64
            };
            match requests.last_mut().filter(joins) {
                Some(request) => {
                    request.end = end;
                    request.targets.push((start, target));
                }
                None => requests.push(CoalescedRequest { start, end, targets: SmallVec::from_iter([(start, target)]) }),
            }
            start = end;
        }
    }
    requests
}

impl CoalescedRequest<'_> {
    fn span(&self) -> ByteSpan {
        ByteSpan::new(self.start, self.end).expect("a request ends after its start")
    }

    fn read(&mut self, remote: &Remote, deadline: Deadline) -> Result<(), RemoteError> {
        let (object, span) = (&remote.object, self.span());
        let (mut at, mut place) = (self.start, 0);
        object.service.read(&object.file, span, deadline, &mut |mut bytes| {
            while let Some((start, target)) = self.targets.get_mut(place).filter(|_| !bytes.is_empty()) {
                // Before the target it is a gap, whose bytes are not needed.
                let is_gap = at < *start;
                let wanted = if is_gap { *start - at } else { *start + target.len() as u64 - at };
                let (now, rest) = bytes.split_at(place_of(wanted).min(bytes.len()));
                if !is_gap {
                    let from = place_of(at - *start);
                    target[from..from + now.len()].copy_from_slice(now);
                    place += usize::from(from + now.len() == target.len());
                }
                at += now.len() as u64;
                bytes = rest;
            }
            ControlFlow::Continue(())
        })
    }
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
        let found: Vec<(u64, u64, usize)> = coalesced(&mut parts, 90)
            .iter()
            .map(|request| (request.start, request.end, request.targets.len()))
            .collect();
        let expected = [(100, 220, 2), (MIB, 3 * MIB, 1), (3 * MIB, 5 * MIB, 1), (5 * MIB, 6 * MIB, 1), (50, 57, 1)];
        assert_eq!(found, expected);
        assert_eq!(coalesced(&mut parts, 89).len(), 6, "the gap is 90 bytes");
    }
}
