//! The files of `hf/`: those of the source's own repository, or generated ones.

pub(crate) mod generated;
pub mod hf;
pub(crate) mod text_model;
