//! The names of tensors: their words, their groups over numbers, and the user's renames.

pub(in crate::plan) mod member;
pub(in crate::plan) mod name_group;
pub(in crate::plan) mod names;
pub(in crate::plan) mod naming;
pub mod rename;
