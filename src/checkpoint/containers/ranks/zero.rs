//! Checkpoints of DeepSpeed: ZeRO 1, 2 and 3, and universal ones. The master weights are read, as `zero_to_fp32` reads them.
//!
//! A parameter is an interval of a flat vector that is spread over the files of ranks. An interval of a tensor in row-major order is a few
//! boxes ([`interval_boxes`]), so that nothing is put together before it is read.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use ckfs_format::torch::{
    read::{OpenedArchive, SavedTensor},
    zero::{self, ModelStates, OptimizerStates, Shaped},
};
use ckfs_source::FileId;
use ckfs_tensor::{DType, PerAxis};

use super::super::super::{
    amount::shown,
    archive::{self, ArchiveSpan},
    container::{Container, Contents, LeftOut},
    folder::PinnedFiles,
    mosaic::{Missing, MosaicBuilder, StoredBox},
    problem::Problems,
    table::TensorTable,
};

/// What a file of a checkpoint of DeepSpeed is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ZeroFile {
    /// Model states: of one rank with ZeRO 3, else of all; and the rank of tensor parallelism.
    Model(Option<u64>, u64),
    /// The optimizer's partitions of a rank.
    Optimizer(u64, u64),
    /// A part of a model that is spread in a way that is not read: stages of a pipeline, experts.
    Other,
}

/// How the file of a parameter of a universal checkpoint ends.
const UNIVERSAL: &str = "/fp32.pt";

/// Where these are.
const UNIVERSAL_DIRECTORY: &str = "zero/";

impl ZeroFile {
    /// What a path is that begins with `below`.
    pub(crate) fn of(path: &str, below: &str) -> Option<Self> {
        let name = path.strip_prefix(below).filter(|name| !name.contains('/'))?;
        let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten();
        if let Some(stem) = name.strip_suffix("_model_states.pt") {
            if let Some(mp) = stem.strip_prefix("mp_rank_").and_then(number) {
                return Some(Self::Model(None, mp));
            }
            let ranks = stem.strip_prefix("zero_pp_rank_").and_then(|rest| rest.split_once("_mp_rank_"));
            if let Some((rank, mp)) = ranks.and_then(|(rank, mp)| Some((number(rank)?, number(mp)?))) {
                return Some(Self::Model(Some(rank), mp));
            }
            return Some(Self::Other);
        }
        if let Some(stem) = name.strip_suffix("_optim_states.pt") {
            let stem = ["bf16_", "fp16_"].iter().find_map(|prefix| stem.strip_prefix(prefix)).unwrap_or(stem);
            let ranks = stem.strip_prefix("zero_pp_rank_").and_then(|rest| rest.split_once("_mp_rank_"));
            let ranks = ranks.and_then(|(rank, mp)| Some((number(rank)?, number(mp)?)));
            return Some(ranks.map_or(Self::Other, |(rank, mp)| Self::Optimizer(rank, mp)));
        }
        (name.starts_with("layer_") && name.ends_with("-model_states.pt")).then_some(Self::Other)
    }

    /// The parameter whose master weights a file of a universal checkpoint holds.
    pub(crate) fn parameter<'a>(path: &'a str, below: &str) -> Option<&'a str> {
        path.strip_prefix(below)?
            .strip_prefix(UNIVERSAL_DIRECTORY)?
            .strip_suffix(UNIVERSAL)
            .filter(|name| !name.is_empty())
    }
}

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
#[derive(Debug, Default)]
struct Flat {
    segments: Vec<Segment>,
    /// First element of each segment.
    starts: Vec<u64>,
    len: u64,
}

impl Flat {
    fn push(&mut self, segment: Segment) {
        self.segments.push(segment);
        self.starts.push(self.len);
        self.len = self.len.saturating_add(segment.len);
    }

