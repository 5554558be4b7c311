//! The names of tensors: their words, their groups over numbers, and the user's renames.

pub(crate) mod member;
pub(crate) mod name_group;
pub(crate) mod names;
pub(crate) mod naming;
pub(crate) mod parsed;
pub mod rename;
