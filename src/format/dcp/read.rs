//! A reader of `torch.distributed.checkpoint` directories: which tensors there are, and where their chunks are.
//!
//! There are two kinds. The classic one has a `.metadata` file, the pickle of a `Metadata` object, and `.distcp` files; each
//! chunk is a segment of such a file and is an archive of `torch.save`, which [`torch::read`](crate::torch::read) reads. The other has
//! safetensors files alone: each tensor of each file is a chunk, and the file's `__metadata__` says where in the whole tensor.
//!
//! No code of the pickle runs, and only the classes that torch itself writes are read. The chunks of a tensor are those that
//! the metadata has; whether they cover it is for the caller to see.

use std::collections::{BTreeMap, HashMap, HashSet};

use ckfs_host::RelativePath;
use ckfs_tensor::{DType, RANK_MAX};
use serde::Deserialize;

use super::{
    super::{
        json::{self, JsonForm},
        pickle::read::{self as unpickle, Id, Limits, Object, PickleValue, Unpickled},
        safetensors::Header,
        torch::state::{dtype_of, is_listed},
    },
    write::DcpSegment,
};
use crate::FormatError;

/// Name of the description of the classic kind.
pub const METADATA: &str = ".metadata";

/// Member of a safetensors file's `__metadata__` that says where its tensors are in the whole ones.
pub const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// The key of the number of files of shards, in the metadata of files that ckfs makes.
pub const FILES_OF_SHARDS: &str = "CKFS_FILES";

const CLASSES: &str = "torch.distributed.checkpoint.metadata";
/// Where torch had two of these classes before 2.3.
const OLDER_CLASSES: &str = "torch.distributed._shard.sharded_tensor.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

/// A box of a tensor and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DcpChunk {
    /// First element along each axis.
    pub offsets: Vec<u64>,
    /// Extent along each axis.
    pub sizes: Vec<u64>,
    /// Where it is: an archive in the classic kind, the elements in row-major order in the other.
    pub segment: DcpSegment,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DcpTensor {
    /// Its full name, with dots.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Extents in elements.
    pub shape: Vec<u64>,
    /// Its chunks, in the order of the metadata.
    pub chunks: Vec<DcpChunk>,
}

/// What is no tensor: a pickled object of any kind, which is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DcpObject {
    /// Its full name, with dots.
    pub name: String,
    /// Where it is.
    pub segment: DcpSegment,
}

/// A directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DcpState {
    /// The files, relative to the directory; a [`DcpSegment`] has a number of these.
    pub files: Vec<String>,
    /// The tensors, in the order of the metadata.
    pub tensors: Vec<DcpTensor>,
    /// What is no tensor.
    pub objects: Vec<DcpObject>,
    /// The keys on the way to a name, where the saver's state was nested. Keys may have dots. Numbers are places in lists.
    pub paths: Vec<(String, Vec<String>)>,
    /// Whether some say that they are not the whole.
    pub has_parts: bool,
    /// Whether some parts do not say what shape the whole has, so that the last parts may be missing.
    pub lacks_shapes: bool,
}

