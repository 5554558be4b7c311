//! The formats of containers, read and written: repositories as they are opened, and the files of a volume byte for byte.

mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod headers;
mod images;
mod metadata;
mod torch_sources;
mod volume;
