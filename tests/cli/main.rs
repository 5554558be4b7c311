//! The program as users and administrators run it.

mod commands;
mod sums;
mod systemd;
