//! What `config.json` says of single layers, cut to some of them: lists and texts with an entry for each layer, and lists, texts and
//! objects of layers' numbers, however deep.
//!
//! A member counts as one of these by its name and by its values, and what may be one and cannot be cut for certain is a reason
//! why there is no configuration of the part.

use serde_json::{Map, Value, json};

/// The layers that are kept.
#[derive(Debug)]
pub(super) struct KeptLayers<'a> {
    /// Their numbers as they were, in order: those of the model, then those that predict further tokens.
    pub(super) layers: &'a [u64],
    /// Number of the model's own layers as they were.
    pub(super) declared: u64,
    /// The same with those that predict further tokens, as the configuration or the tensors have them.
    pub(super) total: u64,
}

/// Members with one entry per layer. These and the next ones are compared with all classes of transformers by a script,
/// `tests/families/layer_lists.py`; others are from models that bring code of their own.
const PER_LAYER: [&str; 31] = [
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "layer_type_list",
    "block_types",
    "block_configs",
    "attn_type_list",
    "attention_layers",
    "no_rope_layers",
    "moe_layer_freq",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "activation_sparsity_pattern",
    "intermediate_size",
    "intermediate_sizes",
    "num_query_heads",
    "num_kv_heads",
    "num_attention_heads",
    "num_attention_heads_per_layer",
    "num_key_value_heads",
    "num_key_value_heads_per_layer",
    "ffn_multipliers",
    "compress_ratios",
    "swiglu_limits",
    "swiglu_limits_shared",
    "partial_rotary_factors",
    "indexer_types",
    "layer_rope_theta",
    "sliding_windows",
    "num_experts",
    "moe_topk",
];

/// A part of the names of further members with one entry per layer, where they have as many.
const SAYS_SO: &str = "per_layer";

/// Members that list numbers of layers, from 0.
const NUMBERS: [&str; 16] = [
    "mlp_only_layers",
    "moe_layers",
    "moe_layers_enum",
    "moe_layer_indices",
    "dense_layers",
    "full_attn_idxs",
    "full_attention_layers",
    "attn_layer_indices",
    "attention_layers_idx",
    "cross_attention_layers",
    "global_attn_idx",
    "hybrid_layer_ids",
    "sparse_layers",
    "layer_idxs",
    "rope_scaling_layers",
    "subsample_layers",
];

/// Members that list numbers of layers, from 1.
const NUMBERS_FROM_ONE: [&str; 3] = ["ple_layer_ids", "full_attn_layers", "kda_layers"];

/// A part of the names of lists of layers that predict further tokens, by numbers of their own.
const OF_PREDICTORS: &str = "mtp";

/// Parts of the names of members that may list numbers of layers.
const NUMBER_WORDS: [&str; 5] = ["layer", "idx", "index", "indices", "block"];

/// Parts of the names of objects that are the configuration of something else than the text model.
const OTHERS: [&str; 12] = [
    "vision",
    "visual",
    "audio",
    "image",
    "video",
    "speech",
    "talker",
    "encoder",
    "token2wav",
    "quantization",
    "compression",
    "generation",
];