/// Whether the metadata may name a class or function.
fn is_allowed(module: &str, name: &str) -> bool {
    const LISTED: [(&str, &str); 8] = [
        (
            CLASSES,
            "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta \
             _MEM_FORMAT_ENCODING",
        ),
        (FILESYSTEM, "_StorageInfo"),
        (OLDER_CLASSES, "TensorProperties MEM_FORMAT_ENCODING"),
        // The plans by which Megatron-Core has saved; nothing is done with them.
        ("torch.distributed.checkpoint.planner", "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        // Where the checkpoint was written; nothing is done with it.
        ("pathlib pathlib._local", "PosixPath WindowsPath PurePosixPath PureWindowsPath"),
    ];
    is_listed(&LISTED, module, name) || module == "torch" && dtype_of(name).is_some()
}

/// Place of a chunk in the whole: none for what is no tensor.
type Offsets = Option<Vec<u64>>;

struct Reader<'a> {
    pickle: &'a Unpickled,
    files: Vec<String>,
    file_numbers: HashMap<&'a str, u32>,
    /// By full name and offsets.
    segments: HashMap<(&'a str, Offsets), DcpSegment>,
}

impl DcpState {
    /// Reads a [`METADATA`] file.
    ///
    /// # Errors
    /// [`FormatError`], the first fault that is met.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let pickle = unpickle::read(bytes, Limits::default(), &is_allowed)?;
        let mut reader =
            Reader { pickle: &pickle, files: Vec::new(), file_numbers: HashMap::new(), segments: HashMap::new() };
        let root = reader.state(pickle.root(), CLASSES, "Metadata", "metadata")?;
        reader.read_segments(reader.member(root, "storage_data", "metadata")?)?;
        let mut state = Self::default();
        let described = reader.items(reader.member(root, "state_dict_metadata", "metadata")?, "state_dict_metadata")?;
        let mut names = HashSet::with_capacity(described.len());
        for (name, description) in described {
            let name = reader.text(*name, "name of a tensor")?;
            if !names.insert(name) {
                return Err(twice(name));
            }
            if reader.object(*description, CLASSES, "BytesStorageMetadata").is_some() {
                let segment = reader.segments.remove(&(name, None));
                let segment = segment.ok_or_else(|| no_data(name, &[]))?;
                state.objects.push(DcpObject { name: name.to_owned(), segment });
            } else {
                state.tensors.push(reader.tensor(name, *description)?);
            }
        }
        if let Some((name, _)) = reader.segments.keys().min() {
            let surplus = reader.segments.len();
            return Err(FormatError(format!("{name:?}: {surplus} stored segments belong to no chunk")));
        }
        state.paths = reader.paths(pickle.item(root, "planner_data"));
        state.files = reader.files;
        Ok(state)
    }

    /// The directory of these safetensors files, each with its path relative to the directory. A file that does not say where
    /// its tensors are holds whole ones.
    ///
    /// # Errors
    /// [`FormatError`], the first fault that is met.
    pub fn of_safetensors<'a>(files: impl IntoIterator<Item = (&'a str, &'a Header)>) -> Result<Self, FormatError> {
        let mut state = Self::default();
        let mut numbers: HashMap<String, usize> = HashMap::new();
        for (number, (path, header)) in files.into_iter().enumerate() {
            let file = u32::try_from(number).map_err(|_| malformed("number of files", "32 bits", number))?;
            state.files.push(check_path(path)?.to_owned());
            let offsets = saved_offsets(header)?;
            for tensor in header.tensors() {
                let zeros = || vec![0; tensor.shape.len()];
                let (offsets, whole) = match &offsets {
                    None => (zeros(), None),
                    Some(offsets) => {
                        let saved = offsets.get(tensor.name).ok_or_else(|| {
                            malformed(&format!("{path}: {SHARDING_INFO}"), "each tensor of the file", "another")
                        })?;
                        state.lacks_shapes |= saved.global_shape.is_none();
                        state.has_parts |= saved.global_shape.as_ref().is_some_and(|whole| whole != tensor.shape);
                        (saved.saved_offsets.clone(), saved.global_shape.clone())
                    }
                };
                let (name, sizes) = (tensor.name.to_owned(), tensor.shape.to_vec());
                let what = || format!("tensor {name:?}: saved_offsets");
                if offsets.len() != sizes.len() {
                    return Err(malformed(&what(), "as many offsets as axes", offsets.len()));
                }
                let ends = offsets.iter().zip(&sizes).map(|(offset, size)| offset.checked_add(*size));
                let ends = ends.collect::<Option<Vec<u64>>>();
                let mut ends = ends.ok_or_else(|| malformed(&what(), "offsets that 64 bits can count", "more"))?;
                if let Some(whole) = whole {
                    if whole.len() != ends.len() || whole.iter().zip(&ends).any(|(whole, end)| whole < end) {
                        let what = format!("tensor {name:?}: global_shape of {path}");
                        return Err(malformed(&what, "a shape that holds the part", format!("{whole:?}")));
                    }
                    ends = whole;
                }
                let segment = DcpSegment { file, offset: tensor.start, len: tensor.end - tensor.start };
                let chunk = DcpChunk { offsets, sizes, segment };
                if let Some(number) = numbers.get(&name) {
                    state.tensors[*number].extend(tensor.dtype, &ends, chunk)?;
                } else {
                    numbers.insert(name.clone(), state.tensors.len());
                    state.tensors.push(DcpTensor { name, dtype: tensor.dtype, shape: ends, chunks: vec![chunk] });
                }
            }
        }
        Ok(state)
    }
}

impl DcpTensor {
    /// Adds a chunk of another file, which ends here.
    fn extend(&mut self, dtype: DType, ends: &[u64], chunk: DcpChunk) -> Result<(), FormatError> {
        if (dtype, ends.len()) != (self.dtype, self.shape.len()) {
            let show = |dtype: DType, rank: usize| format!("{dtype} of {rank} axes");
            let (name, first, second) = (&self.name, show(self.dtype, self.shape.len()), show(dtype, ends.len()));
            return Err(FormatError(format!("tensor {name:?}: {first} in one file, {second} in another")));
        }
        self.shape.iter_mut().zip(ends).for_each(|(extent, end)| *extent = (*extent).max(*end));
        self.chunks.push(chunk);
        Ok(())
    }
}

