//! The mount's tree: fixed nodes, and one block of numbers per directory of tensors.
//!
//! Inode numbers are dense: fixed nodes first (root, `hf/`, `safetensors/`, links, …), then for each directory that shows a
//! view's names a block as long as the view's [`NameTree`](super::name_tree::NameTree), and for each directory of arrays one as
//! long as its [`ArrayTable`](super::arrays::ArrayTable). A thousand devices cost a thousand blocks, each one row of a table.

use std::collections::BTreeMap;

use super::{Ino, view_files::Made};

/// Name of the directories that tell of the mount itself.
pub(super) const OWN: &str = ".ckfs";

/// A fixed node.
#[derive(Debug)]
pub(super) struct Fixed {
    pub(super) parent: Ino,
    /// Whether it is `.ckfs/`, or in it.
    pub(super) is_own: bool,
    pub(super) kind: FixedKind,
}

/// What a fixed node is.
#[derive(Debug)]
pub(super) enum FixedKind {
    /// A directory; its entries sorted by name.
    Directory {
        /// Name, number, and whether it is a directory or a link.
        entries: Vec<(Box<str>, Ino)>,
        /// Subdirectories among the entries.
        subdirectories: u32,
    },
    /// A file of a view.
    Made {
        /// The view.
        view: u32,
        /// Which file.
        made: Made,
    },
    /// A text fixed at mount.
    Text(std::sync::Arc<[u8]>),
    /// `.ckfs/stats.json`.
    Stats,
    /// `.ckfs/metrics`.
    Metrics,
    /// A symbolic link.
    Symlink(Box<str>),
}

/// A directory whose nodes are found by arithmetic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) first: u64,
    pub(super) len: u64,
    pub(super) parent: Ino,
    pub(super) view: u32,
    pub(super) kind: BlockKind,
}

/// What a block shows.
#[derive(Clone, Copy, Debug)]
pub(super) enum BlockKind {
    /// Tensors as files by name.
    Names(Names),
    /// Arrays as directories of chunks: `orbax/0/items`.
    Arrays,
}

/// A directory of tensors: the whole ones, or the shards of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    pub(super) device: Option<u64>,
    pub(super) flavor: Flavor,
}

/// How a directory of tensors wraps them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flavor {
    /// Nothing but the elements.
    Raw,
    /// As `.npy` files.
    Npy,
}

/// What a number stands for.
#[derive(Debug)]
pub(super) enum Place<'a> {
    Fixed(&'a Fixed),
    /// A node of a view's names, in a block.
    Named(Block, Names, u32),
    /// A node of a view's arrays, in a block.
    Array(Block, u64),
}

/// The tree.
#[derive(Debug)]
pub(super) struct Tree {
    fixed: Vec<Fixed>,
    blocks: Vec<Block>,
}

/// A tree being planted: directories by path, before numbers are given.
#[derive(Debug, Default)]
pub(super) struct Seedling {
    entries: BTreeMap<String, Seed>,
}

#[derive(Debug)]
enum Seed {
    Directory(Seedling),
    File(FixedKind),
    Block { view: u32, kind: BlockKind, len: u64 },
}

impl Seedling {
    /// The directory `name`, made if need be; `None` if there is a file of that name.
    pub(super) fn directory(&mut self, name: &str) -> Option<&mut Self> {
        match self.entries.entry(name.to_owned()).or_insert_with(|| Seed::Directory(Self::default())) {
            Seed::Directory(directory) => Some(directory),
            Seed::File(_) | Seed::Block { .. } => None,
        }
    }

    /// Adds a file or link; false if the name is taken.
    pub(super) fn file(&mut self, name: &str, kind: FixedKind) -> bool {
        if self.entries.contains_key(name) {
            return false;
        }
        self.entries.insert(name.to_owned(), Seed::File(kind)).is_none()
    }

    /// Adds a block of `len` nodes.
    pub(super) fn block(&mut self, name: &str, view: u32, kind: BlockKind, len: u64) {
        self.entries.insert(name.to_owned(), Seed::Block { view, kind, len });
    }

    fn fixed_count(&self) -> u64 {
        let count = |seed: &Seed| match seed {
            Seed::Directory(directory) => directory.fixed_count(),
            Seed::File(_) => 1,
            Seed::Block { .. } => 0,
        };
        1 + self.entries.values().map(count).sum::<u64>()
    }

    /// Gives every node its number.
    pub(super) fn plant(self) -> Tree {
        let mut tree = Tree { fixed: Vec::new(), blocks: Vec::new() };
        let mut next_block = Ino::ROOT.0 + self.fixed_count();
        tree.plant(self, Ino::ROOT, false, &mut next_block);
        tree
    }
}

impl Tree {
    fn plant(&mut self, seedling: Seedling, parent: Ino, is_own: bool, next_block: &mut u64) -> Ino {
        let at = self.fixed.len();
        let ino = Ino(Ino::ROOT.0 + at as u64);
        let empty = FixedKind::Directory { entries: Vec::new(), subdirectories: 0 };
        self.fixed.push(Fixed { parent, is_own, kind: empty });
        let mut listed = Vec::with_capacity(seedling.entries.len());
        let mut directories = 0;
        for (name, seed) in seedling.entries {
            directories += u32::from(!matches!(seed, Seed::File(_)));
            let child = match seed {
                Seed::Directory(directory) => self.plant(directory, ino, is_own || name == OWN, next_block),
                Seed::File(kind) => {
                    self.fixed.push(Fixed { parent: ino, is_own, kind });
                    Ino(Ino::ROOT.0 + self.fixed.len() as u64 - 1)
                }
                Seed::Block { view, kind, len } => {
                    let first = *next_block;
                    *next_block += len;
                    self.blocks.push(Block { first, len, parent: ino, view, kind });
                    Ino(first)
                }
            };
            listed.push((name.into_boxed_str(), child));
        }
        self.fixed[at].kind = FixedKind::Directory { entries: listed, subdirectories: directories };
        ino
    }

    /// What a number stands for.
    pub(super) fn place(&self, ino: Ino) -> Option<Place<'_>> {
        let at = ino.0.checked_sub(Ino::ROOT.0)?;
        if let Some(fixed) = usize::try_from(at).ok().and_then(|at| self.fixed.get(at)) {
            return Some(Place::Fixed(fixed));
        }
        let block = self.blocks[..self.blocks.partition_point(|block| block.first <= ino.0)].last()?;
        let node = ino.0 - block.first;
        (node < block.len).then(|| match block.kind {
            BlockKind::Names(names) => Place::Named(*block, names, number(node)),
            BlockKind::Arrays => Place::Array(*block, node),
        })
    }

    /// The fixed directory at a path of names, from the root.
    pub(super) fn directory<'a>(&self, path: impl IntoIterator<Item = &'a str>) -> Option<Ino> {
        path.into_iter().try_fold(Ino::ROOT, |at, name| {
            let Place::Fixed(Fixed { kind: FixedKind::Directory { entries, .. }, .. }) = self.place(at)? else {
                return None;
            };
            let found = entries.binary_search_by(|(entry, _)| (**entry).cmp(name)).ok()?;
            Some(entries[found].1)
        })
    }

    /// Number of nodes.
    pub(super) fn len(&self) -> u64 {
        self.fixed.len() as u64 + self.blocks.iter().map(|block| block.len).sum::<u64>()
    }
}

/// Number of a node in a tree of names.
fn number(node: u64) -> u32 {
    u32::try_from(node).expect("a tree of names has fewer than 2^32 nodes")
}
