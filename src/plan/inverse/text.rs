//! The configuration of a repository made back from a checkpoint, which may hold the text model of a larger model only.

use ckfs_checkpoint::Checkpoint;
use ckfs_tensor::View;
use serde_json::{Value as Json, json};

use super::super::{
    problem::Problem,
    select::{MTP_COUNTS, PREDICTOR_WORDS},
    text_model::TextModel,
};

/// The configuration that fits the tensors, and whether it is that of the text model of a larger one. `is_text` tells whether the
/// tensors are those of the text model alone: configuration and names become its own. `is_requested` tells whether the user wants
/// it so.
///
/// # Errors
/// There is no such text model.
pub(super) fn configuration(
    checkpoint: &Checkpoint,
    text: Option<&TextModel>,
    tensors: &mut [(String, View)],
    (is_text, is_requested): (bool, bool),
    warnings: &mut Vec<String>,
) -> Result<(Json, bool), Problem> {
    let (mut config, dialect) = (checkpoint.config().cloned().unwrap_or_default(), checkpoint.dialect());
    let has_head = tensors.iter().any(|(name, _)| name.ends_with("lm_head.weight"));
    let model_type = config.get("model_type").and_then(Json::as_str).unwrap_or_default().to_owned();
    if is_text && !text.is_some_and(|text| tensors.iter().any(|(name, _)| text.is_outside(name))) {
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
        warnings.extend(Some(warning).filter(|_| !is_requested));
        let is_tied = dialect.tied || (dialect.tied_declared.is_none() && !has_head);
        config = text.config(&config, is_tied);
    }
    let now = text.filter(|text| config["model_type"] == text.model_type.as_str());
    if let Some(text) = now {
        for (name, _) in tensors.iter_mut() {
            *name = text.name(name);
        }
    }
    if let Some(members) = config.as_object_mut() {
        let is_predictor = |name: &str| name.split('.').any(|word| PREDICTOR_WORDS.contains(&word));
        let predicts = tensors.iter().any(|(name, _)| is_predictor(name));
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
    Ok((config, is_text && now.is_some()))
}
