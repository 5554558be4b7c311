//! What the library that has a model's code says of its tensors: which are buffers, which stay in float32, and how names begin.
//!
//! The tables `library/transformers.toml` and `library/names.toml` are made from the library's own classes by scripts under
//! `tests/families`. They have a row for each model type; `config.json` names one at its top and further ones in the
//! configurations of towers and text models. Buffers are matched by their last words, since a module stands under other prefixes
//! in other classes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use ckfs_tensor::DType;
use regex::RegexSet;
use serde::{Deserialize, de::DeserializeOwned};

/// Bits of the narrowest float that holds everything a float32 does: a cast to it, or to a wider one, loses nothing.
const F32_BITS: u64 = 32;

/// Most nested configurations that are searched for model types.
const NESTED_MAX: usize = 1000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    /// Last words of the names of buffers in every model.
    everywhere: Vec<String>,
    /// The same in models that the library does not have.
    common_buffers: Vec<String>,
    /// What such models keep in float32.
    common_keep: Vec<String>,
    /// Model types of which there is no more to say.
    plain: BTreeSet<String>,
    model: BTreeMap<String, Row>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Row {
    buffers: Vec<String>,
    /// Regular expressions, searched for in a name.
    keep: Vec<String>,
    keep_ends: Vec<String>,
    keep_f16: Vec<String>,
    keep_f16_ends: Vec<String>,
    cast_ends: Vec<String>,
}

/// What the library does not say.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Others {
    /// Last words of the names of buffers in checkpoints of trainers.
    trainers: Vec<String>,
    /// Model types that the library lacks, with the one whose code they have.
    alike: BTreeMap<String, String>,
    /// What such types have beside it.
    more: BTreeMap<String, Row>,
}

/// What a table in the program says.
///
/// # Panics
/// If the text is none of that type: a test reads each table.
pub(super) fn embedded_table<T: DeserializeOwned>(text: &str) -> T {
    toml::from_str(text).expect("the table is in the program, and a test reads it")
}

/// The rows of a table of the program that is one array of tables.
pub(super) fn embedded_rows<T: DeserializeOwned>(text: &str) -> Vec<T> {
    embedded_table::<BTreeMap<String, Vec<T>>>(text).into_values().flatten().collect()
}

static TABLE: LazyLock<Table> = LazyLock::new(|| embedded_table(include_str!("library/transformers.toml")));

static OTHERS: LazyLock<Others> = LazyLock::new(|| embedded_table(include_str!("library/others.toml")));

/// How the names of a model type begin in the library's classes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beginnings(&'static str);

impl Beginnings {
    /// Those of a model type, if the library has it.
    pub(crate) fn of(model_type: &str) -> Option<Self> {
        static TABLE: LazyLock<BTreeMap<String, String>> =
            LazyLock::new(|| embedded_table(include_str!("library/names.toml")));
        TABLE.get(model_type).map(|row| Self(row))
    }

    /// Whether a class has a name like those of the library for this model type.
    pub(crate) fn has_class(self, class: &str) -> bool {
        self.0.split(' ').next().is_some_and(|begin| class.starts_with(begin))
    }

    /// Whether a tensor's name begins as one of the model's.
    pub(crate) fn has_tensor(self, name: &str) -> bool {
        let mut words =
            name.split('.').map(|word| if word.bytes().all(|byte| byte.is_ascii_digit()) { "*" } else { word });
        let (first, second) = (words.next().unwrap_or_default(), words.next());
        self.0.split(' ').skip(1).any(|begin| match begin.split_once('.') {
            Some((root, next)) => root == first && second == Some(next),
            None => begin == first,
        })
    }
}

/// What is known of the tensors of one model.
#[derive(Clone, Debug)]
pub struct Model {
    /// Whether the library has it.
    pub is_known: bool,
    buffers: RegexSet,
    keep: RegexSet,
    keep_f16: RegexSet,
    cast: RegexSet,
}

