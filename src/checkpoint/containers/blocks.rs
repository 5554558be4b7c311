//! A tensor of a GGUF file whose blocks become f32.

use std::sync::Arc;

use ckfs_format::gguf::BlockType;
use ckfs_source::{ByteSpan, FileId, Source, SourceError};
use ckfs_tensor::to_usize;

/// Elements that are decoded together: whole blocks of every type.
const CHUNK_ELEMENTS: u64 = 1 << 18;
/// Bytes of a decoded element.
const ELEMENT_BYTES: u64 = 4;

/// A tensor that is stored as blocks.
#[derive(Clone, Debug)]
pub(crate) struct BlockTensor {
    /// Its name in the file.
    pub(crate) name: String,
    /// The type of its blocks.
    pub(crate) of: &'static BlockType,
    /// The file.
    pub(crate) file: FileId,
    /// Where in that file.
    pub(crate) span: ByteSpan,
    /// Whether each element is one more than the model's, as llama.cpp has the norms of Gemma.
    pub(crate) is_one_more: bool,
    /// A tensor of the same form whose rows alternate with this one's, and the elements of a row.
    pub(crate) other: Option<(FileId, ByteSpan, u64)>,
}

impl BlockTensor {
    /// Tensors that it is made of.
    fn parts(&self) -> u64 {
        1 + u64::from(self.other.is_some())
    }

    /// Elements of each part that are decoded together.
    fn chunk_elements(&self) -> u64 {
        self.other.map_or(CHUNK_ELEMENTS, |(.., row)| (CHUNK_ELEMENTS / 2 / row).max(1) * row)
    }

    /// Its bytes when decoded.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.span.len() / self.of.bytes() * self.of.elements() * ELEMENT_BYTES * self.parts()
    }

    /// The files that it is made of.
    pub(crate) fn files(&self) -> Vec<FileId> {
        std::iter::once(self.file).chain(self.other.map(|(file, ..)| file)).collect()
    }

    /// The bytes of a decoded chunk, unless it is the last one.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.len_bytes().min(self.chunk_elements() * ELEMENT_BYTES * self.parts())
    }

    /// The decoded bytes of a chunk.
    pub(crate) fn bytes_of(&self, chunk: u64) -> u64 {
        (self.len_bytes() - chunk * self.chunk_bytes()).min(self.chunk_bytes())
    }

    /// Where a chunk is stored; of two parts, the first. `None` if there is no such chunk.
    pub(crate) fn span_of(&self, chunk: u64) -> Option<ByteSpan> {
        let bytes = self.chunk_elements() / self.of.elements() * self.of.bytes();
        let start = chunk.checked_mul(bytes)?.checked_add(self.span.start())?;
        let end = self.span.end().min(start.checked_add(bytes)?);
        ByteSpan::new(start, end).filter(|span| !span.is_empty())
    }

    /// The same, where the files are others.
    pub(crate) fn of_files(&self, file: &dyn Fn(FileId) -> FileId) -> Arc<Self> {
        let other = self.other.map(|(other, span, row)| (file(other), span, row));
        Arc::new(Self { file: file(self.file), other, ..self.clone() })
    }

    /// Decodes a chunk into `target`. `stored` has room for its stored bytes.
    ///
    /// # Errors
    /// That of reading.
    pub(crate) fn decode(
        &self,
        source: &dyn Source,
        span: ByteSpan,
        stored: &mut [u8],
        target: &mut [u8],
    ) -> Result<(), SourceError> {
        let mut part = |file: FileId, start: u64, target: &mut [u8]| {
            source.read_into(file, start, stored)?;
            // What is decoded, and kept, must be what was pinned.
            source.check(file)?;
            self.of.decode(stored, target);
            Ok(())
        };
        match self.other {
            None => part(self.file, span.start(), target)?,
            Some((file, other, row)) => {
                let mut values = vec![0; target.len() / 2];
                let row = to_usize(row * ELEMENT_BYTES);
                let starts = [(self.file, span.start()), (file, other.start() + (span.start() - self.span.start()))];
                for (number, (file, start)) in starts.into_iter().enumerate() {
                    part(file, start, &mut values)?;
                    for (from, to) in values.chunks_exact(row).zip(target.chunks_exact_mut(2 * row)) {
                        to[number * row..][..row].copy_from_slice(from);
                    }
                }
            }
        }
        if self.is_one_more {
            for value in target.as_chunks_mut::<4>().0 {
                *value = (f32::from_le_bytes(*value) - 1.0).to_le_bytes();
            }
        }
        Ok(())
    }
}
