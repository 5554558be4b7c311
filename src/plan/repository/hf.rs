//! The plan of `hf/`: the repository's own files, with the requested values in their tensors.
//!
//! A file that does not change is the original. A weight file with converted tensors keeps its name and the order of
//! its tensors. The index and `config.json` are rewritten to describe the converted files.

use ckfs_checkpoint::{Checkpoint, Container, FileRole, json, rewritten_index};
use ckfs_source::FileId;
use ckfs_tensor::{DType, TensorId, View};
use hashbrown::HashMap;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde_json::{Value, json};

use super::super::{
    names,
    problem::Problem,
    quantize::{HF_QUANT_CONFIG, Quantizer, quantization_file},
    rename::{self, Rename},
    text_model::{QUANTIZATION, TextModel},
    values::{Values, converts},
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

/// A tensor of `hf/`: its number, its name there, and its values.
type Shown = (TensorId, String, View);

/// Tensors that would have one name.
fn collisions(original: &Checkpoint, shown: &[Shown]) -> Vec<Problem> {
    let mut names: HashMap<&str, TensorId> = HashMap::with_capacity(shown.len());
    let mut problems = Vec::new();
    for (id, name, _) in shown {
        if let Some(first) = names.insert(name, *id) {
            let (first, second) = (original.tensor(first).name, original.tensor(*id).name);
            problems.push(Problem::collision(&format!("hf: {name}"), first, second));
        }
    }
    problems
}

/// Names in `hf/` that differ from those of the repository.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HfNames<'a> {
    /// The user's renames.
    pub(crate) renames: &'a [Rename],
    /// Whether a tied output head is shown.
    pub(crate) tie: bool,
    /// The text model that `hf/` holds alone. Its names apply after the user's.
    pub(crate) text: Option<&'a TextModel>,
}

impl HfNames<'_> {
    fn apply(&self, name: &str) -> Result<String, Problem> {
        let renamed = rename::apply(self.renames, name)?;
        Ok(self.text.map_or(renamed.clone(), |text| text.name(&renamed)))
    }

    /// Whether no name changes.
    fn keep_all(&self) -> bool {
        self.renames.is_empty() && self.text.is_none()
    }
}

