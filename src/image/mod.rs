//! The layout of virtual files: one output format a file, all rows of one type.
//!
//! An [`OutputFormat`] receives a view of the checkpoint ([`FormatInput`]) and returns directories and files
//! ([`FormatFiles`]). A file ([`VirtualFile`]) knows its length and lays out its [`FileContent`] when it is opened. A directory of very
//! many files is a [`Subtree`], whose nodes are computed by arithmetic. Other layers know nothing else of a format: to
//! add one, write its file here and its line in [`FORMATS`].
//!
//! A [`FileImage`] is a list of segments, each some literal bytes or the bytes of one view. A read finds the segments in
//! its span by bisection. This layer lowers no views and reads nothing.
//!
//! A file's length comes from its layout where the layout is cheap. A header of tens of thousands of rows is not. Such a
//! length is counted from the differences between devices, and [`VirtualFile::open`] refuses a file whose layout has
//! another length than the counted one.

mod array_table;
mod bundle;
mod chunk_grid;
mod dcp;
mod dcp_records;
mod file_image;
mod formats;
mod generated_records;
mod gguf;
mod hf;
mod input;
mod manifest;
mod name_tree;
mod npy;
mod orbax;
mod output;
mod pt;
mod raw;
mod safetensors;
mod safetensors_layout;
mod sharded_state;
mod tensor_files;
mod torch_archive;
mod universal;

pub use file_image::{FileImage, ImageError, Segment};
pub use formats::{FORMATS, layout, unavailable, unavailable_text};
pub use generated_records::GeneratedFile;
pub use input::FormatInput;
pub use output::{
    DerivedFrom, Directory, DirectoryEntry, FileContent, FormatFiles, LazyFile, OF_THE_HOST, OWN, Omission,
    OmittedFormat, OutputFormat, Shown, Subtree, SubtreeNode, VirtualFile, text_file,
};
pub use raw::raw;
