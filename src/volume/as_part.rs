//! A volume as one of several that are served together: what their owner needs to know of it.

use std::{
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    ops::ControlFlow,
};

use ckfs_image::FileContent;
use serde_json::{Map, Value};

use super::{
    file_system::{FsError, Ino, NodeKind, Nodes},
    stats::MetricKind,
    tree::{FixedKind, FixedNode, TreeNode},
    volume::Volume,
};

impl Volume {
    /// A digest of everything that decides which file has which inode number, and of the state of its sources: two volumes that
    /// have the same show the same files under the same numbers.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.tree.digest(&mut hasher);
        let checkpoint = self.engine.checkpoint();
        for file in checkpoint.source().files() {
            let pin = checkpoint.source().pin(file);
            (&pin.path, pin.len_bytes, pin.modified, &pin.content).hash(&mut hasher);
        }
        for tensor in self.views.iter().flat_map(|plan| &plan.tensors) {
            (&tensor.name, tensor.view.shape().extents(), tensor.view.dtype().code()).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Tells all that the kernel may keep or hold open of the nodes, in a fixed order: numbers, names, attributes, targets, and the text
    /// of the mount's own files.
    ///
    /// # Errors
    /// A file that cannot be laid out, so that the kernel was never told of it.
    pub fn tell_nodes(&self, tell: &mut dyn FnMut(fmt::Arguments<'_>)) -> Result<(), FsError> {
        for ino in (Ino::ROOT.0..=self.tree.len()).map(Ino) {
            let attr = self.attr(ino)?;
            tell(format_args!("{attr:?}"));
            match attr.kind {
                NodeKind::Directory => self.read_dir(ino, 0, &mut |entry| {
                    tell(format_args!("{:?} {:?}", entry.name, entry.ino));
                    ControlFlow::Continue(())
                })?,
                NodeKind::Symlink => tell(format_args!("{:?}", self.read_link(ino)?)),
                NodeKind::File => {
                    if let Some(TreeNode::Fixed(FixedNode { is_own: true, kind: FixedKind::File(node), .. })) =
                        self.tree.node(ino)
                        && let Ok(FileContent::Bytes(bytes)) = node.file.open()
                    {
                        tell(format_args!("{bytes:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a reader has a file open.
    pub fn has_open_files(&self) -> bool {
        !self.open.read().is_empty()
    }

    /// The statistics, as in `.ckfs/stats.json`.
    pub fn statistics(&self) -> Map<String, Value> {
        let reported = self.reported();
        reported.members(&reported.health())
    }

    /// Those that only grow: they are added up over several volumes.
    pub fn counters(&self) -> Map<String, Value> {
        let reported = self.reported();
        let rows = reported.rows().into_iter().filter(|row| row.kind == MetricKind::Counter);
        reported.by_path().into_iter().chain(rows.map(|row| (row.key.to_owned(), row.value.into()))).collect()
    }

    /// Whether a source of it was found changed.
    pub fn is_poisoned(&self) -> bool {
        self.engine.checkpoint().source().health().poisoned() > 0
    }
}

impl Drop for Volume {
    /// Tiles in a cache that others use would wait there for readers that never come.
    fn drop(&mut self) {
        if self.engine.is_shared() {
            let mut remembered = self.remembered.lock();
            while let Some((_, file)) = remembered.files.pop_lru() {
                self.engine.forget(&file);
            }
        }
    }
}
