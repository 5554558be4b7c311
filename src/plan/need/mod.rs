//! Which source bytes the devices of a plan need, and how many of them storage has to bring.

pub mod amplification;
pub(in crate::plan) mod counting;
pub(in crate::plan) mod needed;
pub(in crate::plan) mod remote_bytes;