/// Members of an object that has layers of its own.
const OWN_LAYERS: [&str; 6] = ["num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "model_type"];

impl KeptLayers<'_> {
    /// Cuts all members of the text model's configuration.
    ///
    /// # Errors
    /// Why that cannot be done for certain.
    pub(super) fn cut(&self, members: &mut Map<String, Value>) -> Result<(), String> {
        let base = members.iter().find_map(|(key, value)| self.base_of(key, value));
        let mut reason = None;
        let mut renamed = Vec::new();
        for (key, value) in members.iter_mut() {
            let cut = match value {
                Value::Object(inner) if is_numbered(key, inner) => {
                    renamed.push(key.clone());
                    Ok(())
                }
                Value::Object(inner) if !is_other(key, inner) => self.cut(inner),
                Value::Array(_) | Value::String(_) => self.cut_member(key, value, base),
                Value::Object(_) | Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
            };
            reason = reason.or(cut.err());
        }
        for key in renamed {
            let numbered = members.get_mut(&key).and_then(Value::as_object_mut).map(std::mem::take).unwrap_or_default();
            let numbered = numbered
                .into_iter()
                .filter_map(|(layer, value)| Some((self.place(layer.parse().ok()?)?.to_string(), value)));
            members.insert(key, Value::Object(numbered.collect()));
        }
        reason.map_or(Ok(()), Err)
    }

    /// Whether all layers stay, each with its number.
    fn is_whole(&self) -> bool {
        self.layers.iter().copied().eq(0..self.total)
    }

    /// Whether all of the model's own layers stay: only what is longer is cut.
    fn has_all_own(&self) -> bool {
        self.layers.iter().copied().take_while(|layer| *layer < self.declared).eq(0..self.declared)
    }

    /// The number that a layer has now.
    fn place(&self, layer: u64) -> Option<usize> {
        self.layers.iter().position(|kept| *kept == layer)
    }

    fn cut_member(&self, key: &str, value: &mut Value, base: Option<u64>) -> Result<(), String> {
        if self.is_whole() {
            return Ok(());
        }
        let is_text = value.is_string();
        let entries = value.as_str().map_or_else(|| value.as_array().map_or(0, Vec::len), |text| text.chars().count());
        let entries = entries as u64;
        let is_as_many = entries == self.declared || entries == self.total;
        if (PER_LAYER.contains(&key) && !(is_text && key == "layer_types")) || (is_as_many && key.contains(SAYS_SO)) {
            if !is_as_many {
                // A model of one value for all layers may have it in a list.
                let is_told = entries > 1 && !self.has_all_own();
                let what = format!("config.json has {key:?} with {entries} entries for {} layers", self.declared);
                return if is_told { Err(format!("{what}: not known how to cut it")) } else { Ok(()) };
            }
            self.pick(value, entries);
            return Ok(());
        }
        if let Some(numbers) = self.numbers(key, value) {
            let own = own_base(&numbers, self.declared);
            let Some(first) = own.or(known_base(key)).or(base) else {
                if self.has_all_own() {
                    return Ok(());
                }
                return Err(format!("config.json has {key:?}, numbers of layers from 0 or from 1: not known which"));
            };
            let kept = numbers.iter().filter_map(|number| self.place(number.checked_sub(first)?));
            let kept: Vec<u64> = kept.map(|place| place as u64 + first).collect();
            let text = || kept.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            *value = if is_text { json!(text()) } else { json!(kept) };
            return Ok(());
        }
        let is_as_long =
            (entries == self.declared && !self.has_all_own()) || (entries == self.total && self.total > self.declared);
        let may_be_layers = if is_text {
            key.contains("pattern") && is_as_long
        } else {
            is_as_long && key != "architectures" && self.declared > 1
        };
        if may_be_layers {
            return Err(format!("config.json has {key:?}, of as many entries as layers: not known how to cut it"));
        }
        Ok(())
    }

    /// Keeps the entries of the layers that are kept, of a list or text of `entries`.
    fn pick(&self, value: &mut Value, entries: u64) {
        let layers = self.layers.iter().filter(|layer| **layer < entries);
        let places: Vec<usize> = layers.filter_map(|layer| usize::try_from(*layer).ok()).collect();
        if let Value::Array(list) = value {
            *list = places.iter().filter_map(|place| list.get(*place).cloned()).collect();
        } else if let Value::String(text) = value {
            let letters: Vec<char> = text.chars().collect();
            *text = places.iter().filter_map(|place| letters.get(*place)).collect();
        }
    }

    /// The numbers of layers that a member lists, if it does.
    fn numbers(&self, key: &str, value: &Value) -> Option<Vec<u64>> {
        let is_named = NUMBER_WORDS.iter().any(|word| key.contains(word)) && !key.contains(OF_PREDICTORS);
        if known_base(key).is_none() && !is_named {
            return None;
        }
        let numbers: Vec<u64> = match value {
            Value::Array(list) => list.iter().map(Value::as_u64).collect::<Option<_>>()?,
            Value::String(text) => text.split(',').map(|number| number.trim().parse().ok()).collect::<Option<_>>()?,
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => return None,
        };
        let is_rising = numbers.windows(2).all(|pair| pair[0] < pair[1]);
        let are_layers = numbers.iter().all(|number| *number <= self.total);
        (is_rising && are_layers && !numbers.is_empty()).then_some(numbers)
    }

    /// What the numbers in a member count from, if they tell it.
    fn base_of(&self, key: &str, value: &Value) -> Option<u64> {
        let is_per_layer = PER_LAYER.contains(&key) || key.contains(SAYS_SO);
        own_base(&self.numbers(key, value).filter(|_| !is_per_layer)?, self.declared)
    }
}

/// What the numbers of a member of this name count from.
fn known_base(key: &str) -> Option<u64> {
    NUMBERS.contains(&key).then_some(0).or_else(|| NUMBERS_FROM_ONE.contains(&key).then_some(1))
}

/// What these numbers count from: there is no layer 0 from 1, and no layer of the number of layers from 0.
fn own_base(numbers: &[u64], declared: u64) -> Option<u64> {
    numbers.contains(&0).then_some(0).or_else(|| numbers.contains(&declared).then_some(1))
}

