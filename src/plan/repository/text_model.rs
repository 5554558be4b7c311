//! A part of a larger model as a model by itself: its configuration, and the names of its tensors.
//!
//! A repository of a model that also sees or hears has a `config.json` that nests the text model's configuration, and
//! names with one more prefix. transformers has a class for the text model alone for some of these models; the others
//! have no repository of their text part. The classes are data, in `text_models.toml`; those of other parts, in
//! `parts.toml`.

use std::{collections::BTreeMap, sync::LazyLock};

use ckfs_checkpoint::Checkpoint;
use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::super::library::{embedded_rows, embedded_table};

/// Classes by `model_type` of the whole model, and then by that of the nested configuration.
type Classes = BTreeMap<String, BTreeMap<String, String>>;

static CLASSES: LazyLock<Classes> = LazyLock::new(|| embedded_table(include_str!("text_models.toml")));

/// A row of `parts.toml`.
#[derive(Deserialize)]
struct PartRow {
    model_types: Vec<String>,
    part: String,
    names: BTreeMap<String, String>,
    architecture: String,
    /// The type of the member, where models of this type have several.
    nested: Option<String>,
    #[serde(flatten)]
    config: PartConfig,
}

static PARTS: LazyLock<Vec<PartRow>> = LazyLock::new(|| embedded_rows(include_str!("parts.toml")));

/// The parts but the text model of a repository that are models by themselves, with their words.
pub(crate) fn parts(checkpoint: &Checkpoint) -> impl Iterator<Item = (&'static str, TextModel)> {
    let whole = checkpoint.dialect().model_type.as_deref();
    let rows = PARTS.iter().filter(move |row| row.model_types.iter().any(|of| Some(of.as_str()) == whole));
    let there =
        rows.filter(|row| row.names.keys().any(|prefix| checkpoint.table().with_prefix(prefix).next().is_some()));
    let is_of_type = |row: &&PartRow| {
        let nested =
            checkpoint.config().zip(row.config.member.as_deref()).and_then(|(whole, member)| inner(whole, member));
        let found = nested.and_then(|nested| nested.get("model_type")?.as_str());
        // Classes differ by it: without it none is known.
        row.nested.as_deref().is_none_or(|expected| found == Some(expected))
    };
    there.filter(is_of_type).map(|row| {
        let (names, architecture) = (row.names.clone(), row.architecture.clone());
        let part = Some(row.config.clone());
        (row.part.as_str(), TextModel { model_type: String::new(), architecture, names, part })
    })
}

/// A member of a member.
fn inner<'a>(whole: &'a Json, path: &str) -> Option<&'a Json> {
    path.split('.').try_fold(whole, |config, member| config.get(member))
}

/// Where the configuration of another part than the text model is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct PartConfig {
    /// The member that it is; `None` is the whole.
    member: Option<String>,
    /// Members that are another in it.
    #[serde(default)]
    set: BTreeMap<String, Json>,
}

/// Prefixes of the text model's names in the whole model, in the order in which they are tried, and their replacements.
const PREFIXES: [(&str, &str); 3] =
    [("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.lm_head.", "lm_head.")];

/// Members of the whole model's configuration that a part takes over if it has none of its own.
const INHERITED: [&str; 5] = ["dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id"];

/// Members of `config.json` that tell how weights are quantized; the last is MLX's.
pub(crate) const QUANTIZATION: [&str; 3] = ["quantization_config", "compression_config", "quantization"];

/// Files that describe the input of the other parts: images, video and sound.
const PROCESSORS: [&str; 4] = [
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
];

/// The text model of a larger model, as a repository by itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextModel {
    /// `model_type` of its configuration.
    pub(crate) model_type: String,
    /// Its class.
    pub(crate) architecture: String,
    /// Prefixes of names in the whole model, each with its replacement in such a repository, tried before [`PREFIXES`].
    #[serde(default)]
    names: BTreeMap<String, String>,
    /// If it is another part than the text model.
    part: Option<PartConfig>,
}

