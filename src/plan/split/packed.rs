//! Quantized weights that are shown as they are stored. Parts of packed codes and parts of their scales have no meaning
//! unless they cover the same rows and columns. Under tensor parallelism such tensors are whole on every device, unless
//! the matching parts of a weight and its scales are known. Then the rest of their block is whole too.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use ckfs_checkpoint::{Checkpoint, Storage, first_names};
use ckfs_tensor::{DType, TensorId};

use super::super::{AxisUse, Mesh, draft::Draft, name_group::fold, shard::axes_of};

/// Last words of the names of matrices that may be packed.
const MATRICES: [&str; 5] = ["weight", "qweight", "weight_packed", "W_q", "_weight_qdata"];

/// Last words of the tensors beside a packed matrix in its module.
const COMPANIONS: [&str; 14] = [
    "qzeros",
    "scales",
    "biases",
    "scale",
    "zero",
    "meta",
    "g_idx",
    "SCB",
    "weight_format",
    "input_scale",
    "_weight_scale",
    "_weight_zero_point",
    "weight_bias",
    "zeros",
];

/// Endings of the names of a packed tensor's companions, if the tensor is not a module.
const ENDINGS: [&str; 4] = ["_scale", "_scale_inv", "_weight_scale", "_scale_2"];

/// Most module names that a warning lists.
const LISTED: usize = 4;

