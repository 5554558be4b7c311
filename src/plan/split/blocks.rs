//! The blocks of a model's layers that tensor parallelism cuts: attention, an MLP, an expert.
//!
//! A device can use its part of a block only if the block is cut as a whole: the rows of the matrices that read its input,
//! and the columns of the matrix that writes its output. So a block is cut so, or it stays whole. How it is cut follows from
//! transformers' plan for the model type, or else by the names of its modules, which a form of `generic.toml` lists. Fused
//! tensors of a family have the axes of the family's own table.
//!
//! Layers of one kind are treated alike: what stays whole in one of them stays whole in all.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ckfs_checkpoint::first_names;
use hashbrown::{HashMap, HashSet};

use super::{
    super::{
        family::{BlockForm, Generic, Role},
        naming::joined,
    },
    styles::{ModelPlan, ModelPlans, Style},
};

/// Most blocks that a warning lists.
const LISTED: usize = 6;

/// One tensor of the model, by the parts of its name.
#[derive(Clone, Debug)]
pub(crate) struct Module<'a> {
    /// The name up to the number of the layer, with numbers as `*`; empty outside the layers.
    pub(crate) base: String,
    /// The part of the name before the layers.
    pub(crate) prefix: &'a str,
    /// The number of the layer.
    pub(crate) layer: Option<u64>,
    /// The name in the layer without the final word, with numbers as `*`.
    pub(crate) stem: String,
    /// The final word.
    pub(crate) suffix: &'a str,
    /// The tensor's shape.
    pub(crate) shape: &'a [u64],
    /// Whether it belongs to a tower for images, video or sound.
    pub(crate) is_tower: bool,
}

/// The side of its block on which a module is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// It reads the block's input. It is useless without a module on the other side.
    Column,
    /// It writes the block's output. It is useless without a module on the other side.
    Row,
    /// The program puts its output together, or cuts its input, by itself.
    Alone,
    /// It has an element for each head.
    Follower,
}

/// A module's place in its block.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    side: Side,
    axis: usize,
    block: Arc<str>,
}

/// A module of a layer.
#[derive(Clone, Debug, Default)]
struct Info {
    /// The shape of its weight.
    shape: Vec<u64>,
    /// The length of its bias.
    bias: Option<u64>,
}

/// Modules of one layer, or all outside the layers.
#[derive(Debug, Default)]
struct Layer {
    base: String,
    is_tower: bool,
    modules: BTreeMap<String, Info>,
}

/// A block that was found in a layer.
#[derive(Debug)]
struct Found {
    root: String,
    members: Vec<(String, Side, usize)>,
    /// Why the block stays whole, if something says so.
    whole: Option<String>,
    /// Whether the other modules are not in the checkpoint.
    is_part: bool,
}

/// The family's entry for a module of a layer, by prefix, stem and shape.
type RoleOf<'a> = dyn Fn(&str, &str, &[u64]) -> Option<Role> + 'a;

/// What says how modules are cut.
#[derive(Clone, Copy)]
pub(crate) struct Sayings<'a> {
    /// The plans of transformers.
    pub(crate) plans: &'a ModelPlans,
    /// The family's entry for a module of a layer, by prefix, stem and shape.
    pub(crate) role: &'a RoleOf<'a>,
    /// Whether the layout shows the parts of a fused tensor each by itself.
    pub(crate) parts: bool,
}

/// Whether a module of this name is whole by its nature.
fn is_whole(name: &str) -> bool {
    Generic::get().blocks.iter().flat_map(|form| &form.whole).any(|whole| whole == name)
}

/// How tensor parallelism cuts the modules of a model.
#[derive(Debug, Default)]
pub(crate) struct CutBlocks {
    members: HashMap<(String, String), Member>,
    /// Why blocks stay whole.
    whole: BTreeMap<Arc<str>, String>,
    unknown: BTreeSet<String>,
}

fn parent(stem: &str) -> &str {
    stem.rsplit_once('.').map_or("", |(parent, _)| parent)
}

fn last(stem: &str) -> &str {
    stem.rsplit('.').next().unwrap_or(stem)
}

impl Layer {
    /// The modules whose weight is a matrix, or several.
    fn matrices(&self) -> impl Iterator<Item = &String> {
        self.modules.iter().filter(|(_, info)| info.shape.len() > 1).map(|(stem, _)| stem)
    }

