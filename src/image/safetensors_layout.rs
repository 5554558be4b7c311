//! The layout of a safetensors file: a header, then the tensors without holes, as the format requires. The data starts on a page
//! boundary. In large files it starts beyond most of the kernel's read-ahead for the header.
//!
//! Programs copy tensors from the file to an accelerator, or use them where they are mapped, if they are aligned. So tensors of
//! whole cache lines come first: each begins at a multiple of 64 bytes. Among these, and among the rest, the widest elements come
//! first, as the format's own library writes them: each tensor is aligned to its element.

use std::cmp::Reverse;

use ckfs_format::{
    dcp::read::{FILES_OF_SHARDS, SHARDING_INFO},
    safetensors::{DATA_ALIGNMENT, LARGE_DATA_BYTES, LARGE_DATA_START, padded_bytes, unpadded_bytes, write_header},
};
use ckfs_tensor::{PerAxis, Region, View};

use super::file_image::{FileImage, ImageError};

pub(super) use ckfs_format::safetensors::{digits, metadata_bytes, tensor_row_bytes};

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub(super) struct NamedView<'a> {
    /// Its name.
    pub(super) name: &'a str,
    /// Its elements.
    pub(super) view: View,
}

/// Bytes that tensors of whole cache lines are aligned to.
const LINE_BYTES: u64 = 64;

/// Whether a tensor of this many bytes is among the first of its file.
pub(super) fn fills_lines(bytes: u64) -> bool {
    bytes.is_multiple_of(LINE_BYTES)
}

/// Sorts tensors as a file has them. Those that nothing tells apart keep their order.
pub(super) fn sort_for_file(entries: &mut [NamedView<'_>]) {
    entries.sort_by_cached_key(|NamedView { view, .. }| {
        // Views of a part of a byte are refused when they are laid out.
        let bytes = view.dtype().bytes_of(view.shape().elements()).unwrap_or(0);
        (!fills_lines(bytes), Reverse(view.dtype().bits()))
    });
}

/// A safetensors file of these tensors.
///
/// # Errors
/// Elements do not fill whole bytes, names repeat, or the header exceeds the format's limit.
pub(super) fn safetensors(mut entries: Vec<NamedView<'_>>, metadata: &[(&str, &str)]) -> Result<FileImage, ImageError> {
    sort_for_file(&mut entries);
    let tensors = entries.iter().map(|entry| (entry.name, entry.view.dtype(), entry.view.shape().extents()));
    let mut header = write_header(tensors, metadata, DATA_ALIGNMENT)?;
    if header.data_bytes >= LARGE_DATA_BYTES {
        header.reach(LARGE_DATA_START);
    }
    let mut image = FileImage::default();
    image.push_bytes(header.bytes.into());
    image.push_spaces(header.spaces);
    for entry in entries {
        image.push_view(entry.name, entry.view)?;
    }
    Ok(image)
}

/// Length of a file by [`safetensors()`] whose metadata takes [`metadata_bytes`], whose tensors have rows of `rows_bytes`
/// ([`tensor_row_bytes`] and the [`digits`] of extents and offsets), and elements of `data_bytes`.
///
/// # Errors
/// The header exceeds the format's limit.
pub(super) fn counted_bytes(metadata_bytes: u64, rows_bytes: u64, data_bytes: u64) -> Result<u64, ImageError> {
    let header = padded_bytes(unpadded_bytes(metadata_bytes, rows_bytes), DATA_ALIGNMENT)?;
    let reached = if data_bytes >= LARGE_DATA_BYTES { header.max(LARGE_DATA_START) } else { header };
    Ok(reached + data_bytes)
}

/// The offsets in a file's metadata of a shard of a tensor of these extents.
///
/// The reader identifies a shard by its offsets alone, so a shard without elements must not have those of another. Its offset
/// is the end of the axis along which it is empty.
pub(super) fn saved_offsets(whole: &[u64], region: &Region) -> PerAxis {
    let mut offsets: PerAxis = region.origin().iter().copied().collect();
    if let Some(axis) = region.shape().extents().iter().position(|extent| *extent == 0) {
        offsets[axis] = whole[axis];
    }
    offsets
}

/// The metadata by which `torch.distributed.checkpoint` reads files of shards as parts of whole tensors: the offsets of each
/// shard in its tensor of these extents. The extents and the number of `files` tell whether files are missing: torch does not look
/// at them.
pub(super) fn sharding_metadata<'a>(
    files: usize,
    shards: impl Iterator<Item = (&'a str, &'a [u64], Region)>,
) -> [(&'static str, String); 3] {
    let info: serde_json::Map<_, _> = shards
        .map(|(name, whole, region)| {
            let offsets = saved_offsets(whole, &region);
            (name.to_owned(), serde_json::json!({"saved_offsets": offsets.as_slice(), "global_shape": whole}))
        })
        .collect();
    [
        ("DCP_VERSION", "1.0".to_owned()),
        (SHARDING_INFO, serde_json::Value::Object(info).to_string()),
        (FILES_OF_SHARDS, files.to_string()),
    ]
}
