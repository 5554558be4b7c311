//! A LoRA adapter on a checkpoint: the names that PEFT gives to the tensors of a model with the adapter.
//!
//! If `adapter_config.json` targets a module, its weight becomes `base_layer.weight`, and the adapter's matrices stand
//! beside it. If it saves a module, the original becomes `original_module`, and the trained copy
//! `modules_to_save.default`. All names begin with `base_model.model.`.

use std::collections::BTreeSet;

use regex::Regex;
use serde_json::Value;

use super::{
    Allow,
    draft::Draft,
    name_group::NameGroup,
    problem::{Problem, RuleLocation},
};
use crate::checkpoint::Adapter;

/// The prefix of the base model's names.
const PREFIX: &str = "base_model.model.";

/// The name that PEFT gives to an adapter.
const NAME: &str = "default";

/// The modules that an adapter targets.
enum Targets {
    /// Modules whose names are one of these, or end with one of them.
    Names(Vec<String>),
    /// Modules whose whole names match.
    Matching(Regex),
    /// Modules for which the adapter has matrices.
    Stored,
}

struct Lora {
    targets: Targets,
    exclude: Vec<String>,
    exclude_matching: Option<Regex>,
    to_save: Vec<String>,
    layers: Option<Vec<u64>>,
    layer_numbers: Vec<Regex>,
    /// Modules for which the adapter has matrices.
    stored: BTreeSet<String>,
}

fn words(value: &Value) -> Vec<String> {
    match value {
        Value::String(word) => vec![word.clone()],
        Value::Array(words) => words.iter().filter_map(|word| word.as_str().map(str::to_owned)).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => Vec::new(),
    }
}

fn matching(member: &str, pattern: &str) -> Result<Regex, String> {
    let regex = Regex::new(&format!("^(?:{pattern})$"));
    regex.map_err(|_| format!("{member}: expected a regular expression, found {pattern:?}"))
}

/// Whether a module is `name`, or ends with it as a word.
fn ends_with(module: &str, name: &str) -> bool {
    module == name || module.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
}

