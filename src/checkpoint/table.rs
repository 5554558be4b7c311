//! The tensor table: what tensors a checkpoint has and where their bytes are.
//!
//! Tensors are numbered by file, in the order of the list of weight files, and within a file by the place of their bytes.
//! A repo may have 150 000 of them, so the table is a few flat arrays: about 100 bytes per tensor, names included.

use rayon::slice::ParallelSliceMut;

use crate::{
    source::{ByteSpan, FileId},
    tensor::{DType, TensorId},
};

/// One tensor of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Name, as in the file's header.
    pub name: &'a str,
    /// Type of its elements.
    pub dtype: DType,
    /// Extents in elements, row-major; empty for a scalar.
    pub shape: &'a [u64],
    /// The file that holds its bytes.
    pub file: FileId,
    /// Where in that file.
    pub span: ByteSpan,
}

/// Immutable table of tensors.
#[derive(Debug, Default)]
pub struct TensorTable {
    rows: Vec<Row>,
    /// All names, one after the other in row order.
    names: String,
    /// All extents, likewise.
    extents: Vec<u64>,
    /// Row numbers in lexical order of name.
    by_name: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    span: ByteSpan,
    name_end: u32,
    extents_end: u32,
    file: FileId,
    dtype: DType,
}
