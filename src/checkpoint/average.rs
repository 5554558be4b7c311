//! Averages of checkpoints: each tensor is the sum of those of several sources, each times a weight.
//!
//! One of the sources is the checkpoint that is shown; files, tensors and decoded files of the others come after its own, under other
//! ids, and none of them is shown. What each tensor becomes is a [`Merge`], which the views of it are made by.

use std::sync::Arc;

use ckfs_source::{FileId, Opened, Source};
use ckfs_tensor::{DType, TensorId, ViewError};
use hashbrown::HashMap;
use parking_lot::Mutex;
use rayon::iter::{ParallelBridge, ParallelIterator};
use serde_json::Value;

use super::{
    merges::{Merge, Merges},
    options::OpenOptions,
    orbax::DecodedFile,
    own_head::are_equal,
    problem::{CheckpointError, Problem, Problems},
    repository::Checkpoint,
    scheme::Found,
    table::{TensorInfo, TensorTable},
};

/// How far the sum of all weights may be from 1 without a warning.
const SUM_TOLERANCE: f64 = 1e-3;

/// Members of a configuration that say nothing of the tensors; all whose names end so.
const OF_NO_TENSOR: [&str; 4] = ["_name_or_path", "transformers_version", "use_cache", "_token_id"];

/// The terms of an average, and the sources that are not the shown one.
pub(super) struct AveragedSources {
    /// In the order of the sum: the number of the other source, or `None` for the shown one; and the weight.
    terms: Vec<(Option<usize>, f32)>,
    others: Vec<OtherSource>,
}

/// A source of an average besides the shown one.
struct OtherSource {
    checkpoint: Checkpoint,
    /// Its files, until they are pinned together with those of the shown one.
    opened: Vec<Opened>,
    /// Where its pinned files begin, and its decoded ones.
    first: [usize; 2],
    /// Where its tensors begin.
    first_tensor: u32,
}

impl OtherSource {
    fn file(&self, own: FileId) -> FileId {
        let pinned = self.checkpoint.opened.pinned;
        FileId::at(match own.index().checked_sub(pinned) {
            None => self.first[0] + own.index(),
            Some(decoded) => self.first[1] + decoded,
        })
    }
}

impl AveragedSources {
    /// Opens the other sources of the average that the options ask for; `None` if they ask for none.
    ///
    /// # Errors
    /// That of opening one, or `source` is none of them.
    pub(super) fn open(source: &str, options: &OpenOptions) -> Result<Option<Self>, CheckpointError> {
        if options.average.is_empty() {
            return Ok(None);
        }
        if !options.average.iter().any(|(term, _)| term == source) {
            let text =
                format!("{source}: --average: expected one of the sources that are averaged; leave the source out");
            return Err(CheckpointError::Refused(text));
        }
        let kept = Arc::<Mutex<Vec<Opened>>>::default();
        let alone = OpenOptions {
            adapters: Vec::new(),
            config_from: None,
            fill_from: None,
            average: Vec::new(),
            kept_open: Some(Arc::clone(&kept)),
            ..options.clone()
        };
        let (mut terms, mut others, mut numbers) = (Vec::new(), Vec::new(), HashMap::new());
        for (term, weight) in &options.average {
            if term == source {
                terms.push((None, *weight));
                continue;
            }
            if !numbers.contains_key(term) {
                let checkpoint = Checkpoint::open(term, &alone)?;
                let opened = std::mem::take(&mut *kept.lock());
                numbers.insert(term, others.len());
                others.push(OtherSource { checkpoint, opened, first: [0; 2], first_tensor: 0 });
            }
            terms.push((numbers.get(term).copied(), *weight));
        }
        Ok(Some(Self { terms, others }))
    }

    /// Number of files that are not pinned yet.
    pub(super) fn file_count(&self) -> usize {
        self.others.iter().map(|other| other.opened.len()).sum()
    }

    /// Appends the files of the other sources to these.
    pub(super) fn append_files(&mut self, opened: &mut Vec<Opened>) {
        for other in &mut self.others {
            other.first[0] = opened.len();
            opened.append(&mut other.opened);
        }
    }

    /// Appends the decoded files of the other sources to these, of a source with so many pinned files. The others' files must be as
    /// they were when they were opened.
    pub(super) fn append_decoded(
        &mut self,
        source: &dyn Source,
        decoded: &mut Vec<DecodedFile>,
        problems: &mut Problems,
    ) {
        for other in &mut self.others {
            other.first[1] = source.file_count() + decoded.len();
            let other = &*other;
            decoded.extend(other.checkpoint.opened.decoded.iter().map(|file| file.of_files(&|own| other.file(own))));
            let before = other.checkpoint.source();
            let pinned = before.files().take(other.checkpoint.opened.pinned);
            for file in pinned.filter(|file| before.pin(*file).content != source.pin(other.file(*file)).content) {
                problems.of_file(before.path(file).display(), "changed while it was opened");
            }
        }
    }

