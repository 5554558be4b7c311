//! Archives of `torch.save`: a zip archive with a pickle, and the storages that it refers to. `state` is what the pickle says,
//! `distributed`, `zero` and `megatron` what it says of tensors that are spread over ranks.

pub mod distributed;
pub mod megatron;
pub mod read;
pub mod state;
pub mod write;
pub mod zero;
