//! The tensors of a view as rows of the page.

use std::collections::{BTreeMap, HashMap, HashSet};

use ckfs_checkpoint::Checkpoint;
use ckfs_tensor::{Reads, TensorId};
use serde_json::{Value, json};

use super::{
    super::effects::{TensorGroup, groups},
    budget::PageBudget,
    bytes::{EmbeddedFiles, Patterns, number_of, source_json},
    cuts::{Cut, CutPart, Cuts, repeated},
};
use crate::{
    Amplification, Plan, PlannedTensor,
    leaf::{ReadLeaf, for_each_leaf},
    name_group,
    numbered::{Numbered, NumberedSet},
};

/// Rows of a view.
const ROWS_MAX: usize = 2000;
/// Tensors of one layer or expert that a row lists with their sources.
const LEAVES_SHOWN: usize = 16;
/// Of those, that each part gets at least, and the parts that do.
const LEAVES_OF_PART: usize = 1;
const PARTS_SERVED: usize = 32;
/// Source tensors of one of those.
const SOURCES_SHOWN: usize = 8;
/// Room of the kinds of content, in bytes.
pub(super) const ROWS_BYTES: usize = 800_000;
pub(super) const SOURCES_BYTES: usize = 800_000;
pub(super) const CUTS_BYTES: usize = 750_000;
pub(super) const PATTERNS_BYTES: usize = 800_000;

struct Maker<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a Plan,
    files: &'a EmbeddedFiles,
    reads: HashMap<&'a str, Reads>,
    cuts: Cuts<'a>,
    patterns: Patterns<'a>,
    sources: PageBudget,
}

/// The rows of a view for these devices, and what they refer to, as members of the page. The largest groups come first where there is
/// not room for all; `room` gives the part of a view in the room of a kind of content.
pub(super) fn records(
    checkpoint: &Checkpoint,
    plan: &Plan,
    devices: &[u64],
    files: &EmbeddedFiles,
    room: impl Fn(usize) -> PageBudget,
) -> Value {
    let groups = groups(plan);
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(groups[*index].bytes));
    let found = Amplification::of(checkpoint, plan);
    let mut maker = Maker {
        checkpoint,
        plan,
        files,
        reads: found.tensors.iter().map(|(name, reads)| (name.as_str(), *reads)).collect(),
        cuts: Cuts::new(plan, devices, room(CUTS_BYTES)),
        patterns: Patterns::new(checkpoint, room(PATTERNS_BYTES)),
        sources: room(SOURCES_BYTES),
    };
    let mut budget = room(ROWS_BYTES);
    let mut made: BTreeMap<usize, Value> = BTreeMap::new();
    // Without a row, and with one whose cut, or whose bytes in the sources, are not in the page.
    let (mut folded, mut tensors, mut bytes, mut without_cut, mut without_bytes) = (0, 0, 0, 0, 0);
    for index in order {
        let group = &groups[index];
        let mut row = maker.row(group);
        if made.len() >= ROWS_MAX || !budget.take(&row) {
            folded += 1;
            tensors += group.members.len();
            bytes += group.bytes;
            continue;
        }
        maker.details(group, &mut row);
        without_cut += usize::from(row["cut"].is_null());
        without_bytes += usize::from(row["leaves"].is_null());
        made.insert(index, row);
    }
    json!({
        "rows": made.into_values().collect::<Vec<_>>(),
        "cuts": maker.cuts.listed,
        "device_maps": maker.cuts.device_maps.into_values().collect::<Vec<_>>(),
        "patterns": maker.patterns.listed.into_values().collect::<Vec<_>>(),
        "folded": {
            "groups": folded, "tensors": tensors, "bytes": bytes, "without_cut": without_cut, "without_bytes": without_bytes,
        },
    })
}