    /// The table with the tensors of the other sources, none of them shown. `None` if a number does not fit 32 bits.
    pub(super) fn append_tensors(&mut self, table: TensorTable) -> Option<TensorTable> {
        self.others.iter_mut().try_fold(table, |table, other| {
            other.first_tensor = u32::try_from(table.stored_ids().len()).ok()?;
            table.with_hidden_table(&other.checkpoint.table, &|file| other.file(file))
        })
    }

    /// What each tensor of the shown source becomes, which has this table, bytes, codes, configuration and label. Tensors that are equal
    /// in all sources stay as they are.
    pub(super) fn merges(
        &self,
        (table, source, coded, config): (&TensorTable, &dyn Source, &Found, Option<&Value>),
        label: &str,
        problems: &mut Problems,
        warnings: &mut Vec<String>,
    ) -> Merges {
        let others = self.others.iter().map(|other| (other.checkpoint.quantized(), other.checkpoint.label()));
        let is_coded = |found: &Found| !found.tensors.is_empty() || !found.unsupported.is_empty();
        if let Some((_, label)) = others.chain([(coded, label)]).find(|(found, _)| is_coded(found)) {
            problems.of_file(label, "quantized: expected floats as they were trained, whose values can be averaged");
            return Merges::default();
        }
        let sum: f64 = self.terms.iter().map(|(_, weight)| f64::from(*weight)).sum();
        if (sum - 1.0).abs() > SUM_TOLERANCE {
            warnings.push(format!("average: the weights add up to {sum}, not to 1: every tensor is scaled by that"));
        }
        for other in &self.others {
            let checkpoint = &other.checkpoint;
            let label = format!("average: {}", checkpoint.label());
            if let (Some(one), Some(two)) = (config, checkpoint.config())
                && let Some(key) = unequal_key(one, two)
            {
                problems.of_file(&label, format_args!("expected the config.json of the others, found another {key}"));
            }
            if checkpoint.table.len() != table.len() {
                let (expected, found) = (table.len(), checkpoint.table.len());
                problems.of_file(&label, format_args!("expected the {expected} tensors of the others, found {found}"));
            }
        }
        // A narrow float is what it was after sums of such weights, which are rounded to it.
        let keeps_narrow = (sum - 1.0).abs() <= SUM_TOLERANCE && self.terms.iter().all(|(_, weight)| *weight >= 0.0);
        let made: Vec<_> = table
            .iter()
            .par_bridge()
            .map(|(id, info)| Ok(self.merge(table, source, (id, &info), keeps_narrow)?.map(|merge| (id, merge))))
            .collect();
        Merges::new(made.into_iter().filter_map(|made: Result<_, Problem>| problems.taken(made)?))
    }

    fn merge(
        &self,
        table: &TensorTable,
        source: &dyn Source,
        (id, info): (TensorId, &TensorInfo<'_>),
        keeps_narrow: bool,
    ) -> Result<Option<Merge>, Problem> {
        let (name, dtype, shape) = (info.name, info.dtype, info.shape);
        let mut ids = Vec::with_capacity(self.others.len());
        for other in &self.others {
            let label = other.checkpoint.label();
            let own = other.checkpoint.find(name);
            let own = own.ok_or_else(|| {
                Problem::of_tensor(name, "in each source of the average", format_args!("none in {label}"))
            })?;
            let theirs = other.checkpoint.tensor(own);
            if (theirs.dtype, theirs.shape) != (dtype, shape) {
                let found = format!("{} {:?} in {label}", theirs.dtype, theirs.shape);
                return Err(Problem::of_tensor(name, format_args!("{dtype} {shape:?} as in the others"), found));
            }
            ids.push(TensorId(other.first_tensor + own.0));
        }
        let is_summed = dtype.is_float() && dtype != DType::F64 && dtype.bits() >= 8;
        if !(is_summed && keeps_narrow && dtype.bits() <= 16) {
            let mut differs = false;
            for other in &ids {
                differs |= !are_equal(table, source, [id, *other])?;
            }
            if !differs {
                return Ok(None);
            }
        }
        if !is_summed {
            let expected = "the same in each source of the average, since sums are made of floats of 8 to 32 bits";
            return Err(Problem::of_tensor(name, expected, format_args!("{dtype} {shape:?} that differs")));
        }
        let made = |error: ViewError| Problem::Other(format!("tensor {name:?}: {error}"));
        let own = |number: Option<usize>| number.map_or(id, |number| ids[number]);
        let terms = self.terms.iter();
        let stored = |id: TensorId| table.tensor(id).stored_view(id).map_err(made);
        let terms = terms.map(|(number, weight)| Ok((stored(own(*number))?, *weight)));
        Ok(Some(Merge { terms: terms.collect::<Result<_, Problem>>()?, ..Merge::default() }))
    }
}

/// The first member of two configurations that tells of other tensors.
fn unequal_key(one: &Value, two: &Value) -> Option<String> {
    let keys = [one, two].into_iter().filter_map(Value::as_object).flat_map(serde_json::Map::keys);
    let mut counted = keys.filter(|key| !OF_NO_TENSOR.iter().any(|end| key.ends_with(end)));
    counted.find(|key| one.get(key) != two.get(key)).cloned()
}
