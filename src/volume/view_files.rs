//! The files of one view: where they are in the tree, how long they are, what is in them.

use std::{
    io::{self, Write},
    sync::{Arc, OnceLock},
};

use serde_json::json;

use super::{manifest, name_tree::NameTree};
use crate::{
    checkpoint::Checkpoint,
    image::{self, Entry, FileImage, ImageError},
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
    /// Tensors.
    Image(FileImage),
}

/// One view of the checkpoint, as files.
#[derive(Debug)]
pub(super) struct ViewFiles {
    pub(super) plan: Arc<Plan>,
    pub(super) names: NameTree,
    checkpoint: Arc<Checkpoint>,
    safetensors_len: Vec<OnceLock<u64>>,
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
        let names = NameTree::new(&plan)?;
        let safetensors_len = plan.devices.iter().map(|_| OnceLock::new()).collect();
        let hf_len = plan.hf.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { plan, names, checkpoint, safetensors_len, hf_len, manifest_len: OnceLock::new() })
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

    /// Bytes of a tensor's raw file.
    pub(super) fn raw_len(&self, tensor: u32, device: Option<u64>) -> u64 {
        let tensor = &self.plan.tensors[tensor as usize];
        let elements = self.region(tensor, device).shape().elements();
        tensor.view.dtype().bytes_of(elements).unwrap_or(0)
    }

    /// The raw file of a tensor.
    pub(super) fn raw(&self, tensor: u32, device: Option<u64>) -> Result<FileImage, ImageError> {
        image::raw(&self.plan.tensors[tensor as usize].name, self.shard(tensor, device))
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

    fn hf_entries<'a>(&'a self, tensors: &'a [(crate::tensor::TensorId, View)]) -> Vec<Entry<'a>> {
        let name = |id| self.checkpoint.tensor(id).name;
        tensors.iter().map(|(id, view)| Entry { name: name(*id), view: view.clone() }).collect()
    }

    /// Length of a made file.
    pub(super) fn made_len(&self, made: Made) -> u64 {
        match made {
            Made::Safetensors { device } => {
                let slot = self.plan.devices.iter().position(|listed| *listed == device);
                let len = || image::safetensors_len(&self.safetensors_entries(device), FORMAT_PT).unwrap_or(0);
                slot.map_or(0, |slot| *self.safetensors_len[slot].get_or_init(len))
            }
            Made::Hf(index) => match &self.plan.hf[index].content {
                HfContent::Original(file) => self.checkpoint.source().len_bytes(*file),
                HfContent::Text(text) => text.len() as u64,
                HfContent::Weights { tensors, metadata } => *self.hf_len[index].get_or_init(|| {
                    image::safetensors_len(&self.hf_entries(tensors), &borrowed(metadata)).unwrap_or(0)
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
                image::safetensors(self.safetensors_entries(device), FORMAT_PT).map(Content::Image)
            }
            Made::Hf(index) => match &self.plan.hf[index].content {
                HfContent::Original(file) => Ok(Content::Original(*file)),
                HfContent::Text(text) => Ok(Content::Bytes(text.as_slice().into())),
                HfContent::Weights { tensors, metadata } => {
                    image::safetensors(self.hf_entries(tensors), &borrowed(metadata)).map(Content::Image)
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

fn borrowed(metadata: &[(String, String)]) -> Vec<(&str, &str)> {
    metadata.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
}
