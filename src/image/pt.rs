//! `pt/`: all shards of a device as one `.pt` archive, a dictionary by name.

use std::sync::Arc;

use ckfs_plan::{Plan, Problem};

use super::{
    file_image::{FileImage, ImageError},
    input::FormatInput,
    output::{Directory, FormatFiles, Omission, OmittedFormat, OutputFormat},
    safetensors::BundleFile,
    safetensors_layout::NamedView,
    torch_archive::{self, Root, push_archive},
};

/// See the module's documentation.
pub(super) const PT: OutputFormat = OutputFormat { name: "pt", unavailable, layout };

fn unavailable(plan: &Plan) -> Option<OmittedFormat> {
    let reason = torch_archive::fits(plan).err()?;
    Some(OmittedFormat { format: PT.name, omission: Omission::Empty, reason })
}

#[expect(clippy::unnecessary_wraps, reason = "other formats have problems")]
fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    if let Some(found) = unavailable(&input.plan) {
        return Ok((Directory::default(), Some(found)));
    }
    let directory = Directory::with(PT.name, |directory| {
        for device in &input.plan.devices {
            let file = BundleFile {
                bundle: Arc::clone(input.bundle()),
                device: *device,
                len_bytes: |bundle, device| {
                    bundle.torch_len(device, |entries| lay_out(entries).expect(HELD).len_bytes())
                },
                lay_out: |bundle, device| lay_out(&bundle.entries(device)),
                is_bundle: true,
            };
            directory.file(&format!("dev{device}.pt"), file);
        }
    });
    Ok((directory, None))
}

/// Why lengths cannot fail.
const HELD: &str = "types that torch lacks were refused";

fn lay_out(entries: &[NamedView<'_>]) -> Result<FileImage, ImageError> {
    let names: Vec<_> = entries.iter().map(|entry| entry.name).collect();
    let mut image = FileImage::default();
    push_archive(&mut image, &Root::Dictionary(&names), entries)?;
    Ok(image)
}
