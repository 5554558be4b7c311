//! Whether an output head is the embedding, decided as in transformers: by `config.json`, and otherwise by the model's
//! type. The types are data, in `tied.toml`, which a script makes from the classes of transformers.

use std::{collections::BTreeMap, sync::LazyLock};

use serde::Deserialize;
use serde_json::Value;

use super::super::{table::TensorTable, weight_name::ends_with_name};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    /// Tied by default.
    by_default: Vec<String>,
    /// Tied, or not, whatever config.json says.
    always: Vec<String>,
    never: Vec<String>,
    /// Tied if the whole model's configuration or the text model's says so.
    by_either: Vec<String>,
    /// Of these, the whole model's configuration says so if it says nothing.
    either_whole: Vec<String>,
    /// Of these, the text model's.
    either_text: Vec<String>,
    /// Only the text model's configuration counts.
    by_text: Vec<String>,
    /// Only the whole model's configuration counts, though there is one of a text model.
    by_whole: Vec<String>,
    /// Names of embeddings that a head may be, without a prefix.
    embeddings: Vec<String>,
    /// Classes whose tied head is not called `lm_head`, by its name.
    heads: BTreeMap<String, Vec<String>>,
}

static RULES: LazyLock<Rules> = LazyLock::new(|| {
    toml::from_str(include_str!("tied.toml")).expect("the file is in the program, and a test reads it")
});

/// The output head according to the configuration and the model's type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tie {
    /// The value in `config.json`, if transformers honours it there.
    pub(crate) declared: Option<bool>,
    /// The effective value.
    pub(crate) tied: bool,
}

/// Words in the names of classes with an output head.
const HEADED: [&str; 4] = ["LMHead", "ForCausalLM", "ForConditionalGeneration", "DoubleHeads"];

/// The name of the output head of a class that does not call it `lm_head`.
pub(crate) fn other_head(architectures: &[String]) -> Option<&'static str> {
    let has = |classes: &[String]| architectures.iter().any(|class| classes.contains(class));
    RULES.heads.iter().find(|(_, classes)| has(classes)).map(|(head, _)| head.as_str())
}

/// Members that say whether the head is the embedding. The second is LFM2's.
const TIES: [&str; 2] = ["tie_word_embeddings", "tie_embedding"];

pub(crate) fn word(config: &Value) -> Option<bool> {
    TIES.iter().find_map(|key| config.get(key)?.as_bool())
}

impl Tie {
    /// `text` is the nested configuration of the text model, where there is one.
    pub(crate) fn of(config: Option<&Value>, text: Option<&Value>, architectures: &[String]) -> Self {
        let Some(config) = config else { return Self::default() };
        let model_type = |config: &Value| config.get("model_type").and_then(Value::as_str).unwrap_or("").to_owned();
        let outer = model_type(config);
        let is_in = |list: &[String], name: &str| list.iter().any(|known| known == name);
        let has_other = other_head(architectures).is_some();
        let has_head = architectures.is_empty()
            || has_other
            || architectures.iter().any(|class| HEADED.iter().any(|word| class.contains(word)));
        // Of a class with parts, or of another program, the name tells less.
        let is_headless = |class: &String| class.ends_with("Model") || class.contains("For");
        if !has_head && text.is_none() && architectures.iter().all(is_headless) {
            return Self { declared: word(config).filter(|tied| !tied), tied: false };
        }
        let by_default = |name: &str| has_head && (has_other || is_in(&RULES.by_default, name));
        if is_in(&RULES.always, &outer) {
            let tied = has_head;
            return Self { declared: word(config).filter(|_| !tied), tied };
        }
        if is_in(&RULES.never, &outer) {
            return Self::default();
        }
        let (declared, default) = match text {
            None => (word(config), by_default(&outer)),
            Some(text) if is_in(&RULES.by_text, &outer) => (word(text), by_default(&outer)),
            Some(text) if is_in(&RULES.by_either, &outer) => {
                let words = [(word(config), &RULES.either_whole), (word(text), &RULES.either_text)];
                let tied = words.iter().any(|(word, list)| word.unwrap_or(has_head && is_in(list, &outer)));
                (words.iter().any(|(word, _)| word.is_some()).then_some(tied), tied)
            }
            Some(_) if is_in(&RULES.by_whole, &outer) => (word(config), by_default(&outer)),
            // If the whole model is not in the lists, either configuration may decide. The whole model's head follows
            // the whole model's configuration.
            Some(text) => (word(config).or_else(|| word(text)), by_default(&model_type(text))),
        };
        Self { declared, tied: declared.unwrap_or(default) }
    }
}

