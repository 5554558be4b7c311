//! How transformers names the tensors of repositories when it loads them, by model type: `models.toml`.

use std::sync::{Arc, OnceLock};

use fancy_regex::Regex;
use serde::Deserialize;

use crate::checkpoint::Checkpoint;

const FILE: &str = include_str!("models.toml");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelsFile {
    /// Types whose names do not change.
    unchanged: Vec<String>,
    model: Vec<ModelRow>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelRow {
    types: Vec<String>,
    experts: Option<[String; 3]>,
    #[serde(default)]
    either_way: bool,
    #[serde(default)]
    renames: Vec<Vec<String>>,
    #[serde(default)]
    back: Vec<Vec<String>>,
    #[serde(default)]
    others: Vec<String>,
    #[serde(default)]
    ignored: Vec<String>,
    #[serde(default)]
    f32: Vec<String>,
}

/// A change of names.
#[derive(Debug)]
struct NameRule {
    pattern: Regex,
    target: String,
    /// Only names that begin so, after these words: the longer one first.
    scope: Option<[String; 2]>,
}

/// How transformers reads the repositories of some model types.
#[derive(Debug)]
pub(in crate::plan) struct ModelNames {
    /// The words of an expert's gate, up and down matrices. The gate has none if there is no gate.
    pub(in crate::plan) experts: Option<[String; 3]>,
    /// Whether fused experts are read in either order of their axes.
    pub(in crate::plan) either_way: bool,
    /// Conversions that are not renames and not stacks of experts.
    pub(in crate::plan) others: Vec<String>,
    renames: Vec<NameRule>,
    back: Vec<NameRule>,
    ignored: Vec<Regex>,
    f32: Vec<Regex>,
}

impl NameRule {
    fn new(row: &[String]) -> Result<Self, String> {
        let ([pattern, target] | [pattern, target, ..]) = row else { return Err("a rename has two texts".to_owned()) };
        let scope = match &row[2..] {
            [scope, base] => {
                let dotted = |word: &String| if word.is_empty() { String::new() } else { format!("{word}.") };
                Some([format!("{}{}", dotted(base), dotted(scope)), dotted(scope)])
            }
            _ => None,
        };
        let pattern = Regex::new(pattern).map_err(|error| error.to_string())?;
        Ok(Self { pattern, target: target.clone(), scope })
    }

    /// The name, with its first match replaced. As transformers does it, the first occurrence of the matched text is replaced.
    fn apply(&self, name: String) -> String {
        let scope = match &self.scope {
            None => "",
            Some(scopes) => match scopes.iter().find(|scope| name.starts_with(scope.as_str())) {
                Some(scope) => scope,
                None => return name,
            },
        };
        let rest = &name[scope.len()..];
        let Ok(Some(found)) = self.pattern.captures(rest) else { return name };
        let Some(whole) = found.get(0) else { return name };
        let group = found.iter().skip(1).flatten().next().map_or("", |group| group.as_str());
        let target = self.target.replace("\\1", group);
        format!("{scope}{}", rest.replacen(whole.as_str(), &target, 1))
    }
}

impl ModelNames {
    fn new(row: &ModelRow) -> Result<Self, String> {
        let rules = |rows: &[Vec<String>]| rows.iter().map(|row| NameRule::new(row)).collect::<Result<Vec<_>, _>>();
        let regex = |text: &str| Regex::new(text).map_err(|error| error.to_string());
        Ok(Self {
            renames: rules(&row.renames)?,
            back: rules(&row.back)?,
            ignored: row.ignored.iter().map(|text| regex(text)).collect::<Result<_, _>>()?,
            f32: row.f32.iter().map(|text| regex(&text.replace('*', ".*"))).collect::<Result<_, _>>()?,
            experts: row.experts.clone(),
            either_way: row.either_way,
            others: row.others.clone(),
        })
    }

    /// The names of this checkpoint's model, if they change when transformers loads it.
    pub(in crate::plan) fn of(checkpoint: &Checkpoint) -> Option<Arc<Self>> {
        let dialect = checkpoint.dialect();
        let types = [&dialect.model_type, &dialect.text_model_type].into_iter().flatten();
        let row = types.into_iter().find_map(|of| file().model.iter().find(|row| row.types.contains(of)))?;
        Some(Arc::new(Self::new(row).expect("the file is in the program, and a test reads it")))
    }

    /// The names of a model of transformers: as [`ModelNames::of`], and unchanged names for the types that have such. The type of the
    /// whole model counts.
    ///
    /// # Errors
    /// The type, if it is none of transformers'; nothing if there is none.
    pub(in crate::plan) fn of_whole(checkpoint: &Checkpoint) -> Result<Arc<Self>, Option<String>> {
        let of = checkpoint.dialect().model_type.as_ref().ok_or(None)?;
        let file = file();
        let row = file.model.iter().find(|row| row.types.contains(of));
        if row.is_none() && !file.unchanged.contains(of) {
            return Err(Some(of.clone()));
        }
        let nothing = ModelRow::default();
        Ok(Arc::new(Self::new(row.unwrap_or(&nothing)).expect("the file is in the program, and a test reads it")))
    }

    /// The name of a module's tensor, from its name in the repository.
    pub(in crate::plan) fn loaded(&self, name: &str) -> String {
        self.renames.iter().fold(name.to_owned(), |name, rule| rule.apply(name))
    }

    /// The name in the repository of a module's tensor. It stays as it is if transformers would not read it back.
    pub(super) fn stored(&self, name: &str) -> String {
        if self.back.is_empty() {
            return name.to_owned();
        }
        let back = self.back.iter().fold(name.to_owned(), |name, rule| rule.apply(name));
        if self.loaded(&back) == name { back } else { name.to_owned() }
    }

    /// Whether the class leaves a tensor out, by its name in its modules.
    pub(in crate::plan) fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|pattern| pattern.is_match(name).unwrap_or(false))
    }

    /// Whether the class keeps a module's tensor in float32 when all other floats have 16 bits.
    pub(in crate::plan) fn is_f32(&self, name: &str) -> bool {
        self.f32.iter().any(|pattern| pattern.is_match(name).unwrap_or(false))
    }
}

/// The file. Only the rows that are asked for are compiled.
fn file() -> &'static ModelsFile {
    static MODELS: OnceLock<ModelsFile> = OnceLock::new();
    MODELS.get_or_init(|| toml::from_str(FILE).expect("the file is in the program, and a test reads it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(of: &str) -> ModelNames {
        ModelNames::new(file().model.iter().find(|row| row.types.iter().any(|known| known == of)).unwrap()).unwrap()
    }

    #[test]
    fn the_file_parses_and_no_type_is_in_it_twice() {
        let mut seen = std::collections::BTreeSet::new();
        for row in &file().model {
            ModelNames::new(row).unwrap_or_else(|error| panic!("{:?}: {error}", row.types));
            assert!(row.types.iter().all(|of| seen.insert(of)));
        }
        assert!(file().unchanged.iter().all(|of| seen.insert(of)));
    }

    #[test]
    fn names_go_to_modules_and_back() {
        let rows = [
            ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
            ("mixtral", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
            ("phimoe", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.router.weight"),
            ("qwen3_moe", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ];
        for (of, stored, loaded) in rows {
            assert_eq!(model(of).loaded(stored), loaded, "{of} {stored}");
            assert_eq!(model(of).stored(loaded), stored, "{of} {loaded}");
        }
        assert_eq!(model("mixtral").experts.as_ref().unwrap(), &["w1", "w3", "w2"].map(str::to_owned));
    }
}
