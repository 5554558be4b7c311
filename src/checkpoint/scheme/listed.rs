//! What the configurations of inference libraries have in common: a method by name, sizes of groups, modules that are left out.

use ckfs_tensor::DType;
use hashbrown::HashSet;
use serde_json::Value as Json;

use super::{findings::SchemeFindings, stored::Stored};
use crate::PythonRegex;

/// The configuration, if its `quant_method` is this.
pub(super) fn config_of<'a>(stored: &Stored<'a>, method: &str) -> Option<&'a Json> {
    stored.config.filter(|config| text(config, "quant_method") == Some(method))
}

/// A member that is a text.
pub(super) fn text<'a>(of: &'a Json, key: &str) -> Option<&'a str> {
    of.get(key).and_then(Json::as_str)
}

/// The type that tensors have when they are decoded, of this name in a description.
pub(super) fn decoded_dtype(name: Option<&str>) -> Option<DType> {
    [DType::F32, DType::F16, DType::BF16].into_iter().find(|dtype| Some(dtype.name()) == name)
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

/// Modules that a list of the configuration leaves unquantized, and all that is in them.
#[derive(Debug)]
pub(super) struct Exceptions<'a> {
    names: HashSet<&'a str>,
    /// Entries that are regular expressions, as those of gpt-oss: `model.layers.*.self_attn`.
    patterns: Vec<PythonRegex>,
    /// An entry that is no name and no expression that can be used: which modules it speaks of is not known.
    broken: Option<&'a str>,
}

impl<'a> Exceptions<'a> {
    /// The list that is the member `key` of the configuration.
    pub(super) fn of(config: &'a Json, key: &str) -> Self {
        let entries = config.get(key).and_then(Json::as_array).into_iter().flatten().filter_map(Json::as_str);
        let entries = entries.map(|entry| entry.trim_matches('.')).filter(|entry| !entry.is_empty());
        let (patterns, names): (Vec<&str>, Vec<&str>) = entries.partition(|entry| entry.contains(is_special));
        let mut exceptions = Self { names: names.into_iter().collect(), patterns: Vec::new(), broken: None };
        for pattern in patterns {
            // As transformers does: from the start of the name, up to the end of a component.
            match PythonRegex::new("^(?:", pattern, r")(?:\.|$)") {
                Some(regex) => exceptions.patterns.push(regex),
                None => exceptions.broken = Some(pattern),
            }
        }
        exceptions
    }

    /// Whether the list has this module, or one that it is part of. Names in the list may lack the first components.
    pub(super) fn has(&self, module: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.matches(module) == Some(true))
            || (!self.names.is_empty() && self.names(module))
    }

    fn names(&self, module: &str) -> bool {
        let mut starts = std::iter::once(0).chain(module.match_indices('.').map(|(dot, _)| dot + 1));
        starts.any(|start| {
            let mut ends = module[start..].match_indices('.').map(|(dot, _)| start + dot).chain([module.len()]);
            ends.any(|end| self.names.contains(&module[start..end]))
        })
    }
}

/// An entry of the configuration's lists of modules that cannot be used.
pub(super) fn broken<'a>(stored: &Stored<'a>) -> Option<&'a str> {
    let lists = ["modules_to_not_convert", "llm_int8_skip_modules"];
    let config = stored.config?;
    lists.iter().find_map(|list| Exceptions::of(config, list).broken)
}

/// Whether a character makes an entry a regular expression. Dots stand for themselves in names.
const fn is_special(character: char) -> bool {
    matches!(character, '*' | '+' | '?' | '|' | '(' | '[' | '{' | '^' | '$' | '\\')
}

/// Why codes of a module are not decoded that the configuration of their method leaves unquantized.
pub(super) fn excepted(method: &str) -> String {
    format!("{method}, but its configuration leaves this tensor unquantized")
}

/// Refuses the companions of these names whose codes are missing: they would stay as tensors that no model has.
pub(super) fn refuse_orphans(stored: &Stored<'_>, found: &mut SchemeFindings<'_>, words: &[&str], codes: &str) {
    for (_, tensor) in stored.iter() {
        let Some((module, word)) = tensor.name.rsplit_once('.') else { continue };
        if words.contains(&word) && stored.companion(module, codes).is_none() {
            found.refuse(tensor.name, format!("codes {module}.{codes} beside it"), "no such tensor");
        }
    }
}
