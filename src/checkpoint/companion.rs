//! What another repository lends to a checkpoint that lacks it: the configuration, the tokenizer, and on request tensors.
//!
//! A checkpoint of a training program holds weights only. The other files of a repository are small, so that they are
//! read whole when the checkpoint is opened.

use std::{io::Read, path::Path, sync::Arc};

use super::{
    adapter::AdapterFiles,
    choose::{CONFIG, INDEX_SUFFIX, quoted},
    file::FileRole,
    json,
    listing::{self, Listed},
    locate::locate,
    options::OpenOptions,
    problem::{CheckpointError, Problem},
};
use crate::source::{Beneath, Fetches, Opened, SourceError};

/// Most bytes of all files of a companion.
const BYTES_MAX: u64 = 512 << 20;

/// Most bytes of one of them. Tokenizers have up to 40 MB.
const FILE_BYTES_MAX: u64 = 128 << 20;

/// How the names of files end that a model needs beside its weights.
const ENDINGS: [&str; 10] =
    [".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".spm", ".bpe", ".vocab", ".jsonl"];

/// Directories of such files.
const DIRECTORIES: [&str; 1] = ["additional_chat_templates"];

/// Files that describe weights stored otherwise than those of the checkpoint.
const OF_OTHER_WEIGHTS: [&str; 3] = ["hf_quant_config.json", "quantize_config.json", "quant_config.json"];

/// Configuration and tokenizer from another repository.
#[derive(Clone, Debug)]
pub struct Companion {
    /// The user's name for it, with the revision found for a name in the cache.
    pub label: String,
    /// Paths in that repository and contents, without `config.json`; sorted.
    pub files: Vec<(String, Arc<[u8]>)>,
}

/// The companion that the user names, and its `config.json`.
///
/// # Errors
/// There is no such repository, or it has no readable `config.json`.
pub(super) fn read_companion(
    source: &str,
    options: &OpenOptions,
    warnings: &mut Vec<String>,
) -> Result<(Companion, serde_json::Value), CheckpointError> {
    let located = locate(source, options.hub_cache.as_deref())?;
    let failed = |file: &str, message: String| CheckpointError::Problems {
        label: format!("--config-from {}", located.label),
        problems: vec![Problem::Json { file: file.to_owned(), message }],
        more: 0,
    };
    if !located.path.is_dir() {
        return Err(failed(CONFIG, "expected a directory with this file, or org/name".to_owned()));
    }
    let list = |error| CheckpointError::Listing { root: located.path.clone(), error };
    let opening = options.fetches.begin_path(&located.path, "open");
    let root = Arc::new(Beneath::open(&located.path).map_err(list)?);
    drop(opening);
    if located.revision.is_some() && !root.is_in_hub_cache() && !options.follow_symlinks {
        return Err(CheckpointError::LeavesCache { snapshot: located.path });
    }
    let listed = listing::list(&root, &options.fetches).map_err(list)?.files;
    let (mut files, mut config, mut total) = (Vec::new(), None, 0u64);
    for mut file in listed.into_iter().filter(is_needed) {
        if let Some(target) = file.outside().filter(|_| !options.follow_symlinks) {
            let target = quoted(target);
            warnings.push(format!(
                "--config-from: {:?}: left out: symbolic link to {target}, outside the repository; --follow-symlinks reads it",
                file.path
            ));
            continue;
        }
        let text = read(&mut file, &root, &options.fetches, &mut total)?.map_err(|message| failed(&file.path, message))?;
        if file.path == CONFIG {
            let value = json::parse(&text).map_err(|error| failed(CONFIG, error.to_string()))?;
            config = Some(value).filter(serde_json::Value::is_object);
        } else {
            files.push((file.path, text.into()));
        }
    }
    let config = config.ok_or_else(|| failed(CONFIG, "expected this file, with an object".to_owned()))?;
    Ok((Companion { label: located.label, files }, config))
}

/// Whether a repository made from a checkpoint needs this file of the companion.
fn is_needed(file: &Listed) -> bool {
    let (directory, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
    file.role == FileRole::Other
        && (directory.is_empty() || DIRECTORIES.contains(&directory))
        && ENDINGS.iter().any(|ending| name.ends_with(ending))
        && !name.ends_with(INDEX_SUFFIX)
        && !name.ends_with(".bin.index.json")
        && !OF_OTHER_WEIGHTS.contains(&name)
}

/// The content of a file, or why it cannot be shown.
fn read(
    file: &mut Listed,
    root: &Arc<Beneath>,
    fetches: &Fetches,
    total: &mut u64,
) -> Result<Result<Vec<u8>, String>, SourceError> {
    let Some(opened) = file.open(root, fetches)? else { return Ok(Err("not a file".to_owned())) };
    let _reading = fetches.begin_path(opened.path(), "read");
    let mut bytes = Vec::new();
    if let Err(error) = opened.file().take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes) {
        return Ok(Err(error.to_string()));
    }
    *total += bytes.len() as u64;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Ok(Err(format!("expected at most {FILE_BYTES_MAX} bytes")));
    }
    if *total > BYTES_MAX {
        return Ok(Err(format!("expected at most {BYTES_MAX} bytes of all such files together")));
    }
    Ok(Ok(bytes))
}

/// The weight files of a repository that fills what the checkpoint lacks. `paths` are those of the repository as opened.
///
/// # Errors
/// A file is gone.
pub(super) fn fill_files<'a>(
    paths: impl Iterator<Item = &'a Path>,
    fetches: &Fetches,
) -> Result<Vec<AdapterFiles>, CheckpointError> {
    let open = |path: &Path| {
        let failed = |error| SourceError::Io { file: Arc::from(path), action: "open".into(), error: Arc::new(error) };
        let _opening = fetches.begin_path(path, "open");
        let weights: Opened = crate::source::Found::named(path).map_err(failed)?.open(None)?;
        let config = serde_json::Value::Null;
        Ok(AdapterFiles { dir: path.to_owned(), config, weights, warning: None, fills: true })
    };
    paths.map(open).collect()
}
