//! Chunks that have no byte ranges: their bytes are elements only after they are decoded whole.
//!
//! The decoded chunks of one array that lie in one file are shown as one more file, a *decoded file*: chunk after chunk, all of
//! the same length. Then a decoded chunk is a span like any other, and every file has exactly one file that can change under it.

use std::{borrow::Cow, ops::Range, sync::Arc};

use ckfs_format::zarr::read::{Array, ArrayBytes, ChunkError, Codecs, Packing, ShardCodec};
use ckfs_source::{BufferMemory, ByteSpan, FileId};
use ckfs_tensor::{to_usize, unravel};

use super::super::{
    blocks::BlockTensor,
    delta::{DeltaTensor, Difference},
};

/// An array whose chunks are decoded.
#[derive(Debug)]
pub(super) struct CodedArray {
    pub(super) name: String,
    pub(super) array: Array,
    /// Whether the chunks are the inner ones of shards.
    pub(super) is_inner: bool,
}

/// Where the stored form of a chunk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CodedBytes {
    /// A span of the file.
    Span(ByteSpan),
    /// These bytes, which a node of the database has.
    Inline(Arc<[u8]>),
}

impl CodedBytes {
    /// The span of the file, if they are there.
    pub(super) const fn span(&self) -> Option<ByteSpan> {
        if let Self::Span(span) = self { Some(*span) } else { None }
    }

    /// How many they are.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Span(span) => span.len(),
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// These of them.
    pub(super) fn part(&self, range: &Range<u64>) -> Self {
        match self {
            Self::Span(span) => {
                Self::Span(ByteSpan::new(range.start, range.end).and_then(|part| span.slice(part)).unwrap_or(*span))
            }
            Self::Inline(bytes) => Self::Inline(bytes[to_usize(range.start)..to_usize(range.end)].into()),
        }
    }
}

/// A chunk, and where its stored form is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CodedChunk {
    /// Number of the chunk, or of its shard, in row-major order of the grid.
    pub(super) number: u64,
    /// Number of the chunk in the shard, likewise.
    pub(super) inner: u32,
    pub(super) bytes: CodedBytes,
}

/// How the chunks of a decoded file become bytes.
#[derive(Clone, Debug)]
pub(super) enum FileCoding {
    /// Each by the codecs of an array.
    Array(Arc<CodedArray>),
    /// The only one by differences from a stored tensor.
    Delta(Arc<DeltaTensor>),
    /// Each from blocks of a GGUF file.
    Blocks(Arc<BlockTensor>),
}

/// A file of decoded chunks.
#[derive(Clone, Debug)]
pub(crate) struct DecodedFile {
    pub(super) coding: FileCoding,
    /// The file with the stored chunks.
    pub(super) stored_in: FileId,
    /// The chunks in the order in which they are shown: that of their places. Those of blocks are computed.
    chunks: Vec<CodedChunk>,
    /// Length of the decoded file in bytes.
    pub(super) len_bytes: u64,
}

impl CodedArray {
    /// How shards hold the chunks, if these are inner ones.
    fn sharding(&self) -> Option<&ShardCodec> {
        self.array.sharding().filter(|_| self.is_inner)
    }

    /// Bytes of one decoded chunk.
    pub(super) fn chunk_bytes(&self) -> u64 {
        // An inner chunk is a part of a chunk.
        self.sharding().map_or_else(|| self.array.chunk_bytes(), |sharding| sharding.chunk_bytes(self.array.dtype))
    }

    /// Bytes of so many decoded chunks, if 64 bits count them.
    pub(super) fn bytes_of(&self, chunks: u64) -> Option<u64> {
        chunks.checked_mul(self.chunk_bytes())
    }

    /// Decodes a chunk of which `stored` are all bytes.
    ///
    /// # Errors
    /// [`ChunkError`]. `target` has then any content.
    pub(super) fn decode(&self, stored: &[u8], target: &mut [u8]) -> Result<(), ChunkError> {
        if self.is_inner { self.array.decode_inner(stored, target) } else { self.array.decode(stored, target) }
    }

    /// The codecs of a chunk.
    pub(super) fn codecs(&self) -> &Codecs {
        self.sharding().map_or(&self.array.codecs, |sharding| &sharding.codecs)
    }

    /// Memory that the decoding of one chunk takes beside that of its stored bytes.
    pub(super) fn decoding_bytes(&self) -> u64 {
        let chunk = BufferMemory::occupied_bytes(to_usize(self.chunk_bytes())) as u64;
        chunk.saturating_mul(self.codecs().copies())
    }

    /// The chunk's key, and its numbers in the shard.
    pub(super) fn chunk_name(&self, chunk: &CodedChunk) -> String {
        let key = self.array.key(&unravel(chunk.number, &self.array.grid()));
        let Some(sharding) = self.sharding() else { return key };
        format!("{key}, inner chunk {:?}", unravel(chunk.inner.into(), &sharding.grid).as_slice())
    }

    /// How chunks are stored, as `explain` and messages say it.
    pub(super) fn codec(&self, chunk: &CodedChunk) -> String {
        let mut words = words_of(self.codecs());
        if matches!(chunk.bytes, CodedBytes::Inline(_)) {
            words.push("in a node of the database".to_owned());
        }
        words.join(", ")
    }
}

