//! What a repository is shown as: layouts, names, parts, strictness, and the way back to the repository.

mod amplification;
mod back;
#[path = "../common/mod.rs"]
mod common;
mod findings;
mod layouts;
mod names;
mod select;
mod strict;
