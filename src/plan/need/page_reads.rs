//! Read amplification: the bytes that the devices' shards need, against the bytes of all pages that they touch.
//!
//! A shard cut on an inner axis touches pages of the sources and uses only a part of each. The rest of each page is
//! read too, for nothing unless another device of the same host uses it. The counts are exact, per source tensor and
//! over all views of it. Tensors that are alike are counted once. Views are split at their stacks into *leaves*, the
//! views of one layer or one expert. Two leaves are alike if their expressions differ only in the source tensors.

use std::{collections::BTreeMap, ops::Range};

use ckfs_checkpoint::Checkpoint;
use ckfs_source::page_size::page_bytes;
use ckfs_tensor::{ByteRuns, DType, Op, Reads, Region, Shape, SourceTensor, TensorId, View, reads};
use hashbrown::{HashMap, HashSet};
use smallvec::SmallVec;

use super::{
    super::{
        Amplification, Plan, PlannedTensor,
        naming::group_name,
        numbered::{Numbered, number_of},
    },
    leaf::{ReadLeaf, for_each_leaf, for_each_leaf_of},
};

impl Amplification {
    /// That of all bundled tensors and listed devices. It is counted once for a plan, by the first caller.
    pub fn of<'a>(checkpoint: &Checkpoint, plan: &'a Plan) -> &'a Self {
        plan.amplification.get_or_init(|| Self::count(checkpoint, plan))
    }

    fn count(checkpoint: &Checkpoint, plan: &Plan) -> Self {
        let mut kinds: Numbered<HoldingKey<'_>, &PlannedTensor> = Numbered::default();
        let mut tensors: Vec<(&PlannedTensor, u32)> = Vec::new();
        for tensor in plan.bundle() {
            let key = (tensor.spec, tensor.expert, tensor.stage, tensor.view.shape());
            tensors.push((tensor, number_of(&mut kinds, key, |_| tensor)));
        }
        let firsts: Vec<&PlannedTensor> = kinds.into_values().collect();
        let classes = Classes::new(plan, &firsts);
        let mut walk = Walk::default();
        let holdings: Vec<u32> = firsts.iter().map(|tensor| walk.holding(plan, tensor, &classes)).collect();
        let mut groups: BTreeMap<String, u32> = BTreeMap::new();
        for (tensor, kind) in tensors {
            let next = number(groups.len());
            let group = *groups.entry(group_name(&tensor.name)).or_insert(next);
            walk.tensor(&tensor.view, holdings[kind as usize], group);
        }
        walk.count(checkpoint, &classes, groups)
    }
}

/// Spec, expert, stage and shape of a tensor: they determine which part of it each device holds.
type HoldingKey<'a> = (u32, Option<(u64, u64)>, Option<u64>, &'a Shape);

/// A number as 32 bits: there are fewer tensors and devices than that.
fn number(of: usize) -> u32 {
    u32::try_from(of).expect("fewer than there are tensors or devices")
}

/// Listed devices that hold the same part of every tensor are one class.
#[derive(Debug)]
struct Classes {
    /// By listed device.
    of_device: Vec<u32>,
    /// The first device of each class.
    first: Vec<u64>,
}

impl Classes {
    /// `kinds` are tensors of which devices may hold different parts.
    fn new(plan: &Plan, kinds: &[&PlannedTensor]) -> Self {
        let mut of_device = vec![0; plan.devices.len()];
        let mut first: Vec<u64> = plan.devices.first().copied().into_iter().collect();
        for tensor in kinds {
            let mut known: Numbered<(u32, Region), u64> = Numbered::default();
            for (class, device) in of_device.iter_mut().zip(&plan.devices) {
                *class = number_of(&mut known, (*class, plan.region(tensor, *device)), |_| *device);
            }
            first = known.into_values().collect();
        }
        Self { of_device, first }
    }
}

/// By axis, the indices at which regions begin or end, ascending.
fn borders(regions: &[Region]) -> Vec<Vec<u64>> {
    let rank = regions.first().map_or(0, |region| region.shape().rank());
    let borders = (0..rank).map(|axis| {
        let ends = |region: &Region| range(region, axis).map_or([0, 0], |range| [range.start, range.end]);
        let mut borders: Vec<u64> = regions.iter().flat_map(ends).collect();
        borders.sort_unstable();
        borders.dedup();
        borders
    });
    borders.collect()
}

fn range(region: &Region, axis: usize) -> Option<Range<u64>> {
    region.ranges().nth(axis)
}