/// The steps of codecs in words.
fn words_of(codecs: &Codecs) -> Vec<String> {
    let bytes = match &codecs.bytes {
        ArrayBytes::Elements { is_big_endian: true } => "bytes (big endian)".to_owned(),
        ArrayBytes::Elements { is_big_endian: false } => "bytes".to_owned(),
        ArrayBytes::Shard(sharding) => format!("sharding_indexed ({})", words_of(&sharding.codecs).join(", ")),
    };
    let packing = |packing: &Packing| match packing {
        Packing::Zstd => "zstd".to_owned(),
        Packing::Gzip => "gzip".to_owned(),
        Packing::Crc32c => "crc32c".to_owned(),
    };
    let order = codecs.order.is_some().then(|| "transpose".to_owned());
    order.into_iter().chain([bytes]).chain(codecs.packings.iter().map(packing)).collect()
}

impl DecodedFile {
    /// The decoded file of these chunks; `None` if it has more bytes than 64 bits count.
    pub(super) fn new(array: Arc<CodedArray>, stored_in: FileId, chunks: Vec<CodedChunk>) -> Option<Self> {
        let len_bytes = array.bytes_of(chunks.len() as u64)?;
        Some(Self { coding: FileCoding::Array(array), stored_in, chunks, len_bytes })
    }

    /// A tensor that is stored as differences.
    pub(crate) fn of_delta(tensor: DeltaTensor) -> Self {
        let Difference { file: stored_in, span, .. } = *tensor.last();
        let chunks = vec![CodedChunk { number: 0, inner: 0, bytes: CodedBytes::Span(span) }];
        let len_bytes = tensor.base.1.len();
        Self { coding: FileCoding::Delta(Arc::new(tensor)), stored_in, chunks, len_bytes }
    }

    /// A tensor that is stored as blocks.
    pub(crate) fn of_blocks(tensor: BlockTensor) -> Self {
        let (len_bytes, stored_in) = (tensor.len_bytes(), tensor.file);
        Self { coding: FileCoding::Blocks(Arc::new(tensor)), stored_in, chunks: Vec::new(), len_bytes }
    }

    /// The same, where the files are others.
    pub(crate) fn of_files(&self, file: &dyn Fn(FileId) -> FileId) -> Self {
        let coding = match &self.coding {
            FileCoding::Array(array) => FileCoding::Array(Arc::clone(array)),
            FileCoding::Delta(tensor) => FileCoding::Delta(Arc::new(tensor.of_files(file))),
            FileCoding::Blocks(tensor) => FileCoding::Blocks(tensor.of_files(file)),
        };
        Self { coding, stored_in: file(self.stored_in), ..self.clone() }
    }

    /// Bytes of one decoded chunk; 1 if it has none, so that it can be divided by.
    pub(super) fn chunk_bytes(&self) -> u64 {
        match &self.coding {
            FileCoding::Array(array) => array.chunk_bytes().max(1),
            FileCoding::Delta(_) => self.len_bytes.max(1),
            FileCoding::Blocks(tensor) => tensor.chunk_bytes().max(1),
        }
    }

    /// Whether it is a tensor of blocks.
    pub(super) const fn is_of_blocks(&self) -> bool {
        matches!(self.coding, FileCoding::Blocks(_))
    }

    /// What a chunk is called, and what it is coded with.
    pub(super) fn described(&self, chunk: &CodedChunk) -> (String, String) {
        match &self.coding {
            FileCoding::Array(array) => (array.chunk_name(chunk), array.codec(chunk)),
            FileCoding::Delta(tensor) => (tensor.name.clone(), tensor.described()),
            FileCoding::Blocks(tensor) => (tensor.name.clone(), tensor.of.name().to_owned()),
        }
    }

    /// The files whose bytes its bytes are made of.
    pub(super) fn files(&self) -> Vec<FileId> {
        match &self.coding {
            FileCoding::Array(_) => vec![self.stored_in],
            FileCoding::Blocks(tensor) => tensor.files(),
            FileCoding::Delta(tensor) => tensor.files().collect(),
        }
    }

    /// Numbers of chunks, the one with the most stored bytes among them.
    pub(super) fn largest(&self) -> Range<u64> {
        if self.is_of_blocks() { 0..u64::from(self.len_bytes > 0) } else { 0..self.chunks.len() as u64 }
    }

    /// The chunk of a number.
    pub(super) fn chunk(&self, number: u64) -> Option<Cow<'_, CodedChunk>> {
        if let FileCoding::Blocks(tensor) = &self.coding {
            let bytes = CodedBytes::Span(tensor.span_of(number)?);
            return Some(Cow::Owned(CodedChunk { number, inner: 0, bytes }));
        }
        self.chunks.get(usize::try_from(number).ok()?).map(Cow::Borrowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_64_bits_do_not_count_are_noticed() {
        let text = r#"{"zarr_format": 2, "shape": [1048576, 1048576], "chunks": [1048576, 1048576], "dtype": "|u1",
            "compressor": null, "fill_value": 0, "order": "C", "filters": null}"#;
        let array = Array::parse_v2(text.as_bytes()).unwrap();
        let coded = CodedArray { name: "x".to_owned(), array, is_inner: false };
        assert_eq!(coded.chunk_bytes(), 1 << 40);
        assert_eq!(coded.bytes_of(1 << 23), Some(1 << 63));
        assert_eq!(coded.bytes_of(1 << 24), None);
    }
}
