//! `dcp/`: a directory of `torch.distributed.checkpoint`, complete for any listed devices: any process may read any part of it.

use std::sync::{Arc, OnceLock};

use ckfs_checkpoint::Container;
use ckfs_plan::{Plan, PlannedTensor, Problem, TensorKinds};

use super::{
    dcp_records::{self, DcpMetadata, OBJECTS, distcp, distcp_name},
    file_image::{FileImage, ImageError},
    hf::unchanged,
    input::FormatInput,
    output::{
        DerivedFrom, Directory, FileContent, FormatFiles, LazyFile, Omission, OmittedFormat, OutputFormat, VirtualFile,
        text_file,
    },
    safetensors_layout::NamedView,
    torch_archive::{self, common_pt},
};

/// The file by which Megatron-Core selects its reader for the directory.
const MEGATRON_METADATA: &str = "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, \
                                     \"common_backend\": \"torch\", \"common_backend_version\": 1}";

/// Most of the bytes that several devices may hold while a file still counts as read once: norms are whole on all of them.
const SHARED_PER_CENT: u128 = 2;

/// See the module's documentation.
pub(super) const DCP: OutputFormat = OutputFormat { name: "dcp", unavailable, layout };

/// The parts that the format cannot show, by the kinds of the plan's tensors.
fn lacking(plan: &Plan, kinds: impl FnOnce() -> Arc<TensorKinds>) -> Option<OmittedFormat> {
    let fits = torch_archive::fits(plan).and_then(|()| dcp_records::fits(plan, &kinds()));
    Some(OmittedFormat { format: DCP.name, omission: Omission::Empty, reason: fits.err()? })
}

fn unavailable(plan: &Plan) -> Option<OmittedFormat> {
    lacking(plan, || Arc::new(TensorKinds::new(plan)))
}

#[expect(clippy::unnecessary_wraps, reason = "other formats have problems")]
fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    if let Some(found) = lacking(&input.plan, || Arc::clone(input.kinds())) {
        return Ok((Directory::default(), Some(found)));
    }
    let input = Arc::clone(input);
    let files =
        Arc::new(DcpFiles { input: Arc::clone(&input), metadata: OnceLock::new(), one_reader: OnceLock::new() });
    let directory = Directory::with(DCP.name, |directory| {
        for device in files.input.plan.first_holders() {
            directory.file(&distcp_name(device), DistcpFile { files: Arc::clone(&files), device });
        }
        let mut objects = FileImage::default();
        files.input.objects(Container::Dcp).for_each(|(_, bytes)| objects.push_bytes(Arc::clone(bytes)));
        if objects.len_bytes() > 0 {
            let content = move || FileContent::Image(objects.clone());
            directory.file(OBJECTS, LazyFile::new(content, DerivedFrom::Tensors));
        }
        let metadata = move || FileContent::generated(Arc::<DcpMetadata>::clone(files.metadata()));
        directory.file(".metadata", LazyFile::new(metadata, DerivedFrom::Tensors));
        let companions = if input.is_whole() { &input.checkpoint.opened.contents.tree.companions[..] } else { &[] };
        for (name, file) in companions {
            directory.add(name, unchanged(&input, *file));
        }
        // Where the source has its own, these are there already.
        directory.file("metadata.json", text_file(MEGATRON_METADATA.as_bytes().into(), DerivedFrom::Tensors));
        directory.file("common.pt", text_file(common_pt(), DerivedFrom::Tensors));
    });
    Ok((directory, None))
}

/// The state that all files share: where each segment is.
struct DcpFiles {
    input: Arc<FormatInput>,
    one_reader: OnceLock<bool>,
    metadata: OnceLock<Arc<DcpMetadata>>,
}

impl DcpFiles {
    fn metadata(&self) -> &Arc<DcpMetadata> {
        let mut start = 0;
        let mut place = |(name, bytes): (&String, &Arc<[u8]>)| {
            let len = bytes.len() as u64;
            start += len;
            (name.clone(), start - len, len)
        };
        let objects = self.input.objects(Container::Dcp).map(&mut place).collect();
        let new = || DcpMetadata::new(Arc::clone(&self.input.plan), Arc::clone(self.input.kinds()), objects);
        self.metadata.get_or_init(|| Arc::new(new()))
    }

    /// Whether each item has one reader, except for [`SHARED_PER_CENT`]: devices that hold copies read the same items, and nothing
    /// says how many programs read those of a mesh of one device. Several readers past the page cache would each have ckfs make
    /// what is converted.
    fn have_one_reader(&self) -> bool {
        *self.one_reader.get_or_init(|| {
            let plan = &self.input.plan;
            let devices = plan.mesh.devices();
            let is_shared = |tensor: &&PlannedTensor| plan.holder_count(tensor) < devices;
            let bytes = |tensor: &PlannedTensor| u128::from(tensor.bytes());
            let shared: u128 = plan.bundle().filter(is_shared).map(bytes).sum();
            devices > 1 && shared * 100 <= plan.bundle().map(bytes).sum::<u128>() * SHARED_PER_CENT
        })
    }
}

/// The chunks of which a device is the first holder.
struct DistcpFile {
    files: Arc<DcpFiles>,
    device: u64,
}

impl VirtualFile for DistcpFile {
    fn len_bytes(&self) -> u64 {
        self.files.metadata().file_bytes(self.device)
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        let plan = &self.files.input.plan;
        let chunks = plan.bundle().filter_map(|tensor| {
            let region = plan.own_region(tensor, self.device)?;
            let view = tensor.view.region(&region).expect("a region of the view's own shape");
            Some(NamedView { name: tensor.name.as_str(), view })
        });
        distcp(chunks).map(FileContent::Image)
    }

    fn is_read_by_items(&self) -> bool {
        true
    }

    fn is_read_once(&self) -> bool {
        self.files.have_one_reader()
    }
}