impl Maker<'_> {
    /// The row without its parts and sources.
    fn row(&self, group: &TensorGroup<'_>) -> Value {
        let (first, shape) = (group.first(), group.first().view.shape());
        let names = group.members.iter().map(|member| member.name.as_str());
        let folded = name_group::fold(names, &[]);
        let name = folded.first().map_or(group.name.as_str(), |folded| folded.name.as_str());
        let mut row = json!({
            "name": name,
            "count": group.members.len(),
            "dtype": first.view.dtype().code(),
            "bits": first.view.dtype().bits(),
            "shape": shape.extents(),
            "spec": self.plan.spec(first).to_json(shape.rank(), &self.plan.mesh),
            "bytes": group.bytes,
            "path": self.plan.path(first).join("/"),
        });
        if let Some(layers) = &first.layers {
            row["layers"] = name_group::ranges(layers.iter()).into();
        }
        if let Some(reads) = self.reads.get(group.name.as_str()) {
            row["reads"] = json!([reads.needed_bytes, reads.paged_bytes]);
        }
        row
    }

    /// Adds the parts that devices hold, and the sources with their bytes, as far as there is room.
    fn details(&mut self, group: &TensorGroup<'_>, row: &mut Value) {
        row["files"] = self.files_of(group);
        let cut = self.cuts.of(group);
        let Some(cut) = cut else { return };
        row["cut"] = cut.number.into();
        if let Some(leaves) = self.leaves(group, &cut) {
            for (key, value) in leaves {
                row[key] = value;
            }
        }
    }

    /// The files that a group is read from, each with the number of stored tensors, the fullest first.
    fn files_of(&mut self, group: &TensorGroup<'_>) -> Value {
        let mut files: BTreeMap<usize, u64> = BTreeMap::new();
        let mut of_source = |id: TensorId| {
            let file = self.checkpoint.tensor(id).file();
            *files.entry(number_of(self.checkpoint, self.files, file)).or_default() += 1;
        };
        group.members.iter().for_each(|member| member.view.for_each_stored(&mut of_source));
        let files: Value = files.iter().map(|(file, count)| json!([file, count])).collect();
        if self.sources.take(&files) { files } else { Value::Null }
    }

    /// The first leaves of a group: their sources, and what each part reads of these.
    fn leaves(&mut self, group: &TensorGroup<'_>, cut: &Cut) -> Option<[(&'static str, Value); 3]> {
        let (shown, count) = choose(group, cut);
        let (mut reads, mut rows) = (Numbered::default(), Vec::new());
        for (member, leaf) in &shown {
            let sources: NumberedSet<TensorId> = leaf.view.stored_ids().into_iter().collect();
            let kind = self.patterns.kind(leaf, &sources);
            let number = match reads.get_index_of(&kind) {
                Some(number) => number,
                None => reads.insert_full(kind, self.reads_of(cut, kind, leaf, &sources)?).0,
            };
            let listed = sources.iter().take(SOURCES_SHOWN);
            let listed: Value = listed.map(|id| source_json(self.checkpoint, self.files, *id)).collect();
            let name = if group.members.len() > 1 { member.name.as_str() } else { "" };
            let expert = member.expert.map(|(number, _)| number);
            let row = json!([number, name, leaf.at.as_slice(), listed, expert]);
            if !self.sources.take(&row) {
                break;
            }
            rows.push(row);
        }
        let more = count.saturating_sub(rows.len() as u64);
        let reads: Value = reads.into_values().collect();
        (!rows.is_empty()).then(|| [("reads_of", reads), ("leaves", rows.into()), ("more_leaves", more.into())])
    }

    /// What each part reads of a leaf of this kind, as pairs of number and repetitions.
    fn reads_of(
        &mut self,
        cut: &Cut,
        kind: usize,
        leaf: &ReadLeaf<'_>,
        sources: &NumberedSet<TensorId>,
    ) -> Option<Value> {
        let of_parts = cut.parts.iter().map(|part| self.patterns.of(kind, leaf, sources, &part.region));
        let of_parts = repeated(&of_parts.collect::<Option<Vec<usize>>>()?);
        self.sources.take(&of_parts).then_some(of_parts)
    }
}

/// The leaves of a group that its row lists: the first ones, and the first ones of each part. Then the number of all.
fn choose<'a>(group: &TensorGroup<'a>, cut: &Cut) -> (Vec<(&'a PlannedTensor, ReadLeaf<'a>)>, u64) {
    let (mut shown, mut count) = (Vec::new(), 0);
    // Parts with the same leaves, and how many of these are listed.
    let mut wanted: Option<Vec<(&CutPart, usize)>> = None;
    for member in &group.members {
        let expert = member.expert.map(|(number, _)| number);
        for_each_leaf(&member.view, &mut |leaf| {
            count += 1;
            let wanted = wanted.get_or_insert_with(|| {
                let axes: Vec<usize> = leaf.at.iter().map(|(axis, _)| *axis).collect();
                let mut seen = HashSet::new();
                let distinct = cut.parts.iter().filter(|part| seen.insert(part.leaves_key(&axes)));
                distinct.take(PARTS_SERVED).map(|part| (part, 0)).collect()
            });
            let lacks = |(part, listed): &(&CutPart, usize)| *listed < LEAVES_OF_PART && part.has(&leaf, expert);
            if shown.len() < LEAVES_SHOWN || wanted.iter().any(lacks) {
                wanted.iter_mut().filter(|(part, _)| part.has(&leaf, expert)).for_each(|(_, listed)| *listed += 1);
                shown.push((*member, leaf));
            }
            true
        });
    }
    (shown, count)
}
