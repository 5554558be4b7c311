//! Where bytes come from: local files, files in memory, the Hub, web servers, object stores, and the disk cache before them.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "helpers of tests are tests too, and their data is small"
)]

#[path = "../common/mod.rs"]
mod common;
mod costs;
#[cfg(feature = "remote")]
mod hub;
mod local;
mod remote_cache;
mod remote_model;
#[cfg(feature = "remote")]
mod remote_store;
#[cfg(feature = "remote")]
#[path = "../stub/mod.rs"]
mod stub;
