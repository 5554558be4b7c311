//! How transformers names the tensors of repositories when it loads them, by model type: `models.toml`.

use std::{
    collections::HashSet,
    num::NonZeroU64,
    sync::{Arc, LazyLock},
};

use ckfs_checkpoint::Checkpoint;
use fancy_regex::Regex;
use serde::Deserialize;

use super::{
    super::{library::embedded_table, member::model_types, naming},
    convert::{ConverterRow, LoadConverter, LoadScope, compiled},
    spelling::ExpertName,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelsFile {
    /// Types whose names do not change.
    unchanged: Vec<String>,
    model: Vec<ModelRow>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ModelRow {
    types: Vec<String>,
    experts: Option<[String; 3]>,
    either_way: bool,
    renames: Vec<RenameRow>,
    back: Vec<Vec<String>>,
    converters: Vec<ConverterRow>,
    others: Vec<String>,
    state: Vec<String>,
    base: String,
    ignored: Vec<String>,
    beside: Vec<[String; 2]>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum RenameRow {
    /// Pattern and target, with the scope.
    Always(Vec<String>),
    /// Only if a name of the repository matches `guard`, or with a group that is a number, which becomes another.
    Changed { from: String, to: String, scope: Vec<String>, guard: Option<String>, number: Option<NumberChange> },
}

/// A number that is divided, without a rest, and then increased.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NumberChange {
    divided: NonZeroU64,
    plus: i64,
}

/// A change of names.
#[derive(Debug)]
struct NameRule {
    pattern: Regex,
    target: String,
    scope: LoadScope,
    number: Option<NumberChange>,
}

/// What transformers renames in the repositories of every model, after the model's own renames. Old ones have these names.
const LEGACY: [[&str; 2]; 2] =
    [[r"LayerNorm.gamma(?!\w)", "LayerNorm.weight"], [r"LayerNorm.beta(?!\w)", "LayerNorm.bias"]];

/// What transformers makes of a tensor of a repository.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Loaded {
    /// The name of the module's tensor. Of several tensors that are made of it, the first.
    pub(crate) name: String,
    /// The converter that the tensor goes through, and the pattern of it that the name matches.
    pub(crate) by: Option<(usize, usize)>,
}

/// How transformers reads the repositories of some model types.
#[derive(Debug)]
pub(crate) struct ModelNames {
    /// The words of an expert's gate, up and down matrices. The gate has none if there is no gate.
    pub(crate) experts: Option<[String; 3]>,
    /// Whether fused experts are read in either order of their axes.
    pub(crate) either_way: bool,
    /// Conversions that are not renames and not stacks of experts.
    pub(crate) others: Vec<String>,
    /// What makes tensors of others.
    pub(crate) converters: Vec<LoadConverter>,
    renames: Vec<NameRule>,
    back: Vec<NameRule>,
    /// The names of the state with `*` for numbers, if the names depend on them.
    state: HashSet<String>,
    /// The prefix of the state's names that a repository may lack or have in addition.
    base: String,
    ignored: Vec<Regex>,
    beside: Vec<(Regex, String)>,
}

impl NameRule {
    fn new(row: &[String]) -> Self {
        let (pattern, target, scope) = (compiled(&row[0]), row[1].clone(), LoadScope::new(&row[2..]));
        Self { pattern, target, scope, number: None }
    }

    /// The name, with its first match replaced. As transformers does it, the first occurrence of the matched text is replaced.
    fn apply(&self, name: String) -> String {
        let Some(begin) = self.scope.begin(&name) else { return name };
        let (scope, rest) = name.split_at(begin);
        let Ok(Some(found)) = self.pattern.captures(rest) else { return name };
        let Some(whole) = found.get(0) else { return name };
        let group = found.iter().skip(1).flatten().next().map_or("", |group| group.as_str());
        let group = match self.number {
            None => group.to_owned(),
            Some(NumberChange { divided, plus }) => {
                let number = group.parse::<u64>().ok().and_then(|number| (number / divided).checked_add_signed(plus));
                let Some(number) = number else { return name };
                number.to_string()
            }
        };
        let target = self.target.replace("\\1", &group);
        format!("{scope}{}", rest.replacen(whole.as_str(), &target, 1))
    }
}

impl ModelNames {
    /// The names for a repository with tensors of these names.
    fn new(row: &ModelRow, names: &[&str]) -> Self {
        let mut renames: Vec<NameRule> = Vec::new();
        for row in &row.renames {
            let (rule, guard) = match row {
                RenameRow::Always(list) => (NameRule::new(list), None),
                RenameRow::Changed { from, to, scope, guard, number } => {
                    let list: Vec<String> = [from, to].into_iter().chain(scope).cloned().collect();
                    let guard = guard.as_deref().map(compiled);
                    (NameRule { number: *number, ..NameRule::new(&list) }, guard)
                }
            };
            let is_there = |guard: &Regex| {
                names.iter().any(|name| {
                    let name = renames.iter().fold((*name).to_owned(), |name, rule| rule.apply(name));
                    let rest = rule.scope.begin(&name).map(|begin| &name[begin..]);
                    rest.is_some_and(|rest| guard.is_match(rest).unwrap_or(false))
                })
            };
            if guard.as_ref().is_none_or(is_there) {
                renames.push(rule);
            }
        }
        renames.extend(LEGACY.map(|row| NameRule::new(&row.map(str::to_owned))));
        Self {
            renames,
            back: row.back.iter().map(|row| NameRule::new(row)).collect(),
            converters: row.converters.iter().map(LoadConverter::new).collect(),
            ignored: row.ignored.iter().map(|text| compiled(text)).collect(),
            beside: row.beside.iter().map(|[pattern, words]| (compiled(pattern), words.clone())).collect(),
            state: row.state.iter().cloned().collect(),
            base: if row.base.is_empty() { String::new() } else { format!("{}.", row.base) },
            experts: row.experts.clone(),
            either_way: row.either_way,
            others: row.others.clone(),
        }
    }

    /// The names of this checkpoint's model, if they change when transformers loads it.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Option<Arc<Self>> {
        let has = |row: &&ModelRow, of: &str| row.types.iter().any(|known| known == of);
        let row = model_types(checkpoint).find_map(|of| MODELS.model.iter().find(|row| has(row, of)))?;
        Some(Self::for_checkpoint(row, checkpoint))
    }

    fn for_checkpoint(row: &ModelRow, checkpoint: &Checkpoint) -> Arc<Self> {
        let names: Vec<&str> = checkpoint.tensors().map(|(_, info)| info.name).collect();
        Arc::new(Self::new(row, &names))
    }

    /// The names of a model of transformers: as [`ModelNames::of`], and unchanged names for the types that have such. The type of the
    /// whole model counts.
    ///
    /// # Errors
    /// The type, if it is none of transformers'; nothing if there is none.
    pub(crate) fn of_whole(checkpoint: &Checkpoint) -> Result<Arc<Self>, Option<String>> {
        let of = checkpoint.dialect().model_type.as_ref().ok_or(None)?;
        let file = &*MODELS;
        let row = file.model.iter().find(|row| row.types.contains(of));
        if row.is_none() && !file.unchanged.contains(of) {
            return Err(Some(of.clone()));
        }
        Ok(Self::for_checkpoint(row.unwrap_or(&ModelRow::default()), checkpoint))
    }

    /// What becomes of a tensor of this name in the repository.
    pub(crate) fn loaded(&self, name: &str) -> Loaded {
        let renamed = self.renames.iter().fold(name.to_owned(), |name, rule| rule.apply(name));
        let (renamed, by) = self.converted(&renamed);
        let renamed = self.with_base(renamed);
        // A name of the state that the rules would change is one already.
        if !self.state.is_empty() && !self.has(&renamed) && self.has(name) {
            return Loaded { name: name.to_owned(), by: None };
        }
        Loaded { name: renamed, by }
    }

    /// The name with the text of the first converter that matches, which is then the only one.
    fn converted(&self, name: &str) -> (String, Option<(usize, usize)>) {
        let mut found = self.converters.iter().enumerate().filter_map(|(at, converter)| {
            let (begin, rest) = name.split_at(converter.scope.begin(name)?);
            let (pattern, text) = converter.matched(rest)?;
            Some((format!("{begin}{}", rest.replacen(text, &converter.to[0].0, 1)), Some((at, pattern))))
        });
        found.next().unwrap_or_else(|| (name.to_owned(), None))
    }

    /// The name with the prefix of the state's names, or without it, whichever the state has.
    fn with_base(&self, name: String) -> String {
        if self.base.is_empty() {
            return name;
        }
        if let Some(rest) = name.strip_prefix(&self.base)
            && self.has(rest)
        {
            return rest.to_owned();
        }
        let longer = format!("{}{name}", self.base);
        if self.has(&longer) { longer } else { name }
    }

    /// Whether the state has a tensor of this name, or one that holds this expert's. Numbers do not count.
    fn has(&self, name: &str) -> bool {
        if self.state.contains(&naming::group_name(name)) {
            return true;
        }
        let Some(expert) = ExpertName::parse(name).filter(|name| name.expert.is_some()) else { return false };
        let module = naming::group_name(expert.before.trim_end_matches('.'));
        let has = |word: &str| self.state.contains(&format!("{module}.experts.{word}"));
        has("gate_up_proj") || has("up_proj")
    }

    /// Whether it is known that the state has no tensor of this name.
    pub(crate) fn lacks(&self, name: &str) -> bool {
        !self.state.is_empty() && !self.has(name)
    }

    /// Whether every name of the modules is the repository's too.
    pub(super) fn keeps_names(&self) -> bool {
        self.back.is_empty()
    }

    /// The name in the repository of a module's tensor. It stays as it is if transformers would not read it back.
    pub(super) fn stored(&self, name: &str) -> String {
        if self.keeps_names() {
            return name.to_owned();
        }
        let back = self.back.iter().fold(name.to_owned(), |name, rule| rule.apply(name));
        if self.loaded(&back).name == name { back } else { name.to_owned() }
    }

    /// Whether the class leaves a tensor out, by its name in its modules. `has` tells whether the repository has a tensor that gets a
    /// name.
    pub(crate) fn ignores(&self, name: &str, has: &dyn Fn(&str) -> bool) -> bool {
        let is_alone = |(pattern, words): &(Regex, String)| {
            let found = pattern.find(name).ok().flatten();
            found.is_some_and(|found| !has(&format!("{}{words}", &name[..found.start()])))
        };
        let is_ignored = |pattern: &Regex| pattern.is_match(name).unwrap_or(false);
        self.beside.iter().any(is_alone)
            || (self.ignored.iter().any(is_ignored) && (self.state.is_empty() || !self.has(name)))
    }
}

