//! The output of a layout: named views, with the meaning of their axes. Sharding rules turn drafts into the plan's
//! tensors.

use std::sync::Arc;

use ckfs_tensor::{PerAxis, Shape, View};

/// A named view before it is sharded.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Dotted name.
    pub name: String,
    /// The view.
    pub view: View,
    /// The meaning of its axes.
    pub roles: Roles,
    /// The bundles that hold it.
    pub bundled: Bundled,
    /// Numbers of the layers stacked on axis 0, for a stack.
    pub layers: Option<Arc<[u64]>>,
}

impl Draft {
    /// A tensor that all bundles hold and that is no stack.
    pub(super) fn new(name: String, view: View, roles: Roles) -> Self {
        Self { name, view, roles, bundled: Bundled::ALWAYS, layers: None }
    }
}

/// The bundles that hold a tensor. The raw tree holds it in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bundled {
    /// In bundles with layers stacked.
    pub scanned: bool,
    /// In bundles with one tensor per source tensor.
    pub unscanned: bool,
}

impl Bundled {
    /// In both kinds.
    pub(crate) const ALWAYS: Self = Self { scanned: true, unscanned: true };
    /// In neither: an alias of another tensor.
    pub const NEVER: Self = Self { scanned: false, unscanned: false };
}

/// Meaning of a view's axes, for rules that shard by role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    /// Number of leading axes made by stacking layers or experts. The other axes are those of the unstacked tensor.
    pub stacked: usize,
    /// Axis that tensor parallelism splits.
    pub tp: Option<usize>,
    /// The block of the layer that tensor parallelism splits as a whole, for a tensor of one.
    pub block: Option<Arc<str>>,
    /// Axis that counts experts.
    pub experts: Option<usize>,
    /// Number of this expert and of all experts, for a tensor of a single one.
    pub expert: Option<(u64, u64)>,
    /// Number of the pipeline stage that holds the tensor, if only one does.
    pub stage: Option<u64>,
    /// Whether every device holds all of it, as FSDP leaves buffers.
    pub whole: bool,
    /// Whether the tensor is split by the position of its axes although others of the layout are split by logical names.
    pub by_position: bool,
    /// Logical names of the axes, where the layout gives them.
    pub logical: Vec<String>,
    /// The quantized weight that the tensor is a part of. The other members are those of the weight.
    pub part: Option<Arc<PartOf>>,
}

/// How codes or scales lie over the weight that they are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartOf {
    /// The weight's name.
    pub name: String,
    /// The weight's shape.
    pub shape: Shape,
    /// By axis of the weight: elements of it for each of the part. 0 where the part has no axis, or one that is never cut.
    pub units: PerAxis,
    /// By axis of the weight: the number of which each cut must be a multiple.
    pub cuts: PerAxis,
}
