//! The threads that take requests from the kernel, and those that stand in for them.

mod spare;

pub(super) use spare::Dispatchers;
