//! What names the content of a file: two files of one name have the same bytes.
//!
//! A modification time is no such name: `rsync --times`, `touch -r`, `cp -a` and `tar` set it to that of another file, and images of
//! disks give all of theirs the same. Without a digest there is only the identity of the file on this machine, with the time of its last
//! change of state, which the kernel sets and no program can.

use std::sync::LazyLock;

use super::{digest::KnownDigest, remote::Content, unique::unique};

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ContentName {
    /// A digest of the bytes, or what a remote service or a network file system knows this version of them by.
    Anywhere(String),
    /// A file and its state, as its file system has it.
    Here {
        /// Inode, size and times.
        state: String,
        /// Its device, whose number holds until this machine starts again.
        device: u64,
    },
}

impl ContentName {
    /// The name of what has a digest.
    pub(super) fn of_digest(known: &KnownDigest) -> Self {
        Self::Anywhere(format!("{} {}", known.kind(), known.hex()))
    }

    /// The name of a remote object.
    pub(super) fn of_object(content: &Content) -> Self {
        content.known_digest().map_or_else(|| Self::Anywhere(format!("{content:?}")), |known| Self::of_digest(&known))
    }
}

/// A word that no other process has, on this machine or another.
pub fn this_process() -> &'static str {
    static NAME: LazyLock<String> = LazyLock::new(unique);
    &NAME
}

/// A word for the time since this machine started. No other machine has it.
pub fn this_start() -> &'static str {
    static NAME: LazyLock<Option<String>> =
        LazyLock::new(|| std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok());
    NAME.as_deref().map_or_else(this_process, str::trim)
}
