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
    read::OpenedArchive,
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
    job::{NAMED, RankJob, ensure, lacking, left_out, missing, tensor_of},
    names::RankFile,
};

/// What a trainer notes of the files.
const CONFIG: &str = "fsdp_config.json";

/// Longest such note that is read, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Most boxes of one rank's part of a tensor. Those of real trainings have one, or a few where an axis is strided.
const BOXES_MAX: usize = 1 << 16;

/// What a rank has of a tensor.
#[derive(Clone, Debug)]
enum Part {
    Plain(StoredBox),
    Meshed { shape: Vec<u64>, sharding: MeshSharding, local: StoredBox },
    Sharded { shape: Vec<u64>, all: u64, own: Vec<StoredBox> },
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
    world_of(&names)
        .and_then(|world| compare_note(job, world))
        .map_err(|message| vec![Problem::of_file(all(), message)])?;
    let rank = |name: &RankFile<'_>| name.fsdp().map_or(0, |(_, rank)| rank);
    let states = job.states(distributed::is_allowed, &|file, name, opened| rank_state(opened, file, rank(name)))?;
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

/// The number of ranks, if files with these numbers of ranks and ranks are those of all ranks of one job.
pub(crate) fn world_of(names: &[(u64, u64)]) -> Result<u64, String> {
    let worlds: BTreeSet<u64> = names.iter().map(|(world, _)| *world).collect();
    let [world] = worlds.iter().copied().collect::<Vec<_>>()[..] else {
        let worlds: Vec<String> = worlds.iter().map(u64::to_string).collect();
        return Err(format!("files of several jobs, of {} ranks: keep those of one", worlds.join(" and ")));
    };
    let ranks: BTreeSet<u64> = names.iter().map(|(_, rank)| *rank).collect();
    if let Some(rank) = ranks.range(world..).next() {
        return Err(format!("a file of rank {rank}, of {world} ranks that count from 0"));
    }
    if (ranks.len() as u64) < world {
        let missing = missing(world, |rank| ranks.contains(rank));
        let more = world - ranks.len() as u64 - missing.len() as u64;
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return Err(lacking(world, ranks.len(), &format!("rank {}{more}", missing.join(", "))));
    }
    Ok(world)
}

/// Compares the number of ranks with what a trainer notes of it.
fn compare_note(job: &RankJob<'_>, world: u64) -> Result<(), String> {
    let Some(note) = job.files.find(&format!("{}{CONFIG}", job.below)) else { return Ok(()) };
    let note = job.files.source.read_whole(note, CONFIG_BYTES_MAX).map_err(|error| format!("{CONFIG}: {error}"))?;
    let note: serde_json::Value = serde_json::from_slice(&note).map_err(|error| format!("{CONFIG}: {error}"))?;
    let noted = note.get("world_size").and_then(serde_json::Value::as_u64).unwrap_or(world);
    let what =
        format_args!("files of {world} ranks, and {CONFIG} beside them says {noted}: they are of different saves");
    ensure(noted == world, what)
}

/// What the file of a rank says.
fn rank_state(opened: &OpenedArchive, file: FileId, rank: u64) -> Result<RankState, String> {
    let text = |error: ckfs_format::FormatError| error.to_string();
    let state::Leaves { tensors: leaves, others } =
        state::leaves(&opened.pickle, opened.pickle.root()).map_err(text)?;
    let mut reader = RankReader::new(&opened.pickle, rank);
    let mut parts = Vec::with_capacity(leaves.len());
    for (name, id) in leaves {
        let local = |id| {
            let saved = tensor_of(opened, id, &name, format_args!("tensor {name:?}"))?;
            Ok::<_, String>((saved.tensor.dtype, StoredBox::saved(file, &saved)))
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
                for (PlacedShard { offsets, sizes }, id) in own {
                    let (found, local) = local(id)?;
                    let of = &local.extents;
                    let what =
                        format_args!("tensor {name:?}: expected a shard of {dtype} {sizes:?}, found {found} {of:?}");
                    ensure(found == dtype && of[..] == sizes, what)?;
                    shards.push(StoredBox { origin: PerAxis::from_vec(offsets), ..local });
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

    fn plain(&mut self, first: &StoredBox, parts: &Parts<'_>) -> Assembled {
        for part in parts {
            match part.2 {
                Part::Plain(local) => {
                    let [(of_first, here), (of_other, there)] =
                        [(first, &parts[0]), (local, part)].map(|(local, part)| (&local.extents, self.file(part)));
                    let what =
                        format_args!("{of_first:?} in {here}, {of_other:?} in {there}, and nothing says how it is cut");
                    ensure(of_other == of_first, what)?;
                }
                Part::Meshed { .. } | Part::Sharded { .. } => return Err(self.mixed(&parts[0], part)),
            }
        }
        let what = format_args!(
            "nothing in the files of {} ranks says how tensors are cut: each may be whole or a part; save DTensors, or by \
             torch.distributed.checkpoint",
            self.world
        );
        ensure(self.world <= 1 || self.says_sharding, what)?;
        self.plain += 1;
        Ok((first.extents.to_vec(), vec![first.clone()]))
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
        let mut by_rank: HashMap<u64, &StoredBox> = HashMap::new();
        for part in parts {
            let Part::Meshed { shape: own_shape, sharding: own, local } = part.2 else {
                return Err(self.mixed(&parts[0], part));
            };
            let (first, this) = (self.file(&parts[0]), self.file(part));
            let [ranks, of_other] = [sharding, own].map(|of| &of.mesh.ranks[..of.mesh.ranks.len().min(NAMED)]);
            let what = format_args!(
                "{first} has it on a mesh of ranks {ranks:?}, {this} on one of ranks {of_other:?}: nothing says whether these are copies \
                 or parts (experts split by hand, for example); save it on one mesh of all ranks"
            );
            ensure(own.mesh.ranks == sharding.mesh.ranks, what)?;
            let what = format_args!(
                "{first} says {shape:?}, {:?} over a mesh of {:?}, and {this} says {own_shape:?}, {:?} over {:?}",
                sharding.placements, sharding.mesh.shape, own.placements, own.mesh.shape
            );
            ensure((own_shape, own) == (shape, sharding), what)?;
            by_rank.insert(part.0, local);
        }
        let mut boxes = Vec::new();
        for rank in &sharding.mesh.ranks {
            let Some(local) = by_rank.remove(rank) else {
                return Err(format!("rank {rank} of its mesh has no part in its file"));
            };
            let coordinate = sharding.mesh.coordinate(*rank).expect("the rank is one of the mesh");
            let runs = sharding.runs(shape, &coordinate);
            let runs = runs.ok_or_else(|| "its placements cut it into more runs than are read".to_owned())?;
            let expected: Vec<u64> = runs.iter().map(|runs| runs.iter().map(|(_, len)| len).sum()).collect();
            let is_empty = |shape: &[u64]| shape.contains(&0);
            let (path, found) = (self.job.path(local.file), &local.extents);
            let is_alike = found[..] == expected || is_empty(&expected) && is_empty(found);
            let placements = &sharding.placements;
            let what =
                format_args!("expected {expected:?} in {path} by its placements {placements:?}, found {found:?}");
            ensure(is_alike, what)?;
            let count = runs.iter().fold(1, |boxes: usize, runs| boxes.saturating_mul(runs.len().max(1)));
            let what = format_args!("its placements cut the part of rank {rank} into more than {BOXES_MAX} boxes");
            ensure(count <= BOXES_MAX, what)?;
            if !sharding.is_copy(&coordinate) && !is_empty(&expected) {
                boxes.extend(boxes_of(local, &runs, element_bytes));
            }
        }
        match by_rank.keys().min() {
            Some(rank) => Err(format!("rank {rank} has a part of it, and is not in its mesh")),
            None => Ok((shape.clone(), boxes)),
        }
    }

    fn sharded(&self, (shape, all): (&Vec<u64>, u64), parts: &Parts<'_>) -> Assembled {
        let mut placed: BTreeSet<&PerAxis> = BTreeSet::new();
        let mut boxes = Vec::new();
        for part in parts {
            let Part::Sharded { shape: own_shape, all: own_all, own } = part.2 else {
                return Err(self.mixed(&parts[0], part));
            };
            let (first, this) = (self.file(&parts[0]), self.file(part));
            let what = format_args!("{first} and {this} say different shards of it");
            ensure((own_shape, *own_all) == (shape, all), what)?;
            // Copies of a shard have its place.
            let own = own.iter().filter(|local| !local.extents.contains(&0));
            boxes.extend(own.filter(|local| placed.insert(&local.origin)).cloned());
        }
        Ok((shape.clone(), boxes))
    }
}

/// The boxes of a part: one for each choice of a run along each axis.
fn boxes_of(local: &StoredBox, runs: &[Vec<Run>], element_bytes: u64) -> Vec<StoredBox> {
    let mut boxes = vec![local.clone()];
    for (axis, runs) in runs.iter().enumerate() {
        let of_part = |part: StoredBox| {
            let mut end = 0;
            runs.iter().map(move |(origin, len)| {
                end += len;
                part.clone().run(axis, (end - len, *len), *origin, element_bytes)
            })
        };
        boxes = boxes.into_iter().flat_map(of_part).collect();
    }
    boxes
}