/// The file. Only the rows that are requested are compiled.
static MODELS: LazyLock<ModelsFile> = LazyLock::new(|| embedded_table(include_str!("models.toml")));

#[cfg(test)]
mod tests {
    use super::*;

    fn model(of: &str) -> ModelNames {
        let row = MODELS.model.iter().find(|row| row.types.iter().any(|known| known == of)).unwrap();
        ModelNames::new(row, &[])
    }

    #[test]
    fn the_file_parses_and_no_type_is_in_it_twice() {
        let mut seen = std::collections::BTreeSet::new();
        for row in &MODELS.model {
            let names = ModelNames::new(row, &[]);
            let guarded = |row: &RenameRow| !matches!(row, RenameRow::Changed { guard: None, number: None, .. });
            for LoadConverter { from, to, .. } in &names.converters {
                let known: Vec<String> = (0..from.len() * to.len()).map(|number| format!("x{number}")).collect();
                let mut used = to.iter().flat_map(|(_, view)| &view.names);
                assert!(
                    !to.is_empty() && used.all(|name| known.iter().any(|known| **known == **name)),
                    "{:?}",
                    row.types
                );
            }
            assert!(row.renames.iter().all(guarded), "{:?}", row.types);
            assert!(row.types.iter().all(|of| seen.insert(of)));
        }
        assert!(MODELS.unchanged.iter().all(|of| seen.insert(of)));
    }

