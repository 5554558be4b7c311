//! The experts of a layer, however a repository names and fuses them, under the names of single experts.
//!
//! Programs store the same matrices as one tensor for each expert (`experts.3.gate_proj`, `experts.3.w1`), with the expert's number
//! after the projection (`experts.gate_proj.3`), or as one tensor for all experts: gate and up in one (`experts.gate_up_proj`,
//! `experts.w13_weight`) or each by itself (`switch_mlp.gate_proj`), with the outputs or the inputs first. Below the layouts there is
//! one form of them: `….experts.N.<word>.weight` of shape `[out, in]`, with the words and the names of the model's releases. Every
//! layout by rules sees that form, and so makes the same views of any spelling. The words come from transformers' own table
//! ([`models`]); the bytes stay where they are.
//!
//! What it deliberately does not do: change models whose table has no single experts (gpt-oss, Gemma 4), whose only form is fused; and
//! codes that are shown as they are stored.

pub(crate) mod convert;
pub(crate) mod models;
pub(crate) mod orientation;
mod spelling;

use std::{collections::BTreeMap, sync::Arc};

use ckfs_checkpoint::{Checkpoint, Composed, ExpertPart, TensorInfo};
use ckfs_tensor::TensorId;
use rayon::prelude::*;

use self::{
    models::ModelNames,
    orientation::{Order, Orientation, fitting},
    spelling::{ExpertName, Projection},
};
use super::{
    member,
    problem::{PlanError, Problem},
};

/// Bits of the narrowest float that is a number by itself and no code.
const PLAIN_BITS: u64 = 16;

/// The orders of axes that a checkpoint's fused experts show. `told` is the user's setting.
pub(super) fn orientation(checkpoint: &Checkpoint, told: Option<Order>) -> Orientation {
    let mut orientation = Orientation::new(told);
    for (info, orders) in fused(checkpoint) {
        orientation.see(info.name, orders);
    }
    orientation
}

/// The tensors that hold the matrices of all experts of a layer, in order, with the orders that their axes may have.
fn fused(checkpoint: &Checkpoint) -> Vec<(TensorInfo<'_>, &'static [Order])> {
    let hidden = hidden(checkpoint);
    let found = of_experts(checkpoint, |name, _| name.expert.is_none() && name.is_matrix());
    found.into_iter().map(|(_, info, name)| (info, fitting(name.projection, info.shape, hidden))).collect()
}

/// Tensors that one thread looks at together.
const PARSED_TOGETHER: usize = 4096;

/// The tensors of experts of which this holds, with their names, in order.
fn of_experts(
    checkpoint: &Checkpoint,
    holds: impl Fn(&ExpertName<'_>, &TensorInfo<'_>) -> bool + Sync,
) -> Vec<(TensorId, TensorInfo<'_>, ExpertName<'_>)> {
    let ids: Vec<TensorId> = checkpoint.tensors().map(|(id, _)| id).collect();
    let found = |id: &TensorId| {
        let info = checkpoint.tensor(*id);
        let name = ExpertName::parse(info.name)?;
        holds(&name, &info).then_some((*id, info, name))
    };
    ids.par_chunks(PARSED_TOGETHER).flat_map_iter(|ids| ids.iter().filter_map(found)).collect()
}

/// A tensor of one expert, by its name.
#[derive(Clone, Copy, Debug)]
pub(super) struct SingleExpert<'a> {
    /// The module that holds the experts.
    pub(super) module: &'a str,
    pub(super) expert: u64,
    /// Which matrix it is: 0 gate, 1 up, 2 down. None for a bias, a scale or another tensor.
    pub(super) place: Option<usize>,
}

/// The expert that a tensor of this name is of.
pub(super) fn single_expert(name: &str) -> Option<SingleExpert<'_>> {
    let parsed = ExpertName::parse(name)?;
    let place = parsed.projection.place().filter(|_| parsed.is_matrix());
    let module = parsed.before.strip_suffix('.').unwrap_or(parsed.before);
    Some(SingleExpert { module, expert: parsed.expert?, place })
}

/// Whether a tensor holds the matrices of all experts, by its name.
pub(super) fn is_fused(name: &str) -> bool {
    ExpertName::parse(name).is_some_and(|name| name.expert.is_none() && name.is_matrix())
}

/// Why a square tensor may be another than transformers reads. Empty if the user has decided.
pub(super) fn doubts(checkpoint: &Checkpoint, told: Option<Order>) -> Vec<String> {
    let orientation = orientation(checkpoint, told);
    let doubt =
        |(info, orders): &(TensorInfo<'_>, &[Order])| orientation.order((info.name, info.shape), orders, true).err();
    fused(checkpoint).iter().find_map(doubt).into_iter().collect()
}

/// The orders that a tensor of fused experts may have; none for another tensor.
pub(super) fn orders(checkpoint: &Checkpoint, name: &str, shape: &[u64]) -> &'static [Order] {
    let fused = ExpertName::parse(name).filter(|name| name.expert.is_none());
    fused.map_or(&[], |name| fitting(name.projection, shape, hidden(checkpoint)))
}

fn hidden(checkpoint: &Checkpoint) -> Option<u64> {
    member::config_number(checkpoint, "hidden_size")
}

