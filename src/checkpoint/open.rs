//! Opening a checkpoint: it finds out what the source holds, has the dialect choose the weight files and read them, and puts
//! the parts together.

use std::{collections::HashMap, io, mem::take, sync::Arc};

use ckfs_format::safetensors::Header;
use ckfs_source::{
    FileId, FoundFile, Opened, Source, SourceError, permission::DirectoryRules, pin_files, remote::RemoteTree,
};
use parking_lot::Mutex;

use super::{
    adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterFiles, is_adapter_file, not_a_model, read_adapter},
    alone::part_of,
    average::AveragedSources,
    choose::{CONFIG, find_unreadable},
    companion::{self, Companion, read_companion},
    container::{self, Container, Contents},
    dcp,
    dialect::{Dialect, own_dtype, quantization_config},
    file::{FileRole, IgnoreReason, RepoFile},
    folder::{Folder, PinnedFiles, Text, open_root},
    foreign::{self, FileKind},
    gguf,
    header::{self, read_header},
    index::Index,
    json::{self, parsed},
    listing::{self, Listed},
    locate::{Located, locate},
    options::OpenOptions,
    orbax::{self, ChunkSource, DecodedFile},
    problem::{BYTES_MAX, CheckpointError, Problem, Problems},
    promised, ranks,
    remote_tree::CachedTree,
    repository::{Adapter, Checkpoint, OpenedRepository},
    safetensors,
    scheme::{self, Quantization, Stored},
    sets::incomplete_sets,
    table::TensorTable,
    torch,
    tree::{LocalTree, OpenTree},
    versions::Versions,
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
        let mut located = locate(source, options)?;
        let of_set;
        let mut options = options;
        if let (None, Some((directory, set))) = (&located.remote, gguf::part_of_set(&located.path)) {
            located.path = directory;
            of_set = OpenOptions { variant: Some(set), ..options.clone() };
            options = &of_set;
        }
        let average = AveragedSources::open(source, options)?;
        let adapters = options.adapters.iter().map(|dir| read_adapter(dir, options)).collect::<Result<_, _>>()?;
        let mut more = MoreFiles { adapters, versions: None, average };
        if let Some(fill) = &options.fill_from {
            more.adapters.extend(filling(fill, options)?);
        }
        let companion = options.config_from.as_ref().map(|source| companion(source, options)).transpose()?;
        let is_file = match &located.remote {
            Some(remote) => remote.files.iter().any(|file| file.path.is_empty()),
            None => !is_directory(&located, options),
        };
        if let Some(part) =
            is_file.then(|| part_of(&located.path, located.remote.is_none(), &options.fetches)).flatten()
        {
            return Err(CheckpointError::of_file(&located.label, located.path.display(), part));
        }
        let tree = remote_tree(&located, options)?;
        let opened = open_located(located, tree.as_ref(), options, more)?;
        opened.completed(companion)
    }
}

fn is_directory(located: &Located, options: &OpenOptions) -> bool {
    let _looking = options.fetches.begin_path(&located.path, "list");
    located.path.is_dir()
}

/// The files of a remote source.
fn remote_tree(located: &Located, options: &OpenOptions) -> Result<Option<RemoteTree>, SourceError> {
    let repository = located.remote.clone();
    repository.map(|repository| RemoteTree::open(repository, &options.cache(), &options.remote)).transpose()
}

/// The weight files of a repository that fills what the checkpoint lacks.
fn filling(source: &str, options: &OpenOptions) -> Result<Vec<AdapterFiles>, CheckpointError> {
    let located = locate(source, options)?;
    let tree = remote_tree(&located, options)?;
    let alone =
        OpenOptions { adapters: Vec::new(), config_from: None, fill_from: None, variant: None, ..options.clone() };
    // A part of a checkpoint may be just what is missing.
    let fill = open_located(located, tree.as_ref(), &alone, MoreFiles::default())?;
    let mut files = Vec::new();
    for file in fill.files().iter().filter(|file| file.role == FileRole::Weights) {
        let Some(id) = file.file else { continue };
        let (found, dir) = if let Some(tree) = &tree {
            // A single file has no path within its repository.
            let place =
                tree.repository().files.iter().position(|listed| listed.path == file.path || listed.path.is_empty());
            let remote = tree.remote(place.expect("the checkpoint has files of this list only"))?;
            (FoundFile::cached(remote), remote.object.name.to_path_buf())
        } else {
            let path = fill.source().path(id).to_owned();
            (FoundFile::named(&path), path)
        };
        let _opening = options.fetches.begin_path(&dir, "open");
        let weights = found.map_err(|error| SourceError::io(&*dir, "open", error))?.open(None)?;
        files.push(AdapterFiles { dir, config: serde_json::Value::Null, weights, warning: None, fills: true });
    }
    Ok(files)
}

