//! Metadata of Orbax checkpoints. Their arrays are [`zarr`](super::zarr), in files of their own or in [`ocdbt`](super::ocdbt).

pub mod read;
pub mod write;
