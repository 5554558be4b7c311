//! The plan of `gguf/model.gguf`: what llama.cpp's `convert_hf_to_gguf.py` writes of a repository, byte for byte.
//!
//! Names, permutations and keys are those of the table with which files of llama.cpp are read. The tokenizer is not run: its
//! pre-tokenizer is known by the patterns in `tokenizer.json` (`pre_tokenizers.toml`).

mod files;
mod hparams;
mod metadata;
mod tensors;
mod vocabulary;

use std::{collections::BTreeMap, sync::Arc};

use ckfs_checkpoint::{Checkpoint, GgufFamily};
use ckfs_config::GgufType;
use ckfs_format::gguf::{GgufPairs, GgufValue, WrittenTensor, gguf_header};
use ckfs_tensor::View;
use serde_json::Value;

use self::{files::ModelTexts, hparams::Hparams, tensors::TensorsInFile, vocabulary::Tokenizer};
use super::{problem::Problem, values::Values};

/// A file of llama.cpp.
#[derive(Clone, Debug)]
pub struct GgufFile {
    /// All before the first tensor.
    pub header: Arc<[u8]>,
    /// Names and stored elements, in the order of the file.
    pub tensors: Vec<(String, View)>,
}

/// The file of a repository, and the names of tensors that are not in it.
///
/// # Errors
/// Every reason why there is none.
pub(crate) fn plan(
    values: &Values<'_>,
    of: Option<GgufType>,
    set: &BTreeMap<String, String>,
) -> Result<(GgufFile, Vec<String>), Vec<Problem>> {
    let problem = |reason: String| vec![tensors::config_problem(reason)];
    let checkpoint = values.checkpoint();
    let config =
        checkpoint.config().ok_or_else(|| problem("expected a config.json: --config-from gives one".to_owned()))?;
    if let Some(name) = set.keys().find(|name| *name != vocabulary::PRE) {
        return Err(problem(format!("the only parameter is {}: found {name}", vocabulary::PRE)));
    }
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let class = config.pointer("/architectures/0").and_then(Value::as_str);
    let family = GgufFamily::of(model_type, class).map_err(problem)?;
    let schemes = &checkpoint.dialect().quantization.schemes;
    if let Some(kept) = schemes.iter().find(|summary| summary.scheme.contains("fp4")) {
        let what = "the converter keeps its codes, which is not done here: export the decoded model first, by --layout hf \
                    --dequantize=bf16";
        return Err(problem(format!("weights are stored as {}: {what}", kept.scheme)));
    }
    let hparams = Hparams::new(family, config);
    let files = ModelTexts(checkpoint);
    let tokenizer =
        Tokenizer::new(&files, &hparams, (config, model_type), set.get(vocabulary::PRE)).map_err(problem)?;
    let ordered = tensors::ordered(checkpoint);
    let of = of.unwrap_or_else(|| tensors::own_type(&ordered));
    let rows = tokenizer.rows().filter(|_| family.rows_of_vocabulary());
    let TensorsInFile { written, views, left_out } = TensorsInFile::of(&ordered, values, &hparams, (of, rows))?;
    let pairs = pairs(checkpoint, config, &tokenizer, (&written, tensors::file_type(of))).map_err(problem)?;
    let names = written.iter().map(|tensor| tensor.name.clone());
    let file = GgufFile { header: gguf_header(&pairs, &written).into(), tensors: names.zip(views).collect() };
    Ok((file, left_out))
}

/// All keys, in the converter's order.
fn pairs(
    checkpoint: &Checkpoint,
    config: &Value,
    tokenizer: &Tokenizer<'_>,
    (written, file_type): (&[WrittenTensor], u32),
) -> Result<GgufPairs, String> {
    let hparams = tokenizer.hparams;
    let mut pairs = GgufPairs::default();
    pairs.set("general.architecture", GgufValue::Text(hparams.family.architecture().to_owned()));
    if let Some(factor) = hparams.longrope_scale() {
        pairs.set(format!("{}.rope.scaling.attn_factor", hparams.family.architecture()), GgufValue::F32(factor));
    }
    // Of a repository of the Hub, the directory is that of a commit.
    let repository = checkpoint.revision().and_then(|_| checkpoint.label().split('@').next());
    let directory = checkpoint.root().file_stem().filter(|_| checkpoint.root().is_file());
    let directory = directory.or_else(|| checkpoint.root().file_name()).and_then(|name| name.to_str());
    let id = (repository.or(directory).unwrap_or(checkpoint.label()), repository.is_some());
    metadata::set(&mut pairs, id, config, tokenizer.files.json("generation_config.json")?.as_ref(), written)?;
    hparams.set(&mut pairs, file_type)?;
    pairs.set("general.quantization_version", GgufValue::U32(2));
    tokenizer.set(&mut pairs)?;
    Ok(pairs)
}
