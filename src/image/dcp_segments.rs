//! The files of a `torch.distributed.checkpoint` directory: segments, each an archive of one chunk.

use std::collections::HashMap;

use ckfs_tensor::{DType, Shape};

use super::{
    file_image::{FileImage, ImageError},
    safetensors_layout::NamedView,
    torch_archive::{Root, alignment, archive_len, data_bytes, push_archive},
};

/// The offsets of the segments in files of a `torch.distributed.checkpoint` directory; segments follow each other in a file.
#[derive(Clone, Debug)]
pub(super) struct Segments {
    /// Lengths of the files.
    pub(super) ends: Vec<u64>,
    /// Lengths of segments by type and shape. A model has many chunks, but of few shapes.
    lens: HashMap<(DType, Shape), u64>,
}

impl Segments {
    /// `files` files without segments.
    pub(super) fn new(files: usize) -> Self {
        Self { ends: vec![0; files], lens: HashMap::new() }
    }

    /// Continues after the segments that end at `ends`, by file.
    pub(super) fn go_on(&mut self, ends: &[u64]) {
        self.ends.clear();
        self.ends.extend_from_slice(ends);
    }

    /// Appends the segment of a chunk of this type and shape to a file; returns its first byte and its length.
    pub(super) fn add(&mut self, file: usize, dtype: DType, shape: &Shape) -> (u64, u64) {
        let start = self.ends[file].next_multiple_of(alignment(data_bytes(dtype, shape)));
        let len = || archive_len(&Root::Tensor, &[(dtype, shape)]);
        let len = *self.lens.entry((dtype, shape.clone())).or_insert_with(len);
        self.ends[file] = start + len;
        (start, len)
    }
}

/// A file of chunks, one segment each.
///
/// # Errors
/// Torch cannot hold a type.
///
/// # Panics
/// If an element type has no whole bytes: see [`super::torch_archive::torch_holds`].
pub(super) fn distcp<'a>(entries: impl Iterator<Item = NamedView<'a>>) -> Result<FileImage, ImageError> {
    let mut image = FileImage::default();
    let mut segments = Segments::new(1);
    for entry in entries {
        let end = segments.ends[0];
        let (start, _) = segments.add(0, entry.view.dtype(), entry.view.shape());
        let gap = usize::try_from(start - end).expect("less than a page");
        image.push_bytes(vec![0; gap].into());
        push_archive(&mut image, &Root::Tensor, &[entry])?;
    }
    Ok(image)
}

/// Name of the file of number `file` in a `torch.distributed.checkpoint` directory.
pub(super) fn distcp_name(file: u64) -> String {
    format!("__{file}_0.distcp")
}
