//! Devices whose shards have the same shapes: files of all shards have the same length for each device of such a class.
//! Where meshes divide tensors evenly there is one class.

use std::collections::HashMap;

use ckfs_plan::PlannedTensor;
use ckfs_tensor::{Region, Shape};

/// The classes of devices.
#[derive(Debug)]
pub(super) struct ShardClasses {
    /// Class by index in the list of devices.
    of: Vec<u32>,
    /// The first device of each class.
    pub(super) first: Vec<u64>,
}

impl ShardClasses {
    /// The classes of `devices`; `region` returns the region that each device holds of these tensors, one tensor of each kind.
    pub(super) fn new<'a>(
        devices: &[u64],
        tensors: impl Iterator<Item = &'a PlannedTensor>,
        region: impl Fn(&PlannedTensor, u64) -> Option<Region>,
    ) -> Self {
        let mut classes = Self { of: vec![0; devices.len()], first: devices.first().copied().into_iter().collect() };
        for tensor in tensors {
            classes.first.clear();
            let mut known: HashMap<(u32, Option<Shape>), u32> = HashMap::new();
            for (class, device) in classes.of.iter_mut().zip(devices) {
                let next = u32::try_from(known.len()).expect("a mesh has fewer than 2^32 devices");
                let shape = region(tensor, *device).map(|region| region.shape().clone());
                *class = *known.entry((*class, shape)).or_insert_with(|| {
                    classes.first.push(*device);
                    next
                });
            }
        }
        classes
    }

    /// The class of the device at this index in the list.
    pub(super) fn of(&self, place: usize) -> usize {
        self.of[place] as usize
    }
}
