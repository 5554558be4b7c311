//! `model_world_size_W_rank_R.pt`: the state of each rank of FSDP, as verl, SkyRL and lmms-engine save it.
//!
//! A `DTensor` says its mesh and its placements, a `ShardedTensor` the offsets of its shards. A tensor that says nothing of other
//! ranks is a buffer or a parameter that is not sharded, the same on every rank, if others in the same files say how they are
//! sharded; torch's own checkpoints take the first rank's too. What is cut without saying so is refused.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
};

use ckfs_format::torch::{
    distributed::{self, MeshSharding, PlacedShard, RankReader, RankTensor, Run},
    read::{OpenedArchive, SavedTensor},
    state,
};
use ckfs_source::FileId;
use ckfs_tensor::{DType, PerAxis};

use super::{
    super::super::{
        container::Contents,
        mosaic::StoredBox,
        problem::{Problem, Problems},
    },
    job::{NAMED, RankJob, lacking, left_out, missing, tensor_of},
    names::RankFile,
};

/// What a trainer notes of the files.
const CONFIG: &str = "fsdp_config.json";

/// Longest such note that is read, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Most boxes of one rank's part of a tensor. Those of real trainings have one, or a few where an axis is strided.
const BOXES_MAX: usize = 1 << 16;

/// A tensor's elements in a file: first byte, extents, strides in elements.
#[derive(Clone, Debug)]
struct Local {
    start: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

/// What a rank has of a tensor.
#[derive(Clone, Debug)]
enum Part {
    Plain(Local),
    Meshed { shape: Vec<u64>, sharding: MeshSharding, local: Local },
    Sharded { shape: Vec<u64>, all: u64, own: Vec<(PlacedShard, Local)> },
}

/// What one file says.
struct RankState {
    parts: Vec<(String, DType, Part)>,
    others: Vec<(String, String)>,
}

/// The parts of a tensor: rank, file and part.
type Parts<'a> = Vec<(u64, FileId, &'a Part)>;

