//! The names and the configuration that the repository of a GGUF file's model has.

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
    family: BTreeMap<String, Family>,
}

/// What repositories of one architecture have in common.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Family {
    model_type: String,
    class: String,
    /// Whether rows of queries and keys are in the order of llama.cpp's rotary embedding.
    #[serde(default)]
    permutes_rows: bool,
    /// Whether weights of norms are stored with 1 added.
    #[serde(default)]
    norms_are_one_more: bool,
    #[serde(default)]
    layer_names: BTreeMap<String, String>,
    /// The family whose tables are used.
    like: Option<String>,
    #[serde(default)]
    config: BTreeMap<String, String>,
    #[serde(default)]
    defaults: Map<String, Value>,
    /// Members that are null unless the file tells of them.
    #[serde(default)]
    nulls: Vec<String>,
    /// Members of the configuration that are one value divided by another.
    #[serde(default)]
    ratios: BTreeMap<String, [String; 2]>,
    /// Those that are one value less another. The last one that is there counts.
    #[serde(default)]
    differences: Vec<[String; 3]>,
}

static FAMILIES: LazyLock<Families> = LazyLock::new(|| {
    toml::from_str(include_str!("families.toml")).expect("the file is in the program, and a test reads it")
});

/// How a tensor of a file becomes one of the repository, or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
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

/// The model of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct GgufModel<'a> {
    header: &'a Gguf,
    architecture: &'a str,
    family: &'static Family,
    /// The family with the tables.
    tables: &'static Family,
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
        let found = FAMILIES.family.get(key).filter(|_| is_own);
        let known = || {
            let known: Vec<&str> = FAMILIES.family.keys().map(String::as_str).collect();
            format!(
                "the GGUF architecture {architecture:?} has no names of a repository here: known are {}",
                known.join(", ")
            )
        };
        let family = found.ok_or_else(known)?;
        let tables = family.like.as_ref().map_or(family, |like| &FAMILIES.family[like]);
        let model = Self { header, architecture, family, tables };
        if model.count("expert_count").unwrap_or(0) > 0 && !tables.config.contains_key("expert_count") {
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
    pub(super) fn name(&self, stored: &str) -> Option<(String, Change)> {
        let layer = stored.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let layer = layer.filter(|(number, _)| number.parse::<u32>().is_ok());
        let whole = layer.map_or(stored, |(_, rest)| rest);
        let (stem, ending) = whole.rsplit_once('.').filter(|(_, ending)| matches!(*ending, "weight" | "bias"))?;
        let whole_name = self.tables.layer_names.get(whole).filter(|_| layer.is_some());
        let name = whole_name.or_else(|| match layer {
            Some(_) => self.tables.layer_names.get(stem).or_else(|| FAMILIES.layer_names.get(stem)),
            None => FAMILIES.names.get(stem),
        })?;
        let before = layer.map_or_else(String::new, |(number, _)| format!("model.layers.{number}."));
        let heads = |key: &str| self.count(key).or_else(|| self.count("attention.head_count")).map(Change::Heads);
        let change = match stem {
            "attn_q" if self.tables.permutes_rows => heads("attention.head_count")?,
            "attn_k" if self.tables.permutes_rows => heads("attention.head_count_kv")?,
            "ffn_gate_inp_shexp" => Change::Unsqueezed,
            "ffn_gate_exps" if whole_name.is_some() => Change::Alternating(0),
            "ffn_up_exps" if whole_name.is_some() => Change::Alternating(1),
            "ffn_down_exps" if whole_name.is_some() && ending == "weight" => Change::Transposed,
            "attn_k_b" => Change::KeysAndValues(0),
            "attn_v_b" => Change::KeysAndValues(1),
            _ if name.contains("{e}") => Change::Experts,
            _ => Change::Nothing,
        };
        let ending = if whole_name.is_some() { String::new() } else { format!(".{ending}") };
        Some((format!("{before}{name}{ending}"), change))
    }

    /// Whether each element of a stored tensor is one more than the repository's.
    pub(super) fn is_one_more(&self, stored: &str) -> bool {
        self.tables.norms_are_one_more && stored.ends_with("norm.weight")
    }

    /// The repository's `config.json`, as transformers makes it of the same file.
    pub(super) fn config(&self, is_tied: bool) -> Value {
        let (family, tables) = (self.family, self.tables);
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