    /// Whether a module is a matrix that no other block covers.
    fn is_free(&self, stem: &str, covered: &HashSet<String>) -> bool {
        self.modules.get(stem).is_some_and(|info| info.shape.len() == 2) && !covered.contains(stem)
    }

    /// The block of a plan, if the layer has any of its modules.
    fn planned<'p>(
        &self,
        prefix: &str,
        root: &str,
        modules: impl Iterator<Item = (Style, &'p str)>,
        sayings: Sayings<'_>,
    ) -> Option<Found> {
        let mut found = Found { root: root.to_owned(), members: Vec::new(), whole: None, is_part: false };
        let mut missing = Vec::new();
        let mut named = HashSet::new();
        for (style, name) in modules {
            let stem = joined(root, name);
            named.insert(stem.clone());
            let Some(info) = self.modules.get(&stem) else {
                if style == Style::Colwise {
                    missing.push(stem);
                }
                continue;
            };
            let role = (sayings.role)(prefix, &stem, &info.shape);
            if let Some(role) = role.filter(|role| role.experts.is_some() || (sayings.parts && !role.split.is_empty()))
            {
                found.add_fused(&stem, &role, sayings.parts);
                continue;
            }
            let rank = info.shape.len();
            let (side, axis) = match style {
                Style::Colwise => (Side::Column, 0),
                Style::Rowwise => (Side::Row, 1),
                Style::ColwiseGatherOutput | Style::EmbeddingRowwise => (Side::Alone, 0),
                Style::RowwiseSplitInput | Style::EmbeddingColwise => (Side::Alone, 1),
                Style::Replicate => continue,
                Style::PackedColwise | Style::PackedRowwise => (Side::Column, 2),
            };
            // Fused experts are in no certain order.
            if axis == 2 || rank > 2 {
                found.whole = Some(fused(name));
            }
            let side = if rank < 2 { Side::Follower } else { side };
            found.members.push((stem, side, axis));
        }
        if found.members.is_empty() || self.is_of_another(&found, &named) {
            return None;
        }
        found.is_part = self.is_part(&found, &missing);
        Some(found)
    }

    /// Whether a plan's block is not that of this layer: each module that it has here can be cut alone, others are missing, and
    /// matrices that the plan does not name are beside them. A tower without a plan has such layers.
    fn is_of_another(&self, found: &Found, named: &HashSet<String>) -> bool {
        let is_beside = |stem: &String| parent(stem) == found.root && !named.contains(stem) && !is_whole(last(stem));
        found.whole.is_none()
            && found.members.iter().all(|(_, side, _)| *side == Side::Alone)
            && named.iter().any(|stem| !self.modules.contains_key(stem))
            && self.matrices().any(is_beside)
    }

    /// The block of a form whose output is this module.
    fn formed(
        &self,
        form: &BlockForm,
        output: &str,
        covered: &HashSet<String>,
        shows_parts: &dyn Fn(&str) -> bool,
    ) -> Option<Found> {
        let root_of = |name: &String| {
            let root = output.strip_suffix(name.as_str())?;
            if root.is_empty() { Some("") } else { root.strip_suffix('.') }
        };
        form.outputs.iter().filter_map(root_of).find_map(|root| {
            let inputs: Vec<String> = form.inputs.iter().chain(&form.fused).map(|name| joined(root, name)).collect();
            if !inputs.iter().map(String::as_str).chain([output]).all(|stem| self.is_free(stem, covered)) {
                return None;
            }
            let in_one = form.fused.iter().find(|name| !shows_parts(&joined(root, name)));
            let sides = inputs.into_iter().map(|stem| (stem, Side::Column));
            let sides: Vec<_> = sides.chain([(output.to_owned(), Side::Row)]).collect();
            let within: BTreeSet<&str> =
                sides.iter().map(|(stem, _)| parent(stem)).filter(|parent| !parent.is_empty()).collect();
            let unknown = self.matrices().filter(|stem| within.contains(parent(stem))).find(|stem| {
                !sides.iter().any(|(member, _)| member == *stem) && !form.whole.iter().any(|name| name == last(stem))
            });
            let mut whole = in_one.map(|name| fused(name));
            whole = whole.or_else(|| unknown.map(|stem| format!("the meaning of {} is not known", last(stem))));
            let transposed = self.is_transposed(sides.iter().map(|(stem, _)| stem));
            if transposed.is_none() {
                whole = whole.or_else(|| Some("its matrices are stored in two orientations".to_owned()));
            }
            let transposed = transposed.unwrap_or(false);
            let axis = |side: Side| usize::from((side == Side::Row) != transposed);
            let members = sides.into_iter().map(|(stem, side)| (stem, side, axis(side))).collect();
            Some(Found { root: root.to_owned(), members, whole, is_part: false })
        })
    }

