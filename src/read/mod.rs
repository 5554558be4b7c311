//! The byte-range engine: from a span of a virtual file to bytes.
//!
//! Four stages, of which the first two and the last are pure:
//!
//! ```text
//! runs       a span of a view        ->  jobs, and the bytes of which tensors they need
//! schedule   jobs                    ->  batches: spans of files, and where they lie in memory
//! fetch      a batch                 ->  its bytes. The only stage that waits
//! scatter    jobs and their bytes    ->  bytes of the view: gathered, decoded, converted
//! ```
//!
//! A file that is mapped needs no schedule: fetching is handing out windows of its map. `fill` puts the stages together. What it
//! makes is served in one of these ways:
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
//! # What a source without maps costs
//!
//! A sequential reader fetches each source byte that it needs once. Between two spans that are no further apart than
//! [`crate::source::Source::gap_bytes`] the bytes in between are fetched too. A transposed view is one tile, and is fetched in whole
//! source rows, if it fits half of the cache; else it is made in bands of a quarter of the cache, of which each fetches its part of
//! every source row: with a request for each row, or, where the parts lie within the gap, all rows again for each band.
//!
//! Whatever was read from a source counts only if the source is still what was pinned at mount; else the read fails. No
//! lock is held while bytes are made, and no reader ever depends on another thread's being free.

mod ahead;
mod buffer;
pub mod counters;
mod engine;
mod fetch;
mod fill;
mod materialize;
mod open_file;
mod prefault;
mod reader;
pub mod reference;
mod runs;
mod scatter;
mod schedule;
mod stream;
mod tile;
pub mod warm;
mod worker;

pub use counters::{Counters, Path};
pub use engine::{Engine, EngineOptions};
pub use materialize::{MaterializeError, Materializing, Target};
pub use open_file::OpenFile;
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
