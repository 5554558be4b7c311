//! Rerankers of Qwen 3: a score is made of the rows of two words in the output head.

use ckfs_checkpoint::Checkpoint;
use ckfs_format::gguf::{GgufPairs, GgufValue};

use super::vocabulary::Tokenizer;

/// What the converter puts before and after a query and a document.
const TEMPLATE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
    Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a \
    web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n\
    <|im_start|>assistant\n<think>\n\n</think>\n\n";

/// The numbers of the words `yes` and `no`, if the model is one by the converter's signs: its path, its name or its card.
///
/// # Errors
/// The tokenizer has no such words.
pub(super) fn words(
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
pub(super) fn set(pairs: &mut GgufPairs) {
    let texts = |texts: &[&str]| GgufValue::Texts(texts.iter().map(|text| (*text).to_owned()).collect());
    pairs.set("qwen3.pooling_type", GgufValue::U32(4));
    pairs.set("qwen3.classifier.output_labels", texts(&["yes", "no"]));
    pairs.set("tokenizer.chat_template.rerank", GgufValue::Text(TEMPLATE.to_owned()));
    pairs.set("tokenizer.chat_templates", texts(&["rerank"]));
}
