//! Checkpoints of DeepSpeed: ZeRO 1, 2 and 3, and universal ones. The master weights are read, as `zero_to_fp32` reads them.
//!
//! A parameter is an interval of a flat vector that is spread over the files of ranks. An interval of a tensor in row-major order is a few
//! boxes ([`interval_boxes`]), so that nothing is put together before it is read. The vectors that the optimizer keeps are cut alike.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::Range,
};

use ckfs_format::torch::{
    read::{OpenedArchive, SavedTensor},
    zero::{self, Copied, ModelStates, OptimizerStates, Shaped},
};
use ckfs_source::FileId;
use ckfs_tensor::DType;

use super::{
    super::super::{
        amount::shown,
        container::{Contents, LeftOut},
        mosaic::StoredBox,
        problem::{Problem, Problems},
    },
    job::{Assembled, RankJob, Saved, missing, tensor_of},
    names::{RankFile, RankKind, UNIVERSAL},
};

/// Elements in a file, one after the other.
#[derive(Clone, Copy, Debug)]
struct Segment {
    file: FileId,
    /// First byte.
    start: u64,
    /// Number of elements.
    len: u64,
}

/// A flat vector that is spread over files.
#[derive(Debug)]
struct Flat {
    dtype: DType,
    segments: Vec<Segment>,
    /// First element of each segment.
    starts: Vec<u64>,
    len: u64,
}

impl Flat {
    /// The parts of `len` elements from `start` on.
    fn parts(&self, start: u64, len: u64) -> Vec<Segment> {
        let element_bytes = self.dtype.element_bytes().unwrap_or(1);
        let end = start.saturating_add(len);
        let first = self.starts.partition_point(|at| *at <= start).saturating_sub(1);
        let mut parts = Vec::new();
        for (segment, at) in self.segments.iter().zip(&self.starts).skip(first).take_while(|(_, at)| **at < end) {
            let (low, high) = (start.max(*at), end.min(at + segment.len));
            if low < high {
                let start = segment.start + (low - at) * element_bytes;
                parts.push(Segment { file: segment.file, start, len: high - low });
            }
        }
        parts
    }
}

/// The boxes of a tensor that hold the elements `low..high` of its row-major order, of which the first is at byte `start` of a file.
fn interval_boxes(
    shape: &[u64],
    (low, high): (u64, u64),
    (file, start): (FileId, u64),
    element_bytes: u64,
) -> Vec<StoredBox> {
    let mut boxes = Vec::new();
    let mut todo = vec![(Vec::new(), low, high, start)];
    while let Some((before, low, high, start)) = todo.pop() {
        if low >= high {
            continue;
        }
        let rest = &shape[before.len()..];
        let inner: u64 = rest.iter().skip(1).product();
        let Some(_) = rest.first() else {
            boxes.push(boxed(shape, before, None, (file, start)));
            continue;
        };
        let (first, last) = (low.div_ceil(inner), high / inner);
        let at = |element: u64| start + (element - low) * element_bytes;
        let inside = |row: u64| [before.as_slice(), &[row]].concat();
        if first > last {
            todo.push((inside(last), low % inner, high % inner, start));
            continue;
        }
        if low < first * inner {
            todo.push((inside(first - 1), low % inner, inner, start));
        }
        if last * inner < high {
            todo.push((inside(last), 0, high % inner, at(last * inner)));
        }
        if first < last {
            let start = at(first * inner);
            boxes.push(boxed(shape, before, Some((first, last - first)), (file, start)));
        }
    }
    boxes
}

/// A box at these indices of the first axes, with a run of the next one, and with all of the others.
fn boxed(shape: &[u64], before: Vec<u64>, run: Option<(u64, u64)>, (file, start): (FileId, u64)) -> StoredBox {
    let mut origin = before;
    let mut extents = vec![1; origin.len()];
    if let Some((first, len)) = run {
        origin.push(first);
        extents.push(len);
    }
    extents.extend(&shape[origin.len()..]);
    origin.resize(shape.len(), 0);
    StoredBox::row_major(file, start, &origin, &extents)
}

