//! The layout `canonical`: generic, for any repository.
//!
//! Tensors of layers are named `layers.N.<rest>`. Tensors that several layers have with equal shape and dtype also
//! appear stacked, as `layers.scanned.<rest>`. Where a shape differs from layer to layer, the largest group of equal
//! layers is stacked and the other layers stay single. Known families have short names. Other names keep their words,
//! without a leading `model.` and a final `weight`. The final `weight` stays where the name would otherwise be a
//! directory. A name that is nevertheless a directory, because another tensor's name continues it with a dot, ends in
//! `_self`.

use std::{collections::BTreeSet, fmt::Write as _, ops::Range, sync::Arc};

use ckfs_checkpoint::Checkpoint;
use ckfs_config::Mesh;
use ckfs_tensor::{DType, RANK_MAX, Shape, TensorId, View};
use hashbrown::{HashMap, HashSet};
use rayon::prelude::*;

use super::{
    AxisUse,
    blocks::{CutBlocks, Module, Sayings},
    draft::{Bundled, Draft, Roles},
    experts::{
        self,
        orientation::{Order, Orientation},
    },
    family::{Family, Generic, Role},
    member, names,
    naming::{self, Parsed, SELF_WORD},
    numbered::{Numbered, number_of},
    parsed::{ParsedName, ParsedNames},
    problem::Problem,
    select,
    shard::axes_of,
    styles::{ModelPlans, Style},
    values::Values,
};

/// How parts of source tensors are named that differ only in their layers and experts, and what such a part is.
#[derive(Clone, Debug, Default)]
struct PartKind {
    /// Output prefix, with its final dot.
    prefix: String,
    /// Whether its tensors are in layers, and whether they are of single experts.
    in_layer: bool,
    single: bool,
    /// Name within the layer, or of the whole tensor; `*` stands for the expert's number.
    rest: String,
    /// Whether a final `weight` was dropped from `rest`.
    weight_dropped: bool,
    /// Part along an axis: `(axis, start, stop)`.
    part: Option<(usize, u64, u64)>,
    tp: Option<usize>,
    /// The block that tensor parallelism splits as a whole.
    block: Option<Arc<str>>,
    experts: Option<usize>,
}

/// A part of a source tensor, and the numbers in its name.
#[derive(Clone, Copy, Debug)]
struct NamedPart {
    id: TensorId,
    /// Number of its kind.
    kind: u32,
    layer: Option<u64>,
    expert: Option<u64>,
}

/// The parts that a layout shows.
#[derive(Debug, Default)]
struct NamedParts {
    kinds: Vec<PartKind>,
    parts: Vec<NamedPart>,
}

/// The common attributes of a tensor in all layers and experts: prefix, rest, and whether it has a layer and an expert.
type KindName<'a> = (&'a str, &'a str, bool, bool);

impl PartKind {
    fn name(&self) -> KindName<'_> {
        (&self.prefix, &self.rest, self.in_layer, self.single)
    }

    fn scanned(&self) -> Option<String> {
        let rest = naming::without_expert(&self.rest, self.single);
        self.in_layer.then(|| format!("{}layers.scanned.{rest}", self.prefix))
    }
}

impl NamedParts {
    fn kind(&self, part: &NamedPart) -> &PartKind {
        &self.kinds[part.kind as usize]
    }

    fn unscanned(&self, part: &NamedPart) -> String {
        let kind = self.kind(part);
        let mut name = String::with_capacity(kind.prefix.len() + kind.rest.len() + 16);
        name.push_str(&kind.prefix);
        if let Some(layer) = part.layer {
            // Writing to a text cannot fail.
            _ = write!(name, "layers.{layer}.");
        }
        naming::push_with_expert(&mut name, &kind.rest, part.expert);
        name
    }

    /// The names of all parts.
    fn all_unscanned(&self) -> Vec<String> {
        self.parts.par_iter().map(|part| self.unscanned(part)).collect()
    }

