//! Distributed checkpoints of torch (`torch.distributed.checkpoint`).

pub mod read;
pub mod write;
