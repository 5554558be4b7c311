//! Per-module quantization settings from compressed-tensors, `ModelOpt`, FBGEMM and fp8 configurations.
//!
//! compressed-tensors gives modules to `config_groups` by `targets`, and takes others out by `ignore`. An entry is a name, a regular
//! expression after `re:` that is matched from the start of the name, or the name of a class. `ignore` wins; then come names, then
//! expressions, the first in alphabetical order, then classes, whatever the order of the groups. Classes are not known here:
//! a module whose codes are stored belongs to the group of the class `Linear`, or to the only group that targets a class; one of an
//! embedding's usual name to that of the class `Embedding`, where there is one.
//!
//! transformers names modules that stay unquantized in `modules_to_not_convert`.
//!
//! `ModelOpt` has one algorithm for all modules but `exclude_modules` (with `*` and `?`), or one for each of `quantized_layers`.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
};

use regex::{Regex, RegexSet};
use serde_json::Value as Json;

use super::{
    listed::{Exceptions, text},
    stored::{Stored, last_word},
};
use crate::PythonRegex;

/// What the configuration says of a module's weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ModuleQuantization {
    /// It is not quantized.
    Plain,
    /// Integers packed into words of 32 bits.
    Packed {
        /// Bits of one.
        bits: u64,
        /// Whether there are no zero points.
        symmetric: bool,
        /// What shares a scale.
        sharing: Sharing,
        /// Whether a tensor says which columns are of a group.
        has_order: bool,
    },
    /// 8-bit floats with scales.
    Fp8(Sharing),
    /// 4-bit floats with an 8-bit float for 16, and one factor.
    Nvfp4(Factor),
    /// 4-bit floats with an exponent for 32.
    Mxfp4,
    /// 8-bit floats with an exponent for 32.
    Mxfp8,
    /// In a way that is not decoded, which has this name.
    Unknown(String),
}

impl ModuleQuantization {
    /// Whether it is codes that are decoded.
    pub(super) const fn is_quantized(&self) -> bool {
        !matches!(self, Self::Plain | Self::Unknown(_))
    }
}

/// What shares one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Sharing {
    /// All elements of a matrix.
    Tensor,
    /// A row of `[out, in]`.
    Channel,
    /// That many neighbours of a row.
    Group(u64),
    /// A block of rows and columns.
    Block(u64, u64),
}

/// How the factor of an NVFP4 matrix acts on its scales. Both come before the product with the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Factor {
    /// Scales are divided by `weight_global_scale`.
    Divides,
    /// Scales are multiplied by `weight_scale_2`.
    Multiplies,
}

impl Sharing {
    /// Rows and columns with one scale, in a matrix of these.
    pub(super) fn block(self, (rows, columns): (u64, u64)) -> (u64, u64) {
        let block = match self {
            Self::Tensor => (rows, columns),
            Self::Channel => (1, columns),
            Self::Group(size) => (1, size),
            Self::Block(rows, columns) => (rows, columns),
        };
        // Matrices may be empty, blocks not.
        (block.0.max(1), block.1.max(1))
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor => f.write_str("a scale per tensor"),
            Self::Channel => f.write_str("a scale per channel"),
            Self::Group(size) => write!(f, "a scale for {size}"),
            Self::Block(rows, columns) => write!(f, "a scale for {rows}x{columns}"),
        }
    }
}

/// A library that quantizes, as the configuration names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Library {
    /// compressed-tensors.
    CompressedTensors,
    /// The fp8 of DeepSeek and transformers.
    Transformers,
    /// FBGEMM.
    Fbgemm,
    /// `ModelOpt`.
    ModelOpt,
}

