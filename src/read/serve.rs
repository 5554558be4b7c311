//! Reads a span of a virtual file, segment by segment.

use std::sync::{Arc, atomic::Ordering};

use ckfs_checkpoint::printable;
use ckfs_image::Segment;
use ckfs_source::{ReadFailure, Replied, Served, SourceError};
use ckfs_tensor::{Stores, to_usize};

use super::{Engine, ReadError, prepared_file::PreparedFile, reader::SegmentReader};

impl Engine {
    /// Reads `len` bytes at `start`, fewer only at the end of the file, and passes them to `reply`, at most once. The bytes are counted
    /// before that: a reader that has the bytes finds them in the counters.
    ///
    /// # Errors
    /// [`ReadError`], and whether `reply` was called nevertheless; the first of a file is logged.
    pub fn read(
        self: &Arc<Self>,
        file: &Arc<PreparedFile>,
        start: u64,
        len: usize,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<ReadError>> {
        let end = start.saturating_add(len as u64).min(file.len_bytes());
        let start = start.min(end);
        // First of all, so that other threads compute the next tiles while this thread computes the requested bytes.
        self.read_ahead(file, start, end);
        let result = self.read_span(file, start, end, reply);
        result.inspect_err(|failure| self.note_failed_read(file, start, end, &failure.error))
    }

    /// As [`Self::read`], into memory of the caller: one copy, whatever the bytes come from. They are checked when it returns.
    ///
    /// # Errors
    /// [`ReadError`]; the content of the target is then unspecified. The file ends within the target.
    pub fn read_into(
        self: &Arc<Self>,
        file: &Arc<PreparedFile>,
        start: u64,
        target: &mut [u8],
    ) -> Result<(), ReadError> {
        let end = start.saturating_add(target.len() as u64);
        self.read_ahead(file, start.min(file.len_bytes()), end.min(file.len_bytes()));
        let result = if end > file.len_bytes() {
            Err(ReadError::Internal { what: "a read beyond the end" })
        } else {
            self.fill_by_segments(file, start, target, Stores::Cached)
        };
        result.inspect_err(|error| self.note_failed_read(file, start, end, error))
    }

    /// Fills a target with a file's bytes from `start` on, segment by segment.
    pub(super) fn fill_by_segments(
        &self,
        file: &PreparedFile,
        start: u64,
        mut target: &mut [u8],
        stores: Stores,
    ) -> Result<(), ReadError> {
        for (segment, low, high) in file.image.spans(start, start.saturating_add(target.len() as u64)) {
            let Some(place) = target.split_off_mut(..to_usize(high - low)) else { break };
            SegmentReader::new(self, file, segment)?.copy_into(low, high, place, stores)?;
        }
        if target.is_empty() {
            Ok(())
        } else {
            Err(ReadError::Internal { what: "the segments of a span do not fill it" })
        }
    }

    /// Counts a failed read, and logs the first of a file.
    fn note_failed_read(&self, file: &PreparedFile, start: u64, end: u64, error: &ReadError) {
        self.count_failure(error);
        // The source has logged the stall, and the file becomes readable again when it ends.
        if error.is_stall() || file.failed.swap(true, Ordering::Relaxed) {
            return;
        }
        // Other errors name it.
        let tensor = if let ReadError::Changed(error) = error { self.tensor_of(file, start, end, error) } else { None };
        let tensor = tensor.map(|tensor| printable(&tensor).into_owned());
        let error = printable(&error.to_string()).into_owned();
        tracing::error!(file = file.name, tensor, start, end, "read failed: {error}");
    }

    /// A tensor that the span is made of: the first in the file that the error is about.
    fn tensor_of(&self, file: &PreparedFile, start: u64, end: u64, error: &SourceError) -> Option<String> {
        let failed = error.file()?;
        let mut found = None;
        for (segment, _, _) in file.image.spans(start, end) {
            let Segment::View(view) = &file.image.segments()[segment] else { continue };
            view.for_each_stored(&mut |tensor| {
                let tensor = self.checkpoint.tensor(tensor);
                if found.is_none() && self.source().path(tensor.file()) == failed {
                    found = Some(tensor.name.to_owned());
                }
            });
        }
        found
    }

    fn read_span(
        &self,
        file: &PreparedFile,
        start: u64,
        end: u64,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<ReadError>> {
        let mut spans = file.image.spans(start, end);
        let Some((segment, low, high)) = spans.next() else {
            return Ok(reply(Served::Memory(&[])));
        };
        if spans.next().is_none() {
            return SegmentReader::new(self, file, segment)?.read(low, high, reply);
        }
        let mut buffer = self.rooms.buffers.take(to_usize(end - start));
        self.fill_by_segments(file, start, &mut buffer, Stores::Cached)?;
        Ok(reply(Served::Memory(&buffer)))
    }
}