    /// Adds the parts of all tensors. Those of one kind of names and of one shape are named once.
    fn add(&mut self, namer: &Namer<'_>, names: &ParsedNames<'_>, problems: &mut Vec<Problem>) {
        let mut known: HashMap<(u32, &[u64]), Range<u32>> = HashMap::new();
        self.parts.reserve(names.names().len());
        for ((id, info), name) in namer.checkpoint.tensors().zip(names.names()) {
            let kinds = match known.get(&(name.kind, info.shape)) {
                Some(kinds) => kinds.clone(),
                None => match namer.name(info.name, &names.kind(name).parsed, info.shape) {
                    Ok(kinds) => {
                        let kinds = self.push_kinds(kinds);
                        known.insert((name.kind, info.shape), kinds.clone());
                        kinds
                    }
                    // Problems name the tensor.
                    Err(problem) => {
                        problems.push(problem);
                        continue;
                    }
                },
            };
            let (layer, expert) = (names.layer(name), names.expert(name));
            self.parts.extend(kinds.map(|kind| NamedPart { id, kind, layer, expert }));
        }
    }

    /// Adds kinds. Returns their numbers.
    fn push_kinds(&mut self, kinds: Vec<PartKind>) -> Range<u32> {
        let number = |kinds: usize| u32::try_from(kinds).expect("there are fewer than 2^32 kinds of tensors");
        let first = number(self.kinds.len());
        self.kinds.extend(kinds);
        first..number(self.kinds.len())
    }
}

struct Namer<'a> {
    checkpoint: &'a Checkpoint,
    family: Option<&'static Family>,
    /// Stems of all layers' tensors.
    stems: BTreeSet<String>,
    /// The orders of axes that fused experts show.
    orientation: Orientation,
    plans: ModelPlans,
    /// What tensor parallelism cuts. Empty if the mesh has no axis for it.
    blocks: CutBlocks,
}

/// Drafts, and the warning about blocks that tensor parallelism leaves whole, if there are any.
pub(super) type Tabled = (Vec<Draft>, Option<String>);

