//! The parts of a tensor's view below its stacks: the views of one layer or one expert each.

use std::ops::Range;

use ckfs_tensor::{Op, Region, View};
use smallvec::SmallVec;

/// A view of one layer or one expert, and its position in the tensor.
#[derive(Clone, Debug)]
pub(crate) struct ReadLeaf<'a> {
    pub(crate) view: &'a View,
    /// Axis of the tensor by axis of the leaf.
    pub(crate) axes: SmallVec<[usize; 4]>,
    /// The stacked axes of the tensor, each with the leaf's index on it.
    pub(crate) at: SmallVec<[(usize, u64); 2]>,
}

impl ReadLeaf<'_> {
    /// What a region of the tensor needs of this leaf if it holds the leaf at all. `None` if that is nothing.
    pub(crate) fn region(&self, held: &Region) -> Option<Region> {
        let ranges: SmallVec<[Range<u64>; 4]> = held.ranges().collect();
        let own: SmallVec<[Range<u64>; 4]> = self.axes.iter().map(|axis| ranges[*axis].clone()).collect();
        Region::within(self.view.shape(), &own).filter(|region| !region.shape().is_empty())
    }
}

/// Emits the leaves of a tensor's view in order. `false` ends the walk.
pub(crate) fn for_each_leaf<'a>(view: &'a View, emit: &mut dyn FnMut(ReadLeaf<'a>) -> bool) {
    for_each_leaf_of(ReadLeaf { view, axes: (0..view.shape().rank()).collect(), at: SmallVec::new() }, emit);
}

/// The same for what is a part of a tensor already. Returns whether the walk came to its end.
pub(super) fn for_each_leaf_of<'a>(mut leaf: ReadLeaf<'a>, emit: &mut dyn FnMut(ReadLeaf<'a>) -> bool) -> bool {
    if let Op::Stack { of, axis } = leaf.view.op() {
        let axis = leaf.axes.remove(*axis);
        return (0..).zip(of).all(|(index, operand)| {
            let mut below = ReadLeaf { view: operand, ..leaf.clone() };
            below.at.push((axis, index));
            for_each_leaf_of(below, emit)
        });
    }
    if let Op::Transpose { of, axes } = leaf.view.op() {
        let mut inner = leaf.axes.clone();
        axes.iter().zip(&leaf.axes).for_each(|(from, axis)| inner[*from] = *axis);
        return for_each_leaf_of(ReadLeaf { view: of, axes: inner, at: leaf.at }, emit);
    }
    if let Op::Cast { of } | Op::Multiply { of, .. } | Op::Add { of, .. } | Op::Exp { of } = leaf.view.op() {
        return for_each_leaf_of(ReadLeaf { view: of, ..leaf }, emit);
    }
    emit(leaf)
}