/// Plans `hf/` for the part of the repository that `values` covers. `original` is the whole repository under its own
/// names.
///
/// # Errors
/// Every problem with a tensor's values or name.
pub(crate) fn plan(
    original: &Checkpoint,
    values: &Values<'_>,
    names: HfNames<'_>,
    quantizer: Option<&Quantizer<'_>>,
) -> Result<Vec<HfFile>, Vec<Problem>> {
    let checkpoint = values.checkpoint();
    let head = names.tie.then(|| names::tied_head(checkpoint)).flatten();
    // What loads safetensors cannot load other files under such names, and the reverse.
    let is_converted = original.container() != Container::Safetensors;
    let has_all = head.is_none()
        && original.quantized().stale.is_none()
        && names.text.is_none()
        && !is_converted
        && !original.opened.lacks_named
        && checkpoint.config() == original.config()
        && originals(original).all(|(_, _, id)| original.is_whole(id))
        && checkpoint.tensors().len() == original.tensors().len();
    let file = |path: &str, content| HfFile { path: path.to_owned(), content };
    let unchanged = || originals(original).map(|(_, path, id)| file(path, HfContent::Original(id))).collect();
    let is_asked = original.merges().is_some() || converts(values.request, values.rules) || !names.keep_all();
    if has_all && !is_asked && std::ptr::eq(checkpoint, original) {
        return Ok(unchanged());
    }
    let shown = shown(original, values, names, head, quantizer)?;
    let is_as_before = |(id, name, view): &Shown| {
        view.as_source().is_some_and(|source| source.id == *id) && *name == original.tensor(*id).name
    };
    if has_all && shown.iter().all(is_as_before) {
        return Ok(unchanged());
    }
    let total_bytes = total_bytes(&shown);
    let mut by_file: Vec<Vec<Shown>> = vec![Vec::new(); original.source().file_count()];
    for tensor in shown {
        by_file[checkpoint.file_of(tensor.0).index()].push(tensor);
    }
    let is_undone = is_undone(checkpoint);
    let quantizer = quantizer.filter(|quantizer| quantizer.found_any());
    let rewriting = Rewriting { original, values, text: names.text, is_undone, is_converted, total_bytes, quantizer };
    let mut problems = Vec::new();
    let mut texts = rewriting.texts(&by_file, &mut problems);
    if !problems.is_empty() {
        return Err(problems);
    }
    let mut before: Vec<usize> = vec![0; by_file.len()];
    for (id, _) in original.tensors() {
        before[original.file_of(id).index()] += 1;
    }
    let mut files = Vec::new();
    for (role, path, id) in rewriting.originals() {
        let content = if *role == FileRole::Weights {
            let (tensors, before) = (std::mem::take(&mut by_file[id.index()]), before[id.index()]);
            let is_whole = original.is_whole(id);
            if tensors.is_empty() && (before > 0 || !is_whole) {
                continue;
            }
            let is_original = is_whole && !is_converted && tensors.len() == before && tensors.iter().all(is_as_before);
            if is_original { HfContent::Original(id) } else { rewriting.weights(id, tensors) }
        } else {
            texts.remove(&id).map_or(HfContent::Original(id), HfContent::Text)
        };
        let is_weights = *role == FileRole::Weights || path.ends_with(".bin.index.json");
        files.push(file(&shown_path(path, is_converted && is_weights), content));
    }
    let recoded = checkpoint.config().filter(|_| checkpoint.is_recoded()).and_then(quantization_file);
    if let Some(value) = quantizer.and_then(Quantizer::file).or(recoded) {
        files.push(file(HF_QUANT_CONFIG, HfContent::Text(json::pretty(&value))));
        files.sort_by(|left, right| left.path.cmp(&right.path));
    }
    Ok(files)
}

/// The tensors of `hf/` where none of the source's files holds one whole: names and values.
///
/// # Errors
/// Every problem with a tensor's values or name.
pub(crate) fn tensors(
    original: &Checkpoint,
    values: &Values<'_>,
    names: HfNames<'_>,
    quantizer: Option<&Quantizer<'_>>,
) -> Result<Vec<(String, View)>, Vec<Problem>> {
    let head = names.tie.then(|| names::tied_head(values.checkpoint())).flatten();
    Ok(shown(original, values, names, head, quantizer)?.into_iter().map(|(_, name, view)| (name, view)).collect())
}

/// All tensors of `hf/`, in order, and then the tied head, of which the name and that of the embedding are given.
fn shown(
    original: &Checkpoint,
    values: &Values<'_>,
    names: HfNames<'_>,
    head: Option<(String, String)>,
    quantizer: Option<&Quantizer<'_>>,
) -> Result<Vec<Shown>, Vec<Problem>> {
    let checkpoint = values.checkpoint();
    let tensors: Vec<_> = checkpoint.tensors().collect();
    let of_name = |name: &str| {
        let id = checkpoint.find(name)?;
        values.view(id, values.dtype_of(id, &[name])).ok()
    };
    let found: Vec<Result<Vec<Shown>, Problem>> = tensors
        .into_par_iter()
        .map(|(id, info)| {
            let view = values.view(id, values.dtype_of(id, &[info.name]))?;
            let name = names.apply(info.name)?;
            let Some(quantizer) = quantizer else { return Ok(vec![(id, name, view)]) };
            let Some(codes) = quantizer.codes(info.name, &view, &of_name)? else { return Ok(vec![(id, name, view)]) };
            let parts = quantizer.parts(info.name, &codes)?.unwrap_or_default();
            Ok(parts.into_iter().map(|part| (id, part.of_weight(&name), part.view)).collect())
        })
        .collect();
    let (mut shown, mut problems) = (Vec::with_capacity(found.len()), Vec::new());
    for found in found {
        shown.extend(found.map_err(|problem| problems.push(problem)).unwrap_or_default());
    }
    let may_collide = !names.keep_all() || head.is_some();
    if let Some((head, embedding)) = head {
        let found = checkpoint.find(&embedding).and_then(|id| shown.iter().find(|(other, ..)| *other == id)).cloned();
        let name = names.apply(&head).map_err(|problem| vec![problem])?;
        shown.extend(found.map(|(id, _, view)| (id, name, view)));
    }
    // A checkpoint's own names differ.
    if may_collide {
        problems.extend(collisions(if checkpoint.is_recoded() { checkpoint } else { original }, &shown));
    }
    if problems.is_empty() { Ok(shown) } else { Err(problems) }
}