/// Drafts of all tensors of a repository.
///
/// # Errors
/// All problems found.
pub(super) fn drafts(
    (checkpoint, names): (&Checkpoint, &ParsedNames<'_>),
    family: Option<&'static Family>,
    (values, order): (&Values<'_>, Option<Order>),
    (whole, mesh): (&Checkpoint, &Mesh),
) -> Result<Tabled, Vec<Problem>> {
    let mut problems = Vec::new();
    let in_layers = names.kinds().iter().filter(|kind| kind.parsed.layer.is_some());
    let stems = in_layers.map(|kind| naming::split_suffix(&kind.parsed.rest).0.to_owned()).collect();
    let mut namer = Namer::new((checkpoint, order), family, stems);
    namer.find_blocks(whole.tensors().map(|(_, info)| (info.name, info.shape)), mesh, true);
    let mut named = NamedParts::default();
    named.add(&namer, names, &mut problems);
    let mut predictors = HashSet::new();
    if let Some((prefix, first)) = select::predicting(checkpoint, names, namer.family) {
        let predicts = |name: &ParsedName| names.kind(name).parsed.prefix == prefix && names.layer(name) >= Some(first);
        let all = checkpoint.tensors().zip(names.names());
        predictors.extend(all.filter(|(_, name)| predicts(name)).map(|((id, _), _)| id));
    }
    let unscanned = resolve_collisions(checkpoint, &mut named);
    let mut drafts = build(&named, unscanned, values, &predictors, &mut problems);
    if let Some(alias) = tied_head(checkpoint, &named, &drafts) {
        drafts.push(alias);
    }
    let warning = namer.blocks.warning();
    if problems.is_empty() { Ok((drafts, warning)) } else { Err(problems) }
}

/// Drafts of tensors under the names that a repository of the family has, with the roles that the tables give to their canonical
/// names. `checkpoint` gives the configuration. Blocks are those of `whole`, or of the tensors.
///
/// # Errors
/// All problems found.
pub(super) fn drafts_of(
    (checkpoint, order): (&Checkpoint, Option<Order>),
    family: Option<&'static Family>,
    tensors: Vec<(String, Result<View, Box<Problem>>)>,
    (whole, mesh): (Option<&Checkpoint>, &Mesh),
) -> Result<Tabled, Vec<Problem>> {
    let mut namer = Namer::new((checkpoint, order), family, BTreeSet::new());
    let of_whole = whole.into_iter().flat_map(Checkpoint::tensors).map(|(_, info)| (info.name, info.shape));
    let own = tensors.iter().filter(|_| whole.is_none());
    let own = own.filter_map(|(name, view)| Some((name.as_str(), view.as_ref().ok()?.shape().extents())));
    namer.find_blocks(of_whole.chain(own), mesh, false);
    let mut problems = Vec::new();
    let mut drafts = Vec::with_capacity(tensors.len());
    let mut experts: HashMap<(String, String), u64> = HashMap::new();
    let mut single = Vec::new();
    for (name, view) in tensors {
        let mut kinds = Vec::new();
        let parsed = naming::parse(&name);
        // The parts of a fused tensor are not shown here.
        let view = view.and_then(|view| {
            kinds = namer.name(&name, &parsed, view.shape().extents())?;
            Ok(view)
        });
        match (view, kinds.first()) {
            (Ok(view), Some(kind)) => {
                let block = kind.block.clone();
                let roles = Roles { tp: kind.tp, block, experts: kind.experts, ..Roles::default() };
                if let Some(expert) = parsed.expert {
                    let key = (kind.prefix.clone(), kind.rest.clone());
                    let count = experts.entry(key.clone()).or_default();
                    *count = (*count).max(expert + 1);
                    single.push((drafts.len(), expert, key));
                }
                drafts.push(Draft::new(name, view, roles));
            }
            (Ok(_), None) => {}
            (Err(problem), _) => problems.push(*problem),
        }
    }
    for (at, expert, key) in single {
        drafts[at].roles.expert = Some((expert, experts[&key]));
    }
    let warning = namer.blocks.warning();
    if problems.is_empty() { Ok((drafts, warning)) } else { Err(problems) }
}

impl<'c> Namer<'c> {
    /// `order` is the user's own word on the axes of fused experts.
    fn new(
        (checkpoint, order): (&'c Checkpoint, Option<Order>),
        family: Option<&'static Family>,
        stems: BTreeSet<String>,
    ) -> Self {
        let (plans, blocks) = (ModelPlans::default(), CutBlocks::default());
        let orientation = experts::orientation(checkpoint, order);
        Self { checkpoint, family, stems, orientation, plans, blocks }
    }

    /// Finds what tensor parallelism cuts, if the mesh has an axis for it. `parts` tells whether the parts of a fused tensor are
    /// shown each by itself.
    fn find_blocks<'t>(&mut self, tensors: impl Iterator<Item = (&'t str, &'t [u64])>, mesh: &Mesh, parts: bool) {
        if !axes_of(mesh, AxisUse::Tensor).any(|(_, axis)| axis.size > 1) {
            return;
        }
        let tensors: Vec<_> = tensors.collect();
        let parsed: Vec<Parsed> = tensors.par_iter().map(|(name, _)| naming::parse(name)).collect();
        let modules = tensors.iter().zip(&parsed).map(|((name, shape), parsed)| {
            let (stem, suffix) = naming::split_suffix(&parsed.rest);
            let starred = naming::group_name(name);
            let words = naming::words_of(stem).count() + usize::from(!suffix.is_empty());
            let base = naming::words_of(&starred).count() - words;
            let base = naming::words_of(&starred).take(base).collect::<Vec<_>>().join(".");
            let (prefix, stem) = (parsed.prefix.as_str(), naming::group_name(stem));
            Module { base, prefix, layer: parsed.layer, stem, suffix, shape, is_tower: naming::is_tower(name) }
        });
        self.plans = ModelPlans::of(self.checkpoint);
        let role = |prefix: &str, stem: &str, shape: &[u64]| {
            let family = self.family.filter(|family| family.prefixes.iter().any(|known| known == prefix))?;
            let role = family.layer(stem, &|stem| self.stems.contains(stem))?;
            self.oriented(role.clone(), stem, shape)
        };
        let sayings = Sayings { plans: &self.plans, role: &role, parts };
        self.blocks = CutBlocks::of(modules, sayings);
    }

    /// The axis of a tensor that tensor parallelism splits, and its block. `role` is the family's entry; `part` the axis of a part
    /// that the layout shows by itself.
    fn cut(
        &self,
        parsed: &Parsed,
        (stem, suffix): (&str, &str),
        role: Option<&Role>,
        rank: usize,
    ) -> (Option<usize>, Option<Arc<str>>) {
        if parsed.layer.is_some() {
            let part = role.filter(|role| !role.split.is_empty()).and_then(|role| role.tp);
            return self.blocks.cut(&parsed.prefix, &naming::group_name(stem), suffix, part);
        }
        let style = self.plans.text.iter().chain(&self.plans.towers).find_map(|plan| plan.top(stem));
        let by_name = || role.and_then(|role| role.tp).or_else(|| Generic::get().tp(stem));
        let alone = match style {
            Some(Style::Replicate) => return (None, None),
            Some(Style::Colwise | Style::PackedColwise | Style::ColwiseGatherOutput | Style::EmbeddingRowwise) => {
                Some(0)
            }
            Some(Style::Rowwise | Style::PackedRowwise | Style::RowwiseSplitInput | Style::EmbeddingColwise) => Some(1),
            None => by_name(),
        };
        match (alone, suffix) {
            (Some(axis), "" | "weight") if rank == 2 => (Some(axis), None),
            (Some(0), "bias") => (Some(0), None),
            (Some(_), _) => (None, None),
            (None, _) => self.blocks.cut("", &naming::group_name(stem), suffix, None),
        }
    }

    fn out_prefix(&self, prefix: &str) -> String {
        let dropped = self.family.iter().flat_map(|family| &family.dropped_prefixes);
        let dropped = dropped.map(String::as_str).chain(["model."]).find_map(|dropped| prefix.strip_prefix(dropped));
        dropped.unwrap_or(prefix).to_owned()
    }

    /// The family's entry for a tensor: the output prefix, its role, and the final word of its name.
    fn role<'n>(&self, parsed: &'n Parsed, name: &'n str) -> Option<(String, Role, &'n str)> {
        let family = self.family?;
        if parsed.layer.is_some() {
            if !family.prefixes.contains(&parsed.prefix) {
                return None;
            }
            let has = |stem: &str| self.stems.contains(stem);
            let prefix = self.out_prefix(&parsed.prefix);
            if let Some(role) = family.layer(&parsed.rest, &has) {
                return Some((prefix, role.clone(), ""));
            }
            let (stem, suffix) = naming::split_suffix(&parsed.rest);
            return family.layer(stem, &has).map(|role| (prefix, role.clone(), suffix));
        }
        family.prefixes.iter().find_map(|prefix| {
            let (stem, suffix) = naming::split_suffix(name.strip_prefix(prefix.as_str())?);
            Some((self.out_prefix(prefix), family.top(stem)?.clone(), suffix))
        })
    }

    /// The role of a tensor of this shape, which may be stored with its inputs before its outputs. None if it has another shape than
    /// its name says.
    fn oriented(&self, role: Role, name: &str, shape: &[u64]) -> Option<Role> {
        let Some(inputs) = role.inputs else { return Some(role) };
        let own = if inputs == 2 { Order::OutIn } else { Order::InOut };
        if member::config_number(self.checkpoint, "hidden_size").is_none() {
            return Some(role);
        }
        let order = self.orientation.as_loaded(experts::orders(self.checkpoint, name, shape))?;
        Some(if order == own { role } else { role.turned() })
    }

    /// The kinds of the parts that a tensor of this name and shape is shown as. Tensors of one kind of names and of one shape have the
    /// same.
    ///
    /// # Errors
    /// A problem that names the tensor.
    fn name(&self, name: &str, parsed: &Parsed, shape: &[u64]) -> Result<Vec<PartKind>, Problem> {
        let (in_layer, single) = (parsed.layer.is_some(), parsed.expert.is_some());
        let mut out = PartKind { in_layer, single, ..PartKind::default() };
        let oriented = |(prefix, role, suffix)| Some((prefix, self.oriented(role, name, shape)?, suffix));
        if let Some((prefix, role, suffix)) = self.role(parsed, name).and_then(oriented) {
            let splits = !role.split.is_empty() && matches!(suffix, "" | "weight" | "bias");
            if splits || role.short.is_some() {
                out.prefix = prefix;
                out.experts = role.experts;
                let stem = if suffix.is_empty() { &parsed.rest } else { naming::split_suffix(&parsed.rest).0 };
                (out.tp, out.block) = self.cut(parsed, (stem, suffix), Some(&role), shape.len());
                if splits {
                    return self.split(&role, suffix, name, shape, &out);
                }
                let short = role.short.expect("a role that does not split has a short name here");
                out.rest = match suffix {
                    "" | "weight" => short,
                    "bias" => role.bias.unwrap_or_else(|| format!("{short}_bias")),
                    _ => format!("{short}{}", suffix.strip_prefix("weight").unwrap_or(suffix)),
                };
                return Ok(vec![out]);
            }
        }
        let (stem, suffix) = naming::split_suffix(&parsed.rest);
        (out.tp, out.block) = self.cut(parsed, (stem, suffix), None, shape.len());
        out.experts = self.counts_experts(parsed, shape).then_some(0);
        out.weight_dropped = suffix == "weight";
        let rest = if out.weight_dropped { stem } else { &parsed.rest };
        if parsed.layer.is_some() {
            out.prefix = self.out_prefix(&parsed.prefix);
            rest.clone_into(&mut out.rest);
        } else {
            out.rest = self.out_prefix(rest);
        }
        Ok(vec![out])
    }

    /// Whether the first axis of a tensor counts experts, of a layer whose family says nothing of such a tensor.
    fn counts_experts(&self, parsed: &Parsed, shape: &[u64]) -> bool {
        const COUNTS: [&str; 4] = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];
        let count = || COUNTS.iter().filter_map(|count| member::config_number(self.checkpoint, count));
        parsed.layer.is_some()
            && parsed.expert.is_none()
            && naming::words_of(&parsed.rest).any(naming::is_of_experts)
            && shape.len() > 1
            && count().any(|count| count == shape[0])
    }

    fn split(
        &self,
        role: &Role,
        suffix: &str,
        name: &str,
        shape: &[u64],
        whole: &PartKind,
    ) -> Result<Vec<PartKind>, Problem> {
        let shares = role.split.iter().map(|(_, share)| {
            let number = share.parse().ok().or_else(|| member::config_number(self.checkpoint, share));
            let reason = || format!("config.json has no number {share:?}");
            number.ok_or_else(|| Problem::File { file: name.to_owned(), reason: reason() })
        });
        let shares = shares.collect::<Result<Vec<u64>, _>>()?;
        // `config.json` may hold any number: a product of its numbers may exceed 64 bits.
        let total: u128 = shares.iter().copied().map(u128::from).sum();
        let axis = role.split_axis;
        let extent = shape.get(axis).copied().unwrap_or(0);
        let part = |share: u64| {
            let product = u128::from(extent) * u128::from(share);
            let whole = total > 0 && product.is_multiple_of(total);
            whole.then(|| u64::try_from(product / total).ok()).flatten()
        };
        let parts: Option<Vec<u64>> = shares.iter().map(|share| part(*share)).collect();
        let Some(parts) = parts.filter(|_| axis < shape.len()) else {
            let shape = ckfs_tensor::Shape::try_new(shape);
            let shape = shape.map_err(|error| Problem::View { name: name.to_owned(), error })?;
            let reason = format!("axis {axis} of {shape} does not split in shares of {shares:?}");
            return Err(Problem::Tensor { name: name.to_owned(), reason });
        };
        let mut start = 0;
        let kind = |((short, _), part): (&(String, String), u64)| {
            let stop = start + part;
            let rest = if suffix == "bias" { short.replacen('w', "b", 1) } else { short.clone() };
            let kind = PartKind { rest, part: Some((axis, start, stop)), ..whole.clone() };
            start = stop;
            kind
        };
        Ok(role.split.iter().zip(parts).map(kind).collect())
    }
}

