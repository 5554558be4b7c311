//! The plan of `hf/`: the repository's own files, with the requested values in their tensors.
//!
//! A file that does not change is the original. A weight file with converted tensors keeps its name and the order of
//! its tensors. The index and `config.json` are rewritten to describe the converted files.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{
    names,
    problem::Problem,
    rename::{self, Rename},
    values::Values,
};
use crate::{
    checkpoint::{Checkpoint, Container, FileRole, json},
    source::FileId,
    tensor::{DType, TensorId, View},
};

/// One file of `hf/`.
#[derive(Clone, Debug)]
pub struct HfFile {
    /// Path relative to `hf/`, with `/` between components.
    pub path: String,
    /// Its content.
    pub content: HfContent,
}

/// The content of a file of `hf/`.
#[derive(Clone, Debug)]
pub enum HfContent {
    /// The repository's file as it is.
    Original(FileId),
    /// A rewritten text.
    Text(Vec<u8>),
    /// Tensors under a new header.
    Weights {
        /// Names and views, in the order of the original.
        tensors: Vec<(String, View)>,
        /// The header's `__metadata__`, in order.
        metadata: Vec<(String, String)>,
    },
}

/// Tensors that would have one name.
fn collisions(original: &Checkpoint, shown: &[(TensorId, String, View)]) -> Vec<Problem> {
    let mut names: HashMap<&str, TensorId> = HashMap::with_capacity(shown.len());
    let mut problems = Vec::new();
    for (id, name, _) in shown {
        if let Some(first) = names.insert(name, *id) {
            problems.push(Problem::Collision {
                path: format!("hf: {name}"),
                first: original.tensor(first).name.to_owned(),
                second: original.tensor(*id).name.to_owned(),
            });
        }
    }
    problems
}

/// Plans `hf/` for the part of the repository that `values` covers. `original` is the whole repository under its own
/// names.
///
/// # Errors
/// Every problem with a tensor's values or name.
pub(super) fn plan(
    original: &Checkpoint,
    values: &Values<'_>,
    renames: &[Rename],
    tie: bool,
) -> Result<Vec<HfFile>, Vec<Problem>> {
    let checkpoint = values.checkpoint();
    let mut problems = Vec::new();
    let mut shown: Vec<(TensorId, String, View)> = Vec::with_capacity(checkpoint.tensors().len());
    let head = tie.then(|| names::tied_head(checkpoint)).flatten();
    let mut changed = head.is_some() || checkpoint.tensors().len() != original.tensors().len();
    // What loads safetensors cannot load other files under such names, and the reverse.
    let converted = original.container() != Container::Safetensors;
    changed |= converted;
    if !changed && !values.converts() && renames.is_empty() && std::ptr::eq(checkpoint, original) {
        return Ok(originals(original).map(|(_, path, id)| original_file(path, id)).collect());
    }
    let renamed = |name: &str| rename::apply(renames, name).map_err(|problem| vec![problem]);
    for (id, info) in checkpoint.tensors() {
        let dtype = values.dtype_of(id, &[info.name]);
        match values.view(id, dtype) {
            Ok(view) => {
                let name = renamed(info.name)?;
                changed |= view.as_source().is_none() || name != original.tensor(id).name;
                shown.push((id, name, view));
            }
            Err(problem) => problems.push(problem),
        }
    }
    if let Some((head, embedding)) = head {
        let found = checkpoint.find(&embedding).and_then(|id| shown.iter().find(|(other, ..)| *other == id)).cloned();
        let name = renamed(&head)?;
        shown.extend(found.map(|(id, _, view)| (id, name, view)));
    }
    problems.extend(collisions(original, &shown));
    if !problems.is_empty() {
        return Err(problems);
    }
    if !changed {
        return Ok(originals(original).map(|(_, path, id)| original_file(path, id)).collect());
    }
    let total = total_bytes(&shown);
    let mut by_file: Vec<Vec<(TensorId, String, View)>> = vec![Vec::new(); original.source().file_count()];
    for (id, name, view) in shown {
        by_file[original.file_of(id).index()].push((id, name, view));
    }
    let mut before: Vec<usize> = vec![0; by_file.len()];
    for (id, _) in original.tensors() {
        before[original.file_of(id).index()] += 1;
    }
    let weight_map: Vec<(String, String)> = originals(original)
        .filter(|(role, ..)| **role == FileRole::Weights)
        .flat_map(|(_, path, id)| {
            by_file[id.index()].iter().map(move |(_, name, _)| (name.clone(), shown_path(path, converted)))
        })
        .collect();
    let mut files = Vec::new();
    let undone = is_undone(checkpoint);
    let tells = |path: &str| !(undone && QUANTIZATION_FILES.contains(&path));
    for (role, path, id) in originals(original).filter(|(_, path, _)| tells(path)) {
        let content = if *role == FileRole::Weights {
            let tensors = std::mem::take(&mut by_file[id.index()]);
            let as_before = |(id, name, view): &(TensorId, String, View)| {
                view.as_source().is_some() && *name == original.tensor(*id).name
            };
            if tensors.is_empty() && before[id.index()] > 0 {
                continue;
            }
            if !converted && tensors.len() == before[id.index()] && tensors.iter().all(as_before) {
                HfContent::Original(id)
            } else {
                let tensors = tensors.into_iter().map(|(_, name, view)| (name, view)).collect();
                // That of stored codes may tell how to read them, as torchao's does.
                let metadata = if undone { plain_metadata() } else { metadata(original, id) };
                HfContent::Weights { tensors, metadata }
            }
        } else if path == "config.json" {
            match checkpoint.config() {
                Some(config) => {
                    let truthful = truthful_config(config, checkpoint, values);
                    if Some(&truthful) == original.config() {
                        HfContent::Original(id)
                    } else {
                        HfContent::Text(json::pretty(&truthful))
                    }
                }
                None => HfContent::Original(id),
            }
        } else if (path.ends_with(".safetensors.index.json") || (converted && path.ends_with(".bin.index.json")))
            && !path.contains('/')
        {
            match index(original, path, id, &weight_map, total) {
                Ok(Some(text)) => HfContent::Text(text),
                Ok(None) => HfContent::Original(id),
                Err(problem) => {
                    problems.push(problem);
                    HfContent::Original(id)
                }
            }
        } else {
            HfContent::Original(id)
        };
        let is_weights = *role == FileRole::Weights || path.ends_with(".bin.index.json");
        files.push(HfFile { path: shown_path(path, converted && is_weights), content });
    }
    if problems.is_empty() { Ok(files) } else { Err(problems) }
}

