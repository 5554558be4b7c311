//! Which tensors are quantized.

use std::collections::{BTreeMap, BTreeSet};

use ckfs_config::{Pattern, Quantize};
use ckfs_tensor::{DType, Encoder, ExponentRule, MatrixFactor};

use super::super::{
    ViewOptions,
    family::{Family, Generic, QuantizeRules},
    name_group::{NameGroup, fold},
    naming::{is_of_experts, parse, split_suffix},
};

/// What a quantized tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A linear layer of attention.
    Attention,
    /// A linear layer of an MLP that all tokens use.
    Mlp,
    /// One of several experts, or several of them in one tensor.
    Experts,
    /// Another linear layer.
    Other,
}

impl Kind {
    /// Its word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Experts => "experts",
            Self::Other => "other",
        }
    }
}

/// Why a matrix is not quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Left {
    /// It is no linear layer of attention, MLP or experts.
    #[error("no linear layer of attention, MLP or experts")]
    Plain,
    /// `--quantize-ignore` names it, or `--quantize-only` does not.
    #[error("left by --quantize-ignore or --quantize-only")]
    Asked,
    /// Its columns are no multiple of this number.
    #[error("expected columns that are a multiple of {0}")]
    Columns(u64),
    /// Its experts are in one tensor, which the scheme has no form for. A plan with such a tensor is refused: a repository in which most
    /// weights stay as they are is not what was requested.
    #[error("experts in one tensor, which only fp8-block stores")]
    Stacked,
    /// They are experts, for which MLX has one tensor under another name. A plan with them is refused as well.
    #[error("experts, which mlx_lm stores in one tensor switch_mlp")]
    SwitchMlp,
}

/// The tensors of a plan that are quantized, and those that could be and are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// The scheme.
    pub scheme: String,
    /// By kind: number of tensors, and their names.
    pub quantized: Vec<(Kind, u64, Vec<NameGroup>)>,
    /// By reason, likewise.
    pub left: Vec<(Left, u64, Vec<NameGroup>)>,
}

/// Decides which tensors are quantized.
#[derive(Clone, Debug)]
pub(crate) struct WeightChoice<'a> {
    pub(super) scheme: Quantize,
    ignore: &'a [Pattern],
    only: &'a [Pattern],
    family: Option<&'static Family>,
    rules: &'static QuantizeRules,
}

/// Ends of the names of what stands beside experts in one tensor.
const FUSED_BESIDE: [&str; 4] = ["bias", "scale", "scales", "blocks"];

/// The module of a weight. The weight of stacked experts is its own module.
pub(crate) fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// Whether a word of a name has one of these parts.
fn contains(name: &str, parts: &[String]) -> bool {
    name.split('.').any(|word| parts.iter().any(|part| word.contains(part.as_str())))
}

/// Whether the last word of a weight's module is one of these.
fn ends_with_one(name: &str, words: &[String]) -> bool {
    module(name).rsplit('.').next().is_some_and(|last| words.iter().any(|known| known == last))
}

impl<'a> WeightChoice<'a> {
    /// The choice for a model of a family; `None` if nothing is to be quantized.
    pub(crate) fn of(options: &'a ViewOptions, family: Option<&'static Family>) -> Option<Self> {
        let (ignore, only) = (&options.quantize_ignore, &options.quantize_only);
        Some(Self { scheme: options.quantize?, ignore, only, family, rules: &Generic::get().quantize })
    }

    /// How matrices are encoded.
    pub(crate) const fn encoder(&self) -> Encoder {
        match self.scheme {
            Quantize::Fp8Block => Encoder::Fp8Block { power_of_two: false },
            Quantize::Fp8BlockUe8m0 => Encoder::Fp8Block { power_of_two: true },
            Quantize::Fp8Channel => Encoder::Fp8Channel,
            Quantize::Fp8Tensor => Encoder::Fp8Tensor,
            Quantize::Mxfp8 => Encoder::Mxfp8(ExponentRule::Nearest),
            Quantize::Mxfp8Sglang => Encoder::Mxfp8(ExponentRule::Up),
            Quantize::Mxfp4 => Encoder::Mxfp4,
            Quantize::Nvfp4 => Encoder::Nvfp4(MatrixFactor::Divides),
            Quantize::Nvfp4Modelopt => Encoder::Nvfp4(MatrixFactor::Multiplies),
            Quantize::Int8Channel => Encoder::Int8Channel,
            Quantize::Int4(group) => Encoder::Int4 { group },
            Quantize::Mlx(bits, group) => Encoder::Affine { bits, group },
            Quantize::MlxMxfp4 => Encoder::MlxMxfp4,
        }
    }

