//! The names and the configuration that the repository of a GGUF file's model has, and the other way round.

use std::{collections::BTreeMap, sync::LazyLock};

use ckfs_format::gguf::Gguf;
use serde::Deserialize;
use serde_json::{Map, Number, Value, json};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Families {
    names: BTreeMap<String, String>,
    layer_names: BTreeMap<String, String>,
    config: BTreeMap<String, String>,
    write: WrittenKeys,
    family: BTreeMap<String, GgufTables>,
}

/// What files of all families that are written have in common.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenKeys {
    keys: Vec<String>,
    absent: Map<String, Value>,
    /// Members of keys that are only written.
    members: BTreeMap<String, String>,
    floats: Vec<String>,
    bools: Vec<String>,
}

/// Where tokens are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GgufTokenizer {
    /// The pieces of a `tokenizer.model` of `SentencePiece`.
    Pieces,
    /// A `tokenizer.json` that falls back to bytes.
    Fallback,
    /// A `tokenizer.json` of pairs of bytes.
    Bytes,
}

/// What repositories of one architecture have in common.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a word of the table")]
pub struct GgufTables {
    model_type: String,
    class: String,
    /// Whether rows of queries and keys are in the order of llama.cpp's rotary embedding.
    permutes_rows: bool,
    /// Whether weights of norms are stored with 1 added.
    norms_are_one_more: bool,
    layer_names: BTreeMap<String, String>,
    /// The family whose tables are used.
    like: Option<String>,
    config: BTreeMap<String, String>,
    defaults: Map<String, Value>,
    /// Members that are null unless the file tells of them.
    nulls: Vec<String>,
    /// Members of the configuration that are one value divided by another.
    ratios: BTreeMap<String, [String; 2]>,
    /// Those that are one value less another. The last one that is there counts.
    differences: Vec<[String; 3]>,
    /// llama.cpp's name, if it is not that of the table.
    architecture: Option<String>,
    /// Other values of `model_type`, and other classes, of which the text model is this one.
    model_types: Vec<String>,
    classes: Vec<String>,
    keys: Option<Vec<String>>,
    more_keys: Vec<String>,
    /// Where tokens are found, the first of which counts; `None` if no file of the family is written.
    tokenizers: Option<Vec<GgufTokenizer>>,
    /// Kinds and texts of special tokens, where nothing else says which they are.
    pub special: Vec<[String; 2]>,
    absent: Map<String, Value>,
    /// Whether a model without `head_dim` has columns divided by heads.
    pub head_dim_of_heads: bool,
    /// Whether no output head is written.
    pub is_tied: bool,
    /// Whether the embedding ends with the last token of the tokenizer.
    pub rows_of_vocabulary: bool,
}

static FAMILIES: LazyLock<Families> = LazyLock::new(|| {
    toml::from_str(include_str!("families.toml")).expect("the file is in the program, and a test reads it")
});

/// How a tensor of a file becomes one of the repository, or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GgufChange {
    /// As it is.
    Nothing,
    /// With an axis of 1 before its own.
    Unsqueezed,
    /// With the rows of each of so many heads in the order of transformers' rotary embedding.
    Heads(u64),
    /// One for each index of its first axis, whose number stands in the name for `{e}`.
    Experts,
    /// With its last two axes exchanged.
    Transposed,
    /// The first or the second of two whose rows alternate, with the last two axes of the whole exchanged.
    Alternating(usize),
    /// The first or the second of the two factors of keys and values, of which each head has some rows.
    KeysAndValues(usize),
}

impl GgufTables {
    /// How a tensor becomes that of the repository. `is_whole` tells that both names stand in the table with their endings.
    fn change(
        &self,
        stem: &str,
        ending: &str,
        name: &str,
        is_whole: bool,
        count: &dyn Fn(&str) -> Option<u64>,
    ) -> Option<GgufChange> {
        let heads = |key: &str| count(key).or_else(|| count("attention.head_count")).map(GgufChange::Heads);
        Some(match stem {
            "attn_q" if self.permutes_rows => heads("attention.head_count")?,
            "attn_k" if self.permutes_rows => heads("attention.head_count_kv")?,
            "ffn_gate_inp_shexp" => GgufChange::Unsqueezed,
            "ffn_gate_exps" if is_whole => GgufChange::Alternating(0),
            "ffn_up_exps" if is_whole => GgufChange::Alternating(1),
            "ffn_down_exps" if is_whole && ending == "weight" => GgufChange::Transposed,
            "attn_k_b" => GgufChange::KeysAndValues(0),
            "attn_v_b" => GgufChange::KeysAndValues(1),
            _ if name.contains("{e}") => GgufChange::Experts,
            _ => GgufChange::Nothing,
        })
    }

