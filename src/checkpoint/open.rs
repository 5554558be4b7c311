//! Opening a repository: choosing the weight files, reading their headers, and checking everything against everything.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, HashMap},
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

use rayon::{
    iter::{IntoParallelIterator, ParallelIterator},
    slice::ParallelSliceMut,
};

use super::{
    Adapter, Checkpoint, FileRole, IgnoreReason, RepoFile,
    dialect::{Dialect, own_dtype, quantization_config},
    index::{Index, stays_inside},
    json,
    listing::{self, Listed, Listing, State},
    locate::{Located, locate},
    problem::{BYTES_MAX, CheckpointError, Problem, Problems},
    quantization::Quantization,
    scheme::{self, Stored},
    table::TensorTable,
};
use crate::{
    format::safetensors::{Header, HeaderErrors},
    source::{
        Beneath, Fetches, FileId, Found, LocalFiles, Opened, Source, SourceError, SourceIo,
        local::check_open_file_limit, permission::DirectoryGates,
    },
};

/// Longest `config.json` or index that is read, in bytes.
const JSON_FILE_BYTES_MAX: u64 = 256 << 20;

/// The configuration of a model.
const CONFIG: &str = "config.json";

/// The configuration of quantization that `ModelOpt` writes.
const MODELOPT: &str = "hf_quant_config.json";

/// How the names of indexes end.
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// How to open a repository.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// How local files are read.
    pub io: SourceIo,
    /// Directories of adapters, each with `adapter_config.json` and `adapter_model.safetensors`.
    pub adapters: Vec<PathBuf>,
    /// Directory of the hub cache; `None` takes it from the environment as the hub's client does.
    pub hub_cache: Option<PathBuf>,
    /// Accepts symbolic links that lead out of the repository.
    pub follow_symlinks: bool,
    /// Where every wait for storage is noted.
    pub fetches: Arc<Fetches>,
}

pub(super) fn open(source: &str, options: &OpenOptions) -> Result<Checkpoint, CheckpointError> {
    let looking = options.fetches.begin_path(Path::new(source), "list");
    let located = locate(source, options.hub_cache.as_deref())?;
    let is_directory = located.path.is_dir();
    drop(looking);
    let adapters = read_adapters(options)?;
    if is_directory { open_directory(located, options, adapters) } else { open_file(located, options, adapters) }
}

/// An adapter's directory, its configuration and its weights.
#[derive(Debug)]
struct AdapterFiles {
    dir: PathBuf,
    config: serde_json::Value,
    weights: Opened,
    warning: Option<String>,
}

/// Name of an adapter's weights.
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

fn read_adapters(options: &OpenOptions) -> Result<Vec<AdapterFiles>, CheckpointError> {
    options.adapters.iter().map(|dir| read_adapter(dir, options)).collect()
}

fn read_adapter(dir: &Path, options: &OpenOptions) -> Result<AdapterFiles, CheckpointError> {
    const CONFIG: &str = "adapter_config.json";
    let problem = |message: String| CheckpointError::Problems {
        label: dir.display().to_string(),
        problems: vec![Problem::Json { file: CONFIG.to_owned(), message }],
        more: 0,
    };
    let follow = options.follow_symlinks;
    let opening = options.fetches.begin_path(dir, "open");
    let root = Beneath::open(dir).map_err(|error| problem(error.to_string()))?;
    let root = Arc::new(root);
    let found = root.find(CONFIG).map_err(|error| problem(error.to_string()))?;
    if !found.is_inside() && !follow {
        return Err(problem(format!(
            "symbolic link to {}, outside the adapter's directory; --follow-symlinks reads it",
            quoted(found.real())
        )));
    }
    let opened = found.open(Some(&root)).map_err(|error| problem(error.to_string()))?;
    drop(opening);
    let text = read_json(&opened, &options.fetches).map_err(problem)?;
    let config = json::parse(&text).map_err(|error| problem(error.to_string()))?;
    let weights = dir.join(ADAPTER_WEIGHTS);
    let opening = options.fetches.begin_path(&weights, "open");
    let found = root.find(ADAPTER_WEIGHTS).map_err(|error| SourceError::Io {
        file: Arc::from(weights.as_path()),
        action: "open".into(),
        error: Arc::new(error),
    })?;
    let outside = (!found.is_inside() && !follow).then(|| found.real().to_owned());
    let warning = outside.map(|target| warn_of_weights(&weights.display().to_string(), &target));
    let weights = found.open(Some(&root))?;
    drop(opening);
    Ok(AdapterFiles { dir: dir.to_owned(), config, weights, warning })
}