fn malformed(what: &str, expected: &str, found: impl std::fmt::Display) -> FormatError {
    FormatError(format!("{what}: expected {expected}, found {found}"))
}

/// A type or layout that has no place here.
fn unsupported(name: &str, found: impl std::fmt::Display) -> FormatError {
    FormatError(format!("tensor {name:?}: {found} is not supported"))
}

fn twice(name: &str) -> FormatError {
    FormatError(format!("tensor {name:?} is described twice"))
}

fn no_data(name: &str, offsets: &[u64]) -> FormatError {
    FormatError(format!("tensor {name:?}: the chunk at {offsets:?} is in no file"))
}

fn check_path(path: &str) -> Result<&str, FormatError> {
    let outside = |flaw| FormatError(format!("file {path:?}: expected a path inside the checkpoint, but {flaw}"));
    RelativePath::parse(path).map(RelativePath::as_str).map_err(outside)
}

/// Where a tensor of a file is in the whole.
#[derive(Deserialize)]
struct Saved {
    saved_offsets: Vec<u64>,
    /// The shape of the whole. Torch's own files do not say it.
    global_shape: Option<Vec<u64>>,
}

/// Where each tensor of a file is in the whole, if the file says so.
fn saved_offsets(header: &Header) -> Result<Option<BTreeMap<String, Saved>>, FormatError> {
    let Some((_, text)) = header.metadata().iter().find(|(key, _)| key == SHARDING_INFO) else { return Ok(None) };
    json::parse(text.as_bytes(), JsonForm::Rows)
        .map(Some)
        .map_err(|error| malformed(SHARDING_INFO, "offsets by name", error))
}

impl<'a> Reader<'a> {
    fn wrong(&self, id: Id, what: &str, expected: &'static str) -> FormatError {
        malformed(what, expected, self.pickle.value(id).kind())
    }

