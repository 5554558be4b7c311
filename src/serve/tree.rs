//! A volume as the door serves it: its nodes by path, and its reads.

use std::{ops::ControlFlow, sync::Arc, time::SystemTime};

use ckfs_image::{OF_THE_HOST, OWN};
use ckfs_service::{
    identity,
    steps::{HeldStep, NoStep},
};
use ckfs_source::this_process;
use ckfs_volume::{Attr, FsError, Ino, NodeKind, Upkeep, Volume, follow};

use super::{gate::Visitor, reads::ServedReads};

/// Why there is no node for a visitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoNode {
    /// There is none, or strangers may not know of it.
    Absent,
    /// The sources' permissions do not let this visitor read it.
    Denied,
    /// It cannot be read: why.
    Failed(String),
}

impl NoNode {
    /// Its step was deleted meanwhile, or its storage does not answer.
    pub(super) fn failed() -> Self {
        Self::Failed("cannot be read now: its step was deleted, or its storage gives no answer".to_owned())
    }
}

impl From<NoStep> for NoNode {
    fn from(reason: NoStep) -> Self {
        match reason {
            NoStep::Absent => Self::Absent,
            NoStep::Failed(message) => Self::Failed(message),
        }
    }
}

impl From<FsError> for NoNode {
    fn from(error: FsError) -> Self {
        if error == FsError::Io { Self::failed() } else { Self::Absent }
    }
}

/// A node that a path leads to.
#[derive(Clone, Debug)]
pub(super) struct FoundNode {
    /// Path from the root, links followed.
    pub(super) path: String,
    pub(super) attr: Attr,
}

impl FoundNode {
    pub(super) fn is_file(&self) -> bool {
        self.attr.kind == NodeKind::File
    }

    /// The node, if it is of a kind: there is no other of its name.
    pub(super) fn of_kind(self, kind: NodeKind) -> Result<Self, NoNode> {
        if self.attr.kind == kind { Ok(self) } else { Err(NoNode::Absent) }
    }
}

/// An entry of a directory.
#[derive(Clone, Debug)]
pub(super) struct ServedEntry {
    pub(super) name: String,
    pub(super) ino: Ino,
    pub(super) kind: NodeKind,
}

/// The version of all files of a volume.
#[derive(Clone, Debug)]
pub(super) struct TreeDigest {
    /// A digest of its plans and sources.
    pub(super) digest: String,
    /// Since when this server has it. The times of the sources are no such time: with other settings the same sources are other files.
    pub(super) since: SystemTime,
}

/// The version of a file.
#[derive(Clone, Debug)]
pub(super) struct FileVersion {
    /// Its entity tag, in quotes.
    pub(super) etag: String,
    /// When it was last changed, at the latest; none if its name may lead to an older one later.
    pub(super) since: Option<SystemTime>,
}

impl FileVersion {
    /// The version of bytes that are made for each reader: any others have another one.
    pub(super) fn of_bytes(bytes: &[u8]) -> Self {
        Self { etag: format!("\"{}\"", identity::bytes_digest(bytes)), since: None }
    }
}

/// Tells the version of the step that a node is in, and the step. May wait for storage.
pub(super) type StepDigests = Box<dyn Fn(Ino) -> Option<(TreeDigest, HeldStep)> + Send + Sync>;

/// Which version of its files a tree has.
pub(super) enum TreeVersion {
    /// That of a volume.
    Volume { volume: Arc<Volume>, version: TreeDigest },
    /// That of a step, which stays planned meanwhile; none of one that cannot be planned.
    Step { held: HeldStep, version: Option<TreeDigest> },
    /// Each step has its own.
    Run(StepDigests),
}

/// Files that are served: those of a volume, of a step, or of all steps.
pub(super) struct ServedTree {
    pub(super) fs: Arc<dyn Upkeep>,
    pub(super) reads: Arc<ServedReads>,
    /// Where paths begin.
    pub(super) root: FoundNode,
    pub(super) version: TreeVersion,
}

impl ServedTree {
    /// A tree from the root of a file system on.
    pub(super) fn new(reads: &Arc<ServedReads>, version: TreeVersion) -> Self {
        let fs = &reads.fs;
        // Every file system has a root; without one nobody could pass it.
        let attr = fs.attr(Ino::ROOT);
        let attr = attr.unwrap_or(Attr { kind: NodeKind::Directory, links: 2, ..Attr::absent(Ino::ROOT) });
        let root = FoundNode { path: String::new(), attr };
        Self { fs: Arc::clone(fs), reads: Arc::clone(reads), root, version }
    }

