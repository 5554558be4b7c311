//! `mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt`: the classic checkpoints of Megatron, one file for each rank of tensor, pipeline and expert
//! parallelism.
//!
//! The tensors get the names and shapes that Megatron's own distributed checkpoints give them, layer by layer, so that the layout of
//! these leads back to a repository. How a module is cut over ranks is in no file: it is a property of Megatron's modules, of which
//! the table here has those that are known. A module that it does not have is refused where it may be cut.

use std::collections::{BTreeMap, BTreeSet};

use ckfs_format::torch::{
    megatron::{self, MegatronArguments},
    read::{OpenedArchive, SavedTensor},
    state::TorchTensor,
};
use ckfs_source::FileId;
use serde_json::{Map, Value as Json};

use super::{
    super::super::{
        amount::shown,
        container::{Contents, SavedArguments},
        mosaic::StoredBox,
        problem::{Problem, Problems},
    },
    job::{Assembled, NAMED, RankJob, Saved, ensure, lacking, left_out, tensor_of},
    names::{MEGATRON_FILE, RankFile},
};

/// Rank of tensor, pipeline and expert parallelism.
type Rank = (u64, u64, u64);

/// What one file says.
struct Said {
    arguments: MegatronArguments,
    saved: Map<String, Json>,
    iteration: Option<u64>,
    chunks: Vec<Vec<(String, SavedTensor)>>,
    others: Vec<(String, String)>,
}

fn said(opened: &OpenedArchive) -> Result<Said, String> {
    let file = megatron::file(&opened.pickle).map_err(|error| error.to_string())?;
    let mut others = file.others;
    let mut chunks = Vec::with_capacity(file.chunks.len());
    for chunk in file.chunks {
        let mut tensors = Vec::with_capacity(chunk.len());
        for (name, id) in chunk {
            if name.ends_with("_extra_state") {
                others.push((name, "state of a kernel".to_owned()));
                continue;
            }
            let found = tensor_of(opened, id, &name, format_args!("tensor {name:?}"))?;
            tensors.push((name, found));
        }
        chunks.push(tensors);
    }
    Ok(Said { arguments: file.arguments, saved: file.saved, iteration: file.iteration, chunks, others })
}

/// How a module's tensor is cut over the ranks of tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    Whole,
    Axis(usize),
    /// Each rank has its rows of the gate, and then those of the other half.
    Gated,
}

/// The cut of a tensor of this name; `None` if it is not known.
fn cut_of(name: &str, arguments: &MegatronArguments) -> Option<Cut> {
    let words: Vec<&str> = name.rsplit('.').collect();
    let [kind, module, ..] = words[..] else { return None };
    // Experts that one module holds have their number behind the word.
    let kind = kind.trim_end_matches(|digit: char| digit.is_ascii_digit());
    let is_norm = |word: &str| word.contains("layernorm") || word.contains("layer_norm") || word.ends_with("_norm");
    if is_norm(module) || is_norm(kind.trim_end_matches("_weight").trim_end_matches("_bias")) {
        return Some(Cut::Whole);
    }
    match (module, kind) {
        (
            "word_embeddings" | "output_layer" | "linear_q_proj" | "linear_q_up_proj" | "linear_kv_up_proj"
            | "linear_qkv",
            "weight",
        )
        | ("linear_qkv", "bias") => Some(Cut::Axis(0)),
        ("linear_fc1", "weight" | "bias") => match arguments.gated {
            Some(true) => Some(Cut::Gated),
            Some(false) => Some(Cut::Axis(0)),
            None => None,
        },
        ("linear_proj" | "linear_fc2", "weight") => Some(Cut::Axis(1)),
        ("linear_proj" | "linear_fc2", "bias")
        | ("router", "weight" | "expert_bias" | "bias")
        | ("linear_q_down_proj" | "linear_kv_down_proj" | "position_embeddings", "weight")
        | ("shared_experts", "gate_weight") => Some(Cut::Whole),
        _ => None,
    }
}

/// The name of the tensor that holds all experts, the number of this one, if the name is of an expert.
fn expert_of(name: &str) -> Option<(String, u64)> {
    let (before, rest) = name.split_once(".mlp.experts.")?;
    if let Some(rest) = rest.strip_prefix("local_experts.") {
        let (number, rest) = rest.split_once('.')?;
        return Some((format!("{before}.mlp.experts.experts.{rest}"), number.parse().ok()?));
    }
    let digits = rest.len() - rest.trim_end_matches(|digit: char| digit.is_ascii_digit()).len();
    let (word, number) = rest.split_at(rest.len() - digits);
    Some((format!("{before}.mlp.experts.experts.{word}"), number.parse().ok()?))
}

