//! An opened repository, and the tensors that it shows: stored or decoded, all or some of them.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs_source::{FileId, Source, permission::DirectoryRules};
use ckfs_tensor::{TensorId, View};
use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;

use super::{
    choose::CONFIG,
    companion::Companion,
    composed::Composed,
    container::{Container, Contents},
    dialect::Dialect,
    file::{FileRole, IgnoreReason, RepoFile},
    merges::Merges,
    orbax::DecodedFile,
    prefix,
    problem::{CheckpointError, Problems},
    promised,
    scheme::{FILE_MARK, Found, Quantization, Quantized, Summary, members},
    table::{Storage, TensorInfo, TensorTable},
    tied,
};

/// An adapter beside the repository. Its tensors are hidden until a view requests them.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Its directory.
    pub dir: PathBuf,
    /// Its weights.
    pub file: FileId,
    /// Its `adapter_config.json`.
    pub config: serde_json::Value,
    /// Whether it is no adapter, but weights that fill what the checkpoint lacks. `dir` is then the file.
    pub fills: bool,
}

/// An opened repository.
pub struct Checkpoint {
    pub(super) source: Arc<dyn Source>,
    pub(super) table: TensorTable,
    pub(super) files: Vec<RepoFile>,
    pub(super) config: Option<serde_json::Value>,
    pub(super) dialect: Dialect,
    pub(super) companion: Option<Arc<Companion>>,
    /// Weight files that hold tensors which are not shown: copies, and what an index does not name.
    pub(super) partial: BTreeSet<FileId>,
    pub(super) warnings: Vec<String>,
    /// An adapter that is merged into the tensors.
    pub(super) merges: Option<Arc<Merges>>,
    /// The quantized tensors, if their codes are shown in another form than the stored one.
    pub(super) recoded: Option<Arc<Found>>,
    /// What is the same in everything that is derived from it.
    pub opened: Arc<OpenedRepository>,
}

/// What is the same in everything that is derived from one opened repository.
pub struct OpenedRepository {
    pub(super) root: PathBuf,
    pub(super) label: String,
    pub(super) revision: Option<String>,
    /// What the weight files hold, without the table and the decoded files.
    pub contents: Contents,
    pub(super) quantized: Arc<Found>,
    /// All adapters.
    pub adapters: Vec<Adapter>,
    /// Number of pinned files, and the files after them, which the source decodes.
    pub(super) pinned: usize,
    pub(super) decoded: Arc<[DecodedFile]>,
    /// The terms of the average that it is: sources and weights, in the order of the sum.
    pub(super) averaged: Vec<(String, f32)>,
    /// Decoded files of tensors that differ from those of a base, and the files where the base has them.
    pub(super) replaced: HashMap<FileId, FileId>,
    /// Whether the index names tensors that no file has, which the user accepts.
    pub lacks_named: bool,
    /// The directories of the repository that have files, relative to it, each with the users that its permissions
    /// admit. The first one is its own, called "". Empty if the checkpoint is a single file.
    pub directories: Vec<(String, DirectoryRules)>,
    /// Output heads that were compared with the embedding, here or in what was derived from the same checkpoint: by the ids of both,
    /// whether they are equal.
    pub(super) compared: Mutex<HashMap<(TensorId, TensorId), bool>>,
}

/// The tensor that every checkpoint of Megatron has, and no repository.
const MEGATRON: &str = "embedding.word_embeddings.weight";

