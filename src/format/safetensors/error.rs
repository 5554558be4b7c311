//! What can be wrong with a header.

use std::fmt;

use ckfs_tensor::DType;

use super::{JSON_BYTES_MAX, PREFIX_BYTES, RANK_MAX};

/// Most problems of one header that are listed. A broken writer gets all its tensors wrong, and no reader wants 150 000 lines.
const PROBLEMS_MAX: usize = 20;

/// What is wrong with a header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not even room for the length.
    #[error("file of {found} bytes: expected at least {PREFIX_BYTES}")]
    TooShort {
        /// Length of the file.
        found: u64,
    },
    /// The header is longer than the format allows.
    #[error(
        "header length: expected at most {JSON_BYTES_MAX} bytes, found {found}: the file is damaged or not safetensors"
    )]
    TooLong {
        /// Length as given.
        found: u64,
    },
    /// The header reaches beyond the end of the file.
    #[error("header of {expected} bytes in a file of {found} bytes: the file is truncated or not safetensors")]
    Truncated {
        /// Length of number and JSON together.
        expected: u64,
        /// Length of the file.
        found: u64,
    },
    /// Not the JSON that a header must be.
    #[error("header: {message}")]
    Json {
        /// What the parser says, with line and column.
        message: String,
    },
    /// A tensor is described twice.
    #[error("tensor {tensor:?}: described twice")]
    DuplicateTensor {
        /// Its name.
        tensor: String,
    },
    /// No such element type.
    #[error("tensor {tensor:?}: unknown dtype {found:?}")]
    UnknownDType {
        /// Its name.
        tensor: String,
        /// Code as given.
        found: String,
    },
    /// More axes than supported.
    #[error("tensor {tensor:?}: expected at most {RANK_MAX} axes, found {found}")]
    Rank {
        /// Its name.
        tensor: String,
        /// Number of axes.
        found: usize,
    },
    /// The number of bytes overflows, or elements below a byte do not fill whole bytes.
    #[error("tensor {tensor:?}: {dtype} of shape {shape:?} is not a number of whole bytes that fits 64 bits")]
    Size {
        /// Its name.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// Offsets and shape disagree.
    #[error("tensor {tensor:?}: {dtype} of shape {shape:?}: expected {expected} bytes, found offsets {start}..{end}")]
    Bytes {
        /// Its name.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes that shape and dtype need.
        expected: u64,
        /// First offset.
        start: u64,
        /// Second offset.
        end: u64,
    },
    /// A hole or an overlap before a tensor.
    #[error("tensor {tensor:?}: expected its data to start at offset {expected}, found {found}")]
    NotContiguous {
        /// Its name.
        tensor: String,
        /// Where the previous tensor ends.
        expected: u64,
        /// Where this one starts.
        found: u64,
    },
    /// The tensors do not end where the file ends.
    #[error("data: expected {expected} bytes by the header, found {found} bytes in the file")]
    End {
        /// End of the last tensor.
        expected: u64,
        /// Bytes after the header.
        found: u64,
    },
    /// A name that the format reserves.
    #[error("tensor {tensor:?}: the name is reserved")]
    ReservedName {
        /// Its name.
        tensor: String,
    },
    /// A limit of 32 or 64 bits.
    #[error("header: {what} overflows")]
    Overflow {
        /// What is too large.
        what: &'static str,
    },
}

/// Everything found wrong with one header, at least one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderErrors {
    /// The problems, in order of the file; at most 20.
    pub problems: Vec<HeaderError>,
    /// Problems beyond those listed.
    pub more: usize,
}

impl fmt::Display for HeaderErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, problem) in self.problems.iter().enumerate() {
            if place > 0 {
                f.write_str("; ")?;
            }
            problem.fmt(f)?;
        }
        if self.more > 0 { write!(f, "; and {} more", self.more) } else { Ok(()) }
    }
}

impl std::error::Error for HeaderErrors {}

impl From<HeaderError> for HeaderErrors {
    fn from(problem: HeaderError) -> Self {
        Self { problems: vec![problem], more: 0 }
    }
}

/// Collects problems.
#[derive(Default)]
pub(super) struct Problems(Vec<HeaderError>, usize);

impl Problems {
    pub(super) fn push(&mut self, problem: HeaderError) {
        if self.0.len() < PROBLEMS_MAX { self.0.push(problem) } else { self.1 += 1 }
    }

    pub(super) fn finish<T>(self, value: T) -> Result<T, HeaderErrors> {
        if self.0.is_empty() { Ok(value) } else { Err(HeaderErrors { problems: self.0, more: self.1 }) }
    }
}