    /// Whether nothing tells that the missing side of a block is there under other names: no other matrix is beside the members or
    /// within their module. Then the checkpoint is a part of a model, or its file a part of one.
    fn is_part(&self, found: &Found, missing: &[String]) -> bool {
        let within = |stem: &str| match stem.strip_prefix(found.root.as_str()) {
            Some(rest) => rest.strip_prefix('.').is_some_and(|rest| !rest.contains("expert")),
            None => false,
        };
        let is_member = |stem: &str| found.members.iter().any(|(member, ..)| member == stem);
        let mut others = self.matrices().filter(|stem| within(stem));
        !missing.is_empty() && others.all(|stem| is_member(stem) || is_whole(last(stem)))
    }

    /// The block of a form of which only some modules are in the checkpoint, one of them this.
    fn part_of(&self, form: &BlockForm, stem: &str, covered: &HashSet<String>) -> Option<Found> {
        let names = || {
            form.inputs.iter().map(|name| (name, Side::Column)).chain(form.outputs.iter().map(|name| (name, Side::Row)))
        };
        let (name, _) = names().find(|(name, _)| last(stem) == name.as_str())?;
        let root = parent(stem).to_owned();
        let (there, missing): (Vec<_>, Vec<_>) =
            names().map(|(name, side)| (joined(&root, name), side)).partition(|(stem, _)| self.is_free(stem, covered));
        if root.is_empty() || !self.is_free(&joined(&root, name), covered) {
            return None;
        }
        let members = there.into_iter().map(|(stem, side)| (stem, side, usize::from(side == Side::Row))).collect();
        let mut found = Found { root, members, whole: None, is_part: false };
        let missing: Vec<String> =
            missing.into_iter().filter(|(_, side)| *side == Side::Column).map(|(stem, _)| stem).collect();
        found.is_part = self.is_part(&found, &missing);
        found.is_part.then_some(found)
    }

