//! Where the bytes of a checkpoint come from.
//!
//! A source is a fixed list of files. Each file is pinned when the source is made: its length and identity are fixed from then
//! on. The interface, [`Source`], is narrow: a file returns spans of bytes, exactly or as an error. A source whose files
//! are mapped provides its maps ([`Source::maps`]). Then contiguous reads ([`Maps::with_kernel_bytes`]) and conversions
//! ([`Maps::with`]) need no copy.
//!
//! A file that differs from the pinned one is *poisoned*: from then on every access to it is an error. It is never trusted
//! again within this process, since it is unknown which of its bytes were read before and which after the change.
//!
//! A file whose storage does not answer *stalls* ([`stall`]): every access to it is an error until the requested bytes come.
//! After that it works as before.
//!
//! Files of a repository are opened beneath its directory ([`Beneath`]), so that no link adds a file from elsewhere to it. The
//! permissions of a file are read once, when it is opened ([`permission`]).
//!
//! A source does not list a repository, know tensors, merge neighbouring spans, or cache. Those belong to the layers above.

mod beneath;
mod health;
mod kernel_bytes;
pub mod local;
pub mod permission;
pub mod stall;
mod survey;

use std::{
    fmt,
    fs::File,
    io,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

pub use beneath::{Beneath, Found, Opened};
pub use health::Health;
pub use kernel_bytes::{KernelBytes, Served};
pub use local::{LocalFiles, ResidentWindow, SourceIo};
pub use stall::{Fetches, Stall, Waiting};

use permission::Gates;

/// A file of a source: index into the source's list of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u32);

impl FileId {
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
}

impl fmt::Display for ByteSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// The property of a file that differs from the pinned one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Aspect {
    /// Length in bytes.
    Size,
    /// Modification time, in nanoseconds.
    Modified,
    /// Time of the last change of the inode, in nanoseconds: content, name, links or permissions.
    StatusChanged,
    /// Device number: another file system.
    Device,
    /// Inode number: another file.
    Inode,
    /// A version that the source counts itself.
    Version,
}

impl fmt::Display for Aspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Size => "size in bytes",
            Self::Modified => "modification time",
            Self::StatusChanged => "status change time",
            Self::Device => "device",
            Self::Inode => "inode",
            Self::Version => "version",
        })
    }
}

/// Why bytes could not be read. Cheap to clone: several readers may wait for one failed read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SourceError {
    /// The file differs from the pinned one. Sticky.
    #[error("{}: changed since it was opened: {aspect}: expected {expected}, found {found}", file.display())]
    Changed {
        /// The file.
        file: Arc<Path>,
        /// The property that differs.
        aspect: Aspect,
        /// Its pinned value.
        expected: i128,
        /// Its value now.
        found: i128,
    },
    /// A page of the mapped file could not be read (SIGBUS): the file was truncated, or the device failed. Sticky.
    #[error("{}: bytes {span} could not be mapped: the file was truncated or its device failed", file.display())]
    Fault {
        /// The file.
        file: Arc<Path>,
        /// The span during whose read the fault occurred.
        span: ByteSpan,
    },
    /// The file ended early, although its length still equals the pinned one. Sticky.
    #[error("{}: bytes {span}: expected {} bytes, found {found}", file.display(), span.len())]
    Short {
        /// The file.
        file: Arc<Path>,
        /// The requested span.
        span: ByteSpan,
        /// Bytes returned.
        found: u64,
    },
    /// The requested span is not inside the file.
    #[error("{}: bytes {span} are outside the file of {len_bytes} bytes", file.display())]
    OutOfBounds {
        /// The file.
        file: Arc<Path>,
        /// The requested span.
        span: ByteSpan,
        /// Pinned length.
        len_bytes: u64,
    },
    /// The operating system failed.
    #[error("{}: cannot {action}: {error}", file.display())]
    Io {
        /// The file.
        file: Arc<Path>,
        /// The failed action: `open`, `read bytes 0..8`.
        action: String,
        /// The system's error.
        #[source]
        error: Arc<io::Error>,
    },
    /// The storage does not answer. The error ends when it does.
    #[error("{}: stalled: {what} got no answer within {} s; the file is read again once the storage answers", file.display(), limit.as_secs_f32())]
    Stalled {
        /// The file.
        file: Arc<Path>,
        /// The action without an answer: `read bytes 0..8`.
        what: String,
        /// The time limit.
        limit: Duration,
    },
    /// The limit of this process is too low for files that all stay open.
    #[error(
        "{files} source files stay open: expected a limit of {needed} open files or more, found {limit}; raise it (ulimit -n \
         {needed}, or LimitNOFILE={needed} of a systemd unit)"
    )]
    FileLimit {
        /// Source files.
        files: usize,
        /// Descriptors that the process needs, including those of these files.
        needed: u64,
        /// Most descriptors that the process may have open.
        limit: u64,
    },
    /// Only regular files can be pinned.
    #[error("{}: not a regular file", file.display())]
    NotRegular {
        /// The file.
        file: Arc<Path>,
    },
}

