//! The program as users and administrators run it.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "helpers of tests are tests too, and their data is small"
)]

mod commands;
mod sums;
mod systemd;