/// Configuration and tokenizer of another repository.
fn companion(source: &str, options: &OpenOptions) -> Result<(Companion, serde_json::Value), CheckpointError> {
    let located = locate(source, options)?;
    let remote = remote_tree(&located, options)?;
    if remote.is_none() && !is_directory(&located, options) {
        let label = format_args!("--config-from {}", located.label);
        return Err(CheckpointError::of_file(label, CONFIG, "expected a directory with this file, or org/name"));
    }
    let tree = tree_of(&located, remote.as_ref(), options)?;
    read_companion(located.label, &*tree)
}

/// The checkpoint at a place: a directory, or a single file. `remote` has the files of a service.
fn open_located(
    located: Located,
    remote: Option<&RemoteTree>,
    options: &OpenOptions,
    more: MoreFiles,
) -> Result<Checkpoint, CheckpointError> {
    let opening = options.fetches.begin_path(&located.path, "open");
    let alone = match remote {
        Some(tree) => match tree.repository().files.iter().position(|file| file.path.is_empty()) {
            Some(alone) => Some(FoundFile::cached(tree.remote(alone)?)),
            None => None,
        },
        None => (!located.path.is_dir()).then(|| FoundFile::named(&located.path)),
    };
    drop(opening);
    if let Some(found) = alone {
        return open_alone(located, found, options, more);
    }
    let tree = tree_of(&located, remote, options)?;
    if orbax::is_orbax(&*tree).map_err(|problem| refusal(&located.label, vec![problem]))? {
        return open_orbax(located, &*tree, options, more);
    }
    drop(tree);
    let folder = match remote {
        Some(tree) => Folder::of(located, None, listing::of_remote(tree)?, options),
        None => Folder::open(located, options, container::is_weights)?,
    };
    open_folder(folder, options, more)
}

/// A single file is a repository of one file, without configuration.
fn open_alone(
    located: Located,
    found: io::Result<FoundFile>,
    options: &OpenOptions,
    more: MoreFiles,
) -> Result<Checkpoint, CheckpointError> {
    let opening = options.fetches.begin_path(&located.path, "open");
    let opened = found.map_err(|error| SourceError::io(&*located.path, "open", error))?.open(None)?;
    let name = located.path.file_name().map_or_else(|| located.label.clone(), |name| name.display().to_string());
    let size_bytes = opened.len_bytes().unwrap_or(0);
    drop(opening);
    let listed = Listed::new(name, FileRole::Weights, size_bytes);
    let chosen = ChosenFiles::new(located, (vec![listed], vec![0]), Box::new(read_file), more);
    chosen.build(vec![opened], options, Problems::default())
}

/// The files of a remote source, or of a directory of this machine.
fn tree_of<'a>(
    located: &Located,
    remote: Option<&'a RemoteTree>,
    options: &OpenOptions,
) -> Result<Box<dyn OpenTree + 'a>, CheckpointError> {
    if let Some(tree) = remote {
        return Ok(Box::new(CachedTree::new(tree)));
    }
    let root = open_root(located, options)?;
    Ok(Box::new(LocalTree::new(root, options.follow_symlinks, Arc::clone(&options.fetches))))
}

/// A version of weights that is published as a difference: the base with all differences until then.
fn open_version(located: Located, options: &OpenOptions, more: MoreFiles) -> Result<Checkpoint, CheckpointError> {
    let label = located.label;
    let refused = |what: &str| CheckpointError::Refused(format!("{label}: a published weight delta{what}"));
    if more.versions.is_some() {
        return Err(refused(", and no base: --base MODEL is a whole repository"));
    }
    let path = if located.remote.is_some() { Ok(label.clone().into()) } else { std::path::absolute(&located.path) };
    let path = path.unwrap_or(located.path).display().to_string();
    let place = path.trim_end_matches('/').rsplit_once('/');
    let (run, name) = place.ok_or_else(|| refused(": expected it in the directory of a run"))?;
    let of_run = locate(run, options)?;
    let remote = remote_tree(&of_run, options)?;
    let tree = tree_of(&of_run, remote.as_ref(), options)?;
    let versions = Versions::find((&label, run, name), &*tree, options.base.as_deref())?;
    drop(tree);
    let base = locate(&versions.base, options)?;
    let remote = remote_tree(&base, options)?;
    let base = Located { label, revision: None, ..base };
    open_located(base, remote.as_ref(), options, MoreFiles { versions: Some(versions), ..more })
}