/// Restores the dropped parts of names where two names would otherwise collide. A final `weight` is restored where the
/// name is also a directory, and everything where two tensors would have one name. A name that is a directory even then
/// gets a word of its own. Returns the unscanned names.
fn resolve_collisions(checkpoint: &Checkpoint, named: &mut NamedParts) -> Vec<String> {
    let found = directories(named);
    if !found.is_empty() {
        for kind in named.kinds.iter_mut().filter(|kind| kind.weight_dropped) {
            if paths(kind.name()).iter().any(|path| found.contains(path)) {
                kind.rest.push_str(".weight");
            }
        }
    }
    let unscanned = named.all_unscanned();
    let several = repeated(&unscanned);
    if found.is_empty() && several.is_empty() {
        drop(several);
        return unscanned;
    }
    for (at, _) in unscanned.iter().enumerate().filter(|(_, name)| several.contains(name.as_str())) {
        let part = named.parts[at];
        let kind = named.kind(&part);
        if kind.part.is_none() {
            let (prefix, rest) = (String::new(), checkpoint.tensor(part.id).name.to_owned());
            let own = PartKind { prefix, in_layer: false, single: false, rest, ..kind.clone() };
            let kind = named.push_kinds(vec![own]).start;
            named.parts[at] = NamedPart { id: part.id, kind, layer: None, expert: None };
        }
    }
    let found = directories(named);
    for kind in named.kinds.iter_mut().filter(|_| !found.is_empty()) {
        if paths(kind.name()).iter().any(|path| found.contains(path)) {
            kind.rest = format!("{}.{SELF_WORD}", kind.rest);
        }
    }
    named.all_unscanned()
}