    /// The parts of `len` elements from `start` on.
    fn parts(&self, start: u64, len: u64, element_bytes: u64) -> Vec<Segment> {
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
        if first < last || inner == 1 {
            let at = |element: u64| start + (element - low) * element_bytes;
            if first < last {
                boxes.push(boxed(shape, before.clone(), Some((first, last - first)), (file, at(first * inner))));
            }
            let inside = |row: u64| [before.as_slice(), &[row]].concat();
            if low < first * inner {
                todo.push((inside(first - 1), low % inner, inner, start));
            }
            if last * inner < high {
                todo.push((inside(last), 0, high % inner, at(last * inner)));
            }
        } else {
            // In one row, or over the border of two.
            let row = low / inner;
            let inside = |row: u64| [before.as_slice(), &[row]].concat();
            let border = ((row + 1) * inner).min(high);
            todo.push((inside(row), low % inner, low % inner + (border - low), start));
            todo.push((inside(row + 1), 0, high - border, start + (border - low) * element_bytes));
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

/// A tensor of one file, whole.
#[derive(Clone, Debug)]
struct Whole {
    file: FileId,
    saved: SavedTensor,
}

impl Whole {
    fn stored(&self) -> StoredBox {
        let (shape, strides) = (&self.saved.tensor.shape, &self.saved.tensor.strides);
        StoredBox {
            file: self.file,
            start: self.saved.span().start,
            origin: PerAxis::from_elem(0, shape.len()),
            extents: PerAxis::from_slice(shape),
            strides: PerAxis::from_slice(strides),
        }
    }

    /// As a part of a flat vector.
    fn flat(&self, what: &str) -> Result<(DType, Segment), String> {
        let tensor = &self.saved.tensor;
        let elements = tensor.shape.iter().product();
        let is_flat = tensor.shape.len() == 1 && (tensor.strides[0] == 1 || elements <= 1);
        if !is_flat || tensor.dtype.element_bytes().is_none() {
            return Err(format!("{what}: expected a flat vector, found {} {:?}", tensor.dtype, tensor.shape));
        }
        Ok((tensor.dtype, Segment { file: self.file, start: self.saved.span().start, len: elements }))
    }
}

/// What one file says.
enum Said {
    Model(ModelFile),
    Optimizer(OptimizerStates, Vec<SavedTensor>),
    /// A parameter of a universal checkpoint.
    Parameter(SavedTensor),
}

struct ModelFile {
    states: ModelStates,
    /// The tensors of `states.module` and of `states.frozen`.
    module: Vec<(String, SavedTensor)>,
    frozen: Vec<SavedTensor>,
    /// Members of the module that are no tensors.
    others: Vec<String>,
}

fn model_file(opened: &OpenedArchive) -> Result<Said, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let states = zero::model_states(&opened.pickle).map_err(|error| text(&error))?;
    let (mut module, mut others) = (Vec::new(), Vec::new());
    for (name, id) in &states.module {
        match opened.tensor(*id, name).map_err(|error| text(&error))? {
            Some(saved) => module.push((name.clone(), saved)),
            None => others.push(name.clone()),
        }
    }
    let mut frozen = Vec::with_capacity(states.frozen.len());
    for ((name, _), id) in &states.frozen {
        let found = opened.tensor(*id, name).map_err(|error| text(&error))?;
        frozen.push(found.ok_or_else(|| format!("frozen parameter {name:?}: expected a tensor"))?);
    }
    Ok(Said::Model(ModelFile { states, module, frozen, others }))
}

fn optimizer_file(opened: &OpenedArchive) -> Result<Said, String> {
    let states = zero::optimizer_states(&opened.pickle).map_err(|error| error.to_string())?;
    let mut flat = Vec::with_capacity(states.flat.len());
    for (number, id) in states.flat.iter().enumerate() {
        let name = format!("partition of group {number}");
        let found = opened.tensor(*id, &name).map_err(|error| error.to_string())?;
        flat.push(found.ok_or_else(|| format!("{name}: expected a tensor"))?);
    }
    Ok(Said::Optimizer(states, flat))
}

fn parameter_file(opened: &OpenedArchive, name: &str) -> Result<Said, String> {
    let root = opened.pickle.root();
    let id = opened.pickle.item(root, "param").unwrap_or(root);
    let found = opened.tensor(id, name).map_err(|error| error.to_string())?;
    found.map(Said::Parameter).ok_or_else(|| format!("tensor {name:?}: expected a tensor under \"param\""))
}

/// Reads the files of a checkpoint of ZeRO, or of a universal one.
pub(crate) fn read(files: &PinnedFiles<'_>, below: &str, problems: &mut Problems) -> Contents {
    let mut contents = Contents::new(Container::Ranks, TensorTable::default());
    contents.are_ranks = true;
    let mut kinds: Vec<(FileId, Option<ZeroFile>, Option<&str>)> = Vec::new();
    for id in files.ids() {
        let path = files.path(id);
        kinds.push((id, ZeroFile::of(path, below), ZeroFile::parameter(path, below)));
    }
    let items: Vec<ArchiveSpan> = kinds.iter().map(|(id, ..)| ArchiveSpan::whole(files.source, *id)).collect();
    let interpret = |number: usize, opened: &OpenedArchive| match kinds[number] {
        (_, _, Some(name)) => parameter_file(opened, name),
        (_, Some(ZeroFile::Optimizer(..)), _) => optimizer_file(opened),
        (_, Some(ZeroFile::Model(..) | ZeroFile::Other) | None, _) => model_file(opened),
    };
    let mut zero = Zero { files, models: BTreeMap::new(), optimizers: BTreeMap::new(), parameters: BTreeMap::new() };
    let mut failed = false;
    let mut again: Vec<(FileId, FileId)> = Vec::new();
    for ((id, kind, parameter), said) in
        kinds.iter().zip(archive::read_opened(files.source, &items, zero::is_allowed, &interpret))
    {
        match (said, kind, parameter) {
            (Ok(Said::Parameter(saved)), _, Some(name)) => {
                zero.parameters.insert((*name).to_owned(), Whole { file: *id, saved });
            }
            // Beside the whole parameters of a universal checkpoint, other ranks of tensor parallelism say nothing more.
            (Ok(Said::Model(file)), Some(ZeroFile::Model(rank, 0)), _) => {
                let of = zero.models.insert(rank.unwrap_or(0), (*id, file));
                again.extend(of.map(|(other, _)| (other, *id)));
            }
            (Ok(Said::Optimizer(states, flat)), Some(ZeroFile::Optimizer(rank, 0)), _) => {
                let of = zero.optimizers.insert(*rank, (*id, states, flat));
                again.extend(of.map(|(other, ..)| (other, *id)));
            }
            (Ok(_), ..) => {}
            (Err(message), ..) => {
                failed = true;
                problems.of_file(files.path(*id), message);
            }
        }
    }
    for (other, id) in again {
        failed = true;
        let message = format!(
            "of the same rank as {}: files of two saves, or of two stages of ZeRO, in one directory; leave those of one save in it",
            files.path(other)
        );
        problems.of_file(files.path(id), message);
    }
    let listed = files.files.iter().filter_map(|listed| ZeroFile::of(&listed.path, below));
    let checked = if failed { return contents } else { zero.check(listed) };
    let assembled = checked.and_then(|()| zero.assemble());
    let tensors = match assembled {
        Ok(tensors) => tensors,
        Err((file, message)) => {
            problems.of_file(file, message);
            return contents;
        }
    };
    let mut builder = MosaicBuilder::new(files.source, problems);
    for (name, (dtype, shape, boxes)) in tensors {
        builder.add(&name, dtype, &shape, boxes, Missing::Refused);
    }
    contents.table = builder.finish();
    contents.left_out = zero.left_out();
    contents.warnings.extend(zero.lacks_frozen().then(|| {
        "saved with exclude_frozen_parameters: tensors that were not trained are not here, and a model needs them from its base".to_owned()
    }));
    contents
}

type Tensors = BTreeMap<String, (DType, Vec<u64>, Vec<StoredBox>)>;

/// A file, and what is wrong with it.
type Fault = (String, String);

struct Zero<'a> {
    files: &'a PinnedFiles<'a>,
    /// By rank; that of all ranks is that of rank 0.
    models: BTreeMap<u64, (FileId, ModelFile)>,
    optimizers: BTreeMap<u64, (FileId, OptimizerStates, Vec<SavedTensor>)>,
    /// Those of a universal checkpoint.
    parameters: BTreeMap<String, Whole>,
}

impl Zero<'_> {
    /// Whether parameters that were not trained may have been left out. ZeRO 2 and 3 save the shapes of these, of none as well; ZeRO 1
    /// never does.
    fn lacks_frozen(&self) -> bool {
        let stages = self.models.values().map(|(_, model)| model.states.stage);
        let stage = stages.chain(self.optimizers.values().map(|(_, states, _)| Some(states.stage))).flatten().max();
        stage >= Some(2) && self.models.values().any(|(_, model)| model.states.says_no_frozen)
    }

