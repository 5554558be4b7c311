//! The extents that a mesh axis does not divide, told once for all tensors.

use std::collections::BTreeSet;

use super::super::{Plan, problem::Problem};

/// Most extents that a message lists.
const EXTENTS_LISTED: usize = 8;

/// Most sizes that a message proposes.
const SIZES_LISTED: usize = 12;

/// Greatest size that is tried.
const SIZE_MAX: u64 = 4096;

/// For each mesh axis that does not divide all extents that it splits: these extents, and the sizes that divide all.
pub(in crate::plan) fn axes(plan: &Plan) -> Vec<Problem> {
    (0..plan.mesh.axes().len()).filter_map(|axis| of_axis(plan, axis)).collect()
}

fn of_axis(plan: &Plan, mesh_axis: usize) -> Option<Problem> {
    let axes = plan.mesh.axes();
    let size = axes[mesh_axis].size;
    let (mut uneven, mut common) = (BTreeSet::new(), 0);
    for tensor in &plan.tensors {
        let spec = plan.spec(tensor);
        for (axis, extent) in tensor.view.shape().extents().iter().enumerate() {
            if !spec.mesh_axes(axis).any(|splitter| splitter == mesh_axis) {
                continue;
            }
            // What the other mesh axes leave of the extent, if they divide it.
            let others = spec.mesh_axes(axis).filter(|other| *other != mesh_axis);
            let others: u64 = others.map(|other| axes[other].size).product();
            if !extent.is_multiple_of(others) {
                continue;
            }
            let part = extent / others;
            common = gcd(common, part);
            if !part.is_multiple_of(size) {
                uneven.insert((*extent, meaning(&tensor.name, tensor.logical.get(axis))));
            }
        }
    }
    if uneven.is_empty() {
        return None;
    }
    let more = uneven.len().saturating_sub(EXTENTS_LISTED);
    let listed = uneven.iter().take(EXTENTS_LISTED).map(|(extent, meaning)| format!("{extent} {meaning}"));
    let extents = listed.chain((more > 0).then(|| format!("and {more} more"))).collect();
    let fits = (1..=common.min(SIZE_MAX)).filter(|size| common.is_multiple_of(*size)).take(SIZES_LISTED);
    let fits = fits.map(|size| size.to_string()).collect();
    Some(Problem::UnevenAxis { axis: axes[mesh_axis].name.clone(), size, extents, fits })
}

/// What an extent counts: the logical axis, or else the tensor's last word.
fn meaning(name: &str, logical: Option<&String>) -> String {
    let word = logical.filter(|logical| !logical.is_empty()).map(String::as_str);
    match word {
        Some("heads" | "q_heads") => "heads".to_owned(),
        Some("kv_heads") => "key-value heads".to_owned(),
        Some("vocab") => "of the vocabulary".to_owned(),
        Some("norm" | "embed" | "embed_attn" | "embed_vocab" | "embed_moe" | "embed_router") => "hidden".to_owned(),
        Some("mlp" | "mlp_moe") => "intermediate".to_owned(),
        Some(other) => other.replace('_', " "),
        None => format!("in {}", name.rsplit('.').find(|word| *word != "weight").unwrap_or(name)),
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
