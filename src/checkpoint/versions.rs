//! Versions of weights that a run publishes as differences, each from the version before it.
//!
//! ```text
//! RUN/weight_v000001/   a difference from --base MODEL
//! RUN/weight_v000002/   a difference from version 1, or a whole repository
//! ```
//!
//! A version is that of its newest whole version, or the base, with all differences since. Its tensors are where the base's are,
//! but those that differ: these are files that the source decodes ([`DeltaTensor`]). Nothing is changed in place.

use std::collections::{BTreeMap, HashMap};

use ckfs_format::{delta::DeltaFormat, safetensors::Header};
use ckfs_source::{ByteSpan, FileId, Opened, Source};
use ckfs_tensor::{DType, TensorId};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde_json::Value;

use super::{
    choose::{INDEX_SUFFIX, is_safetensors},
    delta::{DeltaTensor, Difference},
    header::read_header,
    index::Index,
    json,
    orbax::DecodedFile,
    problem::{CheckpointError, Problem, Problems},
    runs::numbered,
    table::{RowPlace, TensorTable},
    tree::{OpenTree, below, directories, file_names, has},
};

/// The differences that make a version of a base.
pub(super) struct Versions {
    /// The source of the base.
    pub(super) base: String,
    /// The files of all differences, in their order.
    pub(super) opened: Vec<Opened>,
    /// Which version the base must be; 0 if it need not say.
    base_version: u64,
    /// The differences, by version.
    steps: Vec<Version>,
}

/// The differences of one version.
struct Version {
    number: u64,
    directory: String,
    format: DeltaFormat,
    /// Weight files.
    files: Vec<String>,
    /// Tensors, each with the index of its file.
    tensors: HashMap<String, u32>,
}

/// A version as an index has it: digits, or a number.
fn version_in(metadata: &Value, key: &str) -> Result<u64, String> {
    let found = &metadata[key];
    let number = found.as_u64().or_else(|| found.as_str()?.parse().ok());
    number.ok_or_else(|| format!("{key}: expected a number of a version, found {found}"))
}

impl Versions {
    /// The versions that make that in directory `name` of a run. `base` is the user's base.
    ///
    /// # Errors
    /// A version that another one builds on is not there, or what is wrong with one.
    pub(super) fn find(
        (label, run, name): (&str, &str, &str),
        tree: &dyn OpenTree,
        base: Option<&str>,
    ) -> Result<Self, CheckpointError> {
        let of_name = numbered(name);
        let mut all: BTreeMap<u64, String> = BTreeMap::new();
        for other in directories(&tree.list("")?) {
            if let Some((prefix, number)) = numbered(other)
                && of_name.is_some_and(|(own, _)| own == prefix)
            {
                all.insert(number, other.to_owned());
            }
        }
        let mut versions = Self { base: String::new(), opened: Vec::new(), base_version: 0, steps: Vec::new() };
        let mut directory = name.to_owned();
        loop {
            let refused = |what: String| CheckpointError::of_file(label, &directory, what);
            let Some((step, base_version)) = Version::read(tree, &directory)? else {
                versions.base = format!("{run}/{directory}");
                break;
            };
            let number = step.number;
            if let Some((_, named)) = numbered(&directory).filter(|(_, named)| *named != number) {
                return Err(refused(format!(
                    "version: expected {named:06}, as its directory is called, found {number:06}"
                )));
            }
            versions.steps.push(step);
            let before = all.range(..number).next_back();
            match before {
                Some((before, found)) if *before == base_version => {
                    directory.clone_from(found);
                    continue;
                }
                Some((before, _)) if all.contains_key(&base_version) || base_version == 0 => {
                    return Err(refused(format!(
                        "base_version: expected {before:06}, the version before it, found {base_version:06}"
                    )));
                }
                Some((before, _)) => {
                    return Err(refused(format!(
                        "builds on version {base_version:06}, which is not in {run} (the one before it there is {before:06}): its \
                         tensors cannot be made without it; publish a whole version"
                    )));
                }
                None => {}
            }
            let base = base.ok_or_else(|| {
                refused(format!(
                    "a published weight delta (delta_encoding {:?}): version {number:06} as differences from version {base_version:06}, \
                     and no weights by itself; --base MODEL gives the model that the run began with",
                    versions.steps[versions.steps.len() - 1].format.encoding()
                ))
            })?;
            (versions.base, versions.base_version) = (base.to_owned(), base_version);
            break;
        }
        versions.steps.reverse();
        let of_step = |step: &Version| step.files.iter().map(|file| below(&step.directory, file)).collect::<Vec<_>>();
        let paths: Vec<String> = versions.steps.iter().flat_map(of_step).collect();
        versions.opened = tree.open_files(&paths, 0)?;
        Ok(versions)
    }

