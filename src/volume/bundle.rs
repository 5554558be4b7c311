//! Files that hold all shards of a device: what is in them and how long they are, without a step for each device and each
//! tensor.
//!
//! The length follows from the shapes of the shards, which are the same for each device of a class, but for the places of
//! the shards that the header of a safetensors file names: their digits are counted once for each kind of tensors.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use super::{shard_class::ShardClasses, unavailable};
use crate::{
    image::{self, Entry, FileImage, ImageError, Rows, SafetensorsLength, starts},
    plan::{Kinds, Plan, PlannedTensor},
    tensor::View,
};

/// Metadata that transformers demands of every file.
pub(super) const FORMAT_PT: &[(&str, &str)] = &[("format", "pt")];

/// Why lengths are there.
const CHECKED: &str = "headers were checked when the volume was made";

/// The shard of a tensor on a device.
pub(super) fn shard(plan: &Plan, tensor: &PlannedTensor, device: u64) -> View {
    tensor.view.region(&plan.region(tensor, device)).expect("a region of the view's own shape")
}

/// Lengths of the files of a class of devices, each counted when it is first asked for.
#[derive(Debug, Default)]
struct OfClass {
    /// For the class's first device: the length, and the bytes in its header that say where shards are.
    safetensors: OnceLock<Result<(SafetensorsLength, u64), ImageError>>,
    sharded_state: OnceLock<Result<u64, ImageError>>,
    pt: OnceLock<u64>,
}

#[derive(Debug)]
struct Lengths {
    classes: ShardClasses,
    of_class: Vec<OfClass>,
}

/// The bundles of a plan's devices.
#[derive(Debug)]
pub(super) struct Bundles {
    plan: Arc<Plan>,
    /// A bundled tensor of each kind, and how many there are of the kind.
    kinds: Vec<(usize, u64)>,
    /// Whether headers say where shards are in their tensors.
    places: bool,
    lengths: OnceLock<Lengths>,
}

impl Bundles {
    pub(super) fn new(plan: Arc<Plan>, kinds: &Kinds) -> Self {
        let mut bundled: BTreeMap<usize, (usize, u64)> = BTreeMap::new();
        for (index, _) in plan.tensors.iter().enumerate().filter(|(_, tensor)| plan.is_bundled(tensor)) {
            bundled.entry(kinds.of(index)).or_insert((index, 0)).1 += 1;
        }
        let places = unavailable::safetensors(&plan).is_ok();
        Self { kinds: bundled.into_values().collect(), places, plan, lengths: OnceLock::new() }
    }

    /// Checks that every safetensors file has a header that the format allows.
    ///
    /// # Errors
    /// What is wrong with the first that has not.
    pub(super) fn check(&self) -> Result<(), ImageError> {
        let row = |tensor: &PlannedTensor| image::safetensors_row_bytes_max(&tensor.name, tensor.view.shape().rank());
        // Only of very many tensors the header has to be laid out to know.
        if self.plan.bundle().map(row).sum::<u64>() < image::SAFETENSORS_HEADER_BYTES_MAX {
            return Ok(());
        }
        self.plan.devices.iter().try_for_each(|device| {
            self.safetensors_bytes(*device)?;
            self.sharded_state_bytes(*device).map(drop)
        })
    }

    fn firsts(&self) -> impl Iterator<Item = &PlannedTensor> {
        self.kinds.iter().map(|(first, _)| &self.plan.tensors[*first])
    }

    /// The class of a listed device, and its first device.
    fn class(&self, device: u64) -> (&OfClass, u64) {
        let lengths = self.lengths.get_or_init(|| {
            let region = |tensor: &PlannedTensor, device| Some(self.plan.region(tensor, device));
            let classes = ShardClasses::new(&self.plan.devices, self.firsts(), region);
            let of_class = classes.first().iter().map(|_| OfClass::default()).collect();
            Lengths { classes, of_class }
        });
        let place = self.plan.devices.binary_search(&device).expect("bundles are of listed devices");
        let class = lengths.classes.of(place);
        (&lengths.of_class[class], lengths.classes.first()[class])
    }

