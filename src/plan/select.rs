//! Parts of a checkpoint: some of its tensors or layers, under their own names or others.
//!
//! A selection comes before any layout. Layouts see a checkpoint with the selected tensors only, and a `config.json`
//! that describes it. That configuration also serves `hf/`, if it can describe the part. A part that no configuration
//! describes has no `hf/`, and the reason is kept.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ckfs_checkpoint::{Checkpoint, TensorInfo, first_names};
use ckfs_config::{ModelPart, value::Choice as _};
use ckfs_tensor::TensorId;
use serde_json::{Map, Value, json};

use super::{
    LayerRanges,
    family::Family,
    layer_lists::KeptLayers,
    member,
    name_group::{NameGroup, fold},
    naming,
    parsed::{NameKind, ParsedName, ParsedNames},
    pattern::Pattern,
    problem::PlanError,
    rename::{self, Rename},
    text_model::{self, QUANTIZATION, TextModel},
};

/// The selected tensors of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Subset {
    /// Renames of the repository's names, before every other step.
    pub source_renames: Vec<Rename>,
    /// If not empty, only tensors that match one of them.
    pub include: Vec<Pattern>,
    /// Tensors that match none of these.
    pub exclude: Vec<Pattern>,
    /// Layers of the text model.
    pub layers: Option<LayerRanges>,
    /// Whether the remaining layers are numbered from 0.
    pub renumber: bool,
    /// Without layers of multi-token prediction.
    pub no_mtp: bool,
    /// Without towers for images and sound.
    pub text_only: bool,
    /// The part of the model that is shown alone.
    pub part: Option<ModelPart>,
}

impl Subset {
    /// Whether a missing tensor would be shown if it were present.
    pub(super) fn wants(&self, name: &str) -> bool {
        let layer = naming::layer_of(name).map(|(_, layer)| layer);
        let layers = self.layers.as_ref().zip(layer);
        is_accepted(&self.include, &self.exclude, name) && layers.is_none_or(|(layers, layer)| layers.contains(layer))
    }
}

/// Whether a name matches a pattern of `include`, if there is one, and none of `exclude`.
pub(super) fn is_accepted(include: &[Pattern], exclude: &[Pattern], name: &str) -> bool {
    let any = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
    (include.is_empty() || any(include)) && !any(exclude)
}

/// The result of a selection.
#[derive(Default)]
pub(super) struct Selected {
    /// The whole checkpoint under the names that source renames give. `None` without renames.
    pub(super) whole: Option<Checkpoint>,
    /// The selected part; `None` if it is the whole.
    pub(super) part: Option<Checkpoint>,
    /// The reason why there is no `hf/`, if there is none.
    pub(super) no_hf: Option<String>,
    /// The text model that `hf/` holds alone. `None` if `hf/` holds the model of the repository.
    pub(super) text: Option<TextModel>,
    /// The reason why no model by itself is the selected text model, if there is one.
    pub(super) no_text: Option<String>,
    /// Patterns over names in the mount: if not empty, only tensors that match one of them.
    pub(super) target_include: Vec<Pattern>,
    /// Patterns over names in the mount: not the tensors that match one of them.
    pub(super) target_exclude: Vec<Pattern>,
}

impl Selected {
    /// Names of the repository that are not selected.
    pub(super) fn left_out(&self, original: &Checkpoint) -> Vec<NameGroup> {
        let Some(part) = &self.part else { return Vec::new() };
        let kept: BTreeSet<TensorId> = part.tensors().map(|(id, _)| id).collect();
        let names = original.tensors().filter(|(id, _)| !kept.contains(id)).map(|(_, info)| info.name);
        fold(names, &[])
    }
}

/// Whether a name belongs to a predictor of further tokens beside the layers.
pub(super) fn is_predictor(name: &str) -> bool {
    name.split('.').take(3).any(|word| PREDICTORS.contains(&word))
}

/// Words in the names of predictors of further tokens.
const PREDICTORS: [&str; 3] = ["mtp", "nextn", "mtp_layers"];

/// Modules that predictors of further tokens share with the model, unless they have their own.
const SHARED: [&str; 2] = ["embed_tokens", "lm_head"];

