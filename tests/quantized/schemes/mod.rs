//! The schemes that models are trained from: the decoded tensors of small repositories, against formulas written here
//! independently, and the refused repositories.
//!
//! The state protected here is which code, scale and zero point determine each element, and their order. Values are compared as
//! f32, where another order shows in a fifth of all elements. Each matrix and its companions are in two files.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::wildcard_enum_match_arm,
    reason = "tests panic, and sizes are small"
)]

mod comfy;
mod compressed_tensors;
mod fp8;
mod gpt_oss;
mod modelopt;