/// The configuration of quantization.
#[derive(Debug)]
pub(super) enum QuantizationConfig<'a> {
    /// Names none of these libraries.
    Other,
    CompressedTensors(ConfigGroups<'a>),
    /// 8-bit floats of this library, with a scale for each of these. Blocks have schemes of their own.
    Fp8(Exceptions<'a>, Library, Sharing),
    ModelOpt(ModelOpt<'a>),
    /// All that is stored quantized is so in a way of this name.
    Unknown(String),
}

impl<'a> QuantizationConfig<'a> {
    pub(super) fn read(stored: &Stored<'a>) -> Self {
        let config = stored.config;
        let named = config.and_then(|config| text(config, "quant_method"));
        let groups = config.filter(|config| config.get("config_groups").is_some());
        let exceptions = || Exceptions::of(config.unwrap_or(&Json::Null), "modules_to_not_convert");
        match (named, stored.modelopt) {
            (None | Some("modelopt"), Some(_)) | (Some("modelopt"), None) => ModelOpt::read(config, stored.modelopt),
            (Some(other), Some(file)) if quantization(file).is_some_and(|of| of.get("quant_algo").is_some()) => {
                Self::Unknown(format!("{other} by config.json, ModelOpt by hf_quant_config.json"))
            }
            (Some("compressed-tensors"), _) => config.map_or(Self::Other, ConfigGroups::read),
            (None, None) => groups.map_or(Self::Other, ConfigGroups::read),
            // sglang names blocks of 1 x 32 so.
            (Some("fp8" | "mxfp8"), _) => Self::Fp8(exceptions(), Library::Transformers, Sharing::Tensor),
            (Some("fbgemm_fp8"), _) => Self::Fp8(exceptions(), Library::Fbgemm, Sharing::Channel),
            (Some(_), _) => Self::Other,
        }
    }

    /// What the configuration says of the weight of this module.
    pub(super) fn of(&self, module: &str) -> ModuleQuantization {
        match self {
            Self::Other => ModuleQuantization::Plain,
            Self::CompressedTensors(groups) => groups.of(module),
            Self::Fp8(exceptions, ..) if exceptions.has(module) => ModuleQuantization::Plain,
            Self::Fp8(_, _, sharing) => ModuleQuantization::Fp8(*sharing),
            Self::ModelOpt(modelopt) => modelopt.of(module),
            Self::Unknown(name) => ModuleQuantization::Unknown(name.clone()),
        }
    }

    /// Whether the configuration names this module among those that are not quantized.
    pub(super) fn takes_out(&self, module: &str) -> bool {
        match self {
            Self::CompressedTensors(groups) => groups.broken.is_none() && groups.ignored.has(module),
            Self::Fp8(exceptions, ..) => exceptions.has(module),
            Self::ModelOpt(modelopt) => modelopt.is_excluded(module),
            Self::Other | Self::Unknown(_) => false,
        }
    }

    /// Whether the configuration may say this of some module. Expressions are matched against many thousands of names: a
    /// scheme that config.json does not mention need not ask.
    pub(super) fn may_say(&self, told: &ModuleQuantization) -> bool {
        match self {
            Self::Other | Self::Unknown(_) => false,
            Self::CompressedTensors(groups) => groups.told.contains(told),
            Self::Fp8(_, _, sharing) => *told == ModuleQuantization::Fp8(*sharing),
            Self::ModelOpt(modelopt) => {
                modelopt.all == *told || modelopt.layers.iter().any(|layers| layers.values().any(|of| of == told))
            }
        }
    }

    /// A target of the configuration that differs from the general one and matches no module.
    pub(super) fn homeless(&self, stored: &Stored<'_>) -> Option<&str> {
        let Self::CompressedTensors(groups) = self else { return None };
        let mut modules = stored.iter().filter_map(|(_, info)| Some(info.name.rsplit_once('.')?.0));
        groups.homeless(&mut modules)
    }

    /// Whether the configuration names one of the libraries that this file knows.
    pub(super) const fn is_known(&self) -> bool {
        !matches!(self, Self::Other)
    }

    /// The library that wrote the repository, if its configuration says so.
    pub(super) const fn library(&self) -> Option<Library> {
        match self {
            Self::CompressedTensors(_) => Some(Library::CompressedTensors),
            Self::Fp8(_, library, _) => Some(*library),
            Self::ModelOpt(_) => Some(Library::ModelOpt),
            Self::Other | Self::Unknown(_) => None,
        }
    }
}

fn texts<'a>(of: &'a Json, key: &str) -> impl Iterator<Item = &'a str> {
    of.get(key).and_then(Json::as_array).into_iter().flatten().filter_map(Json::as_str)
}

/// Groups of compressed-tensors.
#[derive(Debug)]
pub(super) struct ConfigGroups<'a> {
    /// By number of group.
    told: Vec<ModuleQuantization>,
    ignored: Ignored<'a>,
    targets: Names<'a>,
    /// The group of modules that no name and no expression targets.
    class: Option<usize>,
    /// That of embeddings among them, where their class is targeted.
    embedding: Option<usize>,
    /// An expression that cannot be matched here.
    broken: Option<String>,
    /// What names single modules, and expressions, with the group.
    own: Vec<(&'a str, usize)>,
}

/// Last words of the names of modules that are embeddings.
const EMBEDDINGS: [&str; 6] = ["embed_tokens", "embed", "wte", "word_embeddings", "tok_embeddings", "embeddings"];

/// Names and expressions of modules that are not quantized.
#[derive(Debug)]
struct Ignored<'a> {
    exact: HashSet<&'a str>,
    patterns: RegexSet,
    /// Expressions that look around, which no set holds.
    others: Vec<PythonRegex>,
}