    fn is_one_more(&self, stored: &str) -> bool {
        self.norms_are_one_more && stored.ends_with("norm.weight")
    }
}

/// A tensor of a file that is made of one of the repository, or one of the repository that is made of a file's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTarget {
    /// Its name.
    pub name: String,
    /// How that of the file becomes that of the repository.
    pub change: GgufChange,
    /// The number of the expert that the repository's tensor is.
    pub expert: Option<u64>,
    /// Whether its elements are one more.
    pub is_one_more: bool,
}

/// A key of a file that is written.
#[derive(Clone, Copy, Debug)]
pub struct GgufKey {
    /// Its name, without that of the architecture.
    pub name: &'static str,
    /// The member of the configuration with its value.
    pub member: &'static str,
    /// Whether it is left out without such a member.
    pub is_optional: bool,
    /// Whether its value is a float.
    pub is_float: bool,
    /// Whether its value is a truth value.
    pub is_bool: bool,
}

/// The family of a repository's model, as a file of llama.cpp has it.
#[derive(Clone, Copy, Debug)]
pub struct GgufFamily {
    key: &'static str,
    /// What it alone has.
    pub family: &'static GgufTables,
    /// Those that are used: its own, or those of the family that it is like.
    pub tables: &'static GgufTables,
}

impl GgufFamily {
    /// The family of a model whose `config.json` has this type and this class.
    ///
    /// # Errors
    /// No file of it is written, and of which ones files are.
    pub fn of(model_type: &str, class: Option<&str>) -> Result<Self, String> {
        let is_of = |family: &GgufTables| {
            let has = |word: &str, own: &str, more: &[String]| word == own || more.iter().any(|other| other == word);
            has(model_type, &family.model_type, &family.model_types)
                && class.is_none_or(|class| has(class, &family.class, &family.classes))
        };
        let written = || FAMILIES.family.iter().filter(|(_, family)| family.tokenizers.is_some());
        let found = written().find(|(_, family)| is_of(family));
        let (key, family) = found.ok_or_else(|| {
            let known: Vec<&str> = written().map(|(_, family)| family.class.as_str()).collect();
            let class = class.unwrap_or("no class");
            format!(
                "model_type {model_type:?} with {class}: no GGUF file is written of it, only of {}",
                known.join(", ")
            )
        })?;
        Ok(Self::new(key, family))
    }

    fn new(key: &'static str, family: &'static GgufTables) -> Self {
        Self { key, family, tables: family.like.as_ref().map_or(family, |like| &FAMILIES.family[like]) }
    }

