//! The layout of one virtual file: segments with cumulative ends.

use std::sync::Arc;

use ckfs_format::safetensors::HeaderErrors;
use ckfs_tensor::{DType, View};

/// A part of a file.
#[derive(Clone, Debug)]
pub enum Segment {
    /// Literal bytes: headers, metadata.
    Bytes(Arc<[u8]>),
    /// This many spaces, which text formats allow at the end.
    Spaces(u64),
    /// The elements of a view in row-major order, little-endian.
    View(View),
}

/// Why a file cannot be laid out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ImageError(pub(super) String);

impl ImageError {
    /// That a format has no such element type.
    pub(super) fn unsupported(name: &str, format: &str, dtype: DType) -> Self {
        Self(format!("{name}: {format} cannot hold {dtype}"))
    }
}

impl From<HeaderErrors> for ImageError {
    fn from(errors: HeaderErrors) -> Self {
        Self(errors.to_string())
    }
}

/// The layout of one virtual file.
#[derive(Clone, Debug, Default)]
pub struct FileImage {
    segments: Vec<Segment>,
    /// `ends[i]` is the byte after segment `i`; strictly increasing.
    ends: Vec<u64>,
}

impl FileImage {
    /// A file with these bytes.
    pub(crate) fn of_bytes(bytes: impl Into<Arc<[u8]>>) -> Self {
        let mut image = Self::default();
        image.push_bytes(bytes.into());
        image
    }

    fn push(&mut self, segment: Segment, len_bytes: u64) {
        if len_bytes > 0 {
            self.ends.push(self.len_bytes() + len_bytes);
            self.segments.push(segment);
        }
    }

    /// Appends literal bytes.
    pub(crate) fn push_bytes(&mut self, bytes: Arc<[u8]>) {
        let len = bytes.len() as u64;
        self.push(Segment::Bytes(bytes), len);
    }

    /// Appends spaces.
    pub(crate) fn push_spaces(&mut self, count: u64) {
        self.push(Segment::Spaces(count), count);
    }

    /// Appends the bytes of a view.
    ///
    /// # Errors
    /// [`ImageError`] if they are no whole number of bytes.
    pub fn push_view(&mut self, name: &str, view: View) -> Result<(), ImageError> {
        let len = view.bytes().ok_or_else(|| {
            let (elements, bits) = (view.shape().elements(), view.dtype().bits());
            ImageError(format!("{name}: {elements} elements of {bits} bits do not fill whole bytes"))
        })?;
        self.push(Segment::View(view), len);
        Ok(())
    }

    /// Length of the file.
    pub fn len_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The segments, in order; none is empty.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// First byte of a segment.
    pub fn start_of(&self, segment: usize) -> u64 {
        if segment == 0 { 0 } else { self.ends[segment - 1] }
    }

    /// Calls `each` with the parts of segments within `start..end`, in order: the segment's number and the span
    /// inside the segment.
    pub fn spans(&self, start: u64, end: u64) -> impl Iterator<Item = (usize, u64, u64)> + '_ {
        let first = self.ends.partition_point(|segment_end| *segment_end <= start);
        (first..self.segments.len()).map_while(move |segment| {
            let (low, high) = (self.start_of(segment), self.ends[segment]);
            (low < end).then(|| (segment, start.max(low) - low, end.min(high) - low))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_found_by_bisection() {
        let mut image = FileImage::default();
        for len in [3, 0, 5, 1] {
            image.push_bytes(vec![0; len].into());
        }
        let spans = |start, end| image.spans(start, end).collect::<Vec<_>>();
        assert_eq!(image.len_bytes(), 9);
        assert_eq!(spans(0, 9), [(0, 0, 3), (1, 0, 5), (2, 0, 1)]);
        assert_eq!(spans(2, 4), [(0, 2, 3), (1, 0, 1)]);
        assert_eq!(spans(3, 8), [(1, 0, 5)]);
        assert_eq!(spans(8, 9), [(2, 0, 1)]);
        assert!(spans(9, 9).is_empty());
    }
}