/// A single file is a repository of one file, without configuration.
fn open_file(
    located: Located,
    options: &OpenOptions,
    adapters: Vec<AdapterFiles>,
) -> Result<Checkpoint, CheckpointError> {
    let failed = |error| SourceError::Io {
        file: Arc::from(located.path.as_path()),
        action: "open".into(),
        error: Arc::new(error),
    };
    let opening = options.fetches.begin_path(&located.path, "open");
    let opened = Found::named(&located.path).map_err(failed)?.open(None)?;
    let name = located.path.file_name().map_or_else(|| located.label.clone(), |name| name.display().to_string());
    let size_bytes = opened.file().metadata().map_or(0, |metadata| metadata.len());
    drop(opening);
    let listed = Listed { path: name, role: FileRole::Weights, size_bytes, state: State::Nothing };
    let selected = Selected {
        located,
        files: vec![listed],
        weights: vec![0],
        index: None,
        config_text: None,
        modelopt_text: None,
        adapters,
        directories: Vec::new(),
        warnings: Vec::new(),
    };
    selected.build(vec![opened], options, Problems::default())
}

/// A path for a message, in which characters that a terminal would obey are escaped.
fn quoted(path: &Path) -> String {
    format!("{:?}", path.to_string_lossy())
}

/// What to do about weights that a link takes from elsewhere.
fn warn_of_weights(path: &str, target: &Path) -> String {
    format!(
        "{path:?}: symbolic link to {}, outside the repository: its tensors are shown to those that may read the target; \
         --follow-symlinks accepts such links",
        quoted(target)
    )
}

/// Leaves out the files that links take from elsewhere, but for weights: those are told from others by what is in them.
fn leave_out_links(files: &mut [Listed], warnings: &mut Vec<String>, left_out: impl Fn(&Listed) -> bool) {
    for file in files {
        let Some(target) = file.outside().map(Path::to_owned).filter(|_| left_out(file)) else { continue };
        let decides = file.path == CONFIG || (at_top(&file.path) && file.path.ends_with(INDEX_SUFFIX));
        let as_if = if decides { ", as if it were not there" } else { "" };
        warnings.push(format!(
            "{:?}: left out{as_if}: symbolic link to {}, outside the repository; --follow-symlinks reads it",
            file.path,
            quoted(&target)
        ));
        file.role = FileRole::Ignored(IgnoreReason::LeavesRepository);
        file.state = State::Nothing;
        file.size_bytes = 0;
    }
}