/// A tensor of a file as a part of a flat vector.
fn flat(file: FileId, saved: &SavedTensor, what: &str) -> Result<(DType, Segment), String> {
    let tensor = &saved.tensor;
    let elements = tensor.shape.iter().product();
    let is_flat = tensor.shape.len() == 1 && (tensor.strides[0] == 1 || elements <= 1);
    if !is_flat || tensor.dtype.element_bytes().is_none() {
        return Err(format!("{what}: expected a flat vector, found {} {:?}", tensor.dtype, tensor.shape));
    }
    Ok((tensor.dtype, Segment { file, start: saved.span().start, len: elements }))
}

/// A tensor that is whole in a file.
fn assembled_whole(file: FileId, saved: &SavedTensor) -> Assembled {
    (saved.tensor.dtype, saved.tensor.shape.clone(), vec![StoredBox::saved(file, saved)])
}

/// What one file says.
enum Said {
    Model(ModelFile),
    Optimizer(OptimizerFile),
    /// A parameter of a universal checkpoint.
    Parameter(SavedTensor),
}

/// Under which key optimizers keep the number of steps.
const STEP: &str = "step";

/// What a file of optimizer states says.
pub(super) struct OptimizerFile {
    pub(super) file: FileId,
    pub(super) states: OptimizerStates,
    /// The partition of each group: that of the master weights, called "", and with a training state those of the vectors that the
    /// optimizer keeps, by key.
    pub(super) flat: BTreeMap<String, Vec<SavedTensor>>,
    /// Single numbers that the optimizer keeps, by key and group.
    scalars: BTreeMap<String, Vec<SavedTensor>>,
    /// The numbers of steps by group, and what is the same for all parameters, as files of a universal checkpoint.
    pub(super) steps: Vec<Option<Pickled>>,
    pub(super) shared: Result<Pickled, String>,
}

/// A pickle with keys, first bytes and lengths of its storages.
#[derive(Clone)]
pub(super) struct Pickled(pub(super) Vec<u8>, pub(super) Vec<(String, (u64, u64))>);

pub(super) struct ModelFile {
    pub(super) states: ModelStates,
    /// The tensors of `states.module` and of `states.frozen`.
    pub(super) module: Vec<(String, SavedTensor)>,
    frozen: Vec<SavedTensor>,
    /// Members of the module that are no tensors.
    pub(super) others: Vec<String>,
}

fn model_file(opened: &OpenedArchive) -> Result<Said, String> {
    let states = zero::model_states(&opened.pickle).map_err(|error| error.to_string())?;
    let (mut module, mut others) = (Vec::new(), Vec::new());
    for (name, id) in &states.module {
        match opened.tensor(*id, name).map_err(|error| error.to_string())? {
            Some(saved) => module.push((name.clone(), saved)),
            None => others.push(name.clone()),
        }
    }
    let mut frozen = Vec::with_capacity(states.frozen.len());
    for ((name, _), id) in &states.frozen {
        frozen.push(tensor_of(opened, *id, name, format_args!("frozen parameter {name:?}"))?);
    }
    Ok(Said::Model(ModelFile { states, module, frozen, others }))
}

fn optimizer_file(opened: &OpenedArchive, file: FileId, training_state: bool) -> Result<Said, String> {
    let states = zero::optimizer_states(&opened.pickle).map_err(|error| error.to_string())?;
    let mut weights = Vec::with_capacity(states.flat.len());
    for (number, id) in states.flat.iter().enumerate() {
        let name = format!("partition of group {number}");
        weights.push(tensor_of(opened, *id, &name, &name)?);
    }
    let (mut flat, mut scalars, mut steps) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    for group in states.kept.iter().filter(|_| training_state) {
        for (key, id) in group {
            let Some(saved) = opened.tensor(*id, key).map_err(|error| error.to_string())? else { continue };
            let of = if saved.tensor.shape.is_empty() { &mut scalars } else { &mut flat };
            of.entry(key.clone()).or_insert_with(Vec::new).push(saved);
        }
        let step = group.iter().find(|(key, _)| key == STEP);
        steps.push(
            step.map(|(_, id)| zero::copied(&opened.pickle, *id).and_then(|step| pickled(opened, step))).transpose()?,
        );
    }
    // What only some groups have, as after a step in which the others had no gradients, is of no use to a resume.
    flat.retain(|_, groups| groups.len() == weights.len());
    scalars.retain(|_, groups| groups.len() == weights.len());
    flat.insert(String::new(), weights);
    let shared = states.shared.clone().and_then(|shared| pickled(opened, shared));
    Ok(Said::Optimizer(OptimizerFile { file, states, flat, scalars, steps, shared }))
}

