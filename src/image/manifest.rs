//! `.ckfs/manifest.json`: the contents of the mount, for programs.
//!
//! It has a row for each tensor and each device: gigabytes for a large model on many devices. So it is generated as
//! it is read. The regions of tensors of one kind are the same text, so their lengths are counted once for each kind.

use std::{io::Write, sync::Arc};

use ckfs_checkpoint::Checkpoint;
use ckfs_plan::{Plan, PlannedTensor, Problem, TensorKinds};
use serde_json::json;

use super::{
    generated_records::{GeneratedRecords, byte_counter, starts},
    input::FormatInput,
    output::{DerivedFrom, Directory, FileContent, FormatFiles, LazyFile, OWN, OutputFormat},
};

/// Devices in one block of rows.
const BLOCK_DEVICES: usize = 256;

/// Names in the repository of the tensors that a view reads, without duplicates, in order.
pub(super) fn source_names<'a>(checkpoint: &'a Checkpoint, tensor: &PlannedTensor) -> Vec<&'a str> {
    let mut seen = std::collections::HashSet::new();
    tensor.view.source_ids().into_iter().filter(|id| seen.insert(*id)).map(|id| checkpoint.tensor(id).name).collect()
}

/// See the module's documentation.
pub(super) const MANIFEST: OutputFormat = OutputFormat { name: "manifest", unavailable: |_| None, layout };

#[expect(clippy::unnecessary_wraps, reason = "other formats have problems")]
fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let input = Arc::clone(input);
    let manifest = move || {
        let (checkpoint, plan) = (Arc::clone(&input.checkpoint), Arc::clone(&input.plan));
        FileContent::generated(Arc::new(ManifestRecords::new(checkpoint, plan, Arc::clone(input.kinds()))))
    };
    let directory = Directory::with(OWN, |own| {
        own.file("manifest.json", LazyFile::new(manifest, DerivedFrom::Tensors));
    });
    Ok((directory, None))
}

/// The manifest of a plan.
struct ManifestRecords {
    checkpoint: Arc<Checkpoint>,
    plan: Arc<Plan>,
    kinds: Arc<TensorKinds>,
    starts: Vec<u64>,
    /// By tensor, bytes before its regions.
    before: Vec<u64>,
    /// By kind, ends of the blocks of regions, counted from the first region.
    regions: Vec<Vec<u64>>,
}