    /// What a tensor is, if it is quantized; else the reason, if it is a matrix.
    pub(crate) fn decide(&self, name: &str, shape: &[u64], dtype: DType) -> Result<Kind, Option<Left>> {
        let parsed = parse(name);
        let is_stacked = shape.len() == 3;
        let has_experts = || parsed.rest.split('.').any(is_of_experts);
        // Experts in one tensor, or those of a layout that takes them apart.
        let is_fused =
            || has_experts() && split_suffix(name).0 == name && !FUSED_BESIDE.iter().any(|end| name.ends_with(end));
        let is_matrix = match shape.len() {
            2 => name.ends_with(".weight") || is_fused(),
            3 => is_fused() || (name.ends_with(".weight") && has_experts()),
            _ => false,
        };
        if !is_matrix || !dtype.is_float() || shape.contains(&0) {
            return Err(None);
        }
        let rest = split_suffix(&parsed.rest).0;
        let role = self.family.filter(|_| parsed.layer.is_some()).and_then(|family| family.layer(rest, &|_| false));
        let of_experts = parsed.expert.is_some() || is_stacked || (self.is_mlx() && is_fused());
        let is_plain = match role {
            _ if self.is_mlx() => !of_experts && self.is_router(name),
            Some(role) => role.plain,
            None => parsed.layer.is_none() || self.is_plain_by_name(name),
        };
        if is_plain || contains(&parsed.prefix, &self.rules.towers) {
            return Err(Some(Left::Plain));
        }
        let matches = |patterns: &[Pattern]| {
            patterns.iter().any(|pattern| pattern.matches(name) || pattern.matches(module(name)))
        };
        if matches(self.ignore) || !(self.only.is_empty() || matches(self.only)) {
            return Err(Some(Left::Asked));
        }
        if of_experts && self.is_mlx() {
            return Err(Some(Left::SwitchMlp));
        }
        if is_stacked && !matches!(self.encoder(), Encoder::Fp8Block { .. }) {
            return Err(Some(Left::Stacked));
        }
        let multiple = self.encoder().columns_multiple();
        if shape.last().is_some_and(|columns| !columns.is_multiple_of(multiple)) {
            return Err(Some(Left::Columns(multiple)));
        }
        Ok(self.kind(&parsed.rest, of_experts))
    }

    /// Whether weights are stored as `mlx_lm` does, which quantizes every linear layer and embedding.
    pub(crate) const fn is_mlx(&self) -> bool {
        matches!(self.scheme, Quantize::Mlx(..) | Quantize::MlxMxfp4)
    }

    /// Whether a module chooses among experts. `mlx_lm` leaves some of these as they are, and gives others bits of their own.
    fn is_router(&self, name: &str) -> bool {
        module(name).split('.').any(|word| word == "router") || ends_with_one(name, &self.rules.routers)
    }

    /// Whether converters leave a matrix of this name as it is.
    fn is_plain_by_name(&self, name: &str) -> bool {
        contains(module(name), &self.rules.plain_words) || ends_with_one(name, &self.rules.plain_modules)
    }

    fn kind(&self, rest: &str, of_experts: bool) -> Kind {
        if of_experts {
            return Kind::Experts;
        }
        let mut by_words = [(&self.rules.attention, Kind::Attention), (&self.rules.mlp, Kind::Mlp)].into_iter();
        by_words.find(|(words, _)| contains(rest, words)).map_or(Kind::Other, |(_, kind)| kind)
    }

    /// The names of the weights that engines fuse with this one, itself among them.
    pub(crate) fn together(&self, name: &str) -> Vec<String> {
        let (module, suffix) = (module(name), if name.ends_with(".weight") { ".weight" } else { "" });
        let (parent, last) = module.split_at(module.rfind('.').map_or(0, |dot| dot + 1));
        let group = self.rules.together.iter().find(|group| group.iter().any(|word| word == last));
        let Some(group) = group else { return vec![name.to_owned()] };
        group.iter().map(|word| format!("{parent}{word}{suffix}")).collect()
    }
}

/// What was found of the tensors of a plan.
#[derive(Debug, Default)]
pub(super) struct ChosenSoFar {
    pub(super) quantized: BTreeMap<String, Kind>,
    pub(super) left: BTreeMap<String, Left>,
    /// The columns of tensors that are left for theirs.
    pub(super) columns: BTreeSet<u64>,
}

impl ChosenSoFar {
    /// The tensors that are left for a reason.
    pub(super) fn left_for(&self, reason: Left) -> Vec<NameGroup> {
        fold(self.left.iter().filter(|(_, left)| **left == reason).map(|(name, _)| name.as_str()), &[])
    }

    /// As a plan shows them.
    pub(super) fn chosen(&self, scheme: Quantize) -> Chosen {
        fn by<K: Copy + Ord>(found: &BTreeMap<String, K>) -> Vec<(K, u64, Vec<NameGroup>)> {
            let mut keys: BTreeMap<K, Vec<&str>> = BTreeMap::new();
            for (name, key) in found {
                keys.entry(*key).or_default().push(name);
            }
            let row = |(key, names): (K, Vec<&str>)| (key, names.len() as u64, fold(names, &[]));
            keys.into_iter().map(row).collect()
        }
        Chosen { scheme: scheme.word(), quantized: by(&self.quantized), left: by(&self.left) }
    }
}
