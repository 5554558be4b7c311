//! What is wrong with an Orbax checkpoint.

use std::{path::Path, sync::Arc};

use ckfs_format::{
    ocdbt::OcdbtError,
    orbax::read::OrbaxError,
    zarr::read::{ChunkError, MetadataError},
};
use ckfs_source::SourceError;

/// One problem with an Orbax checkpoint.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OrbaxProblem {
    /// A file cannot be read.
    #[error(transparent)]
    Unreadable(#[from] SourceError),
    /// A directory that its saver has not finished.
    #[error(
        "{}: an unfinished Orbax checkpoint: {reason}; --allow-unfinished reads what is there, if all chunks are",
        directory.display()
    )]
    Unfinished {
        /// The directory.
        directory: Arc<Path>,
        /// How it is known, and what to do.
        reason: &'static str,
    },
    /// A directory of steps, none of which is finished and has arrays.
    #[error(
        "{}: no finished step: {}; --allow-unfinished reads the latest one, if all of its chunks are there",
        directory.display(),
        if found.is_empty() { "no steps".to_owned() } else { found.join(", ") }
    )]
    NoFinishedStep {
        /// The directory.
        directory: Arc<Path>,
        /// The steps, each with the reason.
        found: Vec<String>,
    },
    /// A step has several items with arrays.
    #[error(
        "{}: several items with arrays: expected items, default, state, pytree, params or model, or only one, found {}; give the directory of one",
        directory.display(),
        found.join(", ")
    )]
    SeveralItems {
        /// The step.
        directory: Arc<Path>,
        /// The items.
        found: Vec<String>,
    },
    /// No arrays where Orbax would have them.
    #[error("{}: an Orbax checkpoint without arrays: expected _METADATA or manifest.ocdbt in an item, found {found}", directory.display())]
    NoItem {
        /// The step or item.
        directory: Arc<Path>,
        /// What is there.
        found: String,
    },
    /// A description of the tree or of the step is malformed.
    #[error("{}: {error}", directory.display())]
    Description {
        /// The directory with the description.
        directory: Arc<Path>,
        /// What is wrong.
        error: OrbaxError,
    },
    /// A block of the database is damaged.
    #[error("{}: {error}", file.display())]
    Database {
        /// The file.
        file: Arc<Path>,
        /// What is wrong.
        error: OcdbtError,
    },
    /// A block of the database lies outside its file.
    #[error("{}: bytes {start}..{end} are outside the file of {len_bytes} bytes", file.display())]
    Block {
        /// The file.
        file: Arc<Path>,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Length of the file.
        len_bytes: u64,
    },
    /// A leaf that is no array.
    #[error("leaf {leaf}: stored as {kind:?}, expected an array")]
    Leaf {
        /// The leaf.
        leaf: String,
        /// What it is, as Orbax calls it.
        kind: String,
    },
    /// A leaf without an array.
    #[error("array {array}: in _METADATA, but its description ({expected}) is missing")]
    NoArray {
        /// The array.
        array: String,
        /// The name of the description.
        expected: &'static str,
    },
    /// The description of an array is malformed, or describes what is not read.
    #[error("array {array}, {}: {error}", file.display())]
    Array {
        /// The array.
        array: String,
        /// The file with the description.
        file: Arc<Path>,
        /// What is wrong.
        error: MetadataError,
    },
    /// A value that the array does not have.
    #[error("array {array}: {key:?} is stored, which is no chunk of its grid {grid:?}")]
    Surplus {
        /// The array.
        array: String,
        /// The key of the value, below the array.
        key: String,
        /// Chunks along each axis.
        grid: Vec<u64>,
    },
    /// Chunks that are not stored although the writer stores all.
    #[error(
        "array {array}: {missing} of {of} chunks are missing, the first is {first}: the writer stores chunks of the fill value too, so \
         that they are lost"
    )]
    Missing {
        /// The array.
        array: String,
        /// Missing chunks.
        missing: u64,
        /// All chunks.
        of: u64,
        /// The first that is missing.
        first: String,
    },
    /// A chunk has another length than its elements.
    #[error("array {array}, chunk {chunk}, {}: expected {expected} bytes, found {found}", file.display())]
    Length {
        /// The array.
        array: String,
        /// The chunk.
        chunk: String,
        /// The file.
        file: Arc<Path>,
        /// Bytes of its elements.
        expected: u64,
        /// Bytes that are stored.
        found: u64,
    },
    /// Decoded chunks of one file have more bytes than 64 bits count.
    #[error(
        "array {array}: {chunks} chunks of {chunk_bytes} bytes in one file: expected at most {} bytes decoded",
        u64::MAX
    )]
    TooLarge {
        /// The array.
        array: String,
        /// The chunks.
        chunks: u64,
        /// Bytes of a decoded chunk.
        chunk_bytes: u64,
    },
    /// A chunk lies outside its file.
    #[error("array {array}, chunk {chunk}, {}: bytes {start}..{end} are outside the file of {len_bytes} bytes", file.display())]
    Outside {
        /// The array.
        array: String,
        /// The chunk.
        chunk: String,
        /// The file.
        file: Arc<Path>,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Length of the file.
        len_bytes: u64,
    },
    /// The index of a shard is damaged.
    #[error("array {array}, chunk {chunk}, {}: {error}", file.display())]
    Index {
        /// The array.
        array: String,
        /// The chunk.
        chunk: String,
        /// The file.
        file: Arc<Path>,
        /// What is wrong.
        error: ChunkError,
    },
    /// There is more than a checkpoint may have.
    #[error("{what}: expected at most {limit}, found {found}")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// What is there.
        found: u64,
    },
}
