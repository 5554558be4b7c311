//! Names of files, and spans of their bytes.

use std::{fmt, fs::File, io, ops::ControlFlow, os::unix::fs::FileExt};

/// A file of a source: index into the source's list of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u32);

impl FileId {
    /// The file at a position.
    ///
    /// # Panics
    /// If it is 2^32 or more: files are counted when they are opened.
    pub fn at(index: usize) -> Self {
        Self(u32::try_from(index).expect("files were numbered by 32 bits when they were opened"))
    }

    /// Position in the list of files.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Half-open span of bytes; `start <= end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteSpan {
    start: u64,
    end: u64,
}

impl ByteSpan {
    /// No bytes, at the beginning.
    pub const EMPTY: Self = Self { start: 0, end: 0 };

    /// The span `start..end`, or `None` if it would end before it starts.
    pub const fn new(start: u64, end: u64) -> Option<Self> {
        if start <= end { Some(Self { start, end }) } else { None }
    }

    /// The span of `len_bytes` bytes from `start`, or `None` if its end overflows.
    pub const fn of_len(start: u64, len_bytes: u64) -> Option<Self> {
        match start.checked_add(len_bytes) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// First byte.
    pub const fn start(self) -> u64 {
        self.start
    }

    /// One past the last byte.
    pub const fn end(self) -> u64 {
        self.end
    }

    /// Number of bytes.
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether the span holds no byte.
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Whether every byte of `inner` is in this span.
    pub const fn contains(self, inner: Self) -> bool {
        self.start <= inner.start && inner.end <= self.end
    }

    /// The span of `inner`, given relative to this span's start, or `None` if it leaves this span.
    pub fn slice(self, inner: Self) -> Option<Self> {
        let end = self.start.checked_add(inner.end).filter(|end| *end <= self.end)?;
        Some(Self { start: self.start + inner.start, end })
    }

    /// Reads these bytes of a file in pieces of at most `most` bytes, until `work` says that it has enough.
    ///
    /// # Errors
    /// They cannot be read.
    pub(super) fn for_each_piece(
        self,
        file: &File,
        most: usize,
        mut work: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> io::Result<()> {
        let mut buffer = vec![0; usize::try_from(self.len()).map_or(most, |len| len.min(most))];
        for start in (self.start..self.end).step_by(most) {
            let piece = usize::try_from(self.end - start).map_or(buffer.len(), |left| left.min(buffer.len()));
            file.read_exact_at(&mut buffer[..piece], start)?;
            if work(&buffer[..piece]).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// The parts of this span between multiples of `unit`, in order.
    pub fn split_at_multiples(self, unit: u64) -> impl Iterator<Item = Self> {
        let mut rest = self;
        std::iter::from_fn(move || {
            let multiple = (rest.start / unit).checked_add(1).and_then(|next| next.checked_mul(unit));
            let part = Self { start: rest.start, end: multiple.map_or(rest.end, |end| end.min(rest.end)) };
            rest.start = part.end;
            (!part.is_empty()).then_some(part)
        })
    }
}

impl fmt::Display for ByteSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// Length of a span, in bytes, as a length in memory.
///
/// # Panics
/// If the span is longer than the address space. The bounds check against a mapped or read file excludes this on 64 bits.
pub(super) fn memory_len(span: ByteSpan) -> usize {
    usize::try_from(span.len()).expect("a span to be read fits memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_split_at_multiples() {
        let parts = |start, end| -> Vec<(u64, u64)> {
            let span = ByteSpan::new(start, end).unwrap();
            span.split_at_multiples(8).map(|part| (part.start, part.end)).collect()
        };
        assert_eq!(parts(5, 21), [(5, 8), (8, 16), (16, 21)]);
        assert_eq!(parts(8, 16), [(8, 16)]);
        assert_eq!(parts(9, 10), [(9, 10)]);
        assert_eq!(parts(9, 9), []);
        assert_eq!(parts(u64::MAX - 9, u64::MAX), [(u64::MAX - 9, u64::MAX - 7), (u64::MAX - 7, u64::MAX)]);
    }
}
