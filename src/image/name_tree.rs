//! The tree of a view's tensor names, shared by all directories that show it: `full/` and every `dev{d}/` have the same
//! names, so one tree serves any number of devices.
//!
//! Nodes are numbered so that a directory's children are consecutive and sorted by name; node 0 is the root. A node takes
//! 24 bytes besides its name.

use std::borrow::Cow;

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
    /// First child, for a directory; else the tensor's number.
    first: u32,
    /// Number of children, or [`IS_FILE`].
    children: u32,
    /// Subdirectories among the children.
    subdirectories: u32,
}

const IS_FILE: u32 = u32::MAX;

/// Type of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameNode {
    /// A directory, with its number of subdirectories.
    Directory(u32),
    /// A tensor of the plan.
    Tensor(u32),
}

/// An immutable tree of names.
#[derive(Debug)]
pub(super) struct NameTree {
    nodes: Vec<NameRow>,
    names: String,
}

/// A tree under construction: nodes in the order of their creation, node 0 the root. Two nodes may have one place: those are
/// collisions.
#[derive(Debug)]
struct NameTreeBuilder<'a> {
    nodes: Vec<NodeBuilder<'a>>,
}

#[derive(Debug)]
struct NodeBuilder<'a> {
    parent: u32,
    name: Cow<'a, str>,
    /// The tensor, of a file.
    tensor: Option<u32>,
}

/// The nodes of a builder by directory, sorted by name.
struct Siblings {
    nodes: Vec<u32>,
    /// Where the children of each node start in `nodes`; they end where those of the next start.
    starts: Vec<usize>,
}

impl<'a> NameTreeBuilder<'a> {
    fn node(&self, at: u32) -> &NodeBuilder<'a> {
        &self.nodes[at as usize]
    }

    fn add(&mut self, parent: u32, name: Cow<'a, str>, tensor: Option<u32>) -> u32 {
        let at = number(self.nodes.len());
        self.nodes.push(NodeBuilder { parent, name, tensor });
        at
    }

    fn siblings(&self) -> Siblings {
        let mut starts = vec![0; self.nodes.len() + 1];
        for node in &self.nodes[1..] {
            starts[node.parent as usize + 1] += 1;
        }
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        let mut next = starts.clone();
        let mut nodes = vec![0; self.nodes.len() - 1];
        for (at, node) in (1..).zip(&self.nodes[1..]) {
            let place = &mut next[node.parent as usize];
            nodes[*place] = at;
            *place += 1;
        }
        for children in starts.windows(2) {
            nodes[children[0]..children[1]].sort_by_key(|at| &self.node(*at).name);
        }
        Siblings { nodes, starts }
    }

    /// The number of a file's tensor, or of the first one below a directory.
    fn first_tensor(&self, siblings: &Siblings, mut at: u32) -> u32 {
        loop {
            match self.node(at).tensor {
                Some(tensor) => return tensor,
                None => at = siblings.of(at)[0],
            }
        }
    }

    fn path(&self, at: u32) -> String {
        let node = self.node(at);
        if node.parent == 0 { node.name.to_string() } else { format!("{}/{}", self.path(node.parent), node.name) }
    }

    /// Each pair of nodes that have one place.
    fn collisions(&self, siblings: &Siblings, plan: &Plan) -> Vec<Problem> {
        let same = |pair: &&[u32]| {
            let [first, second] = [self.node(pair[0]), self.node(pair[1])];
            first.parent == second.parent && first.name == second.name
        };
        let tensor = |at: u32| plan.tensors[self.first_tensor(siblings, at) as usize].name.clone();
        let collision = |pair: &[u32]| Problem::Collision {
            path: self.path(pair[0]),
            first: tensor(pair[0]),
            second: tensor(pair[1]),
        };
        siblings.nodes.windows(2).filter(same).map(collision).collect()
    }
}

impl Siblings {
    /// The children of a node.
    fn of(&self, at: u32) -> &[u32] {
        &self.nodes[self.starts[at as usize]..self.starts[at as usize + 1]]
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).expect("a tree of fewer than 2^32 nodes and bytes of names")
}

