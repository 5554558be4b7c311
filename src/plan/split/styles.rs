//! How transformers splits the modules of its models, as data: `library/tensor_parallel.toml`, which a script makes from
//! transformers itself.

use std::{collections::BTreeMap, sync::LazyLock};

use ckfs_checkpoint::Checkpoint;
use serde::Deserialize;

use super::super::library::embedded_rows;

/// What transformers does with a module. The names are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Style {
    /// Rows are split, and so is the output.
    Colwise,
    /// Columns are split, and so is the input.
    Rowwise,
    /// Rows of each of several matrices in one.
    PackedColwise,
    /// Columns of each of several matrices in one.
    PackedRowwise,
    /// Rows are split, and the output is put together again.
    ColwiseGatherOutput,
    /// Columns are split, and each device takes its part of a whole input.
    RowwiseSplitInput,
    /// Rows of an embedding.
    EmbeddingRowwise,
    /// Columns of an embedding.
    EmbeddingColwise,
    /// Nothing is split.
    Replicate,
}

/// Modules by their style.
type Styles = BTreeMap<Style, Vec<String>>;

/// The plan of some model types.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelPlan {
    model_types: Vec<String>,
    /// Modules outside the layers, without a prefix.
    #[serde(default)]
    top: Styles,
    /// The blocks of a layer, each with the modules within.
    #[serde(default)]
    layer: BTreeMap<String, Styles>,
}

/// All plans.
static PLANS: LazyLock<Vec<ModelPlan>> =
    LazyLock::new(|| embedded_rows(include_str!("../library/tensor_parallel.toml")));

impl ModelPlan {
    /// The blocks of a layer, by the module that holds them.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (&str, impl Iterator<Item = (Style, &str)>)> {
        self.layer.iter().map(|(root, styles)| {
            let modules = styles.iter().flat_map(|(style, names)| names.iter().map(|name| (*style, name.as_str())));
            (root.as_str(), modules)
        })
    }

    /// The style of a module outside the layers.
    pub(crate) fn top(&self, stem: &str) -> Option<Style> {
        let is_name = |name: &String| {
            stem.strip_suffix(name.as_str()).is_some_and(|prefix| prefix.is_empty() || prefix.ends_with('.'))
        };
        self.top.iter().find_map(|(style, names)| names.iter().any(is_name).then_some(*style))
    }
}

/// The plans for a checkpoint: of the text model, and of its towers.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelPlans {
    /// The plans of the text model's type and of the whole model's.
    pub(crate) text: Vec<&'static ModelPlan>,
    /// Those of the other members of `config.json` that have a model type.
    pub(crate) towers: Vec<&'static ModelPlan>,
}

impl ModelPlans {
    /// The plans for the model types in `config.json`.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Self {
        let dialect = checkpoint.dialect();
        let find = |of: &str| PLANS.iter().find(|plan| plan.model_types.iter().any(|known| known == of));
        let text = dialect.text_model_type.iter().chain(&dialect.model_type);
        let members = checkpoint.config().and_then(serde_json::Value::as_object).into_iter().flatten();
        let towers = members.filter(|(key, _)| dialect.text_config.as_deref() != Some(key.as_str()));
        let towers = towers.filter_map(|(_, member)| member.get("model_type")?.as_str());
        Self {
            text: text.filter_map(|model_type| find(model_type)).collect(),
            towers: towers.filter_map(find).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_type_has_one_plan_and_each_block_is_closed() {
        let mut seen = Vec::new();
        for plan in &*PLANS {
            for model_type in &plan.model_types {
                assert!(!seen.contains(model_type), "{model_type} is there twice");
                seen.push(model_type.clone());
            }
            for (root, modules) in plan.blocks() {
                let styles: Vec<Style> = modules.map(|(style, _)| style).collect();
                let has = |any: &[Style]| styles.iter().any(|style| any.contains(style));
                let columns = has(&[Style::Colwise, Style::PackedColwise, Style::PackedRowwise]);
                let transposed = has(&[Style::PackedRowwise]);
                assert!(columns == has(&[Style::Rowwise]) || transposed, "{:?}: {root}", plan.model_types);
            }
        }
        assert!(seen.len() > 150, "{}", seen.len());
    }

    #[test]
    fn modules_outside_the_layers_are_found_under_any_prefix() {
        let plan = PLANS.iter().find(|plan| plan.model_types.iter().any(|name| name == "gpt_neox")).unwrap();
        assert_eq!(plan.top("gpt_neox.embed_in"), Some(Style::EmbeddingRowwise));
        assert_eq!(plan.top("embed_in"), Some(Style::EmbeddingRowwise));
        assert_eq!(plan.top("my_embed_in"), None);
    }
}
