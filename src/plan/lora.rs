//! A LoRA adapter on a checkpoint: the names that PEFT gives to the tensors of a model with the adapter.
//!
//! If `adapter_config.json` targets a module, its weight becomes `base_layer.weight`, and the adapter's matrices stand
//! beside it. If it saves a module, the original becomes `original_module`, and the trained copy
//! `modules_to_save.default`. A tensor of the base that the adapter has too, as PEFT saves embeddings, is the adapter's. All names
//! begin with `base_model.model.`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ckfs_checkpoint::{Adapter, PythonRegex};
use ckfs_tensor::Shape;
use serde_json::Value;

use super::{
    Allow,
    draft::{Draft, Roles},
    name_group::{NameGroup, fold, stars},
    naming::TOWERS,
    problem::Problem,
};

/// The prefix of the base model's names.
pub(super) const PREFIX: &str = "base_model.model.";

/// The word that PEFT gives to a module of the base of which the adapter has a trained copy.
const ORIGINAL: &str = ".original_module.";

/// The name that PEFT gives to an adapter, unless the user gives another.
pub(super) const DEFAULT: &str = "default";

/// The matrices of a module whose weight is `[out, in]`, and those of an embedding, whose weight is `[entries, width]`.
pub(super) const OF_LINEAR: [&str; 2] = ["lora_A.weight", "lora_B.weight"];
pub(super) const OF_EMBEDDING: [&str; 2] = ["lora_embedding_A", "lora_embedding_B"];

/// Modules that an adapter targets, or does not.
enum Modules {
    /// Whose names are one of these, or end with one of them.
    Named(Vec<String>),
    /// Whose whole names match.
    Matching(PythonRegex),
}

impl Modules {
    /// Those that a member of a configuration lists; `None` if it does not.
    fn read(config: &Value, member: &str) -> Result<Option<Self>, String> {
        Ok(match &config[member] {
            Value::String(pattern) => {
                let regex = PythonRegex::full(pattern).ok_or_else(|| not_usable(member, pattern))?;
                Some(Self::Matching(regex))
            }
            names @ Value::Array(_) => Some(Self::Named(words(names))),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => None,
        })
    }

    fn have(&self, module: &str) -> bool {
        match self {
            Self::Named(names) => names.iter().any(|name| ends_with(module, name)),
            Self::Matching(regex) => regex.matches(module) == Some(true),
        }
    }
}

pub(super) struct Lora {
    /// `None`: those for which the adapter has matrices.
    targets: Option<Modules>,
    exclude: Option<Modules>,
    to_save: Vec<String>,
    layers: Option<Vec<u64>>,
    layer_numbers: Vec<PythonRegex>,
    /// The rank of all modules, and others for modules whose names end with what an expression matches.
    rank: Option<u64>,
    ranks: Vec<(PythonRegex, u64)>,
    has_magnitudes: bool,
    has_bias: bool,
    /// The base's weights are `[in, out]`.
    pub(super) is_transposed: bool,
    /// Modules for which the adapter has matrices.
    stored: Matrices,
}

/// Shapes of an adapter's matrices, by module and by what follows the module's name.
pub(super) type Matrices = BTreeMap<String, BTreeMap<String, Shape>>;

fn words(value: &Value) -> Vec<String> {
    let listed = value.as_array().into_iter().flatten();
    listed.chain([value]).filter_map(|word| word.as_str().map(str::to_owned)).collect()
}

fn not_usable(member: &str, pattern: &str) -> String {
    format!("{member}: expected a regular expression of Python, found {pattern:?}, which cannot be used")
}

/// The entries of a dictionary whose keys are expressions for the ends of modules' names, in order.
pub(super) fn by_pattern<'c>(config: &'c Value, member: &str) -> Result<Vec<(PythonRegex, &'c Value)>, String> {
    let entries = config[member].as_object().into_iter().flatten();
    let entry = |(pattern, value): (&String, &'c Value)| {
        let regex = PythonRegex::new(r"^(?:.*\.)?(?:", pattern, ")$").ok_or_else(|| not_usable(member, pattern))?;
        Ok((regex, value))
    };
    entries.map(entry).collect()
}

/// Whether a member of a configuration says nothing.
pub(super) fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Whether a module is `name`, or ends with it as a word.
fn ends_with(module: &str, name: &str) -> bool {
    module == name || module.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
}