impl<'a> Ignored<'a> {
    /// The entries that are given, and one that is an expression that cannot be matched here.
    fn of(entries: impl Iterator<Item = &'a str>) -> (Self, Option<String>) {
        let (mut exact, mut patterns, mut others, mut broken) = (HashSet::new(), Vec::new(), Vec::new(), None);
        for entry in entries {
            let Some(pattern) = entry.strip_prefix("re:") else {
                exact.insert(entry);
                continue;
            };
            let anchored = anchored(pattern);
            if Regex::new(&anchored).is_ok() {
                patterns.push(anchored);
            } else if let Some(regex) = PythonRegex::matching(pattern) {
                others.push(regex);
            } else {
                broken = Some(entry.to_owned());
            }
        }
        let patterns = RegexSet::new(patterns).unwrap_or_else(|_| {
            broken = Some("ignore".to_owned());
            RegexSet::empty()
        });
        (Self { exact, patterns, others }, broken)
    }

    fn has(&self, module: &str) -> bool {
        self.exact.contains(module)
            || self.patterns.is_match(module)
            || self.others.iter().any(|regex| regex.matches(module) == Some(true))
    }
}

/// An expression that is matched as `re.match` does: from the start, not to the end.
fn anchored(pattern: &str) -> String {
    format!("^(?:{pattern})")
}

/// Names and expressions of modules, with the number of their group.
#[derive(Debug, Default)]
struct Names<'a> {
    exact: HashMap<&'a str, usize>,
    /// By their text.
    patterns: BTreeMap<&'a str, (PythonRegex, usize)>,
}

impl<'a> Names<'a> {
    /// Adds an entry, or gives it back where it is an expression that cannot be matched here.
    fn add(&mut self, entry: &'a str, to: usize) -> Result<(), &'a str> {
        let Some(pattern) = entry.strip_prefix("re:") else {
            self.exact.entry(entry).or_insert(to);
            return Ok(());
        };
        let regex = PythonRegex::matching(pattern).ok_or(entry)?;
        self.patterns.entry(pattern).or_insert((regex, to));
        Ok(())
    }

    fn find(&self, module: &str) -> Option<usize> {
        let matching = || self.patterns.values().find(|(regex, _)| regex.matches(module) == Some(true));
        self.exact.get(module).copied().or_else(|| matching().map(|(_, to)| *to))
    }
}

impl<'a> ConfigGroups<'a> {
    fn read(config: &'a Json) -> QuantizationConfig<'a> {
        if let Some(sparse) = config.get("sparsity_config").and_then(|sparsity| text(sparsity, "format"))
            && sparse != "dense"
        {
            return QuantizationConfig::Unknown(format!("compressed-tensors {sparse}"));
        }
        let global = text(config, "format").unwrap_or("without a format");
        let (ignored, broken) = Ignored::of(texts(config, "ignore"));
        let (told, targets) = (Vec::new(), Names::default());
        let mut groups = Self { told, ignored, targets, class: None, embedding: None, broken, own: Vec::new() };
        let mut classes = Vec::new();
        for group in
            config.get("config_groups").and_then(Json::as_object).into_iter().flat_map(|groups| groups.values())
        {
            let number = groups.told.len();
            groups.told.push(told_by_group(group, global));
            for target in texts(group, "targets") {
                groups.broken = groups.targets.add(target, number).err().map(str::to_owned).or(groups.broken);
                if target.starts_with(|first: char| first.is_ascii_uppercase()) && !target.contains('.') {
                    classes.push((target, number));
                } else {
                    groups.own.push((target, number));
                }
            }
        }
        let of_class = |wanted: &str| classes.iter().find(|(class, _)| *class == wanted);
        let only = || if classes.len() == 1 { classes.first() } else { None };
        groups.class = of_class("Linear").or_else(only).map(|(_, group)| *group);
        groups.embedding = of_class("Embedding").map(|(_, group)| *group);
        QuantizationConfig::CompressedTensors(groups)
    }

    /// The target that matches no module, of a group that is not that of modules without a target of their own.
    fn homeless(&self, modules: &mut dyn Iterator<Item = &str>) -> Option<&'a str> {
        // Without a class for the others, modules under another name are codes that config.json does not mention.
        let usual = &self.told[self.class?];
        let own = self.own.iter().filter(|(_, group)| self.told[*group] != *usual).map(|(target, _)| *target);
        let mut open: Vec<_> =
            own.map(|target| (target, target.strip_prefix("re:").and_then(PythonRegex::matching))).collect();
        for module in modules {
            if open.is_empty() {
                break;
            }
            open.retain(|(target, regex)| {
                *target != module && regex.as_ref().is_none_or(|regex| regex.matches(module) != Some(true))
            });
        }
        open.first().map(|(target, _)| *target)
    }

