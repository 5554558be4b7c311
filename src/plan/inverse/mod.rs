//! The way back: a checkpoint that has the leaves of a layout in the program, such as MaxText's, as the repository that the
//! layout starts from.
//!
//! [`invert`] resolves the layout's rules with the repository's tensors as unknowns ([`LayoutFile::resolve_inverse`]). Each
//! leaf is then a view over them. The stored leaf is undone operator by operator to its parts of them, and the parts of
//! each tensor are put together. What no leaf holds is a problem, or comes from a repository that the user names.
//!
//! [`LayoutFile::resolve_inverse`]: super::LayoutFile

mod arguments;
mod assemble;
mod detect;
mod invert;
mod text;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use ckfs_checkpoint::Checkpoint;
use ckfs_tensor::{DType, Shape, TensorId, View, ViewError};
use serde_json::Value as Json;

use self::{
    assemble::assemble,
    invert::{LeafPart, Places},
};
use super::{
    LayoutFile, NameGroup, PlanError, Problem, ViewOptions,
    generated::common_dtype,
    layout_file::{Alias, Resolved, StoredNames, Targets},
    library::Model,
    name_group::{fold, stars},
    naming::is_tower,
    values::{ValueRequest, Values},
};

/// A checkpoint as the repository that its layout starts from.
#[derive(Debug)]
pub(super) struct Inverted {
    /// The tensors of the repository, under its names.
    pub(super) tensors: Vec<(String, View)>,
    /// The layout's file, such as `maxtext/llama`.
    pub(super) layout: String,
    /// Its parameters, with their values.
    pub(super) params: Vec<(String, String)>,
    /// The repository's `config.json`, but for the dtype.
    pub(super) config: Json,
    /// Whether the tensors and `config` are those of the text model of a larger one.
    pub(super) is_text: bool,
    /// Remarks that are not errors.
    pub(super) warnings: Vec<String>,
    /// Stored tensors that are no weights.
    pub(super) left_out: Vec<NameGroup>,
    /// What stays in float32 though a dtype is requested.
    pub(super) kept: Vec<NameGroup>,
}

/// One way to read the checkpoint: a layout with its parameters.
struct Reading {
    file: Arc<LayoutFile>,
    resolved: Resolved,
    targets: Targets,
    /// Leaves that the checkpoint has, and those of them with the expected shape.
    score: (usize, usize),
}

/// The checkpoint as a repository. `None` if it is not of a layout in the program.
///
/// # Errors
/// Everything wrong, at once.
pub(super) fn invert(
    checkpoint: &Checkpoint,
    options: &ViewOptions,
    model: &Model,
) -> Result<Option<Inverted>, PlanError> {
    let Some((layouts, names)) = detect::detect(checkpoint) else { return Ok(None) };
    let refused = |problems| PlanError { problems };
    if checkpoint.config().is_none() {
        let reason = format!(
            "expected one, since the names are those of the layout {}: give the model's directory or org/name by --config-from",
            layouts[0].name
        );
        return Err(Problem::File { file: "config.json".to_owned(), reason }.into());
    }
    let problems = arguments::problems(checkpoint, &layouts[0].name);
    if !problems.is_empty() {
        return Err(refused(problems));
    }
    let mut readings = Vec::new();
    let mut failure = None;
    for layout in layouts {
        let mut set = options.set.clone();
        let file = match layout.choose(checkpoint, &mut set) {
            // A repository may have such names of its own.
            Err(_) if checkpoint.is_repository() && checkpoint.companion().is_none() => return Ok(None),
            chosen => chosen?,
        };
        // The axis of stacked layers is a parameter of MaxText's models. Its default comes first.
        let mut axes = vec![None];
        if file.params.contains_key("param_scan_axis") && !set.contains_key("param_scan_axis") {
            axes.push(Some("0"));
        }
        for axis in axes {
            let mut set = set.clone();
            set.extend(axis.map(|axis| ("param_scan_axis".to_owned(), axis.to_owned())));
            match file.resolve_inverse(checkpoint, &names, &options.mesh, &set) {
                Ok((resolved, targets)) => {
                    let score = score(checkpoint, &names, &resolved);
                    readings.push(Reading { file: Arc::clone(&file), resolved, targets, score });
                }
                Err(problems) => failure = failure.or(Some(problems)),
            }
        }
    }
    // Of equal ones the first counts.
    let best = readings.into_iter().rev().max_by_key(|reading| reading.score);
    let Some(reading) = best.filter(|reading| reading.score.0 > 0 || failure.is_none()) else {
        return Err(refused(failure.unwrap_or_default()));
    };
    if let Some(problem) = other_model(checkpoint, &reading, options) {
        return Err(contradiction(checkpoint, options, model).unwrap_or(problem).into());
    }
    let values = Values::new(checkpoint, ValueRequest::default(), &[], None);
    let inversion = Inversion { checkpoint, values, options, names: &names, model, reading, problems: Vec::new() };
    inversion.run().map(Some).map_err(refused)
}

