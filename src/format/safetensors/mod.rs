//! The safetensors header, read and written.
//!
//! A file is `length: u64 LE`, `length` bytes of JSON, then data:
//!
//! ```text
//! {"__metadata__": {"format": "pt"}, "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
//! ```
//!
//! The law: offsets count from the end of the JSON; sorted by offset the tensors follow each other without hole or overlap
//! from 0 to the end of the file; each has exactly the bytes that shape and dtype need. White space may surround the JSON,
//! which writers use to align the data. Unknown members of a tensor are skipped; an unknown dtype is refused, as its tensors
//! could not be cut.
//!
//! The `safetensors` crate decides what is valid: no header is accepted that its `Metadata` refuses. Refused beyond that are a
//! name, a tensor's member or a key of `__metadata__` that comes twice, and a tensor of more than [`RANK_MAX`] axes. Own code
//! does what the crate does not:
//!
//! * It parses the map. The crate's parser copies every value first (serde's `flatten`) and merges repeated names silently.
//!   250 headers of 600 tensors on one thread, best of 25 turns: the crate's parser alone 192 ms; this module, which hands the
//!   parsed tensors to the crate's `Metadata::new`, 86 ms; the same table without that check 60 ms. Of what `ckfs plan` takes
//!   for those 150 000 tensors (1.1 s of processor time), the difference is within noise.
//! * It lists all problems of a refused header by tensor (`diagnosis`); the crate names the first only.
//! * It keeps [`Header`] in a few flat arrays, in order of data: about 40 bytes per tensor besides its name. While a header is
//!   parsed, its tensors also take about twice the memory of its JSON.
//!
//! [`write_header`] makes a header whose data starts at a multiple of a given alignment. The crate's writer wants the data of
//! all tensors at hand, aligns to 8 bytes and orders tensors by dtype; files here are laid out before any data is read.

use ckfs_tensor::DType;

mod diagnosis;
mod error;
mod members;
mod read;
mod write;

pub use error::HeaderErrors;
pub use read::{Header, HeaderTensor};
pub use write::{
    WrittenHeader, check_name, digits, metadata_bytes, padded_bytes, tensor_row_bytes, unpadded_bytes, write_header,
};

/// Longest JSON that readers of the format accept, in bytes.
pub(crate) const JSON_BYTES_MAX: u64 = 100_000_000;

/// Length of the number before the JSON, in bytes.
pub const PREFIX_BYTES: u64 = 8;

/// Most axes of a tensor. The format has no limit; no published tensor comes near this one.
pub const RANK_MAX: usize = 8;

/// Alignment of the data in written files, in bytes: a page, so that data can be mapped and read directly.
pub const DATA_ALIGNMENT: u64 = 4096;

/// Where the data of large files begins at the earliest, in bytes. A reader that maps a file for its header makes the kernel
/// read `read_ahead_kb`, by default 1 MiB of a mount. The kernel reads as much again when the reader enters the last quarter of
/// that; spaces after the JSON count too. With the data here, the kernel reads the least data that no reader wants.
pub const LARGE_DATA_START: u64 = 768 << 10;

/// A file with at least this many bytes of data is large.
pub const LARGE_DATA_BYTES: u64 = 16 << 20;

const METADATA: &str = "__metadata__";

/// Bytes of a tensor, or `None` if elements below a byte do not fill whole bytes or the number overflows.
pub fn tensor_bytes(dtype: DType, shape: &[u64]) -> Option<u64> {
    let elements = shape.iter().try_fold(1_u64, |product, extent| product.checked_mul(*extent))?;
    dtype.bytes_of(elements)
}
