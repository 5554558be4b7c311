//! GGUF files of llama.cpp: a header with key-values and the places of tensors, then tensors in blocks of codes.

mod blocks;
mod read;

pub use blocks::BlockType;
pub use read::{Gguf, GgufError, GgufTensor, StoredAs};