/// The names that occur more than once.
fn repeated(names: &[String]) -> HashSet<&str> {
    let mut seen = HashSet::with_capacity(names.len());
    names.iter().map(String::as_str).filter(|name| !seen.insert(*name)).collect()
}

/// The paths of names that other names continue. They are alike in all layers, so that these still stack. Layers and
/// experts are many, but the kinds of their names are few.
fn directories(named: &NamedParts) -> HashSet<String> {
    let mut is_used = vec![false; named.kinds.len()];
    for part in &named.parts {
        is_used[part.kind as usize] = true;
    }
    let used = named.kinds.iter().zip(is_used).filter(|(_, is_used)| *is_used);
    let kinds: HashSet<KindName<'_>> = used.map(|(kind, _)| kind.name()).collect();
    let all: BTreeSet<String> = kinds.into_iter().flat_map(paths).collect();
    let holds = |(path, next): &(&String, &String)| next.starts_with(path.as_str());
    all.iter().zip(all.iter().skip(1)).filter(holds).map(|(path, _)| path.clone()).collect()
}

/// The paths at which tensors of a kind would be directories, without layer numbers: one by one, and stacked over
/// experts.
fn paths((prefix, rest, in_layer, single): KindName<'_>) -> [String; 2] {
    let stem = format!("{prefix}{}", if in_layer { "layers." } else { "" });
    [format!("{stem}{rest}."), format!("{stem}{}.", naming::without_expert(rest, single))]
}

