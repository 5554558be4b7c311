//! What a repository is shown as: layouts, names, parts, strictness, and the way back to the repository.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "helpers of tests are tests too, and their data is small"
)]

mod amplification;
mod back;
#[path = "../common/mod.rs"]
mod common;
mod findings;
mod layouts;
mod names;
mod select;
mod strict;
