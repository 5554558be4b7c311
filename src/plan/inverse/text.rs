//! The configuration of a repository made back from a checkpoint, which may hold the text model of a larger model only.

use ckfs_tensor::View;
use serde_json::{Value as Json, json};

use super::super::{problem::Problem, select::MTP_COUNTS, text_model::TextModel};

/// What the configuration depends on besides the tensors.
pub(super) struct Wanted {
    /// Whether the tensors are those of the text model of a larger one.
    pub(super) is_text: bool,
    /// Whether the user requests only the text model.
    pub(super) is_requested: bool,
    /// Whether the output head of the whole model is the embedding.
    pub(super) is_tied: bool,
}

/// The configuration that fits the tensors. If `is_text` is set, they are those of the text model of a larger one: the
/// configuration and the names become those of the text model alone.
///
/// # Errors
/// There is no such text model.
pub(super) fn configuration(
    config: Json,
    text: Option<&TextModel>,
    tensors: &mut [(String, View)],
    wanted: &Wanted,
    warnings: &mut Vec<String>,
) -> Result<Json, Problem> {
    let mut config = config;
    let model_type = config.get("model_type").and_then(Json::as_str).unwrap_or_default().to_owned();
    if wanted.is_text && !text.is_some_and(|text| tensors.iter().any(|(name, _)| text.is_outside(name))) {
        let Some(text) = text else {
            let reason = format!(
                "{model_type} has parts beside the text model, which the checkpoint lacks: --fill-from SOURCE takes them from a \
                 repository that has them"
            );
            return Err(Problem::File { file: "config.json".to_owned(), reason });
        };
        let warning = format!(
            "hf/ is a repository of the text model ({}), since the checkpoint lacks the other parts of {model_type}; \
             --fill-from SOURCE takes them from a repository that has them",
            text.architecture
        );
        warnings.extend(Some(warning).filter(|_| !wanted.is_requested));
        config = text.config(&config, wanted.is_tied);
    }
    let now = config.get("model_type").and_then(Json::as_str).unwrap_or_default();
    if let Some(text) = text.filter(|text| text.model_type == now) {
        for (name, _) in tensors.iter_mut() {
            *name = text.name(name);
        }
    }
    if let Some(members) = config.as_object_mut() {
        let predicts = tensors.iter().any(|(name, _)| is_predictor(name));
        let has_head = tensors.iter().any(|(name, _)| name.ends_with("lm_head.weight"));
        let says = |members: &serde_json::Map<String, Json>| members.contains_key("tie_word_embeddings");
        let is_said = says(members) || members.values().filter_map(Json::as_object).any(says);
        if !has_head && !is_said {
            // By default some models would start with a new output head.
            members.insert("tie_word_embeddings".to_owned(), json!(true));
        }
        for key in MTP_COUNTS.iter().filter(|_| !predicts) {
            if members.get(*key).and_then(Json::as_u64).is_some_and(|count| count > 0) {
                members.insert((*key).to_owned(), json!(0));
                warnings.push(format!(
                    "the checkpoint lacks the layers that predict several tokens: {key} is 0 in config.json of hf/; --fill-from \
                     SOURCE takes them from a repository that has them"
                ));
            }
        }
    }
    Ok(config)
}

/// Whether a tensor is of a layer that predicts several tokens.
fn is_predictor(name: &str) -> bool {
    name.split('.').any(|word| ["eh_proj", "enorm", "hnorm", "shared_head", "mtp"].contains(&word))
}
