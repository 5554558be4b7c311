//! Zarr arrays: their metadata, grids and chunks.

pub mod read;
pub mod write;