/// The parts of a tensor: by rank of tensor parallelism and number of the expert.
type Parts = BTreeMap<(u64, Option<u64>), Saved>;

/// Reads the files of all ranks.
pub(super) fn read(job: &RankJob<'_>, contents: &mut Contents, problems: &mut Problems) -> Result<(), Vec<Problem>> {
    let states = job.states(megatron::is_allowed, &|_, _, opened| said(opened))?;
    let one = |problem| vec![problem];
    let ranks = job.ranks(states).map_err(one)?;
    let tensors = job.parts(&ranks).map_err(one)?;
    let (file, Said { arguments, saved, .. }) = &ranks[&(0, 0, 0)];
    let saved = SavedArguments { file: job.path(*file).to_owned(), values: saved.clone() };
    contents.tree.arguments = Some(Box::new(saved));
    let is_copy = |name: &str| name == "output_layer.weight" && arguments.untied == Some(false);
    let copy = tensors.keys().find(|name| is_copy(name)).cloned();
    let own = tensors.iter().filter(|(name, _)| !is_copy(name));
    let file = |parts: &Parts| parts.values().next().map_or(FileId(0), |(file, _)| *file);
    let assembled = own.map(|(name, parts)| (name.as_str(), file(parts), assemble(name, parts, arguments)));
    contents.table = job.table(assembled, problems);
    let copy = copy.map(|name| (name, "the last stage's copy of the embedding".to_owned()));
    contents.left_out = left_out(copy.into_iter().chain(ranks.into_values().flat_map(|(_, said)| said.others)));
    Ok(())
}

/// Shape and boxes of a tensor.
fn assemble(name: &str, parts: &Parts, arguments: &MegatronArguments) -> Result<Assembled, String> {
    let ranks = arguments.tensor.unwrap_or(1);
    let cut = cut_of(name, arguments);
    let cut = if ranks == 1 {
        Cut::Whole
    } else {
        cut.ok_or("no known module: nothing says how it is cut over the ranks of tensor parallelism")?
    };
    let experts = arguments.experts.filter(|_| parts.keys().any(|(_, expert)| expert.is_some()));
    let first = &parts.values().next().ok_or("no part")?.1.tensor;
    let (dtype, local) = (first.dtype, first.shape.clone());
    let element_bytes = dtype.element_bytes().ok_or_else(|| format!("{dtype} has no whole bytes"))?;
    let (axis, halves) = match cut {
        Cut::Whole => (None, 1),
        Cut::Axis(axis) => (Some(axis), 1),
        Cut::Gated => (Some(0), 2),
    };
    if axis.is_some_and(|axis| local.get(axis).is_none_or(|extent| extent % halves != 0)) {
        let how = axis.map_or_else(String::new, |axis| format!(" along axis {axis}"));
        return Err(format!("expected a shape that is cut{how}, found {local:?}"));
    }
    let mut whole = local.clone();
    if let Some(axis) = axis {
        whole[axis] = local[axis].saturating_mul(ranks);
    }
    let mut boxes = Vec::new();
    let numbers: Vec<Option<u64>> = experts.map_or_else(|| vec![None], |experts| (0..experts).map(Some).collect());
    for expert in &numbers {
        for rank in 0..ranks {
            let part = parts.get(&(rank, *expert));
            let part = part.ok_or_else(|| match expert {
                Some(expert) => format!("expert {expert} is not there on rank {rank}"),
                None => format!("not there on rank {rank}"),
            })?;
            let TorchTensor { dtype: found, shape, .. } = &part.1.tensor;
            let what = format_args!("{dtype} {local:?} on one rank, {found} {shape:?} on rank {rank}");
            ensure((*found, shape) == (dtype, &local), what)?;
            if cut == Cut::Whole && rank > 0 {
                continue;
            }
            for half in 0..halves {
                let mut stored = StoredBox::saved(part.0, &part.1);
                if let Some(axis) = axis {
                    let (all, len) = (whole[axis] / halves, local[axis] / halves);
                    stored = stored.run(axis, (half * len, len), half * all + rank * len, element_bytes);
                }
                if let Some(expert) = expert {
                    stored.origin.insert(0, *expert);
                    stored.extents.insert(0, 1);
                    stored.strides.insert(0, 1);
                }
                boxes.push(stored);
            }
        }
    }
    if let Some(experts) = experts {
        whole.insert(0, experts);
    }
    Ok((dtype, whole, boxes))
}

type Ranks = BTreeMap<Rank, (FileId, Said)>;

