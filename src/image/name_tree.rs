//! The tree of a view's tensor names, shared by all directories that show it: `full/` and every `dev{d}/` have the same
//! names, so one tree serves any number of devices. The directories of Orbax's arrays are such a tree, too.
//!
//! Nodes are numbered so that a directory's children are consecutive and sorted by name; node 0 is the root. A node takes
//! 24 bytes besides its name.

use ckfs_plan::{Plan, PlannedTensor, Problem};

/// Longest file name that the kernel passes, in bytes.
pub(super) const NAME_BYTES_MAX: usize = 255;

/// Longest path below a directory of tensors, in bytes: the kernel's limit minus room for the path before it.
const PATH_BYTES_MAX: usize = 4096 - 512;

#[derive(Clone, Copy, Debug)]
struct NameRow {
    name_start: u32,
    name_len: u32,
    parent: u32,
    /// First child, of a directory; else the number of the leaf.
    first: u32,
    /// Number of children, or [`IS_LEAF`].
    children: u32,
    /// Subdirectories among the children.
    subdirectories: u32,
}

const IS_LEAF: u32 = u32::MAX;

/// Type of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameNode {
    /// A directory, with its number of subdirectories.
    Directory(u32),
    /// A leaf: a tensor of the plan, or what else was numbered.
    Leaf(u32),
}

/// An immutable tree of names.
#[derive(Debug)]
pub(super) struct NameTree {
    nodes: Vec<NameRow>,
    names: String,
}

/// What stands between the names of a leaf's path: it sorts before what they contain, so that paths sort as their names do.
pub(super) const BELOW: &str = "\0";

/// The path of a leaf, and its number.
pub(super) type NamedLeaf = (String, u32);

/// The name in a path that starts at that byte.
fn name_at(path: &str, start: usize) -> &str {
    let rest = &path[start..];
    rest.split_once(BELOW).map_or(rest, |(name, _)| name)
}

fn number(n: usize) -> u32 {
    u32::try_from(n).expect("a tree of fewer than 2^32 nodes and bytes of names")
}

/// Number of a node in a tree of names.
pub(super) fn name_node(at: u64) -> u32 {
    u32::try_from(at).expect("a tree of names has fewer than 2^32 nodes")
}

