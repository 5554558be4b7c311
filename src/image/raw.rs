//! Raw files: only a view's elements. `full/` has the whole tensors, `dev{d}/` a device's shards, and `mesh/` links to
//! `dev{d}/` by coordinates.

use std::sync::Arc;

use ckfs_plan::Problem;
use ckfs_tensor::View;

use super::{
    file_image::{FileImage, ImageError},
    input::FormatInput,
    name_tree::NameTree,
    output::{Directory, FormatFiles, OutputFormat, Shown},
    tensor_files::TensorFiles,
};

/// See the module's documentation.
pub(super) const RAW: OutputFormat = OutputFormat { name: "raw", unavailable: |_| None, layout };

/// A file of a view's elements in row-major order, little-endian.
///
/// # Errors
/// The elements do not fill whole bytes.
pub fn raw(name: &str, view: View) -> Result<FileImage, ImageError> {
    let mut image = FileImage::default();
    image.push_view(name, view)?;
    Ok(image)
}

fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let plan = &input.plan;
    let names = Arc::new(NameTree::new(plan, "", |_| true)?);
    let files = |device| {
        let (input, names) = (Arc::clone(input), Arc::clone(&names));
        TensorFiles { input, names, device, lay_out: raw, is_plain: true }
    };
    let mut directory = Directory::default();
    directory.subtree("full", files(None));
    for device in &plan.devices {
        directory.subtree(&format!("dev{device}"), files(Some(*device)));
    }
    if !plan.mesh.axes().is_empty()
        && let Some(mesh) = directory.directory("mesh")
    {
        for device in &plan.devices {
            let target = format!("../dev{device}").into_boxed_str();
            mesh.add(&plan.mesh.path(*device).join(","), Shown::Link(target));
        }
    }
    Ok((directory, None))
}