/// Patterns of the names that end with these words. `^` begins a whole name.
fn ends<'a>(texts: impl IntoIterator<Item = &'a String>) -> impl Iterator<Item = String> {
    texts.into_iter().map(|text| {
        let (before, words) = text.strip_prefix('^').map_or((r"(?:^|\.)", text.as_str()), |words| ("^", words));
        let words = regex::escape(words).replace(r"\*", "[0-9]+");
        format!("{before}{words}$")
    })
}

fn set(patterns: Vec<String>) -> RegexSet {
    RegexSet::new(patterns).expect("the embedded expressions are well-formed, which a test shows")
}

/// The model types that a configuration names, its own first.
fn model_types(config: &serde_json::Value) -> Vec<&str> {
    let (mut found, mut left) = (Vec::new(), vec![config]);
    let mut searched = 0;
    while let Some(config) = left.pop().filter(|_| searched < NESTED_MAX) {
        searched += 1;
        let Some(members) = config.as_object() else { continue };
        found.extend(members.get("model_type").and_then(serde_json::Value::as_str));
        left.extend(members.values().filter(|value| value.is_object()));
    }
    found
}

impl Model {
    /// What is known of the model of a `config.json`. `is_stored` says that names are a trainer's.
    ///
    /// # Panics
    /// Never: a test reads all of the embedded table.
    pub fn of(config: Option<&serde_json::Value>, is_stored: bool) -> Self {
        let types = config.map_or_else(Vec::new, model_types);
        let types = types.into_iter().flat_map(|found| {
            let more = OTHERS.more.contains_key(found).then_some(found);
            [OTHERS.alike.get(found).map_or(found, String::as_str)].into_iter().chain(more)
        });
        Self::of_types(&types.collect::<Vec<_>>(), is_stored)
    }

    fn of_types(types: &[&str], is_stored: bool) -> Self {
        let table = &*TABLE;
        let is_known = types.first().is_some_and(|own| table.plain.contains(*own) || table.model.contains_key(*own));
        let rows: Vec<&Row> =
            types.iter().filter_map(|own| table.model.get(*own).or_else(|| OTHERS.more.get(*own))).collect();
        let all = |of: fn(&Row) -> &Vec<String>| rows.iter().flat_map(move |row| of(row));
        let searched = |texts: &String| texts.replace('*', ".*");
        let common: [&[String]; 2] = if is_known { [&[], &[]] } else { [&table.common_buffers, &table.common_keep] };
        let buffers = all(|row| &row.buffers).chain(&table.everywhere).chain(common[0]);
        let buffers = buffers.chain(if is_stored { &OTHERS.trainers[..] } else { &[] });
        let mut keep: Vec<String> = all(|row| &row.keep).map(searched).collect();
        keep.extend(ends(all(|row| &row.keep_ends).chain(common[1])));
        let mut keep_f16: Vec<String> = all(|row| &row.keep_f16).map(searched).collect();
        keep_f16.extend(ends(all(|row| &row.keep_f16_ends)));
        Self {
            is_known,
            buffers: set(ends(buffers).collect()),
            keep: set(keep),
            keep_f16: set(keep_f16),
            cast: set(ends(all(|row| &row.cast_ends)).collect()),
        }
    }

    /// Whether a tensor is a buffer, by its name. FSDP leaves buffers whole on every rank.
    pub fn is_buffer(&self, name: &str) -> bool {
        self.buffers.is_match(name)
    }

