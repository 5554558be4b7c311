//! The schemes of libraries that models are run with: what opening makes of small repositories, against formulas written here
//! once more, and what it refuses.
//!
//! The state protected here is which field of which word is which element, which group it belongs to, and in which order it is
//! computed. Values are compared as f32. Each matrix and its companions lie in two files.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::wildcard_enum_match_arm,
    reason = "tests panic, and sizes are small"
)]

mod awq;
mod bitsandbytes;
mod gptq;
mod mlx;
mod others;
mod torchao;
