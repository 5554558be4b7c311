//! Why devices read more than they need, and what would change that.

use std::collections::BTreeMap;

use ckfs_checkpoint::Checkpoint;
use ckfs_source::page_size::page_bytes;
use ckfs_tensor::{ByteRuns, Reads, Region, reads};

use super::{
    super::{
        Amplification, Plan, PlannedTensor,
        leaf::{ReadLeaf, for_each_leaf},
        naming::group_name,
        needed::runs_of,
    },
    effects::{human_bytes, hundredths},
};

/// Over-read up to this factor, in hundredths, is not reported: it comes from pages at the ends of long runs.
const OVER_READ_HUNDREDTHS: u128 = 102;

/// Tensors that get a reason, the worst ones.
const REASONS_MAX: usize = 5;

/// Above this number the listed devices are hardly those of one host.
const DEVICES_OF_HOST: usize = 8;

/// Whether devices read notably more than they need.
pub(super) fn exceeds(reads: Reads) -> bool {
    hundredths(reads) > OVER_READ_HUNDREDTHS
}

/// The devices by how much more they read than they need, in hundredths, with the reads of the first of those that are alike.
pub(super) fn by_factor(plan: &Plan, found: &Amplification) -> BTreeMap<u128, (Reads, Vec<u64>)> {
    let mut groups: BTreeMap<u128, (Reads, Vec<u64>)> = BTreeMap::new();
    for (device, reads) in plan.devices.iter().zip(&found.devices) {
        groups.entry(hundredths(*reads)).or_insert_with(|| (*reads, Vec::new())).1.push(*device);
    }
    groups
}

/// Why the tensors of one name are read in part of each page.
#[derive(Clone, Debug)]
pub(super) struct AdviceReason {
    /// Name of the tensors, with `*` for numbers.
    pub(super) name: String,
    /// What the device with the greatest excess reads of them.
    pub(super) reads: Reads,
    /// Axis of the tensor whose cut makes short runs.
    pub(super) axis: usize,
    /// The mesh axes that cut it.
    pub(super) mesh_axes: Vec<String>,
    /// Bytes of one run.
    pub(super) run_bytes: u64,
    /// Distance of the runs in bytes; 0 if there is one run.
    pub(super) stride_bytes: u64,
}

impl AdviceReason {
    /// The cause in a sentence.
    pub(super) fn text(&self) -> String {
        let Self { axis, mesh_axes, run_bytes, stride_bytes, .. } = self;
        let cut = if mesh_axes.len() == 1 { "cuts" } else { "cut" };
        let (run, page) = (human_bytes(*run_bytes), human_bytes(page_bytes()));
        let mesh_axes = mesh_axes.join(" and ");
        if *stride_bytes == 0 {
            return format!(
                "{mesh_axes} {cut} axis {axis} into parts of {run}, which begin and end inside pages of {page}"
            );
        }
        let stride = human_bytes(*stride_bytes);
        format!(
            "{mesh_axes} {cut} axis {axis}: a device needs {run} of every {stride}, and files are read in pages of {page}"
        )
    }
}

/// The causes for the tensors with the greatest excess, those that have one.
pub(super) fn reasons(checkpoint: &Checkpoint, plan: &Plan, found: &Amplification) -> Vec<AdviceReason> {
    let worst: Vec<&(String, Reads)> =
        found.tensors.iter().filter(|(_, reads)| exceeds(*reads)).take(REASONS_MAX).collect();
    let mut firsts: Vec<Option<&PlannedTensor>> = vec![None; worst.len()];
    for tensor in plan.bundle() {
        let name = group_name(&tensor.name);
        if let Some(at) = worst.iter().position(|(worst, _)| *worst == name) {
            firsts[at].get_or_insert(tensor);
        }
    }
    let reason = |((name, reads), tensor): (&&(String, Reads), Option<&PlannedTensor>)| {
        let cut = worst_cut(checkpoint, plan, tensor?)?;
        Some(AdviceReason { name: name.clone(), reads: *reads, ..cut })
    };
    worst.iter().zip(firsts).filter_map(reason).collect()
}

