//! The files of one view: where they are in the tree, how long they are, what is in them.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::UNIX_EPOCH,
};

use serde_json::json;

use super::{
    arrays::{self, ArrayNode, ArrayTable},
    bundle::{self, Bundles, SafetensorsIndex, borrowed},
    dcp_rows::{self, DcpMetadata},
    manifest::{self, Manifest},
    name_tree::NameTree,
    tree::{Flavor, Names},
    unavailable::{self, Unavailable},
};
use crate::{
    checkpoint::Checkpoint,
    image::{self, Entry, FileImage, ImageError, OrbaxPlace, OrbaxTree, RowFile, SafetensorsLength},
    plan::{HfContent, Kinds, Plan, PlannedTensor, Problem, Spec},
    source::FileId,
    tensor::{Region, View},
};

/// Longest value of an extended attribute that the kernel passes, in bytes.
const XATTR_BYTES_MAX: usize = 60_000;

/// A file that is made whole, as opposed to one per tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Made {
    /// `safetensors/dev{d}.safetensors`.
    Safetensors {
        /// The device.
        device: u64,
    },
    /// `sharded_state/model-rank-{r}-part-0.safetensors`.
    ShardedState {
        /// A device of that rank.
        device: u64,
    },
    /// `safetensors/model.safetensors.index.json`.
    SafetensorsIndex,
    /// `pt/dev{d}.pt`.
    Pt {
        /// The device.
        device: u64,
    },
    /// `dcp/__{d}_0.distcp`.
    Distcp {
        /// The device.
        device: u64,
    },
    /// `dcp/.metadata`.
    DcpMetadata,
    /// `dcp/metadata.json`.
    MegatronMetadata,
    /// `dcp/common.pt`.
    MegatronCommon,
    /// `orbax/0/_CHECKPOINT_METADATA`.
    OrbaxStep,
    /// File of this number of `hf/`.
    Hf(usize),
    /// `.ckfs/manifest.json`.
    Manifest,
}

/// What is in a file.
#[derive(Debug)]
pub(super) enum Content {
    /// A source file as it is.
    Original(FileId),
    /// Literal bytes.
    Bytes(Arc<[u8]>),
    /// Rows that are generated as they are read.
    Rows(Arc<RowFile>),
    /// Tensors.
    Image(FileImage),
}

impl Content {
    fn text(text: String) -> Self {
        Self::Bytes(text.into_bytes().into())
    }
}

/// One view of the checkpoint, as files.
#[derive(Debug)]
pub(super) struct ViewFiles {
    pub(super) plan: Arc<Plan>,
    names: NameTree,
    npy: NameTree,
    arrays: Result<Arc<ArrayTable>, String>,
    /// Why there are no files of torch, if there are none.
    torch: Result<(), String>,
    /// Why there is no directory of `torch.distributed.checkpoint`, if there is none.
    dcp: Result<(), String>,
    /// Why the files of safetensors are not all of the tensors, if they are not.
    safetensors: Result<(), String>,
    checkpoint: Arc<Checkpoint>,
    kinds: Arc<Kinds>,
    bundles: Bundles,
    /// By kind, the device whose file has tensors whole, if each is whole in some file.
    whole_on: Option<BTreeMap<usize, u64>>,
    dcp_metadata: OnceLock<(Arc<DcpMetadata>, Arc<RowFile>)>,
    orbax_tree: OnceLock<Arc<RowFile>>,
    index: OnceLock<Arc<RowFile>>,
    manifest: OnceLock<Arc<RowFile>>,
    hf_len: Vec<u64>,
}

impl ViewFiles {
    /// The files of a plan.
    ///
    /// # Errors
    /// Names that cannot be laid out as a tree.
    pub(super) fn new(checkpoint: Arc<Checkpoint>, plan: Arc<Plan>) -> Result<Self, Vec<Problem>> {
        let ((names, npy), arrays) = rayon::join(
            || {
                let bundled = |tensor: &PlannedTensor| plan.is_bundled(tensor);
                rayon::join(|| NameTree::new(&plan, "", |_| true), || NameTree::new(&plan, ".npy", bundled))
            },
            || ArrayTable::new(&plan),
        );
        let (names, npy) = (names?, npy?);
        let kinds = Arc::new(Kinds::new(&plan));
        let bundles = Bundles::new(Arc::clone(&plan), Arc::clone(&kinds));
        let mut problems = Vec::new();
        if let Err(error) = bundles.check() {
            problems.push(Problem::File { file: "safetensors".to_owned(), reason: error.to_string() });
        }
        let hf_len = plan.hf.iter().map(|file| {
            Self::hf_len(&checkpoint, &file.content).unwrap_or_else(|error| {
                problems.push(Problem::Hf { path: file.path.clone(), reason: error.to_string() });
                0
            })
        });
        let hf_len = hf_len.collect();
        if !problems.is_empty() {
            return Err(problems);
        }
        let torch = unavailable::torch(&plan);
        Ok(Self {
            names,
            npy,
            arrays: arrays.map(Arc::new),
            dcp: torch.clone().and_then(|()| dcp_rows::fits(&plan, &kinds)),
            torch,
            safetensors: unavailable::safetensors(&plan),
            checkpoint,
            whole_on: bundles.whole_on(),
            bundles,
            kinds,
            dcp_metadata: OnceLock::new(),
            orbax_tree: OnceLock::new(),
            index: OnceLock::new(),
            manifest: OnceLock::new(),
            hf_len,
            plan,
        })
    }

