//! The shards of a device that its bundles hold, and the length of a safetensors file of them, computed without a step for
//! each device and each tensor.
//!
//! The length follows from the shapes of the shards, which are the same for each device of a class. Only the offsets of
//! the shards in the header of a safetensors file differ: their digits are counted once for each kind of tensors.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::{Arc, OnceLock},
};

use ckfs_format::safetensors::check_name;
use ckfs_plan::{Plan, PlannedTensor, TensorKinds};
use ckfs_tensor::{DType, Region, Shape, View};

use super::{
    file_image::{FileImage, ImageError},
    safetensors_layout::{
        NamedView, counted_bytes, digits, fills_lines, metadata_bytes, safetensors, saved_offsets, sharding_metadata,
        sort_for_file, tensor_row_bytes,
    },
};

/// Metadata that transformers requires in every file.
pub(super) const FORMAT_PT: &[(&str, &str)] = &[("format", "pt")];

/// Why lengths cannot fail.
const CHECKED: &str = "headers were checked when the volume was built";

/// The shard of a tensor on a device.
pub(super) fn shard(plan: &Plan, tensor: &PlannedTensor, device: u64) -> View {
    tensor.view.region(&plan.region(tensor, device)).expect("a region of the view's own shape")
}

/// For a class of devices, each counted at the first request.
#[derive(Debug, Default)]
struct OfClass {
    /// Bytes of the header rows of all tensors, and of the tensors.
    safetensors: OnceLock<(u64, u64)>,
    /// Length of a file of torch.
    torch: OnceLock<u64>,
}

/// A tensor in the order of a device's safetensors file.
#[derive(Clone, Copy, Debug)]
struct HeaderRow {
    dtype: DType,
    /// Index of its kind among those bundled.
    kind: u32,
    /// Bytes of its row in a header without digits.
    bytes: u64,
}

#[derive(Debug)]
struct BundleLengths {
    classes: ShardClasses,
    of_class: Vec<OfClass>,
    rows: Vec<HeaderRow>,
    /// Bytes of a device's metadata without the digits of the shards' offsets.
    metadata_bytes: u64,
}

/// The shards of a plan's devices for the tensors that bundles include.
#[derive(Debug)]
pub(super) struct Bundle {
    plan: Arc<Plan>,
    /// A bundled tensor of each kind, and how many there are of the kind.
    kinds: Vec<(usize, u64)>,
    /// By kind, its index in that list.
    place_of: BTreeMap<usize, u32>,
    /// The kinds of all tensors.
    all: Arc<TensorKinds>,
    /// Whether headers state where shards are in their tensors.
    places: bool,
    lengths: OnceLock<BundleLengths>,
}

impl Bundle {
    pub(super) fn new(plan: Arc<Plan>, all: Arc<TensorKinds>) -> Self {
        let mut bundled: BTreeMap<usize, (usize, u64)> = BTreeMap::new();
        for (index, _) in plan.tensors.iter().enumerate().filter(|(_, tensor)| plan.is_bundled(tensor)) {
            bundled.entry(all.of(index)).or_insert((index, 0)).1 += 1;
        }
        let places = plan.lists_whole();
        let place_of = bundled.keys().copied().zip(0..).collect();
        Self { kinds: bundled.into_values().collect(), place_of, all, places, plan, lengths: OnceLock::new() }
    }

    /// Checks that every safetensors file has a header that the format allows.
    ///
    /// # Errors
    /// The reason for the first file that has none.
    pub(super) fn check(&self) -> Result<(), ImageError> {
        self.plan.bundle().try_for_each(|tensor| check_name(&tensor.name))?;
        // An upper bound for every device's header: names occur twice, the second time escaped once more.
        let most = |tensor: &PlannedTensor| {
            let rank = tensor.view.shape().rank();
            3 * tensor_row_bytes(&tensor.name, tensor.view.dtype(), rank) + 62 * rank as u64 + 140
        };
        let bytes: u64 = self.plan.bundle().map(most).sum();
        if counted_bytes(0, bytes, 0).is_ok() {
            return Ok(());
        }
        self.plan.devices.iter().try_for_each(|device| self.safetensors_bytes(*device).map(drop))
    }

    fn firsts(&self) -> impl Iterator<Item = &PlannedTensor> {
        self.kinds.iter().map(|(first, _)| &self.plan.tensors[*first])
    }

    fn lengths(&self) -> &BundleLengths {
        self.lengths.get_or_init(|| {
            let region = |tensor: &PlannedTensor, device| Some(self.plan.region(tensor, device));
            let classes = ShardClasses::new(&self.plan.devices, self.firsts(), region);
            let of_class = classes.first.iter().map(|_| OfClass::default()).collect();
            let bundled = self.plan.tensors.iter().enumerate().filter(|(_, tensor)| self.plan.is_bundled(tensor));
            let mut rows: Vec<HeaderRow> = bundled
                .map(|(index, tensor)| {
                    let (dtype, rank) = (tensor.view.dtype(), tensor.view.shape().rank());
                    let bytes = tensor_row_bytes(&tensor.name, dtype, rank);
                    HeaderRow { dtype, kind: self.place_of[&self.all.of(index)], bytes }
                })
                .collect();
            rows.sort_by_key(|row| Reverse(row.dtype.bits()));
            let first = classes.first.first().copied();
            let metadata_bytes =
                first.map_or(0, |first| metadata_bytes(&borrowed(&self.metadata(first))) - self.place_bytes(first));
            BundleLengths { classes, of_class, rows, metadata_bytes }
        })
    }