impl Lora {
    fn read(config: &Value, stored: BTreeSet<String>, warnings: &mut Vec<String>) -> Result<Self, String> {
        if config["peft_type"].as_str() != Some("LORA") {
            return Err(format!("peft_type: expected LORA, found {}", config["peft_type"]));
        }
        let bias = config["bias"].as_str().unwrap_or("none");
        if bias != "none" {
            return Err(format!(
                "bias: expected none, found {bias:?}: adapters with biases of the base are not supported"
            ));
        }
        for member in ["target_parameters", "trainable_token_indices"] {
            let empty = match &config[member] {
                Value::Null => true,
                Value::Array(list) => list.is_empty(),
                Value::Object(members) => members.is_empty(),
                Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
            };
            if !empty {
                return Err(format!("{member} is not supported"));
            }
        }
        let targets = match &config["target_modules"] {
            Value::String(word) if word == "all-linear" => Targets::Stored,
            Value::String(pattern) => matching("target_modules", pattern).map_or_else(
                |_| {
                    let what = "is taken to target the modules it has matrices for";
                    warnings
                        .push(format!("lora: target_modules {pattern:?} cannot be evaluated here: the adapter {what}"));
                    Targets::Stored
                },
                Targets::Matching,
            ),
            names @ Value::Array(_) => Targets::Names(words(names)),
            other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) => {
                return Err(format!("target_modules: expected a list or a text, found {other}"));
            }
        };
        let exclude = &config["exclude_modules"];
        let layers = match &config["layers_to_transform"] {
            Value::Number(number) => number.as_u64().map(|number| vec![number]),
            Value::Array(list) if !list.is_empty() => {
                let numbers = list.iter().map(|layer| {
                    layer.as_u64().ok_or_else(|| format!("layers_to_transform: expected numbers, found {layer}"))
                });
                Some(numbers.collect::<Result<_, _>>()?)
            }
            Value::Null | Value::Array(_) | Value::Bool(_) | Value::String(_) | Value::Object(_) => None,
        };
        let patterns = words(&config["layers_pattern"]);
        let layer_numbers = if patterns.is_empty() {
            Regex::new(r"^.*?\.[^.]*\.(\d+)\.").into_iter().collect()
        } else {
            let of_layers = |word: &String| {
                let regex = Regex::new(&format!(r"^(?:|.*?\.)(?:{word})\.(\d+)\."));
                regex.map_err(|_| format!("layers_pattern: expected regular expressions, found {word:?}"))
            };
            patterns.iter().map(of_layers).collect::<Result<_, _>>()?
        };
        Ok(Self {
            targets,
            exclude: if exclude.is_string() { Vec::new() } else { words(exclude) },
            exclude_matching: exclude.as_str().map(|pattern| matching("exclude_modules", pattern)).transpose()?,
            to_save: words(&config["modules_to_save"]),
            layers,
            layer_numbers,
            stored,
        })
    }

    /// Splits a name after the saved module that it belongs to.
    fn saved<'n>(&self, name: &'n str) -> Option<(&'n str, &'n str)> {
        self.to_save.iter().find_map(|module| {
            let mut from = 0;
            while let Some(at) = name[from..].find(module.as_str()).map(|at| from + at) {
                let end = at + module.len();
                let starts = at == 0 || name[..at].ends_with('.');
                if let (true, Some(rest)) = (starts, name[end..].strip_prefix('.')) {
                    return Some((&name[..end], rest));
                }
                from = end;
            }
            None
        })
    }

    fn targets(&self, module: &str) -> bool {
        let excluded = self.exclude.iter().any(|name| ends_with(module, name))
            || self.exclude_matching.as_ref().is_some_and(|regex| regex.is_match(module));
        if excluded {
            return false;
        }
        match &self.targets {
            Targets::Stored => self.stored.contains(module),
            Targets::Matching(regex) => regex.is_match(module),
            Targets::Names(names) if names.iter().any(|name| name == module) => true,
            Targets::Names(names) => {
                names.iter().any(|name| ends_with(module, name))
                    && self.layers.as_ref().is_none_or(|layers| {
                        let found = self.layer_numbers.iter().find_map(|regex| regex.captures(module));
                        let number = found.and_then(|found| found[1].parse::<u64>().ok());
                        number.is_some_and(|number| layers.contains(&number))
                    })
            }
        }
    }
}

/// The module of one of an adapter's matrices, without the prefix, and the name of the tensor in the model.
fn matrix(name: &str) -> Option<(&str, String)> {
    let base = name.strip_prefix(PREFIX)?;
    let at = base.rfind(".lora_")?;
    let (module, matrix) = (&base[..at], &base[at + 1..]);
    let (kind, rest) = matrix.split_once('.').map_or((matrix, ""), |(kind, rest)| (kind, rest));
    let rest = match (kind, rest) {
        ("lora_magnitude_vector", "") => ".weight".to_owned(),
        (_, "") => String::new(),
        (_, rest) => format!(".{rest}"),
    };
    Some((module, format!("{PREFIX}{module}.{kind}.{NAME}{rest}")))
}