/// The path in `hf/` of weights or of their index. Those that `converted` makes safetensors have the names that transformers looks
/// for.
fn shown_path(path: &str, converted: bool) -> String {
    if !converted {
        return path.to_owned();
    }
    let path = path.strip_prefix("pytorch_model").map_or_else(|| path.to_owned(), |rest| format!("model{rest}"));
    if let Some(stem) = path.strip_suffix(".bin.index.json") {
        return format!("{stem}.safetensors.index.json");
    }
    let stem = [".bin", ".pt", ".pth", ".ckpt"].iter().find_map(|suffix| path.strip_suffix(suffix));
    stem.map_or_else(|| path.clone(), |stem| format!("{stem}.safetensors"))
}

/// Bytes of these tensors together.
fn total_bytes(shown: &[(TensorId, String, View)]) -> u64 {
    const FITS: &str = "sources have at most 2^58 bytes, and decoding codes of 2 bits makes at most 32 times as many";
    shown.iter().map(|(_, _, view)| view.bytes().expect(FITS)).sum()
}

/// Most files that `hf/` can have.
fn originals(checkpoint: &Checkpoint) -> impl Iterator<Item = (&FileRole, &str, FileId)> {
    let files = checkpoint.files().iter();
    files
        .filter(|file| matches!(file.role, FileRole::Weights | FileRole::Other))
        .filter_map(|file| Some((&file.role, file.path.as_str(), file.file?)))
}

fn original_file(path: &str, id: FileId) -> HfFile {
    HfFile { path: path.to_owned(), content: HfContent::Original(id) }
}

/// The metadata that transformers demands, and nothing else.
fn plain_metadata() -> Vec<(String, String)> {
    vec![("format".to_owned(), "pt".to_owned())]
}

/// The header's metadata, with the `format` that transformers demands.
fn metadata(checkpoint: &Checkpoint, file: FileId) -> Vec<(String, String)> {
    let mut metadata = checkpoint.file_metadata(file).to_vec();
    if !metadata.iter().any(|(key, _)| key == "format") {
        metadata.extend(plain_metadata());
    }
    metadata
}

/// `config.json` with the present dtype of the weights, and without a quantization that was decoded.
fn truthful_config(config: &Value, checkpoint: &Checkpoint, values: &Values<'_>) -> Value {
    let config = config.clone();
    let decoded = checkpoint.tensors().find_map(|(_, info)| info.quantized());
    let undone = is_undone(checkpoint);
    let dtype = values.general_dtype().or_else(|| values.decoded_dtype(decoded?.dtype));
    with_dtype(config, checkpoint.dialect().text_config.as_deref(), dtype, undone)
}

