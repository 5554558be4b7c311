//! A plan: named views with specs, and the findings about the repository.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use ckfs_config::Mesh;
use ckfs_tensor::{DType, PIECES_MAX, Reads, Region, Shape, TilingError, View};
use hashbrown::HashSet;
use rayon::prelude::*;
use serde::Serialize;

use super::{
    draft::{Bundled, Draft},
    gguf::GgufFile,
    hf::HfFile,
    logical::LogicalRules,
    name_group::NameGroup,
    naming::component,
    numbered::{Numbered, number_of},
    options::{Layout, ViewOptions},
    problem::{Hole, Problem},
    quantize::Chosen,
    shard::{self, AxisUse, STAGE_AXIS, axes_of, axis_use},
    spec::{self, Spec},
};

/// A named, sharded view.
#[derive(Clone, Debug)]
pub struct PlannedTensor {
    /// Dotted name.
    pub name: String,
    /// The whole, unsharded view.
    pub view: View,
    /// How it is split, as an index into [`Plan::specs`].
    pub(super) spec: u32,
    /// Number of this expert and of all experts, for a tensor of a single expert.
    pub(super) expert: Option<(u64, u64)>,
    /// Number of the pipeline stage that holds the tensor, if only one does.
    pub(super) stage: Option<u64>,
    /// The bundles that hold it.
    pub bundled: Bundled,
    /// Numbers of the layers stacked on axis 0, for a stack.
    pub layers: Option<Arc<[u64]>>,
    /// Logical names of its axes, where the layout gives them.
    pub logical: Vec<String>,
}

/// A process of a serving engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its pipeline stage, if there are several.
    pub stage: Option<u64>,
    /// Its number, within its stage.
    pub number: u64,
    /// A device that has its shards.
    pub device: u64,
}

/// The decoded tensors of one scheme.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DecodedScheme {
    /// The scheme, as `plan --json` calls it.
    pub scheme: &'static str,
    /// Number of tensors of the repository.
    pub tensors: u64,
    /// Bytes of all of them after decoding.
    pub bytes: u64,
}

/// An adapter that is merged on read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergedAdapter {
    /// Where it is.
    pub adapter: PathBuf,
    /// Number of shown tensors of the checkpoint that it changes.
    pub tensors: u64,
}

impl fmt::Display for MergedAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = if self.tensors == 1 { "tensor" } else { "tensors" };
        write!(f, "{} {tensors} with the adapter {}", self.tensors, self.adapter.display())
    }
}

/// Tensors that every device holds whole: buffers, which FSDP does not split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Whole {
    /// Their names.
    pub names: Vec<NameGroup>,
    /// Whether the model's library says so. If it does not have the model, they are taken for buffers by usual names and sizes.
    pub is_known: bool,
}

/// A checkpoint as the user requests to see it.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The devices.
    pub mesh: Mesh,
    /// The layout.
    pub layout: Layout,
    /// Dtype of all floats, if the user or the layout sets one.
    pub dtype: Option<DType>,
    /// The decoded tensors, by scheme.
    pub decoded: Vec<DecodedScheme>,
    /// The adapter that is merged on read, if that is requested.
    pub merged: Option<MergedAdapter>,
    /// The tensors that are quantized on read, if that is requested.
    pub quantized: Option<Chosen>,
    /// Number of quantized tensors that are shown as they are stored although others are decoded.
    pub kept_raw: u64,
    /// Tensors that stay as they are stored, though a dtype is requested, because the model's own code keeps them in float32.
    pub kept: Vec<NameGroup>,
    /// The same of `hf/`.
    pub kept_hf: Vec<NameGroup>,
    /// Tensors that every device of the mesh holds whole although others are split.
    pub whole: Whole,
    /// Stored tensors that belong to decoded ones and that no decoder reads, such as scales of activations: they are not shown.
    pub dropped: Vec<NameGroup>,
    /// Name of the model family whose short names, or whose rules of the layout, are used.
    pub family: Option<String>,
    /// Parameters of the layout and their values.
    pub params: Vec<(String, String)>,
    /// Rules for logical axes, if specs come from those.
    pub logical_rules: Option<LogicalRules>,
    /// Whether each tensor is one file named by its whole dotted name.
    pub(super) flat: bool,
    /// Whether a serving engine reads the shards as the state of its ranks.
    pub sharded_state: bool,
    /// The `config.json` of these shards, where they are decoded: `hf/` may hold the repository as it is stored.
    pub decoded_config: Option<Vec<u8>>,
    /// The file of llama.cpp, in the layout of that name.
    pub gguf: Option<GgufFile>,
    /// Devices listed, ascending.
    pub devices: Vec<u64>,
    /// Distinct specs.
    pub specs: Vec<Spec>,
    /// The tensors, sorted by name.
    pub tensors: Vec<PlannedTensor>,
    /// The files of `hf/`.
    pub hf: Vec<HfFile>,
    /// Whether bundles hold one tensor per source tensor.
    pub unscanned: bool,
    /// Bytes of the largest chunk file, if the user limits them.
    pub chunk_bytes_max: Option<u64>,
    /// Names that a complete model has and the repository lacks, as far as the user allows it.
    pub missing: Vec<NameGroup>,
    /// Names of the repository that the tables of its family lack.
    pub unexpected: Vec<NameGroup>,
    /// Differences between layers that nothing explains and that are not refused.
    pub holes: Vec<Hole>,
    /// Names of the repository that the layout or a flag leaves out.
    pub left_out: Vec<NameGroup>,
    /// Remarks that are not errors.
    pub warnings: Vec<String>,
    /// The reason why there is no `hf/`, if there is none.
    pub no_hf: Option<String>,
    /// Its read amplification, once it is counted.
    pub(super) amplification: OnceLock<Amplification>,
}