fn open_folder(mut folder: Folder, options: &OpenOptions, more: MoreFiles) -> Result<Checkpoint, CheckpointError> {
    find_unreadable(&folder.files, &mut folder.problems);
    let ranks = ranks::find(&mut folder)?;
    let found = if ranks.is_some() { Some(Container::Ranks) } else { Container::of(&folder) };
    let text = match found {
        Some(Container::Safetensors) | None => safetensors::index_text(&mut folder, safetensors::INDEX)?,
        Some(Container::Torch) => safetensors::index_text(&mut folder, torch::INDEX)?,
        Some(Container::Dcp | Container::Gguf | Container::Orbax | Container::Ranks) => None,
    };
    // Beside a GGUF file it may say no more than the type of the model. What the file says is that of its tensors.
    let config_text = if found == Some(Container::Gguf) { None } else { folder.read(CONFIG)? };
    let modelopt_text = folder.read(MODELOPT)?;
    let mut companion = None;
    if let (Some(ranks), None, None) = (&ranks, &config_text, &options.config_from) {
        companion = companion::of_folder(&mut folder, &format!("{}{}", ranks.below, ranks::COMPANION))?;
    }
    let index = match &text {
        Some((name, text)) => {
            let unusable = |error| CheckpointError::of_file(&folder.located.label, name, json::fault(&error));
            let index = Index::parse(text).map_err(unusable)?;
            if index.metadata.as_ref().is_some_and(|metadata| !metadata["delta_encoding"].is_null()) {
                return open_version(folder.located, options, more);
            }
            Some((name.as_str(), index))
        }
        None => None,
    };
    let mut index_metadata = None;
    let read: Read<'_> = match (ranks, found) {
        (Some(ranks), _) => {
            ranks.choose(&mut folder);
            Box::new(move |files, _, options, problems| ranks.read(files, options.training_state, problems))
        }
        // A directory without weights is refused there.
        (None, Some(Container::Safetensors) | None) => {
            let index = safetensors::choose(&mut folder, index)?;
            index_metadata = index.as_ref().and_then(|(_, index)| index.metadata.clone());
            Box::new(move |files, _, options, problems| {
                let contents = safetensors::read(files, index.as_ref(), (options.duplicates, false), problems);
                counted(contents, index.is_some(), files, problems)
            })
        }
        (None, Some(Container::Torch)) => {
            torch::choose(&mut folder, index.as_ref())?;
            index_metadata = index.as_ref().and_then(|(_, index)| index.metadata.clone());
            Box::new(move |files, _, OpenOptions { training_state, duplicates, .. }, problems| {
                let contents = torch::read(files, index.as_ref(), (*training_state, *duplicates), problems);
                counted(contents, index.is_some(), files, problems)
            })
        }
        (None, Some(Container::Gguf)) => {
            gguf::choose(&mut folder)?;
            Box::new(|files, source, options, problems| {
                counted(gguf::read(files, source, options.config_from.is_some(), problems), false, files, problems)
            })
        }
        (None, Some(Container::Dcp | Container::Orbax | Container::Ranks)) => {
            dcp::choose(&mut folder);
            Box::new(|files, _, options, problems| dcp::read(files, options.training_state, problems))
        }
    };
    refuse_adapter(&mut folder)?;
    folder.leave_out_pointers()?;
    let found = folder.files.iter().filter(|file| file.role == FileRole::Weights).count();
    folder.problems = of_download(&folder.located, take(&mut folder.problems), found, &folder.files);
    let (weights, opened) = folder.open_files(more.count())?;
    let Folder { located, files, directories, warnings, problems, .. } = folder;
    let chosen = ChosenFiles::new(located, (files, weights), read, more);
    let chosen = ChosenFiles { index_metadata, config_text, modelopt_text, directories, warnings, ..chosen };
    let opened = chosen.build(opened, options, problems)?;
    opened.completed(companion)
}

