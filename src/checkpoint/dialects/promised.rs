//! The shapes that `config.json` promises of tensors whose names are the same in most models: vocabulary, hidden size and heads.
//!
//! Files of ranks add up to a tensor only if all are there. Torch's own do not say how many there were, so that a tensor without
//! its last part is a shorter one. Only the configuration tells. A difference in any other repository is a warning: it may be
//! pruned, padded, or of another model.

use serde_json::Value;

use super::super::{
    dialect::lookup,
    problem::{Problem, Problems},
    table::{Storage, TensorInfo, TensorTable},
};

/// What may be before the names of a text model.
const PREFIXES: [&str; 6] =
    ["", "model.", "language_model.", "model.language_model.", "language_model.model.", "transformer."];

/// Embeddings and output heads.
const EMBEDDINGS: [&str; 6] = [
    "embed_tokens.weight",
    "lm_head.weight",
    "tok_embeddings.weight",
    "output.weight",
    "wte.weight",
    "word_embeddings.weight",
];

/// Weights with an element for each hidden unit.
const NORMS: [&str; 4] =
    ["norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "attention_norm.weight"];

/// The sizes in a configuration.
#[derive(Debug)]
struct Sizes {
    vocabulary: Option<u64>,
    hidden: Option<u64>,
    query: Option<u64>,
    key: Option<u64>,
}

impl Sizes {
    fn of(config: &Value) -> Self {
        let number = |keys: &[&str]| keys.iter().find_map(|key| lookup(Some(config), key)?.as_u64());
        let hidden = number(&["hidden_size", "n_embd", "d_model"]);
        let heads = number(&["num_attention_heads", "n_head"]).filter(|heads| *heads > 0);
        let width = number(&["head_dim"]).or_else(|| Some(hidden? / heads?));
        let rows = |heads: Option<u64>| heads?.checked_mul(width?);
        let (query, key) = (rows(heads), rows(number(&["num_key_value_heads"]).or(heads)));
        Self { vocabulary: number(&["vocab_size"]), hidden, query, key }
    }

    /// The promised extent of the first axis of a tensor, and the words for it.
    fn promised(&self, name: &str) -> Option<(u64, &'static str)> {
        let mut own = PREFIXES.iter().filter_map(|prefix| name.strip_prefix(prefix));
        own.find_map(|own| {
            let in_layer = own.strip_prefix("layers.").and_then(|rest| rest.split_once('.')).map(|(_, rest)| rest);
            match in_layer.unwrap_or(own) {
                "self_attn.q_proj.weight" => Some((self.query?, "the heads")),
                "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => Some((self.key?, "the key-value heads")),
                rest if NORMS.contains(&rest) => Some((self.hidden?, "the hidden size")),
                rest if in_layer.is_none() && EMBEDDINGS.contains(&rest) => Some((self.vocabulary?, "vocab_size")),
                _ => None,
            }
        })
    }
}

/// Whether some tensor is stored in parts.
fn has_parts(table: &TensorTable) -> bool {
    table.iter().any(|(_, info)| matches!(info.storage, Storage::Mosaic(_)))
}

/// Compares tensors with the configuration. Too short ones are refused if `are_ranks`, where the files are those of ranks. Returns a
/// warning otherwise.
pub(in crate::checkpoint) fn compare(
    table: &TensorTable,
    config: &Value,
    are_ranks: bool,
    problems: &mut Problems,
) -> Option<String> {
    const FIRST: usize = 4;
    let sizes = Sizes::of(config);
    let short = |info: &TensorInfo<'_>| {
        let (promised, what) = sizes.promised(info.name)?;
        let found = *info.shape.first()?;
        (found < promised).then_some((promised, what, found))
    };
    let is_embedding = |name: &str| EMBEDDINGS.iter().any(|end| name.ends_with(end));
    let refuses = are_ranks && has_parts(table);
    let mut found = table.iter().filter_map(|(_, info)| Some((info, short(&info)?)));
    if refuses {
        for (info, (promised, what, rows)) in found.take(FIRST) {
            problems.push(Problem::Boxes {
                tensor: info.name.to_owned(),
                dtype: info.dtype,
                shape: info.shape.to_vec(),
                fault: format!(
                    "expected {promised} rows by {what} in config.json, found {rows}: files of ranks are missing, or the configuration \
                     is that of another model"
                ),
            });
        }
        return None;
    }
    // Heads and hidden units of layers differ in pruned models, and their stacks say so.
    let (info, (promised, what, rows)) =
        found.find(|(info, _)| info.quantized().is_none() && is_embedding(info.name))?;
    Some(format!("{}: {rows} rows, and config.json promises {promised} ({what})", info.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_text_model() {
        let config = serde_json::json!({
            "vocab_size": 3,
            "text_config": {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
        });
        let sizes = Sizes::of(&config);
        for (name, expected) in [
            ("model.embed_tokens.weight", Some(64)),
            ("model.language_model.embed_tokens.weight", Some(64)),
            ("lm_head.weight", Some(64)),
            ("model.layers.3.self_attn.q_proj.weight", Some(32)),
            ("model.layers.3.self_attn.v_proj.weight", Some(16)),
            ("model.norm.weight", Some(32)),
            ("vision_tower.layers.0.self_attn.q_proj.weight", None),
            ("model.layers.3.mlp.output.weight", None),
        ] {
            assert_eq!(sizes.promised(name).map(|(rows, _)| rows), expected, "{name}");
        }
    }
}