impl PlannedTensor {
    /// Bytes of the whole tensor.
    ///
    /// # Panics
    /// Never for a tensor of a plan that was built.
    pub fn bytes(&self) -> u64 {
        self.view.bytes().expect("sizes were added up when the plan was made")
    }
}

impl Plan {
    /// Makes the tensors of these drafts, each with its spec.
    pub(super) fn add(&mut self, drafts: Vec<Draft>, options: &ViewOptions, problems: &mut Vec<Problem>) {
        let first = problems.len();
        let specs: Vec<_> = drafts.par_iter().map(|draft| self.spec_of(draft, options)).collect();
        let mut known: Numbered<Spec, ()> = Numbered::default();
        let numbered = specs.into_iter().map(|(spec, found)| {
            problems.extend(found);
            number_of(&mut known, spec, |_| ())
        });
        let numbered: Vec<u32> = numbered.collect();
        self.specs = known.into_keys().collect();
        let planned = |(draft, spec): (Draft, u32)| {
            let is_told = shard::is_told(&draft, options.sharding, &options.shard_rules);
            PlannedTensor {
                name: draft.name,
                view: draft.view,
                spec,
                expert: if is_told { None } else { draft.roles.expert },
                stage: draft.roles.stage,
                bundled: draft.bundled,
                layers: draft.layers,
                logical: draft.roles.logical,
            }
        };
        self.tensors = drafts.into_par_iter().zip(numbered).map(planned).collect();
        let uneven = problems[first..].iter().filter(|problem| matches!(problem, Problem::Uneven { .. })).count();
        if uneven > 1 && self.logical_rules.is_some() {
            let axes = 0..self.mesh.axes().len();
            problems.splice(first..first, axes.filter_map(|axis| uneven_axis(self, axis)));
        }
        // A size beyond 64 bits has been reported as a problem above.
        let sizes = self.tensors.iter().map(|tensor| tensor.view.bytes().unwrap_or(u64::MAX));
        if sizes.fold(0, u64::saturating_add) > BYTES_MAX {
            let reason = format!("all tensors together have more than {BYTES_MAX} bytes");
            problems.push(Problem::File { file: format!("layout {}", self.layout.name()), reason });
        }
        // Equal names are refused, so that their order does not matter.
        self.tensors.par_sort_unstable_by(|a, b| a.name.cmp(&b.name));
        for pair in self.tensors.windows(2).filter(|pair| pair[0].name == pair[1].name) {
            let name = &pair[0].name;
            problems.push(Problem::collision(name, name, name));
        }
    }

