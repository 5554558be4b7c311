//! Quantized tensors: formulas, schemes of repositories, whole plans over decoded tensors, and reads.

mod block_fp8;
#[path = "../common/mod.rs"]
mod common;
mod decoding;
mod formulas;
mod inference;
mod reads;
mod repository;
mod schemes;
