//! What the devices hold, and what each axis of the mesh splits.

use std::collections::HashMap;

use ckfs_tensor::{DType, Shape};

use super::super::{Plan, PlannedTensor, Spec};

/// Bytes of bundled tensors that each listed device holds.
///
/// # Panics
/// Never: a part has no more bytes than its tensor, whose size was checked.
pub fn bytes_per_device(plan: &Plan) -> Vec<u64> {
    // Most tensors share all of these with many others.
    type Kind<'a> = (&'a Spec, &'a Shape, DType, Option<(u64, u64)>, Option<u64>);
    let mut kinds: HashMap<Kind<'_>, (&PlannedTensor, u64)> = HashMap::new();
    for tensor in plan.bundle() {
        let key = (plan.spec(tensor), tensor.view.shape(), tensor.view.dtype(), tensor.expert, tensor.stage);
        kinds.entry(key).or_insert((tensor, 0)).1 += 1;
    }
    let shard = |tensor: &PlannedTensor, device| {
        let elements = plan.region(tensor, device).shape().elements();
        u64::try_from(u128::from(elements) * u128::from(tensor.view.dtype().bits()) / 8)
            .expect("a part has no more bytes than the tensor, whose size was checked")
    };
    let of_device = |device: &u64| kinds.values().map(|(tensor, count)| shard(tensor, *device) * count).sum();
    plan.devices.iter().map(of_device).collect()
}

/// The effect of one mesh axis.
pub(super) struct AxisEffect {
    pub(super) name: String,
    pub(super) size: u64,
    pub(super) tensors: u64,
    pub(super) bytes: u64,
}

pub(super) fn axis_effects(plan: &Plan) -> Vec<AxisEffect> {
    let axes = plan.mesh.axes().iter().enumerate();
    axes.map(|(index, axis)| {
        let split: Vec<&PlannedTensor> = plan.bundle().filter(|tensor| plan.distributes(tensor, index)).collect();
        AxisEffect {
            name: axis.name.clone(),
            size: axis.size,
            tensors: split.len() as u64,
            bytes: split.iter().map(|tensor| tensor.bytes()).sum(),
        }
    })
    .collect()
}
