//! Tensors of bundles whose names differ only in numbers.

use std::collections::HashMap;

use ckfs_tensor::{DType, Shape};

use super::super::{Plan, PlannedTensor, Spec, naming::group_name};

/// Tensors of one dtype, shape and spec whose names differ only in numbers.
#[derive(Debug)]
pub(super) struct TensorGroup<'a> {
    /// The name with `*` for numbers.
    pub(super) name: String,
    /// At least one, in the order of the plan.
    pub(super) members: Vec<&'a PlannedTensor>,
    /// Bytes of all of them, unsharded.
    pub(super) bytes: u64,
}

impl<'a> TensorGroup<'a> {
    /// The first of its tensors.
    pub(super) fn first(&self) -> &'a PlannedTensor {
        self.members[0]
    }
}

/// The groups of a plan, in the order of their first tensors.
pub(super) fn groups(plan: &Plan) -> Vec<TensorGroup<'_>> {
    let mut places: HashMap<(String, DType, &Shape, &Spec), usize> = HashMap::new();
    let mut groups: Vec<TensorGroup<'_>> = Vec::new();
    for tensor in plan.bundle() {
        let name = group_name(&tensor.name);
        let key = (name.clone(), tensor.view.dtype(), tensor.view.shape(), plan.spec(tensor));
        let place = *places.entry(key).or_insert_with(|| {
            groups.push(TensorGroup { name, members: Vec::new(), bytes: 0 });
            groups.len() - 1
        });
        groups[place].members.push(tensor);
        groups[place].bytes += tensor.bytes();
    }
    groups
}