impl Lora {
    pub(super) fn read(config: &Value, stored: Matrices) -> Result<Self, String> {
        if config["peft_type"].as_str() != Some("LORA") {
            return Err(format!("peft_type: expected LORA, found {}", config["peft_type"]));
        }
        let bias = config["bias"].as_str().unwrap_or("none");
        if bias != "none" {
            return Err(format!(
                "bias: expected none, found {bias:?}: adapters with biases of the base are not supported"
            ));
        }
        let mut unknown = ["target_parameters", "trainable_token_indices"].into_iter();
        if let Some(member) = unknown.find(|member| !is_unset(&config[*member])) {
            return Err(format!("{member} is not supported"));
        }
        let listed = &config["target_modules"];
        let targets = if listed == "all-linear" { None } else { Modules::read(config, "target_modules")? };
        if targets.is_none() && !listed.is_string() {
            return Err(format!("target_modules: expected a list or a text, found {listed}"));
        }
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
            PythonRegex::new("", r"^.*?\.[^.]*\.(\d+)\.", "").into_iter().collect()
        } else {
            let of_layers = |word: &String| {
                let regex = PythonRegex::new(r"^(?:|.*?\.)(?:", word, r")\.(\d+)\.");
                regex.ok_or_else(|| not_usable("layers_pattern", word))
            };
            patterns.iter().map(of_layers).collect::<Result<_, _>>()?
        };
        // The scale of an adapter is its trainer's matter, yet a pattern that nobody can use is a damaged configuration.
        by_pattern(config, "alpha_pattern")?;
        let ranks = by_pattern(config, "rank_pattern")?.into_iter().map(|(regex, rank)| {
            rank.as_u64().map(|rank| (regex, rank)).ok_or_else(|| format!("rank_pattern: expected ranks, found {rank}"))
        });
        Ok(Self {
            targets,
            exclude: Modules::read(config, "exclude_modules")?,
            to_save: words(&config["modules_to_save"]),
            layers,
            layer_numbers,
            rank: config["r"].as_u64(),
            ranks: ranks.collect::<Result<_, _>>()?,
            has_magnitudes: config["use_dora"].as_bool().unwrap_or(false),
            has_bias: config["lora_bias"].as_bool().unwrap_or(false),
            is_transposed: config["fan_in_fan_out"].as_bool().unwrap_or(false),
            stored,
        })
    }

    /// The rank of a module's matrices.
    pub(super) fn rank_of(&self, module: &str) -> Option<u64> {
        self.ranks.iter().find(|(regex, _)| regex.matches(module) == Some(true)).map(|(_, rank)| *rank).or(self.rank)
    }

    /// Splits a name after the saved module that it belongs to: the outermost whose name ends with an entry of `modules_to_save`,
    /// as letters, not as words.
    pub(super) fn saved<'n>(&self, name: &'n str) -> Option<(&'n str, &'n str)> {
        let mut modules = name.match_indices('.').map(|(end, _)| (&name[..end], &name[end + 1..]));
        modules.find(|(module, _)| self.to_save.iter().any(|saved| module.ends_with(saved.as_str())))
    }

    /// Whether the adapter targets a module.
    pub(super) fn targets(&self, module: &str) -> bool {
        let is_of_layers = |layers: &Vec<u64>| {
            let found = self.layer_numbers.iter().find_map(|regex| regex.first_group(module));
            found.and_then(|found| found.parse::<u64>().ok()).is_some_and(|number| layers.contains(&number))
        };
        let is_targeted = match &self.targets {
            None => self.stored.contains_key(module),
            Some(Modules::Named(names)) if !names.iter().any(|name| name == module) => {
                names.iter().any(|name| ends_with(module, name)) && self.layers.as_ref().is_none_or(is_of_layers)
            }
            Some(modules) => modules.have(module),
        };
        is_targeted && !self.exclude.as_ref().is_some_and(|modules| modules.have(module))
    }

    /// Checks that a targeted module has all of its matrices, in the shapes that its rank and the base's weight give them.
    fn check(
        &self,
        module: &str,
        weight: Option<&Shape>,
        missing: &Allow,
        problems: &mut Vec<Problem>,
        shapes: &mut Vec<OtherShape>,
    ) {
        let empty = BTreeMap::new();
        let found = self.stored.get(module).unwrap_or(&empty);
        let of_embedding = found.keys().any(|matrix| matrix.starts_with("lora_embedding_"));
        let [a, b] = if of_embedding { OF_EMBEDDING } else { OF_LINEAR };
        let mut wanted = vec![a, b];
        wanted.extend(self.has_magnitudes.then_some("lora_magnitude_vector"));
        wanted.extend((self.has_bias && !of_embedding).then_some("lora_B.bias"));
        for matrix in wanted.into_iter().filter(|matrix| !found.contains_key(*matrix)) {
            let name = format!("{PREFIX}{module}.{matrix}");
            if !missing.accepts(&name) {
                problems.push(Problem::missing(NameGroup::one(name), format!("the targeted module {module}")));
            }
        }
        // The weight of an embedding is `[entries, width]`: an entry is an input.
        let swapped = self.is_transposed != of_embedding;
        let weight = weight.and_then(|weight| match (weight.extents(), swapped) {
            ([out, inner], false) | ([inner, out], true) => Some((*out, *inner)),
            _ => None,
        });
        let rank = self.rank_of(module);
        let sides = [(a, rank, weight.map(|(_, inner)| inner)), (b, weight.map(|(out, _)| out), rank)];
        for (matrix, rows, columns) in sides {
            // Convolutions have further axes. What ZeRO-3 saved without gathering it has no element.
            let is_compared = |stored: &&Shape| stored.extents().len() <= 2 || stored.is_empty();
            let Some(stored) = found.get(matrix).filter(is_compared) else { continue };
            let wanted = [rows, columns];
            let differs =
                wanted.iter().zip(stored.extents()).any(|(wanted, found)| wanted.is_some_and(|it| it != *found));
            if differs || stored.is_empty() || stored.extents().len() != 2 {
                let [rows, columns] =
                    wanted.map(|extent| extent.map_or_else(|| "_".to_owned(), |extent| extent.to_string()));
                let expected = format!("[{rows}, {columns}]");
                shapes.push((format!("{PREFIX}{module}.{matrix}"), expected, stored.clone()));
            }
        }
    }
}

