//! What the devices hold, what each axis of the mesh splits, and tensors whose names differ only in numbers.

use std::collections::HashMap;

pub use ckfs_checkpoint::human_bytes;
use ckfs_tensor::{DType, Reads, Shape};
use serde::Serialize;

use super::super::{AxisUse, Plan, PlannedTensor, Spec, axis_use, naming::group_name, numbered::Numbered};

/// Bytes of bundled tensors that each listed device holds.
pub fn bytes_per_device(plan: &Plan) -> Vec<u64> {
    per_device(plan, part_bytes)
}

/// Bytes that each listed device needs at least to train: what it holds, and for each number of a float type of 16 bits or more a
/// gradient of that type, the two moments of Adam, and where the type is narrower than f32 a copy in f32. Activations are not in it.
pub(super) fn training_bytes_per_device(plan: &Plan) -> Vec<u64> {
    per_device(plan, |dtype, elements| {
        let held = part_bytes(dtype, elements);
        let width = dtype.bits() / 8;
        if !dtype.is_float() || width < 2 {
            return held;
        }
        let optimizer = 2 * width.max(4) + if width < 4 { 4 } else { 0 };
        held.saturating_mul(2).saturating_add(elements.saturating_mul(optimizer))
    })
}

/// # Panics
/// Never: a part has no more bytes than its tensor, whose size was checked.
fn part_bytes(dtype: DType, elements: u64) -> u64 {
    u64::try_from(u128::from(elements) * u128::from(dtype.bits()) / 8)
        .expect("a part has no more bytes than the tensor, whose size was checked")
}

/// For each listed device the sum of `of_part` over the parts of bundled tensors that it holds.
fn per_device(plan: &Plan, of_part: impl Fn(DType, u64) -> u64) -> Vec<u64> {
    // Most tensors share all of these with many others.
    type Kind<'a> = (&'a Spec, &'a Shape, DType, Option<(u64, u64)>, Option<u64>);
    let mut kinds: HashMap<Kind<'_>, (&PlannedTensor, u64)> = HashMap::new();
    for tensor in plan.bundle() {
        let key = (plan.spec(tensor), tensor.view.shape(), tensor.view.dtype(), tensor.expert, tensor.stage);
        kinds.entry(key).or_insert((tensor, 0)).1 += 1;
    }
    let shard =
        |tensor: &PlannedTensor, device| of_part(tensor.view.dtype(), plan.region(tensor, device).shape().elements());
    let sum = |sum: u64, (tensor, count): &(&PlannedTensor, u64), device| {
        sum.saturating_add(shard(tensor, device).saturating_mul(*count))
    };
    let of_device = |device: &u64| kinds.values().fold(0, |all, kind| sum(all, kind, *device));
    plan.devices.iter().map(of_device).collect()
}

/// The effect of one mesh axis.
#[derive(Serialize)]
pub(super) struct AxisEffect {
    pub(super) name: String,
    pub(super) size: u64,
    pub(super) tensors_split: u64,
    pub(super) bytes_split: u64,
    /// By which rule tensors are split over it.
    pub(super) rule: &'static str,
}

fn rule_of_axis(plan: &Plan, name: &str) -> &'static str {
    if plan.logical_rules.is_some() {
        return "by the rules for logical axes";
    }
    match axis_use(name) {
        AxisUse::Expert => "by expert",
        AxisUse::Tensor => "by row or column, as the tensor's role says",
        AxisUse::FullyShard => "axis 0 of the unstacked tensor, inside the others",
        AxisUse::Replicate => "replicas",
        AxisUse::Unknown => "no rule for this name",
    }
}

pub(super) fn axis_effects(plan: &Plan) -> Vec<AxisEffect> {
    let axes = plan.mesh.axes().iter().enumerate();
    axes.map(|(index, axis)| {
        let split: Vec<&PlannedTensor> = plan.bundle().filter(|tensor| plan.distributes(tensor, index)).collect();
        AxisEffect {
            name: axis.name.clone(),
            size: axis.size,
            tensors_split: split.len() as u64,
            bytes_split: split.iter().map(|tensor| tensor.bytes()).sum(),
            rule: rule_of_axis(plan, &axis.name),
        }
    })
    .collect()
}

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
    let mut groups: Numbered<(String, DType, &Shape, &Spec), TensorGroup<'_>> = Numbered::default();
    for tensor in plan.bundle() {
        let name = group_name(&tensor.name);
        let key = (name.clone(), tensor.view.dtype(), tensor.view.shape(), plan.spec(tensor));
        let group = groups.entry(key).or_insert_with(|| TensorGroup { name, members: Vec::new(), bytes: 0 });
        group.members.push(tensor);
        group.bytes += tensor.bytes();
    }
    groups.into_values().collect()
}

/// `part` of `whole` in percent.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "0.0 %".to_owned();
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// The bytes in the touched pages over the bytes needed, in hundredths.
pub(super) fn hundredths(reads: Reads) -> u128 {
    if reads.needed_bytes == 0 { 100 } else { u128::from(reads.paged_bytes) * 100 / u128::from(reads.needed_bytes) }
}

/// The bytes needed, and the bytes in their pages.
pub fn reads_text(reads: Reads) -> String {
    let (needed, paged) = (human_bytes(reads.needed_bytes), human_bytes(reads.paged_bytes));
    format!("{needed} of the sources, {paged} in whole pages: {} times", factor(reads))
}

pub(super) fn factor(reads: Reads) -> String {
    let hundredths = hundredths(reads);
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_percent() {
        assert_eq!((percent(1, 8), percent(0, 0)), ("12.5 %".to_owned(), "0.0 %".to_owned()));
    }
}
