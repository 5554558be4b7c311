//! What the state of one rank says of tensors that are spread over many.
//!
//! A file that each rank saves for itself, such as `model_world_size_8_rank_3.pt`, holds the rank's own parts of tensors as torch
//! pickles them: a `DTensor` with the mesh of ranks and a placement for each mesh axis, or a `ShardedTensor` with the offsets of
//! its shards. [`RankReader::describe`] reads that from the pickle, and [`MeshSharding::runs`] computes which elements of the
//! whole tensor a coordinate of the mesh holds, as torch cuts them. No element is looked at.

use std::{collections::HashMap, sync::Arc};

use ckfs_tensor::{DType, RANK_MAX, to_usize, unravel};

use super::{
    super::pickle::read::{Id, PickleValue, Unpickled},
    state::{self as torch_state, Of, dtype_of, is_listed},
};
use crate::FormatError;

/// Most ranks of a mesh, and most ranks of the job that it is a part of.
pub(crate) const RANKS_MAX: u64 = 1 << 20;

/// Most runs of elements that one axis of a rank's part has. Those of real trainings have a few.
const RUNS_MAX: usize = 1 << 12;

/// Whether the state of a rank may name a class or function.
pub fn is_allowed(module: &str, name: &str) -> bool {
    const LISTED: [(&str, &str); 16] = [
        ("torch", "Tensor"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch._utils", "_rebuild_wrapper_subclass"),
        ("torch.distributed.tensor torch.distributed.tensor._api", "DTensor"),
        ("torch.distributed._tensor torch.distributed._tensor.api", "DTensor"),
        (
            "torch.distributed.tensor._dtensor_spec torch.distributed._tensor._dtensor_spec \
             torch.distributed.tensor.placement_types torch.distributed._tensor.placement_types",
            "DTensorSpec TensorMeta ShardOrderEntry Replicate Shard _StridedShard Partial _Partial",
        ),
        ("torch.distributed.device_mesh torch.distributed._tensor.device_mesh", "DeviceMesh"),
        ("torch.distributed._mesh_layout", "_MeshLayout _FlatLayout"),
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor ShardedTensor.ProcessGroupState"),
        ("torch.distributed._shard.sharded_tensor.shard", "Shard"),
        ("torch.distributed._shard.metadata", "ShardMetadata"),
        (
            "torch.distributed._shard.sharded_tensor.metadata",
            "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING",
        ),
        ("torch.distributed.remote_device", "_remote_device"),
        ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
        ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec"),
        ("_io", "BytesIO"),
    ];
    // `getattr` names the class within a class above.
    let is_getattr = ["__builtin__", "builtins"].contains(&module) && name == "getattr";
    torch_state::is_allowed(module, name) || is_getattr || is_listed(&LISTED, module, name)
}

/// How a mesh axis holds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeshPlacement {
    /// Each coordinate has all of it.
    Replicate,
    /// Each coordinate has a chunk of this axis.
    Shard {
        /// Axis of the tensor.
        axis: usize,
    },
    /// The axis is cut into `split` chunks, and each coordinate has a chunk of every one of them.
    Strided {
        /// Axis of the tensor.
        axis: usize,
        /// Number of the chunks that are cut first.
        split: u64,
    },
}

/// Ranks in a grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMesh {
    /// Extent of each mesh axis.
    pub shape: Vec<u64>,
    /// The rank at each coordinate, in row-major order.
    pub ranks: Vec<u64>,
}

impl RankMesh {
    /// The coordinate of a rank; `None` if it is not in the mesh.
    pub fn coordinate(&self, rank: u64) -> Option<Vec<u64>> {
        let place = self.ranks.iter().position(|found| *found == rank)?;
        Some(unravel(place as u64, &self.shape).to_vec())
    }

    /// Whether ranks ascend along each axis.
    fn ascends(&self) -> bool {
        let mut stride = 1;
        self.shape.iter().rev().all(|extent| {
            let (step, count) = (stride, to_usize(*extent));
            stride *= count;
            let mut pairs = self.ranks.iter().zip(self.ranks.iter().skip(step)).enumerate();
            pairs.all(|(place, (rank, next))| place / step % count == count - 1 || rank < next)
        })
    }
}

