//! What a source holds: the container of its tensors, judged by the names of its files.
//!
//! | container | files | read by |
//! | --- | --- | --- |
//! | [`Container::Safetensors`] | a Hugging Face repository or a single `.safetensors` | `safetensors.rs` |
//! | [`Container::Torch`] | `pytorch_model*.bin`, `.pt`, `.pth`: archives of `torch.save` | `torch.rs` |
//! | [`Container::Gguf`] | `.gguf` of llama.cpp, one or a numbered set | `gguf/` |
//! | [`Container::Orbax`] | `_METADATA`, `manifest.ocdbt`, `_CHECKPOINT_METADATA`; found by `orbax/item.rs` before files are listed | `orbax/` |
//! | [`Container::Ranks`] | `model_world_size_*_rank_*.pt`: a file of each rank's own parts | `ranks/` |
//! | [`Container::Dcp`] | `.metadata` and `*.distcp`, or safetensors that say where their tensors are in the whole | `dcp.rs` |
//!
//! A dialect for a container has two functions. `choose` looks at a [`Folder`] and says which files are weights. `read` takes the
//! [`PinnedFiles`] and returns [`Contents`]. To add one: a variant of [`Container`], its test in [`Container::of`], and its lines in
//! `open.rs`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use ckfs_format::orbax::read::TreeKey;
use ckfs_source::FileId;
use ckfs_tensor::{DType, TensorId};

use super::super::{
    choose::{INDEX_SUFFIX, TORCH_INDEX_SUFFIX, at_top, is_safetensors},
    copies::Copies,
    file::{FileRole, IgnoreReason},
    folder::Folder,
    orbax::DecodedFile,
    table::TensorTable,
    weight_name::variant_of_index,
    words::words,
};

/// What the tree of a trainer's checkpoint has that the names of the tensors do not tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedTree {
    /// The keys on the way to a tensor, by its name: where keys have dots or are places in lists.
    pub keys: HashMap<String, Vec<TreeKey>>,
    /// Names of tensors that are single numbers of Python.
    pub scalars: HashSet<String>,
    /// Leaves without an array, which are empty containers, places with nothing, and texts of a training state: the keys on the way,
    /// and what is there as Orbax calls it.
    pub empty: Vec<(Vec<TreeKey>, String)>,
    /// Names of tensors that were arrays of jax, of a training state.
    pub jax_arrays: HashSet<String>,
    /// What is no tensor, of a training state: the stored bytes of pickled members by name, or of the files of an Orbax item.
    pub objects: BTreeMap<String, Arc<[u8]>>,
    /// Files beside those of the tensors that go with them unchanged, of a training state: names in the directory.
    pub companions: Vec<(String, FileId)>,
    /// The arguments of the training.
    pub arguments: Option<Box<SavedArguments>>,
    /// The files of a universal checkpoint of DeepSpeed, of a training state, by path.
    pub universal: BTreeMap<String, UniversalFile>,
}

/// A file of a universal checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UniversalFile {
    /// A file of the source, unchanged.
    Original(FileId),
    /// `torch.save` of a tensor, by name: flat, or in a dictionary with the axis along which ranks had split it.
    Parameter {
        /// Name of the tensor.
        tensor: String,
        /// How the file holds it.
        frame: ParameterFrame,
    },
    /// `torch.save` of a stored tensor that has no name, in float32, in a dictionary.
    Unnamed(TensorId),
    /// The same of these values.
    Values {
        /// Its shape.
        shape: Vec<u64>,
        /// Little-endian numbers of float32, row-major.
        bytes: Arc<[u8]>,
    },
    /// An archive of a pickle, with the bytes of its storages: key, and a stored tensor without a name.
    Pickled {
        /// The pickle.
        pickle: Arc<[u8]>,
        /// The storages.
        storages: Vec<(String, TensorId)>,
    },
}

/// How a file of a universal checkpoint holds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterFrame {
    /// By itself, with one axis.
    Flat,
    /// In a dictionary that says that ranks had split axis 0.
    Split,
    /// In a dictionary, in float32.
    Float32,
}

/// The arguments of a training, beside its weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedArguments {
    /// The file that has them.
    pub file: String,
    /// By name.
    pub values: serde_json::Map<String, serde_json::Value>,
}

