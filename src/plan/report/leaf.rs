//! Tensors of bundles whose names differ only in numbers, and the parts of a tensor's view below its stacks: the views of one layer or
//! one expert each.

use std::{collections::HashMap, ops::Range};

use ckfs_tensor::{DType, Op, Region, Shape, View};
use smallvec::SmallVec;

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

/// A view of one layer or one expert, and its position in the tensor.
#[derive(Clone, Debug)]
pub(super) struct ReadLeaf<'a> {
    pub(super) view: &'a View,
    /// Axis of the tensor by axis of the leaf.
    pub(super) axes: SmallVec<[usize; 4]>,
    /// The stacked axes of the tensor, each with the leaf's index on it.
    pub(super) at: SmallVec<[(usize, u64); 2]>,
}

impl ReadLeaf<'_> {
    /// What a region of the tensor needs of this leaf if it holds the leaf at all. `None` if that is nothing.
    pub(super) fn region(&self, held: &Region) -> Option<Region> {
        let ranges: SmallVec<[Range<u64>; 4]> = held.ranges().collect();
        let own: SmallVec<[Range<u64>; 4]> = self.axes.iter().map(|axis| ranges[*axis].clone()).collect();
        Region::within(self.view.shape(), &own).filter(|region| !region.shape().is_empty())
    }
}

/// Emits the leaves of a tensor's view in order. `false` ends the walk.
pub(super) fn for_each_leaf<'a>(view: &'a View, emit: &mut dyn FnMut(ReadLeaf<'a>) -> bool) {
    walk(ReadLeaf { view, axes: (0..view.shape().rank()).collect(), at: SmallVec::new() }, emit);
}

fn walk<'a>(mut leaf: ReadLeaf<'a>, emit: &mut dyn FnMut(ReadLeaf<'a>) -> bool) -> bool {
    if let Op::Stack { of, axis } = leaf.view.op() {
        let axis = leaf.axes.remove(*axis);
        return (0..).zip(of).all(|(index, operand)| {
            let mut below = ReadLeaf { view: operand, ..leaf.clone() };
            below.at.push((axis, index));
            walk(below, emit)
        });
    }
    if let Op::Transpose { of, axes } = leaf.view.op() {
        let mut inner = leaf.axes.clone();
        axes.iter().zip(&leaf.axes).for_each(|(from, axis)| inner[*from] = *axis);
        return walk(ReadLeaf { view: of, axes: inner, at: leaf.at }, emit);
    }
    if let Op::Cast { of } | Op::Multiply { of, .. } | Op::Add { of, .. } | Op::Exp { of } = leaf.view.op() {
        return walk(ReadLeaf { view: of, ..leaf }, emit);
    }
    emit(leaf)
}
