//! Members of `config.json`. A member of the text model's own configuration has precedence.

use ckfs_checkpoint::Checkpoint;

/// The non-negative integer `member` of `config.json`, or of its nested configuration of the text model.
pub(crate) fn config_number(checkpoint: &Checkpoint, member: &str) -> Option<u64> {
    let config = checkpoint.config()?;
    let nested = checkpoint.dialect().text_config.as_deref().and_then(|name| config.get(name));
    nested.and_then(|nested| nested.get(member)).or_else(|| config.get(member))?.as_u64()
}

/// Names of the members of `config.json`, and of its nested configuration of the text model.
pub(crate) fn config_members(checkpoint: &Checkpoint) -> Vec<&str> {
    let config = checkpoint.config();
    let nested = checkpoint.dialect().text_config.as_deref().and_then(|name| config?.get(name));
    let objects = nested.into_iter().chain(config).filter_map(serde_json::Value::as_object);
    objects.flat_map(|members| members.keys().map(String::as_str)).collect()
}