    #[test]
    fn names_go_to_modules_and_back() {
        let rows = [
            ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
            ("mixtral", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
            ("phimoe", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.router.weight"),
            ("qwen3_moe", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ];
        let bert = ModelNames::new(&ModelRow::default(), &[]);
        for (stored, loaded) in [("gamma", "weight"), ("beta", "bias"), ("gammas", "gammas")] {
            let name = |word: &str| format!("bert.encoder.layer.0.output.LayerNorm.{word}");
            assert_eq!(bert.loaded(&name(stored)).name, name(loaded));
        }
        for (of, stored, loaded) in rows {
            assert_eq!(model(of).loaded(stored).name, loaded, "{of} {stored}");
            assert_eq!(model(of).stored(loaded), stored, "{of} {loaded}");
        }
        let changed = [
            // Blocks of attention and of the MLP in turns are the halves of layers.
            ("dory", "backbone.layers.4.mixer.q_proj.weight", "model.layers.2.self_attn.q_proj.weight"),
            ("dory", "backbone.layers.5.mixer.up_proj.weight", "model.layers.2.mlp.up_proj.weight"),
            ("dory", "backbone.layers.11.mlp_alpha", "model.layers.5.lambda_2"),
            ("dory", "backbone.layers.5.mixers.weight", "model.layers.5.mixers.weight"),
            // A list that begins with the second layer, and one that begins with the first.
            ("inkling2", "model.llm.attn_res.attn_queries.0", "model.language_model.layers.1.attention_input.query"),
            ("inkling2", "model.llm.attn_res.mlp_queries.0", "model.language_model.layers.0.mlp_input.query"),
        ];
        for (of, stored, loaded) in changed {
            assert_eq!(model(of).loaded(stored).name, loaded, "{of} {stored}");
        }
        assert_eq!(model("mixtral").experts.as_ref().unwrap(), &["w1", "w3", "w2"].map(str::to_owned));
    }
}
