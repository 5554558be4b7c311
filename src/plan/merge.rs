//! A LoRA adapter merged into a checkpoint: which tensors it changes, by how much, and whether that can be done.
//!
//! The adapter is one of PEFT. Each pair of its matrices belongs to a module, whose weight becomes `W + factor * (B @ A)`, and each
//! other tensor replaces one of the checkpoint. All layouts then see the merged tensors.
//!
//! What it deliberately does not do: guess. An adapter that PEFT would merge by another formula, or that was trained on a base whose
//! weights PEFT had changed first, is refused, and so is a tensor that belongs to nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ckfs_checkpoint::{Checkpoint, Merge, Merges, ScaledProduct, Storage, TensorInfo, human_bytes};
use ckfs_config::MergedLora;
use ckfs_tensor::{DType, TensorId, View};
use serde_json::Value;

use super::{
    ViewOptions,
    family::Family,
    inverse,
    lora::{self, Lora, OF_EMBEDDING, OF_LINEAR, PREFIX, by_pattern, is_unset, matrix, unsaved_modules},
    name_group::{NameGroup, fold},
    naming,
    peft::{self, AdapterTensors},
    problem::{PlanError, Problem},
    select::{self, Subset},
};

/// Members of the configuration that are read, or say nothing of how the adapter is merged.
const KNOWN: [&str; 29] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "trainable_token_indices",
    "use_rslora",
];

/// Most bytes of the right matrix of a module, `A`. A part of a weight needs columns of it, which lie apart in all of its rows: on a
/// source that is not mapped each thread has the whole matrix in memory.
const RIGHT_BYTES_MAX: u64 = 256 << 20;

/// Beginnings of adapters that leave the weights of the base as they are.
const INITS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// The checkpoint with the adapter that the user wants merged; `None` if there is none.
///
/// # Errors
/// Everything that keeps the adapter from being merged.
pub(super) fn merged(
    checkpoint: &Checkpoint,
    options: &ViewOptions,
    warnings: &mut Vec<String>,
) -> Result<Option<Checkpoint>, PlanError> {
    let Some(asked) = &options.merge_lora else { return Ok(None) };
    let label = format!("merge-lora {}", asked.path().display());
    let problem = |reason: &str| PlanError::of(&label, vec![reason.to_owned()]);
    if checkpoint.merges().is_some() {
        return Err(problem(
            "expected a checkpoint, found an average: export the average, and merge the adapter into that",
        ));
    }
    if options.lora.is_some() {
        return Err(problem("--lora shows an adapter beside its base and --merge-lora in it: expected one of the two"));
    }
    if let Some(layout) = inverse::layout_of(checkpoint) {
        return Err(problem(&format!(
            "an adapter has the names of the model, and the checkpoint has those of the layout {layout}: mount or export it with \
             --layout hf --config-from, and merge into that"
        )));
    }
    // An adapter has the names of the model, which a rename of the source gives.
    let renames = Subset { source_renames: options.subset.source_renames.clone(), ..Subset::default() };
    let renamed = select::select(checkpoint, &renames, Family::of(checkpoint))?.whole;
    let renamed = renamed.as_ref().unwrap_or(checkpoint);
    let (own, mut moved): (Checkpoint, Option<Checkpoint>);
    let (named, adapter) = match asked {
        MergedLora::Own => {
            let (base, adapter) = peft::own_adapter(renamed, warnings).map_err(|reason| problem(&reason))?;
            own = base;
            (&own, adapter)
        }
        MergedLora::Dir(dir) => {
            moved = None;
            let adapter =
                checkpoint.adapter(dir).ok_or_else(|| problem("the source was opened without this adapter"))?;
            if let Some(name) = peft::base_layer(renamed) {
                return Err(problem(&format!(
                    "the checkpoint is that of a training, which holds an adapter under PEFT's own names ({name}): --merge-lora self \
                     merges it"
                )));
            }
            let tensors: Vec<(TensorId, String)> =
                renamed.of_adapter(adapter).map(|(id, info)| (id, info.name.to_owned())).collect();
            let names: Vec<&str> = renamed.tensors().map(|(_, info)| info.name).collect();
            let moves = lora::moves(&names, &tensors.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>());
            let mut base = renamed;
            if !moves.is_empty() {
                warnings.push(format!("merge-lora: {}", lora::moves_text(&moves)));
                let derived = renamed.derived(None, None, |_, info| Some(lora::moved(info.name, &moves)));
                base = moved.insert(derived.map_err(|reasons| problem(&reasons.join("; ")))?);
            }
            let path = |name: &str| dir.join(name).display().to_string();
            let (file, config_file) = (path("adapter_model.safetensors"), path("adapter_config.json"));
            (base, AdapterTensors { tensors, config: adapter.config.clone(), file, config_file })
        }
    };
    let mut merging =
        Merging { adapter: &adapter, named, options, problems: Vec::new(), warnings, of: BTreeMap::new() };
    merging.all();
    let Merging { problems, of, .. } = merging;
    if !problems.is_empty() {
        return Err(PlanError { problems });
    }
    // The base of an adapter of its own has its names already.
    let base = if *asked == MergedLora::Own { named } else { checkpoint };
    let merging = base.merging(Arc::new(Merges::new(of)));
    merging.map(Some).map_err(|reasons| problem(&reasons.join("; ")))
}

