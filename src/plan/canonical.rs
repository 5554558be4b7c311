//! The layout `canonical`: generic, for any repository.
//!
//! Tensors of layers are named `layers.N.<rest>`. Tensors that several layers have with equal shape and dtype also
//! appear stacked, as `layers.scanned.<rest>`. Where a shape differs from layer to layer, the largest group of equal
//! layers is stacked and the other layers stay single. Known families have short names. Other names keep their words,
//! without a leading `model.` and a final `weight`. The final `weight` stays where the name would otherwise be a
//! directory. A name that is nevertheless a directory, because another tensor's name continues it with a dot, ends in
//! `_self`.

use std::{collections::BTreeSet, sync::Arc};

use ckfs_checkpoint::Checkpoint;
use ckfs_config::Mesh;
use ckfs_tensor::{DType, RANK_MAX, TensorId, View};
use hashbrown::{HashMap, HashSet};
use rayon::prelude::*;

use super::{
    AxisUse, axis_use,
    blocks::{CutBlocks, Module, Sayings},
    draft::{Bundled, Draft, Roles},
    experts::{
        self,
        orientation::{Order, Orientation, ShapeHint},
    },
    family::{Family, Generic, Role},
    member, names,
    naming::{self, Parsed, SELF_WORD},
    problem::Problem,
    select,
    styles::{ModelPlans, Style},
    values::Values,
};

/// Tensors that one thread names at a time.
const NAMED_TOGETHER: usize = 1024;

/// A part of a source tensor, and its name in the layout.
#[derive(Clone, Debug)]
struct NamedPart {
    id: TensorId,
    /// Output prefix, with its final dot.
    prefix: String,
    layer: Option<u64>,
    expert: Option<u64>,
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

/// The common attributes of a tensor in all layers and experts: prefix, rest, and whether it has a layer and an expert.
type NameKind<'a> = (&'a str, &'a str, bool, bool);

impl NamedPart {
    fn unscanned(&self) -> String {
        let rest = naming::with_expert(&self.rest, self.expert);
        self.layer
            .map_or_else(|| format!("{}{rest}", self.prefix), |layer| format!("{}layers.{layer}.{rest}", self.prefix))
    }

    /// The name within the layer, for a stack over experts.
    fn collapsed(&self) -> String {
        naming::without_expert(&self.rest, self.expert.is_some())
    }

    fn kind(&self) -> NameKind<'_> {
        (&self.prefix, &self.rest, self.layer.is_some(), self.expert.is_some())
    }

    fn scanned(&self) -> Option<String> {
        self.layer.map(|_| format!("{}layers.scanned.{}", self.prefix, self.collapsed()))
    }
}

struct Namer<'a> {
    checkpoint: &'a Checkpoint,
    family: Option<Family>,
    generic: Generic,
    /// Stems of all layers' tensors.
    stems: BTreeSet<String>,
    /// The orders of axes that fused experts show.
    orientation: Orientation,
    plans: ModelPlans,
    /// What tensor parallelism cuts. Empty if the mesh has no axis for it.
    blocks: CutBlocks,
}

/// Drafts, and which blocks tensor parallelism leaves whole.
#[derive(Debug, Default)]
pub(super) struct Tabled {
    /// The drafts.
    pub(super) drafts: Vec<Draft>,
    /// The warning, if there is one.
    pub(super) warning: Option<String>,
}