fn score(checkpoint: &Checkpoint, names: &StoredNames, resolved: &Resolved) -> (usize, usize) {
    let found = resolved.drafts.iter().filter_map(|draft| Some((draft, checkpoint.find(&names.of(&draft.name))?)));
    found.fold((0, 0), |(found, fitting), (draft, id)| {
        (found + 1, fitting + usize::from(fits(draft, checkpoint.tensor(id).shape)))
    })
}

/// The problem of a checkpoint that has few of the leaves that its configuration promises: it is of another model.
fn other_model(checkpoint: &Checkpoint, reading: &Reading, options: &ViewOptions) -> Option<Problem> {
    let (found, expected) = (reading.score.0, reading.resolved.drafts.len());
    if found * 2 >= expected {
        return None;
    }
    let model = checkpoint.dialect().model_type.as_deref().unwrap_or("unknown");
    let layout = &reading.file.name;
    let set: Vec<String> = options.set.iter().map(|(name, value)| format!(" with {name}={value}")).collect();
    let set = set.concat();
    let or = if set.is_empty() { "" } else { ", and its parameters" };
    let reason = format!(
        "it is that of a model {model}, for which the layout {layout}{set} has {expected} tensors, and the checkpoint has {found} \
         of them: expected the configuration of the model that was trained{or}"
    );
    Some(Problem::File { file: "config.json".to_owned(), reason })
}

/// Fewest rows that are said where they are cut: a vocabulary of one rank is padded by fewer.
const PADDING: u64 = 128;

/// Most parameters by the user that are tried, each without the others.
const CONTRADICTIONS_MAX: usize = 4;

/// The problem of a parameter without which the checkpoint is one of its model.
fn contradiction(checkpoint: &Checkpoint, options: &ViewOptions, model: &Model) -> Option<Problem> {
    if options.set.len() > CONTRADICTIONS_MAX {
        return None;
    }
    options.set.iter().find_map(|(name, value)| {
        let mut without = options.clone();
        without.set.remove(name);
        let found = invert(checkpoint, &without, model).ok()??;
        let (_, own) = found.params.into_iter().find(|(param, _)| param == name)?;
        let is_told =
            name == "scan" && checkpoint.opened.contents.scan_layers.is_some_and(|scan| scan.to_string() == own);
        let how = if is_told { ", as its metadata says too (scan_layers)" } else { "" };
        let file = format!("--set {name}={value}");
        let reason = format!("the tensors of the checkpoint are those of {name}={own}{how}: leave the parameter out");
        Some(Problem::File { file, reason })
    })
}

/// The layout in the program whose names a checkpoint of a trainer has.
pub(super) fn layout_of(checkpoint: &Checkpoint) -> Option<&'static str> {
    if checkpoint.is_repository() && checkpoint.companion().is_none() {
        return None;
    }
    detect::detect(checkpoint).map(|(layouts, _)| layouts[0].0.name.as_str())
}

fn fits(draft: &super::Draft, found: &[u64]) -> bool {
    draft.view.shape().extents() == found
}