/// Reads the files of all ranks.
pub(super) fn read(job: &RankJob<'_>, contents: &mut Contents, problems: &mut Problems) -> Result<(), Vec<Problem>> {
    let names: Vec<(u64, u64)> = job.found.iter().filter_map(|(_, name)| name.fsdp()).collect();
    let all = || format!("{}model_world_size_*_rank_*.pt", job.below);
    count(job, &names).map_err(|message| vec![Problem::of_file(all(), message)])?;
    let rank = |name: &RankFile<'_>| name.fsdp().map_or(0, |(_, rank)| rank);
    let states = job.states(distributed::is_allowed, &|name, opened| rank_state(opened, rank(name)))?;
    let mut tensors: BTreeMap<&str, (BTreeSet<DType>, Parts<'_>)> = BTreeMap::new();
    for ((file, name), state) in job.found.iter().zip(&states) {
        for (tensor, dtype, part) in &state.parts {
            let (dtypes, parts) = tensors.entry(tensor).or_default();
            dtypes.insert(*dtype);
            parts.push((rank(name), *file, part));
        }
    }
    let mut parts = states.iter().flat_map(|state| &state.parts);
    let says_sharding = parts.any(|(_, _, part)| !matches!(part, Part::Plain(_)));
    let mut assembly = Assembly { job, world: names.len() as u64, says_sharding, plain: 0 };
    let assembled = tensors.iter().map(|(name, (dtypes, parts))| {
        let assembled = match dtypes.iter().copied().collect::<Vec<_>>()[..] {
            [dtype] => assembly.assemble(dtype, parts).map(|(shape, boxes)| (dtype, shape, boxes)),
            ref several => Err(format!("expected one type on all ranks, found {several:?}")),
        };
        (*name, parts[0].1, assembled)
    });
    contents.table = job.table(assembled, problems);
    if assembly.plain > 0 && assembly.world > 1 {
        contents.warnings.push(format!(
            "{} tensors say nothing of other ranks: they are those of the first rank that has them, as buffers and what FSDP does not shard \
             are the same on all",
            assembly.plain
        ));
    }
    contents.left_out = left_out(states.into_iter().flat_map(|state| state.others));
    Ok(())
}

/// Whether the files are those of all ranks of one job.
fn count(job: &RankJob<'_>, names: &[(u64, u64)]) -> Result<(), String> {
    let worlds: BTreeSet<u64> = names.iter().map(|(world, _)| *world).collect();
    let [world] = worlds.iter().copied().collect::<Vec<_>>()[..] else {
        let worlds: Vec<String> = worlds.iter().map(u64::to_string).collect();
        return Err(format!("files of several jobs, of {} ranks: keep those of one", worlds.join(" and ")));
    };
    let ranks: BTreeSet<u64> = names.iter().map(|(_, rank)| *rank).collect();
    if let Some(rank) = ranks.iter().find(|rank| **rank >= world) {
        return Err(format!("a file of rank {rank}, of {world} ranks that count from 0"));
    }
    if (ranks.len() as u64) < world {
        let missing = missing(world, |rank| ranks.contains(rank));
        let more = world - ranks.len() as u64 - missing.len() as u64;
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return Err(lacking(world, ranks.len(), &format!("rank {}{more}", missing.join(", "))));
    }
    let Some(note) = job.files.find(&format!("{}{CONFIG}", job.below)) else { return Ok(()) };
    let note = job.files.source.read_whole(note, CONFIG_BYTES_MAX).map_err(|error| format!("{CONFIG}: {error}"))?;
    let note: serde_json::Value = serde_json::from_slice(&note).map_err(|error| format!("{CONFIG}: {error}"))?;
    match note.get("world_size").and_then(serde_json::Value::as_u64) {
        Some(noted) if noted != world => {
            Err(format!("files of {world} ranks, and {CONFIG} beside them says {noted}: they are of different saves"))
        }
        Some(_) | None => Ok(()),
    }
}

/// What the file of a rank says.
fn rank_state(opened: &OpenedArchive, rank: u64) -> Result<RankState, String> {
    let text = |error: state::TorchError| error.to_string();
    let state::Leaves { tensors: leaves, others } =
        state::leaves(&opened.pickle, opened.pickle.root()).map_err(text)?;
    let mut reader = RankReader::new(&opened.pickle, rank);
    let mut parts = Vec::with_capacity(leaves.len());
    for (name, id) in leaves {
        let local = |id| {
            let saved = tensor_of(opened, id, &name, format_args!("tensor {name:?}"))?;
            Ok::<_, String>((saved.tensor.dtype, Local::of(saved)))
        };
        let (dtype, part) = match reader.describe(&name, id).map_err(text)? {
            RankTensor::Plain(id) => {
                let (dtype, local) = local(id)?;
                (dtype, Part::Plain(local))
            }
            RankTensor::Meshed { shape, sharding, local: id } => {
                let (dtype, local) = local(id)?;
                (dtype, Part::Meshed { shape, sharding, local })
            }
            RankTensor::Sharded { shape, dtype, all, own } => {
                let mut shards = Vec::with_capacity(own.len());
                for (placed, id) in own {
                    let (found, local) = local(id)?;
                    if found != dtype || local.shape != placed.sizes {
                        let (of, at) = (&local.shape, &placed.sizes);
                        return Err(format!(
                            "tensor {name:?}: expected a shard of {dtype} {at:?}, found {found} {of:?}"
                        ));
                    }
                    shards.push((placed, local));
                }
                let mut hasher = DefaultHasher::new();
                for PlacedShard { offsets, sizes } in all {
                    (offsets, sizes).hash(&mut hasher);
                }
                (dtype, Part::Sharded { shape, all: hasher.finish(), own: shards })
            }
        };
        parts.push((name, dtype, part));
    }
    Ok(RankState { parts, others })
}

impl Local {
    fn of(saved: SavedTensor) -> Self {
        let start = saved.span().start;
        Self { start, shape: saved.tensor.shape, strides: saved.tensor.strides }
    }

    /// The box that it is, if it is all of a tensor.
    fn stored(&self, file: FileId) -> StoredBox {
        StoredBox::whole(file, self.start, &self.shape, &self.strides)
    }
}

struct Assembly<'a> {
    job: &'a RankJob<'a>,
    world: u64,
    /// Whether some tensor says how it is sharded.
    says_sharding: bool,
    /// Tensors that say nothing of other ranks.
    plain: u64,
}

type Assembled = Result<(Vec<u64>, Vec<StoredBox>), String>;