/// Whether weights are computed in this type. Other types hold codes.
const fn is_plain(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

fn is_companion(rest: &str) -> bool {
    COMPANIONS.contains(&rest) || rest.starts_with("weight_") || rest.starts_with("weight.")
}

/// Tensors that every device holds whole, and weights whose scales are split with them.
#[derive(Debug, Default)]
struct PackedTensors {
    whole: HashSet<TensorId>,
    /// The block of each weight with a scale per block, and the weight of each such scale.
    blocks: HashMap<TensorId, (u64, u64)>,
    scales: HashMap<TensorId, TensorId>,
}

impl PackedTensors {
    fn of(checkpoint: &Checkpoint) -> Self {
        let mut packed = Self::default();
        let blocks = checkpoint
            .raw()
            .filter_map(|tensor| Some((tensor.operands[0], (tensor.operands[1], tensor.template.block()?))));
        let blocks: HashMap<TensorId, (TensorId, (u64, u64))> = blocks.collect();
        let table = checkpoint.table();
        // Drafts are known by what their views read.
        let read = |id: TensorId| match checkpoint.tensor(id).storage {
            Storage::Composed(composed) => {
                composed.view.as_ref().and_then(|view| view.source_ids().first().copied()).unwrap_or(id)
            }
            Storage::Plain { .. } | Storage::Quantized(_) | Storage::Mosaic(_) => id,
        };
        for (id, info) in checkpoint.tensors().filter(|(_, info)| !is_plain(info.dtype)) {
            if info.quantized().is_some() {
                continue;
            }
            let channels = || Some((channel_scale(checkpoint, id)?, (1, 1)));
            if let Some((scale, block)) = blocks.get(&id).copied().or_else(channels) {
                packed.blocks.insert(read(id), block);
                packed.scales.insert(read(scale), read(id));
                continue;
            }
            let is_single = |other: TensorId| checkpoint.tensor(other).shape.iter().product::<u64>() == 1;
            if let Some((module, _)) = info.name.rsplit_once('.').filter(|(_, last)| MATRICES.contains(last)) {
                let stem = format!("{module}.");
                let rest = |id: TensorId| checkpoint.tensor(id).name.strip_prefix(&stem);
                let own = || table.with_prefix(&stem).filter(|other| rest(*other).is_some_and(|rest| !is_nested(rest)));
                let companions = || own().filter(|other| *other != id && rest(*other).is_some_and(is_companion));
                // Every device holds a single scale anyway.
                if companions().any(|other| !info.dtype.is_float() || !is_single(other)) {
                    packed.whole.extend(own().map(read));
                }
                if companions().next().is_some() {
                    continue;
                }
            }
            let beside: Vec<TensorId> =
                ENDINGS.iter().filter_map(|ending| table.find(&format!("{}{ending}", info.name))).collect();
            if beside.iter().any(|other| !info.dtype.is_float() || !is_single(*other)) {
                packed.whole.extend(beside.into_iter().chain([id]).map(read));
            }
        }
        packed
    }
}

/// The scales of an 8-bit matrix, one for each of its rows.
fn channel_scale(checkpoint: &Checkpoint, weight: TensorId) -> Option<TensorId> {
    let info = checkpoint.tensor(weight);
    let (_, rows) = info.shape.split_last().filter(|(_, rows)| info.dtype.is_float() && !rows.is_empty())?;
    let scale = checkpoint.find(&format!("{}_scale", info.name))?;
    let shape = checkpoint.tensor(scale).shape;
    (shape == rows || (shape.split_last() == Some((&1, rows)))).then_some(scale)
}

/// Whether a name within a module belongs to a module inside it.
fn is_nested(rest: &str) -> bool {
    rest.contains('.') && !rest.starts_with("weight.")
}

/// Removes the axis of tensor parallelism from drafts of packed tensors, or gives scales the axis of their weights.
/// Returns warnings.
///
/// `is_told` tells whether the user fully determines a draft's shards.
pub(crate) fn keep_together(
    drafts: &mut [Draft],
    checkpoint: &Checkpoint,
    mesh: &Mesh,
    is_told: &dyn Fn(&Draft) -> bool,
) -> Vec<String> {
    let parts: u64 = axes_of(mesh, AxisUse::Tensor).map(|(_, axis)| axis.size).product();
    if parts == 1 {
        return Vec::new();
    }
    // The blocks of gpt-oss and their scales are in neither set: both have the axes of the matrix, and the family's table
    // gives both the same roles. Other codes of such a repository have no such table.
    let packed = PackedTensors::of(checkpoint);
    if packed.whole.is_empty() && packed.blocks.is_empty() {
        return Vec::new();
    }
    let mut whole: HashSet<TensorId> = HashSet::new();
    let mut split: HashMap<TensorId, usize> = HashMap::new();
    let mut blocks: BTreeSet<Arc<str>> = BTreeSet::new();
    for draft in drafts.iter_mut().filter(|draft| !is_told(draft)) {
        let Some(first) = first_source(draft) else { continue };
        if packed.whole.contains(&first) {
            blocks.extend(draft.roles.tp.take().and_then(|_| draft.roles.block.clone()));
            whole.extend(draft.view.source_ids());
        } else if let (Some(block), Some(axis)) = (packed.blocks.get(&first), draft.roles.tp) {
            let shape = draft.view.shape();
            let extent = shape.extents().get(axis).copied().unwrap_or(0);
            let unit = if axis + 1 == shape.rank() { block.1 } else { block.0 };
            if axis + 2 >= shape.rank() && extent.is_multiple_of(unit.saturating_mul(parts)) {
                split.insert(first, axis - draft.roles.stacked);
            } else {
                draft.roles.tp = None;
                blocks.extend(draft.roles.block.clone());
                whole.extend(draft.view.source_ids());
            }
        }
    }
    // A part of the other matrices of the block would be of no use.
    let mut others: BTreeSet<&str> = BTreeSet::new();
    for draft in drafts.iter_mut().filter(|draft| !is_told(draft) && draft.roles.tp.is_some()) {
        let Some(block) = draft.roles.block.as_ref().and_then(|block| blocks.get(block)) else { continue };
        draft.roles.tp = None;
        others.insert(block);
        if let Some(first) = first_source(draft) {
            split.remove(&first);
        }
    }
    for draft in drafts.iter_mut().filter(|draft| !is_told(draft)) {
        let weight = first_source(draft).and_then(|first| packed.scales.get(&first));
        if let Some(axis) = weight.and_then(|weight| split.get(weight)) {
            let axis = axis + draft.roles.stacked;
            // One scale for a whole row has no axis to split, or an axis of one element.
            draft.roles.tp = draft.view.shape().extents().get(axis).is_some_and(|extent| *extent > 1).then_some(axis);
        }
    }
    let names = whole.iter().map(|id| checkpoint.tensor(*id).name);
    let modules: BTreeSet<&str> = names.map(module_of).collect();
    let groups = fold(modules, &[]);
    if groups.is_empty() {
        return Vec::new();
    }
    let listed: Vec<&str> = groups.iter().take(LISTED).map(|group| group.name.as_str()).collect();
    let more =
        if groups.len() > LISTED { format!(" and {} more groups", groups.len() - LISTED) } else { String::new() };
    let mut warnings = vec![format!(
        "{} tensors of quantized weights ({}) are whole on every device, since parts of packed codes and of their scales need \
         not fit each other: {}{more}",
        whole.len(),
        checkpoint.dialect().quantization,
        listed.join(", ")
    )];
    if !others.is_empty() {
        let others: Vec<&str> = others.into_iter().collect();
        let listed = first_names(&others, LISTED);
        warnings.push(format!("the other tensors of their blocks are whole as well: {listed}"));
    }
    warnings
}

/// The module of a tensor's name.
fn module_of(name: &str) -> &str {
    let before_weight = name.find(".weight").map(|at| &name[..at]);
    before_weight.or_else(|| name.rsplit_once('.').map(|(module, _)| module)).unwrap_or(name)
}

fn first_source(draft: &Draft) -> Option<TensorId> {
    draft.view.source_ids().first().copied()
}