words! {
    /// The container of a checkpoint's tensors.
    #[derive(Default)]
    pub enum Container {
        /// Safetensors files, each tensor whole.
        #[default]
        Safetensors = "safetensors",
        /// Archives of `torch.save`.
        Torch = "torch.save",
        /// Files of llama.cpp.
        Gguf = "GGUF",
        /// A directory of `torch.distributed.checkpoint`.
        Dcp = "torch.distributed.checkpoint",
        /// Files of ranks: each rank has saved its own parts of the tensors.
        Ranks = "files of ranks",
        /// A checkpoint of Orbax: zarr arrays in an OCDBT database or in directories.
        Orbax = "Orbax",
    }
}

/// Something of a checkpoint that is no tensor and is not shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Its name: the keys on the way to it, joined by dots.
    pub name: String,
    /// What it is.
    pub kind: String,
}

impl LeftOut {
    /// A tensor of the optimizer.
    pub(crate) fn of_optimizer(name: String, dtype: DType, shape: &[u64]) -> Self {
        Self { name, kind: format!("{dtype} {shape:?} of the optimizer (--training-state shows it)") }
    }
}

/// What a dialect has read.
#[derive(Debug, Default)]
pub struct Contents {
    /// The container, as the files turned out to be.
    pub(crate) container: Container,
    /// The tensors.
    pub(crate) table: TensorTable,
    /// The metadata of weight files.
    pub(crate) file_metadata: BTreeMap<FileId, Vec<(String, String)>>,
    /// What the files of weights hold besides tensors. It is not shown.
    pub left_out: Vec<LeftOut>,
    /// Files that the source decodes, with the ids after those of the pinned files.
    pub(crate) decoded: Vec<DecodedFile>,
    /// The configuration that the weight files tell of.
    pub(crate) config: Option<serde_json::Value>,
    /// Why the tensors have no names of a repository, where the container has names of its own.
    pub unnamed: Option<String>,
    /// Whether the layers of a MaxText model are stacked, if the checkpoint says it.
    pub scan_layers: Option<bool>,
    /// What the tree that a trainer saved has besides the names of the tensors.
    pub tree: SavedTree,
    /// Weight files that are not the model's after all.
    pub(crate) unused: Vec<(FileId, IgnoreReason)>,
    /// Weight files that hold tensors which are not the model's.
    pub(crate) partial: BTreeSet<FileId>,
    /// Whether the files are those of ranks.
    pub(crate) are_ranks: bool,
    /// Number of files of ranks, if nothing in them says how many there were.
    pub(crate) uncounted: Option<usize>,
    /// What the user should know.
    pub(crate) warnings: Vec<String>,
}

impl Contents {
    /// These tensors, and nothing else.
    pub(crate) fn new(container: Container, table: TensorTable) -> Self {
        Self { container, table, ..Self::default() }
    }

    /// Notes the copies and the variants that are left out.
    pub(crate) fn take(&mut self, copies: Copies) {
        self.partial.extend(copies.files());
        self.unused.extend(copies.variants.into_iter().map(|file| (file, IgnoreReason::OtherVariant)));
        self.warnings.extend(copies.warnings);
    }
}

/// How the names of files of llama.cpp end.
const GGUF: &str = ".gguf";

/// The description of a classic directory of `torch.distributed.checkpoint`.
pub(crate) const DCP_METADATA: &str = ckfs_format::dcp::read::METADATA;

/// Whether a file may hold tensors, by its name.
pub(crate) fn is_weights(path: &str) -> bool {
    is_safetensors(path) || is_torch(path) || path.ends_with(".distcp") || path.ends_with(GGUF)
}

/// Whether a file is of `torch.save`, by its name.
pub(crate) fn is_torch(path: &str) -> bool {
    [".bin", ".pt", ".pth", ".ckpt"].iter().any(|suffix| path.ends_with(suffix))
}

impl Container {
    /// The container of a directory; `None` if no file has the name of one.
    pub(crate) fn of(folder: &Folder) -> Option<Self> {
        let top = || folder.files.iter().filter(|file| file.role == FileRole::Other && at_top(&file.path));
        if folder.has(DCP_METADATA) && !top().any(|file| is_safetensors(&file.path)) {
            return Some(Self::Dcp);
        }
        let any = |suffix: &str| top().any(|file| file.path.ends_with(suffix));
        let indexed = |suffix: &str| top().any(|file| variant_of_index(&file.path, suffix).is_some());
        if any(".safetensors") || indexed(INDEX_SUFFIX) {
            return Some(Self::Safetensors);
        }
        let torch = top().any(|file| is_torch(&file.path)) || indexed(TORCH_INDEX_SUFFIX);
        if torch { Some(Self::Torch) } else { any(GGUF).then_some(Self::Gguf) }
    }
}