    /// Finds a node below `from` that the visitor may read. Links are followed, inside the volume. A path has no `.` and `..`, which
    /// the reader of paths refuses.
    ///
    /// # Errors
    /// [`NoNode`].
    pub(super) fn find(&self, visitor: Visitor, from: &FoundNode, path: &[String]) -> Result<FoundNode, NoNode> {
        self.reach(visitor, from, path)
            .and_then(|node| if visitor.may_read(&node.attr) { Ok(node) } else { Err(NoNode::Denied) })
    }

    /// As [`ServedTree::find`], also of a node that the visitor may only reach.
    ///
    /// # Errors
    /// [`NoNode`].
    pub(super) fn reach(&self, visitor: Visitor, from: &FoundNode, path: &[String]) -> Result<FoundNode, NoNode> {
        let lookup = |_: &[(String, Attr)], directory: &Attr, name: &str| {
            if name == OWN && visitor == Visitor::Stranger {
                return Err(NoNode::Absent);
            }
            if !visitor.may_pass(directory) {
                return Err(NoNode::Denied);
            }
            Ok(self.fs.lookup(directory.ino, name.as_bytes())?)
        };
        let (below, attr) = follow(&*self.fs, from.attr, &path.join("/"), lookup)?;
        let names = [from.path.as_str(), &below].into_iter().filter(|path| !path.is_empty());
        Ok(FoundNode { path: names.collect::<Vec<_>>().join("/"), attr })
    }

    /// Whether the step that the tree is of was deleted or written anew.
    pub(super) fn is_gone(&self) -> bool {
        self.fs.attr(self.root.attr.ino).is_err()
    }

    /// Up to `count` entries of a directory from entry number `from` on, and the number of the entry after them if there is one.
    /// Strangers do not see the mount's own directories, though these count.
    ///
    /// # Errors
    /// [`NoNode`].
    pub(super) fn entries(
        &self,
        visitor: Visitor,
        directory: Ino,
        from: u64,
        count: usize,
    ) -> Result<(Vec<ServedEntry>, Option<u64>), NoNode> {
        if visitor != Visitor::Trusted && !visitor.may_read(&self.fs.attr(directory)?) {
            return Err(NoNode::Denied);
        }
        let (mut entries, mut next, mut has_more) = (Vec::new(), from, false);
        self.fs.read_dir(directory, from, &mut |entry| {
            if entries.len() == count {
                has_more = true;
                return ControlFlow::Break(());
            }
            next = entry.next.unwrap_or(next + 1);
            if visitor == Visitor::Trusted || entry.name != OWN.as_bytes() {
                let name = String::from_utf8_lossy(entry.name).into_owned();
                entries.push(ServedEntry { name, ino: entry.ino, kind: entry.kind });
            }
            ControlFlow::Continue(())
        })?;
        Ok((entries, has_more.then_some(next)))
    }

    /// All entries of a directory but symbolic links.
    ///
    /// # Errors
    /// [`NoNode`].
    pub(super) fn without_links(
        &self,
        visitor: Visitor,
        directory: Ino,
    ) -> Result<impl Iterator<Item = ServedEntry>, NoNode> {
        let (entries, _) = self.entries(visitor, directory, 0, usize::MAX)?;
        Ok(entries.into_iter().filter(|entry| entry.kind != NodeKind::Symlink))
    }

    /// The version of a file; none of a file whose content changes. Waits for no storage, unless the tree is of all steps.
    pub(super) fn version(&self, node: &FoundNode) -> Option<FileVersion> {
        let of_run;
        let (TreeDigest { digest, since }, is_live) = match &self.version {
            TreeVersion::Volume { volume, version } => (version, volume.is_live(node.attr.ino)),
            TreeVersion::Step { held, version } => (version.as_ref()?, held.is_live(node.attr.ino)),
            TreeVersion::Run(run) => {
                of_run = run(node.attr.ino)?;
                (&of_run.0, of_run.1.is_live(node.attr.ino))
            }
        };
        // What depends on settings and times that the digest does not have.
        let of_host = if node.path.split('/').any(|name| OF_THE_HOST.contains(&name)) { this_process() } else { "" };
        let digest = format!("{digest}{of_host}");
        let etag = || format!("\"{}\"", identity::file_digest(&digest, &node.path, node.attr.size_bytes));
        (!is_live).then(|| FileVersion { etag: etag(), since: Some(*since) })
    }

    /// The same, and of a file whose content changes the version that it has now.
    ///
    /// # Errors
    /// [`NoNode::Failed`].
    pub(super) fn version_now(&self, node: &FoundNode) -> Result<FileVersion, NoNode> {
        let made = || self.reads.made_now(node.attr.ino).map(|bytes| FileVersion::of_bytes(&bytes));
        self.version(node).map_or_else(|| made().map_err(|_| NoNode::failed()), Ok)
    }
}