/// The part of a tensor that a leaf is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LeafPosition {
    /// Axis of the tensor by axis of the leaf.
    axes: SmallVec<[usize; 4]>,
    /// The other axes of the tensor, each with the number of borders at or before the leaf.
    fixed: SmallVec<[(usize, usize); 2]>,
}

/// The reads of the classes from the sources of leaves that are alike.
#[derive(Debug)]
struct LeafReads {
    /// By class, its index in `parts`. The first part is empty.
    part_of: Vec<u32>,
    /// Runs by source of the leaf.
    parts: Vec<Vec<Vec<ByteRuns>>>,
}

/// By leaf, holding and position.
type LeavesReads = Numbered<(u32, u32, LeafPosition), LeafReads>;

/// The number of a [`LeafReads`], and the number of a source in its leaf.
type Use = (u32, u32);

/// One read of a source by the tensors of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Reading {
    source: TensorId,
    group: u32,
    of: Use,
}

#[derive(Debug, Default)]
struct Walk {
    /// The regions of the classes in a tensor, and their [`borders`].
    holdings: Numbered<Vec<Region>, Vec<Vec<u64>>>,
    /// By expression.
    leaves: HashMap<Vec<u64>, u32>,
    leaf_reads: LeavesReads,
    readings: Vec<Reading>,
    expression: Expression,
}

impl Walk {
    /// The holding of a tensor; the same for most experts.
    fn holding(&mut self, plan: &Plan, tensor: &PlannedTensor, classes: &Classes) -> u32 {
        let regions: Vec<Region> = classes.first.iter().map(|device| plan.region(tensor, *device)).collect();
        number_of(&mut self.holdings, regions, |regions| borders(regions))
    }

    fn tensor(&mut self, view: &View, holding: u32, group: u32) {
        for_each_leaf(view, &mut |leaf| self.part(leaf, holding, group));
    }

    fn part(&mut self, leaf: ReadLeaf<'_>, holding: u32, group: u32) -> bool {
        if let Op::Sum { of } | Op::Product { of, .. } = leaf.view.op() {
            // Both sides are read at the same places.
            for side in of {
                let side = ReadLeaf { view: side, ..leaf.clone() };
                for_each_leaf_of(side, &mut |leaf| self.part(leaf, holding, group));
            }
            return true;
        }
        let ReadLeaf { view, axes, at } = leaf;
        let borders = &self.holdings[holding as usize];
        let below = |axis: usize, index: u64| borders[axis].partition_point(|border| *border <= index);
        let fixed = at.iter().map(|(axis, index)| (*axis, below(*axis, *index))).collect();
        self.leaf(view, LeafPosition { axes, fixed }, holding, group);
        true
    }

    fn leaf(&mut self, view: &View, place: LeafPosition, holding: u32, group: u32) {
        self.expression.read(view);
        let next = number(self.leaves.len());
        let leaf = *self.leaves.entry_ref(&self.expression.words[..]).or_insert(next);
        let (holdings, sources) = (&self.holdings, &self.expression.sources);
        let at = number_of(&mut self.leaf_reads, (leaf, holding, place), |(_, _, place)| {
            let (regions, borders) = holdings.get_index(holding as usize).expect("it was given this number");
            reads_of_leaf(view, place, (regions, borders), sources)
        });
        let of_source = |(source, ordinal): (&TensorId, &u32)| Reading { source: *source, of: (at, *ordinal), group };
        self.readings.extend(self.expression.sources.iter().map(of_source));
    }

    fn count(mut self, checkpoint: &Checkpoint, classes: &Classes, groups: BTreeMap<String, u32>) -> Amplification {
        self.readings.sort_unstable();
        let mut totals: HashMap<Uses, u64> = HashMap::new();
        let mut of_groups: HashMap<(u32, Uses), u64> = HashMap::new();
        for readings in self.readings.chunk_by(|a, b| a.source == b.source) {
            let span = checkpoint.tensor(readings[0].source).span();
            let start = span.start() % page_bytes();
            let place = start..start + span.len();
            *totals.entry(Uses::new(readings, place.clone())).or_default() += 1;
            for of_group in readings.chunk_by(|a, b| a.group == b.group) {
                *of_groups.entry((of_group[0].group, Uses::new(of_group, place.clone()))).or_default() += 1;
            }
        }
        let nothing = vec![Reads::default(); classes.first.len()];
        let (mut by_class, mut union) = (nothing.clone(), Reads::default());
        let mut by_group = vec![nothing; groups.len()];
        let mut known: HashMap<&Uses, Vec<Reads>> = HashMap::new();
        for (uses, count) in &totals {
            add(&mut by_class, known.entry(uses).or_insert_with(|| uses.by_class(&self.leaf_reads)), *count);
            union += uses.union(&self.leaf_reads).times(*count);
        }
        for ((group, uses), count) in &of_groups {
            let reads = known.entry(uses).or_insert_with(|| uses.by_class(&self.leaf_reads));
            add(&mut by_group[*group as usize], reads, *count);
        }
        let worst = |reads: &[Reads]| reads.iter().copied().max_by_key(|reads| reads.excess_bytes());
        let mut tensors: Vec<(String, Reads)> = groups
            .into_iter()
            .filter_map(|(name, group)| Some((name, worst(&by_group[group as usize])?)))
            .filter(|(_, reads)| reads.excess_bytes() > 0)
            .collect();
        tensors.sort_by_key(|(_, reads)| std::cmp::Reverse(reads.excess_bytes()));
        let devices = classes.of_device.iter().map(|class| by_class[*class as usize]).collect();
        Amplification { devices, union, tensors }
    }
}