/// A part of an axis: its first element, and its length.
pub type Run = (u64, u64);

/// How a tensor is spread over a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshSharding {
    /// The ranks.
    pub mesh: Arc<RankMesh>,
    /// By mesh axis.
    pub placements: Vec<MeshPlacement>,
    /// Mesh axes in the order in which they cut.
    pub order: Vec<usize>,
}

impl MeshSharding {
    /// What the rank at a coordinate holds of a tensor of this shape: for each axis the runs of the whole that lie one after the
    /// other in the part. `None` if there are too many runs.
    pub fn runs(&self, shape: &[u64], coordinate: &[u64]) -> Option<Vec<Vec<Run>>> {
        let mut axes: Vec<Vec<Run>> = shape.iter().map(|extent| vec![(0, *extent)]).collect();
        for mesh_axis in &self.order {
            let (count, place) = (self.mesh.shape[*mesh_axis], coordinate[*mesh_axis]);
            match self.placements[*mesh_axis] {
                MeshPlacement::Replicate => {}
                MeshPlacement::Shard { axis } => axes[axis] = chunk(&axes[axis], count, place),
                MeshPlacement::Strided { axis, split } => {
                    let mut kept = Vec::new();
                    let len = len_of(&axes[axis]);
                    // Chunks behind the end are empty.
                    for part in (0..split).take_while(|part| part.saturating_mul(len.div_ceil(split)) < len) {
                        kept.extend(chunk(&chunk(&axes[axis], split, part), count, place));
                        if kept.len() > RUNS_MAX {
                            return None;
                        }
                    }
                    axes[axis] = joined(kept);
                }
            }
        }
        Some(axes)
    }

    /// Whether another coordinate holds the same, and comes before this one.
    pub fn is_copy(&self, coordinate: &[u64]) -> bool {
        self.placements
            .iter()
            .zip(coordinate)
            .any(|(placement, place)| *placement == MeshPlacement::Replicate && *place > 0)
    }
}

fn len_of(runs: &[Run]) -> u64 {
    runs.iter().map(|(_, len)| len).sum()
}

/// Chunk `place` of `count` of what these runs hold, as `torch.chunk` cuts: all chunks but the last ones are of one length.
fn chunk(runs: &[Run], count: u64, place: u64) -> Vec<Run> {
    let len = len_of(runs);
    let each = len.div_ceil(count.max(1));
    let start = each.saturating_mul(place).min(len);
    let end = start.saturating_add(each).min(len);
    let (mut kept, mut at) = (Vec::new(), 0);
    for (first, run) in runs {
        let (low, high) = (start.max(at), end.min(at + run));
        if low < high {
            kept.push((first + low - at, high - low));
        }
        at += run;
    }
    kept
}

/// The same runs, those that continue each other as one.
fn joined(runs: Vec<Run>) -> Vec<Run> {
    let mut kept: Vec<Run> = Vec::with_capacity(runs.len());
    for (first, len) in runs {
        match kept.last_mut() {
            Some(last) if last.0 + last.1 == first => last.1 += len,
            Some(_) | None => kept.push((first, len)),
        }
    }
    kept
}

/// A shard with the place that it has in the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedShard {
    /// First element along each axis.
    pub offsets: Vec<u64>,
    /// Extents.
    pub sizes: Vec<u64>,
}

/// What a rank has of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankTensor {
    /// A tensor that says nothing of other ranks.
    Plain(Id),
    /// A `DTensor`.
    Meshed {
        /// Shape of the whole.
        shape: Vec<u64>,
        /// How it is spread.
        sharding: MeshSharding,
        /// The rank's own part.
        local: Id,
    },
    /// A `ShardedTensor`.
    Sharded {
        /// Shape of the whole.
        shape: Vec<u64>,
        /// Type of its elements.
        dtype: DType,
        /// The shards of all ranks.
        all: Vec<PlacedShard>,
        /// The rank's own ones, with their elements.
        own: Vec<(PlacedShard, Id)>,
    },
}

/// A reader of one rank's pickle. Meshes that tensors share are read once.
#[derive(Debug)]
pub struct RankReader<'a> {
    pickle: &'a Unpickled,
    rank: u64,
    meshes: HashMap<Id, Arc<RankMesh>>,
}

