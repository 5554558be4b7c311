//! Real mounts, and what goes wrong around them.
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
mod double;
mod faults_change;
mod faults_health;
mod faults_memory;
mod faults_process;
mod faults_source;
mod mount;
mod permission;
mod serve_faults;
mod steps;