fn add(sums: &mut [Reads], reads: &[Reads], count: u64) {
    sums.iter_mut().zip(reads).for_each(|(sum, reads)| *sum += reads.times(count));
}

/// All uses of a source tensor, and where in pages it lies.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Uses {
    uses: SmallVec<[Use; 1]>,
    place: Range<u64>,
}

impl Uses {
    fn new(readings: &[Reading], place: Range<u64>) -> Self {
        let mut uses: SmallVec<[Use; 1]> = readings.iter().map(|reading| reading.of).collect();
        uses.sort_unstable();
        uses.dedup();
        Self { uses, place }
    }

    /// By class, the part that it holds of each use.
    fn parts(&self, leaf_reads: &LeavesReads) -> impl Iterator<Item = SmallVec<[u32; 1]>> {
        let classes = self.uses.first().map_or(0, |(at, _)| leaf_reads[*at as usize].part_of.len());
        (0..classes).map(|class| self.uses.iter().map(|(at, _)| leaf_reads[*at as usize].part_of[class]).collect())
    }

    fn runs<'a>(&self, leaf_reads: &'a LeavesReads, parts: &[u32]) -> impl Iterator<Item = &'a ByteRuns> {
        self.uses.iter().zip(parts).flat_map(|((at, ordinal), part)| {
            leaf_reads[*at as usize].parts[*part as usize].get(*ordinal as usize).into_iter().flatten()
        })
    }

    fn by_class(&self, leaf_reads: &LeavesReads) -> Vec<Reads> {
        let mut known: HashMap<SmallVec<[u32; 1]>, Reads> = HashMap::new();
        let mut of_parts = |parts: SmallVec<[u32; 1]>| {
            let of = |parts: &SmallVec<[u32; 1]>| self.runs(leaf_reads, parts).cloned().collect();
            *known.entry(parts).or_insert_with_key(|parts| reads(of(parts), &self.place, page_bytes()))
        };
        self.parts(leaf_reads).map(&mut of_parts).collect()
    }

    fn union(&self, leaf_reads: &LeavesReads) -> Reads {
        let distinct: HashSet<SmallVec<[u32; 1]>> = self.parts(leaf_reads).collect();
        let runs = distinct.iter().flat_map(|parts| self.runs(leaf_reads, parts)).cloned().collect();
        reads(runs, &self.place, page_bytes())
    }
}

/// The reads of the classes for one leaf.
fn reads_of_leaf(
    view: &View,
    place: &LeafPosition,
    (regions, borders): (&[Region], &[Vec<u64>]),
    sources: &HashMap<TensorId, u32>,
) -> LeafReads {
    let mut parts: Numbered<Option<Region>, Vec<Vec<ByteRuns>>> = [(None, Vec::new())].into_iter().collect();
    let mut part = |held: &Region| {
        for (axis, below) in &place.fixed {
            let at = borders[*axis].get(below.checked_sub(1)?)?;
            range(held, *axis).filter(|range| range.contains(at))?;
        }
        let ranges: Option<SmallVec<[Range<u64>; 4]>> = place.axes.iter().map(|axis| range(held, *axis)).collect();
        let held = Some(Region::within(view.shape(), &ranges?)?).filter(|region| !region.shape().is_empty());
        if let Some(part) = parts.get_index_of(&held) {
            return Some(number(part));
        }
        // A view without a tiling was refused when the plan was made.
        let tiling = view.region(held.as_ref()?).ok()?.lower().ok()?;
        let mut runs = vec![Vec::new(); sources.len()];
        for (source, found) in
            tiling.pieces().iter().flat_map(|piece| ByteRuns::of_some(&tiling, piece, &|id| sources.contains_key(&id)))
        {
            runs[*sources.get(&source)? as usize].push(found);
        }
        Some(number(parts.insert_full(held, runs).0))
    };
    let part_of = regions.iter().map(|region| part(region).unwrap_or(0)).collect();
    LeafReads { part_of, parts: parts.into_values().collect() }
}