impl NameTree {
    /// The tree of the tensors of a plan that `shown` selects, with `suffix` after the name of each file.
    ///
    /// # Errors
    /// Every name that is too long, used twice, or both a file and a directory.
    pub(super) fn new(plan: &Plan, suffix: &str, shown: impl Fn(&PlannedTensor) -> bool) -> Result<Self, Vec<Problem>> {
        let mut problems = Vec::new();
        let root = NodeBuilder { parent: 0, name: "".into(), tensor: None };
        let mut builder = NameTreeBuilder { nodes: vec![root] };
        // Tensors are sorted by name, so those of a directory follow each other.
        let mut before: Vec<(Cow<'_, str>, u32)> = Vec::new();
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
            let Some(mut file) = path.pop() else { continue };
            if !suffix.is_empty() {
                file.to_mut().push_str(suffix);
            }
            let shared = before.iter().zip(&path).take_while(|((name, _), component)| name == *component).count();
            before.truncate(shared);
            for component in path.iter().skip(shared).chain([&file]).filter(|name| name.len() > NAME_BYTES_MAX) {
                problems.push(Problem::LongName { name: tensor.name.clone(), component: component.to_string() });
            }
            let mut at = before.last().map_or(0, |(_, at)| *at);
            for component in path.drain(shared..) {
                at = builder.add(at, component.clone(), None);
                before.push((component, at));
            }
            builder.add(at, file, Some(number(index)));
        }
        let siblings = builder.siblings();
        problems.extend(builder.collisions(&siblings, plan));
        if problems.is_empty() { Ok(Self::of(&builder, &siblings)) } else { Err(problems) }
    }

    fn of(builder: &NameTreeBuilder<'_>, siblings: &Siblings) -> Self {
        let mut tree = Self { nodes: vec![NameRow::directory(0)], names: String::new() };
        tree.lay(0, 0, builder, siblings);
        tree
    }

    /// Lays out the children of node `from` of `builder`, which is node `to` here.
    fn lay(&mut self, to: u32, from: u32, builder: &NameTreeBuilder<'_>, siblings: &Siblings) {
        let children = siblings.of(from);
        let first = number(self.nodes.len());
        let mut subdirectories = 0;
        for child in children.iter().map(|at| builder.node(*at)) {
            let mut node = NameRow::directory(to);
            (node.name_start, node.name_len) = (number(self.names.len()), number(child.name.len()));
            match child.tensor {
                Some(tensor) => (node.first, node.children) = (tensor, IS_FILE),
                None => subdirectories += 1,
            }
            self.names.push_str(&child.name);
            self.nodes.push(node);
        }
        let node = &mut self.nodes[to as usize];
        (node.first, node.children, node.subdirectories) = (first, number(children.len()), subdirectories);
        for (child, index) in children.iter().zip(first..) {
            if builder.node(*child).tensor.is_none() {
                self.lay(index, *child, builder, siblings);
            }
        }
    }

    /// Number of nodes.
    pub(super) fn len(&self) -> u64 {
        self.nodes.len() as u64
    }

    /// Type of a node.
    pub(super) fn node(&self, at: u32) -> NameNode {
        let node = self.nodes[at as usize];
        if node.children == IS_FILE { NameNode::Tensor(node.first) } else { NameNode::Directory(node.subdirectories) }
    }

    /// A node's name.
    pub(super) fn name(&self, at: u32) -> &str {
        self.name_of(&self.nodes[at as usize])
    }

    fn name_of(&self, node: &NameRow) -> &str {
        &self.names[node.name_start as usize..(node.name_start + node.name_len) as usize]
    }

    /// A node's parent; the root's is the root.
    pub(super) fn parent(&self, at: u32) -> u32 {
        self.nodes[at as usize].parent
    }

    /// Numbers of a directory's children, sorted by name; none for a file.
    pub(super) fn children(&self, at: u32) -> std::ops::Range<u32> {
        let node = self.nodes[at as usize];
        if node.children == IS_FILE { 0..0 } else { node.first..node.first + node.children }
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
