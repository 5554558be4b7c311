//! The content of a repository: its tensors, files, configuration and dialect.
//!
//! [`Checkpoint::open`] finds the files, reads every header, checks index and headers against each other, and pins all
//! files in one `Source`. All problems are reported at once, before anything is mounted. The result never changes.
//!
//! * [`TensorTable`]: name, type, shape and storage of every tensor, as stored or as decoded;
//! * [`RepoFile`]: every file of the repository, and its role;
//! * [`Dialect`]: how the repository names, fuses and quantizes.
//!
//! What it deliberately does not do: rename, stack or convert anything (that is `plan`), or fetch from a network.

mod adapter;
mod archive;
mod choose;
mod companion;
mod container;
mod dcp;
pub mod dialect;
mod file;
mod folder;
mod foreign;
mod header;
mod index;
pub mod json;
mod listing;
mod locate;
mod mosaic;
mod open;
mod options;
mod orbax;
pub mod prefix;
mod printable;
mod problem;
pub mod quantization;
mod remote_tree;
mod repository;
mod safetensors;
pub mod scheme;
mod table;
mod text;
mod tied;
mod torch;
mod tree;

pub use choose::natural;
pub use companion::Companion;
pub use container::{Container, LeftOut, SavedTree};
pub use dialect::{Dialect, Experts, LayerFamily, Qkv};
pub use file::{FileRole, IgnoreReason, RepoFile};
pub use index::rewritten_index;
pub use options::OpenOptions;
pub use orbax::OrbaxProblem;
pub use printable::{printable, printable_lines};
pub use problem::{CheckpointError, Expected, Problem};
pub use quantization::Quantization;
pub use repository::{Adapter, Checkpoint};
pub use scheme::{Quantized, Summary, Unsupported};
pub use table::{MosaicTensor, Storage, TensorInfo, TensorTable};
