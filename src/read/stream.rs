//! Recognizing sequential readers.
//!
//! Several processes may read one file at once, even through one descriptor, so streams belong to the file and not to the
//! handle. The kernel's read-ahead sends requests in parallel; they arrive a little out of order, so a request near a
//! stream's end continues it.

use std::ops::RangeInclusive;

/// Streams followed per file.
const STREAMS: usize = 8;
/// How far from the end of a stream a request may start and still belong to it, in bytes.
const SLACK_BYTES: u64 = 4 << 20;
/// Read-ahead of a stream reaches at most this many times as far as its requests so far. This bounds the wasted work when a reader
/// reads only a part of a file.
const AHEAD_OF_READ: u64 = 4;

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Start of the first request.
    start: u64,
    /// End of the furthest request; 0 where the slot is free.
    end: u64,
    /// Requests so far.
    requests: u32,
    /// End of the bytes already fetched ahead.
    ahead: u64,
    /// Number of the last request of the stream, counted in requests to the file.
    used: u64,
}

/// The streams of one file.
#[derive(Debug, Default)]
pub(super) struct Streams {
    slots: [Stream; STREAMS],
    clock: u64,
}

impl Streams {
    /// Notes a request for `start..end`. If it continues a stream, returns the span that should now be fetched ahead, if any.
    /// `depth_bytes` bounds the distance ahead of the reader: the minimum at first, the maximum once the reader has come far. More is
    /// fetched only when one of `parts` of that distance is used, so that requests stay large.
    pub(super) fn note(
        &mut self,
        start: u64,
        end: u64,
        depth_bytes: RangeInclusive<u64>,
        parts: u64,
    ) -> Option<(u64, u64)> {
        self.clock += 1;
        let near = |stream: &Stream| stream.end > 0 && start.abs_diff(stream.end) <= SLACK_BYTES;
        if let Some(stream) = self.slots.iter_mut().filter(|stream| near(stream)).min_by_key(|s| start.abs_diff(s.end))
        {
            stream.end = stream.end.max(end);
            stream.requests += 1;
            stream.used = self.clock;
            let (least, most) = depth_bytes.into_inner();
            let depth_bytes = (stream.end.saturating_sub(stream.start) * AHEAD_OF_READ).clamp(least, most);
            let from = stream.ahead.max(stream.end);
            let to = stream.end + depth_bytes;
            if stream.requests >= 2 && from < to && to - from >= depth_bytes / parts {
                stream.ahead = to;
                return Some((from, to));
            }
            return None;
        }
        if let Some(slot) = self.slots.iter_mut().min_by_key(|stream| stream.used) {
            *slot = Stream { start, end, requests: 1, ahead: end, used: self.clock };
        }
        None
    }

    /// Whether a span to be fetched ahead still lies, at least in part, ahead of a reader.
    pub(super) fn awaits(&self, start: u64, end: u64) -> bool {
        self.slots.iter().any(|stream| stream.end < end && start < stream.ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;
    const EIGHT: RangeInclusive<u64> = 8 * M..=8 * M;

    #[test]
    fn the_second_request_of_a_stream_fetches_ahead() {
        let mut streams = Streams::default();
        assert_eq!(streams.note(0, M, EIGHT, 2), None);
        assert_eq!(streams.note(M, 2 * M, EIGHT, 2), Some((2 * M, 10 * M)));
        assert_eq!(streams.note(2 * M, 3 * M, EIGHT, 2), None, "enough is ahead");
        assert_eq!(streams.note(5 * M, 6 * M, EIGHT, 2), Some((10 * M, 14 * M)));
        assert!(streams.awaits(10 * M, 12 * M) && streams.awaits(5 * M, 7 * M));
        assert!(!streams.awaits(4 * M, 6 * M), "all of it was requested since");
        assert!(!streams.awaits(14 * M, 16 * M), "nobody is expected there");
    }

    #[test]
    fn a_long_stream_is_fetched_further_ahead() {
        let mut streams = Streams::default();
        assert_eq!(streams.note(0, M, 2 * M..=64 * M, 2), None);
        assert_eq!(streams.note(M, 2 * M, 2 * M..=64 * M, 2), Some((2 * M, 10 * M)), "four times as far");
        assert_eq!(streams.note(2 * M, 3 * M, 2 * M..=64 * M, 2), None);
        assert_eq!(streams.note(3 * M, 4 * M, 2 * M..=64 * M, 2), Some((10 * M, 20 * M)));
        assert_eq!(streams.note(6 * M, 40 * M, 2 * M..=64 * M, 2), Some((40 * M, 104 * M)), "no further than the most");
        let mut late = Streams::default();
        assert_eq!(late.note(1000 * M, 1000 * M + 4096, 2 * M..=64 * M, 2), None);
        let second = late.note(1000 * M + 4096, 1000 * M + 8192, 2 * M..=64 * M, 2);
        assert_eq!(second, Some((1000 * M + 8192, 1002 * M + 8192)), "no nearer than the fewest, from where it began");
    }

    #[test]
    fn interleaved_streams_are_told_apart_and_random_reads_are_none() {
        let mut streams = Streams::default();
        for step in 0..2 {
            for reader in 0..4 {
                let start = reader * 1000 * M + step * M;
                assert_eq!(streams.note(start, start + M, EIGHT, 2).is_some(), step == 1, "reader {reader}");
            }
        }
        let mut random = Streams::default();
        assert!(
            (0..100).all(|i| random
                .note((i * 7919 % 100) * 100 * M, (i * 7919 % 100) * 100 * M + 4096, EIGHT, 2)
                .is_none())
        );
    }
}