fn is_shared(name: &str) -> bool {
    name.rsplit('.').nth(1).is_some_and(|word| SHARED.contains(&word))
}

/// Modules that speak: no encoders, though beside the text model.
const SPEAKERS: [&str; 2] = ["talker", "token2wav"];

/// Whether a name is of what sees or hears, or of what is between that and the text model, whose names begin with `text`.
fn is_encoder(name: &str, text: Option<&str>) -> bool {
    let is_beside = || text.is_some_and(|text| !text.is_empty() && !name.starts_with(text)) && !is_shared(name);
    !name.split('.').next().is_some_and(|word| SPEAKERS.contains(&word)) && (naming::is_tower(name) || is_beside())
}

/// The group of a name: `visual.*`, `mtp.*`, or some layers, as in `model.layers.{4-7}.*`; or else the name itself.
/// Numbers may be folded.
pub(super) fn root(name: &str) -> String {
    let is_number = |word: &str| word.starts_with(|c: char| c == '{' || c.is_ascii_digit());
    let mut end = 0;
    for (at, word) in name.split('.').enumerate() {
        end += word.len() + usize::from(at > 0);
        let is_part = at < 3 && (naming::TOWERS.contains(&word) || PREDICTORS.contains(&word));
        if (is_part || is_number(word)) && end < name.len() {
            return format!("{}.*", &name[..end]);
        }
    }
    name.to_owned()
}

/// Members that count layers from the first.
const COUNTS_FIRST: [&str; 2] = ["first_k_dense_replace", "max_window_layers"];
/// Members that give layers a role by their number, unless they are 0 or 1, or the per-layer list gives the role
/// anyway.
const BY_NUMBER: [&str; 7] = [
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "full_attention_interval",
    "sliding_window_pattern",
    "no_rope_layer_interval",
    "attn_layer_period",
    "expert_layer_period",
];
/// Members that count layers from the last.
const FROM_LAST: [&str; 1] = ["num_kv_shared_layers"];
/// Numbers of layers of multi-token prediction.
pub(super) const MTP_COUNTS: [&str; 3] = ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"];
/// Numbers of layers.
const COUNTS: [&str; 4] = ["num_hidden_layers", "n_layer", "num_layers", "n_layers"];
/// Families in which the layer's number determines nothing beyond what `config.json` says.
const UNIFORM: [&str; 3] = ["llama", "mixtral", "phi3"];

/// The number of a name's layer, if its layers have this prefix.
fn layer_in(name: &str, prefix: Option<&str>) -> Option<u64> {
    naming::layer_of(name).filter(|(before, _)| Some(*before) == prefix).map(|(_, layer)| layer)
}

