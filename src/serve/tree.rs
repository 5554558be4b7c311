//! A volume as the door serves it: its nodes by path, and its reads.

use std::{ops::ControlFlow, sync::Arc};

use ckfs_image::OWN;
use ckfs_service::identity;
use ckfs_volume::{Attr, FileSystem, FsError, Ino, NodeKind, Volume};

use super::{gate::Visitor, reads::ServedReads};

/// Most symbolic links on the way to a node.
const LINKS_MAX: usize = 40;

/// Why there is no node for a visitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoNode {
    /// There is none, or strangers may not know of it.
    Absent,
    /// The sources' permissions do not let this visitor read it.
    Denied,
}

/// A node that a path leads to.
#[derive(Clone, Debug)]
pub(super) struct FoundNode {
    /// Path from the root, links followed.
    pub(super) path: String,
    pub(super) attr: Attr,
}

/// An entry of a directory.
#[derive(Clone, Debug)]
pub(super) struct ServedEntry {
    pub(super) name: String,
    pub(super) ino: Ino,
    pub(super) kind: NodeKind,
}

/// A volume that is served. A step of a run would be another one.
#[derive(Debug)]
pub(super) struct ServedTree {
    pub(super) volume: Arc<Volume>,
    pub(super) reads: Arc<ServedReads>,
    /// A digest of plans and sources.
    pub(super) digest: String,
}

impl ServedTree {
    /// Finds a node below `from`. Links are followed, inside the volume. A path has no `.` and `..`, which the reader of paths
    /// refuses.
    ///
    /// # Errors
    /// [`NoNode`].
    pub(super) fn find(&self, visitor: Visitor, from: &FoundNode, path: &[String]) -> Result<FoundNode, NoNode> {
        let mut pending: Vec<String> = path.iter().rev().cloned().collect();
        let mut at: Vec<(String, Attr)> = Vec::new();
        let mut links = 0;
        while let Some(name) = pending.pop() {
            if name == "." || name.is_empty() {
                continue;
            }
            if name == ".." {
                // Of a link of the volume's own.
                at.pop();
                continue;
            }
            if name == OWN && visitor == Visitor::Stranger {
                return Err(NoNode::Absent);
            }
            let directory = at.last().map_or(from.attr, |(_, attr)| *attr);
            if !visitor.may_pass(&directory) {
                return Err(NoNode::Denied);
            }
            let attr = self.volume.lookup(directory.ino, name.as_bytes()).map_err(|error| match error {
                FsError::NotFound
                | FsError::NotDirectory
                | FsError::IsDirectory
                | FsError::ReadOnly
                | FsError::NoAttribute
                | FsError::Unsupported
                | FsError::Invalid
                | FsError::NameTooLong
                | FsError::Io => NoNode::Absent,
            })?;
            if attr.kind != NodeKind::Symlink {
                at.push((name, attr));
                continue;
            }
            links += 1;
            if links > LINKS_MAX {
                return Err(NoNode::Absent);
            }
            let target = self.volume.read_link(attr.ino).map_err(|_| NoNode::Absent)?;
            pending.extend(String::from_utf8_lossy(&target).split('/').rev().map(str::to_owned));
        }
        let attr = at.last().map_or(from.attr, |(_, attr)| *attr);
        if !visitor.may_read(&attr) {
            return Err(NoNode::Denied);
        }
        let names = (!from.path.is_empty()).then_some(from.path.as_str()).into_iter();
        let names: Vec<&str> = names.chain(at.iter().map(|(name, _)| name.as_str())).collect();
        Ok(FoundNode { path: names.join("/"), attr })
    }

    /// The root.
    ///
    /// # Panics
    /// Never: every volume has a root.
    pub(super) fn root(&self) -> FoundNode {
        let attr = self.volume.attr(Ino::ROOT).expect("every volume has a root");
        FoundNode { path: String::new(), attr }
    }

    /// Up to `count` entries of a directory from entry number `from` on, and the number of the entry after them if there is one.
    /// Strangers do not see the mount's own directories, though these count.
    pub(super) fn entries(
        &self,
        visitor: Visitor,
        directory: Ino,
        from: u64,
        count: usize,
    ) -> (Vec<ServedEntry>, Option<u64>) {
        let (mut entries, mut next, mut has_more) = (Vec::new(), from, false);
        // A directory that was found is one.
        let _ = self.volume.read_dir(directory, from, &mut |entry| {
            if entries.len() == count {
                has_more = true;
                return ControlFlow::Break(());
            }
            next += 1;
            if visitor == Visitor::Trusted || entry.name != OWN.as_bytes() {
                let name = String::from_utf8_lossy(entry.name).into_owned();
                entries.push(ServedEntry { name, ino: entry.ino, kind: entry.kind });
            }
            ControlFlow::Continue(())
        });
        (entries, has_more.then_some(next))
    }

    /// The entity tag of a file, in quotes; none of a file whose content changes.
    pub(super) fn etag(&self, node: &FoundNode) -> Option<String> {
        let tag = || format!("\"{}\"", identity::file_digest(&self.digest, &node.path, node.attr.size_bytes));
        (!self.volume.is_live(node.attr.ino)).then(tag)
    }
}