    /// llama.cpp's name of it.
    pub fn architecture(&self) -> &'static str {
        self.family.architecture.as_deref().unwrap_or(self.key)
    }

    /// What is made of a tensor of the repository; nothing if its name is in no table.
    pub fn targets(&self, name: &str, count: &dyn Fn(&str) -> Option<u64>) -> Vec<GgufTarget> {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let whole = layer.map_or(name, |(_, rest)| rest);
        let before = layer.map_or_else(String::new, |(number, _)| format!("blk.{number}."));
        let found = |table: &BTreeMap<String, String>| -> Vec<GgufTarget> {
            let row = |(stored, pattern): (&String, &String)| {
                let is_whole = matches!(stored.rsplit_once('.'), Some((_, "weight" | "bias")));
                let split = whole.rsplit_once('.').filter(|(_, ending)| matches!(*ending, "weight" | "bias"));
                let (rest, ending) = if is_whole { (whole, "") } else { split? };
                let ending = if is_whole { stored.rsplit_once('.')?.1 } else { ending };
                let expert = match pattern.split_once("{e}") {
                    Some((first, last)) => Some(rest.strip_prefix(first)?.strip_suffix(last)?.parse().ok()?),
                    None if rest == pattern => None,
                    None => return None,
                };
                let stem = stored.strip_suffix(&format!(".{ending}")).filter(|_| is_whole).unwrap_or(stored);
                let change = self.tables.change(stem, ending, pattern, is_whole, count)?;
                let name = format!("{before}{stem}.{ending}");
                Some(GgufTarget { is_one_more: self.tables.is_one_more(&name), name, change, expert })
            };
            table.iter().filter_map(row).collect()
        };
        let mut targets = if layer.is_some() { found(&self.tables.layer_names) } else { found(&FAMILIES.names) };
        if layer.is_some() && targets.is_empty() {
            // A stem that the family has for another tensor is not this one's.
            targets = found(&FAMILIES.layer_names);
        }
        if targets.iter().any(|target| target.change != GgufChange::Nothing) {
            targets.retain(|target| target.change != GgufChange::Nothing);
        }
        targets
    }

    /// The keys about the model, in the converter's order.
    pub fn keys(&self) -> impl Iterator<Item = GgufKey> {
        let (write, tables) = (&FAMILIES.write, self.tables);
        let keys = tables.keys.as_ref().unwrap_or(&write.keys).iter().chain(&tables.more_keys);
        keys.map(|key| {
            let name = key.trim_end_matches('?');
            let member = [&tables.config, &FAMILIES.config, &write.members].iter().find_map(|table| table.get(name));
            let member = member.map_or("", String::as_str);
            GgufKey {
                name,
                member: member.split(',').next().unwrap_or(member),
                is_optional: name.len() < key.len(),
                is_float: write.floats.iter().any(|float| float == name),
                is_bool: write.bools.iter().any(|bool| bool == name),
            }
        })
    }

    /// The member of the configuration that has the value of a key.
    pub fn member(&self, key: &str) -> Option<&'static str> {
        self.keys().find(|known| known.name == key).map(|known| known.member)
    }

    /// The value of a member that the configuration lacks.
    pub fn absent(&self, member: &str) -> Option<&'static Value> {
        self.family
            .absent
            .get(member)
            .or_else(|| self.tables.absent.get(member))
            .or_else(|| FAMILIES.write.absent.get(member))
    }

    /// Where its tokens are found: the first that is there counts.
    pub fn tokenizers(&self) -> &'static [GgufTokenizer] {
        self.family.tokenizers.as_deref().unwrap_or_default()
    }
}

/// The model of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct GgufModel<'a> {
    header: &'a Gguf,
    architecture: &'a str,
    family: GgufFamily,
}

impl<'a> GgufModel<'a> {
    /// The model that a header tells of.
    ///
    /// # Errors
    /// Why no names of a repository are known.
    pub(super) fn of(header: &'a Gguf) -> Result<Self, String> {
        let text = |key: &str| header.values.get(key).and_then(Value::as_str);
        let architecture = text("general.architecture").ok_or("a GGUF file without general.architecture")?;
        let is_mistral = architecture == "llama" && text("general.name") == Some("mistral");
        // Sigmoid, which the first of the two models has not.
        let is_third = architecture == "deepseek2" && header.count("deepseek2.expert_gating_func") == Some(2);
        let key = match architecture {
            "llama" if is_mistral => "mistral",
            "deepseek2" if is_third => "deepseek3",
            of => of,
        };
        let is_own = !["mistral", "deepseek3"].contains(&architecture);
        let found = FAMILIES.family.get_key_value(key).filter(|_| is_own);
        let known = || {
            let known: Vec<&str> = FAMILIES.family.keys().map(String::as_str).collect();
            format!(
                "the GGUF architecture {architecture:?} has no names of a repository here: known are {}",
                known.join(", ")
            )
        };
        let (key, family) = found.ok_or_else(known)?;
        let model = Self { header, architecture, family: GgufFamily::new(key, family) };
        if model.count("expert_count").unwrap_or(0) > 0 && !model.family.tables.config.contains_key("expert_count") {
            return Err(format!(
                "the GGUF architecture {architecture:?} with experts has no names of a repository here"
            ));
        }
        Ok(model)
    }

