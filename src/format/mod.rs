//! Headers of container formats: bytes to description and back. Pure: no file is touched here.
//!
//! Deliberately strict: what is read here decides where every tensor's bytes are, so that a header which is not exactly
//! right is refused rather than guessed at.
//!
//! Each format that is read and written has a directory with `read` and `write`.

pub mod dcp;
pub mod delta;
pub mod gguf;
#[cfg(test)]
mod hexadecimal;
pub mod json;
pub mod npy;
pub mod ocdbt;
pub mod orbax;
pub mod pickle;
pub mod safetensors;
pub mod torch;
pub mod zarr;
pub mod zip;

/// What is wrong with bytes that are read: the first fault that is met, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FormatError(pub(crate) String);
