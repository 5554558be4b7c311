//! The roles of a repository's files in a checkpoint.

use std::fmt;

use ckfs_source::FileId;

/// The role of a repository's file in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileRole {
    /// Its tensors are the checkpoint's.
    Weights,
    /// Configuration, tokenizer or documentation: it holds no tensors of the checkpoint.
    Other,
    /// Left out, with the reason.
    Ignored(IgnoreReason),
}

impl FileRole {
    /// Whether the file is a regular one that is opened.
    pub(crate) const fn is_readable(&self) -> bool {
        use IgnoreReason::{NotInIndex, OtherSet, OtherVariant, SecondCopy};
        matches!(self, Self::Weights | Self::Other | Self::Ignored(NotInIndex | SecondCopy | OtherSet | OtherVariant))
    }
}

/// The reason why a file of a repository is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IgnoreReason {
    /// Safetensors that the index does not name. Suspicious unless it is a known second copy.
    NotInIndex,
    /// Weights in the original publisher's naming, beside the set that is used.
    SecondCopy,
    /// Safetensors beside the chosen set, without an index that says which files belong together.
    OtherSet,
    /// Another variant of the weights, as `model.fp16.safetensors` beside `model.safetensors`.
    OtherVariant,
    /// A symbolic link that leads nowhere.
    DanglingLink,
    /// A symbolic link out of the repository.
    LeavesRepository,
    /// A symbolic link to a directory.
    LinkedDirectory,
    /// Not a regular file.
    Special,
    /// Output of ckfs, from this repository or another: a mount, or an export of one.
    Mount,
    /// Bookkeeping of git or of the hub's client; not listed further.
    Bookkeeping,
    /// Its name is not UTF-8. The path has replacement characters.
    NotUtf8,
    /// A pointer of git LFS in place of the file.
    LfsPointer,
    /// State of a training beside files of ranks: optimizer, scheduler, random numbers.
    TrainingState,
}

impl fmt::Display for IgnoreReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotInIndex => "not named by the index",
            Self::SecondCopy => "second copy of the weights",
            Self::OtherSet => "not of the set of weights that is used",
            Self::OtherVariant => "another variant of the weights, which --variant chooses",
            Self::DanglingLink => "symbolic link to nothing",
            Self::LeavesRepository => "symbolic link that leaves the repository",
            Self::LinkedDirectory => "symbolic link to a directory",
            Self::Special => "not a regular file",
            Self::Mount => "directory that ckfs made",
            Self::Bookkeeping => "bookkeeping, not contents",
            Self::NotUtf8 => "name that is not UTF-8",
            Self::LfsPointer => "pointer of git LFS",
            Self::TrainingState => "state of the training, not of the model",
        })
    }
}

/// One file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoFile {
    /// Path relative to the repository, with `/` between components.
    pub path: String,
    /// Its role in the checkpoint.
    pub role: FileRole,
    /// Length in bytes; 0 where it is not a readable file.
    pub size_bytes: u64,
    /// The file in the checkpoint's source; `None` where it cannot be read as a file.
    pub file: Option<FileId>,
}
