//! Why a description or a chunk is refused.

/// What is wrong with the description of an array.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// Longer than any description.
    #[error("zarr: a description of {found} bytes: expected at most {limit}")]
    TooLong {
        /// The limit.
        limit: usize,
        /// Its length.
        found: usize,
    },
    /// Not the JSON that it must be.
    #[error("zarr: {message}")]
    Json {
        /// What the parser says, with line and column.
        message: String,
    },
    /// A member has a value that it cannot have.
    #[error("zarr: {member}: expected {expected}, found {found}")]
    Value {
        /// The member.
        member: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Valid, but not read here.
    #[error("zarr: {what} {found} is not supported{advice}")]
    Unsupported {
        /// What kind of thing.
        what: &'static str,
        /// Its name.
        found: String,
        /// Why, or what to do; empty or beginning with a colon.
        advice: &'static str,
    },
}

/// What is wrong with a chunk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// The decoded chunk has another length than its shape needs.
    #[error("zarr chunk: {stage}: expected {expected} bytes, found {found}")]
    Length {
        /// Before or after which codec.
        stage: &'static str,
        /// Bytes that the shape needs.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The system has not as much memory.
    #[error("zarr chunk: its shape needs {bytes} bytes of memory, which the system does not have")]
    Memory {
        /// Bytes of the decoded chunk.
        bytes: u64,
    },
    /// A checksum is wrong.
    #[error("zarr chunk: {what}: expected CRC-32C {expected:08x}, found {found:08x}: the chunk is damaged")]
    Checksum {
        /// Of what.
        what: &'static str,
        /// As stored.
        expected: u32,
        /// As computed.
        found: u32,
    },
    /// A codec cannot decode it.
    #[error("zarr chunk: {codec}: {message}")]
    Codec {
        /// The codec.
        codec: &'static str,
        /// What its library says.
        message: String,
    },
    /// The index of a shard points outside the shard.
    #[error(
        "zarr shard: inner chunk {chunk}: {len_bytes} bytes at {offset} are not in the data of the shard, bytes {data_start}..{data_end}"
    )]
    Outside {
        /// Number of the inner chunk, in row-major order.
        chunk: usize,
        /// As the index says.
        offset: u64,
        /// As the index says.
        len_bytes: u64,
        /// First byte of the data.
        data_start: u64,
        /// One past the last byte of the data.
        data_end: u64,
    },
}
