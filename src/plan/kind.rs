//! Kinds of tensors: of all tensors of a kind, a device holds the same region. Work for each tensor and each device is
//! then done once for each kind and device. A repository of 50 000 tensors has a few dozen kinds.

use ckfs_tensor::{DType, Shape};
use hashbrown::HashMap;

use super::{AxisUse, Plan, PlannedTensor, shard::axes_of, spec};

/// Spec, first of the experts that the same devices hold, stage, shape, and whether torch counts two elements as one.
type Key<'a> = (u32, Option<u64>, Option<u64>, &'a Shape, bool);

/// The kinds of a plan's tensors.
#[derive(Clone, Debug, Default)]
pub struct TensorKinds {
    of_tensor: Vec<u32>,
    /// Number of the first tensor of each kind.
    pub first: Vec<usize>,
}

impl TensorKinds {
    /// The kinds of all tensors of a plan, in the order of their first tensors.
    ///
    /// # Panics
    /// If the plan has 2^32 tensors, which a checkpoint's table excludes.
    pub fn new(plan: &Plan) -> Self {
        let mut known: HashMap<Key<'_>, u32> = HashMap::new();
        let mut kinds = Self { of_tensor: Vec::with_capacity(plan.tensors.len()), first: Vec::new() };
        for (index, tensor) in plan.tensors.iter().enumerate() {
            let is_paired = tensor.view.dtype() == DType::F4;
            let key = (tensor.spec, plan.expert_group(tensor), tensor.stage, tensor.view.shape(), is_paired);
            kinds.of_tensor.push(*known.entry(key).or_insert_with(|| {
                kinds.first.push(index);
                u32::try_from(kinds.first.len() - 1).expect("a table of tensors has fewer than 2^32 rows")
            }));
        }
        kinds
    }

    /// The kind of a tensor, both by number.
    pub fn of(&self, tensor: usize) -> usize {
        self.of_tensor[tensor] as usize
    }
}

impl Plan {
    /// The first of the experts that the mesh's expert axes give to the same devices. `None` for a tensor that is not
    /// of a single expert, or without such an axis.
    fn expert_group(&self, tensor: &PlannedTensor) -> Option<u64> {
        let (expert, experts) = tensor.expert?;
        let mut axes = axes_of(&self.mesh, AxisUse::Expert).peekable();
        axes.peek()?;
        let (mut low, mut high) = (0, experts);
        for (_, axis) in axes {
            // As `spec::chunk` splits: chunks of this length, one of which holds the expert.
            let length = (high - low).div_ceil(axis.size).max(1);
            let (start, stop) = spec::chunk(high - low, axis.size, (expert - low) / length);
            (low, high) = (low + start, low + stop);
        }
        Some(low)
    }
}
