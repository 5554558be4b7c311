//! `safetensors/`: all shards of a device as one safetensors file, and an index where every tensor is whole in one file.

use std::{collections::BTreeMap, sync::Arc};

use ckfs_plan::{Plan, PlannedTensor, Problem, TensorKinds};

use super::{
    bundle::Bundle,
    file_image::{FileImage, ImageError},
    generated_records::{GeneratedRecords, written_starts},
    input::FormatInput,
    output::{
        DerivedFrom, Directory, FileContent, FormatFiles, LazyFile, Omission, OmittedFormat, OutputFormat, VirtualFile,
    },
};

/// See the module's documentation.
pub(super) const SAFETENSORS: OutputFormat = OutputFormat { name: "safetensors", unavailable, layout };

/// The files are of the listed devices only.
fn unavailable(plan: &Plan) -> Option<OmittedFormat> {
    if plan.lists_whole() {
        return None;
    }
    let (listed, all) = (plan.devices.len(), plan.mesh.devices());
    let reason = format!(
        "only {listed} of {all} devices are listed, and they do not hold every tensor whole: the files have no \
         DCP_SHARDING_INFO, so that a reader of the whole directory refuses it and leaves no gaps"
    );
    Some(OmittedFormat { format: SAFETENSORS.name, omission: Omission::Part, reason })
}

fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let bundle = input.bundle();
    bundle
        .check()
        .map_err(|error| vec![Problem::File { file: SAFETENSORS.name.to_owned(), reason: error.to_string() }])?;
    let directory = Directory::with(SAFETENSORS.name, |directory| {
        for device in &input.plan.devices {
            let file = BundleFile {
                bundle: Arc::clone(bundle),
                device: *device,
                len_bytes: Bundle::safetensors_len,
                lay_out: Bundle::safetensors,
                is_bundle: true,
            };
            directory.file(&format!("dev{device}.safetensors"), file);
        }
        // An index cannot describe parts of tensors: a reader would take a shard that it names for the tensor.
        if let Some(whole_on) = bundle.whole_on() {
            let input = Arc::clone(input);
            let index = move || {
                let plan = Arc::clone(&input.plan);
                FileContent::generated(Arc::new(SafetensorsIndex::new(plan, input.kinds(), &whole_on)))
            };
            directory.file("model.safetensors.index.json", LazyFile::new(index, DerivedFrom::Tensors));
        }
    });
    Ok((directory, unavailable(&input.plan)))
}

/// A file of a device's shards.
pub(super) struct BundleFile {
    pub(super) bundle: Arc<Bundle>,
    pub(super) device: u64,
    pub(super) len_bytes: fn(&Bundle, u64) -> u64,
    pub(super) lay_out: fn(&Bundle, u64) -> Result<FileImage, ImageError>,
    pub(super) is_bundle: bool,
}

impl VirtualFile for BundleFile {
    fn len_bytes(&self) -> u64 {
        (self.len_bytes)(&self.bundle, self.device)
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        (self.lay_out)(&self.bundle, self.device).map(FileContent::Image)
    }

    fn is_bundle(&self) -> bool {
        self.is_bundle
    }
}

/// `safetensors/model.safetensors.index.json`: a group of rows for each bundled tensor.
#[derive(Debug)]
struct SafetensorsIndex {
    plan: Arc<Plan>,
    /// Indices of the bundled tensors, and for each the device whose file has the whole tensor.
    tensors: Vec<(u32, u64)>,
    starts: Vec<u64>,
}

impl SafetensorsIndex {
    /// `whole_on` gives the device for each kind.
    fn new(plan: Arc<Plan>, kinds: &TensorKinds, whole_on: &BTreeMap<usize, u64>) -> Self {
        let bundled = plan.tensors.iter().enumerate().filter(|(_, tensor)| plan.is_bundled(tensor));
        let row = |(index, _)| {
            let number = u32::try_from(index).expect("a table of tensors has fewer than 2^32 rows");
            (number, whole_on[&kinds.of(index)])
        };
        let tensors = bundled.map(row).collect();
        let mut index = Self { plan, tensors, starts: Vec::new() };
        index.starts = written_starts(&index, index.tensors.len() + 2);
        index
    }
}

impl GeneratedRecords for SafetensorsIndex {
    fn starts(&self) -> &[u64] {
        &self.starts
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