/// Refuses a directory whose weights are those of an adapter.
fn refuse_adapter(folder: &mut Folder) -> Result<(), CheckpointError> {
    let mut weights = folder.files.iter().filter(|file| file.role == FileRole::Weights).map(|file| &file.path);
    let Some(path) = weights.next().filter(|_| folder.has(ADAPTER_CONFIG)).cloned() else { return Ok(()) };
    if !is_adapter_file(&path) || !weights.all(|path| is_adapter_file(path)) {
        return Ok(());
    }
    let text = folder.read(ADAPTER_CONFIG)?.and_then(Result::ok).unwrap_or_default();
    let config = json::parse(&text).unwrap_or_default();
    let base = config["base_model_name_or_path"].as_str();
    let label = folder.located.label.clone();
    let message = not_a_model(&path, base, &label);
    Err(CheckpointError::of_file(&label, ADAPTER_CONFIG, message))
}

/// Says of a snapshot in the Hub's cache that lacks weight files that its download is unfinished.
fn of_download(located: &Located, problems: Problems, found: usize, files: &[Listed]) -> Problems {
    let Located { label, revision: Some(_), remote: None, .. } = located else { return problems };
    let repo = label.split('@').next().unwrap_or(label);
    problems.of_download(label, repo, found, |path| files.iter().any(|file| file.path == path))
}

/// The error of these problems.
fn refusal(label: &str, found: Vec<Problem>) -> CheckpointError {
    let mut problems = Problems::default();
    problems.extend(found);
    problems.refuse(label).expect_err("there is at least one problem")
}

/// An Orbax checkpoint: only the files that reads need are opened.
fn open_orbax(
    located: Located,
    tree: &dyn OpenTree,
    options: &OpenOptions,
    more: MoreFiles,
) -> Result<Checkpoint, CheckpointError> {
    let found = orbax::read(tree, options.training_state, options.allow_unfinished);
    let mut found = found.map_err(|problems| refusal(&located.label, problems))?;
    let opened = tree.open_files(&found.paths, more.count())?;
    let directories = tree.directories(&found.paths);
    let mut numbered: Vec<(usize, &String)> = found.paths.iter().enumerate().collect();
    numbered.sort_unstable_by_key(|(_, path)| *path);
    let mut weights = vec![0; found.paths.len()];
    for (place, (id, _)) in numbered.iter().enumerate() {
        weights[*id] = place;
    }
    let listed = |(_, path): (usize, &String)| Listed::new(path.clone(), FileRole::Weights, 0);
    let files = (numbered.into_iter().map(listed).collect(), weights);
    let read =
        Box::new(move |_: &PinnedFiles<'_>, source: &_, _: &_, problems: &mut _| found.contents(source, problems));
    let chosen = ChosenFiles::new(located, files, read, more);
    let chosen = ChosenFiles { directories, ..chosen };
    chosen.build(opened, options, Problems::default())
}

/// Reads the weight files as those of their kind are.
type Read<'a> = Box<dyn FnOnce(&PinnedFiles<'_>, &Arc<dyn Source>, &OpenOptions, &mut Problems) -> Contents + 'a>;

/// Counts the numbered files that are used where no index lists them.
fn counted(mut contents: Contents, is_indexed: bool, files: &PinnedFiles<'_>, problems: &mut Problems) -> Contents {
    if !is_indexed {
        let is_used = |id: &FileId| contents.unused.iter().all(|(unused, _)| unused != id);
        let used = files.ids().filter(is_used).map(|id| files.path(id));
        let (incomplete, warnings) = incomplete_sets(used);
        problems.extend(incomplete);
        contents.warnings.extend(warnings);
    }
    contents
}

/// Reads a single file.
fn read_file(
    files: &PinnedFiles<'_>,
    source: &Arc<dyn Source>,
    options: &OpenOptions,
    problems: &mut Problems,
) -> Contents {
    let name = files.path(FileId(0)).to_owned();
    let nothing = Contents::default;
    let Some(kind) = problems.taken(foreign::of_file(files.source, FileId(0), &name)) else { return nothing() };
    match kind {
        FileKind::Gguf => gguf::read(files, source, options.config_from.is_some(), problems),
        FileKind::Torch => torch::read(files, None, (options.training_state, None), problems),
        FileKind::Safetensors => safetensors::read(files, None, (None, true), problems),
        FileKind::Foreign(text) => {
            let directory = files.source.path(FileId(0)).parent().filter(|_| text.ends_with(foreign::ITS_DIRECTORY));
            let directory = directory.map_or_else(String::new, |directory| format!(", {}", directory.display()));
            problems.of_file(name, format_args!("{text}{directory}"));
            nothing()
        }
    }
}

