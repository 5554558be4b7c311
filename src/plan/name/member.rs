//! Members of `config.json`. A member of the text model's own configuration has precedence.

use ckfs_checkpoint::Checkpoint;
use serde_json::Value;

/// The model types in `config.json`: that of the whole model, then that of the text model in it.
pub(crate) fn model_types(checkpoint: &Checkpoint) -> impl Iterator<Item = &str> {
    let dialect = checkpoint.dialect();
    dialect.model_type.iter().chain(&dialect.text_model_type).map(String::as_str)
}

/// The configurations in `config.json`: that of the text model if one is nested, then the whole one.
pub(crate) fn configs(checkpoint: &Checkpoint) -> impl Iterator<Item = &Value> {
    let config = checkpoint.config();
    let nested = checkpoint.dialect().text_config.as_deref().and_then(|name| config?.get(name));
    nested.into_iter().chain(config)
}

/// The non-negative integer `member` of `config.json`, or of its nested configuration of the text model.
pub(crate) fn config_number(checkpoint: &Checkpoint, member: &str) -> Option<u64> {
    configs(checkpoint).find_map(|config| config.get(member))?.as_u64()
}

/// Names of the members of `config.json`, and of its nested configuration of the text model.
pub(crate) fn config_members(checkpoint: &Checkpoint) -> Vec<&str> {
    configs(checkpoint).filter_map(Value::as_object).flat_map(|members| members.keys().map(String::as_str)).collect()
}