    fn path(&self, file: FileId) -> String {
        self.files.path(file).to_owned()
    }

    /// Whether the files are those of one checkpoint of a kind that is read, and all of them.
    fn check(&self, listed: impl Iterator<Item = ZeroFile>) -> Result<(), Fault> {
        let all = "*_states.pt".to_owned();
        let mut ranks = BTreeSet::new();
        for file in listed {
            match file {
                ZeroFile::Other => {
                    let message = "stages of a pipeline or experts of DeepSpeed, which are not read: ds_to_universal.py puts them together";
                    return Err((all, message.to_owned()));
                }
                ZeroFile::Model(_, mp) | ZeroFile::Optimizer(_, mp) if mp > 0 && self.parameters.is_empty() => {
                    let message = "a model that is split over ranks (mp_rank_01), by what is in no file: ds_to_universal.py puts it together";
                    return Err((all, message.to_owned()));
                }
                ZeroFile::Optimizer(rank, _) => {
                    ranks.insert(rank);
                }
                ZeroFile::Model(..) => {}
            }
        }
        let Some((first, model)) = self.models.get(&0) else {
            let message = "expected the model states of rank 0, which name the parameters: the save did not finish, or not all files were copied";
            return Err(("*_model_states.pt".to_owned(), message.to_owned()));
        };
        if self.parameters.is_empty() && model.states.tensor_ranks.is_some_and(|ranks| ranks > 1) {
            let message = "a model that is split over ranks (mp_world_size), by what is in no file: ds_to_universal.py puts it together";
            return Err((self.path(*first), message.to_owned()));
        }
        for (file, other) in self.models.values() {
            if other.states.steps != model.states.steps {
                let (left, right) = (shown(model.states.steps), shown(other.states.steps));
                let message =
                    format!("step {right}, and {} has step {left}: they are of different saves", self.path(*first));
                return Err((self.path(*file), message));
            }
            // Which of them are others too is in the file of rank 0 only.
            if other.states.groups != model.states.groups {
                let message = format!("other parameters than {}", self.path(*first));
                return Err((self.path(*file), message));
            }
        }
        if self.parameters.is_empty() { self.check_optimizers() } else { Ok(()) }
    }

