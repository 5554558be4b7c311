//! `npy/`: `.npy` files: a header that ends on a page boundary, then the elements.
//!
//! numpy requires a multiple of 64 only. With a page the elements of one kernel request are inside one tile of
//! a transformed view, and a mapped array starts where a device can use it without a copy.

use std::sync::Arc;

use ckfs_format::npy;
use ckfs_plan::{PlannedTensor, Problem};
use ckfs_tensor::View;

use super::{
    file_image::{FileImage, ImageError},
    input::FormatInput,
    name_tree::NameTree,
    output::{Directory, FormatFiles, OutputFormat},
    tensor_files::TensorFiles,
};

/// Where the elements start.
const ALIGNMENT: usize = 4096;

/// See the module's documentation.
pub(super) const NPY: OutputFormat = OutputFormat { name: "npy", unavailable: |_| None, layout };

fn lay_out(name: &str, view: View) -> Result<FileImage, ImageError> {
    let mut image = FileImage::of_bytes(npy::header(view.dtype(), view.shape().extents(), ALIGNMENT));
    image.push_view(name, view)?;
    Ok(image)
}

fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let plan = &input.plan;
    let bundled = |tensor: &PlannedTensor| plan.is_bundled(tensor);
    let names = NameTree::new(plan, ".npy", bundled).map_err(|problems| {
        // Names that raw files cannot have either are reported once, by the raw format.
        if NameTree::new(plan, "", |_| true).is_err() { Vec::new() } else { problems }
    });
    let names = Arc::new(names?);
    let shown = Directory::with(NPY.name, |directory| {
        for device in &plan.devices {
            let (input, names) = (Arc::clone(input), Arc::clone(&names));
            let files = TensorFiles { input, names, device: Some(*device), lay_out, is_plain: false };
            directory.subtree(&format!("dev{device}"), files);
        }
    });
    Ok((shown, None))
}