/// The module of one of an adapter's matrices, without the prefix, and the matrix in it: `lora_A.weight`, `lora_embedding_B`.
pub(super) fn matrix(name: &str) -> Option<(&str, &str)> {
    let base = name.strip_prefix(PREFIX)?;
    let at = base.rfind(".lora_")?;
    Some((&base[..at], &base[at + 1..]))
}

/// Prefixes of a text model, the longer ones first. transformers 4.52 moved the text models of models with several parts.
const TEXT: [&str; 4] = ["model.language_model.", "language_model.model.", "model.text_model.", "model."];

/// Beginnings of the names of a checkpoint, each with the one that the adapter's names have for the same modules. Both are of one
/// model, saved by different versions of a library.
pub(super) fn moves(base: &[&str], adapter: &[&str]) -> Vec<(String, String)> {
    let is_text = |name: &str, prefix: &str| {
        let rest = name.strip_prefix(prefix).unwrap_or_default();
        ["layers.", "embed_tokens.", "norm."].iter().any(|word| rest.starts_with(word))
    };
    let text_of = |names: &[&str]| names.iter().find_map(|name| TEXT.into_iter().find(|prefix| is_text(name, prefix)));
    let adapter: Vec<&str> = adapter.iter().filter_map(|name| name.strip_prefix(PREFIX)).collect();
    let mut found = Vec::new();
    let mut moved = |own: &str, other: &str| found.push((own.to_owned(), other.to_owned()));
    if let Some((own, other)) = text_of(base).zip(text_of(&adapter))
        && !base.iter().any(|name| is_text(name, other))
    {
        moved(own, other);
    }
    let heads = [("lm_head.".to_owned(), "language_model.lm_head.".to_owned())];
    let towers = TOWERS.iter().map(|tower| (format!("{tower}."), format!("model.{tower}.")));
    for (short, long) in heads.into_iter().chain(towers) {
        for (own, other) in [(&short, &long), (&long, &short)] {
            let has = |prefix: &String| base.iter().any(|name| name.starts_with(prefix.as_str()));
            if adapter.iter().any(|name| name.starts_with(other.as_str())) && has(own) && !has(other) {
                moved(own, other);
            }
        }
    }
    found
}

/// A name of the checkpoint as the adapter has it.
pub(super) fn moved(name: &str, moves: &[(String, String)]) -> String {
    let new = moves.iter().find_map(|(own, other)| Some(format!("{other}{}", name.strip_prefix(own.as_str())?)));
    new.unwrap_or_else(|| name.to_owned())
}

/// What is said of them.
pub(super) fn moves_text(moves: &[(String, String)]) -> String {
    let pairs: Vec<String> = moves.iter().map(|(own, other)| format!("{other} for {own}")).collect();
    format!("the adapter's names are those of another version of the model: {} of the checkpoint", pairs.join(", "))
}

