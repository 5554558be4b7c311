//! What the user wants, as data: a layout, a mesh, dtypes and sharding rules, resolved against a checkpoint to named views
//! with specs.
//!
//! [`Plan::build`] runs a layout, which proposes [`draft::Draft`]s, gives each a spec, and checks everything that can be
//! checked before mount; all problems come together. The result is plain data: nothing is lowered and no weight is read.
//!
//! What it deliberately does not do: lay out files (that is `image`) or know about the mount's tree (that is `volume`).

pub mod amplification;
mod build;
mod canonical;
pub mod draft;
mod expect;
pub mod expr;
pub mod family;
pub mod hf;
pub mod holes;
pub mod kind;
pub mod layout_file;
pub mod layouts;
pub mod logical;
mod lora;
mod name_group;
mod names;
mod naming;
mod options;
mod packed;
pub mod problem;
pub mod rename;
pub mod report;
mod select;
pub mod shard;
pub mod spec;
mod unused;
pub mod values;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
};

pub use draft::{Bundled, Draft, Roles};
pub use family::Family;
pub use hf::{HfContent, HfFile};
pub use holes::Hole;
pub use kind::Kinds;
pub use layout_file::LayoutFile;
pub use layouts::Embedded;
pub use logical::LogicalRules;
pub use name_group::NameGroup;
pub use naming::{SELF_WORD, component};
pub use problem::{PlanError, Problem};
pub use select::Subset;
pub use shard::{AxisUse, Sharding, axis_use};
pub use spec::Spec;

pub use crate::config::{
    Allow, CastRule, DEVICES_LISTED_MAX, Dequantize, LayerRanges, LogicalRule, Mesh, MeshAxis, MeshError, Pattern,
    PatternError, Rename, ShardRule, Tied, mesh, pattern,
};
use crate::{
    checkpoint::Checkpoint,
    tensor::{DType, PIECES_MAX, Region, Shape, TilingError, View},
};
use rayon::slice::ParallelSliceMut;

/// How tensors are named and shaped.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Layout {
    /// Generic: layers stacked, short names, `[out, in]` kept.
    #[default]
    Canonical,
    /// The repository's own names.
    Hf,
    /// One in the program, as data: rules for each model family, chosen by `config.json`.
    Embedded(&'static Embedded),
    /// A file of the user's.
    File(Arc<LayoutFile>),
}

impl Layout {
    /// Its name; for a file, its path.
    pub fn name(&self) -> &str {
        match self {
            Self::Canonical => "canonical",
            Self::Hf => "hf",
            Self::Embedded(embedded) => embedded.name,
            Self::File(file) => file.label(),
        }
    }

    /// Key of the dictionary that holds all tensors in formats of trees. MaxText saves its variables, themselves a tree
    /// below `params`, as the member `params` of its training state.
    pub fn tree_root(&self) -> Option<&str> {
        match self {
            Self::Embedded(embedded) if embedded.name.starts_with("maxtext") => Some("params"),
            Self::Canonical | Self::Hf | Self::Embedded(_) | Self::File(_) => None,
        }
    }
}

/// What the user wants of one view of a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct ViewOptions {
    /// The devices.
    pub mesh: Mesh,
    /// Names and shapes.
    pub layout: Layout,
    /// Dtype of all floats; `None` leaves them as they are, or to the layout.
    pub dtype: Option<DType>,
    /// What quantized tensors are decoded to, if they are whatever `dtype` says.
    pub dequantize: Option<Dequantize>,
    /// Whether floats stay as they are where the layout has a dtype for them.
    pub keep_dtype: bool,
    /// Dtypes by pattern; the first that matches wins over `dtype`.
    pub casts: Vec<CastRule>,
    /// How specs are chosen.
    pub sharding: Sharding,
    /// Specs by pattern; the first that matches wins over `sharding`.
    pub shard_rules: Vec<ShardRule>,
    /// Whether bundles hold one tensor per source tensor instead of stacks of layers.
    pub unscanned: bool,
    /// Whether a split that is not even is refused.
    pub even: bool,
    /// The devices to list, ascending; `None` lists all.
    pub devices: Option<Vec<u64>>,
    /// Whether missing layers, and leaves of a layout file without their tensors, are accepted.
    pub allow_missing: Allow,
    /// Whether tensors that no rule of a layout file, or no table of the family, names are accepted.
    pub allow_unmapped: Allow,
    /// Parameters of the layout, by name.
    pub set: BTreeMap<String, String>,
    /// Rules for logical axes, in place of the layout's for the same axes.
    pub logical_rules: Vec<LogicalRule>,
    /// Bytes of the largest chunk file in formats of chunks; `None` leaves the choice to the format.
    pub chunk_bytes_max: Option<u64>,
    /// Which tensors of the repository.
    pub subset: Subset,
    /// Renames of what is shown, in order.
    pub renames: Vec<Rename>,
    /// How an output head that is the embedding is shown.
    pub tied: Tied,
    /// Directory of a LoRA adapter, one of those that the checkpoint was opened with.
    pub lora: Option<PathBuf>,
}

