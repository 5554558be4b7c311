//! The nodes of a volume: names, attributes and contents.

use std::{ops::ControlFlow, sync::Arc};

use ckfs_image::{FileContent, FileImage, SubtreeNode};
use ckfs_source::FileId;
use ckfs_tensor::to_usize;

use super::{
    exposition::{self, METRICS_BYTES},
    file_system::{Attr, BUFFER_BYTES, DirEntry, FsError, Ino, NodeKind, Nodes, SMALL_BUFFER_BYTES, StatFs},
    health::ProblemKind,
    permissions::ReadSubject,
    tree::{FixedKind, FixedNode, Live, TreeNode},
    volume::Volume,
};

impl Volume {
    /// The node at a path relative to the root, such as `dev3/layers/scanned/wq`. Links are not followed.
    ///
    /// # Errors
    /// [`FsError::NotFound`] or [`FsError::NotDirectory`].
    pub fn resolve(&self, path: &str) -> Result<Attr, FsError> {
        path.split('/')
            .filter(|component| !component.is_empty() && *component != ".")
            .try_fold(self.attr(Ino::ROOT)?, |attr, component| self.lookup(attr.ino, component.as_bytes()))
    }

    /// The layout of a file that holds tensors; `None` for other nodes.
    ///
    /// # Errors
    /// [`FsError::Io`] if the file cannot be laid out.
    pub fn image(&self, ino: Ino) -> Result<Option<FileImage>, FsError> {
        match self.content(ino)? {
            FileContent::Image(image) => Ok(Some(image)),
            FileContent::Original(..) | FileContent::Bytes(_) | FileContent::Generated(_) => Ok(None),
        }
    }

    /// The source file that a file is identical to, if it is one.
    pub fn original(&self, ino: Ino) -> Option<FileId> {
        let TreeNode::Fixed(FixedNode { kind: FixedKind::File(node), .. }) = self.tree.node(ino)? else { return None };
        match node.file.open() {
            Ok(FileContent::Original(file, _)) => Some(file),
            Ok(FileContent::Bytes(_) | FileContent::Generated(_) | FileContent::Image(_)) | Err(_) => None,
        }
    }

    pub(super) fn content(&self, ino: Ino) -> Result<FileContent, FsError> {
        let content = match self.tree.node(ino).ok_or(FsError::NotFound)? {
            TreeNode::InSubtree(block, node) => match block.subtree.node(node) {
                SubtreeNode::Directory(_) => return Err(FsError::IsDirectory),
                SubtreeNode::File => block.subtree.content(node),
            },
            TreeNode::Fixed(fixed) => match &fixed.kind {
                FixedKind::Directory { .. } => return Err(FsError::IsDirectory),
                FixedKind::Symlink(_) => return Err(FsError::Invalid),
                FixedKind::File(node) => node.file.open(),
                FixedKind::Live(live) => Ok(FileContent::Bytes(self.live_content(*live))),
            },
        };
        content.map_err(|error| {
            tracing::error!(ino = ino.0, "cannot lay out a file: {error}");
            self.health().note(ProblemKind::FailedOpen, &self.path_of(ino), &error.to_string());
            FsError::Io
        })
    }

    /// The present content of a file that is generated for its readers.
    pub(super) fn live_content(&self, live: Live) -> Arc<[u8]> {
        match live {
            Live::Stats => self.reported().stats(self.stats_bytes).into(),
            Live::Metrics => exposition::metrics(&self.reported()).into(),
        }
    }

    fn attr_of(&self, ino: Ino, node: &TreeNode<'_>) -> Result<Attr, FsError> {
        let (kind, subdirectories) = node.kind();
        let (size_bytes, has_parts) = match node {
            TreeNode::InSubtree(block, _) if kind == NodeKind::Directory => (0, block.subtree.has_headers()),
            TreeNode::InSubtree(block, node) => {
                let len_bytes = block.subtree.len_bytes(*node).map_err(|error| {
                    tracing::error!(ino = ino.0, "cannot lay out a file: {error}");
                    FsError::Io
                })?;
                (len_bytes, block.subtree.has_headers())
            }
            TreeNode::Fixed(fixed) => match &fixed.kind {
                FixedKind::Directory { .. } => (0, false),
                FixedKind::Symlink(target) => (target.len() as u64, false),
                FixedKind::File(node) => (node.file.len_bytes(), node.file.is_read_by_items()),
                FixedKind::Live(Live::Stats) => (self.stats_bytes as u64, false),
                FixedKind::Live(Live::Metrics) => (METRICS_BYTES as u64, false),
            },
        };
        let find = || self.permissions.of(&Self::subject(ino, node));
        let permission = match node {
            TreeNode::Fixed(FixedNode { kind: FixedKind::File(node), .. }) => *node.permission.get_or_init(find),
            TreeNode::Fixed(_) | TreeNode::InSubtree(..) => find(),
        };
        let links = if kind == NodeKind::Directory { 2 + subdirectories } else { 1 };
        let buffer_bytes = if has_parts { SMALL_BUFFER_BYTES } else { BUFFER_BYTES };
        Ok(Attr { ino, kind, size_bytes, links, modified: self.modified, permission, buffer_bytes })
    }

    fn subject(ino: Ino, node: &TreeNode<'_>) -> ReadSubject {
        let is_directory = node.kind().0 == NodeKind::Directory;
        match node {
            TreeNode::InSubtree(block, _) if is_directory => ReadSubject::Names { view: block.view },
            TreeNode::InSubtree(block, node) => {
                ReadSubject::File { view: block.view, derived_from: block.subtree.derived_from(*node) }
            }
            TreeNode::Fixed(FixedNode { is_own: true, .. }) => ReadSubject::Own { is_directory },
            TreeNode::Fixed(fixed) => match &fixed.kind {
                FixedKind::Directory { .. } => ReadSubject::Directory(ino),
                FixedKind::File(node) => ReadSubject::File { view: node.view, derived_from: node.file.derived_from() },
                FixedKind::Live(_) => ReadSubject::Own { is_directory },
                FixedKind::Symlink(_) => ReadSubject::Link,
            },
        }
    }