fn open_directory(
    located: Located,
    options: &OpenOptions,
    adapters: Vec<AdapterFiles>,
) -> Result<Checkpoint, CheckpointError> {
    let path = located.path.clone();
    let listing = |error| CheckpointError::Listing { root: path.clone(), error };
    let opening = options.fetches.begin_path(&located.path, "open");
    let root = Arc::new(Beneath::open(&located.path).map_err(listing)?);
    drop(opening);
    if located.revision.is_some() && !root.is_in_hub_cache() && !options.follow_symlinks {
        return Err(CheckpointError::LeavesCache { snapshot: located.path });
    }
    let Listing { mut files, directories } = listing::list(&root, &options.fetches).map_err(listing)?;
    let mut warnings = Vec::new();
    if !options.follow_symlinks {
        leave_out_links(&mut files, &mut warnings, |file| !is_safetensors(&file.path));
    }
    let mut problems = Problems::default();
    find_unreadable(&files, &mut problems);
    let index_name = choose_index(&located.path, &files)?;
    let unusable = |file: &str, message: String| {
        let problem = Problem::Json { file: file.to_owned(), message };
        CheckpointError::Problems { label: located.label.clone(), problems: vec![problem], more: 0 }
    };
    let mut text_of = |name: &str| -> Result<Option<Result<Vec<u8>, String>>, SourceError> {
        let listed = files.iter_mut().find(|file| file.path == name && file.role == FileRole::Other);
        let Some(listed) = listed else { return Ok(None) };
        Ok(listed.open(&root, &options.fetches)?.map(|opened| read_json(opened, &options.fetches)))
    };
    let config_text = text_of(CONFIG)?;
    let modelopt_text = text_of(MODELOPT)?;
    let (text, index);
    let index = match &index_name {
        Some(name) => {
            text =
                text_of(name)?.unwrap_or_else(|| Err("not there".into())).map_err(|message| unusable(name, message))?;
            index = Index::parse(&text).map_err(|error| unusable(name, error.to_string()))?;
            Some((name.as_str(), index))
        }
        None => None,
    };
    let mut single = false;
    let index = index.filter(|(name, index)| {
        let warning = choose_single(name, index, &mut files);
        single = warning.is_some();
        warnings.extend(warning);
        !single
    });
    match &index {
        Some((name, index)) => choose_indexed(name, index, &mut files, &mut problems),
        None if single => {}
        None => match choose_unindexed(&located.path, &mut files, &mut problems) {
            Err(error) if problems.is_empty() => return Err(error),
            // What is there and cannot be read is why nothing else is.
            Ok(()) | Err(_) => {}
        },
    }
    if !options.follow_symlinks {
        leave_out_links(&mut files, &mut warnings, |file| file.role != FileRole::Weights);
        let linked = files.iter().filter_map(|file| Some(warn_of_weights(&file.path, file.outside()?)));
        warnings.extend(linked.collect::<Vec<_>>());
    }
    let mut weights: Vec<usize> = (0..files.len()).filter(|place| files[*place].role == FileRole::Weights).collect();
    weights.sort_by(|left, right| natural(&files[*left].path, &files[*right].path));
    let others: Vec<usize> = (0..files.len())
        .filter(|place| files[*place].role != FileRole::Weights && files[*place].role.is_readable())
        .collect();
    check_open_file_limit(weights.len() + others.len() + adapters.len())?;
    let mut opened = Vec::with_capacity(weights.len() + others.len());
    for place in weights.iter().chain(&others) {
        opened.extend(files[*place].take(&root, &options.fetches)?);
    }
    let selected =
        Selected { located, files, weights, index, config_text, modelopt_text, adapters, directories, warnings };
    selected.build(opened, options, problems)
}

impl FileRole {
    /// Whether the file is a regular one that is opened.
    const fn is_readable(&self) -> bool {
        match self {
            Self::Weights | Self::Other => true,
            Self::Ignored(reason) => reason.is_readable(),
        }
    }
}

impl IgnoreReason {
    /// Whether the file is a regular one nevertheless.
    const fn is_readable(self) -> bool {
        match self {
            Self::NotInIndex | Self::SecondCopy | Self::OtherSet | Self::Subdirectory => true,
            Self::DanglingLink
            | Self::LeavesRepository
            | Self::LinkedDirectory
            | Self::Special
            | Self::Mount
            | Self::Bookkeeping => false,
        }
    }
}

/// A repository whose weight files are chosen. The source holds them first, then the other readable files, in order.
struct Selected<'a> {
    located: Located,
    files: Vec<Listed>,
    /// Places in `files`, in the order of their ids.
    weights: Vec<usize>,
    index: Option<(&'a str, Index<'a>)>,
    /// The text of `config.json`, or why it cannot be had; `None` without one.
    config_text: Option<Result<Vec<u8>, String>>,
    /// That of `hf_quant_config.json`, likewise.
    modelopt_text: Option<Result<Vec<u8>, String>>,
    /// Their weights are the last files of the source.
    adapters: Vec<AdapterFiles>,
    /// Directories with the gates before them.
    directories: Vec<(String, DirectoryGates)>,
    warnings: Vec<String>,
}