    fn value(&self, key: &str) -> Option<&'a Value> {
        self.header.values.get(&format!("{}.{key}", self.architecture))
    }

    fn count(&self, key: &str) -> Option<u64> {
        self.value(key)?.as_u64()
    }

    /// The name of a tensor in the repository, and how it becomes that; `None` if there is none.
    pub(super) fn target(&self, stored: &str) -> Option<GgufTarget> {
        let tables = self.family.tables;
        let layer = stored.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let layer = layer.filter(|(number, _)| number.parse::<u32>().is_ok());
        let whole = layer.map_or(stored, |(_, rest)| rest);
        let (stem, ending) = whole.rsplit_once('.').filter(|(_, ending)| matches!(*ending, "weight" | "bias"))?;
        let whole_name = tables.layer_names.get(whole).filter(|_| layer.is_some());
        let name = whole_name.or_else(|| match layer {
            Some(_) => tables.layer_names.get(stem).or_else(|| FAMILIES.layer_names.get(stem)),
            None => FAMILIES.names.get(stem),
        })?;
        let before = layer.map_or_else(String::new, |(number, _)| format!("model.layers.{number}."));
        let change = tables.change(stem, ending, name, whole_name.is_some(), &|key| self.count(key))?;
        let ending = if whole_name.is_some() { String::new() } else { format!(".{ending}") };
        let (name, is_one_more) = (format!("{before}{name}{ending}"), tables.is_one_more(stored));
        Some(GgufTarget { name, change, expert: None, is_one_more })
    }

    /// The repository's `config.json`, as transformers makes it of the same file.
    pub(super) fn config(&self, is_tied: bool) -> Value {
        let GgufFamily { family, tables, .. } = self.family;
        let mut config = tables.defaults.clone();
        config.extend(tables.nulls.iter().map(|name| (name.clone(), Value::Null)));
        config.insert("model_type".to_owned(), json!(family.model_type));
        config.insert("architectures".to_owned(), json!([family.class]));
        config.insert("tie_word_embeddings".to_owned(), json!(is_tied));
        if let Some(count) = self.header.lengths.get("tokenizer.ggml.tokens") {
            config.insert("vocab_size".to_owned(), json!(count));
        }
        for (key, names) in FAMILIES.config.iter().chain(&tables.config) {
            let Some(value) = self.value(key) else { continue };
            config.extend(names.split(',').map(|name| (name.to_owned(), value.clone())));
        }
        for [name, from, less] in &tables.differences {
            let rest = self.count(from).zip(self.count(less)).and_then(|(from, less)| from.checked_sub(less));
            config.extend(rest.map(|rest| (name.clone(), json!(rest))));
        }
        for (name, [over, under]) in &tables.ratios {
            let number = |key: &str| self.value(key).and_then(Value::as_f64);
            let ratio = number(over).zip(number(under)).and_then(|(over, under)| Number::from_f64(over / under));
            config.extend(ratio.map(|ratio| (name.clone(), Value::Number(ratio))));
        }
        for (word, name) in [("bos", "bos"), ("eos", "eos"), ("padding", "pad")] {
            let value = self.header.values.get(&format!("tokenizer.ggml.{word}_token_id"));
            config.extend(value.map(|value| (format!("{name}_token_id"), value.clone())));
        }
        let scaling = config.remove("rope_scaling");
        if let Some(kind) = self.value("rope.scaling.type").filter(|kind| *kind != "none") {
            let mut scaling = scaling.and_then(|scaling| scaling.as_object().cloned()).unwrap_or_default();
            scaling.insert("rope_type".to_owned(), kind.clone());
            // A tenth of the factor is stored, in f32.
            let multiplier = self.value("rope.scaling.yarn_log_multiplier").and_then(Value::as_f64);
            for name in ["mscale", "mscale_all_dim"] {
                let factor = multiplier.map(|tenth| (tenth * 1e6).round() / 1e5);
                scaling.extend(factor.map(|factor| (name.to_owned(), json!(factor))));
            }
            for (key, name) in [("factor", "factor"), ("original_context_length", "original_max_position_embeddings")] {
                let value = self.value(&format!("rope.scaling.{key}"));
                scaling.extend(value.map(|value| (name.to_owned(), value.clone())));
            }
            config.insert("rope_scaling".to_owned(), Value::Object(scaling));
        }
        Value::Object(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_a_type_and_a_class() {
        assert!(FAMILIES.family.len() > 10);
        for (key, GgufTables { model_type, class, .. }) in &FAMILIES.family {
            assert!(!model_type.is_empty() && !class.is_empty(), "{key}: {model_type:?} {class:?}");
        }
    }
}
