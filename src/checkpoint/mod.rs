//! The content of a repository: its tensors, files, configuration and dialect.
//!
//! [`Checkpoint::open`] finds the files, reads every header, checks index and headers against each other, and pins all
//! files in one `Source`. All problems are reported at once, before anything is mounted. The result never changes.
//!
//! * [`TensorTable`]: name, type, shape and storage of every tensor, as stored or as decoded;
//! * [`RepoFile`]: every file of the repository, and its role;
//! * [`Dialect`]: how the repository names, fuses and quantizes;
//! * [`runs`]: which checkpoints a trainer has left in a directory, and which of them are finished.
//!
//! What it deliberately does not do: rename, stack or convert anything (that is `plan`), or fetch from a network.

mod adapter;
mod amount;
mod average;
mod composed;
mod containers;
mod dialects;
mod files;
pub mod json;
mod merges;
mod mosaic;
mod open;
mod options;
mod printable;
mod problem;
mod python_regex;
mod repository;
pub mod runs;
pub mod scheme;
mod table;
mod versions;
mod words;

pub use amount::human_bytes;
pub use companion::Companion;
pub use composed::{Composed, ExpertPart};
pub use container::{Container, Contents, LeftOut, ParameterFrame, SavedArguments, SavedTree, UniversalFile};
pub use dialect::{Dialect, Experts, LayerFamily, Qkv};
pub use file::{FileRole, IgnoreReason, RepoFile};
pub use gguf::{GgufChange, GgufFamily, GgufKey, GgufTables, GgufTarget, GgufTokenizer};
pub use index::rewritten_index;
pub use locate::hub_cache_directory;
pub use merges::{Merge, Merges, ScaledProduct};
pub use options::{Accepted, OpenOptions};
pub use own_head::OwnHead;
pub use printable::{printable, printable_lines};
pub use problem::{CheckpointError, Expected, Problem, first_names};
pub use python_regex::PythonRegex;
pub use repository::{Adapter, Checkpoint, OpenedRepository};
pub use scheme::{Quantization, Quantized, Summary, Unsupported};
pub use table::{MosaicTensor, Storage, TensorInfo, TensorTable};
pub use weight_name::natural;

use self::{
    containers::{archive, container, copies, dcp, delta, gguf, header, index, orbax, ranks, safetensors, torch},
    dialects::{promised, tied},
    files::{alone, choose, companion, file, folder, foreign, listing, locate, remote_tree, sets, tree, weight_name},
};
pub use dialects::{dialect, own_head, prefix};
