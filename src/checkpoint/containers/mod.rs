//! How weights are stored: safetensors, files of PyTorch, GGUF, Orbax and DCP checkpoints, one file each.

pub(super) mod archive;
pub(super) mod blocks;
pub(super) mod container;
pub(super) mod copies;
pub(super) mod dcp;
pub(super) mod delta;
pub(super) mod gguf;
pub(super) mod header;
pub(super) mod index;
pub(super) mod orbax;
pub(super) mod ranks;
pub(super) mod safetensors;
pub(super) mod torch;
