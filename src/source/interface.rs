//! The interface of a source: what each kind of source decides for itself.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use super::{
    content_name::ContentName,
    digest::Compared,
    error::SourceError,
    health::Health,
    kernel_bytes::KernelBytes,
    permission::AccessRules,
    remote::{RemoteCounters, cache::CacheLimit},
    span::{ByteSpan, FileId},
};

/// A call of `pread` costs as much as copying about this many bytes.
const GAP_BYTES: u64 = 1 << 10;

/// The properties of a file when it was pinned.
#[derive(Clone, Debug)]
pub struct Pin {
    /// The path by which it was opened, for messages.
    pub path: Arc<Path>,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Modification time.
    pub modified: SystemTime,
    /// What names its content.
    pub content: ContentName,
    /// The permissions of the file and of the directories above it when it was opened.
    pub gates: AccessRules,
}

/// Bytes to fetch, and their target.
#[derive(Debug)]
pub struct FetchPart<'a> {
    /// First byte in the file.
    pub start: u64,
    /// Receives the bytes from `start` on; its length is their number.
    pub target: &'a mut [u8],
}

impl FetchPart<'_> {
    /// The bytes of the file, or `None` if their end overflows.
    pub fn span(&self) -> Option<ByteSpan> {
        ByteSpan::of_len(self.start, self.target.len() as u64)
    }
}

/// Parts of one file to fetch.
#[derive(Debug)]
pub struct FileFetch<'p, 'b> {
    /// The file.
    pub file: FileId,
    /// Its parts.
    pub parts: &'p mut [FetchPart<'b>],
}

/// How a chunk is stored that a source decodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coded {
    /// The chunk, as its format names it.
    pub chunk: String,
    /// What it is coded with.
    pub codec: String,
    /// Its coded bytes in the file of the same path; `None` if they are no span of it.
    pub stored: Option<ByteSpan>,
}

/// Proof that a reply was called with the bytes of a read. A reply returns it, so that a read cannot succeed without one.
#[derive(Debug)]
#[must_use = "a read returns it to its caller"]
pub struct Replied(());

impl Replied {
    /// What a reply returns when it has taken the bytes, whatever it did with them.
    #[expect(clippy::new_without_default, reason = "only a reply makes one, and says so")]
    pub const fn new() -> Self {
        Self(())
    }
}

/// Why a read failed, and whether its reply was called before.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct ReadFailure<E> {
    /// Why it failed.
    pub error: E,
    /// The token, if the reply was called: a source changed during the read, and the bytes must not be trusted.
    pub replied: Option<Replied>,
}

impl<E> ReadFailure<E> {
    /// The same with another error.
    pub fn map<F>(self, to: impl FnOnce(E) -> F) -> ReadFailure<F> {
        ReadFailure { error: to(self.error), replied: self.replied }
    }
}

/// An error before the reply was called.
impl<E> From<E> for ReadFailure<E> {
    fn from(error: E) -> Self {
        Self { error, replied: None }
    }
}

/// Which of several copies of a tensor counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicates {
    /// That of the file which the index names. What the index does not name is left out.
    Index,
    /// That of the last file, as engines do.
    Last,
    /// None: copies are refused.
    Refuse,
}

/// Where the bytes of a checkpoint come from: a fixed list of pinned files. Blocking; called from many threads.
///
/// Every method that takes a [`FileId`] panics if the source has no such file. The creator of the source assigns the ids, so that
/// a wrong one is an error in the program.
///
/// Bytes read from a file count only if [`Source::check`] succeeds after the read. A file may change at any moment,
/// and a truncation within a page gives zeros, not a fault.
pub trait Source: Send + Sync {
    /// Number of files; their ids count from 0.
    fn file_count(&self) -> usize;

    /// The pinned properties of a file.
    fn pin(&self, file: FileId) -> &Pin;

    /// Checks that the file is still identical to the pinned one; cheap enough (0.2 us) to be called after every read.
    ///
    /// The first failure poisons the file, counts it and logs it; later calls return the same error again.
    ///
    /// # Errors
    /// The error that poisoned the file, or [`SourceError::Io`] if the system cannot tell.
    fn check(&self, file: FileId) -> Result<(), SourceError>;

    /// As [`Source::check`], and that the path still names the pinned file.
    ///
    /// # Errors
    /// As [`Source::check`].
    fn check_path(&self, file: FileId) -> Result<(), SourceError> {
        self.check(file)
    }

    /// Fills all parts, in any order and, where that helps, at the same time. The only call that waits for bytes.
    ///
    /// # Errors
    /// [`SourceError::Refused`], [`SourceError::Io`], or the error that poisoned the file. The content of the parts is then
    /// unspecified.
    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError>;