    /// Whether matrices are stored with the inputs before the outputs, as GPT-2's are: a bias is as long as the outputs. None if
    /// some are and others are not.
    fn is_transposed<'s>(&self, stems: impl Iterator<Item = &'s String>) -> Option<bool> {
        let told = stems.filter_map(|stem| match (&self.modules.get(stem)?.shape[..], self.modules[stem].bias?) {
            ([rows, columns], bias) if rows != columns && (*rows == bias || *columns == bias) => Some(*columns == bias),
            _ => None,
        });
        let told: BTreeSet<bool> = told.collect();
        if told.len() > 1 { None } else { Some(told.contains(&true)) }
    }

    /// The blocks of this layer, and the matrices of its modules that belong to none.
    fn blocks(&self, prefix: &str, plans: &[&ModelPlan], sayings: Sayings<'_>) -> (Vec<Found>, Vec<String>) {
        let mut blocks: Vec<Found> = Vec::new();
        let mut covered: HashSet<String> = HashSet::new();
        let mut roots: BTreeSet<String> = BTreeSet::new();
        for plan in plans {
            for (root, modules) in plan.blocks() {
                if roots.contains(root) {
                    continue;
                }
                let Some(found) = self.planned(prefix, root, modules, sayings) else { continue };
                covered.extend(found.members.iter().map(|(stem, ..)| stem.clone()));
                roots.insert(root.to_owned());
                blocks.push(found);
            }
            // What stands beside the modules of a plan is whole in it.
            covered.extend(self.modules.keys().filter(|stem| roots.contains(parent(stem))).cloned());
        }
        let role = |stem: &str| (sayings.role)(prefix, stem, &self.modules[stem].shape);
        let shows_parts = |stem: &str| sayings.parts && role(stem).is_some_and(|role| !role.split.is_empty());
        let forms = Generic::get().blocks.iter();
        let parts = forms.clone().filter(|form| form.partial).map(|form| (form, true));
        for (form, is_part) in forms.map(|form| (form, false)).chain(parts) {
            for stem in self.modules.keys() {
                let formed = || self.formed(form, stem, &covered, &shows_parts);
                let found = if is_part { self.part_of(form, stem, &covered) } else { formed() };
                let Some(found) = found else { continue };
                let parents: BTreeSet<&str> =
                    found.members.iter().map(|(stem, ..)| parent(stem)).filter(|parent| !parent.is_empty()).collect();
                covered.extend(self.modules.keys().filter(|stem| parents.contains(parent(stem))).cloned());
                covered.extend(found.members.iter().map(|(stem, ..)| stem.clone()));
                blocks.push(found);
            }
        }
        self.add_roles(prefix, &mut blocks, &mut covered, sayings);
        // Routers and the like are whole by their nature, and so is what the family's table knows.
        let is_told = |stem: &str| is_whole(last(stem)) || role(stem).is_some();
        let unknown = self.matrices().filter(|stem| !covered.contains(*stem) && !is_told(stem));
        (blocks, unknown.cloned().collect())
    }

    /// Adds the modules whose axis the family's table says.
    fn add_roles(&self, prefix: &str, blocks: &mut Vec<Found>, covered: &mut HashSet<String>, sayings: Sayings<'_>) {
        for (stem, info) in &self.modules {
            let member = blocks.iter().any(|found| found.members.iter().any(|(member, ..)| member == stem));
            let role = if member { None } else { (sayings.role)(prefix, stem, &info.shape) };
            let Some((role, axis)) = role.and_then(|role| Some((role.clone(), role.tp?))) else { continue };
            let root = parent(stem);
            let block = blocks.iter().position(|found| found.root == root);
            covered.insert(stem.clone());
            if role.experts.is_none() && role.split.is_empty() {
                if let Some(at) = block {
                    blocks[at].members.push((stem.clone(), Side::Follower, axis));
                }
                continue;
            }
            let block = block.unwrap_or_else(|| {
                blocks.push(Found { root: root.to_owned(), members: Vec::new(), whole: None, is_part: false });
                blocks.len() - 1
            });
            blocks[block].add_fused(stem, &role, sayings.parts);
        }
    }
}

impl Found {
    /// Adds a tensor that holds several matrices or experts, by the family's entry.
    fn add_fused(&mut self, stem: &str, role: &Role, parts: bool) {
        if !role.split.is_empty() && !parts {
            self.whole = Some(fused(last(stem)));
        }
        let side = if role.split.is_empty() { Side::Alone } else { Side::Column };
        self.members.push((stem.to_owned(), side, role.tp.unwrap_or(0)));
    }

    /// Why the block cannot be cut as a whole, if it cannot.
    fn whole(&self) -> Option<String> {
        let has = |sides: &[Side]| self.members.iter().any(|(_, side, _)| sides.contains(side));
        let closed = (!has(&[Side::Column]) || has(&[Side::Row, Side::Alone]))
            && (!has(&[Side::Row]) || has(&[Side::Column, Side::Alone]));
        let names = || self.members.iter().map(|(stem, ..)| last(stem)).collect::<Vec<_>>().join(", ");
        self.whole.clone().or_else(|| (!closed && !self.is_part).then(|| format!("only {} of it are known", names())))
    }
}

/// Why a block with a tensor of this name stays whole: it cannot be cut by rows or columns.
fn fused(name: &str) -> String {
    format!("{name} holds several matrices in one")
}

impl CutBlocks {
    /// The blocks of a model.
    pub(crate) fn of<'a>(modules: impl Iterator<Item = Module<'a>>, sayings: Sayings<'_>) -> Self {
        let mut layers: BTreeMap<(&'a str, Option<u64>), Layer> = BTreeMap::new();
        for module in modules {
            let layer = layers.entry((module.prefix, module.layer)).or_default();
            if layer.base.is_empty() {
                (layer.base, layer.is_tower) = (module.base, module.is_tower);
            }
            let info = layer.modules.entry(module.stem).or_default();
            match module.suffix {
                "" | "weight" => info.shape = module.shape.to_vec(),
                "bias" => info.bias = module.shape.first().copied(),
                _ => {}
            }
        }
        let mut blocks = Self::default();
        let mut seen: HashSet<(&str, Vec<String>)> = HashSet::new();
        for ((prefix, number), layer) in &layers {
            // Layers with the same modules have the same blocks.
            if seen.insert((prefix, layer.modules.keys().cloned().collect())) {
                blocks.add(prefix, number.is_some(), layer, sayings);
            }
        }
        blocks
    }