/// Renames drafts, which have the names of base and adapter, to the names of the model with the adapter. `from_adapter`
/// says which drafts are the adapter's.
pub(super) fn rename(
    drafts: &mut [Draft],
    adapter: &Adapter,
    from_adapter: impl Fn(&Draft) -> bool,
    (missing, unmapped): (&Allow, &Allow),
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) {
    let stored: BTreeSet<String> = drafts
        .iter()
        .filter(|draft| from_adapter(draft))
        .filter_map(|draft| Some(matrix(&draft.name)?.0.to_owned()))
        .collect();
    let lora = match Lora::read(&adapter.config, stored, warnings) {
        Ok(lora) => lora,
        Err(reason) => {
            let file = adapter.dir.join("adapter_config.json").display().to_string();
            problems.push(Problem::File { file, reason });
            return;
        }
    };
    let mut targeted = BTreeSet::new();
    let mut to_save = BTreeSet::new();
    for draft in drafts.iter_mut().filter(|draft| !from_adapter(draft)) {
        let name = &draft.name;
        let module = name.rsplit_once('.').map_or("", |(module, _)| module);
        draft.name = if let Some((module, rest)) = lora.saved(name) {
            to_save.insert(module.to_owned());
            format!("{PREFIX}{module}.original_module.{rest}")
        } else if lora.targets(module) {
            targeted.insert(module.to_owned());
            format!("{PREFIX}{module}.base_layer{}", &name[module.len()..])
        } else {
            format!("{PREFIX}{name}")
        };
    }
    for draft in drafts.iter_mut().filter(|draft| from_adapter(draft)) {
        let new = match matrix(&draft.name) {
            Some((module, name)) if targeted.contains(module) => Some(name),
            Some(_) => None,
            None => draft
                .name
                .strip_prefix(PREFIX)
                .and_then(|name| lora.saved(name))
                .map(|(module, rest)| format!("{PREFIX}{module}.modules_to_save.{NAME}.{rest}")),
        };
        match new {
            Some(name) => draft.name = name,
            None if unmapped.accepts(&draft.name) => {
                warnings.push(format!("lora: {} belongs to no module that is targeted", draft.name));
            }
            None => problems.push(Problem::UnexpectedTensor {
                group: NameGroup::one(format!(
                    "{} of the adapter: its module is not there, or not targeted",
                    draft.name
                )),
            }),
        }
    }
    for module in targeted.difference(&lora.stored) {
        let name = format!("{PREFIX}{module}.lora_A.weight");
        if !missing.accepts(&name) {
            let (group, for_target) = (NameGroup::one(name), format!("the targeted module {module}"));
            problems.push(Problem::MissingTensor { group, for_target, rule: RuleLocation::default() });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lora(config: &Value) -> Lora {
        let stored = ["m.layers.0.q".to_owned()].into();
        let mut all = json!({"peft_type": "LORA"});
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        Lora::read(&all, stored, &mut Vec::new()).unwrap()
    }

    #[test]
    fn modules_are_targeted_as_peft_does() {
        let rows = [
            (json!({"target_modules": ["q"]}), "m.layers.3.q", true),
            (json!({"target_modules": ["q"]}), "m.layers.3.xq", false),
            (json!({"target_modules": ["m.layers.3.q"], "layers_to_transform": [0]}), "m.layers.3.q", true),
            (json!({"target_modules": ["q"], "layers_to_transform": [0]}), "m.layers.3.q", false),
            (
                json!({"target_modules": ["q"], "layers_to_transform": 3, "layers_pattern": "layers"}),
                "m.layers.3.q",
                true,
            ),
            (json!({"target_modules": r".*\.\d\.(q|k)"}), "m.layers.3.k", true),
            (json!({"target_modules": r"layers.*"}), "m.layers.3.k", false),
            (json!({"target_modules": "all-linear"}), "m.layers.0.q", true),
            (json!({"target_modules": "all-linear"}), "m.layers.1.q", false),
            (json!({"target_modules": ["q"], "exclude_modules": ["0.q"]}), "m.layers.0.q", false),
        ];
        for (config, module, expected) in rows {
            assert_eq!(lora(&config).targets(module), expected, "{config} {module}");
        }
        let lora = lora(&json!({"target_modules": [], "modules_to_save": ["head", "a.b"]}));
        assert_eq!(lora.saved("x.head.weight"), Some(("x.head", "weight")));
        assert_eq!(lora.saved("overhead.head.p.weight"), Some(("overhead.head", "p.weight")));
        assert_eq!(lora.saved("a.bc.weight"), None);
    }

    #[test]
    fn matrices_get_the_name_of_the_adapter() {
        let rows = [
            ("base_model.model.a.q.lora_A.weight", Some("base_model.model.a.q.lora_A.default.weight")),
            ("base_model.model.e.lora_embedding_B", Some("base_model.model.e.lora_embedding_B.default")),
            (
                "base_model.model.q.lora_magnitude_vector",
                Some("base_model.model.q.lora_magnitude_vector.default.weight"),
            ),
            ("base_model.model.q.weight", None),
            ("q.lora_A.weight", None),
        ];
        for (name, expected) in rows {
            assert_eq!(matrix(name).map(|found| found.1).as_deref(), expected, "{name}");
        }
    }
}
