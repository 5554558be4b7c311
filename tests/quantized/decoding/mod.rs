//! Quantized repositories through whole plans: each layout over the codes against the same layout over a repository of the decoded
//! tensors, `hf/` as a plain repository, and what is refused or spared.
//!
//! The state protected here is that nothing above the schemes can tell a decoded tensor from a stored one. Each repository is
//! made twice, of the same numbers: once as codes and scales, once as what a formula written here makes of them.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::wildcard_enum_match_arm,
    reason = "tests panic, and sizes are small"
)]

mod hf;
mod keep_f32;
mod layouts;
mod models;
mod twice;
mod unsupported;
