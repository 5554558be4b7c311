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
    tensor::{DType, View},
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
    /// Bytes of the rows of all tensors in a header, and of the tensors.
    counted: OnceLock<(u64, u64)>,
    pt: OnceLock<u64>,
}

/// A tensor in the order of a device's safetensors file.
#[derive(Clone, Copy, Debug)]
struct Row {
    dtype: DType,
    /// Place of its kind among those bundled.
    kind: u32,
    /// Bytes of its row in a header besides digits.
    bytes: u64,
}

#[derive(Debug)]
struct Lengths {
    classes: ShardClasses,
    of_class: Vec<OfClass>,
    rows: Vec<Row>,
    /// Bytes of a device's metadata besides the digits of the places of shards.
    metadata_bytes: u64,
}

/// The bundles of a plan's devices.
#[derive(Debug)]
pub(super) struct Bundles {
    plan: Arc<Plan>,
    /// A bundled tensor of each kind, and how many there are of the kind.
    kinds: Vec<(usize, u64)>,
    /// By kind, its place among those.
    place_of: BTreeMap<usize, u32>,
    /// The kinds of all tensors.
    all: Arc<Kinds>,
    /// Whether headers say where shards are in their tensors.
    places: bool,
    lengths: OnceLock<Lengths>,
}

impl Bundles {
    pub(super) fn new(plan: Arc<Plan>, all: Arc<Kinds>) -> Self {
        let mut bundled: BTreeMap<usize, (usize, u64)> = BTreeMap::new();
        for (index, _) in plan.tensors.iter().enumerate().filter(|(_, tensor)| plan.is_bundled(tensor)) {
            bundled.entry(all.of(index)).or_insert((index, 0)).1 += 1;
        }
        let places = unavailable::safetensors(&plan).is_ok();
        let place_of = bundled.keys().copied().zip(0..).collect();
        Self { kinds: bundled.into_values().collect(), place_of, all, places, plan, lengths: OnceLock::new() }
    }

    /// Checks that every safetensors file has a header that the format allows.
    ///
    /// # Errors
    /// What is wrong with the first that has not.
    pub(super) fn check(&self) -> Result<(), ImageError> {
        self.plan.bundle().try_for_each(|tensor| image::check_name(&tensor.name))?;
        // More than any device's header takes: names stand there twice, the second time escaped once more.
        let most = |tensor: &PlannedTensor| {
            let rank = tensor.view.shape().rank();
            3 * image::tensor_row_bytes(&tensor.name, tensor.view.dtype(), rank) + 41 * rank as u64 + 100
        };
        let bytes: u64 = self.plan.bundle().map(most).sum();
        if SafetensorsLength::counted(0, bytes, 0).file_bytes().is_ok() {
            return Ok(());
        }
        self.plan.devices.iter().try_for_each(|device| self.safetensors_bytes(*device).map(drop))
    }

    fn firsts(&self) -> impl Iterator<Item = &PlannedTensor> {
        self.kinds.iter().map(|(first, _)| &self.plan.tensors[*first])
    }

    fn lengths(&self) -> &Lengths {
        self.lengths.get_or_init(|| {
            let region = |tensor: &PlannedTensor, device| Some(self.plan.region(tensor, device));
            let classes = ShardClasses::new(&self.plan.devices, self.firsts(), region);
            let of_class = classes.first().iter().map(|_| OfClass::default()).collect();
            let bundled = self.plan.tensors.iter().enumerate().filter(|(_, tensor)| self.plan.is_bundled(tensor));
            let mut rows: Vec<Row> = bundled
                .map(|(index, tensor)| {
                    let (dtype, rank) = (tensor.view.dtype(), tensor.view.shape().rank());
                    let bytes = image::tensor_row_bytes(&tensor.name, dtype, rank);
                    Row { dtype, kind: self.place_of[&self.all.of(index)], bytes }
                })
                .collect();
            rows.sort_by_key(|row| Reverse(row.dtype.bits()));
            let first = classes.first().first().copied();
            let metadata_bytes = first
                .map_or(0, |first| image::metadata_bytes(&borrowed(&self.metadata(first))) - self.place_bytes(first));
            Lengths { classes, of_class, rows, metadata_bytes }
        })
    }

    /// Bytes of the metadata and of the rows in a device's header, and of its tensors.
    fn counted(&self, device: u64) -> (u64, u64, u64) {
        let (class, first) = self.class(device);
        let (rows, data) = class.counted.get_or_init(|| {
            // By kind, digits of a shard's extents, and its elements.
            let shards: Vec<(u64, u64)> = self
                .firsts()
                .map(|tensor| {
                    let region = self.plan.region(tensor, first);
                    let extents = region.shape().extents();
                    (extents.iter().map(|extent| image::digits(*extent)).sum(), region.shape().elements())
                })
                .collect();
            self.lengths().rows.iter().fold((0, 0), |(bytes, start), row| {
                let (digits, elements) = shards[row.kind as usize];
                let end = start + row.dtype.bytes_of(elements).expect("a plan's shards are whole bytes");
                (bytes + row.bytes + digits + image::digits(start) + image::digits(end), end)
            })
        });
        (self.lengths().metadata_bytes + self.place_bytes(device), *rows, *data)
    }

    /// The class of a listed device, and its first device.
    fn class(&self, device: u64) -> (&OfClass, u64) {
        let lengths = self.lengths();
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
        let of_kind = |(first, count): &(usize, u64)| {
            let tensor = &self.plan.tensors[*first];
            let region = self.plan.region(tensor, device);
            count
                * image::saved_offsets(tensor.view.shape().extents(), &region)
                    .iter()
                    .map(|at| image::digits(*at))
                    .sum::<u64>()
        };
        self.kinds.iter().map(of_kind).sum()
    }

    fn safetensors_bytes(&self, device: u64) -> Result<u64, ImageError> {
        let (metadata, rows, data) = self.counted(device);
        SafetensorsLength::counted(metadata, rows, data).file_bytes()
    }

    /// Length of a device's safetensors file.
    pub(super) fn safetensors_len(&self, device: u64) -> u64 {
        self.safetensors_bytes(device).expect(CHECKED)
    }

    /// Length of a rank's file.
    pub(super) fn sharded_state_len(&self, device: u64) -> u64 {
        let (_, rows, data) = self.counted(device);
        // Its metadata is a part of that of the device's other file.
        SafetensorsLength::counted(image::metadata_bytes(FORMAT_PT), rows, data).file_bytes().expect(CHECKED)
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
    pub(super) fn whole_on(&self) -> Option<BTreeMap<usize, u64>> {
        let whole_on = |(first, _): &(usize, u64)| {
            let tensor = &self.plan.tensors[*first];
            let whole = tensor.view.shape().whole();
            let mut devices = self.plan.devices.iter().copied();
            Some((self.all.of(*first), devices.find(|device| self.plan.region(tensor, *device) == whole)?))
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
