//! What the arguments of a training say of its weights. Rows may lie, and numbers may mean, otherwise than the rules of a layout
//! assume: no name and no shape tells it.

use std::{collections::BTreeMap, sync::LazyLock};

use ckfs_checkpoint::{Checkpoint, SavedArguments};
use serde::Deserialize;
use serde_json::Value as Json;

use super::super::{Problem, library::embedded_table, member::configs};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    /// The values that the layouts assume.
    assumed: BTreeMap<String, Vec<Json>>,
    /// Members of `config.json` that say the same.
    config: BTreeMap<String, Vec<String>>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| embedded_table(include_str!("arguments.toml")));

/// The problems of arguments that say something else than `layout` assumes, or than `config.json` says.
pub(super) fn problems(checkpoint: &Checkpoint, layout: &str) -> Vec<Problem> {
    let Some(SavedArguments { file, values: saved }) = checkpoint.opened.contents.tree.arguments.as_deref() else {
        return Vec::new();
    };
    let said = |name: &str| saved.get(name).filter(|value| !says_nothing(value));
    let problem = |name: &str, found: &Json, expected: String| Problem::File {
        file: file.clone(),
        reason: format!(
            "the arguments of the training say {name}={found}, and {expected}: the weights would be taken for others"
        ),
    };
    let assumed = TABLE.assumed.iter().filter_map(|(name, values)| {
        let found = said(name).filter(|found| !values.iter().any(|value| are_equal(value, found)))?;
        let expected = values.iter().map(ToString::to_string).reduce(|some, more| format!("{some} or {more}"));
        let expected = expected.unwrap_or_else(|| "none".to_owned());
        let way = "Megatron-Bridge may convert it, and --layout stored shows it as it is";
        Some(problem(name, found, format!("the layout {layout} assumes {expected} ({way})")))
    });
    let member = |path: &str| {
        configs(checkpoint)
            .find_map(|config| path.split('.').try_fold(config, |of, key| of.get(key)).filter(|of| of.is_number()))
    };
    let config = TABLE.config.iter().filter_map(|(name, members)| {
        // The number of groups has a default that counts only where heads share keys.
        let counts = name != "num_query_groups" || saved.get("group_query_attention") != Some(&Json::Bool(false));
        let found = said(name).filter(|_| counts)?;
        let (member, expected) = members.iter().find_map(|path| Some((path, member(path)?)))?;
        let expected = (!are_equal(expected, found)).then(|| format!("config.json says {member}={expected}"))?;
        Some(problem(name, found, format!("{expected} (expected the configuration of the model that was trained)")))
    });
    assumed.chain(config).collect()
}

fn says_nothing(value: &Json) -> bool {
    value.is_null() || value.as_str().is_some_and(str::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// Whether two values are the same, numbers of whatever type.
fn are_equal(one: &Json, other: &Json) -> bool {
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}
