//! The layouts in the program. Each is a set of layout files, one per model family.
//!
//! A family is one file; adding one needs no code beyond its line here.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    layout_file::LayoutFile,
    problem::{PlanError, Problem},
};
use crate::{checkpoint::Checkpoint, config::did_you_mean};

/// A layout in the program.
#[derive(Debug, PartialEq, Eq)]
pub struct Embedded {
    /// Its name.
    pub name: &'static str,
    /// Its families: name and text of the file.
    files: &'static [(&'static str, &'static str)],
    /// Parameters that its name implies.
    set: &'static [(&'static str, &'static str)],
    /// Whether a model without a file of its own has the names of transformers' modules, which need no rules.
    pub(super) by_modules: bool,
    /// A leaf that every checkpoint of this layout has, if such a checkpoint can be made back to a repository.
    pub(super) anchor: Option<&'static str>,
}

const MAXTEXT: &[(&str, &str)] = &[
    ("maxtext/llama", include_str!("maxtext/llama.toml")),
    ("maxtext/qwen", include_str!("maxtext/qwen.toml")),
    ("maxtext/mixtral", include_str!("maxtext/mixtral.toml")),
    ("maxtext/gemma2", include_str!("maxtext/gemma2.toml")),
    ("maxtext/gemma3", include_str!("maxtext/gemma3.toml")),
    ("maxtext/gemma4", include_str!("maxtext/gemma4.toml")),
    ("maxtext/deepseek", include_str!("maxtext/deepseek.toml")),
    ("maxtext/gpt-oss", include_str!("maxtext/gpt-oss.toml")),
    ("maxtext/olmo3", include_str!("maxtext/olmo3.toml")),
    ("maxtext/qwen3-next", include_str!("maxtext/qwen3-next.toml")),
    ("maxtext/qwen3.5", include_str!("maxtext/qwen3.5.toml")),
];

const VLLM: &[(&str, &str)] = &[
    ("vllm/llama", include_str!("vllm/llama.toml")),
    ("vllm/qwen3-moe", include_str!("vllm/qwen3-moe.toml")),
    ("vllm/mixtral", include_str!("vllm/mixtral.toml")),
    ("vllm/phi3", include_str!("vllm/phi3.toml")),
    ("vllm/gemma3", include_str!("vllm/gemma3.toml")),
    ("vllm/olmoe", include_str!("vllm/olmoe.toml")),
    ("vllm/glm4-moe", include_str!("vllm/glm4-moe.toml")),
    ("vllm/deepseek", include_str!("vllm/deepseek.toml")),
    ("vllm/gpt-oss", include_str!("vllm/gpt-oss.toml")),
];

const TORCHTITAN: &[(&str, &str)] = &[
    ("torchtitan/llama3", include_str!("torchtitan/llama3.toml")),
    ("torchtitan/qwen3", include_str!("torchtitan/qwen3.toml")),
    ("torchtitan/deepseek_v3", include_str!("torchtitan/deepseek_v3.toml")),
];

const TRANSFORMERS: &[(&str, &str)] = &[
    ("transformers/mixtral", include_str!("transformers/mixtral.toml")),
    ("transformers/qwen-moe", include_str!("transformers/qwen-moe.toml")),
    ("transformers/deepseek_v3", include_str!("transformers/deepseek_v3.toml")),
];

const MEGATRON: &[(&str, &str)] = &[
    ("megatron/llama", include_str!("megatron/llama.toml")),
    ("megatron/qwen", include_str!("megatron/qwen.toml")),
    ("megatron/mixtral", include_str!("megatron/mixtral.toml")),
];

const MAXTEXT_ANCHOR: Option<&str> = Some("params.token_embedder.embedding");

const MEGATRON_ANCHOR: Option<&str> = Some("embedding.word_embeddings.weight");

static EMBEDDED: &[Embedded] = &[
    Embedded { name: "maxtext", files: MAXTEXT, set: &[("scan", "true")], by_modules: false, anchor: MAXTEXT_ANCHOR },
    Embedded {
        name: "maxtext-unscanned",
        files: MAXTEXT,
        set: &[("scan", "false")],
        by_modules: false,
        anchor: MAXTEXT_ANCHOR,
    },
    Embedded {
        name: "megatron",
        files: MEGATRON,
        set: &[("scan", "true")],
        by_modules: false,
        anchor: MEGATRON_ANCHOR,
    },
    Embedded {
        name: "megatron-unscanned",
        files: MEGATRON,
        set: &[("scan", "false")],
        by_modules: false,
        anchor: MEGATRON_ANCHOR,
    },
    Embedded { name: "torchtitan", files: TORCHTITAN, set: &[], by_modules: false, anchor: None },
    Embedded { name: "transformers", files: TRANSFORMERS, set: &[], by_modules: true, anchor: None },
    Embedded { name: "vllm", files: VLLM, set: &[], by_modules: false, anchor: None },
];

