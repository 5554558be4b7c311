//! The `.metadata` file of a `torch.distributed.checkpoint` directory.
//!
//! A pickle of `Metadata`: per tensor its type, size and chunks, and per chunk the segment of a file that holds it. Each
//! segment is an archive of its own, as `torch.save` writes it of the chunk's tensor.

use std::io;

use super::{pickle::Pickle, torch};
use crate::tensor::{DType, Region, Shape};

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

/// Where a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    /// File in the directory.
    pub file: &'a str,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

fn size(pickle: &mut Pickle<'_>, extents: &[u64]) -> io::Result<()> {
    pickle.global("torch", "Size")?;
    pickle.ints(extents)?;
    pickle.tuple1()?;
    pickle.call()
}

/// Begins a member of the dictionary on top of the stack.
fn member(pickle: &mut Pickle<'_>, name: &str) -> io::Result<()> {
    pickle.word(name)
}

/// Begins the metadata: what follows are calls of [`tensor`].
///
/// # Errors
/// What the output fails with.
pub fn begin(pickle: &mut Pickle<'_>) -> io::Result<()> {
    pickle.object(METADATA, "Metadata")?;
    pickle.empty_dict()?;
    member(pickle, "state_dict_metadata")?;
    pickle.empty_dict()
}

/// Describes a tensor and its chunks.
///
/// # Errors
/// What the output fails with.
pub fn tensor(
    pickle: &mut Pickle<'_>,
    name: &str,
    dtype: DType,
    shape: &Shape,
    chunks: impl Iterator<Item = Region>,
) -> io::Result<()> {
    pickle.text(name)?;
    pickle.object(METADATA, "TensorStorageMetadata")?;
    pickle.empty_dict()?;
    member(pickle, "properties")?;
    pickle.object(METADATA, "TensorProperties")?;
    // Type, layout, no gradient, memory format, not pinned: five members, which old and new versions read.
    pickle.mark()?;
    pickle.global("torch", torch::dtype_name(dtype).unwrap_or("uint8"))?;
    pickle.global("torch.serialization", "_get_layout")?;
    pickle.word("torch.strided")?;
    pickle.tuple1()?;
    pickle.call()?;
    pickle.no()?;
    pickle.global(METADATA, "_MEM_FORMAT_ENCODING")?;
    pickle.int(0)?;
    pickle.tuple1()?;
    pickle.call()?;
    pickle.no()?;
    pickle.tuple()?;
    pickle.build()?;
    pickle.set_item()?;
    member(pickle, "size")?;
    size(pickle, shape.extents())?;
    pickle.set_item()?;
    member(pickle, "chunks")?;
    pickle.empty_list()?;
    for chunk in chunks {
        pickle.object(METADATA, "ChunkStorageMetadata")?;
        pickle.empty_dict()?;
        member(pickle, "offsets")?;
        size(pickle, chunk.origin())?;
        pickle.set_item()?;
        member(pickle, "sizes")?;
        size(pickle, chunk.shape().extents())?;
        pickle.set_item()?;
        pickle.build()?;
        pickle.append()?;
    }
    pickle.set_item()?;
    pickle.build()?;
    pickle.set_item()
}

/// Ends the tensors: what follows are calls of [`segment`].
///
/// # Errors
/// What the output fails with.
pub fn begin_segments(pickle: &mut Pickle<'_>) -> io::Result<()> {
    pickle.set_item()?;
    member(pickle, "planner_data")?;
    pickle.none()?;
    pickle.set_item()?;
    member(pickle, "storage_data")?;
    pickle.empty_dict()
}

/// Says where chunk number `index` of a tensor is.
///
/// # Errors
/// What the output fails with.
pub fn segment(
    pickle: &mut Pickle<'_>,
    name: &str,
    chunk: &Region,
    index: u64,
    segment: Segment<'_>,
) -> io::Result<()> {
    pickle.object(METADATA, "MetadataIndex")?;
    pickle.empty_dict()?;
    member(pickle, "fqn")?;
    pickle.text(name)?;
    pickle.set_item()?;
    member(pickle, "offset")?;
    size(pickle, chunk.origin())?;
    pickle.set_item()?;
    member(pickle, "index")?;
    pickle.int(index)?;
    pickle.set_item()?;
    pickle.build()?;
    pickle.object(FILESYSTEM, "_StorageInfo")?;
    pickle.empty_dict()?;
    member(pickle, "relative_path")?;
    pickle.word(segment.file)?;
    pickle.set_item()?;
    member(pickle, "offset")?;
    pickle.int(segment.offset)?;
    pickle.set_item()?;
    member(pickle, "length")?;
    pickle.int(segment.len)?;
    pickle.set_item()?;
    pickle.build()?;
    pickle.set_item()
}

/// Ends the metadata.
///
/// # Errors
/// What the output fails with.
pub fn end(pickle: &mut Pickle<'_>) -> io::Result<()> {
    pickle.set_item()?;
    for name in ["storage_meta", "version"] {
        member(pickle, name)?;
        pickle.none()?;
        pickle.set_item()?;
    }
    pickle.build()?;
    pickle.stop()
}