/// The members of stacks, with prefix and name of the tensor.
type StackGroups<'a> = Numbered<(&'a str, &'a str), Vec<StackMember>>;

struct StackMember {
    layer: u64,
    expert: Option<u64>,
    /// Number of its draft.
    at: usize,
}

/// Drafts of the named tensors, of which `names` are the unscanned names, and of their stacks. The stacks leave out the
/// tensors of `predictors`.
fn build(
    named: &NamedParts,
    names: Vec<String>,
    values: &Values<'_>,
    predictors: &HashSet<TensorId>,
    problems: &mut Vec<Problem>,
) -> Vec<Draft> {
    let checkpoint = values.checkpoint();
    // Kinds of several shapes or parts may have one name.
    let mut groups = StackGroups::default();
    let kinds = named.kinds.iter();
    let of_kind = kinds.map(|kind| number_of(&mut groups, (&kind.prefix, &kind.rest), |_| Vec::new()) as usize);
    let of_kind: Vec<usize> = of_kind.collect();
    let mut experts = vec![0; groups.len()];
    for part in &named.parts {
        let count = &mut experts[of_kind[part.kind as usize]];
        *count = part.expert.map_or(*count, |expert| (*count).max(expert + 1));
    }
    let scanned: Vec<Option<String>> = named.kinds.iter().map(PartKind::scanned).collect();
    let view_of = |(part, unscanned): (&NamedPart, &String)| {
        let stored = checkpoint.tensor(part.id).name;
        let scanned = scanned[part.kind as usize].as_ref().unwrap_or(unscanned);
        let dtype = values.dtype_of(part.id, &[stored, unscanned, scanned]);
        let view = values.view(part.id, dtype)?;
        match named.kind(part).part {
            None => Ok(view),
            Some((axis, start, stop)) => {
                view.slice(axis, start, stop, 1).map_err(|error| Problem::View { name: stored.to_owned(), error })
            }
        }
    };
    let draft_of = |(part, name): (&NamedPart, String)| {
        let view = view_of((part, &name)).map_err(Box::new)?;
        let (kind, group) = (named.kind(part), of_kind[part.kind as usize]);
        let expert = part.expert.map(|expert| (expert, experts[group]));
        let roles = Roles { tp: kind.tp, block: kind.block.clone(), experts: kind.experts, expert, ..Roles::default() };
        Ok(Draft::new(name, view, roles))
    };
    let made: Vec<Result<Draft, Box<Problem>>> = named.parts.par_iter().zip(names).map(draft_of).collect();
    let whole = named.parts.iter().zip(&made).filter(|(_, made)| made.is_ok()).map(|(part, _)| part);
    for (at, part) in whole.enumerate().filter(|(_, part)| !predictors.contains(&part.id)) {
        if let Some(layer) = part.layer {
            groups[of_kind[part.kind as usize]].push(StackMember { layer, expert: part.expert, at });
        }
    }
    let made = made.into_iter().filter_map(|made| made.map_err(|problem| problems.push(*problem)).ok());
    let mut drafts: Vec<Draft> = made.collect();
    groups.retain(|_, members| !members.is_empty());
    add_stacks(groups, &mut drafts, problems);
    drafts
}

