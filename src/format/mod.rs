//! Headers of container formats: bytes to description and back. Pure: no file is touched here.
//!
//! Deliberately strict: what is read here decides where every tensor's bytes are, so that a header which is not exactly
//! right is refused rather than guessed at.

pub mod dcp;
pub mod dcp_state;
#[cfg(test)]
mod hexadecimal;
pub mod npy;
pub mod ocdbt;
pub mod orbax;
pub mod orbax_state;
pub mod pickle;
pub mod safetensors;
pub mod torch;
pub mod torch_archive;
pub mod torch_state;
pub mod unpickle;
pub mod unzip;
pub mod zarr;
pub mod zarr_read;
pub mod zip;