impl Selected<'_> {
    /// `opened` are the files of the repository in the order of their ids.
    fn build(
        mut self,
        mut opened: Vec<Opened>,
        options: &OpenOptions,
        mut problems: Problems,
    ) -> Result<Checkpoint, CheckpointError> {
        let mut adapters = Vec::with_capacity(self.adapters.len());
        for AdapterFiles { dir, config, weights, warning } in std::mem::take(&mut self.adapters) {
            let file = FileId(number(opened.len()));
            opened.push(weights);
            adapters.push(Adapter { dir, file, config });
            self.warnings.extend(warning);
        }
        let source = LocalFiles::pin(opened, options.io, Arc::clone(&options.fetches))?;
        let ids = || (0..number(self.weights.len())).map(FileId);
        let read: Vec<_> = ids().collect::<Vec<_>>().into_par_iter().map(|id| read_header(&source, id)).collect();
        let mut headers = Vec::new();
        let mut broken = BTreeSet::new();
        for (id, result) in ids().zip(read) {
            let file = self.weight(id).to_owned();
            match result {
                Ok(header) => headers.push((id, header)),
                Err(ReadHeader::Header(errors)) => {
                    broken.insert(file.clone());
                    problems.push(Problem::Header { file, errors });
                }
                Err(ReadHeader::Source(error)) => {
                    broken.insert(file.clone());
                    problems.push(Problem::Unreadable { file, error });
                }
            }
        }
        let files = (0..number(source.file_count())).map(FileId);
        if files.map(|file| source.len_bytes(file)).fold(0, u64::saturating_add) > BYTES_MAX {
            problems.push(Problem::TooManyBytes);
        }
        let table = table_of(&headers, &mut problems);
        self.find_duplicates(&table, &mut problems);
        if let Some((name, index)) = &self.index {
            self.compare_with_index(name, index, &table, &broken, &mut problems);
        }
        let config = self.config(&mut problems);
        let file_metadata = headers.iter().map(|(id, header)| (*id, header.metadata().to_vec()));
        let file_metadata: BTreeMap<_, _> = file_metadata.filter(|(_, metadata)| !metadata.is_empty()).collect();
        let modelopt = self.modelopt(&mut problems);
        let settings = (quantization_config(config.as_ref()), modelopt.as_ref());
        let stored = Stored::new((&table, &source), settings, &file_metadata, own_dtype(config.as_ref()));
        let quantized = Arc::new(scheme::find(&stored, &mut problems));
        let quantization = Quantization::of(&quantized, &table, quantization_config(config.as_ref()));
        let dialect = Dialect::of(&table, config.as_ref(), quantization, &mut problems);
        let table = with_adapters(table, headers, &adapters, &source, &mut problems).with_quantized(&quantized);
        let table = table.unwrap_or_else(|| {
            problems.push(Problem::TooLarge);
            TensorTable::default()
        });
        problems.refuse(&self.located.label)?;
        let files = self.repo_files(&source);
        let Located { path, label, revision } = self.located;
        Ok(Checkpoint {
            source: Arc::new(source),
            root: path,
            label,
            revision,
            table,
            files,
            config,
            index_metadata: self.index.and_then(|(_, index)| index.metadata),
            file_metadata,
            dialect,
            quantized,
            adapters,
            directories: self.directories,
            warnings: self.warnings,
        })
    }

    fn weight(&self, id: FileId) -> &str {
        &self.files[self.weights[id.index()]].path
    }

    fn repo_files(&self, source: &LocalFiles) -> Vec<RepoFile> {
        let by_weight: HashMap<usize, u32> = self.weights.iter().copied().zip(0..).collect();
        let mut next_other = number(self.weights.len());
        let file = |(place, listed): (usize, &Listed)| {
            let id = by_weight.get(&place).copied().or_else(|| {
                listed.role.is_readable().then(|| {
                    next_other += 1;
                    next_other - 1
                })
            });
            let file = id.map(FileId);
            RepoFile {
                path: listed.path.clone(),
                role: listed.role.clone(),
                size_bytes: file.map_or(listed.size_bytes, |file| source.len_bytes(file)),
                file,
            }
        };
        self.files.iter().enumerate().map(file).collect()
    }

    fn config(&self, problems: &mut Problems) -> Option<serde_json::Value> {
        parsed(CONFIG, self.config_text.as_ref()?, problems)
    }

    fn modelopt(&self, problems: &mut Problems) -> Option<serde_json::Value> {
        parsed(MODELOPT, self.modelopt_text.as_ref()?, problems)
    }

    fn find_duplicates(&self, table: &TensorTable, problems: &mut Problems) {
        for (first, second) in table.by_name().zip(table.by_name().skip(1)) {
            let (first, second) = (table.tensor(first), table.tensor(second));
            if first.name == second.name {
                problems.push(Problem::Duplicate {
                    tensor: first.name.to_owned(),
                    first: self.weight(first.file()).to_owned(),
                    second: self.weight(second.file()).to_owned(),
                });
            }
        }
    }

    /// Index and headers, both ways: one walk over both, sorted by name.
    fn compare_with_index(
        &self,
        index_name: &str,
        index: &Index<'_>,
        table: &TensorTable,
        broken: &BTreeSet<String>,
        problems: &mut Problems,
    ) {
        let mut named: Vec<(&str, &str)> =
            index.tensors.iter().map(|(name, file)| (&**name, index.files[*file as usize].as_str())).collect();
        named.par_sort_unstable();
        let mut named = named.into_iter().peekable();
        let mut tensors = table.by_name().map(|id| table.tensor(id)).peekable();
        loop {
            let order = match (named.peek(), tensors.peek()) {
                (None, None) => break,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((name, _)), Some(tensor)) => (*name).cmp(tensor.name),
            };
            let entry = if order == Ordering::Greater { None } else { named.next() };
            let tensor = if order == Ordering::Less { None } else { tensors.next() };
            match (entry, tensor) {
                (Some((name, file)), None) => {
                    if !broken.contains(file) && self.files.iter().any(|listed| listed.path == file) {
                        problems.push(Problem::NotInFile { tensor: name.to_owned(), file: file.to_owned() });
                    }
                }
                (None, Some(tensor)) => problems.push(Problem::NotInIndex {
                    tensor: tensor.name.to_owned(),
                    file: self.weight(tensor.file()).to_owned(),
                }),
                (Some((name, expected)), Some(tensor)) if expected != self.weight(tensor.file()) => {
                    problems.push(Problem::InOtherFile {
                        tensor: name.to_owned(),
                        expected: expected.to_owned(),
                        found: self.weight(tensor.file()).to_owned(),
                    });
                }
                (Some(_), Some(_)) | (None, None) => {}
            }
            // Repetitions on either side have been, or are here, reported as such; they must not confuse the walk.
            let name = entry.map(|entry| entry.0).or(tensor.map(|tensor| tensor.name));
            let name = name.expect("the walk has ended where neither side has a name");
            while named.next_if(|next| next.0 == name && entry.is_some()).is_some() {
                let (index, tensor) = (index_name.to_owned(), name.to_owned());
                problems.push(Problem::RepeatedInIndex { index, tensor });
            }
            while tensors.next_if(|next| next.name == name && tensor.is_some()).is_some() {}
        }
    }
}

