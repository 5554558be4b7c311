//! Model families, as data: short names and tensor-parallel roles of their tensors.
//!
//! A family is one TOML file under `families/`. The build finds it: adding one needs no code.

use std::{collections::BTreeMap, sync::LazyLock};

use ckfs_checkpoint::Checkpoint;
use ckfs_layouts::FAMILIES;
use serde::Deserialize;

use super::{
    library::embedded_table,
    member::model_types,
    naming::{self, Parsed},
};

/// The role of one tensor in a family.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Role {
    /// Short name of the weight; `*` stands for the expert's number.
    pub short: Option<String>,
    /// Short name of the bias.
    pub bias: Option<String>,
    /// Axis that tensor parallelism splits, where the block's form does not say it: of a tensor outside the layers, of fused
    /// experts, of the parts of a fused matrix, and of a vector with an element for each head.
    pub tp: Option<usize>,
    /// Axis of the tensor that counts experts, where they are fused.
    pub experts: Option<usize>,
    /// Names of the parts along `split_axis`, with their shares: a number or a member of `config.json`.
    pub split: Vec<(String, String)>,
    /// Axis along which the parts lie.
    pub split_axis: usize,
    /// Axis of the inputs among the last two of fused experts. Of a tensor that is stored the other way round, the two axes are
    /// exchanged.
    pub inputs: Option<usize>,
    /// Whether a matrix is no linear layer of attention, MLP or experts, as a router is none: it is never quantized.
    pub plain: bool,
}

/// Tensors that every complete model has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Expectation {
    /// The model types to which it applies. An empty list means all of the family's.
    pub model_types: Vec<String>,
    /// A condition over `config.json` and the number `l` of the layer.
    pub when: Option<String>,
    /// A member of `config.json` that lists the layers to which it does not apply.
    pub unless_listed: Option<String>,
    /// Names outside the layers, after the text model's prefix.
    pub top: Vec<String>,
    /// Names within each layer. `*` stands for an expert's number.
    pub layer: Vec<String>,
    /// The number of experts, as an expression over `config.json`. Given if the names are those of single experts.
    pub experts: Option<String>,
    /// Whether a name in the layers is expected only if some layer has it: then all layers must have it.
    pub if_any: bool,
}

/// What the names of matrices tell of whether they are quantized, where no family knows them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QuantizeRules {
    /// Parts of words of which a name that is never quantized has one.
    pub(super) plain_words: Vec<String>,
    /// Last words of modules that are never quantized.
    pub(super) plain_modules: Vec<String>,
    /// Last words of modules that choose among experts.
    pub(super) routers: Vec<String>,
    /// Parts of words of the prefixes of towers for images and sound.
    pub(super) towers: Vec<String>,
    /// Parts of words of attention.
    pub(super) attention: Vec<String>,
    /// Parts of words of MLPs.
    pub(super) mlp: Vec<String>,
    /// Last words of modules that engines fuse: those of one parent have one factor.
    pub(super) together: Vec<Vec<String>>,
}

/// A block of a layer by the names of its modules, within the module that holds them all.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockForm {
    /// The modules whose rows are split. The block has all of them.
    #[serde(default)]
    pub(super) inputs: Vec<String>,
    /// The same, each of several matrices in one.
    #[serde(default)]
    pub(super) fused: Vec<String>,
    /// The module whose columns are split. The block has one of these.
    pub(super) outputs: Vec<String>,
    /// Last words of the modules beside them that stay whole.
    #[serde(default)]
    pub(super) whole: Vec<String>,
    /// Whether the words alone tell what a module is: if a checkpoint lacks the others, what it has is cut nevertheless.
    #[serde(default)]
    pub(super) partial: bool,
}

/// A model family.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Family {
    /// Its name.
    pub name: String,
    /// The family whose tables it has where it has no other.
    extends: Option<String>,
    /// Values of `model_type` in `config.json`. Not inherited.
    model_types: Vec<String>,
    /// Possible prefixes of the text model's names. Other prefixes keep their words.
    pub prefixes: Vec<String>,
    /// Prefixes that are left out of names, besides `model.`.
    pub dropped_prefixes: Vec<String>,
    /// The model types whose releases have the experts of a layer in one tensor. Not inherited.
    fused: Vec<String>,
    /// The words before a layer's number in the text model.
    pub layers: String,
    /// The first part of the names of its models' classes in transformers. Not inherited.
    pub classes: Vec<String>,
    /// Whether its own repositories bring code. Code then says nothing about the model. Not inherited.
    pub own_code: bool,
    /// Names, after the prefix, that only draft models have. Such models carry the model type of their target.
    pub unlike: Vec<String>,
    /// What a complete model has; not inherited.
    pub expect: Vec<Expectation>,
    top: BTreeMap<String, Role>,
    layer: BTreeMap<String, Role>,
    layer_if: BTreeMap<String, BTreeMap<String, Role>>,
}

/// The ends of the names of transformers' classes, after the model's own name, if the class holds the whole model.
const CLASS_ENDINGS: [&str; 11] = [
    "Model",
    "TextModel",
    "LMHeadModel",
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "TextForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
    "ForPreTraining",
];

/// The families, each with what it inherits.
static LOADED: LazyLock<Vec<Family>> = LazyLock::new(|| Family::names().map(load).collect());

fn text(name: &str) -> &'static str {
    FAMILIES.iter().find(|(file, _)| *file == name).map_or("", |(_, text)| text)
}