    /// Shards of a device in the order of its safetensors file.
    pub(super) fn entries(&self, device: u64) -> Vec<Entry<'_>> {
        let tensors = self.plan.bundle();
        let mut entries: Vec<_> =
            tensors.map(|tensor| Entry { name: &tensor.name, view: shard(&self.plan, tensor, device) }).collect();
        // Widest first keeps every tensor aligned to its element; names keep their order within a width.
        entries.sort_by_key(|entry| Reverse(entry.view.dtype().bits()));
        entries
    }

    /// Metadata of a device's file: what transformers demands, and where the shards are in their tensors. Where the files do
    /// not have all of these, a reader of the places would fill what there is and leave the rest as it was: without them it
    /// finds tensors of other shapes, and refuses.
    fn metadata(&self, device: u64) -> Vec<(&'static str, String)> {
        let format = FORMAT_PT.iter().map(|(key, value)| (*key, (*value).to_owned()));
        if !self.places {
            return format.collect();
        }
        let shards = self
            .plan
            .bundle()
            .map(|tensor| (tensor.name.as_str(), tensor.view.shape().extents(), self.plan.region(tensor, device)));
        format.chain(image::sharding_metadata(shards)).collect()
    }

    /// Digits of the places of all shards of a device, as they stand in its header.
    fn place_bytes(&self, device: u64) -> u64 {
        if !self.places {
            return 0;
        }
        let digits = |number: &u64| u64::from(number.checked_ilog10().unwrap_or(0)) + 1;
        let of_kind = |(first, count): &(usize, u64)| {
            let tensor = &self.plan.tensors[*first];
            let region = self.plan.region(tensor, device);
            count * image::saved_offsets(tensor.view.shape().extents(), &region).iter().map(digits).sum::<u64>()
        };
        self.kinds.iter().map(of_kind).sum()
    }

    fn safetensors_bytes(&self, device: u64) -> Result<u64, ImageError> {
        let (class, first) = self.class(device);
        let of_first = class.safetensors.get_or_init(|| {
            let length = SafetensorsLength::new(&self.entries(first), &borrowed(&self.metadata(first)))?;
            Ok((length, self.place_bytes(first)))
        });
        let (length, old) = of_first.as_ref().map_err(Clone::clone)?;
        length.with(*old, self.place_bytes(device)).file_bytes()
    }

    fn sharded_state_bytes(&self, device: u64) -> Result<u64, ImageError> {
        let (class, first) = self.class(device);
        let length = || SafetensorsLength::new(&self.entries(first), FORMAT_PT)?.file_bytes();
        class.sharded_state.get_or_init(length).clone()
    }

    /// Length of a device's safetensors file.
    pub(super) fn safetensors_len(&self, device: u64) -> u64 {
        self.safetensors_bytes(device).expect(CHECKED)
    }

    /// Length of a rank's file.
    pub(super) fn sharded_state_len(&self, device: u64) -> u64 {
        self.sharded_state_bytes(device).expect(CHECKED)
    }

    /// Length of a device's `.pt` file.
    pub(super) fn pt_len(&self, device: u64) -> u64 {
        let (class, first) = self.class(device);
        *class.pt.get_or_init(|| image::pt_len(&self.entries(first)))
    }

    /// A device's safetensors file.
    pub(super) fn safetensors(&self, device: u64) -> Result<FileImage, ImageError> {
        image::safetensors(self.entries(device), &borrowed(&self.metadata(device)))
    }

    /// A rank's file.
    pub(super) fn sharded_state(&self, device: u64) -> Result<FileImage, ImageError> {
        image::safetensors(self.entries(device), FORMAT_PT)
    }

    /// A device's `.pt` file.
    pub(super) fn pt(&self, device: u64) -> Result<FileImage, ImageError> {
        image::pt(&self.entries(device))
    }

    /// By kind, the first listed device that holds tensors whole; `None` if one of the kinds is whole on none.
    pub(super) fn whole_on(&self, kinds: &Kinds) -> Option<BTreeMap<usize, u64>> {
        let whole_on = |(first, _): &(usize, u64)| {
            let tensor = &self.plan.tensors[*first];
            let whole = tensor.view.shape().whole();
            let mut devices = self.plan.devices.iter().copied();
            Some((kinds.of(*first), devices.find(|device| self.plan.region(tensor, *device) == whole)?))
        };
        self.kinds.iter().map(whole_on).collect()
    }
}

pub(super) fn borrowed<K: AsRef<str>>(metadata: &[(K, String)]) -> Vec<(&str, &str)> {
    metadata.iter().map(|(key, value)| (key.as_ref(), value.as_str())).collect()
}

/// `safetensors/model.safetensors.index.json`: a group of rows for each bundled tensor.
#[derive(Debug)]
pub(super) struct SafetensorsIndex {
    plan: Arc<Plan>,
    /// Numbers of the bundled tensors, and the device whose file has each whole.
    tensors: Vec<(u32, u64)>,
    starts: Vec<u64>,
}

impl SafetensorsIndex {
    /// `whole_on` gives the device for each kind.
    pub(super) fn new(plan: Arc<Plan>, kinds: &Kinds, whole_on: &BTreeMap<usize, u64>) -> Self {
        let bundled = plan.tensors.iter().enumerate().filter(|(_, tensor)| plan.is_bundled(tensor));
        let row = |(index, _)| {
            let number = u32::try_from(index).expect("a table of tensors has fewer than 2^32 rows");
            (number, whole_on[&kinds.of(index)])
        };
        let tensors = bundled.map(row).collect();
        let mut index = Self { plan, tensors, starts: Vec::new() };
        let lengths = (0..index.tensors.len() + 2).map(|group| {
            let mut bytes = Vec::new();
            index.write(group, 0, &mut bytes);
            bytes.len() as u64
        });
        index.starts = starts(lengths);
        index
    }
}

impl Rows for SafetensorsIndex {
    fn starts(&self) -> &[u64] {
        &self.starts
    }

    fn block_ends(&self, group: usize) -> Vec<u64> {
        vec![self.starts[group + 1] - self.starts[group]]
    }

    fn write(&self, group: usize, _block: usize, out: &mut Vec<u8>) {
        let Some(number) = group.checked_sub(1) else {
            let bytes = |tensor: &PlannedTensor| tensor.view.bytes().expect("a plan's tensors are whole bytes");
            let total = self.plan.bundle().map(bytes).sum::<u64>();
            return out.extend(format!("{{\"metadata\":{{\"total_size\":{total}}},\"weight_map\":{{").into_bytes());
        };
        let Some((tensor, device)) = self.tensors.get(number) else { return out.extend(b"}}") };
        let comma = if number == 0 { "" } else { "," };
        let name = serde_json::Value::from(self.plan.tensors[*tensor as usize].name.as_str());
        out.extend(format!("{comma}{name}:\"dev{device}.safetensors\"").into_bytes());
    }
}