    fn check_optimizers(&self) -> Result<(), Fault> {
        let Some((file, first, _)) = self.optimizers.values().next() else {
            let message = "expected partitions of ranks: the save did not finish, or not all files were copied";
            return Err(("*_optim_states.pt".to_owned(), message.to_owned()));
        };
        let counts: BTreeSet<u64> = first.partitions.iter().copied().collect();
        let [count] = counts.into_iter().collect::<Vec<_>>()[..] else {
            let found = &first.partitions;
            let message = format!(
                "groups of {found:?} partitions: experts of DeepSpeed are not read: ds_to_universal.py puts them together"
            );
            return Err((self.path(*file), message));
        };
        let missing: Vec<String> = (0..count)
            .filter(|rank| !self.optimizers.contains_key(rank))
            .take(8)
            .map(|rank| rank.to_string())
            .collect();
        if !missing.is_empty() || self.optimizers.len() as u64 != count {
            let found = self.optimizers.len();
            let missing = if missing.is_empty() { "none".to_owned() } else { format!("rank {}", missing.join(", ")) };
            let message = format!(
                "expected the partitions of {count} ranks, found {found}; missing: {missing}: the save did not finish, files of another one are \
                 there, or not all were copied"
            );
            return Err(("*_optim_states.pt".to_owned(), message));
        }
        for (other, states, flat) in self.optimizers.values() {
            let (own, of_first) =
                ((states.stage, &states.partitions, flat.len()), (first.stage, &first.partitions, first.flat.len()));
            if own != of_first || states.paddings != first.paddings {
                let text = |(stage, partitions, vectors): (u64, &Vec<u64>, usize)| {
                    format!("ZeRO {stage} of {partitions:?} partitions in {vectors} vectors")
                };
                let message = format!("says {}, and {} says {}", text(own), self.path(*file), text(of_first));
                return Err((self.path(*other), message));
            }
        }
        Ok(())
    }

