//! Stage 3, the only one that waits. It reads the bytes of a batch into memory. Of mapped files it provides windows of the maps
//! instead, without a copy.

use ckfs_checkpoint::Checkpoint;
use ckfs_source::{ByteSpan, FetchPart, FileFetch, FileId, Maps, SourceError};
use ckfs_tensor::{Need, Window, to_usize};
use smallvec::SmallVec;

use super::{
    ReadError,
    buffer::{Buffer, BufferPool},
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
pub(super) fn are_mapped(checkpoint: &Checkpoint, wanted: &[Need]) -> bool {
    wanted.iter().all(|wanted| checkpoint.source().maps_of(checkpoint.tensor(wanted.tensor).file()).is_some())
}

/// Runs `work` over windows of the maps.
///
/// # Errors
/// [`ReadError::Source`] with the error of a source. The output of `work` is then invalid.
pub(super) fn through_maps(
    checkpoint: &Checkpoint,
    maps: &dyn Maps,
    wanted: &[Need],
    windows: &[Window<'_>],
    work: &mut dyn FnMut(&[Window<'_>]),
) -> Result<(), ReadError> {
    let Some((first, others)) = wanted.split_first() else {
        work(windows);
        return Ok(());
    };
    let info = checkpoint.tensor(first.tensor);
    let in_file = |(start, end)| ByteSpan::new(start, end).and_then(|span| info.span().slice(span));
    let Some(span) = in_file((first.start(), first.end())) else {
        return Err(ReadError::Internal { what: "a piece leaves its tensor" });
    };
    if 2 * first.bytes() < span.len() {
        // The pages in between hold bytes that other tiles need.
        maps.will_revisit();
    }
    let mut result = Ok(());
    let mut look = |bytes: &[u8]| {
        let mut all: SmallVec<[Window<'_>; 4]> = SmallVec::from_slice(windows);
        all.push(Window { bytes, start: first.start() });
        result = through_maps(checkpoint, maps, others, &all, work);
    };
    let mapped = if maps.is_partial(info.file(), span) {
        let spans = first.spans(checkpoint.source().gap_bytes());
        let parts: Vec<ByteSpan> = spans.into_iter().filter_map(in_file).collect();
        maps.with_parts(info.file(), span, &parts, &mut look)
    } else {
        maps.with(info.file(), span, &mut look)
    };
    match mapped {
        None => Err(ReadError::Internal { what: "a mapped file is not mapped" }),
        Some(Err(error)) => Err(ReadError::source(&info, span, error)),
        Some(Ok(())) => {
            maps.used(info.file(), span, first.bytes());
            result
        }
    }
}