/// Appends a JSON value.
fn put(out: &mut Vec<u8>, value: &(impl serde::Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("text and numbers can be written to memory");
}

impl ManifestRecords {
    fn new(checkpoint: Arc<Checkpoint>, plan: Arc<Plan>, kinds: Arc<TensorKinds>) -> Self {
        let mut manifest =
            Self { checkpoint, plan, kinds, starts: Vec::new(), before: Vec::new(), regions: Vec::new() };
        let mut count = byte_counter();
        let blocks = manifest.device_blocks();
        let regions = manifest.kinds.first.iter().map(|first| {
            let first = &manifest.plan.tensors[*first];
            starts((0..blocks).map(|block| count(&|out| manifest.region_block(first, block, out)))).split_off(1)
        });
        let regions: Vec<Vec<u64>> = regions.collect();
        let tensors = 0..manifest.plan.tensors.len();
        let before: Vec<u64> = tensors.clone().map(|tensor| count(&|out| manifest.before(tensor, out))).collect();
        let mut lengths: Vec<u64> = (0..blocks + 2).map(|group| count(&|out| manifest.start(group, out))).collect();
        lengths.extend(tensors.map(|tensor| {
            let regions = regions[manifest.kinds.of(tensor)].last().copied().unwrap_or(0);
            before[tensor] + regions + count(&|out| manifest.after(tensor, out))
        }));
        lengths.push(count(&Self::tail));
        manifest.starts = starts(lengths.into_iter());
        (manifest.before, manifest.regions) = (before, regions);
        manifest
    }

    fn device_blocks(&self) -> usize {
        self.plan.devices.len().div_ceil(BLOCK_DEVICES)
    }

    /// Numbers of the devices of a block, each with its index in the list.
    fn block(&self, block: usize) -> impl Iterator<Item = (usize, u64)> {
        let places = block * BLOCK_DEVICES..self.plan.devices.len().min((block + 1) * BLOCK_DEVICES);
        places.map(|place| (place, self.plan.devices[place]))
    }

    /// A group before those of the tensors: the head, the blocks of devices, and what is between these and the tensors.
    fn start(&self, group: usize, out: &mut Vec<u8>) {
        let Some(block) = group.checked_sub(1) else { return self.head(out) };
        if block == self.device_blocks() {
            return out.extend(b"],\n\"tensors\": [");
        }
        for (place, device) in self.block(block) {
            if place > 0 {
                out.push(b',');
            }
            let names = self.plan.mesh.axes().iter().map(|axis| axis.name.clone());
            let at: serde_json::Map<_, _> =
                names.zip(self.plan.mesh.coordinates(device).into_iter().map(serde_json::Value::from)).collect();
            put(out, &json!({"device": device, "coordinates": at}));
        }
    }

    fn head(&self, out: &mut Vec<u8>) {
        let plan = &self.plan;
        let mesh: serde_json::Map<_, _> =
            plan.mesh.axes().iter().map(|axis| (axis.name.clone(), axis.size.into())).collect();
        let head = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "source": self.checkpoint.label(),
            "layout": plan.layout.name(),
            "family": plan.family,
            "dtype": plan.dtype.map(ckfs_tensor::DType::code),
            "mesh": mesh,
        });
        put(out, &head);
        assert_eq!(out.pop(), Some(b'}'), "an object ends with a brace");
        out.extend(b",\"devices\":[");
    }

    /// A tensor's row before its regions.
    fn before(&self, tensor: usize, out: &mut Vec<u8>) {
        out.extend(if tensor == 0 { b"\n".as_slice() } else { b",\n" });
        let plan = &self.plan;
        let tensor = &plan.tensors[tensor];
        let shape = tensor.view.shape();
        let row = json!({
            "name": tensor.name,
            "path": plan.path(tensor).join("/"),
            "dtype": tensor.view.dtype().code(),
            "shape": shape.extents(),
            "spec": plan.spec(tensor).to_json(shape.rank(), &plan.mesh),
            "bundled": plan.is_bundled(tensor),
        });
        put(out, &row);
        assert_eq!(out.pop(), Some(b'}'), "an object ends with a brace");
        out.extend(b",\"sources\":");
        put(out, &source_names(&self.checkpoint, tensor));
        out.extend(b",\"regions\":[");
    }

    /// The regions of a tensor on the devices of a block: offset and extents.
    fn region_block(&self, tensor: &PlannedTensor, block: usize, out: &mut Vec<u8>) {
        for (place, device) in self.block(block) {
            let region = self.plan.region(tensor, device);
            let comma = if place == 0 { "" } else { "," };
            write!(out, "{comma}{{\"device\":{device},\"offset\":").expect("memory takes all bytes");
            put(out, region.origin());
            out.extend(b",\"shape\":");
            put(out, region.shape().extents());
            out.push(b'}');
        }
    }

    /// A tensor's row after its regions.
    fn after(&self, tensor: usize, out: &mut Vec<u8>) {
        out.push(b']');
        if let Some(layers) = &self.plan.tensors[tensor].layers {
            out.extend(b",\"layers\":");
            put(out, &**layers);
        }
        out.push(b'}');
    }

    fn tail(out: &mut Vec<u8>) {
        out.extend(b"\n]}\n");
    }

    /// The tensor of a group; the number of tensors for the last one, `None` for groups before.
    fn tensor(&self, group: usize) -> Option<usize> {
        group.checked_sub(self.device_blocks() + 2)
    }
}

impl GeneratedRecords for ManifestRecords {
    fn starts(&self) -> &[u64] {
        &self.starts
    }

    fn block_ends(&self, group: usize) -> Vec<u64> {
        let len = self.starts[group + 1] - self.starts[group];
        match self.tensor(group) {
            Some(tensor) if tensor < self.plan.tensors.len() => {
                let before = self.before[tensor];
                let regions = self.regions[self.kinds.of(tensor)].iter().map(|end| before + end);
                std::iter::once(before).chain(regions).chain([len]).collect()
            }
            _ => vec![len],
        }
    }

    fn write(&self, group: usize, block: usize, out: &mut Vec<u8>) {
        match self.tensor(group) {
            None => self.start(group, out),
            Some(tensor) if tensor == self.plan.tensors.len() => Self::tail(out),
            Some(tensor) if block == 0 => self.before(tensor, out),
            Some(tensor) if block > self.device_blocks() => self.after(tensor, out),
            Some(tensor) => self.region_block(&self.plan.tensors[tensor], block - 1, out),
        }
    }
}
