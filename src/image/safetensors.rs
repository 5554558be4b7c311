//! Safetensors files: a header whose data starts on a page, and in large files beyond most of what the kernel reads for the header,
//! then the tensors without holes.
//!
//! The order given is kept. Writers that want natural alignment of every tensor sort by falling width first, as the
//! format's own library does.

use super::{FileImage, ImageError};
use crate::{
    format::safetensors::{DATA_ALIGNMENT, LARGE_DATA_BYTES, LARGE_DATA_START, WrittenHeader, write_header},
    tensor::{Region, View},
};

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub struct Entry<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its elements.
    pub view: View,
}

fn header(entries: &[Entry<'_>], metadata: &[(&str, &str)]) -> Result<WrittenHeader, ImageError> {
    let tensors = entries.iter().map(|entry| (entry.name, entry.view.dtype(), entry.view.shape().extents()));
    let mut header = write_header(tensors, metadata, DATA_ALIGNMENT)?;
    if header.data_bytes >= LARGE_DATA_BYTES {
        header.reach(LARGE_DATA_START);
    }
    Ok(header)
}

/// A safetensors file of these tensors, in this order.
///
/// # Errors
/// [`ImageError::PartialByte`], or [`ImageError::Header`] if names repeat or the header exceeds the format's limit.
pub fn safetensors(entries: Vec<Entry<'_>>, metadata: &[(&str, &str)]) -> Result<FileImage, ImageError> {
    let header = header(&entries, metadata)?;
    let mut image = FileImage::default();
    image.push_bytes(header.bytes.into());
    image.push_spaces(header.spaces);
    for entry in entries {
        image.push_view(entry.name, entry.view)?;
    }
    Ok(image)
}

/// Length of the file that [`safetensors()`] would lay out.
///
/// # Errors
/// As [`safetensors()`].
pub fn safetensors_len(entries: &[Entry<'_>], metadata: &[(&str, &str)]) -> Result<u64, ImageError> {
    let header = header(entries, metadata)?;
    Ok(header.bytes.len() as u64 + header.spaces + header.data_bytes)
}

/// The metadata by which `torch.distributed.checkpoint` reads files of shards as parts of whole tensors: the place of each
/// shard in its tensor of these extents.
///
/// The reader knows a shard by the offsets alone, so a shard without elements must not have those of another: it is said to
/// be at the end of the axis along which it is empty.
pub fn sharding_metadata<'a>(
    shards: impl Iterator<Item = (&'a str, &'a [u64], Region)>,
) -> [(&'static str, String); 2] {
    let info: serde_json::Map<_, _> = shards
        .map(|(name, whole, region)| {
            let mut offsets = region.origin().to_vec();
            if let Some(axis) = region.shape().extents().iter().position(|extent| *extent == 0) {
                offsets[axis] = whole[axis];
            }
            (name.to_owned(), serde_json::json!({"saved_offsets": offsets}))
        })
        .collect();
    [("DCP_VERSION", "1.0".to_owned()), ("DCP_SHARDING_INFO", serde_json::Value::Object(info).to_string())]
}
