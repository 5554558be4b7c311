//! An output head that is stored although the configuration says that it is the embedding: its bytes tell whether it is.
//!
//! Only the two tensors are read, and only to the first window in which they differ. Where both are the same bytes of one file,
//! nothing is read.

use ckfs_source::{ByteSpan, FileId, Source, SourceError};
use ckfs_tensor::{MosaicBox, TensorId};
use rayon::prelude::*;
use serde_json::Value;

use super::{
    super::{
        repository::Checkpoint,
        table::{Storage, TensorTable},
        weight_name::ends_with_name,
    },
    tied::{untied, word},
};

/// An output head that is not the embedding, although the configuration says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnHead {
    /// The head.
    pub id: TensorId,
    /// Its name.
    pub head: String,
    /// The name of the embedding.
    pub embedding: String,
}

/// Ends of the names of output heads, after a dot or alone.
const HEADS: [&str; 2] = ["lm_head.weight", "embed_out.weight"];
/// Whole names of output heads.
const WHOLE: [&str; 2] = ["head.weight", "output.weight"];

/// The first window, in bytes: a head that was trained differs in it, and a remote source is asked for little.
const FIRST_BYTES: u64 = 64 << 10;
/// Later windows, in bytes, of which each thread has two at a time.
const WINDOW_BYTES: u64 = 8 << 20;

/// A part of a tensor: its bytes in a file.
type Part = (FileId, ByteSpan);

impl Checkpoint {
    /// The output head that is stored and is not the embedding, although the configuration or the model's type says that it is.
    /// Reads both until they differ. Tensors for which `is_outside` is true belong to another model and are passed over.
    ///
    /// # Errors
    /// Their bytes do not come.
    pub fn own_head(&self, is_outside: &dyn Fn(&str) -> bool) -> Result<Option<OwnHead>, SourceError> {
        let dialect = self.dialect();
        if !dialect.tied || !dialect.has_lm_head || self.config().is_some_and(|config| self.says_untied(config)) {
            return Ok(None);
        }
        let is_head = |name: &str| WHOLE.contains(&name) || HEADS.iter().any(|end| ends_with_name(name, end));
        let names = self.tensors().map(|(_, info)| info.name).filter(|name| is_head(name) && !is_outside(name));
        let (Some(head), Some(embedding)) = (names.min_by_key(|name| name.len()), self.embedding(is_outside)) else {
            return Ok(None);
        };
        let (Some(id), Some(other)) = (self.find(head), self.find(embedding)) else { return Ok(None) };
        let compared = &self.opened.compared;
        let known = compared.lock().get(&(id, other)).copied();
        let are_equal = known.map_or_else(|| are_equal(self.table(), &**self.source(), [id, other]), Ok)?;
        compared.lock().insert((id, other), are_equal);
        Ok((!are_equal).then(|| OwnHead { id, head: head.to_owned(), embedding: embedding.to_owned() }))
    }

    /// Whether the configuration says that the head is a tensor of its own, of a type that transformers ties whatever it says: then it
    /// is tied only where it is not stored, as in T5 1.1.
    fn says_untied(&self, config: &Value) -> bool {
        let dialect = self.dialect();
        word(config) == Some(false) && untied(config, dialect.text_config.as_deref(), &dialect.architectures).is_none()
    }

    /// This checkpoint with a configuration that says that the output head is a tensor of its own. `None` where there is no
    /// configuration, or the model's type ties the head whatever it says.
    ///
    /// # Errors
    /// As of [`Checkpoint::derived`].
    pub fn untied(&self) -> Result<Option<Self>, Vec<String>> {
        let dialect = self.dialect();
        let config = self.config().map(|config| untied(config, dialect.text_config.as_deref(), &dialect.architectures));
        let Some(config) = config.flatten() else { return Ok(None) };
        self.derived(Some(config), None, |_, info| Some(info.name.to_owned())).map(Some)
    }
}

/// Whether two tensors have the same elements. Those that are stored in different ways count as different.
pub(crate) fn are_equal(table: &TensorTable, source: &dyn Source, tensors: [TensorId; 2]) -> Result<bool, SourceError> {
    let [left, right] = tensors.map(|id| table.tensor(id));
    if left.dtype != right.dtype || left.shape != right.shape || !is_alike(left.storage, right.storage) {
        return Ok(false);
    }
    match parts(table, left.storage).zip(parts(table, right.storage)) {
        Some((left, right)) => same_bytes(source, &left, &right),
        None => Ok(false),
    }
}

/// The parts of a tensor, in the order in which it is laid out. `None` if its codes are decoded by something else than stored tensors.
fn parts(table: &TensorTable, storage: Storage<'_>) -> Option<Vec<Part>> {
    let part = |id: TensorId| table.tensor(id).stored();
    match storage {
        Storage::Plain { file, span } => Some(vec![(file, span)]),
        Storage::Quantized(quantized) => quantized.operands.iter().map(|id| part(*id)).collect(),
        Storage::Mosaic(mosaic) => mosaic.ids().map(part).collect(),
        Storage::Composed(_) => None,
    }
}

/// Whether the same bytes would be the same elements.
fn is_alike(left: Storage<'_>, right: Storage<'_>) -> bool {
    match (left, right) {
        (Storage::Plain { .. }, Storage::Plain { .. }) => true,
        (Storage::Quantized(left), Storage::Quantized(right)) => left.template == right.template,
        (Storage::Mosaic(left), Storage::Mosaic(right)) => {
            let (left, right) = (left.of_view(), right.of_view());
            let place = |part: MosaicBox<'_>| (part.origin.to_vec(), part.extents.to_vec(), part.strides());
            left.fill() == right.fill() && left.boxes().map(place).eq(right.boxes().map(place))
        }
        (Storage::Plain { .. } | Storage::Quantized(_) | Storage::Mosaic(_) | Storage::Composed(_), _) => false,
    }
}

/// Whether all parts hold the same bytes, each as the other at its place.
fn same_bytes(source: &dyn Source, left: &[Part], right: &[Part]) -> Result<bool, SourceError> {
    let pairs = || left.iter().zip(right).filter(|(left, right)| left != right);
    if left.len() != right.len() || pairs().any(|((_, left), (_, right))| left.len() != right.len()) {
        return Ok(false);
    }
    let mut windows = Vec::new();
    for ((left_file, left), (right_file, right)) in pairs() {
        let mut at = 0;
        while at < left.len() {
            let most = if windows.is_empty() { FIRST_BYTES } else { WINDOW_BYTES };
            let len = most.min(left.len() - at);
            windows.push([(*left_file, left.start() + at, len), (*right_file, right.start() + at, len)]);
            at += len;
        }
    }
    let read = |(file, start, len): (FileId, u64, u64)| source.read_bytes(file, start, len);
    let is_same = |[left, right]: &[(FileId, u64, u64); 2]| Ok(read(*left)? == read(*right)?);
    let Some((first, others)) = windows.split_first() else { return Ok(true) };
    if !is_same(first)? {
        return Ok(false);
    }
    // The first window that differs, or does not come, ends the search.
    let found = others.par_iter().map(is_same).find_any(|same| !matches!(same, Ok(true)));
    found.unwrap_or(Ok(true))
}