impl RankJob<'_> {
    /// The files by rank, which are those of one step and complete.
    fn ranks(&self, states: Vec<Said>) -> Result<Ranks, Problem> {
        let (first, said) = (self.found[0].0, &states[0]);
        let (arguments, iteration) = (said.arguments.clone(), said.iteration);
        for ((file, _), said) in self.found.iter().zip(&states) {
            let (own, of_first, path) = (shown(said.iteration), shown(iteration), self.path(first));
            let what = format_args!("iteration {own}, and {path} has {of_first}: they are of different saves");
            self.ensure(said.iteration == iteration, *file, what)?;
            let what = format_args!("other arguments of the training than {path}");
            self.ensure(said.arguments == arguments, *file, what)?;
        }
        let sizes = [arguments.tensor, arguments.pipeline, arguments.expert].map(|size| size.unwrap_or(1).max(1));
        let [tensor, pipeline, expert] = sizes;
        let is_alike = arguments.experts.is_none() || arguments.expert_tensor.is_none_or(|size| size == tensor);
        let what = "experts on other ranks of tensor parallelism than the rest, which is not read";
        self.ensure(is_alike, first, what)?;
        let groups = arguments.query_groups.unwrap_or(0);
        let what = format_args!("keys and values of {groups} groups over {tensor} ranks, which is not read");
        self.ensure(groups % tensor == 0, first, what)?;
        let mut ranks = Ranks::new();
        for ((file, name), said) in self.found.iter().zip(states) {
            let RankFile::Megatron(numbers) = name else { continue };
            let rank = match (&numbers[..], pipeline > 1, expert > 1) {
                ([tensor], false, false) => (*tensor, 0, 0),
                ([tensor, pipeline], true, false) => (*tensor, *pipeline, 0),
                ([tensor, expert], false, true) => (*tensor, 0, *expert),
                ([tensor, pipeline, expert], true, true) => (*tensor, *pipeline, *expert),
                _ => {
                    let what = format!("expected ranks of {sizes:?} (tensor, pipeline, expert) in its name");
                    return Err(self.fault(*file, what));
                }
            };
            let what = format_args!("a rank beyond those of its arguments, {sizes:?} (tensor, pipeline, expert)");
            self.ensure(rank.0 < tensor && rank.1 < pipeline && rank.2 < expert, *file, what)?;
            if let Some((other, _)) = ranks.insert(rank, (*file, said)) {
                return Err(self.fault(*file, format_args!("of the same rank as {}", self.path(other))));
            }
        }
        let expected = tensor.saturating_mul(pipeline).saturating_mul(expert);
        if ranks.len() as u64 != expected {
            let all = (0..tensor).flat_map(|t| (0..pipeline).flat_map(move |p| (0..expert).map(move |e| (t, p, e))));
            let missing: Vec<String> = all
                .filter(|rank| !ranks.contains_key(rank))
                .take(NAMED)
                .map(|(t, p, e)| format!("tensor {t}, pipeline {p}, expert {e}"))
                .collect();
            let all = format_args!("{}mp_rank_*/{MEGATRON_FILE}", self.below);
            return Err(Problem::of_file(all, lacking(expected, ranks.len(), &missing.join("; "))));
        }
        Ok(ranks)
    }

    /// The parts of each tensor, by its name in the whole model.
    fn parts(&self, ranks: &Ranks) -> Result<BTreeMap<String, Parts>, Problem> {
        let offsets = self.layer_offsets(ranks)?;
        let arguments = &ranks[&(0, 0, 0)].1.arguments;
        let expert_ranks = arguments.expert.unwrap_or(1).max(1);
        let mut tensors: BTreeMap<String, Parts> = BTreeMap::new();
        for ((tensor, pipeline, expert_rank), (file, said)) in ranks {
            for (chunk, saved) in
                said.chunks.iter().enumerate().flat_map(|(chunk, all)| all.iter().map(move |one| (chunk, one)))
            {
                let (name, saved) = saved;
                let name = global_name(name, offsets[&(chunk, *pipeline)]);
                let part = (*file, saved.clone());
                let (name, expert) = if let Some((name, number)) = expert_of(&name) {
                    let each = arguments.experts.unwrap_or(0) / expert_ranks;
                    let what = format_args!("expert {number} of {each} on each rank: {name}");
                    self.ensure(number < each, *file, what)?;
                    (name, Some(expert_rank * each + number))
                } else {
                    let what = format_args!("{name}: experts in one matrix, which is not read");
                    self.ensure(!name.contains(".mlp.experts."), *file, what)?;
                    (name, None)
                };
                // What is no expert is the same on all ranks of expert parallelism.
                if expert.is_none() && *expert_rank > 0 {
                    let shape = |part: Option<&Saved>| part.map(|(_, saved)| saved.tensor.shape.clone());
                    let first = shape(tensors.get(&name).and_then(|parts| parts.get(&(*tensor, None))));
                    let what = format_args!("{name}: another shape than on the first rank of expert parallelism");
                    self.ensure(first == shape(Some(&part)), *file, what)?;
                    continue;
                }
                let is_new = tensors.entry(name.clone()).or_default().insert((*tensor, expert), part).is_none();
                let what = format_args!("{name} is there again, on another stage of the pipeline");
                self.ensure(is_new, *file, what)?;
            }
        }
        Ok(tensors)
    }

    /// The number of the first layer of each chunk of each stage: chunks go over all stages before the next ones.
    fn layer_offsets(&self, ranks: &Ranks) -> Result<BTreeMap<(usize, u64), u64>, Problem> {
        let mut counts: BTreeMap<(usize, u64), u64> = BTreeMap::new();
        for ((_, pipeline, _), (file, said)) in ranks {
            for (chunk, tensors) in said.chunks.iter().enumerate() {
                let layers: BTreeSet<u64> = tensors.iter().filter_map(|(name, _)| layer_of(name)).collect();
                let count = layers.len() as u64;
                let what = format_args!("expected layers that count from 0, found {layers:?}");
                self.ensure(layers.iter().copied().eq(0..count), *file, what)?;
                let of_stage = *counts.entry((chunk, *pipeline)).or_insert(count);
                let what = format_args!("{count} layers, others than on the other ranks of its stage");
                self.ensure(of_stage == count, *file, what)?;
            }
        }
        let mut offsets = BTreeMap::new();
        let mut total = 0;
        for (place, count) in counts {
            offsets.insert(place, total);
            total += count;
        }
        let (file, said) = &ranks[&(0, 0, 0)];
        let layers = said.arguments.layers.unwrap_or(total);
        let what = format_args!("{total} layers on all stages, and the arguments say {layers}");
        self.ensure(layers == total, *file, what)?;
        Ok(offsets)
    }
}