/// Numbers of the configuration.
struct Factors {
    alpha: f64,
    /// The alpha of modules of a pattern; the first pattern counts.
    patterns: Vec<(ckfs_checkpoint::PythonRegex, f64)>,
    by_root: bool,
}

impl Factors {
    fn read(config: &Value) -> Result<Self, String> {
        let alpha = config["lora_alpha"].as_f64();
        let alpha = alpha.ok_or_else(|| format!("lora_alpha: expected a number, found {}", config["lora_alpha"]))?;
        let entries = by_pattern(config, "alpha_pattern")?.into_iter().map(|(pattern, value)| {
            let alpha = value.as_f64().ok_or_else(|| format!("alpha_pattern: expected numbers, found {value}"))?;
            Ok((pattern, alpha))
        });
        let patterns = entries.collect::<Result<_, String>>()?;
        let by_root = &config["use_rslora"];
        let is_bool = || format!("use_rslora: expected true or false, found {by_root}");
        let by_root = !by_root.is_null() && by_root.as_bool().ok_or_else(is_bool)?;
        Ok(Self { alpha, patterns, by_root })
    }

    /// The number that the product of a module's matrices is multiplied by, rounded to f32 as torch does. `None` if it takes too many
    /// steps to decide whether a pattern is of the module.
    #[allow(clippy::cast_possible_truncation, reason = "the nearest f32 is wanted")]
    #[allow(clippy::cast_precision_loss, reason = "no rank has more than 53 bits")]
    fn of(&self, module: &str, rank: u64) -> Option<f32> {
        let mut alpha = self.alpha;
        for (pattern, of_pattern) in &self.patterns {
            if pattern.matches(module)? {
                alpha = *of_pattern;
                break;
            }
        }
        let rank = rank as f64;
        Some((alpha / if self.by_root { rank.sqrt() } else { rank }) as f32)
    }
}

