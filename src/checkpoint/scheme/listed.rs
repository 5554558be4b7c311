//! What the configurations of inference libraries have in common: a method by name, sizes of groups, modules that are left out.

use serde_json::Value as Json;

use super::{finds::Finds, parts::companion, stored::Stored};

/// The configuration, if its `quant_method` is this.
pub(super) fn config_of<'a>(stored: &Stored<'a>, method: &str) -> Option<&'a Json> {
    stored.config().filter(|config| text(config, "quant_method") == Some(method))
}

/// A member that is a text.
pub(super) fn text<'a>(of: &'a Json, key: &str) -> Option<&'a str> {
    of.get(key).and_then(Json::as_str)
}

/// The first of these members that is there and not null.
pub(super) fn member<'a>(of: &'a Json, keys: &[&str]) -> Option<&'a Json> {
    keys.iter().find_map(|key| of.get(key)).filter(|value| !value.is_null())
}

/// Neighbours on the input axis that share a scale; `None` is all of them, which is configured as -1.
///
/// # Errors
/// A few words about what is configured instead.
pub(super) fn group_size(value: &Json) -> Result<Option<u64>, String> {
    match (value.as_i64(), value.as_u64()) {
        (Some(-1), _) => Ok(None),
        (_, Some(size)) if size > 0 => Ok(Some(size)),
        _ => Err(format!("a group_size of {value}")),
    }
}

/// Whether a list of the configuration has this module, or one that it is part of. Entries may lack the first components of a name.
pub(super) fn lists(config: &Json, key: &str, module: &str) -> bool {
    let whole = format!(".{module}.");
    let entries = config.get(key).and_then(Json::as_array).into_iter().flatten().filter_map(Json::as_str);
    entries.map(|entry| entry.trim_matches('.')).any(|entry| !entry.is_empty() && whole.contains(&format!(".{entry}.")))
}

/// Refuses the companions of these names whose codes are missing: they would stay as tensors that no model has.
pub(super) fn refuse_orphans(stored: &Stored<'_>, found: &mut Finds<'_>, words: &[&str], codes: &str) {
    for (_, tensor) in stored.iter() {
        let Some((module, word)) = tensor.name.rsplit_once('.') else { continue };
        if words.contains(&word) && companion(stored, module, codes).is_none() {
            found.refuse(tensor.name, format!("codes {module}.{codes} beside it"), "no such tensor");
        }
    }
}
