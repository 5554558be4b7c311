//! Why bytes could not be read.

use std::{
    fmt, io,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::{calendar::utc_of_ns, remote::RemoteError, span::ByteSpan};

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
    /// Whether a directory names it: 0 after it was deleted or replaced.
    Named,
    /// A version that the source counts itself.
    Version,
}

impl fmt::Display for Aspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Size => "size in bytes",
            Self::Modified => "modification time",
            Self::StatusChanged => "status change time (content, name, links or permissions)",
            Self::Named => "names (0 when deleted or replaced)",
            Self::Device => "device",
            Self::Inode => "inode",
            Self::Version => "version",
        })
    }
}

impl Aspect {
    /// A value of the aspect; times are in nanoseconds since 1970.
    fn shown(self, value: i128) -> String {
        match self {
            Self::Modified | Self::StatusChanged => utc_of_ns(value),
            Self::Size | Self::Named | Self::Device | Self::Inode | Self::Version => value.to_string(),
        }
    }
}

/// Why bytes could not be read. Cheap to clone: several readers may wait for one failed read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SourceError {
    /// The file differs from the pinned one. Sticky.
    #[error(
        "{}: changed since it was opened: {aspect}: expected {}, found {}",
        file.display(),
        aspect.shown(*expected),
        aspect.shown(*found)
    )]
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
    /// A remote object has another version than the pinned one. Sticky.
    #[error("{}: changed since it was listed: expected version {expected}, found {found}", file.display())]
    OtherVersion {
        /// The file.
        file: Arc<Path>,
        /// The pinned version.
        expected: String,
        /// The version now, or the service's reply.
        found: String,
    },
    /// The bytes have another digest than is known of them. Sticky.
    #[error("{}: expected {kind} {expected}, found {found}: {advice}", file.display())]
    Corrupt {
        /// The file.
        file: Arc<Path>,
        /// The kind of digest.
        kind: &'static str,
        /// The digest that the service or the file's name says.
        expected: String,
        /// The digest of the bytes.
        found: String,
        /// What it means, and what to do.
        advice: &'static str,
    },
    /// A remote object did not come. The message has what the cause says, less what it names already.
    #[error("{}: bytes {span}: {}", file.display(), error.brief())]
    Remote {
        /// The file.
        file: Arc<Path>,
        /// The span for which it was asked.
        span: ByteSpan,
        /// Why.
        error: Arc<RemoteError>,
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
    /// The operating system failed.
    pub fn io(file: impl Into<Arc<Path>>, action: impl Into<String>, error: impl Into<io::Error>) -> Self {
        Self::Io { file: file.into(), action: action.into(), error: Arc::new(error.into()) }
    }

    /// The file that it is about, if it is about one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Changed { file, .. }
            | Self::Fault { file, .. }
            | Self::Short { file, .. }
            | Self::OtherVersion { file, .. }
            | Self::Corrupt { file, .. }
            | Self::OutOfBounds { file, .. }
            | Self::Io { file, .. }
            | Self::Remote { file, .. }
            | Self::Stalled { file, .. }
            | Self::NotRegular { file } => Some(file),
            Self::FileLimit { .. } => None,
        }
    }

    /// The file that this error poisons, if it is such an error.
    pub fn poisoned_file(&self) -> Option<&Path> {
        match self {
            Self::Changed { file, .. }
            | Self::Fault { file, .. }
            | Self::Short { file, .. }
            | Self::OtherVersion { file, .. }
            | Self::Corrupt { file, .. } => Some(file),
            Self::OutOfBounds { .. }
            | Self::Io { .. }
            | Self::Remote { .. }
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