impl<'a> RankReader<'a> {
    /// A reader of the pickle that this rank saved.
    pub fn new(pickle: &'a Unpickled, rank: u64) -> Self {
        Self { pickle, rank, meshes: HashMap::new() }
    }

    /// What the value is that is called `name`, one of [`leaves`](torch_state::leaves).
    ///
    /// # Errors
    /// [`FormatError`]: it is not described as torch describes it, or is of a kind that has no place here.
    pub fn describe(&mut self, name: &str, id: Id) -> Result<RankTensor, FormatError> {
        let of = Of { pickle: self.pickle, name };
        let Some((callee, args, _)) = self.pickle.call(id) else { return Ok(RankTensor::Plain(id)) };
        // A parameter holds its tensor.
        if (callee.module.as_str(), callee.name.as_str()) == ("torch._utils", "_rebuild_parameter")
            && let Some(inner) =
                args.first().filter(|inner| self.pickle.call(**inner).is_some_and(|call| is_typed(&call.0.name)))
        {
            return self.describe(name, *inner);
        }
        if !is_typed(&callee.name) {
            return Ok(RankTensor::Plain(id));
        }
        let [_, class, wrapper, state, ..] = args else { return Err(of.malformed("a class and its state")) };
        let PickleValue::Global(class) = self.pickle.value(*class) else { return Err(of.malformed("a class")) };
        if matches!(class.name.as_str(), "Tensor" | "Parameter") {
            // One with attributes.
            return Ok(RankTensor::Plain(id));
        }
        let shape = self.pickle.sequence(*wrapper).and_then(|members| members.get(2)).copied();
        let shape = of.sizes(shape.ok_or_else(|| of.malformed("the shape of the whole"))?)?;
        match class.name.as_str() {
            "DTensor" => self.meshed(of, shape, *state),
            "ShardedTensor" => {
                let dtype =
                    self.pickle.sequence(*wrapper).and_then(|members| members.get(1)).map(|id| self.pickle.value(*id));
                let Some(PickleValue::Global(dtype)) = dtype else { return Err(of.malformed("a dtype")) };
                let dtype = dtype_of(&dtype.name).ok_or_else(|| of.unsupported(dtype))?;
                self.sharded(of, (shape, dtype), *state)
            }
            _ => Err(of.unsupported(class)),
        }
    }

    fn meshed(&mut self, of: Of<'a, '_>, shape: Vec<u64>, state: Id) -> Result<RankTensor, FormatError> {
        let state = of.members(state);
        let local = of.member(state, "_local_tensor")?;
        let spec = of.member(state, "_spec")?;
        let spec = of.state(spec, "a DTensorSpec")?;
        let meta = of.member(spec, "tensor_meta")?;
        let meta = self.pickle.call(meta).and_then(|(_, args, _)| args.first().copied());
        let meta = of.sizes(meta.ok_or_else(|| of.malformed("tensor_meta with a shape"))?)?;
        if meta != shape {
            return Err(of.unsupported(format!("a DTensor of shape {shape:?} whose specification says {meta:?}")));
        }
        let mesh = self.mesh(of, of.member(spec, "mesh")?)?;
        let listed = of.member(spec, "placements")?;
        let listed = self.pickle.sequence(listed).ok_or_else(|| of.malformed("a tuple of placements"))?;
        let placements = listed.iter().map(|id| of.placement(*id, shape.len())).collect::<Result<Vec<_>, _>>()?;
        if placements.len() != mesh.shape.len() {
            return Err(of.malformed("as many placements as mesh axes"));
        }
        let order = of.order(spec, &placements)?;
        Ok(RankTensor::Meshed { shape, sharding: MeshSharding { mesh, placements, order }, local })
    }

