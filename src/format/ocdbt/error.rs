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

impl Block {
    /// That a value in such a block is none that the format allows.
    pub(super) fn wrong(self, what: &str, expected: impl fmt::Display, found: impl fmt::Display) -> OcdbtError {
        OcdbtError(format!("{self}: {what}: expected {expected}, found {found}"))
    }

    /// That a number is above its limit.
    pub(super) fn beyond(self, what: &str, limit: u64, found: u64) -> OcdbtError {
        self.wrong(what, format_args!("at most {limit}"), found)
    }
}

/// What is wrong with a block, the first fault that is met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OcdbtError(pub(super) String);