    fn add(&mut self, prefix: &str, in_layer: bool, layer: &Layer, sayings: Sayings<'_>) {
        let plans = if layer.is_tower { &sayings.plans.towers } else { &sayings.plans.text };
        let plans = if in_layer { &plans[..] } else { &[] };
        let (found, unknown) = layer.blocks(prefix, plans, sayings);
        let name = |stem: &str| joined(&layer.base, stem);
        self.unknown.extend(unknown.iter().filter(|_| in_layer).map(|stem| name(stem)));
        for found in found {
            // Blocks of one layer may be in one module: they are distinguished by their first member.
            let first = found.members.first().map_or("", |(stem, ..)| stem);
            let root = if found.root.is_empty() { first } else { &found.root };
            let block: Arc<str> = name(root).into();
            if let Some(whole) = found.whole() {
                self.whole.insert(Arc::clone(&block), whole);
            }
            for (stem, side, axis) in found.members {
                let member = Member { side, axis, block: Arc::clone(&block) };
                let key = (prefix.to_owned(), stem);
                if self.members.get(&key).is_some_and(|known| *known != member) {
                    let other = self.members[&key].block.clone();
                    for block in [other, Arc::clone(&block)] {
                        self.whole.entry(block).or_insert_with(|| "its layers differ".to_owned());
                    }
                }
                self.members.insert(key, member);
            }
        }
    }

    /// The axis of a tensor of a module that tensor parallelism splits, and the module's block. `part` is the axis of a part of
    /// a fused tensor.
    pub(crate) fn cut(
        &self,
        prefix: &str,
        stem: &str,
        suffix: &str,
        part: Option<usize>,
    ) -> (Option<usize>, Option<Arc<str>>) {
        let Some(member) = self.members.get(&(prefix.to_owned(), stem.to_owned())) else { return (None, None) };
        let axis = match suffix {
            "" | "weight" => Some(part.unwrap_or(member.axis)),
            // A bias is as long as the outputs. After a split of the inputs it is added once.
            "bias" => match member.side {
                Side::Column => Some(0),
                Side::Row => None,
                Side::Alone | Side::Follower => (member.axis == 0).then_some(0),
            },
            _ => None,
        };
        let axis = axis.filter(|_| !self.whole.contains_key(&member.block));
        (axis, Some(Arc::clone(&member.block)))
    }

