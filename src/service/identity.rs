//! Digests that name what is served or exported: the same plan over the same sources has the same.
//!
//! Hashed are the version of this program, the plan of a view with the expression of every tensor, and of every source file path, length
//! and what names its content ([`ContentName`]). Bytes are not read for it. So they are the same on every machine if all source files
//! have a digest or are remote; else only where those files are.

use std::{
    collections::HashSet,
    fmt::{self, Write},
};

use ckfs_checkpoint::Checkpoint;
use ckfs_plan::Plan;
use ckfs_source::{ContentName, FileId, digest::hexadecimal, this_start};
use ckfs_volume::Volume;
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
        let mut text = Self::of_no_version();
        text.add(format_args!("ckfs {}", env!("CARGO_PKG_VERSION")));
        text
    }

    fn of_no_version() -> Self {
        Self(Sha256::new())
    }

    /// Adds a part, and its end.
    fn add(&mut self, part: fmt::Arguments<'_>) {
        // Writing to a digest never fails.
        let _ = self.write_fmt(part);
        let _ = self.write_str("\0");
    }

    fn digits(self) -> String {
        let mut digits = hexadecimal(&self.0.finalize());
        digits.truncate(COMMIT_DIGITS);
        digits
    }
}

/// Where a file without a digest is known by its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityScope {
    /// On this machine until it starts again: for names that are given away.
    Machine,
    /// On its file system: for what goes on there after a restart, or on another host.
    FileSystem,
}

/// The sources of a checkpoint.
fn add_sources(text: &mut HashedText, checkpoint: &Checkpoint, scope: IdentityScope) {
    let source = checkpoint.source();
    let content = |file: FileId| match (&source.pin(file).content, scope) {
        (ContentName::Anywhere(name), _) => name.clone(),
        (ContentName::Here { state, device }, IdentityScope::Machine) => format!("{state} {device} {}", this_start()),
        (ContentName::Here { state, device: _ }, IdentityScope::FileSystem) => state.clone(),
    };
    let mut named = HashSet::new();
    if let Some(commit) = checkpoint.revision() {
        text.add(format_args!("commit {commit}"));
    }
    for file in checkpoint.files() {
        let Some(id) = file.file else { continue };
        named.insert(id);
        let (path, bytes) = (&file.path, source.len_bytes(id));
        text.add(format_args!("{path:?} {bytes} {}", content(id)));
    }
    // Of adapters and of other repositories.
    for id in source.files() {
        if !named.contains(&id) {
            text.add(format_args!("{} {}", source.len_bytes(id), content(id)));
        }
    }
    // The same tensors may come with them or without.
    for (name, bytes) in &checkpoint.opened.contents.tree.objects {
        text.add(format_args!("{name:?} {}", bytes.len()));
    }
}

/// The commit of a view: a digest of its plan and the sources.
pub fn commit(checkpoint: &Checkpoint, plan: &Plan, scope: IdentityScope) -> String {
    let mut text = HashedText::new();
    add_sources(&mut text, checkpoint, scope);
    add_plan(&mut text, plan);
    text.digits()
}

fn add_plan(text: &mut HashedText, plan: &Plan) {
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
}

/// The digest of all that a kernel may keep or hold open of a volume: nodes, plans and sources. Unlike a commit it names no version of
/// this program. `None` if a file of it cannot be laid out.
pub fn of_kept(volume: &Volume) -> Option<String> {
    let mut text = HashedText::of_no_version();
    add_sources(&mut text, volume.engine().checkpoint(), IdentityScope::Machine);
    volume.plans().iter().for_each(|plan| add_plan(&mut text, plan));
    volume.tell_nodes(&mut |part| text.add(part)).ok()?;
    Some(text.digits())
}

/// Whether a text has the form of a commit.
pub fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The digest of several views, each with its name and commit.
pub fn of_views<'n, 'c>(views: impl IntoIterator<Item = (&'n str, &'c str)>) -> String {
    let mut text = HashedText::new();
    for (name, commit) in views {
        text.add(format_args!("{name:?} {commit}"));
    }
    text.digits()
}

/// The commits of all views of a volume, by their names, and the digest of all together.
pub fn of_volume<'a>(volume: &Volume, names: impl IntoIterator<Item = &'a str>) -> (Vec<String>, String) {
    let checkpoint = volume.engine().checkpoint();
    let commit = |plan| commit(checkpoint, plan, IdentityScope::Machine);
    let commits: Vec<String> = volume.plans().iter().map(|plan| commit(plan)).collect();
    let digest = of_views(names.into_iter().zip(commits.iter().map(String::as_str)));
    (commits, digest)
}

/// The version of a file of what `digest` names.
pub fn file_digest(digest: &str, path: &str, size_bytes: u64) -> String {
    let mut text = HashedText::new();
    text.add(format_args!("{digest} {path:?} {size_bytes}"));
    format!("{TAG_PREFIX}{}", text.digits())
}

/// The version of a file that is made for each reader.
pub fn bytes_digest(bytes: &[u8]) -> String {
    let mut text = HashedText::new();
    text.0.update(bytes);
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
