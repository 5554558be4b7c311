//! Files taken from another repository: `config.json`, tokenizer and, on request, tensors.
//!
//! A checkpoint of a training program holds weights only. The other files of a repository are small, so that they are
//! read whole when the checkpoint is opened.

use std::sync::Arc;

use ckfs_source::SourceError;
use serde_json::Value;

use super::super::{
    choose::CONFIG,
    file::FileRole,
    folder::{Folder, Text},
    foreign::lfs_pointer,
    json,
    problem::CheckpointError,
    tree::{FileTree, below},
    weight_name::is_any_index,
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
pub(crate) fn read_companion(label: String, tree: &dyn FileTree) -> Result<(Companion, Value), CheckpointError> {
    let failed = |file: &str, what: String| CheckpointError::of_file(format_args!("--config-from {label}"), file, what);
    let mut found = Vec::new();
    for directory in [""].into_iter().chain(DIRECTORIES) {
        for entry in tree.list(directory)?.iter().filter(|entry| !entry.is_directory && is_needed(&entry.name)) {
            let path = below(directory, &entry.name);
            found.push((path.clone(), tree.len_bytes(&path)?.unwrap_or(0), path));
        }
    }
    let (files, config) = gathered(found, &failed, &mut |path| {
        let Some(text) = tree.description(path)? else { return Ok(None) };
        // Trees of services need such a file.
        let pointer = lfs_pointer(&text, tree.needs_commit_file());
        Ok(Some(pointer.map_or(Ok(text), |pointer| Err(pointer.to_owned()))))
    })?;
    let config = config.ok_or_else(|| failed(CONFIG, "expected this file, with an object".to_owned()))?;
    Ok((Companion { label, files }, config))
}

/// Names and contents.
type CompanionFiles = Vec<(String, Arc<[u8]>)>;

/// The contents of these files, by path, length and name, and of `config.json` among them, if it is an object.
fn gathered(
    found: Vec<(String, u64, String)>,
    failed: &dyn Fn(&str, String) -> CheckpointError,
    read: &mut dyn FnMut(&str) -> Result<Option<Text>, SourceError>,
) -> Result<(CompanionFiles, Option<Value>), CheckpointError> {
    let (mut files, mut config, mut total) = (Vec::new(), None, 0u64);
    for (path, len, name) in found {
        total = total.saturating_add(len);
        if len > FILE_BYTES_MAX || total > BYTES_MAX {
            let message =
                format!("expected at most {FILE_BYTES_MAX} bytes, and {BYTES_MAX} of all such files together");
            return Err(failed(&path, message));
        }
        let Some(text) = read(&path)? else { continue };
        let text = text.map_err(|message| failed(&path, message))?;
        if name == CONFIG {
            let value = json::parse(&text).map_err(|error| failed(&path, json::fault(&error)))?;
            config = Some(value).filter(Value::is_object);
        } else {
            files.push((name, text.into()));
        }
    }
    Ok((files, config))
}

/// The companion in a directory of a folder, such as `huggingface/`, and its `config.json`; `None` if it has none.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn of_folder(folder: &mut Folder, below: &str) -> Result<Option<(Companion, Value)>, CheckpointError> {
    let label = folder.located.path.join(below.trim_end_matches('/')).display().to_string();
    let is_inside = |path: &str| {
        let name = path.strip_prefix(below)?;
        let in_directory = name
            .split_once('/')
            .is_none_or(|(directory, name)| DIRECTORIES.contains(&directory) && !name.contains('/'));
        (in_directory && is_needed(name)).then(|| name.to_owned())
    };
    let listed = folder.files.iter().filter(|file| file.role == FileRole::Other);
    let listed: Vec<(String, u64, String)> =
        listed.filter_map(|file| Some((file.path.clone(), file.size_bytes, is_inside(&file.path)?))).collect();
    let Some((path, ..)) = listed.iter().find(|(_, _, name)| name == CONFIG).cloned() else { return Ok(None) };
    let failed = |file: &str, what: String| CheckpointError::of_file(&label, file, what);
    let (files, config) = gathered(listed, &failed, &mut |path| folder.read(path))?;
    let config = config.ok_or_else(|| failed(&path, "expected an object".to_owned()))?;
    Ok(Some((Companion { label, files }, config)))
}

/// Whether a file of this name is needed beside the weights.
fn is_needed(name: &str) -> bool {
    ENDINGS.iter().any(|ending| name.ends_with(ending)) && !is_any_index(name) && !OF_OTHER_WEIGHTS.contains(&name)
}
