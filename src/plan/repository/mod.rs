//! The files of `hf/`: those of the source's own repository, or generated ones.

pub(in crate::plan) mod generated;
pub mod hf;
pub(in crate::plan) mod text_model;
