//! The layout `transformers` by table: the names and shapes of the state of the model that transformers 5 loads.
//!
//! Names change as transformers' own table says ([`super::experts::models`]). The experts of a layer become two tensors,
//! `experts.gate_up_proj` and `experts.down_proj`, whatever the repository has. A model whose names and experts do not change has the
//! same tensors in the layout `hf`, and is refused with that word.
//!
//! Other tensors that transformers makes of several, or several of one, are made as its table says ([`super::experts::convert`]).
//!
//! What it deliberately does not do: conversions that the table has no operations for. Their models are refused.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use ckfs_checkpoint::Checkpoint;
use ckfs_config::Mesh;
use ckfs_tensor::{TensorId, View, ViewError};

use super::{
    canonical::{self, Tabled},
    draft::Bundled,
    experts::{
        is_fused,
        models::{Loaded, ModelNames},
        single_expert,
    },
    family::Family,
    name_group::{NameGroup, fold},
    names,
    naming::words_of,
    parsed::ParsedNames,
    problem::{PlanError, Problem},
    select,
    values::Values,
};

/// The buffers of rotary embeddings that some repositories hold. No state has them.
const ROTARY: &str = ".rotary_emb.inv_freq";

fn refused(reason: String) -> PlanError {
    Problem::File { file: "layout transformers".to_owned(), reason }.into()
}

/// Whether transformers has the model as one with a text model inside: a file for the text model alone has not its names.
pub(super) fn is_of_parts(checkpoint: &Checkpoint) -> bool {
    let dialect = checkpoint.dialect();
    dialect.text_model_type.as_ref().is_some_and(|text| dialect.model_type.as_ref() != Some(text))
        && ModelNames::of_whole(checkpoint).is_ok()
}

/// The names of a repository's model in transformers.
///
/// # Errors
/// Its type is not one of transformers', is converted otherwise, or has the same names as the repository.
pub(super) fn names(checkpoint: &Checkpoint) -> Result<Arc<ModelNames>, PlanError> {
    let model = ModelNames::of_whole(checkpoint).map_err(|of| {
        refused(match of {
            Some(of) => format!(
                "{of} is not a model of transformers 5.24: --layout hf has the names of the repository, --set family=qwen-moe (or \
                 mixtral, deepseek_v3) reads it as another model"
            ),
            None => "config.json names no model_type: --set family=qwen-moe, mixtral or deepseek_v3 reads it as one".to_owned(),
        })
    })?;
    let of = checkpoint.dialect().model_type.as_deref().unwrap_or_default();
    if let Some(other) = model.others.first() {
        return Err(refused(format!(
            "transformers converts {of} in a way that is not known here: {other}; --layout hf has the names of the repository"
        )));
    }
    let is_same = |name: &str| {
        let loaded = model.loaded(name);
        single_expert(name).is_none() && loaded.by.is_none() && loaded.name == name
    };
    if checkpoint.tensors().all(|(_, info)| is_same(info.name)) {
        return Err(refused(format!(
            "{of} has the same names in transformers 5 as in the repository: use --layout hf"
        )));
    }
    Ok(model)
}

/// The experts of a layer: by number, the matrices of gate, up and down.
type Layer = BTreeMap<u64, [Option<TensorId>; 3]>;