/// The object that a JSON file holds.
fn parsed(file: &str, text: &Result<Vec<u8>, String>, problems: &mut Problems) -> Option<serde_json::Value> {
    let value = text.as_ref().map_err(Clone::clone).and_then(|text| {
        let value = json::parse(text).map_err(|error| error.to_string())?;
        if value.is_object() { Ok(value) } else { Err("expected an object".into()) }
    });
    value.map_err(|message| problems.push(Problem::Json { file: file.into(), message })).ok()
}

/// The tensors of these files, in this order.
fn table_of(headers: &[(FileId, Header)], problems: &mut Problems) -> TensorTable {
    TensorTable::new(headers.iter().map(|(id, header)| (*id, header))).unwrap_or_else(|| {
        problems.push(Problem::TooLarge);
        TensorTable::default()
    })
}

/// The table with the tensors of adapters after its own. They are not shown.
fn with_adapters(
    own: TensorTable,
    mut headers: Vec<(FileId, Header)>,
    adapters: &[Adapter],
    source: &LocalFiles,
    problems: &mut Problems,
) -> TensorTable {
    if adapters.is_empty() {
        return own;
    }
    for Adapter { dir, file, .. } in adapters {
        let name = || dir.join(ADAPTER_WEIGHTS).display().to_string();
        match read_header(source, *file) {
            Ok(header) => headers.push((*file, header)),
            Err(ReadHeader::Header(errors)) => problems.push(Problem::Header { file: name(), errors }),
            Err(ReadHeader::Source(error)) => problems.push(Problem::Unreadable { file: name(), error }),
        }
    }
    table_of(&headers, problems).showing_first(own.len())
}

