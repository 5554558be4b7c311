//! Opening a repository: it chooses the weight files, reads their headers, and checks index, headers and files against
//! each other.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
    sync::Arc,
};

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::{
    adapter::{ADAPTER_WEIGHTS, AdapterFiles, read_adapters},
    choose::{
        CONFIG, choose_index, choose_indexed, choose_single, choose_unindexed, find_unreadable, is_safetensors,
        leave_out_links, natural, warn_of_weights,
    },
    companion::{fill_files, read_companion},
    dialect::{Dialect, own_dtype, quantization_config},
    file::{FileRole, RepoFile},
    header::{ReadHeader, WeightFiles, read_header, table_of},
    index::Index,
    listing::{self, Listed, Listing, Opening},
    locate::{Located, locate},
    options::OpenOptions,
    problem::{BYTES_MAX, CheckpointError, Problem, Problems},
    quantization::Quantization,
    repository::{Adapter, Checkpoint},
    scheme::{self, Stored},
    table::TensorTable,
    text::{parsed, read_json},
};
use crate::{
    format::safetensors::Header,
    source::{
        Beneath, FileId, Found, LocalFiles, Opened, Source, SourceError, local::check_open_file_limit,
        permission::DirectoryGates,
    },
};

/// The configuration of quantization that `ModelOpt` writes.
const MODELOPT: &str = "hf_quant_config.json";

impl Checkpoint {
    /// Opens a directory, a `.safetensors` file, or an `org/name[@revision]` of the local hub cache. An existing path wins
    /// over a name in the cache.
    ///
    /// # Errors
    /// [`CheckpointError`]. All problems with the contents are one [`CheckpointError::Problems`].
    pub fn open(source: &str, options: &OpenOptions) -> Result<Self, CheckpointError> {
        open(source, options)
    }
}

fn open(source: &str, options: &OpenOptions) -> Result<Checkpoint, CheckpointError> {
    let looking = options.fetches.begin_path(Path::new(source), "list");
    let located = locate(source, options.hub_cache.as_deref())?;
    let is_directory = located.path.is_dir();
    drop(looking);
    let mut adapters = read_adapters(options)?;
    let mut warnings = Vec::new();
    if let Some(fill) = &options.fill_from {
        let alone = OpenOptions { adapters: Vec::new(), config_from: None, fill_from: None, ..options.clone() };
        let fill = open(fill, &alone)?;
        let weights = fill.files().iter().filter(|file| file.role == FileRole::Weights);
        adapters.extend(fill_files(weights.filter_map(|file| Some(fill.source().path(file.file?))), &options.fetches)?);
    }
    let companion = options.config_from.as_ref().map(|source| read_companion(source, options, &mut warnings)).transpose()?;
    let opened =
        if is_directory { open_directory(located, options, adapters) } else { open_file(located, options, adapters) };
    let mut opened = opened?;
    opened.warnings.extend(warnings);
    match companion {
        Some((companion, config)) => opened.completed(companion, config),
        None => Ok(opened),
    }
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
    let listed = Listed { path: name, role: FileRole::Weights, size_bytes, state: Opening::Nothing };
    let chosen = ChosenFiles {
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
    chosen.build(vec![opened], options, Problems::default())
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
            // An unreadable file explains the absence of others.
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
    let chosen =
        ChosenFiles { located, files, weights, index, config_text, modelopt_text, adapters, directories, warnings };
    chosen.build(opened, options, problems)
}

/// A repository with its chosen weight files. The source holds these first, then the other readable files, in order.
struct ChosenFiles<'a> {
    located: Located,
    files: Vec<Listed>,
    /// Indices in `files`, in the order of their ids.
    weights: Vec<usize>,
    index: Option<(&'a str, Index<'a>)>,
    /// The text of `config.json`, or the reason why it is not available. `None` if there is none.
    config_text: Option<Result<Vec<u8>, String>>,
    /// The text of `hf_quant_config.json`, likewise.
    modelopt_text: Option<Result<Vec<u8>, String>>,
    /// Their weights are the last files of the source.
    adapters: Vec<AdapterFiles>,
    /// Directories with the gates before them.
    directories: Vec<(String, DirectoryGates)>,
    warnings: Vec<String>,
}

impl ChosenFiles<'_> {
    /// `opened` are the files of the repository in the order of their ids.
    fn build(
        mut self,
        mut opened: Vec<Opened>,
        options: &OpenOptions,
        mut problems: Problems,
    ) -> Result<Checkpoint, CheckpointError> {
        let mut adapters = Vec::with_capacity(self.adapters.len());
        for AdapterFiles { dir, config, weights, warning, fills } in std::mem::take(&mut self.adapters) {
            let file = FileId(number(opened.len()));
            opened.push(weights);
            adapters.push(Adapter { dir, file, config, fills });
            self.warnings.extend(warning);
        }
        let source = LocalFiles::pin(opened, options.io, Arc::clone(&options.fetches))?;
        let ids = || (0..number(self.weights.len())).map(FileId);
        let read: Vec<_> = ids().collect::<Vec<_>>().into_par_iter().map(|id| read_header(&source, id)).collect();
        let mut headers = Vec::new();
        let mut broken = BTreeSet::new();
        for (id, result) in ids().zip(read) {
            let file = self.weight_files().path(id).to_owned();
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
        if files.map(|file| source.pin(file).len_bytes).fold(0, u64::saturating_add) > BYTES_MAX {
            problems.push(Problem::TooManyBytes);
        }
        let table = table_of(&headers, &mut problems);
        self.weight_files().find_duplicates(&table, &mut problems);
        if let Some((name, index)) = &self.index {
            self.weight_files().compare_with_index(name, index, &table, &broken, &mut problems);
        }
        let config = self.config(&mut problems);
        let file_metadata = headers.iter().map(|(id, header)| (*id, header.metadata().to_vec()));
        let file_metadata: BTreeMap<_, _> = file_metadata.filter(|(_, metadata)| !metadata.is_empty()).collect();
        let modelopt = self.modelopt(&mut problems);
        let settings = (quantization_config(config.as_ref()), modelopt.as_ref());
        let stored = Stored::new((&table, &source), settings, &file_metadata, own_dtype(config.as_ref()));
        let quantized = Arc::new(scheme::find(&stored, &mut problems));
        let quantization = Quantization::of(&quantized);
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
            companion: None,
            directories: self.directories,
            warnings: self.warnings,
        })
    }

    fn weight_files(&self) -> WeightFiles<'_> {
        WeightFiles { files: &self.files, weights: &self.weights }
    }

    fn repo_files(&self, source: &dyn Source) -> Vec<RepoFile> {
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
}

/// The table, with the tensors of adapters after the repository's own. The table hides the adapters' tensors.
fn with_adapters(
    own: TensorTable,
    mut headers: Vec<(FileId, Header)>,
    adapters: &[Adapter],
    source: &dyn Source,
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
