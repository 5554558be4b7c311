//! Decodes chunks of decoded files into the pool: for readers, and ahead of them.

use std::{
    borrow::Cow,
    collections::VecDeque,
    io::{self, BufReader, Read},
    sync::Arc,
    time::Duration,
};

use ckfs_format::zarr::read::ChunkError;
use ckfs_source::{BufferMemory, ByteSpan, FileId, Source, SourceError};
use ckfs_sync::{BoxedJob, Pool, PoolOptions, processors};
use ckfs_tensor::to_usize;

use super::{
    ahead::{ChunkKey, ExpectedChunk},
    chunk_pool::{ChunkPool, Decoded},
    coded::{CodedArray, CodedBytes, CodedChunk, DecodedFile, FileCoding},
};

/// Chunks of more stored bytes are decoded while these are read, where their codecs allow it. It takes longer, by a copy of the
/// decoded bytes, and saves as much memory as is stored.
const STREAMED_BYTES_MIN: u64 = 64 << 20;

/// Chunks of more bytes are decoded only if the system has memory for them. A damaged description may give a chunk any size, and
/// an allocation that fails would end the process.
const PROBED_BYTES_MIN: u64 = 64 << 20;

/// Stored bytes read at once then.
const STREAMED_STEP_BYTES: usize = 1 << 20;

/// A thread that decodes ahead ends after this time without a chunk to decode.
const IDLE: Duration = Duration::from_secs(10);

/// The decoded files of a source, and what is decoded of them.
pub(super) struct Decoder {
    inner: Arc<dyn Source>,
    pub(super) files: Arc<[DecodedFile]>,
    pub(super) pool: ChunkPool,
    /// Decode ahead of readers.
    threads: Pool<VecDeque<BoxedJob>>,
}

impl Decoder {
    /// Over the source in whose files the chunks are stored.
    pub(super) fn new(inner: Arc<dyn Source>, files: Arc<[DecodedFile]>) -> Self {
        let threads = PoolOptions { name: "ckfs-chunks", threads_max: processors(), idle: IDLE };
        Self { inner, files, pool: ChunkPool::new(), threads: Pool::of_closures(threads) }
    }

    fn place(&self, key: ChunkKey) -> (&DecodedFile, Cow<'_, CodedChunk>) {
        let decoded = &self.files[key.0 as usize];
        (decoded, decoded.chunk(key.1).expect("keys are of chunks that there are"))
    }

    fn expected(&self, key: ChunkKey) -> ExpectedChunk {
        let (decoded, chunk) = self.place(key);
        let stored = chunk.bytes.span().map_or(0, ByteSpan::len);
        let (len, stored_len) = match &decoded.coding {
            FileCoding::Array(array) => (array.chunk_bytes(), if is_streamed(array, stored) { 0 } else { stored }),
            FileCoding::Delta(tensor) => (decoded.len_bytes, tensor.stored_bytes_max()),
            FileCoding::Blocks(tensor) => (tensor.bytes_of(chunk.number), stored),
        };
        ExpectedChunk { key, len, stored_len }
    }

    /// Memory for the chunk of a decoded file that takes the most.
    pub(super) fn memory_bytes(&self, number: u32) -> u64 {
        let decoded = &self.files[number as usize];
        let stored = |at| self.expected((number, at)).stored_len;
        let stored_bytes = decoded.largest().map(stored).max().unwrap_or(0);
        let stored_bytes = BufferMemory::occupied_bytes(to_usize(stored_bytes)) as u64;
        let decoding_bytes = match &decoded.coding {
            FileCoding::Array(array) => array.decoding_bytes(),
            FileCoding::Delta(_) | FileCoding::Blocks(_) => {
                BufferMemory::occupied_bytes(to_usize(decoded.chunk_bytes())) as u64
            }
        };
        decoding_bytes.saturating_add(stored_bytes)
    }

    /// The decoded chunk, from memory or by decoding it.
    ///
    /// # Errors
    /// That of reading the stored bytes, or that they are none of the array's codecs.
    pub(super) fn chunk(&self, key: ChunkKey) -> Result<Arc<Decoded>, SourceError> {
        let ExpectedChunk { len, stored_len, .. } = self.expected(key);
        self.check_memory(key)?;
        let goes_on = || self.usable(key);
        self.pool.get(key, (len, stored_len), &goes_on, |stored, target| self.decode(key, stored, target))
    }

    /// Whether no file that a chunk is made of is poisoned or stalls.
    fn usable(&self, key: ChunkKey) -> Result<(), SourceError> {
        self.place(key).0.files().into_iter().try_for_each(|file| self.inner.health().usable(file))
    }

