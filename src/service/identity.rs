//! Digests that name what is served or exported: the same plan over the same sources has the same, on every machine.
//!
//! Hashed are the version of this program, the plan of a view with the expression of every tensor, and of every source file path, length
//! and time of modification, and the version of a remote object; of a commit of the Hub the commit in place of these. Bytes are not read for it.

use std::{
    collections::HashSet,
    fmt::{self, Write},
    time::UNIX_EPOCH,
};

use ckfs_checkpoint::Checkpoint;
use ckfs_plan::Plan;
use ckfs_source::FileId;
use sha2::{Digest, Sha256};

/// Hexadecimal digits of a commit, as of git's.
const COMMIT_DIGITS: usize = 40;

/// What the entity tag of a file begins with. No client takes it for a digest of the bytes, which is not known before they are made.
const TAG_PREFIX: &str = "ckfs-";

/// Hashes text as it is written.
struct HashedText(Sha256);

impl Write for HashedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.update(text.as_bytes());
        Ok(())
    }
}

impl HashedText {
    fn new() -> Self {
        let mut text = Self(Sha256::new());
        text.add(format_args!("ckfs {}", env!("CARGO_PKG_VERSION")));
        text
    }

    /// Adds a part, and its end.
    fn add(&mut self, part: fmt::Arguments<'_>) {
        // Writing to a digest never fails.
        let _ = self.write_fmt(part);
        let _ = self.write_str("\0");
    }

    fn digits(self) -> String {
        let mut digits = String::with_capacity(2 * COMMIT_DIGITS);
        for byte in self.0.finalize() {
            let _ = write!(digits, "{byte:02x}");
        }
        digits.truncate(COMMIT_DIGITS);
        digits
    }
}

/// The sources of a checkpoint.
fn add_sources(text: &mut HashedText, checkpoint: &Checkpoint) {
    let source = checkpoint.source();
    let modified = |file: FileId| {
        let pin = source.pin(file);
        let nanoseconds = pin.modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        match &pin.version {
            Some(version) => format!("{nanoseconds} {version}"),
            None => nanoseconds.to_string(),
        }
    };
    let mut named = HashSet::new();
    if let Some(commit) = checkpoint.revision() {
        text.add(format_args!("commit {commit}"));
    }
    for file in checkpoint.files() {
        let Some(id) = file.file else { continue };
        named.insert(id);
        let (path, bytes) = (&file.path, source.len_bytes(id));
        match checkpoint.revision() {
            Some(_) => text.add(format_args!("{path:?} {bytes}")),
            None => text.add(format_args!("{path:?} {bytes} {}", modified(id))),
        }
    }
    // Of adapters and of other repositories.
    for id in (0..source.file_count()).filter_map(|file| u32::try_from(file).ok()).map(FileId) {
        if !named.contains(&id) {
            text.add(format_args!("{} {}", source.len_bytes(id), modified(id)));
        }
    }
}

/// The commit of a view: a digest of its plan and the sources.
pub fn commit(checkpoint: &Checkpoint, plan: &Plan) -> String {
    let mut text = HashedText::new();
    add_sources(&mut text, checkpoint);
    text.add(format_args!("{:?} {:?} {:?}", plan.mesh, plan.devices, plan.specs));
    text.add(format_args!("{:?} {:?} {:?}", plan.layout, plan.params, plan.dtype));
    text.add(format_args!("{} {:?} {}", plan.unscanned, plan.chunk_bytes_max, plan.sharded_state));
    text.add(format_args!("{:?}", plan.decoded_config));
    for tensor in &plan.tensors {
        text.add(format_args!("{tensor:?}"));
    }
    for file in &plan.hf {
        text.add(format_args!("{file:?}"));
    }
    text.digits()
}

/// Whether a text has the form of a commit.
pub fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The digest of several views, each with its name and commit.
pub fn of_views<'a>(views: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = HashedText::new();
    for (name, commit) in views {
        text.add(format_args!("{name:?} {commit}"));
    }
    text.digits()
}

/// The version of a file of what `digest` names.
pub fn file_digest(digest: &str, path: &str, size_bytes: u64) -> String {
    let mut text = HashedText::new();
    text.add(format_args!("{digest} {path:?} {size_bytes}"));
    format!("{TAG_PREFIX}{}", text.digits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_depends_on_all_that_it_names() {
        let tag = file_digest("a", "b", 1);
        assert_eq!(tag, file_digest("a", "b", 1));
        assert_eq!((tag.len(), tag.starts_with(TAG_PREFIX)), (TAG_PREFIX.len() + COMMIT_DIGITS, true));
        for other in [file_digest("x", "b", 1), file_digest("a", "x", 1), file_digest("a", "b", 2)] {
            assert_ne!(tag, other);
        }
        let views = of_views([("a", "1"), ("b", "2")]);
        assert_eq!(views.len(), COMMIT_DIGITS);
        for other in [of_views([("a", "1")]), of_views([("b", "1"), ("a", "2")]), of_views([("a", "1"), ("b", "3")])] {
            assert_ne!(views, other);
        }
    }
}
