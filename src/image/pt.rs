//! `pt/`: all shards of a device as one `.pt` archive, a dictionary by name.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use ckfs_plan::{Plan, Problem};
use parking_lot::Mutex;

use super::{
    file_image::{FileImage, ImageError},
    input::FormatInput,
    output::{Directory, FileContent, FormatFiles, Omission, OmittedFormat, OutputFormat, VirtualFile},
    safetensors_layout::NamedView,
    torch_archive::{self, Root, archive_len, push_archive},
};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Pt;

impl OutputFormat for Pt {
    fn name(&self) -> &'static str {
        "pt"
    }

    fn unavailable(&self, plan: &Plan) -> Option<OmittedFormat> {
        let reason = torch_archive::fits(plan).err()?;
        Some(OmittedFormat { format: self.name(), omission: Omission::Empty, reason })
    }

    fn layout(&self, input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
        if let Some(found) = self.unavailable(&input.plan) {
            return Ok(found.into());
        }
        let lengths = Arc::new(PtLengths::default());
        let directory = Directory::with(self.name(), |directory| {
            for device in &input.plan.devices {
                let (input, lengths) = (Arc::clone(input), Arc::clone(&lengths));
                directory.file(&format!("dev{device}.pt"), PtFile { input, lengths, device: *device });
            }
        });
        Ok(directory.into())
    }
}

/// Lengths of files, by the first device of those whose shards have the same shapes; each is counted at the first request.
type PtLengths = Mutex<HashMap<u64, Arc<OnceLock<u64>>>>;

/// The shards of a device.
struct PtFile {
    input: Arc<FormatInput>,
    lengths: Arc<PtLengths>,
    device: u64,
}

/// Length of the file that [`lay_out`] produces.
fn len_bytes(entries: &[NamedView<'_>]) -> u64 {
    let names: Vec<_> = entries.iter().map(|entry| entry.name).collect();
    let tensors: Vec<_> = entries.iter().map(|entry| (entry.view.dtype(), entry.view.shape())).collect();
    archive_len(&Root::Dictionary(&names), &tensors)
}

fn lay_out(entries: &[NamedView<'_>]) -> Result<FileImage, ImageError> {
    let names: Vec<_> = entries.iter().map(|entry| entry.name).collect();
    let mut image = FileImage::default();
    push_archive(&mut image, &Root::Dictionary(&names), entries)?;
    Ok(image)
}

impl VirtualFile for PtFile {
    fn len_bytes(&self) -> u64 {
        let bundle = self.input.bundle();
        let first = bundle.first_of_class(self.device);
        let mut lengths = self.lengths.lock();
        let counted = Arc::clone(lengths.entry(first).or_default());
        drop(lengths);
        *counted.get_or_init(|| len_bytes(&bundle.entries(first)))
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        lay_out(&self.input.bundle().entries(self.device)).map(FileContent::Image)
    }

    fn is_bundle(&self) -> bool {
        true
    }
}