struct Inversion<'a> {
    checkpoint: &'a Checkpoint,
    /// Stored tensors as they are.
    values: Values<'a>,
    options: &'a ViewOptions,
    names: &'a StoredNames,
    model: &'a Model,
    reading: Reading,
    problems: Vec<Problem>,
}

impl Inversion<'_> {
    fn run(mut self) -> Result<Inverted, Vec<Problem>> {
        let leaves = self.leaves();
        let infos = leaves.iter().flatten().map(|id| self.checkpoint.tensor(*id));
        let common = common_dtype(infos.map(|info| (info.dtype, info.bytes())));
        let parts = self.parts(&leaves);
        let fill = Fill::new(self.checkpoint, &self.reading, self.options.subset.text_only);
        let mut kept = BTreeSet::new();
        let mut tensors = Vec::with_capacity(parts.len());
        let mut made = BTreeSet::new();
        let targets = std::mem::take(&mut self.reading.targets);
        let mut incomplete: BTreeMap<(String, String), Vec<&str>> = BTreeMap::new();
        for ((name, shape), parts) in targets.iter().zip(parts) {
            let dtype = self.dtype(name, &parts, common, &mut kept);
            match self.assembled(shape, parts, dtype, fill.find(name)) {
                Ok(Some(view)) => tensors.push((fill.own_name(name).to_owned(), view)),
                Ok(None) => {}
                Err(error) => {
                    incomplete.entry((stars(name), error)).or_default().push(name);
                }
            }
            made.insert(name.as_str());
        }
        for ((_, reason), names) in incomplete {
            let problem = |group: NameGroup| Problem::File { file: group.counted(), reason: reason.clone() };
            self.problems.extend(fold(names, &[]).into_iter().map(problem));
        }
        let filled = self.filled(&fill, &made, &mut tensors);
        let resolved = &self.reading.resolved;
        let mut warnings = resolved.warnings.clone();
        let text = self.reading.file.text_model.as_ref();
        let is_requested = self.options.subset.text_only;
        let is_text = self.checkpoint.dialect().text_config.is_some() && (!filled || is_requested);
        let made = text::configuration(self.checkpoint, text, &mut tensors, (is_text, is_requested), &mut warnings);
        let (config, is_text) = made.map_err(|problem| self.problems.push(problem)).unwrap_or_default();
        if !self.problems.is_empty() {
            return Err(self.problems);
        }
        let stored = self.checkpoint.tensors().map(|(_, info)| info.name);
        let copies: Vec<String> = resolved.copies.iter().map(|leaf| self.names.of(leaf)).collect();
        let is_left_out = |name: &&str| !detect::is_weight(self.names, name) || copies.iter().any(|copy| copy == name);
        let left_out = fold(stored.filter(is_left_out), &[]);
        let (layout, params) = (self.reading.file.name.clone(), self.reading.resolved.params);
        Ok(Inverted {
            tensors,
            layout,
            params,
            config,
            is_text,
            warnings,
            left_out,
            kept: fold(kept.iter().map(String::as_str), &[]),
        })
    }

    /// The stored tensor of each leaf, in the order of the rules. Leaves without one are reported, and stored tensors without a
    /// leaf.
    fn leaves(&mut self) -> Vec<Option<TensorId>> {
        let (checkpoint, options) = (self.checkpoint, self.options);
        let mut found = Vec::with_capacity(self.reading.resolved.drafts.len());
        let copies = self.reading.resolved.copies.iter();
        let mut known: BTreeSet<String> = copies.map(|leaf| self.names.of(leaf)).collect();
        let (mut missing, mut misshapen) = (Vec::new(), Vec::new());
        for draft in &self.reading.resolved.drafts {
            let stored = self.names.of(&draft.name);
            let id = checkpoint.find(&stored);
            let fitting = id.filter(|id| fits(draft, checkpoint.tensor(*id).shape));
            match id {
                Some(id) if fitting.is_none() => misshapen.push((id, draft.view.shape().clone())),
                None if !options.allow_missing.accepts(&stored) => missing.push(stored.clone()),
                _ => {}
            }
            known.insert(stored);
            found.push(fitting);
        }
        let weights =
            checkpoint.tensors().map(|(_, info)| info.name).filter(|name| detect::is_weight(self.names, name));
        let strange = weights.filter(|name| !known.contains(*name));
        let (allowed, strange): (Vec<&str>, Vec<&str>) = strange.partition(|name| options.allow_unmapped.accepts(name));
        let allowed = fold(allowed, &[]).into_iter().map(|group| Problem::UnexpectedTensor { group });
        self.reading.resolved.warnings.extend(allowed.map(|problem| format!("{problem}: left out")));
        let others: BTreeSet<String> = strange.iter().map(|name| stars(name)).collect();
        let known: BTreeSet<String> = known.iter().map(|name| stars(name)).collect();
        let layout = self.reading.file.name.clone();
        for group in fold(missing.iter().map(String::as_str), &[&others]) {
            self.problems.push(Problem::missing(group, format!("the layout {layout}")));
        }
        for (id, shape) in misshapen {
            self.problems.push(Problem::SourceShape {
                group: NameGroup::one(checkpoint.tensor(id).name),
                file: checkpoint.source().path(checkpoint.file_of(id)).display().to_string(),
                rule: String::new(),
                expected: format!("{shape} by config.json and the layout {layout}"),
                found: Shape::try_new(checkpoint.tensor(id).shape).unwrap_or_else(|_| shape.clone()),
            });
        }
        let strange = fold(strange, &[&known]);
        self.problems.extend(strange.into_iter().map(|group| Problem::UnexpectedTensor { group }));
        found
    }

    /// The parts of each target, with the dtype in which the part is stored.
    fn parts(&mut self, leaves: &[Option<TensorId>]) -> Vec<Vec<(LeafPart, DType)>> {
        let mut parts: Vec<Vec<(LeafPart, DType)>> = self.reading.targets.iter().map(|_| Vec::new()).collect();
        let drafts = std::mem::take(&mut self.reading.resolved.drafts);
        for (draft, id) in drafts.iter().zip(leaves).filter_map(|(draft, id)| Some((draft, (*id)?))) {
            let info = self.checkpoint.tensor(id);
            let stored = self.values.view(id, None).map_err(|problem| self.problems.push(problem));
            let Ok(stored) = stored else { continue };
            if let Some((found, kept)) = invert::padded(&draft.view).filter(|(found, kept)| found - kept >= PADDING) {
                self.reading.resolved.warnings.push(format!(
                    "{}: {found} rows, of which the first {kept} are shown, as config.json says: the other {} are left out as padding; if \
                     they were trained, give the configuration with {found} by --config-from",
                    info.name,
                    found - kept
                ));
            }
            match invert::invert(&draft.view, stored) {
                Ok(found) => found.into_iter().for_each(|part| parts[part.target.0 as usize].push((part, info.dtype))),
                Err(reason) => self.problems.push(Problem::File { file: draft.name.clone(), reason }),
            }
        }
        self.reading.resolved.drafts = drafts;
        parts
    }

    /// The dtype of a target: the user's, or else that of its leaves. A leaf that its rule leaves in f32 tells nothing of the
    /// target's dtype, which is then the one that most weights have.
    fn dtype(
        &self,
        name: &str,
        parts: &[(LeafPart, DType)],
        common: Option<DType>,
        kept: &mut BTreeSet<String>,
    ) -> Option<DType> {
        // Parts of several types meet in one that holds all of their values.
        let both = |one, other| if one == other { one } else { DType::F32 };
        let stored = parts.iter().map(|(_, stored)| *stored).reduce(both);
        let is_forced = parts.iter().any(|(part, _)| part.is_forced);
        let own = if is_forced { common.or(stored) } else { stored };
        if !own.is_some_and(DType::is_float) {
            return own;
        }
        if let Some(rule) = self.options.casts.iter().find(|rule| rule.pattern.matches(name)) {
            return rule.dtype.or(own);
        }
        let wanted = self.options.dtype;
        if wanted.is_some_and(|dtype| own != Some(dtype) && self.model.keeps_f32(name, dtype)) {
            kept.insert(name.to_owned());
            return own;
        }
        wanted.or(own)
    }

    /// A target, put together. `None` if the user allows that its leaves are missing.
    fn assembled(
        &self,
        shape: &Shape,
        parts: Vec<(LeafPart, DType)>,
        dtype: Option<DType>,
        fill: Option<TensorId>,
    ) -> Result<Option<View>, String> {
        let fill = fill.filter(|id| self.checkpoint.tensor(*id).shape == shape.extents());
        let fill = fill.and_then(|id| self.values.view(id, None).ok());
        if parts.is_empty() && fill.is_none() {
            // Its missing leaves are reported already.
            return Ok(None);
        }
        let cast = |view: View| match dtype {
            Some(dtype) if dtype != view.dtype() => view.cast(dtype),
            Some(_) | None => Ok(view),
        };
        let fill = fill.map(cast).transpose()?;
        let cast_part = |(part, _): (LeafPart, DType)| Ok((part.places, cast(part.view)?));
        let parts = parts.into_iter().map(cast_part).collect::<Result<Vec<(Vec<Places>, View)>, ViewError>>()?;
        assemble(shape.extents(), 0, parts, fill.as_ref()).map(Some)
    }

    /// Adds what the layout leaves out from the repository that the user names. Whether there is such a repository.
    fn filled(&mut self, fill: &Fill, made: &BTreeSet<&str>, tensors: &mut Vec<(String, View)>) -> bool {
        let mut strange = Vec::new();
        for (name, own, id) in &fill.tensors {
            if made.contains(name.as_str()) {
                continue;
            }
            let ignored = &self.reading.resolved.ignored;
            if !ignored.iter().any(|pattern| pattern.matches(name)) {
                strange.push(name.as_str());
                continue;
            }
            let dtype = self.options.dtype.filter(|_| self.checkpoint.tensor(*id).dtype.is_float());
            let view = self.values.view(*id, dtype).map_err(|problem| self.problems.push(problem));
            tensors.extend(view.map(|view| (own.clone(), view)));
        }
        let strange = fold(strange, &[]);
        let reason = "of --fill-from: the layout neither makes nor leaves out such a tensor";
        let problem = |group: NameGroup| Problem::File { file: group.counted(), reason: reason.to_owned() };
        self.problems.extend(strange.into_iter().map(problem));
        !fill.tensors.is_empty()
    }
}