    /// As [`Source::fetch`], for several files, each of which is named once. A source that can work on several at a time does.
    ///
    /// # Errors
    /// As [`Source::fetch`], with the file. The content of all parts is then unspecified.
    fn fetch_files(&self, files: &mut [FileFetch<'_, '_>]) -> Result<(), (FileId, SourceError)> {
        files
            .iter_mut()
            .try_for_each(|FileFetch { file, parts }| self.fetch(*file, parts).map_err(|error| (*file, error)))
    }

    /// Most bytes between two spans that are fetched as one, because that costs less than another request.
    fn gap_bytes(&self) -> u64 {
        GAP_BYTES
    }

    /// Which files are poisoned or stall.
    fn health(&self) -> &Health;

    /// The maps of its files, if it has any.
    fn maps(&self) -> Option<&dyn Maps> {
        None
    }

    /// What its remote files need, if it has any.
    fn remote(&self) -> Option<&dyn RemoteSource> {
        None
    }

    /// The chunks that it decodes, if it decodes any.
    fn chunks(&self) -> Option<&dyn DecodedChunks> {
        None
    }

    /// Whether bytes of a file were read from this source.
    fn is_used(&self, _: FileId) -> bool {
        true
    }

    /// Compares the bytes of a file with the digest that is known of it, unless they were compared before. Waits for the result.
    ///
    /// # Errors
    /// [`SourceError::Lost`] if the bytes have another digest, or the error that poisoned the file before.
    fn compare(&self, _: FileId) -> Result<Compared, SourceError> {
        Ok(Compared::Unknown)
    }

    /// Notes that a caller has compared a file with the digest that is known of it, and found it right.
    fn note_right(&self, _: FileId) {}

    /// The open file, from which the kernel can read directly. `None` if there is none or it is poisoned.
    fn backing(&self, _: FileId) -> Option<Arc<File>> {
        None
    }
}

/// Remote files of a source: requests ahead of readers, and the state of their disk cache.
///
/// A file that is not remote, or that only a wrapper of the source has, needs nothing.
pub trait RemoteSource: Sync {
    /// Counts of remote reads.
    fn counters(&self) -> &RemoteCounters;

    /// Bytes to request ahead of a sequential reader.
    fn ahead_bytes(&self) -> u64;

    /// Requests spans that will be needed, behind everything that readers wait for; does not wait. Returns false if the source has
    /// enough requests for now. Spans of one call are parts of one strided piece, so that small gaps may be fetched with them.
    fn prefetch(&self, file: FileId, spans: &[ByteSpan]) -> bool;

    /// [`RemoteSource::prefetch`] brings gaps of at most this many bytes between spans of one call.
    fn ahead_gap_bytes(&self, file: FileId) -> u64;

    /// Number of requests made by [`RemoteSource::prefetch`] that are not done.
    fn ahead_jobs(&self) -> usize;

    /// What a read of these spans would have to bring: in order, without overlaps, and in the units in which the source brings
    /// bytes.
    fn absent_spans(&self, file: FileId, spans: &[ByteSpan]) -> Vec<ByteSpan>;

    /// The directory of the disk cache, and what bounds it. `None` if there is no such directory, or no place in it for one of the
    /// files.
    fn cache_limit(&self) -> Option<(PathBuf, CacheLimit)>;

    /// Places the files that are complete where programs of their service look for them, as far as the settings say so. Waits for
    /// that. Returns the directories that are complete for those programs.
    ///
    /// # Errors
    /// A complete file has other bytes than its service says.
    fn share(&self) -> Result<Vec<PathBuf>, SourceError>;
}

/// Files of a source that are made of coded chunks, which it decodes.
pub trait DecodedChunks {
    /// How byte `at` of a file is stored; `None` if the file is not made of coded chunks.
    fn coded(&self, file: FileId, at: u64) -> Option<Coded>;

    /// As [`Source::fetch`] of one part of a file for which [`DecodedChunks::coded`] gives an answer, with a slow decoder that
    /// shares no code with the usual one, for comparison.
    ///
    /// # Errors
    /// As [`Source::fetch`].
    fn decode_by_definition(&self, file: FileId, start: u64, target: &mut [u8]) -> Result<(), SourceError>;

    /// Bytes of the largest chunk, which is decoded as a whole.
    fn chunk_bytes_max(&self) -> u64;

    /// Memory in bytes that decoding one chunk of a file takes, at most; 0 if the file is not made of coded chunks.
    fn memory_bytes(&self, file: FileId) -> u64;

    /// Sets the most bytes of decoded chunks that stay in memory.
    fn bound_bytes(&self, bytes_max: u64);

    /// Bytes of decoded chunks, and of the buffers to decode them, that are in memory now.
    fn held_bytes(&self) -> u64;

    /// Chunks decoded so far.
    fn decoded_count(&self) -> u64;
}

/// Files of a source that are mapped in this process: a fast way to fetch, and advice about their pages.
pub trait Maps {
    /// Whether a file is mapped. If it is not, the methods below do nothing, except for the advice to read.
    fn is_mapped(&self, file: FileId) -> bool;