/// Checks that the adapter is merged as `W + factor * (B @ A)` into the base as it is.
fn check_kind(config: &Value) -> Result<(), String> {
    let advice = "merge it with PEFT's merge_and_unload and mount the result";
    for (member, meaning) in [
        ("use_dora", "weights of DoRA are scaled by the norms of their rows"),
        ("lora_bias", "the adapter adds to the biases of the base"),
        ("alora_invocation_tokens", "an activated LoRA works from a token on, which no merged weight does"),
    ] {
        if !is_unset(&config[member]) {
            return Err(format!("{member}: expected none, found {}: {meaning}; {advice}", config[member]));
        }
    }
    let init = &config["init_lora_weights"];
    let leaves_base = match init {
        Value::String(word) => INITS.contains(&word.as_str()),
        Value::Null | Value::Bool(_) => true,
        Value::Number(_) | Value::Array(_) | Value::Object(_) => false,
    };
    if !leaves_base {
        return Err(format!(
            "init_lora_weights: expected true, false or one of {INITS:?}, found {init}: this beginning changes the weights of the \
             base, to which the adapter is relative; save it with path_initial_model_for_weight_conversion, which makes it an \
             adapter of the base as it is, or {advice}"
        ));
    }
    let members = config.as_object().into_iter().flatten();
    let mut unknown = members.filter(|(member, value)| !KNOWN.contains(&member.as_str()) && !is_unset(value));
    unknown.next().map_or(Ok(()), |(member, value)| {
        Err(format!("{member}: expected none, found {value}: nobody knows here how that is merged; {advice}"))
    })
}

struct Merging<'a> {
    adapter: &'a AdapterTensors,
    /// The checkpoint under the names that the model has.
    named: &'a Checkpoint,
    options: &'a ViewOptions,
    problems: Vec<Problem>,
    warnings: &'a mut Vec<String>,
    of: BTreeMap<TensorId, Merge>,
}

/// A tensor as it is stored. `None` if it is stored quantized.
fn stored(id: TensorId, info: &TensorInfo<'_>) -> Option<View> {
    let is_made = matches!(info.storage, Storage::Quantized(_) | Storage::Composed(_));
    info.stored_view(id).ok().filter(|_| !is_made)
}

/// The name in the checkpoint of what a tensor of an adapter replaces.
fn replaced_name(name: &str) -> Option<String> {
    Some(name.strip_prefix(PREFIX)?.replace(".base_layer.", ".").replace(".modules_to_save.", "."))
}

fn is_loadable(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16 | DType::F32)
}