/// What the rewritten files of `hf/` depend on.
struct Rewriting<'a> {
    /// The whole repository under its own names.
    original: &'a Checkpoint,
    values: &'a Values<'a>,
    /// The text model that `hf/` holds alone.
    text: Option<&'a TextModel>,
    /// Whether all that was quantized is decoded.
    is_undone: bool,
    /// Whether weights of another container become safetensors.
    is_converted: bool,
    /// Bytes of all tensors together.
    total_bytes: u64,
    /// What quantizes weights, if any are.
    quantizer: Option<&'a Quantizer<'a>>,
}

impl<'a> Rewriting<'a> {
    /// The repository's files that `hf/` may have.
    fn originals(&self) -> impl Iterator<Item = (&'a FileRole, &'a str, FileId)> {
        let (is_undone, text) = (self.is_undone, self.text);
        let is_anew = self.quantizer.is_some() || self.values.checkpoint().is_recoded();
        originals(self.original).filter(move |(_, path, _)| {
            !((is_undone || is_anew) && QUANTIZATION_FILES.contains(path))
                && !text.is_some_and(|text| text.is_text() && !TextModel::has_file(path))
        })
    }

    /// The texts that are rewritten, by original file: `config.json` and indices. `by_file` are the tensors of each weight file.
    fn texts(&self, by_file: &[Vec<Shown>], problems: &mut Vec<Problem>) -> HashMap<FileId, Vec<u8>> {
        let paths: Vec<(String, FileId)> = originals(self.original)
            .filter(|(role, ..)| **role == FileRole::Weights)
            .map(|(_, path, id)| (shown_path(path, self.is_converted), id))
            .collect();
        let rows = paths
            .iter()
            .flat_map(|(path, id)| by_file[id.index()].iter().map(|(_, name, _)| (name.as_str(), path.as_str())));
        let weight_map: Vec<(&str, &str)> = rows.collect();
        let mut texts = HashMap::new();
        for (_, path, id) in self.originals().filter(|(role, ..)| **role != FileRole::Weights) {
            let is_index =
                path.ends_with(".safetensors.index.json") || (self.is_converted && path.ends_with(".bin.index.json"));
            let text = if path == "config.json" {
                Ok(self.config())
            } else if is_index && !path.contains('/') {
                index(self.original, (path, id), &weight_map, self.total_bytes)
            } else {
                continue;
            };
            let text = text.map_err(|problem| problems.push(problem)).unwrap_or_default();
            texts.extend(text.map(|text| (id, text)));
        }
        texts
    }

    /// `config.json`, if it is not the original.
    fn config(&self) -> Option<Vec<u8>> {
        let checkpoint = self.values.checkpoint();
        let truthful = truthful_config(checkpoint.config()?, checkpoint, self.values, self.is_undone);
        let truthful = self.text.map_or(truthful.clone(), |text| text.config(&truthful, checkpoint.dialect().tied));
        let truthful = match self.quantizer {
            Some(quantizer) => quantizer.of_config(truthful),
            None => truthful,
        };
        (Some(&truthful) != self.original.config()).then(|| json::pretty(&truthful))
    }

