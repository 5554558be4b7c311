//! The mount's tree: fixed nodes, and one block of numbers per subtree.
//!
//! Inode numbers are dense. First come the fixed nodes (root, directories, files, links). Then each directory that a format
//! shows as a [`Subtree`] has a block with one number per node. A thousand devices cost a thousand blocks, each one row of a table.

use std::{
    hash::{Hash, Hasher},
    sync::{Arc, OnceLock},
};

use ckfs_image::{Directory, DirectoryEntry, OWN, Shown, Subtree, SubtreeNode, VirtualFile};
use ckfs_source::permission::Permission;

use super::file_system::{Ino, NodeKind};

/// A fixed node.
pub(super) struct FixedNode {
    pub(super) parent: Ino,
    /// Whether it is the mount's own directory, or inside it.
    pub(super) is_own: bool,
    pub(super) kind: FixedKind,
}

/// Type of a fixed node.
pub(super) enum FixedKind {
    /// A directory; its entries sorted by name.
    Directory {
        /// Names and numbers.
        entries: Vec<(Box<str>, Ino)>,
        /// Subdirectories among the entries.
        subdirectories: u32,
    },
    /// A file of a view, or of the mount.
    File(FileNode),
    /// A file whose content is generated for each reader.
    Live(Live),
    /// A symbolic link.
    Symlink(Box<str>),
}

/// A file.
pub(super) struct FileNode {
    /// Number of its view; 0 for the mount's own files.
    pub(super) view: u32,
    pub(super) file: Arc<dyn VirtualFile>,
    /// Computed at the first request.
    pub(super) permission: OnceLock<Permission>,
}

/// A file of the mount whose content changes and whose length does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Live {
    /// `.ckfs/stats.json`.
    Stats,
    /// `.ckfs/metrics`.
    Metrics,
}

/// A directory whose nodes are found by arithmetic.
pub(super) struct SubtreeBlock {
    pub(super) first: u64,
    pub(super) len: u64,
    pub(super) parent: Ino,
    /// Number of its view.
    pub(super) view: u32,
    pub(super) subtree: Arc<dyn Subtree>,
}

/// The node behind an inode number.
pub(super) enum TreeNode<'a> {
    Fixed(&'a FixedNode),
    /// A node of a subtree, by its number there.
    InSubtree(&'a SubtreeBlock, u64),
}

impl TreeNode<'_> {
    /// Its type, and the number of subdirectories of a directory.
    pub(super) fn kind(&self) -> (NodeKind, u32) {
        match self {
            Self::InSubtree(block, node) => match block.subtree.node(*node) {
                SubtreeNode::Directory(subdirectories) => (NodeKind::Directory, subdirectories),
                SubtreeNode::File => (NodeKind::File, 0),
            },
            Self::Fixed(fixed) => match fixed.kind {
                FixedKind::Directory { subdirectories, .. } => (NodeKind::Directory, subdirectories),
                FixedKind::Symlink(_) => (NodeKind::Symlink, 0),
                FixedKind::File(_) | FixedKind::Live(_) => (NodeKind::File, 0),
            },
        }
    }
}

/// The tree.
pub(super) struct NodeTree {
    fixed: Vec<FixedNode>,
    blocks: Vec<SubtreeBlock>,
    /// Directories that mirror one of the repository, with its path there.
    pub(super) mirrors: Vec<(Ino, String)>,
}

/// A tree under construction: directories by path, before nodes have numbers.
pub(super) type TreeBuilder = Directory<TreeLeaf>;

/// A node under construction, but for directories.
pub(super) enum TreeLeaf {
    Fixed(FixedKind),
    Subtree { view: u32, subtree: Arc<dyn Subtree> },
}

impl TreeLeaf {
    /// What view number `view` shows.
    pub(super) fn of(view: u32, shown: Shown) -> Self {
        match shown {
            Shown::File(file) => Self::Fixed(FixedKind::File(FileNode { view, file, permission: OnceLock::new() })),
            Shown::Link(target) => Self::Fixed(FixedKind::Symlink(target)),
            Shown::Subtree(subtree) => Self::Subtree { view, subtree },
        }
    }

