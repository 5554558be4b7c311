//! The plan of `hf/`: the repository's own files, their tensors with values as wanted.
//!
//! Files that do not change are the originals. A weight file with converted tensors keeps its name and the order of its
//! tensors; the index and `config.json` are rewritten to tell the truth about it.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{problem::Problem, values::Values};
use crate::{
    checkpoint::{Checkpoint, FileRole},
    source::FileId,
    tensor::{DType, TensorId, View},
};

/// One file of `hf/`.
#[derive(Clone, Debug)]
pub struct HfFile {
    /// Path relative to `hf/`, with `/` between components.
    pub path: String,
    /// What is in it.
    pub content: HfContent,
}

/// What is in a file of `hf/`.
#[derive(Clone, Debug)]
pub enum HfContent {
    /// The repository's file as it is.
    Original(FileId),
    /// A rewritten text.
    Text(Vec<u8>),
    /// Tensors under a new header.
    Weights {
        /// Names and views, in the order of the original.
        tensors: Vec<(TensorId, View)>,
        /// The header's `__metadata__`, in order.
        metadata: Vec<(String, String)>,
    },
}

/// Plans `hf/`.
///
/// # Errors
/// Every problem with a tensor's values.
pub(super) fn plan(checkpoint: &Checkpoint, values: &Values<'_>) -> Result<Vec<HfFile>, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut dropped_scales: BTreeSet<TensorId> = BTreeSet::new();
    let mut views: Vec<Option<View>> = Vec::new();
    let mut changed = false;
    if values.converts() {
        for (id, info) in checkpoint.tensors() {
            let dtype = values.dtype_of(&[info.name]);
            let view = values.view(id, dtype);
            if let (Some((scale, _)), Some(_)) = (values.scale_of(id), dtype) {
                dropped_scales.insert(scale);
            }
            match view {
                Ok(view) => {
                    changed |= view.as_source().is_none();
                    views.push(Some(view));
                }
                Err(problem) => {
                    problems.push(problem);
                    views.push(None);
                }
            }
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let mut by_file: Vec<Vec<(TensorId, View)>> = vec![Vec::new(); checkpoint.source().file_count()];
    if changed {
        for ((id, info), view) in checkpoint.tensors().zip(views) {
            if let Some(view) = view.filter(|_| !dropped_scales.contains(&id)) {
                by_file[info.file.index()].push((id, view));
            }
        }
    }
    let mut files = Vec::new();
    for file in checkpoint.files() {
        let (Some(id), FileRole::Weights | FileRole::Other) = (file.file, &file.role) else { continue };
        let original = HfContent::Original(id);
        let content = if !changed {
            original
        } else if file.role == FileRole::Weights {
            let tensors = std::mem::take(&mut by_file[id.index()]);
            let unchanged = tensors.iter().all(|(_, view)| view.as_source().is_some());
            let dropped =
                checkpoint.tensors().any(|(tensor, info)| info.file == id && dropped_scales.contains(&tensor));
            if unchanged && !dropped {
                original
            } else {
                HfContent::Weights { tensors, metadata: metadata(checkpoint, id) }
            }
        } else if file.path == "config.json" {
            match checkpoint.config() {
                Some(config) => HfContent::Text(pretty(&truthful_config(config, checkpoint, values))),
                None => original,
            }
        } else if file.path.ends_with(".safetensors.index.json") && !file.path.contains('/') {
            match index(checkpoint, &file.path, id, values, &dropped_scales) {
                Ok(Some(text)) => HfContent::Text(text),
                Ok(None) => original,
                Err(problem) => {
                    problems.push(problem);
                    original
                }
            }
        } else {
            original
        };
        files.push(HfFile { path: file.path.clone(), content });
    }
    if problems.is_empty() { Ok(files) } else { Err(problems) }
}

/// The header's metadata, with the `format` that transformers demands.
fn metadata(checkpoint: &Checkpoint, file: FileId) -> Vec<(String, String)> {
    let mut metadata = checkpoint.file_metadata(file).to_vec();
    if !metadata.iter().any(|(key, _)| key == "format") {
        metadata.push(("format".to_owned(), "pt".to_owned()));
    }
    metadata
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    text
}

/// `config.json` with the dtype that the weights now have, and without a quantization that was undone.
fn truthful_config(config: &Value, checkpoint: &Checkpoint, values: &Values<'_>) -> Value {
    let mut config = config.clone();
    let Some(name) = values.general_dtype().and_then(torch_name) else { return config };
    let undone = values.undoes_quantization();
    let nested = checkpoint.dialect().text_config.clone();
    let had_dtype = config.get("dtype").is_some();
    let rewrite = |members: &mut serde_json::Map<String, Value>, top: bool| {
        if members.contains_key("torch_dtype") || (top && !had_dtype) {
            members.insert("torch_dtype".to_owned(), json!(name));
        }
        if members.contains_key("dtype") {
            members.insert("dtype".to_owned(), json!(name));
        }
        if undone {
            members.shift_remove("quantization_config");
        }
    };
    if let Some(members) = config.as_object_mut() {
        rewrite(members, true);
        for (key, value) in members.iter_mut() {
            let is_nested = nested.as_deref() == Some(key) || key.ends_with("_config");
            if let (true, Some(inner)) = (is_nested, value.as_object_mut()) {
                rewrite(inner, false);
            }
        }
    }
    config
}

fn torch_name(dtype: DType) -> Option<&'static str> {
    dtype.is_float().then(|| dtype.name())
}

/// The index without dropped scales, its total size as it now is.
fn index(
    checkpoint: &Checkpoint,
    path: &str,
    file: FileId,
    values: &Values<'_>,
    dropped: &BTreeSet<TensorId>,
) -> Result<Option<Vec<u8>>, Problem> {
    let problem = |reason: String| Problem::Hf { path: path.to_owned(), reason };
    let mut bytes = vec![0; usize::try_from(checkpoint.source().len_bytes(file)).unwrap_or(0)];
    checkpoint.source().read_into(file, 0, &mut bytes).map_err(|error| problem(error.to_string()))?;
    let mut index: Value = serde_json::from_slice(&bytes).map_err(|error| problem(error.to_string()))?;
    let Some(map) = index.get_mut("weight_map").and_then(Value::as_object_mut) else { return Ok(None) };
    map.retain(|name, _| checkpoint.find(name).is_none_or(|id| !dropped.contains(&id)));
    let mut total = 0;
    for (id, info) in checkpoint.tensors().filter(|(id, _)| !dropped.contains(id)) {
        let view = values.view(id, values.dtype_of(&[info.name]))?;
        total += view.bytes().unwrap_or(0);
    }
    if let Some(metadata) = index.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.insert("total_size".to_owned(), json!(total));
    }
    Ok(Some(pretty(&index)))
}
