//! How a repository is opened.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use ckfs_source::{
    ComparedFiles, Duplicates, Opened, SourceIo, WaitRegistry,
    remote::{RemoteOptions, cache::Cache, open_cache},
};
use parking_lot::Mutex;

/// Names of tensors that are accepted; none by default.
#[derive(Clone, Default)]
pub struct Accepted(Option<Arc<NameTest>>);

type NameTest = dyn Fn(&str) -> bool + Send + Sync;

impl Accepted {
    /// The names for which `accepts` is true.
    pub fn new(accepts: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(accepts)))
    }

    /// Whether a name is accepted.
    pub fn accepts(&self, name: &str) -> bool {
        self.0.as_ref().is_some_and(|accepts| accepts(name))
    }
}

/// How to open a repository.
#[derive(Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of the user")]
pub struct OpenOptions {
    /// How local files are read.
    pub io: SourceIo,
    /// Directories of adapters, each with `adapter_config.json` and `adapter_model.safetensors`.
    pub adapters: Vec<PathBuf>,
    /// Directory of the hub cache; `None` takes it from the environment as the hub's client does.
    pub hub_cache: Option<PathBuf>,
    /// A repository whose `config.json` and tokenizer the checkpoint takes over.
    pub config_from: Option<String>,
    /// A repository whose tensors fill what the checkpoint lacks, where a layout asks for it.
    pub fill_from: Option<String>,
    /// The model that a run began with, which published differences build on.
    pub base: Option<String>,
    /// The terms of an average, the opened source among them, each a source and its weight; none if it is no average.
    pub average: Vec<(String, f32)>,
    /// Receives the files, open a second time, for an average that the source is a term of.
    pub kept_open: Option<Arc<Mutex<Vec<Opened>>>>,
    /// Accepts symbolic links that lead out of the repository.
    pub follow_symlinks: bool,
    /// Opens the whole training state of a checkpoint that has one, not the model alone.
    pub training_state: bool,
    /// Reads a checkpoint that its saver has not marked as finished, if all of it is there.
    pub allow_unfinished: bool,
    /// Tensors that the index may name although no file has them.
    pub allow_missing: Accepted,
    /// Tensors that a file may have although the index does not name them.
    pub allow_unmapped: Accepted,
    /// Which copy of a tensor counts. `None`: the index's, if it is the last one too; else copies are refused.
    pub duplicates: Option<Duplicates>,
    /// The variant of the weights, as `fp16` in `model.fp16.safetensors`.
    pub variant: Option<String>,
    /// Where blobs of the hub's cache are noted that have the digest of their name. `None` compares them each time.
    pub compared: Option<Arc<ComparedFiles>>,
    /// Where every wait for storage is noted.
    pub fetches: Arc<WaitRegistry>,
    /// Asks the Hub for names that the Hub's cache lacks, and for what a branch stands for now.
    pub asks_hub: bool,
    /// Settings of remote sources.
    pub remote: RemoteOptions,
    /// The disk cache; [`OpenOptions::cache`] opens it.
    pub opened_cache: Arc<OnceLock<Arc<Cache>>>,
}

impl OpenOptions {
    /// The disk cache of remote sources, opened at the first call: one for everything that is opened with these options.
    pub fn cache(&self) -> Arc<Cache> {
        Arc::clone(self.opened_cache.get_or_init(|| open_cache(&self.remote, Arc::default())))
    }
}