/// What stands before the number of a layer.
const LAYERS: &str = "decoder.layers.";

fn layer_of(name: &str) -> Option<u64> {
    name.strip_prefix(LAYERS)?.split('.').next()?.parse().ok()
}

fn global_name(name: &str, offset: u64) -> String {
    let Some(layer) = layer_of(name) else { return name.to_owned() };
    let rest = name[LAYERS.len()..].split_once('.').map_or("", |(_, rest)| rest);
    format!("{LAYERS}{}.{rest}", layer + offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_experts_and_layers() {
        let fused = Some(("decoder.layers.2.mlp.experts.experts.linear_fc1.weight".to_owned(), 3));
        assert_eq!(expert_of("decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"), fused);
        assert_eq!(expert_of("decoder.layers.2.mlp.experts.linear_fc1.weight3"), fused);
        assert_eq!(expert_of("decoder.layers.2.mlp.linear_fc1.weight"), None);
        assert_eq!(global_name("decoder.layers.1.mlp.linear_fc2.weight", 4), "decoder.layers.5.mlp.linear_fc2.weight");
        assert_eq!(global_name("decoder.final_layernorm.weight", 4), "decoder.final_layernorm.weight");
    }

    #[test]
    fn a_module_is_cut_as_megatron_cuts_it_or_not_known() {
        let gated = MegatronArguments { gated: Some(true), ..MegatronArguments::default() };
        for (name, cut) in [
            ("decoder.layers.0.self_attention.linear_qkv.weight", Some(Cut::Axis(0))),
            ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", Some(Cut::Whole)),
            ("decoder.layers.0.self_attention.q_layernorm.weight", Some(Cut::Whole)),
            ("decoder.layers.0.self_attention.linear_proj.weight", Some(Cut::Axis(1))),
            ("decoder.layers.0.mlp.linear_fc1.weight", Some(Cut::Gated)),
            ("decoder.layers.0.mlp.experts.experts.linear_fc2.weight", Some(Cut::Axis(1))),
            ("decoder.layers.0.mlp.router.weight", Some(Cut::Whole)),
            ("output_layer.weight", Some(Cut::Axis(0))),
            ("decoder.layers.0.mixer.in_proj.weight", None),
        ] {
            assert_eq!(cut_of(name, &gated), cut, "{name}");
        }
        assert_eq!(cut_of("decoder.layers.0.mlp.linear_fc1.weight", &MegatronArguments::default()), None);
    }
}
