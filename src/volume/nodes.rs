//! The nodes of a volume: names, attributes and contents.

use std::{ops::ControlFlow, sync::Arc};

use super::{
    Attr, DirEntry, FileSystem, FsError, Ino, NodeKind, ProblemKind, Volume,
    arrays::{ArrayNode, ArrayTable},
    exposition::{self, METRICS_BYTES},
    name_tree::NameNode,
    permissions::Subject,
    tree::{Block, Fixed, FixedKind, Flavor, Names, Place},
    view_files::{Content, Made, ViewFiles},
};
use crate::{
    image::FileImage,
    source::FileId,
    tensor::{View, to_usize},
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

    /// The name and view behind a raw tensor file: a device's shard, or the whole tensor under `full/`.
    pub fn shard_view(&self, ino: Ino) -> Option<(&str, View)> {
        let Place::Named(block, names, node) = self.tree.place(ino)? else { return None };
        let view = &self.views[block.view as usize];
        let NameNode::Tensor(tensor) = view.tree(names.flavor).node(node) else { return None };
        let shard = || (view.plan.tensors[tensor as usize].name.as_str(), view.shard(tensor, names.device));
        (names.flavor == Flavor::Raw).then(shard)
    }

    /// The layout of a file that holds tensors; `None` for other nodes.
    ///
    /// # Errors
    /// [`FsError::Io`] if the file cannot be laid out.
    pub fn image(&self, ino: Ino) -> Result<Option<FileImage>, FsError> {
        match self.content(ino)? {
            Content::Image(image) => Ok(Some(image)),
            Content::Original(_) | Content::Bytes(_) | Content::Rows(_) => Ok(None),
        }
    }

    /// The source file that a file is identical to, if it is one.
    pub fn original(&self, ino: Ino) -> Option<FileId> {
        let Place::Fixed(Fixed { kind: FixedKind::Made { view, made }, .. }) = self.tree.place(ino)? else {
            return None;
        };
        match self.views[*view as usize].made(*made) {
            Ok(Content::Original(file)) => Some(file),
            Ok(Content::Bytes(_) | Content::Rows(_) | Content::Image(_)) | Err(_) => None,
        }
    }

    pub(super) fn content(&self, ino: Ino) -> Result<Content, FsError> {
        let content = match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Named(block, names, node) => {
                let view = &self.views[block.view as usize];
                let NameNode::Tensor(tensor) = view.tree(names.flavor).node(node) else {
                    return Err(FsError::IsDirectory);
                };
                view.tensor(tensor, names).map(Content::Image)
            }
            Place::Array(block, node) => {
                let (view, table) = self.arrays(block)?;
                view.array(table, table.node(node)).transpose().ok_or(FsError::IsDirectory)?
            }
            Place::Fixed(fixed) => match &fixed.kind {
                FixedKind::Directory { .. } => return Err(FsError::IsDirectory),
                FixedKind::Symlink(_) => return Err(FsError::Invalid),
                FixedKind::Made { view, made } => self.views[*view as usize].made(*made),
                FixedKind::Text(text) => Ok(Content::Bytes(Arc::clone(text))),
                FixedKind::Stats => Ok(Content::Bytes(self.reported().stats(self.stats_bytes).into())),
                FixedKind::Metrics => {
                    let text = exposition::metrics(&self.reported()).map_err(|_| FsError::Io)?;
                    Ok(Content::Bytes(text.into()))
                }
            },
        };
        content.map_err(|error| {
            tracing::error!(ino = ino.0, "cannot lay out a file: {error}");
            self.health().note(ProblemKind::FailedOpen, &self.path_of(ino), &error.to_string());
            FsError::Io
        })
    }

    fn fixed_attr(&self, ino: Ino, fixed: &Fixed) -> Attr {
        let (kind, size_bytes, links) = match &fixed.kind {
            FixedKind::Directory { subdirectories, .. } => (NodeKind::Directory, 0, 2 + subdirectories),
            FixedKind::Symlink(target) => (NodeKind::Symlink, target.len() as u64, 1),
            FixedKind::Text(text) => (NodeKind::File, text.len() as u64, 1),
            FixedKind::Stats => (NodeKind::File, self.stats_bytes as u64, 1),
            FixedKind::Metrics => (NodeKind::File, METRICS_BYTES as u64, 1),
            FixedKind::Made { view, made } => (NodeKind::File, self.views[*view as usize].made_len(*made), 1),
        };
        let permission = self.permissions.of(Self::fixed_subject(ino, fixed));
        Attr { ino, kind, size_bytes, links, modified: self.modified, permission }
    }

    fn fixed_subject(ino: Ino, fixed: &Fixed) -> Subject {
        let is_directory = matches!(fixed.kind, FixedKind::Directory { .. });
        if fixed.is_own {
            return Subject::Own { is_directory };
        }
        match fixed.kind {
            FixedKind::Directory { .. } => Subject::Directory(ino),
            FixedKind::Made { view, made: Made::Hf(file) } => Subject::Hf { view, file },
            FixedKind::Made { view, .. } => Subject::Tensors { view },
            FixedKind::Text(_) | FixedKind::Stats | FixedKind::Metrics => Subject::Everything,
            FixedKind::Symlink(_) => Subject::Link,
        }
    }

    fn array_subject(block: Block, table: &ArrayTable, node: ArrayNode) -> Subject {
        let view = block.view;
        match node {
            ArrayNode::Root | ArrayNode::Directory(_) => Subject::Names { view },
            ArrayNode::Metadata(_) => Subject::Tensors { view },
            ArrayNode::Description(array) | ArrayNode::Chunk(array, _) => {
                Subject::Tensor { view, tensor: table.tensor(array) }
            }
        }
    }

    fn named_subject(block: Block, node: NameNode) -> Subject {
        let view = block.view;
        match node {
            NameNode::Directory(_) => Subject::Names { view },
            NameNode::Tensor(tensor) => Subject::Tensor { view, tensor },
        }
    }

    /// The permission bits that a copy of a node may have under another owner and group: those that the sources allow, and all
    /// that the owner needs. For nodes without attributes, none.
    pub fn copy_mode(&self, ino: Ino, uid: u32, gid: u32) -> u16 {
        let subject = match self.tree.place(ino) {
            Some(Place::Fixed(fixed)) => Self::fixed_subject(ino, fixed),
            Some(Place::Named(block, names, node)) => {
                Self::named_subject(block, self.views[block.view as usize].tree(names.flavor).node(node))
            }
            Some(Place::Array(block, node)) => match self.arrays(block) {
                Ok((_, table)) => Self::array_subject(block, table, table.node(node)),
                Err(_) => return 0,
            },
            None => return 0,
        };
        self.permissions.mode(subject, uid, gid)
    }

    fn named_attr(&self, block: Block, names: Names, node: u32) -> Attr {
        let view = &self.views[block.view as usize];
        let node_kind = view.tree(names.flavor).node(node);
        let (kind, size_bytes, links) = match node_kind {
            NameNode::Directory(subdirectories) => (NodeKind::Directory, 0, 2 + subdirectories),
            NameNode::Tensor(tensor) => (NodeKind::File, view.tensor_len(tensor, names), 1),
        };
        let permission = self.permissions.of(Self::named_subject(block, node_kind));
        let ino = Ino(block.first + u64::from(node));
        Attr { ino, kind, size_bytes, links, modified: self.modified, permission }
    }

    /// The view and the arrays of a block, which is there only if the view has arrays.
    fn arrays(&self, block: Block) -> Result<(&ViewFiles, &Arc<ArrayTable>), FsError> {
        let view = &self.views[block.view as usize];
        view.arrays().map(|table| (view, table)).map_err(|_| FsError::NotFound)
    }

    fn array_attr(&self, block: Block, node: u64) -> Result<Attr, FsError> {
        let (view, table) = self.arrays(block)?;
        let node_kind = table.node(node);
        let kind = array_kind(node_kind);
        let links = match node_kind {
            ArrayNode::Root => 2 + u32::try_from(table.arrays()).expect("fewer tensors than 2^32 - 2"),
            ArrayNode::Directory(_) => 2,
            ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) => 1,
        };
        let size_bytes = view.array_len(table, node_kind);
        let permission = self.permissions.of(Self::array_subject(block, table, node_kind));
        Ok(Attr { ino: Ino(block.first + node), kind, size_bytes, links, modified: self.modified, permission })
    }

    fn kind(&self, ino: Ino) -> NodeKind {
        match self.tree.place(ino) {
            Some(Place::Named(block, names, node)) => {
                match self.views[block.view as usize].tree(names.flavor).node(node) {
                    NameNode::Directory(_) => NodeKind::Directory,
                    NameNode::Tensor(_) => NodeKind::File,
                }
            }
            Some(Place::Array(block, node)) => {
                self.arrays(block).map_or(NodeKind::File, |(_, table)| array_kind(table.node(node)))
            }
            Some(Place::Fixed(fixed)) => match fixed.kind {
                FixedKind::Directory { .. } => NodeKind::Directory,
                FixedKind::Symlink(_) => NodeKind::Symlink,
                FixedKind::Made { .. } | FixedKind::Text(_) | FixedKind::Stats | FixedKind::Metrics => NodeKind::File,
            },
            None => NodeKind::File,
        }
    }

    /// The path of a node, for messages.
    pub(super) fn path_of(&self, ino: Ino) -> String {
        let mut names: Vec<String> = Vec::new();
        let mut at = ino;
        while at != Ino::ROOT {
            match self.tree.place(at) {
                Some(Place::Named(block, shown, node)) if node != 0 => {
                    let tree = self.views[block.view as usize].tree(shown.flavor);
                    names.push(tree.name(node).to_owned());
                    at = Ino(block.first + u64::from(tree.parent(node)));
                }
                Some(Place::Array(block, node)) if node != 0 => {
                    let Ok((view, table)) = self.arrays(block) else { break };
                    names.push(table.node_name(&view.plan, table.node(node)));
                    at = Ino(block.first + table.number(ArrayTable::parent(table.node(node))));
                }
                Some(place) => {
                    let parent = match place {
                        Place::Named(block, ..) | Place::Array(block, _) => block.parent,
                        Place::Fixed(fixed) => fixed.parent,
                    };
                    names.push(self.entry_name(parent, at).unwrap_or("?").to_owned());
                    at = parent;
                }
                None => break,
            }
        }
        names.reverse();
        names.join("/")
    }

    fn entry_name(&self, parent: Ino, child: Ino) -> Option<&str> {
        let Place::Fixed(Fixed { kind: FixedKind::Directory { entries, .. }, .. }) = self.tree.place(parent)? else {
            return None;
        };
        entries.iter().find(|(_, ino)| *ino == child).map(|(name, _)| &**name)
    }

    pub(super) fn find(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        match self.tree.place(parent).ok_or(FsError::NotFound)? {
            Place::Named(block, names, node) => {
                let tree = self.views[block.view as usize].tree(names.flavor);
                if let NameNode::Tensor(_) = tree.node(node) {
                    return Err(FsError::NotDirectory);
                }
                tree.child(node, name).map(|child| self.named_attr(block, names, child)).ok_or(FsError::NotFound)
            }
            Place::Array(block, node) => {
                let (view, table) = self.arrays(block)?;
                let node = table.node(node);
                if array_kind(node) != NodeKind::Directory {
                    return Err(FsError::NotDirectory);
                }
                let child = table.child(&view.plan, node, name).ok_or(FsError::NotFound)?;
                self.array_attr(block, table.number(child))
            }
            Place::Fixed(Fixed { kind: FixedKind::Directory { entries, .. }, .. }) => {
                let found = entries.binary_search_by(|(entry, _)| entry.as_bytes().cmp(name));
                self.attr(entries[found.map_err(|_| FsError::NotFound)?].1)
            }
            Place::Fixed(_) => Err(FsError::NotDirectory),
        }
    }

    pub(super) fn node_attr(&self, ino: Ino) -> Result<Attr, FsError> {
        match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Fixed(fixed) => Ok(self.fixed_attr(ino, fixed)),
            Place::Named(block, names, node) => Ok(self.named_attr(block, names, node)),
            Place::Array(block, node) => self.array_attr(block, node),
        }
    }

    pub(super) fn list(
        &self,
        dir: Ino,
        from: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError> {
        let skip = to_usize(from);
        match self.tree.place(dir).ok_or(FsError::NotFound)? {
            Place::Array(block, node) => {
                let (view, table) = self.arrays(block)?;
                let node = table.node(node);
                if array_kind(node) != NodeKind::Directory {
                    return Err(FsError::NotDirectory);
                }
                table.list(&view.plan, node, from, &mut |name, child| {
                    let ino = Ino(block.first + table.number(child));
                    each(DirEntry { name: name.as_bytes(), ino, kind: array_kind(child) }).is_continue()
                });
            }
            Place::Named(block, names, node) => {
                let tree = self.views[block.view as usize].tree(names.flavor);
                if let NameNode::Tensor(_) = tree.node(node) {
                    return Err(FsError::NotDirectory);
                }
                for child in tree.children(node).skip(skip) {
                    let kind = match tree.node(child) {
                        NameNode::Directory(_) => NodeKind::Directory,
                        NameNode::Tensor(_) => NodeKind::File,
                    };
                    let ino = Ino(block.first + u64::from(child));
                    if each(DirEntry { name: tree.name(child).as_bytes(), ino, kind }).is_break() {
                        break;
                    }
                }
            }
            Place::Fixed(Fixed { kind: FixedKind::Directory { entries, .. }, .. }) => {
                for (name, ino) in entries.iter().skip(skip) {
                    if each(DirEntry { name: name.as_bytes(), ino: *ino, kind: self.kind(*ino) }).is_break() {
                        break;
                    }
                }
            }
            Place::Fixed(_) => return Err(FsError::NotDirectory),
        }
        Ok(())
    }

    pub(super) fn parent_of(&self, ino: Ino) -> Result<Ino, FsError> {
        match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Named(block, _, 0) | Place::Array(block, 0) => Ok(block.parent),
            Place::Named(block, names, node) => {
                let tree = self.views[block.view as usize].tree(names.flavor);
                Ok(Ino(block.first + u64::from(tree.parent(node))))
            }
            Place::Array(block, node) => {
                let (_, table) = self.arrays(block)?;
                Ok(Ino(block.first + table.number(ArrayTable::parent(table.node(node)))))
            }
            Place::Fixed(fixed) => Ok(fixed.parent),
        }
    }

    pub(super) fn link_target(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Fixed(Fixed { kind: FixedKind::Symlink(target), .. }) => Ok(target.as_bytes().to_vec()),
            Place::Fixed(_) | Place::Named(..) | Place::Array(..) => Err(FsError::Invalid),
        }
    }

    pub(super) fn node_xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if !name.starts_with(b"user.") {
            return Err(FsError::Unsupported);
        }
        let Place::Named(block, names, node) = self.tree.place(ino).ok_or(FsError::NotFound)? else {
            return Err(FsError::NoAttribute);
        };
        let view = &self.views[block.view as usize];
        let NameNode::Tensor(tensor) = view.tree(names.flavor).node(node) else { return Err(FsError::NoAttribute) };
        view.xattr(tensor, names.device, name).ok_or(FsError::NoAttribute)
    }

    pub(super) fn node_xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>, FsError> {
        match self.tree.place(ino).ok_or(FsError::NotFound)? {
            Place::Named(block, names, node) => {
                let node = self.views[block.view as usize].tree(names.flavor).node(node);
                let shown: &[&str] = if matches!(node, NameNode::Tensor(_)) { &ViewFiles::XATTRS } else { &[] };
                Ok(shown.iter().map(|name| name.as_bytes().to_vec()).collect())
            }
            Place::Array(..) | Place::Fixed(_) => Ok(Vec::new()),
        }
    }
}

fn array_kind(node: ArrayNode) -> NodeKind {
    match node {
        ArrayNode::Root | ArrayNode::Directory(_) => NodeKind::Directory,
        ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) => NodeKind::File,
    }
}
