//! Why a block is refused.

use std::fmt;

/// The kinds of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// A manifest.
    Manifest,
    /// A node of the tree of versions.
    VersionNode,
    /// A node of the B+tree of keys.
    Node,
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Manifest => "ocdbt manifest",
            Self::VersionNode => "ocdbt version node",
            Self::Node => "ocdbt B+tree node",
        })
    }
}

/// What is wrong with a block, the first fault that is met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OcdbtError {
    /// Fewer bytes than the smallest block has.
    #[error("{block}: expected at least {expected} bytes, found {found}")]
    TooShort {
        /// Which kind of block.
        block: Block,
        /// Bytes of the smallest block.
        expected: usize,
        /// Bytes that are there.
        found: usize,
    },
    /// The bytes are not such a block.
    #[error("{block}: expected to begin with {expected:08x}, found {found:08x}")]
    Magic {
        /// Which kind of block.
        block: Block,
        /// The mark of this kind.
        expected: u32,
        /// What is there.
        found: u32,
    },
    /// The block's own length is not that of the bytes.
    #[error("{block}: expected {expected} bytes by its header, found {found}")]
    Length {
        /// Which kind of block.
        block: Block,
        /// As the header says.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The checksum is wrong.
    #[error("{block}: expected CRC-32C {expected:08x}, found {found:08x}: the block is damaged")]
    Checksum {
        /// Which kind of block.
        block: Block,
        /// As stored.
        expected: u32,
        /// As computed.
        found: u32,
    },
    /// The compressed body cannot be decoded.
    #[error("{block}: zstd: {message}")]
    Zstd {
        /// Which kind of block.
        block: Block,
        /// What the library says.
        message: String,
    },
    /// The body ends too early.
    #[error("{block}: ends within its {what}")]
    Truncated {
        /// Which kind of block.
        block: Block,
        /// What should be there.
        what: &'static str,
    },
    /// There is more than the block needs.
    #[error("{block}: expected to end, found {found} more bytes")]
    Trailing {
        /// Which kind of block.
        block: Block,
        /// Bytes after the end.
        found: usize,
    },
    /// A number of more than 64 bits.
    #[error("{block}: {what}: expected a number of at most 64 bits")]
    Varint {
        /// Which kind of block.
        block: Block,
        /// What the number is.
        what: &'static str,
    },
    /// A number above its limit.
    #[error("{block}: {what}: expected at most {limit}, found {found}")]
    Limit {
        /// Which kind of block.
        block: Block,
        /// What the number is.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// The number.
        found: u64,
    },
    /// A value that the format does not allow.
    #[error("{block}: {what}: expected {expected}, found {found}")]
    Value {
        /// Which kind of block.
        block: Block,
        /// What the value is.
        what: &'static str,
        /// What the format allows.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A reference to a file outside the database, or to none.
    #[error("{block}: expected a path of a file inside the database, found {path:?}")]
    Path {
        /// Which kind of block.
        block: Block,
        /// As stored.
        path: String,
    },
}
