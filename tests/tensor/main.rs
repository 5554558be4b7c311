//! Views, tilings and kernels: what every virtual byte is made by. Nothing is read here; all of it is pure.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "helpers of tests are tests too, and their data is small"
)]

mod algebra;
#[path = "../common/mod.rs"]
mod common;
mod kernels;
mod mosaic;
mod tiling;
