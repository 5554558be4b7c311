//! Members of a configuration of quantization that nothing here acts upon. What they say of the weights is lost wherever the
//! configuration is: whoever decodes, converts or lays out the weights would take them for those of the model.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::LazyLock,
};

use serde::Deserialize;
use serde_json::Value as Json;

use super::{stored::Stored, unrecognized};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Members {
    known: HashSet<String>,
    /// Not needed here: a test compares both lists with the libraries'.
    #[serde(rename = "not_followed")]
    _not_followed: HashSet<String>,
    assumed: HashMap<String, Vec<Json>>,
}

static MEMBERS: LazyLock<Members> = LazyLock::new(|| {
    toml::from_str(include_str!("members.toml")).expect("the file is in the program, and a test reads it")
});

/// The method, and its members with a value that nothing acts upon; `None` if there are none.
pub(super) fn not_followed(stored: &Stored<'_>) -> Option<String> {
    let file = stored.modelopt.and_then(|file| file.get("quantization"));
    let lost = lost(stored.config.into_iter().chain(file))?;
    Some(format!("{} with {lost}", unrecognized::method(stored)?))
}

/// The members of configurations of quantization that have a value that nothing acts upon.
pub(crate) fn lost<'v>(configs: impl IntoIterator<Item = &'v Json>) -> Option<String> {
    // Where no method is named, members are names of modules, as MLX has them.
    let is_named = |of: &&Json| ["quant_method", "config_groups", "quant_algo"].iter().any(|key| of.get(key).is_some());
    let members = configs.into_iter().filter(is_named).filter_map(Json::as_object).flatten();
    let is_lost = |key: &str, value: &Json| {
        let is_assumed = MEMBERS.assumed.get(key).is_some_and(|values| values.contains(value));
        !MEMBERS.known.contains(key) && !says_nothing(value) && !is_assumed
    };
    let lost: BTreeSet<&str> =
        members.filter(|(key, value)| is_lost(key, value)).map(|(key, _)| key.as_str()).collect();
    (!lost.is_empty()).then(|| lost.into_iter().collect::<Vec<_>>().join(", "))
}

/// Whether a value is none, or holds nothing but such.
fn says_nothing(value: &Json) -> bool {
    match value {
        Json::Null | Json::Bool(false) => true,
        Json::Bool(true) | Json::Number(_) => false,
        Json::String(text) => text.is_empty(),
        Json::Array(values) => values.iter().all(says_nothing),
        Json::Object(members) => members.values().all(says_nothing),
    }
}