/// A number of files, or of one.
fn number(files: usize) -> u32 {
    u32::try_from(files).expect("a listing has at most some 100 000 files, and each adapter adds one that is open")
}

enum ReadHeader {
    Source(SourceError),
    Header(HeaderErrors),
}

fn read_header(source: &LocalFiles, file: FileId) -> Result<Header, ReadHeader> {
    let file_bytes = source.len_bytes(file);
    let mut prefix = [0; 8];
    if file_bytes >= 8 {
        source.read_into(file, 0, &mut prefix).map_err(ReadHeader::Source)?;
    }
    let len = Header::json_bytes(prefix, file_bytes).map_err(|error| ReadHeader::Header(error.into()))?;
    let mut json = vec![0; usize::try_from(len).expect("a header is at most 100 MB")];
    source.read_into(file, 8, &mut json).map_err(ReadHeader::Source)?;
    Header::parse(&json, file_bytes).map_err(ReadHeader::Header)
}

/// The text of a JSON file, or why it cannot be had.
fn read_json(opened: &Opened, fetches: &Fetches) -> Result<Vec<u8>, String> {
    let _reading = fetches.begin_path(opened.path(), "read");
    let too_long = |len: u64| format!("expected at most {JSON_FILE_BYTES_MAX} bytes, found {len}");
    let len = opened.file().metadata().map_err(|error| error.to_string())?.len();
    if len > JSON_FILE_BYTES_MAX {
        return Err(too_long(len));
    }
    let mut text = Vec::new();
    let mut file = opened.file().take(JSON_FILE_BYTES_MAX + 1);
    file.read_to_end(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > JSON_FILE_BYTES_MAX { Err(too_long(text.len() as u64)) } else { Ok(text) }
}

fn is_safetensors(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "safetensors")
}

fn at_top(path: &str) -> bool {
    !path.contains('/')
}

fn is_second_copy(path: &str) -> bool {
    path.starts_with("consolidated")
}

/// The index to go by: `model.safetensors.index.json`, or the only other one.
fn choose_index(root: &Path, files: &[Listed]) -> Result<Option<String>, CheckpointError> {
    const USUAL: &str = "model.safetensors.index.json";
    let mut indexes: Vec<&str> = files
        .iter()
        .filter(|file| file.role == FileRole::Other && at_top(&file.path))
        .map(|file| file.path.as_str())
        .filter(|path| path.ends_with(INDEX_SUFFIX))
        .collect();
    if indexes.contains(&USUAL) {
        return Ok(Some(USUAL.to_owned()));
    }
    let has_others = files.iter().any(|file| {
        at_top(&file.path) && is_safetensors(&file.path) && !is_second_copy(&file.path) && file.role == FileRole::Other
    });
    if has_others || indexes.len() > 1 {
        // The second copy's index does not speak for the first copy.
        indexes.retain(|path| !is_second_copy(path));
    }
    match indexes[..] {
        [] => Ok(None),
        [only] => Ok(Some(only.to_owned())),
        _ => Err(CheckpointError::SeveralIndexes {
            root: root.to_path_buf(),
            indexes: indexes.into_iter().map(str::to_owned).collect(),
        }),
    }
}