/// Whether an object has an entry for each of some layers, by their numbers.
fn is_numbered(key: &str, object: &Map<String, Value>) -> bool {
    let is_layers = key.contains("layer") && !key.contains("label");
    is_layers && !object.is_empty() && object.keys().all(|key| key.parse::<u64>().is_ok())
}

/// Whether an object is the configuration of something else than the text model.
fn is_other(key: &str, object: &Map<String, Value>) -> bool {
    OTHERS.iter().any(|word| key.contains(word)) || OWN_LAYERS.iter().any(|word| object.contains_key(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Row = (&'static [u64], (u64, u64), Value, Value);

    fn cut(layers: &[u64], (declared, total): (u64, u64), config: &Value) -> Result<Value, String> {
        let mut members = config.as_object().unwrap().clone();
        KeptLayers { layers, declared, total }.cut(&mut members).map(|()| Value::Object(members))
    }

    #[test]
    fn members_follow_the_layers() {
        let same = json!({"architectures": ["A", "B", "C", "D", "E"], "mrope_section": [1, 1, 2], "vision_config": {"deepstack_indexes": [1, 4]}});
        let rows: &[Row] = &[
            (&[0, 1, 2], (5, 7), json!({"layer_types": [0, 1, 2, 3, 4, 5, 6]}), json!({"layer_types": [0, 1, 2]})),
            (
                &[0, 1, 2, 3, 4],
                (5, 7),
                json!({"layer_types": [0, 1, 2, 3, 4, 5, 6]}),
                json!({"layer_types": [0, 1, 2, 3, 4]}),
            ),
            (&[2, 3, 6], (5, 7), json!({"layer_types": [0, 1, 2, 3, 4, 5, 6]}), json!({"layer_types": [2, 3, 6]})),
            (&[2, 3, 6], (5, 7), json!({"layer_types": [0, 1, 2, 3, 4]}), json!({"layer_types": [2, 3]})),
            (&[1, 4], (5, 5), json!({"hybrid_override_pattern": "M-M*E"}), json!({"hybrid_override_pattern": "-E"})),
            (&[1, 4], (5, 5), json!({"moe_layers": [1, 2, 4]}), json!({"moe_layers": [0, 1]})),
            (&[1, 4], (5, 5), json!({"moe_layers_enum": "1,2,4"}), json!({"moe_layers_enum": "0,1"})),
            (&[0, 1], (5, 5), json!({"full_attn_idxs": [2, 4]}), json!({"full_attn_idxs": []})),
            // From 1, as the last layer tells, and the list beside it.
            (
                &[1, 2, 3],
                (5, 5),
                json!({"linear_attn_config": {"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4]}}),
                json!({"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]}}),
            ),
            (&[2, 3], (5, 5), json!({"ple_layer_ids": [2, 4]}), json!({"ple_layer_ids": [2]})),
            (&[1, 2], (5, 7), json!({"mtp_local_layer_ids": [0, 1]}), json!({"mtp_local_layer_ids": [0, 1]})),
            (&[1, 4], (5, 5), json!({"num_experts": [8, 4, 8, 8, 2]}), json!({"num_experts": [4, 2]})),
            (&[1, 3], (5, 5), json!({"window_per_layer": [0, 1, 2, 3, 4]}), json!({"window_per_layer": [1, 3]})),
            (
                &[1, 3],
                (5, 5),
                json!({"per_layer_config": {"1": {"a": 1}, "2": {}}, "hidden_size_per_layer_input": 5}),
                json!({"per_layer_config": {"0": {"a": 1}}, "hidden_size_per_layer_input": 5}),
            ),
            (&[1, 3], (5, 5), json!({"layer_settings": {"0": 7, "3": 8}}), json!({"layer_settings": {"1": 8}})),
            (&[0, 1], (5, 5), same.clone(), same),
        ];
        for (layers, counts, config, expected) in rows {
            assert_eq!(cut(layers, *counts, config).as_ref(), Ok(expected), "{config}");
        }
    }

    #[test]
    fn what_cannot_be_cut_is_a_reason() {
        for config in [
            json!({"some_list": [1, 2, 3, 4, 9]}),
            json!({"nested": {"some_list": ["a", "b", "c", "d", "e"]}}),
            json!({"layer_types": ["a", "b"]}),
            json!({"hybrid_override_pattern": "MM*/MM"}),
            json!({"window_pattern": "SSSSL"}),
            json!({"strange_layers": [2, 3]}),
        ] {
            cut(&[0, 1], (5, 5), &config).unwrap_err();
            assert_eq!(cut(&[0, 1, 2, 3, 4], (5, 5), &config).as_ref(), Ok(&config), "nothing is cut");
        }
    }
}
