//! The configuration of a model as transformers completes it, and the keys that follow from it.

use ckfs_checkpoint::{GgufFamily, GgufKey};
use ckfs_format::gguf::{GgufPairs, GgufValue};
use serde_json::{Map, Value, json};

/// A number as f32; `None` if it is none.
#[expect(clippy::cast_possible_truncation, reason = "rounded once, as the converter does")]
pub(super) fn f32_of(value: &Value) -> Option<f32> {
    value.as_f64().map(|value| value as f32)
}

/// A number that fits; `None` if it does not.
pub(super) fn u32_of(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// The configuration of the text model.
#[derive(Debug)]
pub(super) struct Hparams {
    pub(super) family: GgufFamily,
    members: Map<String, Value>,
}

/// Parameters of the rotary embedding, and those of layers with a window.
type Rotary = (Map<String, Value>, Option<Map<String, Value>>);

impl Hparams {
    /// The text model's members stand beside those of the whole.
    pub(super) fn new(family: GgufFamily, config: &Value) -> Self {
        let object = |value: Option<&Value>| value.and_then(Value::as_object).cloned().unwrap_or_default();
        let mut members = object(Some(config));
        members.extend(object(config.get("text_config")));
        Self { family, members }
    }

    /// A member that is there and not null, or its default.
    pub(super) fn get(&self, member: &str) -> Option<Value> {
        let own = self.members.get(member).filter(|value| !value.is_null()).or_else(|| self.family.absent(member));
        own.cloned().or_else(|| match member {
            "num_key_value_heads" => self.get("num_attention_heads"),
            "num_experts" => self.get("num_local_experts"),
            "head_dim" if self.family.tables.head_dim_of_heads => {
                Some(json!(self.count("hidden_size")?.checked_div(self.count("num_attention_heads")?)?))
            }
            _ => None,
        })
    }

    pub(super) fn count(&self, member: &str) -> Option<u64> {
        self.get(member)?.as_u64()
    }

    /// The value of a key of the file as a number.
    pub(super) fn count_of(&self, key: &str) -> Option<u64> {
        self.count(self.family.member(key)?)
    }

    pub(super) fn rotary(&self) -> Rotary {
        let object = |value: &Value, name: &str| value.get(name).and_then(Value::as_object).cloned();
        let own = ["rope_parameters", "rope_scaling"].iter().find_map(|name| self.get(name)).unwrap_or_default();
        if let Some(full) = object(&own, "full_attention") {
            return (full, object(&own, "sliding_attention"));
        }
        let mut full = own.as_object().cloned().unwrap_or_default();
        let window = self.get("rope_local_base_freq").map(|base| Map::from_iter([("rope_theta".to_owned(), base)]));
        if let Some(kind) = full.get("type").cloned() {
            full.entry("rope_type").or_insert(kind);
        }
        for member in ["rope_theta", "partial_rotary_factor"] {
            if let Some(value) = self.get(member) {
                full.entry(member).or_insert(value);
            }
        }
        // transformers takes that of the model before that of the embedding.
        if let Some(value) = self.get("original_max_position_embeddings") {
            full.insert("original_max_position_embeddings".to_owned(), value);
        } else if let Some(value) = self.get("max_position_embeddings") {
            full.entry("original_max_position_embeddings").or_insert(value);
        }
        (full, window)
    }

    /// Columns of a head that are rotated.
    pub(super) fn rotated(&self) -> Option<u64> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "as in Python; a factor is at most 1"
        )]
        let part = |columns: u64, factor: f64| (columns as f64 * factor) as u64;
        let factor = self.rotary().0.get("partial_rotary_factor").and_then(Value::as_f64).unwrap_or(1.0);
        match self.family.architecture() {
            "phi3" => part(self.count("hidden_size")?, factor).checked_div(self.count("num_attention_heads")?),
            "glm4" => Some(part(self.count("head_dim")?, factor)),
            "deepseek2" => self.count("qk_rope_head_dim"),
            _ => self.count("head_dim"),
        }
    }

    /// What the attention of a model with factors for long contexts is multiplied by.
    #[expect(clippy::cast_possible_truncation, reason = "rounded once, as the converter does")]
    pub(super) fn longrope_scale(&self) -> Option<f32> {
        let (rotary, _) = self.rotary();
        rotary.get("long_factor").filter(|_| self.family.architecture() == "phi3")?;
        let number = |value: Option<&Value>| value.and_then(Value::as_f64);
        let own = number(rotary.get("original_max_position_embeddings"))?;
        let scale = number(self.get("max_position_embeddings").as_ref())? / own;
        let is_yarn = rotary.get("rope_type").and_then(Value::as_str) == Some("yarn");
        let factor = if is_yarn { 0.1 * scale.ln() + 1.0 } else { (1.0 + scale.ln() / own.ln()).sqrt() };
        Some(if scale > 1.0 { factor as f32 } else { 1.0 })
    }

    /// Sets the keys about the model.
    ///
    /// # Errors
    /// What `config.json` lacks.
    pub(super) fn set(&self, pairs: &mut GgufPairs, file_type: u32) -> Result<(), String> {
        let architecture = self.family.architecture();
        for key in self.family.keys() {
            let mut set = |name: &str, value| pairs.set(format!("{architecture}.{name}"), value);
            let value = match key.name {
                "rope" => {
                    self.set_rotary(&mut set)?;
                    continue;
                }
                "file_type" => {
                    pairs.set("general.file_type", GgufValue::U32(file_type));
                    continue;
                }
                "head_dim" => {
                    for name in ["attention.key_length", "attention.value_length"] {
                        if let Some(value) = self.get("head_dim") {
                            set(name, typed(key, "head_dim", &value)?);
                        }
                    }
                    continue;
                }
                // A window that is no pattern.
                "attention.sliding_window" if self.count("sliding_window_pattern") == Some(1) => continue,
                _ if architecture == "deepseek2" && self.latent(key.name).is_some() => self.latent(key.name),
                "rope.dimension_count" => self.rotated().map(Value::from),
                "rope.freq_base" => self.rotary().0.get("rope_theta").cloned(),
                "rope.scaling.original_context_length" => {
                    self.rotary().0.get("original_max_position_embeddings").cloned()
                }
                "expert_gating_func" => match self.get("scoring_func").as_ref().and_then(Value::as_str) {
                    None => None,
                    Some("softmax") => Some(json!(1)),
                    Some("sigmoid") => Some(json!(2)),
                    Some(other) => {
                        return Err(format!("config.json: scoring_func: expected softmax or sigmoid, found {other}"));
                    }
                },
                _ => self.get(key.member),
            };
            match value.filter(|value| !value.is_null()) {
                Some(value) => set(key.name, typed(key, key.member, &value)?),
                None if key.is_optional => {}
                None => return Err(format!("config.json: expected {}, of which {} is made", key.member, key.name)),
            }
        }
        Ok(())
    }

    /// What the converter makes of latent attention: one head of keys and values, as wide as what they are made of.
    fn latent(&self, key: &str) -> Option<Value> {
        let sum = |members: [&str; 2]| Some(json!(self.count(members[0])? + self.count(members[1])?));
        match key {
            "attention.head_count_kv" => Some(json!(1)),
            "attention.key_length" => sum(["kv_lora_rank", "qk_rope_head_dim"]),
            "attention.key_length_mla" => sum(["qk_nope_head_dim", "qk_rope_head_dim"]),
            "attention.value_length" => self.get("kv_lora_rank"),
            "expert_weights_norm" => {
                Some(self.get("norm_topk_prob").filter(|value| *value == json!(true)).unwrap_or_default())
            }
            "rope.scaling.yarn_log_multiplier" => {
                let factor = self.rotary().0.get("mscale_all_dim").and_then(Value::as_f64);
                Some(factor.map(|factor| json!(0.1 * factor)).unwrap_or_default())
            }
            _ => None,
        }
    }

    fn set_rotary(&self, set: &mut dyn FnMut(&str, GgufValue)) -> Result<(), String> {
        let (full, window) = self.rotary();
        let number = |name: &str| full.get(name).filter(|value| !value.is_null());
        let float = |name: &str, value: &Value| {
            let wrong = || format!("config.json: {name}: expected a number, found {value}");
            f32_of(value).map(GgufValue::F32).ok_or_else(wrong)
        };
        let kind = full.get("rope_type").and_then(Value::as_str).unwrap_or("default");
        let text = |text: &str| GgufValue::Text(text.to_owned());
        match (kind, number("factor")) {
            ("linear" | "yarn", Some(factor)) => {
                set("rope.scaling.type", text(kind));
                set("rope.scaling.factor", float("factor", factor)?);
            }
            ("su" | "longrope", _) => set("rope.scaling.type", text("longrope")),
            ("default" | "llama3", _) => {}
            (other, _) => return Err(format!("config.json: rope_type {other:?}: the converter writes nothing of it")),
        }
        if kind == "yarn" {
            let length = number("original_max_position_embeddings").and_then(u32_of);
            let length = length.ok_or("config.json: rope_type yarn: expected original_max_position_embeddings")?;
            set("rope.scaling.original_context_length", GgufValue::U32(length));
            for (members, key) in [
                (&["extrapolation_factor"][..], "ext_factor"),
                (&["attention_factor", "attn_factor"], "attn_factor"),
                (&["beta_fast"], "beta_fast"),
                (&["beta_slow"], "beta_slow"),
            ] {
                if let Some(value) = members.iter().find_map(|name| number(name)) {
                    set(&format!("rope.scaling.yarn_{key}"), float(key, value)?);
                }
            }
        }
        for (key, of) in [("rope.freq_base", Some(&full)), ("rope.freq_base_swa", window.as_ref())] {
            if let Some(value) = of.and_then(|of| of.get("rope_theta")) {
                set(key, float("rope_theta", value)?);
            }
        }
        Ok(())
    }
}

/// A value of the type that its key has.
fn typed(key: GgufKey, member: &str, value: &Value) -> Result<GgufValue, String> {
    let found = match () {
        () if key.is_float => f32_of(value).map(GgufValue::F32),
        () if key.is_bool => value.as_bool().map(GgufValue::Bool),
        () => u32_of(value).map(GgufValue::U32),
    };
    found.ok_or_else(|| format!("config.json: {member}: expected a number for {}, found {value}", key.name))
}