impl SourceError {
    /// The file that this error poisons, if it is such an error.
    pub fn poisoned_file(&self) -> Option<&Path> {
        match self {
            Self::Changed { file, .. } | Self::Fault { file, .. } | Self::Short { file, .. } => Some(file),
            Self::OutOfBounds { .. }
            | Self::Io { .. }
            | Self::Stalled { .. }
            | Self::FileLimit { .. }
            | Self::NotRegular { .. } => None,
        }
    }
}

/// Why and since when a file is poisoned.
#[derive(Clone, Debug)]
pub struct Poison {
    /// The error that poisoned it.
    pub error: SourceError,
    /// Time of that error.
    pub since: SystemTime,
}

/// The properties of a file when it was pinned.
#[derive(Clone, Debug)]
pub struct Pin {
    /// The path by which it was opened, for messages.
    pub path: Arc<Path>,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Modification time.
    pub modified: SystemTime,
    /// The permissions of the file and of the directories above it when it was opened.
    pub gates: Gates,
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

/// Where the bytes of a checkpoint come from: a fixed list of pinned files. Blocking; called from many threads.
///
/// Every method that takes a [`FileId`] panics if the source has no such file. The creator of the source assigns the ids, so that
/// a wrong one is an error in the program.
///
/// Bytes read from a file count only if [`Source::check`] succeeds after the read. A file may change at any moment,
/// and a truncation within a page gives zeros, not a fault.
pub trait Source: fmt::Debug + Send + Sync {
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
    /// [`SourceError::OutOfBounds`], [`SourceError::Io`], or the error that poisoned the file. The content of the parts is then
    /// unspecified.
    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError>;

    /// Most bytes between two spans that are fetched as one, because that costs less than another request.
    fn gap_bytes(&self) -> u64 {
        local::GAP_BYTES
    }

    /// Which files are poisoned or stall.
    fn health(&self) -> &Health;

    /// The maps of its files, if it has any.
    fn maps(&self) -> Option<&dyn Maps> {
        None
    }

    /// The open file, from which the kernel can read by itself. `None` if there is none or it is poisoned.
    fn backing(&self, file: FileId) -> Option<Arc<File>> {
        let _ = file;
        None
    }
}

/// Files of a source that are mapped in this process: a fast way to fetch, and advice about their pages.
pub trait Maps {
    /// Whether a file is mapped. If it is not, the methods below do nothing, except for the advice to read.
    fn is_mapped(&self, file: FileId) -> bool;

    /// Runs `work` on the mapped bytes of a span, guarded against lost pages: if a page is gone, `work` reads zeros and the
    /// result is an error. Calls may nest. `None`, without calling `work`, if the file is not mapped; the caller then fetches.
    ///
    /// # Errors
    /// [`SourceError::OutOfBounds`], or the error that poisoned the file. The output of `work` is then invalid.
    fn with(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>>;

    /// Passes the mapped bytes of a span to `reply` as a kernel-only buffer. Checks before and after that the file is identical
    /// to the pinned one. `None`, without calling `reply`, if there is no such map or no such span; the caller then fetches.
    ///
    /// # Errors
    /// As [`Source::check`]. If `reply` was called, the bytes must not be trusted.
    fn with_kernel_bytes(
        &self,
        file: FileId,
        span: ByteSpan,
        reply: &mut dyn FnMut(KernelBytes<'_>),
    ) -> Option<Result<(), SourceError>>;

    /// Advises that a span will be read soon. Never fails; may do nothing.
    fn will_need(&self, file: FileId, span: ByteSpan);

    /// Advises that mapped pages visited from now on will be visited again soon, as by the next of many transposed tiles.
    fn will_return(&self);

    /// Prefaults a span for [`Maps::with`], as far as its pages are in memory already. Returns whether there is room for more.
    /// The mapped pages are kept as after [`Maps::will_return`].
    fn prefault(&self, file: FileId, span: ByteSpan) -> bool;

    /// Drops pages kept for readers if there were none lately. To be called every few seconds.
    fn trim(&self);

    /// Sets the most bytes of mapped pages that may stay resident: normally, and while the same pages are visited again.
    fn bound(&self, usual_bytes: u64, again_bytes: u64);
}

/// Derived methods, the same for every source.
impl dyn Source + '_ {
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

    /// The maps, if this file is mapped.
    pub fn maps_of(&self, file: FileId) -> Option<&dyn Maps> {
        self.maps().filter(|maps| maps.is_mapped(file))
    }
}

/// Length of a span, in bytes, as a length in memory.
///
/// # Panics
/// If the span is longer than the address space. The bounds check against a mapped or read file excludes this on 64 bits.
fn memory_len(span: ByteSpan) -> usize {
    usize::try_from(span.len()).expect("a span to be read fits memory")
}
