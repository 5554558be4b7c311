//! Opening a repository.

use std::path::PathBuf;

use crate::source::SourceIo;

/// How to open a repository.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// How local files are read.
    pub io: SourceIo,
    /// Directory of the hub cache; `None` takes it from the environment as the hub's client does.
    pub hub_cache: Option<PathBuf>,
}
