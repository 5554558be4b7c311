//! A reader of OCDBT, the key-value store in one directory that Orbax writes its checkpoints into.
//!
//! ```text
//! manifest.ocdbt                 configuration, and the roots of the newest versions
//! manifest.<16 hex digits>       the same, if the manifest is numbered: then `manifest.ocdbt` has the configuration alone
//! d/<32 hex digits>              values, B+tree nodes and version nodes, in no order
//! ```
//!
//! A manifest names the root node of each version; an interior node names its children, a leaf has keys with their values or
//! says where a value lies. Every block has a length and a CRC-32C, and both are checked before anything else is read.
//! Values outside nodes have no checksum. Each block has a table of the files that it refers to: the merged database of several
//! processes refers to the files of theirs by paths with a base, which the nodes below inherit.
//!
//! Nothing here reads a file. [`Manifest::parse`] turns bytes into a description; [`Walk`] says which nodes are to be fetched
//! for the wanted keys, all those of one level at once, and gives the keys and values of the nodes that it is given.
//!
//! A block may be hostile: work and memory are bounded by its length, by [`DECODED_BYTES_MAX`] and by the other limits here, and
//! a path that leaves the database is an error.

mod cursor;
mod envelope;
mod files;
mod manifest;
mod node;
mod walk;

pub use cursor::Block;
pub use envelope::DECODED_BYTES_MAX;
pub use files::BlobLocation;
pub use manifest::{MANIFEST, Manifest, Version, numbered_generation, numbered_name};
pub use node::{NodeRef, NodeValue};
pub use walk::{KeyRange, Walk};

#[cfg(test)]
mod tests;