    /// Refuses a chunk for which the system has no memory.
    pub(super) fn check_memory(&self, key: ChunkKey) -> Result<(), SourceError> {
        let (decoded, chunk) = self.place(key);
        let len = self.expected(key).len;
        let mut probe = Vec::<u8>::new();
        // Unless the compiler thinks that somebody uses it, it leaves the allocation out.
        if len < PROBED_BYTES_MIN || std::hint::black_box(&mut probe).try_reserve_exact(to_usize(len)).is_ok() {
            return Ok(());
        }
        Err(self.undecodable(decoded, &chunk, ChunkError::memory(len)))
    }

    /// Decodes a chunk into `target`. `stored` has room for its stored bytes, unless they are streamed.
    fn decode(&self, key: ChunkKey, stored: &mut [u8], target: &mut [u8]) -> Result<(), SourceError> {
        let (decoded, chunk) = self.place(key);
        let stored_in = decoded.stored_in;
        let array = match &decoded.coding {
            FileCoding::Array(array) => array,
            FileCoding::Delta(tensor) => return tensor.decode(&*self.inner, stored, target),
            FileCoding::Blocks(tensor) => {
                let span = chunk.bytes.span().expect("blocks are in files");
                return tensor.decode(&*self.inner, span, stored, target);
            }
        };
        let stored = match &chunk.bytes {
            CodedBytes::Span(span) if is_streamed(array, span.len()) => {
                let mut bytes = StoredBytes {
                    source: &*self.inner,
                    file: stored_in,
                    at: span.start(),
                    end: span.end(),
                    error: None,
                };
                let stored = BufReader::with_capacity(STREAMED_STEP_BYTES, &mut bytes);
                let made = array.codecs().decode_stream(array.array.dtype, stored, target);
                if let Some(error) = bytes.error {
                    return Err(error);
                }
                self.inner.check(stored_in)?;
                return made.map_err(|error| self.undecodable(decoded, &chunk, error));
            }
            CodedBytes::Span(span) => {
                self.inner.read_into(stored_in, span.start(), stored)?;
                // What is decoded, and kept, must be what was pinned.
                self.inner.check(stored_in)?;
                &*stored
            }
            CodedBytes::Inline(bytes) => bytes,
        };
        array.decode(stored, target).map_err(|error| self.undecodable(decoded, &chunk, error))
    }

    /// A chunk that is none of the array's codecs.
    pub(super) fn undecodable(&self, decoded: &DecodedFile, chunk: &CodedChunk, error: ChunkError) -> SourceError {
        let span = chunk.bytes.span();
        let place = span.map_or_else(|| "in a node of the database".to_owned(), |span| format!("bytes {span}"));
        let action = match &decoded.coding {
            FileCoding::Array(array) => {
                format!("decode array {}, chunk {} ({place})", array.name, array.chunk_name(chunk))
            }
            FileCoding::Delta(_) | FileCoding::Blocks(_) => {
                format!("decode tensor {} ({place})", decoded.described(chunk).0)
            }
        };
        let error = io::Error::new(io::ErrorKind::InvalidData, error);
        SourceError::io(Arc::clone(&self.inner.pin(decoded.stored_in).path), action, error)
    }

    /// Has a chunk decoded in another thread, if there is room for it: a reader will want it soon. A failure is not reported: that
    /// reader meets it again.
    pub(super) fn expect(self: &Arc<Self>, key: ChunkKey) {
        if self.place(key).1.bytes.span().is_none() || self.check_memory(key).is_err() {
            return;
        }
        let expected = self.expected(key);
        if !self.pool.expect(expected, processors()) {
            return;
        }
        let decoder = Arc::downgrade(self);
        self.threads.submit(move || while decoder.upgrade().is_some_and(|decoder| decoder.decode_next()) {});
        // Readers decode by themselves then.
        while self.threads.take_refused(|jobs, _| jobs.pop_front()).is_some() {
            self.pool.end_ahead_thread();
        }
    }

    /// Decodes the next expected chunk; `false` if there is none, or no room for it.
    fn decode_next(&self) -> bool {
        self.pool.decode_next(|key, stored, target| {
            self.usable(key)?;
            self.decode(key, stored, target)
        })
    }
}

/// Whether the stored bytes of a chunk are decoded while they are read.
fn is_streamed(array: &CodedArray, stored_len: u64) -> bool {
    stored_len >= STREAMED_BYTES_MIN && array.codecs().can_stream()
}

/// Reads a span of a file of a source.
struct StoredBytes<'a> {
    source: &'a dyn Source,
    file: FileId,
    /// What is not read yet.
    at: u64,
    end: u64,
    error: Option<SourceError>,
}

impl Read for StoredBytes<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let len = target.len().min(to_usize(self.end - self.at));
        let read = self.source.read_into(self.file, self.at, &mut target[..len]);
        read.map_err(|error| {
            let message = io::Error::other(error.to_string());
            self.error = Some(error);
            message
        })?;
        self.at += len as u64;
        Ok(len)
    }
}
