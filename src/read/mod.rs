//! The byte-range engine: from a span of a virtual file to bytes.
//!
//! Four stages, of which the first two and the last are pure:
//!
//! ```text
//! plan_jobs  a span of a view        ->  jobs, and the bytes of which tensors they need
//! schedule   jobs                    ->  batches: spans of files, and where they lie in memory
//! fetch      a batch                 ->  its bytes; the only stage that waits
//! scatter    jobs and their bytes    ->  bytes of the view: gathered, decoded, converted
//! ```
//!
//! A mapped file needs no schedule: fetching then means passing on windows of its map. `fill` connects the stages. The bytes are
//! served in one of these ways:
//!
//! * **runs**: source bytes that need no conversion go to the kernel directly from the mapped file. Where a request crosses from
//!   one run to the next they are gathered first.
//! * **tiles**: transformed data is computed in tiles of a megabyte or more, for requests of any size. A bounded cache keeps the
//!   tiles, and workers compute them ahead of sequential readers.
//! * **identical** files are read unchanged, by the kernel itself where possible.
//! * **generated** bytes, such as headers, come from the file's image.
//!
//! A file may also be materialized: all threads make its bytes once, in pieces, in a file that the kernel reads directly
//! ([`Materializing`]). A program that wants arrays has them made in its own memory, by several threads ([`Loading`]).
//!
//! # What a source without maps costs
//!
//! A sequential reader fetches each source byte that it needs once. If two spans are no further apart than
//! [`ckfs_source::Source::gap_bytes`], the bytes in between are fetched too.
//!
//! A transposed view that fits half of the cache is one tile, and is fetched in whole source rows. A larger one is made in bands of
//! a quarter of the cache. Each band fetches its part of every source row: with a request for each row, or, where the parts lie
//! within the gap, all rows again.
//!
//! Bytes read from a source count only if the source is still identical to the one pinned at mount; otherwise the read fails. No
//! thread holds a lock while it makes bytes, and no reader depends on another thread being free.

use ckfs_checkpoint::TensorInfo;
use ckfs_source::{ByteSpan, SourceError};
use ckfs_tensor::TilingError;

mod ahead;
mod band_store;
mod buffer;
pub mod counters;
mod encode;
mod engine;
mod fetch;
mod fill;
mod load;
mod materialize;
mod plan_jobs;
mod prepared_file;
mod reader;
pub mod reference;
mod scatter;
mod schedule;
mod serve;
mod stream;
mod tile;
mod worker;

pub use counters::{Counters, Path};
pub use engine::{Engine, EngineOptions, EngineRooms, HeldBytes};
pub use load::{LoadPart, LoadTarget, Loading};
pub use materialize::{FileRoom, MaterializeError, MaterializeTarget, Materializing};
pub use prepared_file::PreparedFile;

/// Why a read failed. Cheap to clone: several readers may wait for one failed computation.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// Bytes of a tensor could not be read.
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
    /// A source file has changed since mount, or cannot be read.
    #[error("{0}")]
    Changed(#[from] SourceError),
    /// A view has no tiling. The plan should have refused it.
    #[error("{0}")]
    Tiling(#[from] TilingError),
    /// An element of a tensor has no code in the scheme that it is quantized by.
    #[error(
        "tensor {tensor}, element {index:?}: {value} has no code or scale: only finite numbers of moderate size are quantized; --quantize-ignore leaves the tensor as it is"
    )]
    Uncodable {
        /// The tensor.
        tensor: String,
        /// Its place, one number for each axis.
        index: Vec<u64>,
        /// Its value.
        value: f32,
    },
    /// The computation panicked: an error in this program, logged where it happened.
    #[error("the computation of these bytes panicked")]
    Panicked,
    /// An invariant does not hold: an error in this program.
    #[error("internal error: {what}")]
    Internal {
        /// The violation.
        what: &'static str,
    },
}

impl ReadError {
    /// The error of a source, if it is the cause.
    pub fn source_error(&self) -> Option<&SourceError> {
        match self {
            Self::Source { error, .. } | Self::Changed(error) => Some(error),
            Self::Tiling(_) | Self::Uncodable { .. } | Self::Panicked | Self::Internal { .. } => None,
        }
    }

    fn source(info: &TensorInfo<'_>, span: ByteSpan, error: SourceError) -> Self {
        Self::Source { tensor: info.name.to_owned(), span, error }
    }

    /// Whether storage did not answer in time, so that a later read may succeed.
    pub fn is_stall(&self) -> bool {
        matches!(self.source_error(), Some(SourceError::Stalled { .. }))
    }
}
