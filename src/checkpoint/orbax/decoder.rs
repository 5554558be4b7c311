//! Decodes chunks of decoded files into the pool: for readers, and ahead of them.

use std::{io, num::NonZeroUsize, sync::Arc, thread};

use super::{
    ahead::{ChunkKey, Expected},
    chunk_pool::{ChunkPool, Decoded},
    coded::{CodedBytes, CodedChunk, DecodedFile},
};
use crate::{
    format::zarr_read::ChunkError,
    source::{FileId, Source, SourceError},
    tensor::to_usize,
};

/// The decoded files of a source, and what is decoded of them.
#[derive(Debug)]
pub(super) struct Decoder {
    inner: Arc<dyn Source>,
    pub(super) files: Vec<DecodedFile>,
    pub(super) pool: Arc<ChunkPool>,
}

impl Decoder {
    /// Over the source in whose files the chunks are stored.
    pub(super) fn new(inner: Arc<dyn Source>, files: Vec<DecodedFile>) -> Self {
        Self { inner, files, pool: ChunkPool::new() }
    }

    fn place(&self, key: ChunkKey) -> (&DecodedFile, &CodedChunk) {
        let decoded = &self.files[key.0 as usize];
        (decoded, &decoded.chunks[to_usize(key.1)])
    }

    fn expected(&self, key: ChunkKey) -> Expected {
        let (decoded, chunk) = self.place(key);
        let stored_len = match &chunk.bytes {
            CodedBytes::Span(span) => span.len(),
            CodedBytes::Inline(_) => 0,
        };
        Expected { key, len: decoded.array.chunk_bytes(), stored_len }
    }

    /// The decoded chunk, from memory or by decoding it.
    ///
    /// # Errors
    /// That of reading the stored bytes, or that they are none of the array's codecs.
    pub(super) fn chunk(&self, key: ChunkKey) -> Result<Arc<Decoded>, SourceError> {
        let stored_in = FileId(self.place(key).0.stored_in);
        let Expected { len, stored_len, .. } = self.expected(key);
        let goes_on = || self.inner.health().usable(stored_in);
        self.pool.get(key, (len, stored_len), &goes_on, |stored, target| self.decode(key, stored, target))
    }

    /// Decodes a chunk into `target`. `stored` has room for its stored bytes.
    fn decode(&self, key: ChunkKey, stored: &mut [u8], target: &mut [u8]) -> Result<(), SourceError> {
        let (decoded, chunk) = self.place(key);
        let stored_in = FileId(decoded.stored_in);
        let stored = match &chunk.bytes {
            CodedBytes::Span(span) => {
                self.inner.read_into(stored_in, span.start(), stored)?;
                // What is decoded, and kept, must be what was pinned.
                self.inner.check(stored_in)?;
                &*stored
            }
            CodedBytes::Inline(bytes) => bytes,
        };
        decoded.array.decode(stored, target).map_err(|error| self.undecodable(decoded, chunk, error))
    }

    /// A chunk that is none of the array's codecs.
    pub(super) fn undecodable(&self, decoded: &DecodedFile, chunk: &CodedChunk, error: ChunkError) -> SourceError {
        let place = match &chunk.bytes {
            CodedBytes::Span(span) => format!("bytes {span}"),
            CodedBytes::Inline(_) => "in a node of the database".to_owned(),
        };
        let (array, chunk) = (&decoded.array.name, decoded.array.chunk_name(chunk));
        SourceError::Io {
            file: self.inner.pin(FileId(decoded.stored_in)).path.clone(),
            action: format!("decode array {array}, chunk {chunk} ({place})"),
            error: Arc::new(io::Error::new(io::ErrorKind::InvalidData, error)),
        }
    }

    /// Has a chunk decoded in another thread, if there is room for it: a reader will want it soon. A failure is not reported: that
    /// reader meets it again.
    pub(super) fn expect(self: &Arc<Self>, key: ChunkKey) {
        let expected = self.expected(key);
        if expected.stored_len == 0 {
            return;
        }
        let threads_max = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        if !self.pool.expect(expected, threads_max) {
            return;
        }
        let decoder = Arc::downgrade(self);
        let work = move || while decoder.upgrade().is_some_and(|decoder| decoder.decode_next()) {};
        if thread::Builder::new().name("ckfs-decode".to_owned()).spawn(work).is_err() {
            self.pool.end_ahead_thread();
        }
    }

    /// Decodes the next expected chunk; `false` if there is none, or no room for it.
    fn decode_next(&self) -> bool {
        self.pool.decode_next(|key, stored, target| {
            self.inner.health().usable(FileId(self.place(key).0.stored_in))?;
            self.decode(key, stored, target)
        })
    }
}
