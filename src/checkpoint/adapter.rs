//! Adapters beside a repository: directories with a configuration and weights of their own.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    choose::{quoted, warn_of_weights},
    json,
    options::OpenOptions,
    problem::{CheckpointError, Problem},
    text::read_json,
};
use crate::source::{Beneath, Opened, SourceError};

/// Name of an adapter's weights.
pub(super) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// An adapter's directory, its configuration and its weights.
#[derive(Debug)]
pub(super) struct AdapterFiles {
    pub(super) dir: PathBuf,
    pub(super) config: serde_json::Value,
    pub(super) weights: Opened,
    pub(super) warning: Option<String>,
    /// Whether the weights fill what the checkpoint lacks, rather than adapt it.
    pub(super) fills: bool,
}

pub(super) fn read_adapters(options: &OpenOptions) -> Result<Vec<AdapterFiles>, CheckpointError> {
    options.adapters.iter().map(|dir| read_adapter(dir, options)).collect()
}

pub(super) fn read_adapter(dir: &Path, options: &OpenOptions) -> Result<AdapterFiles, CheckpointError> {
    const CONFIG: &str = "adapter_config.json";
    let problem = |message: String| CheckpointError::Problems {
        label: dir.display().to_string(),
        problems: vec![Problem::Json { file: CONFIG.to_owned(), message }],
        more: 0,
    };
    let follow = options.follow_symlinks;
    let opening = options.fetches.begin_path(dir, "open");
    let root = Beneath::open(dir).map_err(|error| problem(error.to_string()))?;
    let root = Arc::new(root);
    let found = root.find(CONFIG).map_err(|error| problem(error.to_string()))?;
    if !found.is_inside() && !follow {
        return Err(problem(format!(
            "symbolic link to {}, outside the adapter's directory; --follow-symlinks reads it",
            quoted(found.real())
        )));
    }
    let opened = found.open(Some(&root)).map_err(|error| problem(error.to_string()))?;
    drop(opening);
    let text = read_json(&opened, &options.fetches).map_err(problem)?;
    let config = json::parse(&text).map_err(|error| problem(error.to_string()))?;
    let weights = dir.join(ADAPTER_WEIGHTS);
    let opening = options.fetches.begin_path(&weights, "open");
    let found = root.find(ADAPTER_WEIGHTS).map_err(|error| SourceError::Io {
        file: Arc::from(weights.as_path()),
        action: "open".into(),
        error: Arc::new(error),
    })?;
    let outside = (!found.is_inside() && !follow).then(|| found.real().to_owned());
    let warning = outside.map(|target| warn_of_weights(&weights.display().to_string(), &target));
    let weights = found.open(Some(&root))?;
    drop(opening);
    Ok(AdapterFiles { dir: dir.to_owned(), config, weights, warning, fills: false })
}
