//! A reader of zarr arrays of version 2 and 3.
//!
//! ```text
//! .zarray  zarr.json        shape, element type, chunk shape, codecs, names of chunks
//! 0.1      c/0/1            one chunk: all its elements, also where it reaches beyond the array
//! ```
//!
//! [`Array::parse_v2`] and [`Array::parse_v3`] turn a description into an [`Array`], which names the chunks of its grid. Its
//! [`Codecs`] say how a chunk is stored: elements in some order of axes and bytes, or a shard of smaller chunks with an index,
//! then compressed or not. A chunk that is not compressed has its elements at known places ([`Codecs::plain`]); others are
//! decoded whole ([`Array::decode`]).
//!
//! What is not understood is refused by name: unknown codecs and their settings, types that are no type of this crate, parts
//! of a description that a reader must understand. Data has no checksum unless `crc32c`, gzip or a zstd frame adds one, and
//! those are checked.

mod codec;
mod decode;
pub(super) mod keys;
mod metadata;
mod reference;
mod value;

pub use codec::{ArrayBytes, ChunkError, Codecs, Packing, ShardCodec};
pub use metadata::{Array, METADATA_BYTES_MAX, ZARR_JSON, ZARRAY};

#[cfg(test)]
mod tests;
