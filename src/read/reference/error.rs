//! Why the reference gives no bytes.

use std::error::Error;

use ckfs_tensor::{DType, TensorId};

/// Why the reference gives no bytes.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// The elements of a packed type end inside a byte.
    #[error("{elements} elements of {dtype} do not fill whole bytes")]
    PartialByte {
        /// Element type.
        dtype: DType,
        /// Elements of the view.
        elements: u64,
    },
    /// The span leaves the view.
    #[error("bytes {start}..{end} of a view of {len_bytes} bytes")]
    OutOfBounds {
        /// First requested byte.
        start: u64,
        /// End of the requested bytes.
        end: u64,
        /// Bytes of the view.
        len_bytes: u64,
    },
    /// An element has no code in the scheme that it is quantized by.
    #[error("tensor {tensor}, element {index:?}: {value} has no code")]
    Uncodable {
        /// The tensor.
        tensor: String,
        /// Its place, one number for each axis.
        index: Vec<u64>,
        /// Its value.
        value: f32,
    },
    /// Bytes of a tensor could not be read.
    #[error("tensor #{}: bytes {start}..{end}", tensor.0)]
    Read {
        /// The tensor.
        tensor: TensorId,
        /// First requested byte.
        start: u64,
        /// End of the requested bytes.
        end: u64,
        /// The reader's error.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    /// The reader returned another number of bytes than requested.
    #[error("tensor #{}: asked for bytes {start}..{end}, got {found} bytes", tensor.0)]
    Length {
        /// The tensor.
        tensor: TensorId,
        /// First requested byte.
        start: u64,
        /// End of the requested bytes.
        end: u64,
        /// Bytes returned.
        found: usize,
    },
}
