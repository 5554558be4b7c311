//! The mount's tree: fixed nodes, and one block of numbers per subtree.
//!
//! Inode numbers are dense. First come the fixed nodes (root, directories, files, links). Then each directory that a format
//! shows as a [`Subtree`] has a block with one number per node. A thousand devices cost a thousand blocks, each one row of a table.

use std::{
    collections::BTreeMap,
    hash::{Hash, Hasher},
    sync::{Arc, OnceLock},
};

use ckfs_image::{Directory, DirectoryEntry, OWN, Subtree, VirtualFile};
use ckfs_source::permission::Permission;

use super::file_system::Ino;

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

/// The tree.
pub(super) struct NodeTree {
    fixed: Vec<FixedNode>,
    blocks: Vec<SubtreeBlock>,
    /// Directories that mirror one of the repository, with its path there.
    mirrors: Vec<(Ino, String)>,
}

/// A tree under construction: directories by path, before nodes have numbers.
#[derive(Default)]
pub(super) struct TreeBuilder {
    entries: BTreeMap<String, BuilderChild>,
    mirrors: Option<String>,
}

enum BuilderChild {
    Directory(TreeBuilder),
    File(FixedKind),
    Subtree { view: u32, subtree: Arc<dyn Subtree> },
}

impl TreeBuilder {
    /// The directory `name`, added if it is missing; `None` if another node has the name.
    pub(super) fn directory(&mut self, name: &str) -> Option<&mut Self> {
        match self.entries.entry(name.to_owned()).or_insert_with(|| BuilderChild::Directory(Self::default())) {
            BuilderChild::Directory(directory) => Some(directory),
            BuilderChild::File(_) | BuilderChild::Subtree { .. } => None,
        }
    }

    /// Adds one of the mount's own files.
    pub(super) fn file(&mut self, name: &str, file: impl VirtualFile + 'static) {
        let file = FileNode { view: 0, file: Arc::new(file), permission: OnceLock::new() };
        self.entries.insert(name.to_owned(), BuilderChild::File(FixedKind::File(file)));
    }

    /// Adds a file whose content is generated for each reader.
    pub(super) fn live(&mut self, name: &str, live: Live) {
        self.entries.insert(name.to_owned(), BuilderChild::File(FixedKind::Live(live)));
    }

    /// Adds the nodes of view number `view`; directories of the same name are merged.
    ///
    /// # Errors
    /// The name of an entry that exists already.
    pub(super) fn add(&mut self, view: u32, shown: Directory) -> Result<(), String> {
        self.mirrors = self.mirrors.take().or(shown.mirrors);
        shown.entries.into_iter().try_for_each(|(name, entry)| {
            let child = match entry {
                DirectoryEntry::Directory(directory) => {
                    return match self.directory(&name) {
                        Some(known) => known.add(view, directory),
                        None => Err(name),
                    };
                }
                DirectoryEntry::File(file) => {
                    BuilderChild::File(FixedKind::File(FileNode { view, file, permission: OnceLock::new() }))
                }
                DirectoryEntry::Link(target) => BuilderChild::File(FixedKind::Symlink(target)),
                DirectoryEntry::Subtree(subtree) => BuilderChild::Subtree { view, subtree },
            };
            if self.entries.contains_key(&name) {
                return Err(name);
            }
            self.entries.insert(name, child);
            Ok(())
        })
    }

    fn fixed_count(&self) -> u64 {
        let count = |child: &BuilderChild| match child {
            BuilderChild::Directory(directory) => directory.fixed_count(),
            BuilderChild::File(_) => 1,
            BuilderChild::Subtree { .. } => 0,
        };
        1 + self.entries.values().map(count).sum::<u64>()
    }

    /// Gives every node its number.
    pub(super) fn build(self) -> NodeTree {
        let mut tree = NodeTree { fixed: Vec::new(), blocks: Vec::new(), mirrors: Vec::new() };
        let mut next_block = Ino::ROOT.0 + self.fixed_count();
        tree.build(self, Ino::ROOT, false, &mut next_block);
        tree
    }
}

impl NodeTree {
    fn build(&mut self, builder: TreeBuilder, parent: Ino, is_own: bool, next_block: &mut u64) -> Ino {
        let at = self.fixed.len();
        let ino = Ino(Ino::ROOT.0 + at as u64);
        let empty = FixedKind::Directory { entries: Vec::new(), subdirectories: 0 };
        self.fixed.push(FixedNode { parent, is_own, kind: empty });
        self.mirrors.extend(builder.mirrors.map(|path| (ino, path)));
        let mut listed = Vec::with_capacity(builder.entries.len());
        let mut directories = 0;
        for (name, child) in builder.entries {
            directories += u32::from(!matches!(child, BuilderChild::File(_)));
            let child = match child {
                BuilderChild::Directory(directory) => self.build(directory, ino, is_own || name == OWN, next_block),
                BuilderChild::File(kind) => {
                    self.fixed.push(FixedNode { parent: ino, is_own, kind });
                    Ino(Ino::ROOT.0 + self.fixed.len() as u64 - 1)
                }
                BuilderChild::Subtree { view, subtree } => {
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

    /// Directories that mirror one of the repository, with its path there.
    pub(super) fn mirrors(&self) -> &[(Ino, String)] {
        &self.mirrors
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
