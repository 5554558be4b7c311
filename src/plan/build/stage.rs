//! The values that the stages make, each from those before it, and the first stage: the selected tensors.

use std::{collections::BTreeMap, sync::Arc};

use ckfs_checkpoint::{Adapter, Checkpoint, Container, OwnHead};
use ckfs_config::value::SettingValue;
use ckfs_tensor::TensorId;

use super::super::{
    Draft, Family, Layout, LayoutFile, NameGroup, Plan, PlanError, Problem, Tied, ViewOptions,
    experts::{
        self,
        models::ModelNames,
        orientation::{Order, PARAMETER},
    },
    inverse::Inverted,
    library::Model,
    member::model_types,
    name_group::fold,
    naming, narrow,
    select::{self, Selected},
    values::ValueRequest,
};

/// The options of a plan, the problems found so far, and what is known of the plan.
pub(super) struct Builder<'a> {
    pub(super) original: &'a Checkpoint,
    pub(super) options: &'a ViewOptions,
    pub(super) problems: Vec<Problem>,
    pub(super) plan: Plan,
}

/// The selected tensors.
pub(super) struct Selection<'a> {
    pub(super) original: &'a Checkpoint,
    pub(super) selected: Selected,
    pub(super) adapter: Option<&'a Adapter>,
    /// The stored output head, if the configuration says that it is the embedding and it is not.
    pub(super) own_head: Option<OwnHead>,
    pub(super) adapted: Option<Checkpoint>,
    /// The selected tensors with the experts of a layer in the form that layouts see, if they have another.
    pub(super) normal: Option<Checkpoint>,
    /// All tensors, likewise, under the names that are compared with a family's.
    pub(super) compared: Option<Checkpoint>,
    /// The user's word on the axes of fused experts.
    pub(super) order: Option<Order>,
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
        self.normal.as_ref().or(self.adapted.as_ref()).unwrap_or_else(|| self.part())
    }

    /// All tensors, under the names that a family's tables have.
    pub(super) fn compared(&self) -> &Checkpoint {
        let seen = || self.normal.as_ref().filter(|_| self.selected.part.is_none());
        self.compared.as_ref().or_else(seen).unwrap_or_else(|| self.whole())
    }
}