    fn assemble(&self) -> Result<Tensors, Fault> {
        let (file, model) = &self.models[&0];
        let mut tensors = Tensors::new();
        if self.parameters.is_empty() {
            let stage = self.optimizers.values().next().map_or(0, |(_, states, _)| states.stage);
            if stage == 3 {
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
            let whole = Whole { file: *file, saved: saved.clone() };
            tensors.insert(name.clone(), (saved.tensor.dtype, saved.tensor.shape.clone(), vec![whole.stored()]));
        }
        for (name, of) in &model.states.shared {
            if let Some(tensor) = tensors.get(of).cloned() {
                tensors.entry(name.clone()).or_insert(tensor);
            }
        }
        Ok(tensors)
    }

    /// The flat vector of these partitions.
    fn flat<'b>(&self, partitions: impl Iterator<Item = (FileId, &'b SavedTensor)>) -> Result<(DType, Flat), Fault> {
        let mut flat = Flat::default();
        let mut dtype = None;
        for (number, (file, saved)) in partitions.enumerate() {
            let whole = Whole { file, saved: saved.clone() };
            let (found, segment) =
                whole.flat(&format!("partition {number}")).map_err(|message| (self.path(file), message))?;
            if *dtype.get_or_insert(found) != found {
                return Err((self.path(file), format!("partitions of different types, {found} among them")));
            }
            flat.push(segment);
        }
        Ok((dtype.unwrap_or(DType::F32), flat))
    }

    /// Takes a parameter from these parts of flat vectors, which follow each other.
    fn add(&self, (name, shape): &Shaped, dtype: DType, parts: &[Segment], tensors: &mut Tensors) -> Result<(), Fault> {
        let element_bytes = dtype.element_bytes().unwrap_or(1);
        let mut boxes = Vec::new();
        let mut at = 0;
        for part in parts {
            boxes.extend(interval_boxes(shape, (at, at + part.len), (part.file, part.start), element_bytes));
            at += part.len;
        }
        if tensors.insert(name.clone(), (dtype, shape.clone(), boxes)).is_some() {
            return Err((self.path(self.models[&0].0), format!("parameter {name:?} is there twice")));
        }
        Ok(())
    }

    fn elements(&self, (name, shape): &Shaped) -> Result<u64, Fault> {
        let count = shape.iter().try_fold(1u64, |count, extent| count.checked_mul(*extent));
        let count = count.filter(|count| *count < 1 << 60);
        count.ok_or_else(|| (self.path(self.models[&0].0), format!("parameter {name:?}: a shape of {shape:?}")))
    }

    fn parameters_of_2(&self, model: &ModelFile, tensors: &mut Tensors) -> Result<(), Fault> {
        let (first, states, _) = self.optimizers.values().next().expect("they were counted");
        let groups = &model.states.groups;
        if states.flat.len() != groups.len() {
            let message =
                format!("expected partitions of {} groups of parameters, found {}", groups.len(), states.flat.len());
            return Err((self.path(*first), message));
        }
        // Partitions end at multiples of this, and the last of a group may be cut where the parameters end.
        let align = 2 * self.optimizers.len() as u64;
        for (number, group) in groups.iter().enumerate() {
            let (dtype, flat) = self.flat(self.optimizers.values().map(|(file, _, flat)| (*file, &flat[number])))?;
            let paddings = states.paddings.as_ref().and_then(|paddings| paddings.get(number));
            if let Some(paddings) = paddings.filter(|paddings| paddings.len() != group.len()) {
                let message = format!(
                    "expected {} paddings of parameters in group {number}, found {}",
                    group.len(),
                    paddings.len()
                );
                return Err((self.path(*first), message));
            }
            let mut at = 0u64;
            for (place, shaped) in group.iter().enumerate() {
                let count = self.elements(shaped)?;
                if at.saturating_add(count) > flat.len {
                    let (name, has) = (&shaped.0, flat.len);
                    let message = format!(
                        "group {number} has {has} elements on all ranks, and parameter {name:?} needs those from {at} to {}",
                        at.saturating_add(count)
                    );
                    return Err((self.path(*first), message));
                }
                self.add(shaped, dtype, &flat.parts(at, count, dtype.element_bytes().unwrap_or(1)), tensors)?;
                // Paddings of any size are in the file: an end beyond all numbers is beyond the partitions, too.
                at = at.saturating_add(count).saturating_add(paddings.map_or(0, |paddings| paddings[place]));
            }
            if at.div_ceil(align) != flat.len.div_ceil(align) {
                let message = format!(
                    "group {number}: its parameters have {at} elements, its partitions {}: they are not of the same parameters",
                    flat.len
                );
                return Err((self.path(*first), message));
            }
        }
        Ok(())
    }

    fn parameters_of_3(&self, model: &ModelFile, tensors: &mut Tensors) -> Result<(), Fault> {
        let ranks = self.optimizers.len() as u64;
        let mut flats = Vec::new();
        let mut dtype = DType::F32;
        for (file, _, flat) in self.optimizers.values() {
            let (found, flat) = self.flat(flat.iter().map(|saved| (*file, saved)))?;
            if flats.last().is_some_and(|last: &Flat| last.len != flat.len) || (!flats.is_empty() && found != dtype) {
                let message =
                    format!("partitions of {} elements of {found}, others than those of the ranks before", flat.len);
                return Err((self.path(*file), message));
            }
            dtype = found;
            flats.push(flat);
        }
        let element_bytes = dtype.element_bytes().unwrap_or(1);
        let (first, ..) = self.optimizers.values().next().expect("they were counted");
        let len = flats[0].len;
        let mut at = 0u64;
        for shaped in model.states.groups.iter().flatten() {
            let count = self.elements(shaped)?;
            let each = count.div_ceil(ranks);
            if at.saturating_add(each) > len {
                let message = format!(
                    "partitions of {len} elements, and parameter {:?} needs those from {at} to {}",
                    shaped.0,
                    at + each
                );
                return Err((self.path(*first), message));
            }
            let mut parts = Vec::new();
            for (rank, flat) in (0..).zip(&flats) {
                let left = count.saturating_sub(each * rank).min(each);
                parts.extend(flat.parts(at, left, element_bytes));
            }
            self.add(shaped, dtype, &parts, tensors)?;
            at += each;
        }
        if at != len {
            let message = format!(
                "the parameters have {at} elements on each rank, the partitions {len}: they are not of the same parameters"
            );
            return Err((self.path(*first), message));
        }
        Ok(())
    }

    /// Parameters that the optimizer has not: whole in the file of rank 0, or a part in that of each rank.
    fn frozen(&self, model: &ModelFile, tensors: &mut Tensors) -> Result<(), Fault> {
        let (first, _) = self.models[&0];
        let is_parted = self.files.path(first).contains("zero_pp_rank_");
        let ranks = self.models.keys().max().map_or(0, |rank| rank + 1);
        let expected = self.optimizers.len() as u64;
        let whole = ranks == self.models.len() as u64 && (expected == 0 || ranks == expected);
        if is_parted && !model.frozen.is_empty() && !whole {
            let message = format!(
                "expected the model states of {} ranks, which have parts of parameters that are not trained, found {}",
                expected.max(ranks),
                self.models.len()
            );
            return Err(("*_model_states.pt".to_owned(), message));
        }
        for (number, (shaped, _)) in model.states.frozen.iter().enumerate() {
            if tensors.contains_key(&shaped.0) {
                continue;
            }
            if !is_parted {
                let whole = Whole { file: first, saved: model.frozen[number].clone() };
                let tensor = &whole.saved.tensor;
                if tensor.shape != shaped.1 {
                    let (name, found) = (&shaped.0, &tensor.shape);
                    let message = format!("frozen parameter {name:?}: expected {:?}, found {found:?}", shaped.1);
                    return Err((self.path(first), message));
                }
                tensors.insert(shaped.0.clone(), (tensor.dtype, shaped.1.clone(), vec![whole.stored()]));
                continue;
            }
            for (file, other) in self.models.values() {
                if other.states.frozen.get(number).map(|(shaped, _)| shaped) != Some(shaped) {
                    return Err((self.path(*file), format!("other frozen parameters than {}", self.path(first))));
                }
            }
            let (dtype, flat) = self.flat(self.models.values().map(|(file, model)| (*file, &model.frozen[number])))?;
            let count = self.elements(shaped)?;
            if flat.len < count {
                let message = format!(
                    "frozen parameter {:?}: expected {count} elements on all ranks, found {}",
                    shaped.0, flat.len
                );
                return Err((self.path(first), message));
            }
            self.add(shaped, dtype, &flat.parts(0, count, dtype.element_bytes().unwrap_or(1)), tensors)?;
        }
        Ok(())
    }

    /// The parameters of a universal checkpoint, each whole in a file, flat or in its shape.
    fn universal(&self, model: &ModelFile, tensors: &mut Tensors) -> Result<(), Fault> {
        let shapes: HashMap<&str, &Vec<u64>> =
            model.states.groups.iter().flatten().map(|(name, shape)| (name.as_str(), shape)).collect();
        if let Some(name) = shapes.keys().filter(|name| !self.parameters.contains_key(**name)).min() {
            let file = format!("{UNIVERSAL_DIRECTORY}{name}{UNIVERSAL}");
            return Err((file, "not there: the conversion did not finish, or not all files were copied".to_owned()));
        }
        // Buffers may be there too, in f32 whatever they are; the module's state has them as they are.
        let is_buffer =
            |name: &String| model.states.buffers.contains(name) && model.module.iter().any(|(found, _)| found == name);
        for (name, whole) in self.parameters.iter().filter(|(name, _)| !is_buffer(name)) {
            let tensor = &whole.saved.tensor;
            let shape = shapes.get(name.as_str()).map_or(&tensor.shape, |shape| *shape);
            if *shape == tensor.shape {
                tensors.insert(name.clone(), (tensor.dtype, shape.clone(), vec![whole.stored()]));
                continue;
            }
            let shaped = (name.clone(), shape.clone());
            let count = self.elements(&shaped)?;
            let (dtype, segment) = whole.flat(name).map_err(|message| (self.path(whole.file), message))?;
            if segment.len != count {
                let message =
                    format!("tensor {name:?}: expected {shape:?} by the model states, found {:?}", tensor.shape);
                return Err((self.path(whole.file), message));
            }
            self.add(&shaped, dtype, &[segment], tensors)?;
        }
        Ok(())
    }

    fn left_out(&self) -> Vec<LeftOut> {
        let others = self.models.get(&0).map_or(&[][..], |(_, model)| &model.others);
        others.iter().map(|name| LeftOut { name: name.clone(), kind: "no tensor".to_owned() }).collect()
    }
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

    #[test]
    fn names_say_what_a_file_is() {
        let of = |path: &str| ZeroFile::of(path, "global_step2/");
        assert_eq!(of("global_step2/mp_rank_00_model_states.pt"), Some(ZeroFile::Model(None, 0)));
        assert_eq!(of("global_step2/zero_pp_rank_3_mp_rank_00_model_states.pt"), Some(ZeroFile::Model(Some(3), 0)));
        assert_eq!(
            of("global_step2/bf16_zero_pp_rank_12_mp_rank_01_optim_states.pt"),
            Some(ZeroFile::Optimizer(12, 1))
        );
        assert_eq!(of("global_step2/layer_01-model_00-model_states.pt"), Some(ZeroFile::Other));
        assert_eq!(of("global_step2/layer_0_expert_3_mp_rank_00_model_states.pt"), Some(ZeroFile::Other));
        assert_eq!(of("global_step2/expp_rank_0_mp_rank_00_optim_states.pt"), Some(ZeroFile::Other));
        assert_eq!(of("global_step3/mp_rank_00_model_states.pt"), None);
        assert_eq!(ZeroFile::parameter("u/zero/a.weight/fp32.pt", "u/"), Some("a.weight"));
        assert_eq!(ZeroFile::parameter("u/zero/a.weight/exp_avg.pt", "u/"), None);
    }
}