/// Adds the stacks of all groups.
fn add_stacks(groups: StackGroups<'_>, drafts: &mut Vec<Draft>, problems: &mut Vec<Problem>) {
    // A stack is left out if its name is taken: by a tensor of that name, or by a stack of experts that is one tensor.
    let like_stacks = drafts.par_iter().filter(|draft| draft.name.contains("layers.scanned."));
    let mut taken: std::collections::HashSet<String> = like_stacks.map(|draft| draft.name.clone()).collect();
    let with_expert =
        |(name, members): (_, Vec<StackMember>)| (members.iter().any(|member| member.expert.is_some()), name, members);
    let mut groups: Vec<_> = groups.into_iter().map(with_expert).collect();
    groups.sort_by_key(|(has_expert, name, _)| (*has_expert, *name));
    let named = groups.into_iter().filter_map(|(has_expert, (prefix, rest), members)| {
        let name = format!("{prefix}layers.scanned.{}", naming::without_expert(rest, has_expert));
        taken.insert(name.clone()).then_some((name, members))
    });
    let named: Vec<_> = named.collect();
    let stacks: Vec<_> = named.into_par_iter().map(|(name, members)| scan(name, members, drafts)).collect();
    for stack in stacks {
        match stack {
            Ok(Some((draft, members))) => {
                for at in members {
                    drafts[at].bundled.scanned = false;
                }
                drafts.push(draft);
            }
            Ok(None) => {}
            Err(problem) => problems.push(problem),
        }
    }
}