    /// Length of a file of `hf/`.
    fn hf_len(checkpoint: &Checkpoint, content: &HfContent) -> Result<u64, ImageError> {
        match content {
            HfContent::Original(file) => Ok(checkpoint.source().len_bytes(*file)),
            HfContent::Text(text) => Ok(text.len() as u64),
            HfContent::Weights { tensors, metadata } => {
                SafetensorsLength::new(&Self::hf_entries(tensors), &borrowed(metadata))?.file_bytes()
            }
        }
    }

    /// The names that a directory of tensors shows.
    pub(super) fn tree(&self, flavor: Flavor) -> &NameTree {
        match flavor {
            Flavor::Raw => &self.names,
            Flavor::Npy => &self.npy,
        }
    }

    /// The arrays of the Orbax checkpoint, or why there is none.
    pub(super) fn arrays(&self) -> Result<&Arc<ArrayTable>, &str> {
        self.arrays.as_ref().map_err(String::as_str)
    }

    /// Why there are no files of torch, if there are none.
    pub(super) fn torch(&self) -> Result<(), &str> {
        self.torch.as_ref().copied().map_err(String::as_str)
    }

    /// Why there is no directory of `torch.distributed.checkpoint`, if there is none.
    pub(super) fn dcp(&self) -> Result<(), &str> {
        self.dcp.as_ref().copied().map_err(String::as_str)
    }

    /// What the view does not have, and why.
    pub(super) fn unavailable(&self) -> Vec<Unavailable> {
        let orbax = self.arrays.as_ref().err().cloned();
        let (safetensors, torch, dcp) = (&self.safetensors, &self.torch, &self.dcp);
        let reason = |found: &Result<(), String>| found.clone().err();
        unavailable::collect(&self.plan, reason(safetensors), reason(torch), reason(dcp), orbax)
    }

    /// The region of a tensor that `device` holds; all of it without a device.
    fn region(&self, tensor: &PlannedTensor, device: Option<u64>) -> Region {
        device.map_or_else(|| tensor.view.shape().whole(), |device| self.plan.region(tensor, device))
    }

    /// The shard of a tensor on `device`, or the whole tensor.
    pub(super) fn shard(&self, tensor: u32, device: Option<u64>) -> View {
        let tensor = &self.plan.tensors[tensor as usize];
        match device {
            None => tensor.view.clone(),
            Some(device) => bundle::shard(&self.plan, tensor, device),
        }
    }

    /// Bytes of a tensor's own file.
    pub(super) fn tensor_len(&self, tensor: u32, names: Names) -> u64 {
        let tensor = &self.plan.tensors[tensor as usize];
        let (dtype, region) = (tensor.view.dtype(), self.region(tensor, names.device));
        match names.flavor {
            Flavor::Raw => dtype.bytes_of(region.shape().elements()).expect("a plan's shards are whole bytes"),
            Flavor::Npy => image::npy_len(dtype, region.shape()),
        }
    }

    /// A tensor's own file.
    pub(super) fn tensor(&self, tensor: u32, names: Names) -> Result<FileImage, ImageError> {
        let name = &self.plan.tensors[tensor as usize].name;
        let shard = self.shard(tensor, names.device);
        match names.flavor {
            Flavor::Raw => image::raw(name, shard),
            Flavor::Npy => image::npy(name, shard),
        }
    }