impl Assembly<'_> {
    /// Shape and boxes of a tensor.
    fn assemble(&mut self, dtype: DType, parts: &Parts<'_>) -> Assembled {
        match parts[0].2 {
            Part::Plain(first) => self.plain(first, parts),
            Part::Meshed { shape, sharding, .. } => self.meshed(dtype, (shape, sharding), parts),
            Part::Sharded { shape, all, .. } => self.sharded((shape, *all), parts),
        }
    }

    /// The file of a part, for messages.
    fn file(&self, part: &(u64, FileId, &Part)) -> &str {
        self.job.path(part.1)
    }

    fn plain(&mut self, first: &Local, parts: &Parts<'_>) -> Assembled {
        for part in parts {
            match part.2 {
                Part::Plain(local) if local.shape == first.shape => {}
                Part::Plain(local) => {
                    return Err(format!(
                        "{:?} in {}, {:?} in {}, and nothing says how it is cut",
                        first.shape,
                        self.file(&parts[0]),
                        local.shape,
                        self.file(part)
                    ));
                }
                Part::Meshed { .. } | Part::Sharded { .. } => return Err(self.mixed(&parts[0], part)),
            }
        }
        if self.world > 1 && !self.says_sharding {
            return Err(format!(
                "nothing in the files of {} ranks says how tensors are cut: each may be whole or a part; save DTensors, or by \
                 torch.distributed.checkpoint",
                self.world
            ));
        }
        self.plain += 1;
        let (_, file, _) = parts[0];
        Ok((first.shape.clone(), vec![first.stored(file)]))
    }

    fn mixed(&self, first: &(u64, FileId, &Part), other: &(u64, FileId, &Part)) -> String {
        format!(
            "saved with the ranks' parts in one of {} and {}, and without in the other",
            self.file(first),
            self.file(other)
        )
    }

    fn meshed(&self, dtype: DType, (shape, sharding): (&Vec<u64>, &MeshSharding), parts: &Parts<'_>) -> Assembled {
        let Some(element_bytes) = dtype.element_bytes() else {
            return Err(format!("{dtype} has no whole bytes, and cannot be cut"));
        };
        let mut by_rank: HashMap<u64, (FileId, &Local)> = HashMap::new();
        for part in parts {
            let Part::Meshed { shape: own_shape, sharding: own, local } = part.2 else {
                return Err(self.mixed(&parts[0], part));
            };
            let (first, this) = (self.file(&parts[0]), self.file(part));
            if own.mesh.ranks != sharding.mesh.ranks {
                let ranks =
                    |sharding: &MeshSharding| sharding.mesh.ranks.iter().take(NAMED).copied().collect::<Vec<u64>>();
                return Err(format!(
                    "{first} has it on a mesh of ranks {:?}, {this} on one of ranks {:?}: nothing says whether these are copies or parts \
                     (experts split by hand, for example); save it on one mesh of all ranks",
                    ranks(sharding),
                    ranks(own)
                ));
            }
            if (own_shape, own) != (shape, sharding) {
                return Err(format!(
                    "{first} says {shape:?}, {:?} over a mesh of {:?}, and {this} says {own_shape:?}, {:?} over {:?}",
                    sharding.placements, sharding.mesh.shape, own.placements, own.mesh.shape
                ));
            }
            by_rank.insert(part.0, (part.1, local));
        }
        let mut boxes = Vec::new();
        for rank in &sharding.mesh.ranks {
            let Some((file, local)) = by_rank.remove(rank) else {
                return Err(format!("rank {rank} of its mesh has no part in its file"));
            };
            let coordinate = sharding.mesh.coordinate(*rank).expect("the rank is one of the mesh");
            let runs = sharding.runs(shape, &coordinate);
            let runs = runs.ok_or_else(|| "its placements cut it into more runs than are read".to_owned())?;
            let expected: Vec<u64> = runs.iter().map(|runs| runs.iter().map(|(_, len)| len).sum()).collect();
            let is_empty = |shape: &[u64]| shape.contains(&0);
            if local.shape != expected && !(is_empty(&expected) && is_empty(&local.shape)) {
                return Err(format!(
                    "expected {expected:?} in {} by its placements {:?}, found {:?}",
                    self.job.path(file),
                    sharding.placements,
                    local.shape
                ));
            }
            if runs.iter().fold(1, |boxes: usize, runs| boxes.saturating_mul(runs.len().max(1))) > BOXES_MAX {
                return Err(format!("its placements cut the part of rank {rank} into more than {BOXES_MAX} boxes"));
            }
            if !sharding.is_copy(&coordinate) && !is_empty(&expected) {
                boxes.extend(boxes_of(file, local, &runs, element_bytes));
            }
        }
        match by_rank.keys().min() {
            Some(rank) => Err(format!("rank {rank} has a part of it, and is not in its mesh")),
            None => Ok((shape.clone(), boxes)),
        }
    }

    fn sharded(&self, (shape, all): (&Vec<u64>, u64), parts: &Parts<'_>) -> Assembled {
        let mut placed: BTreeSet<&[u64]> = BTreeSet::new();
        let mut boxes = Vec::new();
        for part in parts {
            let Part::Sharded { shape: own_shape, all: own_all, own } = part.2 else {
                return Err(self.mixed(&parts[0], part));
            };
            if (own_shape, *own_all) != (shape, all) {
                let (first, this) = (self.file(&parts[0]), self.file(part));
                return Err(format!("{first} and {this} say different shards of it"));
            }
            // Copies of a shard have its place.
            for (PlacedShard { offsets, .. }, local) in own.iter().filter(|(_, local)| !local.shape.contains(&0)) {
                if placed.insert(offsets) {
                    boxes.push(StoredBox { origin: PerAxis::from_slice(offsets), ..local.stored(part.1) });
                }
            }
        }
        Ok((shape.clone(), boxes))
    }
}

/// The boxes of a part: one for each choice of a run along each axis.
fn boxes_of(file: FileId, local: &Local, runs: &[Vec<Run>], element_bytes: u64) -> Vec<StoredBox> {
    let mut boxes = vec![StoredBox { origin: PerAxis::new(), extents: PerAxis::new(), ..local.stored(file) }];
    for (runs, stride) in runs.iter().zip(&local.strides) {
        let mut next = Vec::with_capacity(boxes.len() * runs.len());
        for part in &boxes {
            let mut at = 0;
            for (origin, extent) in runs {
                let mut one = part.clone();
                // Inside the tensor, whose last byte fits 64 bits.
                one.start += at * stride * element_bytes;
                one.origin.push(*origin);
                one.extents.push(*extent);
                next.push(one);
                at += extent;
            }
        }
        boxes = next;
    }
    boxes
}