/// Finds what would be passed over though it decides what the repository is: weights, an index or the configuration.
fn find_unreadable(files: &[Listed], problems: &mut Problems) {
    let indexed = files.iter().any(|file| at_top(&file.path) && file.path.ends_with(INDEX_SUFFIX));
    for file in files.iter().filter(|file| at_top(&file.path)) {
        let FileRole::Ignored(reason) = file.role else { continue };
        // These are as if they were not there, which a warning says.
        if reason == IgnoreReason::LeavesRepository {
            continue;
        }
        let name = file.path.as_str();
        // An index says by itself which weights it needs.
        let weights = is_safetensors(name) && !is_second_copy(name) && !indexed;
        if weights || name == CONFIG || (name.ends_with(INDEX_SUFFIX) && !is_second_copy(name)) {
            problems.push(Problem::NoFile { file: name.to_owned(), found: reason });
        }
    }
}

/// The file that transformers takes before it looks for an index.
const SINGLE: &str = "model.safetensors";

/// Chooses `model.safetensors` where an index names other files, as transformers does, and says so. The files of the index stay
/// in the repository as files like any other. An index that is refused by itself decides nothing.
fn choose_single(name: &str, index: &Index<'_>, files: &mut [Listed]) -> Option<String> {
    let is_there = |file: &Listed| file.path == SINGLE && file.role == FileRole::Other;
    let named: BTreeSet<&str> = index.files.iter().map(String::as_str).filter(|path| *path != SINGLE).collect();
    let usable = |path: &&str| {
        let ignored = |file: &Listed| file.path == **path && file.role != FileRole::Other;
        stays_inside(path) && is_safetensors(path) && !files.iter().any(ignored)
    };
    if named.is_empty() || index.tensors.is_empty() || !files.iter().any(is_there) || !named.iter().all(usable) {
        return None;
    }
    for file in files.iter_mut().filter(|file| file.role == FileRole::Other && is_safetensors(&file.path)) {
        if file.path == SINGLE {
            file.role = FileRole::Weights;
        } else if !named.contains(file.path.as_str()) {
            file.role = FileRole::Ignored(beside(&file.path, IgnoreReason::OtherSet));
        }
    }
    let count = named.len();
    Some(format!(
        "{SINGLE} and {name} are both there: tensors come from {SINGLE}, as in transformers; hf/ keeps the {count} files that \
         the index names as they are; remove what is not meant"
    ))
}

/// Why safetensors that are not used are left out; `otherwise` where their path does not say it.
fn beside(path: &str, otherwise: IgnoreReason) -> IgnoreReason {
    if !at_top(path) {
        IgnoreReason::Subdirectory
    } else if is_second_copy(path) {
        IgnoreReason::SecondCopy
    } else {
        otherwise
    }
}

/// With an index, its files are the weights and no others.
fn choose_indexed(name: &str, index: &Index<'_>, files: &mut [Listed], problems: &mut Problems) {
    let mut counts = vec![0; index.files.len()];
    for (_, file) in &index.tensors {
        counts[*file as usize] += 1;
    }
    if counts.is_empty() {
        problems.push(Problem::EmptyIndex { index: name.to_owned() });
    }
    for (path, tensors) in index.files.iter().zip(counts) {
        if !stays_inside(path) {
            problems.push(Problem::OutsideRepository { index: name.to_owned(), path: path.clone() });
            continue;
        }
        let missing = |found: String| {
            let (index, file) = (name.to_owned(), path.clone());
            Problem::MissingFile { index, file, tensors, found }
        };
        match files.iter_mut().find(|file| file.path == *path) {
            None => problems.push(missing("not there".into())),
            Some(Listed { role: FileRole::Ignored(reason), .. }) => problems.push(missing(format!("a {reason}"))),
            Some(file) => file.role = FileRole::Weights,
        }
    }
    for file in files.iter_mut().filter(|file| file.role == FileRole::Other && is_safetensors(&file.path)) {
        file.role = FileRole::Ignored(beside(&file.path, IgnoreReason::NotInIndex));
    }
}

