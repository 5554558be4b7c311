//! Files taken from another repository: `config.json`, tokenizer and, on request, tensors.
//!
//! A checkpoint of a training program holds weights only. The other files of a repository are small, so that they are
//! read whole when the checkpoint is opened.

use std::{io, path::PathBuf, sync::Arc};

use ckfs_source::{FoundFile, SourceError, WaitRegistry};

use super::super::{
    adapter::AdapterFiles, choose::CONFIG, file::FileRole, folder::Folder, foreign::lfs_pointer, json,
    problem::CheckpointError, text::io_error, tree::FileTree, weight_name::is_any_index,
};

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

/// The companion in a tree, and its `config.json`.
///
/// # Errors
/// A file cannot be read, or there is no readable `config.json`.
pub(crate) fn read_companion(
    label: String,
    tree: &dyn FileTree,
) -> Result<(Companion, serde_json::Value), CheckpointError> {
    let failed =
        |file: &str, message: String| CheckpointError::of_file(format_args!("--config-from {label}"), file, message);
    let (mut files, mut config, mut total) = (Vec::new(), None, 0u64);
    for path in needed(tree)? {
        let len = tree.len_bytes(&path)?.unwrap_or(0);
        total = total.saturating_add(len);
        if len > FILE_BYTES_MAX || total > BYTES_MAX {
            let message =
                format!("expected at most {FILE_BYTES_MAX} bytes, and {BYTES_MAX} of all such files together");
            return Err(failed(&path, message));
        }
        let Some(text) = tree.description(&path)? else { continue };
        // Trees of services need such a file.
        let is_remote = tree.needs_commit_file();
        if let Some(found) = lfs_pointer(&text, is_remote) {
            return Err(failed(&path, found.to_owned()));
        }
        if path == CONFIG {
            let value = json::parse(&text).map_err(|error| failed(CONFIG, json::fault(&error)))?;
            config = Some(value).filter(serde_json::Value::is_object);
        } else {
            files.push((path, text.into()));
        }
    }
    let config = config.ok_or_else(|| failed(CONFIG, "expected this file, with an object".to_owned()))?;
    Ok((Companion { label, files }, config))
}

/// The companion in a directory of a folder, such as `huggingface/`, and its `config.json`; `None` if it has none.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn of_folder(
    folder: &mut Folder,
    below: &str,
) -> Result<Option<(Companion, serde_json::Value)>, CheckpointError> {
    let label = folder.located.path.join(below.trim_end_matches('/')).display().to_string();
    let is_inside = |path: &str| {
        let name = path.strip_prefix(below)?;
        let in_directory = name
            .split_once('/')
            .is_none_or(|(directory, name)| DIRECTORIES.contains(&directory) && !name.contains('/'));
        (in_directory && is_needed(name)).then(|| name.to_owned())
    };
    let listed = folder.files.iter().filter(|file| file.role == FileRole::Other);
    let listed: Vec<(String, String, u64)> =
        listed.filter_map(|file| Some((file.path.clone(), is_inside(&file.path)?, file.size_bytes))).collect();
    if !listed.iter().any(|(_, name, _)| name == CONFIG) {
        return Ok(None);
    }
    let failed = |file: &str, message: String| CheckpointError::of_file(&label, file, message);
    let (mut files, mut config, mut total) = (Vec::new(), None, 0u64);
    for (path, name, size_bytes) in listed {
        total = total.saturating_add(size_bytes);
        if size_bytes > FILE_BYTES_MAX || total > BYTES_MAX {
            let message =
                format!("expected at most {FILE_BYTES_MAX} bytes, and {BYTES_MAX} of all such files together");
            return Err(failed(&path, message));
        }
        let Some(text) = folder.read(&path)? else { continue };
        let text = text.map_err(|message| failed(&path, message))?;
        if name == CONFIG {
            let value = json::parse(&text).map_err(|error| failed(&path, json::fault(&error)))?;
            if !value.is_object() {
                return Err(failed(&path, "expected an object".to_owned()));
            }
            config = Some(value);
        } else {
            files.push((name, text.into()));
        }
    }
    Ok(config.map(|config| (Companion { label, files }, config)))
}

/// The problem of a companion that is a file.
pub(crate) fn not_a_directory(label: &str) -> CheckpointError {
    let label = format_args!("--config-from {label}");
    CheckpointError::of_file(label, CONFIG, "expected a directory with this file, or org/name")
}

/// Paths of the files that a repository made from a checkpoint needs.
fn needed(tree: &dyn FileTree) -> Result<Vec<String>, SourceError> {
    let mut paths = Vec::new();
    for directory in [""].into_iter().chain(DIRECTORIES) {
        let entries = tree.list(directory)?.into_iter().filter(|entry| !entry.is_directory && is_needed(&entry.name));
        let below = if directory.is_empty() { String::new() } else { format!("{directory}/") };
        paths.extend(entries.map(|entry| format!("{below}{}", entry.name)));
    }
    Ok(paths)
}

/// Whether a file of this name is needed beside the weights.
fn is_needed(name: &str) -> bool {
    ENDINGS.iter().any(|ending| name.ends_with(ending)) && !is_any_index(name) && !OF_OTHER_WEIGHTS.contains(&name)
}

/// The weight files of a repository that fills what the checkpoint lacks, each with its name.
///
/// # Errors
/// A file is gone.
pub(crate) fn fill_files(
    found: impl Iterator<Item = (io::Result<FoundFile>, PathBuf)>,
    fetches: &WaitRegistry,
) -> Result<Vec<AdapterFiles>, CheckpointError> {
    let open = |(found, path): (io::Result<FoundFile>, PathBuf)| {
        let _opening = fetches.begin_path(&path, "open");
        let weights = found.map_err(|error| io_error(&path, "open", error))?.open(None)?;
        let config = serde_json::Value::Null;
        Ok(AdapterFiles { dir: path, config, weights, warning: None, fills: true })
    };
    found.map(open).collect()
}