/// A view's expression without its source tensors: equal for views that are alike.
#[derive(Debug, Default)]
pub(crate) struct Expression {
    pub(crate) words: Vec<u64>,
    /// The source tensors, numbered by their first place.
    sources: HashMap<TensorId, u32>,
}

impl Expression {
    pub(crate) fn read(&mut self, view: &View) {
        self.words.clear();
        self.sources.clear();
        self.add(view);
    }

    fn add_numbers<'a>(&mut self, operator: u64, numbers: impl IntoIterator<Item = &'a u64>) {
        let at = self.words.len();
        self.words.extend([operator, 0]);
        self.words.extend(numbers);
        self.words[at + 1] = (self.words.len() - at) as u64;
    }

    /// Adds the dtype of a source tensor, and its number.
    fn add_number(&mut self, id: TensorId, dtype: DType) {
        let next = number(self.sources.len());
        let ordinal = *self.sources.entry(id).or_insert(next);
        self.words.extend([dtype as u64, u64::from(ordinal)]);
    }

    fn add_source(&mut self, tensor: &SourceTensor) {
        self.add_numbers(0, tensor.shape.extents());
        self.add_number(tensor.id, tensor.dtype);
    }

    /// Element operators, scales and zero points are left out: they do not move bytes.
    fn add(&mut self, view: &View) {
        match view.op() {
            Op::Source(tensor) => self.add_source(tensor),
            Op::Mosaic(mosaic) => {
                self.add_numbers(13, mosaic.shape().extents());
                for part in mosaic.boxes() {
                    self.add_numbers(14, part.origin.iter().chain(part.extents).chain(&part.strides()));
                    self.add_number(part.tensor, mosaic.dtype());
                }
            }
            Op::Quantized(value) => {
                // Only the position of the codes counts: decoding does not move bytes.
                let operand = &value.load;
                self.add_source(&operand.tensor);
                self.add_numbers(9, view.shape().extents());
                // Packed integers are numbered by their bytes.
                self.words.push(view.dtype() as u64);
                self.add_numbers(10, &[operand.field.bits(), operand.field.index_bits()]);
                for digit in operand.index.digits() {
                    self.add_numbers(11, &[digit.divisor, digit.modulus, digit.group, digit.turn, digit.stride]);
                    self.add_numbers(12, digit.table.iter().flat_map(|table| table.iter()));
                }
            }
            Op::Encoded { of, part } => {
                let (encoder, (rows, columns)) = (of.bands.encoder(), of.bands.matrix());
                let (block_rows, block_columns) = encoder.block(columns);
                let (codes, elements) = encoder.packed();
                self.add_numbers(18, &[*part as u64, rows, columns, block_rows, block_columns, codes, elements]);
                self.add(&of.input);
                if encoder.has_factor() {
                    of.together.iter().for_each(|(_, view)| self.add(view));
                }
            }
            Op::Fill(_) => self.add_numbers(1, view.shape().extents()),
            Op::Slice { axis, start, stop, step, .. } => self.add_numbers(2, &[*axis as u64, *start, *stop, *step]),
            Op::Transpose { axes, .. } => {
                self.add_numbers(3, &axes.iter().map(|axis| *axis as u64).collect::<SmallVec<[u64; 4]>>());
            }
            Op::Reshape { .. } => self.add_numbers(4, view.shape().extents()),
            Op::Stack { of, axis } => self.add_numbers(5, &[*axis as u64, of.len() as u64]),
            Op::Concat { of, axis } => self.add_numbers(6, &[*axis as u64, of.len() as u64]),
            Op::Pad { axis, before, after, .. } => self.add_numbers(7, &[*axis as u64, *before, *after]),
            Op::Gather { axis, runs, .. } => {
                self.add_numbers(15, &[*axis as u64]);
                runs.iter().for_each(|run| self.add_numbers(16, &[run.first, run.step.cast_unsigned(), run.count]));
            }
            Op::Cast { .. } | Op::Multiply { .. } | Op::Add { .. } | Op::Exp { .. } => {}
            Op::Sum { .. } | Op::Product { .. } => self.add_numbers(17, view.shape().extents()),
        }
        view.op().operands().iter().for_each(|of| self.add(of));
    }
}