    /// How a draft is split, and all problems of that. Without a split it is whole.
    fn spec_of(&self, draft: &Draft, options: &ViewOptions) -> (Spec, Vec<Problem>) {
        let rules = self.logical_rules.as_ref();
        let whole = shard::spec(draft, &self.mesh, options.sharding, rules, &options.shard_rules);
        let spec = whole.and_then(|whole| match &draft.roles.part {
            Some(part) => shard::of_part(part, &whole, &self.mesh, options.even),
            None => Ok(whole),
        });
        let spec = match spec {
            Ok(spec) => spec,
            Err(problem) => return (Spec::replicated(), vec![problem]),
        };
        let shape = draft.view.shape();
        // JAX, for which the rules of logical axes are made, refuses uneven splits. What is shown as it is stored may have been
        // saved by anything.
        let even = options.even || (rules.is_some() && options.layout != Layout::Stored);
        let uneven = spec.uneven(shape, &self.mesh).filter(|_| even);
        let problem = |(axis, parts)| Problem::Uneven { name: draft.name.clone(), axis, shape: shape.clone(), parts };
        let mut problems: Vec<Problem> = uneven.map(problem).collect();
        // Without rules, views are of the few simple forms that the program itself makes.
        let built_in = !matches!(self.layout, Layout::Embedded(_) | Layout::File(_));
        let tiled = check_tiling(&draft.view, built_in);
        if let Err(error) = tiled.and_then(|()| self.check_shards(&draft.view, &spec)) {
            problems.push(Problem::Tensor { name: draft.name.clone(), reason: error.to_string() });
        }
        (spec, problems)
    }

    /// Checks that no shard of a type narrower than a byte cuts through a byte.
    fn check_shards(&self, view: &View, spec: &Spec) -> Result<(), TilingError> {
        if view.dtype().unit().elements == 1 || spec.is_replicated() {
            return Ok(());
        }
        // If the rows of a plain tensor and of each shard begin and end at a byte, no byte is cut.
        let unit = view.dtype().unit().elements;
        let aligned = |region: &Region| {
            let last = |numbers: &[u64]| numbers.last().is_some_and(|number| number.is_multiple_of(unit));
            last(region.origin()) && last(region.shape().extents())
        };
        let region = |device: &u64| spec.region(view.shape(), &self.mesh, &self.mesh.coordinates(*device));
        if view.as_source().is_some()
            && aligned(&view.shape().whole())
            && self.devices.iter().all(|device| aligned(&region(device)))
        {
            return Ok(());
        }
        self.devices.iter().try_for_each(|device| {
            let shard = view.region(&region(device)).expect("a spec makes regions inside the shape");
            shard.lower().map(drop)
        })
    }

    /// The tensor of this name, and its index.
    pub fn find(&self, name: &str) -> Option<(usize, &PlannedTensor)> {
        let index = self.tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()?;
        Some((index, &self.tensors[index]))
    }

    /// How a tensor is split.
    pub fn spec(&self, tensor: &PlannedTensor) -> &Spec {
        &self.specs[tensor.spec as usize]
    }

    /// The region of a tensor that a device holds. The devices to which the expert axis gives a tensor of a single expert
    /// hold it whole, or as its spec says. The same holds for the devices of the stage of a tensor of a single stage. On the
    /// other devices its region is empty.
    ///
    /// # Panics
    /// Never for a tensor of this plan.
    pub fn region(&self, tensor: &PlannedTensor, device: u64) -> Region {
        let coordinates = self.mesh.coordinates(device);
        let shape = tensor.view.shape();
        let region = self.spec(tensor).region(shape, &self.mesh, &coordinates);
        if self.has(tensor, &coordinates) || shape.rank() == 0 {
            return region;
        }
        let mut ranges: Vec<_> = region.ranges().collect();
        ranges[0].end = ranges[0].start;
        Region::within(shape, &ranges).expect("an empty range inside a region lies inside the shape")
    }

    /// Whether the expert axis and the stages give a tensor to the device at these coordinates.
    fn has(&self, tensor: &PlannedTensor, coordinates: &[u64]) -> bool {
        self.has_expert(tensor, coordinates) && self.has_stage(tensor, coordinates)
    }

    /// Whether a tensor is of the pipeline stage of the device at these coordinates. True for every tensor that is not of one
    /// stage.
    fn has_stage(&self, tensor: &PlannedTensor, coordinates: &[u64]) -> bool {
        tensor.stage.is_none_or(|stage| self.mesh.find(STAGE_AXIS).is_none_or(|axis| coordinates[axis] == stage))
    }