/// A named, sharded view.
#[derive(Clone, Debug)]
pub struct PlannedTensor {
    /// Dotted name.
    pub name: String,
    /// The whole, unsharded.
    pub view: View,
    /// How it is split: index into [`Plan::specs`].
    spec: u32,
    /// Number of this expert and of all experts, for a tensor of a single one.
    expert: Option<(u64, u64)>,
    /// In which bundles it is.
    pub bundled: Bundled,
    /// Numbers of the layers stacked on axis 0, for a stack.
    pub layers: Option<Arc<[u64]>>,
    /// Logical names of its axes, where the layout gives them.
    pub logical: Vec<String>,
}

/// A checkpoint as the user wants to see it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The devices.
    pub mesh: Mesh,
    /// The layout.
    pub layout: Layout,
    /// Dtype of all floats, if one was asked for or the layout has one.
    pub dtype: Option<DType>,
    /// Name of the model family whose short names, or whose rules of the layout, are used.
    pub family: Option<String>,
    /// Parameters of the layout and their values.
    pub params: Vec<(String, String)>,
    /// Rules for logical axes, where specs come from those.
    pub logical_rules: Option<LogicalRules>,
    /// Whether each tensor is one file named by its whole dotted name.
    flat: bool,
    /// Whether a serving engine reads the shards as the state of its ranks.
    pub sharded_state: bool,
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
    /// Names that a complete model has and the repository has not, as far as that was allowed.
    pub missing: Vec<NameGroup>,
    /// The repository's names that the tables of its family do not have.
    pub unexpected: Vec<NameGroup>,
    /// Differences between layers that nothing explains, as far as they are not refused.
    pub holes: Vec<Hole>,
    /// The repository's names that the layout, or a flag, leaves out.
    pub left_out: Vec<NameGroup>,
    /// Things worth knowing that are no errors.
    pub warnings: Vec<String>,
    /// Why there is no `hf/`, if there is none.
    pub no_hf: Option<String>,
}

