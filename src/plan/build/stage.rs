//! The values that the stages make, each from those before it, and the first stage: the selected tensors.

use std::{collections::BTreeMap, sync::Arc};

use super::super::{
    Draft, Family, Layout, LayoutFile, NameGroup, PlanError, Problem, ViewOptions, Whole,
    expect::Findings,
    inverse::Inverted,
    library::Model,
    name_group::fold,
    select::{self, Selected},
    survey::family,
    values::ValueRequest,
};
use crate::{
    checkpoint::{Adapter, Checkpoint, Container},
    tensor::TensorId,
};

/// The options of a plan, and the problems and warnings found so far.
pub(super) struct Builder<'a> {
    pub(super) original: &'a Checkpoint,
    pub(super) options: &'a ViewOptions,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<String>,
}

/// The selected tensors.
pub(super) struct Selection<'a> {
    pub(super) original: &'a Checkpoint,
    pub(super) selected: Selected,
    pub(super) adapter: Option<&'a Adapter>,
    pub(super) adapted: Option<Checkpoint>,
}

impl Selection<'_> {
    /// All tensors, under the names that source renames give.
    pub(super) fn whole(&self) -> &Checkpoint {
        self.selected.whole.as_ref().unwrap_or(self.original)
    }

    /// The selected ones among them.
    pub(super) fn part(&self) -> &Checkpoint {
        self.selected.part.as_ref().unwrap_or_else(|| self.whole())
    }

    /// The selected tensors and those of the adapter: the input of the layout.
    pub(super) fn seen(&self) -> &Checkpoint {
        self.adapted.as_ref().unwrap_or_else(|| self.part())
    }
}

/// How tensors are to be named and shaped.
pub(super) struct ChosenLayout {
    /// The rules, for a layout of rules.
    pub(super) file: Option<Arc<LayoutFile>>,
    /// Its parameters, as set.
    pub(super) set: BTreeMap<String, String>,
    /// The requested dtype and dequantization.
    pub(super) request: ValueRequest,
    pub(super) family: Option<Family>,
    /// What the library that has the model's code says of its tensors.
    pub(super) model: Model,
    /// Whether a name is one path component.
    pub(super) flat: bool,
    /// The repository that the checkpoint is made back to, if it has the leaves of a layout.
    pub(super) inverse: Option<Inverted>,
}

/// What a layout makes.
#[derive(Default)]
pub(super) struct Drafted {
    pub(super) drafts: Vec<Draft>,
    /// Name of the model family whose tables or rules were used.
    pub(super) family: Option<String>,
    /// Parameters of the layout, with their values.
    pub(super) params: Vec<(String, String)>,
    pub(super) findings: Findings,
    pub(super) left_out: Vec<NameGroup>,
    /// What stays in float32 though a dtype is asked for.
    pub(super) kept: Vec<NameGroup>,
    /// What every device holds whole.
    pub(super) whole: Whole,
    /// What decoding leaves out.
    pub(super) dropped: Vec<NameGroup>,
    pub(super) decoded_config: Option<Vec<u8>>,
}

impl<'a> Builder<'a> {
    pub(super) fn problem(&mut self, file: &str, reason: String) {
        self.problems.push(Problem::File { file: file.to_owned(), reason });
    }

    /// The value, or its default after its problems were collected.
    pub(super) fn or_default<T: Default>(&mut self, found: Result<T, Vec<Problem>>) -> T {
        found.unwrap_or_else(|problems| {
            self.problems.extend(problems);
            T::default()
        })
    }

    /// Selects from `original`, whose tensors are stored or decoded.
    pub(super) fn select<'b>(&self, original: &'b Checkpoint) -> Result<Selection<'b>, PlanError>
    where
        'a: 'b,
    {
        let options = self.options;
        let mut selected = select::select(original, &options.subset, family(original)?.as_ref())?;
        // A file of hf/ is one of the repository. Boxes of tensors are in none.
        let has_files = match original.container() {
            Container::Safetensors => true,
            Container::Torch => original.is_repository(),
            Container::Dcp | Container::Orbax => false,
        };
        if selected.no_hf.is_none() && !has_files {
            let reason = format!("the source is a checkpoint of {}, not a repository", original.container());
            selected.no_hf = Some(reason);
        }
        let adapter = adapter(original, options)?;
        let mut wanted = Selection { original, selected, adapter, adapted: None };
        wanted.adapted = adapter.map(|adapter| with_adapter(wanted.part(), adapter)).transpose()?;
        Ok(wanted)
    }
}

/// The names of tensors, folded over their numbers.
pub(super) fn groups_of(checkpoint: &Checkpoint, ids: impl IntoIterator<Item = TensorId>) -> Vec<NameGroup> {
    fold(ids.into_iter().map(|id| checkpoint.tensor(id).name), &[])
}

/// The adapter that the user requests, if the layout can show it.
fn adapter<'a>(checkpoint: &'a Checkpoint, options: &ViewOptions) -> Result<Option<&'a Adapter>, PlanError> {
    let Some(dir) = &options.lora else { return Ok(None) };
    let problem = |reason: String| PlanError::from(Problem::File { file: format!("lora {}", dir.display()), reason });
    if options.layout != Layout::Hf {
        let layout = options.layout.name();
        return Err(problem(format!(
            "the names of a model with an adapter are those of the layout hf, not of {layout}"
        )));
    }
    checkpoint.adapter(dir).map(Some).ok_or_else(|| problem("the source was opened without this adapter".to_owned()))
}

/// A part of a checkpoint, and the tensors of an adapter under their own names.
fn with_adapter(part: &Checkpoint, adapter: &Adapter) -> Result<Checkpoint, PlanError> {
    let config = part.config().cloned();
    let adapted = part.derived(config, Some(adapter.file), |_, info| Some(info.name.to_owned()));
    adapted.map_err(|reasons| {
        let file = format!("lora {}", adapter.dir.display());
        PlanError { problems: reasons.into_iter().map(|reason| Problem::File { file: file.clone(), reason }).collect() }
    })
}