    /// The mesh axis of pipeline stages, if tensors are of single stages.
    fn stage_axis(&self) -> Option<usize> {
        let axis = self.mesh.find(STAGE_AXIS)?;
        self.tensors.iter().any(|tensor| tensor.stage.is_some()).then_some(axis)
    }

    /// Whether there are several pipeline stages with tensors of their own.
    pub fn has_stages(&self) -> bool {
        self.stage_axis().is_some()
    }

    /// The bundled tensors of a device's pipeline stage.
    pub fn bundle_of_stage(&self, device: u64) -> impl Iterator<Item = &PlannedTensor> {
        let coordinates = self.mesh.coordinates(device);
        self.bundle().filter(move |tensor| self.has_stage(tensor, &coordinates))
    }

    /// Whether the expert axis gives a tensor to the device at these coordinates. True for every tensor that is not of
    /// one expert.
    fn has_expert(&self, tensor: &PlannedTensor, coordinates: &[u64]) -> bool {
        tensor.expert.is_none_or(|(expert, experts)| {
            let axes = axes_of(&self.mesh, AxisUse::Expert);
            axes.fold(0..experts, |all, (index, axis)| spec::chunk(all, axis.size, coordinates[index]))
                .contains(&expert)
        })
    }

    /// The first of the experts that the mesh's expert axes give to the same devices. `None` for a tensor that is not
    /// of a single expert, or without such an axis.
    fn expert_group(&self, tensor: &PlannedTensor) -> Option<u64> {
        let (expert, experts) = tensor.expert?;
        let mut axes = axes_of(&self.mesh, AxisUse::Expert).peekable();
        axes.peek()?;
        let held = axes.fold(0..experts, |all, (_, axis)| {
            // As `spec::chunk` splits: chunks of this length, one of which holds the expert.
            let length = (all.end - all.start).div_ceil(axis.size).max(1);
            let at = (expert - all.start) / length;
            spec::chunk(all, axis.size, at)
        });
        Some(held.start)
    }

    /// Whether a mesh axis distributes a tensor: it splits the tensor, or it gives the tensor's expert or stage to some devices
    /// only. Along the other axes devices hold copies.
    pub(super) fn distributes(&self, tensor: &PlannedTensor, mesh_axis: usize) -> bool {
        let name = &self.mesh.axes()[mesh_axis].name;
        let by_expert = tensor.expert.is_some() && axis_use(name) == AxisUse::Expert;
        let by_stage = tensor.stage.is_some() && name == STAGE_AXIS;
        self.spec(tensor).uses(mesh_axis) || by_expert || by_stage
    }

    /// Whether the device at these coordinates is the first along every axis on which devices hold copies.
    fn is_first(&self, tensor: &PlannedTensor, coordinates: &[u64]) -> bool {
        coordinates.iter().enumerate().all(|(axis, at)| *at == 0 || self.distributes(tensor, axis))
    }

    /// The region of a tensor that `device` is the first to hold. `None` if there is none, or if the region has no
    /// elements.
    pub fn own_region(&self, tensor: &PlannedTensor, device: u64) -> Option<Region> {
        let coordinates = self.mesh.coordinates(device);
        let held = self.is_first(tensor, &coordinates) && self.has(tensor, &coordinates);
        held.then(|| self.region(tensor, device)).filter(|region| !region.shape().is_empty())
    }

    /// Number of devices that are the first, by their place in the mesh, to hold a region of a tensor.
    pub fn holder_count(&self, tensor: &PlannedTensor) -> u64 {
        let axes = self.mesh.axes().iter().enumerate().filter(|(index, _)| self.distributes(tensor, *index));
        axes.map(|(_, axis)| axis.size).product()
    }

    /// The device with this number among the first holders, ascending.
    pub fn holder(&self, tensor: &PlannedTensor, number: u64) -> u64 {
        let (mut rest, mut device, mut stride) = (number, 0, 1);
        for (index, axis) in self.mesh.axes().iter().enumerate().rev() {
            if self.distributes(tensor, index) {
                device += rest % axis.size * stride;
                rest /= axis.size;
            }
            stride *= axis.size;
        }
        device
    }