impl NameTree {
    /// The tree of the tensors of a plan that `shown` selects, with `suffix` after the name of each file.
    ///
    /// # Errors
    /// Every name that is too long, used twice, or both a file and a directory.
    pub(super) fn new(plan: &Plan, suffix: &str, shown: impl Fn(&PlannedTensor) -> bool) -> Result<Self, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut leaves: Vec<NamedLeaf> = Vec::new();
        let mut names_bytes = 0;
        for (index, tensor) in plan.tensors.iter().enumerate().filter(|(_, tensor)| shown(tensor)) {
            let mut path = plan.path(tensor);
            let path_bytes = path.iter().map(|component| component.len() + 1).sum::<usize>() - 1 + suffix.len();
            if path_bytes > PATH_BYTES_MAX {
                let start: String = tensor.name.chars().take(40).collect();
                let reason = format!("the path has {path_bytes} bytes, at most {PATH_BYTES_MAX} are possible");
                problems.push(Problem::File { file: format!("{start}…"), reason });
                continue;
            }
            names_bytes += path_bytes;
            if u32::try_from(names_bytes).is_err() {
                let reason = "all names together have more bytes than the 2^32 that are possible".to_owned();
                problems.push(Problem::File { file: "names".to_owned(), reason });
                break;
            }
            if let Some(file) = path.last_mut().filter(|_| !suffix.is_empty()) {
                file.to_mut().push_str(suffix);
            }
            // Tensors are sorted by name, so those of a directory follow each other, and its name is told once.
            let before = leaves.last().map_or("", |(before, _)| before);
            let shared = before.split(BELOW).zip(&path).take_while(|(before, component)| before == component).count();
            for component in path.iter().skip(shared).filter(|name| name.len() > NAME_BYTES_MAX) {
                let (name, bytes) = (&tensor.name, component.len());
                problems.push(Problem::Request(format!(
                    "{name}: the file name {component:?} has {bytes} bytes, at most {NAME_BYTES_MAX} are possible"
                )));
            }
            leaves.push((path.join(BELOW), number(index)));
        }
        let tree = Self::of(leaves, &mut |path, [first, second]| {
            let [first, second] = [first, second].map(|tensor| &plan.tensors[tensor as usize].name);
            problems.push(Problem::collision(&path, first, second));
        });
        if problems.is_empty() { Ok(tree) } else { Err(problems) }
    }

    /// The tree of these leaves. Two that have one place, or a leaf and one below it, are told to `collide`: path and numbers.
    pub(super) fn of(mut leaves: Vec<NamedLeaf>, collide: &mut dyn FnMut(String, [u32; 2])) -> Self {
        leaves.sort();
        let mut tree = Self { nodes: vec![NameRow::directory(0)], names: String::new() };
        tree.lay(0, &leaves, 0, collide);
        tree
    }

    /// Lays out the nodes below node `to`, whose children's names start at that byte of their paths.
    fn lay(&mut self, to: u32, below: &[NamedLeaf], start: usize, collide: &mut dyn FnMut(String, [u32; 2])) {
        let first = number(self.nodes.len());
        let mut directories = Vec::new();
        for same in below.chunk_by(|(left, _), (right, _)| name_at(left, start) == name_at(right, start)) {
            let (path, leaf) = &same[0];
            let name = name_at(path, start);
            let end = start + name.len();
            for pair in same.windows(2).filter(|pair| pair[0].0.len() == end) {
                collide(pair[0].0.replace(BELOW, "/"), [pair[0].1, pair[1].1]);
            }
            let mut node = NameRow::directory(to);
            (node.name_start, node.name_len) = (number(self.names.len()), number(name.len()));
            if path.len() == end {
                (node.first, node.children) = (*leaf, IS_LEAF);
            } else {
                directories.push((number(self.nodes.len()), same, end + BELOW.len()));
            }
            self.names.push_str(name);
            self.nodes.push(node);
        }
        let children = number(self.nodes.len()) - first;
        let node = &mut self.nodes[to as usize];
        (node.first, node.children, node.subdirectories) = (first, children, number(directories.len()));
        for (at, below, start) in directories {
            self.lay(at, below, start, collide);
        }
    }

    /// Number of nodes.
    pub(super) fn len(&self) -> u64 {
        self.nodes.len() as u64
    }

    /// Type of a node.
    pub(super) fn node(&self, at: u32) -> NameNode {
        let node = self.nodes[at as usize];
        if node.children == IS_LEAF { NameNode::Leaf(node.first) } else { NameNode::Directory(node.subdirectories) }
    }

    /// A node's name.
    pub(super) fn name(&self, at: u32) -> &str {
        self.name_of(&self.nodes[at as usize])
    }

    fn name_of(&self, node: &NameRow) -> &str {
        &self.names[node.name_start as usize..(node.name_start + node.name_len) as usize]
    }

    /// The path from the root to another node.
    pub(super) fn path(&self, at: u32) -> String {
        match self.parent(at) {
            0 => self.name(at).to_owned(),
            parent => format!("{}/{}", self.path(parent), self.name(at)),
        }
    }

    /// A node's parent; the root's is the root.
    pub(super) fn parent(&self, at: u32) -> u32 {
        self.nodes[at as usize].parent
    }

    /// Numbers of a directory's children, sorted by name; none for a leaf.
    pub(super) fn children(&self, at: u32) -> std::ops::Range<u32> {
        let node = self.nodes[at as usize];
        if node.children == IS_LEAF { 0..0 } else { node.first..node.first + node.children }
    }

    /// Calls `each` with a directory's children from entry number `from` on, until it returns false.
    pub(super) fn list(&self, at: u32, from: u64, each: &mut dyn FnMut(&str, u64) -> bool) {
        let children = self.children(at);
        let first = u64::from(children.start).saturating_add(from);
        (first..u64::from(children.end)).all(|child| each(self.name(name_node(child)), child));
    }

    /// The child with that name.
    pub(super) fn child(&self, at: u32, name: &[u8]) -> Option<u32> {
        let children = self.children(at);
        let rows = &self.nodes[children.start as usize..children.end as usize];
        let found = rows.binary_search_by(|row| self.name_of(row).as_bytes().cmp(name)).ok()?;
        Some(children.start + number(found))
    }
}

impl NameRow {
    fn directory(parent: u32) -> Self {
        Self { name_start: 0, name_len: 0, parent, first: 0, children: 0, subdirectories: 0 }
    }
}
