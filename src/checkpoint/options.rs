//! How a repository is opened.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use crate::source::{
    Fetches, SourceIo,
    remote::{RemoteOptions, cache::Cache, open_cache},
};

/// How to open a repository.
#[derive(Clone, Debug, Default)]
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
    /// Accepts symbolic links that lead out of the repository.
    pub follow_symlinks: bool,
    /// Opens the whole training state of a checkpoint that has one, not the model alone.
    pub training_state: bool,
    /// Where every wait for storage is noted.
    pub fetches: Arc<Fetches>,
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