    fn of(&self, module: &str) -> ModuleQuantization {
        if let Some(pattern) = &self.broken {
            return ModuleQuantization::Unknown(format!(
                "compressed-tensors with {pattern:?}, an expression that is not matched here"
            ));
        }
        if self.ignored.has(module) {
            return ModuleQuantization::Plain;
        }
        let class = self.embedding.filter(|_| EMBEDDINGS.contains(&last_word(module))).or(self.class);
        let group = self.targets.find(module).or(class);
        group.map_or(ModuleQuantization::Plain, |group| self.told[group].clone())
    }
}

/// What a group says of the weights of its modules.
fn told_by_group(group: &Json, global: &str) -> ModuleQuantization {
    let format = text(group, "format").unwrap_or(global);
    let Some(weights) = group.get("weights").filter(|weights| weights.is_object()) else {
        return ModuleQuantization::Plain;
    };
    let bits = weights.get("num_bits").and_then(Json::as_u64);
    let kind = text(weights, "type").unwrap_or("int");
    let named = |what: String| ModuleQuantization::Unknown(format!("compressed-tensors {format} {what}"));
    let sharing = match sharing(weights) {
        Ok(sharing) => sharing,
        Err(what) => return named(format!("with {what}")),
    };
    // Group by activations: one more tensor holds the columns of a group.
    let has_order = matches!(weights.get("actorder"), Some(Json::String(order)) if order == "group" || order == "dynamic")
        || weights.get("actorder") == Some(&Json::Bool(true));
    if has_order && !(kind == "int" && matches!(sharing, Sharing::Group(_))) {
        return named("with actorder group".to_owned());
    }
    let symmetric = weights.get("symmetric").and_then(Json::as_bool).unwrap_or(true);
    match (format, kind, bits) {
        ("pack-quantized", "int", Some(bits @ (1 | 2 | 4 | 8))) if !matches!(sharing, Sharing::Block(..)) => {
            ModuleQuantization::Packed { bits, symmetric, sharing, has_order }
        }
        ("float-quantized" | "naive-quantized", "float", Some(8)) if symmetric => ModuleQuantization::Fp8(sharing),
        ("nvfp4-pack-quantized", "float", Some(4)) if sharing == Sharing::Group(16) => {
            ModuleQuantization::Nvfp4(Factor::Divides)
        }
        ("mxfp4-pack-quantized", "float", Some(4)) if sharing == Sharing::Group(32) => ModuleQuantization::Mxfp4,
        ("mxfp8-quantized", "float", Some(8)) if sharing == Sharing::Group(32) => ModuleQuantization::Mxfp8,
        _ => {
            let bits = bits.map_or_else(|| "an unknown number of".to_owned(), |bits| bits.to_string());
            let zero_points = if symmetric { "" } else { ", with zero points" };
            named(format!("of {bits} bits, {kind}, {sharing}{zero_points}"))
        }
    }
}

/// What shares a scale, or what is there instead.
fn sharing(weights: &Json) -> Result<Sharing, String> {
    let size = weights.get("group_size").filter(|size| !size.is_null());
    let default = match size.and_then(Json::as_i64) {
        None => "tensor",
        Some(-1) => "channel",
        Some(_) => "group",
    };
    match text(weights, "strategy").unwrap_or(default) {
        "tensor" => Ok(Sharing::Tensor),
        "channel" => Ok(Sharing::Channel),
        "group" | "tensor_group" => {
            let size = size.ok_or_else(|| "no group_size".to_owned())?;
            let positive = size.as_u64().filter(|size| *size > 0);
            positive.map(Sharing::Group).ok_or_else(|| format!("a group_size of {size}"))
        }
        "block" => {
            let structure = weights.get("block_structure").unwrap_or(&Json::Null);
            let (rows, columns) = block(structure).ok_or_else(|| format!("a block_structure of {structure}"))?;
            Ok(Sharing::Block(rows, columns))
        }
        other => Err(format!("strategy {other:?}")),
    }
}

/// Rows and columns of a block, `[128, 128]` or `"128x128"`.
pub(super) fn block(value: &Json) -> Option<(u64, u64)> {
    let sizes: Option<Vec<u64>> = match value {
        Json::Array(sizes) => sizes.iter().map(Json::as_u64).collect(),
        Json::String(sizes) => sizes.split('x').map(|size| size.parse().ok()).collect(),
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::Object(_) => None,
    };
    match sizes?.as_slice() {
        [rows, columns] if *rows > 0 && *columns > 0 => Some((*rows, *columns)),
        _ => None,
    }
}

/// `ModelOpt`'s configuration.
#[derive(Debug)]
pub(super) struct ModelOpt<'a> {
    /// That of all modules, unless each has its own.
    all: ModuleQuantization,
    layers: Option<HashMap<&'a str, ModuleQuantization>>,
    excluded: Vec<Regex>,
}