    fn mesh(&mut self, of: Of<'a, '_>, id: Id) -> Result<Arc<RankMesh>, FormatError> {
        if let Some(mesh) = self.meshes.get(&id) {
            return Ok(Arc::clone(mesh));
        }
        let state = of.state(id, "a DeviceMesh")?;
        let mesh = match self.pickle.item(state, "_layout") {
            Some(layout) if self.pickle.item(state, "mesh").is_none() => of.mesh_of_layout(state, layout, self.rank)?,
            Some(_) | None => of.mesh_of_tensor(state)?,
        };
        let keeps_order = self.pickle.item(state, "_preserve_rank_order").map(|id| self.pickle.value(id));
        if keeps_order != Some(&PickleValue::Bool(true)) && !mesh.ascends() {
            // Its groups count ranks in ascending order, and its coordinates as they are listed: torch gathers other tensors than it cuts.
            return Err(of.unsupported(format!("a mesh whose ranks do not ascend along each axis ({:?})", mesh.ranks)));
        }
        let coordinate = mesh.coordinate(self.rank);
        // Torch notes where the rank is that has saved the file.
        let noted = self.pickle.item(state, "_coordinate_on_dim").and_then(|id| self.pickle.naturals(id));
        if noted.is_some() && noted != coordinate {
            let found = format!(
                "a mesh in which the rank that saved it is at {noted:?}, and rank {} at {coordinate:?}",
                self.rank
            );
            return Err(of.unsupported(found));
        }
        let mesh = Arc::new(mesh);
        self.meshes.insert(id, Arc::clone(&mesh));
        Ok(mesh)
    }

    fn sharded(
        &mut self,
        of: Of<'a, '_>,
        (shape, dtype): (Vec<u64>, DType),
        state: Id,
    ) -> Result<RankTensor, FormatError> {
        let members = self.pickle.sequence(state).filter(|members| members.len() >= 3);
        let Some([own, metadata, group, ..]) = members else { return Err(of.malformed("shards and metadata")) };
        let group = of.state(*group, "the state of a process group")?;
        let rank = of.natural(of.member(group, "global_rank")?)?;
        if rank != self.rank {
            return Err(
                of.unsupported(format!("a ShardedTensor that rank {rank} saved in the file of rank {}", self.rank))
            );
        }
        let metadata = of.state(*metadata, "a ShardedTensorMetadata")?;
        if of.sizes(of.member(metadata, "size")?)? != shape {
            return Err(of.malformed("metadata of the same shape"));
        }
        let placed = |id: Id| -> Result<PlacedShard, FormatError> {
            let state = of.state(id, "a ShardMetadata")?;
            let offsets = of.sizes(of.member(state, "shard_offsets")?)?;
            let sizes = of.sizes(of.member(state, "shard_sizes")?)?;
            if offsets.len() == shape.len() && sizes.len() == shape.len() {
                Ok(PlacedShard { offsets, sizes })
            } else {
                Err(of.malformed("shards of as many axes as the whole"))
            }
        };
        let list = |id: Id| self.pickle.sequence(id).ok_or_else(|| of.malformed("a list of shards"));
        let all = list(of.member(metadata, "shards_metadata")?)?;
        let all = all.iter().map(|id| placed(*id)).collect::<Result<Vec<_>, _>>()?;
        let mut parts = Vec::new();
        for shard in list(*own)? {
            let state = of.state(*shard, "a Shard")?;
            let (tensor, metadata) = (of.member(state, "tensor")?, of.member(state, "metadata")?);
            parts.push((placed(metadata)?, tensor));
        }
        Ok(RankTensor::Sharded { shape, dtype, all, own: parts })
    }
}

/// Extents and strides of the digits of a mesh axis.
type Digits = (Vec<u64>, Vec<u64>);

fn is_typed(function: &str) -> bool {
    function == "_rebuild_from_type_v2"
}

impl Of<'_, '_> {
    /// The dictionary of a state. Objects with slots have it as the second of two.
    fn members(self, id: Id) -> Id {
        if let PickleValue::Tuple(two) = self.pickle.value(id)
            && let [_, slots] = two[..]
        {
            return slots;
        }
        id
    }

    /// The dictionary that an object was given as its state.
    fn state(self, id: Id, expected: &'static str) -> Result<Id, FormatError> {
        let state = self.pickle.call(id).and_then(|(_, _, object)| object.state);
        state.map(|state| self.members(state)).ok_or_else(|| self.malformed(expected))
    }

    fn member(self, state: Id, key: &'static str) -> Result<Id, FormatError> {
        self.pickle.item(state, key).ok_or_else(|| self.malformed(key))
    }

