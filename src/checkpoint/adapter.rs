//! Adapters beside a repository: directories with a configuration and weights of their own.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs_source::{FoundFile, Opened, RootDir, SourceError, remote::RemoteTree};

use super::{
    choose::{quoted, warn_of_weights},
    foreign::lfs_pointer,
    json::{self, read_json},
    locate::locate,
    options::OpenOptions,
    printable::printable,
    problem::CheckpointError,
};

/// Name of an adapter's weights.
pub(super) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Name of an adapter's weights as older programs save them.
const ADAPTER_PICKLE: &str = "adapter_model.bin";

/// Name of an adapter's configuration.
pub(super) const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Name of an adapter's weights as MLX saves them.
const MLX: &str = "adapters.safetensors";

/// Whether a file has the name of an adapter's weights: of PEFT, also in parts, or of MLX.
pub(super) fn is_adapter_file(path: &str) -> bool {
    path.starts_with("adapter_model") || path.starts_with(MLX)
}

/// What to do with the adapter in `dir` that is given as if it were a model. `base` is that of its configuration.
pub(super) fn not_a_model(path: &str, base: Option<&str>, dir: &str) -> String {
    if path.starts_with(MLX) {
        return "an adapter of MLX, not a model: merge it with mlx_lm.fuse and give the result".to_owned();
    }
    let base = base.filter(|base| !base.is_empty());
    let of = base.map_or_else(String::new, |base| format!(" of {}", printable(base)));
    let base = base.map_or_else(|| "its base".into(), printable);
    format!(
        "an adapter{of}, not a model: give {base} as the source; --merge-lora {dir} merges the adapter into it, and --lora {dir} shows it \
         beside it"
    )
}

/// An adapter's directory, its configuration and its weights.
pub(super) struct AdapterFiles {
    pub(super) dir: PathBuf,
    pub(super) config: serde_json::Value,
    pub(super) weights: Opened,
    pub(super) warning: Option<String>,
    /// Whether the weights fill what the checkpoint lacks, rather than adapt it.
    pub(super) fills: bool,
}

/// The problem of an adapter without the weights that are read.
fn unsaved(dir: &Path) -> CheckpointError {
    let message = if dir.join(ADAPTER_PICKLE).exists() {
        format!(
            "expected {ADAPTER_WEIGHTS}, found {ADAPTER_PICKLE}, a pickle, which is not read: load it with peft and save it again, \
             which writes {ADAPTER_WEIGHTS}"
        )
    } else {
        format!("expected {ADAPTER_WEIGHTS} beside it, found none: is the adapter complete?")
    };
    CheckpointError::of_file(dir.display(), ADAPTER_CONFIG, message)
}

/// An adapter of a service: of the Hub, or in a bucket.
fn read_remote(dir: &Path, source: &str, options: &OpenOptions) -> Result<AdapterFiles, CheckpointError> {
    let located = locate(source, options)?;
    let Some(repository) = located.remote else {
        // The Hub's cache has it.
        let local = read_adapter(&located.path, options)?;
        return Ok(AdapterFiles { dir: dir.to_owned(), ..local });
    };
    let tree = RemoteTree::open(repository, &options.cache(), &options.remote)?;
    let find = |name: &str| {
        let missing = || CheckpointError::of_file(&located.label, name, "expected this file of an adapter");
        let place = tree.repository().files.iter().position(|file| file.path == name).ok_or_else(missing)?;
        let failed = |error| SourceError::io(dir.join(name), "open", error);
        Ok::<_, CheckpointError>(FoundFile::cached(tree.remote(place)?).map_err(failed)?.open(None)?)
    };
    let problem = |message: String| CheckpointError::of_file(&located.label, ADAPTER_CONFIG, message);
    let config = config_of(&find(ADAPTER_CONFIG)?, options).map_err(problem)?;
    let weights = find(ADAPTER_WEIGHTS)?;
    Ok(AdapterFiles { dir: dir.to_owned(), config, weights, warning: None, fills: false })
}

/// An adapter's configuration, or why there is none.
fn config_of(opened: &Opened, options: &OpenOptions) -> Result<serde_json::Value, String> {
    let text = read_json(opened, &options.fetches)?;
    match lfs_pointer(&text, false) {
        Some(pointer) => Err(pointer.to_owned()),
        None => json::parse(&text).map_err(|error| json::fault(&error)),
    }
}

pub(super) fn read_adapter(dir: &Path, options: &OpenOptions) -> Result<AdapterFiles, CheckpointError> {
    let problem = |message: String| CheckpointError::of_file(dir.display(), ADAPTER_CONFIG, message);
    if let Some(source) = dir.to_str().filter(|source| source.contains("://")) {
        return read_remote(dir, source, options);
    }
    let follow = options.follow_symlinks;
    let opening = options.fetches.begin_path(dir, "open");
    let root = RootDir::open(dir).map_err(|error| {
        // A relative path was completed, also that of a name on the Hub.
        let advice = if dir.exists() { "" } else { "; an adapter on the Hub is hf://org/name" };
        problem(format!("{error}{advice}"))
    })?;
    let root = Arc::new(root);
    let found = root.find(ADAPTER_CONFIG).map_err(|error| problem(error.to_string()))?;
    if !found.is_inside() && !follow {
        return Err(problem(format!(
            "symbolic link to {}, outside the adapter's directory; --follow-symlinks reads it",
            quoted(found.real())
        )));
    }
    let opened = found.open(Some(&root)).map_err(|error| problem(error.to_string()))?;
    drop(opening);
    let config = config_of(&opened, options).map_err(problem)?;
    let weights = dir.join(ADAPTER_WEIGHTS);
    let opening = options.fetches.begin_path(&weights, "open");
    let found = root.find(ADAPTER_WEIGHTS).map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound {
            return unsaved(dir);
        }
        SourceError::io(&*weights, "open", error).into()
    })?;
    let outside = (!found.is_inside() && !follow).then(|| found.real().to_owned());
    let warning = outside.map(|target| warn_of_weights(&weights.display().to_string(), &target));
    let weights = found.open(Some(&root))?;
    drop(opening);
    Ok(AdapterFiles { dir: dir.to_owned(), config, weights, warning, fills: false })
}