    /// An object of this class.
    fn object(&self, id: Id, module: &str, class: &str) -> Option<&'a Object> {
        let call = self.pickle.call(id).filter(|(name, _, _)| name.module == module && name.name == class);
        call.map(|(_, _, object)| object)
    }

    /// The state of an object of this class.
    fn state(&self, id: Id, module: &str, class: &'static str, what: &str) -> Result<Id, FormatError> {
        self.object(id, module, class).and_then(|object| object.state).ok_or_else(|| self.wrong(id, what, class))
    }

    fn member(&self, state: Id, name: &'static str, what: &str) -> Result<Id, FormatError> {
        self.pickle.item(state, name).ok_or_else(|| malformed(what, name, "none"))
    }

    fn items(&self, id: Id, what: &str) -> Result<&'a [(Id, Id)], FormatError> {
        self.pickle.items(id).ok_or_else(|| self.wrong(id, what, "a dict"))
    }

    fn text(&self, id: Id, what: &str) -> Result<&'a str, FormatError> {
        self.pickle.text(id).ok_or_else(|| self.wrong(id, what, "a str"))
    }

    fn natural(&self, id: Id, what: &str) -> Result<u64, FormatError> {
        self.pickle.natural(id).ok_or_else(|| self.wrong(id, what, "a whole number of 64 bits"))
    }

    /// The numbers of a `torch.Size`, or of a list that stands for one.
    fn size(&self, id: Id, what: &str) -> Result<Vec<u64>, FormatError> {
        let numbers = self.pickle.size(id);
        let numbers = self.pickle.sequence(numbers).ok_or_else(|| self.wrong(id, what, "a torch.Size"))?;
        if numbers.len() > RANK_MAX {
            return Err(malformed(what, "at most 8 axes", numbers.len()));
        }
        numbers.iter().map(|number| self.natural(*number, what)).collect()
    }

    /// Reads where everything is.
    fn read_segments(&mut self, storage_data: Id) -> Result<(), FormatError> {
        for (index, info) in self.items(storage_data, "storage_data")? {
            let index = self.state(*index, CLASSES, "MetadataIndex", "key of storage_data")?;
            let name = self.text(self.member(index, "fqn", "MetadataIndex")?, "fqn")?;
            let what = format!("storage_data of {name:?}");
            let offsets = self.pickle.item(index, "offset").filter(|id| *self.pickle.value(*id) != PickleValue::None);
            let offsets = offsets.map(|id| self.size(id, &what)).transpose()?;
            let info = self.state(*info, FILESYSTEM, "_StorageInfo", &what)?;
            let is_none = |id: Id| {
                *self.pickle.value(id) == PickleValue::None || self.pickle.sequence(id).is_some_and(<[_]>::is_empty)
            };
            if !self.pickle.item(info, "transform_descriptors").is_none_or(is_none) {
                return Err(unsupported(name, "a transformed segment (compressed or encrypted by an extension)"));
            }
            let path = self.text(self.member(info, "relative_path", &what)?, &what)?;
            let file = self.file(path)?;
            let offset = self.natural(self.member(info, "offset", &what)?, &what)?;
            let len = self.natural(self.member(info, "length", &what)?, &what)?;
            if offset.checked_add(len).is_none() {
                return Err(malformed(&what, "an end that fits 64 bits", format!("{len} bytes at {offset}")));
            }
            if self.segments.insert((name, offsets), DcpSegment { file, offset, len }).is_some() {
                return Err(twice(name));
            }
        }
        Ok(())
    }

    /// The number of a file.
    fn file(&mut self, path: &'a str) -> Result<u32, FormatError> {
        if let Some(number) = self.file_numbers.get(path) {
            return Ok(*number);
        }
        let number = u32::try_from(self.files.len()).map_err(|_| malformed("files", "32 bits", self.files.len()))?;
        self.files.push(check_path(path)?.to_owned());
        self.file_numbers.insert(path, number);
        Ok(number)
    }

    fn tensor(&mut self, name: &'a str, description: Id) -> Result<DcpTensor, FormatError> {
        let what = format!("tensor {name:?}");
        let state = self.state(description, CLASSES, "TensorStorageMetadata", &what)?;
        let dtype = self.dtype(name, self.member(state, "properties", &what)?)?;
        let shape = self.size(self.member(state, "size", &what)?, &what)?;
        let listed = self.member(state, "chunks", &what)?;
        let listed = self.pickle.sequence(listed).ok_or_else(|| self.wrong(listed, &what, "a list of chunks"))?;
        let mut chunks = Vec::with_capacity(listed.len());
        for chunk in listed {
            let state = self.state(*chunk, CLASSES, "ChunkStorageMetadata", &what)?;
            let offsets = self.size(self.member(state, "offsets", &what)?, &what)?;
            let sizes = self.size(self.member(state, "sizes", &what)?, &what)?;
            let ends = offsets.iter().zip(&sizes).map(|(offset, size)| offset.checked_add(*size));
            let fits = ends.zip(&shape).all(|(end, extent)| end.is_some_and(|end| end <= *extent));
            if !fits || offsets.len() != shape.len() || sizes.len() != shape.len() {
                let what = format!("a chunk of shape {sizes:?} at {offsets:?} is outside shape {shape:?}");
                return Err(FormatError(format!("tensor {name:?}: {what}")));
            }
            match self.segments.remove(&(name, Some(offsets.clone()))) {
                Some(segment) => chunks.push(DcpChunk { offsets, sizes, segment }),
                // A rank without a part of the tensor may have nothing to save.
                None if sizes.contains(&0) => {}
                None => return Err(no_data(name, &offsets)),
            }
        }
        Ok(DcpTensor { name: name.to_owned(), dtype, shape, chunks })
    }

    /// The type of elements, from a `TensorProperties`.
    fn dtype(&self, name: &str, properties: Id) -> Result<DType, FormatError> {
        let what = format!("tensor {name:?}: properties");
        let older = self.state(properties, OLDER_CLASSES, "TensorProperties", &what);
        let state = older.or_else(|_| self.state(properties, CLASSES, "TensorProperties", &what))?;
        let members = self.pickle.sequence(state).ok_or_else(|| self.wrong(state, &what, "a tuple"))?;
        let [dtype, layout, ..] = members else { return Err(malformed(&what, "type and layout", members.len())) };
        let layout = match self.pickle.call(*layout) {
            Some((_, [word], _)) => self.text(*word, &what)?,
            Some(_) | None => return Err(self.wrong(*layout, &what, "a layout")),
        };
        if layout != "torch.strided" {
            return Err(unsupported(name, format_args!("layout {layout:?}")));
        }
        let PickleValue::Global(global) = self.pickle.value(*dtype) else {
            return Err(self.wrong(*dtype, &what, "a dtype"));
        };
        dtype_of(&global.name).filter(|_| global.module == "torch").ok_or_else(|| unsupported(name, global))
    }

    /// The keys on the way to each name, if the planner has written them. What else a planner may have written is passed over.
    fn paths(&self, planner_data: Option<Id>) -> Vec<(String, Vec<String>)> {
        let items = planner_data.and_then(|id| self.pickle.items(id)).unwrap_or_default();
        let key = |id: &Id| {
            let number = || self.pickle.natural(*id).map(|number| number.to_string());
            self.pickle.text(*id).map(str::to_owned).or_else(number)
        };
        let path = |(name, path): &(Id, Id)| {
            let keys = self.pickle.sequence(*path)?.iter().map(key).collect::<Option<_>>()?;
            Some((self.pickle.text(*name)?.to_owned(), keys))
        };
        items.iter().filter_map(path).collect()
    }
}

#[cfg(test)]
mod tests;