    /// Says which blocks stay whole, if any do.
    pub(crate) fn warning(&self) -> Option<String> {
        let whole = self.whole.iter().map(|(block, why)| format!("{block} ({why})"));
        let unknown = self.unknown.iter().cloned();
        let all: Vec<String> = whole.chain(unknown).collect();
        if all.is_empty() {
            return None;
        }
        let listed = first_names(&all, LISTED);
        Some(format!(
            "tensor parallelism leaves whole on every device what it cannot cut so that a device can use its part: {listed}; \
             own rules (--shard) cut them all the same"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The axes of a layer's modules, each written as in `self_attn.q_proj 8x4`; `-` for whole.
    fn axes(plans: &ModelPlans, rows: &str) -> String {
        let tensors: Vec<(&str, &str, Vec<u64>)> = rows
            .split(", ")
            .map(|row| {
                let (name, shape) = row.split_once(' ').unwrap();
                let (stem, suffix) = name.strip_suffix(".bias").map_or((name, "weight"), |stem| (stem, "bias"));
                (stem, suffix, shape.split('x').map(|extent| extent.parse().unwrap()).collect())
            })
            .collect();
        let modules = tensors.iter().map(|(stem, suffix, shape)| Module {
            base: "layers.*".to_owned(),
            prefix: "",
            layer: Some(0),
            stem: (*stem).to_owned(),
            suffix,
            shape,
            is_tower: false,
        });
        let per_head = Role { tp: Some(0), ..Role::default() };
        let role = |_: &str, stem: &str, _: &[u64]| stem.ends_with("per_head").then(|| per_head.clone());
        let sayings = Sayings { plans, role: &role, parts: false };
        let blocks = CutBlocks::of(modules, sayings);
        let axis = |stem: &str, suffix: &str| blocks.cut("", stem, suffix, None).0;
        let axes =
            tensors.iter().map(|(stem, suffix, _)| axis(stem, suffix).map_or("-".to_owned(), |at| at.to_string()));
        axes.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_plan_whose_inputs_are_not_there_is_not_that_of_a_block() {
        let plan: ModelPlan = toml::from_str(
            r#"
            model_types = ["text"]
            [layer]
            "self_attn" = { colwise_gather_output = ["qkv_proj"], rowwise_split_input = ["o_proj"] }
            "#,
        )
        .unwrap();
        let plans = ModelPlans { text: vec![Box::leak(Box::new(plan))], ..ModelPlans::default() };
        let rows = [
            ("self_attn.qkv_proj 12x4, self_attn.o_proj 4x4", "0 1"),
            // The encoder of another kind of input, whose attention the plan does not name.
            ("self_attn.q_proj 4x4, self_attn.k_proj 4x4, self_attn.v_proj 4x4, self_attn.o_proj 4x4", "0 0 0 1"),
            ("self_attn.mix 4x4, self_attn.o_proj 4x4", "- -"),
            // A part of a checkpoint.
            ("self_attn.o_proj 4x4", "1"),
        ];
        for (modules, expected) in rows {
            assert_eq!(axes(&plans, modules), expected, "{modules}");
        }
    }

    #[test]
    fn a_block_is_cut_as_a_whole_or_not_at_all() {
        let rows = [
            // Attention of Whisper and CLIP: the output is named out_proj, and its bias stays whole.
            (
                "a.q_proj 8x4, a.q_proj.bias 8, a.k_proj 8x4, a.v_proj 8x4, a.out_proj 4x8, a.out_proj.bias 4",
                "0 0 0 0 1 -",
            ),
            ("fc1 8x4, fc1.bias 8, fc2 4x8, fc2.bias 4", "0 0 1 -"),
            // A part of a block, as a checkpoint of some tensors has it, goes by its names.
            ("a.q_proj 8x4, a.k_proj 8x4, a.o_proj 4x8", "0 0 1"),
            // A matrix of unknown meaning among them.
            ("a.q_proj 8x4, a.k_proj 8x4, a.v_proj 8x4, a.mix 3x3, a.o_proj 4x8", "- - - - -"),
            ("a.q_proj 8x4, a.k_proj 8x4, a.v_proj 8x4, a.q_norm 3, a.o_proj 4x8", "0 0 0 - 1"),
            // A norm of heads follows the block, with its bias.
            ("a.q_proj 8x4, a.k_proj 8x4, a.v_proj 8x4, a.per_head 8, a.per_head.bias 8, a.o_proj 4x8", "0 0 0 0 0 1"),
            // Latent attention: what makes it small is whole.
            ("a.q_a_proj 3x4, a.q_b_proj 8x3, a.kv_a_proj_with_mqa 3x4, a.kv_b_proj 8x2, a.o_proj 4x8", "- 0 - 0 1"),
            // One matrix of several.
            ("m.gate_up_proj 16x4, m.down_proj 4x8", "- -"),
            (
                "a.c_attn 4x12, a.c_attn.bias 12, a.c_proj 4x4, m.c_fc 4x16, m.c_fc.bias 16, m.c_proj 16x4",
                "- - - 1 0 0",
            ),
            ("m.c_fc 16x4, m.c_fc.bias 16, m.c_proj 4x16", "0 0 1"),
            // One matrix with its inputs first, another one with its outputs first.
            ("m.c_fc 4x16, m.c_fc.bias 16, m.c_proj 4x16, m.c_proj.bias 4", "- - - -"),
            (
                "attention.self.query 8x4, attention.self.key 8x4, attention.self.value 8x4, attention.output.dense 4x8",
                "0 0 0 1",
            ),
            ("intermediate.dense 8x4, output.dense 4x8", "0 1"),
            ("e.experts.*.w1 8x4, e.experts.*.w3 8x4, e.experts.*.w2 4x8, e.gate 3x4", "0 0 1 -"),
            // A short convolution has an out_proj, and no query.
            ("conv.in_proj 12x4, conv.conv 4x1x3, conv.out_proj 4x4", "- - -"),
        ];
        for (modules, expected) in rows {
            assert_eq!(axes(&ModelPlans::default(), modules), expected, "{modules}");
        }
    }
}
