//! Which source bytes the devices of a plan need, and how many of them storage has to bring.

pub(crate) mod leaf;
pub(crate) mod needed;
pub(crate) mod page_reads;
pub(crate) mod remote_bytes;