/// Makes the selection.
pub(super) fn select(checkpoint: &Checkpoint, subset: &Subset, family: Option<&Family>) -> Result<Selected, PlanError> {
    let whole = renamed(checkpoint, subset)?;
    let base = whole.as_ref().unwrap_or(checkpoint);
    let mut selected = Selected::default();
    if *subset == (Subset { source_renames: subset.source_renames.clone(), ..Subset::default() }) {
        selected.whole = whole;
        return Ok(selected);
    }
    let patterns = source_patterns(base, subset, &mut selected)?;
    let text = ParsedNames::of(base).text_prefix(family);
    let model = subset.part.map(|part| part_of(base, part)).transpose()?.flatten();
    let choice = Choice::new(base, subset, &patterns, (text.as_deref(), model.as_ref()));
    if subset.layers.is_some() && text.is_none() {
        return Err(PlanError::of("layers", vec!["the repository has no layers of a text model".to_owned()]));
    }
    if let Some(reason) = beyond_the_last(base, subset, text.as_deref()) {
        return Err(PlanError::of("layers", vec![reason]));
    }
    if choice.kept.is_empty() {
        return Err(PlanError::of("include, exclude, layers", vec!["no tensor is left".to_owned()]));
    }
    let layers: Vec<u64> = choice.layers.iter().copied().collect();
    let numbers: BTreeMap<u64, u64> = layers.iter().copied().zip(0..).collect();
    let new_name = |id: TensorId, layer: Option<u64>| {
        let name = base.tensor(id).name;
        let number = layer.filter(|_| subset.renumber).and_then(|layer| Some((layer, *numbers.get(&layer)?)));
        number.map_or_else(|| name.to_owned(), |(layer, number)| renumbered(name, layer, number))
    };
    let mut names: BTreeMap<TensorId, String> =
        choice.kept.into_iter().map(|(id, layer)| (id, new_name(id, layer))).collect();
    keep_operands(base, &mut names, &|id| new_name(id, layer_in(base.tensor(id).name, text.as_deref())));
    match text_part(base, subset, &names) {
        Ok(text) => selected.text = model.or(text),
        Err(reason) if subset.part.is_some() => return Err(PlanError::of("part text", vec![reason])),
        Err(reason) => selected.no_text = Some(reason),
    }
    let (config, no_hf) = configuration(base, subset, &layers, choice.dropped_mtp, family);
    selected.no_hf = selected.no_text.clone().or(no_hf).or_else(|| {
        let reason = "its config.json describes the whole model, of which a pattern leaves out a part";
        choice.cut_by_pattern.then(|| reason.to_owned())
    });
    let part = base.derived(config, None, |id, _| names.get(&id).cloned());
    selected.part = Some(part.map_err(|reasons| PlanError::of("layers", reasons))?);
    selected.whole = whole;
    Ok(selected)
}

/// The model that a part is by itself; `None` for the text model and for what predicts further tokens.
///
/// # Errors
/// The model has no such part, or one that is no model by itself.
fn part_of(base: &Checkpoint, part: ModelPart) -> Result<Option<TextModel>, PlanError> {
    let dialect = base.dialect();
    let is_mtp = |name: &str| is_predictor(name);
    let has_mtp = !dialect.mtp_layers.is_empty() || base.tensors().any(|(_, info)| is_mtp(info.name));
    let has_towers = base.tensors().any(|(_, info)| is_encoder(info.name, None));
    let found = text_model::parts(base).find(|(word, _)| *word == part.word()).map(|(_, model)| model);
    match part {
        ModelPart::Text => return Ok(None),
        ModelPart::Mtp | ModelPart::Draft if has_mtp => return Ok(None),
        // The encoders of a model that is shown whole otherwise, as engines run them apart.
        ModelPart::Encoder if found.is_none() && has_towers => return Ok(None),
        ModelPart::Mtp | ModelPart::Draft | ModelPart::Vision | ModelPart::Audio | ModelPart::Encoder => {}
    }
    if let Some(model) = found {
        return match base.raw().find(|tensor| model.has(&tensor.name)) {
            Some(raw) => {
                let reason = format!(
                    "{}: its codes are named by the whole model's configuration: --dequantize decodes them",
                    raw.name
                );
                Err(PlanError::of("part", vec![reason]))
            }
            None => Ok(Some(model)),
        };
    }
    let words = text_model::parts(base).map(|(word, _)| word).chain(has_mtp.then_some("mtp, draft"));
    let words: Vec<&str> = words.chain(has_towers.then_some("encoder")).chain(["text"]).collect();
    let (model, part, words) = (dialect.model_type.as_deref().unwrap_or("this model"), part.word(), words.join(", "));
    let reason =
        format!("{model} has no part {part} that is a model by itself: expected {words}, or --include with patterns");
    Err(PlanError::of("part", vec![reason]))
}

