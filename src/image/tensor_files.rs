//! Directories with one file for each tensor: its elements, or a device's shard of them, in some encoding.
//!
//! All such directories of an encoding have the same names and share one tree of them, so a thousand devices cost a
//! thousand rows. Files are laid out on request.

use std::{borrow::Cow, sync::Arc};

use ckfs_plan::{PlannedTensor, Spec};
use ckfs_tensor::{Element, Region, View};
use serde_json::json;

use super::{
    bundle::shard,
    file_image::{FileImage, ImageError},
    input::FormatInput,
    manifest::source_names,
    name_tree::{NameNode, NameTree, name_node},
    output::{DerivedFrom, FileContent, Subtree, SubtreeNode},
};

/// Longest value of an extended attribute that the kernel passes, in bytes.
const XATTR_BYTES_MAX: usize = 60_000;

/// Names of the extended attributes.
const XATTRS: [&str; 6] = [
    "user.ckfs.dtype",
    "user.ckfs.shape",
    "user.ckfs.global_shape",
    "user.ckfs.offset",
    "user.ckfs.spec",
    "user.ckfs.sources",
];

/// A directory of tensors: the whole ones, or the shards of a device.
pub(super) struct TensorFiles {
    pub(super) input: Arc<FormatInput>,
    pub(super) names: Arc<NameTree>,
    /// The device; `None` for the whole tensors.
    pub(super) device: Option<u64>,
    /// Lays out the file of a view with this name. Its length must depend on the view's type and shape alone.
    pub(super) lay_out: fn(&str, View) -> Result<FileImage, ImageError>,
    /// Whether a file holds the elements only.
    pub(super) is_plain: bool,
}

impl TensorFiles {
    /// The tensor of a file.
    fn tensor(&self, at: u64) -> Option<u32> {
        match self.names.node(name_node(at)) {
            NameNode::Directory(_) => None,
            NameNode::Leaf(tensor) => Some(tensor),
        }
    }

    /// The shard of a tensor on the device, or the whole tensor.
    fn view(&self, tensor: &PlannedTensor) -> View {
        self.device.map_or_else(|| tensor.view.clone(), |device| shard(&self.input.plan, tensor, device))
    }

    /// The region of a tensor that the device holds, or all of it.
    fn region(&self, tensor: &PlannedTensor) -> Region {
        self.device.map_or_else(|| tensor.view.shape().whole(), |device| self.input.plan.region(tensor, device))
    }
}

impl Subtree for TensorFiles {
    fn nodes(&self) -> u64 {
        self.names.len()
    }

    fn node(&self, at: u64) -> SubtreeNode {
        match self.names.node(name_node(at)) {
            NameNode::Directory(subdirectories) => SubtreeNode::Directory(subdirectories),
            NameNode::Leaf(_) => SubtreeNode::File,
        }
    }

    fn name(&self, at: u64) -> Cow<'_, str> {
        self.names.name(name_node(at)).into()
    }

    fn parent(&self, at: u64) -> u64 {
        self.names.parent(name_node(at)).into()
    }

    fn child(&self, at: u64, name: &[u8]) -> Option<u64> {
        self.names.child(name_node(at), name).map(u64::from)
    }

    fn list(&self, at: u64, from: u64, each: &mut dyn FnMut(&str, u64) -> bool) {
        self.names.list(name_node(at), from, each);
    }

    fn derived_from(&self, at: u64) -> DerivedFrom {
        self.tensor(at).map_or(DerivedFrom::Tensors, DerivedFrom::Tensor)
    }

    fn has_headers(&self) -> bool {
        !self.is_plain
    }

    fn content(&self, at: u64) -> Result<FileContent, ImageError> {
        let tensor = self.tensor(at).expect("only files have contents");
        let tensor = &self.input.plan.tensors[tensor as usize];
        (self.lay_out)(&tensor.name, self.view(tensor)).map(FileContent::Image)
    }

    /// The length of the layout of zeros of the same type and shape: cutting the view takes longer than all the rest.
    fn len_bytes(&self, at: u64) -> Result<u64, ImageError> {
        let tensor = self.tensor(at).expect("only files have lengths");
        let tensor = &self.input.plan.tensors[tensor as usize];
        let zeros = View::fill(self.region(tensor).shape().clone(), Element::zero(tensor.view.dtype()));
        Ok((self.lay_out)(&tensor.name, zeros)?.len_bytes())
    }

    fn xattr_names(&self, at: u64) -> &'static [&'static str] {
        if self.tensor(at).is_some() { &XATTRS } else { &[] }
    }

    fn xattr(&self, at: u64, name: &[u8]) -> Option<Vec<u8>> {
        let plan = &self.input.plan;
        let tensor = &plan.tensors[self.tensor(at)? as usize];
        let region = self.region(tensor);
        let shape = tensor.view.shape();
        let value = match XATTRS.iter().position(|known| known.as_bytes() == name)? {
            0 => tensor.view.dtype().code().to_owned(),
            1 => json!(region.shape().extents()).to_string(),
            2 => json!(shape.extents()).to_string(),
            3 => json!(region.origin()).to_string(),
            4 => {
                let whole = Spec::replicated();
                let spec = if self.device.is_some() { plan.spec(tensor) } else { &whole };
                spec.to_json(shape.rank(), &plan.mesh).to_string()
            }
            _ => {
                let sources = source_names(&self.input.checkpoint, tensor);
                let all = json!(sources).to_string();
                if all.len() <= XATTR_BYTES_MAX {
                    all
                } else {
                    json!({"count": sources.len(), "first": sources.first(), "last": sources.last()}).to_string()
                }
            }
        };
        Some(value.into_bytes())
    }
}