/// `config.json` with this dtype of the weights; with `undone`, without a quantization. `nested` is the member with the text
/// model's own configuration.
pub(super) fn with_dtype(mut config: Value, nested: Option<&str>, dtype: Option<DType>, undone: bool) -> Value {
    let Some(name) = dtype.and_then(torch_name) else { return config };
    let had_dtype = config.get("dtype").is_some();
    let rewrite = |members: &mut serde_json::Map<String, Value>, top: bool| {
        if members.contains_key("torch_dtype") || (top && !had_dtype) {
            members.insert("torch_dtype".to_owned(), json!(name));
        }
        if members.contains_key("dtype") {
            members.insert("dtype".to_owned(), json!(name));
        }
        for key in QUANTIZATION.iter().filter(|_| undone) {
            members.shift_remove(*key);
        }
    };
    if let Some(members) = config.as_object_mut() {
        rewrite(members, true);
        for (key, value) in members.iter_mut() {
            let is_nested = nested == Some(key) || key.ends_with("_config");
            if let (true, Some(inner)) = (is_nested, value.as_object_mut()) {
                rewrite(inner, false);
            }
        }
    }
    config
}

/// What `config.json` says of tensors that are all decoded; `None` where some are not, or none was quantized.
pub(super) fn decoded_config(values: &Values<'_>) -> Option<Vec<u8>> {
    let checkpoint = values.checkpoint();
    let config = checkpoint.config().filter(|_| is_undone(checkpoint))?;
    Some(json::pretty(&truthful_config(config, checkpoint, values)))
}

impl HfFile {
    /// Whether this file, other than `config.json`, tells how weights are quantized.
    pub fn tells_quantization(&self) -> bool {
        QUANTIZATION_FILES.contains(&self.path.as_str())
    }
}

/// Whether all that was quantized is decoded. Where some tensors stay as they are stored, what tells how stays too: codes that are
/// loaded as if they were numbers would give wrong weights without a word.
fn is_undone(checkpoint: &Checkpoint) -> bool {
    checkpoint.tensors().any(|(_, info)| info.quantized().is_some()) && checkpoint.raw().next().is_none()
}

/// Files that tell how weights are quantized, as `ModelOpt`, GPTQ's and AWQ's libraries write them.
const QUANTIZATION_FILES: [&str; 3] = ["hf_quant_config.json", "quantize_config.json", "quant_config.json"];

/// Members of `config.json` that tell how weights are quantized; the last is MLX's.
const QUANTIZATION: [&str; 3] = ["quantization_config", "compression_config", "quantization"];

fn torch_name(dtype: DType) -> Option<&'static str> {
    dtype.is_float().then(|| dtype.name())
}

/// Longest index that is rewritten, in bytes.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// The index with the present tensors, in the order of the original, and with the present total size.
fn index(
    checkpoint: &Checkpoint,
    path: &str,
    file: FileId,
    weight_map: &[(String, String)],
    total: u64,
) -> Result<Option<Vec<u8>>, Problem> {
    let problem = |reason: String| Problem::Hf { path: path.to_owned(), reason };
    let len = checkpoint.source().len_bytes(file);
    if len > INDEX_BYTES_MAX {
        return Err(problem(format!("expected at most {INDEX_BYTES_MAX} bytes, found {len}")));
    }
    let mut bytes = vec![0; usize::try_from(len).expect("a few hundred megabytes")];
    checkpoint.source().read_into(file, 0, &mut bytes).map_err(|error| problem(error.to_string()))?;
    let mut index = json::parse(&bytes).map_err(|error| problem(error.to_string()))?;
    let Some(map) = index.get_mut("weight_map").and_then(Value::as_object_mut) else { return Ok(None) };
    let new: HashMap<&str, &str> = weight_map.iter().map(|(name, file)| (name.as_str(), file.as_str())).collect();
    // Unchanged names keep their places. New names follow.
    map.retain(|name, _| new.contains_key(name.as_str()));
    for (name, file) in weight_map {
        map.entry(name.as_str()).or_insert_with(|| json!(file));
    }
    // Renames may exchange names between files.
    for (name, file) in map.iter_mut() {
        *file = json!(new.get(name.as_str()));
    }
    if let Some(metadata) = index.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.insert("total_size".to_owned(), json!(total));
    }
    Ok(Some(json::pretty(&index)))
}