/// The name of a matrix of a module in the model.
fn model_name(module: &str, matrix: &str) -> String {
    let (kind, rest) = matrix.split_once('.').unwrap_or((matrix, ""));
    let rest = match (kind, rest) {
        ("lora_magnitude_vector", "") => ".weight".to_owned(),
        (_, "") => String::new(),
        (_, rest) => format!(".{rest}"),
    };
    format!("{PREFIX}{module}.{kind}.{DEFAULT}{rest}")
}

/// Shapes and roles of the base's tensors, by their new names.
type BaseTensors = HashMap<String, (Shape, Roles)>;

/// Renames the base. Returns the targeted modules with the shapes of their weights, and all tensors by their new names.
fn rename_base<'d>(
    drafts: impl Iterator<Item = &'d mut Draft>,
    lora: &Lora,
) -> (BTreeMap<String, Option<Shape>>, BaseTensors) {
    let (mut targeted, mut tensors) = (BTreeMap::new(), HashMap::new());
    for draft in drafts {
        let name = &draft.name;
        let (module, parameter) = name.rsplit_once('.').unwrap_or(("", name));
        draft.name = if let Some((module, rest)) = lora.saved(name) {
            format!("{PREFIX}{module}{ORIGINAL}{rest}")
        } else if lora.targets(module) {
            let weight: &mut Option<Shape> = targeted.entry(module.to_owned()).or_default();
            if parameter == "weight" && draft.view.dtype().is_float() {
                *weight = Some(draft.view.shape().clone());
            }
            format!("{PREFIX}{module}.base_layer.{parameter}")
        } else {
            format!("{PREFIX}{name}")
        };
        tensors.insert(draft.name.clone(), (draft.view.shape().clone(), draft.roles.clone()));
    }
    (targeted, tensors)
}

