//! Why bytes could not be read.

use std::{
    io,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::{digest::KnownDigest, remote::RemoteError, span::ByteSpan};

/// Why bytes could not be read. Cheap to clone: several readers may wait for one failed read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SourceError {
    /// The file has not the bytes that were pinned: it changed, ended early, could not be mapped, or has another digest. Sticky.
    #[error("{}: {flaw}", file.display())]
    Lost {
        /// The file.
        file: Arc<Path>,
        /// What was expected and found.
        flaw: String,
    },
    /// What was asked for is not in the file, does not come from its service, or is no file that can be read.
    #[error("{}: {text}", file.display())]
    Refused {
        /// The file.
        file: Arc<Path>,
        /// Why.
        text: String,
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
    #[error("{0}")]
    FileLimit(String),
}

impl SourceError {
    /// The operating system failed.
    pub fn io(file: impl Into<Arc<Path>>, action: impl Into<String>, error: impl Into<io::Error>) -> Self {
        Self::Io { file: file.into(), action: action.into(), error: Arc::new(error.into()) }
    }

    /// A span that is not inside a file of this length.
    pub fn out_of_bounds(file: &Arc<Path>, span: ByteSpan, len_bytes: u64) -> Self {
        let text = format!("bytes {span} are outside the file of {len_bytes} bytes");
        Self::Refused { file: Arc::clone(file), text }
    }

    /// Bytes of a remote object that did not come. The message has what the cause says, less what it names already.
    pub(crate) fn remote(file: Arc<Path>, span: ByteSpan, error: &RemoteError) -> Self {
        Self::Refused { file, text: format!("bytes {span}: {}", error.brief()) }
    }

    /// Bytes with another digest than is known of them; `advice` says what it means, and what to do.
    pub(crate) fn corrupt(file: Arc<Path>, expected: &KnownDigest, found: &str, advice: &str) -> Self {
        let (kind, expected) = (expected.kind(), expected.hex());
        Self::Lost { file, flaw: format!("expected {kind} {expected}, found {found}: {advice}") }
    }

    /// The file that it is about, if it is about one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Lost { file, .. }
            | Self::Refused { file, .. }
            | Self::Io { file, .. }
            | Self::Stalled { file, .. } => Some(file),
            Self::FileLimit(_) => None,
        }
    }

    /// The file that this error poisons, if it is such an error.
    pub fn poisoned_file(&self) -> Option<&Path> {
        if let Self::Lost { file, .. } = self { Some(file) } else { None }
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
