//! What schemes look at: the stored tensors, what the configuration says of quantization, and bytes of small tensors.

use std::{collections::BTreeMap, hash::BuildHasher, sync::OnceLock};

use ckfs_source::{FileId, Source};
use ckfs_tensor::{DType, TensorId};
use hashbrown::{DefaultHashBuilder, HashSet, HashTable, hash_table::Entry};
use rayon::prelude::*;
use serde_json::Value;

use crate::{
    problem::Problem,
    table::{TensorInfo, TensorTable},
};

/// Longest tensor that is read while a repository is opened, in bytes: indices of groups, tables of codes, shapes.
const READ_BYTES_MAX: u64 = 4 << 20;

/// Names that one task looks at.
const IDS_A_TASK: usize = 4096;

/// A repository, as schemes see it.
pub(crate) struct Stored<'a> {
    pub(super) table: &'a TensorTable,
    /// The tensors with a span of their own. Codes that are stored as boxes are not decoded.
    plain: Vec<TensorId>,
    /// Tensors that are stored as several boxes, which no scheme decodes.
    in_boxes: Vec<TensorId>,
    names_in_boxes: HashSet<&'a str>,
    /// By name. Made when it is first needed: where no name has a word of a scheme, it never is.
    by_name: OnceLock<HashTable<TensorId>>,
    hasher: DefaultHashBuilder,
    /// Last words of all names.
    words: HashSet<&'a str>,
    source: &'a dyn Source,
    /// `quantization_config`, `compression_config`, or MLX's `quantization` of `config.json`.
    pub(super) config: Option<&'a Value>,
    /// `hf_quant_config.json`, which `ModelOpt` writes.
    pub(super) modelopt: Option<&'a Value>,
    metadata: &'a BTreeMap<FileId, Vec<(String, String)>>,
    /// The model's own dtype: that of `config.json`, or else bf16.
    pub(super) dtype: DType,
}

impl<'a> Stored<'a> {
    /// `config` is `quantization_config` or what stands for it; `modelopt` is `hf_quant_config.json`; `metadata` are the
    /// `__metadata__` members of headers; `dtype` is the model's own.
    pub(crate) fn new(
        (table, source): (&'a TensorTable, &'a dyn Source),
        (config, modelopt): (Option<&'a Value>, Option<&'a Value>),
        metadata: &'a BTreeMap<FileId, Vec<(String, String)>>,
        dtype: DType,
    ) -> Self {
        let (in_boxes, plain): (Vec<_>, Vec<_>) =
            table.iter().map(|(id, _)| id).partition(|id| table.tensor(*id).mosaic().is_some());
        let word = |id: &TensorId| last_word(table.tensor(*id).name);
        let words_of = |ids: &[TensorId]| ids.iter().map(word).collect::<HashSet<_>>();
        let all = plain.par_chunks(IDS_A_TASK).chain(in_boxes.par_chunks(IDS_A_TASK));
        let words = all.map(words_of).reduce(HashSet::new, |mut some, more| {
            some.extend(more);
            some
        });
        let names_in_boxes = in_boxes.iter().map(|id| table.tensor(*id).name).collect();
        let (by_name, hasher) = (OnceLock::new(), DefaultHashBuilder::default());
        Self {
            table,
            plain,
            in_boxes,
            names_in_boxes,
            by_name,
            hasher,
            words,
            source,
            config,
            modelopt,
            metadata,
            dtype,
        }
    }

    fn by_name(&self) -> &HashTable<TensorId> {
        self.by_name.get_or_init(|| {
            let mut ids = HashTable::with_capacity(self.plain.len());
            let hash = |id: &TensorId| self.hasher.hash_one(self.tensor(*id).name);
            for (id, info) in self.iter() {
                match ids.entry(hash(&id), |other| self.tensor(*other).name == info.name, hash) {
                    Entry::Occupied(mut last) => *last.get_mut() = id,
                    Entry::Vacant(place) => drop(place.insert(id)),
                }
            }
            ids
        })
    }

    /// All stored tensors, in order of id: by file, and within a file by place.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = (TensorId, TensorInfo<'a>)> {
        let table = self.table;
        self.plain.iter().map(move |id| (*id, table.tensor(*id)))
    }

    /// The same, for several threads.
    pub(crate) fn par_iter(&self) -> impl ParallelIterator<Item = (TensorId, TensorInfo<'a>)> {
        let table = self.table;
        self.plain.par_iter().map(move |id| (*id, table.tensor(*id)))
    }

    /// All tensors that are stored as several boxes. They are not among [`Self::iter`].
    pub(crate) fn in_boxes(&self) -> impl Iterator<Item = (TensorId, TensorInfo<'a>)> {
        let table = self.table;
        self.in_boxes.iter().map(move |id| (*id, table.tensor(*id)))
    }

    /// Whether there is a tensor of that name, in boxes or not.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(name).is_some() || self.names_in_boxes.contains(name)
    }

    /// One stored tensor.
    ///
    /// # Panics
    /// If `id` is not of this repository.
    pub(crate) fn tensor(&self, id: TensorId) -> TensorInfo<'a> {
        self.table.tensor(id)
    }

    /// The stored tensor `<module>.<name>`, in whatever file. Where no tensor at all has such a last word, this costs next to
    /// nothing.
    pub(crate) fn companion(&self, module: &str, name: &str) -> Option<TensorId> {
        if !self.words.contains(last_word(name)) {
            return None;
        }
        self.find(&format!("{module}.{name}"))
    }

    /// The stored tensor `<stem><end>`. Ends that begin with a dot are looked up as companions are.
    pub(crate) fn beside(&self, stem: &str, end: &str) -> Option<TensorId> {
        match end.strip_prefix('.') {
            Some(name) => self.companion(stem, name),
            None => self.find(&format!("{stem}{end}")),
        }
    }

    /// Whether the name of some tensor ends with this word.
    pub(crate) fn has_word(&self, word: &str) -> bool {
        self.words.contains(word)
    }

    /// The stored tensor of that name, in whatever file.
    pub(crate) fn find(&self, name: &str) -> Option<TensorId> {
        self.by_name().find(self.hasher.hash_one(name), |id| self.tensor(*id).name == name).copied()
    }

    /// The `__metadata__` of the header of a tensor's file, in order.
    pub(crate) fn metadata(&self, id: TensorId) -> &'a [(String, String)] {
        self.metadata.get(&self.tensor(id).file()).map_or(&[], Vec::as_slice)
    }

    /// The bytes of a small tensor, little-endian and row-major. Reads; call it from several threads where there are many.
    ///
    /// # Errors
    /// [`Problem`] if it is longer than 4 MiB, or its bytes do not come.
    pub(crate) fn read(&self, id: TensorId) -> Result<Vec<u8>, Problem> {
        let info = self.tensor(id);
        let len = info.bytes();
        if len > READ_BYTES_MAX {
            let (expected, found) = (format_args!("at most {READ_BYTES_MAX} bytes"), format_args!("{len} bytes"));
            return Err(Problem::of_tensor(info.name, expected, found));
        }
        let mut bytes = vec![0; usize::try_from(len).expect("at most a few megabytes")];
        self.source.read_into(info.file(), info.span().start(), &mut bytes)?;
        Ok(bytes)
    }
}

/// The part of a name after its last dot.
pub(super) fn last_word(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(_, word)| word)
}
