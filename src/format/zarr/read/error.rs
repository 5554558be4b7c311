//! Why a description or a chunk is refused.

use std::fmt::Display;

/// What is wrong with the description of an array.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("zarr: {0}")]
pub struct MetadataError(pub(super) String);

/// What is wrong with a chunk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("zarr {0}")]
pub struct ChunkError(pub(super) String);

impl MetadataError {
    /// Valid, but not read here. The advice is empty or begins with a colon.
    pub(super) fn unsupported(what: &str, found: impl Display, advice: &str) -> Self {
        Self(format!("{what} {found} is not supported{advice}"))
    }
}

impl ChunkError {
    /// That the decoded chunk has another length than its shape needs, before or after a codec.
    pub(super) fn length(stage: &str, expected: u64, found: u64) -> Self {
        Self(format!("chunk: {stage}: expected {expected} bytes, found {found}"))
    }

    /// That the system has not as much memory as the decoded chunk takes.
    pub fn memory(bytes: u64) -> Self {
        Self(format!("chunk: its shape needs {bytes} bytes of memory, which the system does not have"))
    }

    pub(super) fn checksum(what: &str, expected: u32, found: u32) -> Self {
        Self(format!("chunk: {what}: expected CRC-32C {expected:08x}, found {found:08x}: the chunk is damaged"))
    }

    /// That a codec cannot decode it.
    pub(super) fn codec(codec: &str, message: impl Display) -> Self {
        Self(format!("chunk: {codec}: {message}"))
    }
}
