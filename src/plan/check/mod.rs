//! What is wrong with a plan: missing and unexpected tensors, requests without effect, and the messages for them.

pub(in crate::plan) mod expect;
pub(in crate::plan) mod hole;
pub(in crate::plan) mod holes;
pub mod problem;
pub(in crate::plan) mod survey;
pub(in crate::plan) mod unused;
pub(in crate::plan) mod widths;