/// The checkpoint under the names that source renames give; `None` without renames.
fn renamed(checkpoint: &Checkpoint, subset: &Subset) -> Result<Option<Checkpoint>, PlanError> {
    if subset.source_renames.is_empty() {
        return Ok(None);
    }
    let new = |(id, info): (TensorId, TensorInfo<'_>)| Ok((id, rename::apply(&subset.source_renames, info.name)?));
    let names = checkpoint.tensors().map(new).collect::<Result<HashMap<TensorId, String>, PlanError>>()?;
    let renamed = checkpoint.derived(None, None, |id, _| names.get(&id).cloned());
    let renamed = renamed.map_err(|reasons| PlanError::of("source_rename", reasons))?;
    if parts_names(checkpoint, &renamed) {
        let reason = "takes the names of scales away from those of their quantized weights".to_owned();
        return Err(PlanError::of("source_rename", vec![reason]));
    }
    Ok(Some(renamed))
}

/// The patterns of a selection that match names in the repository: those to include, and those to exclude.
type SourcePatterns = (Vec<Pattern>, Vec<Pattern>);

/// The patterns that match a name in the repository. `selected` gets the others, which match names in the mount.
fn source_patterns(base: &Checkpoint, subset: &Subset, selected: &mut Selected) -> Result<SourcePatterns, PlanError> {
    let in_source = |pattern: &Pattern| base.tensors().any(|(_, info)| pattern.matches(info.name));
    let (include, target_include): SourcePatterns = subset.include.iter().cloned().partition(in_source);
    let (exclude, target_exclude): SourcePatterns = subset.exclude.iter().cloned().partition(in_source);
    if let (Some(source), Some(target)) = (include.first(), target_include.first()) {
        let (source, target) = (source.text(), target.text());
        let reason = format!(
            "{source:?} matches names in the repository, {target:?} does not: expected all to do one or the other"
        );
        return Err(PlanError::of("include", vec![reason]));
    }
    (selected.target_include, selected.target_exclude) = (target_include, target_exclude);
    Ok((include, exclude))
}

/// The tensors that a selection keeps, before operands of raw weights are added or removed.
struct Choice {
    /// Each with its layer of the text model.
    kept: Vec<(TensorId, Option<u64>)>,
    /// The layers of the text model that have a kept tensor.
    layers: BTreeSet<u64>,
    /// Whether tensors of multi-token prediction are left out.
    dropped_mtp: bool,
    /// Whether a pattern leaves out a tensor.
    cut_by_pattern: bool,
}

impl Choice {
    /// `text` is the prefix of the text model's layers, `model` the part that is shown alone, if it has names of its own.
    fn new(
        base: &Checkpoint,
        subset: &Subset,
        (include, exclude): &SourcePatterns,
        (text, model): (Option<&str>, Option<&TextModel>),
    ) -> Self {
        let declared = base.dialect().declared_layers;
        let mut choice = Self { kept: Vec::new(), layers: BTreeSet::new(), dropped_mtp: false, cut_by_pattern: false };
        let text_layer = |name: &str| layer_in(name, text);
        let predicts = |name: &str| {
            let is_beyond = |layer| declared.is_some_and(|declared| layer >= declared);
            is_predictor(name) || text_layer(name).is_some_and(is_beyond)
        };
        let shares = subset.part == Some(ModelPart::Draft)
            && !base.tensors().any(|(_, info)| predicts(info.name) && is_shared(info.name));
        let only_mtp = matches!(subset.part, Some(ModelPart::Mtp | ModelPart::Draft));
        let only_encoders = subset.part == Some(ModelPart::Encoder) && model.is_none();
        for (id, info) in base.tensors() {
            let (of_text, is_mtp) = (text_layer(info.name), predicts(info.name));
            let out = subset.layers.as_ref().zip(of_text).is_some_and(|(layers, layer)| !layers.contains(layer));
            let matched = is_accepted(include, exclude, info.name);
            choice.cut_by_pattern |= !matched;
            let unwanted = (subset.no_mtp && is_mtp)
                || (subset.text_only && naming::is_tower(info.name))
                || (only_mtp && !is_mtp && !(shares && is_shared(info.name)))
                || (only_encoders && (is_mtp || !is_encoder(info.name, text)))
                || model.is_some_and(|model| !model.has(info.name));
            if matched && !out && !unwanted {
                choice.layers.extend(of_text);
                choice.kept.push((id, of_text));
            } else {
                choice.dropped_mtp |= is_mtp;
            }
        }
        choice
    }
}

/// Keeps the operands that decode raw weights exactly if the weights are kept, whatever patterns say: without operands
/// the bytes of the weights have no meaning. `name` gives the name of a kept operand.
fn keep_operands(base: &Checkpoint, names: &mut BTreeMap<TensorId, String>, name: &dyn Fn(TensorId) -> String) {
    let (mut needed, mut unneeded) = (BTreeSet::new(), BTreeSet::new());
    for tensor in base.raw() {
        let [codes, operands @ ..] = &*tensor.operands else { continue };
        if names.contains_key(codes) { needed.extend(operands) } else { unneeded.extend(operands) }
    }
    for id in unneeded.difference(&needed) {
        names.remove(*id);
    }
    for id in needed {
        names.entry(*id).or_insert_with(|| name(*id));
    }
}

/// Whether renames separate the names of scales from those of their weights, among the raw weights. Programs find
/// scales by these names.
fn parts_names(checkpoint: &Checkpoint, renamed: &Checkpoint) -> bool {
    let (old, new) = (|id| checkpoint.tensor(id).name, |id| renamed.tensor(id).name);
    checkpoint.raw().any(|tensor| {
        let [codes, operands @ ..] = &*tensor.operands else { return false };
        operands.iter().any(|operand| {
            let pairs = old(*codes).char_indices().zip(old(*operand).chars());
            let same = pairs.take_while(|((_, a), b)| a == b).last();
            let common = same.map_or(0, |((at, letter), _)| at + letter.len_utf8());
            let stem = new(*codes).strip_suffix(&old(*codes)[common..]);
            stem.is_none() || stem != new(*operand).strip_suffix(&old(*operand)[common..])
        })
    })
}

/// The reason why the selected layers do not exist, if some are beyond the last layer.
fn beyond_the_last(base: &Checkpoint, subset: &Subset, prefix: Option<&str>) -> Option<String> {
    let (layers, prefix) = (subset.layers.as_ref()?, prefix?);
    let found = base.tensors().filter_map(|(_, info)| layer_in(info.name, Some(prefix)));
    let found = found.max().map_or(0, |last| last.saturating_add(1));
    let count = found.max(base.dialect().declared_layers.unwrap_or(0));
    let range = layers.beyond(count)?;
    let last = count.saturating_sub(1);
    Some(format!("{range}: there are {count} layers, 0 to {last}: expected ranges in 0..{count}"))
}

/// Words of the tensors of a layer that predicts further tokens.
pub(super) const PREDICTOR_WORDS: [&str; 6] = ["eh_proj", "enorm", "hnorm", "shared_head", "nextn", "mtp"];

/// The prefix of the text model's layers, and the first layer after the last configured one. From there on layers
/// predict further tokens (multi-token prediction) and are not part of the stack.
pub(super) fn predicting(
    checkpoint: &Checkpoint,
    names: &ParsedNames<'_>,
    family: Option<&Family>,
) -> Option<(String, u64)> {
    let prefix = names.text_prefix(family)?;
    let first = checkpoint.dialect().declared_layers?;
    let config = checkpoint.config()?;
    // Under another prefix the number may belong to another stack.
    if config.get("is_encoder_decoder").and_then(Value::as_bool) == Some(true) {
        return None;
    }
    let is_known = family.is_some() || MTP_COUNTS.iter().any(|key| member::config_number(checkpoint, key) > Some(0));
    let has_word = |name: &str| name.split('.').any(|word| PREDICTOR_WORDS.contains(&word));
    let predicts = |kind: &NameKind<'_>| kind.parsed.prefix == prefix && (is_known || has_word(kind.name));
    let predicting: Vec<bool> = names.kinds().iter().map(predicts).collect();
    let is_beyond = |name: &ParsedName| predicting[name.kind as usize] && names.layer(name) >= Some(first);
    names.names().iter().any(is_beyond).then_some((prefix, first))
}

fn renumbered(name: &str, layer: u64, number: u64) -> String {
    name.replacen(&format!(".{layer}."), &format!(".{number}."), 1)
}

/// Most names in a reason.
const NAMES_MAX: usize = 3;

/// The text model that the selected tensors of a larger model are. `None` if the repository's model has no other parts, or
/// they are selected too.
///
/// # Errors
/// The reason why no model by itself has the selected tensors.
fn text_part(
    base: &Checkpoint,
    subset: &Subset,
    names: &BTreeMap<TensorId, String>,
) -> Result<Option<TextModel>, String> {
    if !subset.text_only || base.config().is_none() {
        return Ok(None);
    }
    let text = match TextModel::of(base) {
        Ok(text) => text,
        Err(reason) if base.tensors().any(|(_, info)| naming::is_tower(info.name)) => return Err(reason),
        Err(_) => return Ok(None),
    };
    if base.raw().any(|tensor| tensor.operands.first().is_some_and(|codes| names.contains_key(codes))) {
        let reason =
            "quantization_config in config.json names modules of the whole model: --dequantize decodes its tensors";
        return Err(reason.to_owned());
    }
    // The configuration of the text model alone has none of that of the whole.
    let is_whole = |config: &Value| QUANTIZATION.iter().any(|key| config.get(*key).is_some());
    let lost = base.dialect().quantization.unsupported.iter().find(|unsupported| unsupported.codes.is_empty());
    if let Some(lost) = lost.filter(|_| base.config().is_some_and(is_whole)) {
        return Err(format!("config.json says of the whole model's weights what would be lost: {}", lost.method));
    }
    let outside: Vec<&str> =
        names.values().map(String::as_str).filter(|name| text.is_outside(name) && !is_predictor(name)).collect();
    if outside.is_empty() {
        return Ok(Some(text));
    }
    Err(format!("{} has no such tensors: {}", text.architecture, first_names(&outside, NAMES_MAX)))
}

/// Number of the model's own layers and of those that predict further tokens, as the configuration or the tensors have them.
pub(super) fn total_layers(base: &Checkpoint) -> u64 {
    let declared = base.dialect().declared_layers.unwrap_or(0);
    let predicting = MTP_COUNTS.iter().filter_map(|key| member::config_number(base, key)).max().unwrap_or(0);
    let last = base.dialect().mtp_layers.last().map_or(0, |last| last.saturating_add(1));
    declared.saturating_add(predicting).max(last)
}

/// The layers that stay, of the model and of what predicts further tokens, and how many there were of both.
fn kept_layers(base: &Checkpoint, subset: &Subset, layers: &[u64], dropped_mtp: bool) -> (Vec<u64>, u64) {
    let declared = base.dialect().declared_layers.unwrap_or(0);
    let total = total_layers(base);
    let mut kept = if subset.layers.is_some() {
        layers.to_vec()
    } else {
        // A layer may have no tensors.
        let predicting = layers.iter().copied().filter(|layer| *layer >= declared);
        (0..declared).chain(predicting).collect()
    };
    // Those beside the layers, which stay unless they are all left out.
    if !dropped_mtp && base.dialect().mtp_layers.is_empty() {
        kept.extend(declared..total);
    }
    (kept, total)
}

/// Whether layers stay that predict further tokens and are no longer the next ones after the model's own.
fn moves_predictors(base: &Checkpoint, kept: &[u64]) -> bool {
    let mut numbered = kept.iter().enumerate().filter(|(_, layer)| base.dialect().mtp_layers.contains(layer));
    numbered.any(|(place, layer)| place as u64 != *layer)
}

/// The configuration of the part, or the reason why there is none.
fn configuration(
    base: &Checkpoint,
    subset: &Subset,
    layers: &[u64],
    dropped_mtp: bool,
    family: Option<&Family>,
) -> (Option<Value>, Option<String>) {
    let Some(config) = base.config() else { return (None, None) };
    let mut config = config.clone();
    let nested = base.dialect().text_config.clone();
    let declared = base.dialect().declared_layers;
    let (kept, total) = kept_layers(base, subset, layers, dropped_mtp);
    let predicting = kept.iter().filter(|layer| Some(**layer) >= declared).count();
    let mut members: Vec<&mut Map<String, Value>> = Vec::new();
    let Some(top) = config.as_object_mut() else { return (None, None) };
    let has_gap = !subset.renumber && moves_predictors(base, &kept);
    let mut no_hf =
        has_gap.then(|| "layers that predict further tokens keep numbers that are not the next ones".to_owned());
    // The nested member is removed and inserted again, since both objects change.
    let mut inner = nested.as_ref().and_then(|name| top.get_mut(name)).map(Value::take);
    members.push(top);
    members.extend(inner.as_mut().and_then(Value::as_object_mut));
    for members in members {
        if dropped_mtp {
            for count in MTP_COUNTS {
                if members.contains_key(count) {
                    members.insert(count.to_owned(), json!(predicting));
                }
            }
        }
        let is_moved = subset.renumber && !kept.iter().copied().eq(0..kept.len() as u64);
        if is_moved && base.raw().next().is_some() && names_layers(members) {
            no_hf = no_hf.or_else(|| {
                Some("quantization_config in config.json names layers by numbers, and these are others now".to_owned())
            });
        }
        if let Some(declared) = declared.filter(|_| subset.layers.is_some() || dropped_mtp) {
            let kept = KeptLayers { layers: &kept, declared, total };
            if let Err(reason) = cut_layers(members, &kept, subset.renumber, family) {
                no_hf = no_hf.or(Some(reason));
            }
        }
    }
    if let (Some(name), Some(inner)) = (nested, inner) {
        config[name.as_str()] = inner;
    }
    (Some(config), no_hf)
}

/// Whether the settings of quantization tell single layers apart.
fn names_layers(members: &Map<String, Value>) -> bool {
    fn has_number(value: &Value) -> bool {
        let is_numbered = |text: &str| text.split('.').any(|word| word.parse::<u64>().is_ok());
        match value {
            Value::String(text) => {
                is_numbered(text) || (text.starts_with("re:") && text.contains(|c: char| c.is_ascii_digit()))
            }
            Value::Array(list) => list.iter().any(has_number),
            Value::Object(inner) => inner.iter().any(|(key, value)| is_numbered(key) || has_number(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }
    QUANTIZATION.iter().any(|key| members.get(*key).is_some_and(has_number))
}

/// Cuts what the configuration says of layers to those that are kept.
fn cut_layers(
    members: &mut Map<String, Value>,
    kept: &KeptLayers<'_>,
    renumber: bool,
    family: Option<&Family>,
) -> Result<(), String> {
    let declared = kept.declared;
    let layers: Vec<u64> = kept.layers.iter().copied().filter(|layer| *layer < declared).collect();
    let prefix = layers.iter().copied().eq(0..layers.len() as u64);
    if !prefix && !renumber {
        let first = layers.first().expect("no layers at all are the first ones");
        return Err(format!(
            "config.json cannot say which layers there are (the first is {first}): expected layers from 0 on, or renumbered"
        ));
    }
    let mut reason = None;
    let is_whole = layers.len() as u64 == declared;
    let typed = members.contains_key("layer_types");
    let number = |members: &Map<String, Value>, key: &str| members.get(key).and_then(Value::as_u64);
    if !prefix && COUNTS.iter().any(|key| members.contains_key(*key)) {
        let uniform = typed || family.is_some_and(|family| UNIFORM.contains(&family.name.as_str()));
        if !uniform {
            reason = Some("what a layer of this model is may follow from its number, which is another now".to_owned());
        }
        let shifted = BY_NUMBER.iter().find(|key| number(members, key).is_some_and(|value| value > 1));
        if let Some(key) = shifted {
            reason = Some(format!("config.json gives layers a role by number ({key}), and numbers are others now"));
        }
    }
    if let Some(key) = FROM_LAST.iter().find(|key| !is_whole && number(members, key).is_some_and(|value| value > 0)) {
        reason = Some(format!("config.json counts layers from the last ({key})"));
    }
    for key in COUNTS {
        if number(members, key) == Some(declared) {
            members.insert(key.to_owned(), json!(layers.len()));
        }
    }
    for key in COUNTS_FIRST {
        if let Some(count) = number(members, key).filter(|_| !is_whole) {
            members.insert(key.to_owned(), json!(layers.iter().filter(|layer| **layer < count).count()));
        }
    }
    reason.or(kept.cut(members).err()).map_or(Ok(()), Err)
}
