//! The roles of a repository's files in a checkpoint.

use ckfs_source::FileId;

use super::super::words::words;

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

words! {
    /// The reason why a file of a repository is left out.
    pub enum IgnoreReason {
        /// Safetensors that the index does not name. Suspicious unless it is a known second copy.
        NotInIndex = "not named by the index",
        /// Weights in the original publisher's naming, beside the set that is used.
        SecondCopy = "second copy of the weights",
        /// Safetensors beside the chosen set, without an index that says which files belong together.
        OtherSet = "not of the set of weights that is used",
        /// Another variant of the weights, as `model.fp16.safetensors` beside `model.safetensors`.
        OtherVariant = "another variant of the weights, which --variant chooses",
        /// A symbolic link that leads nowhere.
        DanglingLink = "symbolic link to nothing",
        /// A symbolic link out of the repository.
        LeavesRepository = "symbolic link that leaves the repository",
        /// A symbolic link to a directory.
        LinkedDirectory = "symbolic link to a directory",
        /// Not a regular file.
        Special = "not a regular file",
        /// Output of ckfs, from this repository or another: a mount, or an export of one.
        Mount = "directory that ckfs made",
        /// Bookkeeping of git or of the hub's client; not listed further.
        Bookkeeping = "bookkeeping, not contents",
        /// Its name is not UTF-8. The path has replacement characters.
        NotUtf8 = "name that is not UTF-8",
        /// A pointer of git LFS in place of the file.
        LfsPointer = "pointer of git LFS",
        /// State of a training beside files of ranks: optimizer, scheduler, random numbers.
        TrainingState = "state of the training, not of the model",
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
