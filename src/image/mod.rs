//! How a virtual file is laid out: one output format a file, all behind one trait.
//!
//! An [`OutputFormat`] is given a view of the checkpoint ([`FormatInput`]) and answers with directories and files
//! ([`Shown`]). A file ([`VirtualFile`]) knows its length and lays out its [`Content`] when it is opened; a directory of very
//! many files is a [`Subtree`], whose nodes are found by arithmetic. Whoever shows them needs no other word of a format: to
//! add one, write its file here and its line in [`FORMATS`].
//!
//! A [`FileImage`] is a list of segments, each some literal bytes or the bytes of one view; a read finds the segments that
//! its span touches by bisection. Views are not lowered here and nothing is read.
//!
//! A length is that of the layout itself wherever the layout is cheap. A header of tens of thousands of rows is not: lengths
//! of such files are counted from what differs between devices, and [`VirtualFile::open`] refuses a file whose layout has
//! another length than the one that was told.

mod array_table;
mod bundle;
mod chunk_grid;
mod dcp;
mod dcp_rows;
mod dcp_segments;
mod file_image;
mod formats;
mod hf;
mod input;
mod lazy_rows;
mod manifest;
mod name_tree;
mod npy;
mod orbax;
mod output;
mod pt;
mod raw;
mod rows;
mod safetensors;
mod safetensors_layout;
mod shard_class;
mod sharded_state;
mod tensor_files;
mod torch_archive;

pub use file_image::{FileImage, ImageError, Segment};
pub use formats::{FORMATS, show, unavailable, unavailable_text};
pub use input::{FormatInput, file_ids};
pub use output::{
    Content, Directory, DirectoryEntry, Lack, MadeOf, OWN, OutputFormat, Shown, Subtree, SubtreeNode, TextFile,
    Unavailable, VirtualFile,
};
pub use raw::raw;
pub use rows::RowFile;