    /// Bytes of the metadata and of the rows in a device's header, and of its tensors.
    fn counted(&self, device: u64) -> (u64, u64, u64) {
        let (class, first) = self.class(device);
        let (rows, data) = class.safetensors.get_or_init(|| {
            // By kind, digits of a shard's extents, and its elements.
            let shards: &[(u64, u64)] = &self
                .firsts()
                .map(|tensor| {
                    let region = self.plan.region(tensor, first);
                    let extents = region.shape().extents();
                    (extents.iter().map(|extent| digits(*extent)).sum(), region.shape().elements())
                })
                .collect::<Vec<_>>();
            // The rows are sorted by width: what the sizes of the shards decide is left to do.
            let places = [true, false].map(|is_whole_lines| {
                self.lengths().rows.iter().filter_map(move |row| {
                    let (extent_digits, elements) = shards[row.kind as usize];
                    let bytes = row.dtype.bytes_of(elements).expect("a plan's shards are whole bytes");
                    (fills_lines(bytes) == is_whole_lines).then_some((row.bytes + extent_digits, bytes))
                })
            });
            places.into_iter().flatten().fold((0, 0), |(header, start), (row, bytes)| {
                let end = start + bytes;
                (header + row + digits(start) + digits(end), end)
            })
        });
        (self.lengths().metadata_bytes + self.place_bytes(device), *rows, *data)
    }

    /// Length of a device's file of torch: `count` counts that of these shards.
    pub(super) fn torch_len(&self, device: u64, count: fn(&[NamedView<'_>]) -> u64) -> u64 {
        let (class, first) = self.class(device);
        *class.torch.get_or_init(|| count(&self.entries(first)))
    }

    /// The class of a listed device, and its first device.
    fn class(&self, device: u64) -> (&OfClass, u64) {
        let lengths = self.lengths();
        let place = self.plan.devices.binary_search(&device).expect("bundles are of listed devices");
        let class = lengths.classes.of(place);
        (&lengths.of_class[class], lengths.classes.first[class])
    }

    /// Shards of a device in the order of its safetensors file.
    pub(super) fn entries(&self, device: u64) -> Vec<NamedView<'_>> {
        self.named(self.plan.bundle(), device)
    }

    /// Shards of these tensors on a device, in the order of a safetensors file.
    fn named<'a>(&self, tensors: impl Iterator<Item = &'a PlannedTensor>, device: u64) -> Vec<NamedView<'a>> {
        let mut entries: Vec<_> =
            tensors.map(|tensor| NamedView { name: &tensor.name, view: shard(&self.plan, tensor, device) }).collect();
        sort_for_file(&mut entries);
        entries
    }

    /// Metadata of a device's file: the entry that transformers requires, and the offsets and shapes of the shards' tensors. Offsets
    /// are left out where the files together omission some shards: a reader with offsets would fill the shards that exist and leave the
    /// rest unset. Without them it finds tensors of other shapes, and refuses.
    fn metadata(&self, device: u64) -> Vec<(&'static str, String)> {
        let format = FORMAT_PT.iter().map(|(key, value)| (*key, (*value).to_owned()));
        if !self.places {
            return format.collect();
        }
        let shards = self
            .plan
            .bundle()
            .map(|tensor| (tensor.name.as_str(), tensor.view.shape().extents(), self.plan.region(tensor, device)));
        format.chain(sharding_metadata(self.plan.devices.len(), shards)).collect()
    }

    /// Digits of the offsets of all shards of a device, as written in its header.
    fn place_bytes(&self, device: u64) -> u64 {
        if !self.places {
            return 0;
        }
        let of_kind = |(first, count): &(usize, u64)| {
            let tensor = &self.plan.tensors[*first];
            let region = self.plan.region(tensor, device);
            count * saved_offsets(tensor.view.shape().extents(), &region).iter().map(|at| digits(*at)).sum::<u64>()
        };
        self.kinds.iter().map(of_kind).sum()
    }

    fn safetensors_bytes(&self, device: u64) -> Result<u64, ImageError> {
        let (metadata, rows, data) = self.counted(device);
        counted_bytes(metadata, rows, data)
    }

    /// Length of a device's safetensors file.
    pub(super) fn safetensors_len(&self, device: u64) -> u64 {
        self.safetensors_bytes(device).expect(CHECKED)
    }

    /// Length of a rank's file.
    pub(super) fn sharded_state_len(&self, device: u64) -> u64 {
        if self.plan.has_stages() {
            // A rank holds the tensors of its stage only: lengths counted for all tensors are of no use.
            return self.sharded_state(device).expect(CHECKED).len_bytes();
        }
        let (_, rows, data) = self.counted(device);
        // Its metadata is a part of that of the device's safetensors file.
        counted_bytes(metadata_bytes(FORMAT_PT), rows, data).expect(CHECKED)
    }

    /// A device's safetensors file.
    pub(super) fn safetensors(&self, device: u64) -> Result<FileImage, ImageError> {
        safetensors(self.entries(device), &borrowed(&self.metadata(device)))
    }

    /// A rank's file.
    pub(super) fn sharded_state(&self, device: u64) -> Result<FileImage, ImageError> {
        safetensors(self.named(self.plan.bundle_of_stage(device), device), FORMAT_PT)
    }

    /// By kind, the first listed device that holds whole tensors; `None` if one of the kinds is whole on no device.
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

/// Devices whose shards have the same shapes: files of all shards have the same length for each device of such a class. Where meshes
/// divide tensors evenly there is one class.
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