    /// Devices of the whole mesh that are, by their place in it, the first to hold a region of a bundled tensor.
    /// Ascending; at most as many as the mesh has.
    pub fn first_holders(&self) -> Vec<u64> {
        // The holders depend on the spec, and on whether the tensor is of one expert or stage: few tensors differ in these.
        let mut seen = HashSet::new();
        let mut holders = Vec::new();
        for tensor in
            self.bundle().filter(|tensor| seen.insert((tensor.spec, tensor.expert.is_some(), tensor.stage.is_some())))
        {
            holders.extend((0..self.holder_count(tensor)).map(|number| self.holder(tensor, number)));
            holders.sort_unstable();
            holders.dedup();
        }
        holders
    }

    /// The ranks of an engine whose processes differ only in their shards, each with the first listed device that has its
    /// shards. Ranks number the distinct sets of shards in the order of the devices; with pipeline stages they do so within
    /// each stage.
    pub fn ranks(&self) -> Vec<Rank> {
        let axes = self.mesh.axes();
        let stages = self.stage_axis().filter(|axis| axes[*axis].size > 1);
        let splits: Vec<bool> =
            (0..axes.len()).map(|axis| self.bundle().any(|tensor| self.distributes(tensor, axis))).collect();
        let mut ranks = BTreeMap::new();
        for device in &self.devices {
            let coordinates = self.mesh.coordinates(*device);
            let split = (0..axes.len()).filter(|axis| splits[*axis] && stages != Some(*axis));
            let number = split.fold(0, |number, axis| number * axes[axis].size + coordinates[axis]);
            ranks.entry((stages.map(|axis| coordinates[axis]), number)).or_insert(*device);
        }
        ranks.into_iter().map(|((stage, number), device)| Rank { stage, number, device }).collect()
    }

    /// Whether the listed devices hold all of every bundled tensor between them.
    pub fn lists_whole(&self) -> bool {
        if self.devices.len() as u64 == self.mesh.devices() {
            return true;
        }
        // Most tensors have the same spec, shape, expert and stage as another.
        let mut seen = HashSet::new();
        let mut new = |tensor: &PlannedTensor| {
            seen.insert((tensor.spec, tensor.view.shape().clone(), tensor.expert, tensor.stage))
        };
        let mut kinds = self.bundle().filter(|tensor| new(tensor));
        // Distinct regions do not overlap: together they are the tensor if they have as many elements.
        kinds.all(|tensor| {
            let regions: HashSet<Region> = self.devices.iter().map(|device| self.region(tensor, *device)).collect();
            regions.iter().map(|region| region.shape().elements()).sum::<u64>() == tensor.view.shape().elements()
        })
    }

    /// Whether bundles hold layers stacked. For a layout from a file its parameter `scan` says so, or else a tensor
    /// with a logical axis `layers`.
    pub fn is_scanned(&self) -> bool {
        match self.layout {
            Layout::Canonical => !self.unscanned,
            Layout::Gguf | Layout::Hf => false,
            Layout::Stored | Layout::Embedded(_) | Layout::File(_) => {
                match self.params.iter().find(|(name, _)| name == "scan") {
                    Some((_, value)) => value == "true",
                    None => {
                        self.tensors.iter().any(|tensor| tensor.logical.iter().any(|axis| axis.ends_with("layers")))
                    }
                }
            }
        }
    }

    /// Keys of a tensor in formats that hold trees of dictionaries, outermost first.
    pub fn keys(&self, tensor: &PlannedTensor) -> Vec<String> {
        let words = tensor.name.split('.').map(str::to_owned);
        self.layout.traits().tree_root.iter().cloned().chain(words).collect()
    }

    /// The same with words escaped that no file name can hold, as in paths.
    pub fn escaped_keys(&self, tensor: &PlannedTensor) -> Vec<String> {
        self.keys(tensor).iter().map(|word| component(word).into_owned()).collect()
    }

    /// Whether bundles hold a tensor.
    pub fn is_bundled(&self, tensor: &PlannedTensor) -> bool {
        if self.unscanned { tensor.bundled.unscanned } else { tensor.bundled.scanned }
    }

    /// The tensors that bundles hold: each weight once.
    pub fn bundle(&self) -> impl Iterator<Item = &PlannedTensor> + Clone {
        self.tensors.iter().filter(|tensor| self.is_bundled(tensor))
    }