/// Drafts of all tensors of a repository.
///
/// # Errors
/// All problems found.
pub(super) fn drafts(
    checkpoint: &Checkpoint,
    family: Option<Family>,
    generic: Generic,
    (values, order): (&Values<'_>, Option<Order>),
    (whole, mesh): (&Checkpoint, &Mesh),
) -> Result<Tabled, Vec<Problem>> {
    let mut problems = Vec::new();
    let tensors: Vec<_> = checkpoint.tensors().collect();
    let parsed: Vec<Parsed> = tensors.par_iter().map(|(_, info)| naming::parse(info.name, &generic.words)).collect();
    let stems_of = |parsed: &[Parsed]| -> HashSet<String> {
        let in_layers = parsed.iter().filter(|parsed| parsed.layer.is_some());
        in_layers.map(|parsed| naming::split_suffix(&parsed.rest).0.to_owned()).collect()
    };
    let stems: Vec<_> = parsed.par_chunks(NAMED_TOGETHER).map(stems_of).collect();
    let stems = stems.into_iter().flatten().collect();
    let mut namer = Namer::new((checkpoint, order), family, generic, stems);
    namer.find_blocks_of(whole, mesh, true);
    let parts: Vec<_> = tensors
        .par_chunks(NAMED_TOGETHER)
        .zip(parsed.par_chunks(NAMED_TOGETHER))
        .map(|(tensors, parsed)| {
            let (mut named, mut problems) = (Vec::with_capacity(tensors.len()), Vec::new());
            for ((id, info), parsed) in tensors.iter().zip(parsed) {
                problems.extend(namer.name(*id, info.name, parsed, info.shape, &mut named).err());
            }
            (named, problems)
        })
        .collect();
    let mut named = Vec::with_capacity(tensors.len());
    for (part, found) in parts {
        named.extend(part);
        problems.extend(found);
    }
    let predicting = select::predicting(checkpoint, namer.family.as_ref());
    let is_predictor = |parsed: &Parsed| {
        predicting.as_ref().is_some_and(|(prefix, first)| parsed.prefix == *prefix && parsed.layer >= Some(*first))
    };
    let all = tensors.iter().zip(&parsed);
    let predictors = all.filter(|(_, parsed)| is_predictor(parsed)).map(|((id, _), _)| *id).collect();
    let names = resolve_collisions(checkpoint, &mut named);
    let mut drafts = build(&named, names, values, &predictors, &mut problems);
    if let Some(alias) = tied_head(checkpoint, &named, &drafts) {
        drafts.push(alias);
    }
    let warning = namer.blocks.warning();
    if problems.is_empty() { Ok(Tabled { drafts, warning }) } else { Err(problems) }
}

/// Drafts of all tensors under the repository's own names, with the roles that the tables give to their canonical
/// names.
///
/// # Errors
/// All problems found.
pub(super) fn hf_drafts(
    checkpoint: &Checkpoint,
    family: Option<Family>,
    generic: Generic,
    (values, order): (&Values<'_>, Option<Order>),
    (whole, mesh): (&Checkpoint, &Mesh),
) -> Result<Tabled, Vec<Problem>> {
    let tensors = checkpoint.tensors().map(|(id, info)| {
        let dtype = values.dtype_of(id, &[info.name]);
        (info.name.to_owned(), values.view(id, dtype))
    });
    let mut namer = Namer::new((checkpoint, order), family, generic, BTreeSet::new());
    namer.find_blocks_of(whole, mesh, false);
    named_drafts(&namer, tensors)
}

/// Drafts of tensors under the names that a repository of the family has, likewise. `checkpoint` gives the configuration.
///
/// # Errors
/// All problems found.
pub(super) fn drafts_of(
    checkpoint: &Checkpoint,
    family: Option<Family>,
    generic: Generic,
    tensors: impl ExactSizeIterator<Item = (String, Result<View, Problem>)>,
    mesh: &Mesh,
) -> Result<Tabled, Vec<Problem>> {
    let mut namer = Namer::new((checkpoint, None), family, generic, BTreeSet::new());
    let tensors: Vec<_> = tensors.collect();
    let parsed: Vec<Parsed> = tensors.iter().map(|(name, _)| naming::parse(name, &namer.generic.words)).collect();
    let shapes = tensors.iter().zip(&parsed).filter_map(|((name, view), parsed)| {
        view.as_ref().ok().map(|view| (name.as_str(), view.shape().extents(), parsed))
    });
    namer.find_blocks(shapes, mesh, false);
    named_drafts(&namer, tensors.into_iter())
}

/// Drafts of tensors under names of a repository.
fn named_drafts(
    namer: &Namer<'_>,
    tensors: impl ExactSizeIterator<Item = (String, Result<View, Problem>)>,
) -> Result<Tabled, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut drafts = Vec::with_capacity(tensors.len());
    let mut experts: HashMap<(String, String), u64> = HashMap::new();
    let mut single = Vec::new();
    for (name, view) in tensors {
        let mut named = Vec::new();
        let parsed = naming::parse(&name, &namer.generic.words);
        // The parts of a fused tensor are not shown here: their ids have no meaning.
        let view = view.and_then(|view| {
            let extents = view.shape().extents();
            namer.name(TensorId(0), &name, &parsed, extents, &mut named).map(|()| view.clone())
        });
        match (view, named.first()) {
            (Ok(view), Some(named)) => {
                let block = named.block.clone();
                let roles = Roles { tp: named.tp, block, experts: named.experts, ..Roles::default() };
                if let Some(expert) = named.expert {
                    let key = (named.prefix.clone(), named.rest.clone());
                    let count = experts.entry(key.clone()).or_default();
                    *count = (*count).max(expert + 1);
                    single.push((drafts.len(), expert, key));
                }
                drafts.push(Draft { name, view, roles, bundled: Bundled::ALWAYS, layers: None });
            }
            (Ok(_), None) => {}
            (Err(problem), _) => problems.push(problem),
        }
    }
    for (at, expert, key) in single {
        drafts[at].roles.expert = Some((expert, experts[&key]));
    }
    let warning = namer.blocks.warning();
    if problems.is_empty() { Ok(Tabled { drafts, warning }) } else { Err(problems) }
}

/// Whether a mesh has an axis that splits by column or row.
fn has_tensor_axis(mesh: &Mesh) -> bool {
    mesh.axes().iter().any(|axis| axis.size > 1 && axis_use(&axis.name) == AxisUse::Tensor)
}

impl<'c> Namer<'c> {
    /// `order` is the user's own word on the axes of fused experts.
    fn new(
        (checkpoint, order): (&'c Checkpoint, Option<Order>),
        family: Option<Family>,
        generic: Generic,
        stems: BTreeSet<String>,
    ) -> Self {
        let (plans, blocks) = (ModelPlans::default(), CutBlocks::default());
        let orientation = experts::orientation(checkpoint, order);
        Self { checkpoint, family, generic, stems, orientation, plans, blocks }
    }

    /// Finds what tensor parallelism cuts in a checkpoint, of which only a part may be shown.
    fn find_blocks_of(&mut self, whole: &Checkpoint, mesh: &Mesh, parts: bool) {
        if !has_tensor_axis(mesh) {
            return;
        }
        let tensors: Vec<_> = whole.tensors().collect();
        let words = self.generic.words.clone();
        let parsed: Vec<Parsed> = tensors.par_iter().map(|(_, info)| naming::parse(info.name, &words)).collect();
        let named = tensors.iter().zip(&parsed).map(|((_, info), parsed)| (info.name, info.shape, parsed));
        self.find_blocks(named, mesh, parts);
    }

    /// Finds what tensor parallelism cuts, if the mesh has an axis for it. `parts` tells whether the parts of a fused tensor are
    /// shown each by itself.
    fn find_blocks<'t>(
        &mut self,
        tensors: impl Iterator<Item = (&'t str, &'t [u64], &'t Parsed)>,
        mesh: &Mesh,
        parts: bool,
    ) {
        if !has_tensor_axis(mesh) {
            return;
        }
        let modules = tensors.map(|(name, shape, parsed)| {
            let (stem, suffix) = naming::split_suffix(&parsed.rest);
            let starred = naming::group_name(name);
            let words = naming::words_of(stem).count() + usize::from(!suffix.is_empty());
            let base = naming::words_of(&starred).count() - words;
            let base = naming::words_of(&starred).take(base).collect::<Vec<_>>().join(".");
            let (prefix, stem) = (parsed.prefix.as_str(), naming::group_name(stem));
            Module { base, prefix, layer: parsed.layer, stem, suffix, shape, is_tower: select::is_tower(name) }
        });
        self.plans = ModelPlans::of(self.checkpoint);
        let role = |prefix: &str, stem: &str, shape: &[u64]| {
            let family = self.family.as_ref().filter(|family| family.prefixes.iter().any(|known| known == prefix))?;
            let role = family.layer(stem, &|stem| self.stems.contains(stem))?;
            self.oriented(role.clone(), stem, shape)
        };
        let sayings = Sayings { plans: &self.plans, generic: &self.generic, role: &role, parts };
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
        let by_name = || role.and_then(|role| role.tp).or_else(|| self.generic.tp(stem));
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
        let family = self.family.as_ref()?;
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
        let shown = experts::shown(self.checkpoint, name, shape).unwrap_or(ShapeHint::Neither);
        let order = self.orientation.as_loaded(shown)?;
        Some(if order == own { role } else { role.turned() })
    }

    fn name(
        &self,
        id: TensorId,
        name: &str,
        parsed: &Parsed,
        shape: &[u64],
        named: &mut Vec<NamedPart>,
    ) -> Result<(), Problem> {
        let mut out = NamedPart {
            id,
            prefix: String::new(),
            layer: parsed.layer,
            expert: parsed.expert,
            rest: String::new(),
            weight_dropped: false,
            part: None,
            tp: None,
            block: None,
            experts: None,
        };
        let oriented = |(prefix, role, suffix)| Some((prefix, self.oriented(role, name, shape)?, suffix));
        if let Some((prefix, role, suffix)) = self.role(parsed, name).and_then(oriented) {
            let splits = !role.split.is_empty() && matches!(suffix, "" | "weight" | "bias");
            if splits || role.short.is_some() {
                out.prefix = prefix;
                out.experts = role.experts;
                let stem = if suffix.is_empty() { &parsed.rest } else { naming::split_suffix(&parsed.rest).0 };
                (out.tp, out.block) = self.cut(parsed, (stem, suffix), Some(&role), shape.len());
                if splits {
                    return self.split(&role, suffix, name, shape, &out, named);
                }
                let short = role.short.expect("a role that does not split has a short name here");
                out.rest = match suffix {
                    "" | "weight" => short,
                    "bias" => role.bias.unwrap_or_else(|| format!("{short}_bias")),
                    _ => format!("{short}{}", suffix.strip_prefix("weight").unwrap_or(suffix)),
                };
                named.push(out);
                return Ok(());
            }
        }
        let (stem, suffix) = naming::split_suffix(&parsed.rest);
        (out.tp, out.block) = self.cut(parsed, (stem, suffix), None, shape.len());
        out.weight_dropped = suffix == "weight";
        let rest = if out.weight_dropped { stem } else { &parsed.rest };
        if parsed.layer.is_some() {
            out.prefix = self.out_prefix(&parsed.prefix);
            rest.clone_into(&mut out.rest);
        } else {
            out.rest = self.out_prefix(rest);
        }
        named.push(out);
        Ok(())
    }

    fn split(
        &self,
        role: &Role,
        suffix: &str,
        name: &str,
        shape: &[u64],
        whole: &NamedPart,
        named: &mut Vec<NamedPart>,
    ) -> Result<(), Problem> {
        let shares = role.split.iter().map(|(_, share)| {
            let number = share.parse().ok().or_else(|| member::config_number(self.checkpoint, share));
            number.ok_or_else(|| Problem::Config { name: name.to_owned(), member: share.clone() })
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
            let shape = shape.map_err(|error| Problem::View { name: name.to_owned(), error: error.into() })?;
            return Err(Problem::Split { name: name.to_owned(), axis, shape, shares });
        };
        let mut start = 0;
        for ((short, _), part) in role.split.iter().zip(parts) {
            let stop = start + part;
            let rest = if suffix == "bias" { short.replacen('w', "b", 1) } else { short.clone() };
            named.push(NamedPart { rest, part: Some((axis, start, stop)), ..whole.clone() });
            start = stop;
        }
        Ok(())
    }
}

/// Restores the dropped parts of names where two names would otherwise collide. A final `weight` is restored where the
/// name is also a directory, and everything where two tensors would have one name. A name that is a directory even then
/// gets a word of its own. Returns the unscanned names.
fn resolve_collisions(checkpoint: &Checkpoint, named: &mut [NamedPart]) -> Vec<String> {
    let mut found = directories(named);
    if !found.is_empty() {
        for n in named.iter_mut().filter(|n| n.weight_dropped) {
            if paths(n.kind()).iter().any(|path| found.contains(path)) {
                n.rest.push_str(".weight");
            }
        }
    }
    let unscanned: Vec<String> = named.par_iter().map(NamedPart::unscanned).collect();
    let several = repeated(&unscanned);
    if found.is_empty() && several.is_empty() {
        drop(several);
        return unscanned;
    }
    for (n, name) in named.iter_mut().zip(&unscanned).filter(|(n, _)| n.part.is_none()) {
        if several.contains(name.as_str()) {
            (n.prefix, n.layer, n.expert) = (String::new(), None, None);
            checkpoint.tensor(n.id).name.clone_into(&mut n.rest);
        }
    }
    found = directories(named);
    for n in named.iter_mut().filter(|_| !found.is_empty()) {
        if paths(n.kind()).iter().any(|path| found.contains(path)) {
            n.rest = format!("{}.{SELF_WORD}", n.rest);
        }
    }
    named.par_iter().map(NamedPart::unscanned).collect()
}

/// The names that occur more than once.
fn repeated(names: &[String]) -> HashSet<&str> {
    let mut seen = HashSet::with_capacity(names.len());
    names.iter().map(String::as_str).filter(|name| !seen.insert(*name)).collect()
}

/// The paths of names that other names continue. They are alike in all layers, so that these still stack. Layers and
/// experts are many, but the kinds of their names are few.
fn directories(named: &[NamedPart]) -> HashSet<String> {
    let parts: Vec<HashSet<NameKind<'_>>> =
        named.par_chunks(NAMED_TOGETHER).map(|part| part.iter().map(NamedPart::kind).collect()).collect();
    let kinds: HashSet<NameKind<'_>> = parts.into_iter().flatten().collect();
    let all: BTreeSet<String> = kinds.into_iter().flat_map(paths).collect();
    let holds = |(path, next): &(&String, &String)| next.starts_with(path.as_str());
    all.iter().zip(all.iter().skip(1)).filter(holds).map(|(path, _)| path.clone()).collect()
}

/// The paths at which tensors of a kind would be directories, without layer numbers: one by one, and stacked over
/// experts.
fn paths((prefix, rest, in_layer, single): NameKind<'_>) -> [String; 2] {
    let stem = format!("{prefix}{}", if in_layer { "layers." } else { "" });
    [format!("{stem}{rest}."), format!("{stem}{}.", naming::without_expert(rest, single))]
}

/// The members of stacks, by prefix and name of the tensor.
type StackGroups<'a> = HashMap<(&'a str, &'a str), Vec<StackMember>>;

struct StackMember {
    layer: u64,
    expert: Option<u64>,
    view: View,
    at: usize,
}

/// Drafts of the named tensors, of which `names` are the unscanned names, and of their stacks. The stacks leave out the
/// tensors of `predictors`.
fn build(
    named: &[NamedPart],
    names: Vec<String>,
    values: &Values<'_>,
    predictors: &HashSet<TensorId>,
    problems: &mut Vec<Problem>,
) -> Vec<Draft> {
    let checkpoint = values.checkpoint();
    let dtypes: Vec<Option<DType>> = named
        .par_iter()
        .zip(&names)
        .map(|(n, unscanned)| {
            let scanned = if values.depend_on_names() { n.scanned() } else { None };
            let names = [checkpoint.tensor(n.id).name, unscanned, scanned.as_deref().unwrap_or(unscanned)];
            values.dtype_of(n.id, &names)
        })
        .collect();
    let mut drafts: Vec<Draft> = Vec::with_capacity(named.len());
    let mut groups = StackGroups::new();
    let mut experts: HashMap<(&str, &str), u64> = HashMap::new();
    for n in named {
        if let Some(expert) = n.expert {
            let count = experts.entry((&n.prefix, &n.rest)).or_default();
            *count = (*count).max(expert + 1);
        }
    }
    let view_of = |(n, dtype): (&NamedPart, &Option<DType>)| {
        values.view(n.id, *dtype).and_then(|view| match n.part {
            None => Ok(view),
            Some((axis, start, stop)) => {
                let name = || checkpoint.tensor(n.id).name.to_owned();
                view.slice(axis, start, stop, 1).map_err(|error| Problem::View { name: name(), error })
            }
        })
    };
    let views: Vec<_> = named.par_iter().zip(&dtypes).map(view_of).collect();
    for ((n, view), name) in named.iter().zip(views).zip(names) {
        let view = match view {
            Ok(view) => view,
            Err(problem) => {
                problems.push(problem);
                continue;
            }
        };
        if let Some(layer) = n.layer.filter(|_| !predictors.contains(&n.id)) {
            let member = StackMember { layer, expert: n.expert, view: view.clone(), at: drafts.len() };
            groups.entry((&n.prefix, &n.rest)).or_default().push(member);
        }
        let expert = n.expert.map(|expert| (expert, experts[&(n.prefix.as_str(), n.rest.as_str())]));
        let roles = Roles { tp: n.tp, block: n.block.clone(), experts: n.experts, expert, ..Roles::default() };
        drafts.push(Draft { name, view, roles, bundled: Bundled::ALWAYS, layers: None });
    }
    add_stacks(groups, &mut drafts, problems);
    drafts
}

/// Adds the stacks of all groups.
fn add_stacks(groups: StackGroups<'_>, drafts: &mut Vec<Draft>, problems: &mut Vec<Problem>) {
    // A stack is left out if its name is taken: by a tensor of that name, or by a stack of experts that is one tensor.
    let mut taken: HashSet<String> =
        drafts.iter().filter(|draft| draft.name.contains("layers.scanned.")).map(|draft| draft.name.clone()).collect();
    let mut groups: Vec<_> = groups
        .into_iter()
        .map(|(name, members)| (members.iter().any(|member| member.expert.is_some()), name, members))
        .collect();
    groups.sort_by_key(|(has_expert, name, _)| (*has_expert, *name));
    for (has_expert, (prefix, rest), members) in groups {
        let name = format!("{prefix}layers.scanned.{}", naming::without_expert(rest, has_expert));
        if !taken.insert(name.clone()) {
            continue;
        }
        match scan(&name, members, drafts) {
            Ok(Some(draft)) => drafts.push(draft),
            Ok(None) => {}
            Err(problem) => problems.push(problem),
        }
    }
}

/// Stacks the largest group of layers whose members are alike, and removes their tensors from the scanned bundles.
fn scan(name: &str, mut members: Vec<StackMember>, drafts: &mut [Draft]) -> Result<Option<Draft>, Problem> {
    members.sort_by_key(|member| (member.layer, member.expert));
    let layers: Vec<&[StackMember]> = members.chunk_by(|a, b| a.layer == b.layer).collect();
    let alike = |a: &[StackMember], b: &[StackMember]| {
        a.len() == b.len() && a[0].view.dtype() == b[0].view.dtype() && a[0].view.shape() == b[0].view.shape()
    };
    // Within a layer: experts 0, 1, … without a gap, all of one shape and dtype.
    let regular = |layer: &[StackMember]| {
        layer.iter().zip(0u64..).all(|(member, index)| {
            member.expert.is_none_or(|expert| expert == index)
                && member.view.dtype() == layer[0].view.dtype()
                && member.view.shape() == layer[0].view.shape()
        }) && (layer[0].expert.is_some() || layer.len() == 1)
    };
    let layers: Vec<&[StackMember]> = layers.into_iter().filter(|layer| regular(layer)).collect();
    let mut kinds: Vec<Vec<&[StackMember]>> = Vec::new();
    for layer in layers {
        match kinds.iter_mut().find(|kind| alike(kind[0], layer)) {
            Some(kind) => kind.push(layer),
            None => kinds.push(vec![layer]),
        }
    }
    let Some(largest) = kinds.into_iter().reduce(|best, kind| if kind.len() > best.len() { kind } else { best }) else {
        return Ok(None);
    };
    let named = |error| Problem::View { name: name.to_owned(), error };
    let stacked = 1 + usize::from(largest[0][0].expert.is_some());
    if largest[0][0].view.shape().rank() + stacked > RANK_MAX {
        return Ok(None);
    }
    let views = largest.iter().map(|layer| match layer {
        [StackMember { expert: None, view, .. }] => Ok(view.clone()),
        experts => View::stack(0, &experts.iter().map(|member| member.view.clone()).collect::<Vec<_>>()),
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
    for member in largest.iter().copied().flatten() {
        drafts[member.at].bundled.scanned = false;
    }
    let layers: Arc<[u64]> = largest.iter().map(|layer| layer[0].layer).collect();
    let bundled = Bundled { scanned: true, unscanned: false };
    Ok(Some(Draft { name: name.to_owned(), view, roles, bundled, layers: Some(layers) }))
}

/// The output head, if it is the embedding and the repository does not store it again.
fn tied_head(checkpoint: &Checkpoint, named: &[NamedPart], drafts: &[Draft]) -> Option<Draft> {
    let (head, embedding) = names::tied_head(checkpoint)?;
    let id = checkpoint.find(&embedding)?;
    let embedding = named.iter().find(|n| n.id == id)?.unscanned();
    let draft = drafts.iter().find(|draft| draft.name == embedding)?;
    let head = head.strip_suffix(".weight").unwrap_or(&head);
    let prefix = embedding.strip_suffix("embed").or_else(|| embedding.strip_suffix("embed_tokens")).unwrap_or_default();
    let taken = drafts.iter().any(|draft| draft.name.strip_prefix(prefix).is_some_and(|rest| rest == head));
    (!taken).then(|| Draft { name: format!("{prefix}{head}"), bundled: Bundled::NEVER, ..draft.clone() })
}
