//! The files of a repository: where they are, which of them hold weights, and which file is which.

pub(super) mod alone;
pub(super) mod choose;
pub(super) mod companion;
pub(super) mod file;
pub(super) mod folder;
pub(super) mod foreign;
pub(super) mod listing;
pub(super) mod locate;
pub(super) mod remote_tree;
pub(super) mod sets;
pub(super) mod tree;
pub(super) mod weight_name;
