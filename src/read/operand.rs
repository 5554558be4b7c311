//! Pieces of quantized tensors: bytes of each operand, mapped or read, for the kernel that decodes them.

use smallvec::SmallVec;

use super::{
    ReadError,
    engine::{Engine, How, Touched, touch},
};
use crate::{
    checkpoint::TensorInfo,
    source::ByteSpan,
    tensor::{Gather, Need, Value, Window, gather_with, needs, to_usize},
};

/// Bytes between two that are needed, from which on they are not read in one: the kernel reads whole pages anyway.
const READ_GAP_BYTES: u64 = 4096;

impl Engine {
    /// Carries out a job that decodes a quantized tensor, with a window of each operand.
    pub(super) fn gather_value(
        &self,
        value: &Value,
        job: &Gather<'_>,
        target: &mut [u8],
        touched: &mut Touched,
        how: How,
    ) -> Result<(), ReadError> {
        let needs = needs(value, job.source_offset, job.loops);
        let mut work = |windows: &[Window<'_>]| gather_with(how.stores, job, windows, target);
        // An element alone is read however far apart its bytes are.
        let used = needs.iter().map(Need::bytes).sum();
        let most = if job.loops.is_empty() { u64::MAX } else { self.few_bytes(used) };
        if self.with_windows(&needs, most, &[], &mut work)? {
            for need in &needs {
                touch(touched, self.checkpoint.tensor(need.operand.tensor.id).file());
                self.counters.fetch(how.path, need.bytes());
            }
            return Ok(());
        }
        // Too much to be in memory at once.
        let done = job.in_turns(&mut |turn| self.gather_value(value, turn, target, touched, how));
        done.unwrap_or(Err(ReadError::Internal { what: "an element is too large to be read" }))
    }

    /// Runs `work` over `windows` and those of all other operands, mapped or read. Says whether it did: not where more than
    /// `most` bytes would have to be read into memory.
    fn with_windows(
        &self,
        needs: &[Need<'_>],
        most: u64,
        windows: &[Window<'_>],
        work: &mut dyn FnMut(&[Window<'_>]),
    ) -> Result<bool, ReadError> {
        let Some((need, others)) = needs.split_first() else {
            work(windows);
            return Ok(true);
        };
        let info = self.checkpoint.tensor(need.operand.tensor.id);
        let (start, end) = (need.start(), need.end());
        let Some(span) = ByteSpan::new(start, end).and_then(|span| info.span().slice(span)) else {
            return Err(ReadError::Internal { what: "an operand leaves its tensor" });
        };
        if 2 * need.bytes() < span.len() {
            // The pages between hold what other tiles need.
            self.source().will_return();
        }
        let with = |bytes: &[u8], most: u64, work: &mut dyn FnMut(&[Window<'_>])| {
            let mut all: SmallVec<[Window<'_>; 4]> = windows.iter().copied().collect();
            all.push(Window { bytes, start });
            self.with_windows(others, most, &all, work)
        };
        let mut result = Ok(false);
        let mapped = self.source().with_map(info.file(), span, &mut |bytes| result = with(bytes, most, work));
        if let Some(mapped) = mapped {
            mapped.map_err(|error| ReadError::source(&info, span, error))?;
            return result;
        }
        let Some(left) = most.checked_sub(span.len()) else { return Ok(false) };
        let mut buffer = self.buffers.take(to_usize(span.len()));
        self.read_runs(&info, need, span, &mut buffer)?;
        with(&buffer, left, work)
    }

    /// Reads what is needed of an operand to its place in `buffer`, which is for `span` of its file.
    fn read_runs(
        &self,
        info: &TensorInfo<'_>,
        need: &Need<'_>,
        span: ByteSpan,
        buffer: &mut [u8],
    ) -> Result<(), ReadError> {
        let place = |byte: u64| to_usize(byte - need.start());
        let mut result = Ok(());
        for runs in &need.runs {
            runs.for_each_span(READ_GAP_BYTES, &mut |start, len| {
                if result.is_ok() {
                    let part = &mut buffer[place(start)..place(start + len)];
                    result = self.source().read_into(info.file(), info.span().start() + start, part);
                }
            });
        }
        result.map_err(|error| ReadError::source(info, span, error))
    }
}