/// A pickle with the places of its storages.
fn pickled(opened: &OpenedArchive, Copied { pickle, storages }: Copied) -> Result<Pickled, String> {
    let keys: BTreeSet<String> = storages.into_iter().collect();
    let place =
        |key: String| opened.storage(&key).map(|place| (key.clone(), place)).ok_or(format!("no storage {key:?}"));
    Ok(Pickled(pickle, keys.into_iter().map(place).collect::<Result<_, _>>()?))
}

fn parameter_file(opened: &OpenedArchive, name: &str) -> Result<Said, String> {
    let root = opened.pickle.root();
    let id = opened.pickle.item(root, "param").unwrap_or(root);
    let found = opened.tensor(id, name).map_err(|error| error.to_string())?;
    found.map(Said::Parameter).ok_or_else(|| format!("tensor {name:?}: expected a tensor under \"param\""))
}

/// Reads the files of a checkpoint of ZeRO, or of a universal one.
pub(super) fn read<'a>(
    job: &'a RankJob<'a>,
    training_state: bool,
    contents: &mut Contents,
    problems: &mut Problems,
) -> Result<Zero<'a>, Vec<Problem>> {
    let said = job.states(zero::is_allowed, &|file, name, opened| match name {
        RankFile::Parameter(name) => parameter_file(opened, name),
        RankFile::Optimizer(..) => optimizer_file(opened, file, training_state),
        RankFile::Model(..) | RankFile::OtherState | RankFile::Fsdp { .. } | RankFile::Megatron(_) => {
            model_file(opened)
        }
    })?;
    let mut zero = Zero { job, models: BTreeMap::new(), optimizers: BTreeMap::new(), parameters: BTreeMap::new() };
    let mut again: Vec<(FileId, FileId)> = Vec::new();
    for ((id, name), said) in job.found.iter().zip(said) {
        match (said, name) {
            (Said::Parameter(saved), RankFile::Parameter(name)) => {
                zero.parameters.insert((*name).to_owned(), (*id, saved));
            }
            // Beside the whole parameters of a universal checkpoint, other ranks of tensor parallelism say nothing more.
            (Said::Model(file), RankFile::Model(rank, 0)) => {
                let of = zero.models.insert(rank.unwrap_or(0), (*id, file));
                again.extend(of.map(|(other, _)| (other, *id)));
            }
            (Said::Optimizer(file), RankFile::Optimizer(rank, 0)) => {
                let of = zero.optimizers.insert(*rank, file);
                again.extend(of.map(|other| (other.file, *id)));
            }
            (Said::Parameter(_) | Said::Model(_) | Said::Optimizer(_), _) => {}
        }
    }
    let of_two = |(other, id): (FileId, FileId)| {
        let what = format!(
            "of the same rank as {}: files of two saves, or of two stages of ZeRO, in one directory; leave those of one save in it",
            job.path(other)
        );
        job.fault(id, what)
    };
    if !again.is_empty() {
        return Err(again.into_iter().map(of_two).collect());
    }
    let tensors = zero.check().and_then(|()| zero.assemble()).map_err(|problem| vec![problem])?;
    contents.table = job.table(tensors.into_iter().map(|(name, tensor)| (name, FileId(0), Ok(tensor))), problems);
    let others = zero.models.get(&0).map_or(&[][..], |(_, model)| &model.others);
    let left_out = others.iter().map(|name| LeftOut { name: name.clone(), kind: "no tensor".to_owned() });
    contents.left_out = left_out.collect();
    contents.warnings.extend(zero.lacks_frozen().then(|| {
        "saved with exclude_frozen_parameters: tensors that were not trained are not here, and a model needs them from its base".to_owned()
    }));
    Ok(zero)
}