    /// The permission bits that a copy of a node may have under another owner and group: those that the sources allow, plus
    /// all that the owner needs. `0` for nodes without attributes.
    pub fn copy_mode(&self, ino: Ino, uid: u32, gid: u32) -> u16 {
        self.tree.node(ino).map_or(0, |node| self.permissions.mode(&Self::subject(ino, &node), uid, gid))
    }

    /// The path of a node, for messages.
    pub(super) fn path_of(&self, ino: Ino) -> String {
        let mut names: Vec<String> = Vec::new();
        let mut at = ino;
        while at != Ino::ROOT {
            let parent = match self.tree.node(at) {
                Some(TreeNode::InSubtree(block, node)) if node != 0 => {
                    names.push(block.subtree.name(node).into_owned());
                    at = Ino(block.first + block.subtree.parent(node));
                    continue;
                }
                Some(TreeNode::InSubtree(block, _)) => block.parent,
                Some(TreeNode::Fixed(fixed)) => fixed.parent,
                None => break,
            };
            names.push(self.entry_name(parent, at).unwrap_or("?").to_owned());
            at = parent;
        }
        names.reverse();
        names.join("/")
    }

    fn entry_name(&self, parent: Ino, child: Ino) -> Option<&str> {
        let TreeNode::Fixed(FixedNode { kind: FixedKind::Directory { entries, .. }, .. }) = self.tree.node(parent)?
        else {
            return None;
        };
        entries.iter().find(|(_, ino)| *ino == child).map(|(name, _)| &**name)
    }
}

impl Nodes for Volume {
    fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        match self.tree.node(parent).ok_or(FsError::NotFound)? {
            TreeNode::InSubtree(block, node) => {
                if block.subtree.node(node) == SubtreeNode::File {
                    return Err(FsError::NotDirectory);
                }
                let child = block.subtree.child(node, name).ok_or(FsError::NotFound)?;
                self.attr_of(Ino(block.first + child), &TreeNode::InSubtree(block, child))
            }
            TreeNode::Fixed(FixedNode { kind: FixedKind::Directory { entries, .. }, .. }) => {
                let found = entries.binary_search_by(|(entry, _)| entry.as_bytes().cmp(name));
                self.attr(entries[found.map_err(|_| FsError::NotFound)?].1)
            }
            TreeNode::Fixed(_) => Err(FsError::NotDirectory),
        }
    }

    fn attr(&self, ino: Ino) -> Result<Attr, FsError> {
        self.attr_of(ino, &self.tree.node(ino).ok_or(FsError::NotFound)?)
    }

    fn read_dir(
        &self,
        dir: Ino,
        from: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError> {
        match self.tree.node(dir).ok_or(FsError::NotFound)? {
            TreeNode::InSubtree(block, node) => {
                if block.subtree.node(node) == SubtreeNode::File {
                    return Err(FsError::NotDirectory);
                }
                block.subtree.list(node, from, &mut |name, child| {
                    let (ino, kind) = (Ino(block.first + child), TreeNode::InSubtree(block, child).kind().0);
                    each(DirEntry { name: name.as_bytes(), ino, kind, next: None }).is_continue()
                });
            }
            TreeNode::Fixed(FixedNode { kind: FixedKind::Directory { entries, .. }, .. }) => {
                for (name, ino) in entries.iter().skip(to_usize(from)) {
                    let kind = self.tree.node(*ino).map_or(NodeKind::File, |node| node.kind().0);
                    if each(DirEntry { name: name.as_bytes(), ino: *ino, kind, next: None }).is_break() {
                        break;
                    }
                }
            }
            TreeNode::Fixed(_) => return Err(FsError::NotDirectory),
        }
        Ok(())
    }

    fn parent(&self, ino: Ino) -> Result<Ino, FsError> {
        match self.tree.node(ino).ok_or(FsError::NotFound)? {
            TreeNode::InSubtree(block, 0) => Ok(block.parent),
            TreeNode::InSubtree(block, node) => Ok(Ino(block.first + block.subtree.parent(node))),
            TreeNode::Fixed(fixed) => Ok(fixed.parent),
        }
    }

    fn read_link(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        match self.tree.node(ino).ok_or(FsError::NotFound)? {
            TreeNode::Fixed(FixedNode { kind: FixedKind::Symlink(target), .. }) => Ok(target.as_bytes().to_vec()),
            TreeNode::Fixed(_) | TreeNode::InSubtree(..) => Err(FsError::Invalid),
        }
    }

    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if !name.starts_with(b"user.") {
            return Err(FsError::Unsupported);
        }
        let value = match self.tree.node(ino).ok_or(FsError::NotFound)? {
            TreeNode::InSubtree(block, node) => block.subtree.xattr(node, name),
            TreeNode::Fixed(_) => None,
        };
        value.ok_or(FsError::NoAttribute)
    }

    fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>, FsError> {
        let shown = match self.tree.node(ino).ok_or(FsError::NotFound)? {
            TreeNode::InSubtree(block, node) => block.subtree.xattr_names(node),
            TreeNode::Fixed(_) => &[],
        };
        Ok(shown.iter().map(|name| name.as_bytes().to_vec()).collect())
    }

    fn stat_fs(&self) -> StatFs {
        StatFs { total_bytes: self.total_bytes, nodes: self.tree.len() }
    }
}
