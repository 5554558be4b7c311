//! Kinds of tensors: of all tensors of a kind, a device holds the same region. Work for each tensor and each device is
//! then done once for each kind and device. A repository of 50 000 tensors has a few dozen kinds.

use ckfs_tensor::{DType, Shape};
use hashbrown::HashMap;

use super::{AxisUse, Plan, PlannedTensor, axis_use, spec};

/// Spec, first of the experts that the same devices hold, stage, shape, and whether torch counts two elements as one.
type Key<'a> = (u32, Option<u64>, Option<u64>, &'a Shape, bool);

/// The kinds of a plan's tensors.
#[derive(Clone, Debug, Default)]
pub struct TensorKinds {
    /// The kind of each tensor.
    of_tensor: Vec<u32>,
    /// Number of the first tensor of each kind.
    first: Vec<u32>,
}

impl TensorKinds {
    /// The kinds of all tensors of a plan, in the order of their first tensors.
    ///
    /// # Panics
    /// If the plan has 2^32 tensors, which a checkpoint's table excludes.
    pub fn new(plan: &Plan) -> Self {
        let narrow = |number: usize| u32::try_from(number).expect("a table of tensors has fewer than 2^32 rows");
        let mut known: HashMap<Key<'_>, u32> = HashMap::new();
        let mut kinds = Self { of_tensor: Vec::with_capacity(plan.tensors.len()), first: Vec::new() };
        for (index, tensor) in plan.tensors.iter().enumerate() {
            let is_paired = tensor.view.dtype() == DType::F4;
            let key = (tensor.spec, plan.expert_group(tensor), tensor.stage, tensor.view.shape(), is_paired);
            let kind = *known.entry(key).or_insert_with(|| {
                kinds.first.push(narrow(index));
                narrow(kinds.first.len() - 1)
            });
            kinds.of_tensor.push(kind);
        }
        kinds
    }

    /// Number of kinds.
    pub fn len(&self) -> usize {
        self.first.len()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.first.is_empty()
    }

    /// The kind of a tensor, both by number.
    pub fn of(&self, tensor: usize) -> usize {
        self.of_tensor[tensor] as usize
    }

    /// Number of the first tensor of a kind.
    pub fn first(&self, kind: usize) -> usize {
        self.first[kind] as usize
    }
}

impl Plan {
    /// The first of the experts that the mesh's expert axes give to the same devices. `None` for a tensor that is not
    /// of a single expert, or without such an axis.
    fn expert_group(&self, tensor: &PlannedTensor) -> Option<u64> {
        let (expert, experts) = tensor.expert?;
        let mut axes = self.mesh.axes().iter().filter(|axis| axis_use(&axis.name) == AxisUse::Expert).peekable();
        axes.peek()?;
        let (mut low, mut high) = (0, experts);
        for axis in axes {
            // As `spec::chunk` splits: chunks of this length, one of which holds the expert.
            let length = (high - low).div_ceil(axis.size).max(1);
            let (start, stop) = spec::chunk(high - low, axis.size, (expert - low) / length);
            (low, high) = (low + start, low + stop);
        }
        Some(low)
    }
}