type Tensors = BTreeMap<String, Assembled>;

/// Partitions that follow each other: of groups in the files of ranks.
type Partitions<'a> = Vec<(&'a OptimizerFile, Range<usize>)>;

pub(super) struct Zero<'a> {
    pub(super) job: &'a RankJob<'a>,
    /// By rank; that of all ranks is that of rank 0.
    pub(super) models: BTreeMap<u64, (FileId, ModelFile)>,
    pub(super) optimizers: BTreeMap<u64, OptimizerFile>,
    /// Those of a universal checkpoint.
    parameters: BTreeMap<String, Saved>,
}

impl Zero<'_> {
    /// Whether parameters that were not trained may have been left out. ZeRO 2 and 3 save the shapes of these, of none as well; ZeRO 1
    /// never does.
    fn lacks_frozen(&self) -> bool {
        let stages = self.models.values().map(|(_, model)| model.states.stage);
        let stage = stages.chain(self.optimizers.values().map(|file| Some(file.states.stage))).flatten().max();
        stage >= Some(2) && self.models.values().any(|(_, model)| model.states.says_no_frozen)
    }

    /// Whether the files are those of one checkpoint of a kind that is read, and all of them.
    fn check(&self) -> Result<(), Problem> {
        let all = self.job.files.files.iter();
        for name in all.filter_map(|listed| RankFile::of(RankKind::Zero, listed.path.strip_prefix(self.job.below)?)) {
            let is_split = matches!(name, RankFile::Model(_, 1..) | RankFile::Optimizer(_, 1..));
            let what = if name == RankFile::OtherState {
                "stages of a pipeline or experts of DeepSpeed, which are not read: ds_to_universal.py puts them together"
            } else if is_split && self.parameters.is_empty() {
                "a model that is split over ranks (mp_rank_01), by what is in no file: ds_to_universal.py puts it together"
            } else {
                continue;
            };
            return Err(Problem::of_file("*_states.pt", what));
        }
        let Some((first, model)) = self.models.get(&0) else {
            let what = "expected the model states of rank 0, which name the parameters: the save did not finish, or not all files were copied";
            return Err(Problem::of_file("*_model_states.pt", what));
        };
        let what = "a model that is split over ranks (mp_world_size), by what is in no file: ds_to_universal.py puts it together";
        let is_whole = !self.parameters.is_empty() || model.states.tensor_ranks.is_none_or(|ranks| ranks <= 1);
        self.job.ensure(is_whole, *first, what)?;
        for (file, other) in self.models.values() {
            let [left, right] = [model, other].map(|of| of.states.steps);
            let (of_first, of_left, of_right) = (self.job.path(*first), shown(left), shown(right));
            let what = format_args!("step {of_right}, and {of_first} has step {of_left}: they are of different saves");
            self.job.ensure(left == right, *file, what)?;
            // Which of them are others too is in the file of rank 0 only.
            let is_same = other.states.groups == model.states.groups;
            self.job.ensure(is_same, *file, format_args!("other parameters than {of_first}"))?;
        }
        if self.parameters.is_empty() { self.check_optimizers() } else { Ok(()) }
    }

    fn check_optimizers(&self) -> Result<(), Problem> {
        let Some(OptimizerFile { file, states: first, .. }) = self.optimizers.values().next() else {
            let what = "expected partitions of ranks: the save did not finish, or not all files were copied";
            return Err(Problem::of_file("*_optim_states.pt", what));
        };
        let counts: BTreeSet<u64> = first.partitions.iter().copied().collect();
        let [count] = counts.into_iter().collect::<Vec<_>>()[..] else {
            let found = &first.partitions;
            let what = format!(
                "groups of {found:?} partitions: experts of DeepSpeed are not read: ds_to_universal.py puts them together"
            );
            return Err(self.job.fault(*file, what));
        };
        let missing = missing(count, |rank| self.optimizers.contains_key(rank));
        if !missing.is_empty() || self.optimizers.len() as u64 != count {
            let found = self.optimizers.len();
            let missing = if missing.is_empty() { "none".to_owned() } else { format!("rank {}", missing.join(", ")) };
            let what = format!(
                "expected the partitions of {count} ranks, found {found}; missing: {missing}: the save did not finish, files of another one are \
                 there, or not all were copied"
            );
            return Err(Problem::of_file("*_optim_states.pt", what));
        }
        for OptimizerFile { file: other, states, .. } in self.optimizers.values() {
            let [own, of_first] = [states, first].map(|of| {
                let (stage, partitions, vectors) = (of.stage, &of.partitions, of.flat.len());
                format!("ZeRO {stage} of {partitions:?} partitions in {vectors} vectors")
            });
            let what = format_args!("says {own}, and {} says {of_first}", self.job.path(*file));
            self.job.ensure(own == of_first && states.paddings == first.paddings, *other, what)?;
        }
        Ok(())
    }

    fn assemble(&self) -> Result<Tensors, Problem> {
        let (file, model) = &self.models[&0];
        let mut tensors = Tensors::new();
        if self.parameters.is_empty() {
            if self.first().states.stage == 3 {
                self.parameters_of_3(model, &mut tensors)?;
            } else {
                self.parameters_of_2(model, &mut tensors)?;
            }
        } else {
            self.universal(model, &mut tensors)?;
        }
        self.frozen(model, &mut tensors)?;
        let is_buffer: HashSet<&str> = model.states.buffers.iter().map(String::as_str).collect();
        let shared: HashMap<&str, &str> =
            model.states.shared.iter().map(|(name, of)| (name.as_str(), of.as_str())).collect();
        let is_placeholder = |saved: &SavedTensor| saved.tensor.shape.contains(&0);
        for (name, saved) in &model.module {
            let is_left = tensors.contains_key(name) || shared.contains_key(name.as_str());
            // Parameters of ZeRO 3 leave an empty tensor in their place.
            if is_left || (is_placeholder(saved) && !is_buffer.contains(name.as_str())) {
                continue;
            }
            tensors.insert(name.clone(), assembled_whole(*file, saved));
        }
        for (name, of) in &model.states.shared {
            if let Some(tensor) = tensors.get(of).cloned() {
                tensors.entry(name.clone()).or_insert(tensor);
            }
        }
        Ok(tensors)
    }

    /// The flat vector of these partitions.
    fn flat<'b>(&self, partitions: impl Iterator<Item = (FileId, &'b SavedTensor)>) -> Result<Flat, Problem> {
        let mut all = Flat { dtype: DType::F32, segments: Vec::new(), starts: Vec::new(), len: 0 };
        for (number, (file, saved)) in partitions.enumerate() {
            let (found, segment) =
                flat(file, saved, &format!("partition {number}")).map_err(|what| self.job.fault(file, what))?;
            let what = format_args!("partitions of different types, {found} among them");
            self.job.ensure(number == 0 || all.dtype == found, file, what)?;
            all.dtype = found;
            all.segments.push(segment);
            all.starts.push(all.len);
            all.len = all.len.saturating_add(segment.len);
        }
        Ok(all)
    }

    /// The optimizer states of the first rank.
    pub(super) fn first(&self) -> &OptimizerFile {
        self.optimizers.values().next().expect("they were counted")
    }

    /// The vectors that all ranks keep, by key, with the master weights.
    fn keys(&self) -> impl Iterator<Item = &String> {
        let is_everywhere = |key: &&String| self.optimizers.values().all(|file| file.flat.contains_key(*key));
        self.first().flat.keys().filter(is_everywhere)
    }

    /// The vectors of each key, those of the master weights first: a vector of the partitions in each of these lists. Others are
    /// as long, or longer if they may be `cut` where the parameters end.
    fn vectors(&self, lists: &[Partitions<'_>], cut: bool) -> Result<Vec<(&str, Vec<Flat>)>, Problem> {
        let mut vectors: Vec<(&str, Vec<Flat>)> = Vec::new();
        for key in self.keys() {
            let mut flats = Vec::with_capacity(lists.len());
            for (number, list) in lists.iter().enumerate() {
                let files =
                    list.iter().flat_map(|(of, groups)| groups.clone().map(|group| (of.file, &of.flat[key][group])));
                let flat = self.flat(files)?;
                let master = vectors.first().map_or(&flat, |(_, flats)| &flats[number]);
                let (expected, found) = (master.len, flat.len);
                let is_equal = flat.starts == master.starts && (found == expected || found > expected && cut);
                let what = format_args!("{key}: expected {expected} elements, as of the master weights, found {found}");
                self.job.ensure(is_equal, list[0].0.file, what)?;
                flats.push(flat);
            }
            vectors.push((key, flats));
        }
        Ok(vectors)
    }

    /// Takes a parameter from these parts of flat vectors, which follow each other.
    fn add(
        &self,
        (name, shape): &Shaped,
        dtype: DType,
        parts: &[Segment],
        tensors: &mut Tensors,
    ) -> Result<(), Problem> {
        let element_bytes = dtype.element_bytes().unwrap_or(1);
        let mut boxes = Vec::new();
        let mut at = 0;
        for part in parts {
            boxes.extend(interval_boxes(shape, (at, at + part.len), (part.file, part.start), element_bytes));
            at += part.len;
        }
        let is_new = tensors.insert(name.clone(), (dtype, shape.clone(), boxes)).is_none();
        self.job.ensure(is_new, self.models[&0].0, format_args!("parameter {name:?} is there twice"))
    }

    /// Takes the single numbers that the optimizer keeps of a parameter's group.
    fn add_scalars(&self, group: usize, shaped: &Shaped, tensors: &mut Tensors) {
        let OptimizerFile { file, scalars, .. } = self.first();
        for (key, groups) in scalars {
            let saved = groups.get(group).map(|saved| assembled_whole(*file, saved));
            tensors.extend(saved.map(|saved| (kept_name(shaped, key).0, saved)));
        }
    }

    fn elements(&self, (name, shape): &Shaped) -> Result<u64, Problem> {
        let count = shape.iter().try_fold(1u64, |count, extent| count.checked_mul(*extent));
        let count = count.filter(|count| *count < 1 << 60);
        let first = self.models[&0].0;
        count.ok_or_else(|| self.job.fault(first, format_args!("parameter {name:?}: a shape of {shape:?}")))
    }

    /// Takes parameters, each with its group and the elements that follow it, which lie one after the other in the vectors of each
    /// key: each vector has an equal part of each. Returns where they end. Messages call the vectors `has`.
    fn place<'b>(
        &self,
        parameters: impl Iterator<Item = (usize, &'b Shaped, u64)>,
        vectors: &[(&str, Vec<Flat>)],
        has: &str,
        tensors: &mut Tensors,
    ) -> Result<u64, Problem> {
        let (ranks, len) = (vectors[0].1.len() as u64, vectors[0].1[0].len);
        let mut at = 0u64;
        for (group, shaped, padding) in parameters {
            let count = self.elements(shaped)?;
            let each = count.div_ceil(ranks);
            let end = at.saturating_add(each);
            let what = format_args!("{has}, and parameter {:?} needs those from {at} to {end}", shaped.0);
            self.job.ensure(end <= len, self.first().file, what)?;
            for (key, flats) in vectors {
                let left = |rank: u64| count.saturating_sub(each * rank).min(each);
                let parts: Vec<Segment> =
                    (0..).zip(flats).flat_map(|(rank, flat)| flat.parts(at, left(rank))).collect();
                self.add(&kept_name(shaped, key), flats[0].dtype, &parts, tensors)?;
            }
            self.add_scalars(group, shaped, tensors);
            // Paddings of any size are in the file: an end beyond all numbers is beyond the partitions, too.
            at = end.saturating_add(padding);
        }
        Ok(at)
    }

    fn parameters_of_2(&self, model: &ModelFile, tensors: &mut Tensors) -> Result<(), Problem> {
        let OptimizerFile { file: first, states, .. } = self.first();
        let groups = &model.states.groups;
        let (expected, found) = (groups.len(), states.flat.len());
        let what = format_args!("expected partitions of {expected} groups of parameters, found {found}");
        self.job.ensure(found == expected, *first, what)?;
        // Partitions end at multiples of this, and the last of a group may be cut where the parameters end.
        let align = 2 * self.optimizers.len() as u64;
        for (number, group) in groups.iter().enumerate() {
            let of_ranks = self.optimizers.values().map(|of| (of, number..number + 1)).collect();
            let vectors = self.vectors(&[of_ranks], true)?;
            let len = vectors[0].1[0].len;
            let paddings = states.paddings.as_ref().and_then(|paddings| paddings.get(number));
            let (expected, found) = (group.len(), paddings.map_or(group.len(), Vec::len));
            let what = format_args!("expected {expected} paddings of parameters in group {number}, found {found}");
            self.job.ensure(found == expected, *first, what)?;
            let padded = |(place, shaped)| (number, shaped, paddings.map_or(0, |paddings| paddings[place]));
            let has = format!("group {number} has {len} elements on all ranks");
            let at = self.place(group.iter().enumerate().map(padded), &vectors, &has, tensors)?;
            let what = format_args!(
                "group {number}: its parameters have {at} elements, its partitions {len}: they are not of the same parameters"
            );
            self.job.ensure(at.div_ceil(align) == len.div_ceil(align), *first, what)?;
        }
        Ok(())
    }

    fn parameters_of_3(&self, model: &ModelFile, tensors: &mut Tensors) -> Result<(), Problem> {
        let lists: Vec<_> = self.optimizers.values().map(|of| vec![(of, 0..of.states.flat.len())]).collect();
        let vectors = self.vectors(&lists, false)?;
        let masters = &vectors[0].1;
        for (two, of) in masters.windows(2).zip(self.optimizers.values().skip(1)) {
            let Flat { len, dtype, .. } = two[1];
            let what = format_args!("partitions of {len} elements of {dtype}, others than those of the ranks before");
            self.job.ensure((two[0].len, two[0].dtype) == (len, dtype), of.file, what)?;
        }
        let len = masters[0].len;
        let groups = model.states.groups.iter().enumerate();
        let parameters = groups.flat_map(|(number, group)| group.iter().map(move |shaped| (number, shaped, 0)));
        let at = self.place(parameters, &vectors, &format!("partitions of {len} elements"), tensors)?;
        let what = format_args!(
            "the parameters have {at} elements on each rank, the partitions {len}: they are not of the same parameters"
        );
        self.job.ensure(at == len, self.first().file, what)
    }

    /// Parameters that the optimizer has not: whole in the file of rank 0, or a part in that of each rank.
    fn frozen(&self, model: &ModelFile, tensors: &mut Tensors) -> Result<(), Problem> {
        let (first, _) = self.models[&0];
        let is_parted = self.job.path(first).contains("zero_pp_rank_");
        let ranks = self.models.keys().max().map_or(0, |rank| rank + 1);
        let expected = self.optimizers.len() as u64;
        let whole = ranks == self.models.len() as u64 && (expected == 0 || ranks == expected);
        if is_parted && !model.frozen.is_empty() && !whole {
            let message = format!(
                "expected the model states of {} ranks, which have parts of parameters that are not trained, found {}",
                expected.max(ranks),
                self.models.len()
            );
            return Err(Problem::of_file("*_model_states.pt", message));
        }
        for (number, (shaped, _)) in model.states.frozen.iter().enumerate() {
            if tensors.contains_key(&shaped.0) {
                continue;
            }
            if !is_parted {
                let saved = &model.frozen[number];
                let ((name, expected), found) = (shaped, &saved.tensor.shape);
                let what = format_args!("frozen parameter {name:?}: expected {expected:?}, found {found:?}");
                self.job.ensure(found == expected, first, what)?;
                tensors.insert(shaped.0.clone(), assembled_whole(first, saved));
                continue;
            }
            for (file, other) in self.models.values() {
                let is_same = other.states.frozen.get(number).map(|(shaped, _)| shaped) == Some(shaped);
                let what = format_args!("other frozen parameters than {}", self.job.path(first));
                self.job.ensure(is_same, *file, what)?;
            }
            let flat = self.flat(self.models.values().map(|(file, model)| (*file, &model.frozen[number])))?;
            let count = self.elements(shaped)?;
            let (name, found) = (&shaped.0, flat.len);
            let what = format_args!("frozen parameter {name:?}: expected {count} elements on all ranks, found {found}");
            self.job.ensure(found >= count, first, what)?;
            self.add(shaped, flat.dtype, &flat.parts(0, count), tensors)?;
        }
        Ok(())
    }

    /// The parameters of a universal checkpoint, each whole in a file, flat or in its shape.
    fn universal(&self, model: &ModelFile, tensors: &mut Tensors) -> Result<(), Problem> {
        let shapes: HashMap<&str, &Vec<u64>> =
            model.states.groups.iter().flatten().map(|(name, shape)| (name.as_str(), shape)).collect();
        if let Some(name) = shapes.keys().filter(|name| !self.parameters.contains_key(**name)).min() {
            let file = format_args!("{}{name}{}", UNIVERSAL.0, UNIVERSAL.1);
            return Err(Problem::of_file(
                file,
                "not there: the conversion did not finish, or not all files were copied",
            ));
        }
        // Buffers may be there too, in f32 whatever they are; the module's state has them as they are.
        let is_buffer =
            |name: &String| model.states.buffers.contains(name) && model.module.iter().any(|(found, _)| found == name);
        for (name, (file, saved)) in self.parameters.iter().filter(|(name, _)| !is_buffer(name)) {
            let tensor = &saved.tensor;
            let shape = shapes.get(name.as_str()).map_or(&tensor.shape, |shape| *shape);
            if *shape == tensor.shape {
                tensors.insert(name.clone(), assembled_whole(*file, saved));
                continue;
            }
            let shaped = (name.clone(), shape.clone());
            let count = self.elements(&shaped)?;
            let (dtype, segment) = flat(*file, saved, name).map_err(|what| self.job.fault(*file, what))?;
            let found = &tensor.shape;
            let what = format_args!("tensor {name:?}: expected {shape:?} by the model states, found {found:?}");
            self.job.ensure(segment.len == count, *file, what)?;
            self.add(&shaped, dtype, &[segment], tensors)?;
        }
        Ok(())
    }
}