/// The axis of a tensor whose cut alone costs the most.
fn worst_cut(checkpoint: &Checkpoint, plan: &Plan, tensor: &PlannedTensor) -> Option<AdviceReason> {
    let shape = tensor.view.shape();
    let held = plan.devices.iter().map(|device| plan.region(tensor, *device));
    let held = held.into_iter().find(|region| !region.shape().is_empty())?;
    let mut leaves = Vec::new();
    for_each_leaf(&tensor.view, &mut |leaf| {
        leaves.push(leaf);
        false
    });
    let leaf = leaves.first()?;
    let cuts = (0..shape.rank()).filter_map(|axis| {
        let mut ranges: Vec<_> = shape.whole().ranges().collect();
        let cut = held.ranges().nth(axis)?;
        if cut == ranges[axis] {
            return None;
        }
        ranges[axis] = cut;
        let (reads, runs) = cost(checkpoint, leaf, &Region::within(shape, &ranges)?)?;
        let axes = plan.spec(tensor).mesh_axes(axis).map(|index| &plan.mesh.axes()[index]).filter(|axis| axis.size > 1);
        Some(AdviceReason {
            name: String::new(),
            reads,
            axis,
            mesh_axes: axes.map(|axis| format!("{}={}", axis.name, axis.size)).collect(),
            run_bytes: runs.run_bytes(),
            stride_bytes: runs.loops().last().map_or(0, |(_, stride)| *stride),
        })
    });
    cuts.filter(|cut| exceeds(cut.reads) && !cut.mesh_axes.is_empty()).max_by_key(|cut| cut.reads.excess_bytes())
}

/// What a region of the tensor reads of the leaf's first source, and the runs in it.
fn cost(checkpoint: &Checkpoint, leaf: &ReadLeaf<'_>, held: &Region) -> Option<(Reads, ByteRuns)> {
    let tiling = leaf.view.region(&leaf.region(held)?).ok()?.lower().ok()?;
    let all: Vec<_> = runs_of(&tiling).collect();
    let (first, shortest) = all.iter().min_by_key(|(_, runs)| runs.run_bytes())?.clone();
    let of_first = all.into_iter().filter(|(id, _)| *id == first).map(|(_, runs)| runs).collect();
    let span = checkpoint.tensor(first).span();
    Some((reads(of_first, &(span.start()..span.end()), page_bytes()), shortest))
}

/// What to change, as sentences.
pub(super) fn advice(plan: &Plan, found: &Amplification, reasons: &[AdviceReason]) -> Vec<String> {
    // Pages at the ends of parts are many only where parts are small: another mesh helps against short runs.
    let short = reasons.iter().filter(|reason| reason.stride_bytes > 0);
    let mut axes: Vec<&str> = short.flat_map(|reason| &reason.mesh_axes).map(String::as_str).collect();
    axes.sort_unstable();
    axes.dedup();
    let names: Vec<&str> = axes.iter().filter_map(|axis| axis.split('=').next()).collect();
    let names = names.join(" and ");
    let union_is_fine = plan.devices.len() > 1 && !exceeds(found.union);
    let mut lines = Vec::new();
    if union_is_fine && !reasons.is_empty() {
        lines.push("a host that runs all listed devices reads each page once, and no more than it needs".to_owned());
    }
    if names.is_empty() {
        return lines;
    }
    if !union_is_fine || plan.devices.len() > DEVICES_OF_HOST {
        lines.push(format!(
            "devices that differ only in {names} use the same pages: run them on one host, which then reads each page once"
        ));
    }
    lines.push(format!(
        "else make {names} smaller and another axis larger, or cut another axis of these tensors (--shard FILE)"
    ));
    lines
}