    /// Runs `work` on the mapped bytes of a span, guarded against lost pages: if a page is gone, `work` reads zeros and the
    /// result is an error. Calls may nest. `None`, without calling `work`, if the file is not mapped; the caller then fetches.
    ///
    /// # Errors
    /// [`SourceError::Refused`], or the error that poisoned the file. The output of `work` is then invalid.
    fn with(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>>;

    /// Tells that `bytes` of a span that was passed to `work` were of use; the others lay in between.
    fn used(&self, _file: FileId, _span: ByteSpan, _bytes: u64) {}

    /// Whether bytes of a span may have to be brought from a remote service first. If so, [`Maps::with_parts`] brings fewer.
    fn is_partial(&self, _file: FileId, _span: ByteSpan) -> bool {
        false
    }

    /// As [`Maps::with`], for `work` that looks only at the bytes of `parts`, which lie in `span`, in order and apart. The others may
    /// be anything.
    ///
    /// # Errors
    /// As [`Maps::with`].
    fn with_parts(
        &self,
        file: FileId,
        span: ByteSpan,
        _parts: &[ByteSpan],
        work: &mut dyn FnMut(&[u8]),
    ) -> Option<Result<(), SourceError>> {
        self.with(file, span, work)
    }

    /// Passes the mapped bytes of a span to `reply` as a kernel-only buffer. Checks before and after that the file is identical
    /// to the pinned one. `None`, without calling `reply`, if there is no such map or no such span; the caller then fetches.
    ///
    /// # Errors
    /// As [`Source::check`].
    fn with_kernel_bytes(
        &self,
        file: FileId,
        span: ByteSpan,
        reply: &mut dyn FnMut(KernelBytes<'_>) -> Replied,
    ) -> Option<Result<Replied, ReadFailure<SourceError>>>;

    /// Advises that a span will be read soon. Never fails; may do nothing. Returns whether storage was asked for some of it, which
    /// may have taken as long as storage takes.
    fn will_need(&self, file: FileId, span: ByteSpan) -> bool;

    /// Advises that mapped pages visited from now on will be visited again soon, as by the next of many transposed tiles.
    fn will_revisit(&self);

    /// Drops pages kept for readers if there were none lately. To be called every few seconds.
    fn trim(&self);

    /// Sets the most bytes of mapped pages that may stay resident: normally, and while the same pages are visited again.
    fn bound(&self, usual_bytes: u64, again_bytes: u64);
}

impl dyn RemoteSource + '_ {
    /// Bytes of [`RemoteSource::absent_spans`].
    pub fn absent_bytes(&self, file: FileId, spans: &[ByteSpan]) -> u64 {
        self.absent_spans(file, spans).iter().map(|span| span.len()).sum()
    }
}

/// Derived methods, the same for every source.
impl dyn Source + '_ {
    /// All files.
    pub fn files(&self) -> impl Iterator<Item = FileId> + use<> {
        (0..self.file_count()).map(FileId::at)
    }

    /// Pinned length of a file in bytes.
    pub fn len_bytes(&self, file: FileId) -> u64 {
        self.pin(file).len_bytes
    }

    /// The path by which a file was opened, for messages.
    pub fn path(&self, file: FileId) -> &Path {
        &self.pin(file).path
    }

    /// Fills `target` with the bytes from `start` on.
    ///
    /// # Errors
    /// As [`Source::fetch`].
    pub fn read_into(&self, file: FileId, start: u64, target: &mut [u8]) -> Result<(), SourceError> {
        self.fetch(file, &mut [FetchPart { start, target }])
    }

    /// `len` bytes from `start` on.
    ///
    /// # Errors
    /// As [`Source::fetch`].
    ///
    /// # Panics
    /// If there are more than there are addresses. The caller knows that they fit memory.
    pub fn read_bytes(&self, file: FileId, start: u64, len: u64) -> Result<Vec<u8>, SourceError> {
        let mut bytes = vec![0; usize::try_from(len).expect("bytes fit memory")];
        self.read_into(file, start, &mut bytes).map(|()| bytes)
    }

    /// All bytes of a file of at most `bytes_max`, which fit memory.
    ///
    /// # Errors
    /// The reason: it is longer, or its bytes do not come.
    ///
    /// # Panics
    /// If a file within the limit has more bytes than there are addresses.
    pub fn read_whole(&self, file: FileId, bytes_max: u64) -> Result<Vec<u8>, String> {
        let len = self.len_bytes(file);
        if len > bytes_max {
            return Err(format!("expected at most {bytes_max} bytes, found {len}"));
        }
        self.read_bytes(file, 0, len).map_err(|error| error.to_string())
    }

    /// How byte `at` of a file is stored, if the source decodes it from a chunk.
    pub fn coded(&self, file: FileId, at: u64) -> Option<Coded> {
        self.chunks()?.coded(file, at)
    }

    /// The maps, if this file is mapped.
    pub fn maps_of(&self, file: FileId) -> Option<&dyn Maps> {
        self.maps().filter(|maps| maps.is_mapped(file))
    }
}