/// The name of what the optimizer keeps of a parameter under a key; under none its master weights.
pub(super) fn kept_name((name, shape): &Shaped, key: &str) -> Shaped {
    let name = if key.is_empty() { name.clone() } else { format!("optimizer.state.{name}.{key}") };
    (name, shape.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_boxes_that_cover_it_in_order() {
        for shape in [vec![], vec![5], vec![3, 4], vec![2, 3, 4], vec![1, 5], vec![4, 1], vec![2, 2, 2, 3]] {
            let count: u64 = shape.iter().product();
            for low in 0..=count {
                for high in low..=count {
                    let mut found = vec![None; usize::try_from(count).unwrap()];
                    for part in interval_boxes(&shape, (low, high), (FileId(0), 100), 2) {
                        let elements: u64 = part.extents.iter().product();
                        for number in 0..elements {
                            let (mut rest, mut place, mut stride) = (number, 0, 1);
                            for axis in (0..shape.len()).rev() {
                                place += (part.origin[axis] + rest % part.extents[axis]) * stride;
                                rest /= part.extents[axis];
                                stride *= shape[axis];
                            }
                            let slot = &mut found[usize::try_from(place).unwrap()];
                            assert_eq!(*slot, None, "{shape:?} {low}..{high}");
                            *slot = Some(part.start + number * 2);
                        }
                    }
                    for (place, byte) in (0..).zip(found) {
                        let expected = (low..high).contains(&place).then(|| 100 + (place - low) * 2);
                        assert_eq!(byte, expected, "{shape:?} {low}..{high} at {place}");
                    }
                }
            }
        }
    }
}
