//! The byte-range engine: from a span of a virtual file to bytes.
//!
//! A span is cut into the pieces of the views it touches, and each piece is carried out in one of these ways:
//!
//! * **runs**: source bytes that need no conversion are lent straight from the mapped file, or gathered where a request
//!   crosses from one run to the next;
//! * **tiles**: transformed data is computed in tiles of a megabyte or more whatever the request's size, kept in a bounded
//!   cache, computed ahead for sequential readers;
//! * **identical** files are read as they are, by the kernel itself where it may.
//!
//! A file may also be materialized: made once, in pieces, by all threads, into a file that the kernel reads by itself
//! ([`Materializing`]).
//!
//! Whatever was read from a source counts only if the source is still what was pinned at mount; else the read fails. No
//! lock is held while bytes are made, and no reader ever depends on another thread's being free.

mod buffer;
pub mod counters;
mod engine;
mod materialize;
mod operand;
mod prefault;
pub mod reference;
mod stream;
mod tile;
pub mod warm;
mod worker;

pub use counters::{Counters, Path};
pub use engine::{Engine, EngineOptions, OpenFile};
pub use materialize::{MaterializeError, Materializing, Target};
pub use prefault::Prefault;
pub use tile::Reservation;

use crate::{
    checkpoint::TensorInfo,
    source::{ByteSpan, SourceError},
    tensor::TilingError,
};

/// Why a read failed. Cheap to clone: one failure may have several waiting for it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// Bytes of a tensor did not come.
    #[error("tensor {tensor}, file bytes {span}: {error}")]
    Source {
        /// The tensor.
        tensor: String,
        /// The span of its file.
        span: ByteSpan,
        /// The cause.
        #[source]
        error: SourceError,
    },
    /// A source file is not what it was at mount, or cannot be read.
    #[error("{error}")]
    Changed {
        /// The cause.
        #[source]
        error: SourceError,
    },
    /// A view has no tiling, which the plan should have refused.
    #[error("{error}")]
    Tiling {
        /// The cause.
        #[source]
        error: TilingError,
    },
    /// The computation panicked: an error in this program, logged where it happened.
    #[error("the computation of these bytes panicked")]
    Panicked,
    /// What cannot be is: an error in this program.
    #[error("internal error: {what}")]
    Internal {
        /// What should hold and does not.
        what: &'static str,
    },
}

impl ReadError {
    /// What a source said, if it is the cause.
    pub fn source_error(&self) -> Option<&SourceError> {
        match self {
            Self::Source { error, .. } | Self::Changed { error } => Some(error),
            Self::Tiling { .. } | Self::Panicked | Self::Internal { .. } => None,
        }
    }

    fn source(info: &TensorInfo<'_>, span: ByteSpan, error: SourceError) -> Self {
        Self::Source { tensor: info.name.to_owned(), span, error }
    }

    /// Whether storage gives no answer, so that a later read may succeed.
    pub fn is_stall(&self) -> bool {
        match self {
            Self::Source { error, .. } | Self::Changed { error } => matches!(error, SourceError::Stalled { .. }),
            Self::Tiling { .. } | Self::Panicked | Self::Internal { .. } => false,
        }
    }
}
