//! GGUF files of llama.cpp: a header with key-values and the places of tensors, then tensors in blocks of codes.

mod blocks;
mod pieces;
mod read;
mod write;

pub use blocks::BlockType;
pub use pieces::{SentencePiece, sentence_pieces};
pub use read::{Gguf, GgufError, GgufTensor, StoredAs};
pub use write::{GgufPairs, GgufValue, WrittenTensor, gguf_header, gguf_padding};
