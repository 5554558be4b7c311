//! The formats of containers, read and written: repositories as they are opened, and the files of a volume byte for byte.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "helpers of tests are tests too, and their data is small"
)]

mod average;
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod headers;
mod images;
mod metadata;
mod torch_sources;
mod versions;
mod volume;