    fn natural(self, id: Id) -> Result<u64, FormatError> {
        self.pickle.natural(id).ok_or_else(|| self.malformed("a whole number"))
    }

    /// The numbers of a `torch.Size` or of a tuple or list.
    fn sizes(self, id: Id) -> Result<Vec<u64>, FormatError> {
        let numbers =
            self.pickle.naturals(self.pickle.size(id)).ok_or_else(|| self.malformed("sizes of whole numbers"))?;
        if numbers.len() <= RANK_MAX { Ok(numbers) } else { Err(self.malformed("at most 8 axes")) }
    }

    fn placement(self, id: Id, rank: usize) -> Result<MeshPlacement, FormatError> {
        let Some((class, args, object)) = self.pickle.call(id) else { return Err(self.malformed("a placement")) };
        let member = |key: &'static str, place: usize| -> Result<u64, FormatError> {
            let found = object.state.and_then(|state| self.pickle.item(self.members(state), key));
            self.natural(found.or(args.get(place).copied()).ok_or_else(|| self.malformed(key))?)
        };
        let axis = || match member("dim", 0)? {
            axis if axis < rank as u64 => Ok(to_usize(axis)),
            _ => Err(self.malformed("a placement on an axis of the tensor")),
        };
        match class.name.as_str() {
            "Replicate" => Ok(MeshPlacement::Replicate),
            "Shard" => Ok(MeshPlacement::Shard { axis: axis()? }),
            "_StridedShard" => match member("split_factor", 1)? {
                split @ 1..=RANKS_MAX => Ok(MeshPlacement::Strided { axis: axis()?, split }),
                _ => Err(self.malformed("a split factor")),
            },
            // The sum over ranks is the tensor, and stands nowhere.
            "Partial" | "_Partial" => Err(self.unsupported("the placement Partial, sums that were not added yet,")),
            _ => Err(self.unsupported(class)),
        }
    }

    /// Mesh axes in the order in which they cut: from the first to the last, unless the specification says otherwise of an axis that
    /// several of them cut.
    fn order(self, spec: Id, placements: &[MeshPlacement]) -> Result<Vec<usize>, FormatError> {
        let usual: Vec<usize> = (0..placements.len()).collect();
        let entries = self.pickle.item(spec, "shard_order").and_then(|id| self.pickle.sequence(id)).unwrap_or_default();
        let mut order: Vec<usize> = Vec::new();
        let mut is_usual = true;
        for entry in entries {
            let args = self.pickle.call(*entry).map(|(_, args, _)| args).or_else(|| self.pickle.sequence(*entry));
            let Some([_, axes]) = args else { return Err(self.malformed("an order of shards")) };
            let axes = self.pickle.naturals(*axes).ok_or_else(|| self.malformed("mesh axes in an order"))?;
            if axes.iter().any(|axis| *axis >= placements.len() as u64 || order.contains(&to_usize(*axis))) {
                return Err(self.malformed("each mesh axis once in the order of shards"));
            }
            is_usual &= axes.is_sorted();
            order.extend(axes.iter().map(|axis| to_usize(*axis)));
        }
        if is_usual {
            return Ok(usual);
        }
        if placements.iter().any(|placement| matches!(placement, MeshPlacement::Strided { .. })) {
            return Err(self.unsupported("an order of shards besides strided ones"));
        }
        order.extend(usual.into_iter().filter(|axis| !order.contains(axis)).collect::<Vec<_>>());
        Ok(order)
    }

    /// A mesh as torch noted it until 2.9: a tensor of ranks, whose elements are noted besides.
    fn mesh_of_tensor(self, state: Id) -> Result<RankMesh, FormatError> {
        let tensor = self.tensor(self.member(state, "mesh")?)?;
        let shape = tensor.ok_or_else(|| self.malformed("a mesh that is a tensor"))?.shape;
        let ranks = self.pickle.naturals(self.member(state, "_flatten_mesh_list")?);
        self.checked(shape, ranks.ok_or_else(|| self.malformed("the ranks of the mesh"))?)
    }

    /// A mesh as newer torch notes it: places in the list of all ranks. A part of a larger mesh is the one with the rank in it.
    fn mesh_of_layout(self, state: Id, layout: Id, rank: u64) -> Result<RankMesh, FormatError> {
        let map =
            self.pickle.item(state, "_flatten_rank_map").or_else(|| self.pickle.item(state, "_flatten_mesh_list"));
        let map = map.and_then(|id| self.pickle.naturals(id)).ok_or_else(|| self.malformed("the ranks of the mesh"))?;
        if map.len() as u64 > RANKS_MAX {
            return Err(self.malformed("a mesh of at most 2^20 ranks"));
        }
        let layout = self.state(layout, "the layout of a mesh")?;
        let axes = self.axes_of_layout(layout)?;
        let place = map.iter().position(|found| *found == rank);
        let place =
            place.ok_or_else(|| self.unsupported(format!("a mesh without rank {rank}, which saved it,")))? as u64;
        // The digits of the place along the axes are what this mesh goes over; the rest is where it begins.
        let mut base = place;
        for (extent, stride) in axes.iter().flat_map(|(shape, strides)| shape.iter().zip(strides)) {
            if *extent > 1 && *stride > 0 {
                base = base.saturating_sub((place / stride) % extent * stride);
            }
        }
        let mut places = vec![base];
        for (extent, stride) in axes.iter().flat_map(|(shape, strides)| shape.iter().zip(strides)) {
            if (places.len() as u64).saturating_mul(*extent) > RANKS_MAX {
                return Err(self.malformed("a mesh of at most 2^20 ranks"));
            }
            places = places
                .iter()
                .flat_map(|at| (0..*extent).map(move |index| at.saturating_add(index.saturating_mul(*stride))))
                .collect();
        }
        let ranks: Option<Vec<u64>> = places.iter().map(|at| map.get(usize::try_from(*at).ok()?).copied()).collect();
        let shape = axes.iter().map(|(shape, _)| shape.iter().product()).collect();
        self.checked(shape, ranks.ok_or_else(|| self.malformed("a mesh inside the list of its ranks"))?)
    }

    /// Extents and strides of each axis of a mesh; an axis may have several digits.
    fn axes_of_layout(self, layout: Id) -> Result<Vec<Digits>, FormatError> {
        if let Some(axes) = self.pickle.item(layout, "axes") {
            let axes = self.pickle.sequence(axes).ok_or_else(|| self.malformed("axes of a mesh"))?;
            return axes.iter().map(|axis| self.flat_layout(self.state(*axis, "an axis of a mesh")?)).collect();
        }
        // Before, one pair of tuples had all axes, those of several digits nested.
        let malformed = || self.malformed("shape and stride of a mesh");
        let (shape, stride) = (self.member(layout, "shape")?, self.member(layout, "stride")?);
        let (Some(shape), Some(stride)) = (self.pickle.sequence(shape), self.pickle.sequence(stride)) else {
            return Err(malformed());
        };
        let digits = |(shape, stride): (&Id, &Id)| {
            Some((self.pickle.naturals(*shape)?, self.pickle.naturals(*stride)?)).filter(|(s, t)| s.len() == t.len())
        };
        let axes: Option<Vec<Digits>> = shape.iter().zip(stride).map(digits).collect();
        axes.filter(|_| shape.len() == stride.len()).ok_or_else(malformed)
    }

    fn flat_layout(self, axis: Id) -> Result<Digits, FormatError> {
        let numbers = |key| self.pickle.naturals(self.member(axis, key)?).ok_or_else(|| self.malformed(key));
        let (shape, stride) = (numbers("shape")?, numbers("stride")?);
        if shape.len() == stride.len() {
            Ok((shape, stride))
        } else {
            Err(self.malformed("as many strides as extents"))
        }
    }

    fn checked(self, shape: Vec<u64>, ranks: Vec<u64>) -> Result<RankMesh, FormatError> {
        let count = shape.iter().try_fold(1u64, |count, extent| count.checked_mul(*extent));
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        sorted.dedup();
        let fits = count == Some(ranks.len() as u64) && sorted.len() == ranks.len() && !ranks.is_empty();
        if fits && ranks.len() as u64 <= RANKS_MAX && shape.len() <= RANK_MAX * 2 {
            Ok(RankMesh { shape, ranks })
        } else {
            Err(self.malformed("a mesh with each of its ranks once"))
        }
    }
}

#[cfg(test)]
mod tests;