/// Stacks the largest group of layers whose members are alike. In scanned bundles the stack is in the place of its members, of which the
/// numbers of the drafts are returned too.
fn scan(name: String, mut members: Vec<StackMember>, drafts: &[Draft]) -> Result<Option<(Draft, Vec<usize>)>, Problem> {
    members.par_sort_by_key(|member| (member.layer, member.expert));
    let layers: Vec<&[StackMember]> = members.chunk_by(|a, b| a.layer == b.layer).collect();
    let view = |member: &StackMember| &drafts[member.at].view;
    let same = |a: &View, b: &View| a.dtype() == b.dtype() && a.shape() == b.shape();
    // Within a layer: experts 0, 1, … without a gap, all of one shape and dtype.
    let regular = |layer: &[StackMember]| {
        layer.iter().zip(0u64..).all(|(member, index)| {
            member.expert.is_none_or(|expert| expert == index) && same(view(member), view(&layer[0]))
        }) && (layer[0].expert.is_some() || layer.len() == 1)
    };
    let layers: Vec<&[StackMember]> = layers.into_par_iter().filter(|layer| regular(layer)).collect();
    let mut kinds: Numbered<(usize, DType, &Shape), Vec<&[StackMember]>> = Numbered::default();
    for layer in layers {
        let first = view(&layer[0]);
        kinds.entry((layer.len(), first.dtype(), first.shape())).or_default().push(layer);
    }
    let Some(largest) = kinds.into_values().reduce(|best, kind| if kind.len() > best.len() { kind } else { best })
    else {
        return Ok(None);
    };
    let named = |error| Problem::View { name: name.clone(), error };
    let stacked = 1 + usize::from(largest[0][0].expert.is_some());
    if view(&largest[0][0]).shape().rank() + stacked > RANK_MAX {
        return Ok(None);
    }
    let views = largest.par_iter().map(|layer| match layer {
        [member @ StackMember { expert: None, .. }] => Ok(view(member).clone()),
        experts => View::stack(0, &experts.iter().map(|member| view(member).clone()).collect::<Vec<_>>()),
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(named)?;
    let view = View::stack(0, &views).map_err(named)?;
    let single = stacked > 1;
    let first = drafts[largest[0][0].at].roles.clone();
    let roles = Roles {
        stacked,
        tp: first.tp.map(|axis| axis + stacked),
        block: first.block,
        experts: if single { Some(1) } else { first.experts.map(|axis| axis + 1) },
        ..Roles::default()
    };
    let members = largest.iter().copied().flatten().map(|member| member.at).collect();
    let layers: Arc<[u64]> = largest.iter().map(|layer| layer[0].layer).collect();
    let bundled = Bundled { scanned: true, unscanned: false };
    let draft = Draft { name, view, roles, bundled, layers: Some(layers) };
    Ok(Some((draft, members)))
}

/// The output head, if it is the embedding and the repository does not store it again.
fn tied_head(checkpoint: &Checkpoint, named: &NamedParts, drafts: &[Draft]) -> Option<Draft> {
    let (head, embedding) = names::tied_head(checkpoint)?;
    let id = checkpoint.find(&embedding)?;
    let embedding = named.unscanned(named.parts.iter().find(|part| part.id == id)?);
    let draft = drafts.iter().find(|draft| draft.name == embedding)?;
    let head = head.strip_suffix(".weight").unwrap_or(&head);
    let prefix = embedding.strip_suffix("embed").or_else(|| embedding.strip_suffix("embed_tokens")).unwrap_or_default();
    // A head of another name has its whole name.
    let prefix = if checkpoint.dialect().other_head.is_some() { "" } else { prefix };
    let taken = drafts.iter().any(|draft| draft.name.strip_prefix(prefix).is_some_and(|rest| rest == head));
    (!taken).then(|| Draft { name: format!("{prefix}{head}"), bundled: Bundled::NEVER, ..draft.clone() })
}