    /// A file with these tensors in the place of `file`.
    fn weights(&self, file: FileId, tensors: Vec<Shown>) -> HfContent {
        let tensors = tensors.into_iter().map(|(_, name, view)| (name, view)).collect();
        // That of stored codes may tell how to read them, as torchao's does.
        let metadata = match self.quantizer {
            Some(quantizer) => quantizer.metadata(),
            None if self.is_undone => plain_metadata(),
            None => metadata(self.original, file),
        };
        HfContent::Weights { tensors, metadata }
    }
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
fn total_bytes(shown: &[Shown]) -> u64 {
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

/// The metadata that transformers demands, and nothing else.
pub(crate) fn plain_metadata() -> Vec<(String, String)> {
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
fn truthful_config(config: &Value, checkpoint: &Checkpoint, values: &Values<'_>, undone: bool) -> Value {
    let config = config.clone();
    let decoded = checkpoint.tensors().find_map(|(_, info)| info.quantized());
    let dtype = values.request.dtype.or_else(|| values.decoded_dtype(decoded?.dtype));
    with_dtype(config, checkpoint.dialect().text_config.as_deref(), dtype, undone)
}

/// `config.json` with this dtype of the weights; with `undone`, without a quantization. `nested` is the member with the text
/// model's own configuration.
pub(crate) fn with_dtype(mut config: Value, nested: Option<&str>, dtype: Option<DType>, undone: bool) -> Value {
    let name = dtype.filter(|dtype| dtype.is_float()).map(DType::name);
    let had_dtype = config.get("dtype").is_some();
    let rewrite = |members: &mut serde_json::Map<String, Value>, top: bool| {
        if let Some(name) = name {
            if members.contains_key("torch_dtype") || (top && !had_dtype) {
                members.insert("torch_dtype".to_owned(), json!(name));
            }
            if members.contains_key("dtype") {
                members.insert("dtype".to_owned(), json!(name));
            }
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
pub(crate) fn decoded_config(values: &Values<'_>) -> Option<Vec<u8>> {
    let checkpoint = values.checkpoint();
    let config = checkpoint.config().filter(|_| is_undone(checkpoint))?;
    Some(json::pretty(&truthful_config(config, checkpoint, values, true)))
}

impl HfFile {
    /// Whether this file, other than `config.json`, tells how weights are quantized.
    pub fn tells_quantization(&self) -> bool {
        QUANTIZATION_FILES.contains(&self.path.as_str())
    }
}

/// Whether nothing is stored quantized: all that was is decoded, or the configuration says it of weights that are plain. Where some tensors stay as they are stored, what tells how stays too: codes that are
/// loaded as if they were numbers would give wrong weights without a word.
fn is_undone(checkpoint: &Checkpoint) -> bool {
    let is_decoded = || checkpoint.tensors().any(|(_, info)| info.quantized().is_some());
    checkpoint.quantized().stale.is_some() || (is_decoded() && checkpoint.raw().next().is_none())
}

/// Files that tell how weights are quantized, as `ModelOpt`, GPTQ's and AWQ's libraries write them.
const QUANTIZATION_FILES: [&str; 3] = ["hf_quant_config.json", "quantize_config.json", "quant_config.json"];

/// Longest index that is rewritten, in bytes.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// The index with the present tensors, in the order of the original, and with the present total size.
fn index(
    checkpoint: &Checkpoint,
    (path, file): (&str, FileId),
    weight_map: &[(&str, &str)],
    total: u64,
) -> Result<Option<Vec<u8>>, Problem> {
    let problem = |reason: String| Problem::File { file: format!("hf/{path}"), reason };
    let bytes = checkpoint.source().read_whole(file, INDEX_BYTES_MAX).map_err(problem)?;
    rewritten_index(&bytes, weight_map, total).map_err(|error| problem(error.to_string()))
}
