//! Stage 3, the only one that waits. It reads the bytes of a batch into memory. Of mapped files it provides windows of the maps
//! instead, without a copy.

use ckfs_checkpoint::Checkpoint;
use ckfs_source::{ByteSpan, FetchPart, FileFetch, FileId, Maps, SourceError};
use ckfs_tensor::{Window, to_usize};
use smallvec::SmallVec;

use super::{
    ReadError,
    buffer::{Buffer, BufferPool},
    plan_jobs::{Job, Requirement},
    schedule::{Batch, Fetch},
};

/// Fetches the bytes of a batch, each call with all spans of one file.
///
/// # Errors
/// [`ReadError::Source`] with the error of a source.
pub(super) fn fetch(checkpoint: &Checkpoint, buffers: &BufferPool, batch: &Batch<'_>) -> Result<Buffer, ReadError> {
    let mut memory = buffers.take(to_usize(batch.len_bytes));
    let mut rest: &mut [u8] = &mut memory;
    let mut at = 0;
    let mut parts: Vec<(Fetch, FetchPart<'_>)> = Vec::with_capacity(batch.fetches.len());
    for fetch in &batch.fetches {
        let skipped = rest.split_off_mut(..to_usize(fetch.at - at));
        let target = rest.split_off_mut(..to_usize(fetch.span.len()));
        let (Some(_), Some(target)) = (skipped, target) else {
            return Err(ReadError::Internal { what: "a fetch leaves the memory of its batch" });
        };
        at = fetch.at + fetch.span.len();
        parts.push((*fetch, FetchPart { start: fetch.span.start(), target }));
    }
    // Operands of one step may lie in several files.
    parts.sort_by_key(|(fetch, _)| fetch.file);
    let (fetches, mut parts): (Vec<Fetch>, Vec<FetchPart<'_>>) = parts.into_iter().unzip();
    let mut files = Vec::new();
    let mut rest = &mut *parts;
    for of_file in fetches.chunk_by(|left, right| left.file == right.file) {
        let (parts, after) = rest.split_at_mut(of_file.len());
        files.push(FileFetch { file: of_file[0].file, parts });
        rest = after;
    }
    checkpoint.source().fetch_files(&mut files).map_err(|(file, error)| failed(checkpoint, &fetches, file, error))?;
    Ok(memory)
}

/// The error of a file, with the first of the spans that were wanted from it.
fn failed(checkpoint: &Checkpoint, fetches: &[Fetch], file: FileId, error: SourceError) -> ReadError {
    let mut of_file = fetches.iter().filter(|fetch| fetch.file == file);
    let Some(first) = of_file.next() else { return ReadError::Internal { what: "a source failed for another file" } };
    let name = checkpoint.tensor(first.tensor).name;
    let others = of_file.any(|fetch| fetch.tensor != first.tensor);
    let tensor = if others { format!("{name} and others") } else { name.to_owned() };
    ReadError::Source { tensor, span: first.span, error }
}

/// Whether all tensors that a job needs lie in mapped files.
pub(super) fn are_mapped(checkpoint: &Checkpoint, wanted: &[Requirement]) -> bool {
    wanted.iter().all(|wanted| checkpoint.source().maps_of(checkpoint.tensor(wanted.tensor).file()).is_some())
}

/// The parts of a requirement's span that the job reads, in order and apart, as spans of the file.
fn parts(checkpoint: &Checkpoint, job: &Job<'_>, wanted: &Requirement, span: ByteSpan) -> Vec<ByteSpan> {
    let (gap, whole) = (checkpoint.source().gap_bytes(), checkpoint.tensor(wanted.tensor).span());
    let mut parts: Vec<ByteSpan> = Vec::new();
    let mut add = |start: u64, len: u64| {
        parts.extend(ByteSpan::of_len(start, len).and_then(|part| whole.slice(part)));
    };
    match job.source_bytes().filter(|_| wanted.runs.is_empty()) {
        Some(unit) => {
            let (_, offset) = job.origin();
            job.piece.source_bounding_spans(gap.div_ceil(unit), &mut |start, units| {
                add((offset + start) * unit, units * unit);
            });
        }
        None => wanted.runs.iter().for_each(|runs| runs.for_each_span(gap, &mut add)),
    }
    if parts.is_empty() {
        return vec![span];
    }
    parts.sort_unstable();
    parts.dedup_by(|next, last| {
        let joined = next.start() <= last.end();
        if joined && let Some(both) = ByteSpan::new(last.start(), last.end().max(next.end())) {
            *last = both;
        }
        joined
    });
    parts
}

/// Runs `work` over windows of the maps.
///
/// # Errors
/// [`ReadError::Source`] with the error of a source. The output of `work` is then invalid.
pub(super) fn through_maps(
    checkpoint: &Checkpoint,
    maps: &dyn Maps,
    job: &Job<'_>,
    wanted: &[Requirement],
    windows: &[Window<'_>],
    work: &mut dyn FnMut(&[Window<'_>]),
) -> Result<(), ReadError> {
    let Some((first, others)) = wanted.split_first() else {
        work(windows);
        return Ok(());
    };
    let info = checkpoint.tensor(first.tensor);
    let Some(span) = ByteSpan::new(first.start, first.end).and_then(|span| info.span().slice(span)) else {
        return Err(ReadError::Internal { what: "a piece leaves its tensor" });
    };
    if 2 * first.used_bytes < span.len() {
        // The pages in between hold bytes that other tiles need.
        maps.will_revisit();
    }
    let mut result = Ok(());
    let mut look = |bytes: &[u8]| {
        let mut all: SmallVec<[Window<'_>; 4]> = SmallVec::from_slice(windows);
        all.push(Window { bytes, start: first.start });
        result = through_maps(checkpoint, maps, job, others, &all, work);
    };
    let mapped = if maps.is_partial(info.file(), span) {
        let parts = parts(checkpoint, job, first, span);
        maps.with_parts(info.file(), span, &parts, &mut look)
    } else {
        maps.with(info.file(), span, &mut look)
    };
    match mapped {
        None => Err(ReadError::Internal { what: "a mapped file is not mapped" }),
        Some(Err(error)) => Err(ReadError::source(&info, span, error)),
        Some(Ok(())) => {
            maps.used(info.file(), span, first.used_bytes);
            result
        }
    }
}
