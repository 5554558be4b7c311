//! The files of one view: where they are in the tree, how long they are, what is in them.

use std::{
    io::{self, Write},
    sync::{Arc, OnceLock},
    time::UNIX_EPOCH,
};

use serde_json::json;

use super::{
    arrays::{self, ArrayNode, ArrayTable},
    manifest,
    name_tree::NameTree,
    tree::{Flavor, Names},
    unavailable::{self, Unavailable},
};
use crate::{
    checkpoint::Checkpoint,
    image::{self, Chunked, Entry, FileImage, ImageError, OrbaxPlace, Segments},
    plan::{HfContent, Plan, PlannedTensor, Problem, Spec},
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

impl Made {
    /// Whether it is literal bytes, as many as there are tensors or more.
    pub(super) fn is_long(self) -> bool {
        matches!(self, Self::DcpMetadata | Self::Manifest)
    }
}

/// What is in a file.
#[derive(Debug)]
pub(super) enum Content {
    /// A source file as it is.
    Original(FileId),
    /// Literal bytes.
    Bytes(Arc<[u8]>),
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
    arrays: Result<ArrayTable, String>,
    /// Why there are no files of torch, if there are none.
    torch: Result<(), String>,
    /// Why the files of safetensors are not all of the tensors, if they are not.
    safetensors: Result<(), String>,
    checkpoint: Arc<Checkpoint>,
    safetensors_len: Vec<OnceLock<u64>>,
    sharded_state_len: Vec<OnceLock<u64>>,
    pt_len: Vec<OnceLock<u64>>,
    distcp_len: Vec<OnceLock<u64>>,
    dcp_metadata_len: OnceLock<u64>,
    orbax_tree_len: OnceLock<u64>,
    index: OnceLock<Arc<[u8]>>,
    hf_len: Vec<OnceLock<u64>>,
    manifest_len: OnceLock<u64>,
}

/// Counts bytes and drops them.
#[derive(Default)]
struct Length(u64);

impl Write for Length {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
        let slots = |count: usize| (0..count).map(|_| OnceLock::new()).collect();
        Ok(Self {
            names,
            npy,
            arrays,
            torch: unavailable::torch(&plan),
            safetensors: unavailable::safetensors(&plan),
            checkpoint,
            safetensors_len: slots(plan.devices.len()),
            sharded_state_len: slots(plan.devices.len()),
            pt_len: slots(plan.devices.len()),
            distcp_len: slots(usize::try_from(plan.mesh.devices()).unwrap_or(0)),
            dcp_metadata_len: OnceLock::new(),
            orbax_tree_len: OnceLock::new(),
            index: OnceLock::new(),
            hf_len: slots(plan.hf.len()),
            manifest_len: OnceLock::new(),
            plan,
        })
    }

    /// The names that a directory of tensors shows.
    pub(super) fn tree(&self, flavor: Flavor) -> &NameTree {
        match flavor {
            Flavor::Raw => &self.names,
            Flavor::Npy => &self.npy,
        }
    }

    /// The arrays of the Orbax checkpoint, or why there is none.
    pub(super) fn arrays(&self) -> Result<&ArrayTable, &str> {
        self.arrays.as_ref().map_err(String::as_str)
    }

    /// Why there are no files of torch, if there are none.
    pub(super) fn torch(&self) -> Result<(), &str> {
        self.torch.as_ref().copied().map_err(String::as_str)
    }

    /// What the view does not have, and why.
    pub(super) fn unavailable(&self) -> Vec<Unavailable> {
        let orbax = self.arrays.as_ref().err().cloned();
        unavailable::collect(&self.plan, self.safetensors.clone().err(), self.torch.clone().err(), orbax)
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
            // The region was taken from the view's own shape.
            Some(device) => {
                tensor.view.region(&self.plan.region(tensor, device)).unwrap_or_else(|_| tensor.view.clone())
            }
        }
    }

    /// Bytes of a tensor's own file.
    pub(super) fn tensor_len(&self, tensor: u32, names: Names) -> u64 {
        let tensor = &self.plan.tensors[tensor as usize];
        let (dtype, region) = (tensor.view.dtype(), self.region(tensor, names.device));
        match names.flavor {
            Flavor::Raw => dtype.bytes_of(region.shape().elements()).unwrap_or(0),
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
    pub(super) fn array_len(&self, table: &ArrayTable, node: ArrayNode) -> u64 {
        let tensor = |array| &self.plan.tensors[table.tensor(array) as usize];
        match node {
            ArrayNode::Root | ArrayNode::Directory(_) => 0,
            ArrayNode::Metadata(0) => self.orbax_checkpoint(OrbaxPlace::Item).len() as u64,
            ArrayNode::Metadata(_) => *self.orbax_tree_len.get_or_init(|| {
                let mut length = Length::default();
                // Counting cannot fail.
                let _ = image::orbax_tree(table.keys(), &mut length);
                length.0
            }),
            ArrayNode::Description(array) => {
                let text = arrays::grid(&self.plan, tensor(array)).zarray(&tensor(array).name);
                text.map_or(0, |text| text.len() as u64)
            }
            ArrayNode::Chunk(array, _) => arrays::grid(&self.plan, tensor(array)).chunk_bytes(),
        }
    }

    /// Contents of a file among the arrays; nothing for directories.
    pub(super) fn array(&self, table: &ArrayTable, node: ArrayNode) -> Result<Option<Content>, ImageError> {
        let tensor = |array| &self.plan.tensors[table.tensor(array) as usize];
        Ok(Some(match node {
            ArrayNode::Root | ArrayNode::Directory(_) => return Ok(None),
            ArrayNode::Metadata(0) => Content::text(self.orbax_checkpoint(OrbaxPlace::Item)),
            ArrayNode::Metadata(_) => {
                let mut text = Vec::new();
                let _ = image::orbax_tree(table.keys(), &mut text);
                Content::Bytes(text.into())
            }
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

    /// A `_CHECKPOINT_METADATA`; the checkpoint was made when the newest source file was.
    fn orbax_checkpoint(&self, place: OrbaxPlace) -> String {
        let source = self.checkpoint.source();
        let files =
            (0..source.file_count()).filter_map(|file| Some(source.modified(FileId(u32::try_from(file).ok()?))));
        let newest = files.max().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let nanoseconds = newest.and_then(|time| u64::try_from(time.as_nanos()).ok()).unwrap_or(0);
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

    fn safetensors_entries(&self, device: u64) -> Vec<Entry<'_>> {
        let shard = |tensor: &PlannedTensor| {
            let region = self.plan.region(tensor, device);
            tensor.view.region(&region).unwrap_or_else(|_| tensor.view.clone())
        };
        let mut entries: Vec<_> =
            self.plan.bundle().map(|tensor| Entry { name: tensor.name.as_str(), view: shard(tensor) }).collect();
        // Widest first keeps every tensor aligned to its element; names keep their order within a width.
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.view.dtype().bits()));
        entries
    }

    /// Metadata of a device's file: what transformers demands, and where the shards are in their tensors. Where the files do
    /// not have all of these, a reader of the places would fill what there is and leave the rest as it was: without them it
    /// finds tensors of other shapes, and refuses.
    fn safetensors_metadata(&self, device: u64) -> Vec<(&'static str, String)> {
        if self.safetensors.is_err() {
            return FORMAT_PT.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
        }
        let shards = self
            .plan
            .bundle()
            .map(|tensor| (tensor.name.as_str(), tensor.view.shape().extents(), self.plan.region(tensor, device)));
        let format = FORMAT_PT.iter().map(|(key, value)| (*key, (*value).to_owned()));
        format.chain(image::sharding_metadata(shards)).collect()
    }

    /// The first listed device that holds all of a tensor.
    fn whole_on(&self, tensor: &PlannedTensor) -> Option<u64> {
        let whole = tensor.view.shape().whole();
        self.plan.devices.iter().copied().find(|device| self.plan.region(tensor, *device) == whole)
    }

    /// Whether an index of the devices' files would be true: each tensor is whole in some file. An index has no words for
    /// parts of tensors, and one that named a shard would have it taken for the tensor.
    pub(super) fn has_safetensors_index(&self) -> bool {
        self.plan.bundle().all(|tensor| self.whole_on(tensor).is_some())
    }

    fn safetensors_index(&self) -> &Arc<[u8]> {
        self.index.get_or_init(|| {
            let mut files = serde_json::Map::new();
            let mut total_bytes = 0;
            for tensor in self.plan.bundle() {
                let Some(device) = self.whole_on(tensor) else { continue };
                files.insert(tensor.name.clone(), format!("dev{device}.safetensors").into());
                total_bytes += tensor.view.bytes().unwrap_or(0);
            }
            json!({"metadata": {"total_size": total_bytes}, "weight_map": files}).to_string().into_bytes().into()
        })
    }

    /// The chunks that `device` is the first to hold, in order.
    fn distcp_entries(&self, device: u64) -> impl Iterator<Item = Entry<'_>> {
        self.plan.bundle().filter_map(move |tensor| {
            let region = self.plan.own_region(tensor, device)?;
            let view = tensor.view.region(&region).unwrap_or_else(|_| tensor.view.clone());
            Some(Entry { name: tensor.name.as_str(), view })
        })
    }

    fn dcp_tensors(&self) -> impl Iterator<Item = Chunked<'_>> + Clone {
        self.plan.bundle().map(|tensor| Chunked {
            name: &tensor.name,
            dtype: tensor.view.dtype(),
            shape: tensor.view.shape(),
            chunks: self.plan.distinct_regions(tensor),
        })
    }

    fn hf_entries(tensors: &[(String, View)]) -> Vec<Entry<'_>> {
        tensors.iter().map(|(name, view)| Entry { name, view: view.clone() }).collect()
    }

    /// Length of a made file.
    pub(super) fn made_len(&self, made: Made) -> u64 {
        let slot = |device| self.plan.devices.binary_search(&device).ok();
        match made {
            Made::Safetensors { device } => {
                let len = || {
                    let metadata = self.safetensors_metadata(device);
                    image::safetensors_len(&self.safetensors_entries(device), &borrowed(&metadata)).unwrap_or(0)
                };
                slot(device).map_or(0, |slot| *self.safetensors_len[slot].get_or_init(len))
            }
            Made::ShardedState { device } => {
                let len = || image::safetensors_len(&self.safetensors_entries(device), FORMAT_PT).unwrap_or(0);
                slot(device).map_or(0, |slot| *self.sharded_state_len[slot].get_or_init(len))
            }
            Made::SafetensorsIndex => self.safetensors_index().len() as u64,
            Made::Pt { device } => {
                let len = || image::pt_len(&self.safetensors_entries(device));
                slot(device).map_or(0, |slot| *self.pt_len[slot].get_or_init(len))
            }
            Made::Distcp { device } => {
                let len = || {
                    let mut segments = Segments::new(1);
                    for tensor in self.plan.bundle() {
                        if let Some(region) = self.plan.own_region(tensor, device) {
                            segments.add(0, tensor.view.dtype(), region.shape());
                        }
                    }
                    segments.len_bytes(0)
                };
                let slot = usize::try_from(device).ok().and_then(|slot| self.distcp_len.get(slot));
                slot.map_or(0, |slot| *slot.get_or_init(len))
            }
            Made::DcpMetadata => {
                let len = || image::dcp_metadata_len(self.dcp_tensors(), self.plan.mesh.devices());
                *self.dcp_metadata_len.get_or_init(len)
            }
            Made::MegatronMetadata => image::MEGATRON_METADATA.len() as u64,
            Made::MegatronCommon => image::common_pt().len() as u64,
            Made::OrbaxStep => self.orbax_checkpoint(ORBAX_STEP).len() as u64,
            Made::Hf(index) => match &self.plan.hf[index].content {
                HfContent::Original(file) => self.checkpoint.source().len_bytes(*file),
                HfContent::Text(text) => text.len() as u64,
                HfContent::Weights { tensors, metadata } => *self.hf_len[index].get_or_init(|| {
                    image::safetensors_len(&Self::hf_entries(tensors), &borrowed(metadata)).unwrap_or(0)
                }),
            },
            Made::Manifest => *self.manifest_len.get_or_init(|| {
                let mut length = Length::default();
                // Counting cannot fail.
                let _ = manifest::write(&self.checkpoint, &self.plan, &mut length);
                length.0
            }),
        }
    }

    /// Contents of a made file.
    ///
    /// # Errors
    /// [`ImageError`], which planning has excluded.
    pub(super) fn made(&self, made: Made) -> Result<Content, ImageError> {
        match made {
            Made::Safetensors { device } => {
                let metadata = self.safetensors_metadata(device);
                image::safetensors(self.safetensors_entries(device), &borrowed(&metadata)).map(Content::Image)
            }
            Made::ShardedState { device } => {
                image::safetensors(self.safetensors_entries(device), FORMAT_PT).map(Content::Image)
            }
            Made::SafetensorsIndex => Ok(Content::Bytes(Arc::clone(self.safetensors_index()))),
            Made::Pt { device } => image::pt(&self.safetensors_entries(device)).map(Content::Image),
            Made::Distcp { device } => image::distcp(self.distcp_entries(device)).map(Content::Image),
            Made::DcpMetadata => {
                let mut bytes = Vec::new();
                let _ = image::dcp_metadata(self.dcp_tensors(), self.plan.mesh.devices(), &mut bytes);
                Ok(Content::Bytes(bytes.into()))
            }
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
            Made::Manifest => {
                let mut text = Vec::new();
                let _ = manifest::write(&self.checkpoint, &self.plan, &mut text);
                Ok(Content::Bytes(text.into()))
            }
        }
    }
}

/// Metadata that transformers demands of every file.
const FORMAT_PT: &[(&str, &str)] = &[("format", "pt")];

/// The only item of a step of the Orbax checkpoint.
pub(super) const ORBAX_ITEM: &str = "items";

const ORBAX_STEP: OrbaxPlace = OrbaxPlace::Step { item: ORBAX_ITEM };

fn borrowed<K: AsRef<str>>(metadata: &[(K, String)]) -> Vec<(&str, &str)> {
    metadata.iter().map(|(key, value)| (key.as_ref(), value.as_str())).collect()
}