    /// Length of a file among the arrays; 0 for directories.
    pub(super) fn array_len(&self, table: &Arc<ArrayTable>, node: ArrayNode) -> u64 {
        let tensor = |array| &self.plan.tensors[table.tensor(array) as usize];
        match node {
            ArrayNode::Root | ArrayNode::Directory(_) => 0,
            ArrayNode::Metadata(0) => self.orbax_checkpoint(OrbaxPlace::Item).len() as u64,
            ArrayNode::Metadata(_) => self.orbax_tree(table).len_bytes(),
            ArrayNode::Description(array) => {
                let text = arrays::grid(&self.plan, tensor(array)).zarray(&tensor(array).name);
                text.expect("a table has arrays of types that the format holds").len() as u64
            }
            ArrayNode::Chunk(array, _) => arrays::grid(&self.plan, tensor(array)).chunk_bytes(),
        }
    }

    /// Contents of a file among the arrays; nothing for directories.
    pub(super) fn array(&self, table: &Arc<ArrayTable>, node: ArrayNode) -> Result<Option<Content>, ImageError> {
        let tensor = |array| &self.plan.tensors[table.tensor(array) as usize];
        Ok(Some(match node {
            ArrayNode::Root | ArrayNode::Directory(_) => return Ok(None),
            ArrayNode::Metadata(0) => Content::text(self.orbax_checkpoint(OrbaxPlace::Item)),
            ArrayNode::Metadata(_) => Content::Rows(Arc::clone(self.orbax_tree(table))),
            ArrayNode::Description(array) => {
                Content::text(arrays::grid(&self.plan, tensor(array)).zarray(&tensor(array).name)?)
            }
            ArrayNode::Chunk(array, chunk) => {
                let tensor = tensor(array);
                let grid = arrays::grid(&self.plan, tensor);
                Content::Image(grid.chunk_image(&tensor.name, &tensor.view, chunk)?)
            }
        }))
    }

    fn orbax_tree(&self, table: &Arc<ArrayTable>) -> &Arc<RowFile> {
        self.orbax_tree.get_or_init(|| {
            let (arrays, table) = (table.arrays(), Arc::clone(table));
            Arc::new(RowFile::new(OrbaxTree::new(arrays, move |array| table.name(array).to_owned())))
        })
    }

    /// A `_CHECKPOINT_METADATA`; the checkpoint was made when the newest source file was.
    fn orbax_checkpoint(&self, place: OrbaxPlace) -> String {
        let source = self.checkpoint.source();
        let newest = file_ids(&self.checkpoint).map(|file| source.pin(file).modified).max().unwrap_or(UNIX_EPOCH);
        // Files from before 1970 and from after 2554 are said to be of 1970.
        let since = newest.duration_since(UNIX_EPOCH).unwrap_or_default();
        let nanoseconds = u64::try_from(since.as_nanos()).unwrap_or(0);
        image::orbax_checkpoint(place, self.plan.is_scanned(), nanoseconds)
    }

    /// Names of the extended attributes of raw files.
    pub(super) const XATTRS: [&'static str; 6] = [
        "user.ckfs.dtype",
        "user.ckfs.shape",
        "user.ckfs.global_shape",
        "user.ckfs.offset",
        "user.ckfs.spec",
        "user.ckfs.sources",
    ];

    /// An extended attribute of a tensor's raw file.
    pub(super) fn xattr(&self, tensor: u32, device: Option<u64>, name: &[u8]) -> Option<Vec<u8>> {
        let tensor = &self.plan.tensors[tensor as usize];
        let region = self.region(tensor, device);
        let shape = tensor.view.shape();
        let value = match Self::XATTRS.iter().position(|known| known.as_bytes() == name)? {
            0 => tensor.view.dtype().code().to_owned(),
            1 => json!(region.shape().extents()).to_string(),
            2 => json!(shape.extents()).to_string(),
            3 => json!(region.origin()).to_string(),
            4 => {
                let whole = Spec::replicated();
                let spec = if device.is_some() { self.plan.spec(tensor) } else { &whole };
                spec.to_json(shape.rank(), &self.plan.mesh).to_string()
            }
            _ => {
                let sources = manifest::source_names(&self.checkpoint, tensor);
                let all = json!(sources).to_string();
                if all.len() <= XATTR_BYTES_MAX {
                    all
                } else {
                    json!({"count": sources.len(), "first": sources.first(), "last": sources.last()}).to_string()
                }
            }
        };
        Some(value.into_bytes())
    }

    /// Whether an index of the devices' files would be true: each tensor is whole in some file. An index has no words for
    /// parts of tensors, and one that named a shard would have it taken for the tensor.
    pub(super) fn has_safetensors_index(&self) -> bool {
        self.whole_on.is_some()
    }

    fn safetensors_index(&self) -> &Arc<RowFile> {
        self.index.get_or_init(|| {
            let whole_on =
                self.whole_on.as_ref().expect("there is an index only where each tensor is whole in some file");
            let index = SafetensorsIndex::new(Arc::clone(&self.plan), &self.kinds, whole_on);
            Arc::new(RowFile::new(index))
        })
    }