/// Name of the parameter that chooses the file.
pub(super) const FAMILY: &str = "family";

impl Embedded {
    /// The layout of that name.
    pub fn find(name: &str) -> Option<&'static Self> {
        EMBEDDED.iter().find(|embedded| embedded.name == name)
    }

    /// All embedded layouts.
    pub(super) fn all() -> &'static [Self] {
        EMBEDDED
    }

    /// Names of all embedded layouts.
    pub fn names() -> impl Iterator<Item = &'static str> {
        EMBEDDED.iter().map(|embedded| embedded.name)
    }

    /// Names of the families that the layout supports.
    pub fn families(&self) -> impl Iterator<Item = &'static str> {
        self.files.iter().map(|(name, _)| *name)
    }

    /// The layout's file for one family.
    ///
    /// # Errors
    /// The file's problems. This is always an error in this program.
    pub fn family(&self, name: &str) -> Option<Result<LayoutFile, PlanError>> {
        let (label, text) =
            self.files.iter().find(|(label, _)| *label == name || label.rsplit('/').next() == Some(name))?;
        Some(LayoutFile::parse(&format!("{label}.toml"), text).map(LayoutFile::embedded))
    }

    /// The file for the model that `config.json` names, if there is one.
    fn file_of(&self, checkpoint: &Checkpoint) -> Result<Option<LayoutFile>, PlanError> {
        let dialect = checkpoint.dialect();
        for wanted in [&dialect.model_type, &dialect.text_model_type].into_iter().flatten() {
            for (label, _) in self.files {
                let Some(file) = self.family(label) else { continue };
                let file = file?;
                if file.model_types().iter().any(|known| known == wanted) {
                    return Ok(Some(file));
                }
            }
        }
        Ok(None)
    }

    /// Whether the layout has a file for the model that `config.json` names.
    ///
    /// # Errors
    /// A file's problems. This is always an error in this program.
    pub(super) fn has_file(&self, checkpoint: &Checkpoint) -> Result<bool, PlanError> {
        Ok(self.file_of(checkpoint)?.is_some())
    }

    /// The file for a repository: that of the family that the user set, or of the model that `config.json` names. Takes
    /// the parameter `family` from `set` and adds those that the layout's own name implies.
    ///
    /// # Errors
    /// The supported families, if the repository is of none of them.
    pub(super) fn choose(
        &self,
        checkpoint: &Checkpoint,
        set: &mut BTreeMap<String, String>,
    ) -> Result<Arc<LayoutFile>, PlanError> {
        for (name, value) in self.set {
            set.entry((*name).to_owned()).or_insert_with(|| (*value).to_owned());
        }
        let dialect = checkpoint.dialect();
        let wanted = set.remove(FAMILY);
        let known = || self.families().collect::<Vec<_>>().join(", ");
        let problem = |reason: String| Problem::File { file: format!("layout {}", self.name), reason };
        if let Some(name) = wanted {
            let short = || self.files.iter().map(|(label, _)| label.rsplit('/').next().unwrap_or(label));
            let unknown = || {
                let near = did_you_mean("family", &name, short());
                near.unwrap_or_else(|| format!("no family {name:?}; known: {}", known()))
            };
            let file = self.family(&name).ok_or_else(|| problem(unknown()))?;
            return file.map(Arc::new);
        }
        let types: Vec<&str> =
            [&dialect.model_type, &dialect.text_model_type].into_iter().flatten().map(String::as_str).collect();
        if let Some(file) = self.file_of(checkpoint)? {
            return Ok(Arc::new(file));
        }
        let reason = if types.is_empty() {
            format!("config.json names no model_type; choose a family by the parameter family: {}", known())
        } else {
            format!(
                "no family for model_type {}; known, and to be set by the parameter family: {}",
                types.join(", "),
                known()
            )
        };
        Err(problem(reason).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_loads_and_no_model_type_is_claimed_twice() {
        for embedded in EMBEDDED {
            let mut seen = std::collections::BTreeSet::new();
            for label in embedded.families() {
                let file = embedded.family(label).unwrap().unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(file.name(), label);
                // The layouts for FSDP2 cut axis 0 of each tensor; the others name their axes.
                assert_eq!(file.shards_logically(), !matches!(embedded.name, "torchtitan" | "transformers"));
                for model_type in file.model_types() {
                    assert!(seen.insert(model_type.clone()), "{model_type} is claimed twice");
                }
            }
        }
    }
}