/// The configuration, saying that the output head is a tensor of its own. `nested` is the member with the text model's own. `None`
/// where the model's type ties it whatever the configuration says.
pub(crate) fn untied(config: &Value, nested: Option<&str>, architectures: &[String]) -> Option<Value> {
    let mut config = config.clone();
    let members = config.as_object_mut()?;
    members.insert(TIES[0].to_owned(), Value::Bool(false));
    let text = nested.and_then(|nested| members.get_mut(nested)).and_then(Value::as_object_mut);
    for member in text.into_iter().flat_map(|text| text.iter_mut()) {
        if TIES.contains(&member.0.as_str()) {
            *member.1 = Value::Bool(false);
        }
    }
    if let Some(other) = members.get_mut(TIES[1]) {
        *other = Value::Bool(false);
    }
    let tie = Tie::of(Some(&config), nested.and_then(|nested| config.get(nested)), architectures);
    (!tie.tied).then_some(config)
}

/// The name of the embedding that serves as output head. Of several, the one with the shortest name.
pub(crate) fn embedding<'a>(table: &'a TensorTable, is_outside: &dyn Fn(&str) -> bool) -> Option<&'a str> {
    let is_named = |name: &str| RULES.embeddings.iter().any(|known| ends_with_name(name, known));
    let names = table.iter().map(|(_, info)| info.name).filter(|name| is_named(name) && !is_outside(name));
    names.min_by_key(|name| name.len())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ties_are_those_of_transformers() {
        let rows = [
            (json!({"model_type": "llama"}), None, false),
            (json!({"model_type": "llama", "tie_word_embeddings": true}), Some(true), true),
            (json!({"model_type": "gpt2"}), None, true),
            (json!({"model_type": "gpt2", "architectures": ["GPT2Model"]}), None, false),
            (json!({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}), None, true),
            // Classes without a head, and with one of another name.
            (json!({"model_type": "qwen2", "architectures": ["Qwen2Model"], "tie_word_embeddings": true}), None, false),
            (json!({"model_type": "bert", "architectures": ["BertModel"], "tie_word_embeddings": true}), None, false),
            (json!({"model_type": "bert", "architectures": ["BertForMaskedLM"]}), None, true),
            (
                json!({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "tie_word_embeddings": false}),
                Some(false),
                false,
            ),
            (json!({"model_type": "falcon", "tie_word_embeddings": false}), Some(false), false),
            (json!({"model_type": "t5", "tie_word_embeddings": false}), None, true),
            (json!({"model_type": "t5", "architectures": ["T5EncoderModel"]}), None, false),
            // The outer configuration or the type decides.
            (
                json!({"model_type": "gemma3", "tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}),
                Some(false),
                false,
            ),
            (
                json!({"model_type": "gemma3", "tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}}),
                Some(true),
                true,
            ),
            (json!({"model_type": "gemma3", "text_config": {"tie_word_embeddings": false}}), None, true),
            // Here the inner configuration may tie although the outer one does not.
            (
                json!({"model_type": "llava", "tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}),
                Some(true),
                true,
            ),
            // Each of two configurations that says nothing counts as its own default.
            (json!({"model_type": "kosmos-2", "tie_word_embeddings": false, "text_config": {}}), Some(true), true),
            (json!({"model_type": "kosmos-2", "text_config": {"tie_word_embeddings": false}}), Some(true), true),
            (json!({"model_type": "shieldgemma2", "text_config": {"tie_word_embeddings": false}}), Some(false), false),
            (json!({"model_type": "shieldgemma2", "tie_word_embeddings": false, "text_config": {}}), Some(true), true),
            (json!({"model_type": "shieldgemma2", "text_config": {}}), None, true),
            (json!({"model_type": "llava", "tie_word_embeddings": false, "text_config": {}}), Some(false), false),
            // Or it alone counts.
            (
                json!({"model_type": "llama4", "tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}),
                Some(true),
                true,
            ),
            (json!({"model_type": "llama4", "tie_word_embeddings": true, "text_config": {}}), None, false),
            // No class has a tied head.
            (json!({"model_type": "kimi_linear", "tie_word_embeddings": true}), None, false),
            (json!({"model_type": "llava", "text_config": {"model_type": "llama"}}), None, false),
            (json!({"model_type": "other", "text_config": {"model_type": "gemma2"}}), None, true),
            (json!({"model_type": "other", "text_config": {"tie_word_embeddings": true}}), Some(true), true),
        ];
        for (config, declared, tied) in rows {
            let classes: Vec<String> = config["architectures"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|class| class.as_str().unwrap().to_owned())
                .collect();
            let found = Tie::of(Some(&config), config.get("text_config"), &classes);
            assert_eq!(found, Tie { declared, tied }, "{config}");
        }
        assert_eq!(Tie::of(None, None, &[]), Tie::default());
    }
}