/// The checkpoint with the experts of its layers under the names of single ones. None if they have these names already. `keeps_fused`
/// tells of fused experts that they stay so.
///
/// # Errors
/// Square tensors whose order nothing shows, and names that would be the same.
pub(super) fn normal(
    checkpoint: &Checkpoint,
    told: Option<Order>,
    keeps_fused: bool,
) -> Result<Option<Checkpoint>, Vec<Problem>> {
    let model = ModelNames::of(checkpoint);
    // A single expert whose name is that already needs no other.
    let is_other = |name: &ExpertName<'_>, info: &TensorInfo<'_>| {
        let is_own = || {
            model.as_ref().is_none_or(|model| model.keeps_names())
                && word(model.as_deref(), name, name.projection) == name.word
                && !(name.number_last || name.after.is_empty())
                && info.name[name.before.len()..].starts_with("experts.")
        };
        name.expert.is_none() || name.projection == Projection::GateUp || !is_own()
    };
    let found = of_experts(checkpoint, is_other);
    if found.is_empty() {
        return Ok(None);
    }
    let (orientation, hidden) = (orientation(checkpoint, told), hidden(checkpoint));
    let form = Form { checkpoint, model: model.clone(), orientation, hidden };
    let mut composed = Vec::new();
    let mut problems = Vec::new();
    let mut names: BTreeMap<TensorId, String> = BTreeMap::new();
    for (id, info, name) in found {
        if name.expert.is_some() && name.projection != Projection::GateUp {
            let new = form.single(&name, name.expert.unwrap_or_default(), name.projection);
            if new != info.name {
                names.insert(id, new);
            }
        } else if !keeps_fused {
            let parts = form.parts(id, &name, &info).map_err(|problem| problems.push(problem));
            composed.extend(parts.unwrap_or_default());
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    if names.is_empty() && composed.is_empty() {
        return Ok(None);
    }
    // Experts under the names of modules mean that the other tensors have such names too.
    let is_of_modules = !composed.is_empty();
    let new = |id: TensorId, info: &TensorInfo<'_>| {
        let renamed = || model.as_ref().filter(|_| is_of_modules).map(|model| model.stored(info.name));
        names.get(&id).cloned().or_else(renamed).filter(|new| new != info.name)
    };
    let composed = checkpoint.composed(composed, new);
    composed.map(Some).map_err(|reasons| PlanError::of("names of experts", reasons).problems)
}

/// The model's word for a matrix of an expert, or else the one that the name has.
fn word<'n>(model: Option<&'n ModelNames>, name: &ExpertName<'n>, projection: Projection) -> &'n str {
    let words = model.and_then(|model| model.experts.as_ref()).zip(projection.place());
    words.map(|(words, place)| words[place].as_str()).filter(|word| !word.is_empty()).unwrap_or(name.word)
}

/// The form that the experts of a checkpoint are to have.
struct Form<'a> {
    checkpoint: &'a Checkpoint,
    model: Option<Arc<ModelNames>>,
    orientation: Orientation,
    hidden: Option<u64>,
}

impl Form<'_> {
    /// The name of one expert's matrix, or of what belongs to it.
    fn single(&self, name: &ExpertName<'_>, expert: u64, projection: Projection) -> String {
        let word = word(self.model.as_deref(), name, projection);
        let after = if name.after.is_empty() { ".weight" } else { name.after };
        let whole = format!("{}experts.{expert}.{word}{after}", name.before);
        self.model.as_ref().map_or_else(|| whole.clone(), |model| model.stored(&whole))
    }

    /// The matrices of single experts in a tensor of several. Empty if it has none that is known.
    fn parts(&self, id: TensorId, name: &ExpertName<'_>, info: &TensorInfo<'_>) -> Result<Vec<Composed>, Problem> {
        let Some(model) = self.model.as_ref().filter(|model| model.experts.is_some()) else { return Ok(Vec::new()) };
        let is_plain = info.dtype.is_float() && info.dtype.bits() >= PLAIN_BITS;
        if !name.is_matrix() || !is_plain {
            return Ok(Vec::new());
        }
        let (order, inner) = if name.expert.is_some() {
            // One expert's gate and up together: rows of the gate, then of up.
            (Order::OutIn, info.shape)
        } else {
            let orders = fitting(name.projection, info.shape, self.hidden);
            let order = self.orientation.order((info.name, info.shape), orders, !model.either_way);
            let file = || self.checkpoint.source().path(self.checkpoint.file_of(id)).display().to_string();
            let order = order.map_err(|reason| Problem::File { file: file(), reason })?;
            let Some(order) = order else { return Ok(Vec::new()) };
            (order, &info.shape[1..])
        };
        let turned = order == Order::InOut;
        let ranges = match name.projection {
            Projection::GateUp => halves(inner, usize::from(turned)).unwrap_or_default(),
            Projection::Gate | Projection::Up | Projection::Down => vec![(name.projection, None)],
        };
        let part = |number: u64, (projection, range): &Half| {
            let expert = Some(number).filter(|_| name.expert.is_none());
            let new = self.single(name, number, *projection);
            Composed::part(new, (id, info.dtype, info.shape), ExpertPart { expert, range: *range, turned })
        };
        let experts = name.expert.map_or(0..info.shape[0], |expert| expert..expert + 1);
        Ok(experts.flat_map(|number| ranges.iter().filter_map(move |half| part(number, half))).collect())
    }
}

/// A matrix, and its elements of an axis of a tensor that has two.
type Half = (Projection, Option<(usize, u64, u64, u64)>);

/// Gate and up along an axis, if it has two halves.
fn halves(shape: &[u64], axis: usize) -> Option<Vec<Half>> {
    let extent = shape.get(axis).copied().filter(|extent| extent.is_multiple_of(2))?;
    let half = extent / 2;
    let gate = (Projection::Gate, Some((axis, 0, half, 1)));
    Some(vec![gate, (Projection::Up, Some((axis, half, extent, 1)))])
}