    /// One of the mount's own files.
    pub(super) fn own(file: impl VirtualFile + 'static) -> Self {
        Self::of(0, Shown::File(Arc::new(file)))
    }
}

fn fixed_count(directory: &TreeBuilder) -> u64 {
    let count = |child: &DirectoryEntry<TreeLeaf>| match child {
        DirectoryEntry::Directory(directory) => fixed_count(directory),
        DirectoryEntry::Leaf(TreeLeaf::Fixed(_)) => 1,
        DirectoryEntry::Leaf(TreeLeaf::Subtree { .. }) => 0,
    };
    1 + directory.entries.values().map(count).sum::<u64>()
}

impl NodeTree {
    /// Gives every node its number.
    pub(super) fn new(root: TreeBuilder) -> Self {
        let mut tree = Self { fixed: Vec::new(), blocks: Vec::new(), mirrors: Vec::new() };
        let mut next_block = Ino::ROOT.0 + fixed_count(&root);
        tree.build(root, Ino::ROOT, false, &mut next_block);
        tree
    }

    fn build(&mut self, builder: TreeBuilder, parent: Ino, is_own: bool, next_block: &mut u64) -> Ino {
        let at = self.fixed.len();
        let ino = Ino(Ino::ROOT.0 + at as u64);
        let empty = FixedKind::Directory { entries: Vec::new(), subdirectories: 0 };
        self.fixed.push(FixedNode { parent, is_own, kind: empty });
        self.mirrors.extend(builder.mirrors.map(|path| (ino, path)));
        let mut listed = Vec::with_capacity(builder.entries.len());
        let mut directories = 0;
        for (name, child) in builder.entries {
            directories += u32::from(!matches!(child, DirectoryEntry::Leaf(TreeLeaf::Fixed(_))));
            let child = match child {
                DirectoryEntry::Directory(directory) => self.build(directory, ino, is_own || name == OWN, next_block),
                DirectoryEntry::Leaf(TreeLeaf::Fixed(kind)) => {
                    self.fixed.push(FixedNode { parent: ino, is_own, kind });
                    Ino(Ino::ROOT.0 + self.fixed.len() as u64 - 1)
                }
                DirectoryEntry::Leaf(TreeLeaf::Subtree { view, subtree }) => {
                    let (first, len) = (*next_block, subtree.nodes());
                    *next_block += len;
                    self.blocks.push(SubtreeBlock { first, len, parent: ino, view, subtree });
                    Ino(first)
                }
            };
            listed.push((name.into_boxed_str(), child));
        }
        self.fixed[at].kind = FixedKind::Directory { entries: listed, subdirectories: directories };
        ino
    }

    /// The node behind an inode number.
    pub(super) fn node(&self, ino: Ino) -> Option<TreeNode<'_>> {
        let at = ino.0.checked_sub(Ino::ROOT.0)?;
        if let Some(fixed) = usize::try_from(at).ok().and_then(|at| self.fixed.get(at)) {
            return Some(TreeNode::Fixed(fixed));
        }
        let block = self.blocks[..self.blocks.partition_point(|block| block.first <= ino.0)].last()?;
        let node = ino.0 - block.first;
        (node < block.len).then_some(TreeNode::InSubtree(block, node))
    }

    /// Adds to a digest what decides which node has which number, but for the names within subtrees.
    pub(super) fn digest(&self, hasher: &mut impl Hasher) {
        for node in &self.fixed {
            (node.parent, node.is_own).hash(hasher);
            match &node.kind {
                FixedKind::Directory { entries, subdirectories } => (entries, subdirectories).hash(hasher),
                FixedKind::File(file) => (file.view, file.file.len_bytes()).hash(hasher),
                FixedKind::Live(live) => (*live == Live::Stats).hash(hasher),
                FixedKind::Symlink(target) => target.hash(hasher),
            }
        }
        for block in &self.blocks {
            (block.first, block.len, block.parent, block.view).hash(hasher);
        }
    }

    /// Number of nodes.
    pub(super) fn len(&self) -> u64 {
        self.fixed.len() as u64 + self.blocks.iter().map(|block| block.len).sum::<u64>()
    }
}