    fn manifest(&self) -> &Arc<RowFile> {
        self.manifest.get_or_init(|| {
            let (checkpoint, plan) = (Arc::clone(&self.checkpoint), Arc::clone(&self.plan));
            Arc::new(RowFile::new(Manifest::new(checkpoint, plan, Arc::clone(&self.kinds))))
        })
    }

    fn dcp_metadata(&self) -> &(Arc<DcpMetadata>, Arc<RowFile>) {
        self.dcp_metadata.get_or_init(|| {
            let metadata = Arc::new(DcpMetadata::new(Arc::clone(&self.plan), Arc::clone(&self.kinds)));
            let file = Arc::new(RowFile::new(Arc::clone(&metadata)));
            (metadata, file)
        })
    }

    /// The chunks that `device` is the first to hold, in order.
    fn distcp_entries(&self, device: u64) -> impl Iterator<Item = Entry<'_>> {
        self.plan.bundle().filter_map(move |tensor| {
            let region = self.plan.own_region(tensor, device)?;
            let view = tensor.view.region(&region).expect("a region of the view's own shape");
            Some(Entry { name: tensor.name.as_str(), view })
        })
    }

    fn hf_entries(tensors: &[(String, View)]) -> Vec<Entry<'_>> {
        tensors.iter().map(|(name, view)| Entry { name, view: view.clone() }).collect()
    }

    /// Length of a made file.
    pub(super) fn made_len(&self, made: Made) -> u64 {
        match made {
            Made::Safetensors { device } => self.bundles.safetensors_len(device),
            Made::ShardedState { device } => self.bundles.sharded_state_len(device),
            Made::SafetensorsIndex => self.safetensors_index().len_bytes(),
            Made::Pt { device } => self.bundles.pt_len(device),
            Made::Distcp { device } => self.dcp_metadata().0.file_bytes(device),
            Made::DcpMetadata => self.dcp_metadata().1.len_bytes(),
            Made::MegatronMetadata => image::MEGATRON_METADATA.len() as u64,
            Made::MegatronCommon => image::common_pt().len() as u64,
            Made::OrbaxStep => self.orbax_checkpoint(ORBAX_STEP).len() as u64,
            Made::Hf(index) => self.hf_len[index],
            Made::Manifest => self.manifest().len_bytes(),
        }
    }

    /// Contents of a made file.
    ///
    /// # Errors
    /// [`ImageError`], which planning has excluded.
    pub(super) fn made(&self, made: Made) -> Result<Content, ImageError> {
        match made {
            Made::Safetensors { device } => self.bundles.safetensors(device).map(Content::Image),
            Made::ShardedState { device } => self.bundles.sharded_state(device).map(Content::Image),
            Made::SafetensorsIndex => Ok(Content::Rows(Arc::clone(self.safetensors_index()))),
            Made::Pt { device } => self.bundles.pt(device).map(Content::Image),
            Made::Distcp { device } => image::distcp(self.distcp_entries(device)).map(Content::Image),
            Made::DcpMetadata => Ok(Content::Rows(Arc::clone(&self.dcp_metadata().1))),
            Made::MegatronMetadata => Ok(Content::text(image::MEGATRON_METADATA.to_owned())),
            Made::MegatronCommon => Ok(Content::Bytes(image::common_pt().into())),
            Made::OrbaxStep => Ok(Content::text(self.orbax_checkpoint(ORBAX_STEP))),
            Made::Hf(index) => match &self.plan.hf[index].content {
                HfContent::Original(file) => Ok(Content::Original(*file)),
                HfContent::Text(text) => Ok(Content::Bytes(text.as_slice().into())),
                HfContent::Weights { tensors, metadata } => {
                    image::safetensors(Self::hf_entries(tensors), &borrowed(metadata)).map(Content::Image)
                }
            },
            Made::Manifest => Ok(Content::Rows(Arc::clone(self.manifest()))),
        }
    }
}

/// All files of the source.
pub(super) fn file_ids(checkpoint: &Checkpoint) -> impl Iterator<Item = FileId> {
    (0..checkpoint.source().file_count())
        .map(|file| FileId(u32::try_from(file).expect("a checkpoint has fewer than 2^32 files")))
}

/// The only item of a step of the Orbax checkpoint.
pub(super) const ORBAX_ITEM: &str = "items";

const ORBAX_STEP: OrbaxPlace = OrbaxPlace::Step { item: ORBAX_ITEM };