fn load(name: &str) -> Family {
    let mut family: Family = embedded_table(text(name));
    if let Some(base) = family.extends.as_deref().map(load) {
        if family.prefixes.is_empty() {
            family.prefixes = base.prefixes;
        }
        if family.layers.is_empty() {
            family.layers = base.layers;
        }
        family.dropped_prefixes.splice(0..0, base.dropped_prefixes);
        family.unlike.splice(0..0, base.unlike);
        family.top = base.top.into_iter().chain(family.top).collect();
        family.layer = base.layer.into_iter().chain(family.layer).collect();
        family.layer_if = base.layer_if.into_iter().chain(family.layer_if).collect();
    } else if family.layers.is_empty() {
        "layers".clone_into(&mut family.layers);
    }
    family
}

impl Role {
    /// The role of a tensor whose last two axes, of three, are the other way round.
    #[must_use]
    pub(super) fn turned(self) -> Self {
        let other = |axis: usize| if matches!(axis, 1 | 2) { 3 - axis } else { axis };
        Self { tp: self.tp.map(other), split_axis: other(self.split_axis), inputs: self.inputs.map(other), ..self }
    }
}

impl Family {
    /// The family of a checkpoint's model. `None` if it is not known.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Option<&'static Self> {
        model_types(checkpoint).find_map(Self::of_model_type)
    }

    fn of_model_type(model_type: &str) -> Option<&'static Self> {
        LOADED.iter().find(|family| family.model_types.iter().any(|known| known == model_type))
    }

    /// Names of all families.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().map(|(name, _)| *name).filter(|name| *name != "generic")
    }

    /// The role of a tensor outside the layers, by its name without prefix and final word.
    pub fn top(&self, stem: &str) -> Option<&Role> {
        self.top.get(stem)
    }

    /// Whether the releases of a model type have the experts of a layer in one tensor.
    pub(super) fn has_fused_experts(&self, model_type: &str) -> bool {
        self.fused.iter().any(|known| known == model_type)
    }

    /// Whether a class of `config.json` is one of transformers' for this family.
    pub(super) fn has_class(&self, class: &str) -> bool {
        let ending = |name: &String| class.strip_prefix(name.as_str());
        self.classes.iter().filter_map(ending).any(|ending| CLASS_ENDINGS.contains(&ending))
    }

    /// Whether the tables have a tensor, by its name.
    pub(super) fn knows(&self, name: &str, parsed: &Parsed) -> bool {
        if parsed.layer.is_some() {
            let tables = || std::iter::once(&self.layer).chain(self.layer_if.values());
            let stem = naming::split_suffix(&parsed.rest).0;
            return tables().any(|table| table.contains_key(stem) || table.contains_key(&parsed.rest));
        }
        let stem = naming::split_suffix(name).0;
        self.prefixes
            .iter()
            .any(|prefix| stem.strip_prefix(prefix.as_str()).is_some_and(|stem| self.top.contains_key(stem)))
    }

    /// Whether the tables have a tensor of a layer, under a prefix that the text model may have.
    pub(super) fn has_layer(&self, name: &str) -> bool {
        let parsed = naming::parse(name);
        let is_layer = parsed.layer.is_some() && self.prefixes.contains(&parsed.prefix) && !naming::is_tower(name);
        is_layer && self.knows(name, &parsed)
    }

    /// Names of all tensors in the tables, after the prefix and with `*` for numbers.
    pub(super) fn stems(&self) -> impl Iterator<Item = String> {
        let layers = std::iter::once(&self.layer).chain(self.layer_if.values());
        let layers = layers.flat_map(|table| table.keys()).map(|stem| format!("{}.*.{stem}.weight", self.layers));
        self.top.keys().map(|stem| format!("{stem}.weight")).chain(layers)
    }

    /// The role of a layer's tensor, by its name in the layer without the final word. `*` stands for an expert's
    /// number. `has` tells whether the layers have tensors of another stem.
    pub fn layer(&self, stem: &str, has: &dyn Fn(&str) -> bool) -> Option<&Role> {
        let mut special = self.layer_if.iter().filter(|(condition, _)| has(condition));
        special.find_map(|(_, roles)| roles.get(stem)).or_else(|| self.layer.get(stem))
    }
}

/// The assumptions for any repository: the usual tensor-parallel roles, and what is quantized.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Generic {
    /// Forms of blocks, the first of which counts.
    #[serde(rename = "block")]
    pub(super) blocks: Vec<BlockForm>,
    /// What is quantized, by names.
    pub(super) quantize: QuantizeRules,
    roles: BTreeMap<String, usize>,
}

impl Generic {
    /// These assumptions.
    pub(super) fn get() -> &'static Self {
        static GENERIC: LazyLock<Generic> = LazyLock::new(|| embedded_table(text("generic")));
        &GENERIC
    }

    /// Axis that tensor parallelism splits in a module that is split by itself, by the last word of its stem.
    pub(super) fn tp(&self, stem: &str) -> Option<usize> {
        self.roles.get(stem.rsplit('.').next().unwrap_or(stem)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_file_loads_and_no_model_type_is_claimed_twice() {
        let mut seen: Vec<String> = Vec::new();
        for family in &*LOADED {
            for expectation in &family.expect {
                for expression in expectation.when.iter().chain(&expectation.experts) {
                    crate::expr::Expr::parse(expression).unwrap();
                }
            }
            for model_type in &family.model_types {
                assert!(!seen.contains(model_type), "{model_type} is claimed twice");
                seen.push(model_type.clone());
            }
        }
        assert!(!Generic::get().blocks.is_empty());
    }

    #[test]
    fn gemma_renames_the_norm_after_attention_only_where_another_stands_before_the_mlp() {
        let family = Family::of_model_type("gemma2").unwrap();
        let short = |has: bool| family.layer("post_attention_layernorm", &|_| has).unwrap().short.clone().unwrap();
        assert_eq!(short(true), "attn_post_norm");
        assert_eq!(short(false), "mlp_norm");
    }
}