/// Files that are read besides those of a source. They are the last ones of its files.
#[derive(Default)]
struct MoreFiles {
    adapters: Vec<AdapterFiles>,
    versions: Option<Versions>,
    average: Option<AveragedSources>,
}

impl MoreFiles {
    fn count(&self) -> usize {
        let versions = self.versions.as_ref().map_or(0, |versions| versions.opened.len());
        self.adapters.len() + versions + self.average.as_ref().map_or(0, AveragedSources::file_count)
    }
}

/// A repository with its chosen weight files. The source holds these first, then the other readable files, in order.
struct ChosenFiles<'a> {
    located: Located,
    files: Vec<Listed>,
    /// Indices in `files`, in the order of their ids.
    weights: Vec<usize>,
    read: Read<'a>,
    /// The `metadata` member of the index.
    index_metadata: Option<serde_json::Value>,
    /// The text of `config.json`, or the reason why it is not available. `None` if there is none.
    config_text: Option<Text>,
    /// The text of `hf_quant_config.json`, likewise.
    modelopt_text: Option<Text>,
    more: MoreFiles,
    /// Directories with the gates before them.
    directories: Vec<(String, DirectoryRules)>,
    warnings: Vec<String>,
}

impl<'a> ChosenFiles<'a> {
    /// These weight files and nothing else.
    fn new(located: Located, (files, weights): (Vec<Listed>, Vec<usize>), read: Read<'a>, more: MoreFiles) -> Self {
        let (config_text, modelopt_text, index_metadata) = (None, None, None);
        let (directories, warnings) = (Vec::new(), Vec::new());
        Self { located, files, weights, read, index_metadata, config_text, modelopt_text, more, directories, warnings }
    }

    /// Adds the weights of adapters to the files.
    fn add_adapters(&mut self, files: Vec<AdapterFiles>, opened: &mut Vec<Opened>) -> Vec<Adapter> {
        let mut adapters = Vec::with_capacity(files.len());
        for AdapterFiles { dir, config, weights, warning, fills } in files {
            let file = FileId::at(opened.len());
            opened.push(weights);
            adapters.push(Adapter { dir, file, config, fills });
            self.warnings.extend(warning);
        }
        adapters
    }

