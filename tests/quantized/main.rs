//! Quantized tensors: formulas, schemes of repositories, whole plans over decoded tensors, and reads.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "helpers of tests are tests too, and their data is small"
)]

mod block_fp8;
#[path = "../common/mod.rs"]
mod common;
mod decoding;
mod encoding;
mod formulas;
mod inference;
mod reads;
mod repository;
mod schemes;
