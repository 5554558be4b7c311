//! What can be wrong with a header.

use std::fmt;

use ckfs_tensor::DType;

use super::{JSON_BYTES_MAX, PREFIX_BYTES, RANK_MAX};

/// Most problems of one header that are listed. A broken writer gets all its tensors wrong, and no reader wants 150 000 lines.
const PROBLEMS_MAX: usize = 20;

/// Everything found wrong with one header, at least one thing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderErrors {
    /// The problems, in order of the file; at most 20.
    pub problems: Vec<String>,
    /// Problems beyond those listed.
    pub more: usize,
}

impl HeaderErrors {
    fn one(problem: String) -> Self {
        Self { problems: vec![problem], more: 0 }
    }

    /// What is wrong with one tensor.
    pub(super) fn of(tensor: &str, problem: impl fmt::Display) -> Self {
        Self::one(format!("tensor {tensor:?}: {problem}"))
    }

    pub(super) fn duplicate(tensor: &str) -> Self {
        Self::of(tensor, "described twice")
    }

    pub(super) fn rank(tensor: &str, found: usize) -> Self {
        Self::of(tensor, format_args!("expected at most {RANK_MAX} axes, found {found}"))
    }

    pub(super) fn dtype(tensor: &str, code: &str) -> Self {
        Self::of(tensor, format_args!("unknown dtype {code:?}"))
    }

    /// That the number of bytes overflows, or elements below a byte do not fill whole bytes.
    pub(super) fn size(tensor: &str, dtype: DType, shape: &[u64]) -> Self {
        let problem = format!("{dtype} of shape {shape:?} is not a number of whole bytes that fits 64 bits");
        Self::of(tensor, problem)
    }

    /// That the text is not the JSON that a header must be.
    pub(super) fn json(error: impl fmt::Display) -> Self {
        Self::one(format!("header: {error}"))
    }

    pub(super) fn overflow(what: &str) -> Self {
        Self::one(format!("header: {what} overflows"))
    }

    /// That the data does not end where the file ends.
    pub(super) fn end(expected: u64, found: u64) -> Self {
        Self::one(format!("data: expected {expected} bytes by the header, found {found} bytes in the file"))
    }

    pub(super) fn too_long(found: u64) -> Self {
        let problem = "the file is damaged or not safetensors";
        Self::one(format!("header length: expected at most {JSON_BYTES_MAX} bytes, found {found}: {problem}"))
    }

    pub(super) fn truncated(expected: u64, found: u64) -> Self {
        let problem = "the file is truncated or not safetensors";
        Self::one(format!("header of {expected} bytes in a file of {found} bytes: {problem}"))
    }

    /// That there is not even room for the length.
    pub(super) fn too_short(found: u64) -> Self {
        Self::one(format!("file of {found} bytes: expected at least {PREFIX_BYTES}"))
    }

    pub(super) fn push(&mut self, found: Self) {
        for problem in found.problems {
            if self.problems.len() < PROBLEMS_MAX { self.problems.push(problem) } else { self.more += 1 }
        }
    }

    /// These problems, or else the value.
    pub(super) fn finish<T>(self, value: T) -> Result<T, Self> {
        if self.problems.is_empty() { Ok(value) } else { Err(self) }
    }
}

impl fmt::Display for HeaderErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("; "))?;
        if self.more > 0 { write!(f, "; and {} more", self.more) } else { Ok(()) }
    }
}

impl std::error::Error for HeaderErrors {}