/// The member of `hf_quant_config.json` that counts.
fn quantization(file: &Json) -> Option<&Json> {
    file.get("quantization").filter(|of| of.is_object())
}

impl<'a> ModelOpt<'a> {
    /// `config` and `file` are what `config.json` and `hf_quant_config.json` say. Where both name an algorithm, it is the same.
    fn read(config: Option<&'a Json>, file: Option<&'a Json>) -> QuantizationConfig<'a> {
        let both: Vec<&Json> = file.and_then(quantization).into_iter().chain(config).collect();
        let mut algorithms = both.iter().filter_map(|of| text(of, "quant_algo"));
        let Some(algorithm) = algorithms.next() else {
            // Only caches are quantized.
            let is_null = both.iter().any(|of| of.get("quant_algo").is_some_and(Json::is_null));
            let nothing = Self { all: ModuleQuantization::Plain, layers: None, excluded: Vec::new() };
            let unknown = || QuantizationConfig::Unknown("ModelOpt without quant_algo".to_owned());
            return if is_null { QuantizationConfig::ModelOpt(nothing) } else { unknown() };
        };
        if let Some(other) = algorithms.find(|other| *other != algorithm) {
            return QuantizationConfig::Unknown(format!(
                "ModelOpt {algorithm} by hf_quant_config.json, {other} by config.json"
            ));
        }
        let excluded = both.iter().flat_map(|of| texts(of, "exclude_modules").chain(texts(of, "ignore")));
        let excluded = excluded.filter_map(|pattern| Regex::new(&wildcards(pattern)).ok()).collect();
        if algorithm != "MIXED_PRECISION" {
            let all = both.iter().find_map(|of| of.get("group_size"));
            return QuantizationConfig::ModelOpt(Self {
                all: told_by_algorithm(algorithm, all),
                layers: None,
                excluded,
            });
        }
        let layers = both.iter().find_map(|of| of.get("quantized_layers").and_then(Json::as_object));
        let layers = layers.into_iter().flatten().map(|(module, of)| {
            let told = text(of, "quant_algo").map(|algorithm| told_by_algorithm(algorithm, of.get("group_size")));
            (module.as_str(), told.unwrap_or(ModuleQuantization::Plain))
        });
        let all = ModuleQuantization::Plain;
        QuantizationConfig::ModelOpt(Self { all, layers: Some(layers.collect()), excluded })
    }

    fn is_excluded(&self, module: &str) -> bool {
        self.excluded.iter().any(|pattern| pattern.is_match(module))
    }

    fn of(&self, module: &str) -> ModuleQuantization {
        if self.is_excluded(module) {
            return ModuleQuantization::Plain;
        }
        let of_layer = self.layers.as_ref().and_then(|layers| layers.get(module));
        of_layer.unwrap_or(&self.all).clone()
    }
}

fn told_by_algorithm(algorithm: &str, size: Option<&Json>) -> ModuleQuantization {
    let size = size.filter(|size| !size.is_null()).map(|size| size.as_u64().unwrap_or(0));
    match (algorithm, size) {
        ("FP8", _) => ModuleQuantization::Fp8(Sharing::Tensor),
        // They differ in activations only.
        ("NVFP4" | "W4A16_NVFP4", None | Some(16)) => ModuleQuantization::Nvfp4(Factor::Multiplies),
        ("MXFP8", None | Some(32)) => ModuleQuantization::Mxfp8,
        ("NVFP4" | "W4A16_NVFP4" | "MXFP8", Some(size)) => {
            ModuleQuantization::Unknown(format!("ModelOpt {algorithm} in groups of {size}"))
        }
        _ => ModuleQuantization::Unknown(format!("ModelOpt {algorithm}")),
    }
}

/// An expression for a name in which `*` stands for any characters and `?` for one.
fn wildcards(pattern: &str) -> String {
    let mut expression = String::from("^");
    for character in pattern.chars() {
        match character {
            '*' => expression.push_str(".*"),
            '?' => expression.push('.'),
            _ => expression.push_str(&regex::escape(&character.to_string())),
        }
    }
    expression.push('$');
    expression
}