/// Drafts of all tensors of the model's state, and the tensors that it has not.
///
/// # Errors
/// All problems found.
pub(super) fn drafts(
    checkpoint: &Checkpoint,
    model: &ModelNames,
    family: Option<&'static Family>,
    values: &Values<'_>,
    mesh: &Mesh,
) -> Result<(Tabled, Vec<NameGroup>), Vec<Problem>> {
    let predicting = select::predicting(checkpoint, &ParsedNames::of(checkpoint), family);
    let is_beyond = |name: &str| {
        let parsed = super::naming::parse(name);
        predicting.as_ref().is_some_and(|(prefix, first)| parsed.prefix == *prefix && parsed.layer >= Some(*first))
    };
    let mut layers: BTreeMap<String, Layer> = BTreeMap::new();
    let (mut made, mut left_out) = (Vec::new(), Vec::new());
    let mut problems = Vec::new();
    let view = |id: TensorId, name: &str| {
        let asked = values.dtype_of(id, &[checkpoint.tensor(id).name, name]);
        values.view(id, asked)
    };
    let loaded: Vec<_> = checkpoint.tensors().map(|(id, info)| (id, info.name, model.loaded(info.name))).collect();
    let names: HashSet<&str> = loaded.iter().map(|(_, _, loaded)| loaded.name.as_str()).collect();
    let mut converted: BTreeMap<(usize, &str), Vec<Vec<TensorId>>> = BTreeMap::new();
    for (id, stored, Loaded { name, by }) in &loaded {
        let (id, stored) = (*id, *stored);
        let is_left_out = || model.ignores(name, &|name| names.contains(name)) || name.ends_with(ROTARY);
        if is_beyond(stored) || is_left_out() {
            left_out.push(stored);
        } else if model.lacks(name) {
            problems.push(unknown(
                stored,
                &format!("the model of transformers 5.24 has no tensor {name}; --exclude leaves it out"),
            ));
        } else if let Some(single) = single_expert(name) {
            match single.place {
                Some(place) => {
                    let layer = layers.entry(single.module.to_owned()).or_default();
                    layer.entry(single.expert).or_default()[place] = Some(id);
                }
                None => problems.push(unknown(stored, "transformers fuses no such tensor of an expert")),
            }
        } else if let Some((converter, pattern)) = by {
            let patterns = || vec![Vec::new(); model.converters[*converter].from.len()];
            converted.entry((*converter, name)).or_insert_with(patterns)[*pattern].push(id);
        } else {
            made.push((name.clone(), view(id, name).map_err(Box::new)));
        }
    }
    let layers = layers.iter().map(|(module, layer)| fused_of(module, layer, &view));
    let converted = converted.into_iter().map(|((converter, name), given)| {
        let views = |ids: Vec<TensorId>| -> Result<Vec<View>, Problem> {
            let ids = in_order(checkpoint, ids).map_err(|reason| unknown(name, &reason))?;
            ids.into_iter().map(|id| view(id, name)).collect()
        };
        let given = given.into_iter().map(views).collect::<Result<Vec<_>, Problem>>()?;
        let made = model.converters[converter].make(name, &given, checkpoint);
        let made = made.map_err(|reason| unknown(name, &reason))?;
        Ok(made.into_iter().map(|(name, view)| (name, Ok(view))).collect())
    });
    let mut fused = Vec::new();
    for tensors in layers.chain(converted) {
        match tensors {
            Ok(tensors) => {
                fused.extend(tensors.iter().map(|(name, _)| name).filter(|name| is_fused(name)).cloned());
                made.extend(tensors);
            }
            Err(problem) => problems.push(problem),
        }
    }
    if let Some((head, embedding)) = names::tied_head(checkpoint)
        && let Some(id) = checkpoint.find(&embedding)
    {
        made.push((head.clone(), view(id, &head).map_err(Box::new)));
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let (mut drafts, warning) = canonical::drafts_of((checkpoint, None), family, made, (None, mesh))?;
    for draft in &mut drafts {
        draft.bundled = Bundled::ALWAYS;
        if fused.contains(&draft.name) {
            draft.roles.experts = Some(0);
        }
    }
    Ok(((drafts, warning), fold(left_out, &[])))
}

fn unknown(name: &str, reason: &str) -> Problem {
    Problem::File { file: "layout transformers".to_owned(), reason: format!("{name}: {reason}") }
}

/// Tensors of one pattern in the order of the numbers in their names, which are all there.
fn in_order(checkpoint: &Checkpoint, mut ids: Vec<TensorId>) -> Result<Vec<TensorId>, String> {
    let words = |id: &TensorId| words_of(checkpoint.tensor(*id).name).collect::<Vec<_>>();
    let [first, second, ..] = ids.as_slice() else { return Ok(ids) };
    let at = words(first).iter().zip(words(second)).position(|(one, other)| **one != *other).unwrap_or_default();
    let number = |id: &TensorId| {
        let word = words(id).get(at).copied().unwrap_or_default().to_owned();
        word[word.trim_end_matches(|letter: char| letter.is_ascii_digit()).len()..].parse::<u64>().ok()
    };
    ids.sort_by_key(number);
    match (0u64..).zip(&ids).find(|(expected, id)| number(id) != Some(*expected)) {
        Some((expected, id)) => {
            Err(format!("expected a tensor of number {expected}, found {}", checkpoint.tensor(*id).name))
        }
        None => Ok(ids),
    }
}

/// The view of a tensor that is shown under a name.
type ViewOf<'a> = dyn Fn(TensorId, &str) -> Result<View, Problem> + 'a;

/// A tensor's name and view.
type Shown = (String, Result<View, Box<Problem>>);

/// The fused tensors of a layer: the matrices of each expert one after the other on axis 0, and the experts on a new axis 0.
fn fused_of(module: &str, layer: &Layer, view: &ViewOf<'_>) -> Result<Vec<Shown>, Problem> {
    let numbers: Vec<u64> = layer.keys().copied().collect();
    let count = numbers.len() as u64;
    if !numbers.iter().copied().eq(0..count) {
        let missing = (0..=count).find(|number| !layer.contains_key(number)).unwrap_or_default();
        return Err(unknown(
            &format!("{module}.experts.{missing}"),
            "this expert is missing, but later ones are there",
        ));
    }
    let has = |place: usize| layer.values().filter(|expert| expert[place].is_some()).count();
    let [gates, ups, downs] = [has(0), has(1), has(2)];
    if downs != layer.len() || ups != layer.len() || !(gates == 0 || gates == layer.len()) {
        let (name, all) = (format!("{module}.experts"), layer.len());
        let found = format!("{gates} matrices gate, {ups} up and {downs} down of {all} experts: expected one of each");
        return Err(unknown(&name, &found));
    }
    let stacked = |name: &str, places: &[usize]| {
        let named = |error: ViewError| Problem::View { name: name.to_owned(), error };
        let one = |expert: &[Option<TensorId>; 3]| {
            let parts = places.iter().filter_map(|place| expert[*place]).map(|id| view(id, name));
            View::concat(0, &parts.collect::<Result<Vec<_>, _>>()?).map_err(named)
        };
        View::stack(0, &layer.values().map(one).collect::<Result<Vec<_>, Problem>>()?).map_err(named)
    };
    let first = if gates == 0 { "up_proj" } else { "gate_up_proj" };
    let tensor = |word: &str, places: &[usize]| {
        let name = format!("{module}.experts.{word}");
        let view = stacked(&name, places).map_err(Box::new);
        (name, view)
    };
    Ok(vec![tensor(first, &[0, 1]), tensor("down_proj", &[2])])
}