/// Without an index: `model.safetensors` by itself, or else `model-*`, or else all but second copies, or else these.
fn choose_unindexed(root: &Path, files: &mut [Listed], problems: &mut Problems) -> Result<(), CheckpointError> {
    let usable = |file: &Listed| file.role == FileRole::Other && is_safetensors(&file.path);
    let top: Vec<String> =
        files.iter().filter(|file| usable(file) && at_top(&file.path)).map(|file| file.path.clone()).collect();
    let tests: [fn(&str) -> bool; 4] =
        [|path| path == "model.safetensors", |path| path.starts_with("model-"), |path| !is_second_copy(path), |_| true];
    let Some(chosen) = tests.into_iter().find(|test| top.iter().any(|path| test(path))) else {
        let subdirectories = files.iter().filter(|file| usable(file)).filter_map(|file| file.path.rsplit_once('/'));
        let subdirectories: BTreeSet<String> = subdirectories.map(|(dir, _)| dir.to_owned()).collect();
        let subdirectories = subdirectories.into_iter().collect();
        return Err(CheckpointError::NoWeights { root: root.to_path_buf(), subdirectories });
    };
    let mut sets: BTreeMap<(String, String), u64> = BTreeMap::new();
    for file in files.iter_mut().filter(|file| usable(file)) {
        file.role = if !at_top(&file.path) {
            FileRole::Ignored(IgnoreReason::Subdirectory)
        } else if chosen(&file.path) {
            if let Some((stem, total)) = numbered(&file.path) {
                *sets.entry((stem.to_owned(), total.to_owned())).or_default() += 1;
            }
            FileRole::Weights
        } else if is_second_copy(&file.path) {
            FileRole::Ignored(IgnoreReason::SecondCopy)
        } else {
            FileRole::Ignored(IgnoreReason::OtherSet)
        };
    }
    for ((stem, total), found) in sets {
        // A total beyond 64 bits is more than there can be.
        let expected = total.parse().unwrap_or(u64::MAX);
        if found < expected {
            problems.push(Problem::IncompleteSet { stem, total, expected, found });
        }
    }
    Ok(())
}

/// Stem and total of `stem-00001-of-00003.safetensors`.
fn numbered(path: &str) -> Option<(&str, &str)> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (left, total) = path.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = left.rsplit_once('-')?;
    (digits(number) && digits(total)).then_some((stem, total))
}

/// Order of names in which numbers count as numbers: `layers-2` before `layers-10`.
fn natural(left: &str, right: &str) -> Ordering {
    let (mut a, mut b) = (left.as_bytes(), right.as_bytes());
    while let (Some(x), Some(y)) = (a.first(), b.first()) {
        let order = if x.is_ascii_digit() && y.is_ascii_digit() {
            let number = |bytes: &[u8]| bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let ((na, rest_a), (nb, rest_b)) = (a.split_at(number(a)), b.split_at(number(b)));
            (a, b) = (rest_a, rest_b);
            let significant = |digits: &'_ [u8]| digits.iter().take_while(|digit| **digit == b'0').count();
            let (na, nb) = (&na[significant(na)..], &nb[significant(nb)..]);
            na.len().cmp(&nb.len()).then(na.cmp(nb))
        } else {
            (a, b) = (&a[1..], &b[1..]);
            x.cmp(y)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    a.len().cmp(&b.len()).then_with(|| left.cmp(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let mut names =
            ["layers-10", "layers-9", "layers-010", "layers", "m-00002-of-00010", "m-00001-of-00010", "layers-9b"];
        names.sort_by(|left, right| natural(left, right));
        assert_eq!(
            names,
            ["layers", "layers-9", "layers-9b", "layers-010", "layers-10", "m-00001-of-00010", "m-00002-of-00010"]
        );
    }

    #[test]
    fn numbered_files() {
        assert_eq!(numbered("model-00001-of-00003.safetensors"), Some(("model", "00003")));
        assert_eq!(numbered("a-b-1-of-2.safetensors"), Some(("a-b", "2")));
        for other in ["model.safetensors", "model-1.safetensors", "model-x-of-3.safetensors", "1-of-2.safetensors"] {
            assert_eq!(numbered(other), None);
        }
    }
}
