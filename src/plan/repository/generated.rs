//! `hf/` of a checkpoint that is no repository: weight files, index and `config.json` are made, and the other files come
//! from the repository that the user names.

use std::collections::BTreeMap;

use ckfs_checkpoint::{Checkpoint, FileRole, json, natural};
use ckfs_tensor::{DType, Op, View};
use serde_json::{Map, Value as Json, json};

use super::super::{
    hf::{HfContent, HfFile, plain_metadata, with_dtype},
    problem::Problem,
    quantize::{HF_QUANT_CONFIG, Quantizer},
    text_model::TextModel,
};

/// Most bytes of the tensors of a weight file, unless the user says otherwise: as transformers saves them.
const SHARD_BYTES_MAX: u64 = 5_000_000_000;

/// The files of a repository with these tensors. They are of the model that the configuration and the word of `own` tell of, which says
/// whether it is the text model of a larger one; or else of `text`, the part of a model; or else of the checkpoint's own model. A
/// tensor of more than `shard_bytes_max` bytes is a file by itself.
///
/// # Errors
/// There is no configuration.
pub(crate) fn files(
    checkpoint: &Checkpoint,
    mut tensors: Vec<(String, View)>,
    (own, text): (Option<(&Json, bool)>, Option<&TextModel>),
    shard_bytes_max: Option<u64>,
    quantizer: Option<&Quantizer<'_>>,
) -> Result<Vec<HfFile>, Vec<Problem>> {
    let alone = text.and_then(|text| Some(text.config(checkpoint.config()?, checkpoint.dialect().tied)));
    let is_text = own.is_some_and(|(_, is_text)| is_text) || text.is_some_and(TextModel::is_text);
    let config = own.map(|(config, _)| config).or(alone.as_ref()).or_else(|| checkpoint.config());
    let Some(config) = config else {
        let reason = "expected one: give the model's directory or org/name by --config-from".to_owned();
        return Err(vec![Problem::File { file: "hf/config.json".to_owned(), reason }]);
    };
    tensors.sort_by(|(left, _), (right, _)| natural(left, right));
    let nested = checkpoint.dialect().text_config.as_deref();
    // What is quantized tells nothing of the dtype of the model.
    let plain = tensors.iter().filter(|(_, view)| !is_part(view)).map(|(_, view)| (view.dtype(), bytes_of(view)));
    let mut config = with_dtype(config.clone(), nested, common_dtype(plain), true);
    let quantizer = quantizer.filter(|quantizer| quantizer.found_any());
    if let Some(quantizer) = quantizer {
        config = quantizer.of_config(config);
    }
    let text =
        |path: &str, value: &Json| HfFile { path: path.to_owned(), content: HfContent::Text(json::pretty(value)) };
    let mut files = vec![text("config.json", &config)];
    match checkpoint.companion() {
        Some(companion) => files.extend(
            companion
                .files
                .iter()
                .map(|(path, bytes)| HfFile { path: path.clone(), content: HfContent::Text(bytes.to_vec()) }),
        ),
        None => files.extend(checkpoint.files().iter().filter_map(|file| {
            let own = file.role == FileRole::Other && file.path != "config.json" && !file.path.ends_with(".index.json");
            let content = HfContent::Original(file.file.filter(|_| own)?);
            Some(HfFile { path: file.path.clone(), content })
        })),
    }
    // What is shown here is decoded, whatever was told of the weights that the configuration came with.
    files.retain(|file| (!is_text || TextModel::has_file(&file.path)) && !file.tells_quantization());
    files.extend(quantizer.and_then(Quantizer::file).map(|value| text(HF_QUANT_CONFIG, &value)));
    let total: u64 = tensors.iter().map(|(_, view)| bytes_of(view)).sum();
    let shards = split(tensors, shard_bytes_max.unwrap_or(SHARD_BYTES_MAX));
    let count = shards.len();
    let mut map = Map::new();
    for (number, tensors) in shards.into_iter().enumerate() {
        let path = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        map.extend(tensors.iter().map(|(name, _)| (name.clone(), json!(path))));
        let metadata = quantizer.map_or_else(plain_metadata, Quantizer::metadata);
        files.push(HfFile { path, content: HfContent::Weights { tensors, metadata } });
    }
    if count > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        files.push(text("model.safetensors.index.json", &index));
    }
    files.sort_by(|left, right| left.path.cmp(&right.path));
    Ok(files)
}

/// Whether a view is a part of a quantized weight.
fn is_part(view: &View) -> bool {
    if let Op::Reshape { of } = view.op() { is_part(of) } else { matches!(view.op(), Op::Encoded { .. }) }
}

fn bytes_of(view: &View) -> u64 {
    // A view without whole bytes is refused when its file is laid out.
    view.bytes().unwrap_or(0)
}

/// The float type of most bytes.
pub(crate) fn common_dtype(tensors: impl Iterator<Item = (DType, u64)>) -> Option<DType> {
    let mut all: BTreeMap<&'static str, (u64, DType)> = BTreeMap::new();
    for (dtype, bytes) in tensors.filter(|(dtype, _)| dtype.is_float()) {
        all.entry(dtype.name()).or_insert((0, dtype)).0 += bytes;
    }
    all.into_values().max_by_key(|(bytes, _)| *bytes).map(|(_, dtype)| dtype)
}

/// Tensors in the order given, in files of at most `bytes_max` bytes.
fn split(tensors: Vec<(String, View)>, bytes_max: u64) -> Vec<Vec<(String, View)>> {
    let mut shards: Vec<Vec<(String, View)>> = vec![Vec::new()];
    let mut filled = 0u64;
    for tensor in tensors {
        let bytes = bytes_of(&tensor.1);
        let last = shards.len() - 1;
        if !shards[last].is_empty() && filled.saturating_add(bytes) > bytes_max {
            shards.push(vec![tensor]);
            filled = bytes;
        } else {
            shards[last].push(tensor);
            filled += bytes;
        }
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckfs_tensor::{Element, Shape};

    fn tensor(name: &str, elements: u64) -> (String, View) {
        (name.to_owned(), View::fill(Shape::try_new(&[elements]).unwrap(), Element::zero(DType::F32)))
    }

    #[test]
    fn files_hold_as_much_as_they_may() {
        let rows: [(&[u64], u64, &[usize]); 6] = [
            (&[1, 1, 1], 8, &[2, 1]),
            (&[1, 1, 1], 12, &[3]),
            // A tensor that is too large is a file by itself.
            (&[1, 9, 1], 8, &[1, 1, 1]),
            (&[9, 9], 8, &[1, 1]),
            (&[], 8, &[0]),
            (&[1], 0, &[1]),
        ];
        for (elements, bytes_max, expected) in rows {
            let tensors = elements.iter().map(|elements| tensor("x", *elements)).collect();
            let found: Vec<usize> = split(tensors, bytes_max).iter().map(Vec::len).collect();
            assert_eq!(found, expected, "{elements:?} in files of {bytes_max} bytes");
        }
    }
}
