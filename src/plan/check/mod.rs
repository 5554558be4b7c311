//! What is wrong with a plan: missing and unexpected tensors, requests without effect, and the messages for them.

pub(crate) mod expect;
pub(crate) mod holes;
pub(crate) mod narrow;
pub mod problem;
pub(crate) mod survey;
pub(crate) mod unused;
pub(crate) mod widths;