impl Checkpoint {
    /// This checkpoint with some tensors hidden and others renamed, and possibly another configuration. `name` gives
    /// each tensor's name, or `None` to hide it. Of adapters, only the tensors of `adapter` are passed to `name`. Ids
    /// do not change, so that this checkpoint can read the views of the result.
    ///
    /// # Errors
    /// The reasons: two tensors of one name, or names that are too long together.
    pub fn derived(
        &self,
        config: Option<serde_json::Value>,
        adapter: Option<FileId>,
        mut name: impl FnMut(TensorId, &TensorInfo<'_>) -> Option<String>,
    ) -> Result<Self, Vec<String>> {
        let of_file = |file| self.table.stored_ids().filter(move |id| self.file_of(*id) == file);
        let of_adapter = adapter.into_iter().flat_map(of_file);
        let offered = self.tensors().map(|(id, _)| id).chain(of_adapter);
        let rows = offered.filter_map(|id| Some((id, Cow::Owned(name(id, &self.tensor(id))?))));
        self.showing(&self.table, rows, config)
    }

    /// This checkpoint with quantized tensors decoded, in the place of their codes. Hidden are the stored tensors that
    /// they are decoded from, and those that decoding makes superfluous. Tensors for which `is_raw` is true, by the id
    /// of the decoded tensor, stay as they are stored.
    ///
    /// # Errors
    /// None for a checkpoint as it was opened: its decoded names are known to be distinct.
    pub fn decoded(&self, is_raw: &dyn Fn(TensorId) -> bool) -> Result<Self, Vec<String>> {
        let found = &self.opened.quantized;
        // By id of a stored tensor.
        let mut place: Vec<Option<TensorId>> = vec![None; self.table.id_end()];
        let mut is_hidden = vec![false; place.len()];
        let mut is_raw_part = is_hidden.clone();
        let mark = |marks: &mut [bool], ids: &mut dyn Iterator<Item = TensorId>| {
            ids.for_each(|id| marks[id.0 as usize] = true);
        };
        mark(&mut is_hidden, &mut found.left_out.iter().copied());
        let module = |id: TensorId| {
            let name = self.tensor(id).name;
            name.rsplit_once('.').map_or(name, |(module, _)| module)
        };
        let mut raw_modules: HashSet<&str> = HashSet::new();
        for (number, tensor) in found.tensors.iter().enumerate() {
            let id = self.table.decoded_id(number);
            if is_raw(id) {
                mark(&mut is_raw_part, &mut tensor.operands.iter().copied());
                raw_modules.insert(module(tensor.operands[0]));
            } else {
                place[tensor.operands[0].0 as usize] = Some(id);
                mark(&mut is_hidden, &mut tensor.operands[1..].iter().copied());
            }
        }
        // Nobody could decode these later without what no decoder reads here, such as the shape of a packed matrix, or the tensor
        // that marks a whole file, which is in no module.
        if !raw_modules.is_empty() {
            let left_out = found.left_out.iter().copied();
            let belongs = |id: &TensorId| {
                let name = self.tensor(*id).name;
                raw_modules.contains(module(*id)) || name.rsplit('.').next() == Some(FILE_MARK)
            };
            mark(&mut is_raw_part, &mut left_out.filter(belongs));
        }
        let rows = self.tensors().filter_map(|(id, info)| match place[id.0 as usize] {
            Some(decoded) => Some((decoded, Cow::Borrowed(self.tensor(decoded).name))),
            None if is_hidden[id.0 as usize] && !is_raw_part[id.0 as usize] => None,
            None => Some((id, Cow::Borrowed(info.name))),
        });
        self.showing(&self.table, rows, None)
    }

    /// This checkpoint with composed tensors in the place of the tensors that they are parts of, and with other tensors renamed.
    /// `name` gives the new name of a tensor that is to have one. Ids do not change, so that this checkpoint can read the
    /// views of the result.
    ///
    /// # Errors
    /// As of [`Checkpoint::derived`].
    pub fn composed(
        &self,
        composed: Vec<Composed>,
        name: impl Fn(TensorId, &TensorInfo<'_>) -> Option<String>,
    ) -> Result<Self, Vec<String>> {
        let name = |id, info: &TensorInfo<'_>| Some(name(id, info).unwrap_or_else(|| info.name.to_owned()));
        Ok(self.with_composed(composed, name, None)?.0)
    }

    /// This checkpoint with the codes of all quantized tensors in another form, `composed`. `operands` are, for each of them in order,
    /// the numbers of those that it is decoded from then, the codes first. Every stored tensor that the old form is made of, and that
    /// the new one reads, is hidden. `config` says what the new form is, and `text` says it to readers.
    ///
    /// # Errors
    /// As of [`Checkpoint::derived`].
    pub fn recoded(
        &self,
        composed: Vec<Composed>,
        operands: &[Vec<usize>],
        config: serde_json::Value,
        text: String,
    ) -> Result<Self, Vec<String>> {
        let found = self.quantized();
        let old = found.tensors.iter().flat_map(|tensor| tensor.operands.iter().copied());
        let read = composed.iter().flat_map(|made| made.view.as_ref().map(View::source_ids).unwrap_or_default());
        let hidden: HashSet<TensorId> = old.chain(found.left_out.iter().copied()).chain(read).collect();
        let name = |id, info: &TensorInfo<'_>| (!hidden.contains(&id)).then(|| info.name.to_owned());
        let (mut recoded, first) = self.with_composed(composed, name, Some(config))?;
        let ids =
            |numbers: &Vec<usize>| numbers.iter().map(|number| recoded.table.composed_id(first + number)).collect();
        let tensor = |(tensor, numbers): (&Quantized, _)| Quantized { operands: ids(numbers), ..tensor.clone() };
        let tensors = found.tensors.iter().zip(operands).map(tensor).collect();
        recoded.recoded = Some(Arc::new(Found { tensors, ..Found::default() }));
        let summary = Summary { scheme: "recoded", text, details: Vec::new() };
        recoded.dialect.quantization = Quantization { schemes: vec![summary], ..Quantization::default() };
        Ok(recoded)
    }

    /// Whether codes are shown in another form than the stored one.
    pub const fn is_recoded(&self) -> bool {
        self.recoded.is_some()
    }

    /// This checkpoint with composed tensors in the place of others, and the number of the first of them. `name` gives the name of
    /// each tensor that stays.
    fn with_composed(
        &self,
        composed: Vec<Composed>,
        name: impl Fn(TensorId, &TensorInfo<'_>) -> Option<String>,
        config: Option<serde_json::Value>,
    ) -> Result<(Self, usize), Vec<String>> {
        let mut parts: HashMap<TensorId, Vec<(usize, String)>> = HashMap::new();
        for (number, tensor) in composed.iter().enumerate() {
            parts.entry(tensor.of).or_default().push((number, tensor.name.clone()));
        }
        let table = self.table.clone().with_composed(composed);
        let (table, first) = table.ok_or_else(|| vec!["there are more tensors than 32 bits can number".to_owned()])?;
        let mut rows: Vec<(TensorId, Cow<'_, str>)> = Vec::with_capacity(self.table.len());
        for (id, info) in self.tensors() {
            match parts.remove(&id) {
                Some(parts) => {
                    let parts = parts.into_iter();
                    rows.extend(parts.map(|(number, name)| (table.composed_id(first + number), Cow::Owned(name))));
                }
                None => rows.extend(name(id, &info).map(|name| (id, Cow::Owned(name)))),
            }
        }
        Ok((self.showing(&table, rows.into_iter(), config)?, first))
    }

    /// This checkpoint showing these rows of `all`, which is its own table, or that with more tensors.
    fn showing<'a>(
        &self,
        all: &'a TensorTable,
        rows: impl Iterator<Item = (TensorId, Cow<'a, str>)>,
        config: Option<serde_json::Value>,
    ) -> Result<Self, Vec<String>> {
        let table = all.derived(rows);
        let table = table.ok_or_else(|| vec!["the names of all tensors together are longer than 4 GiB".to_owned()])?;
        let both = |ids: [TensorId; 2]| {
            let [first, second] = ids.map(|id| all.tensor(id).name);
            format!("{first} and {second} would both be called {}", table.tensor(ids[0]).name)
        };
        let wrong: Vec<String> = table.repeated().map(both).collect();
        if !wrong.is_empty() {
            return Err(wrong);
        }
        let mut problems = Problems::default();
        let config = config.or_else(|| self.config.clone());
        let quantization = self.dialect.quantization.clone();
        let dialect = Dialect::of(&table, config.as_ref(), quantization, &mut problems);
        if let Err(error) = problems.refuse(&self.opened.label) {
            return Err(vec![error.to_string()]);
        }
        Ok(Self {
            source: Arc::clone(&self.source),
            table,
            files: self.files.clone(),
            config,
            dialect,
            companion: self.companion.clone(),
            partial: self.partial.clone(),
            warnings: self.warnings.clone(),
            merges: self.merges.clone(),
            recoded: self.recoded.clone(),
            opened: Arc::clone(&self.opened),
        })
    }

    /// This checkpoint with an adapter merged into its tensors. The table stays that of the stored tensors: what is made of one is
    /// for the views of it ([`Checkpoint::merges`]).
    ///
    /// # Errors
    /// As of [`Checkpoint::derived`]; none for a checkpoint as it was opened.
    pub fn merging(&self, merges: Arc<Merges>) -> Result<Self, Vec<String>> {
        let rows = self.tensors().map(|(id, info)| (id, Cow::Borrowed(info.name)));
        let same = self.showing(&self.table, rows, None)?;
        Ok(Self { merges: Some(merges), ..same })
    }

    /// The base of a training checkpoint that holds an adapter too: `name` gives each tensor of the base its name, and `None` to what
    /// is the adapter's. No file of weights is given out as it is, and none for which `is_of_adapter` is true.
    ///
    /// # Errors
    /// As of [`Checkpoint::derived`].
    pub fn without_adapter(
        &self,
        is_of_adapter: &dyn Fn(&str) -> bool,
        name: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Vec<String>> {
        let mut base = self.derived(None, None, |_, info| name(info.name))?;
        let weights = base.files.iter().filter(|file| file.role == FileRole::Weights);
        base.partial.extend(weights.filter_map(|file| file.file));
        base.files.retain(|file| file.role == FileRole::Weights || !is_of_adapter(&file.path));
        if let Some(companion) = base.companion.as_mut().map(Arc::make_mut) {
            companion.files.retain(|(path, _)| !is_of_adapter(path));
        }
        Ok(base)
    }

    /// The average that it is, in words; `None` if it is none.
    pub fn averaged(&self) -> Option<String> {
        let terms: Vec<String> =
            self.opened.averaged.iter().map(|(source, weight)| format!("{weight} * {source}")).collect();
        (!terms.is_empty()).then(|| terms.join(" + "))
    }

    /// What is merged into the tensors, if anything is.
    pub fn merges(&self) -> Option<&Merges> {
        self.merges.as_deref()
    }

    /// The tensors of an adapter, under its own names.
    pub fn of_adapter(&self, adapter: &Adapter) -> impl Iterator<Item = (TensorId, TensorInfo<'_>)> {
        let file = adapter.file;
        let ids = self.table.stored_ids().filter(move |id| self.file_of(*id) == file);
        ids.map(|id| (id, self.tensor(id)))
    }

    /// The adapter in a directory, if the checkpoint was opened with it.
    pub fn adapter(&self, dir: &Path) -> Option<&Adapter> {
        self.opened.adapters.iter().find(|adapter| adapter.dir == dir && !adapter.fills)
    }

    /// Configuration and tokenizer from another repository, if the checkpoint was opened with them. [`Checkpoint::config`] is then
    /// theirs.
    pub fn companion(&self) -> Option<&Arc<Companion>> {
        self.companion.as_ref()
    }

    /// The tensors that fill what the checkpoint lacks, under the names of their own repository.
    pub fn fill(&self) -> impl Iterator<Item = (TensorId, TensorInfo<'_>)> {
        let files: HashSet<FileId> =
            self.opened.adapters.iter().filter(|adapter| adapter.fills).map(|adapter| adapter.file).collect();
        let ids = if files.is_empty() { None } else { Some(self.table.stored_ids()) };
        let rows = ids.into_iter().flatten().map(|id| (id, self.tensor(id)));
        rows.filter(move |(id, _)| files.contains(&self.file_of(*id)))
    }

    /// This checkpoint with the configuration and the tokenizer of another repository, if there is one.
    ///
    /// # Errors
    /// The configuration contradicts itself.
    pub(super) fn completed(
        mut self,
        companion: Option<(Companion, serde_json::Value)>,
    ) -> Result<Self, CheckpointError> {
        let Some((companion, config)) = companion else { return Ok(self) };
        let mut problems = Problems::default();
        let quantization = self.dialect.quantization.clone();
        if let Some(lost) = members::lost(config.get("quantization_config")) {
            let message = format!(
                "quantization_config has {lost}, which says what the weights mean, and no file that is made of them would say so; \
                 name the model that it was quantized from"
            );
            problems.of_file(CONFIG, message);
        }
        self.dialect = Dialect::of(&self.table, Some(&config), quantization, &mut problems);
        let ranks = (self.opened.contents.are_ranks, true);
        self.warnings.extend(promised::compare(&self.table, &config, ranks, &mut problems));
        problems.refuse(&format!("--config-from {}", companion.label))?;
        (self.config, self.companion) = (Some(config), Some(Arc::new(companion)));
        Ok(self)
    }

    /// Warnings about the choice of files.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The source of bytes. All readable files of the repository are pinned in it.
    pub fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// The same checkpoint with another source, for example a wrapper of the present one.
    ///
    /// # Panics
    /// If `wrap` returns a source with another number of files.
    #[must_use]
    pub fn with_source(mut self, wrap: impl FnOnce(Arc<dyn Source>) -> Arc<dyn Source>) -> Self {
        let files = self.source.file_count();
        self.source = wrap(self.source);
        assert_eq!(self.source.file_count(), files, "files of the other source");
        self
    }

    /// Directory of the repository, or the file where the checkpoint is a single file.
    pub fn root(&self) -> &Path {
        &self.opened.root
    }

    /// The user's name for it, with the revision found for a name in the cache.
    pub fn label(&self) -> &str {
        &self.opened.label
    }

    /// Commit of a repository in the cache.
    pub fn revision(&self) -> Option<&str> {
        self.opened.revision.as_deref()
    }

    /// What the files of weights are.
    pub fn container(&self) -> Container {
        self.opened.contents.container
    }

    /// Whether it is a repository of Hugging Face: safetensors of whole tensors, or any weights beside a `config.json` of
    /// its own. Trainers put that of their files of ranks into a directory beside them.
    pub fn is_repository(&self) -> bool {
        let is_config = |file: &RepoFile| file.path == CONFIG && file.file.is_some();
        if self.opened.contents.container == Container::Ranks {
            // Those of Megatron have its own names, which a layout takes back.
            return self.config.is_some() && self.find(MEGATRON).is_none();
        }
        if self.opened.contents.container == Container::Gguf {
            return self.opened.contents.unnamed.is_none();
        }
        self.opened.contents.container == Container::Safetensors || self.files.iter().any(is_config)
    }

    /// The rename that takes the wrappers of training programs from all names, as `--source-rename` takes it; `None` if there
    /// are none. Also whether it is certain that they are wrappers.
    pub fn proposed_rename(&self) -> Option<(String, bool)> {
        let names: Vec<&str> = self.tensors().map(|(_, info)| info.name).collect();
        prefix::proposed_rename(&names)
    }

    /// The tensor table.
    pub fn table(&self) -> &TensorTable {
        &self.table
    }

    /// All tensors with their ids, in order of id.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (TensorId, TensorInfo<'_>)> {
        self.table.iter()
    }

    /// One tensor.
    ///
    /// # Panics
    /// If `id` is not of this checkpoint.
    pub fn tensor(&self, id: TensorId) -> TensorInfo<'_> {
        self.table.tensor(id)
    }

    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.table.find(name)
    }

    /// Every file of the repository, sorted by path.
    pub fn files(&self) -> &[RepoFile] {
        &self.files
    }

    /// The repository's `config.json`, if it has one.
    pub fn config(&self) -> Option<&serde_json::Value> {
        self.config.as_ref()
    }

    /// Whether every tensor of a weight file is the model's. Another file is never given out as it is.
    pub fn is_whole(&self, file: FileId) -> bool {
        !self.partial.contains(&file)
    }

    /// The `__metadata__` member of a weight file's header, in order; empty if it has none.
    pub fn file_metadata(&self, file: FileId) -> &[(String, String)] {
        self.opened.contents.file_metadata.get(&file).map_or(&[], Vec::as_slice)
    }

    /// How the repository names, fuses and quantizes.
    pub fn dialect(&self) -> &Dialect {
        &self.dialect
    }

    /// The quantized tensors of known schemes, and how each is decoded. As in the repository, also if they are hidden
    /// or renamed here. Where codes have another form, their operands are what they are decoded from here.
    pub fn quantized(&self) -> &Found {
        self.recoded.as_ref().unwrap_or(&self.opened.quantized)
    }

    /// The quantized tensors that are shown here as they are stored.
    pub fn raw(&self) -> impl Iterator<Item = &Quantized> {
        let found = self.quantized();
        let shown: HashSet<TensorId> =
            if found.tensors.is_empty() { HashSet::new() } else { self.tensors().map(|(id, _)| id).collect() };
        found.tensors.iter().filter(move |tensor| shown.contains(&tensor.operands[0]))
    }

    /// Whether the codes of all quantized tensors have the names that the tensors have when decoded.
    pub fn keeps_names(&self) -> bool {
        self.raw().all(|tensor| self.tensor(tensor.operands[0]).name.ends_with(&*tensor.name))
    }

    /// The file of a tensor's first byte: its own, that of its codes if it is decoded, or that of its first box. If it is made by
    /// differences from a base, where the base has it.
    ///
    /// # Panics
    /// If `id` is not of this checkpoint.
    pub fn file_of(&self, id: TensorId) -> FileId {
        match self.tensor(id).storage {
            Storage::Plain { file, .. } => self.opened.replaced.get(&file).copied().unwrap_or(file),
            Storage::Quantized(quantized) => self.file_of(quantized.operands[0]),
            Storage::Mosaic(mosaic) => mosaic.file,
            Storage::Composed(composed) => self.file_of(composed.of),
        }
    }

    /// The files that a tensor's bytes are in: its own, or those of its codes and operands, or of its boxes. With repeats.
    ///
    /// # Panics
    /// If `id` is not of this checkpoint.
    pub fn files_of(&self, id: TensorId) -> Vec<FileId> {
        match self.tensor(id).storage {
            Storage::Plain { file, .. } => vec![file],
            Storage::Quantized(quantized) => quantized.operands.iter().map(|id| self.tensor(*id).file()).collect(),
            Storage::Mosaic(mosaic) => mosaic.ids().map(|id| self.tensor(id).file()).collect(),
            Storage::Composed(composed) => self.files_of(composed.of),
        }
    }

    /// The embedding that serves as an output head that is not stored. Tensors for which `is_outside` is true belong to
    /// another model and are passed over.
    pub fn embedding(&self, is_outside: &dyn Fn(&str) -> bool) -> Option<&str> {
        tied::embedding(&self.table, is_outside)
    }

    /// Ignored files that are not known copies: each deserves a warning.
    pub fn suspicious_files(&self) -> impl Iterator<Item = &RepoFile> {
        self.files.iter().filter(|file| file.role == FileRole::Ignored(IgnoreReason::NotInIndex))
    }
}