/// The non-negative integer `member` of `config.json`, or of its nested configuration of the text model.
pub(crate) fn config_number(checkpoint: &Checkpoint, member: &str) -> Option<u64> {
    let config = checkpoint.config()?;
    let nested = checkpoint.dialect().text_config.as_deref().and_then(|name| config.get(name));
    nested.and_then(|nested| nested.get(member)).or_else(|| config.get(member))?.as_u64()
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
    /// Resolves what the user wants against a checkpoint.
    ///
    /// # Errors
    /// Everything wrong with the plan, at once.
    pub fn build(checkpoint: &Checkpoint, options: &ViewOptions) -> Result<Self, PlanError> {
        build::build(checkpoint, options)
    }

    fn add(&mut self, drafts: Vec<Draft>, options: &ViewOptions, problems: &mut Vec<Problem>) {
        let mut known: HashMap<Spec, u32> = HashMap::new();
        for draft in drafts {
            let rules = self.logical_rules.as_ref();
            let spec = match shard::spec(&draft, &self.mesh, options.sharding, rules, &options.shard_rules) {
                Ok(spec) => spec,
                Err(problem) => {
                    problems.push(problem);
                    continue;
                }
            };
            let expert =
                if shard::is_told(&draft, options.sharding, &options.shard_rules) { None } else { draft.roles.expert };
            let shape = draft.view.shape();
            // What the rules of logical axes are for, JAX, refuses uneven splits.
            let even = options.even || rules.is_some();
            for (axis, parts) in spec.uneven(shape, &self.mesh).filter(|_| even) {
                problems.push(Problem::Uneven { name: draft.name.clone(), axis, shape: shape.clone(), parts });
            }
            let tiled = check_tiling(&draft.view, self.built_in());
            if let Err(error) = tiled.and_then(|()| self.check_shards(&draft.view, &spec)) {
                problems.push(Problem::Tiling { name: draft.name.clone(), error });
            }
            let index = *known.entry(spec.clone()).or_insert_with(|| {
                self.specs.push(spec);
                u32::try_from(self.specs.len() - 1).expect("there are no more specs than tensors")
            });
            self.tensors.push(PlannedTensor {
                name: draft.name,
                view: draft.view,
                spec: index,
                expert,
                bundled: draft.bundled,
                layers: draft.layers,
                logical: draft.roles.logical,
            });
        }
        // A size that does not fit 64 bits has been a problem above.
        let sizes = self.tensors.iter().map(|tensor| tensor.view.bytes().unwrap_or(u64::MAX));
        if sizes.fold(0, u64::saturating_add) > BYTES_MAX {
            let reason = format!("all tensors together have more than {BYTES_MAX} bytes");
            problems.push(Problem::File { file: format!("layout {}", self.layout.name()), reason });
        }
        self.tensors.par_sort_by(|a, b| a.name.cmp(&b.name));
        for pair in self.tensors.windows(2).filter(|pair| pair[0].name == pair[1].name) {
            let path = pair[0].name.clone();
            problems.push(Problem::Collision { first: path.clone(), second: path.clone(), path });
        }
    }

    /// Checks that no shard of a type narrower than a byte cuts one.
    fn check_shards(&self, view: &View, spec: &Spec) -> Result<(), TilingError> {
        if view.dtype().unit().elements == 1 || spec.is_replicated() {
            return Ok(());
        }
        // Where rows of a plain tensor and of each shard begin and end with a byte, nothing is cut.
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

    /// Whether views are of the few simple shapes that the program itself makes.
    fn built_in(&self) -> bool {
        match self.layout {
            Layout::Canonical | Layout::Hf => true,
            Layout::Embedded(_) | Layout::File(_) => false,
        }
    }

    /// How a tensor is split.
    pub fn spec(&self, tensor: &PlannedTensor) -> &Spec {
        &self.specs[tensor.spec as usize]
    }

    /// The region of a tensor that a device holds. A tensor of a single expert is held whole, or as its spec says, by the
    /// devices that the expert axis gives it to, and is empty on the others.
    ///
    /// # Panics
    /// Never for a tensor of this plan.
    pub fn region(&self, tensor: &PlannedTensor, device: u64) -> Region {
        let coordinates = self.mesh.coordinates(device);
        let shape = tensor.view.shape();
        let region = self.spec(tensor).region(shape, &self.mesh, &coordinates);
        if self.has_expert(tensor, &coordinates) || shape.rank() == 0 {
            return region;
        }
        let mut ranges: Vec<_> = region.ranges().collect();
        ranges[0].end = ranges[0].start;
        Region::within(shape, &ranges).expect("an empty range inside a region lies inside the shape")
    }

    /// Whether the expert axis gives a tensor to the device at these coordinates; true of all but tensors of one expert.
    fn has_expert(&self, tensor: &PlannedTensor, coordinates: &[u64]) -> bool {
        tensor.expert.is_none_or(|(expert, experts)| {
            let (mut low, mut high) = (0, experts);
            for (index, axis) in self.mesh.axes().iter().enumerate() {
                if axis_use(&axis.name) == AxisUse::Expert {
                    let (start, stop) = spec::chunk(high - low, axis.size, coordinates[index]);
                    (low, high) = (low + start, low + stop);
                }
            }
            (low..high).contains(&expert)
        })
    }

    /// Whether a mesh axis distributes a tensor, by splitting it or by giving its expert to some devices only; along the
    /// other axes devices hold copies.
    fn distributes(&self, tensor: &PlannedTensor, mesh_axis: usize) -> bool {
        let by_expert = tensor.expert.is_some() && axis_use(&self.mesh.axes()[mesh_axis].name) == AxisUse::Expert;
        self.spec(tensor).uses(mesh_axis) || by_expert
    }

    /// Whether the device at these coordinates is the first along every axis on which devices hold copies.
    fn is_first(&self, tensor: &PlannedTensor, coordinates: &[u64]) -> bool {
        coordinates.iter().enumerate().all(|(axis, at)| *at == 0 || self.distributes(tensor, axis))
    }

    /// The region of a tensor that `device` is the first to hold, if there is one and it has elements.
    pub fn own_region(&self, tensor: &PlannedTensor, device: u64) -> Option<Region> {
        let coordinates = self.mesh.coordinates(device);
        let held = self.is_first(tensor, &coordinates) && self.has_expert(tensor, &coordinates);
        held.then(|| self.region(tensor, device)).filter(|region| !region.shape().is_empty())
    }

    /// Number of the devices that are, by their place in the mesh, the first to hold a region of a tensor.
    pub fn holder_count(&self, tensor: &PlannedTensor) -> u64 {
        let axes = self.mesh.axes().iter().enumerate().filter(|(index, _)| self.distributes(tensor, *index));
        axes.map(|(_, axis)| axis.size).product()
    }

    /// The device of number `number` among those, ascending.
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

    /// The distinct regions of a tensor that have elements, each with the first device that holds it, by which they are
    /// ordered: together they are the tensor, and no two overlap.
    pub fn distinct_regions(&self, tensor: &PlannedTensor) -> impl Iterator<Item = (u64, Region)> {
        let holders = (0..self.holder_count(tensor)).map(|number| self.holder(tensor, number));
        holders.filter_map(|device| Some((device, self.own_region(tensor, device)?)))
    }

    /// Devices of the whole mesh that are, by their place in it, the first to hold some bundled tensor's region; ascending.
    /// At most as many as the mesh has.
    pub fn first_holders(&self) -> Vec<u64> {
        // Few tensors differ in what matters here.
        let mut seen = HashSet::new();
        let mut holders = Vec::new();
        for tensor in self.bundle().filter(|tensor| seen.insert((tensor.spec, tensor.expert.is_some()))) {
            holders.extend((0..self.holder_count(tensor)).map(|number| self.holder(tensor, number)));
            holders.sort_unstable();
            holders.dedup();
        }
        holders
    }

    /// The ranks of an engine whose processes differ in nothing but their shards, each with the listed device that stands for
    /// it: ranks count the distinct sets of shards in the order of the devices, and devices with the same shards are one.
    pub fn ranks(&self) -> Vec<(usize, u64)> {
        let firsts = self.first_holders();
        let axes = self.mesh.axes();
        let splits: Vec<bool> =
            (0..axes.len()).map(|axis| self.bundle().any(|tensor| self.distributes(tensor, axis))).collect();
        let mut ranks = BTreeMap::new();
        for device in &self.devices {
            let coordinates = self.mesh.coordinates(*device);
            let first = axes.iter().enumerate().fold(0, |first, (axis, mesh_axis)| {
                first * mesh_axis.size + if splits[axis] { coordinates[axis] } else { 0 }
            });
            if let Ok(rank) = firsts.binary_search(&first) {
                ranks.entry(rank).or_insert(*device);
            }
        }
        ranks.into_iter().collect()
    }

    /// Whether the listed devices hold all of every bundled tensor between them.
    pub fn lists_whole(&self) -> bool {
        if self.devices.len() as u64 == self.mesh.devices() {
            return true;
        }
        // Many tensors differ in nothing that matters here.
        let mut seen = HashSet::new();
        let mut kinds = self.bundle().filter(|tensor| seen.insert((tensor.spec, tensor.view.shape(), tensor.expert)));
        // Regions that differ do not overlap: together they are the tensor if they have as many elements.
        kinds.all(|tensor| {
            let regions: HashSet<Region> = self.devices.iter().map(|device| self.region(tensor, *device)).collect();
            regions.iter().map(|region| region.shape().elements()).sum::<u64>() == tensor.view.shape().elements()
        })
    }

    /// Whether bundles hold layers stacked: for layouts from files what their parameter `scan` says, or whether a tensor has
    /// a logical axis `layers`.
    pub fn is_scanned(&self) -> bool {
        match self.layout {
            Layout::Canonical => !self.unscanned,
            Layout::Hf => false,
            Layout::Embedded(_) | Layout::File(_) => match self.params.iter().find(|(name, _)| name == "scan") {
                Some((_, value)) => value == "true",
                None => self.tensors.iter().any(|tensor| tensor.logical.iter().any(|axis| axis.ends_with("layers"))),
            },
        }
    }

    /// Keys of a tensor in formats that hold trees of dictionaries, outermost first. Words that no file name can hold are
    /// escaped as in paths, because such formats make directories of keys.
    pub fn keys(&self, tensor: &PlannedTensor) -> Vec<String> {
        let words = tensor.name.split('.').map(|word| component(word).into_owned());
        self.layout.tree_root().into_iter().map(str::to_owned).chain(words).collect()
    }

    /// The shape of the shard that a device holds.
    pub fn shard_shape(&self, tensor: &PlannedTensor, device: u64) -> Shape {
        self.region(tensor, device).shape().clone()
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

fn family_problem(error: &family::FamilyError) -> PlanError {
    Problem::File { file: error.family.clone(), reason: error.reason.clone() }.into()
}

fn family(checkpoint: &Checkpoint) -> Result<Option<Family>, PlanError> {
    let dialect = checkpoint.dialect();
    for model_type in [&dialect.model_type, &dialect.text_model_type].into_iter().flatten() {
        if let Some(family) = Family::of_model_type(model_type).map_err(|error| family_problem(&error))? {
            return Ok(Some(family));
        }
    }
    Ok(None)
}

fn devices(options: &ViewOptions, problems: &mut Vec<Problem>) -> Vec<u64> {
    let devices = options.mesh.devices();
    let count = options.devices.as_ref().map_or(devices, |listed| listed.len() as u64);
    if count > DEVICES_LISTED_MAX {
        problems.push(Problem::Devices { mesh: options.mesh.to_string(), count });
        return Vec::new();
    }
    let Some(listed) = &options.devices else { return (0..devices).collect() };
    let mut listed = listed.clone();
    listed.sort_unstable();
    listed.dedup();
    problems.extend(
        listed.iter().filter(|device| **device >= devices).map(|device| Problem::Device { device: *device, devices }),
    );
    listed
}

/// Most bytes of all tensors together: sizes of files that hold many of them then fit 64 bits.
const BYTES_MAX: u64 = 1 << 61;

/// Most pieces per source tensor that the views of built-in layouts can have before a plan has to count them.
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
    view.for_each_source(&mut |_| sources += 1);
    if view.dtype().unit().elements > 1 || sources.saturating_mul(PIECES_PER_SOURCE) > PIECES_MAX {
        view.lower()?;
    }
    Ok(())
}

/// Most missing layers of one family that are listed.
const MISSING_MAX: usize = 1000;

/// Finds layers that are not there. Where a known model's configuration counts its layers, a missing one is a problem;
/// a gap elsewhere (part of a repository, an adapter) is only worth a warning.
fn missing_layers(
    checkpoint: &Checkpoint,
    known: Option<&Family>,
    options: &ViewOptions,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) {
    let dialect = checkpoint.dialect();
    for family in &dialect.families {
        let is_text = known.is_some_and(|known| known.prefixes.contains(&family.prefix));
        let declared = if is_text { dialect.declared_layers.unwrap_or(0) } else { 0 };
        let count = family.last.saturating_add(1).max(declared);
        if family.layers == count {
            continue;
        }
        let name = format!("{}{}", family.prefix, family.word);
        let stem = format!("{name}.");
        let number = |rest: &str| rest.split('.').next().and_then(|number| number.parse::<u64>().ok());
        let present: BTreeSet<u64> =
            checkpoint.tensors().filter_map(|(_, info)| number(info.name.strip_prefix(&stem)?)).collect();
        let wanted =
            |layer: &u64| options.subset.layers.as_ref().is_none_or(|layers| !is_text || layers.contains(*layer));
        let absent = (0..count).filter(|layer| !present.contains(layer)).take(MISSING_MAX).filter(wanted);
        let accepted = |layer: &u64| *layer >= declared || options.allow_missing.accepts(&format!("{stem}{layer}."));
        let (allowed, refused): (BTreeSet<u64>, BTreeSet<u64>) = absent.partition(accepted);
        let problem = |layers| Problem::MissingLayers { family: name.clone(), layers, count };
        warnings.extend(Some(allowed).filter(|layers| !layers.is_empty()).map(|layers| problem(layers).to_string()));
        problems.extend(Some(refused).filter(|layers| !layers.is_empty()).map(problem));
    }
}