    /// Path components of a tensor under `dev{d}/` and `full/`.
    pub fn path<'a>(&self, tensor: &'a PlannedTensor) -> Vec<Cow<'a, str>> {
        if self.flat {
            return vec![component(&tensor.name)];
        }
        tensor.name.split('.').map(component).collect()
    }
}

/// The bytes that a plan's devices read from the sources for all bundled tensors.
#[derive(Clone, Debug)]
pub struct Amplification {
    /// By listed device, in order.
    pub devices: Vec<Reads>,
    /// All listed devices together, as on a host with one page cache.
    pub union: Reads,
    /// By name with `*` for numbers: the reads of these tensors alone, on the device with the greatest excess. Sorted
    /// by excess, the greatest first.
    pub tensors: Vec<(String, Reads)>,
}

/// Spec, first of the experts that the same devices hold, stage, shape, and whether torch counts two elements as one.
type Key<'a> = (u32, Option<u64>, Option<u64>, &'a Shape, bool);

/// The kinds of a plan's tensors: of all tensors of a kind, a device holds the same region. Work for each tensor and each device is then
/// done once for each kind and device. A repository of 50 000 tensors has a few dozen kinds.
#[derive(Clone, Debug, Default)]
pub struct TensorKinds {
    of_tensor: Vec<u32>,
    /// Number of the first tensor of each kind.
    pub first: Vec<usize>,
}

impl TensorKinds {
    /// The kinds of all tensors of a plan, in the order of their first tensors.
    ///
    /// # Panics
    /// If the plan has 2^32 tensors, which a checkpoint's table excludes.
    pub fn new(plan: &Plan) -> Self {
        let mut first: Numbered<Key<'_>, usize> = Numbered::default();
        let mut of_tensor = Vec::with_capacity(plan.tensors.len());
        for (index, tensor) in plan.tensors.iter().enumerate() {
            let is_paired = tensor.view.dtype() == DType::F4;
            let key = (tensor.spec, plan.expert_group(tensor), tensor.stage, tensor.view.shape(), is_paired);
            of_tensor.push(number_of(&mut first, key, |_| index));
        }
        Self { of_tensor, first: first.into_values().collect() }
    }

    /// The kind of a tensor, both by number.
    pub fn of(&self, tensor: usize) -> usize {
        self.of_tensor[tensor] as usize
    }
}

/// Most bytes of all tensors together. Sizes of files that hold many of them then fit 64 bits.
const BYTES_MAX: u64 = 1 << 61;

/// Most pieces per source tensor in the views of built-in layouts. A view that may exceed [`PIECES_MAX`] by this bound is
/// lowered, which counts its pieces.
const PIECES_PER_SOURCE: usize = 8;

/// Checks that a view has a tiling, without lowering views that are simple by construction.
fn check_tiling(view: &View, built_in: bool) -> Result<(), TilingError> {
    if view.as_source().is_some() {
        return view.bytes().map_or_else(|| view.lower().map(drop), |_| Ok(()));
    }
    if !built_in {
        return view.lower().map(drop);
    }
    let mut sources = 0usize;
    view.for_each_stored(&mut |_| sources += 1);
    if view.dtype().unit().elements > 1 || sources.saturating_mul(PIECES_PER_SOURCE) > PIECES_MAX {
        view.lower()?;
    }
    Ok(())
}

/// Most extents that a message lists.
const EXTENTS_LISTED: usize = 8;

/// Most sizes that a message proposes.
const SIZES_LISTED: usize = 12;

/// Greatest size that is tried.
const SIZE_MAX: u64 = 4096;

/// The extents that a mesh axis splits and does not divide, if there are any, and the sizes that divide all.
fn uneven_axis(plan: &Plan, mesh_axis: usize) -> Option<Problem> {
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
    let extents: Vec<String> = listed.chain((more > 0).then(|| format!("and {more} more"))).collect();
    let fits = (1..=common.min(SIZE_MAX)).filter(|size| common.is_multiple_of(*size)).take(SIZES_LISTED);
    let fits: Vec<String> = fits.map(|size| size.to_string()).collect();
    let (axis, extents, fits) = (&axes[mesh_axis].name, extents.join(", "), fits.join(", "));
    let text = format!("mesh axis {axis}={size} does not divide {extents}; sizes that divide all: {fits}");
    Some(Problem::Request(text))
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
