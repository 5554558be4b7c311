//! The bytes of the source files that feed each part of a tensor.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use ckfs_checkpoint::Checkpoint;
use ckfs_source::FileId;
use ckfs_tensor::{ByteRuns, Region, TensorId};
use serde_json::{Value, json};

use super::budget::PageBudget;
use crate::{
    leaf::ReadLeaf,
    needed::runs_of,
    numbered::{Numbered, NumberedSet},
    page_reads::Expression,
};

/// Sets of runs of one source that a page lists. A count stands for the others.
const RUNS_SHOWN: usize = 4;
/// Sources of one part that a page lists.
const SOURCES_SHOWN: usize = 12;

/// Expression of a leaf, and dtype and bytes of each of its sources: leaves that agree in these read the same spans of theirs.
type Kind = (Vec<u64>, Vec<u64>);

/// What regions of leaves read. Equal reads are stored once.
pub(super) struct Patterns<'a> {
    checkpoint: &'a Checkpoint,
    kinds: NumberedSet<Kind>,
    known: HashMap<(usize, Vec<Range<u64>>), Option<usize>>,
    budget: PageBudget,
    expression: Expression,
    /// By number, per source `[number in the leaf, bytes, first, end, runs, number of further sets of runs]`.
    pub(super) listed: Numbered<String, Value>,
}

impl<'a> Patterns<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, budget: PageBudget) -> Self {
        let (kinds, known, listed) = (NumberedSet::default(), HashMap::new(), Numbered::default());
        Self { checkpoint, kinds, known, budget, expression: Expression::default(), listed }
    }

    /// The kind of a leaf.
    pub(super) fn kind(&mut self, leaf: &ReadLeaf<'_>, sources: &NumberedSet<TensorId>) -> usize {
        self.expression.read(leaf.view);
        let operands = sources.iter().map(|id| self.checkpoint.tensor(*id).bytes()).collect();
        self.kinds.insert_full((self.expression.words.clone(), operands)).0
    }

    /// The number of what a region of a leaf of this kind reads. `None` if the page has no room for it.
    pub(super) fn of(
        &mut self,
        kind: usize,
        leaf: &ReadLeaf<'_>,
        sources: &NumberedSet<TensorId>,
        held: &Region,
    ) -> Option<usize> {
        let region = leaf.region(held);
        let key = (kind, region.iter().flat_map(Region::ranges).collect());
        // A scalar has no ranges, and neither has nothing: the second is not stored here.
        if let Some(known) = self.known.get(&key).filter(|_| region.is_some()) {
            return *known;
        }
        if self.budget.is_spent() {
            return None;
        }
        let pattern = region.as_ref().map_or_else(|| json!([]), |region| pattern(leaf, sources, region));
        let text = pattern.to_string();
        let number = match self.listed.get_index_of(&text) {
            None if self.budget.take(&pattern) => Some(self.listed.insert_full(text, pattern).0),
            known => known,
        };
        if region.is_some() {
            self.known.insert(key, number);
        }
        number
    }
}

fn pattern(leaf: &ReadLeaf<'_>, sources: &NumberedSet<TensorId>, region: &Region) -> Value {
    // A view without a tiling was refused when the plan was made.
    let Some(tiling) = leaf.view.region(region).ok().and_then(|view| view.lower().ok()) else { return json!([]) };
    let mut by_source: BTreeMap<usize, Vec<ByteRuns>> = BTreeMap::new();
    for (id, runs) in runs_of(&tiling) {
        if let Some(number) = sources.get_index_of(&id) {
            by_source.entry(number).or_default().push(runs);
        }
    }
    let rows = by_source.into_iter().take(SOURCES_SHOWN).map(|(number, mut runs)| {
        runs.sort_unstable();
        runs.dedup();
        let first = runs.iter().map(ByteRuns::start).min().unwrap_or(0);
        let end = runs.iter().map(ByteRuns::end).max().unwrap_or(0);
        let bytes: u64 = runs.iter().map(ByteRuns::bytes).sum();
        let shown: Value =
            runs.iter().take(RUNS_SHOWN).map(|runs| json!([runs.start(), runs.run_bytes(), runs.loops()])).collect();
        json!([number, bytes, first, end, shown, runs.len().saturating_sub(RUNS_SHOWN)])
    });
    rows.collect()
}

/// A stored tensor: `[name, file, first byte in the file, end, codec]`.
pub(super) fn source_json(checkpoint: &Checkpoint, files: &EmbeddedFiles, id: TensorId) -> Value {
    let info = checkpoint.tensor(id);
    let (file, span) = (info.file(), info.span());
    let codec = checkpoint.source().coded(file, span.start()).map(|coded| coded.codec);
    json!([info.name, number_of(checkpoint, files, file), span.start(), span.end(), codec])
}

/// The files of the sources by the numbers that the page has for them. A file that is not the checkpoint's own has the next.
pub(super) type EmbeddedFiles = HashMap<FileId, usize>;

/// The numbers of all files.
pub(super) fn numbered(checkpoint: &Checkpoint) -> EmbeddedFiles {
    let files = checkpoint.files().iter().enumerate();
    files.filter_map(|(number, file)| Some((file.file?, number))).collect()
}

/// The number of a file.
pub(super) fn number_of(checkpoint: &Checkpoint, files: &EmbeddedFiles, file: FileId) -> usize {
    files.get(&file).copied().unwrap_or(checkpoint.files().len())
}