/// The tensors of the repository that fills what the checkpoint lacks, under the names of the rules.
struct Fill {
    /// Name in the rules, own name and number.
    tensors: Vec<(String, String, TensorId)>,
    /// Own names and numbers, by the names in the rules.
    by_name: HashMap<String, (String, TensorId)>,
}

impl Fill {
    /// With `text_only`, without the other parts of the model.
    fn new(checkpoint: &Checkpoint, reading: &Reading, text_only: bool) -> Self {
        let own = |(id, info): (TensorId, ckfs_checkpoint::TensorInfo<'_>)| {
            (in_rules(info.name, &reading.file.alias), info.name.to_owned(), id)
        };
        let wanted = checkpoint.fill().filter(|(_, info)| !(text_only && is_tower(info.name)));
        let tensors: Vec<_> = wanted.map(own).collect();
        let by_name = tensors.iter().map(|(name, own, id)| (name.clone(), (own.clone(), *id))).collect();
        Self { tensors, by_name }
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.by_name.get(name).map(|(_, id)| *id)
    }

    /// The name that the repository which fills has for a tensor of the rules, since it knows how the model's names are stored.
    fn own_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.by_name.get(name).map_or(name, |(own, _)| own)
    }
}

/// The name that rules have for a repository's tensor: the longest prefix that an alias knows decides.
fn in_rules(name: &str, aliases: &[Alias]) -> String {
    let known = aliases.iter().flat_map(|Alias { name: own, on_disk }| {
        on_disk.iter().chain([own]).filter(|prefix| name.starts_with(prefix.as_str())).map(move |prefix| (prefix, own))
    });
    let longest = known.max_by_key(|(prefix, _)| prefix.len());
    longest.map_or_else(|| name.to_owned(), |(prefix, own)| format!("{own}{}", &name[prefix.len()..]))
}
