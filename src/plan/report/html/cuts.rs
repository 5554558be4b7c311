//! Which part of a tensor each device holds.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use ckfs_tensor::Region;
use serde_json::{Value, json};

use super::{super::effects::TensorGroup, budget::PageBudget};
use crate::{
    Plan, PlannedTensor,
    leaf::ReadLeaf,
    numbered::{Numbered, NumberedSet},
};

/// The parts of the tensors of a group.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    /// Its number in the page.
    pub(super) number: usize,
    /// The distinct parts.
    pub(super) parts: Vec<CutPart>,
}

/// What a device holds of the tensors of a group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct CutPart {
    /// Number of tensors that it holds.
    held: u64,
    /// First and last number of the experts that it holds, in a group of single experts.
    experts: Option<(u64, u64)>,
    /// What it holds of each of them. An empty region stands for nothing.
    pub(super) region: Region,
}

impl CutPart {
    /// Whether the part has a leaf of a tensor of this expert.
    pub(super) fn has(&self, leaf: &ReadLeaf<'_>, expert: Option<u64>) -> bool {
        let in_experts = |expert| self.experts.is_some_and(|(first, last)| (first..=last).contains(&expert));
        let ranges: Vec<_> = self.region.ranges().collect();
        self.held > 0
            && expert.is_none_or(in_experts)
            && leaf.at.iter().all(|(axis, index)| ranges[*axis].contains(index))
    }

    /// The parts that differ from this one in neither experts nor these axes have the same leaves.
    pub(super) fn leaves_key(&self, axes: &[usize]) -> (Option<(u64, u64)>, Vec<Range<u64>>) {
        let ranges: Vec<_> = self.region.ranges().collect();
        (self.experts, axes.iter().map(|axis| ranges[*axis].clone()).collect())
    }
}

/// Spec, shape, and the experts with the number of tensors of each: they determine the parts.
type Key = (String, Vec<u64>, Vec<(Option<(u64, u64)>, u64)>);

/// The cuts of a page. Equal ones are stored once.
#[derive(Debug)]
pub(super) struct Cuts<'a> {
    plan: &'a Plan,
    /// The devices that the page shows.
    devices: &'a [u64],
    known: HashMap<Key, Option<Cut>>,
    budget: PageBudget,
    /// By number, the parts as `[map, [tensors held, [first, last expert] or 0, [start, length] per axis …], …]`.
    pub(super) listed: Vec<Value>,
    /// By device, the number of its part, as pairs of number and repetitions.
    pub(super) device_maps: Numbered<String, Value>,
}

impl<'a> Cuts<'a> {
    pub(super) fn new(plan: &'a Plan, devices: &'a [u64], budget: PageBudget) -> Self {
        Self { plan, devices, known: HashMap::new(), budget, listed: Vec::new(), device_maps: Numbered::default() }
    }

    /// The cut of a group. `None` if the page has no room for it.
    pub(super) fn of(&mut self, group: &TensorGroup<'_>) -> Option<Cut> {
        let first = group.first();
        let mut experts: BTreeMap<Option<(u64, u64)>, (u64, &PlannedTensor)> = BTreeMap::new();
        for member in &group.members {
            experts.entry(member.expert).or_insert((0, member)).0 += 1;
        }
        let spec = self.plan.spec(first).to_json(first.view.shape().rank(), &self.plan.mesh).to_string();
        let counts = experts.iter().map(|(expert, (count, _))| (*expert, *count)).collect();
        let key = (spec, first.view.shape().extents().to_vec(), counts);
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let made = if self.budget.is_spent() { None } else { self.make(&experts) };
        self.known.insert(key, made.clone());
        made
    }

    fn make(&mut self, experts: &BTreeMap<Option<(u64, u64)>, (u64, &PlannedTensor)>) -> Option<Cut> {
        let mut parts: NumberedSet<CutPart> = NumberedSet::default();
        let mut of_device: Vec<usize> = Vec::new();
        for device in self.devices {
            let mut part: Option<CutPart> = None;
            for (expert, (count, tensor)) in experts {
                let region = self.plan.region(tensor, *device);
                let number = expert.map(|(number, _)| (number, number));
                match &mut part {
                    Some(_) if region.shape().is_empty() => {}
                    Some(part) if part.held > 0 => {
                        part.held += count;
                        part.experts = part.experts.zip(number).map(|((first, _), (last, _))| (first, last));
                    }
                    _ if region.shape().is_empty() => part = Some(CutPart { held: 0, experts: None, region }),
                    _ => part = Some(CutPart { held: *count, experts: number, region }),
                }
            }
            of_device.push(parts.insert_full(part?).0);
        }
        let map = repeated(&of_device);
        let text = map.to_string();
        let map_number = self.device_maps.get_index_of(&text).unwrap_or(self.device_maps.len());
        let value: Vec<Value> = std::iter::once(json!(map_number)).chain(parts.iter().map(part_json)).collect();
        let value = Value::from(value);
        if !self.budget.take(&value) {
            return None;
        }
        if map_number == self.device_maps.len() {
            if !self.budget.take(&map) {
                return None;
            }
            self.device_maps.insert(text, map);
        }
        self.listed.push(value);
        Some(Cut { number: self.listed.len() - 1, parts: parts.into_iter().collect() })
    }
}

/// Numbers as pairs of number and repetitions.
pub(super) fn repeated(numbers: &[usize]) -> Value {
    numbers.chunk_by(|a, b| a == b).flat_map(|run| [run[0], run.len()]).map(Value::from).collect()
}

fn part_json(part: &CutPart) -> Value {
    let ranges = part.region.ranges().map(|range| json!([range.start, range.end - range.start]));
    let experts = part.experts.map_or(json!(0), |(first, last)| json!([first, last]));
    [json!(part.held), experts].into_iter().chain(ranges).collect()
}