/// Renames drafts, which have the names of base and adapter, to the names of the model with the adapter. `from_adapter`
/// says which drafts are the adapter's.
pub(super) fn rename(
    drafts: &mut Vec<Draft>,
    adapter: &Adapter,
    from_adapter: impl Fn(&Draft) -> bool + Copy,
    (missing, unmapped): (&Allow, &Allow),
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) {
    let names = |of_adapter: bool| -> Vec<&str> {
        drafts.iter().filter(|draft| from_adapter(draft) == of_adapter).map(|draft| draft.name.as_str()).collect()
    };
    let moves = moves(&names(false), &names(true));
    if !moves.is_empty() {
        warnings.push(format!("lora: {}", moves_text(&moves)));
        for draft in drafts.iter_mut().filter(|draft| !from_adapter(draft)) {
            draft.name = moved(&draft.name, &moves);
        }
    }
    let mut stored = Matrices::new();
    for draft in drafts.iter().filter(|draft| from_adapter(draft)) {
        if let Some((module, matrix)) = matrix(&draft.name) {
            stored.entry(module.to_owned()).or_default().insert(matrix.to_owned(), draft.view.shape().clone());
        }
    }
    let lora = match Lora::read(&adapter.config, stored) {
        Ok(lora) => lora,
        Err(reason) => {
            let file = adapter.dir.join("adapter_config.json").display().to_string();
            problems.push(Problem::File { file, reason });
            return;
        }
    };
    let (targeted, base) = rename_base(drafts.iter_mut().filter(|draft| !from_adapter(draft)), &lora);
    let (mut replaced, mut saved, mut shapes) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for draft in drafts.iter_mut().filter(|draft| from_adapter(draft)) {
        if let Some((expected, roles)) = base.get(&draft.name) {
            let found = draft.view.shape();
            if expected != found {
                shapes.push((draft.name.clone(), expected.to_string(), found.clone()));
            }
            // It is cut as the tensor that it replaces.
            draft.roles = roles.clone();
            replaced.insert(draft.name.clone());
            continue;
        }
        let new = match matrix(&draft.name) {
            Some((module, matrix)) => targeted.contains_key(module).then(|| model_name(module, matrix)),
            None => draft.name.strip_prefix(PREFIX).and_then(|name| lora.saved(name)).map(|(module, rest)| {
                let original = format!("{PREFIX}{module}{ORIGINAL}{rest}");
                let found = draft.view.shape();
                let differing = base.get(&original).map(|(shape, _)| shape).filter(|shape| *shape != found);
                shapes.extend(differing.map(|shape| (draft.name.clone(), shape.to_string(), found.clone())));
                saved.insert(original);
                format!("{PREFIX}{module}.modules_to_save.{DEFAULT}.{rest}")
            }),
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
    drafts.retain(|draft| from_adapter(draft) || !replaced.contains(&draft.name));
    let unsaved = base.keys().filter(|name| name.contains(ORIGINAL) && !saved.contains(*name));
    let unsaved = unsaved.map(|name| name.replace(ORIGINAL, ".")).filter(|name| !missing.accepts(name));
    problems.extend(unsaved_modules(&unsaved.collect()));
    for (module, weight) in &targeted {
        lora.check(module, weight.as_ref(), missing, problems, &mut shapes);
    }
    problems.extend(of_other_shape(shapes, adapter));
}

/// The problems of an adapter without these trained copies of modules, by the names that it would have for them.
pub(super) fn unsaved_modules(names: &BTreeSet<String>) -> impl Iterator<Item = Problem> {
    let groups = fold(names.iter().map(String::as_str), &[]);
    groups.into_iter().map(|group| Problem::missing(group, "modules_to_save in adapter_config.json"))
}

/// A tensor of the adapter that has another shape: its name, the shape expected and the one found.
type OtherShape = (String, String, Shape);

/// One problem for the same matrix of all layers.
fn of_other_shape(all: Vec<OtherShape>, adapter: &Adapter) -> Vec<Problem> {
    let file = adapter.dir.join("adapter_model.safetensors").display().to_string();
    let mut groups: BTreeMap<(String, String, String), (Vec<String>, Shape)> = BTreeMap::new();
    for (name, expected, found) in all {
        let key = (stars(&name), expected, found.to_string());
        groups.entry(key).or_insert_with(|| (Vec::new(), found)).0.push(name);
    }
    let problem = |((_, expected, _), (names, found)): (_, (Vec<String>, Shape))| {
        let group = fold(names.iter().map(String::as_str), &[]).pop()?;
        Some(Problem::SourceShape { group, file: file.clone(), rule: String::new(), expected, found })
    };
    groups.into_iter().filter_map(problem).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lora(config: &Value) -> Lora {
        let stored = [("m.layers.0.q".to_owned(), BTreeMap::new())].into();
        let mut all = json!({"peft_type": "LORA"});
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        Lora::read(&all, stored).unwrap()
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
        assert_eq!(lora.saved("overhead.head.p.weight"), Some(("overhead", "head.p.weight")));
        assert_eq!(lora.saved("x.a.b.weight"), Some(("x.a.b", "weight")));
        assert_eq!(lora.saved("a.bc.weight"), None);
        assert_eq!(lora.saved("head"), None);
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
            let found = matrix(name).map(|(module, matrix)| model_name(module, matrix));
            assert_eq!(found.as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn modules_that_moved_are_found_in_both_directions() {
        let new = ["model.language_model.layers.0.q.weight", "model.visual.blocks.0.qkv.weight", "lm_head.weight"];
        let old = ["model.layers.0.q.weight", "visual.blocks.0.qkv.weight", "lm_head.weight"];
        let older = [
            "language_model.model.layers.0.q.weight",
            "vision_tower.layers.0.q.weight",
            "language_model.lm_head.weight",
        ];
        let llava =
            ["model.language_model.layers.0.q.weight", "model.vision_tower.layers.0.q.weight", "lm_head.weight"];
        for (base, adapter) in [(new, old), (old, new), (older, llava), (llava, older), (new, new), (old, old)] {
            let names: Vec<String> = adapter.iter().map(|name| format!("{PREFIX}{name}")).collect();
            let found = moves(&base, &names.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(base.map(|name| moved(name, &found)), adapter, "{found:?}");
            assert_eq!(found.is_empty(), base == adapter);
        }
        // A text model alone, and an adapter of other modules.
        assert!(moves(&["model.layers.0.q.weight"], &["base_model.model.x.y.weight"]).is_empty());
    }

    #[test]
    fn ranks_are_those_of_modules() {
        let config = json!({"target_modules": [], "r": 8, "rank_pattern": {"q": 4, r"layers\.\d\.v": 2}});
        let lora = lora(&config);
        let rows = [("layers.0.q", 4), ("q", 4), ("layers.0.xq", 8), ("m.layers.3.v", 2), ("m.layers.30.v", 8)];
        for (module, rank) in rows {
            assert_eq!(lora.rank_of(module), Some(rank), "{module}");
        }
    }
}