    /// The table with the tensors that differ in decoded files, which are added to those after the files of `source`; and the files of
    /// the base where they were, by decoded file. The differences are in `source` from file `first` on.
    pub(super) fn apply(
        &self,
        (source, first, index_metadata): (&dyn Source, usize, Option<&Value>),
        table: TensorTable,
        decoded: &mut Vec<DecodedFile>,
        problems: &mut Problems,
    ) -> (TensorTable, hashbrown::HashMap<FileId, FileId>) {
        let base_version = index_metadata.and_then(|metadata| version_in(metadata, "version").ok());
        if self.base_version != 0 && base_version != Some(self.base_version) {
            let found = base_version.map_or_else(|| "no version".to_owned(), |found| format!("{found:06}"));
            problems.push(Problem::Other(format!(
                "{}: builds on version {:06}, which is not beside it: expected the index of --base to say that it is this version, found \
                 {found}; give that version as the base",
                self.steps[0].directory, self.base_version
            )));
        }
        let mut files: Vec<(&Version, u32, &String)> = Vec::new();
        for step in &self.steps {
            files.extend((0..).zip(&step.files).map(|(number, file)| (step, number, file)));
        }
        let read = |at: usize| {
            let (step, _, file) = files[at];
            let place = below(&step.directory, file);
            read_header(source, FileId::at(first + at), &place).map(|header| (header, place))
        };
        let headers: Vec<_> = (0..files.len()).into_par_iter().map(read).collect();
        let mut changed: BTreeMap<TensorId, Vec<Difference>> = BTreeMap::new();
        for (at, ((step, number, _), header)) in files.into_iter().zip(headers).enumerate() {
            if let Some((header, place)) = problems.taken(header) {
                step.add((FileId::at(first + at), number, &place), &header, &table, &mut changed, problems);
            }
        }
        let (mut places, mut replaced) = (Vec::new(), hashbrown::HashMap::new());
        for (id, differences) in changed {
            let tensor = table.tensor(id);
            let stored = tensor.stored().filter(|(file, _)| file.index() < source.file_count());
            let Some((file, span)) = stored else {
                let found = "found one that is made of others: give a base that is stored whole, as safetensors";
                problems.push(Problem::Tensor {
                    tensor: tensor.name.to_owned(),
                    what: format!(": expected in one span of the base, {found}"),
                });
                continue;
            };
            let place = ByteSpan::of_len(0, span.len()).expect("it begins at 0");
            let made = FileId::at(source.file_count() + decoded.len());
            places.push((id, RowPlace::Span(made, place)));
            replaced.insert(made, file);
            decoded.push(DecodedFile::of_delta(DeltaTensor {
                name: tensor.name.to_owned(),
                base: (file, span),
                differences,
            }));
        }
        (table.relocated(&places), replaced)
    }
}

impl Version {
    /// The version in a directory of a run, and the one that it builds on; `None` if it is whole.
    fn read(tree: &dyn OpenTree, directory: &str) -> Result<Option<(Self, u64)>, CheckpointError> {
        let entries = tree.list(directory)?;
        let Some(name) = file_names(&entries).find(|name| name.ends_with(INDEX_SUFFIX)) else { return Ok(None) };
        let path = below(directory, name);
        let refused = |what: String| {
            CheckpointError::of_file(tree.shown("").display(), &path, format_args!("a published weight delta: {what}"))
        };
        let text = tree.description(&path)?.unwrap_or_default();
        let index = Index::parse(&text).map_err(|error| refused(json::fault(&error)))?;
        let Some(metadata) = index.metadata.filter(|metadata| !metadata["delta_encoding"].is_null()) else {
            return Ok(None);
        };
        let number = version_in(&metadata, "version").map_err(refused)?;
        let base_version = version_in(&metadata, "base_version").map_err(refused)?;
        let format = DeltaFormat::parse(&metadata).map_err(|error| refused(error.to_string()))?;
        if let Some(file) = index.files.iter().find(|file| !is_safetensors(file) || !has(&entries, file)) {
            return Err(refused(format!("names {file:?}, which is not there")));
        }
        let mut tensors = HashMap::with_capacity(index.tensors.len());
        for (tensor, file) in index.tensors {
            if tensors.insert(tensor.clone().into_owned(), file).is_some() {
                return Err(refused(format!("names tensor {tensor:?} twice")));
            }
        }
        Ok(Some((Self { number, directory: directory.to_owned(), format, files: index.files, tensors }, base_version)))
    }

    /// Adds the differences of one of its files to those of the tensors of a base.
    fn add(
        &self,
        (file, number, path): (FileId, u32, &str),
        header: &Header,
        table: &TensorTable,
        changed: &mut BTreeMap<TensorId, Vec<Difference>>,
        problems: &mut Problems,
    ) {
        let digests: HashMap<&str, &str> =
            header.metadata().iter().map(|(name, digest)| (name.as_str(), digest.as_str())).collect();
        let named = self.tensors.values().filter(|file| **file == number).count();
        if named != header.tensors().len() {
            let found = header.tensors().len();
            problems
                .of_file(path, format_args!("expected the {named} tensors that the index names there, found {found}"));
        }
        for tensor in header.tensors() {
            let mut refused = |what: &str| {
                problems.push(Problem::Tensor { tensor: tensor.name.to_owned(), what: format!(" of {path}: {what}") });
            };
            let digest = digests.get(tensor.name).copied().unwrap_or_default();
            let base = table.find(tensor.name);
            if self.tensors.get(tensor.name) != Some(&number) {
                refused("the index does not name it there");
            } else if (tensor.dtype, tensor.shape.len()) != (DType::U8, 1) {
                refused(&format!(
                    "expected a difference, bytes on one axis, found {} {:?}",
                    tensor.dtype, tensor.shape
                ));
            } else if !self.format.is_digest(digest) {
                refused(&format!("expected a digest of its bytes in the file's metadata, found {digest:?}"));
            } else if let Some(id) = base {
                changed.entry(id).or_default().push(Difference {
                    version: self.number,
                    format: self.format,
                    digest: digest.to_owned(),
                    file,
                    span: ByteSpan::new(tensor.start, tensor.end).expect("a header's offsets are in order"),
                });
            } else {
                refused("a difference from a tensor that the base lacks: is --base the model that the run began with?");
            }
        }
    }
}