impl TextModel {
    /// The text model of the repository.
    ///
    /// # Errors
    /// The reason why there is none.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Result<Self, String> {
        let dialect = checkpoint.dialect();
        let whole = dialect.model_type.as_deref().unwrap_or("unknown");
        let Some(text) = dialect.text_config.as_ref().map(|_| dialect.text_model_type.as_deref()) else {
            return Err(format!(
                "config.json is that of a whole {whole} model: it nests no configuration of the text model"
            ));
        };
        let classes = CLASSES.get(whole);
        let only = |classes: &'static BTreeMap<String, String>| classes.keys().next().filter(|_| classes.len() == 1);
        let text = text.or_else(|| classes.and_then(only).map(String::as_str));
        let class = text.zip(classes).and_then(|(text, classes)| classes.get_key_value(text));
        let Some((model_type, architecture)) = class else {
            let known: Vec<&str> = CLASSES.keys().map(String::as_str).collect();
            let text = text.unwrap_or("unnamed");
            return Err(format!(
                "no class of transformers is known that is the text model ({text}) of {whole} alone: there is one for {}",
                known.join(", ")
            ));
        };
        let names = BTreeMap::new();
        Ok(Self { model_type: model_type.clone(), architecture: architecture.clone(), names, part: None })
    }

    fn prefixes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.names.iter().map(|(old, new)| (old.as_str(), new.as_str())).chain(PREFIXES)
    }

    /// Whether a name of the whole model is of another part of the model.
    pub(crate) fn is_outside(&self, name: &str) -> bool {
        !name.contains("lm_head") && self.prefixes().all(|(prefix, _)| !name.starts_with(prefix))
    }

    /// Whether a name of the whole model is one of this part's own.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.names.keys().any(|prefix| name.starts_with(prefix.as_str()))
    }

    /// The name in a repository of the text model.
    pub(crate) fn name(&self, name: &str) -> String {
        let renamed = self.prefixes().find_map(|(old, new)| Some(format!("{new}{}", name.strip_prefix(old)?)));
        renamed.unwrap_or_else(|| name.to_owned())
    }

    /// The text model's configuration by itself. `tied` says whether the whole model's output head is the embedding,
    /// which the whole model's configuration may decide.
    pub(crate) fn config(&self, whole: &Json, tied: bool) -> Json {
        let is_own = |value: &&Json| value.get("model_type").is_some_and(|of| *of == self.model_type.as_str());
        let by_type = || whole.as_object().and_then(|members| members.values().find(is_own));
        let nested = match &self.part {
            Some(part) => part.member.as_ref().map_or(Some(whole), |member| inner(whole, member)),
            None => by_type().or_else(|| whole.get("text_config")),
        };
        let mut config = nested.cloned().unwrap_or_default();
        if let Some(members) = config.as_object_mut() {
            // Only the text model has tokens.
            for key in INHERITED.into_iter().filter(|key| self.is_text() || !key.ends_with("_token_id")) {
                if let Some(value) = whole.get(key) {
                    members.entry(key).or_insert_with(|| value.clone());
                }
            }
            if let Some(part) = &self.part {
                members.extend(part.set.clone());
            } else {
                members.insert("tie_word_embeddings".to_owned(), json!(tied));
                members.insert("model_type".to_owned(), json!(self.model_type));
            }
            members.insert("architectures".to_owned(), json!([self.architecture]));
        }
        config
    }

    /// Whether it is the text model, and not another part.
    pub(crate) const fn is_text(&self) -> bool {
        self.part.is_none()
    }

    /// Whether a repository of the text model has this file of the whole model's.
    pub(crate) fn has_file(path: &str) -> bool {
        !PROCESSORS.contains(&path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> TextModel {
        toml::from_str("model_type = 'inner'\narchitecture = 'InnerForCausalLM'").unwrap()
    }

    #[test]
    fn names_lose_the_prefix_of_the_part() {
        for (whole, expected) in [
            ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("model.language_model.norm.weight", "model.norm.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(text().name(whole), expected);
            assert!(!text().is_outside(whole), "{whole}");
        }
        for other in ["model.sound_tower.x", "language_model.embeddings.weight", "projector.weight"] {
            assert!(text().is_outside(other), "{other}");
        }
    }

    #[test]
    fn configurations_take_over_what_only_the_whole_one_says() {
        let whole = json!({"model_type": "outer", "torch_dtype": "bfloat16", "eos_token_id": [1, 106], "tie_word_embeddings": true,
            "vision_config": {"model_type": "eye"},
            "text_config": {"model_type": "inner", "tie_word_embeddings": false, "hidden_size": 8}});
        let expected = json!({"model_type": "inner", "architectures": ["InnerForCausalLM"], "torch_dtype": "bfloat16",
            "eos_token_id": [1, 106], "tie_word_embeddings": true, "hidden_size": 8});
        assert_eq!(text().config(&whole, true), expected);
    }

    #[test]
    fn the_table_names_classes() {
        for (whole, classes) in &*CLASSES {
            assert!(!classes.is_empty() && classes.values().all(|class| class.ends_with("ForCausalLM")), "{whole}");
        }
    }
}