    /// Whether the model's own code keeps a tensor in float32 when all floats become `dtype`.
    pub(crate) fn keeps_f32(&self, name: &str, dtype: DType) -> bool {
        // Only what overflows in float16 but not in bfloat16 stays for float16 alone.
        let kept = || self.keep.is_match(name) || (dtype == DType::F16 && self.keep_f16.is_match(name));
        dtype.bits() < F32_BITS && kept() && !self.cast.is_match(name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_row_of_the_embedded_tables_is_well_formed() {
        for model_type in TABLE.model.keys() {
            assert!(!TABLE.plain.contains(model_type), "{model_type} is listed twice");
            assert!(Model::of_types(&[model_type], false).is_known);
        }
        for (model_type, like) in &OTHERS.alike {
            assert!(!Model::of_types(&[model_type], false).is_known, "{model_type} has a row of its own");
            assert!(Model::of_types(&[like], false).is_known, "{like}");
        }
        assert!(!Model::of(None, false).is_known);
        // A trainer's name, which is a parameter's in a repository.
        for is_stored in [false, true] {
            let model = Model::of(Some(&json!({"model_type": "afmoe"})), is_stored);
            assert_eq!(model.is_buffer("layers.1.moe.expert_bias_E"), is_stored);
        }
    }

    #[test]
    fn buffers_are_known_by_the_last_words_of_names() {
        let rows = [
            ("deepseek_v3", "model.layers.3.mlp.gate.e_score_correction_bias", true),
            ("kimi_k2", "model.layers.3.mlp.gate.e_score_correction_bias", true),
            ("deepseek_v3", "model.layers.3.mlp.gate.weight", false),
            ("deepseek_v4", "layers.3.ffn.gate.bias", true),
            ("deepseek_v4", "layers.3.ffn.gate.tid2eid", true),
            ("deepseek_v41", "layers.3.ffn.gate.bias", true),
            ("deepseek_v41", "layers.3.ffn.gate.bias_vl", true),
            ("deepseek_v4", "layers.3.ffn.gate.bias_vl", false),
            ("gemma4", "model.language_model.layers.0.layer_scalar", true),
            ("gemma4", "model.vision_tower.std_bias", true),
            ("bart", "final_logits_bias", true),
            ("bart", "model.shared.weight", false),
            // Ernie's is a parameter, which FSDP cuts. In models that the library lacks it is most likely a buffer.
            ("ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias", false),
            ("of nobody", "model.layers.1.gate.e_score_correction_bias", true),
            ("of nobody", "model.layers.1.gate.bias", false),
            ("of nobody", "model.bn.running_mean", true),
            ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", true),
            ("llama", "model.layers.0.self_attn.q_proj.weight", false),
        ];
        for (model_type, name, expected) in rows {
            assert_eq!(
                Model::of(Some(&json!({ "model_type": model_type })), false).is_buffer(name),
                expected,
                "{name}"
            );
        }
    }

    #[test]
    fn nested_configurations_count_and_float16_keeps_more() {
        let nested = json!({"model_type": "llava", "text_config": {"model_type": "deepseek_v3"}});
        let t5 = json!({"model_type": "t5"});
        let vl = json!({"model_type": "deepseek_v41", "text_config": {"model_type": "deepseek_v41_text"}});
        let rows = [
            (&vl, "layers.3.ffn.gate.bias_vl", DType::BF16, true),
            (&vl, "layers.3.ffn.gate.weight", DType::BF16, false),
            (&nested, "language_model.model.layers.3.mlp.gate.weight", DType::BF16, true),
            (&nested, "language_model.model.layers.3.mlp.gate_proj.weight", DType::BF16, false),
            (&nested, "language_model.model.layers.3.mlp.gate.weight", DType::F64, false),
            (&t5, "encoder.block.0.layer.1.DenseReluDense.wo.weight", DType::BF16, false),
            (&t5, "encoder.block.0.layer.1.DenseReluDense.wo.weight", DType::F16, true),
            (&t5, "encoder.block.0.layer.1.DenseReluDense.wi.weight", DType::F16, false),
        ];
        for (config, name, dtype, expected) in rows {
            assert_eq!(Model::of(Some(config), false).keeps_f32(name, dtype), expected, "{name} {dtype}");
        }
    }
}