impl Merging<'_> {
    fn problem(&mut self, tensor: &str, reason: &str) {
        let file = self.adapter.file.clone();
        self.problems.push(Problem::File { file, reason: format!("{tensor}: {reason}") });
    }

    /// Decides on all tensors of the adapter.
    fn all(&mut self) {
        let (adapter, named) = (self.adapter, self.named);
        let config = &adapter.config;
        let mut modules: BTreeMap<&str, BTreeMap<&str, TensorId>> = BTreeMap::new();
        let mut others = Vec::new();
        for (id, name) in &adapter.tensors {
            match matrix(name) {
                Some((module, matrix)) => {
                    modules.entry(module).or_default().insert(matrix, *id);
                }
                None => others.push((*id, name.as_str())),
            }
        }
        // Here the matrices are compared when they are added.
        let stored = modules.keys().map(|module| ((*module).to_owned(), BTreeMap::new())).collect();
        let read = || Ok((check_kind(config)?, Lora::read(config, stored)?, Factors::read(config)?));
        let (lora, factors) = match read() {
            Ok(((), lora, factors)) => (lora, factors),
            Err(reason) => {
                let file = adapter.config_file.clone();
                self.problems.push(Problem::File { file, reason });
                return;
            }
        };
        let mut unmatched = BTreeSet::new();
        for (id, name) in others {
            if !self.replace(id, name) {
                unmatched.insert(named.tensor(id).name);
            }
        }
        for (module, matrices) in &modules {
            if lora.targets(module) && named.find(&format!("{module}.weight")).is_some() {
                self.add(module, matrices, &lora, &factors);
            } else {
                unmatched.extend(matrices.values().map(|id| named.tensor(*id).name));
            }
        }
        self.refuse_unmatched(unmatched);
        self.refuse_missing(&lora, &modules);
        self.refuse_tied();
        if self.of.is_empty() && self.problems.is_empty() {
            self.problem("the adapter", "expected matrices or tensors for the checkpoint, found none");
        }
    }

    /// Tensors of the adapter that belong to nothing.
    fn refuse_unmatched(&mut self, mut names: BTreeSet<&str>) {
        names.retain(|name| {
            let is_allowed = self.options.allow_unmapped.accepts(name);
            if is_allowed {
                self.warnings
                    .push(format!("merge-lora: {name} belongs to no tensor of the checkpoint, and is not merged"));
            }
            !is_allowed
        });
        let hint = if self.named.quantized().tensors.is_empty() {
            "--source-rename gives the checkpoint the names of the model that was trained"
        } else {
            "the checkpoint is quantized: merge into the model that it was made of, or --source-rename if names differ"
        };
        for group in fold(names, &[]) {
            let reason = format!(
                "expected a module that adapter_config.json targets, with a weight in the checkpoint, found none; {hint}; \
                 --allow-unmapped leaves it out"
            );
            self.problem(&group.to_string(), &reason);
        }
    }

    /// Modules that the configuration targets or saves, and the adapter has not.
    fn refuse_missing(&mut self, lora: &Lora, modules: &BTreeMap<&str, BTreeMap<&str, TensorId>>) {
        let mut missing = Vec::new();
        let stored: BTreeSet<String> =
            self.adapter.tensors.iter().filter_map(|(_, name)| replaced_name(name)).collect();
        let is_unsaved = |name: &&str| lora.saved(name).is_some() && !stored.contains(*name);
        let unsaved = self.named.tensors().map(|(_, info)| info.name).filter(is_unsaved);
        let unsaved = unsaved.map(|name| format!("{PREFIX}{name}"));
        let unsaved = unsaved.filter(|name| !self.options.allow_missing.accepts(name)).collect();
        self.problems.extend(unsaved_modules(&unsaved));
        for (_, info) in self.named.tensors() {
            let Some(module) = info.name.strip_suffix(".weight") else { continue };
            if info.shape.len() == 2 && !modules.contains_key(module) && lora.targets(module) {
                let name = format!("{PREFIX}{module}.{}", OF_LINEAR[0]);
                if !self.options.allow_missing.accepts(&name) {
                    missing.push(name);
                }
            }
        }
        for group in fold(missing.iter().map(String::as_str), &[]) {
            self.problems.push(Problem::missing(group, "the adapter's target_modules"));
        }
    }

    /// Embeddings that are output heads too.
    fn refuse_tied(&mut self) {
        if !self.named.dialect().tied {
            return;
        }
        let embedding = self.named.embedding(&naming::is_tower);
        let is_head = |name: &str| name == "lm_head.weight" || name.ends_with(".lm_head.weight");
        let is_one = |name: &str| is_head(name) || Some(name) == embedding;
        let names: Vec<&str> =
            self.of.keys().map(|id| self.named.tensor(*id).name).filter(|name| is_one(name)).collect();
        for name in names {
            self.problem(
                name,
                "the embedding is the output head too (tie_word_embeddings), and the adapter changes one of them: expected an \
                 adapter of neither; merge it with PEFT, which unties them, and mount the result",
            );
        }
    }

    /// The tensor of the checkpoint of this name, if an adapter can change it; otherwise the problem is noted.
    fn base(&mut self, name: &str) -> Option<(TensorId, View)> {
        let named = self.named;
        let id = named.find(name)?;
        let info = named.tensor(id);
        if let Some(view) = stored(id, &info).filter(|_| is_loadable(info.dtype)) {
            return Some((id, view));
        }
        self.problem(
            name,
            &format!(
                "expected a weight of the checkpoint in BF16, F16 or F32, found {}: quantized weights are not merged; merge into the \
                 model that it was made of, which --quantize then quantizes on read",
                info.dtype
            ),
        );
        None
    }

    /// Notes that a tensor of the adapter replaces one of the checkpoint. Returns false if there is none.
    fn replace(&mut self, id: TensorId, name: &str) -> bool {
        let info = self.named.tensor(id);
        let Some(name) = replaced_name(name) else { return false };
        if self.named.find(&name).is_none() {
            return false;
        }
        let Some(((of, base), new)) = self.base(&name).zip(stored(id, &info)) else { return true };
        if base.shape() != new.shape() || !is_loadable(new.dtype()) {
            let reason = format!(
                "expected {} as {name} of the checkpoint has, in BF16, F16 or F32, found {} {}: a vocabulary of another size is not \
                 merged; merge it with PEFT and mount the result",
                base.shape(),
                new.dtype(),
                new.shape()
            );
            self.problem(info.name, &reason);
            return true;
        }
        self.of.entry(of).or_default().replaced_by = Some(new);
        true
    }

    /// Notes that the product of a module's matrices is added to its weight.
    fn add(&mut self, module: &str, matrices: &BTreeMap<&str, TensorId>, lora: &Lora, factors: &Factors) {
        let named = self.named;
        let is_embedding = matrices.keys().any(|matrix| OF_EMBEDDING.contains(matrix));
        let wanted = if is_embedding { OF_EMBEDDING } else { OF_LINEAR };
        for (matrix, id) in matrices.iter().filter(|(matrix, _)| !wanted.contains(*matrix)) {
            let reason = format!("expected the matrices {} and {} alone, found {matrix}", wanted[0], wanted[1]);
            self.problem(named.tensor(*id).name, &reason);
        }
        let [Some(right), Some(left)] = wanted.map(|matrix| matrices.get(matrix).copied()) else {
            for matrix in wanted.iter().filter(|matrix| !matrices.contains_key(*matrix)) {
                let group = NameGroup::one(format!("{PREFIX}{module}.{matrix}"));
                self.problems.push(Problem::missing(group, format!("the targeted module {module}")));
            }
            return;
        };
        let Some((id, base)) = self.base(&format!("{module}.weight")) else { return };
        let Some(rank) = lora.rank_of(module) else {
            return self.problem(module, "expected its rank in adapter_config.json (r, rank_pattern), found none");
        };
        let is_transposed = lora.is_transposed != is_embedding;
        let [rows, columns] = base.shape().extents() else {
            let reason = format!(
                "expected a matrix, found {module}.weight {}: only products of matrices are merged",
                base.shape()
            );
            return self.problem(named.tensor(left).name, &reason);
        };
        let (out, inner) = if is_transposed { (*columns, *rows) } else { (*rows, *columns) };
        let mut factor = |id: TensorId, expected: [u64; 2]| {
            let info = named.tensor(id);
            if info.shape == expected && is_loadable(info.dtype) {
                return stored(id, &info);
            }
            let reason = format!(
                "expected {expected:?} in BF16, F16 or F32 (rank {rank}, {module}.weight is {}, fan_in_fan_out {}), found {} {:?}: is it \
                 an adapter of this checkpoint?",
                base.shape(),
                lora.is_transposed,
                info.dtype,
                info.shape
            );
            self.problem(info.name, &reason);
            None
        };
        let of_right = named.tensor(right).name;
        let (left, right) = (factor(left, [out, rank]), factor(right, [rank, inner]));
        let Some((left, right)) = left.zip(right) else { return };
        let right_bytes = right.dtype().bytes_of(right.shape().elements()).unwrap_or(u64::MAX);
        if right_bytes > RIGHT_BYTES_MAX {
            let reason = format!(
                "expected at most {}, which each thread may hold in memory, found {} ({} {}): merge it with PEFT and mount the result",
                human_bytes(RIGHT_BYTES_MAX),
                human_bytes(right_bytes),
                right.dtype(),
                right.shape()
            );
            return self.problem(of_right, &reason);
        }
        let Some(factor) = factors.of(module, rank) else {
            return self.problem(
                module,
                "expected an alpha_pattern that a name can be compared with, found one of too many steps",
            );
        };
        if !factor.is_finite() || rank == 0 {
            return self.problem(module, &format!("expected a finite scale, found {factor} at rank {rank}"));
        }
        self.of.entry(id).or_default().added = Some(ScaledProduct { left, right, factor, is_transposed });
    }
}