    /// `opened` are the files of the repository in the order of their ids.
    fn build(
        mut self,
        mut opened: Vec<Opened>,
        options: &OpenOptions,
        mut problems: Problems,
    ) -> Result<Checkpoint, CheckpointError> {
        let MoreFiles { adapters, mut versions, mut average } = take(&mut self.more);
        let adapters = self.add_adapters(adapters, &mut opened);
        let first = opened.len();
        opened.extend(versions.iter_mut().flat_map(|versions| take(&mut versions.opened)));
        if let Some(average) = &mut average {
            average.append_files(&mut opened);
        }
        let source = pin(opened, options, &mut problems)?;
        let pinned = PinnedFiles { files: &self.files, weights: &self.weights, source: &*source };
        let mut contents = (self.read)(&pinned, &source, options, &mut problems);
        let files = repo_files(&pinned, &contents.unused);
        let (mut table, mut partial) = (take(&mut contents.table), take(&mut contents.partial));
        self.warnings.append(&mut contents.warnings);
        let (pinned, mut decoded) = (source.file_count(), take(&mut contents.decoded));
        let mut replaced = hashbrown::HashMap::new();
        if let Some(versions) = versions {
            let of_base = (&*source, first, self.index_metadata.as_ref());
            (table, replaced) = versions.apply(of_base, table, &mut decoded, &mut problems);
            partial.extend(replaced.values());
        }
        if let Some(average) = &mut average {
            average.append_decoded(&*source, &mut decoded, &mut problems);
        }
        let decoded: Arc<[DecodedFile]> = decoded.into();
        let source = ChunkSource::over(source, &decoded);
        let config = self.config_text.as_ref().and_then(|text| parsed(CONFIG, text, &mut problems));
        let config = config.or(contents.config.take());
        let modelopt = self.modelopt_text.as_ref().and_then(|text| parsed(MODELOPT, text, &mut problems));
        let settings = (quantization_config(config.as_ref()), modelopt.as_ref());
        let stored = Stored::new((&table, &*source), settings, &contents.file_metadata, own_dtype(config.as_ref()));
        // Both visit the names of all tensors: they run at the same time.
        let mut found = Problems::default();
        let (quantized, mut dialect) = rayon::join(
            || {
                let mut quantized = scheme::find(&stored, &mut problems);
                let misread = config.as_ref().and_then(|config| promised::misread(&quantized.tensors, config));
                quantized.unsupported.extend(misread);
                Arc::new(quantized)
            },
            || Dialect::of(&table, config.as_ref(), Quantization::default(), &mut found),
        );
        drop(stored);
        let ranks = (contents.are_ranks, contents.are_ranks);
        let compared = config.as_ref().and_then(|config| promised::compare(&table, config, ranks, &mut found));
        self.warnings.extend(compared);
        if let (Some(files), None) = (contents.uncounted, &config) {
            self.warnings.push(format!(
                "files of ranks: {files}, and nothing says how many there were: if the files of the last ranks are missing, tensors are \
                 shorter; --config-from compares them with a model"
            ));
        }
        problems.append(found);
        dialect.quantization = Quantization::of(&quantized, quantization_config(config.as_ref()));
        let table = with_adapters(table, &adapters, &*source, &mut problems);
        let table = average.iter_mut().try_fold(table, |table, average| average.append_tensors(table));
        let table = problems.or_too_large(table.and_then(|table| table.with_quantized(&quantized)));
        let merges = average.map(|average| {
            let shown = (&table, &*source, &*quantized, config.as_ref());
            Arc::new(average.merges(shown, &self.located.label, &mut problems, &mut self.warnings))
        });
        self.warnings.extend(problems.warnings());
        let lacks_named = problems.missing.count > 0;
        // Without an index, what is missing shows when the files that are there are read.
        let problems = of_download(&self.located, problems, self.weights.len(), &self.files);
        problems.refuse(&self.located.label)?;
        let Located { path, label, revision, remote: _ } = self.located;
        let opened = OpenedRepository {
            root: path,
            label,
            revision,
            contents,
            quantized,
            adapters,
            pinned,
            decoded,
            averaged: options.average.clone(),
            replaced,
            lacks_named,
            directories: self.directories,
            compared: Mutex::default(),
        };
        Ok(Checkpoint {
            source,
            table,
            files,
            config,
            dialect,
            companion: None,
            partial,
            warnings: self.warnings,
            merges,
            recoded: None,
            opened: Arc::new(opened),
        })
    }
}

/// The source of open files.
fn pin(opened: Vec<Opened>, options: &OpenOptions, problems: &mut Problems) -> Result<Arc<dyn Source>, SourceError> {
    if let Some(kept) = &options.kept_open {
        kept.lock().clone_from(&opened);
    }
    let source = pin_files(opened, options.io, Arc::clone(&options.fetches), options.compared.as_ref())?;
    if source.files().map(|file| source.len_bytes(file)).fold(0, u64::saturating_add) > BYTES_MAX {
        problems.push(Problem::TooManyBytes);
    }
    Ok(source)
}

/// All files of a repository, with their ids.
fn repo_files(files: &PinnedFiles<'_>, unused: &[(FileId, IgnoreReason)]) -> Vec<RepoFile> {
    let ids: HashMap<&str, FileId> = files.all().collect();
    let file = |listed: &Listed| {
        let file = ids.get(listed.path.as_str()).copied();
        let reason = unused.iter().find(|(id, _)| Some(*id) == file).map(|(_, reason)| *reason);
        RepoFile {
            path: listed.path.clone(),
            role: reason.map_or_else(|| listed.role.clone(), FileRole::Ignored),
            size_bytes: file.map_or(listed.size_bytes, |file| files.source.len_bytes(file)),
            file,
        }
    };
    files.files.iter().map(file).collect()
}

/// The table, with the tensors of adapters after the repository's own. The table hides the adapters' tensors.
fn with_adapters(own: TensorTable, adapters: &[Adapter], source: &dyn Source, problems: &mut Problems) -> TensorTable {
    if adapters.is_empty() {
        return own;
    }
    let header = |Adapter { dir, file, .. }: &Adapter| {
        Some((*file, problems.taken(read_header(source, *file, dir.join(ADAPTER_WEIGHTS).display()))?))
    };
    let headers: Vec<(FileId, Header)> = adapters.iter().filter_map(header).collect();
    problems.or_too_large(own.with_hidden_rows(header::rows(&headers)))
}