/// How tensors are to be named and shaped.
pub(super) struct ChosenLayout {
    /// The rules, for a layout of rules.
    pub(super) file: Option<Arc<LayoutFile>>,
    /// The names of transformers' modules, for the layout that has these without rules.
    pub(super) modules: Option<Arc<ModelNames>>,
    /// Its parameters, as set.
    pub(super) set: BTreeMap<String, String>,
    /// The requested dtype and dequantization.
    pub(super) request: ValueRequest,
    pub(super) family: Option<&'static Family>,
    /// What the library that has the model's code says of its tensors.
    pub(super) model: Model,
    /// Whether a name is one path component.
    pub(super) flat: bool,
    /// The repository that the checkpoint is made back to, if it has the leaves of a layout.
    pub(super) inverse: Option<Inverted>,
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
        let mut selected = select::select(original, &options.subset, Family::of(original))?;
        // A file of hf/ is one of the repository. Boxes of tensors are in none.
        let has_files = match original.container() {
            Container::Safetensors => true,
            // Its files are made, as many as are needed.
            Container::Torch | Container::Gguf | Container::Ranks => original.is_repository(),
            Container::Dcp | Container::Orbax => false,
        };
        if let Some(dtype) = options.dtype.filter(|dtype| narrow::needs_scales(*dtype)) {
            let reason = format!(
                "weights in {dtype} without scales are no model that a program loads: --quantize fp8-block gives them scales, and names \
                 them in config.json"
            );
            if options.layout == Layout::Hf {
                return Err(PlanError::of("dtype", vec![reason]));
            }
            selected.no_hf = Some(reason);
        }
        if selected.no_hf.is_none() && !has_files {
            let container = original.container();
            if let (Some(reason), Layout::Hf) = (original.opened.contents.unnamed.as_deref(), &options.layout) {
                return Err(PlanError::of("layout", vec![reason.to_owned()]));
            }
            let reason = if container == Container::Ranks {
                "files of ranks without a config.json, which --config-from gives".to_owned()
            } else {
                format!("the source is a checkpoint of {container}, not a repository")
            };
            selected.no_hf = Some(reason);
        }
        let adapter = adapter(original, options)?;
        let order = self.order_of_experts()?;
        let (own_head, adapted, normal, compared) = (None, None, None, None);
        let mut wanted = Selection { original, selected, adapter, own_head, adapted, normal, compared, order };
        wanted.own_head = self.own_head(wanted.part())?;
        if wanted.own_head.is_some() && options.tied != Tied::Absent {
            let untied = wanted.part().untied().map_err(|reasons| PlanError::of("tied", reasons))?;
            wanted.selected.part = untied.or(wanted.selected.part);
        }
        wanted.adapted = adapter.map(|adapter| with_adapter(wanted.part(), adapter)).transpose()?;
        let normal =
            |checkpoint, keeps| experts::normal(checkpoint, order, keeps).map_err(|problems| PlanError { problems });
        match &options.layout {
            Layout::Stored => {}
            Layout::Hf => wanted.compared = normal(wanted.whole(), true)?,
            Layout::Canonical => {
                let family = Family::of(original);
                let keeps = model_types(original).any(|of| family.is_some_and(|family| family.has_fused_experts(of)));
                let is_part = wanted.selected.part.is_some();
                let compared = if is_part { normal(wanted.whole(), keeps)? } else { None };
                (wanted.compared, wanted.normal) = (compared, normal(wanted.seen(), keeps)?);
            }
            Layout::Gguf | Layout::Embedded(_) | Layout::File(_) => wanted.normal = normal(wanted.seen(), false)?,
        }
        Ok(wanted)
    }

    /// The user's word on the axes of fused experts.
    fn order_of_experts(&self) -> Result<Option<Order>, PlanError> {
        let Some(word) = self.options.set.get(PARAMETER) else { return Ok(None) };
        Order::from_word(word).map(Some).map_err(|reason| PlanError::of("set", vec![reason]))
    }

    /// The stored output head of this part, if the configuration says that it is the embedding and its bytes are others.
    fn own_head(&self, part: &Checkpoint) -> Result<Option<OwnHead>, PlanError> {
        // A trainer's checkpoint is shown as it is stored, whatever a configuration says.
        if self.options.layout == Layout::Stored {
            return Ok(None);
        }
        let is_outside = |name: &str| naming::is_tower(name) || select::is_predictor(name);
        part.own_head(&is_outside).map_err(|error| PlanError::of("tied", vec![error.to_string()]))
    }

    /// Says what becomes of an output head of its own that the configuration takes for the embedding.
    pub(super) fn report_own_head(&mut self, wanted: &Selection<'_>, drafts: &mut Vec<Draft>) {
        let Some(OwnHead { id, head, embedding }) = &wanted.own_head else { return };
        let codes = wanted.seen().tensor(*id).quantized().map(|quantized| quantized.operands[0]);
        let is_head = |source: &TensorId| source == id || Some(*source) == codes;
        let shows = |draft: &Draft| draft.view.source_ids().iter().any(is_head);
        let is_shown = drafts.iter().any(shows);
        let differs = format!(
            "{head} is stored and differs from {embedding}, though the model's configuration says they are one"
        );
        if self.options.tied == Tied::Absent {
            drafts.retain(|draft| !shows(draft));
            self.plan.warnings.push(format!(
                "{differs}: --tied absent leaves {head} out, and the model is taken as tied; hf/ keeps it as the source has it"
            ));
        } else if is_shown {
            self.plan.warnings.push(format!(
                "{differs}: it is shown as a tensor of its own, and hf/config.json says tie_word_embeddings false; \
                 --tied absent takes the configuration at its word"
            ));
        } else if drafts.is_empty() {
            self.plan.warnings.push(differs);
        } else {
            let layout = self.options.layout.name();
            let reason = format!(
                "{differs}. The layout {layout} has no output head of its own: expected a head that is the embedding, or \
                 --tied absent to leave {head} out"
            );
            self.problem("tied", reason);
        }
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
            "the names of a model with an adapter are those of the layout hf, not of {layout}: add --layout hf"
        )));
    }
    checkpoint.adapter(dir).map(Some).ok_or_else(|| problem("the source was opened without this adapter".to_owned()))
}

/// A part of a checkpoint, and the tensors of an adapter under their own names.
fn with_adapter(part: &Checkpoint, adapter: &Adapter) -> Result<Checkpoint, PlanError> {
    let config = part.config().cloned();
    let adapted = part.derived(config, Some(adapter.file), |_, info| Some(info.name.to_owned()));
    adapted.map_err(|reasons| PlanError::of(&format!("lora {}", adapter.dir.display()), reasons))
}
