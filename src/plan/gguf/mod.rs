//! The plan of `gguf/model.gguf`: what llama.cpp's `convert_hf_to_gguf.py` writes of a repository, byte for byte.
//!
//! Names, permutations and keys are those of the table with which files of llama.cpp are read. The tokenizer is not run: its
//! pre-tokenizer is known by the patterns in `tokenizer.json` (`pre_tokenizers.toml`).

mod card;
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

use self::{
    hparams::Hparams,
    tensors::TensorsInFile,
    vocabulary::{ModelTexts, Tokenizer},
};
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
    let is_known = |(name, value): &(&String, &String)| match name.as_str() {
        vocabulary::PRE => true,
        metadata::CARD => *value == "none",
        _ => false,
    };
    if let Some((name, value)) = set.iter().find(|pair| !is_known(pair)) {
        let what = format!("the only parameters are {}=NAME and {}=none", vocabulary::PRE, metadata::CARD);
        return Err(problem(format!("{what}: found {name}={value}")));
    }
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let class = config.pointer("/architectures/0").and_then(Value::as_str);
    let family = GgufFamily::of(model_type, class).map_err(problem)?;
    let schemes = &checkpoint.dialect().quantization.schemes;
    let is_refused =
        |scheme: &str| scheme.contains("fp4") && !(scheme == "mxfp4" && family.architecture() == "gpt-oss");
    if let Some(kept) = schemes.iter().find(|summary| is_refused(summary.scheme)) {
        let what = "the converter keeps its codes, which is done of gpt-oss only: export the decoded model first, by \
                    --layout hf --dequantize=bf16";
        return Err(problem(format!("weights are stored as {}: {what}", kept.scheme)));
    }
    let hparams = Hparams::new(family, config);
    let files = ModelTexts(checkpoint);
    let tokenizer =
        Tokenizer::new(&files, &hparams, (config, model_type), set.get(vocabulary::PRE)).map_err(problem)?;
    let card = files.text("README.md").map_err(problem)?;
    let generation = files.json("generation_config.json").map_err(problem)?;
    let words = words_of_reranker(&tokenizer, checkpoint, card.as_deref()).map_err(problem)?;
    let ordered = tensors::ordered(checkpoint);
    let of = of.unwrap_or_else(|| tensors::own_type(&ordered));
    let rows = tokenizer.rows().filter(|_| family.tables.rows_of_vocabulary);
    let TensorsInFile { written, views, left_out, file_type } =
        TensorsInFile::of(&ordered, values, &hparams, (of, rows, words))?;
    let card = card.filter(|_| !set.contains_key(metadata::CARD));
    // Of a repository of the Hub, the directory is that of a commit.
    let repository = checkpoint.revision().and_then(|_| checkpoint.label().split('@').next());
    let directory = checkpoint.root().file_stem().filter(|_| checkpoint.root().is_file());
    let directory = directory.or_else(|| checkpoint.root().file_name()).and_then(|name| name.to_str());
    let (id, is_remote) = (repository.or(directory).unwrap_or(checkpoint.label()), repository.is_some());
    let told = metadata::Told { config, id, is_remote, card, generation: generation.unwrap_or_default() };
    let pairs = pairs(&told, &tokenizer, words, (&written, file_type)).map_err(problem)?;
    let names = written.iter().map(|tensor| tensor.name.clone());
    let file = GgufFile { header: gguf_header(&pairs, &written).into(), tensors: names.zip(views).collect() };
    Ok((file, left_out))
}

/// All keys, in the converter's order.
fn pairs(
    told: &metadata::Told<'_>,
    tokenizer: &Tokenizer<'_>,
    words: Option<[u64; 2]>,
    (written, file_type): (&[WrittenTensor], u32),
) -> Result<GgufPairs, String> {
    let (hparams, mut pairs) = (tokenizer.hparams, GgufPairs::default());
    pairs.set("general.architecture", GgufValue::Text(hparams.family.architecture().to_owned()));
    if let Some(factor) = hparams.longrope_scale() {
        pairs.set(format!("{}.rope.scaling.attn_factor", hparams.family.architecture()), GgufValue::F32(factor));
    }
    metadata::set(&mut pairs, told, written)?;
    hparams.set(&mut pairs, file_type)?;
    if words.is_some() {
        set_reranker(&mut pairs);
    }
    pairs.set("general.quantization_version", GgufValue::U32(2));
    tokenizer.set(&mut pairs)?;
    Ok(pairs)
}

/// What the converter puts before and after a query and a document.
const TEMPLATE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
    Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a \
    web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n\
    <|im_start|>assistant\n<think>\n\n</think>\n\n";

/// The numbers of the words `yes` and `no`, of which a reranker of Qwen 3 makes a score, if the model is one by the converter's signs: its path, its name or its card.
///
/// # Errors
/// The tokenizer has no such words.
fn words_of_reranker(
    tokenizer: &Tokenizer<'_>,
    checkpoint: &Checkpoint,
    card: Option<&str>,
) -> Result<Option<[u64; 2]>, String> {
    let has = |text: &str, before: &str| {
        let text = text.to_lowercase();
        ["qwen3-reranker", "qwen3-vl-reranker"].iter().any(|word| text.contains(&format!("{before}{word}")))
    };
    let is_named = has(checkpoint.label(), "") || has(&checkpoint.root().to_string_lossy(), "");
    let is_one = is_named || card.is_some_and(|card| has(card, "# "));
    if tokenizer.hparams.family.architecture() != "qwen3" || !is_one {
        return Ok(None);
    }
    let number = |word: &str| {
        tokenizer.number(word).ok_or_else(|| format!("tokenizer.json: expected the token {word} of a reranker"))
    };
    Ok(Some([number("yes")?, number("no")?]))
}

/// Sets the keys of a reranker.
fn set_reranker(pairs: &mut GgufPairs) {
    let texts = |texts: &[&str]| GgufValue::Texts(texts.iter().map(|text| (*text).to_owned()).collect());
    pairs.set("qwen3.pooling_type", GgufValue::U32(4));
    pairs.set("qwen3.classifier.output_labels", texts(&["yes", "no"]));
    pairs.set("tokenizer.chat_template.rerank", GgufValue::Text(TEMPLATE.to_owned()));
    pairs.set("tokenizer.chat_templates", texts(&["rerank"]));
}
